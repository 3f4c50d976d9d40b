"""The choice of a filter by its estimated errors (:mod:`parallel_lce.kernels.filter_estimates`).

A filter may add to a rank's part of dX an error of at most ``LARGEST_ERROR``, relative to that part. It may add to dW,
over all ranks, an error of at most

    2^-7.5 sqrt(sum_i |a_i x_i|^2 p_i (1 - p_i))

where ``p_i`` is the probability of token i's target, and ``a_i`` what the token's row of G holds where the probability
is 1. Rounding the logits to bf16 adds more to dW: on models of D=256 to 4096, after 50 to 1000 steps of training,
2^-6.6 to 2^-5.6 times the same root: 1.9 times the limit and more, and an error that is estimated from a sample may be
twice as large as it seems. The root is known for all tokens, from the merged partial. How large dW itself is would have
to be estimated, and a sample of the tokens does not tell what they have in common.

The errors are estimated from a sample of the tokens. For ``step`` times as many tokens dW's error is

    |error|^2 = step own + step^2 common
    own = |first - second|^2        common = |first + second|^2 - |first - second|^2

where ``first`` and ``second`` are the sums over the two halves of the sample, ``own`` is the square of what the tokens
do not have in common, and ``common`` of what they have.

A sample must stand for all tokens. If it has less than half of its share of ``sum_i |a_i x_i|^2``, nothing may be
added; and for dW the root counts as ``step`` times the sample's sum, if that is less.

Of dX the norms of some tokens each are known, and tokens have nothing in common. A few tokens may have most of the sum
of squares. So twice its standard error is added to the squares of dX's errors, and subtracted from that of dX itself.

Slices have limits in common. Of what slices leave of dX's limit, which grows with each slice's part of dX, the next one
may take all. Of dW's, which is the same for all slices, and shared by the ranks, it may take a share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import finite_base
from parallel_lce.kernels.filter_estimates import LEVELS, SIGNS, SLOTS, filter_of
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.tile_scan import FINITE, BlockSample

LARGEST_ERROR = 2.0**-9
"""Largest relative error, in Frobenius norms, that filters of ``"auto"`` add to dX: about that of rounding to bf16."""

_LEVELS, _SLOTS, _FINITE = tl.constexpr(LEVELS), tl.constexpr(SLOTS), tl.constexpr(FINITE)
# Columns of the sketch that estimate the same norm: so many times its square is their sum.
_SIGNS = tl.constexpr(SIGNS)
# Largest error of dW, in units of the root above.
_OF_TARGETS = 2.0**-7.5
# Tokens that are looked at at a time.
_TOKENS = 512
# Norms, and tiles, that are looked at at a time.
_SUMMED = 64
# Norms below and above which fp32 does not hold their squares, and those of small parts.
_SMALLEST, _LARGEST = tl.constexpr(2.0**-50), tl.constexpr(2.0**60)


class Allowance(NamedTuple):
    """What a slice's filter may add to the errors of dX and dW."""

    # fp32 [2, 3]: of :func:`error_allowance`, for all slices
    of_all: torch.Tensor
    # of the square of dW's error that the slices before have left
    share: float


class SampledErrors(NamedTuple):
    """What is known, from a sample of the tokens, of the errors that filters add."""

    # [n, 16] fp32: ``LevelProducts.norms``
    hidden_norms: torch.Tensor
    # [3 * 8] fp32: norms of the halves of ``LevelProducts.signed`` times x, and of their sum
    weight_norms: torch.Tensor
    # [T, 8] fp32: how many tiles of a block of entries each level skips, of so many ``tiles`` in all
    skipped: torch.Tensor
    tiles: int

    @classmethod
    def of_slices(cls, slices: list[SampledErrors]) -> SampledErrors:
        """Of several slices together."""
        if len(slices) == 1:
            return slices[0]
        *norms, skipped, tiles = zip(*slices)
        of_hidden, of_weight = (torch.linalg.vector_norm(torch.stack(parts), dim=0) for parts in norms)
        return cls(of_hidden, of_weight, torch.cat(skipped), sum(tiles))


@triton.jit
def _size_of_row(inverse_limits, hidden_norms, r, rows):
    """``|a_i x_i|``, 0 where the gradient is."""
    inverse = tl.load(inverse_limits + r, mask=r < rows, other=_FINITE)
    counted = inverse != _FINITE
    return tl.where(counted, tl.load(hidden_norms + r, mask=counted, other=0.0) / inverse, 0.0)


@Relaunched
@triton.jit(do_not_specialize=["rows", "first", "step", "count"])
def lce_backward_error_allowance(
    partial,
    inverse_limits,
    hidden_norms,
    allowance,
    rows,
    first,
    step,
    count,
    largest,
    of_targets,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sample: ``count`` blocks of ``HEIGHT`` tokens."""
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        size = _size_of_row(inverse_limits, hidden_norms, start + tl.arange(0, BLOCK), rows)
        top = tl.maximum(top, size)
    # In units of the largest one, fp32 holds squares of the sizes.
    unit = tl.max(top, 0)
    unit = tl.where((unit > 0.0) & (unit < float("inf")), unit, 1.0)
    squares, sampled_squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    sizes, sampled_sizes = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        r = start + tl.arange(0, BLOCK)
        after = r // HEIGHT - first
        is_sampled = (after >= 0) & (after % step == 0) & (after < count * step)
        size = _size_of_row(inverse_limits, hidden_norms, r, rows) / unit
        sizes += size * size
        sampled_sizes += tl.where(is_sampled, size * size, 0.0)
        counted = size != 0.0
        base = finite_base(tl.load(partial + r, mask=counted, other=0.0))
        sum_exp = tl.load(partial + rows + r, mask=counted, other=1.0)
        logit = tl.load(partial + 2 * rows + r, mask=counted, other=0.0)
        probability = tl.exp(logit - base) / sum_exp
        square = size * size * probability * (1.0 - probability)
        # A target outside of the vocabulary has the logit 0. Rounding may make a probability larger than 1. NaN stays.
        square = tl.where(counted & (logit != 0.0) & (probability <= 1.0), square, 0.0)
        squares += tl.where(probability != probability, probability, square)
        sampled_squares += tl.where(is_sampled, square, 0.0)
    of_all, of_sample = tl.sum(squares, 0), step * tl.sum(sampled_squares, 0)
    root = unit * tl.sqrt(tl.where(of_sample < of_all, of_sample, of_all))
    # What is not finite is not represented.
    total = tl.sum(sizes, 0)
    is_represented = (2 * step * tl.sum(sampled_sizes, 0) >= total) & (total < float("inf"))
    place = tl.arange(0, 8)
    # What is not finite does not allow anything.
    of_weight = tl.where((root > 0.0) & (root < float("inf")), of_targets * root, 0.0)
    limits = tl.where(place == 0, largest, tl.where(place == 3, of_weight, 0.0))
    tl.store(allowance + place, tl.where(is_represented, limits, 0.0), mask=place < 6)


def error_allowance(
    partial: torch.Tensor, inverse_limits: torch.Tensor, hidden_norms: torch.Tensor, ranks: int, sample: BlockSample
) -> torch.Tensor:
    """``[2, 3]`` fp32. Of dX: the largest relative error, and the sums over slices of the squares of errors and of
    norms, which are 0. Of this rank's rows of dW: the largest error, the sum over slices of the squares of errors in
    units of it, and 0.

    ``partial [>= 3, R]``, contiguous: the merged partial, with the targets' logits. ``inverse_limits [R]`` fp32:
    ``1 / a_i``, as of :func:`parallel_lce.kernels.tile_scan.inverse_limits`. ``hidden_norms [R]`` fp32: ``|x_i|``.
    ``ranks``: each may add the same to dW. ``sample``: of the R tokens, from which errors are estimated.
    """
    allowance = partial.new_empty(2, 3)
    lce_backward_error_allowance.launch(
        (1,),
        partial,
        inverse_limits,
        hidden_norms,
        allowance,
        partial.shape[1],
        sample.first,
        sample.step,
        sample.count,
        LARGEST_ERROR,
        _OF_TARGETS * ranks**-0.5,
        HEIGHT=sample.height,
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
def _relative_squares(norms, step, limit, errors):
    """``[16]``: the squares of the errors that the levels add to dW, of all tokens, in units of the ``limit``, from the
    ``norms [3, 8]`` of ``first``, ``second`` and their sum. Stores their roots."""
    slot = tl.arange(0, _SLOTS)
    first = tl.load(norms + slot, mask=slot < _LEVELS, other=0.0) / limit
    second = tl.load(norms + _LEVELS + slot, mask=slot < _LEVELS, other=0.0) / limit
    both = tl.load(norms + 2 * _LEVELS + slot, mask=slot < _LEVELS, other=0.0) / limit
    square = both * both
    if step > 1.0:
        own = 2.0 * (first * first + second * second) - square
        common = square - own
        # NaN stays.
        common = tl.where(common < 0.0, 0.0, common)
        square = step * own + step * step * common
    square /= _SIGNS
    tl.store(errors + slot, tl.sqrt(square), mask=slot < _LEVELS)
    return square


@triton.jit
def _allowed_of_hidden(norms, allowance, errors):
    """Which levels dX allows, and the squares of the errors that they add, and of dX. Stores the relative errors."""
    slot = tl.arange(0, _SLOTS)
    whole = tl.sum(tl.where(slot == _LEVELS, norms, 0.0), 0)
    known = (whole > _SMALLEST) & (whole < _LARGEST)
    tl.store(errors + slot, tl.where(known, norms / whole, float("inf")), mask=slot < _LEVELS)
    square, limit = norms * norms, tl.load(allowance)
    # What is not known adds nothing: the slice is formed exactly. NaN is not below the limit.
    whole = tl.where(known, whole * whole, 0.0)
    left = limit * limit * (tl.load(allowance + 2) + whole) - tl.load(allowance + 1)
    return square <= tl.where(known, left, -1.0), square, whole


@triton.jit
def _add(total, square, taken):
    tl.store(total, tl.load(total) + tl.sum(tl.where(taken, square, 0.0), 0))


@Relaunched
@triton.jit(do_not_specialize=["count", "tiles"])
def lce_backward_choose_level(
    hidden_norms,
    weight_norms,
    skipped,
    allowance,
    only_if,
    chosen,
    errors,
    count,
    tiles,
    step,
    share,
    fewest,
    TENTATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``fewest``: tiles that a filter must skip."""
    if only_if is not None:
        # No filter skips so many.
        fewest = tl.where(tl.load(only_if) > 0.0, fewest, float("inf"))
    slot = tl.arange(0, _SLOTS)
    bounds = _bounds_of_norms(hidden_norms, count, step, BLOCK)
    allowed, of_hidden, whole = _allowed_of_hidden(bounds, allowance, errors)
    of_weight = _relative_squares(weight_norms, step, tl.load(allowance + 3), errors + _LEVELS)
    allowed &= of_weight <= share * (1.0 - tl.load(allowance + 4))
    total = tl.zeros((_SLOTS,), tl.float32)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = (t < tiles)[:, None] & (slot < _LEVELS)[None, :]
        total += tl.sum(tl.load(skipped + t[:, None] * _LEVELS + slot[None, :], mask=inside, other=0.0), 0)
    allowed &= (total >= fewest) & (slot < _LEVELS)
    number = tl.min(tl.where(allowed, slot, _LEVELS), 0)
    tl.store(chosen, tl.where(number < _LEVELS, filter_of(number), 0.0))
    tl.debug_barrier()
    is_noted = fewest < float("inf")
    if TENTATIVE:
        is_noted = number == _LEVELS
    if is_noted:
        taken = (slot == number) & (slot < _LEVELS)
        _add(allowance + 1, of_hidden, taken)
        tl.store(allowance + 2, tl.load(allowance + 2) + whole)
        _add(allowance + 4, of_weight, taken)


def choose_level(
    sampled: SampledErrors,
    allowance: Allowance,
    step: int = 1,
    fewest: float = 0.0,
    *,
    tentative: bool = False,
    only_if: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest filter that adds no more than the ``allowance``, else 0: fp32 ``[1]``; and the errors ``[2, 8]`` of
    dX, relative to the slice's part of it, and of dW, in units of the largest one.

    What the slice adds is noted in ``allowance``. The parts of slices count as orthogonal. Those of dW are, being
    different rows. ``step``: there are so many times as many tokens. ``fewest``: a filter must skip so many tiles.
    ``tentative``: only the choice of 0 is final and noted; after another one the slice is asked about again.
    ``only_if``: that choice; if it is 0, so is this one, nothing is noted, and the errors mean nothing.
    """
    chosen, errors = sampled.weight_norms.new_empty(1), sampled.weight_norms.new_empty(2, LEVELS)
    lce_backward_choose_level.launch(
        (1,),
        sampled.hidden_norms,
        sampled.weight_norms,
        sampled.skipped,
        allowance.of_all,
        only_if,
        chosen,
        errors,
        len(sampled.hidden_norms),
        len(sampled.skipped),
        float(step),
        float(allowance.share),
        float(fewest),
        TENTATIVE=tentative,
        BLOCK=_SUMMED,
    )
    return chosen, errors
