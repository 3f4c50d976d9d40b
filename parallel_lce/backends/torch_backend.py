"""The torch backend: any device, and the plain reference beside each kernel.

A block of R tokens is projected onto the vocabulary shard in tiles of up to 64 MiB
(:mod:`parallel_lce.backends.torch_logits`). No tensor of size R * V exists but the saved exponentials. The gradient of
the logits, :class:`parallel_lce.core.partials.Coefficients`, is that of "From Projection to Prediction", Appendix A.1,
generalised to any statistic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.formulas import (
    mean_loss,
    statistics_gradient,
    token_losses,
    token_statistics,
    without_factor,
)
from parallel_lce.backends.gemm import accumulate, operand, put
from parallel_lce.backends.interface import BackwardTask, ForwardTask, Scratch
from parallel_lce.backends.torch_logits import (
    add_selected,
    borrowed,
    even_slices,
    log_softmax_of_sets,
    logits,
    logits_gradient,
    logits_partial,
    row_tiles,
    saved_tile,
    selected_logits,
    selected_rows,
    set_at_targets,
    take_selected,
    take_targets,
    target_gradient,
    window_size,
)
from parallel_lce.core import partials
from parallel_lce.core.logit_map import Projection
from parallel_lce.core.memory import some_rows
from parallel_lce.core.options import Wanted
from parallel_lce.core.partials import (
    LOWEST_SHIFT,
    MAX,
    NEAR,
    ONE_LARGE_ENTRY,
    SUM_EXP,
    TARGET,
    Columns,
    empty_partial,
    exponential_,
    merge,
    tile_partial,
)

# What this module imports and does not call are functions of :class:`parallel_lce.backends.interface.Backend`.
NAME: str = "torch"
FLOPS_PER_BYTE: float = 8  # of a CPU
SAVED_DTYPES: tuple[torch.dtype, ...] = torch.float32, torch.float64
SAME_BITS: bool = False
REUSES_SAVED: bool = False
CODES: bool = False

# Most bytes of a copy of gradients in the factor's dtype.
_SCALED_BYTES = 16 << 20


class Saved(NamedTuple):
    """The saved tensors of a block of R tokens and the shard's first entries, in W windows. The last window may be
    smaller than the others."""

    # exp(z - maxima) of each entry and token, tile after tile of rows
    exponentials: Tensor
    # [W, R]: each token's largest logit of each window
    maxima: Tensor


def allocate_saved(projection: Projection, rows: int, entries: int) -> Tensor:
    return projection.weight.new_empty(min(entries, projection.real_rows) * rows)


def results_of(partial: Tensor, vocab_size: Tensor | int, wanted: Wanted) -> Any:
    kind, options, target, token_weight, log_sum = wanted
    if kind == "statistics":
        return token_statistics(partial, vocab_size, target, options, log_sum)
    assert target is not None  # check_tensors refuses a loss without targets
    return token_losses(partial, vocab_size, target, token_weight, options)


def merge_ranks(
    packed: Tensor, columns: Columns, rows: int, vocab_size: int | None, wanted: Wanted | None
) -> tuple[Tensor, Tensor, Any]:
    merged, size = partials.merge_ranks(packed, columns, rows, vocab_size)
    return merged, size, None if wanted is None else results_of(merged, size, wanted)


def block_forward(task: ForwardTask) -> tuple[Tensor, Saved | tuple[()], Any]:
    projection, columns, target, selection = task.projection, task.columns, task.target, task.selection
    rows, real, dtype = task.x.shape[0], projection.real_rows, projection.dtype
    partial = empty_partial(columns, rows, dtype, task.x.device, task.out)
    tiles, save = row_tiles(rows) if real else [], min(task.save, real)
    x, memory = operand(task.x), Scratch(0, task.x.device)
    width = window_size(projection, tiles[0].stop if tiles else 0, columns.weighted or columns.squared)
    saved_windows = even_slices(0, save, width)
    windows = saved_windows + even_slices(save, real, width)
    saved: Saved | None = None
    if save and tiles:
        buffer = allocate_saved(projection, rows, save) if task.buffer is None else task.buffer
        saved = Saved(buffer[: save * rows], partial.new_empty(len(saved_windows), rows))
    for tile in tiles:
        of_tile = projection if len(tiles) == 1 else projection.of_rows(tile)
        merged = partial[:, tile]
        # [W, C, rows]
        of_windows = None if len(windows) == 1 else merged.new_zeros(len(windows), *merged.shape)
        for number, window in enumerate(windows):
            window_partial = merged if of_windows is None else of_windows[number]
            weight = operand(some_rows(projection.weight, window.start, window.stop))
            if saved is None or window.start >= save:
                z = borrowed(memory, tile, window, dtype)
            else:
                z = saved_tile(saved.exponentials, save, tile, window)
            logits(of_tile, x[tile], weight, window, z)
            if target is not None:
                take_targets(z, target[tile], window, window_partial[TARGET])
            if selection is not None:
                take_selected(z, selection, tile, window)
            if task.logits is not None:
                task.logits[tile, window] = z.t()
            # z becomes exponentials.
            tile_partial(z, projection.start + window.start, columns, window_partial)
            if saved is not None and window.start < save:
                saved.maxima[number, tile] = window_partial[MAX]
        if of_windows is not None:
            counts = torch.stack([merged.new_full((), w.stop - w.start) for w in windows])
            merged.copy_(merge(of_windows, counts, columns))
    found = None if task.wanted is None else results_of(partial, real, task.wanted)
    return partial, () if saved is None else saved, found


class LogitsGradient:
    """The gradient of a block's logits, in tiles."""

    def __init__(self, task: BackwardTask) -> None:
        projection, x, partial, saved = task.projection, task.x, task.partial, task.saved
        self._projection, self._target, self._scratch = projection, task.target, task.scratch
        rows, real, dtype = x.shape[0], projection.real_rows, projection.dtype
        self._saved: Saved | None = None
        # Number of entries with saved exponentials, and of a forward's window.
        self._save = self._saved_width = 0
        if saved:
            self._saved = saved
            self._save = saved.exponentials.numel() // rows
            self._saved_width = -(-self._save // saved.maxima.shape[0])
        coefficients = without_factor(task.coefficients)
        alpha, others = coefficients.alpha, (coefficients.gamma, coefficients.delta, coefficients.epsilon)
        self.row_tiles = row_tiles(rows)
        temporaries = projection.logit_map.softcap is not None or coefficients.delta is not None
        temporaries |= coefficients.epsilon is not None
        self.windows = self._cut(window_size(projection, self.row_tiles[0].stop if rows else 0, temporaries))
        maximum, sum_exp = partial[MAX], partial[SUM_EXP]
        # A row without a finite logit has M = -inf.
        self._maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
        # [R]: a recomputed logit closer than this to the maximum is set to the maximum. A product over other rows
        # rounds differently, which matters in logits of millions, and where 1 - p is small. None: 0.
        self._slack: Tensor | None = None
        if self._save < real:
            slack = self._maximum.abs().mul_(8 * torch.finfo(dtype).eps).sub_(1.0)
            slack.clamp_(min=0.0).clamp_(min=(sum_exp < ONE_LARGE_ENTRY) * NEAR)
            self._slack = slack if slack.is_cuda or slack.any() else None
        factor: Tensor | float = projection.logit_map.scale
        if projection.logit_map.token_scale is not None:
            factor = factor * projection.logit_map.token_scale
        self._selection = task.selection
        # [R]: of each target's logit.
        self._of_target: Tensor | None = None
        if coefficients.beta is not None and self._target is not None:
            self._of_target = target_gradient(partial, coefficients) * factor
            slope = projection.logit_map.slope(partial[TARGET])
            self._of_target = self._of_target if slope is None else self._of_target * slope
        # p = e / s: the 1 / s is multiplied into alpha, delta and, twice, epsilon.
        self._alpha = alpha / sum_exp * factor
        self._gamma, self._delta, self._epsilon = [None if c is None else c * factor for c in others]
        if self._delta is not None:
            self._delta = self._delta / sum_exp
        if self._epsilon is not None:
            self._epsilon = self._epsilon / sum_exp.square()

    def _cut(self, width: int) -> list[slice]:
        """Windows of at most ``width`` entries. Each lies in one window of the forward, or is recomputed."""
        windows: list[slice] = []
        for start in range(0, self._save, self._saved_width or 1):
            windows += even_slices(start, min(start + self._saved_width, self._save), width)
        return windows + even_slices(self._save, self._projection.real_rows, width)

    def of_tile(self, rows: slice, window: slice, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of a tile, ``[entries, rows]``. ``x``, ``weight``: its rows and entries as operands."""
        saved, slope = self._saved, None
        if saved is None or window.start >= self._save:
            projection = self._projection.of_rows(rows)
            out = borrowed(self._scratch, rows, window, projection.dtype)
            z = logits(projection, x, weight, window, out)
            slope = projection.logit_map.slope(z)
            gradient = self._of_logits(z, rows)
        else:
            gradient = self._of_exponentials(saved, rows, window)
        if self._gamma is not None:
            gradient -= self._gamma[rows]
        if slope is not None:
            gradient *= slope
        if self._of_target is not None and self._target is not None:
            set_at_targets(gradient, self._target[rows], window, self._of_target[rows])
        if self._selection is not None:
            add_selected(gradient, self._selection, rows, window)
        return gradient.to(x.dtype)

    def _of_exponentials(self, saved: Saved, rows: slice, window: slice) -> Tensor:
        """The gradient of a saved tile, before gamma and the targets'."""
        e = saved_tile(saved.exponentials, self._save, rows, window)
        maximum = saved.maxima[window.start // self._saved_width, rows]
        rebase = (maximum - self._maximum[rows]).exp()
        if self._delta is None and self._epsilon is None:
            return e.mul_(self._alpha[rows] * rebase)
        e.mul_(rebase)
        below_max = None if self._delta is None else e.log().clamp_(min=LOWEST_SHIFT)
        return self._softmax_gradient(e, below_max, rows)

    def _of_logits(self, z: Tensor, rows: slice) -> Tensor:
        """The gradient of a tile of logits ``z``, which it overwrites."""
        z.sub_(self._maximum[rows])
        z = z.clamp_(max=0.0) if self._slack is None else z.masked_fill_(z > -self._slack[rows], 0.0)
        below_max = None if self._delta is None else z.clamp(min=LOWEST_SHIFT)
        return self._softmax_gradient(exponential_(z), below_max, rows)

    def _softmax_gradient(self, e: Tensor, below_max: Tensor | None, rows: slice) -> Tensor:
        """``e (alpha + delta below_max + epsilon e)``. ``e``: exp(z - M). ``below_max``: z - M. Both are
        overwritten."""
        alpha = self._alpha[rows]
        if self._delta is None and self._epsilon is None:
            return e.mul_(alpha)
        factor = alpha if self._delta is None or below_max is None else below_max.mul_(self._delta[rows]).add_(alpha)
        if self._epsilon is not None:
            factor = torch.addcmul(factor, e, self._epsilon[rows])
        return e.mul_(factor)


def block_backward(task: BackwardTask) -> Iterator[bool]:
    of_logits, dtype, dweight, dbias = LogitsGradient(task), task.projection.dtype, task.dweight, task.dbias
    yield False
    x, windows, row_tiles = operand(task.x), of_logits.windows, of_logits.row_tiles
    dx = None if task.dx is None else task.dx.memory
    total = dx if dx is None or dx.dtype == dtype else dx.new_empty(dx.shape, dtype=dtype)
    if not (windows and row_tiles):
        if dx is not None:
            dx.zero_()
        yield True
    for window in windows:
        start, stop = window.start, window.stop
        of_weight, of_bias = dweight and dweight.open(start, stop), dbias and dbias.open(start, stop)
        weight = operand(some_rows(task.projection.weight, start, stop))
        for rows in row_tiles:
            tile_x, first = some_rows(x, rows.start, rows.stop), rows is row_tiles[0]
            gradient = of_logits.of_tile(rows, window, tile_x, weight)
            if total is not None:
                accumulate(total[rows], gradient.t(), weight, overwrite=start == 0)
            if window is windows[-1] and rows is row_tiles[-1]:
                if dx is not None and total is not None and total is not dx:
                    dx.copy_(total)
                total = None
                yield True
            if of_weight is not None:
                accumulate(of_weight[0], gradient, tile_x, overwrite=of_weight[1] and first)
            if of_bias is not None:
                put(of_bias[0], gradient.sum(1, dtype=of_bias[0].dtype), of_bias[1] and first)
        for buffer, opened in ((dweight, of_weight), (dbias, of_bias)):
            if buffer is not None and opened is not None:
                buffer.close(start, stop, opened[0])


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    if gradient.dtype == factor.dtype:
        return torch.mul(gradient, factor, out=result)
    # torch.mul would round the factor to the gradient's dtype.
    rows = max(1, _SCALED_BYTES // max(1, gradient[:1].numel() * factor.element_size()))
    for source, destination in zip(gradient.split(rows), result.split(rows)):
        destination.copy_(source.to(factor.dtype) * factor)
    return result
