"""Accuracy, memory and time of all peers on one problem, on all ranks of its team together, and tables of them in
Markdown. docs/benchmarks.md explains their columns."""

import gc
import math
from collections.abc import Callable
from functools import partial

import torch

from .accuracy import Judge
from .peak_memory import peak_memory
from .peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, PASSES, Peer, calls_of
from .problem import Problem
from .report import NONE, RATIO, mebibytes, milliseconds, new_table, spread_ms, spread_text
from .team import NotMeasured, release
from .timing import interleaved, profile_of, ratios, timer

SECONDS, HOST_SECONDS = "seconds", "host_seconds"
ERRORS = ("loss", "dX", "dW")  # JSON also has the errors of the worst rows
SHORT = {FORWARD: "forward", FORWARD_BACKWARD: "fwd+bwd"}
CAPTION = (
    " Milliseconds of the slowest rank. of GEMM-only: speed relative to the bare products in the same round; of "
    "overlapped: relative to the products with collectives. MiB: peak above the inputs, largest of the ranks; beyond: "
    "peak above the inputs, dX and dW. ours ×: how often as fast ours, its first row, is in forward + backward."
)
HOST_CAPTION = (
    "host ms: from call to return, with the GPU idle before the call; medians (min–max over the rounds). GPU "
    "operations: kernels, copies and fills of one call; GPU ms: their time."
)


def measure(peers: list[Peer], judge: Judge, rounds: int, host: bool = False) -> dict:
    """The problem and one entry per peer, as JSON has them.

    First each peer is checked and its memory measured. Then all peers are timed round by round. With `host` the host
    time is measured too, and on a GPU the calls are profiled at the end.
    """
    problem, team = judge.problem, judge.problem.team
    entries, calls, readers = {}, {}, {}
    gc.freeze()  # later collections skip the objects of the libraries
    torch.compiler.reset()  # torch.compile would make a loss dynamic that it compiled for another shape
    for peer in peers:
        entry = {"name": peer.name, "upstream": peer.upstream, "family": peer.family, "refused": None, "errors": {}}
        entries[peer] = entry
        try:
            calls[peer], peaks = _checked(peer, judge, entry)
            timers = {(kind, SECONDS): timer(call, team) for kind, call in calls[peer].items()}
            if host:
                timers |= {(kind, HOST_SECONDS): timer(call, team, host) for kind, call in calls[peer].items()}
            readers[peer] = lambda timers=timers: {key: read() for key, read in timers.items()}
            entry |= peaks
        except NotMeasured as refusal:
            entry["refused"] = str(refusal)
            calls.pop(peer, None)
        release(team.device)
    largest_logit = judge.truth.largest_logit
    del judge.truth  # the last judge that holds the truth frees its memory
    release(team.device)
    gc.freeze()
    for peer, readings in interleaved(readers, team, rounds).items():
        for kind, clock in readings[0]:
            entries[peer][kind][clock] = [reading[kind, clock] for reading in readings]
    for peer, its in calls.items() if host and team.device.type == "cuda" else ():
        for kind, call in its.items():
            entries[peer][kind]["profile"] = team.agree(partial(profile_of, call))
    gc.unfreeze()
    return {
        "problem": str(problem),
        "tp": team.ranks,
        **vars(problem.shape),
        "sequence_parallel": problem.sequence_parallel,
        "dtype": str(problem.hidden.dtype).removeprefix("torch."),
        "rounds": rounds,
        "max_abs_logit": largest_logit,
        "counted_targets": int(problem.counted.sum()),
        "torch_errors": judge.yardstick,
        "allowed_errors": judge.limits,
        "peers": [*entries.values()],
    }


def _checked(peer: Peer, judge: Judge, entry: dict) -> tuple[dict[str, Callable], dict[str, dict]]:
    """The calls of a peer, and for each pass its peak of memory. The errors go to the entry. Raises NotMeasured if they
    are too large, or if a call fails."""
    problem, team, outputs, peaks = judge.problem, judge.problem.team, {}, {}
    calls = team.agree(partial(calls_of, peer, problem))
    for kind, call in calls.items():  # all ranks learn of a failure before the next call's collectives
        team.agree(partial(_poison, problem))
        outputs[kind] = team.agree(call)
    if peer.judged:
        entry["errors"], wrong = judge.check(outputs[FORWARD], outputs[FORWARD_BACKWARD], peer.main_grad)
        if wrong:
            raise NotMeasured(f"refused: {wrong}")
    outputs.clear()  # not held while memory is measured
    # With main_grad dX alone: main_grad exists before the call.
    gradients = problem.x.nbytes + (0 if peer.main_grad else problem.weight.nbytes)
    for kind, call in calls.items():
        peak = max(team.gather(team.agree(lambda: peak_memory(call, team.device)[0])))
        beyond = peak - gradients if kind == FORWARD_BACKWARD else peak
        peaks[kind] = {"peak_bytes": peak, "beyond_gradients_bytes": beyond}
    return calls, peaks


def _poison(problem: Problem) -> None:
    """Writes NaN to the memory in which an allocator may place the next dX and dW. Otherwise a peer that does not write
    its gradient could return the gradient of the peer before."""
    for like in (problem.x, problem.weight):
        torch.full_like(like, math.nan)


def ratio(cell: dict, entry: dict, other: str, kind: str) -> tuple[float, float, float] | None:
    """(median, min, max) over the rounds of a peer's speed relative to the peer named `other`; None if either was not
    timed."""
    reference = next((peer for peer in cell["peers"] if peer["name"] == other), {})
    timed = kind in reference and kind in entry
    return ratios(reference[kind][SECONDS], entry[kind][SECONDS]) if timed else None


def cell_table(cell: dict):
    """The table of a cell: a row per peer."""
    about = f"{cell['dtype']}, {cell['counted_targets']} targets, max |z| {cell['max_abs_logit']:.1f}"
    title = f"{cell['problem']}, {about}: medians of {cell['rounds']} rounds (min–max)"
    unit = cell["torch_errors"]
    yardstick = ", ".join(f"{name} {unit[name]:.1e}" for name in ERRORS)
    caption = f"Errors relative to float64, in units of plain {cell['dtype']} torch's ({yardstick})." + CAPTION
    speeds = {"of GEMM-only": GEMM_ONLY} | ({"of overlapped": OVERLAPPED} if cell["tp"] > 1 else {})
    columns = [name for kind in PASSES for name in (f"{SHORT[kind]} ms", *speeds, "MiB", "beyond")]
    table = new_table(title, caption, ["peer", "upstream"], [*columns, "ours ×", *(f"{name} err" for name in ERRORS)])
    ours = next((entry for entry in cell["peers"] if entry["family"] == "ours"), {})
    for entry in cell["peers"]:
        row = [entry["name"], entry["upstream"]]
        if entry["refused"]:
            row[0] += ", " + entry["refused"].split(":")[0]  # the whole reason is printed below the table
            row += [NONE] * len(columns)
        for kind in PASSES if not entry["refused"] else ():
            row += [spread_ms(entry[kind][SECONDS])]
            row += [spread_text(ratio(cell, entry, other, kind)) for other in speeds.values()]
            row += [mebibytes(entry[kind][size]) for size in ("peak_bytes", "beyond_gradients_bytes")]
        row += [spread_text(ratio(cell, ours, entry["name"], FORWARD_BACKWARD), RATIO)]
        row += [f"{entry['errors'][e] / unit[e]:.2f}" if e in entry["errors"] and unit[e] else NONE for e in ERRORS]
        table.add_row(*row, style="bold" if entry["family"] == "ours" else None)
    return table


def host_table(cell: dict):
    """The table of host times, if they were measured."""
    columns = ["host ms", "GPU operations", "GPU ms"]
    table = new_table(f"{cell['problem']}, {cell['dtype']}: the host", HOST_CAPTION, ["peer", "pass"], columns)
    for entry in cell["peers"]:
        for kind in PASSES if not entry["refused"] else ():
            profile, on_gpu = entry[kind].get("profile"), [NONE] * 2
            if profile:
                on_gpu = [f"{profile['operations']:.4g}", milliseconds(profile["gpu_seconds"])]
            row = entry["name"], SHORT[kind], spread_ms(entry[kind][HOST_SECONDS]), *on_gpu
            table.add_row(*row, style="bold" if entry["family"] == "ours" else None)
    return table
