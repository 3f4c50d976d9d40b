"""A call as the arguments of an operator (:mod:`parallel_lce.ops`): a flat list of tensors, numbers and texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]

from parallel_lce.backends import named, valueless
from parallel_lce.call import Call, Inputs, token_count
from parallel_lce.collectives import Layout, Shard
from parallel_lce.losses import WeightedLoss
from parallel_lce.partials import Columns
from parallel_lce.plan import Plan
from parallel_lce.selection import Selected

CALL = (
    "str backend, str group, bool sequence_parallel, SymInt start, SymInt? vocab_size, "
    "bool[] columns, int top_k, bool capped, bool filtered, SymInt[] plan, ScalarType? reduce_dtype, "
    "bool reduce_hidden_grad"
)
OPERANDS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? target, Tensor? token_scale, Tensor? token_cap, "
    "Tensor? selected, Tensor? offsets, Tensor factors"
)
LOSS = "Tensor? token_weight, SymInt? ignore_index, bool outside_is_nan"


class Operands(NamedTuple):
    """The arguments ``OPERANDS``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    token_scale: Tensor | None
    token_cap: Tensor | None
    selected: Tensor | None
    offsets: Tensor | None
    # [6] fp64, on the CPU: logit_scale, logit_softcap, temperature, gradient_filter, label_smoothing, z_loss
    factors: Tensor

    @property
    def inputs(self) -> Inputs:
        return self.hidden, self.weight, self.bias


class OfLoss(NamedTuple):
    """The arguments ``LOSS``."""

    token_weight: Tensor | None = None
    ignore_index: int | None = None
    outside_is_nan: bool = True


def operands_of(call: Call, inputs: Inputs, loss: WeightedLoss | None = None) -> Operands:
    """A Python number passed to an operator is compiled in as a constant; in a tensor it may change."""
    softcap = call.logit_softcap if call.token_cap is None else None
    # As they are given: a graph of torch 2.11 knows no quotient of two of them.
    numbers = [call.logit_scale, softcap or 0.0, call.temperature, call.gradient_filter or 0.0, 0.0, 0.0]
    if loss is not None:
        numbers[4:] = loss.label_smoothing, loss.z_loss
    zero = inputs[1].new_zeros((), dtype=torch.float64, device="cpu")
    factors = torch.stack([zero + number for number in numbers])
    return Operands(*inputs, *call.per_token, factors)


class Numbers(NamedTuple):
    """The arguments ``CALL``, in their order."""

    backend: str
    group: str
    sequence_parallel: bool
    start: int
    vocab_size: int | None
    # One per field of Columns.
    columns: list[bool]
    top_k: int
    capped: bool
    filtered: bool
    # One per field of Plan.
    plan: list[int]
    reduce_dtype: torch.dtype | None
    reduce_hidden_grad: bool


def numbers_of(call: Call) -> Numbers:
    layout, columns, plan = call.layout, call.columns, call.plan
    if call.main_grad is not None:
        raise RuntimeError("a gradient that is added to main_grad cannot be compiled")
    return Numbers(
        call.backend.NAME,
        "" if layout.group is None else layout.group.group_name,
        layout.sequence_parallel,
        call.shard.start,
        call.shard.vocab_size,
        [getattr(columns, field) for field in _COLUMN_FIELDS],
        call.top_k,
        call.logit_softcap is not None and call.token_cap is None,
        call.gradient_filter is not None,
        [int(getattr(plan, field)) for field in _PLAN_FIELDS],
        call.reduce_dtype,
        call.reduce_hidden_grad,
    )


_COLUMN_FIELDS = tuple(f.name for f in dataclasses.fields(Columns))
_PLAN_FIELDS = tuple(f.name for f in dataclasses.fields(Plan))


def split(arguments: Sequence[Any], *parts: Any) -> list[Any]:
    """An operator's arguments: ``parts``, which are NamedTuples, then others, and at the end ``Numbers``."""
    found, arguments = [], list(arguments)
    for part in parts:
        count = len(part._fields)
        found.append(part(*arguments[:count]))
        arguments = arguments[count:]
    end = len(arguments) - len(Numbers._fields)
    return [*found, *arguments[:end], Numbers(*arguments[end:])]


def call_of(operands: Operands, numbers: Numbers) -> Call:
    # A group's name is a str, of which torch 2.13 makes a type of its own.
    group = numbers.group
    process_group = _resolve_process_group(group) if group else None  # pyright: ignore[reportArgumentType]
    layout = Layout.of(process_group, numbers.sequence_parallel)
    shard = Shard(numbers.start, operands.weight.shape[0], numbers.vocab_size)
    planned: dict[str, Any] = dict(zip(_PLAN_FIELDS, numbers.plan))
    planned["accumulate"] = bool(planned["accumulate"])
    # While a graph is traced the factors have no values. The results' shapes do not depend on them.
    factors, ids = operands.factors, operands.selected
    selected = None if ids is None else Selected(ids, operands.offsets, token_count(operands.hidden, layout))
    scale, softcap, temperature, gradient_filter = [1.0] * 4 if valueless(factors) else factors.tolist()[:4]
    return Call(
        named(numbers.backend),
        layout,
        shard,
        Columns(*numbers.columns),
        Plan(**planned),
        operands.target,
        operands.token_scale,
        selected,
        numbers.top_k,
        scale,
        softcap if numbers.capped else operands.token_cap,
        temperature,
        reduce_dtype=numbers.reduce_dtype,
        reduce_hidden_grad=numbers.reduce_hidden_grad,
        gradient_filter=gradient_filter if numbers.filtered else None,
    )


def loss_of(operands: Operands, of_loss: OfLoss) -> WeightedLoss:
    label_smoothing, z_loss = operands.factors.tolist()[4:]
    assert operands.target is not None
    weight, ignore_index, outside_is_nan = of_loss
    return WeightedLoss(operands.target, weight, ignore_index, label_smoothing, z_loss, outside_is_nan)
