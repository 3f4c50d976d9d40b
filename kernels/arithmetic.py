"""Exponentials relative to a shift, and the soft-cap, as the kernels compute them.

A softmax shift is what a token's exponentials are relative to: ``exp(z - shift)``. The functions run under
Triton and, called from a Gluon kernel, under Gluon.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

REACH = 32.0
"""How far, in nats, a window's maximum may lie from the token's softmax shift. bf16 has fp32's exponent range:
exp(32) and exp(-32) are far from its limits."""

SAVED_FP16_SCALE = 2.0**15
"""fp16 saves exp(z - maximum), which is in [0, 1], times this: nothing is lost down to e^-20."""

_REACH = tl.constexpr(REACH)
# exp(-1e4) is 0 in every dtype, and -1e4 * 0 is not NaN as -inf * 0 would be.
LOWEST_SHIFT = tl.constexpr(-1e4)
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# |u / cap| up to which a soft-cap is computed by its series.
_SERIES_END = tl.constexpr(0.625)


@triton.jit
def exponential(x):
    """exp(x). Triton's ``exp2`` is one instruction, its ``exp`` is several."""
    return tl.exp2(x * _LOG2_E)


@triton.jit
def exponential_from(z, shift):
    """exp(z - shift) by one multiply-add and one ``exp2``.

    ``shift * log2(e)`` is rounded. :func:`rebased` rounds it in the same way, and in the product of the two the
    errors cancel.
    """
    return tl.exp2(tl.fma(z, _LOG2_E, -(shift * _LOG2_E)))


@triton.jit
def rebased(shift, base):
    """The factor that turns ``exponential_from(z, shift)`` into exp(z - base)."""
    return tl.exp2(_bits_between(shift, base))


@triton.jit
def _bits_between(shift, base):
    """(shift - base) * log2(e), ``shift * log2(e)`` being rounded as in :func:`exponential_from`."""
    return tl.fma(-base, _LOG2_E, shift * _LOG2_E)


@triton.jit
def logit_above(e, shift, base):
    """z - base, from ``e = exponential_from(z, shift)``; ``LOWEST_SHIFT`` where e underflowed."""
    return tl.maximum((tl.log2(e) + _bits_between(shift, base)) * _LN_2, LOWEST_SHIFT)


@triton.jit
def softcapped(u, cap):
    """``cap * tanh(u / cap)`` with an error of a few ulp, for every cap.

    Large |u / cap| take exponentials of negative numbers. Below :data:`_SERIES_END`, where ``1 - e`` would
    cancel, an odd polynomial of degree 11 is used: the minimax one (Remez), of relative error 4.4e-9.
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


class Cap(NamedTuple):
    """A soft-cap as the kernels take it: one number, or of each token."""

    number: float | None
    # [R] fp32
    of_token: torch.Tensor | None

    @classmethod
    def of(cls, softcap: float | torch.Tensor | None) -> Cap | None:
        if isinstance(softcap, torch.Tensor):
            return cls(None, softcap)
        return None if softcap is None else cls(float(softcap), None)


@triton.jit
def caps_of(cap, r, inside):
    """The caps of the tokens ``r``: one number, or a tensor of ``r``'s shape."""
    if cap.of_token is not None:
        return tl.load(cap.of_token + r, mask=inside, other=1.0)
    else:
        return cap.number


@triton.jit
def finite_base(maximum):
    """The maximum, or 0 where every logit is -inf: -inf - -inf would be NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def window_shift(maximum, softmax_shift):
    """What a window's exponentials are relative to: the token's softmax shift if the window's maximum lies
    within ``REACH`` of it, else the maximum."""
    within = (tl.abs(maximum - softmax_shift) <= _REACH) | (maximum == -float("inf"))
    return tl.where(within, softmax_shift, finite_base(maximum))
