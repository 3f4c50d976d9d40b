"""The configuration of launch/snapshots.py: which small GPT is trained, and when its output layer's inputs are kept."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from training.config import (
    ROOT,
    Count,
    Device,
    Number,
    Positive,
    Run,
    Section,
    TextConfig,
    load_run,
    must_divide,
    parse_run,
)
from training.refusal import Refusal


class SmallModel(Section):
    layers: Count
    hidden: Count
    heads: Count
    vocab_size: Count | None = None  # V of the output layer; None: that of the text; otherwise no less than that


class SmallTraining(Section):
    steps: Count | None = None  # the training ends at the first of the two limits; None: no such limit
    minutes: Positive | None = None
    sequence: Count  # tokens per sample
    batch: Count  # samples per step
    learning_rate: Number  # the largest: it rises over the warm-up, and falls linearly to a tenth at the end
    warmup_steps: Annotated[int, Field(strict=True, ge=0)]
    weight_decay: Number
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)]
    device: Device


class Snapshots(Section):
    steps: list[Count]  # after which to write, beside the last step
    tokens: Count  # held-out tokens of a snapshot: N


class SnapshotConfig(Run):
    text: TextConfig
    model: SmallModel
    train: SmallTraining
    snapshots: Snapshots

    @model_validator(mode="after")
    def _fits(self) -> "SnapshotConfig":
        model, train = self.model, self.train
        must_divide("model.hidden", model.hidden, "model.heads", model.heads)
        if self.vocab_size < self.text.vocab_size:
            raise ValueError(f"model.vocab_size={model.vocab_size} is less than text.vocab_size={self.text.vocab_size}")
        if train.steps is None and train.minutes is None:
            raise ValueError("train.steps and train.minutes are both null: one of them must end the training")
        return self

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size or self.text.vocab_size

    @property
    def held_out_samples(self) -> int:
        """Samples of which the held-out tokens are the first `snapshots.tokens`."""
        return -(-self.snapshots.tokens // self.train.sequence)


def parse_snapshots(description: str | None, argv: list[str]) -> SnapshotConfig:
    """Reads `[--config FILE] [--text PATH] [key=value ...]`. Raises a Refusal for a configuration that is wrong.

    Without `--config`: configs/snapshots.yaml where there is a GPU, else configs/snapshots-cpu.yaml.
    """
    import torch  # it loads for seconds

    default = "snapshots.yaml" if torch.cuda.is_available() else "snapshots-cpu.yaml"
    config = parse_run(description, argv, ROOT / "configs" / default, load_snapshots)
    if config.train.device is Device.cuda and not torch.cuda.is_available():
        raise Refusal("train.device=cuda needs a GPU, found none")
    return config


def load_snapshots(path: Path, overrides: list[str], text: str | None = None) -> SnapshotConfig:
    return load_run(SnapshotConfig, path, overrides, text)


def describe_snapshots(config: SnapshotConfig) -> dict[str, object]:
    """All that decides what a training writes, as plain values: not where it writes it."""
    return config.model_dump(mode="json", exclude={"output": True, "text": {"cache": True}})
