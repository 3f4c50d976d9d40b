"""The products of a slice of G: its active tiles, and the rank-one estimates of the other tiles."""

from __future__ import annotations

from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, matmul_nt
from parallel_lce.backends.interface import Coefficients, Projection
from parallel_lce.kernels.filter.products import sparse_product
from parallel_lce.kernels.filter.tiles import ActiveTiles, centroids
from parallel_lce.kernels.tuning import MEASURED

SMALLEST_FILTERED = MEASURED.smallest_filtered


def worth_filtering(multiplications: int) -> bool:
    """Whether the products of a slice take longer than the search for its active tiles. ``multiplications``: of each of
    the two products, for dX and dW."""
    return 4 * multiplications >= SMALLEST_FILTERED


def limits_of(coefficients: Coefficients, projection: Projection, fp16_scale: Tensor | None) -> Tensor:
    """``[R]`` fp32: a token's gradient of a logit whose probability is 1, as its row of G holds it."""
    limits = coefficients.alpha * projection.scale
    for factor in (coefficients.factor, projection.token_scale, fp16_scale):
        if factor is not None:
            limits *= factor
    return limits


def inverse_of(limits: Tensor, dx_factor: Tensor | None) -> Tensor:
    """``|dx_factor| / |limits| [R]`` fp32: times an element of G it is that element's probability. ``dx_factor [R]``:
    the factors with which G's rows enter dX, None for 1. If it is 0, the result is 0, and no element is large. If the
    limit is 0, the result is the largest number, and every element but 0 is large."""
    inverse = limits.reciprocal() if dx_factor is None else dx_factor / limits
    # Finite, so that 0 times it is 0.
    return inverse.abs_().nan_to_num_()


class FilteredGradient:
    """The products of a slice's gradient of the logits ``[R, C]``. They read its active tiles alone."""

    def __init__(self, gradient: Tensor, found: ActiveTiles) -> None:
        self._gradient, self._found = gradient, found
        # S [windows, D] fp32, sums of the rows of x by mass; and that x.
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
