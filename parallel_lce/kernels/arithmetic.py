"""Arithmetic that several kernels share: exponentials, sums that do not depend on their order, gradients of logits.

The functions run under Triton and, called from a Gluon kernel, under Gluon.

The sum of a token's exponentials has the same bits however its vocabulary is cut into windows and shards:

- A window's exponentials are ``exp(z)``, and so a function of the logit alone, unless the window's logits are far from
  0 (:func:`slope_and_reference`).
- :func:`wide_sum` adds the exponentials of a window, and fp64 the sums of windows and ranks. What they round away is
  too small to change the fp32 result, but for about one token in ten million.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice

from parallel_lce.core.partials import NEAR, ONE_LARGE_ENTRY
from parallel_lce.kernels.launch import interpreted

SAVED_FP16_SCALE = 2.0**15
"""fp16 saves exponentials in [0, 1], times this number. Down to e^-20 no precision is lost."""

# Relative error of a logit that is summed in another order.
_ROUNDINGS = tl.constexpr(2.0**-20)
_ONE_LARGE_ENTRY, _NEAR = tl.constexpr(ONE_LARGE_ENTRY), tl.constexpr(NEAR)
_FAR_BELOW = tl.constexpr(2.0**126)
# Largest logits, in units of log2, for which exp(z) and sums of it neither overflow nor lose an entry that counts.
_LOWEST_TOP, _HIGHEST_TOP = tl.constexpr(-64.0), tl.constexpr(100.0)
_HUGE = tl.constexpr(2.0**30)
_EXPONENT = tl.constexpr(0x7F800000)
INTERPRETED = tl.constexpr(interpreted())
# Lower bound of z - shift: exp(-1e4) is 0 in every dtype, and -1e4 * 0 is not NaN, as -inf * 0 would be.
LOWEST_SHIFT = tl.constexpr(-1e4)
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# ln(2) minus its fp32 number.
_LN_2_LOW = tl.constexpr(-1.9046542121259336e-09)


@triton.jit
def exponential(x):
    """exp(x). Triton's ``exp2`` is one instruction, its ``exp`` is several. A maximum is subtracted before: products of
    large numbers with log2(e) would not cancel."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def add_product(a, b, z):
    """``z + a @ b`` in fp32: fp32 operands are not rounded to tf32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        # Triton's interpreter multiplies bf16 wrongly.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, z, input_precision="ieee")


@triton.jit
def loaded(source, index, mask, factor):
    """``source[index] * factor``, 0 outside the mask. Without a ``source``, a placeholder that must not be used:
    functions of Triton 3.6 cannot return None."""
    if source is not None:
        return tl.load(source + index, mask=mask, other=0.0) * factor
    else:
        return factor


@triton.jit
def times(coefficient, factor):
    """The product; 0 where the coefficient is 0, whatever the factor: that of a token that does not count may be
    NaN."""
    return tl.where(coefficient == 0.0, 0.0, coefficient * factor)


@triton.jit
def factor_of(coefficients, stride, r, valid):
    """``factor / divisor`` of :class:`parallel_lce.core.partials.Coefficients`, of the tokens ``r``."""
    factor = tl.full(r.shape, 1.0, tl.float32)
    if coefficients.factor is not None:
        factor = tl.load(coefficients.factor + r * stride, mask=valid, other=0.0)
    if coefficients.divisor is not None:
        factor = tl.div_rn(factor, tl.load(coefficients.divisor))
    return factor


@triton.jit
def local_ids(target, row, rows, entries):
    """The targets of some tokens as 32-bit ids of this shard; -1 outside it."""
    ids = tl.load(target + row, mask=row < rows, other=-1)
    return tl.where((ids >= 0) & (ids < entries), ids, -1).to(tl.int32)


@triton.jit
def fast_log2(x):
    """log2(x) with an error of 2^-22, absolute for x in [1/2, 2], else relative; on a GPU -inf for x < 2^-126. This is
    one instruction. Triton's ``log2`` is about twenty, but the interpreter has no other."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def flattened(e, flat):
    """The numbers to save of exponentials. ``flat``: 0, and they are ``e``; or exp(-c) for a token with most logits
    near a number c, and they are ``exp(z - c) - 1``, whose rounding is relative to z - c. An exponential below 0.6
    keeps its digits in another range."""
    is_flat = flat > 0.0
    one, least = tl.where(is_flat, 1.0, 0.0), tl.where(is_flat, 0.6, -1.0)
    e *= tl.where(is_flat, flat, 1.0)
    return tl.where(e < least, e * -_FAR_BELOW - 1.0, e - one)


@triton.jit
def unflattened(saved, flat):
    """The exponentials of :func:`flattened`."""
    is_flat = flat > 0.0
    e = tl.where(saved < -0.5, (saved + 1.0) * (-1.0 / _FAR_BELOW), saved + tl.where(is_flat, 1.0, 0.0))
    return e / tl.where(is_flat, flat, 1.0)


@triton.jit
def exact_logit(logit, top, sum_exp):
    """The maximum ``top`` if ``logit`` can only belong to the largest entry (:data:`ONE_LARGE_ENTRY`), else ``logit``.

    ``logit`` and the logits in ``sum_exp`` come from different operations. They differ by at most ``2^-20 |top|``.
    For p near 1 this difference would be an error of 1 - p.
    """
    near = tl.maximum(_NEAR, tl.abs(top) * _ROUNDINGS)
    return tl.where((sum_exp < _ONE_LARGE_ENTRY) & (logit > top - near), top, logit)


@triton.jit
def gradient_of(p, below_max, values, coefficients):
    """``p (alpha + delta below_max + epsilon p) - gamma``, with ``below_max = z - M``. ``values``: alpha, gamma, delta
    and epsilon. The last three are read only if ``coefficients`` has them."""
    alpha, gamma, delta, epsilon = values
    # Summed before the product with p: the terms nearly cancel where z is near the expected logit.
    factor = alpha
    if coefficients.delta is not None:
        factor += delta * below_max
    if coefficients.epsilon is not None:
        factor += epsilon * p
    g = p * factor
    if coefficients.gamma is not None:
        g -= gamma
    return g


@triton.jit
def gradient_of_entry(logit, base, sum_exp, alpha, beta, coefficients, row, mask):
    """``p alpha - beta (1 - p)`` and the other terms of :func:`gradient_of`, for an fp32 ``logit``. gamma, delta and
    epsilon of the tokens ``row`` are loaded."""
    # A huge logit may exceed the maximum by a rounding.
    below_max = tl.minimum(logit - base, 0.0)
    p = tl.exp(below_max) / sum_exp
    values = (
        alpha,
        loaded(coefficients.gamma, row, mask, 1.0),
        loaded(coefficients.delta, row, mask, 1.0),
        loaded(coefficients.epsilon, row, mask, 1.0),
    )
    return gradient_of(p, tl.maximum(below_max, LOWEST_SHIFT), values, coefficients) + beta * (p - 1.0)


@triton.jit
def finite_base(maximum):
    """The maximum, or 0 where every logit is -inf: -inf - -inf would be NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def _fused(a, b, c):
    """``a * b + c``: on a GPU rounded once, to fp32; interpreted in fp64, whose exp2 has no error that counts. On a GPU
    exp2 itself is off by up to 2^-22 (PTX ISA, ex2.approx)."""
    if INTERPRETED:
        return a.to(tl.float64) * b + c
    else:
        return tl.fma(a, b, c)


_ROUND_TWO = tl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)


@triton.jit
def rounded_to_bf16(x):
    """``x`` as bf16 rounds it, in fp32. Two numbers at a time: one is converted by the unit of exp2, which is slow."""
    if INTERPRETED:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(_ROUND_TWO, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def slope_and_reference(maximum):
    """``(slope, reference)`` of a window's exponentials, which are ``2^(slope z - reference)``: log2(e) and 0 if the
    window's largest logit lies between -44 and 69, else the exponential of the largest logit is near 1."""
    base = finite_base(maximum)
    top = base * LOG2_E
    reference = tl.where((top >= _LOWEST_TOP) & (top < _HIGHEST_TOP), 0.0, top)
    # The rounding of a huge top would be large. Neighbours differ by 64 or more: exponentials are 0, with any slope.
    is_huge = tl.abs(top) >= _HUGE
    return tl.where(is_huge, 1.0, LOG2_E), tl.where(is_huge, base, reference)


@triton.jit
def power_from(z, slope, reference):
    """``2^(slope z - reference)``"""
    return tl.exp2(_fused(z, slope, -reference)).to(tl.float32)


@triton.jit
def largest_of(maximum):
    """A window's largest exponential, in its scale."""
    slope, reference = slope_and_reference(maximum)
    return power_from(finite_base(maximum), slope, reference)


@triton.jit
def at_max(base, slope, reference):
    """log2 of :func:`to_base`."""
    return _fused(-base, slope, reference)


@triton.jit
def to_base(maximum, base):
    """What a window's exponentials are to be multiplied by, to be relative to exp(base)."""
    slope, reference = slope_and_reference(maximum)
    return tl.exp2(at_max(base, slope, reference)).to(tl.float32)


@triton.jit
def of_saved(maximum, base, IS_FP16: tl.constexpr):
    """``(factor, unit, shift)`` of a window's saved exponentials e: ``exp(z - base) = factor e`` and
    ``z - base = unit log2(e) + shift``. In fp16 they are relative to the window's maximum."""
    if IS_FP16:
        shift = finite_base(maximum) - base
        return exponential(shift), tl.full(shift.shape, LN_2, tl.float32), shift
    else:
        slope, reference = slope_and_reference(maximum)
        unit = tl.where(slope == 1.0, 1.0, LN_2)
        shift = _fused(reference, unit, -base).to(tl.float32) + reference * tl.where(slope == 1.0, 0.0, _LN_2_LOW)
        return to_base(maximum, base), unit, shift


@triton.jit
def logit_above(e, unit, shift):
    """z - base of :func:`of_saved`; ``LOWEST_SHIFT`` where e underflowed."""
    return tl.maximum(fast_log2(e) * unit + shift, LOWEST_SHIFT)


@triton.jit
def power_of_two_above(x):
    """The least power of two above x >= 0."""
    return (x.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True) * 2.0


@triton.jit
def wide_sum(values, bound, like):
    """Sums ``[M]`` fp64 of ``values [M, N]`` over N. ``bound [M]``: at least their magnitude. ``like [M]``: has the
    layout of the result."""
    if INTERPRETED:
        # Its operations take long, and fp64 does as well.
        return tl.sum(values.to(tl.float64), 1)
    else:
        return split_sum(values, bound, like)


@triton.jit
def split_sum(values, bound, like):
    """:func:`wide_sum` without fp64 for each number.

    The columns 2 k and 2 k + 1 are added in fp32. Each of these sums is split into a multiple of a quantum and a rest.
    Sums of multiples are exact in fp32, in any order. The roundings of the rests' sum are about 2^-42 of the bound
    (Rump, Ogita and Oishi 2008, "Accurate floating-point summation", section 3).
    """
    M: tl.constexpr = values.shape[0]
    PAIRS: tl.constexpr = values.shape[1] // 2
    # A thread has the columns 8 k + 2 i and 8 k + 2 i + 1 of a tensor core's accumulator, for one i below 4.
    LANES: tl.constexpr = 4
    NUMBER: tl.constexpr = PAIRS // LANES
    pairs = tl.sum(tl.reshape(values, (M, PAIRS, 2)), 2)
    pairs = tl.reshape(pairs, (M, NUMBER, LANES))
    # 1.5 n 2^e for n sums of at most 2^e: adding it rounds to a multiple of n 2^(e - 23).
    large = power_of_two_above(bound) * (1.5 * NUMBER)
    if hasattr(like.type, "layout"):
        large = gl.convert_layout(large, gl.SliceLayout(1, gl.SliceLayout(2, pairs.type.layout)))
    multiples = (pairs + large[:, None, None]) - large[:, None, None]
    total = tl.sum(multiples, 1).to(tl.float64) + tl.sum(pairs - multiples, 1).to(tl.float64)
    total = tl.sum(total, 1)
    if hasattr(like.type, "layout"):
        total = gl.convert_layout(total, like.type.layout)
    return total
