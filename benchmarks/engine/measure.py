"""Checks candidates, and measures their memory and time: peers of a loss, steps of a library, tiles of a kernel."""

import gc
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from .peak_memory import peak_memory
from .team import NotMeasured, Team, release
from .timing import interleaved, timer

SECONDS, HOST_SECONDS = "seconds", "host_seconds"
Calls = dict[str, Callable]  # the calls of a candidate, by the name of a pass


def measure(
    candidates: dict[str, Callable[[], Calls]],
    team: Team,
    rounds: int,
    check: Callable[[dict, dict], None],
    like: Iterable[Tensor] = (),
    host: bool = False,
) -> list[dict]:
    """A row for each candidate, as JSON has them: `name`, why it is `refused` or None, and for each pass the `seconds`
    of each round and `peak`, bytes during the call.

    First each candidate is built, checked, and its memory measured. `check(row, results)` gets the result of each pass,
    and raises NotMeasured for a wrong one. Then all candidates are timed round by round; with `host` the
    `host_seconds`, too. `like`: tensors of the sizes of gradients; see `_poison`."""
    rows, readers = [{"name": name, "refused": None} for name in candidates], {}
    gc.freeze()  # later collections skip the objects of the libraries
    for row, build in zip(rows, candidates.values()):
        try:
            timers = _timers(row, build, team, check, like, host)
            readers[row["name"]] = lambda timers=timers: {key: read() for key, read in timers.items()}
        except NotMeasured as refusal:
            row["refused"] = str(refusal)
        release(team.device)
    gc.freeze()
    readings = interleaved(readers, team, rounds)
    gc.unfreeze()
    for row in rows:
        its = readings.get(row["name"], [{}])
        for kind, clock in its[0]:
            row[kind][clock] = [reading[kind, clock] for reading in its]
    return rows


def _timers(row: dict, build: Callable, team: Team, check: Callable, like: Iterable[Tensor], host: bool) -> dict:
    """Checks a candidate, and adds its memory to the row. Returns a timer for each (pass, clock)."""
    calls, results = team.agree(build), {}
    for kind, call in calls.items():  # all ranks learn of a failure before the next call's collectives
        team.agree(partial(_poison, like))
        results[kind] = team.agree(call)
    check(row, results)
    results.clear()  # not held while memory is measured
    memory, timers = {}, {}
    for kind, call in calls.items():
        peak, _ = team.agree(partial(peak_memory, call, team.device))
        memory[kind] = team.worst({"peak": peak})
        timers[kind, SECONDS] = timer(call, team)
        if host:
            timers[kind, HOST_SECONDS] = timer(call, team, host)
    row |= memory
    return timers


def _poison(like: Iterable[Tensor]) -> None:
    """Writes NaN to the memory in which an allocator may place the next gradients. Otherwise a candidate that does not
    write its gradient could return the gradient of the candidate before."""
    for tensor in like:
        torch.full_like(tensor, math.nan)
