"""The runs of the demo and the files that each leaves in its folder.

Rank 0 writes metrics.json and config.yaml. With `save_weights` every rank writes its parameters to weights-RANK.pt.
"""

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from training.config import Config, LossConfig, LossImpl, ModelConfig, ParallelConfig, TrainConfig
from training.refusal import Refusal

# Each run's folder under the output, and the overrides that tell the run from the others.
RUNS = {
    "stock": ["loss.impl=stock", "train.reverse_samples=false"],
    "parallel_lce": ["loss.impl=parallel_lce", "train.reverse_samples=false"],
    "stock-reversed": ["loss.impl=stock", "train.reverse_samples=true"],
}

Measured = Annotated[float, Field(strict=True)]
Bytes = Annotated[int, Field(strict=True)]


class Metrics(BaseModel):
    """The content of metrics.json."""

    model: ModelConfig
    train: TrainConfig
    loss: LossConfig | None = None
    parallel: ParallelConfig
    device: str  # of rank 0
    processes: int
    hosts: int
    backend: str  # of torch.distributed
    versions: dict[str, str]
    padded_vocab_size: int
    text: str  # where the text is from
    tokens_per_step: int
    tokens_per_second: Measured
    losses: Annotated[list[Measured], Field(min_length=1)]  # of each step
    step_seconds: list[Measured] | None = None  # of each step
    median_step_seconds: Measured  # of the steps after the warm-up
    step_peak_bytes: Bytes | None  # largest of all ranks, after the warm-up; None on a CPU
    loss_peak_bytes: Bytes | None  # largest of all ranks, of the output layer and the loss; None: not measured
    loss_peak_tokens: int | None  # of the step in which loss_peak_bytes was measured
    held_out_loss: Measured | None = None  # mean over train.held_out_samples after the training; None: not asked for


def runs_of(config: Config) -> dict[str, list[str]]:
    """The entries of RUNS that the demo trains: all of them with a yardstick, else one for each loss."""
    return {name: chosen for name, chosen in RUNS.items() if config.compare.yardstick or name in LossImpl.__members__}


def write_metrics(metrics: Metrics, folder: str) -> None:
    Path(folder, "metrics.json").write_text(json.dumps(metrics.model_dump(mode="json"), indent=1) + "\n")


def read_metrics(folder: Path) -> Metrics:
    """The run's metrics. Raises a Refusal if there are none or if they are not what a run writes."""
    path = folder / "metrics.json"
    try:
        if not path.exists():
            raise Refusal(f"no results of a run at {path}")
        return Metrics.model_validate(json.loads(path.read_text()))
    except Refusal:
        raise
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
        raise Refusal(f"{path} holds no results of a run: {said}") from None
    except (OSError, OverflowError, RecursionError, ValueError) as error:
        raise Refusal(f"{path} holds no results of a run: {error!r}") from None


def weights_in(folder: str | Path) -> list[Path]:
    """The files of parameters that the run's ranks left in the folder."""
    return [path for path in Path(folder).glob("weights-*.pt") if path.stem.removeprefix("weights-").isdecimal()]


def remove_results(folder: str) -> None:
    """Removes the metrics and parameters of an earlier run.

    A run overwrites some of them, but one that fails, or that has fewer ranks, would leave the rest. config.yaml stays:
    the new run may be started with it.
    """
    for path in (Path(folder, "metrics.json"), *weights_in(folder)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise Refusal(f"{path} cannot be removed: {error.strerror}") from None
