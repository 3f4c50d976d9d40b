"""Log-probabilities and entropies, under the names and signatures that RL trainers use.

Logits are summed in fp32 and never rounded, so log-probabilities are as exact as from an fp32 head on the same weights.
A temperature divides the logits, also for the entropies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call.checks import as_group, int64_ids, public, renamed
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import Options, Tensors, as_flag, as_number, shortened, split_per_token
from parallel_lce.functional import statistics_of
from parallel_lce.run.statistics import TokenStatistics
from parallel_lce.run.transforms import transformable


@public
@transformable
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
) -> tuple[Tensor, ...]:
    """Log-probabilities of the labels and entropies, with the signature and meaning of verl's
    ``verl.utils.kernel.linear_cross_entropy``, which slime copies.

    As in verl, the gradient of ``hidden`` is the term of this rank's shard: it is not summed over the ranks. A mapping
    in front of this function sums it: Megatron's ``gather_from_sequence_parallel_region`` (verl and slime with sequence
    parallelism), or ``copy_to_tensor_model_parallel_region`` (slime without). verl's Megatron path without sequence
    parallelism has no mapping, so the gradient is incomplete: :mod:`parallel_lce.verl` sums it within verl's functions.

    Args:
        hidden: ``[..., D]``, all tokens on every rank of the group. It is flattened, and so are the labels.
        weight: this rank's vocabulary shard ``[V/P, D]``, of equal shards, in the dtype of ``hidden``.
        labels: N ids, of any integer dtype.
        temperature: a number > 0; or, beyond verl, a tensor of N numbers. None is 1.
        reduction: of the log-probabilities: 'none', 'sum' or 'mean', in upper or lower case. None is 'none'.
        dist_process_group: the tensor-parallel group; None for one rank.
        bias: ``[V/P]`` or None.
        vocab_size, logits_budget: as in :func:`parallel_lce.linear_cross_entropy`.
        reduce_hidden_grad: True: the gradient of ``hidden`` is summed over the ranks here, where no mapping does it.
        sum_p_squared: the sums of squared probabilities are returned too.

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
    if temperature is None:
        temperature = 1.0
    name = "none" if reduction is None else str(reduction).lower()
    if name not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    _check_tensors(hidden=hidden, weight=weight, labels=labels)
    if hidden.dim() < 1:
        raise ValueError(f"hidden must be [..., D], got {list(hidden.shape)}")
    own = dict(input="hidden", linear_weight="weight", target="labels", linear_bias="bias")
    _, number, _, each = split_per_token(1.0, temperature)
    flat = hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1])
    tensors = Tensors(flat, weight, labels.reshape(-1), bias, temperature=each if each is None else each.reshape(-1))
    with renamed(process_group="dist_process_group", **own):
        statistics = _statistics(
            tensors,
            dist_process_group,
            temperature=number,
            vocab_size=vocab_size,
            logits_budget=logits_budget,
            reduce_hidden_grad=reduce_hidden_grad,
            expected_logit=True,
            sum_p_squared=sum_p_squared,
        )
    assert statistics.target_log_prob is not None and statistics.entropy is not None
    log_probs = statistics.target_log_prob
    if name != "none":
        log_probs = log_probs.sum() if name == "sum" else log_probs.mean()
    if statistics.sum_p_squared is not None:
        return log_probs, statistics.entropy, statistics.sum_p_squared
    return log_probs, statistics.entropy


@public
@transformable
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
) -> Tensor:
    """Log-probability of each next token, as the function of this name in NeMo-RL's ``distributed/model_utils.py``.

    As there, the caller passes the decoder's output, without a mapping in front: the gradient of the hidden states is
    summed over the ranks, by a reduce-scatter.

    Args:
        tensor_parallel_hidden_states: ``[S/P, B, D]``, split over ``tp_group`` along the sequence.
        output_weight_layer: this rank's vocabulary shard ``[V/P, D]``, whose first row is ``vocab_start_index``.
        runtime_gather_output: not used, as there.
        target: token ids ``[B, S]``. Position s is scored with the token at s + 1.
        vocab_end_index: end of the shard's ids. Further rows of the weight are padding, and left out.
        inference_only: nothing is saved for a backward.
        cp_group: None or a group of one rank, as there.
        chunk_size: not used, since no logits are stored.
        bias: ``[V/P]`` or None.
        vocab_size, logits_budget: as in :func:`parallel_lce.linear_cross_entropy`.

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
    start, rows = _ids("output_weight_layer", weight, vocab_start_index, vocab_end_index)
    if isinstance(bias, Tensor) and bias.shape != (len(weight),):
        raise ValueError(f"bias must have shape [{len(weight)}], got {list(bias.shape)}")
    target = int64_ids("target", target).roll(-1, -1)
    own = dict(input="tensor_parallel_hidden_states", linear_weight="output_weight_layer", linear_bias="bias")
    with _gradients_unless(inference_only), renamed(process_group="tp_group", vocab_start="vocab_start_index", **own):
        statistics = _statistics(
            Tensors(hidden, weight[:rows], target.t(), bias[:rows] if isinstance(bias, Tensor) else bias),
            tp_group,
            sequence_parallel=True,
            vocab_start=start,
            vocab_size=vocab_size,
            logits_budget=logits_budget,
        )
    assert statistics.target_log_prob is not None
    outside = (target < 0) | (target >= statistics.vocab_size)
    return statistics.target_log_prob.t().masked_fill(outside, 0.0)[:, :-1].contiguous()


class FusedLinearLogprobTriton:
    """Replaces SkyRL's autograd function of this name. It has only the method that SkyRL calls, ``apply``, and needs no
    Triton."""

    @staticmethod
    @public
    @transformable
    def apply(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: dist.ProcessGroup | None,
        inference_only: bool = False,
    ) -> Tensor:
        """Log-probabilities of the targets, as in SkyRL's ``fused_linear_logprob_triton.py``. The caller has divided
        the hidden states or the weight by the temperature, and shifted the targets.

        As there, the gradient of ``hidden`` is the term of this rank's shard, which a mapping in front must sum.

        Args:
            hidden: ``[B, S, D]``, all tokens on every rank of the group. Another dtype than the weight's is converted.
            weight: this rank's vocabulary shard ``[V/P, D]``, whose first row is ``vocab_start_index``.
            target: ids ``[B, S]`` of any integer dtype.
            vocab_end_index: end of the shard's ids. Further rows of the weight are padding, and left out.
            chunk_size: not used, since no logits are stored.
            inference_only: nothing is saved for a backward.

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
        start, rows = _ids("weight", weight, vocab_start_index, vocab_end_index)
        target = int64_ids("target", target)
        own = dict(input="hidden", linear_weight="weight", vocab_start="vocab_start_index", process_group="tp_group")
        with _gradients_unless(inference_only), renamed(**own):
            tensors = Tensors(hidden.to(weight.dtype), weight[:rows], target)
            statistics = _statistics(tensors, tp_group, vocab_start=start, reduce_hidden_grad=False)
        log_probs = statistics.target_log_prob
        assert log_probs is not None
        outside = (target < 0) | (target >= statistics.vocab_size)
        return log_probs - log_probs.detach().masked_fill(~outside, 0.0)


def _gradients_unless(inference_only: object) -> AbstractContextManager:
    return torch.set_grad_enabled(not as_flag("inference_only", inference_only) and torch.is_grad_enabled())


def _statistics(tensors: Tensors, group: dist.ProcessGroup | None, **options: Any) -> TokenStatistics:
    """:func:`parallel_lce.token_statistics`, where as in the trainers a target outside the vocabulary has a logit of
    0."""
    return statistics_of(Options("token_statistics", **options), tensors, group)


def _ids(name: str, weight: Tensor, vocab_start: object, vocab_end: object) -> tuple[int, int]:
    """The first id of a shard, and the number of its ids."""
    rows, start, end = len(weight), as_number(vocab_start), as_number(vocab_end)
    if not (type(start) is type(end) is int and 0 <= start <= end <= start + rows):
        bounds = f"vocab_start_index={shortened(start)} to vocab_end_index={shortened(end)}"
        raise ValueError(f"{name} has {rows} rows, which do not fit the ids from {bounds}")
    return start, end - start


def _check_tensors(**named: object) -> None:
    """Raise ``ValueError`` for arguments that are no dense tensors, before their shapes are read."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
        if value.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got one of layout {value.layout}")
