"""Refusals of bad input: a ``ValueError`` naming both sizes, before any kernel or collective."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from parallel_lce.dtensor import refuse_dtensor
from parallel_lce.parallel import Layout
from parallel_lce.weight_grad import accumulation_dtype

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TENSORS = ("input", "linear_weight", "target", "linear_bias", "token_weight")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8)
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
# Ids are exchanged and stored in 32 bits.
_LARGEST_VOCABULARY = 2**31 - 1


@dataclass(frozen=True)
class Arguments:
    """What the public functions share; the meaning of each is theirs."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor | None
    linear_bias: Tensor | None
    logit_scale: float
    logit_softcap: float | None
    process_group: dist.ProcessGroup | None
    sequence_parallel: bool
    vocab_start: int | None
    vocab_size: int | None
    logits_budget: int | None
    token_weight: Tensor | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in _TENSORS}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _require(condition: bool, message: Callable[[], str]) -> None:
    if not condition:
        raise ValueError(message())


def plain(value: object) -> object:
    """NumPy's scalars and other numbers as Python's; anything else as it is.

    NumPy's float64 is a ``float`` whose comparisons are no ``bool``, which Triton does not take for one.
    """
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else value
    except OverflowError:  # of a fraction
        return value


def real(value: object) -> object:
    """As :func:`plain`, and an integer as the float that it is; one beyond fp32 as it is, to be refused."""
    value = plain(value)
    return float(value) if type(value) is int and -_LARGEST <= value <= _LARGEST else value


def is_number(value: object) -> bool:
    """Whether fp32 can hold it: false for NaN and infinity. Comparisons alone, which torch.compile can trace."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -_LARGEST <= value <= _LARGEST


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_process_group(group: object) -> None:
    _require(
        group is None or isinstance(group, dist.ProcessGroup),
        lambda: f"process_group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}",
    )


def check_arguments(a: Arguments, layout: Layout) -> None:
    """Raise ``ValueError`` for tensors or numbers that do not fit each other or the layout."""
    _check_tensors(a)
    weight, rows = a.linear_weight, a.linear_weight.shape[0]
    bias, target = a.linear_bias, a.target
    if bias is not None:
        _require(
            bias.shape == (rows,),
            lambda: (
                f"linear_bias must have shape [{rows}], one entry per row of linear_weight "
                f"{list(weight.shape)}, got {list(bias.shape)}"
            ),
        )
    _require(
        a.input.dim() >= 2 or layout.parts == 1,
        lambda: f"input must be [S/P, ..., D] under sequence parallelism, got {list(a.input.shape)}",
    )
    tokens = torch.Size(token_shape(a.input, layout))
    if target is not None:
        where = (
            f"input {list(a.input.shape)} of each of {layout.ranks} sequence-parallel ranks"
            if layout.sequence_parallel
            else f"input {list(a.input.shape)}"
        )
        _require(
            target.shape == tokens,
            lambda: f"target must have shape {list(tokens)} for {where}, got {list(target.shape)}",
        )
    if a.token_weight is not None:
        _require(
            a.token_weight.shape == tokens,
            lambda: f"token_weight must have target's shape {list(tokens)}, got {list(a.token_weight.shape)}",
        )
    _check_numbers(a)
    _check_shard(a, layout)


def token_shape(input: Tensor, layout: Layout) -> tuple[int, ...]:
    """Shape of the tokens in the TP layout: the leading shape of ``input``, all parts together."""
    leading = input.shape[:-1]
    return (leading[0] * layout.parts, *leading[1:]) if layout.parts > 1 else tuple(leading)


def check_kind(name: str, value: Tensor, process_group: dist.ProcessGroup | None) -> None:
    """Raise for a DTensor, a sparse tensor, and one with a tangent, which kernels would not see."""
    refuse_dtensor(name, value, process_group)
    _require(value.layout == torch.strided, lambda: f"{name} must be a dense tensor, got one of layout {value.layout}")
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(f"{name} has a tangent: parallel_lce has no forward-mode derivatives")


def _check_tensors(a: Arguments) -> None:
    for name in ("input", "linear_weight"):
        value = getattr(a, name)
        _require(isinstance(value, Tensor), lambda: f"{name} must be a tensor, got {type(value).__name__}")
    tensors = a.tensors
    for name, value in tensors.items():
        check_kind(name, value, a.process_group)
    for name in ("target", "linear_bias", "token_weight"):
        value = getattr(a, name)
        _require(
            value is None or isinstance(value, Tensor),
            lambda: f"{name} must be a tensor or None, got {type(value).__name__}",
        )
    input, weight = a.input, a.linear_weight
    _require(input.dim() >= 1, lambda: f"input must be [..., D], got {list(input.shape)}")
    _require(weight.dim() == 2, lambda: f"linear_weight must be [V, D] with two dimensions, got {list(weight.shape)}")
    _require(
        input.shape[-1] == weight.shape[1],
        lambda: f"input has {input.shape[-1]} features and linear_weight {list(weight.shape)} has {weight.shape[1]}",
    )
    for name, value in tensors.items():
        _require(value.device == input.device, lambda: f"{name} is on {value.device} and input is on {input.device}")
    _require(input.dtype in _FLOATS, lambda: f"input must be bfloat16, float16, float32 or float64, got {input.dtype}")
    for name in ("linear_weight", "linear_bias"):
        value = getattr(a, name)
        _require(
            value is None or value.dtype == input.dtype,
            lambda: f"{name} is {None if value is None else value.dtype} and input is {input.dtype}",
        )
    if a.target is not None:
        _require(
            a.target.dtype in _INTEGERS,
            lambda: (
                f"target must hold class indices of an integer dtype, got {a.target.dtype} "
                "(class probabilities are not supported)"
            ),
        )
    if a.token_weight is not None:
        _require(not a.token_weight.is_complex(), lambda: f"token_weight must be real, got {a.token_weight.dtype}")


def _check_numbers(a: Arguments) -> None:
    check_logit_options(a.logit_scale, a.logit_softcap)
    check_budget(a.logits_budget)
    sums = accumulation_dtype(a.input.dtype)
    _require(
        a.reduce_dtype in (None, a.input.dtype, sums),
        lambda: f"reduce_dtype must be None, {sums} or the input's {a.input.dtype}, got {a.reduce_dtype!r}",
    )


def check_logit_options(logit_scale: object, logit_softcap: object) -> None:
    _require(
        is_number(logit_scale), lambda: f"logit_scale must be a finite Python number, got {shortened(logit_scale)}"
    )
    _require(
        logit_softcap is None or (is_number(logit_softcap) and logit_softcap >= _SMALLEST),
        lambda: f"logit_softcap must be None or a positive Python number, got {shortened(logit_softcap)}",
    )


def check_budget(logits_budget: object) -> None:
    _require(
        logits_budget is None or (_is_count(logits_budget) and logits_budget >= 0),
        lambda: f"logits_budget must be None or a number of bytes >= 0, got {logits_budget!r}",
    )


def check_reduce_dtype(reduce_dtype: object) -> None:
    _require(
        reduce_dtype is None or reduce_dtype in _FLOATS,
        lambda: f"reduce_dtype must be None, torch.float32 or the input's dtype, got {reduce_dtype!r}",
    )


def check_vocabulary(vocab_start: object, vocab_size: object) -> None:
    _require(
        vocab_start is None or (_is_count(vocab_start) and 0 <= vocab_start <= _LARGEST_VOCABULARY),
        lambda: f"vocab_start must be None or an id >= 0 and < 2^31, got {shortened(vocab_start)}",
    )
    _require(
        vocab_size is None or (_is_count(vocab_size) and 1 <= vocab_size <= _LARGEST_VOCABULARY),
        lambda: f"vocab_size must be None or a number of entries >= 1 and < 2^31, got {shortened(vocab_size)}",
    )


def shortened(value: object) -> str:
    """The value's ``repr``, of which a number of 400 digits keeps a few."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _check_shard(a: Arguments, layout: Layout) -> None:
    rows, start, size = a.linear_weight.shape[0], a.vocab_start, a.vocab_size
    check_vocabulary(start, size)
    _require(
        rows > 0 or (start is not None and layout.ranks > 1),
        lambda: f"linear_weight {list(a.linear_weight.shape)} has no rows: the vocabulary is empty",
    )
    first = layout.rank * rows if start is None else start
    _require(
        first + rows <= _LARGEST_VOCABULARY,
        lambda: f"linear_weight's {rows} rows from id {first} on exceed the largest id, 2^31 - 2",
    )
    if layout.ranks == 1:
        _require(
            not start,
            lambda: (
                f"vocab_start={start} without a process group of several ranks: nobody holds the entries [0, {start})"
            ),
        )
    if size is not None and (start is None or layout.ranks == 1):
        _require(
            size <= rows * layout.ranks,
            lambda: (
                f"vocab_size={size} exceeds the {rows * layout.ranks} rows of linear_weight on "
                f"{layout.ranks} rank(s) of {rows}"
            ),
        )
    if layout.ranks > 1:
        backend = dist.get_backend(a.process_group)
        _require(
            backend != "nccl" or a.input.is_cuda,
            lambda: f"process_group communicates through {backend}, but input is on {a.input.device}",
        )


def check_loss(
    target: object, reduction: object, ignore_index: object, label_smoothing: object, z_loss: object
) -> None:
    """Raise ``ValueError`` for options of the loss that have no meaning."""
    _require(isinstance(target, Tensor), lambda: f"target must be a tensor, got {type(target).__name__}")
    check_loss_options(reduction, ignore_index, label_smoothing, z_loss)


def check_loss_options(reduction: object, ignore_index: object, label_smoothing: object, z_loss: object) -> None:
    _require(
        reduction in ("none", "mean", "sum"), lambda: f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}"
    )
    _require(
        ignore_index is None or (_is_count(ignore_index) and -(2**63) <= ignore_index < 2**63),
        lambda: f"ignore_index must be an integer of 64 bits or None, got {shortened(ignore_index)}",
    )
    _require(
        is_number(label_smoothing) and 0 <= label_smoothing <= 1,
        lambda: f"label_smoothing must be a Python number in [0, 1], got {shortened(label_smoothing)}",
    )
    _require(is_number(z_loss), lambda: f"z_loss must be a finite Python number, got {shortened(z_loss)}")
