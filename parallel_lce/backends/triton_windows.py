"""Recomputed slices of G of which only the windows with a large probability are projected.

The forward keeps the partials of its windows. A sample of the row blocks is projected in full: its sums over tokens
stand for those of all tokens (:mod:`parallel_lce.kernels.active_windows`), and ``"auto"`` is chosen by it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import matmul_nt
from parallel_lce.backends.interface import AUTO, Projection, Saved
from parallel_lce.backends.triton_filter import FilteredGradient, estimated, limits_of, sketch_of, worth_filtering
from parallel_lce.backends.triton_operands import product_of, stride_of
from parallel_lce.kernels.active_tiles import ActiveTiles, list_active_tiles
from parallel_lce.kernels.active_windows import (
    RowTerms,
    WindowPartials,
    list_active_windows,
    mean_shares,
    sampled_shares,
    window_bounds,
)
from parallel_lce.kernels.filter_estimates import RowFactors
from parallel_lce.kernels.projection import Product, logits_gradient
from parallel_lce.kernels.rewrite import TokenCoefficients
from parallel_lce.kernels.targets import place_targets
from parallel_lce.kernels.tile_scan import TILE, sample_blocks, scan_tiles
from parallel_lce.memory import some_rows

WINDOWED_BYTES = 256 << 20
"""Bytes of a slice of which only active windows are projected. In smaller ones they would not fill a GPU."""

# Row blocks that are projected in full: one in so many. Of few rows, where it would be more than one in _FEWEST_STEP,
# everything is projected.
_ONE_IN, _FEWEST_STEP = 15, 3


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
    # without a factor
    coefficients: TokenCoefficients
    # 0-dimensional, or None
    fp16_scale: Tensor | None
    # None: their entries are not placed
    targets: Targets | None

    def form(self, start: int, stop: int, gradient: Tensor, listed: Tensor | None = None) -> None:
        """Write ``gradient [R, stop - start]`` of the shard's entries ``[start, stop)``: all tiles, or those
        ``listed``."""
        product, c = product_of(self.projection, self.x, start, stop), self.coefficients
        others = c.gamma, c.delta, c.epsilon
        logits_gradient(product, self.partial, c.alpha, *others, self.fp16_scale, gradient, listed)
        if self.targets is not None:
            place_targets(gradient, start, *self.targets, self.fp16_scale)


def keeps_windows(projection: Projection, product: Product, entries: int) -> bool:
    """Whether the partials of a ``product``'s windows are worth keeping, where so many of its entries are recomputed.
    Under a soft-cap the mass of a window is not that of its gradient."""
    (rows, hidden_size), tile = product.x.shape, product.tile
    at_once = min(rows * entries, WINDOWED_BYTES // product.x.element_size())
    is_useful = fills_sample(rows) and worth_filtering(at_once * hidden_size)
    return is_useful and projection.softcap is None and tile.rows == TILE and tile.entries % TILE == 0


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

    ``allowance``: of :func:`parallel_lce.backends.triton_filter.estimated`, for ``"auto"``.
    """

    def __init__(
        self, rows: Rows, windows: WindowPartials, gradient_filter: float | str, allowance: Tensor | None
    ) -> None:
        self._rows, self._windows, self._filter, self._allowance = rows, windows, gradient_filter, allowance
        projection, alpha = rows.projection, rows.coefficients.alpha
        self._inverse = limits_of(rows.coefficients, projection, None, rows.fp16_scale)
        targets = rows.targets or (None, None, None)
        self._terms = RowTerms(rows.partial, alpha, projection.token_scale, rows.fp16_scale, self._inverse, *targets)
        sample, targets = sample_blocks(len(rows.x), _ONE_IN), None
        self._step = sample.step
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
        # [D] and 0-dimensional: what the tokens' mean logit is of a row of the weight, and of its bias
        self._mean, self._mean_scale = _mean_of(rows)

    def form(self, start: int, stop: int, gradient: Tensor) -> FilteredGradient:
        """Write the active windows of ``gradient [R, stop - start]``, the shard's entries ``[start, stop)``."""
        projection = self._rows.projection
        mean_logits, sketch = self._sketched(start, stop)
        of_weight = mean_shares(mean_logits, projection.scale)
        eps, sums = self._sampled_sums(start, stop, sketch, of_weight)
        of_hidden, sums = sampled_shares(sums, eps, of_weight)
        window = product_of(projection, self._rows.x, start, stop).tile.entries
        first = start // window
        tiles = window_bounds(self._windows, self._terms, gradient, first, window, eps, sums, projection.scale)
        self._rows.form(start, stop, gradient, list_active_windows(tiles, window, eps))
        scan_tiles(gradient, self._inverse, eps, bounds=tiles)
        lists = list_active_tiles(tiles.largest, eps)
        return FilteredGradient(gradient, ActiveTiles(*lists, tiles.masses, of_hidden, of_weight))

    def _sketched(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """The mean logits ``[stop - start]`` fp32, without the projection's scale, and for ``"auto"`` a sketch."""
        projection, sketch = self._rows.projection, None
        weight = some_rows(projection.weight, start, stop)
        if self._filter == AUTO:
            products = sketch_of(weight, self._mean)
            mean_logits, sketch = products[0], products[1:]
        else:
            mean_logits = matmul_nt(self._mean[None], weight)[0]
        if projection.bias is not None:
            mean_logits += some_rows(projection.bias, start, stop) * self._mean_scale
        return mean_logits, sketch

    def _sampled_sums(
        self, start: int, stop: int, sketch: Tensor | None, of_weight: Tensor
    ) -> tuple[float | Tensor, Tensor]:
        """The filter, and the column sums of a scan of the sample with it."""
        rows, eps, inverse = self._sampled, self._filter, self._sampled_inverse
        gradient = rows.x.new_empty(len(rows.x), stride_of(stop - start))[:, : stop - start]
        rows.form(start, stop, gradient)
        if isinstance(eps, str):
            assert sketch is not None and self._allowance is not None
            factors = RowFactors(None, None, rows.fp16_scale, *(rows.targets or (None, None, None)))
            scanned = scan_tiles(gradient, inverse, sketch=sketch)
            found = estimated(rows.x, factors, start, scanned, sketch, self._allowance, self._step, of_weight=of_weight)
            eps = found.eps
        sums = scan_tiles(gradient, inverse, eps).column_sums
        assert sums is not None
        return eps, sums


def _mean_of(rows: Rows) -> tuple[Tensor, Tensor]:
    """Over the tokens whose gradient is not 0, the means of the hidden states ``[D]`` and of 1, times their scales."""
    counted = rows.coefficients.alpha != 0
    weights = counted / counted.sum().clamp_(min=1)
    if rows.projection.token_scale is not None:
        weights = weights * rows.projection.token_scale
    return torch.mv(rows.x.t(), weights.to(rows.x.dtype)), weights.sum()
