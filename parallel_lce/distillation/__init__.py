"""Distillation: divergences between a teacher's softmax and a student's, without storing all logits of either.

The teacher is an output layer (:func:`divergence`), or its stored largest log-probabilities (:func:`top_k_divergence`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_lce.call import debug
from parallel_lce.call.call import Call, Inputs
from parallel_lce.call.checks import check_dtype, check_value, described, int64_ids, public, renamed
from parallel_lce.call.prepare import autocasted, check, prepare
from parallel_lce.core.collectives import Shard
from parallel_lce.core.memory import out_of_inference
from parallel_lce.core.options import NO_LABEL, Options, Tensors, check_option, check_reduction, is_number, shortened
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.private import outside_graphs, outside_selective_checkpoints
from parallel_lce.distillation.blocks import Divergences, reduced
from parallel_lce.distillation.torch_part import of_classes
from parallel_lce.dtensor import DTensorAdapter, adapted
from parallel_lce.run.entry import fused_statistics
from parallel_lce.selected_log_probs import log_probs_of

_NEAREST = 1e-6  # a beta between 0 and 1 is at least this far from both: nearer, 1 - beta is not in fp32
# Arguments by the names of linear_cross_entropy.
_STUDENT = {"input": "student_hidden", "linear_weight": "student_weight", "linear_bias": "student_bias"}
_STUDENT["selected"] = "teacher_ids"
_TEACHER = {"input": "teacher_hidden", "linear_weight": "teacher_weight", "linear_bias": "teacher_bias"}
_TEACHER |= {name: f"teacher_{name}" for name in ("logit_scale", "logit_softcap")}


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
    """Divergence of the teacher's softmax from the student's, differentiable by the student's tensors alone.

    With q the teacher's softmax and p the student's, and m = beta q + (1 - beta) p, a token's divergence is, in nats,
    KL(q || p) for ``beta=0``, KL(p || q) for ``beta=1``, and between them beta KL(q || m) + (1 - beta) KL(p || m), the
    generalised Jensen-Shannon divergence (arXiv:2306.13649). It is not multiplied by the square of the temperature. One
    near 1e-6 has a relative error of about 1e-4 from the roundings of fp32 logits.

    Args: as those of :func:`parallel_lce.linear_cross_entropy`, and

        teacher_hidden, teacher_weight, teacher_bias: ``[..., E]`` of the same tokens, split like the student's, and
            shards ``[V/P, E]`` and ``[V/P]`` of the same vocabulary entries. The dtype (but both are fp64 or neither)
            and, with ``vocab_size``, the rows of padding may differ from the student's; those of DTensors may not.
        beta: 0, 1, or a number between them at least 1e-6 from both.
        teacher_logit_scale, teacher_logit_softcap: None: the student's. ``math.inf``: no soft-cap.
        target: ids, used for ``ignore_index`` alone; None: no token is ignored. An ignored token has divergence 0 and
            gradient 0, even if the teacher's values are NaN.
        logits_budget: bytes per rank and call for a block's student and teacher logits, in fp32, and their gradient. A
            block has at least 128 tokens, and may use 64 MiB whatever the budget. With uneven shards and no
            ``vocab_size``, 32768 vocabulary rows per rank are assumed.

    Returns:
        fp32 (fp64 for fp64), identical on every rank bit for bit; differentiable once. NaN as those of
        :func:`parallel_lce.linear_cross_entropy`.

    Collectives, on ``process_group`` alone, for each block of R tokens in this order, elements per rank: under sequence
    parallelism, all-gathers of the student's and of the teacher's hidden states, R/P * D and R/P * E, each started a
    block ahead; all-gathers of 6 R + 3 and of 2 R, fp32 (fp64 for fp64); and if gradients are formed in forward, for
    'mean' and 'sum' except in fp16, an all-reduce, or reduce-scatter, of dX, R * D of ``reduce_dtype``, but with
    ``reduce_hidden_grad=False`` none. A backward that projects again runs the first and the last.

    Raises:
        ValueError: as :func:`parallel_lce.linear_cross_entropy`; or the teacher's tensors do not fit the student's.
    """
    scale = logit_scale if teacher_logit_scale is None else teacher_logit_scale
    softcap = logit_softcap if teacher_logit_softcap is None else teacher_logit_softcap
    if isinstance(softcap, float) and softcap == math.inf:
        softcap = None
    with renamed(**_STUDENT):
        options, given, group, adapter = _adapted_student("divergence", locals())
        teacher_tensors = [
            adapter.hidden("teacher_hidden", teacher_hidden),
            adapter.weight("teacher_weight", teacher_weight),
            adapter.weight("teacher_bias", teacher_bias),
        ]
        scale = adapter.per_token("teacher_logit_scale", scale)
        student, inputs = prepare(options, given, group)
    debug.state.awaited = True  # the teacher's exchange is to come
    # No gradient flows to the teacher, whose tensors may be of inference mode: autograd could not save those.
    hidden, weight, bias = [out_of_inference(t.detach()) if isinstance(t, Tensor) else t for t in teacher_tensors]
    one_scale, token_scale = (1.0, scale) if isinstance(scale, Tensor) else (scale, None)
    options = options._replace(reduce_dtype=None, logit_scale=one_scale, logit_softcap=softcap)
    with renamed(**_TEACHER):
        _check_pair(student, inputs, options, hidden, weight)
        tensors = Tensors(hidden, weight, None, bias, None, token_scale, given.temperature)
        teacher, teacher_inputs = prepare(options, tensors, group)
    factors = _factors(given.target, ignore_index, reduction, student.shape, inputs[0])
    task = student, teacher, float(beta)
    return adapter.loss(Divergences.apply(*inputs, *teacher_inputs, factors, task, reduction))


@outside_graphs
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

    Args: as those of :func:`divergence`, and

        teacher_ids: ``[..., K]`` of any integer dtype, the same on all ranks: the whole sequence under sequence
            parallelism. A token should have each id once. Ids outside the vocabulary, such as -1, are no entries.
        teacher_log_probs: ``[..., K]``, of a temperature that was chosen when they were stored. An entry of -inf is no
            entry either. Values of ignored tokens are not used.
        tail: 'class': the probability of all other entries is one more class. It is 1 - sum of the K, and at least
            1e-7 (2e-16 for fp64), the precision of that difference; no gradient flows through a student's tail below
            that. The gradient has a relative error of about 5e-7 times the teacher's tail, divided by the student's.
            'renormalize': both distributions are renormalised over the K entries. Then only the weight's rows of these
            entries are read, and ``logits_budget`` is not used. A student that excludes all entries of a token has
            probability 0 for each.

    Returns:
        As :func:`divergence`. A token without any entry has divergence 0.

    Collectives: those of :func:`parallel_lce.token_statistics` with ``selected``, or of
    :func:`parallel_lce.selected_log_probs` with 'renormalize'.
    """
    if tail not in ("class", "renormalize"):
        raise ValueError(f"tail must be 'class' or 'renormalize', got {shortened(tail)}")
    teacher_ids = int64_ids("teacher_ids", teacher_ids)
    with renamed(**_STUDENT):
        options, given, group, adapter = _adapted_student(f"top_k_divergence of {tail=}", locals(), teacher_ids)
        log_q = adapter.per_token("teacher_log_probs", teacher_log_probs, trailing=True)
        check(options, autocasted(given), group)
        ids = given.selected
        log_q = check_value("teacher_log_probs", log_q, "teacher_ids", ids)
        check_dtype("teacher_log_probs", log_q)
        factors = _factors(given.target, ignore_index, reduction, ids.shape[:-1], given.input)
        counted = factors != 0
        debug.compare_later({"counted tokens": counted})
        # Padding entries, and stored values of ignored tokens, must not reach a gradient.
        ids = ids.masked_fill((log_q == -torch.inf) | ~counted.unsqueeze(-1), -1)
        given = given._replace(target=None, selected=ids)
        if tail == "renormalize":
            log_p, size = log_probs_of(options, given, group)
        else:
            statistics = fused_statistics(options, given, group)
            log_p, size = statistics.selected_log_prob, statistics.vocab_size
    assert log_p is not None  # asked for
    # As the student's, which are -inf outside the vocabulary.
    log_q = log_q.to(log_p.dtype).masked_fill((ids < 0) | (ids >= size), -torch.inf)
    if tail == "class":
        log_p, log_q = _with_tail(log_p), _with_tail(log_q)
    else:
        total = log_q.logsumexp(-1, keepdim=True)
        log_q = log_q - total.masked_fill(total == -torch.inf, 0.0)  # of a token without any entry
    with outside_selective_checkpoints():
        losses = of_classes(log_p, log_q, float(beta))
    return adapter.loss(reduced(losses, factors, reduction))


def _with_tail(log_probs: Tensor) -> Tensor:
    """Append the log-probability of all other entries to ``[..., K]`` log-probabilities."""
    others = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, others.clamp(min=torch.finfo(others.dtype).eps).log()], -1)


def _factors(target: Tensor | None, ignore_index: int | None, reduction: str, shape: Any, hidden: Tensor) -> Tensor:
    """Each token's factor in the result, in the statistics' dtype; 0 for an ignored one."""
    factors = torch.ones(shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    if target is not None:
        factors = factors.masked_fill(target == (NO_LABEL if ignore_index is None else ignore_index), 0.0)
    return factors / factors.sum().clamp(min=1) if reduction == "mean" else factors


def _adapted_student(
    name: str, arguments: dict[str, Any], ids: Any = None
) -> tuple[Options, Tensors, dist.ProcessGroup | None, DTensorAdapter]:
    """:func:`adapted` from a public function's ``arguments``, of the student. ``ids``: selected. The call itself
    reduces and ignores nothing: the settings are in its name, which ranks compare."""
    beta, reduction, ignore_index = (arguments[name] for name in ("beta", "reduction", "ignore_index"))
    if not (is_number(beta) and (beta in (0, 1) or _NEAREST <= beta <= 1 - _NEAREST)):
        raise ValueError(f"beta must be 0, 1 or a number from {_NEAREST} to 1 - {_NEAREST}, got {shortened(beta)}")
    beta = float(beta)
    check_reduction(reduction)
    check_option("ignore_index", ignore_index)
    ignore_index = NO_LABEL if ignore_index is None else ignore_index
    name = f"distillation.{name} with {beta=}, {reduction=} and {ignore_index=}"
    options = Options.of(name, arguments | dict(reduction=None, ignore_index=None))
    hidden, weight, bias = (arguments[f"student_{what}"] for what in ("hidden", "weight", "bias"))
    given = Tensors(hidden, weight, arguments["target"], bias, selected=ids)
    return adapted(options, given, arguments["process_group"], reduction)


def _check_pair(student: Call, inputs: Inputs, options: Options, hidden: Any, weight: Any) -> None:
    """Raise ``ValueError`` unless the teacher's ``hidden`` states and ``weight``, with its ``options``, have the
    student's tokens, device, vocabulary entries and statistics' dtype."""
    if not (isinstance(hidden, Tensor) and isinstance(weight, Tensor) and weight.dim()):
        return  # refused with the teacher's other arguments
    pair = inputs[0], hidden
    if len({(t.shape[:-1], t.device, accumulation_dtype(t.dtype)) for t in pair}) > 1:
        of_student, given = (f"{described(t)} on {t.device}" for t in pair)
        expected = "the tokens and the device of student_hidden, and both or none must be float64"
        raise ValueError(f"teacher_hidden must have {expected}, got {given} and {of_student}")
    of_teacher = Shard.of(weight.shape[0], student.layout, options.vocab_start, options.vocab_size)
    # All empty shards have the same entries, none.
    own, given = (range(shard.start, shard.start + shard.real_rows) for shard in (student.shard, of_teacher))
    if own != given:
        raise ValueError(
            f"teacher_weight {list(weight.shape)} has the vocabulary entries [{given.start}, {given.stop}) and "
            f"student_weight {list(inputs[1].shape)} has the vocabulary entries [{own.start}, {own.stop})"
        )
