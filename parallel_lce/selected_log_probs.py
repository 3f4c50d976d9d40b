"""Log-softmax over each token's selected entries alone. No logit of another entry is computed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.call.checks import public
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.private import outside_graphs
from parallel_lce.dtensor import adapted
from parallel_lce.features.selected import ids_and_offsets
from parallel_lce.run.picked import log_probs_of


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
    states, N/P * D elements per rank; an all-gather of the logits, E + 3 elements of fp32 per rank. Backward: an
    all-reduce of dX, N * D elements of ``reduce_dtype``, or under sequence parallelism a reduce-scatter, unless
    ``reduce_hidden_grad=False``; under sequence parallelism the hidden states are gathered again for dW.

    Raises:
        ValueError: as :func:`parallel_lce.token_statistics`, before any collective.
    """
    ids, offsets = ids_and_offsets(selected)
    if not isinstance(ids, Tensor):
        raise ValueError(f"selected must be a tensor, or a pair of ids and offsets, got {type(ids).__name__}")
    tensors = Tensors(input, linear_weight, None, linear_bias, picked=ids, picked_offsets=offsets)
    options = Options.of("selected_log_probs", locals())
    options, tensors, group, adapter = adapted(options, tensors, process_group)
    log_probs, _ = log_probs_of(options, tensors, group)
    return adapter.of_tokens(log_probs)
