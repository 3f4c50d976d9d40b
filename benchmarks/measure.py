"""Accuracy, memory and time of all peers on one problem, on all ranks of its team together."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from .accuracy import Judge
from .breakdown import break_down
from .passes import calls_of
from .peak_memory import peak_memory
from .peers import FORWARD_BACKWARD, Peer
from .problem import Problem
from .results import Measured, Result
from .suites import Suite
from .team import NotTimed
from .timing import timer


def measure(
    peers: list[Peer],
    judge: Judge,
    plan: Suite,
    say: Callable[[str], None] = lambda text: None,
    after: Callable[[Result, Callable], None] = lambda result, call: None,
) -> list[Result]:
    """[Result], one per peer. Each is checked and its memory measured; then all are timed round by round, A B C A B C.
    `plan` says in which passes, in how many rounds and for how long. With `plan.host` the time of the host is read too,
    and at the end the calls are profiled on a GPU.

    `say` is told what is going on. At the end `after(result, call)` is called with forward + backward of every peer
    that was timed.
    """
    problem, results = judge.problem, [Result(peer) for peer in peers]
    team, losses, calls, readers = problem.team, {}, {}, {}
    torch.compiler.reset()  # a compiled loss that has seen another shape would become dynamic
    for result, peer in _remaining(results):
        with _refusals(result, say):
            losses[peer] = team.agree(lambda: peer.build and peer.build(team.group, problem.sequence_parallel))
    gc.collect()
    gc.freeze()  # the libraries' own objects, which every collection would look at again
    for result, peer in _remaining(results):
        say(f"checking {peer}")
        with _refusals(result, say):
            calls[peer] = team.agree(lambda: calls_of(peer, problem, losses[peer], plan.passes))
            result.errors = _errors(peer, calls[peer], judge)
            for kind, call in calls[peer].items():
                peak = max(team.gather(team.agree(lambda: peak_memory(call, team.device)[0])))
                gradients = _gradient_bytes(peer, problem) if kind == FORWARD_BACKWARD else 0
                measured = result.passes[kind] = Measured(peak, gradients)
                readers.setdefault(peer, []).append((measured.seconds, timer(call, team, plan.reading)))
                if plan.host:
                    readers[peer].append((measured.host_seconds, timer(call, team, plan.reading, host=True)))
        if result.refused:
            calls.pop(peer, None)
        release(team.device)
    judge.forget()
    release(team.device)

    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        if team.alone:  # over ranks, with less warm-up, a pause would make the round's first peer faster
            gc.collect()
        for result, peer in _remaining(results):
            with _refusals(result, say):
                for seconds, read in readers[peer]:
                    seconds.append(read())
    for result, peer in _remaining(results) if plan.host and team.device.type == "cuda" else ():
        say(f"profiling {peer}")
        with _refusals(result, say):
            for kind, call in calls[peer].items():
                breakdowns = team.gather(team.agree(partial(break_down, call, team.device)))
                result.passes[kind].breakdown = breakdowns[0]
    for result, peer in _remaining(results):
        if FORWARD_BACKWARD in result.passes:
            after(result, calls[peer][FORWARD_BACKWARD])
    gc.unfreeze()
    return results


def _remaining(results: list[Result]) -> Iterator[tuple[Result, Peer]]:
    """`(result, its peer)` of those that have not been refused."""
    return ((result, result.peer) for result in results if not result.refused)


@contextmanager
def _refusals(result: Result, say: Callable[[str], None]) -> Iterator[None]:
    """Whatever a peer raises is a row of the table and does not end the run."""
    try:
        yield
    except NotTimed as refusal:
        result.refused = str(refusal)
        result.errors = refusal.errors or result.errors
        say(f"{result.peer} {result.refused}")


def _errors(peer: Peer, calls: dict[str, Callable], judge: Judge) -> dict[str, float]:
    """The errors of a peer, or NotTimed."""
    team, outputs = judge.problem.team, {}
    for kind, call in calls.items():  # all ranks hear of a failure before the next call's collectives
        team.agree(partial(_poison, judge.problem))
        outputs[kind] = team.agree(call)
    return judge.check(outputs, peer.main_grad) if peer.family != "gemm-only" and peer.judged else {}


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
