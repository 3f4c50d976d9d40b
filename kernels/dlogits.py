"""Kept exponentials become gradients of the logits, in place, touching no more than they must.

A product with the gradients needs ``p_ij alpha_i - beta_i [j = y_i] - gamma_i``, and what was kept is
``e_ij = exp(z_ij - r_i)``. With ``c_i = alpha_i exp(r_i - M_i) / s_i`` the former is ``c_i e_ij`` but for
the target's entry, so one entry per token is written, divided by ``c_i``, and ``c_i`` is left to the
products: on the rows of the result of ``G @ weight``, on those of ``x`` in ``G.T @ x``. The target's
entry is formed in fp32 from its own logit, so nothing cancels in bf16 where p is nearly 1.

Only tokens for which this does not do are rewritten whole, and have ``c_i = 1``: those whose windows
were kept relative to different references, or whose ``c_i`` or target's entry would leave bf16, and
all of them where a soft-cap or ``gamma`` acts on every entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.epilogues import (
    FP16_SCALE,
    LOWEST_SHIFT,
    REACH,
    finite_base,
    rebased,
    window_reference,
)

# A target's entry may be this many times larger than its row's coefficient.
_LARGEST_RATIO = tl.constexpr(2.0**20)
_LEAST_COEFFICIENT = tl.constexpr(2.0**-60)
_BLOCK = 4096
_ROWS = 128


@triton.jit
def _target_gradient(
    row, valid, statistics, alpha, beta, gamma, delta, rows, factor, cap,
    HAS_BETA: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Base of the exponentials, alpha / s, gamma, and the gradient of the target's logit."""
    base = finite_base(tl.load(statistics + row, mask=valid, other=0.0))
    per_sum = factor / tl.load(statistics + rows + row, mask=valid, other=1.0)
    logit = tl.load(statistics + 2 * rows + row, mask=valid, other=0.0)
    level = tl.load(alpha + row, mask=valid, other=0.0) * per_sum
    shifted = logit - base
    g = level
    if HAS_DELTA:
        slope = tl.load(delta + row, mask=valid, other=0.0) * per_sum
        g += slope * tl.maximum(shifted, LOWEST_SHIFT)
    g *= tl.exp(shifted)
    uniform = base * 0.0
    if HAS_GAMMA:
        uniform = tl.load(gamma + row, mask=valid, other=0.0) * factor
        g -= uniform
    if HAS_BETA:
        g -= tl.load(beta + row, mask=valid, other=0.0) * factor
    if CAPPED:
        g *= 1.0 - (logit / cap) * (logit / cap)
    return base, level, uniform, g


@triton.jit(do_not_specialize=["rows"])
def _settle_kernel(
    kept, maxima, common, agreed, target, statistics, alpha, beta, gamma, power, row_scale,
    rows, columns, stride, scale, cap,
    REWRITE: tl.constexpr, REACH: tl.constexpr, KEPT_SCALE: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_POWER: tl.constexpr, CAPPED: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    here = kept + row.to(tl.int64) * stride
    factor = scale
    if HAS_POWER:
        factor *= tl.load(power)
    base, level, uniform, at_target = _target_gradient(
        row, True, statistics, alpha, beta, gamma, alpha, rows, factor, cap,
        HAS_BETA, HAS_GAMMA, False, CAPPED,
    )  # fmt: skip
    wanted = tl.load(target + row) if HAS_BETA else -1
    hit = (wanted >= 0) & (wanted < columns)
    own = base
    as_it_is = False
    if REACH >= 0:
        own = tl.load(common + row)
    if not REWRITE:
        # All comparisons are false for NaN.
        bounded = (tl.abs(at_target) <= tl.abs(level) * _LARGEST_RATIO) | (hit == 0)
        as_it_is = (tl.load(agreed + row) != 0) & (tl.abs(base - own) <= REACH) & bounded
    coefficient = level * rebased(own, base)
    if not REWRITE:
        # Below, c x would lose digits in bf16 that dlogits do not.
        as_it_is &= (tl.abs(coefficient) >= _LEAST_COEFFICIENT) | (coefficient == 0.0)
    if as_it_is:
        tl.store(row_scale + row, coefficient)
        if hit:
            entry = tl.where(coefficient == 0.0, 0.0, at_target / coefficient)
            tl.store(here + wanted, entry.to(kept.dtype.element_ty))
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
            if HAS_BETA:
                g = tl.where(c == wanted, at_target, g)
            tl.store(here + c, g.to(kept.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _target_kernel(
    gradient, target, statistics, alpha, beta, gamma, delta, power,
    rows, columns, stride, scale, cap,
    HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_POWER: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    factor = scale
    if HAS_POWER:
        factor *= tl.load(power)
    _, _, _, g = _target_gradient(
        row, valid, statistics, alpha, beta, gamma, delta, rows, factor, cap,
        True, HAS_GAMMA, HAS_DELTA, CAPPED,
    )  # fmt: skip
    wanted = tl.load(target + row, mask=valid, other=-1)
    hit = (wanted >= 0) & (wanted < columns)
    place = gradient + row.to(tl.int64) * stride + wanted
    tl.store(place, g.to(gradient.dtype.element_ty), mask=hit)


def settle(
    kept: torch.Tensor,
    maxima: torch.Tensor,
    common: torch.Tensor | None,
    agreed: torch.Tensor | None,
    window: int,
    target: torch.Tensor | None,
    statistics: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor | None,
    gamma: torch.Tensor | None,
    power: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    rewrite: bool,
) -> torch.Tensor | None:
    """Make ``kept [R, C]`` the gradient of the logits, each row over the factor ``[R]`` returned, if any.

    ``maxima [>= C / window, R]`` of the windows, ``common [R]`` and ``agreed [R]`` of
    ``partials.merge_windows``; None where each window is relative to its maximum. ``target [R]`` int64, relative to the first
    column; ``statistics [>= 3, R]`` the merged partial; ``alpha``, ``beta``, ``gamma [R]``. All fp32
    and contiguous. ``rewrite`` every row, as a soft-cap, ``gamma`` and windows relative to their own
    maxima demand anyway: then there are no factors.
    """
    rows, columns = kept.shape
    row_scale = torch.empty_like(alpha)
    rewrite = rewrite or common is None or softcap is not None or gamma is not None
    if beta is None or target is None:
        target = beta = None
    _settle_kernel[(rows,)](
        kept,
        maxima,
        common,
        agreed,
        target,
        statistics,
        alpha,
        beta,
        gamma,
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
        HAS_BETA=beta is not None,
        HAS_GAMMA=gamma is not None,
        HAS_POWER=power is not None,
        CAPPED=softcap is not None,
        WINDOW=window,
        BLOCK=_BLOCK,
    )
    return None if rewrite else row_scale


def write_targets(
    gradient: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    gamma: torch.Tensor | None,
    delta: torch.Tensor | None,
    power: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> None:
    """Overwrite the targets' entries of ``gradient [R, C]``, each from the target's own logit in fp32.

    Arguments as in :func:`settle`, and ``delta [R]``.
    """
    rows, columns = gradient.shape
    _target_kernel[(triton.cdiv(rows, _ROWS),)](
        gradient,
        target,
        statistics,
        alpha,
        beta,
        gamma,
        delta,
        power,
        rows,
        columns,
        gradient.stride(0),
        float(scale),
        1.0 if softcap is None else float(softcap),
        HAS_GAMMA=gamma is not None,
        HAS_DELTA=delta is not None,
        HAS_POWER=power is not None,
        CAPPED=softcap is not None,
        BLOCK=_ROWS,
    )


@triton.jit
def _scale_kernel(source, factor, result, columns, source_stride, result_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + row * source_stride + c, mask=c < columns, other=0.0).to(tl.float32)
    value *= tl.load(factor + row)
    tl.store(result + row * result_stride + c, value.to(result.dtype.element_ty), mask=c < columns)


def scale_rows(source: torch.Tensor, factor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result [R, C] = source [R, C] * factor [R]``, rounded once; ``result`` may be ``source``."""
    rows, columns = source.shape
    block = min(triton.next_power_of_2(columns), _BLOCK)
    _scale_kernel[(rows, triton.cdiv(columns, block))](
        source, factor, result, columns, source.stride(0), result.stride(0), BLOCK=block
    )
    return result
