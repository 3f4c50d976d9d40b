"""The products of a slice of G with its active tiles alone, and with what stands for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt
from parallel_lce.backends.interface import Projection
from parallel_lce.kernels.active_tiles import TILE, centroids, entry_shares, find_active_tiles
from parallel_lce.kernels.rewrite import TokenCoefficients
from parallel_lce.kernels.sparse_product import sparse_product


def inverse_limits(
    gradient_filter: float,
    coefficients: TokenCoefficients,
    projection: Projection,
    dx_factor: Tensor | None,
    fp16_scale: Tensor | None,
) -> Tensor:
    """``1 / limit [R]`` fp32, where a token's limit is what its row of G holds where the probability is
    ``gradient_filter``.

    ``dx_factor``: what the rows of G are still to be multiplied by. A row whose factor is 0 has no limit. In a row
    without probabilities every number but 0 lies beyond the limit.
    """
    limits = coefficients.alpha.abs() * (gradient_filter * abs(projection.scale))
    for more in (coefficients.factor, projection.token_scale, fp16_scale):
        if more is not None:
            limits = limits * more.abs()
    inverse = limits.reciprocal() if dx_factor is None else dx_factor.abs() / limits
    return inverse.nan_to_num_(nan=0.0)


class FilteredGradient:
    """A slice ``gradient [R, C]`` of the gradient of the logits, filtered."""

    def __init__(self, gradient: Tensor, inverse: Tensor) -> None:
        self._gradient = gradient
        self._found = find_active_tiles(gradient, inverse)
        self._shares = entry_shares(self._found.column_sums)
        # S [T, D] fp32, and the x of which they are sums.
        self._spread: tuple[Tensor, Tensor] | None = None

    def add_hidden(self, total: Tensor, weight: Tensor, rows: slice, overwrite: bool) -> None:
        """As :meth:`parallel_lce.backends.triton_slices.Slice.add_hidden`; ``total`` is fp32, and ``rows`` begin at a
        multiple of 128."""
        means = centroids(weight, self._shares)
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
        rank_one = self._shares[entries], self._spread[0][first:last]
        sparse_product(
            total, self._gradient[:, entries], x, lists, transposed=True, add=not overwrite, rank_one=rank_one
        )
