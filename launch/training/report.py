"""The report of a comparison: tables in the terminal, and report.md, report.png and report.json in a folder."""

from pathlib import Path

from matplotlib.figure import Figure

from training.comparison import Comparison, mean_and_largest
from training.results import Metrics

COLOURS = {"stock": "#9aa5b1", "parallel_lce": "#c2410c", "stock-reversed": "#2563a8"}
MOST_ROWS = 40  # of the table of steps


def step_table(comparison: Comparison) -> str:
    stock, ours = comparison.runs["stock"], comparison.runs["parallel_lce"]
    rows = [["step", "stock loss", "parallel_lce loss", *(f"difference of {name}" for name in comparison.differences)]]
    for step in range(0, len(stock.losses), -(-len(stock.losses) // MOST_ROWS)):
        losses = (f"{run.losses[step]:.6f}" for run in (stock, ours))
        rows.append([str(step), *losses, *(f"{each[step]:.1e}" for each in comparison.differences.values())])
    return _table(rows)


def summary_table(comparison: Comparison) -> str:
    """A column for each run. Rows that no run has are left out."""
    runs, first = list(comparison.runs.values()), comparison.runs["stock"]
    distances = [(None, None), *map(mean_and_largest, comparison.differences.values())]
    weight, difference = comparison.weights or ("", None)
    rows = [
        ("final loss", ".6f", [run.losses[-1] for run in runs]),
        ("held-out loss", ".6f", [run.held_out_loss for run in runs]),
        ("difference from stock's losses, mean", ".2e", [mean for mean, _ in distances]),
        ("difference from stock's losses, largest", ".2e", [largest for _, largest in distances]),
        (f"largest difference of final weights: {weight}", ".2e", [None, difference, None][: len(runs)]),
        (f"step of {first.tokens_per_step} tokens, median, ms", ".1f", [1e3 * run.median_step_seconds for run in runs]),
        ("peak memory of a step, MiB per rank", ".1f", [_mib(run.step_peak_bytes) for run in runs]),
        (f"peak memory of the loss, measured at {first.loss_peak_tokens} tokens, MiB per rank", ".1f",
         [_mib(run.loss_peak_bytes) for run in runs]),
    ]  # fmt: skip
    return _table(
        [["", *comparison.runs]]
        + [
            [name, *("" if value is None else format(value, form) for value in values)]
            for name, form, values in rows
            if any(value is not None for value in values)
        ]
    )


def _table(rows: list[list[str]]) -> str:
    """In Markdown, the first column aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def description(run: Metrics) -> str:
    parallel, versions = run.parallel, ", ".join(f"{name} {version}" for name, version in run.versions.items())
    sequence = " with sequence parallelism" if parallel.sequence and parallel.tensor > 1 else ""
    return (
        f"TP={parallel.tensor}{sequence}, PP={parallel.pipeline}, DP={parallel.data}; {parallel.processes} × "
        f"{run.device}, {run.backend}, on {run.hosts} host(s); {versions}; {run.text}"
    )


def write_report(comparison: Comparison, folder: Path, tolerance: float, command: str) -> None:
    """Writes the three files. `command` makes them again."""
    run = comparison.runs["stock"]
    settings = "\n".join(
        f"- {section}: " + ", ".join(f"{key}={value}" for key, value in getattr(run, section))
        for section in ("model", "train", "parallel")
    )
    (folder / "report.md").write_text(f"""# Training with Megatron's loss and with parallel_lce

{comparison.verdict}

![loss curves and differences](report.png)

{summary_table(comparison)}

- {description(run)}
{settings}

Made by

```bash
{command}
```
""")
    (folder / "report.json").write_text(comparison.model_dump_json(indent=1) + "\n")
    _draw(comparison, tolerance, folder / "report.png")


def _draw(comparison: Comparison, tolerance: float, path: Path) -> None:
    figure = Figure(figsize=(8, 7), layout="constrained")
    curves, gaps = figure.subplots(2)
    # The curves coincide: a thin dashed line over a wide pale one shows both.
    styles = {"stock": {"linewidth": 5}, "parallel_lce": {"linewidth": 1.5, "linestyle": "--"}}
    for name, style in styles.items():
        curves.plot(comparison.runs[name].losses, color=COLOURS[name], label=name, **style)
    curves.set(title="Training loss", xlabel="step", ylabel="mean loss per token")
    for name, differences in reversed(comparison.differences.items()):
        gaps.plot(differences, color=COLOURS[name], label=name, marker=".", linestyle="none")
    if "stock-reversed" not in comparison.differences:
        gaps.axhline(tolerance, color="#444444", linewidth=1, label=f"tolerance {tolerance:.0e}")
    gaps.set_yscale("symlog", linthresh=1e-7)  # differences may be exactly 0
    gaps.set(title="|loss − stock's loss|", xlabel="step")
    for axes in (curves, gaps):
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
