"""The choice of a filter by its estimated errors (:mod:`parallel_lce.kernels.filter_estimates`).

The errors are estimated from a sample of the tokens. For ``step`` times as many tokens dW's error is

    |error|^2 = step I + step^2 C        C = |A + B|^2 - |A - B|^2        I = |A - B|^2

where A and B are the sums over the two halves of the sample, I is the square of what the tokens do not have in common,
and C of what they have. dW itself is taken as if tokens had nothing in common: step (|A + B|^2 + |A - B|^2) / 2. It is
not smaller than that, and four signs do not tell how much larger it is. Without other tokens both are |A + B|. Of dX
the norms of some tokens each are known, and tokens have nothing in common. Few tokens may have most of the error, so
its square is taken larger by twice its standard error.

A filter may add to dX an error of at most ``LARGEST_ERROR``. To dW it may add as much, but no more than logits that are
rounded to bf16 would: of a flat softmax that is little. It was measured on models of D=256 to 4096 after 50 to 1000
steps of training. Where the mean probability of the targets was .05 to .43, it was from 1/340 to 1/64 of that, and the
limit is 1/256 of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import finite_base
from parallel_lce.kernels.filter_estimates import LEVELS, LevelProducts, filter_of
from parallel_lce.kernels.relaunch import Relaunched

LARGEST_ERROR = 2.0**-9
"""Largest relative error, in Frobenius norms, that filters of ``"auto"`` add: about that of rounding to bf16."""

_LEVELS = tl.constexpr(LEVELS)
# Largest relative error of dW by the mean probability of the targets.
_OF_TARGETS = 2.0**-8
# Tokens that are looked at at a time.
_TOKENS = 1024
# Columns of the norms, of which those of the levels and of G are written.
_SLOTS = tl.constexpr(16)
# Norms, and tiles, that are looked at at a time.
_SUMMED = 64
# Norms below and above which fp32 does not hold their squares, and those of small parts.
_SMALLEST, _LARGEST = tl.constexpr(2.0**-50), tl.constexpr(2.0**60)


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_error_budget(
    partial, alpha, budget, rows, largest, of_targets, TARGETS: tl.constexpr, BLOCK: tl.constexpr
):
    of_weight = largest
    if TARGETS:
        probability, count = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, rows, BLOCK):
            r = start + tl.arange(0, BLOCK)
            counted = tl.load(alpha + r, mask=r < rows, other=0.0) != 0.0
            base = finite_base(tl.load(partial + r, mask=counted, other=0.0))
            sum_exp = tl.load(partial + rows + r, mask=counted, other=1.0)
            logit = tl.load(partial + 2 * rows + r, mask=counted, other=-float("inf"))
            probability += tl.exp(logit - base) / sum_exp
            count += counted.to(tl.float32)
        mean = tl.sum(probability, 0) / tl.maximum(tl.sum(count, 0), 1.0)
        # NaN does not allow more.
        of_weight = tl.where(mean >= 0.0, tl.minimum(largest, of_targets * mean), 0.0)
    place = tl.arange(0, 8)
    limits = tl.where(place == 0, largest, tl.where(place == 3, of_weight, 0.0))
    tl.store(budget + place, limits, mask=place < 6)


def error_budget(partial: torch.Tensor, alpha: torch.Tensor, has_targets: bool) -> torch.Tensor:
    """``[2, 3]`` fp32: for dX and dW the largest relative error, and the sums over slices of the squares of errors and
    of norms, which are 0.

    ``partial [>= 3, R]``, contiguous: the merged partial, with the targets' logits if it ``has_targets``.
    ``alpha [R]``: 0 for tokens that do not count.
    """
    budget = partial.new_empty(2, 3)
    lce_backward_error_budget.launch(
        (1,), partial, alpha, budget, partial.shape[1], LARGEST_ERROR, _OF_TARGETS, TARGETS=has_targets, BLOCK=_TOKENS
    )
    return budget


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
def _total_norms(norms, step):
    """``[16]``: of all tokens, from those of A + B and of A - B, ``norms [2, 9]``."""
    slot = tl.arange(0, _SLOTS)
    both = tl.load(norms + slot, mask=slot <= _LEVELS, other=0.0)
    difference = tl.load(norms + _LEVELS + 1 + slot, mask=slot <= _LEVELS, other=0.0)
    top = tl.max(tl.where(slot == _LEVELS, tl.maximum(both, difference), 0.0), 0)
    unit = tl.where((top > 0.0) & (top < float("inf")), top, 1.0)
    both, difference = both / unit, difference / unit
    own = difference * difference
    common = both * both - own
    # NaN stays.
    common = tl.where(common < 0.0, 0.0, common)
    error = step * own + step * step * common
    whole = step * tl.where(step > 1.0, 0.5 * (both * both + own), both * both)
    return unit * tl.sqrt(tl.where(slot == _LEVELS, whole, error))


@triton.jit
def _allowed(norms, budget, errors):
    """Which levels a product allows, and the squares of the errors that they add. Stores the relative errors."""
    slot = tl.arange(0, _SLOTS)
    whole = tl.sum(tl.where(slot == _LEVELS, norms, 0.0), 0)
    known = (whole > _SMALLEST) & (whole < _LARGEST)
    tl.store(errors + slot, tl.where(known, norms / whole, float("inf")), mask=slot < _LEVELS)
    square, limit = norms * norms, tl.load(budget)
    # What is not known adds nothing: the slice is formed exactly. NaN is not below the limit.
    whole = tl.where(known, whole * whole, 0.0)
    most = tl.where(known, limit * limit * (tl.load(budget + 2) + whole), -1.0)
    return tl.load(budget + 1) + square <= most, square, whole


@triton.jit
def _add(budget, square, whole, taken):
    tl.store(budget + 1, tl.load(budget + 1) + tl.sum(tl.where(taken, square, 0.0), 0))
    tl.store(budget + 2, tl.load(budget + 2) + whole)


@Relaunched
@triton.jit(do_not_specialize=["count", "tiles"])
def lce_backward_choose_level(
    hidden_norms, weight_norms, skipped, budget, chosen, errors, count, tiles, step, fewest, BLOCK: tl.constexpr
):
    """``fewest``: tiles that a filter must skip."""
    slot = tl.arange(0, _SLOTS)
    of_hidden, hidden_square, hidden = _allowed(_upper_norms(hidden_norms, count, BLOCK), budget, errors)
    of_weight, weight_square, weight = _allowed(_total_norms(weight_norms, step), budget + 3, errors + _LEVELS)
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
    _add(budget, hidden_square, hidden, taken)
    _add(budget + 3, weight_square, weight, taken)


def choose_level(
    products: LevelProducts, weight_norms: torch.Tensor, budget: torch.Tensor, step: int = 1, fewest: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest filter with which the relative errors of all slices so far are within the ``budget``, else 0: fp32
    ``[1]``; and the errors ``[2, 8]`` of dX and dW, relative to this slice's part.

    ``weight_norms [2 * 9]`` fp32: of ``products.signed`` times x. ``budget``: of :func:`error_budget`; this slice's
    part is added. The parts of slices count as orthogonal. Those of dW are, being different rows. ``step``: there are
    so many times as many tokens. ``fewest``: a filter must skip so many of the tiles that ``products`` counts.
    """
    chosen, errors = weight_norms.new_empty(1), weight_norms.new_empty(2, LEVELS)
    lce_backward_choose_level.launch(
        (1,),
        products.norms,
        weight_norms,
        products.skipped,
        budget,
        chosen,
        errors,
        len(products.norms),
        len(products.skipped),
        float(step),
        float(fewest),
        BLOCK=_SUMMED,
    )
    return chosen, errors
