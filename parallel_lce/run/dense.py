"""Forward and backward of a loss that saves fp32 logits.

The plan chooses it for small problems (:mod:`parallel_lce.core.plan`), which the GPU finishes before the host has
launched them. To save host time the code is straight: products, the launches of
:mod:`parallel_lce.backends.triton_dense`, and the collectives of :mod:`parallel_lce.run.schedule` for one block, in the
same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, product
from parallel_lce.call.call import Call, flattened
from parallel_lce.core.collectives import PartialsGather, gather_hidden
from parallel_lce.core.memory import device_without_autocast, in_memory, with_contiguous_rows
from parallel_lce.run.autograd import first_order_only


class DenseLoss(torch.autograd.Function):
    """The loss, of each token ``[N]`` or 0-dimensional."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        layout, dense, options, backend = call.layout, call.dense, call.options, call.backend
        target, scales, caps, weights = call.target, call.token_scale, call.token_cap, call.token_weight
        gathered = divisor = None
        with device_without_autocast(weight):
            x = hidden if hidden.dim() == 2 else flattened(hidden)
            if layout.sp_size > 1:
                x = gather_hidden(x, call.plan.blocks[0], layout).wait()
                gathered = x if call.plan.saves_hidden else None
            products = dense.products(x, weight)
            if layout.ranks == 1:
                value, found = dense.losses(products, (target, weights, bias, scales, caps))
            else:
                gather = PartialsGather(x, len(x), call.shard, call.columns, layout)
                dense.partial(products, gather.local, (call.local_targets(), None, bias, scales, caps))
                gather.start()
                partial, vocab_size = gather.finish(backend.merge_ranks)
                value, *each = backend.token_losses(partial, vocab_size, target, weights, options)
                found = torch.cat([partial, *[c[None] for c in each if c is not None]])
            if options.reduction == "mean":
                value, divisor = dense.mean(value, target, weights)
            elif options.reduction == "sum":
                value = value.sum()
        ctx.save_for_backward(hidden, weight, bias, target, scales, caps, found, divisor, gathered, products)
        ctx.call, ctx.consumed = call, False
        return value

    @staticmethod
    @first_order_only
    def backward(ctx, saved, upstream: Tensor):
        # Hooks for saved tensors may have changed strides, but those of an operand's rows.
        hidden, weight, *others = saved
        bias, target, scales, caps, found, divisor, gathered, products = [
            t if t is None or t.is_contiguous() else t.contiguous() for t in others
        ]
        call, (needs_hidden, needs_weight, *_) = ctx.call, ctx.needs_input_grad
        layout, dense, real = call.layout, call.dense, call.dense.entries
        consumed, ctx.consumed = ctx.consumed, True
        dx = dweight = reduction = incoming = None
        with device_without_autocast(weight):
            x = hidden if hidden.dim() == 2 else flattened(hidden)
            rows = weight.shape[0]
            shard = with_contiguous_rows(weight if real == rows else weight[:real])
            if gathered is not None:
                x = gathered
            elif layout.sp_size > 1:
                incoming = gather_hidden(x, call.plan.blocks[0], layout)
                x = incoming.tensor
            if consumed:
                # An earlier backward has overwritten the logits, past autograd's count of versions.
                dense.products(x if incoming is None else incoming.wait(), shard, products.data)
            if call.shard.start:
                target = target - call.shard.start
            gradient = dense.gradient(products, found, in_memory(upstream), divisor, (target, bias, scales, caps))
            if needs_hidden and layout.ranks > 1 and call.reduced_over.ranks > 1:
                block, reduction = call.plan.blocks[0], call.hidden_reduction(flattened(hidden))
                part = reduction.open_block(block)
                reduction.start(block, product(gradient, shard, part.dtype, part))
            elif needs_hidden:
                dx = product(gradient, shard, hidden.dtype)
            if incoming is not None:
                incoming.wait()
            if needs_weight and call.main_grad is not None:
                main_grad = call.main_grad.now()
                accumulate_nt(main_grad.tensor[:real], gradient.t(), x.t(), overwrite=False)
                dweight = main_grad.placeholder()
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
