"""Gradients formed in forward: Algorithms 3 and 4 of "From Projection to Prediction", over ranks and
row blocks.

A ``mean`` or ``sum`` knows each token's weight before backward, so a block's gradients are formed
from its exponentials as soon as its statistics are merged, and backward only scales them by the
scalar upstream gradient. 6 N V D flops with one block of logits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_lce.backends.blocks import Coefficients
from parallel_lce.losses import WeightedLoss
from parallel_lce.parallel import gather_partials
from parallel_lce.plan import Block
from parallel_lce.statistics import (
    DIFFERENTIABLE,
    Call,
    GradientSums,
    Needs,
    coefficients,
    finish_statistics,
    first_order_only,
    hidden_blocks,
    token_count,
)
from parallel_lce.weight_grad import accumulation_dtype

_SCALED_BYTES = 16 << 20


@dataclass
class Accumulated:
    """Weighted losses ``[N]`` and the gradients of their sum over the divisor: dX in the hidden
    states' dtype, dW and dbias in fp32 (fp64 for fp64)."""

    per_token: Tensor
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]


def accumulate(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    loss: WeightedLoss,
    divisor: Tensor | float,
    needs: Needs,
) -> Accumulated:
    """Losses and gradients in one pass over the blocks.

    Collectives per block: under sequence parallelism the all-gather of its hidden states, started a
    block ahead; the all-gather of its partials, waited for after the next block's projection; the
    reduction of its dX.
    """
    layout, columns = call.layout, call.columns
    projection = call.projection(weight, bias)
    dtype = accumulation_dtype(weight.dtype)
    sums = GradientSums(call, hidden, projection, needs, dtype)
    per_token = hidden.new_empty(token_count(hidden, layout), dtype=dtype)

    def complete(block: Block, x, merged, kept) -> None:
        partial, vocab_size = merged()
        losses, folded = _block_coefficients(call, block, partial, vocab_size, loss, divisor)
        layout.put(per_token, block, losses)
        sums.add_block(block, x, partial, folded, kept)

    # Over ranks a block waits for its statistics while the next one is projected.
    ahead = 1 if layout.ranks > 1 else 0
    backend, blocks = call.backend, call.plan.blocks
    rows = layout.parts * max((b.stop - b.start for b in blocks), default=0)
    kept_columns = max((b.kept for b in blocks), default=0)
    buffers = deque(
        backend.allocate_kept(projection, rows, kept_columns) for _ in range(ahead + 1)
    )
    waiting: deque = deque()
    for block, pending in hidden_blocks(call, hidden):
        x = pending.wait()
        buffers.rotate(1)
        target = call.local_target(block)
        local, kept = backend.block_forward(
            projection, x, target, columns, block.kept, buffers[0]
        )
        merged = gather_partials(local, call.shard, columns, layout)
        waiting.append((block, x, merged, kept))
        if len(waiting) > ahead:
            complete(*waiting.popleft())
    while waiting:
        complete(*waiting.popleft())
    return Accumulated(per_token, sums.deliver())


def _block_coefficients(
    call: Call,
    block: Block,
    partial: Tensor,
    vocab_size: Tensor,
    loss: WeightedLoss,
    divisor: Tensor | float,
) -> tuple[Tensor, Coefficients]:
    """A block's weighted losses ``[R]`` and the coefficients that autograd finds for them."""
    statistics = finish_statistics(partial, vocab_size, call.columns, True)
    leaves = {
        name: value.requires_grad_()
        for name in DIFFERENTIABLE
        if (value := getattr(statistics, name)) is not None
    }
    # The caller's saved-tensor hooks (activation checkpointing) are for the graph of the call.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        losses = loss.per_token(
            replace(statistics, **leaves), lambda tokens: call.layout.take(tokens, block)
        )
        found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
    upstream = {name: g if g is None else g / divisor for name, g in zip(leaves, found)}
    return losses.detach(), coefficients(upstream, partial, vocab_size, call.columns)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _AccumulatedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call, loss: WeightedLoss, divisor):
        needs = Needs(*ctx.needs_input_grad[:3])
        done = accumulate(call, hidden, weight, bias, loss, divisor, needs)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.arguments, ctx.gradients = (call, loss, divisor, needs), done.gradients
        return done.per_token.sum() / divisor

    @staticmethod
    @first_order_only
    def backward(ctx, upstream):
        hidden, weight, bias = ctx.saved_tensors
        # The first backward scales the sums in place and hands them over: a copy would double the
        # largest buffer of the call. A later backward through the same graph forms them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            call, loss, divisor, needs = ctx.arguments
            gradients = accumulate(call, hidden, weight, bias, loss, divisor, needs).gradients
        scaled = (
            g if g is None else _scaled(g, upstream, tensor.dtype)
            for g, tensor in zip(gradients, (hidden, weight, bias))
        )
        return (*scaled, None, None, None)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in ``dtype``, in place where that is its own."""
    if gradient.dtype == factor.dtype == dtype:
        return gradient.mul_(factor)
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    rows = max(1, _SCALED_BYTES // max(1, gradient[:1].numel() * factor.element_size()))
    for source, destination in zip(gradient.split(rows), result.split(rows)):
        destination.copy_(source.to(factor.dtype) * factor)
    return result


def accumulated_loss(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    loss: WeightedLoss,
    divisor: Tensor | float,
) -> Tensor:
    """The reduced loss, 0-dimensional, whose gradients exist when this returns."""
    return _AccumulatedLoss.apply(hidden, weight, bias, call, loss, divisor)
