"""Log-probabilities and entropy where RL trainers call for them, under the names and signatures that they use.

Statistics come from fp32 logits that are never rounded. So log-probabilities are those of an fp32 head on the same
weights. A temperature divides the logits; entropies are those of the divided logits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.arguments import inverse_temperature
from parallel_lce.functional import token_statistics


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies: ``verl.utils.kernel.linear_cross_entropy`` of verl, which slime
    and SkyRL copy, in its signature and meaning.

    Args:
        hidden: ``[..., D]``, all tokens on every rank of the group. It is flattened, and so are the labels.
        weight: this rank's vocabulary shard ``[V/P, D]``, of equal shards, in the dtype of ``hidden``.
        labels: as many ids, of any integer dtype.
        temperature: a number > 0; or, beyond verl, a tensor of as many numbers, one for each token. None is 1.
        reduction: of the log-probabilities: 'none', 'sum' or 'mean', in any case of letters. None is 'none'.
        dist_process_group: the tensor-parallel group; None for one rank.

    Returns:
        Log-probabilities ``[N]``, or 0-dimensional, and entropies in nats ``[N]``, fp32 (fp64 for fp64), N tokens in
        row-major order; differentiable, identical on every rank bit for bit. A label outside the vocabulary has the
        log-probability ``-lse``.

    Collectives: those of :func:`parallel_lce.token_statistics`, C = 4.

    Raises:
        ValueError: a temperature that is no number > 0, an unknown reduction, and as
        :func:`parallel_lce.token_statistics`.
    """
    name = "none" if reduction is None else str(reduction).lower()
    if name not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    if hidden.dim() < 1:
        raise ValueError(f"hidden must be [..., D], got {list(hidden.shape)}")
    tokens = hidden.shape[:-1].numel()
    found = token_statistics(
        hidden.reshape(tokens, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        logit_scale=inverse_temperature(temperature, tokens),
        process_group=dist_process_group,
        expected_logit=True,
    )
    assert found.target_log_prob is not None and found.entropy is not None
    log_probs = found.target_log_prob
    if name != "none":
        log_probs = log_probs.sum() if name == "sum" else log_probs.mean()
    return log_probs, found.entropy


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Log-probability of each next token: the function of this name in NeMo-RL's ``distributed/model_utils.py``.

    Args:
        tensor_parallel_hidden_states: ``[S/P, B, D]``, split over ``tp_group`` along the sequence.
        output_weight_layer: this rank's vocabulary shard ``[V/P, D]``, whose first row is ``vocab_start_index``.
        runtime_gather_output: not used, as there.
        target: token ids ``[B, S]``. Position s is scored with the token at s + 1.
        vocab_end_index: end of the shard's ids. Further rows of the weight are padding, and left out.
        inference_only: nothing is saved for a backward.
        cp_group: None or a group of one rank, as there.
        chunk_size: not used: no logits are formed.

    Returns:
        ``[B, S - 1]`` fp32, differentiable. A target outside the vocabulary has 0 and no gradient.

    Collectives: those of :func:`parallel_lce.token_statistics` under sequence parallelism, C = 3.

    Raises:
        ValueError: a ``cp_group`` of several ranks, a shard of fewer rows than ids, and as
        :func:`parallel_lce.token_statistics`.
    """
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        raise ValueError(f"cp_group must have one rank, got {dist.get_world_size(cp_group)}")
    rows, ids = output_weight_layer.shape[0], vocab_end_index - vocab_start_index
    if rows < ids:
        raise ValueError(f"output_weight_layer has {rows} rows for {ids} ids of the shard")
    target = target.roll(-1, -1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        found = token_statistics(
            tensor_parallel_hidden_states,
            output_weight_layer[:ids],
            target.t(),
            process_group=tp_group,
            sequence_parallel=True,
            vocab_start=vocab_start_index,
        )
    assert found.target_log_prob is not None
    outside = (target < 0) | (target >= found.vocab_size)
    return found.target_log_prob.t().masked_fill(outside, 0.0)[:, :-1].contiguous()
