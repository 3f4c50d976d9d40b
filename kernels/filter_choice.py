"""The choice of a filter by its estimated errors (:mod:`parallel_lce.kernels.filter_estimates`).

The errors are estimated from a sample of the tokens. For ``step`` times as many tokens dW's error is

    |error|^2 = step own + step^2 common
    own = |first - second|^2        common = |first + second|^2 - |first - second|^2

where ``first`` and ``second`` are the sums over the two halves of the sample, ``own`` is the square of what the tokens
do not have in common, and ``common`` of what they have. dW itself is taken as small as the sample allows: as if tokens
had nothing in common, and the half with more were like the other one.

Of dX the norms of some tokens each are known, and tokens have nothing in common. A few tokens may have most of the sum
of squares. So twice its standard error is added to the squares of dX's errors, and subtracted from that of dX itself.

A slice may add to the errors what the slices before it have left of the limits.

A filter may add to dX an error of at most ``LARGEST_ERROR``. To dW it may add as much, but no more than 1/256 of the
mean probability of the targets. That is about what rounding the logits to bf16 adds: on models of D=256 to 4096, after
50 to 1000 steps of training, it added 1/340 to 1/64 of that probability, which was .05 to .43.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import finite_base
from parallel_lce.kernels.filter_estimates import LEVELS, SLOTS, LevelProducts, filter_of
from parallel_lce.kernels.relaunch import Relaunched

LARGEST_ERROR = 2.0**-9
"""Largest relative error, in Frobenius norms, that filters of ``"auto"`` add: about that of rounding to bf16."""

_LEVELS, _SLOTS = tl.constexpr(LEVELS), tl.constexpr(SLOTS)
# Largest relative error of dW by the mean probability of the targets.
_OF_TARGETS = 2.0**-8
# Tokens that are looked at at a time.
_TOKENS = 1024
# Norms, and tiles, that are looked at at a time.
_SUMMED = 64
# Norms below and above which fp32 does not hold their squares, and those of small parts.
_SMALLEST, _LARGEST = tl.constexpr(2.0**-50), tl.constexpr(2.0**60)


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_error_allowance(
    partial,
    alpha,
    factor,
    allowance,
    rows,
    factor_stride,
    largest,
    of_targets,
    TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    of_weight = largest
    if TARGETS:
        probability, count = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, rows, BLOCK):
            r = start + tl.arange(0, BLOCK)
            coefficient = tl.load(alpha + r, mask=r < rows, other=0.0)
            if factor is not None:
                coefficient *= tl.load(factor + r * factor_stride, mask=r < rows, other=0.0)
            counted = coefficient != 0.0
            base = finite_base(tl.load(partial + r, mask=counted, other=0.0))
            sum_exp = tl.load(partial + rows + r, mask=counted, other=1.0)
            logit = tl.load(partial + 2 * rows + r, mask=counted, other=0.0)
            # A target outside of the vocabulary has the logit 0.
            counted &= logit != 0.0
            probability += tl.where(counted, tl.exp(logit - base) / sum_exp, 0.0)
            count += counted.to(tl.float32)
        mean = tl.sum(probability, 0) / tl.maximum(tl.sum(count, 0), 1.0)
        # NaN does not allow more.
        of_weight = tl.where(mean >= 0.0, tl.minimum(largest, of_targets * mean), 0.0)
    place = tl.arange(0, 8)
    limits = tl.where(place == 0, largest, tl.where(place == 3, of_weight, 0.0))
    tl.store(allowance + place, limits, mask=place < 6)


def error_allowance(
    partial: torch.Tensor, alpha: torch.Tensor, factor: torch.Tensor | None, has_targets: bool
) -> torch.Tensor:
    """``[2, 3]`` fp32: for dX and dW the largest relative error, and the sums over slices of the squares of errors and
    of norms, which are 0.

    ``partial [>= 3, R]``, contiguous: the merged partial, with the targets' logits if it ``has_targets``.
    ``alpha [R]`` and ``factor [R]``, or one number for all tokens, or None: tokens count whose product is not 0.
    """
    allowance = partial.new_empty(2, 3)
    lce_backward_error_allowance.launch(
        (1,),
        partial,
        alpha,
        factor,
        allowance,
        partial.shape[1],
        0 if factor is None or factor.dim() == 0 else factor.stride(0),
        LARGEST_ERROR,
        _OF_TARGETS,
        TARGETS=has_targets,
        BLOCK=_TOKENS,
    )
    return allowance


@triton.jit
def _bounds_of_norms(norms, count, step, BLOCK: tl.constexpr):
    """``[16]``: the norms of all tokens; if they are a sample, those of the levels increased, and G's decreased."""
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
    bound = squares + tl.where(step > 1.0, tl.where(slot < _LEVELS, 2.0, -2.0) * error, 0.0)
    # NaN stays.
    return unit * tl.sqrt(tl.where(bound < 0.0, 0.0, bound))


@triton.jit
def _squares(norms, start, count, unit, BLOCK: tl.constexpr):
    i, slot = start + tl.arange(0, BLOCK), tl.arange(0, _SLOTS)
    inside = (i < count)[:, None] & (slot <= _LEVELS)[None, :]
    value = tl.load(norms + i[:, None] * _SLOTS + slot[None, :], mask=inside, other=0.0) / unit
    return value * value


@triton.jit
def _total_norms(norms, step):
    """``[16]``: the norms of the levels' errors and of dW, of all tokens, from those of ``first``, ``second`` and their
    sum, ``norms [3, 9]``."""
    slot = tl.arange(0, _SLOTS)
    first = tl.load(norms + slot, mask=slot <= _LEVELS, other=0.0)
    second = tl.load(norms + _LEVELS + 1 + slot, mask=slot <= _LEVELS, other=0.0)
    both = tl.load(norms + 2 * (_LEVELS + 1) + slot, mask=slot <= _LEVELS, other=0.0)
    if step > 1.0:
        top = tl.max(tl.where(slot == _LEVELS, tl.maximum(first, second), 0.0), 0)
        unit = tl.where((top > 0.0) & (top < float("inf")), top, 1.0)
        first, second, both = first / unit, second / unit, both / unit
        own = 2.0 * (first * first + second * second) - both * both
        common = both * both - own
        # NaN stays.
        common = tl.where(common < 0.0, 0.0, common)
        error = step * own + step * step * common
        # Twice the smaller of the squares.
        of_all = first * first + second * second - tl.abs(first * first - second * second)
        both = unit * tl.sqrt(tl.where(slot == _LEVELS, step * of_all, error))
    return both


@triton.jit
def _allowed(norms, allowance, errors):
    """Which levels a product allows, and the squares of the errors that they add. Stores the relative errors."""
    slot = tl.arange(0, _SLOTS)
    whole = tl.sum(tl.where(slot == _LEVELS, norms, 0.0), 0)
    known = (whole > _SMALLEST) & (whole < _LARGEST)
    tl.store(errors + slot, tl.where(known, norms / whole, float("inf")), mask=slot < _LEVELS)
    square, limit = norms * norms, tl.load(allowance)
    # What is not known adds nothing: the slice is formed exactly. NaN is not below the limit.
    whole = tl.where(known, whole * whole, 0.0)
    most = tl.where(known, limit * limit * (tl.load(allowance + 2) + whole), -1.0)
    return tl.load(allowance + 1) + square <= most, square, whole


@triton.jit
def _add(allowance, square, whole, taken):
    tl.store(allowance + 1, tl.load(allowance + 1) + tl.sum(tl.where(taken, square, 0.0), 0))
    tl.store(allowance + 2, tl.load(allowance + 2) + whole)


@Relaunched
@triton.jit(do_not_specialize=["count", "tiles"])
def lce_backward_choose_level(
    hidden_norms, weight_norms, skipped, allowance, chosen, errors, count, tiles, step, fewest, BLOCK: tl.constexpr
):
    """``fewest``: tiles that a filter must skip."""
    slot = tl.arange(0, _SLOTS)
    of_hidden, hidden_square, hidden = _allowed(_bounds_of_norms(hidden_norms, count, step, BLOCK), allowance, errors)
    of_weight, weight_square, weight = _allowed(_total_norms(weight_norms, step), allowance + 3, errors + _LEVELS)
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
    _add(allowance, hidden_square, hidden, taken)
    _add(allowance + 3, weight_square, weight, taken)


def choose_level(
    products: LevelProducts, weight_norms: torch.Tensor, allowance: torch.Tensor, step: int = 1, fewest: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest filter with which the relative errors of all slices so far are within the ``allowance``, else 0: fp32
    ``[1]``; and the errors ``[2, 8]`` of dX and dW, relative to this slice's part.

    ``weight_norms [3 * 9]`` fp32: of the halves of ``products.signed`` times x, and of their sum. ``allowance``: of
    :func:`error_allowance`; this slice's part is added. The parts of slices count as orthogonal. Those of dW are, being
    different rows. ``step``: there are so many times as many tokens. ``fewest``: a filter must skip so many of the
    tiles that ``products`` counts.
    """
    chosen, errors = weight_norms.new_empty(1), weight_norms.new_empty(2, LEVELS)
    lce_backward_choose_level.launch(
        (1,),
        products.norms,
        weight_norms,
        products.skipped,
        allowance,
        chosen,
        errors,
        len(products.norms),
        len(products.skipped),
        float(step),
        float(fewest),
        BLOCK=_SUMMED,
    )
    return chosen, errors
