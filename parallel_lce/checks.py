"""Refusals of bad input: a ``ValueError`` that names the given and the expected value, before any kernel or
collective."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from parallel_lce.arguments import LARGEST, Arguments, LossOptions
from parallel_lce.budget import budget_of_environment
from parallel_lce.collectives import Layout
from parallel_lce.dtensor import refuse_dtensor
from parallel_lce.partials import Columns, accumulation_dtype

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8)
_SMALLEST = torch.finfo(torch.float32).tiny
# Ids are exchanged and stored in 32 bits.
_LARGEST_VOCABULARY = 2**31 - 1


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Refusals within it have these ``names`` of arguments instead of :func:`parallel_lce.linear_cross_entropy`'s."""
    try:
        yield
    except ValueError as refusal:
        text = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], str(refusal))
        raise ValueError(text) from None


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is an int or float within fp32's range, and not NaN. Comparisons only: torch.compile can
    trace them."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_process_group(group: object) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        kind = type(group).__name__
        # A DeviceMesh; a mesh of several dimensions is asked for one of them.
        remedy = ': pass its get_group(), as mesh["tp"].get_group()' if hasattr(group, "get_group") else ""
        raise ValueError(f"process_group must be a torch.distributed.ProcessGroup or None, got {kind}{remedy}")


def check_arguments(a: Arguments, layout: Layout, needs_target: bool) -> torch.Size:
    """Raise ``ValueError`` for tensors or numbers that do not fit each other or the layout. Returns the tokens'
    shape."""
    if needs_target and not isinstance(a.target, Tensor):
        raise ValueError(f"target must be a tensor, got {type(a.target).__name__}")
    check_sequence_parallel(a.sequence_parallel, a.reduce_hidden_grad)
    _check_tensors(a)
    weight, rows = a.linear_weight, a.linear_weight.shape[0]
    bias, target = a.linear_bias, a.target
    if bias is not None and bias.shape != (rows,):
        raise ValueError(
            f"linear_bias must have shape [{rows}], one entry per row of linear_weight "
            f"{list(weight.shape)}, got {list(bias.shape)}"
        )
    if a.input.dim() < 2 and layout.sequence_parallel:
        raise ValueError(f"input must be [S/P, ..., D] under sequence parallelism, got {list(a.input.shape)}")
    tokens = torch.Size(token_shape(a.input, layout))
    if target is not None and target.shape != tokens:
        where = f"input {list(a.input.shape)}"
        if layout.sequence_parallel:
            where += f" of each of {layout.ranks} sequence-parallel ranks"
        raise ValueError(f"target must have shape {list(tokens)} for {where}, got {list(target.shape)}")
    if a.token_weight is not None and a.token_weight.shape != tokens:
        raise ValueError(f"token_weight must have target's shape {list(tokens)}, got {list(a.token_weight.shape)}")
    if a.token_scale is not None:
        _check_per_token("logit_scale", a.token_scale, tokens)
    if a.token_temperature is not None:
        _check_per_token("temperature", a.token_temperature, tokens)
    _check_selected(a, tokens)
    scale, temperature = (1.0 if isinstance(v, Tensor) else v for v in (a.logit_scale, a.temperature))
    check_logit_options(scale, a.logit_softcap, temperature)
    check_budget(a.logits_budget)
    check_gradient_filter(a.gradient_filter)
    sums = accumulation_dtype(a.input.dtype)
    if a.reduce_dtype not in (None, a.input.dtype, sums):
        raise ValueError(f"reduce_dtype must be None, {sums} or the input's {a.input.dtype}, got {a.reduce_dtype!r}")
    _check_shard(a, layout)
    return tokens


def token_shape(input: Tensor, layout: Layout) -> tuple[int, ...]:
    """Shape of the tokens in the TP layout: the leading shape of ``input``, all parts together."""
    leading = input.shape[:-1]
    return (leading[0] * layout.sp_size, *leading[1:]) if leading else ()


def check_kind(name: str, value: Tensor, process_group: dist.ProcessGroup | None) -> None:
    """Raise for a DTensor, a sparse tensor, a subclass that has no plain memory, and a forward-mode dual tensor, whose
    tangent would be ignored."""
    if hasattr(value, "to_local"):
        refuse_dtensor(name, value, process_group)
    if _dispatches(type(value)):
        raise ValueError(
            f"{name} is a {type(value).__name__}, a subclass of Tensor with a __torch_dispatch__ of its own, whose "
            "memory may hold anything: pass a plain tensor"
        )
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got one of layout {value.layout}")
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(f"{name} has a tangent: parallel_lce has no forward-mode derivatives")


def _dispatches(kind: type[Tensor]) -> bool:
    """Whether tensors of this class compute in their own way. Those of torch's tracing do, and are understood."""
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or torch.compiler.is_compiling():
        return False
    return kind is not AsyncCollectiveTensor and not kind.__module__.startswith("torch._subclasses.")


def _check_tensors(a: Arguments) -> None:
    for name in ("input", "linear_weight"):
        value = getattr(a, name)
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    tensors = a.tensors
    for name, value in tensors.items():
        check_kind(name, value, a.process_group)
    for name in ("target", "linear_bias", "token_weight", "selected", "selected_offsets"):
        value = getattr(a, name)
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor or None, got {type(value).__name__}")
    input, weight = a.input, a.linear_weight
    if input.dim() < 1:
        raise ValueError(f"input must be [..., D], got {list(input.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"linear_weight must be [V, D] with two dimensions, got {list(weight.shape)}")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has {input.shape[-1]} features and linear_weight {list(weight.shape)} has {weight.shape[1]}"
        )
    for name, value in tensors.items():
        if value.device != input.device:
            raise ValueError(f"{name} is on {value.device} and input is on {input.device}")
    if input.dtype not in _FLOATS:
        raise ValueError(f"input must be bfloat16, float16, float32 or float64, got {input.dtype}")
    for name in ("linear_weight", "linear_bias"):
        value = getattr(a, name)
        if value is not None and value.dtype != input.dtype:
            raise ValueError(f"{name} is {value.dtype} and input is {input.dtype}")
    if a.target is not None and a.target.dtype not in INTEGERS:
        raise ValueError(
            f"target must hold class indices of an integer dtype, got {a.target.dtype} "
            "(class probabilities are not supported)"
        )
    if a.token_weight is not None and a.token_weight.is_complex():
        raise ValueError(f"token_weight must be real, got {a.token_weight.dtype}")


def _check_per_token(name: str, value: Tensor, tokens: torch.Size) -> None:
    if value.shape != tokens:
        raise ValueError(
            f"{name} must be a finite Python number, or a tensor of target's shape {list(tokens)}, got one of "
            f"shape {list(value.shape)}"
        )
    if not value.is_floating_point():
        raise ValueError(f"{name} must be floating-point, got {value.dtype}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, and none flows to it: pass {name}.detach()")


def _check_selected(a: Arguments, tokens: torch.Size) -> None:
    for name, ids in (("selected", a.selected), ("offsets of selected", a.selected_offsets)):
        if ids is not None and ids.dtype not in INTEGERS:
            raise ValueError(f"{name} must be of an integer dtype, got {ids.dtype}")
    if (
        a.selected is not None
        and a.selected_offsets is None
        and (not a.selected.dim() or a.selected.shape[:-1] != tokens)
    ):
        raise ValueError(
            f"selected must be ids of shape [..., K] for tokens of shape {list(tokens)}, got {list(a.selected.shape)}; "
            "or a pair of ids [E] and offsets [N + 1]"
        )
    if a.selected_offsets is not None and a.selected is not None:
        expected = tokens.numel() + 1
        if a.selected.dim() != 1 or a.selected_offsets.shape != (expected,):
            raise ValueError(
                f"selected must be ids [E] and offsets [{expected}], one more than the tokens, got shapes "
                f"{list(a.selected.shape)} and {list(a.selected_offsets.shape)}"
            )
    if a.top_k is not None and not (_is_count(a.top_k) and a.top_k >= 1):
        raise ValueError(f"top_k must be None or a number of entries >= 1, got {shortened(a.top_k)}")


def check_logit_options(logit_scale: object, logit_softcap: object, temperature: object) -> None:
    if not is_number(logit_scale):
        raise ValueError(f"logit_scale must be a finite Python number, got {shortened(logit_scale)}")
    if logit_softcap is not None and not (is_number(logit_softcap) and logit_softcap >= _SMALLEST):
        raise ValueError(f"logit_softcap must be None or a positive Python number, got {shortened(logit_softcap)}")
    if not (is_number(temperature) and temperature >= 1 / LARGEST):
        raise ValueError(f"temperature must be a number > 0, or one per token, got {shortened(temperature)}")
    cap = _SMALLEST if logit_softcap is None else logit_softcap / temperature
    if not (is_number(logit_scale / temperature) and _SMALLEST <= cap <= LARGEST):
        raise ValueError(f"{logit_scale=} and {logit_softcap=} divided by {temperature=} are beyond fp32")


def check_budget(logits_budget: object) -> None:
    if logits_budget is None:
        budget_of_environment()  # raises
    if logits_budget is not None and not (_is_count(logits_budget) and logits_budget >= 0):
        raise ValueError(f"logits_budget must be None or a number of bytes >= 0, got {logits_budget!r}")


def check_gradient_filter(gradient_filter: object) -> None:
    if gradient_filter is not None and not (is_number(gradient_filter) and 0 < gradient_filter < 1):
        expected = "None or a number between 0 and 1, such as 2**-13"
        raise ValueError(f"gradient_filter must be {expected}, got {shortened(gradient_filter)}")


def check_filtered(a: Arguments, columns: Columns, options: LossOptions | None) -> None:
    """Raise if the gradient is filtered, and not the probabilities times one number per token."""
    if a.gradient_filter is None:
        return
    if options is not None:
        check_filtered_loss(a.gradient_filter, options.label_smoothing)
    asked = {
        "mean_logit": columns.shifted and options is None,
        "expected_logit": columns.weighted,
        "sum_p_squared": columns.squared,
        "selected": a.selected is not None,
    }
    for name, wanted in asked.items():
        if wanted:
            raise ValueError(_unfiltered(a.gradient_filter, name))


def check_filtered_loss(gradient_filter: object, label_smoothing: float) -> None:
    """The same of the options of a loss alone."""
    if gradient_filter is not None and label_smoothing != 0:
        raise ValueError(_unfiltered(gradient_filter, f"label_smoothing={label_smoothing}"))


def _unfiltered(gradient_filter: object, name: str) -> str:
    return (
        f"gradient_filter={gradient_filter} cannot be combined with {name}, whose gradient is large where "
        "probabilities are small"
    )


def check_sequence_parallel(sequence_parallel: object, reduce_hidden_grad: object) -> None:
    # The text "no" would be taken for yes.
    if not isinstance(sequence_parallel, bool):
        raise ValueError(f"sequence_parallel must be True or False, got {shortened(sequence_parallel)}")
    if not isinstance(reduce_hidden_grad, bool):
        raise ValueError(f"reduce_hidden_grad must be True or False, got {shortened(reduce_hidden_grad)}")
    if sequence_parallel and not reduce_hidden_grad:
        raise ValueError(
            "reduce_hidden_grad=False cannot be combined with sequence_parallel=True: a gradient of this rank's part "
            "of the tokens is made by the reduce-scatter alone. If a mapping of your own gathers the tokens, pass what "
            "it returns, with sequence_parallel=False"
        )


def check_reduce_dtype(reduce_dtype: object) -> None:
    if reduce_dtype is not None and reduce_dtype not in _FLOATS:
        raise ValueError(f"reduce_dtype must be None, torch.float32 or the input's dtype, got {reduce_dtype!r}")


def check_vocabulary(vocab_start: object, vocab_size: object) -> None:
    if vocab_start is not None and not (_is_count(vocab_start) and 0 <= vocab_start <= _LARGEST_VOCABULARY):
        raise ValueError(f"vocab_start must be None or an id >= 0 and < 2^31, got {shortened(vocab_start)}")
    if vocab_size is not None and not (_is_count(vocab_size) and 1 <= vocab_size <= _LARGEST_VOCABULARY):
        raise ValueError(f"vocab_size must be None or a number of entries >= 1 and < 2^31, got {shortened(vocab_size)}")


def shortened(value: object) -> str:
    """``repr(value)``, cut to 60 characters if it is longer than 80."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _check_shard(a: Arguments, layout: Layout) -> None:
    rows, start, size = a.linear_weight.shape[0], a.vocab_start, a.vocab_size
    check_vocabulary(start, size)
    if rows == 0 and (start is None or layout.ranks == 1):
        raise ValueError(f"linear_weight {list(a.linear_weight.shape)} has no rows: the vocabulary is empty")
    first = layout.rank * rows if start is None else start
    if first + rows > _LARGEST_VOCABULARY:
        raise ValueError(f"linear_weight's {rows} rows from id {first} on exceed the largest id, 2^31 - 2")
    known = known_vocab_size(rows, layout, start, size)
    if a.top_k is not None and known is not None and a.top_k > known:
        raise ValueError(f"top_k={a.top_k} exceeds the {known} entries of the vocabulary")
    if layout.ranks == 1 and start:
        raise ValueError(
            f"vocab_start={start} without a process group of several ranks: nobody holds the entries [0, {start})"
        )
    countable = start is None or layout.ranks == 1
    if size is not None and countable and size > rows * layout.ranks:
        raise ValueError(
            f"vocab_size={size} exceeds the {rows * layout.ranks} rows of linear_weight on "
            f"{layout.ranks} rank(s) of {rows}"
        )
    if layout.ranks > 1 and not a.input.is_cuda and dist.get_backend(a.process_group) == "nccl":
        raise ValueError(f"process_group communicates through nccl, but input is on {a.input.device}")


def known_vocab_size(rows: int, layout: Layout, vocab_start: int | None, vocab_size: int | None) -> int | None:
    """V, if the host knows it; None where only the other ranks' shards tell."""
    if vocab_size is not None:
        return vocab_size
    return rows * layout.ranks if vocab_start is None or layout.ranks == 1 else None


def check_loss_options(options: LossOptions) -> None:
    """Raise ``ValueError`` for options of a loss that have no meaning."""
    reduction, ignore_index = options.reduction, options.ignore_index
    label_smoothing, z_loss = options.label_smoothing, options.z_loss
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    if ignore_index is not None and not (_is_count(ignore_index) and -(2**63) <= ignore_index < 2**63):
        raise ValueError(f"ignore_index must be an integer of 64 bits or None, got {shortened(ignore_index)}")
    if not (is_number(label_smoothing) and 0 <= label_smoothing <= 1):
        raise ValueError(f"label_smoothing must be a Python number in [0, 1], got {shortened(label_smoothing)}")
    if not is_number(z_loss):
        raise ValueError(f"z_loss must be a finite Python number, got {shortened(z_loss)}")
