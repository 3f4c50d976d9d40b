"""Forward and backward of a call joined for autograd, which may walk a graph more than once.

A *head* computes a call's outputs from merged partials: :class:`parallel_lce.statistics.StatisticsHead` the statistics,
:class:`parallel_lce.losses.WeightedLoss` per-token losses, :class:`parallel_lce.losses.ReducedLoss` their sum or mean.
Its ``outputs`` gives the outputs and the residuals for the backward, its ``coefficients`` folds upstream gradients into
coefficients of the gradient of the logits.

In a compiled graph, and for tensors without values, the operators of :mod:`parallel_lce.ops` run instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallel_lce import ops
from parallel_lce.backends import uses_kernels
from parallel_lce.backends.interface import Saved
from parallel_lce.backends.loss import mean_loss
from parallel_lce.call import Call, Gradients, Inputs, Needs, flattened
from parallel_lce.losses import ReducedLoss, WeightedLoss
from parallel_lce.memory import in_memory, on_device_of
from parallel_lce.schedule import accumulate, backward, forward
from parallel_lce.statistics import StatisticsHead

Head = StatisticsHead | WeightedLoss | ReducedLoss

_SCALED_BYTES = 16 << 20


class _FirstOrder(torch.autograd.Function):
    """The identity on a gradient, whose derivative is refused.

    All tensors on which the gradient depends are inputs, too, so a second derivative by any of them is refused.
    """

    @staticmethod
    def forward(ctx, gradient: Tensor, *dependencies: Tensor) -> Tensor:
        return gradient.clone()  # A view could not be changed in place, as gradients often are.

    @staticmethod
    def backward(ctx, upstream: Tensor):
        raise RuntimeError(ops.FIRST_ORDER)


def first_order_only(backward: Callable) -> Callable:
    """Make ``backward(ctx, saved, *upstream)`` that of an autograd.Function, ``saved`` being its saved tensors.

    With ``create_graph=True`` autograd would treat the gradients as constants, and second derivatives would silently be
    wrong. :class:`_FirstOrder` records what they depend on, and raises instead.
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


class _Fused(torch.autograd.Function):
    """The outputs of a head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call, head: Head):
        # Most statistics get no upstream gradient, and no zeros are made for them.
        ctx.set_materialize_grads(head.num_differentiable == 1)
        outputs, residuals, partial, saved = _forward(call, (hidden, weight, bias), head, save=True)
        # The first backward overwrites the exponentials among ``saved``; later ones recompute them.
        ctx.save_for_backward(hidden, weight, bias, *call.per_token, partial, *residuals, *saved)
        ctx.call, ctx.head, ctx.consumed = call, head, False
        if len(outputs) > head.num_differentiable:
            ctx.mark_non_differentiable(*[v for v in outputs[head.num_differentiable :] if v is not None])
        return tuple(outputs)

    @staticmethod
    @first_order_only
    def backward(ctx, saved_tensors, *upstream):
        (hidden, weight, bias), others = saved_tensors[:3], saved_tensors[3:]
        # A saved-tensor hook may have returned them in other memory.
        count = len(ctx.call.per_token)
        call, partial, others = ctx.call.with_tensors(others[:count]), others[count], others[count + 1 :]
        number = ctx.head.num_residuals
        residuals, saved = others[:number], tuple(others[number:])
        upstream = tuple([u if u is None else in_memory(u) for u in upstream])
        needs, head, main_grad = Needs(*ctx.needs_input_grad[:3]), ctx.head, call.main_grad
        now = main_grad and main_grad.now()
        if now is not main_grad:
            call, main_grad = replace(call, main_grad=now), now
        if isinstance(head, StatisticsHead):
            head = call.statistics()
        consumed, ctx.consumed = ctx.consumed, True

        def work() -> Gradients:
            coefficients = head.coefficients(partial, residuals, upstream)
            return backward(call, hidden, weight, bias, partial, saved, coefficients, needs, consumed)

        added_to = None if main_grad is None else main_grad.tensor
        kind = "backward", needs, consumed
        dx, dweight, dbias = call.run(kind, work, *saved_tensors, *upstream, added_to)
        if main_grad is not None and needs.weight:
            dweight = main_grad.placeholder()
        return dx, dweight, dbias, None, None


def fused(call: Call, inputs: Inputs, head: Head, differentiable: bool) -> tuple[Any, ...]:
    """The outputs of a head; None for one not asked for. Nothing is saved unless ``differentiable``."""
    if ops.uses_operators(inputs[1]):
        assert not isinstance(head, ReducedLoss)
        return ops.fused(call, inputs, head, differentiable)
    if differentiable:
        return _Fused.apply(*inputs, call, head)
    with torch.no_grad():
        return tuple(_forward(call, inputs, head, save=False)[0])


def _forward(call: Call, inputs: Inputs, head: Head, save: bool) -> tuple[list, tuple, Tensor, Saved]:
    """The head's outputs and residuals, the merged partial, and what is saved for backward."""

    def work():
        merged, saved = forward(call, *inputs, save=save)
        outputs, residuals = head.outputs(call.backend, merged)
        return outputs, residuals, merged.partial, saved

    return call.run(("forward", save), work, *inputs, *call.per_token, head.weights)


def token_losses(call: Call, inputs: Inputs, loss: WeightedLoss, differentiable: bool) -> Tensor:
    """The loss of each token ``[N]``, differentiable by the tokens' weights, too."""
    weights = loss.token_weight
    if weights is not None and _differentiable_by_weights(loss):
        losses = token_losses(call, inputs, replace(loss, token_weight=None), differentiable)
        return torch.where(loss.counted, losses * weights, 0.0)
    return fused(call, inputs, loss, differentiable)[0]


def _differentiable_by_weights(loss: WeightedLoss) -> bool:
    weights = loss.token_weight
    return torch.is_grad_enabled() and weights is not None and weights.requires_grad


def reduced_loss(call: Call, inputs: Inputs, loss: WeightedLoss, mean: bool, differentiable: bool) -> Tensor:
    """The sum of the tokens' losses, or their mean by weight, 0-dimensional."""
    if not (ops.uses_operators(inputs[1]) or _differentiable_by_weights(loss)):
        return fused(call, inputs, ReducedLoss(loss, mean), differentiable)[0]
    losses = token_losses(call, inputs, loss, differentiable)
    return mean_loss(losses, loss.target, loss.token_weight, loss.ignore_index)[0] if mean else losses.sum()


class _AccumulatedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call, loss: WeightedLoss, divisor):
        needs = Needs(*ctx.needs_input_grad[:3])
        value, *gradients = _accumulate(call, (hidden, weight, bias), loss, divisor, needs)
        ctx.save_for_backward(hidden, weight, bias, loss.token_weight, *call.per_token)
        ctx.arguments, ctx.gradients = (call, loss, divisor, needs), gradients
        return value

    @staticmethod
    @first_order_only
    def backward(ctx, saved, upstream):
        hidden, weight, bias, token_weight, *per_token = saved
        # The first backward scales the sums in place and hands them over: a copy would double the largest buffer of the
        # call. A later backward through the same graph forms them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            call, loss, divisor, needs = ctx.arguments
            call = call.with_tensors(per_token)
            token_weight = token_weight if token_weight is None else token_weight.contiguous()
            assert call.target is not None
            loss = replace(loss, target=call.target, token_weight=token_weight)
            _, *gradients = _accumulate(call, (hidden, weight, bias), loss, divisor, needs)
        delivered = [
            g if g is None else scaled(g, upstream, tensor.dtype)
            for g, tensor in zip(gradients, (hidden, weight, bias))
        ]
        return *delivered, None, None, None


def _accumulate(
    call: Call, inputs: Inputs, loss: WeightedLoss, divisor: Tensor | None, needs: Needs
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss, and the gradients formed with it."""

    def work():
        done = accumulate(call, *inputs, loss, divisor, needs)
        return done.loss, *done.gradients

    return call.run(("accumulate", needs), work, *inputs, *call.per_token, loss.token_weight, divisor)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in ``dtype``, in place where that is its own."""
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    if gradient.dim() > 1 and gradient.numel() and gradient.is_contiguous() and uses_kernels(gradient):
        from parallel_lce.kernels.targets import scale_and_add_targets

        with on_device_of(gradient):
            scale_and_add_targets(flattened(gradient), factor, None, flattened(result))
        return result
    if gradient.dtype == factor.dtype:
        return torch.mul(gradient, factor, out=result)
    # torch.mul would round the factor to the gradient's dtype.
    rows = max(1, _SCALED_BYTES // max(1, gradient[:1].numel() * factor.element_size()))
    for source, destination in zip(gradient.split(rows), result.split(rows)):
        destination.copy_(source.to(factor.dtype) * factor)
    return result


def accumulated_loss(call: Call, inputs: Inputs, loss: WeightedLoss, divisor: Tensor | None) -> Tensor:
    """The reduced loss, 0-dimensional. Its gradients are formed in this call."""
    if ops.uses_operators(inputs[1]):
        return ops.accumulated_loss(call, inputs, loss, divisor)
    return _AccumulatedLoss.apply(*inputs, call, loss, divisor)
