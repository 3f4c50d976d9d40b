"""Seconds of one call. On CUDA they lie between events on the stream; those of the host between call and return."""

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from .team import Team, synchronize

# Seconds of one reading: first of calls that warm up, then of calls that are measured. A power-limited GPU is faster in
# its first tens of milliseconds than in training. Over ranks the peers follow one another without a pause, so that less
# warm-up is needed than after one.
ALONE = {"cpu": (0.0, 0.05), "cuda": (0.05, 0.15)}
OVER_RANKS = {"cpu": (0.0, 0.01), "cuda": (0.02, 0.06)}
MOST_CALLS = 1000  # of one reading at most


def timer(call: Callable, team: Team, reading: float = 1.0, host: bool = False) -> Callable[[], float]:
    """A function that reads the seconds of `call`, or those of the host alone, on the slowest rank. The number of calls
    is chosen here, from the fastest of three, and is the same on all ranks and for all readings. `reading` is the
    length of what is measured, relative to the usual."""
    read = partial(_reading, host_clock if host else clock, call, team)
    one = min(read(0, 1) for _ in range(3))
    warm_up, measured = (ALONE if team.alone else OVER_RANKS)[team.device.type]
    return partial(read, calls_in(warm_up, one), calls_in(measured * reading, one))


def _reading(seconds_of: Callable, call: Callable, team: Team, warm_up: int, calls: int) -> float:
    team.barrier()
    return max(team.gather(team.agree(partial(seconds_of, call, warm_up, calls, team.device))))


def clock(call: Callable, warm_up: int, calls: int, device: torch.device) -> float:
    """Seconds of one call on this device: the median on CUDA, where all calls are queued before any is waited for."""
    for _ in range(warm_up):
        call()
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(end) / 1e3 for start, end in pairwise(events))


def host_clock(call: Callable, warm_up: int, calls: int, device: torch.device) -> float:
    """Median of the seconds from call to return, of calls that find the device idle."""
    for _ in range(warm_up):
        call()
    seconds = []
    for _ in range(calls):
        synchronize(device)
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        del result  # not within the next call
    synchronize(device)
    return median(seconds)


def calls_in(seconds: float, one: float) -> int:
    """How many calls of `one` second each fill so many seconds."""
    return min(MOST_CALLS, math.ceil(seconds / max(one, 1e-6)))
