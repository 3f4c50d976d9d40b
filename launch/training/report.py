"""The report of a comparison: tables in the terminal, and report.md, report.png and report.json in a folder."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from training.comparison import Comparison, mean_and_largest
from training.results import Metrics

COLOURS = {"stock": "#9aa5b1", "parallel_lce": "#c2410c", "stock-reversed": "#2563a8"}
MOST_ROWS = 40  # of the table of steps


def print_report(console: Console, comparison: Comparison) -> None:
    console.print(_step_table(comparison))
    console.print(_summary_table(comparison))
    console.print(comparison.verdict, style="bold green" if comparison.agree else "bold red", soft_wrap=True)


def write_report(comparison: Comparison, folder: Path, tolerance: float, command: str) -> None:
    """Writes the three files. `command` makes them again."""
    _draw(comparison, tolerance, folder / "report.png")
    (folder / "report.json").write_text(comparison.model_dump_json(indent=1) + "\n")
    (folder / "report.md").write_text(_markdown(comparison, command))


def _markdown(comparison: Comparison, command: str) -> str:
    table, run = _summary_table(comparison), comparison.runs["stock"]
    table.title, table.box = None, box.MARKDOWN
    console = Console(width=400, no_color=True)
    with console.capture() as capture:
        console.print(table)
    rows = "\n".join(line.strip() for line in capture.get().splitlines() if line.strip())
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    settings = "\n".join(
        f"- {section}: " + ", ".join(f"{key}={value}" for key, value in getattr(run, section))
        for section in ("model", "train", "parallel")
    )
    return f"""# Training with Megatron's loss and with parallel_lce

{comparison.verdict}

![loss curves, differences, memory and time](report.png)

{rows}

- {_hardware(run)} on {run.hosts} host(s); {versions}; {run.text}
{settings}

Made by

```bash
{command}
```
"""


def _hardware(run: Metrics) -> str:
    return f"{run.processes} × {run.device}, {run.backend}"


def _step_table(comparison: Comparison) -> Table:
    stock, ours = comparison.runs["stock"], comparison.runs["parallel_lce"]
    table = _right_aligned("step", "stock loss", "parallel_lce loss", title=f"Losses on {stock.text}")
    for name in comparison.differences:
        table.add_column(f"difference of {name}", justify="right")
    steps = len(stock.losses)
    for step in range(0, steps, -(-steps // MOST_ROWS)):
        differences = (f"{each[step]:.1e}" for each in comparison.differences.values())
        table.add_row(str(step), f"{stock.losses[step]:.6f}", f"{ours.losses[step]:.6f}", *differences)
    return table


def _summary_table(comparison: Comparison) -> Table:
    runs, first = list(comparison.runs.values()), comparison.runs["stock"]
    parallel = first.parallel
    sequence = " with sequence parallelism" if parallel.sequence and parallel.tensor > 1 else ""
    layout = f"TP={parallel.tensor}{sequence}, PP={parallel.pipeline}, DP={parallel.data}"
    table = _right_aligned("", *comparison.runs, title=f"{layout}, {_hardware(first)}")

    def row(name: str, form: str, values: list[float | None], unit: float = 1) -> None:
        """One value for each run, in units of `unit`; no row if no run has one."""
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else form.format(value / unit) for value in values))

    distances = [(None, None), *map(mean_and_largest, comparison.differences.values())]
    row("final loss", "{:.6f}", [run.losses[-1] for run in runs])
    row("held-out loss", "{:.6f}", [run.held_out_loss for run in runs])
    row("difference from stock's losses, mean", "{:.2e}", [mean for mean, _ in distances])
    row("difference from stock's losses, largest", "{:.2e}", [largest for _, largest in distances])
    step = f"step time at {first.tokens_per_step} tokens, median, ms"
    row(step, "{:.1f}", [run.median_step_seconds for run in runs], unit=1e-3)
    row("tokens per second", "{:.0f}", [run.tokens_per_second for run in runs])
    row("peak memory of a step, MiB per rank", "{:.1f}", [run.step_peak_bytes for run in runs], unit=2**20)
    loss = f"peak memory of the loss, measured at {first.loss_peak_tokens} tokens, MiB per rank"
    row(loss, "{:.1f}", [run.loss_peak_bytes for run in runs], unit=2**20)
    if comparison.weights:
        name, difference = comparison.weights
        blanks = [None] * (len(runs) - 2)
        row(f"largest difference of final weights: {name}", "{:.2e}", [None, difference, *blanks])
    return table


def _right_aligned(first: str, *others: str, title: str) -> Table:
    table = Table(first, title=title)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _draw(comparison: Comparison, tolerance: float, path: Path) -> None:
    figure = Figure(figsize=(11, 7), layout="constrained")
    (curves, memory), (gaps, time) = figure.subplots(2, 2, width_ratios=(2, 1))
    stock, ours = comparison.runs["stock"], comparison.runs["parallel_lce"]
    # The curves coincide: a thin dashed line over a wide pale one shows both.
    curves.plot(stock.losses, color=COLOURS["stock"], linewidth=5, label="stock")
    curves.plot(ours.losses, color=COLOURS["parallel_lce"], linewidth=1.5, linestyle="--", label="parallel_lce")
    curves.set(title="Training loss", xlabel="step", ylabel="mean loss per token")
    _draw_differences(gaps, comparison.differences, tolerance)
    if stock.step_peak_bytes and ours.step_peak_bytes:  # on GPUs; otherwise the peak of the loss alone
        title = "Peak memory of a step"
        _draw_bars(memory, title, "GiB per rank", stock.step_peak_bytes / 2**30, ours.step_peak_bytes / 2**30)
    elif stock.loss_peak_bytes and ours.loss_peak_bytes:
        title = f"Peak memory of the loss, {stock.loss_peak_tokens} tokens"
        _draw_bars(memory, title, "MiB per rank", stock.loss_peak_bytes / 2**20, ours.loss_peak_bytes / 2**20)
    else:
        memory.set_visible(False)
    title = f"Step of {stock.tokens_per_step} tokens, median"
    _draw_bars(time, title, "ms", stock.median_step_seconds * 1e3, ours.median_step_seconds * 1e3)
    for axes in (curves, gaps):
        axes.legend(frameon=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _draw_differences(axes: Axes, differences: dict[str, list[float]], tolerance: float) -> None:
    """Of each run from stock's losses. Without a yardstick also the tolerance."""
    drawn = [value for each in differences.values() for value in each if math.isfinite(value)]
    for name, each in reversed(differences.items()):
        axes.plot(each, color=COLOURS[name], label=name, marker=".", linestyle="none")
    if "stock-reversed" not in differences:
        axes.axhline(tolerance, color="#444444", linewidth=1, label=f"tolerance {tolerance:.0e}")
        drawn.append(tolerance)
    largest = max([1e-9, *drawn])
    axes.set_yscale("symlog", linthresh=largest / 1000)  # differences may be exactly 0
    axes.set(title="|loss − stock's loss|", xlabel="step", ylim=(0, 10 * largest))


def _draw_bars(axes: Axes, title: str, unit: str, stock: float, ours: float) -> None:
    bars = axes.bar(["stock", "parallel_lce"], [stock, ours], color=[COLOURS["stock"], COLOURS["parallel_lce"]])
    axes.bar_label(bars, fmt="%.2f" if unit == "GiB per rank" else "%.1f")
    axes.margins(y=0.12)
    axes.set(title=title, ylabel=unit)
