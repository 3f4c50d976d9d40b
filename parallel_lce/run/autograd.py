"""The autograd.Functions of a call. Autograd may run backward through one graph more than once.

The results of a call are statistics (:mod:`parallel_lce.run.statistics`) or a loss
(:mod:`parallel_lce.run.loss_results`). Both modules have ``outputs``, which makes the user's results from merged
partials, and ``coefficients``, which folds upstream gradients into coefficients of the gradient of the logits.

:class:`DenseLoss` makes fp32 logits, and saves them for a backward. The plan chooses it for problems so small that the
host needs longer for the launches than the GPU for the work. To save host time it does not use
:mod:`parallel_lce.run.schedule`, but runs its collectives for one block in the same order, between the launches of
:mod:`parallel_lce.backends.triton_dense`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, product
from parallel_lce.call.call import Call, Needs, flattened
from parallel_lce.core.collectives import PartialsGather, gather_hidden
from parallel_lce.core.memory import device_without_autocast, in_memory, on_device_of, with_aligned_rows
from parallel_lce.run import loss_results, statistics
from parallel_lce.run.schedule import accumulate, backward, forward
from parallel_lce.run.statistics import DIFFERENTIABLE, Residuals

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


class _Kept(NamedTuple):
    """The first saved tensors of :class:`Fused`. The tensors of the call and those that the backend saves follow."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    # [C, N], merged
    partial: Tensor
    # The gathered hidden states [N, D], if the plan saves them.
    gathered: Tensor | None
    # Residuals
    alpha: Tensor | None
    beta: Tensor | None
    gamma: Tensor | None
    delta: Tensor | None
    epsilon: Tensor | None
    excess: Tensor | None
    divisor: Tensor | None
    vocab_size: Tensor | None


_NUM_KEPT = len(_Kept._fields)


class Fused(torch.autograd.Function):
    """The results of a call: a loss; or all statistics, None if not asked for."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, call: Call):
        is_loss, save = call.options.reduction is not None, any(call.needs)
        # Most statistics get no upstream gradient: autograd need not make zeros for them.
        ctx.set_materialize_grads(is_loss)
        merged, gathered, saved = forward(call, hidden, weight, bias, save)
        outputs, residuals = (loss_results if is_loss else statistics).outputs(call, merged)
        if save:
            # The first backward overwrites the exponentials among ``saved``; later ones recompute them.
            kept = hidden, weight, bias, merged.partial, gathered, *residuals
            ctx.save_for_backward(*kept, *call.tensors, *saved)
            ctx.call, ctx.consumed = call, False
            for feature in call.features:
                feature.forget()
            if call.picked is not None:
                call.picked.forget()
        if is_loss:
            return outputs[0]
        ctx.mark_non_differentiable(*[v for v in outputs[len(DIFFERENTIABLE) :] if v is not None])
        return tuple(outputs)

    @staticmethod
    @first_order_only
    def backward(ctx, saved_tensors, *upstream):
        kept, (call, saved) = _Kept(*saved_tensors[:_NUM_KEPT]), ctx.call.with_saved(saved_tensors[_NUM_KEPT:])
        if call.main_grad is not None:
            call = call.replaced(main_grad=call.main_grad.now(ctx.next_functions[1][0]))
        needs, residuals = Needs(*ctx.needs_input_grad[:3]), Residuals(*kept[5:])
        if call.options.reduction is None:
            upstream = tuple([u if u is None else in_memory(u) for u in upstream])
            coefficients = statistics.coefficients(call, kept.partial, residuals, upstream)
        else:
            of_loss = loss_results.of_counted(in_memory(upstream[0]), call.target, call.options)
            coefficients = loss_results.coefficients(residuals, of_loss)
        consumed, ctx.consumed = ctx.consumed, True
        dx, dweight, dbias = backward(
            call, *kept[:3], kept.partial, kept.gathered, saved, coefficients, needs, consumed
        )
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


class DenseLoss(torch.autograd.Function):
    """The loss, of each token ``[N]`` or 0-dimensional."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        layout, dense, options, backend = call.layout, call.dense, call.options, call.backend
        target, logit_map, weights = call.target, call.logit_map, call.token_weight
        gathered = divisor = None
        with device_without_autocast(weight):
            x = with_aligned_rows(hidden if hidden.dim() == 2 else flattened(hidden))
            if layout.sp_size > 1:
                x = gather_hidden(x, call.plan.blocks[0], layout).wait()
                gathered = x if call.plan.saves_hidden else None
            products = dense.products(x, with_aligned_rows(weight))
            if layout.ranks == 1:
                value, stacked = dense.losses(products, (target, weights, bias, logit_map))
            else:
                gather = PartialsGather(x, len(x), call.shard, call.columns, layout, call.dtype)
                # A rank without entries has no dense logits, and sends second rows.
                sums, second = gather.local.tensor_split([call.columns.merged])
                second.zero_()
                dense.partial(products, sums, (call.local_targets(), None, bias, logit_map))
                gather.start()
                partial, vocab_size = gather.finish(backend.merge_ranks)
                assert target is not None
                value, coefficients = backend.token_losses(partial, vocab_size, target, weights, options)
                each = [c[None] for c in coefficients[:3] if c is not None]
                stacked = torch.cat([partial, *each]) if any(call.needs) else None
            if options.reduction == "mean":
                value, divisor = dense.mean(value, target, weights)
            elif options.reduction == "sum":
                value = value.sum()
        ctx.save_for_backward(hidden, weight, bias, target, *logit_map.tensors, stacked, divisor, gathered, products)
        ctx.call, ctx.consumed = call, False
        return value

    @staticmethod
    @first_order_only
    def backward(ctx, saved, upstream: Tensor):
        # Saved-tensor hooks may have changed strides. The operands hidden and weight may have any row stride.
        hidden, weight, *others = saved
        contiguous: list[Any] = [t if t is None or t.is_contiguous() else t.contiguous() for t in others]
        bias, target, scales, caps, stacked, divisor, gathered, products = contiguous
        call, (needs_hidden, needs_weight, *_) = ctx.call, ctx.needs_input_grad
        logit_map = call.logit_map.with_tensors(scales, caps)
        layout, dense, real = call.layout, call.dense, call.dense.entries
        consumed, ctx.consumed = ctx.consumed, True
        dx = dweight = reduction = incoming = None
        with device_without_autocast(weight):
            upstream = loss_results.of_counted(in_memory(upstream), target, call.options)
            x = with_aligned_rows(hidden if hidden.dim() == 2 else flattened(hidden))
            if needs_hidden and layout.ranks > 1 and call.options.reduce_hidden_grad:
                reduction = call.hidden_reduction(x)  # in debug mode an exchange, before the gather on every rank
            rows = weight.shape[0]
            shard = with_aligned_rows(weight if real == rows else weight[:real])
            if gathered is not None:
                x = gathered
            elif layout.sp_size > 1:
                incoming = gather_hidden(x, call.plan.blocks[0], layout)
                x = incoming.tensor
            if consumed:
                # An earlier backward has overwritten the logits. Autograd's version counter ignores writes to .data.
                dense.products(x if incoming is None else incoming.wait(), shard, products.data)
            if call.shard.start:
                target = target - call.shard.start
            gradient = dense.gradient(products, stacked, upstream, divisor, (target, bias, logit_map))
            if reduction is not None:
                block = call.plan.blocks[0]
                local = reduction.open_block(block)
                reduction.start(block, product(gradient, shard, local.dtype, local))
            elif needs_hidden:
                dx = product(gradient, shard, hidden.dtype)
            if incoming is not None:
                incoming.wait()
            main_grad = call.main_grad and call.main_grad.now(ctx.next_functions[1][0])
            if needs_weight and main_grad is not None:
                accumulate_nt(main_grad.tensor[:real], gradient.t(), x.t(), overwrite=False)
                dweight = main_grad.placeholder(products)
            elif needs_weight and real == rows:
                dweight = product(gradient.t(), x, weight.dtype)
            elif needs_weight:
                dweight = weight.new_empty(weight.shape)
                dweight[real:].zero_()
                product(gradient.t(), x, weight.dtype, dweight[:real])
            dx = dx if reduction is None else reduction.wait()
            if dx is not None and dx.dim() != hidden.dim():
                dx = dx.view(hidden.shape)
        return dx, dweight, None, None
