"""Kept exponentials become gradients of the logits, in place, touching no more than they must.

A product with the gradients needs ``p_ij alpha_i - gamma_i``, and what was kept is
``e_ij = exp(z_ij - r_i)``. With ``c_i = alpha_i exp(r_i - M_i) / s_i`` the former is ``c_i e_ij``, so
``c_i`` is left to the products: on the rows of the result of ``G @ weight``, on those of ``x`` in
``G.T @ x``. (The targets' entries are :mod:`parallel_lce.kernels.targets`'.)

Only tokens for which this does not do are rewritten, and have ``c_i = 1``: those whose windows were
kept relative to different references, or whose ``c_i`` would leave bf16 or is 0 and their target's
gradient is not, and all of them where a soft-cap or ``gamma`` acts on every entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.epilogues import FP16_SCALE, LOWEST_SHIFT, REACH, finite_base, rebased, window_reference
from parallel_lce.kernels.launch import Relaunched

# Below, c x would lose digits in bf16 that dlogits do not.
_LEAST_COEFFICIENT = tl.constexpr(2.0**-60)
_BLOCK = 4096


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def _settle_kernel(
    kept,
    maxima,
    common,
    agreed,
    statistics,
    alpha,
    gamma,
    of_target,
    power,
    row_scale,
    rows,
    columns,
    stride,
    scale,
    cap,
    REWRITE: tl.constexpr,
    REACH: tl.constexpr,
    KEPT_SCALE: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    HAS_POWER: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    here = kept + row.to(tl.int64) * stride
    factor = scale
    if HAS_POWER:
        factor *= tl.load(power)
    base = finite_base(tl.load(statistics + row))
    level = tl.load(alpha + row) * (factor / tl.load(statistics + rows + row))
    uniform = 0.0
    if HAS_GAMMA:
        uniform = tl.load(gamma + row) * factor
    own = base
    as_it_is = False
    if REACH >= 0:
        own = tl.load(common + row)
    coefficient = level * rebased(own, base)
    if not REWRITE:
        # All comparisons are false for NaN.
        as_it_is = (tl.load(agreed + row) != 0) & (tl.abs(base - own) <= REACH)
        nothing = coefficient == 0.0
        if HAS_TARGET:
            nothing &= tl.load(of_target + row) == 0.0
        as_it_is &= (tl.abs(coefficient) >= _LEAST_COEFFICIENT) | nothing
    if as_it_is:
        tl.store(row_scale + row, coefficient)
    else:
        tl.store(row_scale + row, 1.0)
        for first in range(0, columns, BLOCK):
            c = first + tl.arange(0, BLOCK)
            inside = c < columns
            e = tl.load(here + c, mask=inside, other=0.0).to(tl.float32) * (1.0 / KEPT_SCALE)
            top = tl.load(maxima + (c // WINDOW).to(tl.int64) * rows + row, mask=inside, other=0.0)
            reference = window_reference(top, own, REACH)
            # A window of -inf alone: its factor may be infinite, and 0 times that NaN.
            empty = (top == -float("inf")) & (e == 0.0)
            g = tl.where(empty, 0.0, e * (level * rebased(reference, base))) - uniform
            if CAPPED:
                z = tl.maximum(tl.log(e) + reference, LOWEST_SHIFT)
                g *= 1.0 - (z / cap) * (z / cap)
            tl.store(here + c, g.to(kept.dtype.element_ty), mask=inside)


def settle(
    kept: torch.Tensor,
    maxima: torch.Tensor,
    common: torch.Tensor | None,
    agreed: torch.Tensor | None,
    window: int,
    statistics: torch.Tensor,
    alpha: torch.Tensor,
    gamma: torch.Tensor | None,
    of_target: torch.Tensor | None,
    power: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    rewrite: bool,
) -> torch.Tensor | None:
    """Make ``kept [R, C]`` ``p alpha - gamma``, times scale, the slope of the soft-cap and ``power``,
    each row over the factor ``[R]`` returned, if any.

    ``maxima [>= C / window, R]`` of the windows, ``common [R]`` and ``agreed [R]`` of
    ``partials.merge_windows``; None where each window is relative to its maximum. ``statistics [>= 2, R]``:
    maximum and sum of exponentials; ``alpha``, ``gamma``, ``of_target [R]``, the gradients of the targets. All
    fp32 and contiguous. ``rewrite`` every row, as a soft-cap, ``gamma`` and windows relative to their own
    maxima demand anyway: then there are no factors.
    """
    rows, columns = kept.shape
    row_scale = torch.empty_like(alpha)
    rewrite = rewrite or common is None or softcap is not None or gamma is not None
    _settle_kernel[(rows,)](
        kept,
        maxima,
        common,
        agreed,
        statistics,
        alpha,
        gamma,
        of_target,
        power,
        row_scale,
        rows,
        columns,
        kept.stride(0),
        float(scale),
        1.0 if softcap is None else float(softcap),
        REWRITE=rewrite,
        REACH=-1.0 if common is None else REACH,
        KEPT_SCALE=FP16_SCALE if kept.dtype == torch.float16 else 1.0,
        HAS_GAMMA=gamma is not None,
        HAS_TARGET=of_target is not None,
        HAS_POWER=power is not None,
        CAPPED=softcap is not None,
        WINDOW=window,
        BLOCK=_BLOCK,
    )
    return None if rewrite else row_scale
