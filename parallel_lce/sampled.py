"""Sampled softmax: cross-entropy over the target and a few sampled entries. :mod:`parallel_lce.samplers` has samplers.

With the logits z of the target y and of the sampled entries s, and the logarithms of their expected counts q, a token's
loss is log(exp(z_y - q_y) + sum over s of exp(z_s - q_s)) - (z_y - q_y). Samples that equal the token's target are left
out. (Jean et al. 2015, arXiv:1412.2007; Bengio and Senecal 2008.)

Samples that all tokens share are one matrix product: of their M rows of the weight each rank gets M/P, and the ranks
merge maxima and sums of exponentials, as they do for the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.backends import valueless
from parallel_lce.backends.gemm import accumulate_nt, matmul_nt
from parallel_lce.backends.interface import power_of_two_near
from parallel_lce.call import debug
from parallel_lce.call.call import Call, flattened, token_count
from parallel_lce.call.checks import INTEGERS, as_group, check_kind, described, public
from parallel_lce.call.prepare import autocasted, check, prepare
from parallel_lce.core import plan
from parallel_lce.core.budget import default_budget
from parallel_lce.core.collectives import Layout, all_gather, gather_whole, reduce_scatter
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.options import Options, Tensors, as_flag, as_int64, as_number, check_option, check_reduction
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.plan import Block, balanced
from parallel_lce.run.autograd import first_order_only
from parallel_lce.run.picked import gathered_logits, gradients_of_logits
from parallel_lce.run.schedule import Gathers
from parallel_lce.run.transforms import operator, without_values


@public
@operator
def sampled_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    sampled: Tensor,
    *,
    log_expected_count: Tensor | None = None,
    target_log_expected_count: Tensor | None = None,
    remove_accidental_hits: bool = True,
    reduction: str = "mean",
    linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sequence_parallel: bool = False,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
) -> Tensor:
    """Cross-entropy over each token's target and the ``sampled`` entries.

    Args:
        input, linear_weight, target, linear_bias, ...: as in :func:`parallel_lce.linear_cross_entropy`.
        sampled: ids ``[M]``, the same for all tokens, or ``[..., M]``, of any integer dtype, the same on all ranks;
            under sequence parallelism of the whole sequence. An id that comes twice counts twice. An id outside
            ``[0, V)``, such as -1, is no sample.
        log_expected_count: the logarithm of how often each sample was expected, of ``sampled``'s shape. It is
            subtracted from the logit. Needs ``target_log_expected_count``. None: nothing is subtracted.
        target_log_expected_count: the same for the targets, of the target's shape. With zeros, which subtract nothing,
            the sum of exponentials is an unbiased estimate of the vocabulary's (arXiv:1712.00527).
        remove_accidental_hits: samples that equal a token's target are left out of that token's loss.
        logit_scale: a Python number.

    Returns:
        The loss, fp32 (fp64 for fp64), of the target's shape for 'none', else 0-dimensional; identical on every rank
        bit for bit, differentiable once, also by the expected counts. NaN if the ranks' ids or options differ, but
        a collective may fail or hang if they have different numbers of ids. The gradient of the weight is dense, 0 in
        rows that are neither a target nor sampled. A graph of torch.compile breaks at this call.

    Collectives, on ``process_group``, in this order; P ranks, N tokens, M' = M rounded up to a multiple of P. SP: under
    sequence parallelism.

    - Forward: SP, an all-gather of the hidden states, N/P * D elements per rank. An all-gather of N + 3 fp32 elements
      per rank; of N * (M + 1) + 3 for ``sampled [..., M]``. For shared samples also: a reduce-scatter of M' * D
      elements of the weight's dtype; one of 2 M' fp32 elements; SP, the gather of the hidden states again, in blocks;
      an all-gather of N fp32 elements per rank.
    - Backward: an all-reduce (SP: a reduce-scatter) of dX, N * D elements; SP, a gather of the hidden states. For
      shared samples both of these twice, and an all-gather of M'/P * (D + 1) fp32 elements per rank.

    Raises:
        ValueError: as :func:`parallel_lce.linear_cross_entropy`, before any collective. ``PARALLEL_LCE_DEBUG=1``
            compares the samples and the expected counts, too.
    """
    check_reduction(reduction)
    check_option("ignore_index", ignore_index := -100 if ignore_index is None else as_number(ignore_index))
    remove_accidental_hits = as_flag("remove_accidental_hits", remove_accidental_hits)
    _check(target, sampled, log_expected_count, target_log_expected_count, logit_scale)
    target, sampled, shared = as_int64(target), as_int64(sampled), sampled.dim() == 1 and target.dim() != 0
    ids = target.unsqueeze(-1)
    if not shared:
        ids = torch.cat([ids, sampled], -1)
    # Ranks compare the name, and so these settings.
    corrected = log_expected_count is not None
    settings = f"{reduction=}, {ignore_index=}, {remove_accidental_hits=}, {corrected=}, {[*sampled.shape]} samples"
    name, group = f"sampled_linear_cross_entropy with {settings}", as_group(process_group)
    if debug.enabled() and not valueless(target) and (layout := Layout.of(group, False)).ranks > 1:
        given = dict(target=target, sampled=sampled)
        counts = dict(log_expected_count=log_expected_count, target_log_expected_count=target_log_expected_count)
        given |= {n: None if t is None else t.double() for n, t in counts.items()}
        debug.agree(layout, {"function": "sampled_linear_cross_entropy"}, given, (0, 0))
        debug.state().awaited = True  # the exchange of prepare is to come
    options = Options(
        name,
        logit_scale=logit_scale,  # pyright: ignore[reportArgumentType]
        sequence_parallel=sequence_parallel,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        logits_budget=0,
    )
    tensors = Tensors(input, linear_weight, None, linear_bias, picked=ids)
    if valueless(target):
        check(options, autocasted(tensors), group)
        return without_values(target.shape if reduction == "none" else (), input, linear_weight, linear_bias)
    call, inputs = prepare(options, tensors, group, planned=False)
    count, dtype = target.numel(), accumulation_dtype(inputs[0].dtype)
    logits, outside = [t.view(count, ids.shape[-1]) for t in _EntryLogits.apply(*inputs, call, sampled)]
    target, sampled = target.reshape(-1), sampled if shared else sampled.reshape(count, sampled.shape[-1])
    offsets = torch.zeros_like(sampled, dtype=dtype)
    if log_expected_count is not None:
        offsets = offsets - log_expected_count.reshape(sampled.shape).to(dtype)
    of_target = logits[:, 0].masked_fill(outside[:, 0], torch.nan)
    if target_log_expected_count is not None:
        of_target = of_target - target_log_expected_count.reshape(-1).to(dtype)
    if shared:
        others = _SharedLogSumExp.apply(*inputs, call, sampled, offsets, target, remove_accidental_hits)
    else:
        left_out = outside[:, 1:]
        if remove_accidental_hits:
            left_out = left_out | (sampled == target.unsqueeze(1))
        others = (logits[:, 1:] + offsets).masked_fill(left_out, -torch.inf).logsumexp(1)
    counted = target != ignore_index
    # Tokens that do not count are set to 0 here, so that a NaN of theirs reaches no gradient.
    difference = torch.where(counted, others - of_target, 0.0)
    losses = torch.where(counted, torch.logaddexp(torch.zeros_like(difference), difference), 0.0)
    if reduction == "none":
        return losses.view(tensors.picked.shape[:-1])
    return losses.sum() / counted.sum().clamp(min=1) if reduction == "mean" else losses.sum()


# Graphs of torch.compile break here. torch.compiler.disable does the same, and imports torch._dynamo.
sampled_linear_cross_entropy._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


def _check(target: Any, sampled: Any, of_samples: Any, of_targets: Any, logit_scale: Any) -> None:
    for name, value in (("target", target), ("sampled", sampled)):
        if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
            raise ValueError(f"{name} must be ids of an integer dtype, got {described(value)}")
        check_kind(name, value)
    if isinstance(logit_scale, Tensor):
        raise ValueError("logit_scale must be a finite Python number, got a tensor")
    if sampled.dim() != 1 and sampled.shape[:-1] != target.shape:
        raise ValueError(
            f"sampled must be ids [M] or [..., M] for target {list(target.shape)}, got {list(sampled.shape)}"
        )
    if sampled.device != target.device:
        raise ValueError(f"sampled is on {sampled.device} and target is on {target.device}")
    for name, value, ids in (
        ("log_expected_count", of_samples, sampled),
        ("target_log_expected_count", of_targets, target),
    ):
        if value is None:
            if of_samples is not of_targets:
                raise ValueError(
                    f"log_expected_count and target_log_expected_count must be given together, got no {name}: zeros "
                    "subtract nothing"
                )
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != ids.shape:
            raise ValueError(f"{name} must be floating-point of shape {list(ids.shape)}, got {described(value)}")
        check_kind(name, value)
        if value.device != ids.device:
            raise ValueError(f"{name} is on {value.device} and target is on {ids.device}")


class _EntryLogits(torch.autograd.Function):
    """Logits ``[E]`` of the call's selected entries, and which of their ids are outside the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, sampled: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert call.picked is not None
        packed, broken, vocab_size = gathered_logits(call, hidden, weight, bias, sampled)
        ids = call.picked.ids
        outside = (ids < 0) | (ids >= vocab_size)
        logits = packed[:, : len(ids)].sum(0).masked_fill_(outside, 0.0)
        if broken is not None:
            logits.masked_fill_(broken, torch.nan)
        ctx.call = call
        ctx.save_for_backward(hidden, weight, bias, *call.per_token, logits)
        ctx.mark_non_differentiable(outside)
        return logits, outside

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor, _):
        hidden, weight, bias, *per_token, logits = saved
        call = ctx.call.with_tensors(per_token)
        with device_without_autocast(weight):
            logit_map = call.logit_map.each(call.picked.spread)
            values = logit_map.before(in_memory(upstream).contiguous(), logits)
        return *gradients_of_logits(call, hidden, weight, bias, values, ctx.needs_input_grad), None, None


class _SharedLogSumExp(torch.autograd.Function):
    """Per token ``[N]`` the logarithm of the sum of exponentials of shared samples' logits plus ``offsets [M]``; -inf
    for a token without a sample."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        ids: Tensor,
        offsets: Tensor,
        target: Tensor,
        remove: bool,
    ) -> Tensor:
        layout = call.layout
        with device_without_autocast(weight):
            rows, columns = _rows_of(call, weight, bias, ids)
            part = slice(layout.rank * len(rows), (layout.rank + 1) * len(rows))
            padded = layout.ranks * len(rows) - len(ids)
            own_ids = torch.nn.functional.pad(ids, (0, padded), value=-1)[part]
            # [m]: bias and offset of a column; -inf for an id outside the vocabulary.
            offsets = torch.nn.functional.pad(offsets, (0, padded))[part]
            bias_of, exists = columns.unbind(1)
            offsets = (call.logit_map.scale * bias_of + offsets).masked_fill(exists == 0, -torch.inf)
            work = _SharedSamples(call, rows, own_ids, offsets, target, remove)
            logsumexp = work.logsumexp(hidden)
        ctx.work, ctx.shape, ctx.bias = work, weight.shape, bias is not None
        ctx.dtype, ctx.ids = weight.dtype, ids
        ctx.save_for_backward(hidden, logsumexp)
        return logsumexp

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor):
        hidden, logsumexp = saved
        needs_hidden, *needs_rows, _, _, needs_offsets = ctx.needs_input_grad[:6]
        with device_without_autocast(hidden):
            dx, drows, doffsets = ctx.work.gradients(hidden, logsumexp, in_memory(upstream), needs_hidden)
            dweight = dbias = None
            if any(needs_rows) or needs_offsets:
                dweight, dbias, doffsets = _to_rows(ctx.work.call, ctx.ids, drows, doffsets, ctx.shape, ctx.dtype)
        given = needs_rows[0], needs_rows[1] and ctx.bias, False, False, needs_offsets
        of_rows = [g if needed else None for g, needed in zip((dweight, dbias, None, None, doffsets), given)]
        return dx, *of_rows, None, None


class _SharedSamples:
    """This rank's share of the samples: ``rows [m, D]`` of the weight, ``ids [m]``, and ``offsets [m]`` of their scaled
    logits. Logits exist for one block of tokens at a time, within the default budget."""

    def __init__(self, call: Call, rows: Tensor, ids: Tensor, offsets: Tensor, target: Tensor, remove: bool) -> None:
        self.call, self.rows, self.ids, self.offsets = call, rows, ids, offsets
        self.target, self.remove = target, remove
        tokens, sp_size = len(target) // call.layout.sp_size, call.layout.sp_size
        budget = max(default_budget(rows.device), plan.SMALLEST_BLOCK)
        size = balanced(tokens, max(1, budget // max(1, 8 * sp_size * len(rows))))
        self.blocks = tuple([Block(a, min(a + size, tokens), 0) for a in range(0, tokens, size)])

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
        partials = flat.new_empty(layout.ranks, token_count(flat, layout), dtype=call.dtype)
        gathers = Gathers(flat, self.blocks, layout)
        for block in self.blocks:
            x = gathers.ready().tensor
            layout.put(partials[layout.rank], block, self.logits(block, x).logsumexp(1))
        if layout.ranks > 1:
            gather_whole(partials, partials[layout.rank], layout)
        return partials.logsumexp(0)

    def gradients(
        self, hidden: Tensor, logsumexp: Tensor, upstream: Tensor, needs_hidden: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """dX, and in fp32 (fp64) the gradients of the rows ``[m, D]`` and of their offsets ``[m]``."""
        call, layout, flat = self.call, self.call.layout, flattened(hidden).contiguous()
        # On CPUs low-precision products are slower, and no more exact.
        dtype = flat.dtype if flat.is_cuda else call.dtype
        factor = upstream
        unscale = None
        if dtype == torch.float16 and len(factor):  # a mean's gradients, 1 / N each, would underflow
            power = power_of_two_near((factor * call.logit_map.scale).abs().nan_to_num(0.0, 0.0).amax())
            factor, unscale = factor * power, 1 / power
        reduction = call.hidden_reduction(flat) if needs_hidden else None
        drows = self.rows.new_zeros(self.rows.shape, dtype=call.dtype)
        doffsets = drows.new_zeros(len(drows))
        # A token without a sample has no gradient.
        lse, factor = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0), factor.contiguous()
        gathers = Gathers(flat, self.blocks, layout)
        for block in self.blocks:
            x = gathers.ready().tensor
            gradient = self.logits(block, x).sub_(layout.take(lse, block).unsqueeze(1)).exp_()
            gradient = gradient.mul_(layout.take(factor, block).unsqueeze(1))
            doffsets += gradient.sum(0)
            gradient = (gradient if call.logit_map.scale == 1 else gradient.mul_(call.logit_map.scale)).to(dtype)
            if reduction is not None:
                local = reduction.open_block(block)
                accumulate_nt(local, gradient, self.rows.t(), overwrite=True, factor=unscale)
                reduction.start(block, local)
            accumulate_nt(drows, gradient.t(), x.t(), overwrite=False)
        if unscale is not None:
            drows, doffsets = drows * unscale, doffsets * unscale
        return None if reduction is None else reduction.wait().view(hidden.shape), drows, doffsets


def _rows_of(call: Call, weight: Tensor, bias: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's share of the sampled rows ``[m, D]``, m = ceil(M / P); and ``[m, 2]`` their biases, and 1 for an id
    of the vocabulary, else 0. A sum over the ranks delivers them: an id is in one shard, and all others add 0."""
    layout, local = call.layout, _local(call, ids)
    size = -(-len(ids) // layout.ranks)
    rows = weight.new_zeros(layout.ranks * size, weight.shape[1])
    columns = weight.new_zeros(layout.ranks * size, 2, dtype=call.dtype)
    mine = local < call.shard.real_rows
    if call.shard.real_rows:
        place = local.clamp(max=call.shard.real_rows - 1)
        rows[: len(ids)] = weight.index_select(0, place).masked_fill_(~mine.unsqueeze(1), 0.0)
        columns[: len(ids), 1] = mine.to(call.dtype)
        if bias is not None:
            columns[: len(ids), 0] = bias.index_select(0, place).to(call.dtype).masked_fill_(~mine, 0.0)
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
    call: Call, ids: Tensor, drows: Tensor, doffsets: Tensor, shape: torch.Size, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dW ``[V/P, D]`` and dbias ``[V/P]`` of this rank's shard, and the gradients of all offsets ``[M]``, from each
    rank's ``drows [m, D]`` and ``doffsets [m]``."""
    layout, count = call.layout, len(ids)
    whole = torch.cat([drows, doffsets.unsqueeze(1)], 1)
    if layout.ranks > 1:
        gathered = whole.new_empty(layout.ranks * len(whole), whole.shape[1])
        all_gather(gathered, whole, group=layout.group, async_op=True).wait()
        whole = gathered
    # Equal ids are summed in a fixed order, in fp32. The last row takes other ranks' ids.
    local, order = _local(call, ids).sort(stable=True)
    first = torch.ones_like(local)
    first[1:] = local[1:] != local[:-1]
    group = first.cumsum(0) - 1
    sums = whole.new_zeros(count, whole.shape[1]).index_put_((group,), whole[:count][order], accumulate=True)[group]
    dweight = whole.new_zeros(shape[0] + 1, shape[1], dtype=dtype)
    of_bias = whole.new_zeros(shape[0] + 1, dtype=dtype)
    place = local.masked_fill(local == call.shard.real_rows, shape[0])
    dweight[place], of_bias[place] = sums[:, :-1].to(dtype), (sums[:, -1] * call.logit_map.scale).to(dtype)
    return dweight[:-1], of_bias[:-1], whole[:count, -1]
