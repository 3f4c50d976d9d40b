"""The report of a comparison: tables in the terminal, and report.md, report.png and report.json in a folder."""

import json
import math
from pathlib import Path

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

from training.compare import Comparison

matplotlib.use("Agg")  # a picture in a file needs no display
from matplotlib import pyplot

STOCK_COLOUR, OURS_COLOUR, YARDSTICK_COLOUR = "#9aa5b1", "#c2410c", "#2563a8"
ROWS = 40  # of the table of steps, at most


def show(comparison: Comparison, console: Console) -> None:
    """Prints both tables."""
    console.print(_step_table(comparison))
    console.print(_summary_table(comparison))


def write(comparison: Comparison, folder: Path, tolerance: float, command: str) -> None:
    """Writes the three files. `command` is what makes them again."""
    folder.mkdir(parents=True, exist_ok=True)
    _draw(comparison, tolerance, folder / "report.png")
    record = {
        "agree": comparison.agree,
        "verdict": comparison.verdict,
        "command": command,
        "mean_difference": comparison.ours.mean,
        "largest_difference": comparison.ours.maximum,
        "runs": comparison.runs,
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


def _facts(run: dict) -> dict[str, str]:
    model, train, parallel = run["model"], run["train"], run["parallel"]
    kv_heads = model["kv_heads"] or model["heads"]
    samples = f"{parallel['data']} × {train['micro_batches']} × {train['micro_batch']}"
    return {
        "Hardware": f"{_hardware(run)} on {run['hosts']} host(s); "
        + ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "Model": f"{model['layers']} layers, hidden {model['hidden']}, feed-forward {model['ffn_hidden']}, "
        f"{model['heads']} heads, {kv_heads} of keys and values, padded vocabulary {run['padded_vocab_size']}, "
        + ("tied" if model["tie_embeddings"] else "untied")
        + " embeddings"
        + (", activations recomputed" if model["recompute"] else ""),
        "Parallelism": _layout(run) + (", distributed optimizer" if parallel["distributed_optimizer"] else ""),
        "Training": f"{train['steps']} steps of {run['tokens_per_step']} tokens, {samples} samples of "
        f"{train['sequence']} (data-parallel ranks × micro batches × samples), {train['precision']}, "
        f"gradients in fp32, on {run['text']}",
    }


def _hardware(run: dict) -> str:
    return f"{run['processes']} × {run['device']}, {run['backend']}"


def _layout(run: dict) -> str:
    parallel = run["parallel"]
    sequence = " with sequence parallelism" if parallel["sequence"] and parallel["tensor"] > 1 else ""
    return f"TP={parallel['tensor']}{sequence}, PP={parallel['pipeline']}, DP={parallel['data']}"


def _step_table(comparison: Comparison) -> Table:
    stock, ours = (comparison.runs[name] for name in ("stock", "parallel_lce"))
    table = Table("step", "stock loss", "parallel_lce loss", "difference", title=f"Losses on {stock['text']}")
    columns = [stock["losses"], ours["losses"], comparison.ours.steps]
    if comparison.yardstick:
        table.add_column("of stock reversed")
        columns.append(comparison.yardstick.steps)
    for column in table.columns:
        column.justify = "right"
    steps = len(stock["losses"])
    for step in range(0, steps, -(-steps // ROWS)):
        x, y, *differences = (column[step] for column in columns)
        table.add_row(str(step), f"{x:.6f}", f"{y:.6f}", *(f"{difference:.1e}" for difference in differences))
    return table


def _summary_table(comparison: Comparison) -> Table:
    runs = list(comparison.runs.values())
    first = runs[0]
    title = f"{_layout(first)}, {_hardware(first)}"
    table = Table("", *comparison.runs, title=title)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, form: str, values: list) -> None:
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else form.format(value) for value in values))

    distances = [None, comparison.ours, comparison.yardstick][: len(runs)]
    mebibytes = lambda key: [None if run[key] is None else run[key] / 2**20 for run in runs]  # noqa: E731
    row("final loss", "{:.6f}", [run["losses"][-1] for run in runs])
    row("difference from stock's losses, mean", "{:.2e}", [d and d.mean for d in distances])
    row("difference from stock's losses, largest", "{:.2e}", [d and d.maximum for d in distances])
    row(
        f"step time at {first['tokens_per_step']} tokens, median, ms",
        "{:.1f}",
        [run["median_step_seconds"] * 1e3 for run in runs],
    )
    row("tokens per second", "{:.0f}", [run["tokens_per_second"] for run in runs])
    row("peak memory of a step, MiB per rank", "{:.1f}", mebibytes("step_peak_bytes"))
    row(
        f"peak memory of the loss, measured at {first['loss_peak_tokens']} tokens, MiB per rank",
        "{:.1f}",
        mebibytes("loss_peak_bytes"),
    )
    if comparison.weights:
        name, difference = comparison.weights
        blanks = [None] * (len(runs) - 2)
        row(f"largest difference of final weights: {name}", "{:.2e}", [None, difference, *blanks])
    return table


def _draw(comparison: Comparison, tolerance: float, path: Path) -> None:
    figure, ((curves, memory), (gaps, time)) = pyplot.subplots(
        2, 2, figsize=(11, 7), layout="constrained", width_ratios=(2, 1)
    )
    pair = [comparison.runs[name] for name in ("stock", "parallel_lce")]
    _draw_curves(curves, *(run["losses"] for run in pair))
    _draw_differences(gaps, comparison, tolerance)
    # The whole step where that was measured, on GPUs; otherwise the loss alone.
    if pair[0]["step_peak_bytes"] is not None:
        _draw_bars(memory, [run["step_peak_bytes"] / 2**30 for run in pair], "%.2f")
        memory.set(title="Peak memory of a step", ylabel="GiB per rank")
    elif pair[0]["loss_peak_bytes"] is not None:
        _draw_bars(memory, [run["loss_peak_bytes"] / 2**20 for run in pair], "%.1f")
        memory.set(title=f"Peak memory of the loss, {pair[0]['loss_peak_tokens']} tokens", ylabel="MiB per rank")
    else:
        memory.set_visible(False)
    _draw_bars(time, [run["median_step_seconds"] * 1e3 for run in pair], "%.1f")
    time.set(title=f"Step of {pair[0]['tokens_per_step']} tokens, median", ylabel="ms")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_curves(axes: pyplot.Axes, stock: list[float], ours: list[float]) -> None:
    # The curves lie on each other: a wide pale line under a thin dashed one shows both.
    axes.plot(stock, color=STOCK_COLOUR, linewidth=5, label="stock")
    axes.plot(ours, color=OURS_COLOUR, linewidth=1.5, linestyle="--", label="parallel_lce")
    axes.set(title="Training loss", xlabel="step", ylabel="mean loss per token")
    axes.legend(frameon=False)


def _draw_differences(axes: pyplot.Axes, comparison: Comparison, tolerance: float) -> None:
    dots = {"marker": ".", "linestyle": "none"}
    drawn = list(comparison.ours.steps)
    if comparison.yardstick:
        label = "stock, samples in reverse order"
        axes.plot(comparison.yardstick.steps, color=YARDSTICK_COLOUR, label=label, **dots)
        drawn += comparison.yardstick.steps
    else:
        axes.axhline(tolerance, color="#444444", linewidth=1, label=f"tolerance {tolerance:.0e}")
        drawn.append(tolerance)
    axes.plot(comparison.ours.steps, color=OURS_COLOUR, label="parallel_lce", **dots)
    largest = max([1e-9, *filter(math.isfinite, drawn)])
    axes.set_yscale("symlog", linthresh=largest / 1000)  # differences may be exactly 0
    axes.set(title="|loss − stock's loss|", xlabel="step", ylim=(0, 10 * largest))
    axes.legend(frameon=False)


def _draw_bars(axes: pyplot.Axes, values: list[float], form: str) -> None:
    bars = axes.bar(["stock", "parallel_lce"], values, color=[STOCK_COLOUR, OURS_COLOUR], width=0.6)
    axes.bar_label(bars, fmt=form)
    axes.margins(y=0.12)
