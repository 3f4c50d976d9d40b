"""The public functions: check, flatten, call, reduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce import debug
from parallel_lce.backends import backend_of, valueless
from parallel_lce.checks import (
    Arguments,
    check_arguments,
    check_loss,
    check_process_group,
    plain,
    token_shape,
)
from parallel_lce.differentiable import accumulated_loss, token_losses
from parallel_lce.differentiable import token_statistics as _token_statistics
from parallel_lce.losses import WeightedLoss
from parallel_lce.parallel import Layout, Shard
from parallel_lce.partials import Columns
from parallel_lce.plan import Gradients, Plan, plan, shared_shard_rows
from parallel_lce.statistics import Call, TokenStatistics, token_count
from parallel_lce.weight_grad import MainGrad, accumulation_dtype


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
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_weight: Tensor | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    **unsupported: object,
) -> Tensor:
    """Cross-entropy of ``softcap(logit_scale * (input @ linear_weight.T + linear_bias))``.

    The ``[N, V]`` logits never exist. The same call of PyTorch 2.13's
    ``torch.nn.functional.linear_cross_entropy`` gives the same answer, except that the loss of
    bf16 and fp16 input is fp32, that the mean of no tokens is 0 instead of NaN, and that class
    weights, class probabilities and ``options`` are refused.

    Args:
        input: hidden states ``[..., D]``, bf16, fp16, fp32 or fp64. Under sequence parallelism this
            rank's part ``[S/P, ..., D]``; dimension 0 must be equal on all ranks.
        linear_weight: this rank's vocabulary shard ``[V/P, D]``, in the input's dtype. Rows must be
            contiguous in D, else they are copied. Shards may be uneven, or empty.
        target: ids ``[...]`` of any integer dtype, the whole sequence ``[S, ...]`` under sequence
            parallelism, the same on all ranks. A token whose target is outside ``[0, V)`` and is
            not ``ignore_index`` has loss NaN, whatever its ``token_weight``, and NaN gradients.
        linear_bias: ``[V/P]`` or None.
        reduction: 'none' (losses of the target's shape), 'sum', or 'mean': the sum divided by the
            sum of the weights of the tokens that count, over the whole sequence; 0, with zero
            gradients, where that is 0.
        ignore_index: tokens with this target have loss 0 and gradient 0; None means -100.
        label_smoothing: in [0, 1], as in ``torch.nn.functional.cross_entropy``, over the V real
            entries of all ranks.
        z_loss: adds ``z_loss * lse**2`` per token.
        logit_scale, logit_softcap: Python numbers; ``softcap(u) = cap * tanh(u / cap)``.
        process_group: the tensor-parallel group that shards the vocabulary; None or a group of one
            rank means no parallelism. No other group is used.
        sequence_parallel: ``input`` is split along dimension 0 over ``process_group``.
        token_weight: ``[...]`` of the target's shape, multiplies the loss of each token.
        vocab_start: global id of this shard's first row, given on all ranks or on none; the default
            is ``rank * rows``, for equal shards only.
        vocab_size: V, the real entries; rows from there on are padding, left out of the softmax and
            with zero gradient. Default: all rows of all ranks.
        logits_budget: bytes per rank and call for what has the logits' shape: kept from forward to
            backward plus working block, though never less than a block of 64 MiB. None means 1 GiB.
            Must be equal on all ranks. What does not fit is recomputed, or for 'mean' and 'sum',
            except in fp16, the gradients are formed in forward (:func:`parallel_lce.plan.plan`). A
            second backward through one graph recomputes everything.
        reduce_dtype: dtype in which dX is summed over the ranks; None means the input's. With
            torch.float32 each rank's part is summed, sent and added unrounded, twice the bytes for bf16.

    Returns:
        The loss, fp32 (fp64 for fp64), identical on every rank bit for bit.

    Collectives, on ``process_group`` alone, in this order on every rank; P ranks, N tokens of the
    whole sequence, in B blocks (``plan``; one block unless the budget splits the rows):

    - forward: with ``sequence_parallel``, all-gathers of hidden states, N/P * D elements per rank in
      all: one for the block of which something is kept, if any, and of the other tokens one per
      256 MiB of gathered hidden states, each a block ahead, so that two may be alive; then one
      all-gather of partials, 3 N + 2 elements of fp32 per rank (4 N + 2 with ``label_smoothing``).
    - backward, if ``input`` needs a gradient: B all-reduces of dX, N * D elements of ``reduce_dtype``
      in all, each beside a dW product (where the weight needs no gradient one per 64 MiB of a block,
      beside the rest of its dX where its rows are done one after another); with ``sequence_parallel``
      B reduce-scatters of the same size instead, and B all-gathers of hidden states again, each a
      block ahead, also where only the weight or the bias needs a gradient; no all-gather at all where
      the budget holds the gathered hidden states, N * D elements, beside every logit.
    - where gradients are formed in forward, all of it happens there, once: the hidden states'
      gathers, one gather of partials per block and the reductions of dX, those of a block after
      the next block's gather of partials. Backward has none; a second backward repeats all.

    The upstream gradient may be any tensor, and must be the same on all ranks. A shard set with a
    gap or an overlap gives NaN, and so does one without any row. ``PARALLEL_LCE_DEBUG=1``, set on all
    ranks, turns this, targets out of range and disagreement between the ranks into errors, at the cost
    of waiting for the device. Meta and fake tensors give the shapes of results.

    Raises:
        ValueError: shapes, dtypes, devices or numbers that do not fit, naming both, before any
            collective. A DTensor, naming its mesh and what to pass instead.
        RuntimeError: in backward, where a gradient itself is differentiated.
    """
    ignore_index = -100 if ignore_index is None else plain(ignore_index)
    label_smoothing, z_loss = plain(label_smoothing), plain(z_loss)
    arguments = Arguments(
        input=input,
        linear_weight=linear_weight,
        target=target,
        linear_bias=linear_bias,
        logit_scale=plain(logit_scale),
        logit_softcap=plain(logit_softcap),
        process_group=process_group,
        sequence_parallel=sequence_parallel,
        vocab_start=plain(vocab_start),
        vocab_size=plain(vocab_size),
        logits_budget=plain(logits_budget),
        reduce_dtype=reduce_dtype,
        token_weight=token_weight,
    )

    def check() -> None:
        _refuse_unknown("linear_cross_entropy", unsupported, _OF_TORCH)
        _refuse_unsupported(unsupported)
        check_loss(target, reduction, ignore_index, label_smoothing, z_loss)

    smoothed = isinstance(label_smoothing, (int, float)) and label_smoothing > 0
    prepared = prepare(
        arguments,
        Columns(mean_log_prob=smoothed),
        check=check,
        accumulable=reduction != "none",
        ignore_index=ignore_index,
        agreed={
            "function": "linear_cross_entropy",
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
        },
    )
    call, weights, dtype = prepared.call, token_weight, accumulation_dtype(input.dtype)
    if weights is not None:
        weights = weights.reshape(-1).to(dtype).contiguous()
    loss = WeightedLoss(call.target, weights, ignore_index, label_smoothing, z_loss)
    divisor = loss.divisor(reduction, dtype)
    if call.plan.accumulate:
        return accumulated_loss(call, *prepared.tensors, loss, divisor)
    per_token = token_losses(call, *prepared.tensors, loss, prepared.differentiable)
    if reduction == "none":
        return per_token.view(prepared.shape)
    return per_token.sum() / divisor


def token_statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    *,
    linear_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    mean_logit: bool = False,
    expected_logit: bool = False,
    argmax: bool = False,
    **unknown: object,
) -> TokenStatistics:
    """Differentiable per-token statistics of the logits, from which any loss can be made.

    Arguments, layouts and errors as in :func:`linear_cross_entropy`. ``target`` may be None: no
    statistics of a target then. A target outside ``[0, V)`` has ``target_logit`` 0, to which no
    gradient flows; its ``target_log_prob`` is ``-lse``. ``mean_logit``, ``expected_logit`` and
    ``argmax`` ask for the fields of :class:`TokenStatistics` that cost a little more. An upstream
    gradient of ``expected_logit`` or ``entropy`` recomputes the logits in backward whatever the
    budget.

    Collectives: those of :func:`linear_cross_entropy` with ``reduction='none'``; the gather of
    partials is of C * N + 2 elements per rank, C = 3 and 1 more for each of ``expected_logit`` and
    ``argmax``, 2 more for ``mean_logit``.
    """
    arguments = Arguments(
        input=input,
        linear_weight=linear_weight,
        target=target,
        linear_bias=linear_bias,
        logit_scale=plain(logit_scale),
        logit_softcap=plain(logit_softcap),
        process_group=process_group,
        sequence_parallel=sequence_parallel,
        vocab_start=plain(vocab_start),
        vocab_size=plain(vocab_size),
        logits_budget=plain(logits_budget),
        reduce_dtype=reduce_dtype,
    )
    columns = Columns(bool(mean_logit), bool(mean_logit), bool(expected_logit), bool(argmax))
    prepared = prepare(
        arguments,
        columns,
        check=lambda: _refuse_unknown("token_statistics", unknown, ()),
        agreed={"function": "token_statistics"},
    )
    statistics = _token_statistics(prepared.call, *prepared.tensors, prepared.differentiable)
    return statistics.view(prepared.shape)


@dataclass(frozen=True)
class Prepared:
    """A checked call, its tensors ``[..., D]``, ``[V/P, D]`` and ``[V/P]``, and the shape of its tokens."""

    call: Call
    tensors: tuple[Tensor, Tensor, Tensor | None]
    shape: tuple[int, ...]
    differentiable: bool


def prepare(
    arguments: Arguments,
    columns: Columns,
    *,
    check: Callable[[], None] = lambda: None,
    accumulable: bool = False,
    ignore_index: int | None = None,
    agreed: dict[str, object] | None = None,
    main_grad: MainGrad | None = None,
) -> Prepared:
    """Check ``arguments`` and plan the call.

    ``check`` raises for what else the caller was given. ``ignore_index`` and ``agreed`` serve the
    debug checks: None lets any target pass, and the values of ``agreed`` must be the same on all
    ranks. ``main_grad`` takes dW by addition.
    """
    check_process_group(arguments.process_group)
    layout = Layout.of(arguments.process_group, bool(arguments.sequence_parallel))
    try:
        check()
        a = _autocast(arguments)
        check_arguments(a, layout)
        backend = backend_of(a.linear_weight)
    except Exception as refusal:
        if layout.ranks > 1 and debug.enabled():
            debug.refuse(layout, refusal)
        elif layout.ranks > 1 and type(refusal) in (TypeError, ValueError):
            raise type(refusal)(
                f"{refusal} (if only this rank's arguments are wrong, the other {layout.ranks - 1} "
                "rank(s) of process_group wait in their collective until its timeout; "
                "PARALLEL_LCE_DEBUG=1 raises on every rank)"
            ) from None
        raise

    # As it is given: torch.compile knows it as an input then, so that a second derivative by it is refused.
    hidden = a.input
    weight = a.linear_weight if a.linear_weight.stride(1) == 1 else a.linear_weight.contiguous()
    rows = weight.shape[0]
    start = layout.rank * rows if a.vocab_start is None else a.vocab_start
    shard = Shard(start, rows, a.vocab_size)
    target = None if a.target is None else a.target.reshape(-1).long().contiguous()
    bias = None if a.linear_bias is None else a.linear_bias.contiguous()
    tensors = hidden, weight, bias
    differentiable = any(_needs(t) for t in tensors if t is not None)
    gradients = None
    if differentiable:
        sum_dtype = accumulation_dtype(weight.dtype)
        destination = weight if main_grad is None else main_grad.tensor
        gradients = Gradients(
            input=hidden.requires_grad,
            weight=weight.requires_grad,
            input_fp32=hidden.dtype == sum_dtype,
            weight_fp32=destination.dtype == sum_dtype,
            weight_new=main_grad is None,
        )
    planned = _plan(a, layout, shard, hidden, weight, backend, gradients, accumulable)
    if debug.enabled() and not valueless(weight):
        agreed = dict(agreed or {}, ignore_index=ignore_index, statistics=columns, gradients=gradients)
        agreed["backend"] = backend.__name__.rpartition(".")[2]
        _check_together(a, layout, shard, ignore_index, agreed)
    call = Call(
        backend,
        layout,
        shard,
        columns,
        planned,
        target,
        float(a.logit_scale),
        a.logit_softcap,
        main_grad,
        a.reduce_dtype,
    )
    return Prepared(call, tensors, token_shape(a.input, layout), differentiable)


def _plan(
    a: Arguments,
    layout: Layout,
    shard: Shard,
    hidden: Tensor,
    weight: Tensor,
    backend: ModuleType,
    gradients: Gradients | None,
    accumulable: bool,
) -> Plan:
    # Accumulation needs the loss's weights as constants and, over ranks, blocks that all agree on.
    # It writes dX before the upstream gradient is known, which in fp16 would undo loss scaling.
    accumulable = (
        accumulable
        and (a.token_weight is None or not _needs(a.token_weight))
        and (a.vocab_start is None or a.vocab_size is not None or layout.ranks == 1)
        and hidden.dtype != torch.float16
    )
    itemsize = weight.element_size()
    planned = plan(
        token_count(hidden, layout),
        shared_shard_rows(shard.rows, layout.ranks, a.vocab_start, a.vocab_size),
        hidden.shape[-1],
        itemsize,
        budget=a.logits_budget,
        parts=layout.parts,
        ranks=layout.ranks,
        gradients=gradients,
        keepable=backend.keepable(weight.dtype, a.logit_softcap),
        accumulable=accumulable,
        smallest_accumulated=backend.SMALLEST_ACCUMULATED,
        reuses_kept=backend.REUSES_KEPT,
    )
    return planned.limited(shard.real, itemsize, layout.parts)


def _check_together(
    a: Arguments,
    layout: Layout,
    shard: Shard,
    ignore_index: int | None,
    agreed: dict[str, object],
) -> None:
    shards = [(shard.start, shard.rows)]
    if layout.ranks > 1:
        weight = a.token_weight
        settings = {
            "tokens": token_shape(a.input, layout),
            "hidden size": a.input.shape[-1],
            "dtype": a.input.dtype,
            "sequence_parallel": layout.sequence_parallel,
            "logit_scale": a.logit_scale,
            "logit_softcap": a.logit_softcap,
            "vocab_size": a.vocab_size,
            "vocab_start given": a.vocab_start is not None,
            "logits_budget": a.logits_budget,
            "reduce_dtype": a.reduce_dtype,
            "token_weight needs a gradient": weight is not None and _needs(weight),
            **agreed,
        }
        if shard.rows:
            settings["linear_bias given"] = a.linear_bias is not None
        tensors = {
            "target": None if a.target is None else a.target.long(),
            "token_weight": None if weight is None else weight.double(),
        }
        shards = debug.agree(layout, settings, tensors, shards[0])
        if not layout.sequence_parallel:
            debug.agree_about_hidden(layout, a.input)
    vocab_size = debug.check_cover(shards, a.vocab_size)
    if a.target is not None and ignore_index is not None:
        target = a.target.long()
        debug.check_target(target, target != ignore_index, vocab_size)


def _needs(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _autocast(a: Arguments) -> Arguments:
    """As ``F.linear`` does under autocast, take fp32 and half operands in autocast's dtype."""
    # Meta tensors have no autocast.
    if not isinstance(a.input, Tensor) or a.input.is_meta:
        return a
    if not torch.is_autocast_enabled(a.input.device.type):
        return a
    dtype = torch.get_autocast_dtype(a.input.device.type)
    names = ("input", "linear_weight", "linear_bias")
    cast = {
        name: t.to(dtype)
        for name in names
        if isinstance(t := getattr(a, name), Tensor)
        and t.is_floating_point()
        and t.dtype != torch.float64
    }
    return replace(a, **cast)


_OF_TORCH = ("weight", "options")


def _refuse_unknown(function: str, given: dict[str, object], known: tuple[str, ...]) -> None:
    """As Python does, but where the other ranks can be told."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _refuse_unsupported(unsupported: dict[str, object]) -> None:
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} of torch.nn.functional.linear_cross_entropy is not supported: "
                "use token_weight for per-token weights and logits_budget for the memory"
            )
