"""Seconds of one call. On CUDA they lie between events on the stream."""

import math
import time
from functools import partial
from itertools import pairwise
from statistics import median

import torch

# Seconds of one reading: first of calls that warm up, then of calls that are measured. A power-limited GPU is faster in
# its first tens of milliseconds than in training. Over ranks the peers follow one another without a pause, so that less
# warm-up is needed than after one.
ALONE = {"cpu": (0.0, 0.05), "cuda": (0.05, 0.15)}
OVER_RANKS = {"cpu": (0.0, 0.01), "cuda": (0.02, 0.06)}
CUDA_CALLS = 1000  # of one reading at most


def timer(call, team):
    """A function that reads the seconds of `call` on the slowest rank.

    Over ranks the number of calls is chosen once, from one reading, and is the same on all ranks. One process alone
    chooses it for each reading.
    """
    if team.alone:
        return lambda: team.agree(partial(clock, call, team.device))
    one = reading(call, (0, 1), team)
    numbers = [calls_in(seconds, one) for seconds in OVER_RANKS[team.device.type]]
    return lambda: reading(call, numbers, team)


def reading(call, numbers, team):
    """Seconds of one call on the slowest rank. `numbers` are the calls to warm up with and those to measure."""
    team.barrier()
    return max(team.gather(team.agree(partial(_fixed_clock, call, *numbers, team.device))))


def _fixed_clock(call, warm_up, calls, device):
    if device.type == "cuda":
        return median(between_events(call, calls, device, warm_up))
    for _ in range(warm_up):
        call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def clock(call, device):
    """Seconds of one call on this device. On CUDA the median, after calls that are not looked at: the peer measured
    before may also have made the allocator give back what this one needs."""
    warm_up, measured = ALONE[device.type]
    if device.type == "cpu":
        calls, elapsed, start = 0, 0.0, time.perf_counter()
        while elapsed < measured:
            call()
            calls += 1
            elapsed = time.perf_counter() - start
        return elapsed / calls
    (one,) = between_events(call, 1, device)
    one = median(between_events(call, calls_in(warm_up, one), device))
    return median(between_events(call, calls_in(measured, one), device))


def between_events(call, calls, device, warm_up=0):
    """[seconds], one per call; all are queued before any is waited for, after `warm_up` calls more."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize(device)
    for _ in range(warm_up):
        call()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def calls_in(seconds, one):
    """How many calls of `one` second each fill so many seconds."""
    return min(CUDA_CALLS, max(1, math.ceil(seconds / max(one, 1e-6))))
