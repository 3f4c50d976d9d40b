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
from typing import Annotated

import torch
from pydantic import BaseModel, Field, ValidationError

from training.config import Config, LossImpl, ModelConfig, ParallelConfig, TrainConfig
from training.host import weights_in
from training.refusal import Refusal

# Folder under the output, and what sets that run apart from the configuration it was started with.
RUNS = {
    "stock": ["loss.impl=stock", "train.reverse_samples=false"],
    "parallel_lce": ["loss.impl=parallel_lce", "train.reverse_samples=false"],
    "stock-reversed": ["loss.impl=stock", "train.reverse_samples=true"],
}
# What the runs may differ in, beside the loss.
FREE = {"train.reverse_samples", "parallel.device", "parallel.timeout_seconds"}


class Metrics(BaseModel):
    """What the comparison and its report need of a run's metrics.json."""

    losses: Annotated[list[Annotated[float, Field(strict=True)]], Field(min_length=1)]
    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig
    device: str
    processes: int
    hosts: int
    backend: str
    versions: dict[str, str]
    padded_vocab_size: int
    text: str
    tokens_per_step: int
    tokens_per_second: Annotated[float, Field(strict=True)]
    median_step_seconds: Annotated[float, Field(strict=True)]
    step_peak_bytes: Annotated[int, Field(strict=True)] | None
    loss_peak_bytes: Annotated[int, Field(strict=True)] | None
    loss_peak_tokens: int | None


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
        theirs, mine = _settings(stock), _settings(run)
        for key in sorted(theirs | mine):
            if theirs.get(key) != mine.get(key):
                raise Refusal(f"the runs differ in {key}: {theirs.get(key)} (stock) and {mine.get(key)} ({name})")
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
    try:
        if not path.exists():
            raise Refusal(f"no results of a run at {path}")
        run = json.loads(path.read_text())
        Metrics.model_validate(run)
        return {**run, "losses": [float(loss) for loss in run["losses"]]}
    except Refusal:
        raise
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
        raise Refusal(f"{path} holds no results of a run: {said}") from None
    except (OSError, OverflowError, RecursionError, ValueError) as error:
        raise Refusal(f"{path} holds no results of a run: {error!r}") from None


def _settings(run: dict) -> dict[str, object]:
    """What has to be the same in all runs, since the report shows that of one."""
    sections = {f"{s}.{key}": value for s in ("model", "train", "parallel") for key, value in run[s].items()}
    measured = {key: run[key] for key in ("backend", "padded_vocab_size", "loss_peak_tokens")}
    return {key: value for key, value in (sections | measured).items() if key not in FREE}


def _distance(a: dict, b: dict) -> Distance:
    return Distance([abs(x - y) for x, y in zip(a["losses"], b["losses"])])


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
    except Exception as error:  # of any kind: a damaged file may look like anything
        raise Refusal(f"{path} cannot be read as weights: {type(error).__name__}") from None
    if not isinstance(weights, dict) or not weights or not all(map(_is_parameter, weights.items())):
        raise Refusal(f"{path} holds no weights of a run")
    return weights


def _is_parameter(item: tuple[object, object]) -> bool:
    name, weight = item
    return isinstance(name, str) and isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.numel()


def _shape(weights: dict[str, torch.Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None
