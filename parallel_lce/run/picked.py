"""The log-softmax over each token's picked entries alone.

No logit of another entry is computed, so there is no plan and no schedule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call.call import Call, flattened
from parallel_lce.call.prepare import prepare
from parallel_lce.core.collectives import gather_hidden, gather_with_trailer
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import TRAILER
from parallel_lce.core.picked import Picked
from parallel_lce.core.plan import Block
from parallel_lce.run.autograd import first_order_only


def log_probs_of(options: Options, tensors: Tensors, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | int]:
    """Log-softmax over each token's picked entries, in their shape, and V."""
    call, inputs = prepare(options._replace(logits_budget=0), tensors, group, planned=False)
    log_probs, vocab_size = _LogProbs.apply(*inputs, call)
    return log_probs.view(tensors.picked.shape), vocab_size


class _LogProbs(torch.autograd.Function):
    """Log-softmax ``[E]``, and V."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor | int]:
        layout, shard, picked = call.layout, call.shard, call.picked
        assert picked is not None
        count = len(picked.ids)
        with device_without_autocast(weight):
            x = _gathered(call, hidden)
            # A row is a rank's logits, 0 for other ranks' ids, and its trailer.
            packed = x.new_zeros(layout.ranks, count + TRAILER, dtype=call.dtype)
            local = picked._replace(ids=picked.ids - shard.start, logits=packed[layout.rank, :count])
            call.backend.picked_logits(call.projection(weight, bias), x, local)
            vocab_size, differing = gather_with_trailer(packed, shard, layout, picked[:3])
            logits = packed[:, :count].sum(0)
            log_probs = call.backend.log_softmax_of_sets(logits, picked, vocab_size)
            for wrong in (differing, picked.invalid):
                if wrong is not None:
                    log_probs.masked_fill_(wrong, torch.nan)
        ctx.call = call
        ctx.save_for_backward(hidden, weight, bias, *call.tensors, log_probs, logits)
        if isinstance(vocab_size, Tensor):
            ctx.mark_non_differentiable(vocab_size)
        return log_probs, vocab_size

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor, _: None):
        hidden, weight, bias, *tensors, log_probs, logits = saved
        (call, _), needs = ctx.call.with_saved(tensors), ctx.needs_input_grad
        backend, real, picked = call.backend, call.shard.real_rows, call.picked
        assert picked is not None
        dx = dweight = dbias = None
        with device_without_autocast(weight):
            owner = picked.owner
            gradient = backend.gradient_of_sets(log_probs.contiguous(), in_memory(upstream).contiguous(), picked)
            gradient = call.logit_map.of_rows(owner).before(gradient, logits)
            local = picked._replace(ids=picked.ids - call.shard.start, gradient=gradient)
            weight = call.projection(weight, bias).weight
            if needs[0]:
                flat = flattened(hidden)
                reduction, whole = call.hidden_reduction(flat), Block(0, len(flat), 0)
                total = reduction.open_block(whole)
                backend.picked_rows(local, weight[:real], total)
                reduction.start(whole, total)
                dx = reduction.wait().view(hidden.shape)
            if needs[1] or needs[2]:
                x, tokens = _gathered(call, hidden), _tokens_of(local, owner, real)
                if needs[1]:
                    dweight = torch.empty_like(weight)
                    dweight[real:].zero_()
                    backend.picked_rows(tokens, x, dweight[:real])
                if needs[2]:
                    dbias = torch.zeros_like(bias)
                    backend.picked_rows(tokens, x.new_ones(len(x), 1), dbias[:real].unsqueeze(1))
        return dx, dweight, dbias, None


def _gathered(call: Call, hidden: Tensor) -> Tensor:
    """The hidden states ``[N, D]``. Under sequence parallelism one all-gather."""
    flat = flattened(hidden)
    return gather_hidden(flat, Block(0, len(flat), 0), call.layout).wait().contiguous()


def _tokens_of(picked: Picked, owner: Tensor, entries: int) -> Picked:
    """The transpose: row j of ``entries`` rows has the tokens that picked the id j, and their gradients."""
    # Of 32 bits, which are sorted in half the time.
    ids, order = picked.ids.clamp(-1, entries).int().sort(stable=True)
    starts = torch.searchsorted(ids, torch.arange(entries + 1, device=ids.device, dtype=torch.int32))
    return Picked(owner[order], starts[:-1], starts[1:], gradient=picked.gradient[order])
