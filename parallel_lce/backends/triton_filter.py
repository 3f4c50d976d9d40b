"""The products of a slice of G with its active tiles alone, and with what stands for the others."""

from __future__ import annotations

from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, matmul_nt
from parallel_lce.backends.interface import Coefficients, Projection
from parallel_lce.kernels.filter.products import sparse_product
from parallel_lce.kernels.filter.tiles import ActiveTiles, centroids
from parallel_lce.kernels.tuning import MEASURED

SMALLEST_FILTERED = MEASURED.smallest_filtered


def worth_filtering(multiplications: int) -> bool:
    """Whether the products of a slice take longer than finding its active tiles: dX and dW, of so many multiplications
    each."""
    return 4 * multiplications >= SMALLEST_FILTERED


def limits_of(coefficients: Coefficients, projection: Projection, fp16_scale: Tensor | None) -> Tensor:
    """``[R]`` fp32: what a token's row of G holds where the probability is 1."""
    limits = coefficients.alpha * projection.scale
    for factor in (coefficients.factor, projection.token_scale, fp16_scale):
        if factor is not None:
            limits *= factor
    return limits


def inverse_of(limits: Tensor, dx_factor: Tensor | None) -> Tensor:
    """``|dx_factor| / |limits| [R]`` fp32. A row whose ``dx_factor`` is 0 has no limit. In a row without probabilities
    every number but 0 lies beyond the limit. ``dx_factor [R]``: what the rows of G are still to be multiplied by."""
    inverse = limits.reciprocal() if dx_factor is None else dx_factor / limits
    # Finite, so that 0 times it is 0.
    return inverse.abs_().nan_to_num_()


class FilteredGradient:
    """The products of a slice's gradient of the logits ``[R, C]``, of which the active tiles alone are read."""

    def __init__(self, gradient: Tensor, found: ActiveTiles) -> None:
        self._gradient, self._found = gradient, found
        # S [windows, D] fp32, and the x of which they are sums.
        self._spread: tuple[Tensor, Tensor] | None = None

    def add_hidden(self, total: Tensor, weight: Tensor, rows: slice, overwrite: bool) -> None:
        """As :meth:`parallel_lce.backends.triton_slices.Slice.add_hidden`; ``total`` is fp32, and ``rows`` begin at a
        multiple of 128."""
        found = self._found
        means = centroids(weight, found.of_hidden, found.width)
        accumulate_nt(total, found.masses.t()[rows], means.t(), overwrite=overwrite)
        lists = found.of_rows.of_blocks(rows)
        sparse_product(total, self._gradient[rows], weight, lists, transposed=False, add=True)

    def add_weight(self, total: Tensor, x: Tensor, entries: slice, overwrite: bool) -> None:
        """As :meth:`parallel_lce.backends.triton_slices.Slice.add_weight`; ``entries`` begin at a window's first."""
        found = self._found
        if self._spread is None or self._spread[1] is not x:
            self._spread = matmul_nt(found.masses, x.t()), x
        sparse_product(
            total,
            self._gradient[:, entries],
            x,
            found.of_entries.of_blocks(entries),
            transposed=True,
            add=not overwrite,
            rank_one=(found.of_weight[entries], self._spread[0][entries.start // found.width :]),
            width=found.width,
        )
