"""What the public functions are given: arguments and options, with other libraries' numbers as Python's."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
_TENSORS = (
    "input",
    "linear_weight",
    "target",
    "linear_bias",
    "token_weight",
    "logit_scale",
    "temperature",
    "selected",
    "selected_offsets",
)
_COUNTS, _REALS = (
    ("vocab_start", "vocab_size", "logits_budget", "top_k"),
    ("logit_scale", "logit_softcap", "temperature", "gradient_filter"),
)


@dataclass(frozen=True)
class Arguments:
    """Arguments that the public functions share; :func:`parallel_lce.linear_cross_entropy` says what each means."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor | None
    linear_bias: Tensor | None
    logit_scale: float | Tensor
    logit_softcap: float | None
    process_group: dist.ProcessGroup | None
    sequence_parallel: bool
    vocab_start: int | None
    vocab_size: int | None
    logits_budget: int | None
    reduce_dtype: torch.dtype | None = None
    token_weight: Tensor | None = None
    selected: Tensor | None = None
    selected_offsets: Tensor | None = None
    top_k: int | None = None
    gradient_filter: float | None = None
    temperature: float | Tensor = 1.0
    reduce_hidden_grad: bool = True

    @property
    def token_scale(self) -> Tensor | None:
        """The scale of each token's logits, if it is not one number."""
        return self.logit_scale if isinstance(self.logit_scale, Tensor) else None

    @property
    def token_temperature(self) -> Tensor | None:
        """The temperature of each token, if it is not one number."""
        return self.temperature if isinstance(self.temperature, Tensor) else None

    @property
    def tensors_or_none(self) -> tuple[Tensor | None, ...]:
        """All that are tensors, or None, in one order."""
        operands = self.input, self.linear_weight, self.linear_bias
        selected = self.selected, self.selected_offsets
        return *operands, self.target, self.token_weight, self.token_scale, self.token_temperature, *selected

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in _TENSORS}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def with_python_numbers(self) -> Arguments:
        """The same with other libraries' numbers as Python's."""
        changed = {}
        for names, usual, convert in ((_COUNTS, int, as_number), (_REALS, float, as_float)):
            for name in names:
                value = getattr(self, name)
                if value is not None and type(value) is not usual:
                    changed[name] = convert(value)
        for name in ("sequence_parallel", "reduce_hidden_grad"):
            if type(getattr(self, name)) is not bool:
                changed[name] = as_bool(getattr(self, name))
        return replace(self, **changed) if changed else self


@dataclass(frozen=True)
class LossOptions:
    """Options of a loss; :func:`parallel_lce.linear_cross_entropy` says what each means."""

    reduction: str = "none"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    # False: as in Megatron, the loss of a target outside [0, V) is lse - max, and any target is allowed.
    outside_is_nan: bool = True

    @classmethod
    def given(cls, reduction: str, ignore_index: Any, label_smoothing: Any, z_loss: Any) -> LossOptions:
        """Options with other libraries' numbers as Python's."""
        if not (type(ignore_index) is int and type(label_smoothing) is type(z_loss) is float):
            ignore_index = as_number(ignore_index)
            label_smoothing, z_loss = as_float(label_smoothing), as_float(z_loss)
        return cls(reduction, ignore_index, label_smoothing, z_loss)


def refuse_unknown(function: Callable, given: dict[str, object]) -> None:
    """Raise for keyword arguments that ``function`` does not take, and name one of its own that may be meant: of the
    same last word, or else of nearly the same letters."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name in given:
        alike = [other for other in known if other.split("_")[-1] == name.split("_")[-1]]
        meant = " or ".join(alike or difflib.get_close_matches(name, known, 1))
        hint = f": did you mean {meant}?" if meant else ""
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")


def as_number(value: Any) -> Any:
    """NumPy's scalars and other numbers as Python's; anything else as it is.

    NumPy's float64 is a subclass of float. Its comparisons give numpy.bool_, which Triton rejects.
    """
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else value
    except OverflowError:  # of a fraction
        return value


def as_float(value: Any) -> Any:
    """As :func:`as_number`, with integers as floats. An integer too large for fp32 is returned unchanged; the checks
    refuse it."""
    value = as_number(value)
    return float(value) if type(value) is int and -LARGEST <= value <= LARGEST else value


def as_bool(value: Any) -> Any:
    """NumPy's bool, and the numbers 0 and 1, as Python's bool; anything else as it is."""
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    value = as_number(value)
    return bool(value) if type(value) is int and value in (0, 1) else value
