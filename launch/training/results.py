"""The files that a run leaves in its output folder.

Rank 0 writes config.yaml, snapshots as step-STEP.safetensors if they are asked for, and last metrics.json.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.config import Config, described, load_config
from training.refusal import Refusal, check_folder


class Metrics(BaseModel):
    """The content of metrics.json."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a NaN among the losses stays one

    config: Config
    device: str  # of rank 0
    hosts: int
    backend: str  # of torch.distributed
    versions: dict[str, str]
    text: str  # where the text is from
    losses: Annotated[list[float], Field(min_length=1)]  # of each step
    step_seconds: list[float]  # of each step
    median_step_seconds: float  # of the steps after the warm-up
    step_peak_bytes: int | None  # largest of all ranks, after the warm-up; None on a CPU
    loss_peak_bytes: int | None  # largest of all ranks, of the output layer and the loss; None: not measured
    held_out_loss: float | None  # mean over the held-out samples after the training; None: there are none


def read_metrics(folder: Path) -> Metrics:
    """The run's metrics. Raises a Refusal if there are none or if they are not what a run writes."""
    path = folder / "metrics.json"
    try:
        return Metrics.model_validate_json(path.read_bytes())
    except OSError as error:
        raise Refusal(f"no results of a run at {path}: {error.strerror}") from None
    except ValidationError as error:
        raise Refusal(f"{path} holds no results of a run: {described(error)}") from None


def snapshots_in(folder: str | Path) -> list[Path]:
    """The files step-NUMBER.safetensors, in the order of their numbers."""
    found = {path.stem.removeprefix("step-"): path for path in Path(folder).glob("step-*.safetensors")}
    return [found[number] for number in sorted(filter(str.isdecimal, found), key=int)]


def is_trained(config: Config) -> bool:
    """Whether the output folder holds all snapshots of this configuration. Raises a Refusal if they are of another."""
    if config.snapshots is None:
        raise Refusal("snapshots=None: the report needs some, as configs/snapshots.yaml has them")
    if not Path(config.output, "metrics.json").exists():
        return False
    steps = len(read_metrics(Path(config.output)).losses)
    before = load_config(Path(config.output, "config.yaml"), [])
    elsewhere = {"output": True, "text": {"cache"}, "compare": True}  # decide nothing that a training writes
    if before.model_dump(exclude=elsewhere) != config.model_dump(exclude=elsewhere):
        raise Refusal(f"{config.output} has snapshots of another configuration: give another output=, or remove them")
    wanted = {f"step-{step}" for step in (*config.snapshots.steps, steps) if step <= steps}
    return wanted <= {path.stem for path in snapshots_in(config.output)}


def remove_results(folder: str | Path) -> None:
    """Makes the folder, and removes the results of an earlier run, since the new run may overwrite only some of them.
    config.yaml stays: the new run may be started with it."""
    check_folder("output", folder)
    snapshots = snapshots_in(folder)
    if snapshots and not Path(folder, "config.yaml").exists():
        raise Refusal(f"{snapshots[0]} is of no training that this program knows of: give another output=")
    for path in (Path(folder, "metrics.json"), *snapshots):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise Refusal(f"{path} cannot be removed: {error.strerror}") from None
