"""Recomputed slices of G of which only the windows with a large probability are projected.

The forward keeps the partials of its windows. A sample of the tokens is projected in full: its sums stand for those of
all tokens (:mod:`parallel_lce.kernels.active_windows`), and ``"auto"`` is chosen by it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import matmul_nt
from parallel_lce.backends.interface import Projection, Saved
from parallel_lce.backends.triton_filter import (
    FilteredGradient,
    estimated,
    inverse_limits_of,
    sample_groups,
    sampled_errors,
    sketch_of,
    worth_filtering,
)
from parallel_lce.backends.triton_operands import product_of, stride_of
from parallel_lce.kernels.active_tiles import ActiveTiles, entry_shares, list_tiles
from parallel_lce.kernels.active_windows import (
    Places,
    RowTerms,
    WindowPartials,
    list_active_windows,
    window_bounds,
    window_masses,
)
from parallel_lce.kernels.filter_choice import Allowance, SampledErrors
from parallel_lce.kernels.filter_estimates import RowFactors
from parallel_lce.kernels.projection import Product, logits_gradient
from parallel_lce.kernels.rewrite import TokenCoefficients
from parallel_lce.kernels.targets import place_targets
from parallel_lce.kernels.tile_scan import GROUP, TILE, ScannedTiles, scan_tiles
from parallel_lce.kernels.window_shares import mean_shares, share_masses
from parallel_lce.memory import some_rows

WINDOWED_BYTES = 256 << 20
"""Bytes of a slice of which only active windows are projected. In smaller ones they would not fill a GPU."""

# Where the sample that is projected in full would be more than one in so many tokens, everything is projected.
_FEWEST_STEP = 3


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
    return sample_groups(rows).step >= _FEWEST_STEP


class ActiveWindows:
    """Forms slices of the gradient of some ``rows`` by projecting their active windows: those of the shard's entries
    from ``first`` on."""

    def __init__(self, rows: Rows, windows: WindowPartials, first: int) -> None:
        self._rows, self._windows, self._first = rows, windows, first
        projection, alpha = rows.projection, rows.coefficients.alpha
        targets = rows.targets or (None, None, None)
        self._terms = RowTerms(rows.partial, alpha, projection.token_scale, rows.fp16_scale, *targets)
        sample, targets = sample_groups(len(rows.x)), None
        self._sample = sample
        if rows.targets is not None:
            targets = Targets(*map(sample.of, rows.targets))
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
        self._sampled_inverse = sample.of(inverse_limits_of(rows.coefficients, rows.projection, None, rows.fp16_scale))
        # [D] and 0-dimensional: what the tokens' mean logit is of a row of the weight, and of its bias
        self._mean, self._mean_scale = _mean_of(rows)
        # Of all entries from ``first`` on, fp32: the mean logits, without the projection's scale.
        self._mean_logits: Tensor | None = None
        # Of the slices that were looked at, ``(start, stop)``: the sums over each group of the sample.
        self._column_sums: dict[tuple[int, int], Tensor] = {}

    def choose(self, allowance: Allowance, width: int) -> Tensor:
        """One filter for all entries from ``first`` on, of which it looks at ``width`` at a time: fp32 ``[1]``. Then
        slices of that width are formed. Their sums over groups are kept until then: of 16-bit gradients 1/24 (1536
        tokens) to 1/104 (6656 tokens and more) of the memory."""
        first, real = self._first, self._rows.projection.real_rows
        mean_logits, errors, rows = self._mean.new_empty(real - first, dtype=torch.float32), [], self._sampled
        scale = rows.projection.scale
        for start in range(first, real, width):
            stop = min(start + width, real)
            products = sketch_of(some_rows(rows.projection.weight, start, stop), self._mean)
            of_slice, sketch = mean_logits[start - first : stop - first], products[1:]
            of_slice.copy_(products[0])
            self._add_bias(of_slice, start, stop)
            factors = RowFactors(None, None, rows.fp16_scale, *(rows.targets or (None, None))[:2])
            scanned = self._scanned(start, stop, sketch)
            self._column_sums[start, stop] = scanned.column_sums
            # What is skipped is whole windows, and of a window the mass is known.
            places, shares = self._places(start, stop), mean_shares(of_slice, scale)
            bounds = window_bounds(self._windows, self._terms, places, scale)
            scanned = scanned._replace(largest=self._sample.of_tiles(bounds))
            scanned = share_masses(scanned, shares.of_tiles, sketch, places.window)
            errors.append(sampled_errors(rows.x, factors, start, scanned, sketch, of_weight=shares.of_entries))
        self._mean_logits = mean_logits
        return estimated(SampledErrors.of_slices(errors), allowance, self._sample.step, rows.x.shape[1]).eps

    def form(self, start: int, stop: int, gradient: Tensor, eps: float | Tensor) -> FilteredGradient:
        """Write the active windows of ``gradient [R, stop - start]``, the shard's entries ``[start, stop)``."""
        scale, mean_logits, places = self._rows.projection.scale, self._all_mean_logits(), self._places(start, stop)
        of_weight, of_tiles = mean_shares(mean_logits[start - self._first : stop - self._first], scale)
        sums = self._column_sums.pop((start, stop), None)
        if sums is None:
            sums = self._scanned(start, stop).column_sums
        bounds, masses = window_masses(self._windows, self._terms, places, scale, of_tiles, eps, gradient.dtype)
        of_hidden = entry_shares(self._sample.of_tiles(bounds), sums, eps, of_weight)
        self._rows.form(start, stop, gradient, list_active_windows(bounds, places.window, eps))
        return FilteredGradient(gradient, ActiveTiles(list_tiles(bounds, eps), masses, of_hidden, of_weight))

    def _scanned(self, start: int, stop: int, sketch: Tensor | None = None) -> ScannedTiles:
        """Of the sample, which is projected in full. Each slice may be asked for once: its targets are then placed."""
        rows = self._sampled
        gradient = rows.x.new_empty(len(rows.x), stride_of(stop - start))[:, : stop - start]
        rows.form(start, stop, gradient)
        return scan_tiles(gradient, self._sampled_inverse, sketch=sketch, height=GROUP)

    def _places(self, start: int, stop: int) -> Places:
        window = product_of(self._rows.projection, self._rows.x, start, stop).tile.entries
        return Places(start // window, stop - start, window)

    def _all_mean_logits(self) -> Tensor:
        if self._mean_logits is None:
            first, real = self._first, self._rows.projection.real_rows
            self._mean_logits = matmul_nt(self._mean[None], some_rows(self._rows.projection.weight, first, real))[0]
            self._add_bias(self._mean_logits, first, real)
        return self._mean_logits

    def _add_bias(self, mean_logits: Tensor, start: int, stop: int) -> None:
        bias = self._rows.projection.bias
        if bias is not None:
            mean_logits += some_rows(bias, start, stop) * self._mean_scale


def _mean_of(rows: Rows) -> tuple[Tensor, Tensor]:
    """Over the tokens whose gradient is not 0, the means of the hidden states ``[D]`` and of 1, times their scales."""
    counted = rows.coefficients.alpha != 0
    weights = counted / counted.sum().clamp_(min=1)
    if rows.projection.token_scale is not None:
        weights = weights * rows.projection.token_scale
    return torch.mv(rows.x.t(), weights.to(rows.x.dtype)), weights.sum()
