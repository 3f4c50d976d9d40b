"""Filtered gradients in the triton backend: products with the active tiles of a slice of G, and with rank-one estimates
of the other tiles; and recomputed slices in which only the active windows are projected again.

The partials of the forward's windows tell which windows are active. A sample of the tokens is projected in full, and
its sums estimate the sums over all tokens (:mod:`parallel_lce.features.filter.kernels.windows`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate, matmul
from parallel_lce.backends.interface import BackwardTask, Coefficients, ForwardTask
from parallel_lce.backends.triton_operands import GradientOperands, aligned_contiguous, product_of, stride_of
from parallel_lce.core.memory import some_rows
from parallel_lce.features.filter.choice import Choice, choice_for
from parallel_lce.features.filter.kernels.products import sparse_product
from parallel_lce.features.filter.kernels.tiles import (
    TILE,
    ActiveTiles,
    active_tile_lists,
    centroids,
    entry_shares,
    find_active_tiles,
)
from parallel_lce.features.filter.kernels.windows import list_active_windows, mean_shares, sample_tokens, window_masses
from parallel_lce.kernels.arithmetic import SAVED_FP16_SCALE
from parallel_lce.kernels.partials import WindowPartials
from parallel_lce.kernels.token_gradients import Targets

# Measured on an H200. Fewest flops of a slice's products that are filtered. For smaller slices, as at D=1024 with
# logits_budget=0, the host needs longer for a filtered backward than the GPU for an exact one.
SMALLEST_FILTERED = 1e12
# Bytes of a slice in which only active windows are projected. A smaller slice has too few to fill the GPU.
WINDOWED_BYTES = 256 << 20


def worth_filtering(multiplications: int) -> bool:
    """Whether the products of a slice take longer than the search for its active tiles. ``multiplications``: in one of
    the two products, for dX or dW."""
    return 4 * multiplications >= SMALLEST_FILTERED


def units_of(rows: GradientOperands) -> Tensor:
    """Units ``[R]`` fp32: a token's gradient of a logit whose probability is 1, with the factors of its row of G."""
    logit_map = rows.projection.logit_map
    units = rows.coefficients.alpha * logit_map.scale
    for factor in (logit_map.token_scale, rows.fp16_scale):
        if factor is not None:
            units *= factor
    return units


def inverse_of(units: Tensor, dx_factor: Tensor | None) -> Tensor:
    """``|dx_factor| / |units| [R]`` fp32. An element of G times this number is a probability. ``dx_factor [R]``: the
    factors with which G's rows enter dX, None for 1. Factor 0 gives 0. Unit 0 gives the largest fp32 number."""
    inverse = units.reciprocal() if dx_factor is None else dx_factor / units
    # Finite, so that 0 times it is 0.
    return inverse.abs_().nan_to_num_()


class FilterForm:
    """The :class:`parallel_lce.backends.interface.SliceForm` of one block's backward."""

    def __init__(self, eps: float, chosen: list[tuple[bool, Choice | None]]) -> None:
        """``chosen``: shared by all blocks, and backwards, of a call. Whether they are filtered, and what counts their
        tiles. The first block decides."""
        self._eps, self._chosen = eps, chosen
        # The forward's window partials, if only the active windows are projected again.
        self._windows: WindowPartials | None = None
        # By the first row of a piece.
        self._active: dict[int, ActiveWindows] = {}

    def begin(self, task: BackwardTask) -> int:
        """Chooses whether the call is filtered, and whether only active windows are projected again."""
        windows, entries = _windows_of(task), task.projection.real_rows
        if not self._chosen and worth_filtering(task.x.numel() * entries):
            choice = choice_for(task.x, entries, self._eps, windows is not None)
            filters, is_counted = (True, False) if choice is None else choice.begin()
            self._chosen.append((filters, choice if is_counted else None))
        self._windows = windows if self._filters else None
        return 0 if self._windows is None else WINDOWED_BYTES

    @property
    def _filters(self) -> bool:
        return not self._chosen or self._chosen[0][0]

    def recomputes(self, x: Tensor, entries: int) -> bool:
        return self._windows is not None and fills_sample(len(x)) and worth_filtering(x.numel() * entries)

    def recompute(self, piece: slice, rows: GradientOperands, start: int, gradient: Tensor) -> FilteredGradient:
        assert self._windows is not None
        active = self._active.get(piece.start)
        if active is None:
            active = ActiveWindows(rows, self._windows.of_rows(piece), start, self._eps)
            self._active[piece.start] = active
        return self._counted(gradient, active.form(start, start + gradient.shape[1], gradient))

    def products(
        self, rows: GradientOperands, start: int, gradient: Tensor, dx_factor: Tensor | None
    ) -> FilteredGradient | None:
        if not self._filters or not worth_filtering(rows.x.numel() * gradient.shape[1]):
            return None
        inverse = inverse_of(units_of(rows), dx_factor)
        return self._counted(gradient, find_active_tiles(gradient, inverse, self._eps, rows.targets, start))

    def _counted(self, gradient: Tensor, active: ActiveTiles) -> FilteredGradient:
        if self._chosen and (choice := self._chosen[0][1]) is not None:
            choice.count(active.of_rows)
        return FilteredGradient(gradient, active)


class FilteredGradient:
    """:class:`parallel_lce.backends.interface.SliceProducts` that read the active tiles of a slice alone."""

    def __init__(self, gradient: Tensor, active: ActiveTiles) -> None:
        self._gradient, self._active = gradient, active
        # For each window the sum of the rows of x, weighted by mass, [windows, D] fp32; and the x that was summed.
        self._spread: tuple[Tensor, Tensor] | None = None

    def add_hidden(self, total: Tensor, weight: Tensor, rows: slice, overwrite: bool) -> None:
        """``rows`` begin at a multiple of 128."""
        active = self._active
        means = centroids(weight, active.of_hidden, active.width)
        accumulate(total, active.masses.t()[rows], means, overwrite=overwrite)
        lists = active.of_rows.of_blocks(rows)
        sparse_product(total, self._gradient[rows], weight, lists, transposed=False, add=True)

    def add_weight(self, total: Tensor, x: Tensor, entries: slice, overwrite: bool) -> None:
        """``entries`` begin at a window's first."""
        active = self._active
        if self._spread is None or self._spread[1] is not x:
            self._spread = matmul(active.masses, x), x
        sparse_product(
            total,
            self._gradient[:, entries],
            x,
            active.of_entries.of_blocks(entries),
            transposed=True,
            add=not overwrite,
            rank_one=(active.of_weight[entries], self._spread[0][entries.start // active.width :]),
            width=active.width,
        )


def with_window_partials(task: ForwardTask) -> ForwardTask:
    """The task, which also saves the partials of windows if a backward could recompute fewer windows. Not under a
    soft-cap, whose slope changes the gradients of a window, so that their sum is not the window's mass."""
    (rows, hidden_size), projection, real = task.x.shape, task.projection, task.projection.real_rows
    if real == 0 or projection.logit_map.softcap is not None or not fills_sample(rows):
        return task
    x = aligned_contiguous(task.x)
    tile = product_of(projection, x, 0, real).tile
    recomputed = real - (real if task.save >= real else task.save // tile.entries * tile.entries)
    at_once = min(rows * recomputed, WINDOWED_BYTES // x.element_size())
    # Products for dW begin at multiples of 256 entries.
    fitting = tile.rows == TILE and tile.entries in (TILE, 2 * TILE)
    return task._replace(x=x, save_window_partials=fitting and worth_filtering(at_once * hidden_size))


def _windows_of(task: BackwardTask) -> WindowPartials | None:
    """The forward's window partials, if they tell which windows to project. All are projected for dbias, and if
    saved-tensor hooks changed the operands' alignment, and with it the tile."""
    saved, projection = task.saved, task.projection
    if not saved or saved.sums is None or task.grads.dbias is not None or not fills_sample(len(task.x)):
        return None
    known = len(saved.maxima) == product_of(projection, task.x, 0, projection.real_rows).windows
    return WindowPartials(saved.maxima, saved.sums) if known else None


def fills_sample(rows: int) -> bool:
    """Whether ``rows`` tokens can be sampled: a sample must be much smaller than ``rows``."""
    return sample_tokens(rows) is not None


class ActiveWindows:
    """Forms slices of the gradient of some ``rows`` by projecting their active windows, whose largest probability
    exceeds ``eps``. The slices cover the shard's entries from ``first`` on."""

    def __init__(self, rows: GradientOperands, windows: WindowPartials, first: int, eps: float) -> None:
        self._rows, self._windows, self._first, self._eps = rows, windows, first, eps
        projection, alpha = rows.projection, rows.coefficients.alpha
        self._units = units_of(rows)
        sample = sample_tokens(len(rows.x))
        assert sample is not None, "windows are given to rows that fill a sample"
        self._sample = sample
        projection = projection._replace(logit_map=projection.logit_map.each(sample.of))
        # The sampled rows of G hold probabilities. In fp16 they are scaled, so that small ones do not underflow.
        # Finite, so that a token whose scale is 0 has G = 0.
        alpha = (alpha.abs() * inverse_of(self._units, None) * SAVED_FP16_SCALE).nan_to_num_()
        self._sampled = GradientOperands(
            sample.of(rows.x),
            projection,
            sample.of(rows.partial.t()).t().contiguous(),
            Coefficients(sample.of(alpha), None, None),
            rows.fp16_scale,
            None if rows.targets is None else Targets(*map(sample.of, rows.targets)),
        )
        # [entries from ``first`` on], fp32.
        self._mean_logits = _mean_logits(rows, first)

    def form(self, start: int, stop: int, gradient: Tensor) -> ActiveTiles:
        """Write the active windows of ``gradient [R, stop - start]``, the shard's entries ``[start, stop)``."""
        eps, rows, entries = self._eps, self._rows, stop - start
        width = product_of(rows.projection, rows.x, start, stop).tile.entries
        of_weight = mean_shares(self._mean_logits[start - self._first : stop - self._first], width)
        given = self._windows, rows.partial, self._units, rows.targets
        bounds, masses = window_masses(*given, start // width, width, entries, eps, gradient.dtype)
        sampled = self._sample.sums(self._sampled_gradient(start, stop), bounds, width, eps)
        of_hidden = entry_shares(sampled, width, of_weight)
        rows.form(start, stop, gradient, list_active_windows(bounds, eps))
        return ActiveTiles(*active_tile_lists(bounds, eps, entries, width), masses, of_hidden, of_weight)

    def _sampled_gradient(self, start: int, stop: int) -> Tensor:
        """The gradient of the sample, for all entries of the slice. Called once per slice: placing the targets changes
        their residuals."""
        rows = self._sampled
        gradient = rows.x.new_empty(len(rows.x), stride_of(stop - start))[:, : stop - start]
        rows.form(start, stop, gradient)
        return gradient


def _mean_logits(rows: GradientOperands, first: int) -> Tensor:
    """Mean logits, fp32, of the shard's entries from ``first`` on, over the tokens with a gradient."""
    projection, counted = rows.projection, rows.coefficients.alpha != 0
    weights = counted / counted.sum().clamp_(min=1)
    if projection.logit_map.token_scale is not None:
        weights = weights * projection.logit_map.token_scale
    mean, of_bias = torch.mv(rows.x.t(), weights.to(rows.x.dtype)), weights.sum()
    result = matmul(mean[None], some_rows(projection.weight, first, projection.real_rows).t())[0]
    if projection.bias is not None:
        result += some_rows(projection.bias, first, projection.real_rows) * of_bias
    return result.mul_(projection.logit_map.scale)
