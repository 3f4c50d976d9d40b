"""Forward and backward of a call as operators: torch.compile takes each as a whole.

Eager mode calls the same functions directly. An operator gets a :class:`Call` spelled out in numbers,
a process group by its name, and runs the collectives that the function's docstring states.

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
from parallel_lce.backends import named
from parallel_lce.backends.blocks import Coefficients, Kept
from parallel_lce.losses import WeightedLoss
from parallel_lce.parallel import Layout, Shard
from parallel_lce.partials import Columns
from parallel_lce.plan import Plan
from parallel_lce.statistics import Call, Needs, token_count
from parallel_lce.weight_grad import accumulation_dtype

_CALL = (
    "str backend, str group, bool sequence_parallel, SymInt start, SymInt? vocab_size, "
    "bool[] columns, float scale, float? softcap, SymInt[] plan"
)
_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? target"


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
        call.scale,
        call.softcap,
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
        ],
    )


def _call(
    weight: Tensor,
    target: Tensor | None,
    backend: str,
    group: str,
    sequence_parallel: bool,
    start: int,
    vocab_size: int | None,
    columns: list[bool],
    scale: float,
    softcap: float | None,
    plan: list[int],
) -> Call:
    layout = Layout.of(_resolve_process_group(group) if group else None, sequence_parallel)
    shard = Shard(start, weight.shape[0], vocab_size)
    rows, first, most, kept, accumulates, *others = plan
    planned = Plan(rows, first, most, kept, bool(accumulates), *others)
    return Call(
        named(backend), layout, shard, Columns(*columns), planned, target, scale, softcap
    )


# A CUDA graph of torch.compile's would not know of the memory behind a ticket. One that captures
# forward and backward together, by torch.cuda.graph, needs not.
_TICKETED = (torch.Tag.cudagraph_unsafe,)


def _new_ticket(like: Tensor) -> Tensor:
    return like.new_empty(1, dtype=torch.uint8)


@torch.library.custom_op(
    "parallel_lce::statistics",
    mutates_args=(),
    schema=f"({_OPERANDS}, bool keep, {_CALL}) -> (Tensor, Tensor, Tensor)",
    tags=_TICKETED,
)
def _statistics(hidden, weight, bias, target, keep, *numbers):
    """Partial, V and the ticket."""
    call = _call(weight, target, *numbers)
    partial, vocab_size, kept = statistics.statistics_forward(call, hidden, weight, bias, keep)
    ticket = _new_ticket(partial)
    ticket.untyped_storage()._parallel_lce_kept = kept
    return partial, vocab_size, ticket


@_statistics.register_fake
def _(hidden, weight, bias, target, keep, *numbers):
    call = _call(weight, target, *numbers)
    shape = call.columns.count, token_count(hidden, call.layout)
    partial = hidden.new_empty(shape, dtype=accumulation_dtype(weight.dtype))
    return partial, partial.new_empty(()), _new_ticket(partial)


@torch.library.custom_op(
    "parallel_lce::statistics_backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor partial, Tensor ticket, Tensor alpha, Tensor? beta, Tensor? gamma, "
    f"Tensor? delta, bool[] needs, {_CALL}) -> Tensor[]",
    tags=_TICKETED,
)
def _statistics_backward(
    hidden, weight, bias, target, partial, ticket, alpha, beta, gamma, delta, needs, *numbers
):
    """The gradients that ``needs`` (dX, dW, dbias) asks for."""
    call = _call(weight, target, *numbers)
    kept = vars(ticket.untyped_storage()).pop("_parallel_lce_kept", ())
    folded = Coefficients(alpha, beta, gamma, delta)
    gradients = statistics.statistics_backward(
        call, hidden, weight, bias, partial, kept, folded, Needs(*needs)
    )
    return [g for g in gradients if g is not None]


@_statistics_backward.register_fake
def _(hidden, weight, bias, target, partial, ticket, alpha, beta, gamma, delta, needs, *numbers):
    return _empty_gradients(hidden, weight, bias, needs)


@torch.library.custom_op(
    "parallel_lce::accumulated_loss",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor token_weights, Tensor ignored, Tensor? divisor, float label_smoothing, "
    f"float z_loss, bool[] needs, {_CALL}) -> Tensor[]",
)
def _accumulated_loss(
    hidden, weight, bias, target, token_weights, ignored, divisor, label_smoothing, z_loss, needs, *numbers
):
    """The loss, then the gradients that ``needs`` asks for."""
    call = _call(weight, target, *numbers)
    loss = WeightedLoss(target, token_weights, ignored, label_smoothing, z_loss)
    divisor = 1.0 if divisor is None else divisor
    done = accumulate.accumulate(call, hidden, weight, bias, loss, divisor, Needs(*needs))
    return [done.loss, *(g for g in done.gradients if g is not None)]


@_accumulated_loss.register_fake
def _(hidden, weight, bias, target, token_weights, ignored, divisor, smoothing, z_loss, needs, *numbers):
    dtype = accumulation_dtype(weight.dtype)
    return [hidden.new_empty((), dtype=dtype), *_empty_gradients(hidden, weight, bias, needs, dtype)]


def _empty_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: list[bool],
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    gradients = []
    if needs[0]:
        gradients.append(hidden.new_empty(hidden.shape))
    if needs[1]:
        gradients.append(weight.new_empty(weight.shape, dtype=dtype))
    if needs[2]:
        gradients.append(bias.new_empty(bias.shape, dtype=dtype))
    return gradients


def _complete(gradients: list[Tensor], needs: Needs) -> tuple[Tensor | None, ...]:
    """Gradients that an operator lists, in their places."""
    found = iter(gradients)
    return tuple(next(found) if n else None for n in (needs.hidden, needs.weight, needs.bias))


def statistics_forward(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Kept]:
    """:func:`parallel_lce.statistics.statistics_forward`; where it is compiled an operator, and what is
    kept a ticket."""
    if not torch.compiler.is_compiling():
        return statistics.statistics_forward(call, hidden, weight, bias, keep)
    partial, vocab_size, ticket = torch.ops.parallel_lce.statistics(
        hidden, weight, bias, call.target, keep, *_numbers(call)
    )
    return partial, vocab_size, (ticket,)


def statistics_backward(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    partial: Tensor,
    kept: Kept,
    coefficients: Coefficients,
    needs: Needs,
    spent: bool,
) -> tuple[Tensor | None, ...]:
    """:func:`parallel_lce.statistics.statistics_backward`, an operator where it is compiled."""
    if not torch.compiler.is_compiling():
        return statistics.statistics_backward(
            call, hidden, weight, bias, partial, kept, coefficients, needs, spent
        )
    c, (ticket,) = coefficients, kept
    gradients = torch.ops.parallel_lce.statistics_backward(
        hidden, weight, bias, call.target, partial, ticket, c.alpha, c.beta, c.gamma, c.delta,
        [needs.hidden, needs.weight, needs.bias], *_numbers(call),
    )  # fmt: skip
    return _complete(gradients, needs)


def accumulated(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    loss: WeightedLoss,
    divisor: Tensor | float,
    needs: Needs,
) -> accumulate.Accumulated:
    """:func:`parallel_lce.accumulate.accumulate`, an operator where it is compiled."""
    if not torch.compiler.is_compiling():
        return accumulate.accumulate(call, hidden, weight, bias, loss, divisor, needs)
    value, *gradients = torch.ops.parallel_lce.accumulated_loss(
        hidden, weight, bias, loss.target, loss.weights, loss.ignored,
        divisor if isinstance(divisor, Tensor) else None, loss.label_smoothing, loss.z_loss,
        [needs.hidden, needs.weight, needs.bias], *_numbers(call),
    )  # fmt: skip
    return accumulate.Accumulated(value, _complete(gradients, needs))
