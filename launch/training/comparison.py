"""Finished runs side by side: whether the loss curves of stock and parallel_lce agree.

Without a yardstick (fp32), the losses of the two may differ by at most `compare.tolerance` at any step.

In bf16 rounding alone makes curves part, so the allowed difference is measured: the yardstick is stock trained once
more on the same samples in reverse order, which sums the same terms in another order. The mean over the steps, and the
maximum over the steps, of parallel_lce's difference from stock must each be at most `compare.factor` times the
yardstick's. One fp32 rounding of the loss is always allowed, since over a few steps the yardstick may be exactly 0.
"""

import math
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from training.config import Config
from training.refusal import Refusal
from training.results import Metrics, read_metrics, weights_in

# Each run's folder under the output, and the overrides that tell the run from the others.
RUNS = {
    "stock": ["loss.impl=stock", "train.reverse_samples=false"],
    "parallel_lce": ["loss.impl=parallel_lce", "train.reverse_samples=false"],
    "stock-reversed": ["loss.impl=stock", "train.reverse_samples=true"],
}
# What the runs must share, since the report shows that of one run, and settings in which they may differ nevertheless.
SHARED = {"model", "train", "parallel", "memory"}
FREE = {"train": {"reverse_samples"}, "parallel": {"device", "timeout_seconds"}}


class Comparison(BaseModel):
    """The metrics of the runs and the verdict on them."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    agree: bool
    verdict: str  # one line
    differences: dict[str, list[float]]  # of each other run: of its losses from stock's, by step
    weights: tuple[str, float] | None  # the parameter that differs most after training, and its largest difference
    runs: dict[str, Metrics]  # by the names of RUNS


def folders_of(config: Config) -> dict[str, Path]:
    """The runs that the demo trains, and their folders: with a yardstick all of RUNS, else one for each loss."""
    names = [name for name in RUNS if config.compare.yardstick or name != "stock-reversed"]
    return {name: Path(config.output, name) for name in names}


def compare(config: Config) -> Comparison:
    """Reads the results of the runs under `config.output`.

    Raises a Refusal if results are missing, or if the runs have different settings or lengths.
    """
    folders = folders_of(config)
    runs = {name: read_metrics(folder) for name, folder in folders.items()}
    stock = runs.pop("stock")
    for name, run in runs.items():
        _check_same_settings(stock, name, run)
    differences = {name: [abs(x - y) for x, y in zip(stock.losses, run.losses)] for name, run in runs.items()}
    mean, largest = mean_and_largest(differences["parallel_lce"])
    if "stock-reversed" in differences:
        (their_mean, their_largest), factor = mean_and_largest(differences["stock-reversed"]), config.compare.factor
        rounding = max(stock.losses) * 2**-23
        # Both are false for a NaN.
        agree = mean <= factor * their_mean + rounding and largest <= factor * their_largest + rounding
        words = (
            f"they differ by {mean:.1e} in the mean and {largest:.1e} at most, stock with its samples "
            f"reversed by {their_mean:.1e} and {their_largest:.1e}; {factor:g} times that is allowed"
        )
    else:
        agree = largest <= config.compare.tolerance
        words = f"they differ by at most {largest:.1e}; {config.compare.tolerance:.0e} is allowed"
    verdict = f"{'The loss curves agree' if agree else 'FAILED: the loss curves part'}: {words}."
    weights = _largest_weight_difference(folders["stock"], folders["parallel_lce"]) if config.save_weights else None
    return Comparison(
        agree=agree, verdict=verdict, differences=differences, weights=weights, runs={"stock": stock} | runs
    )


def mean_and_largest(differences: list[float]) -> tuple[float, float]:
    """Both are NaN if a difference is."""
    mean = sum(differences) / len(differences)
    return mean, max(differences) if math.isfinite(mean) else mean


def _check_same_settings(stock: Metrics, name: str, run: Metrics) -> None:
    if len(run.losses) != len(stock.losses):  # a missing step must not pass
        raise Refusal(f"the runs have {len(stock.losses)} steps (stock) and {len(run.losses)} ({name})")
    theirs, mine = (each.model_dump(include=SHARED, exclude=FREE) for each in (stock, run))
    for section, values in theirs.items():
        for key, value in values.items():
            if value != mine[section][key]:
                raise Refusal(f"the runs differ in {section}.{key}: {value} (stock) and {mine[section][key]} ({name})")


def _largest_weight_difference(stock: Path, ours: Path) -> tuple[str, float]:
    """The parameter that differs most after training, over all ranks that left theirs here, and by how much."""
    files = [path.name for path in weights_in(stock)]
    if not files:
        raise Refusal(f"no weights in {stock}")
    differences = {}
    for file in files:
        theirs, mine = _read_weights(stock / file), _read_weights(ours / file)
        for name, weight in theirs.items():
            differences[f"{name} ({Path(file).stem})"] = (weight - mine[name]).abs().max().item()
    return max(differences.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise Refusal(f"{path} cannot be read as weights: {type(error).__name__}") from None
