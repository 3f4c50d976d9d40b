"""Logits in memory (:func:`parallel_lce.vocab_parallel_cross_entropy`): partials in one read, or two for the mean
logit; the gradient in one read and one write. In plain torch: :mod:`parallel_lce.backends.torch_logits`.

One program reads a token's row, or 2048 columns of it in :func:`logits_gradient`. Rows are addressed in int64: N * V
passes 2^31 in ordinary use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import exponential, finite_base
from parallel_lce.kernels.launch import Relaunched

# Columns per step, and warps.
_ENTRIES, _WARPS = tl.constexpr(2048), 8


@triton.jit
def _load(logits, column, inside):
    """The logits of some columns of a token's row; -inf outside."""
    z = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, z, -float("inf"))


@Relaunched
@triton.jit
def lce_forward_dense(logits, partial, target, rows, entries, stride, SHIFTED: tl.constexpr):
    """``partial``: 3 columns, or 4 with ``SHIFTED``. ``target``: relative to the first entry."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    # Per lane: the maximum, and the sum of the other exponentials relative to it. The maximum's own exponential, 1, is
    # added last: small exponentials, added to it one by one, would be rounded away.
    maxima = tl.full((_ENTRIES,), -float("inf"), tl.float32)
    others = tl.zeros((_ENTRIES,), tl.float32)
    lane = tl.arange(0, _ENTRIES)
    for first in range(0, entries, _ENTRIES):
        column = first + lane
        z = _load(logits, column, column < entries)
        is_larger = z > maxima
        # -inf - -inf is NaN.
        e = tl.where(z == -float("inf"), 0.0, exponential(-tl.abs(z - maxima)))
        others = tl.where(is_larger, (others + 1.0) * e, others + e)
        maxima = tl.where(is_larger, z, maxima)
    top = tl.max(maxima, 0)
    base = finite_base(top)
    e = exponential(maxima - base)
    is_top = (maxima == top) & (maxima != -float("inf"))
    sum_exp = tl.sum(others * e + tl.where(is_top, 0.0, e), 0) + tl.sum(tl.where(is_top, 1.0, 0.0), 0)
    if SHIFTED:
        shifted = tl.zeros((_ENTRIES,), tl.float32)
        for first in range(0, entries, _ENTRIES):
            inside = first + lane < entries
            shifted += tl.where(inside, _load(logits, first + lane, inside) - base, 0.0)
        tl.store(partial + 3 * rows + row, tl.sum(shifted, 0))
    # With an infinite maximum the sum is NaN: inf - inf.
    sum_exp = tl.where(top == float("inf"), float("nan"), sum_exp)
    # tl.max ignores NaN, a sum does not.
    top = tl.where((sum_exp != sum_exp) & (top != float("inf")), float("nan"), top)
    target_id = tl.load(target + row)
    inside = (target_id >= 0) & (target_id < entries)
    tl.store(partial + row, top)
    tl.store(partial + rows + row, sum_exp)
    tl.store(partial + 2 * rows + row, tl.where(inside, _load(logits, target_id, inside), 0.0))


@Relaunched
@triton.jit
def lce_backward_dense(logits, gradient, partial, coefficients, target, rows, entries, stride, gradient_stride):
    """Writes some columns of a row's gradient. ``coefficients [3, N]``: alpha, beta and gamma."""
    row = tl.program_id(0).to(tl.int64)
    base = finite_base(tl.load(partial + row))
    over_sum = 1.0 / tl.load(partial + rows + row)
    column = tl.program_id(1) * _ENTRIES + tl.arange(0, _ENTRIES)
    inside = column < entries
    z = _load(logits + row * stride, column, inside)
    # A huge logit may exceed the maximum by a rounding.
    p = exponential(tl.minimum(z - base, 0.0)) * over_sum
    of_target = tl.where(column == tl.load(target + row), tl.load(coefficients + rows + row), 0.0)
    g = p * tl.load(coefficients + row) - of_target - tl.load(coefficients + 2 * rows + row)
    tl.store(gradient + row * gradient_stride + column, g.to(gradient.dtype.element_ty), mask=inside)


def logits_partial(logits: torch.Tensor, target: torch.Tensor, shifted: bool, partial: torch.Tensor) -> None:
    """Write the ``partial [3, N]`` fp32, or with ``shifted`` ``[4, N]``, of ``logits [N, V]``, contiguous in V.

    ``target [N]`` int64: relative to the first entry. Logits are bf16, fp16 or fp32.
    """
    rows, entries = logits.shape
    if rows:
        sizes = rows, entries, logits.stride(0)
        lce_forward_dense.launch((rows,), logits, partial, target, *sizes, SHIFTED=shifted, num_warps=_WARPS)


def logits_gradient(
    logits: torch.Tensor, target: torch.Tensor, partial: torch.Tensor, coefficients: torch.Tensor
) -> torch.Tensor:
    """The gradient ``[N, V]`` of ``logits``, in their dtype.

    ``partial [>= 2, N]`` fp32: merged over all ranks. ``coefficients [3, N]`` fp32: alpha, beta and gamma. Both are
    contiguous.
    """
    (rows, entries), gradient = logits.shape, torch.empty_like(logits, memory_format=torch.contiguous_format)
    if rows and entries:
        sizes = rows, entries, logits.stride(0), gradient.stride(0)
        tensors = logits, gradient, partial, coefficients, target
        lce_backward_dense.launch((rows, -(-entries // _ENTRIES.value)), *tensors, *sizes, num_warps=_WARPS)
    return gradient
