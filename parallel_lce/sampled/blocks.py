"""The sums of exponentials of samples that all tokens share, in blocks of tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.gemm import matmul_nt
from parallel_lce.backends.interface import Projection
from parallel_lce.call.call import Call, Needs, flattened
from parallel_lce.core.budget import default_budget
from parallel_lce.core.collectives import all_gather, gather_whole, reduce_scatter
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.plan import Block, blocks_within
from parallel_lce.run.autograd import first_order_only
from parallel_lce.run.output_gradients import OutputGradients
from parallel_lce.run.schedule import Gathers


@dataclass(frozen=True)
class SharedSamples:
    call: Call
    # [M] int64
    ids: Tensor
    # [N] int64
    target: Tensor
    # Samples that equal a token's target are left out.
    remove: bool


class LogSumExp(torch.autograd.Function):
    """Per token ``[N]`` the logarithm of the sum of exponentials of the samples' logits plus ``offsets [M]``; -inf for
    a token without a sample."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, samples: SharedSamples
    ) -> Tensor:
        with device_without_autocast(weight):
            share = _Share(samples, weight, bias, offsets)
            logsumexp = share.logsumexp(hidden)
        ctx.samples, ctx.shape, ctx.dtype, ctx.share = samples, weight.shape, weight.dtype, share
        ctx.save_for_backward(hidden, logsumexp, share.rows, share.offsets)
        del share.rows, share.offsets
        return logsumexp

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor):
        hidden, logsumexp, rows, offsets = saved
        needs_hidden, *needs, _ = ctx.needs_input_grad
        of_rows, share = (None, None, None), copy.copy(ctx.share)
        share.rows, share.offsets = rows.contiguous(), offsets.contiguous()
        with device_without_autocast(hidden):
            dx, drows, doffsets = share.gradients(hidden, logsumexp, in_memory(upstream), needs_hidden)
            if any(needs):
                of_rows = _to_rows(ctx.samples, drows, doffsets, ctx.shape, ctx.dtype)
        return dx, *[g if needed else None for g, needed in zip(of_rows, needs)], None


class _Share:
    """This rank's share of the samples: ``rows [m, D]`` of the weight, ``ids [m]``, and ``offsets [m]`` of their scaled
    logits. Logits exist for one block of tokens at a time, within the default budget."""

    def __init__(self, samples: SharedSamples, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> None:
        self.call, self.target, self.remove = samples.call, samples.target, samples.remove
        call, layout, pad = samples.call, samples.call.layout, torch.nn.functional.pad
        self.rows, columns = _rows_of(call, weight, bias, samples.ids)
        size = len(self.rows)
        part, padded = slice(layout.rank * size, (layout.rank + 1) * size), (0, layout.ranks * size - len(samples.ids))
        self.ids = pad(samples.ids, padded, value=-1)[part]
        # [m]: bias and offset of a column; -inf for an id outside the vocabulary.
        bias_of, exists = columns.unbind(1)
        offsets = call.logit_map.scale * bias_of + pad(offsets, padded)[part]
        self.offsets = offsets.masked_fill(exists == 0, -torch.inf)
        row_bytes = 8 * layout.sp_size * size
        self.blocks = blocks_within(default_budget(weight.device), len(self.target) // layout.sp_size, row_bytes)

    def logits(self, block: Block, x: Tensor) -> Tensor:
        """``[R, m]`` of a block's hidden states ``x [R, D]``; -inf for samples that are left out."""
        logits = matmul_nt(x, self.rows).mul_(self.call.logit_map.scale).add_(self.offsets)
        if self.remove:
            target = self.call.layout.take(self.target, block)
            logits.masked_fill_(self.ids == target.unsqueeze(1), -torch.inf)
        return logits

    def logsumexp(self, hidden: Tensor) -> Tensor:
        call, layout = self.call, self.call.layout
        flat = flattened(hidden)
        partials = flat.new_empty(layout.ranks, call.shape.numel(), dtype=call.dtype)
        gathers = Gathers(flat, self.blocks, layout)
        for block in self.blocks:
            x = gathers.ready().tensor
            layout.put(partials[layout.rank], block, self.logits(block, x).logsumexp(1))
        if layout.ranks > 1:
            gather_whole(partials, partials[layout.rank], layout)
        return partials.logsumexp(0)

    def gradients(
        self, hidden: Tensor, logsumexp: Tensor, upstream: Tensor, needs_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """dX, and in fp32 (fp64) the gradients of the rows ``[m, D]`` and of their offsets ``[m]``."""
        call, layout, flat = self.call, self.call.layout, flattened(hidden).contiguous()
        projection = Projection(self.rows, None, 0, len(self.rows), dtype=call.dtype)
        needs = Needs(needs_hidden, True, False)
        largest = abs(call.logit_map.scale)
        sums = OutputGradients(call, flat, projection, needs, len(self.blocks), upstream, largest, call.dtype)
        doffsets = torch.zeros_like(self.offsets)
        # A token without a sample has no gradient.
        lse, factor = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0), sums.factor.contiguous()
        gathers = Gathers(flat, self.blocks, layout)
        for block in self.blocks:
            x = gathers.ready().tensor
            gradient = self.logits(block, x).sub_(layout.take(lse, block).unsqueeze(1)).exp_()
            gradient = gradient.mul_(layout.take(factor, block).unsqueeze(1))
            doffsets += gradient.sum(0)
            sums.add(
                block,
                x,
                (gradient if call.logit_map.scale == 1 else gradient.mul_(call.logit_map.scale)).to(sums.dtype),
            )
        dx, drows, _ = sums.deliver(hidden.shape)
        return dx, drows, sums.unscaled(doffsets)


def _rows_of(call: Call, weight: Tensor, bias: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's share of the sampled rows ``[m, D]``, m = ceil(M / P); and ``[m, 2]`` their biases, and 1 for an id
    of the vocabulary, else 0. A sum over the ranks delivers them: an id is in one shard, and all others add 0."""
    layout, local = call.layout, _local(call, ids)
    size = -(-len(ids) // layout.ranks)
    rows = weight.new_zeros(layout.ranks * size, weight.shape[1])
    columns = weight.new_zeros(layout.ranks * size, 2, dtype=call.dtype)
    mine = local < call.shard.real_rows
    if call.shard.real_rows:
        row = local.clamp(max=call.shard.real_rows - 1)
        rows[: len(ids)] = weight.index_select(0, row).masked_fill_(~mine.unsqueeze(1), 0.0)
        columns[: len(ids), 1] = mine.to(call.dtype)
        if bias is not None:
            columns[: len(ids), 0] = bias.index_select(0, row).to(call.dtype).masked_fill_(~mine, 0.0)
    if layout.ranks == 1:
        return rows, columns
    parts = rows.new_empty(size, rows.shape[1]), columns.new_empty(size, 2)
    for part, whole in zip(parts, (rows, columns)):
        reduce_scatter(part, whole, group=layout.group, async_op=True).wait()
    return parts


def _local(call: Call, ids: Tensor) -> Tensor:
    """The ids relative to the shard's first one; its number of real rows for an id of another shard."""
    local = ids - call.shard.start
    return local.masked_fill((local < 0) | (local >= call.shard.real_rows), call.shard.real_rows)


def _to_rows(
    samples: SharedSamples, drows: Tensor, doffsets: Tensor, shape: torch.Size, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dW ``[V/P, D]`` and dbias ``[V/P]`` of this rank's shard, and the gradients of all offsets ``[M]``, from each
    rank's ``drows [m, D]`` and ``doffsets [m]``."""
    call, layout, count = samples.call, samples.call.layout, len(samples.ids)
    whole = torch.cat([drows, doffsets.unsqueeze(1)], 1)
    if layout.ranks > 1:
        gathered = whole.new_empty(layout.ranks * len(whole), whole.shape[1])
        all_gather(gathered, whole, group=layout.group, async_op=True).wait()
        whole = gathered
    # Equal ids are summed in a fixed order, in fp32. The last row takes other ranks' ids.
    local, order = _local(call, samples.ids).sort(stable=True)
    first = torch.ones_like(local)
    first[1:] = local[1:] != local[:-1]
    group = first.cumsum(0) - 1
    sums = whole.new_zeros(count, whole.shape[1]).index_put_((group,), whole[:count][order], accumulate=True)[group]
    dweight = whole.new_zeros(shape[0] + 1, shape[1], dtype=dtype)
    of_bias = whole.new_zeros(shape[0] + 1, dtype=dtype)
    row = local.masked_fill(local == call.shard.real_rows, shape[0])
    dweight[row], of_bias[row] = sums[:, :-1].to(dtype), (sums[:, -1] * call.logit_map.scale).to(dtype)
    return dweight[:-1], of_bias[:-1], whole[:count, -1]
