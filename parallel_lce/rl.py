"""Log-probabilities and entropies, under the names and signatures that RL trainers use.

Logits are summed in fp32 and never rounded, so log-probabilities are as exact as from an fp32 head on the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call.checks import as_group, int64_ids, public, renamed
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import Options, Tensors, check_flag, shortened, split_per_token
from parallel_lce.functional import statistics_of
from parallel_lce.run.token_count import TokenCount


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
    """Log-probabilities of the labels and entropies, with the signature and meaning of verl's
    ``verl.utils.kernel.linear_cross_entropy``, which slime copies.

    As in verl, the gradient of ``hidden`` is the term of this rank's shard, which a mapping in front of this function
    must sum over the ranks, such as Megatron's ``gather_from_sequence_parallel_region``. verl's Megatron path without
    sequence parallelism has none; :mod:`parallel_lce.verl` sums the gradient within verl's functions.

    Args:
        hidden: ``[..., D]``, all tokens on every rank of the group. It is flattened, and so are the labels.
        weight: this rank's vocabulary shard ``[V/P, D]``, of equal shards, in the dtype of ``hidden``.
        labels: N ids, of any integer dtype.
        temperature: divides the logits, also for the entropies: a number > 0; or, beyond verl, N numbers. None is 1.
        reduction: of the log-probabilities: 'none', 'sum' or 'mean', in upper or lower case. None is 'none'.
        dist_process_group: the tensor-parallel group; None for one rank.
        bias: ``[V/P]`` or None.
        vocab_size, logits_budget: as in :func:`parallel_lce.linear_cross_entropy`.
        reduce_hidden_grad: True: the gradient of ``hidden`` is summed over the ranks here, where no mapping does it.
        sum_p_squared: the sums of squared probabilities are returned too.
        mask, counted_tokens: as in :func:`parallel_lce.token_statistics`, of N tokens in any shape, such as a response
            mask, aligned with the labels. Results of tokens that do not count are 0.

    Returns:
        Log-probabilities ``[N]``, or 0-dimensional, and entropies in nats ``[N]``, fp32 (fp64 for fp64), N tokens in
        row-major order; differentiable, identical on every rank bit for bit. With ``sum_p_squared`` a third tensor
        ``[N]``. As in verl's kernel, a label outside the vocabulary has the log-probability ``-lse``.

    Collectives: forward, the all-gather of partials of :func:`parallel_lce.token_statistics`, C = 4, or 5 with
    ``sum_p_squared``; backward, none, or one all-reduce of N * D elements with ``reduce_hidden_grad``.

    Raises:
        ValueError: a temperature that is no number > 0, an unknown reduction, and as
        :func:`parallel_lce.token_statistics`.
    """
    name = "none" if reduction is None else str(reduction).lower()
    if name not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    _check_tensors(hidden=hidden, weight=weight, labels=labels)
    if hidden.dim() < 1:
        raise ValueError(f"hidden must be [..., D], got {list(hidden.shape)}")
    _, number, _, each = split_per_token(1.0, 1.0 if temperature is None else temperature)
    flat = hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1])
    tensors = Tensors(flat, weight, labels.reshape(-1), bias, temperature=each if each is None else each.reshape(-1))
    options = Options(
        "token_statistics",
        temperature=number,
        vocab_size=vocab_size,
        logits_budget=logits_budget,
        reduce_hidden_grad=reduce_hidden_grad,
        entropy=True,
        sum_p_squared=sum_p_squared,
    )
    own = dict(input="hidden", linear_weight="weight", target="labels", linear_bias="bias")
    with renamed(process_group="dist_process_group", **own):
        flat_mask = mask.reshape(-1) if isinstance(mask, Tensor) else mask
        statistics = statistics_of(options, tensors, dist_process_group, flat_mask, counted_tokens)
    assert statistics.target_log_prob is not None and statistics.entropy is not None
    log_probs = statistics.target_log_prob
    if name != "none":
        log_probs = log_probs.sum() if name == "sum" else log_probs.mean()
    if statistics.sum_p_squared is not None:
        return log_probs, statistics.entropy, statistics.sum_p_squared
    return log_probs, statistics.entropy


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
    """Log-probability of each next token, as the function of this name in NeMo-RL's ``distributed/model_utils.py``.

    As there, the caller passes the decoder's output, without a mapping in front: the gradient of the hidden states is
    summed over the ranks, by a reduce-scatter.

    Args:
        tensor_parallel_hidden_states: ``[S/P, B, D]``, split over ``tp_group`` along the sequence.
        output_weight_layer: this rank's vocabulary shard ``[V/P, D]``, whose first row is ``vocab_start_index``.
        target: token ids ``[B, S]``. Position s is scored with the token at s + 1.
        vocab_end_index: end of the shard's ids. Further rows of the weight are padding, and left out.
        inference_only: nothing is saved for a backward.
        cp_group: None or a group of one rank, as there.
        bias: ``[V/P]`` or None.
        vocab_size, logits_budget: as in :func:`parallel_lce.linear_cross_entropy`.
        mask: bool ``[B, S]`` or None: true for a position whose next token is to be scored; the others have 0 and cost
            nothing. Needs ``counted_tokens``, the number of trues, as in :func:`parallel_lce.token_statistics`.
        runtime_gather_output, chunk_size: not used.

    Returns:
        ``[B, S - 1]`` fp32, differentiable. A target outside the vocabulary has 0 and no gradient.

    Collectives: those of :func:`parallel_lce.token_statistics` under sequence parallelism, C = 3.

    Raises:
        ValueError: a ``cp_group`` of several ranks, a shard of fewer rows than ids, ids that end before they start, and
        as :func:`parallel_lce.token_statistics`.
    """
    with renamed(process_group="cp_group"):
        cp_ranks = Layout.of(as_group(cp_group), False).ranks
    if cp_ranks > 1:
        raise ValueError(f"cp_group must have one rank, got {cp_ranks}")
    hidden, weight = tensor_parallel_hidden_states, output_weight_layer
    _check_tensors(tensor_parallel_hidden_states=hidden, output_weight_layer=weight, target=target)
    if target.dim() != 2 or weight.dim() != 2:
        given = f"{list(target.shape)} and {list(weight.shape)}"
        raise ValueError(f"target must be [B, S] and output_weight_layer [V/P, D], got {given}")
    ids = int64_ids("target", target).roll(-1, -1).t()
    tensors, shard = Tensors(hidden, weight, ids, bias), (vocab_start_index, vocab_end_index)
    names = "tensor_parallel_hidden_states", "output_weight_layer"
    options = dict(sequence_parallel=True, vocab_size=vocab_size, logits_budget=logits_budget)
    counted = mask.t() if isinstance(mask, Tensor) and mask.dim() == 2 else mask, counted_tokens
    log_probs, outside = _of_shard(tensors, names, shard, tp_group, inference_only, counted=counted, **options)
    return log_probs.masked_fill(outside, 0.0).t()[:, :-1].contiguous()


class FusedLinearLogprobTriton:
    """Replaces SkyRL's autograd function of this name. It has only the method that SkyRL calls, ``apply``, and needs no
    Triton."""

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
        """Log-probabilities of the targets, as in SkyRL's ``fused_linear_logprob_triton.py``. The caller has divided
        the hidden states or the weight by the temperature, and shifted the targets.

        As there, the gradient of ``hidden`` is the term of this rank's shard, which a mapping in front must sum.

        Args:
            hidden: ``[B, S, D]``, all tokens on every rank of the group. Another dtype than the weight's is converted.
            target: ids ``[B, S]`` of any integer dtype.
            mask: bool ``[B, S]`` or None: true for a target to be scored; the others have 0 and cost nothing. Needs
                ``counted_tokens``, as in :func:`parallel_lce.token_statistics`.
            Others: as in :func:`from_parallel_hidden_states_to_logprobs`.

        Returns:
            ``[B, S]`` fp32 (fp64 for fp64), identical on every rank. A target outside the vocabulary has 0, but, as in
            SkyRL, the gradient of ``-lse``.

        Collectives: those of :func:`linear_cross_entropy`, but C = 3.

        Raises:
            ValueError: as :func:`from_parallel_hidden_states_to_logprobs`.
        """
        _check_tensors(hidden=hidden, weight=weight, target=target)
        if weight.dim() != 2:
            raise ValueError(f"weight must be [V/P, D], got {list(weight.shape)}")
        tensors, shard = Tensors(hidden.to(weight.dtype), weight, target), (vocab_start_index, vocab_end_index)
        names = "hidden", "weight"
        log_probs, outside = _of_shard(
            tensors, names, shard, tp_group, inference_only, counted=(mask, counted_tokens), reduce_hidden_grad=False
        )
        return log_probs - log_probs.detach().masked_fill(~outside, 0.0)


def _of_shard(
    tensors: Tensors,
    names: tuple[str, str],
    shard: tuple[Any, Any],
    tp_group: dist.ProcessGroup | None,
    inference_only: bool,
    counted: tuple[Any, Any] = (None, None),
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and which of them are outside of the vocabulary, where their logit is 0.
    ``names``: of hidden states and weight, in messages. ``shard``: the first id of the weight's rows, and the last + 1;
    further rows are left out. ``counted``: a mask of the tokens that count, and their number."""
    weight, bias, (start, end) = tensors.linear_weight, tensors.linear_bias, shard
    if not (type(start) is type(end) is int and 0 <= start <= end <= start + len(weight)):
        bounds = f"vocab_start_index={shortened(start)} to vocab_end_index={shortened(end)}"
        raise ValueError(f"{names[1]} has {len(weight)} rows, which do not fit the ids from {bounds}")
    if isinstance(bias, Tensor):
        if bias.shape != (len(weight),):
            raise ValueError(f"bias must have shape [{len(weight)}], got {list(bias.shape)}")
        bias = bias[: end - start]
    target = int64_ids("target", tensors.target)
    tensors = tensors._replace(linear_weight=weight[: end - start], target=target, linear_bias=bias)
    check_flag("inference_only", inference_only)
    gradients = not inference_only and torch.is_grad_enabled()
    own = dict(zip(("input", "linear_weight"), names), linear_bias="bias", vocab_start="vocab_start_index")
    with torch.set_grad_enabled(gradients), renamed(process_group="tp_group", **own):
        statistics = statistics_of(
            Options("token_statistics", vocab_start=start, **options), tensors, tp_group, *counted
        )
    assert statistics.target_log_prob is not None
    return statistics.target_log_prob, (target < 0) | (target >= statistics.vocab_size)


def _check_tensors(**named: object) -> None:
    """Raise ``ValueError`` for arguments that are no dense tensors, before their shapes are read."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
        if value.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got one of layout {value.layout}")
