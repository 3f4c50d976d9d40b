"""Rows of saved exponentials, rewritten as the gradient of the logits but for the target.

Saved is ``e = exp(z - r)``, with the softmax shift r. With the maximum M and the sum s of a token,

    p = e exp(r - M) / s        z - M = log e + r - M

Where e underflowed, p is 0, and the gradient is -gamma. The rounding of e is an error of z, relative to 1, and of p,
relative to p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.partials import ALONE
from parallel_lce.kernels.arithmetic import (
    SAVED_FP16_SCALE,
    exponential_from,
    finite_base,
    gradient_of,
    logit_above,
    window_shift,
)
from parallel_lce.kernels.relaunch import Relaunched

REWRITTEN = 2048
"""Entries of a row that are rewritten at a time."""

_ALONE = tl.constexpr(ALONE)
# Entries of a program.
_SPAN = 16384


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


class TokenCoefficients(NamedTuple):
    """Coefficients of the gradient of the logits, fp32, contiguous; None for 0.

    dL/dz_j = factor (p_j (alpha + delta (z_j - max) + epsilon p_j) - beta [j = target] - gamma).
    """

    # [R]
    alpha: torch.Tensor
    beta: torch.Tensor | None
    gamma: torch.Tensor | None
    delta: torch.Tensor | None
    epsilon: torch.Tensor | None
    # [R], or one number for all tokens (a stride of 0); None: 1
    factor: torch.Tensor | None


@triton.jit
def rewrite_row(
    saved,
    maxima,
    token,
    terms,
    rows,
    first,
    stop,
    cap,
    HAS_SHIFT: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn one token's saved exponentials of ``[first, stop)`` into ``p (alpha + delta (z - M) + epsilon p) - gamma``,
    times the soft-cap's slope. ``token``: its maximum, softmax shift and sum of exponentials. ``terms``: of
    :func:`gradient_of` an exponential relative to the maximum."""
    base, shift, sum_exp = token
    # Some windows at a time: what is the same in a window is computed once.
    WINDOWS: tl.constexpr = BLOCK // WINDOW
    # The largest entry of a token that is sure, whose terms nearly cancel, is known exactly. The others are below 1/2.
    least = tl.where(sum_exp < _ALONE, 0.75, float("inf"))
    for start in range(first, stop, BLOCK):
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
        g = gradient_of(of_max, moved, terms)
        if cap is not None:
            z = tl.where(alone, base, logit_above(e, reference[:, None], 0.0))
            g *= 1.0 - (z / cap) * (z / cap)
        tl.store(saved + c, g.to(saved.dtype.element_ty), mask=inside)


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_rewrite(
    gradient,
    maxima,
    softmax_shift,
    token_scale,
    partial,
    coefficients,
    fp16_scale,
    rows,
    slice_entries,
    stride,
    factor_stride,
    scale,
    cap,
    SAVED_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * SPAN
    grad_scale = scale
    if token_scale is not None:
        grad_scale *= tl.load(token_scale + row)
    if fp16_scale is not None:
        grad_scale *= tl.load(fp16_scale)
    if coefficients.factor is not None:
        grad_scale *= tl.load(coefficients.factor + row * factor_stride)
    base = finite_base(tl.load(partial + row))
    shift = base
    if softmax_shift is not None:
        shift = tl.load(softmax_shift + row)
    sum_exp = tl.load(partial + rows + row)
    over_sum = grad_scale / sum_exp
    # Each a number, or None.
    gamma, delta, epsilon = coefficients.gamma, coefficients.delta, coefficients.epsilon
    if gamma is not None:
        gamma = tl.load(gamma + row) * grad_scale
    if delta is not None:
        delta = tl.load(delta + row) * over_sum
    if epsilon is not None:
        epsilon = tl.load(epsilon + row) * (over_sum / sum_exp)
    rewrite_row(
        gradient + row.to(tl.int64) * stride,
        maxima + row,
        (base, shift, sum_exp),
        (tl.load(coefficients.alpha + row) * over_sum, gamma, delta, epsilon),
        rows,
        first,
        tl.minimum(first + SPAN, slice_entries),
        cap,
        softmax_shift is not None,
        SAVED_SCALE,
        WINDOW,
        BLOCK,
    )


def rewrite_rows(
    gradient: torch.Tensor,
    saved: Saved,
    partial: torch.Tensor,
    coefficients: TokenCoefficients,
    fp16_scale: torch.Tensor | None,
    window: int,
    scale: float,
    token_scale: torch.Tensor | None,
    softcap: float | None,
) -> None:
    """Rewrite every row of ``gradient [R, C]``, which holds the exponentials of ``saved``.

    ``window``: entries of a window of the forward. The others: of ``token_gradients.token_gradients``.
    """
    (rows, entries), factor = gradient.shape, coefficients.factor
    lce_backward_rewrite.launch(
        (rows, -(-entries // _SPAN)),
        gradient,
        saved.maxima,
        saved.softmax_shift,
        token_scale,
        partial,
        coefficients,
        fp16_scale,
        rows,
        entries,
        gradient.stride(0),
        0 if factor is None or factor.dim() == 0 else factor.stride(0),
        float(scale),
        None if softcap is None else float(softcap),
        SAVED_SCALE=SAVED_FP16_SCALE if gradient.dtype == torch.float16 else 1.0,
        WINDOW=window,
        SPAN=_SPAN,
        BLOCK=REWRITTEN,
    )
