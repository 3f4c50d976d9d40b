"""The products of a slice of G with its active tiles alone, and with what stands for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.interface import Projection
from parallel_lce.kernels.filter.products import sparse_product
from parallel_lce.kernels.filter.tiles import TILE, ActiveTiles, centroids, inverse_limits
from parallel_lce.kernels.rewrite import TokenCoefficients

# Fewest flops of a slice's products that are filtered. Of smaller slices, as at D=1024 with logits_budget=0, a filtered
# backward takes the host longer than an exact one takes the GPU.
SMALLEST_FILTERED = 1e12


def worth_filtering(multiplications: int) -> bool:
    """Whether the products of a slice take longer than finding its active tiles: dX and dW, of so many multiplications
    each."""
    return 4 * multiplications >= SMALLEST_FILTERED


def inverse_limits_of(
    coefficients: TokenCoefficients, projection: Projection, dx_factor: Tensor | None, fp16_scale: Tensor | None
) -> Tensor:
    """``1 / limit [R]`` fp32, where a token's limit is what its row of G holds where the probability is 1.
    ``dx_factor [R]``: what the rows of G are still to be multiplied by."""
    factors = coefficients.factor, projection.token_scale, fp16_scale
    return inverse_limits(coefficients.alpha, projection.scale, factors, dx_factor)


class FilteredGradient:
    """The products of a slice's gradient of the logits ``[R, C]``, of which the active tiles alone are read."""

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
