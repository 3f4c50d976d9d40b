"""The configuration: a typed schema, filled from a YAML file and then from the command line.

configs/demo.yaml names all settings.
"""

import argparse
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = ROOT / "configs" / "demo.yaml"

# The settings that are paths: overrides of them are taken literally.
PATHS = ("text.path", "text.cache", "output")
FEWEST_SAMPLES = 4  # of a step, with a yardstick: fewer have too few different orders

Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
InRepository = Annotated[Name, AfterValidator(lambda path: str(ROOT / os.path.expanduser(path)))]
InCurrentFolder = Annotated[Name, AfterValidator(lambda path: str(Path(os.path.expanduser(path)).absolute()))]


class Section(BaseModel):
    """A section of the configuration, without unknown keys."""

    model_config = ConfigDict(extra="forbid")


class TextConfig(Section):
    path: InCurrentFolder | None = None  # a file or a folder; None: the standard library's own sources
    torch_sources: bool = False  # without a path: the sources of the installed PyTorch too
    vocab_size: Annotated[int, Field(ge=257)]  # of the BPE: bytes, a special token, and its merges
    max_bytes: Count  # read no more text than this
    cache: InRepository = str(ROOT / "outputs/cache")  # folder of token streams


class ModelConfig(Section):
    layers: Count
    hidden: Count
    ffn_hidden: Count | None = None  # None: 3 * hidden
    heads: Count
    kv_heads: Count | None = None  # groups of heads that share keys and values; None: every head has its own
    head_dim: Count | None = None  # None: hidden / heads
    vocab_size: Count | None = None  # None: the text's vocabulary size; a number must be at least that size
    order_vocabulary: bool = False  # rows by frequency in the text, dealt to the tensor-parallel ranks in turn
    rotary_base: Count = 10000
    tie_embeddings: bool = False
    recompute: bool = False  # run every layer's forward again in the backward instead of saving its activations


class TrainConfig(Section):
    steps: Count
    sequence: Count  # tokens per sample
    micro_batch: Count  # samples that go through the model at once
    micro_batches: Count = 1  # per step and data-parallel rank
    sample_order: Index = 0  # of a step's samples: 0 as drawn; another number shuffles them, and so the order of sums
    precision: Literal["fp32", "bf16"]  # of the model; gradients and the optimizer's parameters are fp32
    learning_rate: Number  # the largest: it rises over the warm-up
    last_rate: Number = 1.0  # share of the learning rate that remains at the end, after a linear decay
    adam_eps: Positive = 1e-8
    warmup_steps: Index
    weight_decay: Number = 0.1
    clip_grad: Number = 1.0  # largest norm of the gradient; 0: no limit
    seed: Index = 1234
    held_out_samples: Count | None = None  # not trained on: their loss is computed after the training


class LossConfig(Section):
    impl: Literal["stock", "native", "parallel_lce"] = "parallel_lce"  # native: Megatron's own fused loss
    logits_budget_mib: Number | None = None  # passed to patch(); None: its default
    gradient_filter: Annotated[float, Field(gt=0, lt=1)] | None = None  # likewise; None: exact gradients


class ParallelConfig(Section):
    tensor: Count = 1
    data: Count = 1
    sequence: bool = False  # sequence parallelism on top of tensor parallelism
    overlap_grad_reduce: bool = False  # sum gradients over data-parallel ranks while the backward runs
    distributed_optimizer: bool = False  # shard the optimizer's state over data-parallel ranks
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs if this host has one for each of its processes
    timeout_seconds: Count = 300  # of a collective, so that a lost process is an error rather than a hang

    @property
    def processes(self) -> int:
        """Number of ranks in the whole launch."""
        return self.tensor * self.data


class MemoryConfig(Section):
    micro_batch: Count | None = None  # samples of the step after training that measures the loss; None: no such step


class CompareConfig(Section):
    tolerance: Number = 1e-4  # without a yardstick: largest allowed difference of the two losses at any step
    yardstick: bool = False  # from three more stock runs, with the samples of a step in other orders
    factor: Positive = 1.5  # with a yardstick: the allowed difference is this times the yardstick


class SnapshotConfig(Section):
    steps: list[Count] = []  # after which to write a snapshot, beside the last step
    tokens: Count  # held-out tokens of a snapshot: N


class Config(Section):
    text: TextConfig
    model: ModelConfig
    train: TrainConfig
    loss: LossConfig = LossConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    compare: CompareConfig = CompareConfig()
    snapshots: SnapshotConfig | None = None  # None: no snapshots
    output: InRepository  # folder of this run's results

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size or self.text.vocab_size

    def uses_cuda(self, here: int) -> bool:
        """Whether this host's `here` processes train on GPUs. Raises a Refusal if its devices cannot train this."""
        import torch

        gpus, device = torch.cuda.device_count(), self.parallel.device
        if device == "cuda" and gpus < here:
            raise Refusal(f"parallel.device=cuda needs a GPU for each of this host's {here} processes, found {gpus}")
        if device != "cpu" and gpus >= here:
            return True
        if (self.train.precision, self.train.clip_grad) != ("fp32", 0):  # needs GPUs in Megatron-core's optimizer
            raise Refusal("on a CPU train.precision must be fp32 and train.clip_grad 0")
        return False

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        model, train, parallel = self.model, self.train, self.parallel
        model.ffn_hidden = model.ffn_hidden or 3 * model.hidden
        model.kv_heads = model.kv_heads or model.heads
        if model.head_dim is None and model.hidden % model.heads:
            raise ValueError(f"model.hidden={model.hidden} is not a multiple of model.heads={model.heads}")
        model.head_dim = model.head_dim or model.hidden // model.heads
        if self.vocab_size < self.text.vocab_size:
            raise ValueError(f"model.vocab_size={model.vocab_size} is less than text.vocab_size={self.text.vocab_size}")
        if self.snapshots:  # so many held-out samples that their tokens suffice
            train.held_out_samples = -(-self.snapshots.tokens // train.sequence)
            if parallel.processes > 1:
                raise ValueError(f"snapshots need a single process, got {parallel.processes}")
        samples = train.micro_batch * train.micro_batches * parallel.data
        if self.compare.yardstick and samples < FEWEST_SAMPLES:
            raise ValueError(f"compare.yardstick=true needs at least {FEWEST_SAMPLES} samples a step, got {samples}")
        return self


def parse_command_line(description: str, argv: list[str]) -> Config:
    """Reads `[--config FILE] [key=value ...]`. Raises a Refusal for a configuration that is wrong."""
    parser = argparse.ArgumentParser(description=description, epilog="configs/demo.yaml explains all settings.")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="YAML file (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=20")
    args = parser.parse_intermixed_args(argv)
    return load_config(args.config, args.overrides)


def load_config(path: Path, overrides: list[str]) -> Config:
    """The configuration in the file, with the overrides applied, checked. `text.path` is relative to the current
    folder, the other paths to the repository. Raises a Refusal for every mistake."""
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
        if not isinstance(values, dict):
            raise Refusal(f"{path}: expected sections of keys and values")
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals:
                raise Refusal(f"expected key=value, got {override!r}")
            _set(values, key, value if key in PATHS and value != "null" else yaml.safe_load(value))
        return Config.model_validate(values)
    except ValidationError as error:
        raise Refusal(described(error)) from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise Refusal(f"{path} or an override cannot be read: {' '.join(str(error).split())}") from None


def _set(values: dict[str, Any], key: str, value: object) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values[section] = values.get(section) or {}  # a section may be null
        values = values[section]
    values[name] = value


def described(errors: ValidationError) -> str:
    """One line for all of pydantic's errors."""
    words = []
    for error in errors.errors():
        key, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
        if error["type"] == "extra_forbidden":
            message = f"no such setting: {key}; configs/demo.yaml has all"
        elif key:  # an error of the whole configuration names its keys
            message = f"{key}: {message}" if error["type"] == "missing" else f"{key}={error['input']!r}: {message}"
        words.append(message)
    return "; ".join(words)
