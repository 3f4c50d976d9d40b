"""Distillation: divergences between a teacher's softmax and a student's, without storing all logits of either.

The teacher is an output layer (:func:`divergence`), or its stored largest log-probabilities (:func:`top_k_divergence`).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.call import debug
from parallel_lce.call.call import Call, Inputs
from parallel_lce.call.checks import INTEGERS, described, public, renamed
from parallel_lce.call.prepare import prepare
from parallel_lce.core.collectives import Shard
from parallel_lce.core.memory import out_of_inference
from parallel_lce.core.options import (
    Options,
    Tensors,
    as_float,
    check_option,
    check_reduction,
    is_number,
    shortened,
    split_per_token,
)
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.private import outside_graphs
from parallel_lce.distillation.blocks import Divergence, divergences
from parallel_lce.distillation.torch_part import of_classes
from parallel_lce.dtensor import adapted
from parallel_lce.run.entry import fused_statistics
from parallel_lce.run.picked import log_probs_of

_NEAREST = 1e-6  # a beta between 0 and 1 is at least this far from both: nearer, the mixture's logarithm is inexact


@outside_graphs
@public
def divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float = 0.0,
    logit_scale: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    teacher_logit_scale: float | Tensor | None = None,
    teacher_logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    target: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce_hidden_grad: bool = True,
) -> Tensor:
    """Divergence of the teacher's softmax from the student's, differentiable by the student's tensors.

    With q the teacher's softmax and p the student's, and m = beta q + (1 - beta) p, a token's divergence is, in nats,
    KL(q || p) for ``beta=0``, KL(p || q) for ``beta=1``, and between them beta KL(q || m) + (1 - beta) KL(p || m), the
    generalised Jensen-Shannon divergence (arXiv:2306.13649). The logits of either are
    ``softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``. The divergence is not multiplied by the square
    of the temperature. No gradient flows to the teacher.

    The terms of a KL(q || m) are summed as q log(q / m) - q + m, which are of second order where q is close to m. So a
    divergence near 1e-6 has a relative error of about 1e-4 from the roundings of fp32 logits, and one of 1e-10 of about
    1e-2.

    Args:
        student_hidden: ``[..., D]``, bf16, fp16, fp32 or fp64. Under sequence parallelism this rank's part
            ``[S/P, ..., D]``.
        student_weight: this rank's vocabulary shard ``[V/P, D]``, in the dtype of the student's hidden states.
        teacher_hidden: ``[..., E]`` of the same tokens, split like the student's. Its hidden size and dtype may differ
            from the student's, but both are fp64 or neither.
        teacher_weight: the teacher's shard ``[V/P, E]`` of the same vocabulary entries. With ``vocab_size`` it may have
            more or fewer rows of padding than the student's.
        beta: 0, 1, or a number between them at least 1e-6 from both.
        logit_scale, logit_softcap: as in :func:`parallel_lce.linear_cross_entropy`: of the student, and of the teacher
            unless it has its own.
        teacher_logit_scale, teacher_logit_softcap: the teacher's. None: the student's, also one per token. A teacher
            without a soft-cap beside a student with one has ``teacher_logit_softcap=math.inf``.
        temperature: a number > 0, or one per token, as in :func:`parallel_lce.linear_cross_entropy`, of both.
        reduction: 'none': divergences of the tokens' shape. 'sum'. 'mean': the sum divided by the number of tokens that
            are not ignored; 0 if there are none.
        ignore_index: tokens with this target have divergence 0 and gradient 0, even if the teacher's values are NaN.
            None means -100.
        target: ids as in :func:`parallel_lce.linear_cross_entropy`, used for ``ignore_index`` alone. None: no token is
            ignored.
        student_bias, teacher_bias: ``[V/P]`` or None.
        logits_budget: bytes per rank and call for a block's student and teacher logits, in fp32, and their gradient.
            None as in :func:`parallel_lce.linear_cross_entropy`. A block has at least 128 tokens, and may use 64 MiB
            whatever the budget. With uneven shards and no ``vocab_size``, 32768 vocabulary rows per rank are assumed.
        Others: as in :func:`parallel_lce.linear_cross_entropy`.

    Returns:
        fp32 (fp64 for fp64), identical on every rank bit for bit; differentiable once. For 'mean' and 'sum' gradients
        are formed in forward, except in fp16, and kept until backward, dW in fp32. A second backward forms them again.
        Otherwise backward projects student and teacher again. Shards with a gap or overlap give NaN, as do options
        that differ between ranks. A graph of torch.compile breaks at this call.

    Collectives, on ``process_group`` alone, for each block of R tokens in this order; P ranks:

    1. Under sequence parallelism, all-gathers of the student's and of the teacher's hidden states, R/P * D and R/P * E
       elements per rank, each started a block ahead.
    2. An all-gather of 4 R + 3 elements per rank, and one of 2 R, fp32 (fp64 for fp64).
    3. If gradients are formed in forward: an all-reduce, or reduce-scatter, of dX, R * D elements of ``reduce_dtype``,
       beside dW. None with ``reduce_hidden_grad=False``.

    A backward that projects again runs 1 and 3.

    Raises:
        ValueError: as :func:`parallel_lce.linear_cross_entropy`; or the teacher's tensors do not fit the student's.
    """
    beta, softcap = as_float(beta), as_float(teacher_logit_softcap)
    scale, of_all, token_scale, token_temperature = split_per_token(logit_scale, temperature)
    ignored: int = -100 if ignore_index is None else ignore_index
    # Ranks compare the name, and so these settings. The call itself reduces and ignores nothing.
    name = f"distillation.divergence with {beta=}, {reduction=} and ignore_index={ignored}"
    changed = dict(reduction=None, ignore_index=None, logit_scale=scale, temperature=of_all)
    options = Options.of(name, locals() | changed)
    numbers = partial(_check_numbers, beta, reduction, ignored)
    given = Tensors(student_hidden, student_weight, target, student_bias, None, token_scale, token_temperature)
    teachers = map(detached, (teacher_hidden, teacher_weight, teacher_bias))
    teacher_scale = logit_scale if teacher_logit_scale is None else teacher_logit_scale
    with _naming("student"):
        options, given, group, adapter = adapted(options, given, process_group, reduction, teacher_scale)
        if adapter is not None:
            hidden, weight, bias = teachers
            of_weight = adapter.weight("teacher_weight", weight), adapter.weight("teacher_bias", bias, weight)
            teachers = adapter.hidden("teacher_hidden", hidden), *of_weight
            teacher_scale = adapter.per_token("teacher_logit_scale", teacher_scale)
        student, inputs = prepare(options, given, group, extra_check=numbers, planned=False)
    debug.state.awaited = True  # the teacher's exchange is to come
    hidden, weight, bias = teachers
    teacher_scale, _, token_scale, _ = split_per_token(teacher_scale, 1.0)
    of_teacher = Tensors(hidden, weight, None, bias, None, token_scale, given.temperature)
    pair = partial(check_pair, student, inputs, of_teacher)
    with _naming("teacher", logit_scale="teacher_logit_scale", logit_softcap="teacher_logit_softcap"):
        unlimited = isinstance(softcap, float) and softcap == math.inf
        softcap = options.logit_softcap if softcap is None else None if unlimited else softcap
        options = options._replace(reduce_dtype=None, logit_scale=teacher_scale, logit_softcap=softcap)
        teacher, teacher_inputs = prepare(options, of_teacher, group, extra_check=pair, planned=False)
    dtype = inputs[0].dtype
    task = Divergence.of(student, teacher, beta, dtype)
    factor = _factor(student, inputs[0], reduction, ignored)
    if reduction != "none" and any(student.needs) and dtype != torch.float16:
        result, _ = divergences(task, inputs, teacher_inputs, factor)
    else:
        losses, _ = divergences(task, inputs, teacher_inputs)
        # An ignored token has no loss and no gradient, even if its logits are NaN.
        losses = torch.where(factor != 0, losses * factor, 0.0)
        result = losses.view(student.shape) if reduction == "none" else losses.sum()
    return result if adapter is None else adapter.loss(result)


@public
def top_k_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    tail: str = "class",
    beta: float = 0.0,
    logit_scale: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    target: Tensor | None = None,
    student_bias: Tensor | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_budget: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce_hidden_grad: bool = True,
) -> Tensor:
    """:func:`divergence` from a teacher's stored largest log-probabilities, K of each token.

    Args:
        teacher_ids: ``[..., K]`` of any integer dtype, the same on all ranks: the whole sequence under sequence
            parallelism. A token should have each id once. An id outside the vocabulary is no entry, and its
            log-probability is not used: fill up tokens with fewer than K entries with -1.
        teacher_log_probs: ``[..., K]``, of a temperature that was chosen when they were stored. An entry of -inf is no
            entry either. Values of ignored tokens are not used. No gradient flows to the teacher.
        tail: 'class': the probability of all other entries is one more class. It is 1 - sum of the K, and at least
            1e-7 (2e-16 for fp64), the precision of that difference. No gradient flows through a student's tail below
            that; a higher temperature or a larger K avoids it. 'renormalize': both distributions are renormalised over
            the K entries. Then only the weight's rows of these entries are read, and no matrix product is formed. A
            student that excludes all entries of a token has probability 0 for each.
        logit_scale, logit_softcap, temperature: as in :func:`divergence`, of the student's logits alone.
        logits_budget: as in :func:`parallel_lce.token_statistics`. Not used by 'renormalize'.
        Others: as in :func:`divergence`.

    Returns:
        As :func:`divergence`, but no gradient is formed in forward. A token without any entry has divergence 0. Errors
        are those of fp32 log-probabilities, about 1e-7: a divergence as small as that may be negative.

    Collectives: those of :func:`parallel_lce.token_statistics` with ``selected``, or of
    :func:`parallel_lce.selected_log_probs` with 'renormalize'.

    Raises:
        ValueError: as :func:`divergence`.
    """
    scale, of_all, token_scale, token_temperature = split_per_token(logit_scale, temperature)
    given = Tensors(
        student_hidden, student_weight, target, student_bias, None, token_scale, token_temperature, teacher_ids
    )
    with _naming("student", selected="teacher_ids"):
        changed = dict(reduction=None, ignore_index=None, logit_scale=scale, temperature=of_all)
        asked = Options.of("top_k_divergence", locals() | changed)
        asked, given, group, adapter = adapted(asked, given, process_group, reduction, teacher_log_probs)
        if adapter is not None:
            teacher_log_probs = adapter.per_token("teacher_log_probs", teacher_log_probs, trailing=True)
    target, teacher_ids = given.target, given.picked
    check_option("sequence_parallel", asked.sequence_parallel)
    beta = as_float(beta)
    ignore_index = -100 if ignore_index is None else ignore_index
    _check_numbers(beta, reduction, ignore_index)
    check_option("logits_budget", logits_budget)
    _check_stored(teacher_ids, teacher_log_probs, tail, target)
    counted = teacher_ids.new_ones(teacher_ids.shape[:-1], dtype=torch.bool)
    if target is not None:
        counted = target.long() != ignore_index
    debug.compare_later({"beta": beta, "reduction": reduction, "tail": tail, "teacher_log_probs": teacher_log_probs})
    debug.compare_later({"counted tokens": counted})
    # Padding entries, and stored values of ignored tokens, must not reach a gradient.
    there = (teacher_ids.long() >= 0) & (teacher_log_probs != -torch.inf) & counted.unsqueeze(-1)
    ids = teacher_ids.long().masked_fill(~there, -1)
    with _naming("student", selected="teacher_ids"):
        given = given._replace(target=None, picked=ids)
        if tail == "renormalize":
            log_p, size = log_probs_of(asked, given, group)
        else:
            statistics = fused_statistics(asked, given, group)
            log_p, size = statistics.selected_log_prob, statistics.vocab_size
    assert log_p is not None  # asked for
    there &= ids < size
    log_q = teacher_log_probs.detach().to(log_p.dtype)
    log_p, log_q = (v.masked_fill(~there, -torch.inf) for v in (log_p, log_q))
    if tail == "renormalize":
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    else:
        log_p, log_q = _with_tail(log_p), _with_tail(log_q)
        there = torch.cat([there, torch.ones_like(there[..., :1])], -1)
    losses = torch.where(counted, of_classes(log_p, log_q, there, beta), 0.0)
    if reduction != "none":
        losses = losses.sum() / (counted.sum().clamp(min=1) if reduction == "mean" else 1)
    return losses if adapter is None else adapter.loss(losses)


def _with_tail(log_probs: Tensor) -> Tensor:
    """Append the log-probability of all other entries to ``[..., K]`` log-probabilities."""
    others = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, others.clamp(min=torch.finfo(others.dtype).eps).log()], -1)


def _factor(student: Call, hidden: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """``[N]``: each token's weight in the result, 0 if it is ignored."""
    target, dtype = student.target, accumulation_dtype(hidden.dtype)
    if target is None:
        count = student.shape.numel()
        share = 1 / max(1, count) if reduction == "mean" else 1.0
        return hidden.new_full((count,), share, dtype=dtype)
    counted = (target != ignore_index).to(dtype)
    return counted / counted.sum().clamp(min=1) if reduction == "mean" else counted


def detached(value: Any) -> Any:
    """A teacher's tensor, detached. A copy of one made in inference mode, since autograd cannot save such tensors."""
    if not isinstance(value, Tensor):
        return value
    return out_of_inference(value.detach())


def _naming(who: str, **others: str) -> AbstractContextManager[None]:
    """:func:`renamed` with the names of the student's or teacher's arguments, and the ``others``."""
    names = {"input": f"{who}_hidden", "linear_weight": f"{who}_weight", "linear_bias": f"{who}_bias"}
    return renamed(**names | others)


def _check_numbers(beta: object, reduction: object, ignore_index: object, shape: torch.Size | None = None) -> None:
    check_beta(beta)
    check_reduction(reduction)
    check_option("ignore_index", ignore_index)


def check_beta(beta: object) -> None:
    """Raise ``ValueError`` unless this is a beta of :func:`divergence`."""
    if not (is_number(beta) and (beta in (0, 1) or _NEAREST <= beta <= 1 - _NEAREST)):
        between = f"0, 1 or a number from {_NEAREST} to 1 - {_NEAREST}"
        raise ValueError(f"beta must be {between}, got {shortened(beta)}")


def check_pair(student: Call, inputs: Inputs, teacher: Tensors, shape: torch.Size) -> None:
    """Raise ``ValueError`` unless the teacher has the student's tokens, vocabulary entries, device and dtype of
    statistics."""
    x, weight = teacher.input, teacher.linear_weight
    own, shard, options = inputs[0], student.shard, student.options
    if x.shape[:-1] != own.shape[:-1]:
        raise ValueError(f"teacher_hidden {list(x.shape)} has other tokens than student_hidden {list(own.shape)}")
    if x.device != own.device:
        raise ValueError(f"teacher_hidden is on {x.device} and student_hidden is on {own.device}")
    if x.is_floating_point() and accumulation_dtype(x.dtype) != accumulation_dtype(own.dtype):
        raise ValueError(f"teacher_hidden is {x.dtype} and student_hidden is {own.dtype}: both or none must be float64")
    start = student.layout.rank * len(weight) if options.vocab_start is None else options.vocab_start
    other = Shard(start, len(weight), options.vocab_size)
    # An empty shard may have any start.
    if other.real_rows != shard.real_rows or (shard.real_rows and other.start != shard.start):
        raise ValueError(
            f"teacher_weight {list(weight.shape)} has the vocabulary entries [{other.start}, "
            f"{other.start + other.real_rows}) and student_weight {list(inputs[1].shape)} has "
            f"[{shard.start}, {shard.start + shard.real_rows})"
        )


def _check_stored(ids: object, log_probs: object, tail: object, target: object) -> None:
    if tail not in ("class", "renormalize"):
        raise ValueError(f"tail must be 'class' or 'renormalize', got {shortened(tail)}")
    if not (isinstance(ids, Tensor) and isinstance(log_probs, Tensor)):
        given = f"{described(ids)} and {described(log_probs)}"
        raise ValueError(f"teacher_ids and teacher_log_probs must be tensors, got {given}")
    if ids.dim() < 1 or ids.shape != log_probs.shape:
        given = f"{list(ids.shape)} and {list(log_probs.shape)}"
        raise ValueError(f"teacher_ids and teacher_log_probs must both be [..., K], got {given}")
    if ids.dtype not in INTEGERS:
        raise ValueError(f"teacher_ids must be of an integer dtype, got {ids.dtype}")
    if not log_probs.is_floating_point():
        raise ValueError(f"teacher_log_probs must be floating-point, got {log_probs.dtype}")
    if log_probs.device != ids.device:
        raise ValueError(f"teacher_log_probs is on {log_probs.device} and teacher_ids is on {ids.device}")
    if target is None:
        return
    if not isinstance(target, Tensor) or target.shape != ids.shape[:-1] or target.dtype not in INTEGERS:
        raise ValueError(f"target must be None or ids of shape {list(ids.shape[:-1])}, got {described(target)}")
    if target.device != ids.device:
        raise ValueError(f"target is on {target.device} and teacher_ids is on {ids.device}")
