"""Finished runs side by side: whether the loss curves of stock and parallel_lce agree.

Without a yardstick (fp32), the losses of the two may differ by at most `compare.tolerance` at any step.

With one (bf16, where rounding makes curves part), stock trained once more on the same samples in reverse order, which
sums the same terms in another order. Ours may be no further from stock than that run is, times `compare.factor`: both
in the mean over the steps and at the step where each is furthest. One rounding of the loss itself, which is a sum in
fp32, is always allowed: over a few steps the yardstick may be exactly 0.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from training.config import Config, LossImpl
from training.refusal import Refusal

# Folder under the output, and what sets that run apart from the configuration it was started with.
RUNS = {
    "stock": ["loss.impl=stock", "train.reverse_samples=false"],
    "parallel_lce": ["loss.impl=parallel_lce", "train.reverse_samples=false"],
    "stock-reversed": ["loss.impl=stock", "train.reverse_samples=true"],
}


@dataclass
class Distance:
    """How far the losses of one run are from stock's, step by step; NaN anywhere makes the mean and the maximum NaN."""

    steps: list[float]

    @property
    def mean(self) -> float:
        return sum(self.steps) / len(self.steps)

    @property
    def maximum(self) -> float:
        return math.nan if any(map(math.isnan, self.steps)) else max(self.steps)


@dataclass
class Comparison:
    """The metrics.json of the runs, and what follows from them."""

    runs: dict[str, dict]  # by the names of RUNS
    ours: Distance
    yardstick: Distance | None
    weights: tuple[str, float] | None  # the parameter that differs most after training, and by how much
    agree: bool
    verdict: str


def runs_of(config: Config) -> dict[str, list[str]]:
    """The runs that are compared: folders, and the overrides of each."""
    return {name: chosen for name, chosen in RUNS.items() if config.compare.yardstick or name in LossImpl.__members__}


def compare(config: Config) -> Comparison:
    """Reads the results of runs under `config.output`. Raises a Refusal if they are missing or do not fit."""
    folders = {name: Path(config.output) / name for name in runs_of(config)}
    runs = {name: _read(folder / "metrics.json") for name, folder in folders.items()}
    stock = runs["stock"]
    for name, run in runs.items():
        # A missing step must not pass.
        if len(run["losses"]) != len(stock["losses"]):
            raise Refusal(f"the runs have {len(stock['losses'])} steps (stock) and {len(run['losses'])} ({name})")
    distances = {name: _distance(stock, run) for name, run in runs.items()}
    ours, yardstick = distances["parallel_lce"], distances.get("stock-reversed")
    if yardstick is None:
        tolerance = config.compare.tolerance
        agree = ours.maximum <= tolerance  # False for a NaN
        words = f"they differ by at most {ours.maximum:.1e}; {tolerance:.0e} is allowed"
    else:
        factor = config.compare.factor
        rounding = max(stock["losses"]) * 2**-23
        agree = all(
            mine <= factor * theirs + rounding  # False for a NaN
            for mine, theirs in ((ours.mean, yardstick.mean), (ours.maximum, yardstick.maximum))
        )
        words = (
            f"they differ by {ours.mean:.1e} in the mean and {ours.maximum:.1e} at most, stock with its samples "
            f"reversed by {yardstick.mean:.1e} and {yardstick.maximum:.1e}; {factor:g} times that is allowed"
        )
    verdict = f"{'The loss curves agree' if agree else 'FAILED: the loss curves part'}: {words}."
    weights = _largest_weight_difference(folders["stock"], folders["parallel_lce"]) if config.save_weights else None
    return Comparison(runs, ours, yardstick, weights, agree, verdict)


def _read(path: Path) -> dict:
    if not path.exists():
        raise Refusal(f"no results of a run at {path}")
    try:
        run = json.loads(path.read_text())
        return {**run, "losses": [float(loss) for loss in run["losses"]]}
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise Refusal(f"{path} holds no results of a run: {error!r}") from None


def _distance(a: dict, b: dict) -> Distance:
    return Distance([abs(x - y) for x, y in zip(a["losses"], b["losses"])])


def _largest_weight_difference(stock: Path, ours: Path) -> tuple[str, float]:
    """The parameter that differs most after training, over all ranks that left theirs here, and by how much."""
    worst = {}
    for file in sorted(stock.glob("weights-*.pt")):
        theirs, mine = (torch.load(folder / file.name, weights_only=True) for folder in (stock, ours))
        if theirs.keys() != mine.keys():
            raise Refusal(f"the two runs have different parameters in {file.name}: {theirs.keys() ^ mine.keys()}")
        for name, weight in theirs.items():
            worst[f"{name} ({file.stem})"] = (weight - mine[name]).abs().max().item()
    if not worst:
        raise Refusal(f"no weights in {stock}")
    name = max(worst, key=lambda key: math.inf if math.isnan(worst[key]) else worst[key])
    return name, worst[name]
