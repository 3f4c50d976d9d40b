"""The fused loss and the fused statistics: the public functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.call.checks import check_values, public
from parallel_lce.core.options import NO_LABEL, Options, Tensors, check_reduction, shortened, split_per_token
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

    There is no ``[N, V]`` tensor of logits. The same call of PyTorch 2.13's
    ``torch.nn.functional.linear_cross_entropy`` gives the same answer, with four exceptions: the loss of bf16 and fp16
    input is fp32; the mean of no tokens is 0 instead of NaN; class weights, class probabilities and ``options`` are
    refused; on a GPU a target outside the vocabulary gives NaN.

    Args:
        input: hidden states ``[..., D]``, bf16, fp16, fp32 or fp64. Under sequence parallelism this rank's part
            ``[S/P, ..., D]``, with S/P equal on all ranks.
        linear_weight: this rank's vocabulary shard ``[V/P, D]``, in the input's dtype. Copied if its rows are not
            contiguous; and on a GPU, in forward and again in backward, if it has 16 bits, D is a multiple of 8, and its
            rows do not begin at multiples of 16 bytes. Shards may be uneven, or empty. Under autocast ``input``,
            ``linear_weight`` and ``linear_bias`` are cast to autocast's dtype first, unless they are fp64.
        target: ids ``[...]`` of any integer dtype, the same on all ranks; under sequence parallelism the whole sequence
            ``[S, ...]``. A target outside ``[0, V)`` that is not ``ignore_index`` has loss NaN and NaN gradients, even
            if its ``token_weight`` is 0; on a CPU it is refused (docs/usage.md, "Ids outside the vocabulary").
        linear_bias: ``[V/P]`` or None.
        reduction: 'none': losses of the target's shape. 'sum'. 'mean': the sum divided by the sum of the weights of the
            tokens that are not ignored, over the whole sequence. If the weights sum to 0, the loss and its gradients
            are 0.
        ignore_index: tokens with this target have loss 0 and gradient 0. None means -100.
        label_smoothing: in [0, 1], as in ``torch.nn.functional.cross_entropy``, over the V real entries of all ranks.
        z_loss: a number >= 0; adds ``z_loss * lse**2`` per token.
        logit_scale: a Python number; or a tensor of the target's shape and any floating-point dtype, one scale for each
            token. No gradient flows to it. It must be the same on all ranks.
        logit_softcap: a Python number; ``softcap(u) = cap * tanh(u / cap)``.
        temperature: divides the soft-capped logits: a number > 0; or a tensor as for ``logit_scale``, whose values must
            be > 0 and are not checked. With a tensor and a ``logit_softcap`` backward recomputes every logit.
        process_group: the tensor-parallel group that shards the vocabulary, or a one-dimensional DeviceMesh. None, or a
            group of one rank, means no parallelism. No other group is used.
        sequence_parallel: ``input`` is split along ``sequence_dim`` over ``process_group``.
        sequence_dim: 0; or 1 for ``input`` ``[b, S/P, ..., D]``, ``target`` ``[b, S, ...]`` and results in the same
            order. Without sequence parallelism it has no effect.
        token_weight: ``[...]`` of the target's shape and any real dtype; multiplies the loss of each token, in the
            loss's dtype. If it needs a gradient, the losses are multiplied after the fused call. A token whose weight
            is 0 has no gradient, whatever comes from above.
        vocab_start: global id of this shard's first row, given on all ranks or on none. Default: ``rank * rows``, for
            equal shards only.
        vocab_size: V, the number of real entries. Rows from id V on are padding: they are left out of the softmax and
            have zero gradient. Default: all rows of all ranks.
        logits_budget: bytes per rank and call for tensors of the logits' shape: exponentials saved from forward to
            backward, and the working block (docs/usage.md, "Memory", which also has the errors of exponentials that are
            saved in one byte). It must be equal on all ranks. A smaller one
            allows 64 MiB, or 256 MiB where a ``gradient_filter`` recomputes logits. Without a reduction of dX,
            recomputed logits may also use as many bytes as dX: dX is allocated later. None: that of the environment's
            ``PARALLEL_LCE_LOGITS_BUDGET``, else a thirty-second of the GPU's memory (4.25 GiB on an H200), and 1 GiB on
            a CPU. Logits beyond the budget are recomputed; or, for 'mean' and 'sum' except in fp16, the gradients are
            formed in forward. A second backward through one graph recomputes everything.
        reduce_dtype: dtype in which dX is summed over the ranks; None means the input's. With torch.float32 each rank's
            term is sent and added unrounded: for bf16 that is twice the bytes.
        reduce_hidden_grad: True: dX is summed over the ranks. False: each rank gets the term of its own shard, in the
            input's dtype, without a reduction. This is for hidden states from a mapping that sums in its own backward,
            such as Megatron's ``copy_to_tensor_model_parallel_region`` and ``gather_from_sequence_parallel_region``.
            Not with ``sequence_parallel``: if a mapping gathers the sequence, pass the gathered states without it.
        counted_tokens: how many targets are not ``ignore_index``, the same number on all ranks; or what
            :func:`parallel_lce.count_tokens` has begun to count before the model's forward. The call then works on
            these tokens alone, and the others cost nothing. A wrong number is refused on a CPU and in debug mode, and
            makes the loss NaN on a GPU and in a compiled graph. Under sequence parallelism every rank gathers all
            hidden states, and dX is all-reduced. Where the host cannot read the number, the call works on all tokens,
            on a copy of ``input`` with 0 for those that do not count.
        gradient_filter: None: nothing is estimated. A probability in (0, 1), such as 2**-13: backward is exact only in
            the gradients of the targets' logits, and in tiles of 128 tokens by 128 vocabulary rows that contain a
            larger probability. Every other tile gets a rank-one estimate (docs/gradient_filter.md). The loss is
            unchanged, and no collective is added. Gradients are exact on the torch backend, in products below 1e12
            flops, and where earlier calls had more than three quarters of the tiles to compute. Not with
            ``label_smoothing``.
        weight, options: only None: PyTorch's arguments that are not supported.

    Returns:
        The loss, fp32 (fp64 for fp64), identical on every rank bit for bit.

    Collectives run on ``process_group`` alone, on every rank in this order. P ranks; N tokens of the whole sequence, in
    B blocks (1 unless the budget splits the tokens); C = 3, and 1 more for ``label_smoothing``; in the Triton backend,
    whose sums take two numbers each, another 1, and 1 more for ``label_smoothing``; SP: ``sequence_parallel``.

    ===========  ========================  ==============================  ===========================================
    when         operation                 elements per rank, in all       overlaps
    ===========  ========================  ==============================  ===========================================
    forward, SP  all-gather of hidden      N/P * D                         projection of the previous block
                 states
    forward      all-gather of partials    C * N + 3, fp32                 nothing
    backward,    B all-gathers of hidden   N/P * D; none if forward saved  the first: dX of its own block; the others:
    SP           states                    them, within the budget         the previous block
    backward     B all-reduces of dX       N * D of ``reduce_dtype``       dW of the block's last slice
    backward,    B reduce-scatters of dX   N * D of ``reduce_dtype``       dW of the block's last slice
    SP           instead
    ===========  ========================  ==============================  ===========================================

    A forward gathers the hidden states of the block that saves exponentials by one all-gather, and all others in blocks
    of at most 256 MiB, each started a block ahead. The first gather of a backward overlaps dX only in the Triton
    backend with all exponentials saved. There is no reduction if ``input`` needs no gradient, or with
    ``reduce_hidden_grad=False``. If gradients are formed in forward, each block of R tokens gathers its hidden states
    there (SP), gathers its partials (C * R + 3 elements), and reduces its dX after the next block's gather of partials.
    Backward then has no collective; a second backward repeats those of forward.

    **DTensors.** ``input``, ``linear_weight`` and the other tensors may be DTensors of one mesh. One mesh dimension,
    tensor parallelism, shards the weight with ``Shard(0)``: its group and its ids are used. ``input`` is ``Replicate``
    on it, or ``Shard`` of the first or second dimension, which is sequence parallelism. The result is a DTensor if
    ``input`` is one. docs/pytorch.md has the placements of results and gradients. With ``reduce_hidden_grad=False`` the
    gradient of ``input`` is ``Partial`` on the dimension that shards the weight. Before the call DTensor redistributes
    values per token, and hidden states in unequal parts.

    The upstream gradient may be any tensor, and must be the same on all ranks. Shards with a gap or an overlap give
    NaN, and so do options that differ between ranks, and a vocabulary without any row. If shards have unequal rows and
    no ``vocab_start``, a collective may fail or hang. ``PARALLEL_LCE_DEBUG=1`` on all ranks raises an error for these,
    for equal shards, for targets out of range, and for arguments that one rank refuses; it synchronises the host with
    the device.

    Raises:
        ValueError: shapes, dtypes, devices, numbers or placements that do not fit, before any collective; the message
        has the given and the expected value. For a target outside the vocabulary it is an IndexError, too.
        TypeError: an unknown keyword argument. NotImplementedError: forward-mode differentiation.
        RuntimeError: in backward, with ``create_graph=True``.
    """
    if reduction is None or weight is not None or options is not None:
        _refuse_unsupported(reduction, weight=weight, options=options)
    one_scale, one_temperature, token_scale, token_temperature = split_per_token(logit_scale, temperature)
    tensors = Tensors(input, linear_weight, target, linear_bias, token_weight, token_scale, token_temperature)
    chosen = Options(
        "linear_cross_entropy",
        reduction=reduction,
        ignore_index=NO_LABEL if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=one_scale,
        logit_softcap=logit_softcap,
        temperature=one_temperature,
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
    loss = fused_loss(chosen, tensors, group, counted_tokens=counted_tokens)
    return loss if adapter is None else adapter.loss(loss)


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

    Arguments, layouts and errors as in :func:`linear_cross_entropy`. With ``target=None`` there are no statistics of a
    target. The target -100 has ``target_logit`` and ``target_log_prob`` 0, to which no gradient flows. Another one
    outside ``[0, V)`` has NaN; on a CPU it is refused (docs/usage.md, "Ids outside the vocabulary"). ``mean_logit``
    asks for the fields ``mean_logit`` and ``mean_log_prob``, ``entropy`` for ``entropy`` and ``expected_logit``,
    ``argmax`` and ``sum_p_squared`` for the fields of their names; otherwise these fields are None. For fp16 an
    upstream gradient of ``expected_logit`` or ``entropy`` recomputes all logits in backward, even saved ones.

    Args:
        selected: asks for ``selected_log_prob``. Ids ``[..., K]``; or a pair of ids ``[E]`` and offsets ``[N + 1]``,
            where token n has ``ids[offsets[n]:offsets[n + 1]]``. Of any integer dtype. If they differ between ranks,
            the statistics are NaN. An id may come twice. An id outside ``[0, V)`` has the log-probability -inf and no
            gradient. Offsets give NaN if they do not begin with 0, do not end with E, or decrease.
        top_k: asks for ``top_logits`` and ``top_ids``, K of each token, which have no gradient. The hidden states are
            projected a second time, in blocks of 64 MiB of fp32 logits.
        mask: bool, of the tokens' shape: true for a token that counts. The others have statistics of 0, ids of -1, and
            no gradient. They cost nothing with ``counted_tokens``; without it ``input`` is copied, with 0 for them.
        counted_tokens: how many tokens the mask counts, the same number on all ranks. On a GPU and in a compiled graph
            a wrong number makes statistics NaN and ids -1. See :func:`linear_cross_entropy`.
        gradient_filter: as in :func:`linear_cross_entropy`. Not with ``mean_logit``, ``entropy``,
            ``sum_p_squared`` and ``selected``: with them the gradient of a logit is not its probability times one
            number per token.

    Returns:
        :class:`TokenStatistics` of the target's shape, or of the tokens' without a target; fp32 (fp64 for fp64),
        identical on every rank bit for bit.

    Collectives: those of :func:`linear_cross_entropy` with ``reduction='none'``. The gather of partials has C * N + 3
    elements per rank: C = 3, plus 1 for each of ``entropy``, ``argmax`` and ``sum_p_squared``, plus 2 for
    ``mean_logit``; in the Triton backend, whose sums take two numbers each, another 1, plus 1 for each of ``entropy``
    and ``sum_p_squared``, plus 2 for ``mean_logit``. Beside them it has E elements for ``selected`` (N * K of them for
    ids ``[..., K]``), and 2 * N * K for ``top_k``.
    """
    ids, offsets = ids_and_offsets(selected)
    one_scale, one_temperature, token_scale, token_temperature = split_per_token(logit_scale, temperature)
    tensors = Tensors(input, linear_weight, target, linear_bias, None, token_scale, token_temperature, ids, offsets)
    options = Options(
        "token_statistics",
        ignore_index=NO_LABEL,
        logit_scale=one_scale,
        logit_softcap=logit_softcap,
        temperature=one_temperature,
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
    options, tensors, group, adapter = adapted(options, tensors, process_group, also=mask)
    if adapter is not None and mask is not None:
        mask = adapter.per_token("mask", mask)
    statistics = fused_statistics(options, tensors, group, mask=mask, counted_tokens=counted_tokens)
    return statistics if adapter is None else adapter.statistics(statistics)


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
    :func:`linear_cross_entropy`: in forward, where the logits exceed the budget.

    Forward calls ``loss(statistics, *values)`` for each block of R tokens, under autograd. Its derivatives by the
    statistics give the gradient of the block's logits. docs/rl.md has PPO as an example.

    Args:
        loss: gets :class:`TokenStatistics` with ``[R]`` tensors, and the block's ``per_token`` values ``[R]``. It
            returns losses ``[R]``, or losses and a dict of further tensors ``[R]``, the metrics, which need no
            gradient. It must be elementwise over tokens: the loss of a token must not depend on other tokens of the
            block, whose size depends on the budget. ``PARALLEL_LCE_DEBUG=1`` calls it again on halves of the block, and
            raises if a loss differs. Pass means over a sequence, or weights that make them, as ``per_token`` values. It
            must not write into its statistics, and must be the same on all ranks: debug mode compares the losses and
            the metrics, but no gradients; without debug mode nobody notices. Gradients flow to ``input``,
            ``linear_weight`` and ``linear_bias`` alone, not to tensors that ``loss`` has from elsewhere. A second
            backward, and a checkpoint around the call, call it again.
        per_token: tensors of the target's shape and any dtype, without gradients, the same on all ranks; under
            sequence parallelism of the whole sequence. Those made in inference mode are copied, and so is ``target``.
        entropy, sum_p_squared, mean_logit, argmax: the statistics that ``loss`` needs beside ``lse``, ``max_logit``,
            ``target_logit`` and ``target_log_prob``, as in :func:`token_statistics`. To read another one is refused.
        reduction: 'sum'; or 'mean', the sum divided by the number of tokens that are not ignored.
        ignore_index: tokens with this target have loss, metrics and gradient 0, whatever ``loss`` gives for them. None
            means -100.
        Others: as in :func:`linear_cross_entropy`. With ``gradient_filter`` no statistics that
            :func:`token_statistics` refuses beside it.

    Returns:
        The loss, 0-dimensional, fp32 (fp64 for fp64), and the metrics by name, each of the target's shape, in its own
        dtype and detached. Both are identical on every rank bit for bit, if ``loss`` is the same function on all.

    Without gradients ``loss`` runs under ``torch.no_grad``. In fp16, and where a ``main_grad`` gets dW (Megatron), the
    gradients wait for the upstream gradient, the loss scale, as those of :func:`linear_cross_entropy` do: backward
    forms them, from saved exponentials as far as the budget allows. ``loss`` is then called once, in forward, with all
    tokens. A graph of torch.compile breaks at this call; for one graph take :func:`token_statistics`.

    Collectives: those of :func:`linear_cross_entropy`, with the C of :func:`token_statistics`. An exception in ``loss``
    is raised after the collectives of forward, so that a rank which raises alone keeps no other rank waiting there;
    with ``PARALLEL_LCE_DEBUG=1`` all ranks raise.

    Raises:
        ValueError: as :func:`linear_cross_entropy`; ``per_token`` values that do not fit; or ``loss`` returns anything
        else than the above, writes into its statistics, or reads one that was not asked for. Whatever ``loss`` raises.
    """
    scale, of_all, token_scale, token_temperature = split_per_token(logit_scale, temperature)
    tensors = Tensors(input, linear_weight, target, linear_bias, None, token_scale, token_temperature)
    changed = dict(logit_scale=scale, temperature=of_all, loss_function=True)
    changed["ignore_index"] = NO_LABEL if ignore_index is None else ignore_index
    options = Options.of("token_loss", locals() | changed)
    options, tensors, group, adapter = adapted(options, tensors, process_group)
    if adapter is not None:
        per_token = tuple([adapter.per_token(f"per_token[{n}]", value) for n, value in enumerate(per_token)])
    values = check_values(loss, per_token, reduction, tensors.target)
    total, metrics = fused_token_loss(options, tensors, group, loss, values, counted_tokens=counted_tokens)
    if adapter is not None:
        total = adapter.loss(total)
        metrics = {name: adapter.of_tokens(metric) for name, metric in metrics.items()}
    return total, metrics


# Arguments of torch.nn.functional.linear_cross_entropy that are not supported, and the remedy of each.
_ONLY_TORCH = {
    "weight": "use token_weight for a weight of each token",
    "options": "use logits_budget to bound the memory",
}


def _refuse_unsupported(reduction: object, **only_torchs: object) -> None:
    """Raise for arguments that only PyTorch's function takes, and for a reduction of None."""
    for name, value in only_torchs.items():
        if value is not None:
            said = f"{name}={shortened(value)} of torch.nn.functional.linear_cross_entropy is not supported"
            raise ValueError(f"{said}: {_ONLY_TORCH[name]}")
    check_reduction(reduction)
