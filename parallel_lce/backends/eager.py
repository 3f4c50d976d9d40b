"""The torch backend: any device, and the plain reference beside each kernel.

A block of R tokens is projected onto the vocabulary shard in tiles of up to 64 MiB, few and large: each is projected,
exponentiated in place, and multiplied into the gradients by one operation on all of it. Nothing of size R * V exists
but the exponentials that the caller asked to save.

Tiles are vocabulary-major, ``[entries, rows]``. Per-token vectors broadcast along their contiguous rows.

:mod:`parallel_lce.backends.eager_tiles` makes the tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel_lce.backends.eager_logits import block_logits
from parallel_lce.backends.eager_selected import (
    selected_hidden_gradient,
    selected_logits,
    selected_weight_gradient,
    top_k,
)
from parallel_lce.backends.eager_tiles import (
    SAVED_FP16_SCALE,
    GradientTile,
    LogitGradient,
    Saved,
    borrowed,
    logits,
    pieces,
    row_tiles,
    saved_tile,
    take_selected,
    target_positions,
    window_size,
)
from parallel_lce.backends.gemm import accumulate_nt, operand, put
from parallel_lce.backends.interface import (
    Coefficients,
    GradBuffers,
    Projection,
    Scratch,
    SelectedGradient,
    SelectedLogits,
    savable,
)
from parallel_lce.backends.loss import mean_loss, token_losses
from parallel_lce.memory import some_rows
from parallel_lce.options import Options
from parallel_lce.partials import MAX, TARGET, Columns, empty_partial, merge, merge_ranks, tile_partial

__all__ = [
    "NAME",
    "REUSES_SAVED",
    "SMALLEST_ACCUMULATED",
    "BlockBackward",
    "BlockForward",
    "Saved",
    "allocate_saved",
    "block_logits",
    "mean_loss",
    "merge_ranks",
    "savable",
    "selected_hidden_gradient",
    "selected_logits",
    "selected_weight_gradient",
    "token_losses",
    "top_k",
]

# Row tiles whose window partials are held at once, in a buffer [windows, C, rows of these tiles]. It grows with V, but
# not with N.
_GROUP = 16

NAME: str = "eager"
SMALLEST_ACCUMULATED: int = 1
REUSES_SAVED: bool = False


def is_straight(hidden: Tensor, weight: Tensor, options: Options) -> bool:
    return False


def allocate_saved(projection: Projection, rows: int, entries: int) -> Tensor:
    """A buffer for the exponentials of ``rows`` tokens and the shard's first ``entries`` vocabulary rows."""
    return projection.weight.new_empty(min(entries, projection.real_rows) * rows)


class BlockForward:
    """Partials of a block of ``x [R, D]`` over the shard, and the exponentials of its first ``save`` vocabulary rows.

    Saved are the exponentials exp(z - maxima) in the weight's dtype, one tile of rows after another, in ``buffer``, and
    the maxima ``[windows, R]`` of each window. ``target [R]``: ids relative to the shard; one outside [0, real_rows)
    has no logit here. ``out [C, R]``: where the partial is written. ``keep_windows`` has no effect.
    """

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        columns: Columns,
        save: int,
        buffer: Tensor | None = None,
        out: Tensor | None = None,
        keep_windows: bool = False,
        selected: SelectedLogits | None = None,
    ) -> None:
        self._selected = selected
        self._projection, self._x, self._target, self._columns = projection, x, target, columns
        self._save = min(save, projection.real_rows)
        self._buffer = buffer
        self.partial = empty_partial(columns, x.shape[0], projection.dtype, x.device, out)

    def project_local(self, local: range) -> None:
        """Does nothing. On a CPU a product would only slow down the collective beside it."""

    def project_rest(self) -> Saved | tuple[()]:
        """Project all rows; returns what is saved."""
        projection, columns, save = self._projection, self._columns, self._save
        x, rows, dtype = operand(self._x), self._x.shape[0], projection.dtype
        if 0 in (projection.real_rows, rows):
            return ()
        tiles, memory = row_tiles(rows), Scratch(0, x.device)
        width = window_size(projection, tiles[0].stop, columns.weighted or columns.squared)
        stored = pieces(0, save, width)
        cut = stored + pieces(save, projection.real_rows, width)
        exponentials: Tensor | None = None
        saved = ()
        if save:
            exponentials = allocate_saved(projection, rows, save) if self._buffer is None else self._buffer
            saved = Saved(exponentials[: save * rows], self.partial.new_empty(len(stored), rows))
        for group in (tiles[a : a + _GROUP] for a in range(0, len(tiles), _GROUP)):
            of_group = self.partial[:, group[0].start : group[-1].stop]
            partials = of_group[None] if len(cut) == 1 else of_group.new_zeros(len(cut), *of_group.shape)
            for number, window in enumerate(cut):
                weight = operand(some_rows(projection.weight, window.start, window.stop))
                for tile in group:
                    store = None
                    if exponentials is not None and window.start < save:
                        store = saved_tile(exponentials, save, tile, window)
                    in_place = store is not None and store.dtype == dtype
                    z = store if store is not None and in_place else borrowed(memory, window, tile, dtype)
                    logits(projection, x, tile, weight, window, z)
                    self._reduce(z, tile, window, partials[number, :, tile.start - group[0].start :])
                    if store is not None and not in_place:
                        store.copy_(z.mul_(SAVED_FP16_SCALE) if store.dtype == torch.float16 else z)
            if len(cut) > 1:
                counts = torch.stack([self.partial.new_full((), w.stop - w.start) for w in cut])
                of_group.copy_(merge(partials, counts, columns))
            if saved:
                saved.maxima[:, group[0].start : group[-1].stop] = partials[: len(stored), MAX]
        return saved

    def _reduce(self, z: Tensor, tile: slice, window: slice, partial: Tensor) -> None:
        """Write the partial ``[C, rows]`` of a tile of logits, which become exponentials."""
        partial = partial[:, : z.shape[1]]
        if self._target is not None:
            position, missed = target_positions(self._target[tile], window)
            torch.index_select(z.view(-1), 0, position, out=partial[TARGET]).masked_fill_(missed, 0.0)
        if self._selected is not None:
            take_selected(z, self._selected, tile, window)
        tile_partial(z, self._projection.start + window.start, self._columns, partial)


class BlockBackward:
    """Gradients of a block of ``x [R, D]``. ``partial [>= 3, R]``: the merged partial.

    What is not ``saved`` is projected again. Where dX is reduced over the ranks, dW of the last tile, and of those that
    stay in the memory of what is saved, is formed after dX.
    """

    reads_hidden_first = True

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        partial: Tensor,
        coefficients: Coefficients,
        saved: Saved | tuple[()],
        grads: GradBuffers,
        scratch: Scratch,
        selected: SelectedGradient | None = None,
        gradient_filter: float | None = None,
    ) -> None:
        self._projection, self._target, self._x_given, self._selected = projection, target, x, selected
        self._gradient_filter = gradient_filter
        self._partial, self._coefficients, self._saved = partial, coefficients.folded(), saved
        self._grads, self._scratch = grads, scratch
        # Tiles that are still to be added to dW of their windows.
        self._waiting: list[tuple[_WindowSums, slice, GradientTile]] = []

    def hidden_grad(self) -> Iterator[int]:
        """Form dX, and dW of the tiles that do not wait; yields R when dX is complete."""
        projection, grads = self._projection, self._grads
        producer = LogitGradient(
            projection,
            self._x_given,
            self._target,
            self._partial,
            self._coefficients,
            self._saved,
            self._scratch,
            self._selected,
            self._gradient_filter,
        )
        dx, total = grads.dx, None
        if dx is not None:
            total = dx if dx.dtype == projection.dtype else dx.new_empty(dx.shape, dtype=projection.dtype)
            if not producer.windows:
                total.zero_()
        waits = dx is not None and grads.reduces_dx
        for window in producer.windows:
            sums = _WindowSums(grads, producer, window)
            weight = operand(some_rows(projection.weight, window.start, window.stop))
            for rows in producer.row_tiles:
                tile = producer.tile(window, rows, weight)
                if total is not None:
                    of_rows, factor = some_rows(total, rows.start, rows.stop), producer.fp16_unscale
                    overwrite = window.start == 0
                    accumulate_nt(of_rows, tile.gradient.t(), weight.t(), overwrite=overwrite, factor=factor)
                last = window.stop == projection.real_rows and rows.stop == len(producer.x)
                if waits and (last or producer.stays(window)):
                    self._waiting.append((sums, rows, tile))
                else:
                    sums.add(rows, tile)
        if dx is not None and total is not dx:
            dx.copy_(total)
        yield self._x_given.shape[0]

    def weight_grad(self) -> None:
        """dW and dbias of the tiles that wait."""
        while self._waiting:
            sums, rows, tile = self._waiting.pop(0)
            sums.add(rows, tile)


class _WindowSums:
    """Adds tiles of the gradient of logits to dW and dbias of one vocabulary window."""

    def __init__(self, grads: GradBuffers, producer: LogitGradient, window: slice) -> None:
        self._producer, self._window = producer, window
        self._buffers = grads.dweight, grads.dbias
        self._opened = [b and b.open(window.start, window.stop) for b in self._buffers]

    def add(self, rows: slice, tile: GradientTile) -> None:
        weight, bias = self._opened
        factor, first = self._producer.fp16_unscale, rows.start == 0
        if weight is not None:
            total, empty = weight
            x = some_rows(self._producer.x, rows.start, rows.stop)
            accumulate_nt(total, tile.gradient, x.t(), overwrite=empty and first, factor=factor)
        if bias is not None:
            total, empty = bias
            column_sum = tile.gradient.sum(1, dtype=total.dtype) if tile.sums is None else tile.sums.to(total.dtype)
            if factor is not None:
                column_sum *= factor
            put(total, column_sum, empty and first)
        if rows.stop == len(self._producer.x):
            for buffer, opened in zip(self._buffers, self._opened):
                if buffer is not None and opened is not None:
                    buffer.close(self._window.start, self._window.stop, opened[0])
