"""Accuracy, memory and time of all peers on one problem, on all ranks of its team together."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from .accuracy import Judge
from .passes import calls_of
from .peak_memory import peak_memory
from .peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, PASSES, Peer
from .problem import Problem
from .profiles import profile_of
from .team import NotMeasured
from .timing import ratios, spread, timer


def measure(
    peers: list[Peer],
    judge: Judge,
    rounds: int,
    host: bool = False,
    say: Callable[[str], None] = lambda text: None,
    after: Callable[[Peer, Callable], None] = lambda peer, call: None,
) -> dict:
    """The problem and an entry per peer, as JSON has them. Each peer is checked and its memory measured; then all are
    timed round by round, A B C A B C. With `host` the time of the host is read too, and at the end the calls are
    profiled on a GPU.

    `say` is told what is going on. At the end `after(peer, call)` is called with forward + backward of every peer that
    was timed.
    """
    problem, team = judge.problem, judge.problem.team
    entries, losses, calls, readers = {}, {}, {}, {}
    for peer in peers:
        about = {"name": peer.name, "upstream": peer.upstream, "family": peer.family}
        entries[peer] = about | {"refused": None, "errors": {}}

    def remaining() -> Iterator[tuple[Peer, dict]]:
        return ((peer, entry) for peer, entry in entries.items() if not entry["refused"])

    @contextmanager
    def refusals(entry: dict) -> Iterator[None]:
        """Whatever a peer raises is a row of the table and does not end the run."""
        try:
            yield
        except NotMeasured as refusal:
            entry["refused"], entry["errors"] = str(refusal), refusal.errors or entry["errors"]
            for kind in PASSES:
                entry.pop(kind, None)
            say(f"{entry['name']} {refusal}")

    torch.compiler.reset()  # a compiled loss that has seen another shape would become dynamic
    for peer, entry in remaining():
        with refusals(entry):
            losses[peer] = team.agree(lambda: peer.build and peer.build(team.group, problem.sequence_parallel))
    gc.collect()
    gc.freeze()  # the libraries' own objects, which every collection would look at again
    for peer, entry in remaining():
        say(f"checking {peer.name}")
        with refusals(entry):
            calls[peer] = team.agree(lambda: calls_of(peer, problem, losses[peer]))
            entry["errors"] = _errors(peer, calls[peer], judge)
            for kind, call in calls[peer].items():
                peak = max(team.gather(team.agree(lambda: peak_memory(call, team.device)[0])))
                gradients = _gradient_bytes(peer, problem) if kind == FORWARD_BACKWARD else 0
                measured = entry[kind] = {"peak_bytes": peak, "beyond_gradients_bytes": peak - gradients}
                for name in ["seconds"] + ["host_seconds"] * host:
                    measured[name] = []
                    read = timer(call, team, host=name == "host_seconds")
                    readers.setdefault(peer, []).append((measured[name], read))
        if entry["refused"]:
            calls.pop(peer, None)
        release(team.device)
    largest_logit = judge.truth.largest_logit
    del judge.truth  # its last judge frees the memory
    release(team.device)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        if team.group is None:  # over ranks, with less warm-up, a pause would make the round's first peer faster
            gc.collect()
        for peer, entry in remaining():
            with refusals(entry):
                for seconds, read in readers[peer]:
                    seconds.append(read())
    for peer, entry in remaining():
        with refusals(entry):
            for kind, call in calls[peer].items() if host and team.device.type == "cuda" else ():
                entry[kind]["profile"] = team.agree(partial(profile_of, call, team))
            after(peer, calls[peer][FORWARD_BACKWARD])
    gc.unfreeze()
    cell = {
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
    for entry in cell["peers"]:
        for kind in filter(entry.__contains__, PASSES):
            names = "seconds_median", "seconds_min", "seconds_max"
            entry[kind] |= dict(zip(names, spread(entry[kind]["seconds"])))
            entry[kind]["of_gemm_only"] = ratio(cell, entry, GEMM_ONLY, kind)
            entry[kind]["of_overlapped"] = ratio(cell, entry, OVERLAPPED, kind)
    return cell


def ratio(cell: dict, entry: dict, other: str, kind: str) -> tuple[float, float, float] | None:
    """(median, min, max) over the rounds of the speed of a peer relative to that of the peer named `other`; None if
    either has no time. A single rank has no collectives: its GEMM-only baseline is the overlapped one, too."""
    other = GEMM_ONLY if other == OVERLAPPED and cell["tp"] == 1 else other
    reference = next((its for its in cell["peers"] if its["name"] == other), {})
    timed = kind in reference and kind in entry
    return ratios(reference[kind]["seconds"], entry[kind]["seconds"]) if timed else None


def _errors(peer: Peer, calls: dict[str, Callable], judge: Judge) -> dict[str, float]:
    """The errors of a peer, or NotMeasured."""
    team, outputs = judge.problem.team, {}
    for kind, call in calls.items():  # all ranks hear of a failure before the next call's collectives
        team.agree(partial(_poison, judge.problem))
        outputs[kind] = team.agree(call)
    if peer.family == "gemm-only" or not peer.judged:
        return {}
    return judge.check(outputs[FORWARD], outputs[FORWARD_BACKWARD], peer.main_grad)


def _poison(problem: Problem) -> None:
    """NaN where an allocator may place the next dX and dW. Values left there by the peer before would hide a gradient
    that is not written."""
    for like in (problem.x, problem.weight):
        torch.full_like(like, math.nan)


def _gradient_bytes(peer: Peer, problem: Problem) -> int:
    """dX and dW in the dtype of the inputs; of a peer with main_grad dX alone, since its dW exists before the call."""
    size = problem.x.numel() + (0 if peer.main_grad else problem.weight.numel())
    return size * problem.x.element_size()


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
