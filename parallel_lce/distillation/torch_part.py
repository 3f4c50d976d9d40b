"""The work on a block's logits in plain torch. :mod:`parallel_lce.distillation.triton_part` has the same function, and
:mod:`parallel_lce.distillation.blocks` the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.torch_logits import tiles_of_rows
from parallel_lce.core.logit_map import LogitMap
from parallel_lce.core.partials import LOWEST_SHIFT

# Magnitude of log(q / r) below which q and r are close.
NEAR_RATIO = 0.25

# Numbers per token, [ROWS, N]. The first are the student's and the teacher's maximum of the logits, over the whole
# vocabulary, then for both the logarithm of the sum of exponentials relative to it. A logit minus these is a
# log-probability.
DIVERGENCE = 4
# The sum of p log(p / r), from which the gradient takes a difference if beta > 0.
STUDENT_MEAN = 5
ROWS = 6


def divergence(
    student: Tensor,
    teacher: Tensor,
    numbers: Tensor,
    beta: float,
    factor: Tensor | None,
    logit_map: LogitMap,
    sums: Tensor | None,
    gradient: Tensor | None,
) -> None:
    """From the logits ``[R, V/P]`` of both, in the statistics' dtype, write ``sums`` and ``gradient``, unless None.

    Args:
        numbers: ``[ROWS, R]``, contiguous. The normalizers are read and, for a gradient with beta > 0, the mean.
        factor: ``[R]``, of the gradient. A token of factor 0 has gradient 0, even if its logits are NaN.
        logit_map: the student's.
        sums: ``[2, R]``, the shard's part of the numbers from ``DIVERGENCE`` on.
        gradient: ``[R, V/P]``: factor slope (p - q) if beta is 0, else factor slope p (log(p / r) - mean), with the
            slope of the soft-cap.
    """
    for rows in tiles_of_rows(*student.shape, itemsize=student.element_size()):
        top, teacher_top, log_sum, teacher_log_sum = numbers[:DIVERGENCE, rows, None]
        log_p = student[rows] - top - log_sum
        log_q = teacher[rows] - teacher_top - teacher_log_sum
        p, q = log_p.exp(), log_q.exp()
        of_p, of_q = log_ratios(log_p - log_q, beta)
        if sums is not None:
            sums[0, rows] = _terms(p, q, of_p, of_q, beta).sum(1)
            sums[1, rows] = _product(p, of_p).sum(1)
        if gradient is not None and factor is not None:
            g = p - q if beta == 0 else _product(p, of_p - numbers[STUDENT_MEAN, rows, None])
            slope = logit_map.of_rows(rows).slope(student[rows].t())
            if slope is not None:
                g *= slope.t()
            times = factor[rows, None]
            gradient[rows] = g.mul_(times).masked_fill_(times == 0, 0.0)


def _product(p: Tensor, value: Tensor) -> Tensor:
    return (p * value).masked_fill_(p == 0, 0.0)


def _terms(p: Tensor, q: Tensor, of_p: Tensor, of_q: Tensor, beta: float) -> Tensor:
    """The entries' terms of the divergence. Those of KL(q || r) are ``q log(q / r) - q + r``: the sum of r - q is 0.
    Where q and r are close, such a term is of second order, and so are its errors. Those of q log(q / r) would be of
    first order, far larger than the divergence."""
    r = beta * q + (1 - beta) * p

    def term(q: Tensor, log_ratio: Tensor) -> Tensor:
        near = log_ratio.abs() < NEAR_RATIO
        small = log_ratio.where(near, 0.0)  # autograd multiplies what `where` drops by 0
        return torch.where(near, q * (small + torch.expm1(-small)), _product(q, log_ratio).add_(r - q))

    if beta in (0, 1):
        return term(q, of_q) if beta == 0 else term(p, of_p)
    return beta * term(q, of_q) + (1 - beta) * term(p, of_p)


def log_ratios(log_ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / r) and log(q / r) from log(p / q), without the large logarithm of r. Differentiable. If beta is 0 or 1,
    r is p or q, whose own ratio is not needed."""
    if beta in (0, 1):
        return log_ratio, -log_ratio
    up, rest = log_ratio > 0, 1 - beta
    share = torch.full_like(log_ratio, rest).masked_fill_(up, beta)
    other = torch.full_like(log_ratio, beta).masked_fill_(up, rest)
    distance = log_ratio.abs()
    total = other + share * torch.exp(-distance)
    log_sum = total.log() + (1 - total + share * torch.expm1(-distance))  # what the sum lost by its rounding
    return log_ratio.where(~up, 0.0) - log_sum, -log_ratio.where(up, 0.0) - log_sum


def of_classes(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """The divergence of ``[..., C]`` log-probabilities, over classes whose ``log_q`` is not -inf; differentiable."""
    # The others have probabilities of 0. Unlike -inf, this gives 0 and no NaN in products and their gradients.
    missing = log_q == -torch.inf
    log_p, log_q = log_p.masked_fill(missing, LOWEST_SHIFT), log_q.masked_fill(missing, LOWEST_SHIFT)
    if beta > 0:
        log_p = log_p.clamp(min=LOWEST_SHIFT)
    return _terms(log_p.exp(), log_q.exp(), *log_ratios(log_p - log_q, beta), beta).sum(-1)
