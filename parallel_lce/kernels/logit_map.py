"""The logits of products, and the derivative: :class:`parallel_lce.core.logit_map.LogitMap` in kernels.

``cap`` is a value of a product's token, :func:`caps_of`; without a soft-cap a placeholder. The functions run under
Triton and, called from a Gluon kernel, under Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from parallel_lce.kernels.arithmetic import INTERPRETED, LOG2_E, loaded

# |u / cap| below which three digits of tanh need no exponential.
_TINY = tl.constexpr(0.03)
# |u / cap| below which the soft-cap is a polynomial.
_SERIES_END = tl.constexpr(0.625)


@triton.jit
def scales_of(logit_map, r, inside):
    """``scale * token_scale`` of the tokens ``r``: one number, or a tensor of ``r``'s shape."""
    return loaded(logit_map.token_scale, r, inside, logit_map.scale)


@triton.jit
def caps_of(logit_map, r, inside):
    """The caps of the tokens ``r``: one number, or a tensor of ``r``'s shape. 1 without a soft-cap."""
    if logit_map.token_softcap is not None:
        return tl.load(logit_map.token_softcap + r, mask=inside, other=1.0)
    elif logit_map.softcap is not None:
        return logit_map.softcap
    else:
        return 1.0


@triton.jit
def entry_logits(u, bias, entry, hit, logit_map, r, inside):
    """The logits of the products ``u`` of the tokens ``r`` with the entries ``entry``, whose shapes are broadcast."""
    if bias is not None:
        u += tl.load(bias + entry, mask=hit, other=0.0).to(tl.float32)
    u = scaled(u, logit_map.scale)
    if logit_map.token_scale is not None:
        u = scaled(u, tl.load(logit_map.token_scale + r, mask=inside, other=0.0))
    if logit_map.softcap is not None:
        u = softcapped(u, caps_of(logit_map, r, inside))
    return u


@triton.jit
def slope_of(z, logit_map, r, inside):
    """The soft-cap's derivative where it returns ``z``; 1 without a soft-cap. ``r``: as for :func:`entry_logits`."""
    if logit_map.softcap is not None:
        return slope_at(z, caps_of(logit_map, r, inside))
    else:
        return 1.0


@triton.jit
def scaled(z, factor):
    """``z * factor``, rounded. Compilers would fuse a plain product with the subtraction of the maximum, and skip this
    rounding. The largest logit minus the maximum would not be 0. For huge logits, its exponential might be infinite."""
    return tl.fma(z, factor, 0.0)


@triton.jit
def _quotient(a, b):
    """a / b for b in [1, 2], with an error of 2 ulp. On a GPU these are two instructions, where Triton's division, for
    any b, is eight."""
    if INTERPRETED:
        return a / b
    else:
        return libdevice.fast_dividef(a, b)


@triton.jit
def softcapped(u, cap):
    """``cap * tanh(u / cap)`` with an error of a few ulp, for every cap.

    Large |u / cap| use the exponential of a negative number. Below :data:`_SERIES_END`, where ``1 - e`` would cancel,
    an odd polynomial of degree 11 is used: the minimax polynomial (Remez), of relative error 4.4e-9.
    """
    ratio = u * (1.0 / cap)
    # exponential(-2 |ratio|), with one product less.
    e = tl.exp2(tl.abs(ratio) * (-2.0 * LOG2_E))
    magnitude = cap * _quotient(1.0 - e, 1.0 + e)
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
def recapped(u, cap):
    """:func:`softcapped` of saved numbers ``u``, which fp16 has rounded, and the derivative there. Both are as exact as
    the numbers are: near 0, and where the soft-cap saturates and its derivative is small."""
    ratio = tl.abs(u) * (1.0 / cap)
    e = tl.exp2(ratio * (-2.0 * LOG2_E))
    inverse = _quotient(1.0, 1.0 + e)
    # tanh(r) = r - r^3 / 3 + ..., where 1 - e would cancel.
    y = tl.where(ratio < _TINY, ratio - ratio * ratio * ratio * (1.0 / 3.0), (1.0 - e) * inverse)
    return tl.where(u < 0.0, -y, y) * cap, 4.0 * e * inverse * inverse


@triton.jit
def slope_at(z, cap):
    """The derivative of :func:`softcapped` where it is ``z``."""
    ratio = z * (1.0 / cap)
    return 1.0 - ratio * ratio
