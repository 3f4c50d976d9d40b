"""Logits in memory: partials in one read, or two for the mean logit; the gradient in one read and one write.

The logits are either a user's (:func:`parallel_lce.vocab_parallel_cross_entropy`), or the fp32 products of a small
problem (:mod:`parallel_lce.backends.triton_dense`). Bias, scales and soft-cap are applied to the products when they are
read. Plain torch for a user's logits: :mod:`parallel_lce.backends.torch_logits`.

One program reads a token's row, or 2048 columns of it in :func:`logits_gradient`. Rows are addressed in int64: N * V
passes 2^31 in ordinary use. Both kernels take what may change first, then numbers, for ``kernels.relaunch.Bound``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.core.logit_map import LogitMap
from parallel_lce.kernels.arithmetic import exact_logit, exponential, exponential_from, finite_base
from parallel_lce.kernels.logit_map import caps_of, row_logits, scales_of, slope_at
from parallel_lce.kernels.loss_kernels import LossTerms, loss_of
from parallel_lce.kernels.relaunch import Relaunched

# Columns per step, and warps, for a user's logits.
_ENTRIES, _WARPS = 2048, 8


@triton.jit
def _logits(products, column, inside, bias, logit_map, scale, cap, SCALED: tl.constexpr):
    """The logits of some columns of a token's row; -inf outside."""
    z = tl.load(products + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    z = row_logits(z, logit_map, scale, cap, SCALED)
    return tl.where(inside, z, -float("inf"))


@Relaunched
@triton.jit
def lce_forward_dense(
    products,
    partial,
    losses,
    target,
    token_weight,
    bias,
    logit_map,
    rows,
    entries,
    stride,
    terms,
    SHIFTED: tl.constexpr,
    SCALED: tl.constexpr,
    OUTSIDE_NAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``partial``: 3 columns, or 4 with ``SHIFTED``. ``losses``: only if ``entries`` is the whole vocabulary. Alpha,
    beta and, with ``SHIFTED``, gamma then follow the partial. ``target``: relative to the first entry."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    scale, cap = scales_of(logit_map, row, True), caps_of(logit_map, row, True)
    # Per lane: the maximum, and the sum of the other exponentials relative to it. The maximum's own exponential, 1, is
    # added last: small exponentials, added to it one by one, would be rounded away.
    maxima = tl.full((BLOCK,), -float("inf"), tl.float32)
    others = tl.zeros((BLOCK,), tl.float32)
    lane = tl.arange(0, BLOCK)
    for first in range(0, entries, BLOCK):
        column = first + lane
        z = _logits(products, column, column < entries, bias, logit_map, scale, cap, SCALED)
        is_larger = z > maxima
        # -inf - -inf is NaN.
        e = tl.where(z == -float("inf"), 0.0, exponential(-tl.abs(z - maxima)))
        others = tl.where(is_larger, (others + 1.0) * e, others + e)
        maxima = tl.where(is_larger, z, maxima)
    top = tl.max(maxima, 0)
    base = finite_base(top)
    e = exponential_from(maxima, base)
    is_top = (maxima == top) & (maxima != -float("inf"))
    sum_exp = tl.sum(others * e + tl.where(is_top, 0.0, e), 0) + tl.sum(tl.where(is_top, 1.0, 0.0), 0)
    shifted = tl.zeros((BLOCK,), tl.float32)
    if SHIFTED:
        for first in range(0, entries, BLOCK):
            column = first + lane
            inside = column < entries
            z = _logits(products, column, inside, bias, logit_map, scale, cap, SCALED)
            shifted += tl.where(inside, z - base, 0.0)
    # With an infinite maximum the sum is NaN: inf - inf.
    sum_exp = tl.where(top == float("inf"), float("nan"), sum_exp)
    # tl.max ignores NaN, a sum does not.
    top = tl.where((sum_exp != sum_exp) & (top != float("inf")), float("nan"), top)
    target_id = tl.load(target + row)
    inside = (target_id >= 0) & (target_id < entries)
    logit = _logits(products, target_id, inside, bias, logit_map, scale, cap, SCALED)
    if logit_map.softcap is not None:
        # The loop may have soft-capped this logit with other instructions.
        logit = exact_logit(logit, top, sum_exp, 0.0)
    logit = tl.where(inside, logit, 0.0)
    of_shift = tl.sum(shifted, 0)
    tl.store(partial + row, top)
    tl.store(partial + rows + row, sum_exp)
    tl.store(partial + 2 * rows + row, logit)
    if SHIFTED:
        tl.store(partial + 3 * rows + row, of_shift)
    if losses is not None:
        weight = tl.full((), 1.0, tl.float32)
        if token_weight is not None:
            weight = tl.load(token_weight + row)
        loss, alpha, beta, gamma, _ = loss_of(
            top, tl.log(sum_exp), logit, of_shift, target_id, weight, entries, terms, SHIFTED, OUTSIDE_NAN
        )
        tl.store(losses + row, loss)
        coefficients = partial + (3 + SHIFTED) * rows
        tl.store(coefficients + row, alpha)
        tl.store(coefficients + rows + row, beta)
        if SHIFTED:
            tl.store(coefficients + 2 * rows + row, gamma)


@Relaunched
@triton.jit
def lce_backward_dense(
    products,
    gradient,
    partial,
    factor,
    divisor,
    target,
    bias,
    logit_map,
    rows,
    entries,
    stride,
    gradient_stride,
    factor_stride,
    SHIFTED: tl.constexpr,
    SCALED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a row's gradient times ``factor / divisor``: all columns if ``IN_PLACE``, else ``SPAN`` columns.
    ``partial``: with the coefficients, as :func:`lce_forward_dense` stores them."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    gradient += row * gradient_stride
    scale, cap = scales_of(logit_map, row, True), caps_of(logit_map, row, True)
    upstream = scale
    if factor is not None:
        upstream *= tl.load(factor + row * factor_stride)
    if divisor is not None:
        upstream /= tl.load(divisor)
    base = finite_base(tl.load(partial + row))
    over_sum = 1.0 / tl.load(partial + rows + row)
    coefficients = partial + (3 + SHIFTED) * rows
    alpha = tl.load(coefficients + row)
    beta = tl.load(coefficients + rows + row)
    target_id = tl.load(target + row)
    begin = tl.program_id(1) * SPAN
    end = entries
    if not IN_PLACE:
        end = tl.minimum(entries, begin + SPAN)
    for first in range(begin, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < end
        z = _logits(products, column, inside, bias, logit_map, scale, cap, SCALED)
        if IN_PLACE:
            # The stores overwrite these and earlier products: all threads must have read them.
            tl.debug_barrier()
        # A huge logit may exceed the maximum by a rounding.
        p = exponential(tl.minimum(z - base, 0.0)) * over_sum
        g = p * alpha - tl.where(column == target_id, beta, 0.0)
        if SHIFTED:
            g -= tl.load(coefficients + 2 * rows + row)
        if logit_map.softcap is not None:
            g *= slope_at(z, cap)
        tl.store(gradient + column, (g * upstream).to(gradient.dtype.element_ty), mask=inside)


def logits_partial(logits: torch.Tensor, target: torch.Tensor, shifted: bool, partial: torch.Tensor) -> None:
    """Write the ``partial [3, N]`` fp32, or with ``shifted`` ``[4, N]``, of ``logits [N, V]``, contiguous in V.

    ``target [N]`` int64: relative to the first entry. Logits are bf16, fp16 or fp32.
    """
    rows, entries = logits.shape
    if rows:
        numbers = rows, entries, logits.stride(0), LossTerms()
        tensors = logits, partial, None, target, None, None, LogitMap()
        options = dict(SHIFTED=shifted, SCALED=False, OUTSIDE_NAN=False)
        lce_forward_dense.launch((rows,), *tensors, *numbers, **options, BLOCK=_ENTRIES, num_warps=_WARPS)


def logits_gradient(logits: torch.Tensor, target: torch.Tensor, partial: torch.Tensor, gradient: torch.Tensor) -> None:
    """Write the ``gradient [N, V]`` of ``logits``, in its own dtype, contiguous in V.

    ``partial [7, N]`` fp32, contiguous: merged over all ranks, 4 columns, and alpha, beta and gamma.
    """
    rows, entries = logits.shape
    if rows and entries:
        tensors = logits, gradient, partial, None, None, target, None, LogitMap()
        numbers = rows, entries, logits.stride(0), gradient.stride(0), 0
        options = dict(SHIFTED=True, SCALED=False, IN_PLACE=False, SPAN=_ENTRIES, BLOCK=_ENTRIES)
        lce_backward_dense.launch((rows, -(-entries // _ENTRIES)), *tensors, *numbers, **options, num_warps=_WARPS)
