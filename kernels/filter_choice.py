"""The choice of a filter by its estimated errors (:mod:`parallel_lce.kernels.filter_estimates`).

The errors of dX are known of some tokens each. Few tokens may have most of the error, so the norm of all is taken
larger by twice the standard error of the sum of squares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.filter_estimates import LEVELS, LevelProducts, filter_of
from parallel_lce.kernels.relaunch import Relaunched

_LEVELS = tl.constexpr(LEVELS)
# Columns of the norms, of which those of the levels and of G are written.
_SLOTS = tl.constexpr(16)
# Norms, and tiles, that are looked at at a time.
_SUMMED = 64
# Norms below and above which fp32 does not hold their squares, and those of small parts.
_SMALLEST, _LARGEST = tl.constexpr(2.0**-50), tl.constexpr(2.0**60)


@triton.jit
def _upper_norms(norms, count, BLOCK: tl.constexpr):
    """``[16]``: the norms of all tokens, those of the levels increased."""
    slot = tl.arange(0, _SLOTS)
    top = 0.0
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(norms + i * _SLOTS + _LEVELS, mask=i < count, other=0.0)
        top = tl.maximum(top, tl.max(value, 0))
    # In units of G's largest norm, fp32 holds squares of the sums.
    unit = tl.where((top > 0.0) & (top < float("inf")), top, 1.0)
    squares = tl.zeros((_SLOTS,), tl.float32)
    for start in range(0, count, BLOCK):
        squares += tl.sum(_squares(norms, start, count, unit, BLOCK), 0)
    mean, deviations = squares / count, tl.zeros((_SLOTS,), tl.float32)
    for start in range(0, count, BLOCK):
        valid = (start + tl.arange(0, BLOCK) < count)[:, None]
        off = tl.where(valid, _squares(norms, start, count, unit, BLOCK) - mean[None, :], 0.0)
        deviations += tl.sum(off * off, 0)
    # The variance of the sum of n squares is n times that of one.
    error = tl.sqrt(deviations * count / tl.maximum(count - 1, 1))
    return unit * tl.sqrt(squares + tl.where(slot < _LEVELS, 2.0 * error, 0.0))


@triton.jit
def _squares(norms, start, count, unit, BLOCK: tl.constexpr):
    i, slot = start + tl.arange(0, BLOCK), tl.arange(0, _SLOTS)
    inside = (i < count)[:, None] & (slot <= _LEVELS)[None, :]
    value = tl.load(norms + i[:, None] * _SLOTS + slot[None, :], mask=inside, other=0.0) / unit
    return value * value


@triton.jit
def _allowed(norms, added, errors, limit):
    """Which levels a product allows, and the squares of the errors that they add. Stores the relative errors."""
    slot = tl.arange(0, _SLOTS)
    whole = tl.sum(tl.where(slot == _LEVELS, norms, 0.0), 0)
    known = (whole > _SMALLEST) & (whole < _LARGEST)
    tl.store(errors + slot, tl.where(known, norms / whole, float("inf")), mask=slot < _LEVELS)
    square = norms * norms
    # What is not known adds nothing: the slice is formed exactly. NaN is not below the limit.
    whole = tl.where(known, whole * whole, 0.0)
    most = tl.where(known, limit * limit * (tl.load(added + 1) + whole), -1.0)
    return tl.load(added) + square <= most, square, whole


@triton.jit
def _add(added, square, whole, taken):
    tl.store(added, tl.load(added) + tl.sum(tl.where(taken, square, 0.0), 0))
    tl.store(added + 1, tl.load(added + 1) + whole)


@Relaunched
@triton.jit(do_not_specialize=["count", "tiles"])
def lce_backward_choose_level(
    hidden_norms, weight_norms, skipped, added, chosen, errors, count, tiles, limit, growth, fewest, BLOCK: tl.constexpr
):
    """``weight_norms`` of all tokens are ``growth`` times as large in the levels. ``fewest``: tiles that a filter must
    skip."""
    slot = tl.arange(0, _SLOTS)
    weight_norms = tl.load(weight_norms + slot, mask=slot <= _LEVELS, other=0.0)
    weight_norms *= tl.where(slot < _LEVELS, growth, 1.0)
    hidden_norms = _upper_norms(hidden_norms, count, BLOCK)
    of_hidden, hidden_square, hidden = _allowed(hidden_norms, added, errors, limit)
    of_weight, weight_square, weight = _allowed(weight_norms, added + 2, errors + _LEVELS, limit)
    total = tl.zeros((_SLOTS,), tl.float32)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = (t < tiles)[:, None] & (slot < _LEVELS)[None, :]
        total += tl.sum(tl.load(skipped + t[:, None] * _LEVELS + slot[None, :], mask=inside, other=0.0), 0)
    allowed = of_hidden & of_weight & (total >= fewest) & (slot < _LEVELS)
    number = tl.min(tl.where(allowed, slot, _LEVELS), 0)
    tl.store(chosen, tl.where(number < _LEVELS, filter_of(number), 0.0))
    tl.debug_barrier()
    taken = (slot == number) & (slot < _LEVELS)
    _add(added, hidden_square, hidden, taken)
    _add(added + 2, weight_square, weight, taken)


def choose_level(
    products: LevelProducts,
    weight_norms: torch.Tensor,
    added: torch.Tensor,
    limit: float,
    *,
    growth: float = 1.0,
    fewest: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest filter with which the relative errors of all slices so far are at most ``limit``, else 0: fp32
    ``[1]``; and the errors ``[2, 8]`` of dX and dW, relative to this slice's part.

    ``weight_norms [9]`` fp32: of ``products.signed`` times x. Those of the levels are multiplied by ``growth``.
    ``added [4]`` fp32: for dX and dW, the sums over the slices of the squares of the chosen filters' errors, and of the
    norms; this slice's are added. The parts of slices count as orthogonal. Those of dW are, being different rows.
    ``fewest``: a filter must skip so many of the tiles that ``products`` counts.
    """
    chosen, errors = weight_norms.new_empty(1), weight_norms.new_empty(2, LEVELS)
    lce_backward_choose_level.launch(
        (1,),
        products.norms,
        weight_norms,
        products.skipped,
        added,
        chosen,
        errors,
        len(products.norms),
        len(products.skipped),
        float(limit),
        float(growth),
        float(fewest),
        BLOCK=_SUMMED,
    )
    return chosen, errors
