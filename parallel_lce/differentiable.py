"""Forward and backward joined for autograd, which may walk a graph more than once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from parallel_lce import ops
from parallel_lce.accumulate import accumulate
from parallel_lce.backends.blocks import Coefficients
from parallel_lce.losses import WeightedLoss
from parallel_lce.statistics import (
    DIFFERENTIABLE,
    NAMES,
    Call,
    Needs,
    TokenStatistics,
    coefficients,
    finish_statistics,
    statistics_backward,
    statistics_forward,
)

_SCALED_BYTES = 16 << 20


class _FirstOrder(torch.autograd.Function):
    """The identity on a gradient. What the gradient depends on is an input too, so that whoever
    differentiates it meets the refusal, whichever leaves he asks for."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *dependencies: Tensor) -> Tensor:
        return gradient.clone()  # a view could not be changed in place, as gradients often are

    @staticmethod
    def backward(ctx, upstream: Tensor):
        raise RuntimeError(ops.FIRST_ORDER)


def first_order_only(backward: Callable) -> Callable:
    """Make ``backward(ctx, saved, *upstream)`` that of an autograd.Function, ``saved`` being what it saved.

    With ``create_graph=True`` the gradients are recorded as functions of the saved tensors and the upstream
    gradients whose derivative is refused. Without a record they would count as constants, and second
    derivatives be wrong without a word.
    """

    @functools.wraps(backward)
    def call(ctx, *upstream):
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx, saved, *upstream)
        if not torch.is_grad_enabled():
            return gradients
        dependencies = [t for t in (*saved, *upstream) if t is not None and t.requires_grad]
        return tuple(g if g is None else _FirstOrder.apply(g, *dependencies) for g in gradients)

    return call


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call):
        ctx.set_materialize_grads(False)
        partial, vocab_size, kept = statistics_forward(call, hidden, weight, bias, keep=True)
        ctx.save_for_backward(hidden, weight, bias, call.target, partial, vocab_size, *kept)
        ctx.call, ctx.spent = call, False
        statistics = finish_statistics(partial, vocab_size, call.columns, call.target is not None)
        values = tuple(getattr(statistics, name) for name in NAMES)
        ctx.mark_non_differentiable(*(v for v in values[len(DIFFERENTIABLE) :] if v is not None))
        return values

    @staticmethod
    @first_order_only
    def backward(ctx, saved, *gradients):
        hidden, weight, bias, target, partial, vocab_size, *kept = saved
        call = replace(ctx.call, target=target)
        upstream = dict(zip(DIFFERENTIABLE, gradients))
        folded = coefficients(upstream, partial, vocab_size, call.columns)
        needs = Needs(*ctx.needs_input_grad[:3])
        spent, ctx.spent = ctx.spent, True
        found = statistics_backward(call, hidden, weight, bias, partial, tuple(kept), folded, needs, spent)
        return *found, None


def token_statistics(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, differentiable: bool
) -> TokenStatistics:
    """Statistics ``[N]`` of ``hidden [..., D]`` against the shard ``weight [V/P, D]``.

    Nothing is kept unless ``differentiable``.
    """
    if ops.needed(weight):
        return ops.token_statistics(call, hidden, weight, bias, differentiable)
    if differentiable:
        return TokenStatistics(*_Statistics.apply(hidden, weight, bias, call))
    with torch.no_grad():
        partial, vocab_size, _ = statistics_forward(call, hidden, weight, bias, keep=False)
        return finish_statistics(partial, vocab_size, call.columns, call.target is not None)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call, loss: WeightedLoss):
        partial, vocab_size, kept = statistics_forward(call, hidden, weight, bias, keep=True)
        losses, c = loss.of_partials(call.backend, partial, vocab_size)
        ctx.save_for_backward(hidden, weight, bias, call.target, partial, c.alpha, c.beta, c.gamma, *kept)
        ctx.call, ctx.spent = call, False
        return losses

    @staticmethod
    @first_order_only
    def backward(ctx, saved, upstream):
        hidden, weight, bias, target, partial, alpha, beta, gamma, *kept = saved
        call = replace(ctx.call, target=target)
        folded = Coefficients(alpha, beta, gamma, None).times(upstream)
        needs = Needs(*ctx.needs_input_grad[:3])
        spent, ctx.spent = ctx.spent, True
        found = statistics_backward(call, hidden, weight, bias, partial, tuple(kept), folded, needs, spent)
        return *found, None, None


def token_losses(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: WeightedLoss, differentiable: bool
) -> Tensor:
    """The loss of each token ``[N]``."""
    weights = loss.token_weight
    if torch.is_grad_enabled() and weights is not None and weights.requires_grad:
        plain = replace(loss, token_weight=None)
        losses = token_losses(call, hidden, weight, bias, plain, differentiable)
        return (losses * weights).masked_fill(loss.ignored, 0.0)
    if ops.needed(weight):
        return ops.token_losses(call, hidden, weight, bias, loss, differentiable)
    if differentiable:
        return _Losses.apply(hidden, weight, bias, call, loss)
    with torch.no_grad():
        partial, vocab_size, _ = statistics_forward(call, hidden, weight, bias, keep=False)
        return loss.of_partials(call.backend, partial, vocab_size)[0]


class _AccumulatedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call, loss: WeightedLoss, divisor):
        needs = Needs(*ctx.needs_input_grad[:3])
        done = accumulate(call, hidden, weight, bias, loss, divisor, needs)
        ctx.save_for_backward(hidden, weight, bias, loss.target, loss.token_weight)
        ctx.arguments, ctx.gradients = (call, loss, divisor, needs), done.gradients
        return done.loss

    @staticmethod
    @first_order_only
    def backward(ctx, saved, upstream):
        hidden, weight, bias, target, token_weight = saved
        # The first backward scales the sums in place and hands them over: a copy would double the
        # largest buffer of the call. A later backward through the same graph forms them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            call, loss, divisor, needs = ctx.arguments
            call = replace(call, target=target)
            token_weight = token_weight if token_weight is None else token_weight.contiguous()
            loss = replace(loss, target=target.contiguous(), token_weight=token_weight)
            gradients = accumulate(call, hidden, weight, bias, loss, divisor, needs).gradients
        scaled = (
            g if g is None else _scaled(g, upstream, tensor.dtype)
            for g, tensor in zip(gradients, (hidden, weight, bias))
        )
        return *scaled, None, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in ``dtype``, in place where that is its own."""
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    if gradient.dtype == factor.dtype:
        return torch.mul(gradient, factor, out=result)
    # torch would round the factor to the gradient's dtype.
    rows = max(1, _SCALED_BYTES // max(1, gradient[:1].numel() * factor.element_size()))
    for source, destination in zip(gradient.split(rows), result.split(rows)):
        destination.copy_(source.to(factor.dtype) * factor)
    return result


def accumulated_loss(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: WeightedLoss, divisor: Tensor | float
) -> Tensor:
    """The reduced loss, 0-dimensional, whose gradients exist when this returns."""
    if ops.needed(weight):
        return ops.accumulated_loss(call, hidden, weight, bias, loss, divisor)
    return _AccumulatedLoss.apply(hidden, weight, bias, call, loss, divisor)
