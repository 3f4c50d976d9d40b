"""Seconds of one call. On CUDA they lie between events on the stream."""

import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch

# A power-limited GPU is faster in its first tens of milliseconds than in training. Each reading skips the first
# seconds and uses the second ones.
CUDA_WARM_UP, CUDA_SECONDS = 0.05, 0.15
CUDA_CALLS = 1000  # of one reading at most
CPU_SECONDS = 0.05  # the calls of one reading take at least this long together


@dataclass(frozen=True)
class Window:
    """Seconds of one reading over ranks. The peers follow one another without a pause, so that less warm-up is needed
    than after one."""

    warm_up: float = 0.02  # calls that are not looked at
    measured: float = 0.06  # calls that are


def timer(team, window=None):
    """A function that takes a call and returns another, which reads its seconds on the slowest rank.

    With a window the number of calls is chosen once per call, from one reading, and is the same on all ranks. Without
    one, for one rank alone, each reading chooses its own.
    """
    if window is None:
        return lambda call: lambda: slowest(team, partial(clock, call, team.device))

    def over_ranks(call):
        one = reading(call, (0, 1), team)
        numbers = calls_in(window.warm_up, one), calls_in(window.measured, one)
        return lambda: reading(call, numbers, team)

    return over_ranks


def slowest(team, read):
    return max(team.gather(team.agree(read)))


def reading(call, numbers, team):
    """Seconds of one call on the slowest rank. `numbers` are the calls to warm up with and those to measure."""
    team.barrier()
    return slowest(team, partial(_fixed_clock, call, *numbers, team.device))


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
    if device.type == "cpu":
        calls, elapsed, start = 0, 0.0, time.perf_counter()
        while elapsed < CPU_SECONDS:
            call()
            calls += 1
            elapsed = time.perf_counter() - start
        return elapsed / calls
    (one,) = between_events(call, 1, device)
    one = median(between_events(call, calls_in(CUDA_WARM_UP, one), device))
    return median(between_events(call, calls_in(CUDA_SECONDS, one), device))


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
