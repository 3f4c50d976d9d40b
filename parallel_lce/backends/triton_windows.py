"""Recomputed slices of G of which only the windows with a large probability are projected.

The forward keeps the partials of its windows. A sample of the row blocks is projected in full: its sums over tokens
stand for those of all tokens (:mod:`parallel_lce.kernels.active_windows`), and ``"auto"`` is chosen by it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.interface import AUTO, Projection, Saved
from parallel_lce.backends.triton_filter import (
    AUTO_ERROR,
    FilteredGradient,
    UnfilteredSlice,
    estimated,
    inverse_limits,
    sketch_of,
)
from parallel_lce.backends.triton_operands import product_of, stride_of
from parallel_lce.kernels.active_tiles import ActiveTiles, list_active_tiles
from parallel_lce.kernels.active_windows import (
    RowTerms,
    SampledShares,
    WindowPartials,
    list_active_windows,
    sampled_shares,
    window_bounds,
)
from parallel_lce.kernels.filter_estimates import RowFactors
from parallel_lce.kernels.projection import logits_gradient
from parallel_lce.kernels.rewrite import TokenCoefficients
from parallel_lce.kernels.targets import place_targets
from parallel_lce.kernels.tile_scan import TILE, sample_blocks, scan_tiles
from parallel_lce.kernels.tuning import Tile
from parallel_lce.memory import some_rows

WINDOWED_BYTES = 256 << 20
"""Bytes of a slice of which only active windows are projected. In smaller ones they would not fill a GPU."""

# Row blocks that are projected in full: one in so many. If it would be more than one in FEWEST_STEP, all are.
_ONE_IN, _FEWEST_STEP = 16, 4
# What "auto" may add by the estimates of so small a sample.
_AUTO_ERROR = AUTO_ERROR / 2


class Targets(NamedTuple):
    """Of :func:`parallel_lce.kernels.targets.place_targets`, ``[R]`` each."""

    target: Tensor
    residual: Tensor
    unshared: Tensor


class Rows(NamedTuple):
    """Some tokens, and what their rows of G are formed from."""

    # [R, D]
    x: Tensor
    projection: Projection
    # [>= 3, R], contiguous
    partial: Tensor
    # alpha alone, without a factor
    coefficients: TokenCoefficients
    # 0-dimensional, or None
    fp16_scale: Tensor | None
    # None without a gradient of targets
    targets: Targets | None

    def form(self, start: int, stop: int, gradient: Tensor, listed: Tensor | None = None) -> None:
        """Write ``gradient [R, stop - start]`` of the shard's entries ``[start, stop)``: all tiles, or those
        ``listed``."""
        product, alpha = product_of(self.projection, self.x, start, stop), self.coefficients.alpha
        logits_gradient(product, self.partial, alpha, None, None, None, self.fp16_scale, gradient, listed)
        if self.targets is not None:
            place_targets(gradient, start, *self.targets, self.fp16_scale)


def keeps_windows(projection: Projection, tile: Tile) -> bool:
    """Whether partials of windows of this tile tell what :class:`ActiveWindows` needs. Under a soft-cap the mass of a
    window is not that of its gradient."""
    return projection.softcap is None and tile.rows == TILE and tile.entries % TILE == 0


def kept_windows(saved: Saved) -> WindowPartials | None:
    """The partials of the windows, if they are part of what a forward saved."""
    if len(saved) % 2 == 0:
        return None
    _, maxima, *shift, sums = saved
    return WindowPartials(maxima, sums, shift[0] if shift else None)


def fills_sample(rows: int) -> bool:
    """Whether a sample of so many rows is much less than all of them."""
    return sample_blocks(rows, _ONE_IN).step >= _FEWEST_STEP


class ActiveWindows:
    """Forms slices of the gradient of some ``rows`` by projecting their active windows.

    ``added``: of :func:`parallel_lce.backends.triton_filter.estimated`, for ``"auto"``.
    """

    def __init__(self, rows: Rows, windows: WindowPartials, gradient_filter: float | str, added: Tensor | None) -> None:
        self._rows, self._windows, self._filter, self._added = rows, windows, gradient_filter, added
        projection, alpha = rows.projection, rows.coefficients.alpha
        self._inverse = inverse_limits(rows.coefficients, projection, None, rows.fp16_scale)
        target, _, unshared = rows.targets or (None, None, None)
        self._terms = RowTerms(
            rows.partial, alpha, projection.token_scale, rows.fp16_scale, self._inverse, target, unshared
        )
        sample, targets = sample_blocks(len(rows.x), _ONE_IN), None
        if rows.targets is not None:
            target, residual, unshared = map(sample.of, rows.targets)
            # Placing a target changes what is left of it.
            targets = Targets(target, residual.clone(), unshared)
        if projection.token_scale is not None:
            projection = replace(projection, token_scale=sample.of(projection.token_scale))
        self._sampled = Rows(
            sample.of(rows.x),
            projection,
            sample.of(rows.partial, 1),
            TokenCoefficients(sample.of(alpha), None, None, None, None, None),
            rows.fp16_scale,
            targets,
        )
        self._sampled_inverse = sample.of(self._inverse)
        # [D], of the tokens that have a gradient
        self._mean = _mean_of(rows)

    def form(self, start: int, stop: int, gradient: Tensor) -> FilteredGradient:
        """Write the active windows of ``gradient [R, stop - start]``, the shard's entries ``[start, stop)``."""
        eps, shares = self._sample(start, stop)
        scale, x = self._rows.projection.scale, self._rows.x
        window = product_of(self._rows.projection, x, start, stop).tile.entries
        tiles = window_bounds(self._windows, self._terms, gradient, start // window, window, eps, shares.sums, scale)
        self._rows.form(start, stop, gradient, list_active_windows(tiles, window, eps))
        scan_tiles(gradient, self._inverse, eps, bounds=tiles)
        lists = list_active_tiles(tiles.largest, eps)
        return FilteredGradient(gradient, ActiveTiles(*lists, tiles.masses, shares.of_hidden, shares.of_weight))

    def _sample(self, start: int, stop: int) -> tuple[float | Tensor, SampledShares]:
        """The filter, and what stands for the entries of a tile that is skipped."""
        rows, eps, inverse = self._sampled, self._filter, self._sampled_inverse
        gradient = rows.x.new_empty(len(rows.x), stride_of(stop - start))[:, : stop - start]
        rows.form(start, stop, gradient)
        projection = rows.projection
        weight = some_rows(projection.weight, start, stop)
        if isinstance(eps, str):
            assert eps == AUTO
            sketch = sketch_of(weight)
            factors = RowFactors(None, None, rows.fp16_scale, *(rows.targets or (None, None, None)))
            scanned = scan_tiles(gradient, inverse, sketch=sketch)
            assert self._added is not None
            given = UnfilteredSlice(gradient, weight, rows.x, factors, start)
            eps = estimated(given, scanned, sketch, self._added, limit=_AUTO_ERROR).eps
        sums = scan_tiles(gradient, inverse, eps).column_sums
        assert sums is not None
        bias = None if projection.bias is None else some_rows(projection.bias, start, stop)
        return eps, sampled_shares(sums, eps, torch.mv(weight, self._mean), bias, projection.scale)


def _mean_of(rows: Rows) -> Tensor:
    """The mean ``[D]`` of the hidden states, times their scales, of the tokens whose gradient is not 0."""
    counted = rows.coefficients.alpha != 0
    weights = counted / counted.sum().clamp_(min=1)
    if rows.projection.token_scale is not None:
        weights = weights * rows.projection.token_scale
    return torch.mv(rows.x.t(), weights.to(rows.x.dtype))
