"""The report of a comparison: tables in the terminal, and report.md, report.png and report.json in a folder."""

import json
import math
import shlex
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from training.comparison import Comparison, compare
from training.config import Config
from training.refusal import Refusal, check_folder
from training.runs import Metrics

STOCK_COLOUR, OURS_COLOUR, YARDSTICK_COLOUR = "#9aa5b1", "#c2410c", "#2563a8"
MOST_ROWS = 40  # of the table of steps


def report(config: Config, argv: list[str]) -> int:
    """Compares the runs, prints the report and writes it; 0 if the loss curves agree, else 1.

    `argv` are the arguments of demo.py, which the report repeats.
    """
    console = Console()
    comparison = compare(config)
    console.print(_step_table(comparison))
    console.print(_summary_table(comparison))
    folder = Path(config.compare.report or config.output)
    check_folder("compare.report", str(folder))
    try:
        _write(comparison, folder, config.compare.tolerance, shlex.join(["./launch/demo.sh", *argv]))
    except OSError as error:
        raise Refusal(f"the report cannot be written: {error}") from None
    console.print(f"report: {folder / 'report.md'}", soft_wrap=True)
    console.print(comparison.verdict, style="bold green" if comparison.agree else "bold red", soft_wrap=True)
    return 0 if comparison.agree else 1


def _write(comparison: Comparison, folder: Path, tolerance: float, command: str) -> None:
    """Writes the three files. `command` makes them again."""
    _draw(comparison, tolerance, folder / "report.png")
    record = {
        "agree": comparison.agree,
        "verdict": comparison.verdict,
        "command": command,
        "mean_difference": comparison.ours.mean,
        "largest_difference": comparison.ours.maximum,
        "runs": {name: run.model_dump(mode="json") for name, run in comparison.runs.items()},
    }
    if comparison.weights:
        record["largest_weight_difference"] = dict(zip(("name", "difference"), comparison.weights))
    if comparison.yardstick:
        record["yardstick"] = {"mean": comparison.yardstick.mean, "largest": comparison.yardstick.maximum}
    (folder / "report.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "report.md").write_text(_markdown(comparison, command))


def _markdown(comparison: Comparison, command: str) -> str:
    table = _summary_table(comparison)
    table.title, table.box = None, box.MARKDOWN
    console = Console(width=400, no_color=True)
    with console.capture() as capture:
        console.print(table)
    rows = "\n".join(line.strip() for line in capture.get().splitlines() if line.strip())
    facts = "\n".join(f"- {name}: {value}" for name, value in _facts(comparison.runs["stock"]).items())
    return f"""# Training with Megatron's loss and with parallel_lce

{comparison.verdict}

![loss curves, differences, memory and time](report.png)

{rows}

{facts}

Made by

```bash
{command}
```
"""


def _facts(run: Metrics) -> dict[str, str]:
    model, train, parallel = run.model, run.train, run.parallel
    kv_heads = model.kv_heads or model.heads
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    tied = "tied" if model.tie_embeddings else "untied"
    samples = f"{parallel.data} × {train.micro_batches} × {train.micro_batch}"
    return {
        "Hardware": f"{_hardware(run)} on {run.hosts} host(s); {versions}",
        "Model": f"{model.layers} layers, hidden {model.hidden}, feed-forward {model.ffn_hidden}, "
        f"{model.heads} heads, {kv_heads} of keys and values, padded vocabulary {run.padded_vocab_size}, "
        f"{tied} embeddings" + (", activations recomputed" if model.recompute else ""),
        "Parallelism": _layout(run) + (", distributed optimizer" if parallel.distributed_optimizer else ""),
        "Training": f"{train.steps} steps of {run.tokens_per_step} tokens, {samples} samples of {train.sequence} "
        f"(data-parallel ranks × micro batches × samples), {train.precision.value}, gradients in fp32, on {run.text}",
    }


def _hardware(run: Metrics) -> str:
    return f"{run.processes} × {run.device}, {run.backend}"


def _layout(run: Metrics) -> str:
    parallel = run.parallel
    sequence = " with sequence parallelism" if parallel.sequence and parallel.tensor > 1 else ""
    return f"TP={parallel.tensor}{sequence}, PP={parallel.pipeline}, DP={parallel.data}"


def _step_table(comparison: Comparison) -> Table:
    stock, ours = comparison.runs["stock"], comparison.runs["parallel_lce"]
    table = Table("step", "stock loss", "parallel_lce loss", "difference", title=f"Losses on {stock.text}")
    columns = [stock.losses, ours.losses, comparison.ours.steps]
    if comparison.yardstick:
        table.add_column("of stock reversed")
        columns.append(comparison.yardstick.steps)
    for column in table.columns:
        column.justify = "right"
    steps = len(stock.losses)
    for step in range(0, steps, -(-steps // MOST_ROWS)):
        x, y, *differences = (column[step] for column in columns)
        table.add_row(str(step), f"{x:.6f}", f"{y:.6f}", *(f"{difference:.1e}" for difference in differences))
    return table


def _summary_table(comparison: Comparison) -> Table:
    runs = list(comparison.runs.values())
    first = runs[0]
    table = Table("", *comparison.runs, title=f"{_layout(first)}, {_hardware(first)}")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, form: str, values: list[float | None], unit: float = 1) -> None:
        """One value for each run, in units of `unit`; no row if no run has one."""
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else form.format(value / unit) for value in values))

    distances = [None, comparison.ours, comparison.yardstick][: len(runs)]
    loss_tokens = f"measured at {first.loss_peak_tokens} tokens"
    row("final loss", "{:.6f}", [run.losses[-1] for run in runs])
    row("difference from stock's losses, mean", "{:.2e}", [d and d.mean for d in distances])
    row("difference from stock's losses, largest", "{:.2e}", [d and d.maximum for d in distances])
    row(
        f"step time at {first.tokens_per_step} tokens, median, ms",
        "{:.1f}",
        [run.median_step_seconds for run in runs],
        unit=1e-3,
    )
    row("tokens per second", "{:.0f}", [run.tokens_per_second for run in runs])
    row("peak memory of a step, MiB per rank", "{:.1f}", [run.step_peak_bytes for run in runs], unit=2**20)
    row(
        f"peak memory of the loss, {loss_tokens}, MiB per rank",
        "{:.1f}",
        [run.loss_peak_bytes for run in runs],
        unit=2**20,
    )
    if comparison.weights:
        name, difference = comparison.weights
        blanks = [None] * (len(runs) - 2)
        row(f"largest difference of final weights: {name}", "{:.2e}", [None, difference, *blanks])
    return table


def _draw(comparison: Comparison, tolerance: float, path: Path) -> None:
    figure = Figure(figsize=(11, 7), layout="constrained")
    (curves, memory), (gaps, time) = figure.subplots(2, 2, width_ratios=(2, 1))
    stock, ours = comparison.runs["stock"], comparison.runs["parallel_lce"]
    _draw_curves(curves, stock.losses, ours.losses)
    _draw_differences(gaps, comparison, tolerance)
    _draw_memory(memory, stock, ours)
    _draw_bars(time, [run.median_step_seconds * 1e3 for run in (stock, ours)], "%.1f")
    time.set(title=f"Step of {stock.tokens_per_step} tokens, median", ylabel="ms")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _draw_memory(axes: Axes, stock: Metrics, ours: Metrics) -> None:
    """The peak of a whole step where that was measured, on GPUs; otherwise the peak of the loss alone."""
    if stock.step_peak_bytes is not None and ours.step_peak_bytes is not None:
        _draw_bars(axes, [stock.step_peak_bytes / 2**30, ours.step_peak_bytes / 2**30], "%.2f")
        axes.set(title="Peak memory of a step", ylabel="GiB per rank")
    elif stock.loss_peak_bytes is not None and ours.loss_peak_bytes is not None:
        _draw_bars(axes, [stock.loss_peak_bytes / 2**20, ours.loss_peak_bytes / 2**20], "%.1f")
        axes.set(title=f"Peak memory of the loss, {stock.loss_peak_tokens} tokens", ylabel="MiB per rank")
    else:
        axes.set_visible(False)


def _draw_curves(axes: Axes, stock: list[float], ours: list[float]) -> None:
    # The curves coincide: a thin dashed line over a wide pale one shows both.
    axes.plot(stock, color=STOCK_COLOUR, linewidth=5, label="stock")
    axes.plot(ours, color=OURS_COLOUR, linewidth=1.5, linestyle="--", label="parallel_lce")
    axes.set(title="Training loss", xlabel="step", ylabel="mean loss per token")
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, comparison: Comparison, tolerance: float) -> None:
    drawn = list(comparison.ours.steps)
    if comparison.yardstick:
        label = "stock, samples in reverse order"
        axes.plot(comparison.yardstick.steps, color=YARDSTICK_COLOUR, label=label, marker=".", linestyle="none")
        drawn += comparison.yardstick.steps
    else:
        axes.axhline(tolerance, color="#444444", linewidth=1, label=f"tolerance {tolerance:.0e}")
        drawn.append(tolerance)
    axes.plot(comparison.ours.steps, color=OURS_COLOUR, label="parallel_lce", marker=".", linestyle="none")
    largest = max([1e-9, *filter(math.isfinite, drawn)])
    axes.set_yscale("symlog", linthresh=largest / 1000)  # differences may be exactly 0
    axes.set(title="|loss − stock's loss|", xlabel="step", ylim=(0, 10 * largest))
    axes.legend(frameon=False)


def _draw_bars(axes: Axes, values: list[float], form: str) -> None:
    bars = axes.bar(["stock", "parallel_lce"], values, color=[STOCK_COLOUR, OURS_COLOUR], width=0.6)
    axes.bar_label(bars, fmt=form)
    axes.margins(y=0.12)
