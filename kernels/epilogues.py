"""What becomes of a tile of logits while it is in registers: shared by the mainloops.

A tile is ``z [BLOCK_M tokens, BLOCK_N vocabulary rows]`` in fp32; ``r`` and ``c`` are its row and
column numbers. Its columns are a *window* of the vocabulary. The functions run under Triton and,
called from a Gluon kernel, under Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl

REACH = 32.0
"""How far a window's maximum may lie from the common reference: e^32 and e^-32 leave bf16, whose
exponents are those of fp32, ample room on both sides."""

FP16_SCALE = 2.0**15
"""fp16 keeps exp(z - maximum) in [0, 1] times this, so that it loses nothing down to e^-20."""

_INT_MAX = tl.constexpr(2**31 - 1)
# exp(-1e4) is 0 in every dtype, and -1e4 * 0 is no NaN as -inf * 0 would be.
LOWEST_SHIFT = tl.constexpr(-1e4)


_LOG2_E = tl.constexpr(1.4426950408889634)
# |u / cap| up to which a soft-cap is computed by its series.
_SERIES_END = tl.constexpr(0.625)


@triton.jit
def exponential(x):
    """exp(x), by the one instruction that Triton's ``exp2`` is and its ``exp`` is not."""
    return tl.exp2(x * _LOG2_E)


@triton.jit
def exponential_from(z, reference):
    """exp(z - reference) in one multiply-add and one instruction more, relative to a reference that
    is rounded in base 2. :func:`rebased` knows the rounding, so nothing is lost at large |z|."""
    return tl.exp2(tl.fma(z, _LOG2_E, -(reference * _LOG2_E)))


@triton.jit
def rebased(reference, base):
    """What turns :func:`exponential_from` of ``reference`` into exp(z - base)."""
    return tl.exp2(tl.fma(-base, _LOG2_E, reference * _LOG2_E))


@triton.jit
def softcapped(u, cap):
    """``cap * tanh(u / cap)``, to a few roundings of the result whatever the cap is.

    From :data:`_SERIES_END` on by exponentials of negative numbers alone. Below, where ``1 - e`` would cancel,
    by the odd polynomial of degree 11 whose largest relative error, 4.4e-9, is the least (Remez).
    """
    ratio = u / cap
    e = exponential(-2.0 * tl.abs(ratio))
    magnitude = cap * ((1.0 - e) / (1.0 + e))
    far = tl.where(ratio < 0.0, -magnitude, magnitude)
    square = ratio * ratio
    series = -0.005704986993455203
    series = series * square + 0.020639087244729175
    series = series * square - 0.05373971508582496
    series = series * square + 0.13331442198175808
    series = series * square - 0.3333328194201277
    near = u + u * (series * square)
    return tl.where(tl.abs(ratio) < _SERIES_END, near, far)


@triton.jit
def finite_base(maximum):
    """The maximum, or 0 for a token of -inf alone, since -inf - -inf is NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def window_reference(maximum, common, REACH: tl.constexpr):
    """What a window's kept exponentials are relative to; its maximum where ``REACH`` is negative."""
    within = (tl.abs(maximum - common) <= REACH) | ((maximum == -float("inf")) & (REACH >= 0))
    return tl.where(within, common, finite_base(maximum))


@triton.jit
def finished_logits(
    z, c, bias, columns, scale, cap, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr
):
    """``softcap(scale * (z + bias))``."""
    if HAS_BIAS:
        z += tl.load(bias + c, mask=c < columns, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        z *= scale
    if CAPPED:
        z = softcapped(z, cap)
    return z


@triton.jit
def partials_rows(r, rows, common, REACH: tl.constexpr):
    """The common reference of the tile's rows, loaded before the mainloop so that it has arrived
    after it."""
    known = r.to(tl.float32)
    if REACH >= 0:
        known = tl.load(common + r, mask=r < rows, other=0.0)
    return known


@triton.jit
def partials_epilogue(
    z,
    r,
    c,
    window,
    windows,
    rows,
    columns,
    known,
    maxima,
    sums,
    REACH: tl.constexpr,
    KEPT_SCALE: tl.constexpr,
    SHIFTED: tl.constexpr,
    TOTAL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ARGMAX: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store the tile's partials; returns ``exp(z - reference)`` times ``KEPT_SCALE``, to be kept.

    ``known`` from :func:`partials_rows`. ``maxima [windows, rows]`` and ``sums [*, windows, rows]``:
    sum_exp, relative as :func:`exponential_from` is, then those asked for.
    """
    valid = r < rows
    inside = (c < columns)[None, :]
    here = window.to(tl.int64) * rows + r
    step = windows.to(tl.int64) * rows
    if TOTAL:
        total = tl.sum(tl.where(inside, z, 0.0), 1)
        tl.store(sums + (1 + SHIFTED) * step + here, total, mask=valid)
    if MASKED:
        z = tl.where(inside, z, -float("inf"))
    top = tl.max(z, 1)
    base = finite_base(top)
    tl.store(maxima + here, top, mask=valid)
    if ARGMAX:
        index = tl.min(tl.where(z == top[:, None], c[None, :], _INT_MAX), 1)
        place = sums + (1 + SHIFTED + TOTAL + WEIGHTED) * step + here
        tl.store(place, index.to(tl.float32, bitcast=True), mask=valid)
    if SHIFTED:
        moved = tl.where(inside, z - base[:, None], 0.0)
        tl.store(sums + step + here, tl.sum(moved, 1), mask=valid)
    reference = base
    if REACH >= 0:
        reference = window_reference(top, known, REACH)
    # tl.max drops NaN; it comes back here, through its exponential.
    e = exponential_from(z, reference[:, None])
    tl.store(sums + here, tl.sum(e, 1), mask=valid)
    if WEIGHTED:
        ez = tl.sum(e * tl.maximum(z - base[:, None], LOWEST_SHIFT), 1)
        tl.store(sums + (1 + SHIFTED + TOTAL) * step + here, ez, mask=valid)
    return e * KEPT_SCALE


@triton.jit
def gradient_rows(
    r,
    rows,
    statistics,
    alpha,
    gamma,
    delta,
    power,
    scale,
    HAS_GAMMA: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_POWER: tl.constexpr,
):
    """What :func:`gradient_epilogue` needs of the tile's rows, loaded before the mainloop so that it
    has arrived after it: the base of the exponentials, and alpha / s, delta / s and gamma times
    scale and ``power``."""
    valid = r < rows
    base = finite_base(tl.load(statistics + r, mask=valid, other=0.0))
    factor = scale
    if HAS_POWER:
        factor *= tl.load(power)
    per_sum = factor / tl.load(statistics + rows + r, mask=valid, other=1.0)
    level = tl.load(alpha + r, mask=valid, other=0.0) * per_sum
    level *= rebased(base, base)
    slope = level
    if HAS_DELTA:
        slope = tl.load(delta + r, mask=valid, other=0.0) * per_sum * rebased(base, base)
    uniform = level
    if HAS_GAMMA:
        uniform = tl.load(gamma + r, mask=valid, other=0.0) * factor
    return base, level, slope, uniform


@triton.jit
def gradient_epilogue(
    z, base, level, slope, uniform, cap, HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, CAPPED: tl.constexpr
):
    """``p (alpha + delta (z - M)) - gamma`` times the slope of scale and soft-cap, and ``power``."""
    g = exponential_from(z, base[:, None])
    if HAS_DELTA:
        g *= level[:, None] + slope[:, None] * tl.maximum(z - base[:, None], LOWEST_SHIFT)
    else:
        g *= level[:, None]
    if HAS_GAMMA:
        g -= uniform[:, None]
    if CAPPED:
        g *= 1.0 - (z / cap) * (z / cap)
    return g
