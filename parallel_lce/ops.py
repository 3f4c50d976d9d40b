"""Forward and backward of a call as operators: torch.compile takes each as a whole, and meta and fake
tensors get the results' shapes.

They run the functions that eager mode calls directly (:mod:`parallel_lce.differentiable`), with their
collectives. An operator gets a :class:`Call` spelled out in numbers and a process group by its name.

What is kept from forward to backward, 1 GiB or more, and which the backward writes over, is in no
graph. As tensors its mutation would have to be declared; they are inputs of the compiled backward,
where Inductor mutates in place only what the caller is to see mutated, so that each step would copy
them first. Undeclared, a graph walked twice would read what is spent. So a graph carries a ticket of
one byte, to whose storage they are attached and with which they live and die. The backward takes
them off; where it finds none, in a second walk or after saved-tensor hooks made a copy of the ticket,
it recomputes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from parallel_lce import accumulate, statistics
from parallel_lce.backends import named, valueless
from parallel_lce.backends.blocks import Coefficients
from parallel_lce.losses import WeightedLoss
from parallel_lce.parallel import Layout, Shard
from parallel_lce.partials import Columns
from parallel_lce.plan import Plan
from parallel_lce.statistics import (
    DIFFERENTIABLE,
    NAMES,
    Call,
    Needs,
    TokenStatistics,
    coefficients,
    finish_statistics,
    token_count,
)
from parallel_lce.weight_grad import accumulation_dtype

_CALL = (
    "str backend, str group, bool sequence_parallel, SymInt start, SymInt? vocab_size, "
    "bool[] columns, bool capped, SymInt[] plan, ScalarType? reduce_dtype"
)
_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? target, Tensor factors"
_LOSS = "Tensor? token_weight, SymInt? ignore_index"


def needed(weight: Tensor) -> bool:
    """Whether a call is to go through the operators: in a graph, and for tensors without values."""
    return torch.compiler.is_compiling() or valueless(weight)


def _operands(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: WeightedLoss | None = None
) -> tuple:
    """The arguments ``_OPERANDS``. ``factors [4]`` fp64, on the CPU: logit_scale, logit_softcap, label_smoothing,
    z_loss.

    A number among an operator's arguments is a constant of its graph: another value, another compilation. A
    number added to a tensor is not.
    """
    numbers = [call.scale, 0.0 if call.softcap is None else call.softcap, 0.0, 0.0]
    if loss is not None:
        numbers[2:] = loss.label_smoothing, loss.z_loss
    zero = weight.new_zeros((), dtype=torch.float64, device="cpu")
    return hidden, weight, bias, call.target, torch.stack([zero + number for number in numbers])


def _numbers(call: Call) -> tuple:
    """The arguments ``_CALL``."""
    layout, columns, plan = call.layout, call.columns, call.plan
    if call.main_grad is not None:
        raise RuntimeError("a gradient that is added to main_grad cannot be compiled")
    return (
        call.backend.__name__.rpartition(".")[2],
        "" if layout.group is None else layout.group.group_name,
        layout.sequence_parallel,
        call.shard.start,
        call.shard.vocab_size,
        [columns.mean_log_prob, columns.mean_logit, columns.expected_logit, columns.argmax],
        call.softcap is not None,
        [
            plan.rows,
            plan.first,
            plan.most,
            plan.kept,
            int(plan.accumulate),
            plan.shard_rows,
            plan.block_bytes,
            plan.scratch_bytes,
            plan.accumulator_bytes,
            plan.hidden_bytes,
            plan.gathered,
            plan.scratch_alone,
        ],
        call.reduce_dtype,
    )


def _columns(numbers: tuple) -> Columns:
    """Of the arguments ``_CALL``."""
    return Columns(*numbers[5])


def _call(
    weight: Tensor,
    target: Tensor | None,
    factors: Tensor,
    backend: str,
    group: str,
    sequence_parallel: bool,
    start: int,
    vocab_size: int | None,
    columns: list[bool],
    capped: bool,
    plan: list[int],
    reduce_dtype: torch.dtype | None,
) -> Call:
    layout = Layout.of(_resolve_process_group(group) if group else None, sequence_parallel)
    shard = Shard(start, weight.shape[0], vocab_size)
    rows, first, most, kept, accumulates, *others = plan
    planned = Plan(rows, first, most, kept, bool(accumulates), *others)
    # While a graph is traced they have no values, and results' shapes do not depend on them.
    scale, softcap = (1.0, 1.0) if valueless(factors) else factors.tolist()[:2]
    return Call(
        named(backend),
        layout,
        shard,
        Columns(*columns),
        planned,
        target,
        scale,
        softcap if capped else None,
        reduce_dtype=reduce_dtype,
    )


def _loss(target: Tensor, token_weight: Tensor | None, ignore_index: int | None, factors: Tensor) -> WeightedLoss:
    label_smoothing, z_loss = factors.tolist()[2:]
    return WeightedLoss(target, token_weight, ignore_index, label_smoothing, z_loss)


FIRST_ORDER = "gradients of parallel_lce cannot be differentiated twice"


def _refuse_second_order(ctx, *_):
    raise RuntimeError(FIRST_ORDER)


def _save_nothing(ctx, inputs, output) -> None:
    pass


# A CUDA graph of torch.compile's takes no tensor of the CPU, as the factors are, and would not know of
# the memory behind a ticket. One that captures forward and backward together, by torch.cuda.graph,
# has neither.
_OUTSIDE_GRAPHS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op(
    "parallel_lce::token_statistics",
    mutates_args=(),
    schema=f"({_OPERANDS}, bool keep, {_CALL}) -> ({', '.join(['Tensor'] * (len(NAMES) + 2))})",
    tags=_OUTSIDE_GRAPHS,
)
def _token_statistics(hidden, weight, bias, target, factors, keep, *numbers):
    """The fields of :class:`TokenStatistics`, empty where they are None; the partial; the ticket."""
    call = _call(weight, target, factors, *numbers)
    partial, vocab_size, kept = statistics.statistics_forward(call, hidden, weight, bias, keep)
    outputs = _fields(call, partial, vocab_size)
    outputs[-1].untyped_storage()._parallel_lce_kept = kept
    return outputs


@_token_statistics.register_fake
def _(hidden, weight, bias, target, factors, keep, *numbers):
    call = _call(weight, target, factors, *numbers)
    shape = call.columns.count, token_count(hidden, call.layout)
    partial = hidden.new_empty(shape, dtype=accumulation_dtype(weight.dtype))
    return _fields(call, partial, partial.new_empty((), dtype=torch.int64))


def _fields(call: Call, partial: Tensor, vocab_size: Tensor) -> tuple[Tensor, ...]:
    found = finish_statistics(partial, vocab_size, call.columns, call.target is not None)
    values = (getattr(found, name) for name in NAMES)
    ticket = partial.new_zeros(1, dtype=torch.uint8)
    return *(partial.new_empty(0) if v is None else v for v in values), partial, ticket


def _save_statistics(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[len(DIFFERENTIABLE) :])
    *fields, partial, ticket = output
    vocab_size = fields[NAMES.index("vocab_size")]
    ctx.save_for_backward(*inputs[:5], partial, vocab_size, ticket)
    ctx.numbers = inputs[6:]


def _differentiate_statistics(ctx, *gradients):
    *operands, partial, vocab_size, ticket = ctx.saved_tensors
    upstream = dict(zip(DIFFERENTIABLE, gradients))
    c = coefficients(upstream, partial, vocab_size, _columns(ctx.numbers))
    needs = list(ctx.needs_input_grad[:3])
    found = torch.ops.parallel_lce.statistics_backward(
        *operands, partial, ticket, c.alpha, c.beta, c.gamma, c.delta, needs, *ctx.numbers
    )
    return *_in_place(found, needs), None, None, None, *(None for _ in ctx.numbers)


_token_statistics.register_autograd(_differentiate_statistics, setup_context=_save_statistics)


@torch.library.custom_op(
    "parallel_lce::statistics_backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor partial, Tensor ticket, Tensor alpha, Tensor? beta, Tensor? gamma, "
    f"Tensor? delta, bool[] needs, {_CALL}) -> Tensor[]",
    tags=_OUTSIDE_GRAPHS,
)
def _statistics_backward(
    hidden, weight, bias, target, factors, partial, ticket, alpha, beta, gamma, delta, needs, *numbers
):
    """dX, dW and dbias, those that ``needs`` asks for."""
    call = _call(weight, target, factors, *numbers)
    kept = vars(ticket.untyped_storage()).pop("_parallel_lce_kept", ())
    folded = Coefficients(alpha, beta, gamma, delta)
    gradients = statistics.statistics_backward(call, hidden, weight, bias, partial, kept, folded, Needs(*needs))
    return [g for g in gradients if g is not None]


@_statistics_backward.register_fake
def _(hidden, weight, bias, target, factors, partial, ticket, alpha, beta, gamma, delta, needs, *numbers):
    return _empty_gradients(hidden, weight, bias, needs)


_statistics_backward.register_autograd(_refuse_second_order, setup_context=_save_nothing)


@torch.library.custom_op(
    "parallel_lce::token_losses",
    mutates_args=(),
    schema=f"({_OPERANDS}, {_LOSS}, bool keep, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_OUTSIDE_GRAPHS,
)
def _token_losses(hidden, weight, bias, target, factors, token_weight, ignore_index, keep, *numbers):
    """The losses; the coefficients alpha, beta and gamma, empty if it is None; the partial; the ticket."""
    call = _call(weight, target, factors, *numbers)
    loss = _loss(target, token_weight, ignore_index, factors)
    partial, vocab_size, kept = statistics.statistics_forward(call, hidden, weight, bias, keep)
    losses, c = loss.of_partials(call.backend, partial, vocab_size)
    ticket = partial.new_zeros(1, dtype=torch.uint8)
    ticket.untyped_storage()._parallel_lce_kept = kept
    return losses, c.alpha, c.beta, partial.new_empty(0) if c.gamma is None else c.gamma, partial, ticket


@_token_losses.register_fake
def _(hidden, weight, bias, target, factors, token_weight, ignore_index, keep, *numbers):
    call = _call(weight, target, factors, *numbers)
    shape = call.columns.count, token_count(hidden, call.layout)
    partial = hidden.new_empty(shape, dtype=accumulation_dtype(weight.dtype))
    each = [partial.new_empty(shape[1]) for _ in range(3)]
    gamma = partial.new_empty(shape[1] if call.columns.mean_log_prob else 0)
    return *each, gamma, partial, partial.new_empty(1, dtype=torch.uint8)


def _save_losses(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.inputs, ctx.numbers = len(inputs), inputs[8:]


def _differentiate_losses(ctx, upstream, *_):
    *operands, alpha, beta, gamma, partial, ticket = ctx.saved_tensors
    gamma = gamma if _columns(ctx.numbers).mean_log_prob else None
    c = Coefficients(alpha, beta, gamma, None).times(upstream)
    needs = list(ctx.needs_input_grad[:3])
    found = torch.ops.parallel_lce.statistics_backward(
        *operands, partial, ticket, c.alpha, c.beta, c.gamma, None, needs, *ctx.numbers
    )
    return *_in_place(found, needs), *(None for _ in range(ctx.inputs - 3))


_token_losses.register_autograd(_differentiate_losses, setup_context=_save_losses)


@torch.library.custom_op(
    "parallel_lce::accumulated_loss",
    mutates_args=(),
    schema=f"({_OPERANDS}, {_LOSS}, Tensor? divisor, bool[] needs, {_CALL}) -> (Tensor, Tensor[])",
    tags=_OUTSIDE_GRAPHS,
)
def _accumulated_loss(hidden, weight, bias, target, factors, token_weight, ignore_index, divisor, needs, *numbers):
    """The loss, and its dX, dW and dbias, those that ``needs`` asks for."""
    call = _call(weight, target, factors, *numbers)
    loss = _loss(target, token_weight, ignore_index, factors)
    divisor = 1.0 if divisor is None else divisor
    done = accumulate.accumulate(call, hidden, weight, bias, loss, divisor, Needs(*needs))
    return done.loss, [g for g in done.gradients if g is not None]


@_accumulated_loss.register_fake
def _(hidden, weight, bias, target, factors, token_weight, ignore_index, divisor, needs, *numbers):
    dtype = accumulation_dtype(weight.dtype)
    return hidden.new_empty((), dtype=dtype), _empty_gradients(hidden, weight, bias, needs, dtype)


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


def _save_gradients(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1])
    ctx.needs, ctx.inputs = inputs[8], len(inputs)


def _scale_gradients(ctx, upstream, _):
    hidden, weight, bias, *gradients = ctx.saved_tensors
    if any(asked and not formed for asked, formed in zip(ctx.needs_input_grad, ctx.needs)):
        raise RuntimeError(
            "a gradient is asked for that was not when this graph was made, and gradients of parallel_lce's "
            "'mean' and 'sum' are formed in forward: make the graph with tensors that require gradients"
        )
    # Formed in forward, the gradients would pass for constants under create_graph=True.
    upstream = torch.ops.parallel_lce.first_order(upstream, hidden, weight, bias)
    # The compiler finds out which of them it may scale in place.
    scaled = [(g.to(upstream.dtype) * upstream).to(weight.dtype) for g in gradients]
    return *_in_place(scaled, ctx.needs), *(None for _ in range(ctx.inputs - 3))


_accumulated_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool], dtype: torch.dtype | None = None
) -> list[Tensor]:
    gradients = []
    if needs[0]:
        gradients.append(hidden.new_empty(hidden.shape))
    if needs[1]:
        gradients.append(weight.new_empty(weight.shape, dtype=dtype))
    if needs[2]:
        gradients.append(bias.new_empty(bias.shape, dtype=dtype))
    return gradients


def _in_place(gradients: list[Tensor], needs: list[bool]) -> tuple[Tensor | None, ...]:
    """Gradients that an operator lists, each in its place among three."""
    found = iter(gradients)
    return tuple(next(found) if needed else None for needed in needs)


def token_statistics(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, differentiable: bool
) -> TokenStatistics:
    """:func:`parallel_lce.differentiable.token_statistics` of a graph."""
    outputs = torch.ops.parallel_lce.token_statistics(
        *_operands(call, hidden, weight, bias), differentiable, *_numbers(call)
    )
    c, target = call.columns, call.target is not None
    present = (
        True,
        target,
        target,
        c.mean_logit,
        c.mean_log_prob,
        c.expected_logit,
        c.expected_logit,
        True,
        c.argmax,
        True,
    )
    return TokenStatistics(*(v if there else None for v, there in zip(outputs, present)))


def token_losses(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: WeightedLoss, differentiable: bool
) -> Tensor:
    """:func:`parallel_lce.differentiable.token_losses` of a graph."""
    return torch.ops.parallel_lce.token_losses(
        *_operands(call, hidden, weight, bias, loss),
        loss.token_weight,
        loss.ignore_index,
        differentiable,
        *_numbers(call),
    )[0]


def accumulated_loss(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: WeightedLoss, divisor: Tensor | float
) -> Tensor:
    """:func:`parallel_lce.differentiable.accumulated_loss` of a graph."""
    value, _ = torch.ops.parallel_lce.accumulated_loss(
        *_operands(call, hidden, weight, bias, loss),
        loss.token_weight,
        loss.ignore_index,
        divisor if isinstance(divisor, Tensor) else None,
        [t is not None and t.requires_grad for t in (hidden, weight, bias)],
        *_numbers(call),
    )
    return value
