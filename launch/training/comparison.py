"""Finished runs side by side: whether the loss curves of stock and parallel_lce agree.

Without a yardstick (fp32), the losses of the two may differ by at most `compare.tolerance` at any step.

In bf16 rounding alone makes curves part, so the allowed difference is measured: the yardstick is stock trained once
more on the same samples in reverse order, which sums the same terms in another order. The mean over the steps, and the
maximum over the steps, of parallel_lce's difference from stock must each be at most `compare.factor` times the
yardstick's. One fp32 rounding of the loss is always allowed, since over a few steps the yardstick may be exactly 0.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from training.config import Config
from training.refusal import Refusal
from training.runs import Metrics, read_metrics, runs_of, weights_in

# Settings in which the runs may differ, beside the loss.
FREE = {"train.reverse_samples", "parallel.device", "parallel.timeout_seconds"}


@dataclass
class Distance:
    """How far the losses of one run are from stock's, step by step. A NaN makes the mean and the maximum NaN."""

    steps: list[float]

    @property
    def mean(self) -> float:
        return sum(self.steps) / len(self.steps)

    @property
    def maximum(self) -> float:
        return math.nan if any(map(math.isnan, self.steps)) else max(self.steps)


@dataclass
class Comparison:
    """The metrics of the runs and the verdict on them."""

    runs: dict[str, Metrics]  # by the names of RUNS
    ours: Distance
    yardstick: Distance | None
    weights: tuple[str, float] | None  # the parameter that differs most after training, and its largest difference
    agree: bool
    verdict: str  # one line


def compare(config: Config) -> Comparison:
    """Reads the results of the runs under `config.output`.

    Raises a Refusal if results are missing, or if the runs have different settings or lengths.
    """
    folders = {name: Path(config.output) / name for name in runs_of(config)}
    runs = {name: read_metrics(folder) for name, folder in folders.items()}
    stock = runs["stock"]
    for name, run in runs.items():
        _check_same_settings(stock, name, run)
    distances = {name: _distance(stock, run) for name, run in runs.items()}
    ours, yardstick = distances["parallel_lce"], distances.get("stock-reversed")
    if yardstick is None:
        agree, words = _within_tolerance(ours, config.compare.tolerance)
    else:
        rounding = max(stock.losses) * 2**-23
        agree, words = _within_yardstick(ours, yardstick, config.compare.factor, rounding)
    verdict = f"{'The loss curves agree' if agree else 'FAILED: the loss curves part'}: {words}."
    weights = _largest_weight_difference(folders["stock"], folders["parallel_lce"]) if config.save_weights else None
    return Comparison(runs, ours, yardstick, weights, agree, verdict)


def _within_tolerance(ours: Distance, tolerance: float) -> tuple[bool, str]:
    words = f"they differ by at most {ours.maximum:.1e}; {tolerance:.0e} is allowed"
    return ours.maximum <= tolerance, words  # False for a NaN


def _within_yardstick(ours: Distance, yardstick: Distance, factor: float, rounding: float) -> tuple[bool, str]:
    agree = all(
        mine <= factor * theirs + rounding  # False for a NaN
        for mine, theirs in ((ours.mean, yardstick.mean), (ours.maximum, yardstick.maximum))
    )
    words = (
        f"they differ by {ours.mean:.1e} in the mean and {ours.maximum:.1e} at most, stock with its samples "
        f"reversed by {yardstick.mean:.1e} and {yardstick.maximum:.1e}; {factor:g} times that is allowed"
    )
    return agree, words


def _check_same_settings(stock: Metrics, name: str, run: Metrics) -> None:
    if len(run.losses) != len(stock.losses):  # a missing step must not pass
        raise Refusal(f"the runs have {len(stock.losses)} steps (stock) and {len(run.losses)} ({name})")
    theirs, mine = _settings(stock), _settings(run)
    for key in sorted(theirs):
        if theirs[key] != mine[key]:
            raise Refusal(f"the runs differ in {key}: {theirs[key]} (stock) and {mine[key]} ({name})")


def _settings(run: Metrics) -> dict[str, object]:
    """The settings that all runs must share, since the report shows those of one run."""
    values = run.model_dump(mode="json")
    sections = {f"{s}.{key}": value for s in ("model", "train", "parallel") for key, value in values[s].items()}
    measured = {key: values[key] for key in ("backend", "padded_vocab_size", "loss_peak_tokens")}
    return {key: value for key, value in (sections | measured).items() if key not in FREE}


def _distance(a: Metrics, b: Metrics) -> Distance:
    return Distance([abs(x - y) for x, y in zip(a.losses, b.losses)])


def _largest_weight_difference(stock: Path, ours: Path) -> tuple[str, float]:
    """The parameter that differs most after training, over all ranks that left theirs here, and by how much."""
    files, mine = ({path.name for path in weights_in(folder)} for folder in (stock, ours))
    if files != mine:
        raise Refusal(f"only one of the two runs in {stock.parent} left {', '.join(sorted(files ^ mine))}")
    if not files:
        raise Refusal(f"no weights in {stock}")
    worst = {}
    for file in sorted(files):
        theirs, mine = (_read_weights(folder / file) for folder in (stock, ours))
        if different := {name for name in theirs | mine if _shape(theirs, name) != _shape(mine, name)}:
            raise Refusal(f"the two runs have different parameters in {file}: {', '.join(sorted(different))}")
        for name, weight in theirs.items():
            worst[f"{name} ({Path(file).stem})"] = (weight - mine[name]).abs().max().item()
    name = max(worst, key=lambda key: math.inf if math.isnan(worst[key]) else worst[key])
    return name, worst[name]


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise Refusal(f"{path} cannot be read as weights: {type(error).__name__}") from None
    if not isinstance(weights, dict) or not weights or not all(map(_is_parameter, weights.items())):
        raise Refusal(f"{path} holds no weights of a run")
    return weights


def _is_parameter(item: tuple[object, object]) -> bool:
    name, weight = item
    if not isinstance(name, str) or not isinstance(weight, torch.Tensor):
        return False
    return weight.is_floating_point() and weight.numel() > 0


def _shape(weights: dict[str, torch.Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None
