"""Log-probabilities and entropies, under the names and signatures that RL trainers use, exact as from an fp32 head.

A label outside the vocabulary has the logit 0, as in these trainers' own functions. ``mask`` and ``counted_tokens`` are
as in :func:`parallel_lce.token_statistics`; results of tokens that do not count are 0. ``vocab_size``,
``logits_budget`` and errors are as in :func:`parallel_lce.linear_cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call.checks import as_group, described, int64_ids, is_dtensor, public, renamed
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import Options, Tensors, check_flag, shortened
from parallel_lce.functional import statistics_of
from parallel_lce.run.token_count import TokenCount

# Of the fused functions' arguments.
_NAMES = dict(input="hidden", linear_weight="weight", linear_bias="bias", vocab_start="vocab_start_index")


@public
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_hidden_grad: bool = False,
    sum_p_squared: bool = False,
    mask: Tensor | None = None,
    counted_tokens: int | TokenCount | None = None,
) -> tuple[Tensor, ...]:
    """Log-probabilities of the labels and entropies, as verl's ``verl.utils.kernel.linear_cross_entropy``, which slime
    copies. As there, the gradient of ``hidden`` is the term of this rank's shard: a mapping in front of this function
    must sum it over the ranks, such as Megatron's ``gather_from_sequence_parallel_region``, or ``reduce_hidden_grad``.

    Args:
        hidden: ``[..., D]``, all N tokens on every rank of the group.
        weight, bias: this rank's vocabulary shard ``[V/P, D]`` and ``[V/P]``, of equal shards, in ``hidden``'s dtype.
        labels, mask: N of them in any shape.
        temperature: a number > 0, or N numbers; of the entropies, too. None is 1.
        reduction: of the log-probabilities: 'none' (also None), 'sum' or 'mean', in upper or lower case. Of N tokens,
            so not 'mean' with a ``mask``.

    Returns log-probabilities ``[N]`` or their reduction, entropies ``[N]`` in nats, and ``sum_p_squared [N]``: fp32
    (fp64 for fp64), differentiable, identical on every rank.

    Collectives: forward, the all-gather of partials of :func:`parallel_lce.token_statistics`, C = 4, or 5 with
    ``sum_p_squared``; backward, none, or one all-reduce of N * D elements with ``reduce_hidden_grad``.
    """
    name = "none" if reduction is None else str(reduction).lower()
    if name not in ("none", "sum", "mean") or (name == "mean" and mask is not None):
        raise ValueError(f"reduction must be 'none', 'sum' or, without a mask, 'mean', got {reduction!r}")
    options = Options(
        f"rl.linear_cross_entropy, reduction={name!r}",
        temperature=1.0 if temperature is None else _flat(temperature),
        vocab_size=vocab_size,
        logits_budget=logits_budget,
        entropy=True,
        sum_p_squared=sum_p_squared,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    tensors = Tensors(_flat(hidden, trailing=1), weight, _flat(int64_ids("labels", labels)), bias)
    with renamed(process_group="dist_process_group", target="labels", **_NAMES):
        found: Any = statistics_of(options, tensors, dist_process_group, _flat(mask), counted_tokens)
    log_probs = found.target_log_prob if name == "none" else getattr(found.target_log_prob, name)()
    return (log_probs, found.entropy, found.sum_p_squared) if sum_p_squared else (log_probs, found.entropy)


@public
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
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    mask: Tensor | None = None,
    counted_tokens: int | TokenCount | None = None,
) -> Tensor:
    """Log-probability of each next token, ``[B, S - 1]`` fp32, as the function of this name in NeMo-RL's
    ``distributed/model_utils.py``. As there, no mapping is in front: the gradient of the hidden states is summed over
    the ranks, by a reduce-scatter. A target outside the vocabulary has 0, but, as there, the gradient of ``-lse``.

    Args:
        tensor_parallel_hidden_states: ``[S/P, B, D]``, split over ``tp_group`` along the sequence.
        output_weight_layer, bias: ``[V/P, D]`` and ``[V/P]``, of the ids from ``vocab_start_index`` on. Rows from
            ``vocab_end_index`` on are padding, and left out.
        target: token ids ``[B, S]``. Position s is scored with the token at s + 1, if a ``mask [B, S]`` is true at s.
        cp_group: None or a group of one rank, as there. ``runtime_gather_output`` and ``chunk_size`` are not used.

    Collectives: those of :func:`parallel_lce.token_statistics` under sequence parallelism, C = 3.
    """
    with renamed(process_group="cp_group"):
        if (cp_ranks := Layout.of(as_group(cp_group), False).ranks) > 1:
            raise ValueError(f"process_group must have one rank, got {cp_ranks}")
    hidden, target = tensor_parallel_hidden_states, int64_ids("target", target)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise ValueError(f"tensor_parallel_hidden_states must be [S/P, B, D], got {described(hidden)}")
    with renamed(process_group="tp_group"):
        ranks = 1 if is_dtensor(hidden) else Layout.of(as_group(tp_group), False).ranks
    expected = [hidden.shape[1], hidden.shape[0] * ranks]
    for name, value in (("target", target), ("mask", mask)):
        if isinstance(value, Tensor) and list(value.shape) != expected:
            of = f"tensor_parallel_hidden_states {list(hidden.shape)} of each of {ranks} rank(s)"
            raise ValueError(f"{name} must be [B, S] = {expected} for {of}, got {list(value.shape)}")
    mask = mask.t() if isinstance(mask, Tensor) else mask
    options = Options("token_statistics", sequence_parallel=True, vocab_size=vocab_size, logits_budget=logits_budget)
    tensors = Tensors(hidden, output_weight_layer, target.roll(-1, -1).t(), bias)
    with renamed(hidden="tensor_parallel_hidden_states", weight="output_weight_layer"):
        log_probs = _of_ids(
            options, tensors, vocab_start_index, vocab_end_index, tp_group, inference_only, mask, counted_tokens
        )
    return log_probs.t()[:, :-1].contiguous()


class FusedLinearLogprobTriton:
    """Replaces SkyRL's autograd function of this name. It has the method that SkyRL calls, and needs no Triton."""

    @staticmethod
    @public
    def apply(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: dist.ProcessGroup | None,
        inference_only: bool = False,
        *,
        mask: Tensor | None = None,
        counted_tokens: int | TokenCount | None = None,
    ) -> Tensor:
        """Log-probabilities ``[B, S]`` of the ids ``target [B, S]``, as in SkyRL's ``fused_linear_logprob_triton.py``:
        the caller has shifted the targets, and divided the hidden states or the weight by the temperature. ``hidden``
        is ``[B, S, D]``, all tokens on every rank, and is cast to the weight's dtype. Its gradient is the term of this
        rank's shard, which a mapping in front must sum. A target outside the vocabulary has 0, and the gradient of
        ``-lse``. Results are fp32 (fp64 for fp64), identical on every rank.

        Others: as in :func:`from_parallel_hidden_states_to_logprobs`. Collectives: those of
        :func:`linear_cross_entropy`, but C = 3.
        """
        if isinstance(hidden, Tensor) and isinstance(weight, Tensor):
            hidden = hidden.to(weight.dtype)
        tensors = Tensors(hidden, weight, int64_ids("target", target))
        options = Options("token_statistics", reduce_hidden_grad=False)
        return _of_ids(
            options, tensors, vocab_start_index, vocab_end_index, tp_group, inference_only, mask, counted_tokens
        )


def _of_ids(
    options: Options, tensors: Tensors, start: Any, end: Any, group: Any, inference_only: Any, mask: Any, count: Any
) -> Tensor:
    """Log-probabilities of the targets, 0 for one outside of the vocabulary. Rows of the weight are those of the ids
    from ``start`` on; those from ``end`` on are left out."""
    _, weight, target, bias, *_ = tensors
    if not isinstance(weight, Tensor) or weight.dim() != 2 or is_dtensor(weight):
        given = "a DTensor: pass weight.to_local()" if is_dtensor(weight) else described(weight)
        raise ValueError(f"weight must be [V/P, D], got {given}")
    if not (type(start) is type(end) is int and 0 <= start <= end <= start + len(weight)):
        bounds = f"vocab_start_index={shortened(start)} to vocab_end_index={shortened(end)}, which must be ints"
        raise ValueError(f"weight has {len(weight)} rows, which do not fit the ids from {bounds}")
    if isinstance(bias, Tensor) and bias.shape == weight.shape[:1]:
        bias = bias[: end - start]
    check_flag("inference_only", inference_only)
    tensors = tensors._replace(linear_weight=weight[: end - start], linear_bias=bias)
    gradients = torch.is_grad_enabled() and not inference_only
    with torch.set_grad_enabled(gradients), renamed(process_group="tp_group", **_NAMES):
        found: Any = statistics_of(options._replace(vocab_start=start), tensors, group, mask, count)
    log_probs, inside = found.target_log_prob, (target >= 0) & (target < found.vocab_size)
    outside = (log_probs - log_probs.detach()).nan_to_num(0.0)  # 0, with the gradient of -lse
    return torch.where(inside, log_probs, outside)


def _flat(value: Any, trailing: int = 0) -> Any:
    """A tensor with one dimension of tokens, and ``trailing`` others. What has none is left, for a refusal."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() < trailing:
        return value
    tokens = value.dim() - trailing
    return value.reshape(value.shape[:tokens].numel(), *value.shape[tokens:])
