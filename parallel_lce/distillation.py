"""Distillation: how far a student's softmax is from a teacher's, without the logits of either.

The teacher is an output layer of its own (:func:`divergence`), or the largest log-probabilities that were stored of it
(:func:`top_k_divergence`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce import debug
from parallel_lce.arguments import Arguments, LossOptions, as_float
from parallel_lce.checks import check_loss_options, is_number, shortened
from parallel_lce.collectives import Layout, Shard
from parallel_lce.divergence import Divergence, summed_divergence, token_divergences
from parallel_lce.functional import token_statistics
from parallel_lce.partials import Columns, accumulation_dtype
from parallel_lce.plan import shared_shard_rows
from parallel_lce.prepare import Prepared, budget_of, prepare
from parallel_lce.selected_log_probs import selected_log_probs


def divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    target: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Divergence of the teacher's softmax from the student's, differentiable by the student's tensors.

    With q the teacher's softmax and p the student's, both of logits divided by ``temperature``, and m = beta q +
    (1 - beta) p, a token's divergence is, in nats, KL(q || p) for ``beta=0``, KL(p || q) for ``beta=1``, and between
    them beta KL(q || m) + (1 - beta) KL(p || m), the generalised Jensen-Shannon divergence (arXiv:2306.13649). It is
    not multiplied by the temperature's square. No gradient flows to the teacher.

    Args:
        student_hidden: ``[..., D]``, bf16, fp16, fp32 or fp64. Under sequence parallelism this rank's part
            ``[S/P, ..., D]``.
        student_weight: this rank's vocabulary shard ``[V/P, D]``, in the dtype of the student's hidden states.
        teacher_hidden: ``[..., E]`` of the same tokens, with a hidden size and a dtype of the teacher's own, split like
            the student's. If one of both is fp64, so is the other.
        teacher_weight: the teacher's shard ``[V/P, E]`` of the same vocabulary entries. Padding may differ on a single
            rank, and everywhere where ``vocab_start`` is given.
        beta: in [0, 1].
        temperature: a number > 0.
        reduction: 'none': divergences of the tokens' shape. 'sum'. 'mean': the sum over the number of tokens that are
            not ignored; 0 if there are none.
        ignore_index: tokens with this target have divergence 0 and gradient 0. None means -100.
        target: ids ``[...]`` of any integer dtype, for ``ignore_index`` alone: the whole sequence ``[S, ...]`` under
            sequence parallelism, the same on all ranks. None: no token is ignored.
        student_bias, teacher_bias: ``[V/P]`` or None.
        logits_budget: bytes per rank and call for the logits of a block of tokens, both in fp32, and their gradient.
            None as in :func:`parallel_lce.linear_cross_entropy`. At least 64 MiB, or 128 tokens, are used.
        Others: as in :func:`parallel_lce.linear_cross_entropy`.

    Returns:
        fp32 (fp64 for fp64), identical on every rank bit for bit; differentiable once. For 'mean' and 'sum' gradients
        are formed with the loss, except in fp16; they are kept until backward, dW in fp32. A second backward forms them
        again. Shards with a gap or overlap give NaN. A graph of torch.compile breaks at this call.

    Collectives, on ``process_group`` alone, for each block of R tokens in this order; P ranks. Under sequence
    parallelism all-gathers of the student's and of the teacher's hidden states, R/P * D and R/P * E elements per rank,
    each started a block ahead; an all-gather of 4 R + 2 elements of fp32 per rank; one of 2 R; where gradients are
    formed an all-reduce, or reduce-scatter, of dX, R * D elements of ``reduce_dtype``, beside dW. A backward of 'none'
    repeats all but the second and third.

    Raises:
        ValueError: shapes, dtypes, devices, shards or numbers that do not fit, before any collective; the message has
        the given and the expected value.
    """
    shared: dict[str, Any] = dict(
        logit_softcap=None,
        process_group=process_group,
        sequence_parallel=sequence_parallel,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        logits_budget=logits_budget,
        reduce_dtype=reduce_dtype,
    )
    beta, temperature = as_float(beta), as_float(temperature)
    ignore_index = -100 if ignore_index is None else ignore_index
    numbers = partial(_check_numbers, beta, temperature, reduction, ignore_index)
    scale = 1 / temperature if is_number(temperature) and temperature > 0 else 1.0
    name = f"distillation.divergence with beta={beta!r} and reduction={reduction!r}"
    mine = Arguments(student_hidden, student_weight, target, student_bias, scale, **shared)
    student = _prepare("student", mine, name, numbers)
    shared["reduce_dtype"] = None
    theirs = Arguments(teacher_hidden, teacher_weight, None, teacher_bias, scale, **shared)
    with torch.no_grad():
        teacher = _prepare("teacher", theirs, name, partial(_check_pair, student, theirs))
    dtype = student.inputs[0].dtype
    shape = student.shape if reduction == "none" else ()
    if student_weight.is_meta:
        return student_hidden.new_empty(shape, dtype=accumulation_dtype(dtype))
    call = student.call
    rows = shared_shard_rows(call.shard.rows, call.layout.ranks, mine.vocab_start, mine.vocab_size)
    task = Divergence.of(call, teacher.call, float(beta), dtype, rows, budget_of(mine))
    factor = _factor(student, reduction, ignore_index)
    if reduction != "none" and student.differentiable and dtype != torch.float16:
        return summed_divergence(task, student.inputs, teacher.inputs, factor)
    found = token_divergences(task, student.inputs, teacher.inputs)
    # A token that does not count has no loss and no gradient, whatever its logits are.
    found = torch.where(factor != 0, found * factor, 0.0)
    return found.view(shape) if reduction == "none" else found.sum()


def top_k_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    tail: str = "class",
    beta: float = 0.0,
    temperature: float = 1.0,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    target: Tensor | None = None,
    student_bias: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`divergence` from the teacher's largest log-probabilities, K of each token, that were stored.

    Args:
        teacher_ids: ``[..., K]`` of any integer dtype, the same on all ranks: the whole sequence under sequence
            parallelism. An id of a token should come once. An id outside the vocabulary is no entry, whatever its
            log-probability: tokens with fewer than K entries are filled up with -1.
        teacher_log_probs: ``[..., K]``, of a temperature that was chosen when they were stored. One of -inf is no entry
            either. No gradient flows to them.
        tail: 'class': the probability of all other entries is one more class. It is 1 - sum of the K, and at least
            1e-7, the precision of fp32. 'renormalize': both distributions are renormalised over the K entries. Then
            only their rows of the weight are read, and no matrix product is formed.
        temperature: divides the student's logits alone.
        Others: as in :func:`divergence`.

    Returns:
        As :func:`divergence`. A token without any entry has divergence 0.

    Collectives: those of :func:`parallel_lce.token_statistics` with ``selected``, or of
    :func:`parallel_lce.selected_log_probs` with 'renormalize'.

    Raises:
        ValueError: as :func:`divergence`.
    """
    layout = Layout.of(process_group, sequence_parallel is True)
    beta, temperature = as_float(beta), as_float(temperature)
    ignore_index = -100 if ignore_index is None else ignore_index
    try:
        _check_numbers(beta, temperature, reduction, ignore_index)
        _check_stored(teacher_ids, teacher_log_probs, tail, target)
    except ValueError as refusal:
        debug.report_refusal(layout, refusal)
        raise
    options: dict[str, Any] = dict(
        linear_bias=student_bias,
        logit_scale=1 / temperature,
        process_group=process_group,
        sequence_parallel=sequence_parallel,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        reduce_dtype=reduce_dtype,
    )
    ids, log_q = teacher_ids.long(), teacher_log_probs.detach().to(accumulation_dtype(student_hidden.dtype))
    ids = ids.masked_fill(log_q == -torch.inf, -1)
    if tail == "renormalize":
        log_p = selected_log_probs(student_hidden, student_weight, ids, **options)
        there = log_p != -torch.inf
        log_q = log_q.masked_fill(~there, -torch.inf)
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    else:
        found = token_statistics(
            student_hidden, student_weight, None, selected=ids, logits_budget=logits_budget, **options
        )
        assert found.selected_log_prob is not None  # asked for
        log_p = found.selected_log_prob
        there = (ids >= 0) & (ids < found.vocab_size)
        log_p, log_q = (_with_tail(v.masked_fill(~there, -torch.inf)) for v in (log_p, log_q))
        there = torch.cat([there, torch.ones_like(there[..., :1])], -1)
    # Entries that there are not have probability 0; their logarithms would give gradients of 0 * inf.
    found = _of_classes(*(v.masked_fill(~there, 0.0) for v in (log_p, log_q)), there, float(beta))
    counted = torch.ones_like(found, dtype=torch.bool) if target is None else target.long() != ignore_index
    found = torch.where(counted, found, 0.0)
    if reduction == "mean":
        return found.sum() / counted.sum().clamp(min=1)
    return found.sum() if reduction == "sum" else found


def _with_tail(log_probs: Tensor) -> Tensor:
    """``[..., K]`` log-probabilities and that of all other entries, ``[..., K + 1]``."""
    others = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, others.clamp(min=torch.finfo(others.dtype).eps).log()], -1)


def _of_classes(log_p: Tensor, log_q: Tensor, there: Tensor, beta: float) -> Tensor:
    """:func:`divergence` of ``[..., C]`` log-probabilities of the classes that are ``there``."""
    p, q = (torch.where(there, v.exp(), 0.0) for v in (log_p, log_q))
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (p * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)


def _factor(student: Prepared, reduction: str, ignore_index: int) -> Tensor:
    """``[N]``: what each token's divergence counts in the result."""
    target, dtype = student.call.target, accumulation_dtype(student.inputs[0].dtype)
    if target is None:
        count = student.shape.numel()
        share = 1 / max(1, count) if reduction == "mean" else 1.0
        return student.inputs[0].new_full((count,), share, dtype=dtype)
    counted = (target != ignore_index).to(dtype)
    return counted / counted.sum().clamp(min=1) if reduction == "mean" else counted


def _prepare(who: str, arguments: Arguments, function: str, extra_check: Callable[[], None]) -> Prepared:
    """Checked and planned. Refusals name the arguments of :func:`divergence`."""
    try:
        return prepare(arguments, Columns(), function=function, extra_check=extra_check)
    except ValueError as refusal:
        text = str(refusal)
        for name, own in (("input", "hidden"), ("linear_weight", "weight"), ("linear_bias", "bias")):
            text = re.sub(rf"\b{name}\b", f"{who}_{own}", text)
        raise ValueError(text) from None


def _check_numbers(beta: object, temperature: object, reduction: str, ignore_index: int) -> None:
    if not (is_number(beta) and 0 <= beta <= 1):
        raise ValueError(f"beta must be a number in [0, 1], got {shortened(beta)}")
    if not (is_number(temperature) and temperature > 0 and is_number(1 / temperature)):
        raise ValueError(f"temperature must be a number > 0, got {shortened(temperature)}")
    check_loss_options(LossOptions.given(reduction, ignore_index, 0.0, 0.0))


def _check_pair(student: Prepared, teacher: Arguments) -> None:
    """The teacher has the student's tokens, vocabulary entries, device and dtype of statistics."""
    x, weight = teacher.input, teacher.linear_weight
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and x.dim() and weight.dim() == 2):
        return  # refused by what follows
    own, shard = student.inputs[0], student.call.shard
    if x.shape[:-1] != own.shape[:-1]:
        raise ValueError(f"teacher_hidden {list(x.shape)} has other tokens than student_hidden {list(own.shape)}")
    if x.device != own.device:
        raise ValueError(f"teacher_hidden is on {x.device} and student_hidden is on {own.device}")
    if x.is_floating_point() and accumulation_dtype(x.dtype) != accumulation_dtype(own.dtype):
        raise ValueError(f"teacher_hidden is {x.dtype} and student_hidden is {own.dtype}: both or none must be float64")
    start = student.call.layout.rank * len(weight) if teacher.vocab_start is None else teacher.vocab_start
    other = Shard(start, len(weight), teacher.vocab_size)
    if (other.start, other.real_rows) != (shard.start, shard.real_rows):
        raise ValueError(
            f"teacher_weight {list(weight.shape)} has the vocabulary entries [{other.start}, "
            f"{other.start + other.real_rows}) and student_weight {list(student.inputs[1].shape)} has "
            f"[{shard.start}, {shard.start + shard.real_rows})"
        )


def _check_stored(ids: object, log_probs: object, tail: object, target: object) -> None:
    if tail not in ("class", "renormalize"):
        raise ValueError(f"tail must be 'class' or 'renormalize', got {shortened(tail)}")
    if not (isinstance(ids, Tensor) and isinstance(log_probs, Tensor)):
        given = f"{type(ids).__name__} and {type(log_probs).__name__}"
        raise ValueError(f"teacher_ids and teacher_log_probs must be tensors, got {given}")
    if ids.dim() < 1 or ids.shape != log_probs.shape:
        raise ValueError(
            f"teacher_ids and teacher_log_probs must both be [..., K], got {list(ids.shape)} and "
            f"{list(log_probs.shape)}"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"teacher_ids must be of an integer dtype, got {ids.dtype}")
    if not log_probs.is_floating_point():
        raise ValueError(f"teacher_log_probs must be floating-point, got {log_probs.dtype}")
    if log_probs.device != ids.device:
        raise ValueError(f"teacher_log_probs is on {log_probs.device} and teacher_ids is on {ids.device}")
    if target is not None and not (isinstance(target, Tensor) and target.shape == ids.shape[:-1]):
        given = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must be None or a tensor of shape {list(ids.shape[:-1])}, got {given}")


# Graphs of torch.compile break here. torch.compiler.disable does the same, and imports torch._dynamo.
divergence._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
