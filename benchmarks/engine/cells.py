"""A cell: the accuracy, memory and time of peers on one problem and layout, on all ranks of a team together, and its
table in Markdown. docs/benchmarks.md explains the columns."""

from functools import partial

import torch

from .accuracy import Judge
from .measure import HOST_SECONDS, SECONDS, measure
from .peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, PASSES, Peer, calls_of
from .report import NONE, Session, mebibytes, new_table, spread_ms, spread_text
from .team import NotMeasured
from .timing import ratios

ERRORS = ("loss", "dX", "dW")  # JSON also has the errors of the worst rows
CAPTION = (
    "Medians (min–max over the rounds), ms of the slowest rank. of GEMM-only: speed relative to the bare products in "
    "the same round; of overlapped: relative to the products with collectives. MiB: peak above inputs and gradients, "
    "largest of the ranks. host: ms from call to return, with the device idle before the call. The upstream gradient "
    "of ours, liger and quack is one scalar, of the others one per token."
)


def measure_cell(peers: list[Peer], judge: Judge, rounds: int, host: bool = False) -> dict:
    """The problem and one row per peer, as JSON has them."""
    problem, by_name = judge.problem, {peer.name: peer for peer in peers}

    def check(row: dict, results: dict) -> None:
        """Adds the errors to the row. Raises NotMeasured if they are too large."""
        peer = by_name[row["name"]]
        if peer.judged:
            outputs = results[FORWARD], results[FORWARD_BACKWARD]
            row["errors"], wrong = judge.check(*outputs, peer.main_grad, peer.factor)
            if wrong:
                raise NotMeasured(f"refused: {wrong}")

    torch.compiler.reset()  # torch.compile would make a loss dynamic that it compiled for another shape
    candidates = {peer.name: partial(calls_of, peer, problem) for peer in peers}
    rows = measure(candidates, problem.team, rounds, check, (problem.x, problem.weight), host)
    for row in rows:
        if not row["refused"]:
            # With main_grad dX alone: main_grad exists before the call.
            weight = 0 if by_name[row["name"]].main_grad else problem.weight.nbytes
            row[FORWARD]["beyond_gradients"] = row[FORWARD]["peak"]
            row[FORWARD_BACKWARD]["beyond_gradients"] = row[FORWARD_BACKWARD]["peak"] - problem.x.nbytes - weight
    return {
        "name": problem.name,
        "tp": problem.team.ranks,
        **vars(problem.shape),
        "sequence_parallel": problem.sequence_parallel,
        "dtype": str(problem.hidden.dtype).removeprefix("torch."),
        "torch_errors": judge.yardstick,
        "peers": rows,
    }


def show(cell: dict, run: Session, shown: int | None = None) -> None:
    """Prints the table of a cell, a row for each peer or the first ones, and why peers are refused; writes the JSON."""
    rows, unit = cell["peers"][:shown], cell["torch_errors"]
    layout = "SP, " * cell["sequence_parallel"]
    title = "{name}TP {tp}, N={n}, V={v}, D={d}, {layout}{dtype}".format(layout=layout, **cell)
    yardstick = ", ".join(f"{name} {unit[name]:.1e}" for name in ERRORS)
    caption = f"{CAPTION} Errors relative to float64, in units of plain {cell['dtype']} torch's ({yardstick})."
    timed = {row["name"]: row for row in rows if not row["refused"]}
    references = {"of GEMM-only": timed.get(GEMM_ONLY)}
    if cell["tp"] > 1:
        references["of overlapped"] = timed.get(OVERLAPPED)
    host = ["host"] * any(HOST_SECONDS in row[FORWARD] for row in timed.values())
    columns = [column for kind in PASSES for column in (f"{kind} ms", *references, "MiB", *host)]
    table = new_table(title, caption, ["peer"], [*columns, *(f"{name} error" for name in ERRORS)])
    for row in rows:
        name, texts = row["name"], []
        if row["refused"]:
            name += ", " + row["refused"].partition(":")[0]  # the whole reason is printed below the table
            texts = [NONE] * len(columns)
        for kind in PASSES if not row["refused"] else ():
            its = row[kind]
            texts.append(spread_ms(its[SECONDS]))
            for other in references.values():
                texts.append(spread_text(ratios(other[kind][SECONDS], its[SECONDS]) if other else None))
            texts.append(mebibytes(its["beyond_gradients"]))
            texts += [spread_ms(its[HOST_SECONDS]) for _ in host]
        errors = row.get("errors", {})
        texts += [f"{errors[e] / unit[e]:.2f}" if e in errors and unit[e] else NONE for e in ERRORS]
        table.add_row(name, *texts, style="bold" if name.startswith("ours") else None)
    run.say(table, *(f"{row['name']}: {row['refused']}" for row in rows if row["refused"]))
    run.save()
