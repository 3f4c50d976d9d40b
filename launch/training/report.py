"""The report of a comparison: tables in the terminal, and report.md, report.png and report.json in a folder."""

from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from training.comparison import Comparison, mean_and_largest
from training.results import Metrics

COLOURS = {"stock": "#9aa5b1", "parallel_lce": "#c2410c", "stock-reversed": "#2563a8"}
MOST_ROWS = 40  # of the table of steps


def print_report(comparison: Comparison) -> None:
    console = Console()
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
    return f"{run.parallel.processes} × {run.device}, {run.backend}"


def _step_table(comparison: Comparison) -> Table:
    stock, ours = comparison.runs["stock"], comparison.runs["parallel_lce"]
    names = ["step", "stock loss", "parallel_lce loss", *(f"difference of {name}" for name in comparison.differences)]
    table = Table(title=f"Losses on {stock.text}")
    for name in names:
        table.add_column(name, justify="right")
    steps = len(stock.losses)
    for step in range(0, steps, -(-steps // MOST_ROWS)):
        differences = (f"{each[step]:.1e}" for each in comparison.differences.values())
        table.add_row(str(step), f"{stock.losses[step]:.6f}", f"{ours.losses[step]:.6f}", *differences)
    return table


def _summary_table(comparison: Comparison) -> Table:
    """A column for each run. Rows that no run has are left out."""
    runs, first = list(comparison.runs.values()), comparison.runs["stock"]
    distances = [(None, None), *map(mean_and_largest, comparison.differences.values())]
    weights, difference = comparison.weights or ("", None)
    rows: dict[str, tuple[str, list]] = {
        "final loss": ("{:.6f}", [run.losses[-1] for run in runs]),
        "held-out loss": ("{:.6f}", [run.held_out_loss for run in runs]),
        "difference from stock's losses, mean": ("{:.2e}", [mean for mean, _ in distances]),
        "difference from stock's losses, largest": ("{:.2e}", [largest for _, largest in distances]),
        f"step time at {first.tokens_per_step} tokens, median, ms": (
            "{:.1f}",
            [run.median_step_seconds * 1e3 for run in runs],
        ),
        "peak memory of a step, MiB per rank": ("{:.1f}", [_mib(run.step_peak_bytes) for run in runs]),
        f"peak memory of the loss, measured at {first.loss_peak_tokens} tokens, MiB per rank": (
            "{:.1f}",
            [_mib(run.loss_peak_bytes) for run in runs],
        ),
        f"largest difference of final weights: {weights}": ("{:.2e}", [None, difference, None][: len(runs)]),
    }
    parallel = first.parallel
    layout = f"TP={parallel.tensor}{' with sequence parallelism' * parallel.sequence}, PP={parallel.pipeline}, "
    table = Table("", title=f"{layout}DP={parallel.data}, {_hardware(first)}")
    for name in comparison.runs:
        table.add_column(name, justify="right")
    for name, (form, values) in rows.items():
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else form.format(value) for value in values))
    return table


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def _draw(comparison: Comparison, tolerance: float, path: Path) -> None:
    figure = Figure(figsize=(11, 7), layout="constrained")
    (curves, memory), (gaps, time) = figure.subplots(2, 2, width_ratios=(2, 1))
    stock, ours = comparison.runs["stock"], comparison.runs["parallel_lce"]
    # The curves coincide: a thin dashed line over a wide pale one shows both.
    curves.plot(stock.losses, color=COLOURS["stock"], linewidth=5, label="stock")
    curves.plot(ours.losses, color=COLOURS["parallel_lce"], linewidth=1.5, linestyle="--", label="parallel_lce")
    curves.set(title="Training loss", xlabel="step", ylabel="mean loss per token")
    for name, differences in reversed(comparison.differences.items()):
        gaps.plot(differences, color=COLOURS[name], label=name, marker=".", linestyle="none")
    if "stock-reversed" not in comparison.differences:
        gaps.axhline(tolerance, color="#444444", linewidth=1, label=f"tolerance {tolerance:.0e}")
    gaps.set_yscale("symlog", linthresh=1e-7)  # differences may be exactly 0
    gaps.set(title="|loss − stock's loss|", xlabel="step")
    gaps.set_ylim(bottom=0)
    # The peak of a whole step where that was measured, on GPUs; otherwise the peak of the loss alone.
    peaks, of = [_mib(run.step_peak_bytes) for run in (stock, ours)], f"a step of {stock.tokens_per_step} tokens"
    if None in peaks:
        peaks, of = [_mib(run.loss_peak_bytes) for run in (stock, ours)], f"the loss, {stock.loss_peak_tokens} tokens"
    seconds = [run.median_step_seconds for run in (stock, ours)]
    for axes, values, title, unit in (
        (memory, peaks, f"Peak memory of {of}", "MiB per rank"),
        (time, [1e3 * each for each in seconds], f"Step of {stock.tokens_per_step} tokens, median", "ms"),
    ):
        axes.bar_label(axes.bar(["stock", "parallel_lce"], [value or 0 for value in values]), fmt="%.1f")
        axes.set(title=title, ylabel=unit)
        axes.margins(y=0.12)
    for axes in (curves, gaps):
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
