"""Rows of saved exponentials, rewritten as the gradient of the logits but for the target.

Saved is ``e = exp(z - r)``, with the softmax shift r. With the maximum M and the sum s of a token,

    p = e exp(r - M) / s        z - M = log e + r - M

Where e underflowed, p is 0, and the gradient is -gamma. The rounding of e is an error of z, relative to 1, and of p,
relative to p.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.partials import ALONE, Coefficients
from parallel_lce.kernels.arithmetic import (
    SAVED_FP16_SCALE,
    Scaling,
    exponential_from,
    finite_base,
    gradient_of,
    loaded,
    logit_above,
    scales_of,
    window_shift,
)
from parallel_lce.kernels.relaunch import Relaunched

_ALONE = tl.constexpr(ALONE)
# Entries of a program, and those that it rewrites at a time.
_SPAN, _BLOCK = tl.constexpr(16384), tl.constexpr(2048)


class Saved(NamedTuple):
    """What a block saves of its first C vocabulary entries from forward to backward."""

    # [R, C] in the input's dtype, rows 16 bytes aligned; in fp16 times SAVED_FP16_SCALE. None: windows alone are kept.
    exponentials: torch.Tensor | None
    # [windows, R] fp32, of all windows of the forward
    maxima: torch.Tensor
    # [R] fp32, or None where each window is relative to its maximum
    softmax_shift: torch.Tensor | None = None
    # [R] uint8: whether all of a token's windows are relative to its softmax shift
    on_shift: torch.Tensor | None = None
    # [windows, R] fp32: each window's sum of exponentials, if a filtered backward can do without some entries
    sums: torch.Tensor | None = None


class GradientTerms(NamedTuple):
    """What the gradient of the logits of R tokens is formed from, beside the logits or their exponentials."""

    # [>= 3, R] fp32, contiguous: the merged partial
    partial: torch.Tensor
    # fp32, contiguous
    coefficients: Coefficients
    # Elements from one token's factor to the next one's. Triton specializes the integers of a tuple.
    factor_stride: int
    # 0-dimensional: the gradient is stored times this; None: 1
    fp16_scale: torch.Tensor | None
    scaling: Scaling

    @classmethod
    def of(
        cls, partial: torch.Tensor, coefficients: Coefficients, fp16_scale: torch.Tensor | None, operands: Any
    ) -> GradientTerms:
        """``operands``: of :meth:`Scaling.of`."""
        factor = coefficients.factor
        stride = 0 if factor is None or factor.dim() == 0 else factor.stride(0)
        return cls(partial, coefficients, stride, fp16_scale, Scaling.of(operands))


@triton.jit
def rewrite_row(
    saved,
    maxima,
    token,
    values,
    terms,
    rows,
    first,
    stop,
    HAS_SHIFT: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Turn one token's saved exponentials of ``[first, stop)`` into ``p (alpha + delta (z - M) + epsilon p) - gamma``,
    times the soft-cap's slope. ``token``: its maximum, softmax shift and sum of exponentials. ``values``: of
    :func:`gradient_of` an exponential relative to the maximum."""
    base, shift, sum_exp = token
    # Some windows at a time: what is the same in a window is computed once.
    WINDOWS: tl.constexpr = _BLOCK // WINDOW
    # The largest entry of a token that is sure, whose terms nearly cancel, is known exactly. The others are below 1/2.
    least = tl.where(sum_exp < _ALONE, 0.75, float("inf"))
    for start in range(first, stop, _BLOCK):
        c = start + (tl.arange(0, WINDOWS) * WINDOW)[:, None] + tl.arange(0, WINDOW)[None, :]
        inside = c < stop
        e = tl.load(saved + c, mask=inside, other=0.0).to(tl.float32) * (1.0 / SAVED_SCALE)
        window = start // WINDOW + tl.arange(0, WINDOWS)
        top = tl.load(maxima + window.to(tl.int64) * rows, mask=window * WINDOW < stop, other=0.0)
        reference = finite_base(top)
        if HAS_SHIFT:
            reference = window_shift(top, shift)
        rebase = exponential_from(reference, base)
        # In a window of -inf alone the factor may be infinite, and 0 times that is NaN.
        empty = (top == -float("inf"))[:, None] & (e == 0.0)
        of_max = tl.where(empty, 0.0, e * rebase[:, None])
        alone = of_max > least
        of_max = tl.where(alone, 1.0, of_max)
        moved = tl.where(alone, 0.0, logit_above(e, reference[:, None], base))
        g = gradient_of(of_max, moved, values, terms.coefficients)
        cap = terms.scaling.cap
        if cap is not None:
            z = tl.where(alone, base, logit_above(e, reference[:, None], 0.0))
            g *= 1.0 - (z / cap) * (z / cap)
        tl.store(saved + c, g.to(saved.dtype.element_ty), mask=inside)


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_rewrite(
    gradient, maxima, softmax_shift, terms, rows, slice_entries, stride, SAVED_SCALE: tl.constexpr, WINDOW: tl.constexpr
):
    row = tl.program_id(0)
    first = tl.program_id(1) * _SPAN
    coefficients = terms.coefficients
    grad_scale = scales_of(terms.scaling, row, True)
    if terms.fp16_scale is not None:
        grad_scale *= tl.load(terms.fp16_scale)
    if coefficients.factor is not None:
        grad_scale *= tl.load(coefficients.factor + row * terms.factor_stride)
    base = finite_base(tl.load(terms.partial + row))
    sum_exp = tl.load(terms.partial + rows + row)
    over_sum = grad_scale / sum_exp
    rewrite_row(
        gradient + row.to(tl.int64) * stride,
        maxima + row,
        (base, loaded(softmax_shift, row, True, 1.0), sum_exp),
        (
            tl.load(coefficients.alpha + row) * over_sum,
            loaded(coefficients.gamma, row, True, grad_scale),
            loaded(coefficients.delta, row, True, over_sum),
            loaded(coefficients.epsilon, row, True, over_sum / sum_exp),
        ),
        terms,
        rows,
        first,
        tl.minimum(first + _SPAN, slice_entries),
        softmax_shift is not None,
        SAVED_SCALE,
        WINDOW,
    )


def rewrite_rows(gradient: torch.Tensor, saved: Saved, terms: GradientTerms, window: int) -> None:
    """Rewrite every row of ``gradient [R, C]``, which holds the exponentials of ``saved``, of a forward with windows of
    ``window`` entries. Nothing is saved under caps of each token."""
    assert terms.scaling.token_cap is None
    rows, entries = gradient.shape
    lce_backward_rewrite.launch(
        (rows, -(-entries // _SPAN.value)),
        gradient,
        saved.maxima,
        saved.softmax_shift,
        terms,
        rows,
        entries,
        gradient.stride(0),
        SAVED_SCALE=SAVED_FP16_SCALE if gradient.dtype == torch.float16 else 1.0,
        WINDOW=window,
    )
