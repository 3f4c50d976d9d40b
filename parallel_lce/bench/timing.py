"""Seconds of one call. On CUDA they lie between events on the stream."""

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from .team import Team

# Seconds of one reading: first of calls that warm up, then of calls that are measured. A power-limited GPU is faster in
# its first tens of milliseconds than in training. Over ranks the peers follow one another without a pause, so that less
# warm-up is needed than after one.
ALONE = {"cpu": (0.0, 0.05), "cuda": (0.05, 0.15)}
OVER_RANKS = {"cpu": (0.0, 0.01), "cuda": (0.02, 0.06)}
MOST_CALLS = 1000  # of one reading at most


def timer(call: Callable, team: Team) -> Callable[[], float]:
    """A function that reads the seconds of `call` on the slowest rank. The number of calls is chosen here, from the
    fastest of three, and is the same on all ranks and for all readings."""
    one = min(_reading(call, 0, 1, team) for _ in range(3))
    warm_up, measured = (ALONE if team.alone else OVER_RANKS)[team.device.type]
    return partial(_reading, call, calls_in(warm_up, one), calls_in(measured, one), team)


def _reading(call: Callable, warm_up: int, calls: int, team: Team) -> float:
    team.barrier()
    return max(team.gather(team.agree(partial(clock, call, warm_up, calls, team.device))))


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


def calls_in(seconds: float, one: float) -> int:
    """How many calls of `one` second each fill so many seconds."""
    return min(MOST_CALLS, math.ceil(seconds / max(one, 1e-6)))
