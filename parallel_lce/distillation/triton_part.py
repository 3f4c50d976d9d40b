"""The work on a block's logits in one kernel, which reads a token's row in one program."""

from __future__ import annotations

import triton
import triton.language as tl

from parallel_lce.distillation.torch_part import NEAR_RATIO, STUDENT_MEAN
from parallel_lce.kernels.arithmetic import LN_2, fast_log2
from parallel_lce.kernels.launch import Relaunched
from parallel_lce.kernels.logit_map import caps_of, slope_at

_BLOCK, _NEAR_RATIO, _MEAN = tl.constexpr(4096), tl.constexpr(NEAR_RATIO), tl.constexpr(STUDENT_MEAN)


@triton.jit
def _term(q, log_ratio, r):
    """``q log(q / r) - q + r``, as in :mod:`parallel_lce.distillation.torch_part`, by a power series where q and r are
    close."""
    series = 1.0 / 720.0 - log_ratio * (1.0 / 5040.0)
    series = 1.0 / 120.0 - log_ratio * series
    series = 1.0 / 24.0 - log_ratio * series
    series = 1.0 / 6.0 - log_ratio * series
    series = log_ratio * log_ratio * (0.5 - log_ratio * series)
    far = tl.where(q != 0.0, q * log_ratio, 0.0) + (r - q)
    return tl.where(tl.abs(log_ratio) < _NEAR_RATIO, q * series, far)


@triton.jit
def _log_of_sum(share, other, distance):
    """``log(other + share exp(-distance))``, of ``other + share = 1``; with a small relative error near 0, too."""
    e = tl.exp(-distance)
    series = distance * (1.0 - distance * (1.0 / 2.0 - distance * (1.0 / 6.0 - distance * (1.0 / 24.0))))
    missing = share * tl.where(distance < 0.0625, series, 1.0 - e)
    # -log(1 - missing) / missing
    ratio = 1.0 / 5.0 + missing * (1.0 / 6.0 + missing * (1.0 / 7.0))
    ratio = 1.0 / 3.0 + missing * (1.0 / 4.0 + missing * ratio)
    ratio = 1.0 + missing * (1.0 / 2.0 + missing * ratio)
    return tl.where(missing < 0.125, -missing * ratio, LN_2 * fast_log2(other + share * e))


@Relaunched
@triton.jit
def lce_backward_divergence(
    student,
    teacher,
    numbers,
    factor,
    logit_map,
    sums,
    gradient,
    entries,
    stride,
    beta,
    rest,
    TEACHER: tl.constexpr,
    STUDENT: tl.constexpr,
):
    """``stride``: of the rows of both logits and of the gradient. ``TEACHER``, ``STUDENT``: whether the divergence
    contains the sum over the teacher's, or the student's, probabilities."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    of_row = numbers + row
    top, teacher_top = tl.load(of_row), tl.load(of_row + rows)
    log_sum, teacher_log_sum = tl.load(of_row + 2 * rows), tl.load(of_row + 3 * rows)
    times = 0.0
    mean = 0.0
    if gradient is not None:
        times = tl.load(factor + row)
        if STUDENT:
            mean = tl.load(of_row + _MEAN * rows)
    cap = caps_of(logit_map, row, True)
    total = tl.zeros((_BLOCK,), tl.float32)
    student_mean = tl.zeros((_BLOCK,), tl.float32)
    for first in range(0, entries, _BLOCK):
        column = first + tl.arange(0, _BLOCK)
        valid = column < entries
        here = row * stride + column
        z = tl.load(student + here, mask=valid, other=-float("inf"))
        log_p = z - top - log_sum
        log_q = tl.load(teacher + here, mask=valid, other=-float("inf")) - teacher_top - teacher_log_sum
        p = tl.exp(log_p)
        q = tl.exp(log_q)
        # log(q / r) and log(p / r), with the mixture r of p and q, without the large logarithm of r.
        log_ratio = log_p - log_q
        of_q = -log_ratio
        of_p = log_ratio
        if TEACHER and STUDENT:
            up = log_ratio > 0
            log_of_sum = _log_of_sum(tl.where(up, beta, rest), tl.where(up, rest, beta), tl.abs(log_ratio))
            of_q = tl.where(up, -log_ratio, 0.0) - log_of_sum
            of_p = tl.where(up, 0.0, log_ratio) - log_of_sum
        if sums is not None:
            r = beta * q + rest * p
            if not STUDENT:
                terms = _term(q, of_q, r)
            elif not TEACHER:
                terms = _term(p, of_p, r)
            else:
                terms = beta * _term(q, of_q, r) + rest * _term(p, of_p, r)
            total += tl.where(valid, terms, 0.0)
            if STUDENT:
                student_mean += tl.where(valid & (p != 0.0), p * of_p, 0.0)
        if gradient is not None:
            g = tl.where(p != 0.0, p * (of_p - mean), 0.0) if STUDENT else p - q
            if logit_map.softcap is not None:
                g *= slope_at(z, cap)
            # An ignored token has gradient 0, whatever its logits are.
            g = tl.where(times != 0.0, g * times, 0.0)
            tl.store(gradient + here, g.to(gradient.dtype.element_ty), mask=valid)
    if sums is not None:
        tl.store(sums + row, tl.sum(total, 0))
        tl.store(sums + rows + row, tl.sum(student_mean, 0))


def divergence(student, teacher, numbers, beta, factor, logit_map, sums, gradient) -> None:
    """As that of :mod:`parallel_lce.distillation.torch_part`. Rows of all three matrices have one stride."""
    rows, entries = student.shape
    tensors = student, teacher, numbers, factor, logit_map, sums, gradient
    terms = dict(TEACHER=beta < 1, STUDENT=beta > 0)
    if rows:
        lce_backward_divergence.launch(
            (rows,), *tensors, entries, student.stride(0), beta, 1 - beta, **terms, num_warps=8
        )
