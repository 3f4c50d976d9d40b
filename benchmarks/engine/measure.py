"""Accuracy, memory and time of all peers on one problem, on all ranks of its team together."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random

import torch

from .accuracy import Judge
from .peak_memory import peak_memory
from .peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, PASSES, Peer, calls_of
from .problem import Problem
from .team import NotMeasured, release
from .timing import profile_of, ratios, timer


def measure(peers: list[Peer], judge: Judge, rounds: int, host: bool = False) -> dict:
    """The problem and one entry per peer, as JSON has them.

    First each peer is checked and its memory measured. Then all peers are timed round by round. Each round has its own
    order: the preceding peer changes the GPU's clock rate. With `host` the host time is measured too, and on a GPU the
    calls are profiled at the end.
    """
    problem, team = judge.problem, judge.problem.team
    entries, calls, readers = {}, {}, {}
    for peer in peers:
        about = {"name": peer.name, "upstream": peer.upstream, "family": peer.family}
        entries[peer] = about | {"refused": None, "errors": {}}

    def remaining() -> Iterator[tuple[Peer, dict]]:
        return ((peer, entry) for peer, entry in entries.items() if not entry["refused"])

    @contextmanager
    def refusals(entry: dict) -> Iterator[None]:
        """Records an error of a peer in its entry. The run goes on."""
        try:
            yield
        except NotMeasured as refusal:
            entry["refused"] = str(refusal)
            for kind in PASSES:
                entry.pop(kind, None)

    torch.compiler.reset()  # torch.compile would make a loss dynamic that it compiled for another shape
    for peer, entry in remaining():
        with refusals(entry):
            calls[peer] = team.agree(lambda: calls_of(peer, problem))
            entry["errors"], wrong = _errors(peer, calls[peer], judge)
            if wrong:
                raise NotMeasured(f"refused: {wrong}")
            for kind, call in calls[peer].items():
                peak = max(team.gather(team.agree(lambda: peak_memory(call, team.device)[0])))
                size = 0
                if kind == FORWARD_BACKWARD:  # with main_grad dX alone: main_grad exists before the call
                    size = problem.x.nbytes + (0 if peer.main_grad else problem.weight.nbytes)
                measured = entry[kind] = {"peak_bytes": peak, "beyond_gradients_bytes": peak - size}
                for name in ["seconds"] + ["host_seconds"] * host:
                    measured[name] = []
                    read = timer(call, team, host=name == "host_seconds")
                    readers.setdefault(peer, []).append((measured[name], read))
        if entry["refused"]:
            calls.pop(peer, None)
        release(team.device)
    largest_logit = judge.truth.largest_logit
    del judge.truth  # the last judge that holds the truth frees its memory
    release(team.device)
    gc.freeze()  # later collections skip the objects of the libraries
    random = Random(0)  # all ranks get the same orders
    for _ in range(rounds):
        if team.group is None:  # over ranks the warm-up is short: after a pause the round's first peer would be faster
            gc.collect()
        timed = [*remaining()]
        for peer, entry in random.sample(timed, len(timed)):
            with refusals(entry):
                for seconds, read in readers[peer]:
                    seconds.append(read())
    for peer, entry in remaining() if host and team.device.type == "cuda" else ():
        with refusals(entry):
            for kind, call in calls[peer].items():
                entry[kind]["profile"] = team.agree(partial(profile_of, call, team.device))
    gc.unfreeze()
    return {
        "problem": str(problem),
        "tp": team.ranks,
        **vars(problem.shape),
        "sequence_parallel": problem.sequence_parallel,
        "dtype": problem.dtype_name,
        "rounds": rounds,
        "max_abs_logit": largest_logit,
        "counted_targets": int(problem.counted.sum()),
        "torch_errors": judge.yardstick,
        "allowed_errors": judge.limits,
        "peers": [*entries.values()],
    }


def ratio(cell: dict, entry: dict, other: str, kind: str) -> tuple[float, float, float] | None:
    """(median, min, max) over the rounds of a peer's speed relative to the peer named `other`; None if either was not
    timed. On a single rank, without collectives, the two GEMM-only baselines are the same."""
    other = GEMM_ONLY if other == OVERLAPPED and cell["tp"] == 1 else other
    reference = next((peer for peer in cell["peers"] if peer["name"] == other), {})
    timed = kind in reference and kind in entry
    return ratios(reference[kind]["seconds"], entry[kind]["seconds"]) if timed else None


def _errors(peer: Peer, calls: dict[str, Callable], judge: Judge) -> tuple[dict[str, float], str]:
    """What `Judge.check` returns for a peer. Raises NotMeasured if a call fails."""
    team, outputs = judge.problem.team, {}
    for kind, call in calls.items():  # all ranks learn of a failure before the next call's collectives
        team.agree(partial(_poison, judge.problem))
        outputs[kind] = team.agree(call)
    return judge.check(outputs[FORWARD], outputs[FORWARD_BACKWARD], peer.main_grad) if peer.judged else ({}, "")


def _poison(problem: Problem) -> None:
    """Writes NaN to the memory in which an allocator may place the next dX and dW. Otherwise a peer that does not write
    its gradient could return the gradient of the peer before."""
    for like in (problem.x, problem.weight):
        torch.full_like(like, math.nan)
