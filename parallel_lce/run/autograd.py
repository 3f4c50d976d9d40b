"""The autograd.Functions of a call. Autograd may run backward through one graph more than once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from parallel_lce.call.call import Call, Needs
from parallel_lce.core.memory import in_memory, on_device_of
from parallel_lce.core.partials import Coefficients
from parallel_lce.run.results import DIFFERENTIABLE, NAMES, loss_of, of_statistics
from parallel_lce.run.schedule import accumulate, backward, forward

FIRST_ORDER = "gradients of parallel_lce cannot be differentiated twice (create_graph=True)"


def first_order_only(backward: Callable) -> Callable:
    """Decorator for an autograd.Function's ``backward(ctx, saved, *upstream)``, where ``saved`` are its saved tensors.

    With ``create_graph=True`` autograd would treat the gradients as constants, and second derivatives would silently be
    wrong: that is refused. (PyTorch's ``once_differentiable`` refuses only if an upstream gradient has a graph.)
    """

    @functools.wraps(backward)
    def call(ctx, *upstream):
        if torch.is_grad_enabled():
            raise RuntimeError(FIRST_ORDER)
        return backward(ctx, ctx.saved_tensors, *upstream)

    return call


class Fused(torch.autograd.Function):
    """The results of a call: a loss; or all statistics, None if not asked for."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call):
        save = any(call.needs)
        # Most statistics get no upstream gradient: autograd need not make zeros for them.
        ctx.set_materialize_grads(call.kind == "loss")
        merged, gathered, saved, found = forward(call, hidden, weight, bias, save)
        # ``kept``: from what backward makes the coefficients.
        if call.kind == "loss":
            outputs, kept = loss_of(call, merged, found)
        else:
            outputs, kept = tuple([found.get(name) for name in NAMES]), (found["vocab_size"],)
            ctx.mark_non_differentiable(*[v for v in outputs[len(DIFFERENTIABLE) :] if v is not None])
        if save:
            # The first backward overwrites the exponentials among ``saved``; later ones recompute them.
            ctx.save_for_backward(hidden, weight, bias, merged.partial, gathered, *kept, *call.tensors, *saved)
            ctx.call, ctx.kept, ctx.consumed = call, len(kept), False
            for feature in call.features:  # autograd keeps these, and saved-tensor hooks may move them
                feature.saved = None
        return outputs

    @staticmethod
    @first_order_only
    def backward(ctx, saved_tensors, *upstream):
        hidden, weight, bias, partial, gathered, *others = saved_tensors
        kept: list[Any] = others[: ctx.kept]
        call, saved = ctx.call.with_saved(others[ctx.kept :])
        if call.main_grad is not None:
            call = call.replaced(main_grad=call.main_grad.now(ctx.next_functions[1][0]))
        needs, upstream = Needs(*ctx.needs_input_grad[:3]), tuple([u if u is None else in_memory(u) for u in upstream])
        if call.kind == "loss":  # saved-tensor hooks may have changed the strides
            values: list[Any] = [c if c is None else c.contiguous() for c in kept]
            coefficients = Coefficients(*values)._replace(factor=upstream[0])
        else:
            (vocab_size,) = kept
            coefficients = of_statistics(call, partial, vocab_size, upstream)
        consumed, ctx.consumed = ctx.consumed, True
        given = hidden, weight, bias, partial, gathered
        dx, dweight, dbias = backward(call, *given, saved, coefficients, needs, consumed)
        if call.main_grad is not None and needs.weight:
            memory = call.backend.Saved(*saved).exponentials if saved else None
            dweight = call.main_grad.placeholder(memory)
        return dx, dweight, dbias, None


class AccumulatedLoss(torch.autograd.Function):
    """The reduced loss, 0-dimensional. Its gradients are formed in forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call):
        ctx.call = call
        value, ctx.gradients = accumulate(call, hidden, weight, bias, call.needs)
        ctx.save_for_backward(hidden, weight, bias, *call.tensors)
        return value

    @staticmethod
    @first_order_only
    def backward(ctx, saved, upstream):
        inputs, tensors, call = saved[:3], saved[3:], ctx.call
        # The first backward scales the gradients in place and returns them: a copy would double the call's largest
        # buffer. A later backward through the same graph forms them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = accumulate(call.with_saved(tensors)[0], *inputs, needs=call.needs)
        with on_device_of(inputs[1]):
            scaled = call.backend.scaled
            upstream = in_memory(upstream)
            return *[g if g is None else scaled(g, upstream, t.dtype) for g, t in zip(gradients, inputs)], None


def function_of(call: Call) -> type[torch.autograd.Function]:
    """The Function of a planned call. Its inputs are hidden states, weight, bias and the call."""
    return AccumulatedLoss if call.plan.accumulate else Fused
