"""What can be set: a typed schema, filled from a YAML file, then from the command line.

The schema holds no numbers: a configuration file gives every one of them, so a run is described by one file
and the overrides beside it. Unknown keys, wrong types and missing values are errors.
"""

import argparse
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = ROOT / "configs" / "demo.yaml"


class LossImpl(Enum):
    """Which cross-entropy the model is built with."""

    stock = "stock"
    parallel_lce = "parallel_lce"


class Device(Enum):
    """Where to train; `auto` takes GPUs if there is one for every tensor-parallel rank."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class TextConfig:
    path: str | None = None  # a file or a folder; None: the standard library's own sources
    vocab_size: int = MISSING  # entries of the BPE, special token included
    max_bytes: int = MISSING  # read no more text than this
    cache: str = MISSING  # folder of trained tokenizers and token streams


@dataclass
class ModelConfig:
    layers: int = MISSING
    hidden: int = MISSING
    ffn_hidden: int = MISSING
    heads: int = MISSING
    tie_embeddings: bool = MISSING


@dataclass
class TrainConfig:
    steps: int = MISSING
    sequence: int = MISSING  # tokens per sample
    micro_batch: int = MISSING  # samples per step
    learning_rate: float = MISSING
    adam_eps: float = MISSING
    warmup_steps: int = MISSING
    weight_decay: float = MISSING
    seed: int = MISSING


@dataclass
class LossConfig:
    impl: LossImpl = MISSING
    logits_budget_mib: float | None = None  # passed to install(); None: its default


@dataclass
class ParallelConfig:
    tensor: int = MISSING  # tensor-parallel size, which is the number of processes
    sequence: bool = MISSING  # sequence parallelism on top
    device: Device = MISSING
    timeout_seconds: int = MISSING  # of a collective: a lost process is an error, not a hang


@dataclass
class MemoryConfig:
    micro_batch: int = MISSING  # samples of the one step that measures the memory of the loss, after training


@dataclass
class CompareConfig:
    tolerance: float = MISSING  # largest difference of the two losses at any step


@dataclass
class Config:
    text: TextConfig
    model: ModelConfig
    train: TrainConfig
    loss: LossConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    compare: CompareConfig
    output: str = MISSING  # folder of this run's results


def parse_command_line(description: str, argv: list[str]) -> Config:
    """Reads `[--config FILE] [--text PATH] [key=value ...]`; ends the program with a line of help if it is wrong."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="YAML file (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="train on this file or folder; the same as text.path=PATH")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=20")
    args = parser.parse_intermixed_args(argv)
    try:
        return load_config(args.config, args.overrides, args.text)
    except OmegaConfBaseException as error:
        parser.error(f"{error.full_key or args.config}: {str(error).splitlines()[0]}")
    except (OSError, ValueError, YAMLError) as error:
        parser.error(str(error))


def load_config(path: Path, overrides: list[str], text: Path | None = None) -> Config:
    """Schema, then the file, then `key=value` overrides, then `text`. Relative folders are under the repository."""
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"expected key=value, got {override!r}")
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path), OmegaConf.from_dotlist(overrides))
    config: Config = OmegaConf.to_object(merged)
    if text is not None:
        config.text.path = str(text)
    if config.text.path is not None:  # what a user types is relative to where the user is
        config.text.path = str(Path(config.text.path).expanduser().resolve())
    config.text.cache = str(ROOT / os.path.expanduser(config.text.cache))
    config.output = str(ROOT / os.path.expanduser(config.output))
    _check(config)
    return config


def save_config(config: Config, path: Path) -> None:
    """Writes the resolved configuration, so that a run can be repeated from its results."""
    OmegaConf.save(OmegaConf.structured(config), path)


def _check(config: Config) -> None:
    model, train, tp = config.model, config.train, config.parallel.tensor
    sizes = {
        "model.layers": model.layers, "model.hidden": model.hidden, "model.ffn_hidden": model.ffn_hidden,
        "model.heads": model.heads, "train.steps": train.steps, "train.sequence": train.sequence,
        "train.micro_batch": train.micro_batch, "text.max_bytes": config.text.max_bytes, "parallel.tensor": tp,
        "memory.micro_batch": config.memory.micro_batch,
        "parallel.timeout_seconds": config.parallel.timeout_seconds,
    }  # fmt: skip
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if config.text.vocab_size < 257:
        raise ValueError(f"text.vocab_size must hold 256 bytes and a special token, got {config.text.vocab_size}")
    if model.hidden % model.heads:
        raise ValueError(f"model.hidden={model.hidden} is not a multiple of model.heads={model.heads}")
    for name, size in {"model.heads": model.heads, "model.ffn_hidden": model.ffn_hidden}.items():
        if size % tp:
            raise ValueError(f"{name}={size} is not a multiple of parallel.tensor={tp}")
    if config.parallel.sequence and train.sequence % tp:
        raise ValueError(f"train.sequence={train.sequence} is not a multiple of parallel.tensor={tp}")
