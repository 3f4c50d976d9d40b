"""The files that a run writes, and the report that compares runs: do the loss curves of stock and parallel_lce agree?

Rank 0 of a run writes snapshots as step-STEP.safetensors if they are asked for, and last metrics.json.

Without a yardstick (fp32), the losses of the two may differ by at most `compare.tolerance` at any step.

In bf16 rounding alone makes curves part. There stock is trained three times more, with a step's samples in other
orders: it then sums the same terms in another order. The mean and the maximum of parallel_lce's difference from stock
must each be at most `compare.factor` times the largest one between any two of the four stock runs. One fp32 rounding of
the loss is always allowed. All losses must be finite.
"""

import math
import statistics
from itertools import combinations
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from training.config import Config

# Each run's folder under the output, and the overrides that tell the run from the others.
RUNS = {
    "stock": ["loss.impl=stock", "train.sample_order=0"],
    "parallel_lce": ["loss.impl=parallel_lce", "train.sample_order=0"],
    **{f"stock-{order}": ["loss.impl=stock", f"train.sample_order={order}"] for order in (1, 2, 3)},
}
WARM_UP_STEPS = 2  # not in the step times and the peak memory


class Metrics(BaseModel):
    """The content of metrics.json."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a NaN among the losses stays one

    config: Config
    device: str  # of rank 0
    backend: str  # of torch.distributed
    versions: dict[str, str]
    text: str  # where the text is from
    losses: Annotated[list[float], Field(min_length=1)]  # of each step
    step_seconds: list[float]  # of each step
    step_peak_bytes: int | None  # largest of all ranks, after the warm-up; None on a CPU
    loss_peak_bytes: int | None  # largest of all ranks, of the output layer and the loss; None: not measured
    held_out_loss: float | None  # mean over the held-out samples after the training; None: there are none

    def step_times(self) -> tuple[float, float, float]:
        """Times in ms of the steps after the warm-up: tenth percentile, median and ninetieth percentile."""
        times = sorted(1e3 * s for s in self.step_seconds[WARM_UP_STEPS:] or self.step_seconds)
        last = len(times) - 1
        return times[round(0.1 * last)], statistics.median(times), times[round(0.9 * last)]


class Comparison(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")

    agree: bool
    verdict: str  # one line
    differences: dict[str, list[float]]  # of each other run: of its losses from stock's, by step
    runs: dict[str, Metrics]  # by the names of RUNS


def folders_of(config: Config) -> dict[str, Path]:
    """The runs that the demo trains, and their folders: with a yardstick all of RUNS, else one for each loss."""
    names = list(RUNS) if config.compare.yardstick else ["stock", "parallel_lce"]
    return {name: Path(config.output, name) for name in names}


def compare(config: Config) -> Comparison:
    """Reads the results of the runs under `config.output`, and compares them."""
    allowed, runs = config.compare, {}
    for name, folder in folders_of(config).items():
        runs[name] = Metrics.model_validate_json((folder / "metrics.json").read_bytes())
    stock = runs["stock"]
    differences = {name: _differences(stock, run) for name, run in runs.items() if run is not stock}
    mean, largest = mean_and_largest(differences["parallel_lce"])
    if allowed.yardstick:
        stocks = [run for name, run in runs.items() if name != "parallel_lce"]
        pairs = [mean_and_largest(_differences(*pair)) for pair in combinations(stocks, 2)]
        their_mean, their_largest = map(float, np.max(pairs, axis=0))
        factor, rounding = allowed.factor, max(stock.losses) * 2**-23
        # Both are false for a NaN.
        agree = mean <= factor * their_mean + rounding and largest <= factor * their_largest + rounding
        agree = agree and math.isfinite(their_largest)
        words = (
            f"they differ by {mean:.1e} in the mean and {largest:.1e} at most. Of {len(stocks)} stock runs with "
            f"samples in different orders, two differ by up to {their_mean:.1e} and {their_largest:.1e}; {factor:g} "
            "times as much is allowed"
        )
    else:
        agree = largest <= allowed.tolerance
        words = f"they differ by at most {largest:.1e}; {allowed.tolerance:.0e} is allowed"
    verdict = f"{'The loss curves agree' if agree else 'FAILED: the loss curves part'}: {words}."
    return Comparison(agree=agree, verdict=verdict, differences=differences, runs=runs)


def _differences(one: Metrics, other: Metrics) -> list[float]:
    return [abs(x - y) for x, y in zip(one.losses, other.losses, strict=True)]  # a missing step must not pass


def mean_and_largest(differences: list[float]) -> tuple[float, float]:
    """Both are NaN if a difference is."""
    return float(np.mean(differences)), float(np.max(differences))


def write_report(comparison: Comparison, folder: Path, command: str) -> str:
    """Writes report.md, report.png and report.json, which `command` makes again. Returns what the terminal shows."""
    description, summary = _description(comparison.runs["stock"]), _summary_table(comparison) + _on_times(comparison)
    others = "*stock-N* is stock with train.sample_order=N." if len(comparison.runs) > 2 else ""
    (folder / "report.md").write_text(f"""# Training with Megatron's loss and with parallel_lce

{comparison.verdict}

![differences of the losses](report.png)

{summary}

*stock* is Megatron's unfused loss, its default. {others}

{description}. report.json has all settings and losses. Made by

```bash
{command}
```
""")
    (folder / "report.json").write_text(comparison.model_dump_json(indent=1) + "\n")
    _draw(comparison.differences, folder / "report.png")
    return f"{description}\n\n{summary}"


def _summary_table(comparison: Comparison) -> str:
    """A column for each run. Rows that no run has are left out."""
    runs, config = list(comparison.runs.values()), comparison.runs["stock"].config
    train = config.train
    tokens = train.micro_batch * train.micro_batches * config.parallel.data * train.sequence
    measured = (config.memory.micro_batch or 0) * train.sequence
    step_peaks, loss_peaks = zip(*((run.step_peak_bytes, run.loss_peak_bytes) for run in runs))
    distances = [(None, None), *map(mean_and_largest, comparison.differences.values())]
    times = [run.step_times() for run in runs]
    rows = [
        ("final loss", ".6f", [run.losses[-1] for run in runs]),
        ("held-out loss", ".6f", [run.held_out_loss for run in runs]),
        ("difference from stock's losses, mean", ".2e", [mean for mean, _ in distances]),
        ("difference from stock's losses, largest", ".2e", [largest for _, largest in distances]),
        (f"step of {tokens} tokens, ms: p10, median, p90", "", [" / ".join(map("{:.0f}".format, t)) for t in times]),
        ("peak memory of a step, MiB per rank", ".1f", [size and size / 2**20 for size in step_peaks]),
        (f"peak memory of the loss, measured at {measured} tokens, MiB per rank", ".1f",
         [size and size / 2**20 for size in loss_peaks]),
    ]  # fmt: skip
    texts = [[name, *("" if value is None else format(value, form) for value in values)] for name, form, values in rows]
    return _table([["", *comparison.runs], *(row for row in texts if any(row[1:]))])


def _on_times(comparison: Comparison) -> str:
    """A sentence on the step times, where a difference of medians may be noise."""
    (low, _, high), (our_low, _, our_high) = (comparison.runs[n].step_times() for n in ("stock", "parallel_lce"))
    if max(low, our_low) > min(high, our_high):
        return ""
    return "\n\nThe step times of both losses overlap between p10 and p90: a difference of their medians may be noise."


def _table(rows: list[list[str]]) -> str:
    """In Markdown, the first column aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _description(run: Metrics) -> str:
    parallel, versions = run.config.parallel, ", ".join(f"{name} {version}" for name, version in run.versions.items())
    sequence = " with sequence parallelism" if parallel.sequence and parallel.tensor > 1 else ""
    return (
        f"TP={parallel.tensor}{sequence}, DP={parallel.data}; {parallel.processes} × "
        f"{run.device}, {run.backend}; {versions}; {run.text}"
    )


def _draw(differences: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes, width = figure.subplots(), max(1, len(differences["parallel_lce"]) // 20)
    ours, *others = [np.convolve(each, np.full(width, 1 / width), "valid") for each in differences.values()]
    if others:
        axes.fill_between(range(len(ours)), np.min(others, 0), np.max(others, 0), color="0.8", label="reordered stock")
    axes.plot(ours, label="parallel_lce")
    axes.set(title=f"|loss − stock's loss|, means of {width} steps", xlabel="step", yscale="log")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
