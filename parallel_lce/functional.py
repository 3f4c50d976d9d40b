"""The fused loss and the fused statistics: the public functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.call.checks import check_values, public
from parallel_lce.core.options import NO_LABEL, Options, Tensors, check_reduction
from parallel_lce.core.private import outside_graphs
from parallel_lce.dtensor import adapted
from parallel_lce.features.selected import ids_and_offsets
from parallel_lce.run.entry import fused_loss, fused_statistics, fused_token_loss
from parallel_lce.run.results import TokenStatistics
from parallel_lce.run.token_count import TokenCount


@public
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    token_weight: Tensor | None = None,
    mask: Tensor | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    counted_tokens: int | TokenCount | None = None,
    gradient_filter: float | None = None,
    temperature: float | Tensor = 1.0,
    reduce_hidden_grad: bool = True,
    weight: None = None,
    options: None = None,
) -> Tensor:
    """Cross-entropy of ``softcap(logit_scale * (input @ linear_weight.T + linear_bias)) / temperature``.

    N is the number of tokens, V that of vocabulary entries, P that of ranks of ``process_group``. docs/usage.md has the
    meaning of all arguments, and differences from PyTorch's function.

    Args:
        input: ``[..., D]``, bf16, fp16, fp32 or fp64. Under sequence parallelism ``[S/P, ..., D]``, or
            ``[b, S/P, ..., D]`` with ``sequence_dim=1``, with S/P equal on all ranks.
        linear_weight, linear_bias: this rank's shards ``[V/P, D]`` and ``[V/P]``, in the input's dtype or cast by
            autocast. Shards may be uneven, or empty. A weight is copied if its rows are not contiguous, or misaligned.
        target: ids ``[...]`` of any integer dtype, the same on all ranks; of the whole sequence. One outside ``[0, V)``
            that is not ``ignore_index`` has loss and gradients NaN, whatever its weight; on a CPU it is refused.
        reduction: 'none': losses of the target's shape. 'sum'. 'mean': the sum divided by the weights of the tokens
            that are not ignored, over the whole sequence; 0 with gradients of 0 if those sum to 0.
        token_weight: of the target's shape and any real dtype, without a gradient. A weight of 0 gives one of 0.
        logit_scale, temperature: a Python number; or a floating-point tensor of the target's shape, the same on all
            ranks, without a gradient. Temperatures are > 0; those of a tensor are not checked.
        mask: bool, of the target's shape. Tokens where it is false are ignored, too. Without ``counted_tokens`` the
            call works on all tokens, on a copy of ``input`` with 0 for those that do not count.
        counted_tokens: the number of tokens that are not ignored, the same on all ranks; or a result of
            :func:`parallel_lce.count_tokens`. A wrong number is refused on a CPU and in debug mode, and gives NaN on a
            GPU and in a compiled graph. A count that the host cannot read: as a ``mask`` alone.
        gradient_filter: a probability in (0, 1); not with ``label_smoothing``.

    Returns:
        The loss, fp32 (fp64 for fp64), identical on every rank bit for bit; a DTensor if ``input`` is one
        (docs/pytorch.md). Its upstream gradient may be any tensor, the same on all ranks.

    Collectives run on ``process_group`` alone, on every rank in this order. N tokens are in B blocks, 1 unless the
    budget splits them; sizes are elements per rank, of all blocks together:

    - forward, sequence parallelism: all-gathers of hidden states, N/P * D, of at most 256 MiB each unless the block
      saves exponentials, during the projection of the previous block;
    - forward: an all-gather of partials, C * N + 3 of fp32, with C = 3, or 4 with ``label_smoothing``; in the Triton
      backend, whose sums take two numbers each, 4 or 6;
    - backward, sequence parallelism: B all-gathers of hidden states, N/P * D, unless forward saved them; the first
      during dX of its own block, the others during the previous block;
    - backward: B all-reduces, under sequence parallelism reduce-scatters, of dX, N * D of ``reduce_dtype``, during dW
      of the block's last slice; none if ``input`` needs no gradient, or with ``reduce_hidden_grad=False``.

    If forward forms the gradients, each block of R tokens gathers its hidden states and its partials (C * R + 3) there,
    and reduces its dX after the next block's gather; backward has no collective. A second backward repeats those of
    forward. With ``counted_tokens``, sequence parallelism gathers all hidden states, and all-reduces dX.

    Raises:
        ValueError: shapes, dtypes, devices, numbers or placements that do not fit, before any collective. For a target
            outside the vocabulary it is an IndexError, too. Ranks that differ give NaN, a failed or a hanging
            collective; ``PARALLEL_LCE_DEBUG=1`` raises on all of them (docs/faults.md).
        NotImplementedError: forward-mode differentiation. RuntimeError: in backward, with ``create_graph=True``.
    """
    if weight is not None or options is not None:
        name, instead = ("options", "logits_budget") if weight is None else ("weight", "token_weight")
        raise ValueError(f"{name} of torch.nn.functional.linear_cross_entropy is not supported: use {instead}")
    if reduction is None:  # which in Options means statistics
        check_reduction(reduction)
    tensors = Tensors(input, linear_weight, target, linear_bias, token_weight)
    chosen = Options(
        "linear_cross_entropy",
        reduction=reduction,
        ignore_index=NO_LABEL if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        temperature=temperature,
        gradient_filter=gradient_filter,
        sequence_parallel=sequence_parallel,
        sequence_dim=sequence_dim,
        reduce_hidden_grad=reduce_hidden_grad,
        reduce_dtype=reduce_dtype,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        logits_budget=logits_budget,
    )
    chosen, tensors, group, adapter = adapted(chosen, tensors, process_group)
    mask = adapter.per_token("mask", mask)
    return adapter.loss(fused_loss(chosen, tensors, group, mask=mask, counted_tokens=counted_tokens))


@public
def token_statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    *,
    linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    mean_logit: bool = False,
    entropy: bool = False,
    argmax: bool = False,
    sum_p_squared: bool = False,
    selected: Tensor | tuple[Tensor, Tensor] | None = None,
    top_k: int | None = None,
    mask: Tensor | None = None,
    counted_tokens: int | TokenCount | None = None,
    gradient_filter: float | None = None,
    temperature: float | Tensor = 1.0,
    reduce_hidden_grad: bool = True,
) -> TokenStatistics:
    """Differentiable per-token statistics of the logits, from which any loss can be made.

    Args: as of :func:`linear_cross_entropy`, as are layouts and errors, and:

        target: None: no statistics of a target. The target -100 has ``target_logit`` and ``target_log_prob`` 0, without
            a gradient; another one outside ``[0, V)`` has NaN, and on a CPU is refused.
        mean_logit, entropy, argmax, sum_p_squared: ask for the fields of these names; ``mean_logit`` also for
            ``mean_log_prob``, ``entropy`` for ``expected_logit``. Fields that are not asked for are None.
        selected: asks for ``selected_log_prob``, of ids ``[..., K]``; or of a pair of ids ``[E]`` and offsets
            ``[N + 1]``, where token n has ``ids[offsets[n]:offsets[n + 1]]``. Of any integer dtype, the same on all
            ranks, else the statistics are NaN, as for offsets that do not rise from 0 to E. An id may come twice; one
            outside ``[0, V)`` has log-probability -inf and no gradient.
        top_k: asks for ``top_logits`` and ``top_ids``, K of each token, without a gradient. The hidden states are
            projected a second time, some of them at a time: 64 MiB of fp32 logits, or those of 128 tokens.
        mask: bool, of the tokens' shape. Where it is false, statistics are 0, ids -1, and there is no gradient. These
            tokens cost nothing with ``counted_tokens``, the number of the others; without it ``input`` is copied, with
            0 for them. On a GPU and in a compiled graph a wrong number makes statistics NaN and ids -1.
        gradient_filter: not with ``mean_logit``, ``entropy``, ``sum_p_squared`` and ``selected``.

    Returns:
        :class:`TokenStatistics` of the tokens' shape, fp32 (fp64 for fp64), identical on every rank bit for bit.

    Collectives: those of :func:`linear_cross_entropy` with ``reduction='none'``. C is 3, plus 1 for each of
    ``entropy``, ``argmax`` and ``sum_p_squared``, and 2 for ``mean_logit``; in the Triton backend 1 more, and all but
    ``argmax`` twice. The message also has E elements for ``selected`` (N * K for ids ``[..., K]``), and 2 * N * K for
    ``top_k``.
    """
    ids, offsets = ids_and_offsets(selected)
    tensors = Tensors(input, linear_weight, target, linear_bias, selected=ids, selected_offsets=offsets)
    options = Options(
        "token_statistics",
        ignore_index=NO_LABEL,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        temperature=temperature,
        gradient_filter=gradient_filter,
        sequence_parallel=sequence_parallel,
        sequence_dim=sequence_dim,
        reduce_hidden_grad=reduce_hidden_grad,
        reduce_dtype=reduce_dtype,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        logits_budget=logits_budget,
        mean_logit=mean_logit,
        entropy=entropy,
        argmax=argmax,
        sum_p_squared=sum_p_squared,
        top_k=top_k,
    )
    return statistics_of(options, tensors, process_group, mask, counted_tokens)


def statistics_of(
    options: Options,
    tensors: Tensors,
    process_group: dist.ProcessGroup | DeviceMesh | None,
    mask: Tensor | None = None,
    counted_tokens: int | TokenCount | None = None,
) -> TokenStatistics:
    """:func:`token_statistics` of options and tensors."""
    options, tensors, group, adapter = adapted(options, tensors, process_group)
    mask = adapter.per_token("mask", mask)
    return adapter.statistics(fused_statistics(options, tensors, group, mask=mask, counted_tokens=counted_tokens))


@partial(outside_graphs, reason="graphs of torch.compile break at token_loss: for one graph use token_statistics")
@public
def token_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: Callable[..., Tensor | tuple[Tensor, dict[str, Tensor]]],
    *per_token: Tensor,
    entropy: bool = False,
    sum_p_squared: bool = False,
    mean_logit: bool = False,
    argmax: bool = False,
    reduction: str = "sum",
    ignore_index: int | None = -100,
    linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce_hidden_grad: bool = True,
    counted_tokens: int | TokenCount | None = None,
    gradient_filter: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of the caller's own, a function of each token's statistics, with the gradients formed as those of
    :func:`linear_cross_entropy`: in forward, where the logits exceed the budget. docs/rl.md has PPO as an example.

    Forward calls ``loss(statistics, *values)`` for each block of R tokens, without autocast, under autograd, or under
    ``torch.no_grad`` if no gradient is needed. In fp16, and for a ``main_grad`` (Megatron), backward forms the
    gradients, and ``loss`` gets all tokens. A second backward, and a checkpoint around the call, call it again.

    Args: as of :func:`linear_cross_entropy`, ``gradient_filter`` as of :func:`token_statistics`, and:

        loss: gets :class:`TokenStatistics` with ``[R]`` tensors, and the block's ``per_token`` values ``[R]``. Returns
            losses ``[R]``, or losses and a dict of metrics ``[R]``, which need no gradient. Elementwise over tokens,
            since R depends on the budget, and the same on all ranks; debug mode checks both, but for the gradients.
            Gradients flow to ``input``, ``linear_weight`` and ``linear_bias`` alone, not to tensors that ``loss`` has
            from elsewhere. Of losses that are constants the result requires none.
        per_token: tensors of the target's shape and any dtype, without gradients, the same on all ranks.
        entropy, sum_p_squared, mean_logit, argmax: the statistics that ``loss`` needs beside ``lse``, ``max_logit``,
            ``target_logit`` and ``target_log_prob``. To read another one is refused.
        reduction: 'sum'; or 'mean', the sum divided by the number of tokens that are not ignored.
        ignore_index: tokens with this target have loss, metrics and gradient 0, whatever ``loss`` gives for them.

    Returns:
        The loss, 0-dimensional, fp32 (fp64 for fp64), and the metrics by name, each of the target's shape, in its own
        dtype and detached. Both are identical on every rank bit for bit.

    Collectives: those of :func:`linear_cross_entropy`, with the C of :func:`token_statistics`. An exception in ``loss``
    is raised after the collectives of forward, for which other ranks wait; in debug mode all ranks raise.

    Raises:
        ValueError: as :func:`linear_cross_entropy`; ``per_token`` values that do not fit; or ``loss`` returns anything
            else, writes into its statistics, or reads one that was not asked for. Whatever ``loss`` raises.
    """
    ignore_index = NO_LABEL if ignore_index is None else ignore_index
    tensors, options = Tensors(input, linear_weight, target, linear_bias), Options.of("token_loss", locals())
    options, tensors, group, adapter = adapted(options, tensors, process_group)
    per_token = tuple([adapter.per_token(f"per_token[{n}]", value) for n, value in enumerate(per_token)])
    values = check_values(loss, per_token, reduction, tensors.target)
    total, metrics = fused_token_loss(options, tensors, group, loss, values, counted_tokens=counted_tokens)
    return adapter.loss(total), {name: adapter.of_tokens(metric) for name, metric in metrics.items()}
