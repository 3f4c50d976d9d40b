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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_lce import schedule
from parallel_lce.backends import valueless
from parallel_lce.backends.interface import Coefficients
from parallel_lce.call import Call, Inputs, Needs, token_count
from parallel_lce.losses import WeightedLoss
from parallel_lce.operands import (
    CALL,
    LOSS,
    OPERANDS,
    OfLoss,
    Operands,
    call_of,
    loss_of,
    numbers_of,
    operands_of,
    split,
)
from parallel_lce.partials import Columns, Merged, accumulation_dtype
from parallel_lce.selection import Selected
from parallel_lce.statistics import NAMES, StatisticsHead

# Attribute of a handle's storage that holds what is saved.
_SAVED = "_parallel_lce_saved"
# How many outputs of the forward operator are a head's. Its residuals, the partial and the handle follow.
_NUM_OUTPUTS, _NUM_RESIDUALS = len(NAMES), WeightedLoss.num_residuals


def uses_operators(weight: Tensor) -> bool:
    """Whether a call goes through the operators: in a graph, and for tensors without values."""
    return torch.compiler.is_compiling() or valueless(weight)


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
    schema=f"({OPERANDS}, {LOSS}, bool losses, bool save, {CALL}) -> "
    f"({', '.join(['Tensor'] * (_NUM_OUTPUTS + _NUM_RESIDUALS + 2))})",
    tags=_OUTSIDE_GRAPHS,
)
def _forward(*arguments):
    """The outputs of a head, its residuals, the merged partial, and the handle. ``losses``: the head is WeightedLoss,
    else StatisticsHead."""
    operands, of_loss, losses, save, numbers = split(arguments, Operands, OfLoss)
    call = call_of(operands, numbers)
    head = loss_of(operands, of_loss) if losses else call.statistics()
    inputs: Inputs = operands.inputs
    merged, saved = schedule.forward(call, *inputs, save)
    outputs, residuals = head.outputs(call.backend, merged)
    partial = merged.partial
    handle = partial.new_zeros(1, dtype=torch.uint8)
    vars(handle.untyped_storage())[_SAVED] = saved
    # An output must not share memory with an input or another output.
    residuals = [r if r is None else r.clone() for r in residuals]
    return *_padded(outputs, _NUM_OUTPUTS, partial), *_padded(residuals, _NUM_RESIDUALS, partial), partial, handle


@_forward.register_fake
def _(*arguments):
    operands, _, losses, _, numbers = split(arguments, Operands, OfLoss)
    call, hidden = call_of(operands, numbers), operands.hidden
    shape, dtype = (call.columns.count, token_count(hidden, call.layout)), accumulation_dtype(hidden.dtype)
    partial = hidden.new_empty(shape, dtype=dtype)
    if losses:
        outputs = [partial.new_empty(shape[1])]
        residuals = [partial.new_empty(shape[1]) for _ in range(2 + call.columns.shifted)]
    else:
        vocab_size = partial.new_empty((), dtype=torch.int64)
        selected = None if call.selected is None else partial.new_empty(call.selected.count)
        top = partial.new_empty(shape[1], call.top_k)
        found = Merged(partial, vocab_size, selected, (top, top.long()) if call.top_k else None)
        outputs, residuals = call.statistics().outputs(call.backend, found)
        residuals = [r if r is None else r.clone() for r in residuals]
    handle = partial.new_empty(1, dtype=torch.uint8)
    return *_padded(outputs, _NUM_OUTPUTS, partial), *_padded(residuals, _NUM_RESIDUALS, partial), partial, handle


def _save_forward(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    operands, _, ctx.losses, _, ctx.numbers = split(inputs, Operands, OfLoss)
    ctx.num_inputs = len(inputs)
    ctx.mark_non_differentiable(*output[_head_class(ctx.losses).num_differentiable :])
    ctx.save_for_backward(*operands, *output[_NUM_OUTPUTS:])


def _head_class(losses: bool) -> type:
    return WeightedLoss if losses else StatisticsHead


def _differentiate_forward(ctx, *upstream):
    if all(u is None for u in upstream):
        return (None,) * ctx.num_inputs
    count, saved = len(Operands._fields), ctx.saved_tensors
    operands, (*residuals, partial, handle) = Operands(*saved[:count]), saved[count:]
    target, columns = operands.target, Columns(*ctx.numbers.columns)
    if ctx.losses:
        alpha, beta, gamma = residuals
        of_losses = alpha, beta, gamma if columns.shifted else None
        assert target is not None
        c = WeightedLoss(target).coefficients(partial, of_losses, upstream[:1]).folded()
    else:
        ids, offsets = operands.selected, operands.offsets
        selected = None if ids is None else Selected(ids, offsets, partial.shape[1])
        head = StatisticsHead(columns, target is not None, selected)
        c = head.coefficients(partial, (residuals[0], residuals[1]), upstream[: head.num_differentiable])
    needs, of_selected = list(ctx.needs_input_grad[:3]), c.selected or (None, None)
    found = torch.ops.parallel_lce.backward(*operands, partial, handle, *c.each, *of_selected, needs, *ctx.numbers)
    return *_by_input(found, needs), *(None for _ in range(ctx.num_inputs - 3))


_forward.register_autograd(_differentiate_forward, setup_context=_save_forward)


@torch.library.custom_op(
    "parallel_lce::backward",
    mutates_args=(),
    schema=f"({OPERANDS}, Tensor partial, Tensor handle, Tensor alpha, Tensor? beta, Tensor? gamma, "
    f"Tensor? delta, Tensor? epsilon, Tensor? of_selected, Tensor? selected_logits, bool[] needs, {CALL}) -> Tensor[]",
    tags=_OUTSIDE_GRAPHS,
)
def _backward(*arguments):
    """dX, dW and dbias, those that ``needs`` asks for."""
    operands, partial, handle, *each, of_selected, selected_logits, needs, numbers = split(arguments, Operands)
    saved = vars(handle.untyped_storage()).pop(_SAVED, ())
    inputs: Inputs = operands.inputs
    coefficients = Coefficients(*each, selected=None if of_selected is None else (of_selected, selected_logits))
    gradients = schedule.backward(call_of(operands, numbers), *inputs, partial, saved, coefficients, Needs(*needs))
    return [g for g in gradients if g is not None]


@_backward.register_fake
def _(*arguments):
    operands, _, _, *_, needs, _ = split(arguments, Operands)
    return _empty_gradients(operands.inputs, needs)


_backward.register_autograd(_refuse_second_order, setup_context=_save_nothing)


# --- gradients formed in forward -------------------------------------------------------------------


@torch.library.custom_op(
    "parallel_lce::accumulated_loss",
    mutates_args=(),
    schema=f"({OPERANDS}, {LOSS}, Tensor? divisor, bool[] needs, {CALL}) -> (Tensor, Tensor[])",
    tags=_OUTSIDE_GRAPHS,
)
def _accumulated_loss(*arguments):
    """The loss, and its dX, dW and dbias, those that ``needs`` asks for."""
    operands, of_loss, divisor, needs, numbers = split(arguments, Operands, OfLoss)
    inputs: Inputs = operands.inputs
    done = schedule.accumulate(call_of(operands, numbers), *inputs, loss_of(operands, of_loss), divisor, Needs(*needs))
    return done.loss, [g for g in done.gradients if g is not None]


@_accumulated_loss.register_fake
def _(*arguments):
    operands, _, _, needs, _ = split(arguments, Operands, OfLoss)
    dtype = accumulation_dtype(operands.weight.dtype)
    return operands.hidden.new_empty((), dtype=dtype), _empty_gradients(operands.inputs, needs, dtype)


def _save_gradients(ctx, inputs, output) -> None:
    operands, _, _, ctx.needs, _ = split(inputs, Operands, OfLoss)
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
    operands, of_loss = operands_of(call, inputs, head if losses else None), OfLoss()
    if losses:
        of_loss = OfLoss(head.token_weight, head.ignore_index, head.outside_is_nan)
    outputs = torch.ops.parallel_lce.forward(*operands, *of_loss, losses, differentiable, *numbers_of(call))
    if losses:
        return (outputs[0],)
    return tuple(v if there else None for v, there in zip(outputs, head.present))


def accumulated_loss(call: Call, inputs: Inputs, loss: WeightedLoss, divisor: Tensor | None) -> Tensor:
    """:func:`parallel_lce.autograd.accumulated_loss` of a graph."""
    needs = [t is not None and t.requires_grad for t in inputs]
    operands, of_loss = (
        operands_of(call, inputs, loss),
        OfLoss(loss.token_weight, loss.ignore_index, loss.outside_is_nan),
    )
    value, _ = torch.ops.parallel_lce.accumulated_loss(*operands, *of_loss, divisor, needs, *numbers_of(call))
    return value
