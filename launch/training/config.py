"""The configuration: a typed schema, filled from a YAML file and then from the command line.

The schema has no default numbers. The YAML file gives all of them, so that one file and the overrides describe a run.
Unknown keys, wrong types, numbers out of range and missing values are errors.
"""

import argparse
import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator
from pydantic_core import ErrorDetails

from training.overrides import literal_strings, parse_overrides
from training.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = ROOT / "configs" / "demo.yaml"

# PyTorch and Megatron compute with integers and floats of 32 bits. The optimizer multiplies two such floats: 1e18 times
# 1e18 stays below fp32's maximum.
LARGEST_INT, LARGEST_FLOAT = 2**31 - 1, 1e18

R = TypeVar("R", bound="Run")

Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST_INT)]
# Strict: a boolean is not a number. An integer is one, such as a learning rate of 1.
Number = Annotated[float, Field(strict=True, ge=0, le=LARGEST_FLOAT, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=LARGEST_FLOAT, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, min_length=1)]


class Section(BaseModel):
    """A section of the configuration, without unknown keys."""

    model_config = ConfigDict(extra="forbid")


class LossImpl(Enum):
    """Which cross-entropy the model is built with."""

    stock = "stock"
    parallel_lce = "parallel_lce"


class Precision(Enum):
    """Of the model. Gradients and the optimizer's copy of the parameters are fp32 in either case."""

    fp32 = "fp32"
    bf16 = "bf16"


class Device(Enum):
    """Where to train. `auto` takes GPUs if this host has one for each of its processes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class TextConfig(Section):
    path: Name | None = None  # a file or a folder; None: the standard library's own sources
    torch_sources: StrictBool = False  # without a path: the sources of the installed PyTorch too
    # Of the BPE: 256 bytes, one special token and the merges that it learns.
    vocab_size: Annotated[int, Field(strict=True, ge=257, le=LARGEST_INT)]
    max_bytes: Annotated[int, Field(strict=True, ge=1, lt=2**63)]  # read no more text than this
    cache: Name  # folder of trained tokenizers and token streams


class ModelConfig(Section):
    layers: Count
    hidden: Count
    ffn_hidden: Count
    heads: Count
    kv_heads: Count | None = None  # groups of heads that share keys and values; None: every head has its own
    head_dim: Count | None = None  # None: hidden / heads
    vocab_size: Count | None = None  # None: that of the text; otherwise no less than that
    order_vocabulary: StrictBool = False  # rows by frequency in the text, dealt to the tensor-parallel ranks in turn
    rotary_base: Count
    tie_embeddings: StrictBool
    initialize_on_cpu: StrictBool  # equal parameters whatever the device and layout, and slow for large models
    recompute: StrictBool  # run every layer's forward again in the backward instead of saving its activations

    @model_validator(mode="after")
    def _fits(self) -> "ModelConfig":
        must_divide("model.heads", self.heads, "model.kv_heads", self.kv_heads or self.heads)
        if self.head_dim is None:
            must_divide("model.hidden", self.hidden, "model.heads", self.heads)
        dim = self.head_dim or self.hidden // self.heads
        if dim % 2:
            raise ValueError(f"rotary embeddings turn pairs of numbers: model.head_dim={dim} is not even")
        return self


class TrainConfig(Section):
    steps: Count
    sequence: Count  # tokens per sample
    micro_batch: Count  # samples that go through the model at once
    micro_batches: Count  # per step and data-parallel rank
    reverse_samples: StrictBool  # the same samples in reverse order: another order of every sum over them
    precision: Precision
    learning_rate: Number
    adam_eps: Positive
    warmup_steps: Annotated[int, Field(strict=True, ge=0, le=LARGEST_INT)]
    weight_decay: Number
    clip_grad: Number  # largest norm of the gradient; 0: no limit
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)]
    held_out_samples: Count | None = None  # not trained on: their loss is computed after the training


def _checked_filter(value: object) -> object:
    if value is None or (isinstance(value, float) and 0 < value < 1):
        return value
    expected = "null or a number between 0 and 1, such as 0.0001220703125, which is 2**-13"
    raise ValueError(f"loss.gradient_filter={value!r}: expected {expected}")


class LossConfig(Section):
    impl: LossImpl
    logits_budget_mib: Number | None = None  # passed to install(); None: its default
    # Passed to install(). None: gradients are exact.
    gradient_filter: Annotated[float | None, BeforeValidator(_checked_filter)] = None


class ParallelConfig(Section):
    tensor: Count
    pipeline: Count  # stages, each with as many layers
    data: Count
    sequence: StrictBool  # sequence parallelism on top of tensor parallelism
    overlap_grad_reduce: StrictBool  # sum gradients over data-parallel ranks while the backward runs
    distributed_optimizer: StrictBool  # shard the optimizer's state over data-parallel ranks
    device: Device
    # Of a collective, so that a lost process is an error rather than a hang.
    timeout_seconds: Annotated[int, Field(strict=True, ge=1, le=10**7)]

    @property
    def processes(self) -> int:
        """Number of ranks in the whole launch."""
        return self.tensor * self.pipeline * self.data


class MemoryConfig(Section):
    # Samples of the one step that measures the memory of the loss, after training; None: not measured.
    micro_batch: Count | None = None


class CompareConfig(Section):
    tolerance: Number  # without a yardstick: largest allowed difference of the two losses at any step
    yardstick: StrictBool  # train stock once more with its samples reversed; its difference is the yardstick
    factor: Positive  # with a yardstick: the allowed difference is this times the yardstick
    report: Name | None = None  # folder of the report; None: the output folder


class Run(Section):
    """What every training has."""

    text: TextConfig
    output: Name  # folder of this run's results


class Config(Run):
    text: TextConfig
    model: ModelConfig
    train: TrainConfig
    loss: LossConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    compare: CompareConfig
    output: Name  # folder of this run's results
    save_weights: StrictBool  # save each rank's parameters after training; the comparison then includes them

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        model, tensor = self.model, self.parallel.tensor
        if model.vocab_size is not None and model.vocab_size < self.text.vocab_size:
            raise ValueError(f"model.vocab_size={model.vocab_size} is less than text.vocab_size={self.text.vocab_size}")
        must_divide("model.heads", model.heads, "parallel.tensor", tensor)
        must_divide("model.kv_heads", model.kv_heads or model.heads, "parallel.tensor", tensor)
        must_divide("model.ffn_hidden", model.ffn_hidden, "parallel.tensor", tensor)
        must_divide("model.layers", model.layers, "parallel.pipeline", self.parallel.pipeline)
        must_divide(
            "train.held_out_samples", self.train.held_out_samples or 0, "train.micro_batch", self.train.micro_batch
        )
        if self.parallel.sequence:
            must_divide("train.sequence", self.train.sequence, "parallel.tensor", tensor)
        if self.parallel.device is Device.cpu:
            check_for_cpu(self)
        return self


def must_divide(name: str, size: int, divisor_name: str, divisor: int) -> None:
    if size % divisor:
        raise ValueError(f"{name}={size} is not a multiple of {divisor_name}={divisor}")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(message)


def parse_command_line(description: str | None, argv: list[str]) -> Config:
    """Reads `[--config FILE] [--text PATH] [key=value ...]`. Raises a Refusal for a configuration that is wrong."""
    return parse_run(description, argv, DEFAULT_CONFIG, load_config)


def parse_run(description: str | None, argv: list[str], default: Path, load: Callable[..., R]) -> R:
    """The same for any schema: `load(path, overrides, text)` reads the file, which is `default` if none is named."""
    parser = _Parser(description=description)
    parser.add_argument("--config", type=Path, default=default, help="YAML file (default: %(default)s)")
    parser.add_argument("--text", help="train on this file or folder; the same as text.path=PATH")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=20")
    args = parser.parse_intermixed_args(argv)
    return load(args.config, args.overrides, args.text)


def load_config(path: Path, overrides: list[str], text: str | None = None) -> Config:
    """The configuration of a training with Megatron-core, as `load_run` reads it."""
    config = load_run(Config, path, overrides, text)
    if config.compare.report is not None:
        config.compare.report = _absolute("compare.report", config.compare.report)
    return config


def load_run(schema: type[R], path: Path, overrides: list[str], text: str | None = None) -> R:
    """The configuration in the file, with the `key=value` overrides and then `text` applied, checked.

    `text` and `text.path` are relative to the current folder, the other paths to the repository. Raises a Refusal of
    one line for every mistake.
    """
    try:
        given = parse_overrides(overrides, schema)
        merged = OmegaConf.merge(_read(path), given)
        if missing := OmegaConf.missing_keys(given):  # merging ignores them
            raise Refusal(f"{', '.join(sorted(missing))}=???: a value is needed")
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        config = schema.model_validate(values)
        if text is not None:
            config.text = TextConfig.model_validate({**config.text.model_dump(), "path": text})
    except Refusal:
        raise
    except ValidationError as error:
        raise Refusal("; ".join(map(_described, error.errors()))) from None
    except OmegaConfBaseException as error:
        raise Refusal(f"{error.full_key or path}: {_first_line(error)}") from None
    except (yaml.YAMLError, ValueError, IndexError, RecursionError) as error:
        raise Refusal(f"{path} or an override is no YAML: {' '.join(str(error).split())}") from None
    if config.text.path is not None:
        config.text.path = _absolute("text.path", config.text.path, Path())
    config.text.cache = _absolute("text.cache", config.text.cache)
    config.output = _absolute("output", config.output)
    return config


def _absolute(name: str, path: str, base: Path = ROOT) -> str:
    try:
        return str(Path(base, os.path.expanduser(path)).absolute())
    except (OSError, ValueError) as error:  # a NUL in a user's name, or no current folder any more
        raise Refusal(f"{name}={path!r} is no path: {error}") from None


def _read(path: Path) -> DictConfig:
    try:
        if path.exists() and not path.is_file():  # every process reads it, and a pipe can be read only once
            raise Refusal(f"{path} is neither a regular file nor a link to one")
        loaded = OmegaConf.load(path)
    except OSError as error:  # OmegaConf also raises it, without strerror, for a file that holds a scalar
        raise Refusal(f"{path}: {error.strerror or 'expected sections of keys and values'}") from None
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8: {error}") from None
    if not isinstance(loaded, DictConfig):
        raise Refusal(f"{path}: expected sections of keys and values, got a list")
    return loaded


def _described(error: ErrorDetails) -> str:
    """One line for one of pydantic's errors."""
    raised = error.get("ctx", {}).get("error")
    if raised is not None:  # by one of the validators above, whose messages name the keys
        return str(raised)
    key, value = ".".join(map(str, error["loc"])), error["input"]
    given = "" if error["type"] == "missing" else f"={getattr(value, 'value', value)!r}"
    message = error["msg"]
    return f"{key}{given}: {message[0].lower()}{message[1:]}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def save_config(config: Run, path: Path) -> None:
    """Writes the resolved configuration, so that a run can be repeated from its results."""
    values = literal_strings(config.model_dump(mode="json"))
    # safe_dump writes ASCII alone. Unicode's line ends, which YAML would fold, are therefore escaped.
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def describe(config: Config) -> dict[str, object]:
    """The sections that the results repeat, as plain values. They hold no paths."""
    return config.model_dump(mode="json", include={"model", "train", "loss", "parallel"})


def check_for_cpu(config: Config) -> None:
    """Raises a Refusal for what Megatron-core's optimizer cannot do on a CPU."""
    if config.train.precision is not Precision.fp32:
        raise Refusal(f"train.precision={config.train.precision.name} needs GPUs; on a CPU it must be fp32")
    if config.train.clip_grad > 0:
        raise Refusal(f"train.clip_grad={config.train.clip_grad} needs GPUs; on a CPU it must be 0")
