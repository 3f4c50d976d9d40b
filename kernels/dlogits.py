"""Saved exponentials become the gradient of the logits, in place, rewriting only the rows that need it.

The backward's products need ``p_ij alpha_i - gamma_i``. What is saved is ``e_ij = exp(z_ij - r_i)``, with the softmax
shift r. Where gamma is absent, ``p_ij alpha_i = c_i e_ij`` with one coefficient per token,
``c_i = alpha_i exp(r_i - M_i) / s_i``. So ``c_i`` is left to the products: it scales the rows of the result of
``G @ weight``, and the rows of ``x`` in ``G.T @ x``. :mod:`parallel_lce.kernels.targets` adds the targets' own entries.

Only these tokens are rewritten, and have ``c_i = 1``:
- tokens with a window that was saved relative to its maximum, and tokens whose ``r_i`` lies more than ``REACH`` from
  their maximum over all ranks;
- tokens whose ``c_i`` is so small (< 2^-60) that ``c_i x_i`` would lose precision, unless both ``c_i`` and the target's
  gradient are 0;
- all tokens, where a soft-cap or ``gamma`` acts on every entry, where the bias's gradient is wanted, or in fp16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import LOWEST_SHIFT, REACH, SAVED_FP16_SCALE, finite_base, rebased, window_shift
from parallel_lce.kernels.relaunch import Relaunched

_REACH = tl.constexpr(REACH)
# Smallest c for which c * x keeps the full precision of bf16.
_LEAST_COEFFICIENT = tl.constexpr(2.0**-60)
_BLOCK = 4096


class SavedExponentials(NamedTuple):
    """What a block saves of its first C vocabulary entries from forward to backward."""

    # [R, C] in the input's dtype, rows 16 bytes aligned; in fp16 times SAVED_FP16_SCALE
    exponentials: torch.Tensor
    # [windows, R] fp32, of all windows of the forward
    maxima: torch.Tensor
    # [R] fp32, or None where each window is relative to its maximum
    softmax_shift: torch.Tensor | None = None
    # [R] uint8: whether all of a token's windows are relative to its softmax shift
    on_shift: torch.Tensor | None = None


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_from_saved(
    exponentials,
    maxima,
    softmax_shift,
    on_shift,
    partial,
    alpha,
    gamma,
    target_grad,
    fp16_scale,
    dx_factor,
    rows,
    entries,
    stride,
    scale,
    cap,
    REWRITE: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    here = exponentials + row.to(tl.int64) * stride
    grad_scale = scale
    if fp16_scale is not None:
        grad_scale *= tl.load(fp16_scale)
    base = finite_base(tl.load(partial + row))
    alpha_over_sum = tl.load(alpha + row) * (grad_scale / tl.load(partial + rows + row))
    scaled_gamma = 0.0
    if gamma is not None:
        scaled_gamma = tl.load(gamma + row) * grad_scale
    shift = base
    if softmax_shift is not None:
        shift = tl.load(softmax_shift + row)
    coefficient = alpha_over_sum * rebased(shift, base)
    keeps_row = False
    if not REWRITE:
        # NaN makes keeps_row false.
        keeps_row = (tl.load(on_shift + row) != 0) & (tl.abs(base - shift) <= _REACH)
        row_is_zero = coefficient == 0.0
        if target_grad is not None:
            row_is_zero &= tl.load(target_grad + row) == 0.0
        keeps_row &= (tl.abs(coefficient) >= _LEAST_COEFFICIENT) | row_is_zero
    if keeps_row:
        tl.store(dx_factor + row, coefficient)
    else:
        tl.store(dx_factor + row, 1.0)
        for first in range(0, entries, BLOCK):
            c = first + tl.arange(0, BLOCK)
            inside = c < entries
            e = tl.load(here + c, mask=inside, other=0.0).to(tl.float32) * (1.0 / SAVED_SCALE)
            top = tl.load(maxima + (c // WINDOW).to(tl.int64) * rows + row, mask=inside, other=0.0)
            reference = finite_base(top)
            if softmax_shift is not None:
                reference = window_shift(top, shift)
            # In a window of -inf alone the factor may be infinite, and 0 times that is NaN.
            empty = (top == -float("inf")) & (e == 0.0)
            g = tl.where(empty, 0.0, e * (alpha_over_sum * rebased(reference, base))) - scaled_gamma
            if cap is not None:
                z = tl.maximum(tl.log(e) + reference, LOWEST_SHIFT)
                g *= 1.0 - (z / cap) * (z / cap)
            tl.store(here + c, g.to(exponentials.dtype.element_ty), mask=inside)


def gradient_from_saved(
    saved: SavedExponentials,
    window: int,
    partial: torch.Tensor,
    alpha: torch.Tensor,
    gamma: torch.Tensor | None,
    target_grad: torch.Tensor | None,
    fp16_scale: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    rewrite: bool,
) -> torch.Tensor | None:
    """Turn the saved exponentials into ``p alpha - gamma``, times scale, soft-cap's slope and ``fp16_scale``.

    Each row of the result is still to be multiplied by the factors ``[R]`` that are returned, if any. The forward's
    windows have ``window`` entries. ``partial [>= 2, R]``: maximum and sum of exponentials. ``alpha``, ``gamma``,
    ``target_grad``: ``[R]``, the last being the gradients of the targets' logits. All are fp32 and contiguous.
    ``rewrite``: rewrite every row and return no factors.
    """
    rows, entries = saved.exponentials.shape
    dx_factor = torch.empty_like(alpha)
    rewrite = rewrite or saved.softmax_shift is None or softcap is not None or gamma is not None
    lce_backward_from_saved.launch(
        (rows,),
        *saved,
        partial,
        alpha,
        gamma,
        target_grad,
        fp16_scale,
        dx_factor,
        rows,
        entries,
        saved.exponentials.stride(0),
        float(scale),
        None if softcap is None else float(softcap),
        REWRITE=rewrite,
        SAVED_SCALE=SAVED_FP16_SCALE if saved.exponentials.dtype == torch.float16 else 1.0,
        WINDOW=window,
        BLOCK=_BLOCK,
    )
    return None if rewrite else dx_factor
