"""The torch backend: any device, and the plain reference beside each kernel.

A block of R tokens is projected onto the vocabulary shard in tiles, on a CPU of 256 tokens by 2048 entries: small
enough to stay in a processor's cache while they are projected, exponentiated in place and multiplied into the
gradients. Nothing of size R * V exists but the exponentials that the caller asked to save.

Tiles are vocabulary-major, ``[entries, rows]``. Per-token vectors broadcast along their contiguous rows. In the
products for dX and dW a tile's second operand is whole rows of the weight or of x, which oneDNN takes without a copy
(:mod:`parallel_lce.backends.gemm`).

:mod:`parallel_lce.backends.eager_tiles` makes the tiles.
"""

from __future__ import annotations

import functools
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
    logits,
    row_tiles,
    target_positions,
    tile_size,
    windows,
)
from parallel_lce.backends.gemm import accumulate_nt, operand, put
from parallel_lce.backends.interface import (
    Coefficients,
    GradBuffers,
    GradientFilter,
    Projection,
    Saved,
    Scratch,
    SelectedGradient,
    SelectedLogits,
    savable,
)
from parallel_lce.backends.loss import mean_loss, token_losses
from parallel_lce.partials import MAX, TARGET, Columns, empty_partial, merge, merge_ranks, tile_partial

__all__ = [
    "NAME",
    "REUSES_SAVED",
    "SMALLEST_ACCUMULATED",
    "BlockBackward",
    "BlockForward",
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


def allocate_saved(projection: Projection, rows: int, entries: int) -> Tensor:
    """A buffer for the exponentials of ``rows`` tokens and the shard's first ``entries`` vocabulary rows."""
    return projection.weight.new_empty(min(entries, projection.real_rows) * rows)


@functools.cache
def _settle_allocator() -> None:
    """Free one buffer of nearly 32 MiB, untouched, once per process.

    glibc raises its mmap threshold to the size of the largest freed buffer, up to 32 MiB. Tiles below the threshold
    reuse memory. Above it each tile would be mapped and zeroed anew, which takes up to half of a call's time.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


class BlockForward:
    """Partials of a block of ``x [R, D]`` over the shard, and the exponentials of its first ``save`` vocabulary rows.

    Saved are the exponentials ``exp(z - maxima) [save, R]`` in the weight's dtype, in ``buffer``, and the maxima
    ``[windows, R]`` of each window. ``target [R]``: ids relative to the shard; one outside ``[0, real_rows)`` has no
    logit here. ``out [C, R]``: where the partial is written. ``keep_windows`` has no effect.
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

    def project_rest(self) -> Saved:
        """Project all rows; returns what is saved."""
        projection, columns, save = self._projection, self._columns, self._save
        cut = windows(projection, save)
        if not cut:
            return ()
        if self._x.device.type == "cpu":
            _settle_allocator()
        if self._selected is not None:
            selected_logits(projection, self._x, *self._selected)
        x, rows = operand(self._x), self._x.shape[0]
        exponentials = maxima = None
        saved: Saved = ()
        if save:
            buffer = allocate_saved(projection, rows, save) if self._buffer is None else self._buffer
            exponentials = buffer[: save * rows].view(save, rows)
            maxima = self.partial.new_empty(sum(w.start < save for w in cut), rows)
            saved = exponentials, maxima
        width = tile_size(x.device)[1]
        counts = self.partial.new_full((len(cut),), width)
        for number, window in enumerate(cut):
            if window.stop - window.start < width:
                counts[number].fill_(window.stop - window.start)
        tiles = row_tiles(rows, x.device)
        for group in (tiles[a : a + _GROUP] for a in range(0, len(tiles), _GROUP)):
            first, last = group[0].start, group[-1].stop
            partials = self.partial.new_zeros(len(cut), columns.count, last - first)
            for number, window in enumerate(cut):
                weight = operand(projection.weight[window])
                for tile in group:
                    z = logits(projection, x, tile, weight, window)
                    store = None if exponentials is None or window.start >= save else exponentials[window, tile]
                    self._reduce(z, tile, window, partials[number, :, tile.start - first : tile.stop - first], store)
            self.partial[:, first:last] = merge(partials, counts, columns)
            if maxima is not None:
                maxima[:, first:last] = partials[: len(maxima), MAX]
        return saved

    def _reduce(self, z: Tensor, tile: slice, window: slice, partial: Tensor, store: Tensor | None) -> None:
        """Write the partial ``[C, rows]`` of a tile of logits, which is overwritten, and its exponentials."""
        if self._target is not None:
            position, hit = target_positions(self._target[tile], window)
            partial[TARGET].copy_(z.view(-1).index_select(0, position).masked_fill_(~hit, 0.0))
        in_place = store is not None and store.dtype == z.dtype
        first = self._projection.start + window.start
        e = tile_partial(z, first, self._columns, partial, store if in_place else None)
        if store is not None and not in_place:
            store.copy_(e.mul_(SAVED_FP16_SCALE) if store.dtype == torch.float16 else e)


class BlockBackward:
    """Gradients of a block of ``x [R, D]``. ``partial [>= 3, R]``: the merged partial.

    What is not ``saved`` is projected again. Where dX is reduced over the ranks, dW of some windows is formed after
    dX: of all saved windows, and of as many recomputed ones as can hold their gradients in ``scratch.limit`` bytes.
    If there is no such window, dW of the last one is, whose logits are then recomputed once more.
    """

    reads_hidden_first = True

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        partial: Tensor,
        coefficients: Coefficients,
        saved: Saved,
        grads: GradBuffers,
        scratch: Scratch,
        selected: SelectedGradient | None = None,
        gradient_filter: GradientFilter = None,
    ) -> None:
        self._projection, self._target, self._x_given, self._selected = projection, target, x, selected
        self._gradient_filter: GradientFilter = gradient_filter
        self._partial, self._coefficients, self._saved = partial, coefficients.folded(), saved
        self._grads, self._scratch = grads, scratch
        # Windows whose dW is still to come, each with its tiles, or None if they are to be produced again.
        self._deferred: list[tuple[slice, list | None]] = []

    def _open(self) -> list[slice]:
        """Make the tiles' producer; returns the windows, recomputed ones first."""
        self._producer = LogitGradient(
            self._projection,
            self._x_given,
            self._target,
            self._partial,
            self._coefficients,
            self._saved,
            self._selected,
            self._gradient_filter,
        )
        cut, saved = windows(self._projection, self._producer.saved), self._producer.saved
        return [w for w in cut if w.start >= saved] + [w for w in cut if w.start < saved]

    def _num_deferred(self, cut: list[slice]) -> tuple[int, bool]:
        """How many of the last windows have their dW deferred, and whether recomputed ones of them are held."""
        grads, saved = self._grads, self._producer.saved
        if grads.dx is None or not grads.reduces_dx or not (grads.dweight or grads.dbias):
            return 0, False
        recomputed = [w.stop - w.start for w in cut if w.start >= saved]
        tile_bytes = self._x_given.shape[0] * max(recomputed, default=0) * self._producer.x.element_size()
        held = min(len(recomputed), self._scratch.limit // max(1, tile_bytes))
        stored = len(cut) - len(recomputed)
        again = 1 if recomputed and not held and not stored else 0
        return stored + held + again, held > 0

    def hidden_grad(self) -> Iterator[int]:
        """Form dX, and dW of the windows that are not deferred; yields R when dX is complete."""
        cut, dx = self._open(), self._grads.dx
        producer, dtype = self._producer, self._projection.dtype
        number, holds = self._num_deferred(cut)
        if dx is not None:
            total = dx if dx.dtype == dtype else dx.new_empty(dx.shape, dtype=dtype)
            if not cut:
                total.zero_()
        for index, window in enumerate(cut):
            deferred = index >= len(cut) - number
            held = [] if deferred and holds and window.start >= producer.saved else None
            sums = None if deferred else _WindowSums(self._grads, producer, window)
            weight = operand(self._projection.weight[window])
            for tile in producer.tiles(window, weight):
                if dx is not None:
                    of_rows, gradient = total[tile.rows], tile.gradient.t()
                    accumulate_nt(of_rows, gradient, weight.t(), overwrite=index == 0, factor=producer.fp16_unscale)
                    del gradient
                if sums is not None:
                    sums.add(tile)
                if held is not None:
                    held.append(tile)
                del tile  # before the next one is made
            if sums is not None:
                sums.close()
            if deferred:
                self._deferred.append((window, held))
        if dx is not None and total is not dx:
            dx.copy_(total)
        yield self._x_given.shape[0]

    def weight_grad(self) -> None:
        """dW and dbias of the deferred windows."""
        while self._deferred:
            window, held = self._deferred.pop(0)
            sums = _WindowSums(self._grads, self._producer, window)
            for tile in self._producer.tiles(window) if held is None else held:
                sums.add(tile)
                del tile
            sums.close()


class _WindowSums:
    """Adds tiles of the gradient of logits to dW and dbias of one vocabulary window."""

    def __init__(self, grads: GradBuffers, producer: LogitGradient, window: slice) -> None:
        self._producer, self._window = producer, window
        self._buffers = grads.dweight, grads.dbias
        self._opened = [b and b.open(window.start, window.stop) for b in self._buffers]
        self._first = True

    def add(self, tile: GradientTile) -> None:
        weight, bias = self._opened
        factor = self._producer.fp16_unscale
        if weight is not None:
            total, empty = weight
            x = self._producer.x[tile.rows]
            accumulate_nt(total, tile.gradient, x.t(), overwrite=empty and self._first, factor=factor)
        if bias is not None:
            total, empty = bias
            column_sum = tile.gradient.sum(1, dtype=total.dtype) if tile.sums is None else tile.sums.to(total.dtype)
            if factor is not None:
                column_sum *= factor
            put(total, column_sum, empty and self._first)
        self._first = False

    def close(self) -> None:
        for buffer, opened in zip(self._buffers, self._opened):
            if buffer is not None and opened is not None:
                buffer.close(self._window.start, self._window.stop, opened[0])
