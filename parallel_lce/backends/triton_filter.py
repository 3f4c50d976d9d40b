"""The products of a slice of G with its active tiles alone, and with what stands for the others."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt
from parallel_lce.backends.interface import AUTO, Projection
from parallel_lce.kernels.active_tiles import ActiveTiles, centroids, find_active_tiles
from parallel_lce.kernels.filter_estimates import LEVELS, SIGNS, RowFactors, choose_level, level_products, signs
from parallel_lce.kernels.rewrite import TokenCoefficients
from parallel_lce.kernels.sparse_product import sparse_product
from parallel_lce.kernels.tile_scan import TILE, BlockSample, ScannedTiles, sample_blocks, scan_tiles

AUTO_ERROR = 2.0**-9
"""Largest estimate of the relative errors that filters of ``"auto"`` add: about the rounding of a bf16 gradient."""


# Fewest flops of a slice's products that are filtered. Of smaller slices, as at D=1024 with logits_budget=0, a filtered
# backward takes the host longer than an exact one takes the GPU.
SMALLEST_FILTERED = 1e12
# Row blocks that are looked at to choose a filter: one in so many.
_ONE_IN = 5


class UnfilteredSlice(NamedTuple):
    """A slice of the gradient of the logits and what its products take beside it."""

    # [R, C]
    gradient: Tensor
    # [C, D]: the slice's rows
    weight: Tensor
    # [R, D]
    x: Tensor
    factors: RowFactors
    # id of the slice's first entry
    first: int


class Estimates(NamedTuple):
    """Relative errors, in Frobenius norms, that filters add to what a slice adds to dX and to dW."""

    # fp32 [1]: the largest filter with which both stay within AUTO_ERROR over the slices so far, or 0
    eps: Tensor
    # fp32 [2, LEVELS]: of dX and of dW, at the filters 2^-8, 2^-9, ...
    errors: Tensor


def worth_filtering(multiplications: int) -> bool:
    """Whether the products of a slice take longer than finding its active tiles: dX and dW, of so many multiplications
    each."""
    return 4 * multiplications >= SMALLEST_FILTERED


def inverse_limits(
    coefficients: TokenCoefficients, projection: Projection, dx_factor: Tensor | None, fp16_scale: Tensor | None
) -> Tensor:
    """``1 / limit [R]`` fp32, where a token's limit is what its row of G holds where the probability is 1.

    ``dx_factor``: what the rows of G are still to be multiplied by. A row whose factor is 0 has no limit. In a row
    without probabilities every number but 0 lies beyond the limit.
    """
    limits = coefficients.alpha.abs() * abs(projection.scale)
    for more in (coefficients.factor, projection.token_scale, fp16_scale):
        if more is not None:
            limits = limits * more.abs()
    inverse = limits.reciprocal() if dx_factor is None else dx_factor.abs() / limits
    return inverse.nan_to_num_(nan=0.0)


def sketch_of(weight: Tensor) -> Tensor:
    """``[8, C]``: the rows of ``weight [C, D]`` times random signs, then random signs."""
    entries, hidden_size = weight.shape
    # Rows begin at multiples of 16 bytes.
    sketch = weight.new_empty(2 * SIGNS, -(-entries // 8) * 8)[:, :entries]
    of_hidden = signs(weight.new_empty(SIGNS, hidden_size), seed=0)
    accumulate_nt(sketch[:SIGNS], of_hidden, weight, overwrite=True)
    signs(sketch[SIGNS:], seed=1)
    return sketch


def estimated(
    given: UnfilteredSlice,
    scanned: ScannedTiles,
    sketch: Tensor,
    added: Tensor,
    step: int,
    sample: BlockSample | None = None,
    of_weight: Tensor | None = None,
) -> Estimates:
    """``scanned``: one row block in ``step``, with the products of ``sketch``. ``sample``: which they are of those that
    ``given`` has; None: all. ``added [4]`` fp32: what is known of the slices so far, 0 before the first one.
    ``of_weight``: the shares of dW; None: those of the column sums."""
    norms, signed = level_products(scanned, sketch, given.factors, given.first, sample, of_weight)
    x = given.x if sample is None else sample.of(given.x)
    product = signed.new_empty(len(signed), x.shape[1], dtype=torch.float32)
    accumulate_nt(product, signed, x.t(), overwrite=True)
    weight_norms = torch.linalg.vector_norm(product.view(LEVELS + 1, -1), dim=1)
    # Errors of shares grow with the number of tokens, dW at the least with its root.
    weight_norms[:LEVELS] *= math.sqrt(step)
    return Estimates(*choose_level(_upper_norms(norms), weight_norms, added, AUTO_ERROR))


def _upper_norms(norms: Tensor) -> Tensor:
    """The norms ``[9]`` of all tokens, from those of some tokens each, ``norms [n, 9]``: those of the levels increased
    by twice the standard error of their squares' sum. Few tokens may have most of the error."""
    squares, count = norms.double().square_(), len(norms)
    total = squares.sum(0)
    if count > 1:
        total[:LEVELS] += 2 * (squares[:, :LEVELS].var(0) * count).sqrt_()
    return total.sqrt_().float()


def filtered(
    given: UnfilteredSlice, inverse: Tensor, gradient_filter: float | str, added: Tensor | None
) -> FilteredGradient:
    """A slice filtered by a probability or, with ``"auto"``, by the one that is chosen for it. ``inverse [R]``: of
    :func:`inverse_limits`. ``added``: of :func:`estimated`, for ``"auto"``."""
    eps = gradient_filter
    if isinstance(eps, str):
        assert eps == AUTO and added is not None
        sketch, sample = sketch_of(given.weight), sample_blocks(len(given.gradient), _ONE_IN)
        scanned = scan_tiles(given.gradient, inverse, sketch=sketch, sample=sample)
        eps = estimated(given, scanned, sketch, added, sample.step, sample).eps
    return FilteredGradient(given.gradient, find_active_tiles(given.gradient, inverse, eps))


class FilteredGradient:
    """The products of a slice's gradient of the logits ``[R, C]``, of which the active tiles alone are read."""

    def __init__(self, gradient: Tensor, found: ActiveTiles) -> None:
        self._gradient, self._found = gradient, found
        # S [T, D] fp32, and the x of which they are sums.
        self._spread: tuple[Tensor, Tensor] | None = None

    def add_hidden(self, total: Tensor, weight: Tensor, rows: slice, overwrite: bool) -> None:
        """As :meth:`parallel_lce.backends.triton_slices.Slice.add_hidden`; ``total`` is fp32, and ``rows`` begin at a
        multiple of 128."""
        means = centroids(weight, self._found.of_hidden)
        accumulate_nt(total, self._found.masses[:, rows].t(), means.t(), overwrite=overwrite)
        lists = self._found.of_rows.of_blocks(rows.start // TILE, -(-rows.stop // TILE))
        sparse_product(total, self._gradient[rows], weight, lists, transposed=False, add=True)

    def add_weight(self, total: Tensor, x: Tensor, entries: slice, overwrite: bool) -> None:
        """As :meth:`parallel_lce.backends.triton_slices.Slice.add_weight`; ``entries`` begin at a multiple of 128."""
        if self._spread is None or self._spread[1] is not x:
            sums = x.new_empty(len(self._found.masses), x.shape[1], dtype=torch.float32)
            accumulate_nt(sums, self._found.masses, x.t(), overwrite=True)
            self._spread = sums, x
        first, last = entries.start // TILE, -(-entries.stop // TILE)
        lists = self._found.of_entries.of_blocks(first, last)
        rank_one = self._found.of_weight[entries], self._spread[0][first:last]
        sparse_product(
            total, self._gradient[:, entries], x, lists, transposed=True, add=not overwrite, rank_one=rank_one
        )
