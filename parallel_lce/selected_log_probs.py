"""Log-softmax over each token's selected entries alone. No logit of another entry is computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.backends import is_meta_or_fake
from parallel_lce.backends.interface import SelectedGradient
from parallel_lce.call.call import Call, flattened
from parallel_lce.call.checks import public
from parallel_lce.call.prepare import autocasted, check, prepare
from parallel_lce.call.selection import ids_and_offsets
from parallel_lce.core.collectives import gather_hidden, gather_with_trailer
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.options import Options, Tensors, apart
from parallel_lce.core.partials import TRAILER, accumulation_dtype
from parallel_lce.core.plan import Block
from parallel_lce.core.private import outside_graphs
from parallel_lce.run.arrangement import arranged
from parallel_lce.run.autograd import first_order_only
from parallel_lce.run.transforms import operator, without_values


@outside_graphs
@public
@operator
def selected_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    selected: Tensor | tuple[Tensor, Tensor],
    *,
    linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    temperature: float | Tensor = 1.0,
    reduce_hidden_grad: bool = True,
) -> Tensor:
    """Log-softmax of the logits of selected entries, over each token's entries alone.

    A sampler with a mask draws from this distribution: the softmax renormalised over the kept entries. Only the E
    selected rows of the weight are read.

    Args:
        selected: ids ``[..., K]``, the same number for each token; or a pair of ids ``[E]`` and offsets ``[N + 1]``,
            where token n has ``ids[offsets[n]:offsets[n + 1]]``. Of any integer dtype, the same on all ranks. An id
            that comes twice counts twice. An id outside ``[0, vocab_size)`` or with a logit of -inf has probability 0,
            log-probability -inf and no gradient, even if the token has no other entry. (``torch.log_softmax`` would
            give NaN there.)
        Others: as in :func:`parallel_lce.linear_cross_entropy`.

    Returns:
        ``[..., K]`` or ``[E]``, fp32 (fp64 for fp64), identical on every rank bit for bit; differentiable once. NaN
        if shards leave a gap or overlap, if ids or options differ between ranks, or if the offsets are invalid. dW is
        dense, 0 in rows that no token selects. A graph of torch.compile breaks at this call.

    Collectives, on ``process_group``, in this order. Forward: under sequence parallelism an all-gather of the hidden
    states, N/P * D elements per rank; an all-gather of the logits, E + 3 elements of fp32 per rank. Backward: an
    all-reduce of dX, N * D elements of ``reduce_dtype``, or under sequence parallelism a reduce-scatter, unless
    ``reduce_hidden_grad=False``; under sequence parallelism the hidden states are gathered again for dW.

    Raises:
        ValueError: as :func:`parallel_lce.token_statistics`, before any collective.
    """
    ids, offsets = ids_and_offsets(selected)
    if not isinstance(ids, Tensor):
        raise ValueError(f"selected must be a tensor, or a pair of ids and offsets, got {type(ids).__name__}")
    logit_scale, temperature, token_scale, token_temperature = apart(logit_scale, temperature)
    tensors = Tensors(input, linear_weight, None, linear_bias, None, token_scale, token_temperature, ids, offsets)
    options = Options.of("selected_log_probs", locals())
    options, tensors, group, arrangement = arranged(options, tensors, process_group)
    log_probs, _ = log_probs_of(options, tensors, group)
    return log_probs if arrangement is None else arrangement.of_tokens(log_probs)


def log_probs_of(options: Options, tensors: Tensors, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | int]:
    """:func:`selected_log_probs` of options and tensors, and V."""
    options, weight = options._replace(logits_budget=0), tensors.linear_weight
    if isinstance(weight, Tensor) and is_meta_or_fake(weight):
        check(options, autocasted(tensors), group)
        return without_values(tensors.selected.shape, tensors.input, weight, tensors.linear_bias), len(weight)
    call, inputs = prepare(options, tensors, group, planned=False)
    log_probs, vocab_size = _SelectedLogProbs.apply(*inputs, call)
    return log_probs.view(tensors.selected.shape), vocab_size


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call):
        assert call.selected is not None
        packed, broken, vocab_size = gathered_logits(call, hidden, weight, bias)
        with device_without_autocast(weight):
            log_probs, logits = call.backend.set_log_probs(packed, call.selected, broken, vocab_size)
        ctx.call = call
        ctx.save_for_backward(hidden, weight, bias, *call.per_token, log_probs, logits)
        if isinstance(vocab_size, Tensor):
            ctx.mark_non_differentiable(vocab_size)
        return log_probs, vocab_size

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor, _: None):
        (hidden, weight, bias, *per_token, log_probs, logits), needs = saved, ctx.needs_input_grad
        call = ctx.call.with_tensors(per_token)
        upstream = in_memory(upstream)
        values = _gradient_of_logits(call, log_probs, logits, upstream)
        return *gradients_of_logits(call, hidden, weight, bias, values, needs), None


def _gradient_of_logits(call: Call, log_probs: Tensor, logits: Tensor, upstream: Tensor) -> Tensor:
    """The gradient ``[E]`` of the projection's output at the selected entries."""
    selected = call.selected
    assert selected is not None
    with device_without_autocast(logits):
        return call.before_softcap(call.backend.set_gradient(log_probs, upstream, selected), logits)


def _whole(call: Call) -> Block:
    return Block(0, call.shape.numel() // call.layout.sp_size, 0)


def gathered_logits(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, more_ids: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | int]:
    """All ranks' logits of the selected entries ``[P, >= E]``, 0 for other ranks' ids; a 0-dimensional flag, or None,
    that is true if shards or offsets are invalid, or if the ranks' ids, offsets or ``more_ids`` differ; and V."""
    layout, shard, selected, whole = call.layout, call.shard, call.selected, _whole(call)
    assert selected is not None
    count, dtype = selected.count, accumulation_dtype(weight.dtype)
    with device_without_autocast(weight):
        x = gather_hidden(flattened(hidden), whole, layout).wait()
        # A row is a rank's logits, 0 for other ranks' ids, and its trailer.
        packed = x.new_zeros(layout.ranks, count + TRAILER, dtype=dtype)
        own = packed[layout.rank]
        projection = call.of_block(call.projection(weight, bias), whole)
        call.backend.selected_logits(projection, x, selected.of_block(layout, whole, shard.start), own[:count])
        vocab_size, wrong = gather_with_trailer(packed, shard, layout, (*selected.tensors, more_ids))
        broken = selected.broken
        if wrong is not None:
            broken = wrong if broken is None else broken | wrong
        return packed, broken, vocab_size


def gradients_of_logits(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dW and dbias from the gradients ``values [E]`` of the projection's output."""
    layout, shard, selected, whole = call.layout, call.shard, call.selected, _whole(call)
    assert selected is not None
    dx = dweight = dbias = None
    with device_without_autocast(weight):
        weight = call.projection(weight, bias).weight
        flat, real = flattened(hidden), shard.real_rows
        gradient = SelectedGradient(selected.of_block(layout, whole, shard.start), values)
        if needs[0]:
            reduction = call.hidden_reduction(flat)
            local = reduction.open_block(whole)
            call.backend.selected_hidden_gradient(weight[:real], gradient, local)
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
            call.backend.selected_weight_gradient(x, selected.owner, gradient, dweight[:real], of_bias)
    return dx, dweight if needs[1] else None, dbias if needs[2] else None
