"""Log-softmax over each token's selected entries alone.

No logit of another entry is computed, so there is no schedule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.call import debug
from parallel_lce.call.call import Call, flattened
from parallel_lce.call.checks import public
from parallel_lce.call.prepare import prepare
from parallel_lce.core.collectives import PartialsGather, checksum_of, gather_hidden
from parallel_lce.core.memory import in_memory
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import TARGET, Columns
from parallel_lce.core.plan import Block, Needs
from parallel_lce.core.private import outside_graphs
from parallel_lce.core.selection import Selection
from parallel_lce.dtensor import adapted
from parallel_lce.features.selected import ids_and_offsets
from parallel_lce.run.schedule import GradientSums, function_backward, function_forward


@outside_graphs
@public
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
    """Log-softmax over each token's selected entries alone: the distribution of a sampler with a mask. Only the E
    selected rows of the weight are read.

    Args: as of :func:`parallel_lce.linear_cross_entropy`, and

        selected: ids, or a pair of ids and offsets, as in :func:`parallel_lce.token_statistics`. An id that comes twice
            counts twice. An id outside ``[0, vocab_size)`` or with a logit of -inf has probability 0, log-probability
            -inf and no gradient, even if the token has no other entry. (``torch.log_softmax`` would give NaN there.)

    Returns:
        ``[..., K]`` or ``[E]``, fp32 (fp64 for fp64), identical on every rank bit for bit; differentiable once. NaN
        if shards leave a gap or overlap, if ids or options differ between ranks, or if the offsets are invalid. dW is
        dense. A graph of torch.compile breaks at this call.

    Collectives, on ``process_group``, in this order. Forward: under sequence parallelism an all-gather of the hidden
    states, N/P * D elements per rank; an all-gather of the logits, E + 6 elements of fp32 per rank. Backward: an
    all-reduce of dX, N * D elements of ``reduce_dtype``, or under sequence parallelism a reduce-scatter, unless
    ``reduce_hidden_grad=False``; under sequence parallelism the hidden states are gathered again for dW.

    Raises:
        ValueError: as :func:`parallel_lce.token_statistics`, before any collective.
    """
    ids, offsets = ids_and_offsets(selected)
    if not isinstance(ids, Tensor):
        raise ValueError(f"selected must be a tensor, or a pair of ids and offsets, got {type(ids).__name__}")
    tensors = Tensors(input, linear_weight, None, linear_bias, selected=ids, selected_offsets=offsets)
    options = Options.of("selected_log_probs", locals())
    options, tensors, group, adapter = adapted(options, tensors, process_group)
    log_probs, _ = log_probs_of(options, tensors, group)
    return adapter.of_tokens(log_probs)


def log_probs_of(options: Options, tensors: Tensors, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | int]:
    """Log-softmax over each token's selected entries, in their shape, and V."""
    call, inputs = prepare(options._replace(logits_budget=0), tensors, group)
    log_probs, vocab_size = _LogProbs.apply(*inputs, call)
    return log_probs.view(tensors.selected.shape), vocab_size


class _LogProbs(torch.autograd.Function):
    """Log-softmax ``[E]``, and V."""

    @staticmethod
    @function_forward
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor | int]:
        layout, shard, selection = call.layout, call.shard, call.selection
        assert selection is not None
        x = _gathered(call, flattened(hidden))
        # This rank's logits, -inf for other ranks' ids.
        gather = PartialsGather(x, 1, shard, Columns(), layout, extra=len(selection.ids))
        local = selection._replace(ids=selection.ids - shard.start, logits=gather.extra.fill_(-torch.inf))
        call.backend.selected_logits(call.projection(weight, bias), x, local)
        if layout.ranks > 1:
            gather.local.zero_()  # of one token
            gather.start(checksum_of(*selection[:3]))
        (merged, vocab_size), _ = gather.finish(call.backend)
        # NaN if the ranks differ.
        logits = gather.extras.amax(0) + merged[TARGET] if layout.ranks > 1 else gather.extra
        log_probs = call.backend.log_softmax_of_sets(logits, selection)
        ctx.call = call
        ctx.save_for_backward(hidden, weight, bias, *call.tensors, logits)
        return log_probs, vocab_size

    @staticmethod
    @function_backward
    def backward(ctx: Any, saved: tuple, upstream: Tensor, _: None):
        hidden, weight, bias, *tensors = saved
        call, (logits,) = ctx.call.with_saved(tensors)
        upstream = in_memory(upstream).contiguous()
        debug.agree_on_backward(call.layout, call.number, [upstream])
        logits = logits.contiguous()
        backend, real, selection = call.backend, call.shard.real_rows, call.selection
        assert selection is not None
        owner = selection.owner
        gradient = backend.log_softmax_of_sets(logits, selection, upstream)
        gradient = call.logit_map.of_rows(owner).before(gradient, logits)
        local = selection._replace(ids=selection.ids - call.shard.start, gradient=gradient)
        sums = GradientSums(call, hidden, weight, bias, Needs(*ctx.needs_input_grad[:3]), blocks=1)
        if sums.reduction is not None:
            whole = Block(0, len(sums.hidden), 0)
            dx = sums.reduction.open_block(whole)
            backend.selected_rows(local, sums.projection.weight[:real], dx)
            sums.reduction.start(whole, dx)
        if sums.dweight is not None or sums.dbias is not None:
            x, tokens = _gathered(call, sums.hidden), _tokens_of(local, owner, real)
            if sums.dweight is not None:
                backend.selected_rows(tokens, x, sums.dweight.open(0, real, whole=True)[0])
            if sums.dbias is not None:
                dbias = sums.dbias.open(0, real, whole=True)[0]
                backend.selected_rows(tokens, x.new_ones(len(x), 1), dbias.unsqueeze(1))
        return *sums.deliver(), None


def _gathered(call: Call, hidden: Tensor) -> Tensor:
    """All ``hidden [N/sp_size, D]`` states. Under sequence parallelism one all-gather."""
    return gather_hidden(hidden, Block(0, len(hidden), 0), call.layout).wait().contiguous()


def _tokens_of(selection: Selection, owner: Tensor, entries: int) -> Selection:
    """The transpose: row j of ``entries`` rows has the tokens that selected the id j, and their gradients."""
    # Of 32 bits, which are sorted in half the time.
    ids, order = selection.ids.clamp(-1, entries).int().sort(stable=True)
    starts = torch.searchsorted(ids, torch.arange(entries + 1, device=ids.device, dtype=torch.int32))
    return Selection(owner[order], starts[:-1], starts[1:], gradient=selection.gradient[order])
