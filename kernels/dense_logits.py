"""Logits in memory: their partials in two reads, their gradient in one read and one write.

They are either those that a user has (:func:`parallel_lce.vocab_parallel_cross_entropy`), or the fp32 products of a
small problem (:mod:`parallel_lce.backends.triton_dense`), to which bias, scales and soft-cap are applied as they are
read. The plain torch of the former is :mod:`parallel_lce.backends.dense_logits`.

One program reads a token's row. Rows are addressed in int64: N * V passes 2^31 in ordinary use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.partials import NOBODY, Columns
from parallel_lce.kernels.arithmetic import (
    LOWEST_SHIFT,
    Cap,
    caps_of,
    exact_logit,
    exponential,
    exponential_from,
    finite_base,
    gradient_of,
    scaled,
    softcapped,
)
from parallel_lce.kernels.partials import columns_of
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.rewrite import TokenCoefficients

_BLOCK, _WARPS = 2048, 8
_NOBODY = tl.constexpr(NOBODY)


class Affine(NamedTuple):
    """What turns products into logits: ``softcap(scale * token_scale * (product + bias))``."""

    # [V]
    bias: torch.Tensor | None = None
    scale: float = 1.0
    # [N] fp32
    token_scale: torch.Tensor | None = None
    # One number, or [N] fp32.
    softcap: float | torch.Tensor | None = None


PLAIN = Affine()


@triton.jit
def _logits(products, column, inside, bias, factor, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """The logits of some columns of a token's row; -inf outside."""
    z = tl.load(products + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        z = scaled(z, factor)
    if CAPPED:
        z = softcapped(z, cap)
    return tl.where(inside, z, -float("inf"))


@triton.jit
def _of_token(token_scale, scale, cap, row):
    """The factor and the soft-cap of a token."""
    factor = scale
    if token_scale is not None:
        factor = tl.load(token_scale + row) * scale
    number = scale  # Not read without a cap.
    if cap.number is not None:
        number = caps_of(cap, row, True)
    return factor, number


@Relaunched
@triton.jit(do_not_specialize=["start"])
def lce_forward_dense(
    products,
    partial,
    target,
    bias,
    token_scale,
    entries,
    stride,
    start,
    scale,
    cap,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``partial``: its columns. ``target``: relative to the first entry, whose global id is ``start``."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    CAPPED: tl.constexpr = cap.number is not None
    factor, number = _of_token(token_scale, scale, cap, row)
    lane = tl.arange(0, BLOCK)
    maxima = tl.full((BLOCK,), -float("inf"), tl.float32)
    places = tl.where(lane < entries, lane, _NOBODY)
    for first in range(0, entries, BLOCK):
        column = first + lane
        z = _logits(products, column, column < entries, bias, factor, number, SCALED, CAPPED)
        if partial.argmax is not None:
            places = tl.where(z > maxima, column, places)
        maxima = tl.maximum(maxima, z)
    top = tl.max(maxima, 0)
    base = finite_base(top)
    # Equal to no logit where all are -inf.
    peak = tl.where(top == -float("inf"), float("nan"), top)
    # The largest exponentials, each of them 1, are counted apart: the sum of all would round away what a confident
    # token leaves to the others.
    largest = tl.zeros((BLOCK,), tl.float32)
    others = tl.zeros((BLOCK,), tl.float32)
    shifted = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    squared = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, entries, BLOCK):
        column = first + lane
        inside = column < entries
        z = _logits(products, column, inside, bias, factor, number, SCALED, CAPPED)
        highest = inside & (z == peak)
        e = tl.where(highest, 0.0, exponential_from(z, base))
        largest += tl.where(highest, 1.0, 0.0)
        others += e
        if partial.shifted is not None:
            shifted += tl.where(inside, z - base, 0.0)
        if partial.total is not None:
            total += tl.where(inside, z, 0.0)
        if partial.weighted is not None:
            weighted += e * tl.maximum(z - base, LOWEST_SHIFT)
        if partial.squared is not None:
            squared += e * e
    number_of_largest = tl.sum(largest, 0)
    sum_exp = tl.sum(others, 0) + number_of_largest
    # inf - inf
    sum_exp = tl.where(top == float("inf"), float("nan"), sum_exp)
    # tl.max drops NaN, a sum does not.
    broken = (sum_exp != sum_exp) & (top != float("inf"))
    tl.store(partial.max + row, tl.where(broken, float("nan"), top))
    tl.store(partial.sum_exp + row, sum_exp)
    logit = 0.0
    if target is not None:
        wanted = tl.load(target + row)
        hit = (wanted >= 0) & (wanted < entries)
        z = _logits(products, wanted, hit, bias, factor, number, SCALED, CAPPED)
        logit = tl.where(hit, exact_logit(z, top, sum_exp), 0.0)
    tl.store(partial.target + row, logit)
    if partial.shifted is not None:
        tl.store(partial.shifted + row, tl.sum(shifted, 0))
    if partial.total is not None:
        tl.store(partial.total + row, tl.sum(total, 0))
    if partial.weighted is not None:
        tl.store(partial.weighted + row, tl.sum(weighted, 0))
    if partial.squared is not None:
        tl.store(partial.squared + row, tl.sum(squared, 0) + number_of_largest)
    if partial.argmax is not None:
        place = tl.min(tl.where(maxima == top, places, _NOBODY), 0)
        place = tl.where(broken | (place == _NOBODY), _NOBODY, place + start)
        tl.store(partial.argmax + row, place.to(tl.float32, bitcast=True))


@Relaunched
@triton.jit
def lce_backward_dense(
    products,
    gradient,
    partial,
    coefficients,
    target,
    bias,
    token_scale,
    rows,
    entries,
    stride,
    gradient_stride,
    factor_stride,
    scale,
    cap,
    SCALED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of ``SPAN`` columns of a token's row; of all where ``IN_PLACE``."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    gradient += row * gradient_stride
    CAPPED: tl.constexpr = cap.number is not None
    factor, number = _of_token(token_scale, scale, cap, row)
    upstream = factor
    if coefficients.factor is not None:
        upstream *= tl.load(coefficients.factor + row * factor_stride)
    base = finite_base(tl.load(partial + row))
    over_sum = 1.0 / tl.load(partial + rows + row)
    alpha = tl.load(coefficients.alpha + row)
    gamma, delta, epsilon = coefficients.gamma, coefficients.delta, coefficients.epsilon
    if gamma is not None:
        gamma = tl.load(gamma + row)
    if delta is not None:
        delta = tl.load(delta + row)
    if epsilon is not None:
        epsilon = tl.load(epsilon + row)
    wanted, beta = -1, 0.0
    if target is not None:
        wanted = tl.load(target + row).to(tl.int32)
        beta = tl.load(coefficients.beta + row)
    begin = tl.program_id(1) * SPAN
    end = entries
    if not IN_PLACE:
        end = tl.minimum(entries, begin + SPAN)
    for first in range(begin, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < end
        z = _logits(products, column, inside, bias, factor, number, SCALED, CAPPED)
        if IN_PLACE:
            # The entries that are written lie where these and earlier ones were read.
            tl.debug_barrier()
        moved = tl.minimum(z - base, 0.0)
        p = exponential(moved) * over_sum
        g = gradient_of(p, tl.maximum(moved, LOWEST_SHIFT), (alpha, gamma, delta, epsilon))
        if target is not None:
            g -= tl.where(column == wanted, beta, 0.0)
        if CAPPED:
            g *= 1.0 - (z / number) * (z / number)
        tl.store(gradient + column, (g * upstream).to(gradient.dtype.element_ty), mask=inside)


def dense_partial(
    products: torch.Tensor,
    target: torch.Tensor | None,
    columns: Columns,
    partial: torch.Tensor,
    affine: Affine = PLAIN,
    start: int = 0,
) -> None:
    """Write the ``partial [C, N]`` fp32 of the logits that ``affine`` makes of ``products [N, V]``, contiguous in V.

    ``target [N]`` int64, relative to the first entry, whose global id is ``start``; None: 0. Products are bf16, fp16
    or fp32.
    """
    rows, entries = products.shape
    bias, scale, token_scale, softcap = affine
    if rows:
        lce_forward_dense.launch(
            (rows,),
            products,
            columns_of(partial, columns),
            target,
            bias,
            token_scale,
            entries,
            products.stride(0),
            start,
            float(scale),
            Cap.of(softcap),
            SCALED=scale != 1.0 or token_scale is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def dense_gradient(
    products: torch.Tensor,
    target: torch.Tensor | None,
    partial: torch.Tensor,
    coefficients: TokenCoefficients,
    gradient: torch.Tensor,
    affine: Affine = PLAIN,
) -> None:
    """Write the ``gradient [N, V]`` of the products, in its own dtype, contiguous in V.

    ``partial [>= 2, N]`` fp32, contiguous: merged over all ranks. ``gradient`` may begin each row where the
    ``products``, then fp32, begin theirs.
    """
    rows, entries = products.shape
    bias, scale, token_scale, softcap = affine
    factor, in_place = coefficients.factor, gradient.data_ptr() == products.data_ptr()
    if rows and entries:
        lce_backward_dense.launch(
            (rows, 1 if in_place else -(-entries // _BLOCK)),
            products,
            gradient,
            partial,
            coefficients,
            target if coefficients.beta is not None else None,
            bias,
            token_scale,
            rows,
            entries,
            products.stride(0),
            gradient.stride(0),
            0 if factor is None or factor.dim() == 0 else factor.stride(0),
            float(scale),
            Cap.of(softcap),
            SCALED=scale != 1.0 or token_scale is not None,
            IN_PLACE=in_place,
            SPAN=_BLOCK,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
