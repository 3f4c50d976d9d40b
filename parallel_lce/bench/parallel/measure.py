"""Accuracy, memory and time of all peers of one cell: a TP size, a shape, with or without sequence parallelism.

A reading is the time of the slowest rank, as the median over its calls; every rank makes the same number of calls.
"""

import time
from dataclasses import dataclass
from functools import partial
from statistics import median

from ..accuracy import Refused
from ..measure import Result, between_events, calls_in, gradient_bytes, poison, release
from ..memory import peak_memory
from ..peers import FORWARD_BACKWARD
from .peers import calls_of


@dataclass(frozen=True)
class Window:
    """Seconds of one reading: calls that are not looked at, as a power-limited GPU is faster in its first moments, and
    calls that are. The peers follow one another without a pause, so less is needed than after one."""

    warm_up: float = 0.02
    measured: float = 0.06


def measure(peers, problem, judge, sequence_parallel, team, rounds, window, say, after=lambda result, call: None):
    """[Result], one per peer: each is checked and its memory measured, then all are timed round by round, A B C A B C.
    Bytes are those of the rank that needs most. `after(result, call)` is called at the end with forward + backward of
    every peer that was timed."""
    results, calls, lengths = [], {}, {}
    inputs = problem.inputs(team, sequence_parallel)
    for peer in peers:
        say(f"checking {peer}")
        result = Result(peer)
        results.append(result)
        try:
            found = _build(peer, problem, sequence_parallel, team)
            result.errors = _errors(peer, found, judge, team)
            for kind, call in found.items():
                result.peak[kind] = max(team.together(lambda call=call: peak_memory(call, team.device)[0]))
                result.gradients[kind] = gradient_bytes(inputs, peer) if kind == FORWARD_BACKWARD else 0
                lengths[id(result), kind] = reading(call, (0, 1), team)
            result.seconds = {kind: [] for kind in found}
            calls[id(result)] = found
        except Refused as refusal:
            _refuse(result, refusal, say)
    judge.forget()
    release(team.device)

    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for result in results:
            try:
                for kind in result.seconds if not result.refused else ():
                    one = lengths[id(result), kind]  # the same on all ranks
                    numbers = calls_in(window.warm_up, one), calls_in(window.measured, one)
                    result.seconds[kind].append(reading(calls[id(result)][kind], numbers, team))
            except Refused as refusal:
                _refuse(result, refusal, say)
    for result in results:
        if not result.refused:
            after(result, calls[id(result)][FORWARD_BACKWARD])
    calls.clear()
    release(team.device)
    return results


def _refuse(result, refusal, say):
    result.refused = str(refusal)
    result.errors = refusal.errors or result.errors
    say(f"{result.peer} {result.refused}")


def _build(peer, problem, sequence_parallel, team):
    """Its calls on this rank, none of which is made before all ranks have theirs."""
    built = {}
    team.together(lambda: built.update(calls_of(peer, problem, team, sequence_parallel)))
    return built


def _errors(peer, calls, judge, team):
    """The largest errors of all ranks, or Refused on all of them."""
    outputs, found = {}, {}
    for kind, call in calls.items():  # all ranks hear of a failure before the next call's collectives
        poison(judge.inputs)
        team.together(lambda kind=kind, call=call: outputs.update({kind: call()}))
    if peer.family != "bare":
        given = {kind: partial(outputs.get, kind) for kind in outputs}
        team.together(lambda: found.update(judge.found(given, peer.main_grad)))
    errors = team.worst(found)
    judge.rule(errors)
    return errors


def reading(call, numbers, team):
    """Seconds of one call on the slowest rank, after so many calls that are not looked at and of so many that are."""
    team.barrier()
    return max(team.together(lambda: _clock(call, *numbers, team.device)))


def _clock(call, warm_up, calls, device):
    if device.type == "cuda":
        return median(between_events(call, calls, device, warm_up))
    for _ in range(warm_up):
        call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
