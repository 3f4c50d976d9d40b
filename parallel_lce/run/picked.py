"""The log-softmax over each token's picked entries alone.

No logit of another entry is computed, so there is no plan and no schedule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.backends.interface import PickedGradient
from parallel_lce.call.call import Call, flattened
from parallel_lce.call.prepare import prepare
from parallel_lce.core.collectives import gather_hidden, gather_with_trailer
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import TRAILER, accumulation_dtype
from parallel_lce.core.plan import Block
from parallel_lce.run.autograd import first_order_only


def log_probs_of(options: Options, tensors: Tensors, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | int]:
    """Log-softmax over each token's picked entries, in their shape, and V."""
    call, inputs = prepare(options._replace(logits_budget=0), tensors, group, planned=False)
    log_probs, vocab_size = _Picked.apply(*inputs, call)
    return log_probs.view(tensors.picked.shape), vocab_size


class _Picked(torch.autograd.Function):
    """Log-softmax ``[E]``, and V."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor | int]:
        picked = call.picked
        assert picked is not None
        packed, broken, vocab_size = _gathered_logits(call, hidden, weight, bias)
        with device_without_autocast(weight):
            log_probs, logits = call.backend.log_softmax_of_sets(packed, picked, broken, vocab_size)
        ctx.call = call
        picked.forget()
        ctx.save_for_backward(hidden, weight, bias, *call.tensors, log_probs, logits)
        if isinstance(vocab_size, Tensor):
            ctx.mark_non_differentiable(vocab_size)
        return log_probs, vocab_size

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor, _: None):
        hidden, weight, bias, *tensors, log_probs, logits = saved
        (call, _), gradient = ctx.call.with_saved(tensors), in_memory(upstream).contiguous()
        with device_without_autocast(weight):
            gradient = call.backend.gradient_of_sets(log_probs, gradient, call.picked)
            values = call.logit_map.each(call.picked.spread).before(gradient, logits)
        return *_gradients(call, hidden, weight, bias, values, ctx.needs_input_grad), None


def _whole(call: Call) -> Block:
    return Block(0, call.shape.numel() // call.layout.sp_size, 0)


def _gathered_logits(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | int]:
    """All ranks' logits of the picked entries ``[P, >= E]``, 0 for other ranks' ids; a 0-dimensional flag, or None,
    that is true if shards or offsets are invalid, or if the ranks' ids or offsets differ; and V."""
    layout, shard, picked, whole = call.layout, call.shard, call.picked, _whole(call)
    assert picked is not None
    count, dtype = picked.count, accumulation_dtype(weight.dtype)
    with device_without_autocast(weight):
        x = gather_hidden(flattened(hidden), whole, layout).wait()
        # A row is a rank's logits, 0 for other ranks' ids, and its trailer.
        packed = x.new_zeros(layout.ranks, count + TRAILER, dtype=dtype)
        own = packed[layout.rank]
        projection = call.of_block(call.projection(weight, bias), whole)
        call.backend.picked_logits(projection, x, picked.of_block(layout, whole, shard.start), own[:count])
        vocab_size, wrong = gather_with_trailer(packed, shard, layout, picked.tensors)
        broken = picked.broken
        if wrong is not None:
            broken = wrong if broken is None else broken | wrong
        return packed, broken, vocab_size


def _gradients(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dW and dbias from the gradients ``values [E]`` of the projection's output."""
    layout, shard, picked, whole = call.layout, call.shard, call.picked, _whole(call)
    assert picked is not None
    dx = dweight = dbias = None
    with device_without_autocast(weight):
        weight = call.projection(weight, bias).weight
        flat, real = flattened(hidden), shard.real_rows
        gradient = PickedGradient(picked.of_block(layout, whole, shard.start), values)
        if needs[0]:
            reduction = call.hidden_reduction(flat)
            local = reduction.open_block(whole)
            call.backend.picked_hidden_gradient(weight[:real], gradient, local)
            reduction.start(whole, local)
            dx = reduction.wait().view(hidden.shape)
        if needs[1] or needs[2]:
            x = gather_hidden(flat, whole, layout).wait()
            dweight = torch.empty_like(weight)
            dbias = None if bias is None else torch.empty_like(bias)
            for gradient_of in (dweight, dbias):
                if gradient_of is not None and real < len(weight):
                    gradient_of[real:].zero_()
            of_bias = None if dbias is None else dbias[:real]
            call.backend.picked_weight_gradient(x, picked.owner, gradient, dweight[:real], of_bias)
    return dx, dweight if needs[1] else None, dbias if needs[2] else None
