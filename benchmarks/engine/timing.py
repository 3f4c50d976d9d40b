"""The time of one call, in seconds: on CUDA between events on the stream; the host time between call and return."""

import gc
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median

import torch

from .team import Team

# Seconds of one reading: of warm-up calls, then of measured calls. In its first tens of milliseconds a power-limited
# GPU is faster than in training.
LENGTHS = {"cpu": (0.0, 0.05), "cuda": (0.05, 0.15)}
MOST_CALLS = 1000  # upper bound of warm-up calls, and of measured calls, of one reading


def timer(call: Callable, team: Team, host: bool = False) -> Callable[[], float]:
    """A function that returns the seconds of `call` on the slowest rank; with `host` the host time.

    The number of calls per reading is chosen here, from the fastest of three calls. It is the same on all ranks and in
    all readings."""
    seconds_of = host_clock if host else clock

    def read(warm_up: int, calls: int) -> float:
        team.gather(None)  # the ranks start together
        return max(team.gather(team.agree(partial(seconds_of, call, warm_up, calls, team.device))))

    one = min(read(0, 1) for _ in range(3))
    warm_up, calls = (min(MOST_CALLS, math.ceil(length / max(one, 1e-6))) for length in LENGTHS[team.device.type])
    return partial(read, warm_up, calls)


def interleaved(readers: dict, team: Team, rounds: int) -> dict:
    """`{key: [result of its reader, one per round]}`. Each round has its own order of readers: the preceding call
    changes the GPU's clock rate."""
    random = Random(0)  # all ranks get the same orders
    readings = {key: [] for key in readers}
    for _ in range(rounds):
        gc.collect()
        for key in random.sample([*readers], len(readers)):
            readings[key].append(readers[key]())
    return readings


def clock(call: Callable, warm_up: int, calls: int, device: torch.device) -> float:
    """Seconds of one call on this device: on CPU the mean; on CUDA the median of calls that are all queued at once."""
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
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) / 1e3 for start, end in pairwise(events))


def host_clock(call: Callable, warm_up: int, calls: int, device: torch.device) -> float:
    """Median of the seconds from call to return, with the device idle before each call."""
    seconds = []
    for _ in range(warm_up + calls):
        torch.get_device_module(device).synchronize()
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        del result  # freed here, not within the next call
    torch.get_device_module(device).synchronize()
    return median(seconds[warm_up:])


def spread(values: list[float]) -> tuple[float, float, float]:
    """(median, min, max)."""
    return median(values), min(values), max(values)


def ratios(reference: list[float], seconds: list[float]) -> tuple[float, float, float]:
    """(median, min, max) over the rounds of the speed relative to the reference in the same round: a slow moment of the
    machine affects both."""
    return spread([other / own for other, own in zip(reference, seconds)])
