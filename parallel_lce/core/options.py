"""The options of a call, and what each may be.

Checks and plan of a call are cached by its :class:`Options` (:mod:`parallel_lce.call.prepare`), debug mode compares
them between ranks, and a compiled graph carries them (:mod:`parallel_lce.run.compile`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from parallel_lce.core.partials import Columns
from parallel_lce.core.plan import budget_of_environment

LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8)
# Ids are exchanged and stored in 32 bits.
LARGEST_VOCABULARY = 2**31 - 1

NO_LABEL = -100
"""The target of a token without a label, in statistics; in losses the default of ``ignore_index``."""


class Options(NamedTuple):
    """The arguments of a call beside its tensors and its process group, as in :func:`parallel_lce.linear_cross_entropy`
    and :func:`parallel_lce.token_statistics`."""

    # Name of the public function.
    function: str
    # None: the call computes statistics, no loss.
    reduction: str | None = None
    # None: of statistics, any target is allowed; one outside [0, V) has a logit of 0.
    ignore_index: int | None = None
    # False: any target is allowed. As in Megatron, the loss of a target outside [0, V) is lse - max.
    outside_is_nan: bool = True
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    # A tensor only as a public function gets it: a call has it in Tensors.logit_scale, and 1.0 here.
    logit_scale: float | Tensor = 1.0
    logit_softcap: float | None = None
    # As logit_scale.
    temperature: float | Tensor = 1.0
    gradient_filter: float | None = None
    sequence_parallel: bool = False
    # The dimension of the tokens that sequence parallelism splits. The call's own tensors are always split along 0.
    sequence_dim: int = 0
    reduce_hidden_grad: bool = True
    reduce_dtype: torch.dtype | None = None
    vocab_start: int | None = None
    vocab_size: int | None = None
    logits_budget: int | None = None
    mean_logit: bool = False
    entropy: bool = False
    argmax: bool = False
    sum_p_squared: bool = False
    top_k: int | None = None

    @classmethod
    def of(cls, function: str, given: Mapping[str, Any]) -> Options:
        """The options among a function's arguments by name, such as ``locals()``. Not for compiled functions: torch
        2.11 cannot trace ``locals()``."""
        return cls(function, **{name: given[name] for name in cls._fields if name in given})

    @property
    def kind(self) -> str:
        """What the call computes: "loss" or "statistics"."""
        return "statistics" if self.reduction is None else "loss"

    @property
    def columns(self) -> Columns:
        """The columns of partials that the call needs."""
        shifted = self.mean_logit or self.label_smoothing > 0
        return Columns(shifted, self.mean_logit, self.entropy, self.sum_p_squared, self.argmax)


class Tensors(NamedTuple):
    """The tensors among a call's arguments."""

    # [..., D]
    input: Any
    # [V/P, D]
    linear_weight: Any
    # [...]
    target: Any = None
    # [V/P]
    linear_bias: Any = None
    # [...] each
    token_weight: Any = None
    logit_scale: Tensor | None = None
    temperature: Tensor | None = None
    # [..., K], or [E] with offsets [N + 1]
    selected: Any = None
    selected_offsets: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """The fields that hold tensors, by name."""
        return {name: value for name, value in zip(self._fields, self) if isinstance(value, Tensor)}


class Wanted(NamedTuple):
    """What is made of the merged partials of some tokens: "loss" or "statistics"."""

    kind: str
    options: Options
    # [R] int64 ids in the whole vocabulary, or None
    target: Tensor | None
    # [R] in the statistics' dtype, or None: of a loss
    token_weight: Tensor | None = None
    # Whether statistics have the logarithm of the sum of exponentials, too: another function's may differ in a bit.
    log_sum: bool = False


def as_int64(ids: Any) -> Any:
    """Integers of any dtype as int64, so that no sum or comparison wraps; anything else as it is. uint64 ids that int64
    cannot hold become its largest number, which no vocabulary has."""
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS or ids.dtype is torch.int64:
        return ids
    wide = ids.long()
    return wide if ids.dtype is not torch.uint64 else wide.masked_fill(wide < 0, torch.iinfo(torch.int64).max)


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is Python's int or float within fp32's range, and not NaN. torch.compile can trace comparisons.
    NumPy's float64 is a subclass of float, whose comparisons give numpy.bool_, which Triton rejects."""
    return type(value) in (int, float) and -LARGEST <= cast(float, value) <= LARGEST


def check_flag(name: str, value: object) -> None:
    """Raise ``ValueError`` unless this is True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name} must be True or False, got {shortened(value)}")


def shortened(value: object) -> str:
    """``repr(value)``, cut to 60 characters if it is longer than 80."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _number(fits: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and fits(value)


def _number_or_none(fits: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or (is_number(value) and fits(value))


def _count_or_none(first: int, end: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: value is None or (type(value) is int and first <= value < end)


_FLAG = "True or False", lambda value: type(value) is bool
# Of each option: what a refusal says that it must be, and whether a value is allowed, with floats for integers.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "reduction": ("'none', 'mean' or 'sum'", lambda name: name in (None, "none", "mean", "sum")),
    "ignore_index": ("an integer of 64 bits or None", _count_or_none(-(2**63), 2**63)),
    "label_smoothing": ("a Python number in [0, 1]", _number(lambda eps: 0 <= eps <= 1)),
    "z_loss": ("a finite Python number >= 0", _number(lambda factor: factor >= 0)),
    "logit_scale": ("a finite Python number", is_number),
    "logit_softcap": ("None or a positive Python number", _number_or_none(lambda cap: cap >= _SMALLEST)),
    "temperature": ("a finite Python number > 0", _number(lambda t: t >= 1 / LARGEST)),
    "gradient_filter": ("None or a number between 0 and 1, such as 2**-13", _number_or_none(lambda eps: 0 < eps < 1)),
    "sequence_dim": ("0 or 1", lambda dim: type(dim) is int and dim in (0, 1)),
    # Together with the input's dtype: call.checks.
    "reduce_dtype": ("None, torch.float32 or the input's dtype", lambda dtype: dtype is None or dtype in FLOATS),
    "vocab_start": ("None or an id >= 0 and < 2^31", _count_or_none(0, LARGEST_VOCABULARY + 1)),
    "vocab_size": ("None or a number of entries >= 1 and < 2^31", _count_or_none(1, LARGEST_VOCABULARY + 1)),
    # 64 bits: a graph of torch.compile carries it.
    "logits_budget": ("None or a number of bytes >= 0 and < 2^63", _count_or_none(0, 2**63)),
    "top_k": ("None or a number of entries >= 1", _count_or_none(1)),
    **dict.fromkeys(("sequence_parallel", "reduce_hidden_grad"), _FLAG),
    **dict.fromkeys(("mean_logit", "entropy", "argmax", "sum_p_squared"), _FLAG),
}
FLOAT_OPTIONS = ("label_smoothing", "z_loss", "logit_scale", "logit_softcap", "temperature", "gradient_filter")
COUNT_OPTIONS = ("ignore_index", "vocab_start", "vocab_size", "logits_budget", "top_k")


def with_floats(options: Options) -> Options:
    """The same options, with floats for integers where an option is a float; but those too large for fp32, which the
    checks refuse."""
    given = {name: getattr(options, name) for name in FLOAT_OPTIONS}
    floats = {name: float(value) for name, value in given.items() if type(value) is int and is_number(value)}
    return options._replace(**floats)


def check_option(name: str, value: object) -> None:
    """Raise ``ValueError`` unless the option of this name may have this value."""
    expected, allowed = _RULES[name]
    if not allowed(value):
        raise ValueError(f"{name} must be {expected}, got {shortened(value)}")


def check_reduction(reduction: object) -> None:
    """Raise ``ValueError`` unless this is a loss's reduction. None is refused: in ``Options`` it means statistics."""
    if reduction is None:
        raise ValueError(f"reduction must be {_RULES['reduction'][0]}, got None")
    check_option("reduction", reduction)


def check_options(options: Options) -> None:
    """Raise ``ValueError`` for an option that is invalid, alone or in combination with the others."""
    for name in _RULES:
        check_option(name, getattr(options, name))
    if options.logits_budget is None:
        budget_of_environment()  # raises
    if options.sequence_parallel and not options.reduce_hidden_grad:
        raise ValueError(
            "reduce_hidden_grad=False cannot be combined with sequence_parallel=True: only the reduce-scatter makes a "
            "gradient of this rank's part of the tokens. If a mapping of your own gathers the tokens, pass its result, "
            "with sequence_parallel=False"
        )
    logit_scale, logit_softcap, temperature = options.logit_scale, options.logit_softcap, options.temperature
    cap = _SMALLEST if logit_softcap is None else logit_softcap / temperature
    if not (is_number(logit_scale / temperature) and _SMALLEST <= cap <= LARGEST):
        raise ValueError(f"{logit_scale=} and {logit_softcap=} divided by {temperature=} are beyond fp32")


def agreed(options: Options) -> dict[str, Any]:
    """The values that must be equal on all ranks, by the options' names."""
    start = "not given" if options.vocab_start is None else "given"
    return options._asdict() | {"vocab_start": start}
