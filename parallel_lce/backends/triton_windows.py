"""Recomputed slices of G: only windows with a large probability are projected again.

The forward keeps the partials of its windows. A sample of the tokens is projected in full, and its sums estimate those
of all tokens (:mod:`parallel_lce.kernels.filter.windows`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import matmul_nt
from parallel_lce.backends.interface import Coefficients, Projection
from parallel_lce.backends.triton_filter import FilteredGradient, inverse_of, limits_of, worth_filtering
from parallel_lce.backends.triton_operands import product_of, stride_of
from parallel_lce.core.memory import some_rows
from parallel_lce.kernels.arithmetic import SAVED_FP16_SCALE
from parallel_lce.kernels.filter.tiles import TILE, ActiveTiles, entry_shares, list_tiles
from parallel_lce.kernels.filter.windows import list_active_windows, mean_shares, sample_tokens, window_masses
from parallel_lce.kernels.partials import WindowPartials
from parallel_lce.kernels.projection import Product, logits_gradient
from parallel_lce.kernels.rewrite import Saved
from parallel_lce.kernels.targets import Targets, place_targets
from parallel_lce.kernels.tuning import MEASURED

WINDOWED_BYTES = MEASURED.windowed_bytes


class Rows(NamedTuple):
    """Some tokens, and the tensors from which their rows of G are formed."""

    # [R, D]
    x: Tensor
    projection: Projection
    # [>= 3, R], contiguous
    partial: Tensor
    # without a factor
    coefficients: Coefficients
    # 0-dimensional, or None
    fp16_scale: Tensor | None
    # None: their entries are not placed
    targets: Targets | None

    def form(self, start: int, stop: int, gradient: Tensor, listed: Tensor | None = None) -> None:
        """Write ``gradient [R, stop - start]`` of the shard's entries ``[start, stop)``: all tiles, or those
        ``listed``."""
        product = product_of(self.projection, self.x, start, stop)
        logits_gradient(product, self.partial, self.coefficients, self.fp16_scale, gradient, listed)
        if self.targets is not None:
            place_targets(gradient, start, self.targets, self.fp16_scale)


def keeps_windows(projection: Projection, product: Product, entries: int) -> bool:
    """Whether to keep the partials of a ``product``'s windows. ``entries``: number of recomputed entries. Under a
    soft-cap the mass of a window is not that of its gradient, so its windows are not kept."""
    (rows, hidden_size), tile = product.x.shape, product.tile
    at_once = min(rows * entries, WINDOWED_BYTES // product.x.element_size())
    is_useful = fills_sample(rows) and worth_filtering(at_once * hidden_size)
    # Products for dW begin at multiples of 256 entries.
    return is_useful and projection.softcap is None and tile.rows == TILE and tile.entries in (TILE, 2 * TILE)


def kept_windows(saved: Saved | tuple[()]) -> WindowPartials | None:
    """The partials of the windows, if the forward saved them."""
    if not saved or saved.sums is None:
        return None
    return WindowPartials(saved.maxima, saved.sums, saved.softmax_shift)


def fills_sample(rows: int) -> bool:
    """Whether there is a sample of so many rows: it must be much smaller than all of them."""
    return sample_tokens(rows) is not None


class ActiveWindows:
    """Forms slices of the gradient of some ``rows`` by projecting their active windows: those of the shard's entries
    from ``first`` on, whose largest probability exceeds ``eps``."""

    def __init__(self, rows: Rows, windows: WindowPartials, first: int, eps: float) -> None:
        self._rows, self._windows, self._first, self._eps = rows, windows, first, eps
        projection, alpha = rows.projection, rows.coefficients.alpha
        self._limits = limits_of(rows.coefficients, projection, rows.fp16_scale)
        sample = sample_tokens(len(rows.x))
        assert sample is not None, "windows are given to rows that fill a sample"
        self._sample = sample
        if projection.token_scale is not None:
            projection = replace(projection, token_scale=sample.of(projection.token_scale))
        # The sampled rows are probabilities. In fp16 they are scaled, so that small ones do not underflow.
        alpha = alpha.abs() * inverse_of(self._limits, None) * SAVED_FP16_SCALE
        self._sampled = Rows(
            sample.of(rows.x),
            projection,
            sample.of(rows.partial.t()).t().contiguous(),
            Coefficients(sample.of(alpha), None, None),
            rows.fp16_scale,
            None if rows.targets is None else Targets(*map(sample.of, rows.targets)),
        )
        # [entries from ``first`` on], fp32.
        self._mean_logits = _mean_logits(rows, first)

    def form(self, start: int, stop: int, gradient: Tensor) -> FilteredGradient:
        """Write the active windows of ``gradient [R, stop - start]``, the shard's entries ``[start, stop)``."""
        eps, rows, entries = self._eps, self._rows, stop - start
        width = product_of(rows.projection, rows.x, start, stop).tile.entries
        of_weight = mean_shares(self._mean_logits[start - self._first : stop - self._first], width)
        given = self._windows, rows.partial, self._limits, rows.targets
        bounds, masses = window_masses(*given, start // width, width, entries, eps, gradient.dtype)
        sampled = self._sample.sums(self._sampled_gradient(start, stop), bounds, width, eps)
        of_hidden = entry_shares(sampled, width, of_weight)
        rows.form(start, stop, gradient, list_active_windows(bounds, eps))
        return FilteredGradient(
            gradient, ActiveTiles(*list_tiles(bounds, eps, entries, width), masses, of_hidden, of_weight)
        )

    def _sampled_gradient(self, start: int, stop: int) -> Tensor:
        """The gradient of the sample, for all entries of the slice. May be called once per slice: it places the
        targets."""
        rows = self._sampled
        gradient = rows.x.new_empty(len(rows.x), stride_of(stop - start))[:, : stop - start]
        rows.form(start, stop, gradient)
        return gradient


def _mean_logits(rows: Rows, first: int) -> Tensor:
    """Mean logits, fp32, of the shard's entries from ``first`` on, over the tokens with a gradient."""
    projection, counted = rows.projection, rows.coefficients.alpha != 0
    weights = counted / counted.sum().clamp_(min=1)
    if projection.token_scale is not None:
        weights = weights * projection.token_scale
    mean, of_bias = torch.mv(rows.x.t(), weights.to(rows.x.dtype)), weights.sum()
    result = matmul_nt(mean[None], some_rows(projection.weight, first, projection.real_rows))[0]
    if projection.bias is not None:
        result += some_rows(projection.bias, first, projection.real_rows) * of_bias
    return result.mul_(projection.scale)
