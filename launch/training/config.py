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


class Precision(Enum):
    """Of the model; gradients are summed, and the optimizer's copy of the parameters kept, in fp32 in either."""

    fp32 = "fp32"
    bf16 = "bf16"


class Device(Enum):
    """Where to train; `auto` takes GPUs if this host has one for every process on it."""

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
    kv_heads: int | None = None  # groups of heads that share keys and values; None: every head has its own
    head_dim: int | None = None  # None: hidden / heads
    vocab_size: int | None = None  # None: that of the text; otherwise no less than that
    rotary_base: int = MISSING
    tie_embeddings: bool = MISSING
    initialize_on_cpu: bool = MISSING  # equal parameters whatever the device and layout, and slow for large models
    recompute: bool = MISSING  # run every layer's forward again in the backward instead of keeping its activations


@dataclass
class TrainConfig:
    steps: int = MISSING
    sequence: int = MISSING  # tokens per sample
    micro_batch: int = MISSING  # samples that go through the model at once
    micro_batches: int = MISSING  # per step and data-parallel rank
    reverse_samples: bool = MISSING  # the same samples in reverse order: another order of every sum over them
    precision: Precision = MISSING
    learning_rate: float = MISSING
    adam_eps: float = MISSING
    warmup_steps: int = MISSING
    weight_decay: float = MISSING
    clip_grad: float = MISSING  # largest norm of the gradient; 0: no limit
    seed: int = MISSING


@dataclass
class LossConfig:
    impl: LossImpl = MISSING
    logits_budget_mib: float | None = None  # passed to install(); None: its default


@dataclass
class ParallelConfig:
    tensor: int = MISSING
    pipeline: int = MISSING  # stages, each with as many layers
    data: int = MISSING
    sequence: bool = MISSING  # sequence parallelism on top of tensor parallelism
    overlap_grad_reduce: bool = MISSING  # sum gradients over data-parallel ranks while the backward runs
    distributed_optimizer: bool = MISSING  # shard the optimizer's state over data-parallel ranks
    device: Device = MISSING
    timeout_seconds: int = MISSING  # of a collective: a lost process is an error, not a hang

    @property
    def processes(self) -> int:
        """Number of ranks in the whole launch."""
        return self.tensor * self.pipeline * self.data


@dataclass
class MemoryConfig:
    # Samples of the one step that measures the memory of the loss, after training; None: not measured.
    micro_batch: int | None = None


@dataclass
class CompareConfig:
    tolerance: float = MISSING  # without a yardstick: largest difference of the two losses at any step
    yardstick: bool = MISSING  # train stock once more with its samples reversed, and measure against that difference
    factor: float = MISSING  # with a yardstick: how much larger than it ours may be
    report: str | None = None  # folder of the report; None: the output folder


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
    save_weights: bool = MISSING  # each rank's parameters after training, which the comparison then looks at too


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
    if config.compare.report is not None:
        config.compare.report = str(ROOT / os.path.expanduser(config.compare.report))
    _check(config)
    return config


def save_config(config: Config, path: Path) -> None:
    """Writes the resolved configuration, so that a run can be repeated from its results."""
    OmegaConf.save(OmegaConf.structured(config), path)


def describe(config: Config) -> dict[str, object]:
    """What a reader of the results wants to know of the settings, as plain values; no paths."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return {section: plain[section] for section in ("model", "train", "loss", "parallel")}


def check_for_cpu(config: Config) -> None:
    """Raises a ValueError for what Megatron-core's optimizer cannot do on a CPU."""
    if config.train.precision is not Precision.fp32:
        raise ValueError(f"train.precision={config.train.precision.name} needs GPUs; on a CPU it must be fp32")
    if config.train.clip_grad > 0:
        raise ValueError(f"train.clip_grad={config.train.clip_grad} needs GPUs; on a CPU it must be 0")


def _check(config: Config) -> None:
    model, train, parallel = config.model, config.train, config.parallel
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
    sizes = {
        "model.layers": model.layers, "model.hidden": model.hidden, "model.ffn_hidden": model.ffn_hidden,
        "model.heads": model.heads, "model.kv_heads": kv_heads, "model.rotary_base": model.rotary_base,
        "train.steps": train.steps, "train.sequence": train.sequence, "train.micro_batch": train.micro_batch,
        "train.micro_batches": train.micro_batches, "text.max_bytes": config.text.max_bytes,
        "parallel.tensor": parallel.tensor, "parallel.pipeline": parallel.pipeline, "parallel.data": parallel.data,
        "parallel.timeout_seconds": parallel.timeout_seconds,
    }  # fmt: skip
    optional = {"memory.micro_batch": config.memory.micro_batch, "model.head_dim": model.head_dim}
    sizes |= {name: size for name, size in optional.items() if size is not None}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    for name, number in {"train.clip_grad": train.clip_grad, "train.warmup_steps": train.warmup_steps}.items():
        if number < 0:
            raise ValueError(f"{name} must not be negative, got {number}")
    if config.text.vocab_size < 257:
        raise ValueError(f"text.vocab_size must hold 256 bytes and a special token, got {config.text.vocab_size}")
    if model.vocab_size is not None and model.vocab_size < config.text.vocab_size:
        raise ValueError(f"model.vocab_size={model.vocab_size} is less than text.vocab_size={config.text.vocab_size}")
    multiples = [
        ("model.heads", model.heads, "model.kv_heads", kv_heads),
        ("model.heads", model.heads, "parallel.tensor", parallel.tensor),
        ("model.kv_heads", kv_heads, "parallel.tensor", parallel.tensor),
        ("model.ffn_hidden", model.ffn_hidden, "parallel.tensor", parallel.tensor),
        ("model.layers", model.layers, "parallel.pipeline", parallel.pipeline),
    ]
    if model.head_dim is None:
        multiples.append(("model.hidden", model.hidden, "model.heads", model.heads))
    if parallel.sequence:
        multiples.append(("train.sequence", train.sequence, "parallel.tensor", parallel.tensor))
    for name, size, divisor_name, divisor in multiples:
        if size % divisor:
            raise ValueError(f"{name}={size} is not a multiple of {divisor_name}={divisor}")
    if parallel.device is Device.cpu:
        check_for_cpu(config)
