"""The products of a slice of G with its active tiles alone, and with what stands for the others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt
from parallel_lce.backends.interface import AUTO, Projection
from parallel_lce.kernels.active_tiles import ActiveTiles, active_tiles_of, centroids, find_active_tiles
from parallel_lce.kernels.filter_choice import Allowance, SampledErrors, choose_level
from parallel_lce.kernels.filter_estimates import LEVELS, SIGNS, RowFactors, level_products, signs
from parallel_lce.kernels.rewrite import TokenCoefficients
from parallel_lce.kernels.sparse_product import sparse_product
from parallel_lce.kernels.tile_scan import (
    GROUP,
    TILE,
    BlockSample,
    ScannedTiles,
    TokenTargets,
    inverse_limits,
    sample_blocks,
    scan_tiles,
)

# Fewest flops of a slice's products that are filtered. Of smaller slices, as at D=1024 with logits_budget=0, a filtered
# backward takes the host longer than an exact one takes the GPU.
SMALLEST_FILTERED = 1e12
# Hidden elements with which the products of a tile take as long as reading it to see whether it is active. Where a
# filter skips a smaller share of the tiles than this is of the hidden size, it does not pay. Where windows are
# projected again this is rough: a window is skipped whole.
HIDDEN_PER_SCAN = 144
# What is looked at to choose a filter: one in so many row blocks, or groups of tokens.
_BLOCKS_ONE_IN, _GROUPS_ONE_IN = 5, 13


class UnfilteredSlice(NamedTuple):
    """A slice of the gradient of the logits and what its products take beside it."""

    # [R, C]
    gradient: Tensor
    # [C, D]: the slice's rows
    weight: Tensor
    # [R, D]
    x: Tensor
    factors: RowFactors
    # None: there are none
    targets: TokenTargets | None
    # id of the slice's first entry
    first: int


class Estimates(NamedTuple):
    """Errors, in Frobenius norms, that filters add to parts of dX and dW."""

    # fp32 [1]: the largest filter that adds no more than the allowance, or 0
    eps: Tensor
    # fp32 [2, LEVELS], at each level: relative to dX's part, and to the largest error of dW
    errors: Tensor


def worth_filtering(multiplications: int) -> bool:
    """Whether the products of a slice take longer than finding its active tiles: dX and dW, of so many multiplications
    each."""
    return 4 * multiplications >= SMALLEST_FILTERED


def sample_groups(rows: int) -> BlockSample:
    """Where it is known which windows have large probabilities, a sample needs no whole tiles: it has tokens of many
    places."""
    return sample_blocks(rows, _GROUPS_ONE_IN, GROUP)


def sample_of(rows: int, knows_windows: bool) -> BlockSample:
    """The tokens that are looked at to choose a filter."""
    groups = sample_groups(rows)
    return groups if knows_windows and groups.step > 1 else sample_blocks(rows, _BLOCKS_ONE_IN)


def inverse_limits_of(
    coefficients: TokenCoefficients, projection: Projection, dx_factor: Tensor | None, fp16_scale: Tensor | None
) -> Tensor:
    """``1 / limit [R]`` fp32, where a token's limit is what its row of G holds where the probability is 1.
    ``dx_factor [R]``: what the rows of G are still to be multiplied by."""
    factors = coefficients.factor, projection.token_scale, fp16_scale
    return inverse_limits(coefficients.alpha, projection.scale, factors, dx_factor)


def sketch_of(weight: Tensor, mean: Tensor | None = None) -> Tensor:
    """``[8, C]`` fp32: the rows of ``weight [C, D]``, less their mean, times random signs; then random signs. Before
    them, with ``mean [D]``, the rows themselves times that."""
    (entries, hidden_size), first = weight.shape, 0 if mean is None else 1
    # Rows begin at multiples of 16 bytes.
    rows = weight.new_empty(first + 2 * SIGNS, -(-entries // 8) * 8, dtype=torch.float32)[:, :entries]
    factors = weight.new_empty(first + SIGNS, hidden_size)
    if mean is not None:
        factors[0] = mean
    signs(factors[first:], seed=0)
    accumulate_nt(rows[: first + SIGNS], factors, weight, overwrite=True)
    # What all rows have in common does not count: over the whole vocabulary a token's gradients sum to 0.
    of_hidden = rows[first : first + SIGNS]
    of_hidden -= of_hidden.mean(1, keepdim=True)
    signs(rows[first + SIGNS :], seed=1)
    return rows


def sampled_errors(
    x: Tensor,
    factors: RowFactors,
    first: int,
    scanned: ScannedTiles,
    sketch: Tensor,
    sample: BlockSample | None = None,
    of_weight: Tensor | None = None,
    only_if: Tensor | None = None,
) -> SampledErrors:
    """Of a slice whose first entry is ``first``. ``scanned``: a sample, with the products of ``sketch`` and its ``x``.
    The others: as for :func:`level_products`."""
    products = level_products(scanned, sketch, factors, first, sample, of_weight, only_if)
    product = sketch.new_empty(len(products.signed), x.shape[1])
    accumulate_nt(product, products.signed, x.t(), overwrite=True)
    weight_norms = torch.linalg.vector_norm(product.view(3 * LEVELS, -1), dim=1)
    return SampledErrors(products.norms, weight_norms, products.skipped, scanned.largest.numel())


def estimated(errors: SampledErrors, allowance: Allowance, step: int, hidden_size: int, **stage) -> Estimates:
    """``step``: there are so many times as many tokens as were looked at. ``stage``: as for :func:`choose_level`."""
    fewest = errors.tiles * HIDDEN_PER_SCAN / hidden_size
    return Estimates(*choose_level(errors, allowance, step, fewest, **stage))


def filtered(
    given: UnfilteredSlice,
    inverse: Tensor,
    gradient_filter: float | str,
    allowance: Allowance | None = None,
    bounds: Tensor | None = None,
) -> FilteredGradient:
    """A slice filtered by a probability or, with ``"auto"``, by the one that is chosen for it. ``inverse [R]``: of
    :func:`inverse_limits_of`. For ``"auto"``: ``allowance``, and ``bounds`` of the tiles' largest entries, as of
    :func:`parallel_lce.kernels.active_windows.window_bounds`, if they are known."""
    if isinstance(gradient_filter, str):
        assert gradient_filter == AUTO and allowance is not None
        found = _chosen(given, inverse, allowance, bounds)
    else:
        found = find_active_tiles(given.gradient, inverse, gradient_filter, given.targets, given.first)
    return FilteredGradient(given.gradient, found)


def _chosen(given: UnfilteredSlice, inverse: Tensor, allowance: Allowance, bounds: Tensor | None) -> ActiveTiles:
    (rows, hidden_size), sketch = given.x.shape, sketch_of(given.weight)
    sample = sample_of(rows, bounds is not None)
    if sample.height == TILE:
        bounds = None
    targets, first, x = given.targets, given.first, sample.of(given.x)
    scanned = scan_tiles(given.gradient, inverse, targets=targets, first=first, sketch=sketch, sample=sample)

    def choice(largest: Tensor, only_if: Tensor | None = None, **stage) -> Tensor:
        tiles = scanned._replace(largest=largest)
        errors = sampled_errors(x, given.factors, first, tiles, sketch, sample, only_if=only_if)
        return estimated(errors, allowance, sample.step, hidden_size, only_if=only_if, **stage).eps

    if bounds is None:
        return find_active_tiles(given.gradient, inverse, choice(scanned.largest), targets, first)
    # Within the bounds less is skipped than by the entries. If even that were too much, no tile need be read.
    only_if = choice(sample.of_tiles(bounds), tentative=True)
    whole = scan_tiles(given.gradient, inverse, targets=targets, first=first, only_if=only_if)
    return active_tiles_of(whole, choice(sample.of_tiles(whole.largest), only_if))


class FilteredGradient:
    """The products of a slice's gradient of the logits ``[R, C]``, of which the active tiles alone are read. Where all
    are active, the products of the masses take little time."""

    def __init__(self, gradient: Tensor, found: ActiveTiles) -> None:
        self._gradient, self._found = gradient, found
        # S [T, D] fp32, and the x of which they are sums.
        self._spread: tuple[Tensor, Tensor] | None = None

    def add_hidden(self, total: Tensor, weight: Tensor, rows: slice, overwrite: bool) -> None:
        """As :meth:`parallel_lce.backends.triton_slices.Slice.add_hidden`; ``total`` is fp32, and ``rows`` begin at a
        multiple of 128."""
        means, (first, last) = centroids(weight, self._found.of_hidden), _blocks(rows)
        masses, lists = self._found.masses[:, rows], self._found.listed.masses_of_rows.of_blocks(first, last)
        sparse_product(total, masses, means, lists, transposed=True, add=not overwrite)
        lists = self._found.listed.of_rows.of_blocks(first, last)
        sparse_product(total, self._gradient[rows], weight, lists, transposed=False, add=True)

    def add_weight(self, total: Tensor, x: Tensor, entries: slice, overwrite: bool) -> None:
        """As :meth:`parallel_lce.backends.triton_slices.Slice.add_weight`; ``entries`` begin at a multiple of 128."""
        if self._spread is None or self._spread[1] is not x:
            sums = x.new_empty(len(self._found.masses), x.shape[1], dtype=torch.float32)
            lists = self._found.listed.masses_of_groups
            sparse_product(sums, self._found.masses, x, lists, transposed=False, add=False)
            self._spread = sums, x
        first, last = _blocks(entries)
        lists = self._found.listed.of_entries.of_blocks(first, last)
        rank_one = self._found.of_weight[entries], self._spread[0][first:last]
        sparse_product(
            total, self._gradient[:, entries], x, lists, transposed=True, add=not overwrite, rank_one=rank_one
        )


def _blocks(rows: slice) -> tuple[int, int]:
    """The blocks of 128 rows, which begin at a multiple of that."""
    return rows.start // TILE, -(-rows.stop // TILE)
