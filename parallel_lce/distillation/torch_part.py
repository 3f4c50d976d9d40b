"""The work on a block's logits in plain torch. :mod:`parallel_lce.distillation.triton_part` has the same functions, and
:mod:`parallel_lce.distillation.blocks` the formulas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate, matmul
from parallel_lce.backends.interface import Projection
from parallel_lce.backends.torch_logits import tiles_of_rows
from parallel_lce.core.logit_map import LogitMap
from parallel_lce.core.partials import MAX, SUM_EXP, Columns, empty_partial

# Rows begin at multiples of this many elements: cuBLAS wants 16 bytes, in half precision too.
_ALIGNED = 8
NEAR_RATIO = 0.25
"""Magnitude of log(q / r) below which q and r are close."""


class Pair(NamedTuple):
    """Logits of R tokens: p is the softmax of the student's, q of the teacher's. A normalizer ``[2, R]`` holds, over
    the whole vocabulary, the maximum of the logits and the logarithm of the sum of exponentials relative to it. A
    log-probability is ``logit - normalizer[0] - normalizer[1]``."""

    # [R, V/P], the statistics' dtype, rows contiguous
    student: Tensor
    teacher: Tensor
    student_normalizer: Tensor
    teacher_normalizer: Tensor
    beta: float


class LogitsGradient(NamedTuple):
    """Memory for the gradient of the student's logits, and the numbers from which it is formed."""

    # [R, V/P]: factor slope (p - q) if beta is 0, else factor slope p (log(p / r) - student_mean). The slope is that of
    # the student's soft-cap.
    out: Tensor
    # [R]. A token of factor 0 has gradient 0, even if its logits are NaN.
    factor: Tensor
    # [R]: sum over the whole vocabulary of p log(p / r). None if beta is 0.
    student_mean: Tensor | None
    # The student's
    logit_map: LogitMap


def block_logits(projection: Projection, x: Tensor) -> tuple[Tensor, Tensor]:
    """The logits ``[R, V/P]`` of the real rows, in the statistics' dtype, and their partial ``[3, R]``, whose target
    column is 0. On CUDA rows are :func:`aligned`."""
    real = projection.real_rows
    partial = empty_partial(Columns(), len(x), projection.dtype, x.device)
    if x.is_cuda:
        z = aligned(x, len(x), real, projection.dtype)
        accumulate(z, x, projection.weight[:real].t(), overwrite=True)
    else:
        z = matmul(x, projection.weight[:real].t())
    if real == 0:
        return z, partial
    if projection.bias is not None:
        z += projection.bias[:real]
    projection.logit_map.apply(z.t())
    for rows in tiles_of_rows(*z.shape, itemsize=z.element_size()):
        maximum = torch.amax(z[rows], 1, out=partial[MAX, rows])
        # If all logits of a token are -inf, subtract 0: -inf - -inf is NaN.
        shifted = z[rows] - maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(1)
        torch.sum(shifted.exp_(), 1, out=partial[SUM_EXP, rows])
    return z, partial


def aligned(like: Tensor, rows: int, entries: int, dtype: torch.dtype) -> Tensor:
    """New memory ``[rows, entries]`` with rows aligned to 16 bytes."""
    return like.new_empty(rows, -(-entries // _ALIGNED) * _ALIGNED, dtype=dtype)[:, :entries]


def divergence(pair: Pair, sums: Tensor | None, gradient: LogitsGradient | None) -> None:
    """Write ``sums [2, R]``, the divergence's and that of p log(p / r) over the shard's entries, or ``[3, R]`` with
    that of p log p, and the gradient, each unless it is None. Without p log(p / r) in the divergence its sum is 0."""
    for rows in tiles_of_rows(*pair.student.shape, itemsize=pair.student.element_size()):
        log_p = _log_probs(pair.student, pair.student_normalizer, rows)
        log_q = _log_probs(pair.teacher, pair.teacher_normalizer, rows)
        p, q = log_p.exp(), log_q.exp()
        of_p, of_q = log_ratios(log_p - log_q, pair.beta)
        if sums is not None:
            sums[0, rows] = _terms(p, q, of_p, of_q, pair.beta).sum(1)
            sums[1, rows] = (p * of_p).masked_fill_(p == 0, 0.0).sum(1) if pair.beta > 0 else 0.0
            if len(sums) > 2:
                sums[2, rows] = (p * log_p).masked_fill_(p == 0, 0.0).sum(1)
        if gradient is not None:
            if gradient.student_mean is None:
                g = p - q
            else:
                g = (p * (of_p - gradient.student_mean[rows, None])).masked_fill_(p == 0, 0.0)
            slope = gradient.logit_map.of_rows(rows).slope(pair.student[rows].t())
            if slope is not None:
                g *= slope.t()
            factor = gradient.factor[rows, None]
            gradient.out[rows] = g.mul_(factor).masked_fill_(factor == 0, 0.0)


def _terms(p: Tensor, q: Tensor, of_p: Tensor, of_q: Tensor, beta: float) -> Tensor:
    """The entries' terms of the divergence. Those of KL(q || r) are ``q log(q / r) - q + r``: the sum of r - q is 0.
    Where q and r are close, such a term is of second order, and so are its errors. Those of q log(q / r) would be of
    first order, far larger than the divergence."""
    r = beta * q + (1 - beta) * p

    def term(q: Tensor, log_ratio: Tensor) -> Tensor:
        far = (q * log_ratio).masked_fill_(q == 0, 0.0).add_(r - q)
        near = log_ratio.abs() < NEAR_RATIO
        return torch.where(near, q * (log_ratio + torch.expm1(-log_ratio)), far)

    if beta in (0, 1):
        return term(q, of_q) if beta == 0 else term(p, of_p)
    return beta * term(q, of_q) + (1 - beta) * term(p, of_p)


def log_ratios(log_ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / r) and log(q / r) from log(p / q), without the large logarithm of r. Differentiable."""
    if beta in (0, 1):
        return log_ratio, -log_ratio
    up, rest = log_ratio > 0, 1 - beta
    smaller = torch.where(up, -log_ratio, log_ratio).exp()
    log_sum = torch.where(up, rest + beta * smaller, beta + rest * smaller).log()
    return log_ratio.where(~up, 0.0) - log_sum, -log_ratio.where(up, 0.0) - log_sum


def of_classes(log_p: Tensor, log_q: Tensor, there: Tensor, beta: float) -> Tensor:
    """The divergence of ``[..., C]`` log-probabilities, over the classes marked in ``there``; differentiable. The
    teacher's, ``log_q``, must be finite there."""
    # Masked first: if the other classes were masked at the end, their gradients would be 0 * inf.
    log_p, log_q = log_p.masked_fill(~there, 0.0), log_q.masked_fill(~there, 0.0)
    p, q = (torch.where(there, v.exp(), 0.0) for v in (log_p, log_q))
    excluded = log_p == -torch.inf
    _, of_q = log_ratios(log_p - log_q, beta)
    of_p, _ = log_ratios(log_p.masked_fill(excluded, 0.0) - log_q, beta)
    if beta in (0, 1):
        return (q * of_q).sum(-1) if beta == 0 else (p * of_p).sum(-1)
    return (beta * q * of_q + (1 - beta) * p * of_p).sum(-1)


def _log_probs(logits: Tensor, normalizer: Tensor, rows: slice) -> Tensor:
    return logits[rows] - normalizer[0, rows, None] - normalizer[1, rows, None]
