"""Arithmetic that several kernels share: exponentials, and gradients of logits.

The softmax shift is subtracted from a token's logits before exp: ``exp(z - shift)``. The functions run under Triton
and, called from a Gluon kernel, under Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from parallel_lce.core.partials import ALONE, NEAR
from parallel_lce.kernels.device import interpreted

REACH = 32.0
"""Largest distance, in nats, of a window's maximum from the token's softmax shift. bf16 has fp32's exponent range:
exp(32) and exp(-32) are far from overflow and underflow."""

SAVED_FP16_SCALE = 2.0**15
"""fp16 saves exp(z - maximum), which is in [0, 1], times this number. Down to e^-20 no precision is lost."""

# Relative error of a logit that is summed in another order.
_ROUNDINGS = tl.constexpr(2.0**-20)
_ALONE, _NEAR = tl.constexpr(ALONE), tl.constexpr(NEAR)
_REACH, _FAR_BELOW = tl.constexpr(REACH), tl.constexpr(2.0**126)
INTERPRETED = tl.constexpr(interpreted())
# Lower bound of z - shift: exp(-1e4) is 0 in every dtype, and -1e4 * 0 is not NaN, as -inf * 0 would be.
LOWEST_SHIFT = tl.constexpr(-1e4)
LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def exponential(x):
    """exp(x). Triton's ``exp2`` is one instruction, its ``exp`` is several."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def exponential_from(z, shift):
    """exp(z - shift). The subtraction comes first: products of large numbers with log2(e) would not cancel."""
    return exponential(z - shift)


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
def _log2(x):
    """log2(x) with an error of 2^-22, absolute for x in [1/2, 2], else relative; on a GPU -inf for x < 2^-126. This is
    one instruction. Triton's ``log2`` is about twenty, but the interpreter has no other."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def logit_above(e, shift, base):
    """z - base, from ``e = exp(z - shift)``; ``LOWEST_SHIFT`` where e underflowed."""
    return tl.maximum(_log2(e) * _LN_2 + (shift - base), LOWEST_SHIFT)


@triton.jit
def flattened(e, flat):
    """The numbers to save of exponentials relative to the softmax shift. ``flat``: 0, and they are ``e``; or exp(shift)
    of a token with most logits near 0, and they are ``exp(z) - 1``, whose rounding is relative to z. An exp(z) below
    0.6 keeps its digits in another range."""
    is_flat = flat > 0.0
    e *= tl.where(is_flat, flat, 1.0)
    one, least = tl.where(is_flat, 1.0, 0.0), tl.where(is_flat, 0.6, -1.0)
    return tl.where(e < least, e * -_FAR_BELOW - 1.0, e - one)


@triton.jit
def unflattened(saved, flat):
    """The exponentials of :func:`flattened`, of a flat token relative to 0 instead of the softmax shift."""
    return tl.where(saved < -0.5, (saved + 1.0) * (-1.0 / _FAR_BELOW), saved + tl.where(flat > 0.0, 1.0, 0.0))


@triton.jit
def exact_logit(logit, top, sum_exp, ROUNDINGS: tl.constexpr = _ROUNDINGS):
    """The maximum ``top`` if ``logit`` can only belong to the largest entry (:data:`ALONE`), else ``logit``.

    ``logit`` and the logits in ``sum_exp`` come from different operations. They differ by at most ``ROUNDINGS |top|``.
    For p near 1 this difference would be an error of 1 - p.
    """
    near = tl.maximum(_NEAR, tl.abs(top) * ROUNDINGS)
    return tl.where((sum_exp < _ALONE) & (logit > top - near), top, logit)


@triton.jit
def gradient_of(p, moved, values, coefficients):
    """``p (alpha + delta moved + epsilon p) - gamma``, with ``moved = z - M``. ``values``: alpha, gamma, delta and
    epsilon. The last three are read only if ``coefficients`` has them."""
    alpha, gamma, delta, epsilon = values
    # Summed before the product with p: the terms nearly cancel where z is near the expected logit.
    factor = alpha
    if coefficients.delta is not None:
        factor += delta * moved
    if coefficients.epsilon is not None:
        factor += epsilon * p
    g = p * factor
    if coefficients.gamma is not None:
        g -= gamma
    return g


@triton.jit
def gradient_of_entry(logit, base, sum_exp, alpha, coefficients, row, mask, upstream):
    """:func:`gradient_of` for an fp32 ``logit``. gamma, delta and epsilon of the tokens ``row`` are loaded and
    multiplied by ``upstream``; ``alpha`` already is."""
    # A huge logit may exceed the maximum by a rounding.
    moved = tl.minimum(logit - base, 0.0)
    values = (
        alpha,
        loaded(coefficients.gamma, row, mask, upstream),
        loaded(coefficients.delta, row, mask, upstream),
        loaded(coefficients.epsilon, row, mask, upstream),
    )
    return gradient_of(tl.exp(moved) / sum_exp, tl.maximum(moved, LOWEST_SHIFT), values, coefficients)


@triton.jit
def finite_base(maximum):
    """The maximum, or 0 where every logit is -inf: -inf - -inf would be NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def window_shift(maximum, softmax_shift):
    """The number subtracted from a window's logits before exp: the token's softmax shift if the window's maximum lies
    within ``REACH`` of it, else the maximum."""
    within = (tl.abs(maximum - softmax_shift) <= _REACH) | (maximum == -float("inf"))
    return tl.where(within, softmax_shift, finite_base(maximum))
