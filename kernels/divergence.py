"""The divergence of two distributions over the same entries, from fp32 logits, and its gradient.

The formulas are those of :mod:`parallel_lce.run.divergence`, the plain torch :mod:`parallel_lce.backends.divergence`.
One program reads a row. Rows are addressed in int64: R * V passes 2^31 in ordinary use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched

_BLOCK = tl.constexpr(4096)


@triton.jit
def _log_probs(of, column, valid, row, rows):
    logits, stride, normalizer = of
    z = tl.load(logits + row * stride + column, mask=valid, other=-float("inf"))
    return z - tl.load(normalizer + row) - tl.load(normalizer + rows + row)


@Relaunched
@triton.jit
def lce_backward_divergence(
    student,
    teacher,
    sums,
    gradient,
    factor,
    student_mean,
    rows,
    entries,
    gradient_stride,
    beta,
    rest,
    TEACHER: tl.constexpr,
    STUDENT: tl.constexpr,
):
    """``student`` and ``teacher``: logits, their row's stride, and normalizer. ``TEACHER`` and ``STUDENT``: whose sum
    counts in the divergence. ``sums``, ``gradient``: None if not wanted."""
    row = tl.program_id(0).to(tl.int64)
    of_teacher = 0.0
    of_student = 0.0
    for first in range(0, entries, _BLOCK):
        column = first + tl.arange(0, _BLOCK)
        valid = column < entries
        log_p = _log_probs(student, column, valid, row, rows)
        log_q = _log_probs(teacher, column, valid, row, rows)
        p = tl.exp(log_p)
        q = tl.exp(log_q)
        # log(q / r) and log(p / r), without the large logarithm of r.
        log_ratio = log_p - log_q
        of_q = -log_ratio
        of_p = log_ratio
        if TEACHER and STUDENT:
            smaller = tl.exp(-tl.abs(log_ratio))
            up = log_ratio > 0
            log_sum = tl.log(tl.where(up, rest + beta * smaller, beta + rest * smaller))
            of_q = tl.where(up, -log_ratio, 0.0) - log_sum
            of_p = tl.where(up, 0.0, log_ratio) - log_sum
        if sums is not None:
            if TEACHER:
                of_teacher += tl.sum(tl.where(valid & (q != 0.0), q * of_q, 0.0), 0)
            if STUDENT:
                of_student += tl.sum(tl.where(valid & (p != 0.0), p * of_p, 0.0), 0)
        if gradient is not None:
            times = tl.load(factor + row)
            if STUDENT:
                g = tl.where(p != 0.0, p * (of_p - tl.load(student_mean + row)), 0.0)
            else:
                g = p - q
            # A token that does not count has gradient 0, whatever its logits are.
            g = tl.where(times != 0.0, g * times, 0.0)
            tl.store(gradient + row * gradient_stride + column, g.to(gradient.dtype.element_ty), mask=valid)
    if sums is not None:
        tl.store(sums + row, of_teacher)
        tl.store(sums + rows + row, of_student)


def divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    student_normalizer: torch.Tensor,
    teacher_normalizer: torch.Tensor,
    beta: float,
    sums: torch.Tensor | None,
    gradient: torch.Tensor | None,
    factor: torch.Tensor | None,
    student_mean: torch.Tensor | None,
) -> None:
    """:func:`parallel_lce.backends.divergence.divergence`"""
    rows, entries = student.shape
    if rows:
        lce_backward_divergence.launch(
            (rows,),
            (student, student.stride(0), student_normalizer),
            (teacher, teacher.stride(0), teacher_normalizer),
            sums,
            gradient,
            factor,
            student_mean,
            rows,
            entries,
            0 if gradient is None else gradient.stride(0),
            beta,
            1 - beta,
            TEACHER=beta < 1,
            STUDENT=beta > 0,
            num_warps=8,
        )
