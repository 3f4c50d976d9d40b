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


@triton.jit
def exponential(x):
    """exp(x), by the one instruction that Triton's ``exp2`` is and its ``exp`` is not."""
    return tl.exp2(x * _LOG2_E)


@triton.jit
def softcapped(u, cap):
    """cap * tanh(u / cap), by exponentials of negative numbers alone."""
    ratio = u / cap
    e = exponential(-2.0 * tl.abs(ratio))
    magnitude = cap * ((1.0 - e) / (1.0 + e))
    return tl.where(ratio < 0.0, -magnitude, magnitude)


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
def position(tile, row_blocks, windows, GROUP: tl.constexpr):
    """Row block and window of a tile: groups of row blocks walk the windows together, so that both
    operands are met in the L2 cache."""
    per_group = GROUP * windows
    group = tile // per_group
    size = min(row_blocks - group * GROUP, GROUP)
    inside = tile - group * per_group
    return group * GROUP + inside % size, inside // size


@triton.jit
def finished_logits(
    z, c, bias, columns, scale, cap,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """``softcap(scale * (z + bias))``."""
    if HAS_BIAS:
        z += tl.load(bias + c, mask=c < columns, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        z *= scale
    if CAPPED:
        z = softcapped(z, cap)
    return z


@triton.jit
def partials_rows(
    r, rows, columns, target, common, HAS_TARGET: tl.constexpr, REACH: tl.constexpr
):  # fmt: skip
    """What :func:`partials_epilogue` needs of the tile's rows, loaded before the mainloop so that it
    has arrived after it: the target's column, -1 if it is none, and the common reference."""
    wanted = r * 0 - 1
    known = wanted.to(tl.float32)
    if HAS_TARGET:
        wanted = target_columns(r, rows, columns, target)
    if REACH >= 0:
        known = tl.load(common + r, mask=r < rows, other=0.0)
    return wanted, known


@triton.jit
def target_columns(r, rows, columns, target):
    wanted = tl.load(target + r, mask=r < rows, other=-1)
    # A target of the next shard may equal a column of the mask.
    return tl.where((wanted >= 0) & (wanted < columns), wanted, -1).to(tl.int32)


@triton.jit
def any_target(wanted, first, BLOCK_N: tl.constexpr):
    """Whether the window that begins at column ``first`` holds a target of the tile's rows."""
    return tl.max(((wanted >= first) & (wanted < first + BLOCK_N)).to(tl.int32), 0) > 0


@triton.jit
def partials_epilogue(
    z, r, c, window, windows, rows, columns, wanted, known, holds_target, maxima, sums, target_logit,
    REACH: tl.constexpr, KEPT_SCALE: tl.constexpr, HAS_TARGET: tl.constexpr, SHIFTED: tl.constexpr,
    TOTAL: tl.constexpr, WEIGHTED: tl.constexpr, ARGMAX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the tile's partials; returns ``exp(z - reference)`` times ``KEPT_SCALE``, to be kept.

    ``wanted`` and ``known`` from :func:`partials_rows`, ``holds_target`` from :func:`any_target`.
    ``maxima [windows, rows]``, ``sums [*, windows, rows]`` (sum_exp, then those asked for) and, for
    tokens whose target the tile holds, ``target_logit [rows]``.
    """
    valid = r < rows
    inside = (c < columns)[None, :]
    here = window.to(tl.int64) * rows + r
    step = windows.to(tl.int64) * rows
    if HAS_TARGET:
        # Most windows hold no token's target.
        if holds_target:
            first = window * z.shape[1]
            found = tl.where(c[None, :] == wanted[:, None], z, 0.0)
            hit = (wanted >= first) & (wanted < first + z.shape[1])
            tl.store(target_logit + r, tl.sum(found, 1), mask=valid & hit)
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
    e = exponential(z - reference[:, None])
    tl.store(sums + here, tl.sum(e, 1), mask=valid)
    if WEIGHTED:
        ez = tl.sum(e * tl.maximum(z - base[:, None], LOWEST_SHIFT), 1)
        tl.store(sums + (1 + SHIFTED + TOTAL) * step + here, ez, mask=valid)
    return e * KEPT_SCALE


@triton.jit
def gradient_rows(
    r, rows, statistics, alpha, gamma, delta, power, scale,
    HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_POWER: tl.constexpr,
):  # fmt: skip
    """What :func:`gradient_epilogue` needs of the tile's rows, loaded before the mainloop: the base
    of the exponentials, and alpha / s, delta / s and gamma times scale and ``power``."""
    valid = r < rows
    base = finite_base(tl.load(statistics + r, mask=valid, other=0.0))
    factor = scale
    if HAS_POWER:
        factor *= tl.load(power)
    per_sum = factor / tl.load(statistics + rows + r, mask=valid, other=1.0)
    level = tl.load(alpha + r, mask=valid, other=0.0) * per_sum
    slope = level
    if HAS_DELTA:
        slope = tl.load(delta + r, mask=valid, other=0.0) * per_sum
    uniform = level
    if HAS_GAMMA:
        uniform = tl.load(gamma + r, mask=valid, other=0.0) * factor
    return base, level, slope, uniform


@triton.jit
def gradient_epilogue(
    z, base, level, slope, uniform, cap,
    HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """``p (alpha + delta (z - M)) - gamma`` times the slope of scale and soft-cap, and ``power``."""
    shifted = z - base[:, None]
    g = exponential(shifted)
    if HAS_DELTA:
        g *= level[:, None] + slope[:, None] * tl.maximum(shifted, LOWEST_SHIFT)
    else:
        g *= level[:, None]
    if HAS_GAMMA:
        g -= uniform[:, None]
    if CAPPED:
        g *= 1.0 - (z / cap) * (z / cap)
    return g
