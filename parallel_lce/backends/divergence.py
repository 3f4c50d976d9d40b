"""Two distributions over the same vocabulary shard, from fp32 logits of a block of tokens: statistics, divergence and
its gradient, by kernels where the backend is triton, else in plain torch.

The formulas are in :mod:`parallel_lce.divergence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends import uses_kernels
from parallel_lce.backends.gemm import accumulate_nt
from parallel_lce.backends.interface import Projection

# Bytes of a tile of fp32 log-probabilities in plain torch, which has several of them.
_CPU_BYTES, _CUDA_BYTES = 2 << 20, 64 << 20
# Rows begin at multiples of this many elements: cuBLAS wants 16 bytes, of half-precision gradients too.
_ALIGNED = 8


@dataclass(frozen=True)
class Pair:
    """Student and teacher of R tokens: p = softmax(scale * student), q = softmax(scale * teacher).

    A normalizer ``[2, R]`` holds, over the whole vocabulary, the maximum of the scaled logits and the logarithm of the
    sum of exponentials below it: log p = scale * logit - normalizer[0] - normalizer[1].
    """

    # [R, V/P], the statistics' dtype, rows contiguous
    student: Tensor
    teacher: Tensor
    student_normalizer: Tensor
    teacher_normalizer: Tensor
    scale: float
    beta: float

    @property
    def mixed(self) -> bool:
        return 0 < self.beta < 1


class LogitsGradient(NamedTuple):
    """Where the gradient of the student's logits goes, and what it needs."""

    # [R, V/P]: factor (p - q) if beta is 0, else factor p (log(p / r) - student_mean)
    out: Tensor
    # [R]. A token of factor 0 has gradient 0, whatever its logits are.
    factor: Tensor
    # [R]: sum over the whole vocabulary of p log(p / r). None if beta is 0.
    student_mean: Tensor | None


def aligned(like: Tensor, rows: int, entries: int, dtype: torch.dtype) -> Tensor:
    """New memory ``[rows, entries]`` whose rows are 16 bytes aligned."""
    return like.new_empty(rows, -(-entries // _ALIGNED) * _ALIGNED, dtype=dtype)[:, :entries]


def plain_logits(projection: Projection, x: Tensor) -> Tensor:
    """``x @ weight.T + bias``, ``[R, V/P]`` of the real rows, in the statistics' dtype: not scaled."""
    real = projection.real_rows
    out = aligned(x, len(x), real, projection.dtype)
    accumulate_nt(out, x, projection.weight[:real], overwrite=True)
    if projection.bias is not None:
        out += projection.bias[:real]
    return out


def row_partials(logits: Tensor, scale: float, partial: Tensor) -> None:
    """Write to ``partial [2, R]`` the maximum of ``scale * logits [R, V/P]`` and the sum of exponentials below it."""
    if uses_kernels(logits):
        from parallel_lce.kernels import divergence as kernels

        kernels.row_partials(logits, scale, partial)
    else:
        torch_row_partials(logits, scale, partial)


def divergence(pair: Pair, sums: Tensor | None, gradient: LogitsGradient | None) -> None:
    """Write this shard's part of ``sums [2, R]``, and the gradient, where they are given.

    The sums are, with the reference r of :mod:`parallel_lce.divergence`, that of q log(q / r) and that of p log(p / r).
    One that does not count in the divergence is 0.
    """
    if uses_kernels(pair.student):
        from parallel_lce.kernels import divergence as kernels

        given = (None, None, None) if gradient is None else gradient
        normalizers = pair.student_normalizer, pair.teacher_normalizer
        kernels.divergence(pair.student, pair.teacher, *normalizers, pair.scale, pair.beta, sums, *given)
    else:
        torch_divergence(pair, sums, gradient)


def torch_row_partials(logits: Tensor, scale: float, partial: Tensor) -> None:
    """:func:`row_partials` in plain torch."""
    if logits.shape[1] == 0:
        partial[0], partial[1] = -torch.inf, 0.0
        return
    for rows in _tiles(logits):
        z = logits[rows] * scale
        maximum = torch.amax(z, 1, out=partial[0, rows])
        z -= maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(1)
        torch.sum(z.exp_(), 1, out=partial[1, rows])


def torch_divergence(pair: Pair, sums: Tensor | None, gradient: LogitsGradient | None) -> None:
    """:func:`divergence` in plain torch."""
    for rows in _tiles(pair.student):
        log_p = _log_probs(pair.student, pair.student_normalizer, pair.scale, rows)
        log_q = _log_probs(pair.teacher, pair.teacher_normalizer, pair.scale, rows)
        p, q = log_p.exp(), log_q.exp()
        of_p, of_q = _log_ratios(log_p - log_q, pair)
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


def _log_ratios(log_ratio: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    """log(p / r) and log(q / r) from log(p / q), without the large logarithm of r."""
    if not pair.mixed:
        return log_ratio, -log_ratio
    smaller, up, beta, rest = log_ratio.abs().neg_().exp_(), log_ratio > 0, pair.beta, 1 - pair.beta
    log_sum = torch.where(up, rest + beta * smaller, beta + rest * smaller).log_()
    return log_ratio.where(~up, 0.0) - log_sum, -log_ratio.where(up, 0.0) - log_sum


def _log_probs(logits: Tensor, normalizer: Tensor, scale: float, rows: slice) -> Tensor:
    return logits[rows] * scale - normalizer[0, rows, None] - normalizer[1, rows, None]


def _tiles(logits: Tensor) -> list[slice]:
    row_bytes = max(1, logits.shape[1] * logits.element_size())
    step = max(1, (_CUDA_BYTES if logits.is_cuda else _CPU_BYTES) // row_bytes)
    return [slice(a, a + step) for a in range(0, len(logits), step)]
