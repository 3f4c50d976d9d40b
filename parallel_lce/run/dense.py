"""Forward and backward of a loss whose fp32 logits are saved, in straight code.

The plan chooses it for small problems (:mod:`parallel_lce.core.plan`), whose time is the host's. So there is nothing
here but products, the launches of :mod:`parallel_lce.backends.triton_dense`, and the collectives of
:mod:`parallel_lce.run.schedule` for one block, in its order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, product
from parallel_lce.call.call import Call, Inputs, flattened
from parallel_lce.core.collectives import PartialsGather, gather_hidden
from parallel_lce.core.memory import device_without_autocast, in_memory, some_rows
from parallel_lce.run.autograd import first_order_only


class _DenseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        layout, dense, options, backend = call.layout, call.dense, call.options, call.backend
        target, scales, caps, weights = call.target, call.token_scale, call.token_cap, call.token_weight
        with device_without_autocast(weight):
            x = gather_hidden(flattened(hidden), call.plan.blocks[0], layout).wait()
            products = dense.products(x, some_rows(weight, 0, call.shard.real_rows))
            if layout.ranks == 1:
                partial, value, coefficients = dense.losses(products, (target, weights, bias, scales, caps))
            else:
                gather = PartialsGather(x, len(x), call.shard, call.columns, layout)
                dense.partial(products, gather.local, (call.local_targets(), None, bias, scales, caps))
                gather.start()
                partial, vocab_size = gather.finish(backend.merge_ranks)
                value, *each = backend.token_losses(partial, vocab_size, target, weights, options)
                coefficients = torch.stack([each for each in each if each is not None])
            divisor = None
            if options.reduction == "mean":
                value, divisor = backend.mean_loss(value, target, weights, options.ignore_index)
            elif options.reduction == "sum":
                value = value.sum()
        gathered = x if call.plan.saves_hidden else None
        of_call = hidden, weight, bias, target, scales, caps
        ctx.save_for_backward(*of_call, partial, coefficients, divisor, gathered, products)
        ctx.call, ctx.consumed = call, False
        return value

    @staticmethod
    @first_order_only
    def backward(ctx, saved, upstream: Tensor):
        hidden, weight, bias, target, scales, caps, partial, coefficients, divisor, gathered, products = saved
        call, (needs_hidden, needs_weight, *_) = ctx.call, ctx.needs_input_grad
        layout, dense, real, block = call.layout, call.dense, call.shard.real_rows, call.plan.blocks[0]
        consumed, ctx.consumed = ctx.consumed, True
        dx = dweight = reduction = None
        with device_without_autocast(weight):
            factor = in_memory(upstream)
            factor = factor if divisor is None else factor / divisor
            flat, shard = flattened(hidden), some_rows(weight, 0, real)
            x = gather_hidden(flat, block, layout) if gathered is None else None
            if consumed:
                # An earlier backward has overwritten the logits.
                products = dense.products(gathered if x is None else x.wait(), shard)
            local = target - call.shard.start if call.shard.start else target
            # Autograd must not see that the logits are overwritten. Hooks for saved tensors may have changed strides.
            found = products.data.contiguous(), partial.contiguous(), coefficients.contiguous()
            g = dense.gradient(*found, factor, (local, bias, scales, caps))
            if needs_hidden and call.reduced_over.ranks > 1:
                reduction = call.hidden_reduction(flat, in_pieces=not needs_weight)
                part = reduction.open_block(block)
                reduction.start(block, product(g, shard, part.dtype, part), len(part))
            elif needs_hidden:
                dx = product(g, shard, hidden.dtype).view(hidden.shape)
            whole = gathered if x is None else x.wait()
            if needs_weight and call.main_grad is not None:
                main_grad = call.main_grad.now()
                accumulate_nt(some_rows(main_grad.tensor, 0, real), g.t(), whole.t(), overwrite=False)
                dweight = main_grad.placeholder()
            elif needs_weight and real == len(weight):
                dweight = product(g.t(), whole, weight.dtype)
            elif needs_weight:
                dweight = weight.new_empty(weight.shape)
                dweight[real:].zero_()
                product(g.t(), whole, weight.dtype, dweight[:real])
            if reduction is not None:
                dx = reduction.wait().view(hidden.shape)
        return dx, dweight, None, None


def dense_loss(call: Call, inputs: Inputs) -> Tensor:
    """The loss, of each token ``[N]`` or 0-dimensional."""
    return _DenseLoss.apply(*inputs, call)
