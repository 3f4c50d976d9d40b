"""Two finished runs side by side: a table, a picture, and whether their loss curves agree."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # a picture in a file needs no display
from matplotlib import pyplot  # noqa: E402

STOCK_COLOUR, OURS_COLOUR = "#9aa5b1", "#c2410c"


@dataclass
class Comparison:
    """Largest differences between two runs; NaN anywhere makes them NaN."""

    losses: float
    weights: float
    weights_name: str  # the parameter that differs most


def compare(stock: Path, ours: Path, output: Path, tolerance: float) -> bool:
    """Prints the tables, writes `demo.png` and `comparison.json` into `output`, returns whether the curves agree."""
    a, b = (json.loads((folder / "metrics.json").read_text()) for folder in (stock, ours))
    name, difference = _largest_weight_difference(stock, ours, a["tensor_parallel"])
    result = Comparison(_largest(map(_distance, a["losses"], b["losses"])), difference, name)
    console = Console()
    console.print(_step_table(a, b))
    console.print(_summary_table(a, b, result))
    picture = output / "demo.png"
    _draw(a, b, tolerance, picture)
    # A NaN or a missing step must not pass.
    agree = len(a["losses"]) == len(b["losses"]) and result.losses <= tolerance
    record = {"agree": agree, "tolerance": tolerance, **vars(result), "stock": a, "parallel_lce": b}
    (output / "comparison.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"picture: {picture}", soft_wrap=True)
    verdict = "The loss curves agree" if agree else "FAILED: the loss curves part"
    line = f"{verdict}: they differ by at most {result.losses:.1e}; {tolerance:.0e} is allowed."
    console.print(line, style="bold green" if agree else "bold red", soft_wrap=True)
    return agree


def _distance(x: float, y: float) -> float:
    return abs(x - y)


def _largest(values) -> float:
    """The largest value, NaN if one of them is NaN (max() would lose it)."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def _largest_weight_difference(stock: Path, ours: Path, ranks: int) -> tuple[str, float]:
    """The parameter that differs most after training, over all ranks, and by how much."""
    worst = {}
    for rank in range(ranks):
        theirs, mine = (torch.load(folder / f"weights-{rank}.pt", weights_only=True) for folder in (stock, ours))
        if theirs.keys() != mine.keys():
            raise ValueError(f"the two runs have different parameters on rank {rank}: {theirs.keys() ^ mine.keys()}")
        for name, weight in theirs.items():
            worst[f"{name} (rank {rank})"] = (weight - mine[name]).abs().max().item()
    name = max(worst, key=lambda key: math.inf if math.isnan(worst[key]) else worst[key])
    return name, worst[name]


def _step_table(a: dict, b: dict) -> Table:
    table = Table("step", "stock loss", "parallel_lce loss", "difference", title=f"Losses on {a['text']}")
    for column in table.columns:
        column.justify = "right"
    for step, (x, y) in enumerate(zip(a["losses"], b["losses"])):
        table.add_row(str(step), f"{x:.6f}", f"{y:.6f}", f"{abs(x - y):.1e}")
    return table


def _summary_table(a: dict, b: dict, result: Comparison) -> Table:
    layout = f"TP={a['tensor_parallel']}" + (" with sequence parallelism" if a["sequence_parallel"] else "")
    table = Table("", "stock", "parallel_lce", title=f"{layout}, {a['backend']}, {a['device']}")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("final loss", *(f"{run['losses'][-1]:.6f}" for run in (a, b)))
    peaks = (f"{run['loss_peak_bytes'] / 2**20:.1f}" for run in (a, b))
    table.add_row(f"peak memory of the loss, measured at {a['loss_peak_tokens']} tokens, MiB per rank", *peaks)
    times = (f"{run['median_step_seconds'] * 1e3:.1f}" for run in (a, b))
    table.add_row(f"step time at {a['tokens_per_step']} tokens, median, ms", *times)
    table.add_section()
    table.add_row("largest difference of losses", "", f"{result.losses:.2e}")
    table.add_row(f"largest difference of final weights\n[dim]{result.weights_name}", "", f"{result.weights:.2e}")
    return table


def _draw(a: dict, b: dict, tolerance: float, path: Path) -> None:
    figure, (curves, gaps, memory) = pyplot.subplots(
        1, 3, figsize=(13, 4), layout="constrained", width_ratios=(2, 2, 1.3)
    )
    # The curves lie on each other: a wide pale line under a thin dashed one shows both.
    curves.plot(a["losses"], color=STOCK_COLOUR, linewidth=5, label="stock")
    curves.plot(b["losses"], color=OURS_COLOUR, linewidth=1.5, linestyle="--", label="parallel_lce")
    curves.set(title="Training loss", xlabel="step", ylabel="mean loss per token")
    curves.legend(frameon=False)

    differences = [abs(x - y) for x, y in zip(a["losses"], b["losses"])]
    gaps.plot(differences, color=OURS_COLOUR, marker=".", linestyle="none", label="difference")
    gaps.axhline(tolerance, color="#444444", linewidth=1, label=f"tolerance {tolerance:.0e}")
    gaps.set_yscale("symlog", linthresh=1e-7)  # differences may be exactly 0
    gaps.set(title="|stock − parallel_lce|", xlabel="step", ylim=(0, 10 * max([tolerance, *differences])))
    gaps.legend(frameon=False)

    mebibytes = [run["loss_peak_bytes"] / 2**20 for run in (a, b)]
    bars = memory.bar(["stock", "parallel_lce"], mebibytes, color=[STOCK_COLOUR, OURS_COLOUR], width=0.6)
    memory.bar_label(bars, fmt="%.1f")
    memory.set(title="Peak memory of the loss", ylabel=f"MiB per rank, measured at {a['loss_peak_tokens']} tokens")
    memory.margins(y=0.12)
    for axes in (curves, gaps, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
