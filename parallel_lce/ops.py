"""Forward and backward of a call as operators.

torch.compile takes an operator as a whole; meta and fake tensors get the shapes of its results. The operators run the
functions that eager mode calls directly (:mod:`parallel_lce.schedule`), with their collectives. An operator gets a
:class:`Call` as numbers, and a process group by its name.

Saved exponentials travel outside the graph. The forward operator returns a *handle*, a tensor of one byte; what is
saved is an attribute of its storage, and lives and dies with it. The backward removes it, and recomputes if it is
gone: in a second backward, or where saved-tensor hooks copied the handle. The exponentials cannot be outputs of the
operator. The backward overwrites them, and would have to declare that: Inductor then copies them, up to
``logits_budget`` bytes. Undeclared, a second backward would read overwritten values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]

from parallel_lce import schedule
from parallel_lce.backends import named, valueless
from parallel_lce.backends.interface import Coefficients
from parallel_lce.collectives import Layout, Shard
from parallel_lce.losses import WeightedLoss
from parallel_lce.partials import Columns, accumulation_dtype
from parallel_lce.plan import Plan
from parallel_lce.schedule import Call, Inputs, Needs, token_count
from parallel_lce.statistics import NAMES, StatisticsHead

_CALL = (
    "str backend, str group, bool sequence_parallel, SymInt start, SymInt? vocab_size, "
    "bool[] columns, bool capped, SymInt[] plan, ScalarType? reduce_dtype"
)
_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? target, Tensor? token_scale, Tensor factors"
_LOSS = "Tensor? token_weight, SymInt? ignore_index, bool outside_is_nan"
# Attribute of a handle's storage that holds what is saved.
_SAVED = "_parallel_lce_saved"
# How many outputs of the forward operator are a head's. Its residuals, the partial and the handle follow.
_NUM_OUTPUTS, _NUM_RESIDUALS = len(NAMES), WeightedLoss.num_residuals


def uses_operators(weight: Tensor) -> bool:
    """Whether a call goes through the operators: in a graph, and for tensors without values."""
    return torch.compiler.is_compiling() or valueless(weight)


# --- a call as an operator's arguments -------------------------------------------------------------


class _Operands(NamedTuple):
    """The arguments ``_OPERANDS``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    token_scale: Tensor | None
    # [4] fp64, on the CPU: logit_scale, logit_softcap, label_smoothing, z_loss
    factors: Tensor

    @property
    def inputs(self) -> Inputs:
        return self.hidden, self.weight, self.bias


class _OfLoss(NamedTuple):
    """The arguments ``_LOSS``."""

    token_weight: Tensor | None = None
    ignore_index: int | None = None
    outside_is_nan: bool = True


def _operands(call: Call, inputs: Inputs, loss: WeightedLoss | None = None) -> _Operands:
    """A Python number passed to an operator is compiled in as a constant; in a tensor it may change."""
    numbers = [call.scale, 0.0 if call.softcap is None else call.softcap, 0.0, 0.0]
    if loss is not None:
        numbers[2:] = loss.label_smoothing, loss.z_loss
    zero = inputs[1].new_zeros((), dtype=torch.float64, device="cpu")
    factors = torch.stack([zero + number for number in numbers])
    return _Operands(*inputs, call.target, call.token_scale, factors)


class _Numbers(NamedTuple):
    """The arguments ``_CALL``, in their order."""

    backend: str
    group: str
    sequence_parallel: bool
    start: int
    vocab_size: int | None
    # One per field of Columns.
    columns: list[bool]
    capped: bool
    # One per field of Plan.
    plan: list[int]
    reduce_dtype: torch.dtype | None


def _numbers(call: Call) -> _Numbers:
    layout, columns, plan = call.layout, call.columns, call.plan
    if call.main_grad is not None:
        raise RuntimeError("a gradient that is added to main_grad cannot be compiled")
    return _Numbers(
        call.backend.NAME,
        "" if layout.group is None else layout.group.group_name,
        layout.sequence_parallel,
        call.shard.start,
        call.shard.vocab_size,
        [getattr(columns, field) for field in _COLUMN_FIELDS],
        call.softcap is not None,
        [int(getattr(plan, field)) for field in _PLAN_FIELDS],
        call.reduce_dtype,
    )


_COLUMN_FIELDS = tuple(f.name for f in dataclasses.fields(Columns))
_PLAN_FIELDS = tuple(f.name for f in dataclasses.fields(Plan))


def _split(arguments: Sequence[Any], *parts: Any) -> list[Any]:
    """An operator's arguments: ``parts``, which are NamedTuples, then others, and at the end ``_Numbers``."""
    found, arguments = [], list(arguments)
    for part in parts:
        count = len(part._fields)
        found.append(part(*arguments[:count]))
        arguments = arguments[count:]
    end = len(arguments) - len(_Numbers._fields)
    return [*found, *arguments[:end], _Numbers(*arguments[end:])]


def _call(operands: _Operands, numbers: _Numbers) -> Call:
    # A group's name is a str, of which torch 2.13 makes a type of its own.
    group = numbers.group
    process_group = _resolve_process_group(group) if group else None  # pyright: ignore[reportArgumentType]
    layout = Layout.of(process_group, numbers.sequence_parallel)
    shard = Shard(numbers.start, operands.weight.shape[0], numbers.vocab_size)
    planned: dict[str, Any] = dict(zip(_PLAN_FIELDS, numbers.plan))
    planned["accumulate"] = bool(planned["accumulate"])
    # While a graph is traced the factors have no values. The results' shapes do not depend on them.
    factors = operands.factors
    scale, softcap = (1.0, 1.0) if valueless(factors) else factors.tolist()[:2]
    return Call(
        named(numbers.backend),
        layout,
        shard,
        Columns(*numbers.columns),
        Plan(**planned),
        operands.target,
        operands.token_scale,
        scale,
        softcap if numbers.capped else None,
        reduce_dtype=numbers.reduce_dtype,
    )


def _loss(operands: _Operands, of_loss: _OfLoss) -> WeightedLoss:
    label_smoothing, z_loss = operands.factors.tolist()[2:]
    assert operands.target is not None
    weight, ignore_index, outside_is_nan = of_loss
    return WeightedLoss(operands.target, weight, ignore_index, label_smoothing, z_loss, outside_is_nan)


# --- second derivatives ----------------------------------------------------------------------------

FIRST_ORDER = "gradients of parallel_lce cannot be differentiated twice"


def _refuse_second_order(ctx, *_):
    raise RuntimeError(FIRST_ORDER)


def _save_nothing(ctx, inputs, output) -> None:
    pass


@torch.library.custom_op(
    "parallel_lce::first_order",
    mutates_args=(),
    schema="(Tensor upstream, Tensor hidden, Tensor weight, Tensor? bias) -> Tensor",
)
def _first_order(upstream, hidden, weight, bias):
    """A copy of ``upstream`` whose derivative is refused, as a function of all arguments."""
    return upstream.clone()


@_first_order.register_fake
def _(upstream, hidden, weight, bias):
    return torch.empty_like(upstream)


_first_order.register_autograd(_refuse_second_order, setup_context=_save_nothing)


# --- forward and backward --------------------------------------------------------------------------

# torch.compile's CUDA graphs refuse CPU tensors (the factors) and do not track the memory behind a handle.
# torch.cuda.graph over forward and backward has neither problem.
_OUTSIDE_GRAPHS = (torch.Tag.cudagraph_unsafe,)


def _padded(values: Sequence[Tensor | None], count: int, like: Tensor) -> list[Tensor]:
    """``count`` tensors: an empty one for each value that is None or missing."""
    values = [*values, *[None] * (count - len(values))]
    return [like.new_empty(0) if v is None else v for v in values]


@torch.library.custom_op(
    "parallel_lce::forward",
    mutates_args=(),
    schema=f"({_OPERANDS}, {_LOSS}, bool losses, bool save, {_CALL}) -> "
    f"({', '.join(['Tensor'] * (_NUM_OUTPUTS + _NUM_RESIDUALS + 2))})",
    tags=_OUTSIDE_GRAPHS,
)
def _forward(*arguments):
    """The outputs of a head, its residuals, the merged partial, and the handle. ``losses``: the head is WeightedLoss,
    else StatisticsHead."""
    operands, of_loss, losses, save, numbers = _split(arguments, _Operands, _OfLoss)
    call = _call(operands, numbers)
    head = _loss(operands, of_loss) if losses else StatisticsHead(call.columns, call.target is not None)
    inputs: Inputs = operands.inputs
    partial, vocab_size, saved = schedule.forward(call, *inputs, save)
    outputs, residuals = head.outputs(call.backend, partial, vocab_size)
    handle = partial.new_zeros(1, dtype=torch.uint8)
    vars(handle.untyped_storage())[_SAVED] = saved
    # An output must not share memory with an input or another output.
    residuals = [r if r is None else r.clone() for r in residuals]
    return *_padded(outputs, _NUM_OUTPUTS, partial), *_padded(residuals, _NUM_RESIDUALS, partial), partial, handle


@_forward.register_fake
def _(*arguments):
    operands, _, losses, _, numbers = _split(arguments, _Operands, _OfLoss)
    call, hidden = _call(operands, numbers), operands.hidden
    shape, dtype = (call.columns.count, token_count(hidden, call.layout)), accumulation_dtype(hidden.dtype)
    partial = hidden.new_empty(shape, dtype=dtype)
    if losses:
        outputs = [partial.new_empty(shape[1])]
        residuals = [partial.new_empty(shape[1]) for _ in range(2 + call.columns.shifted)]
    else:
        vocab_size = partial.new_empty((), dtype=torch.int64)
        head = StatisticsHead(call.columns, call.target is not None)
        outputs, _ = head.outputs(call.backend, partial, vocab_size)
        residuals = [vocab_size.clone()]
    handle = partial.new_empty(1, dtype=torch.uint8)
    return *_padded(outputs, _NUM_OUTPUTS, partial), *_padded(residuals, _NUM_RESIDUALS, partial), partial, handle


def _save_forward(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    operands, _, ctx.losses, _, ctx.numbers = _split(inputs, _Operands, _OfLoss)
    ctx.num_inputs = len(inputs)
    ctx.mark_non_differentiable(*output[_head_class(ctx.losses).num_differentiable :])
    ctx.save_for_backward(*operands, *output[_NUM_OUTPUTS:])


def _head_class(losses: bool) -> type:
    return WeightedLoss if losses else StatisticsHead


def _differentiate_forward(ctx, *upstream):
    if all(u is None for u in upstream):
        return (None,) * ctx.num_inputs
    count, saved = len(_Operands._fields), ctx.saved_tensors
    operands, (*residuals, partial, handle) = _Operands(*saved[:count]), saved[count:]
    target = operands.target
    columns = Columns(*ctx.numbers.columns)
    if ctx.losses:
        alpha, beta, gamma = residuals
        of_losses = alpha, beta, gamma if columns.shifted else None
        assert target is not None
        c = WeightedLoss(target).coefficients(partial, of_losses, upstream[:1]).folded()
    else:
        head = StatisticsHead(columns, target is not None)
        c = head.coefficients(partial, (residuals[0],), upstream[: head.num_differentiable])
    needs = list(ctx.needs_input_grad[:3])
    found = torch.ops.parallel_lce.backward(*operands, partial, handle, *c.each, needs, *ctx.numbers)
    return *_by_input(found, needs), *(None for _ in range(ctx.num_inputs - 3))


_forward.register_autograd(_differentiate_forward, setup_context=_save_forward)


@torch.library.custom_op(
    "parallel_lce::backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor partial, Tensor handle, Tensor alpha, Tensor? beta, Tensor? gamma, "
    f"Tensor? delta, Tensor? epsilon, bool[] needs, {_CALL}) -> Tensor[]",
    tags=_OUTSIDE_GRAPHS,
)
def _backward(*arguments):
    """dX, dW and dbias, those that ``needs`` asks for."""
    operands, partial, handle, *each, needs, numbers = _split(arguments, _Operands)
    saved = vars(handle.untyped_storage()).pop(_SAVED, ())
    inputs: Inputs = operands.inputs
    gradients = schedule.backward(_call(operands, numbers), *inputs, partial, saved, Coefficients(*each), Needs(*needs))
    return [g for g in gradients if g is not None]


@_backward.register_fake
def _(*arguments):
    operands, _, _, *_, needs, _ = _split(arguments, _Operands)
    return _empty_gradients(operands.inputs, needs)


_backward.register_autograd(_refuse_second_order, setup_context=_save_nothing)


# --- gradients formed in forward -------------------------------------------------------------------


@torch.library.custom_op(
    "parallel_lce::accumulated_loss",
    mutates_args=(),
    schema=f"({_OPERANDS}, {_LOSS}, Tensor? divisor, bool[] needs, {_CALL}) -> (Tensor, Tensor[])",
    tags=_OUTSIDE_GRAPHS,
)
def _accumulated_loss(*arguments):
    """The loss, and its dX, dW and dbias, those that ``needs`` asks for."""
    operands, of_loss, divisor, needs, numbers = _split(arguments, _Operands, _OfLoss)
    inputs: Inputs = operands.inputs
    done = schedule.accumulate(_call(operands, numbers), *inputs, _loss(operands, of_loss), divisor, Needs(*needs))
    return done.loss, [g for g in done.gradients if g is not None]


@_accumulated_loss.register_fake
def _(*arguments):
    operands, _, _, needs, _ = _split(arguments, _Operands, _OfLoss)
    dtype = accumulation_dtype(operands.weight.dtype)
    return operands.hidden.new_empty((), dtype=dtype), _empty_gradients(operands.inputs, needs, dtype)


def _save_gradients(ctx, inputs, output) -> None:
    operands, _, _, ctx.needs, _ = _split(inputs, _Operands, _OfLoss)
    ctx.num_inputs = len(inputs)
    ctx.save_for_backward(*operands.inputs, *output[1])


def _scale_gradients(ctx, upstream, _):
    hidden, weight, bias, *gradients = ctx.saved_tensors
    if any(asked and not formed for asked, formed in zip(ctx.needs_input_grad, ctx.needs)):
        raise RuntimeError(
            "a gradient is asked for that was not when this graph was made, and gradients of parallel_lce's "
            "'mean' and 'sum' are formed in forward: make the graph with tensors that require gradients"
        )
    # Under create_graph=True autograd would treat gradients formed in forward as constants. first_order raises.
    upstream = torch.ops.parallel_lce.first_order(upstream, hidden, weight, bias)
    # torch.compile decides which of them it scales in place.
    scaled = [(g.to(upstream.dtype) * upstream).to(weight.dtype) for g in gradients]
    return *_by_input(scaled, ctx.needs), *(None for _ in range(ctx.num_inputs - 3))


_accumulated_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _empty_gradients(inputs: Inputs, needs: list[bool], dtype: torch.dtype | None = None) -> list[Tensor]:
    gradients = []
    if needs[0]:
        gradients.append(inputs[0].new_empty(inputs[0].shape))
    parameters = zip(inputs[1:], needs[1:])
    return gradients + [p.new_empty(p.shape, dtype=dtype) for p, needed in parameters if needed and p is not None]


def _by_input(gradients: list[Tensor], needs: list[bool]) -> tuple[Tensor | None, ...]:
    """Gradients that an operator lists, each at its input's place among hidden states, weight and bias."""
    found = iter(gradients)
    return tuple(next(found) if needed else None for needed in needs)


# --- the functions of parallel_lce.autograd, in a graph --------------------------------------------


def fused(call: Call, inputs: Inputs, head: StatisticsHead | WeightedLoss, differentiable: bool) -> tuple[Any, ...]:
    """:func:`parallel_lce.autograd.fused` of a graph."""
    losses = isinstance(head, WeightedLoss)
    operands, of_loss = _operands(call, inputs, head if losses else None), _OfLoss()
    if losses:
        of_loss = _OfLoss(head.token_weight, head.ignore_index, head.outside_is_nan)
    outputs = torch.ops.parallel_lce.forward(*operands, *of_loss, losses, differentiable, *_numbers(call))
    if losses:
        return (outputs[0],)
    return tuple(v if there else None for v, there in zip(outputs, head.present))


def accumulated_loss(call: Call, inputs: Inputs, loss: WeightedLoss, divisor: Tensor | None) -> Tensor:
    """:func:`parallel_lce.autograd.accumulated_loss` of a graph."""
    needs = [t is not None and t.requires_grad for t in inputs]
    operands, of_loss = (
        _operands(call, inputs, loss),
        _OfLoss(loss.token_weight, loss.ignore_index, loss.outside_is_nan),
    )
    value, _ = torch.ops.parallel_lce.accumulated_loss(*operands, *of_loss, divisor, needs, *_numbers(call))
    return value
