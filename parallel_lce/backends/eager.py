"""The torch backend: any device, and the plain reference beside each kernel.

A block of R tokens is projected onto the vocabulary shard in tiles, on a CPU of 256 tokens by 2048 entries: small
enough to stay in a processor's cache while they are projected, exponentiated in place and multiplied into the
gradients. Nothing of size R * V exists but the exponentials that the caller asked to save.

Tiles are vocabulary-major, ``[entries, rows]``. Per-token vectors broadcast along their contiguous rows. In the
products for dX and dW a tile's second operand is whole rows of the weight or of x, which oneDNN takes without a copy
(:mod:`parallel_lce.backends.gemm`).

Gradient of the logits, with the upstream gradients of all statistics folded into four per-token coefficients
(:class:`Coefficients`):

    dL/dz_j = p_j (alpha + delta (z_j - M)) - beta [j = target] - gamma,     p_j = exp(z_j - M) / s

times the derivative of scale and soft-cap ("From Projection to Prediction", Appendix A.1, generalised to any
statistic).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, matmul_nt, operand, put
from parallel_lce.backends.interface import (
    Coefficients,
    GradBuffers,
    Projection,
    Saved,
    Scratch,
    power_of_two_scale,
    savable,
)
from parallel_lce.backends.loss import mean_loss, token_losses
from parallel_lce.partials import LOWEST_SHIFT, MAX, TARGET, Columns, empty_partial, merge, merge_ranks, tile_partial

__all__ = [
    "NAME",
    "REUSES_SAVED",
    "SMALLEST_ACCUMULATED",
    "BlockBackward",
    "BlockForward",
    "allocate_saved",
    "mean_loss",
    "merge_ranks",
    "savable",
    "token_losses",
]

# Rows and entries of a tile: 2 MiB of fp32, a core complex's cache, or 16 MiB for a GPU.
_CPU_TILE = (256, 2048)
_CUDA_TILE = (2048, 2048)
# Row tiles whose window partials are held at once, in a buffer [windows, C, rows of these tiles]. It grows with V, but
# not with N.
_GROUP = 16

# fp16 saves exp(z - m), which is in [0, 1], times this: nothing is lost down to e^-20.
_SAVED_FP16_SCALE = 2.0**15

NAME: str = "eager"
SMALLEST_ACCUMULATED: int = 1
REUSES_SAVED: bool = False


def _tile_size(device: torch.device) -> tuple[int, int]:
    return _CUDA_TILE if device.type == "cuda" else _CPU_TILE


def windows(projection: Projection, saved: int = 0) -> list[slice]:
    """The vocabulary windows of a shard, one per tile. None straddles the end of the first ``saved`` entries."""
    width = _tile_size(projection.weight.device)[1]
    bounds = ((0, saved), (saved, projection.real_rows))
    return [slice(a, min(a + width, end)) for begin, end in bounds for a in range(begin, end, width)]


def _row_tiles(rows: int, device: torch.device) -> list[slice]:
    height = _tile_size(device)[0]
    return [slice(a, min(a + height, rows)) for a in range(0, rows, height)]


def _logits(projection: Projection, x: Tensor, weight: Tensor, window: slice) -> Tensor:
    """A tile ``[entries, rows]`` of z; ``weight`` holds the window's rows as an operand."""
    z = matmul_nt(weight, x)
    if projection.bias is not None:
        z += projection.bias[window, None]
    if projection.scale != 1.0:
        z *= projection.scale
    if projection.softcap is not None:
        z.div_(projection.softcap).tanh_().mul_(projection.softcap)
    return z


def _softcap_slope(cap: float, z: Tensor) -> Tensor:
    """d softcap(u) / du at ``z = softcap(u)``: ``1 - (z / cap)^2``."""
    return (z / cap).square_().neg_().add_(1.0)


def _target_positions(target: Tensor, window: slice) -> tuple[Tensor, Tensor]:
    """Positions of the targets in the flattened tile, and which targets lie in it ``[rows]``.

    One-dimensional: only at such positions does torch add deterministically.
    """
    entry = target - window.start
    width, rows = window.stop - window.start, target.shape[0]
    hit = (entry >= 0) & (entry < width)
    position = entry.clamp_(0, width - 1).mul_(rows)
    return position.add_(torch.arange(rows, device=target.device)), hit


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
    logit here. ``out [C, R]``: where the partial is written.
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
    ) -> None:
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
        x, rows = operand(self._x), self._x.shape[0]
        exponentials = maxima = None
        saved: Saved = ()
        if save:
            buffer = allocate_saved(projection, rows, save) if self._buffer is None else self._buffer
            exponentials = buffer[: save * rows].view(save, rows)
            maxima = self.partial.new_empty(sum(w.start < save for w in cut), rows)
            saved = exponentials, maxima
        width = _tile_size(x.device)[1]
        counts = self.partial.new_full((len(cut),), width)
        for number, window in enumerate(cut):
            if window.stop - window.start < width:
                counts[number].fill_(window.stop - window.start)
        tiles = _row_tiles(rows, x.device)
        for group in (tiles[a : a + _GROUP] for a in range(0, len(tiles), _GROUP)):
            first, last = group[0].start, group[-1].stop
            partials = self.partial.new_zeros(len(cut), columns.count, last - first)
            for number, window in enumerate(cut):
                weight = operand(projection.weight[window])
                for tile in group:
                    z = _logits(projection, x[tile], weight, window)
                    store = None if exponentials is None or window.start >= save else exponentials[window, tile]
                    self._reduce(z, tile, window, partials[number, :, tile.start - first : tile.stop - first], store)
            self.partial[:, first:last] = merge(partials, counts, columns)
            if maxima is not None:
                maxima[:, first:last] = partials[: len(maxima), MAX]
        return saved

    def _reduce(self, z: Tensor, tile: slice, window: slice, partial: Tensor, store: Tensor | None) -> None:
        """Write the partial ``[C, rows]`` of a tile of logits, which is overwritten, and its exponentials."""
        if self._target is not None:
            position, hit = _target_positions(self._target[tile], window)
            partial[TARGET].copy_(z.view(-1).index_select(0, position).masked_fill_(~hit, 0.0))
        in_place = store is not None and store.dtype == z.dtype
        first = self._projection.start + window.start
        e = tile_partial(z, first, self._columns, partial, store if in_place else None)
        if store is not None and not in_place:
            store.copy_(e.mul_(_SAVED_FP16_SCALE) if store.dtype == torch.float16 else e)


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
    ) -> None:
        self._projection, self._target, self._x_given = projection, target, x
        self._partial, self._coefficients, self._saved = partial, coefficients.folded(), saved
        self._grads, self._scratch = grads, scratch
        # Windows whose dW is still to come, each with its tiles, or None if they are to be produced again.
        self._deferred: list[tuple[slice, list | None]] = []

    def _open(self) -> list[slice]:
        """Make the tiles' producer; returns the windows, recomputed ones first."""
        self._producer = _LogitGradient(
            self._projection, self._x_given, self._target, self._partial, self._coefficients, self._saved
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
            for rows, tile in producer.tiles(window, weight):
                if dx is not None:
                    accumulate_nt(total[rows], tile.t(), weight.t(), overwrite=index == 0, factor=producer.fp16_unscale)
                if sums is not None:
                    sums.add(tile, rows)
                if held is not None:
                    held.append((rows, tile))
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
            for rows, tile in self._producer.tiles(window) if held is None else held:
                sums.add(tile, rows)
                del tile
            sums.close()


class _LogitGradient:
    """Produces tiles of a block's gradient of the projection's output ``x @ weight.T + bias``."""

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        partial: Tensor,
        coefficients: Coefficients,
        saved: Saved,
    ) -> None:
        self.x = operand(x)
        self._projection, self._target, self._saved = projection, target, saved
        # Vocabulary rows whose exponentials are saved.
        self.saved = len(saved[0]) if saved else 0
        maximum, sum_exp, target_logit = partial[: TARGET + 1]
        # A row without a finite logit has M = -inf.
        self._maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
        self.fp16_unscale: Tensor | None = None
        factor: Tensor | float = projection.scale
        if self.x.dtype == torch.float16:
            power = power_of_two_scale(coefficients, projection.scale)
            factor, self.fp16_unscale = factor * power, 1 / power
        # p = e / s: the 1 / s is multiplied into alpha and delta.
        self._alpha = coefficients.alpha / sum_exp * factor
        self._beta, self._gamma, self._delta = (c if c is None else c * factor for c in coefficients.each[1:])
        if self._delta is not None:
            self._delta = self._delta / sum_exp
        if self._beta is not None and projection.softcap is not None:
            # Uses the target's fp32 logit, not a stored exponential.
            self._beta = self._beta * _softcap_slope(projection.softcap, target_logit)

    def tiles(self, window: slice, weight: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and the gradient of their tile ``[window, rows]`` as an operand of the next products.

        ``weight``: the window's rows as an operand.
        """
        if weight is None:
            weight = operand(self._projection.weight[window])
        for rows in _row_tiles(self.x.shape[0], self.x.device):
            if window.start < self.saved:
                gradient, slope = self._from_saved(rows, window)
            else:
                gradient, slope = self._recomputed(rows, window, weight)
            if self._gamma is not None:
                gradient -= self._gamma[rows]
            if slope is not None:
                gradient *= slope
            if self._beta is not None and self._target is not None:
                position, hit = _target_positions(self._target[rows], window)
                gradient.view(-1).scatter_add_(0, position, self._beta[rows] * -hit.to(gradient.dtype))
            yield rows, gradient.to(self.x.dtype)
            del gradient

    def _from_saved(self, rows: slice, window: slice) -> tuple[Tensor, Tensor | None]:
        exponentials, maxima = self._saved
        stored = exponentials[window, rows]
        scale = 1 / _SAVED_FP16_SCALE if stored.dtype == torch.float16 else 1.0
        maximum = maxima[window.start // _tile_size(stored.device)[1], rows]
        coefficient = self._alpha[rows] * torch.exp(maximum - self._maximum[rows])
        gradient = stored * (coefficient * scale)
        slope, cap = None, self._projection.softcap
        if cap is not None:
            slope = _softcap_slope(cap, torch.log(stored.to(gradient.dtype) * scale).add_(maximum))
        return gradient, slope

    def _recomputed(self, rows: slice, window: slice, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        z = _logits(self._projection, self.x[rows], weight, window)
        cap = self._projection.softcap
        slope = None if cap is None else _softcap_slope(cap, z)
        z -= self._maximum[rows]
        alpha = self._alpha[rows]
        if self._delta is None:
            return z.exp_().mul_(alpha), slope
        weighted = z.clamp(min=LOWEST_SHIFT).mul_(self._delta[rows]).add_(alpha)
        return z.exp_().mul_(weighted), slope


class _WindowSums:
    """Adds tiles of the gradient of logits to dW and dbias of one vocabulary window."""

    def __init__(self, grads: GradBuffers, producer: _LogitGradient, window: slice) -> None:
        self._producer, self._window = producer, window
        self._buffers = grads.dweight, grads.dbias
        self._opened = [b and b.open(window.start, window.stop) for b in self._buffers]
        self._first = True

    def add(self, tile: Tensor, rows: slice) -> None:
        weight, bias = self._opened
        factor = self._producer.fp16_unscale
        if weight is not None:
            total, empty = weight
            accumulate_nt(total, tile, self._producer.x[rows].t(), overwrite=empty and self._first, factor=factor)
        if bias is not None:
            total, empty = bias
            column_sum = tile.sum(1, dtype=total.dtype)
            if factor is not None:
                column_sum *= factor
            put(total, column_sum, empty and self._first)
        self._first = False

    def close(self) -> None:
        for buffer, opened in zip(self._buffers, self._opened):
            if buffer is not None and opened is not None:
                buffer.close(self._window.start, self._window.stop, opened[0])
