"""The divergence of two distributions over the same vocabulary shard, from fp32 logits of a block of tokens, and its
gradient, in plain torch; in a kernel: parallel_lce.kernels.divergence.

The formulas are in :mod:`parallel_lce.run.divergence`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.interface import LogitsGradient, Pair
from parallel_lce.backends.torch_logits import tiles_of_rows


def divergence(pair: Pair, sums: Tensor | None, gradient: LogitsGradient | None) -> None:
    """Write this shard's ``sums [2, R]``, and the gradient; neither is written if it is None.

    The two sums over the shard's entries are those of q log(q / r) and of p log(p / r). A sum that is no term of the
    divergence is 0.
    """
    for rows in tiles_of_rows(*pair.student.shape, pair.student.element_size()):
        log_p = _log_probs(pair.student, pair.student_normalizer, rows)
        log_q = _log_probs(pair.teacher, pair.teacher_normalizer, rows)
        p, q = log_p.exp(), log_q.exp()
        of_p, of_q = log_ratios(log_p - log_q, pair.beta)
        if sums is not None:
            sums[0, rows] = (q * of_q).masked_fill_(q == 0, 0.0).sum(1) if pair.beta < 1 else 0.0
            sums[1, rows] = (p * of_p).masked_fill_(p == 0, 0.0).sum(1) if pair.beta > 0 else 0.0
        if gradient is not None:
            if gradient.student_mean is None:
                g = p - q
            else:
                g = (p * (of_p - gradient.student_mean[rows, None])).masked_fill_(p == 0, 0.0)
            factor = gradient.factor[rows, None]
            gradient.out[rows] = g.mul_(factor).masked_fill_(factor == 0, 0.0)


def log_ratios(log_ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / r) and log(q / r) from log(p / q), without the large logarithm of r. Differentiable."""
    if beta in (0, 1):
        return log_ratio, -log_ratio
    up, rest = log_ratio > 0, 1 - beta
    smaller = torch.where(up, -log_ratio, log_ratio).exp()
    log_sum = torch.where(up, rest + beta * smaller, beta + rest * smaller).log()
    return log_ratio.where(~up, 0.0) - log_sum, -log_ratio.where(up, 0.0) - log_sum


def of_classes(log_p: Tensor, log_q: Tensor, there: Tensor, beta: float) -> Tensor:
    """The divergence of ``[..., C]`` log-probabilities, over the classes marked in ``there``; differentiable. There the
    teacher's, q, are finite."""
    # Masked first: if they were masked at the end, their gradients would be 0 * inf.
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
