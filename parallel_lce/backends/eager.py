"""The torch backend: any device, and the plain reference beside each kernel.

A block of R tokens meets the vocabulary shard in tiles of a few thousand logits a side, small enough
to stay in a processor's cache while they are projected, exponentiated in place and multiplied into
the gradients. Nothing of size R * V exists but the exponentials that the caller asked to keep. Tiles
are vocabulary-major, ``[columns, rows]``: per-token vectors broadcast along their contiguous rows,
and every product of theirs finds its operands packed (:mod:`parallel_lce.backends.gemm`).

Gradient of the logits: with statistics' upstream gradients folded into four per-token coefficients
(:class:`Coefficients`),

    dL/dz_j = p_j (alpha + delta (z_j - M)) - beta [j = target] - gamma,     p_j = exp(z_j - M) / s

times the chain of scale and soft-cap ("From Projection to Prediction", Appendix A.1, generalised to
any statistic).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from parallel_lce.backends.blocks import (
    Arrival,
    Coefficients,
    Destinations,
    Kept,
    Projection,
    Scratch,
    in_own_context,
    keepable,  # noqa: F401
    power_of_two_scale,
)
from parallel_lce.backends.gemm import accumulate_nt, matmul_nt, operand, put
from parallel_lce.backends.loss import token_losses  # noqa: F401
from parallel_lce.partials import (
    MAX,
    SUM_EXP,
    TARGET,
    Columns,
    empty_partial,
    integer_view,
    merge,
    merge_messages,  # noqa: F401
)

# Rows and columns of a tile: 2 MiB of fp32, a core complex's cache, or 16 MiB for a GPU.
_CPU_TILE = (256, 2048)
_CUDA_TILE = (2048, 2048)
# Tiles of rows whose window partials are alive at once: a buffer of V, but none that grows with N.
_GROUP = 16

# fp16 keeps exp(z - m) in [0, 1] times this, so that it loses nothing down to e^-20.
_FP16_SCALE = 2.0**15
# exp(-1e4) is 0 in every dtype, and -1e4 * 0 is no NaN as -inf * 0 would be.
_LOWEST_SHIFT = -1e4

SMALLEST_ACCUMULATED = 1
"""Rows of a block from which on gradients are worth forming in forward."""

REUSES_KEPT = False
"""Whether what is recomputed needs no memory beside that of what was kept."""


def _logits(projection: Projection, x: Tensor, weight: Tensor, columns: slice) -> Tensor:
    """A tile ``[columns, rows]`` of z; ``weight`` holds the columns' weights as an operand."""
    z = matmul_nt(weight, x)
    if projection.bias is not None:
        z += projection.bias[columns, None]
    if projection.scale != 1.0:
        z *= projection.scale
    if projection.softcap is not None:
        z.div_(projection.softcap).tanh_().mul_(projection.softcap)
    return z


def _chain(projection: Projection, z: Tensor) -> Tensor:
    """d softcap(u) / du at ``z = softcap(u)``: ``1 - (z / cap)^2``."""
    return (z / projection.softcap).square_().neg_().add_(1.0)


def windows(projection: Projection, kept: int = 0) -> list[slice]:
    """The vocabulary windows of a shard, the columns of its tiles; none straddles the end of the
    ``kept`` ones."""
    width = _width(projection)
    bounds = ((0, kept), (kept, projection.real))
    return [slice(a, min(a + width, end)) for begin, end in bounds for a in range(begin, end, width)]


def _width(projection: Projection) -> int:
    return (_CUDA_TILE if projection.weight.is_cuda else _CPU_TILE)[1]


def _row_tiles(rows: int, device: torch.device) -> list[slice]:
    height = (_CUDA_TILE if device.type == "cuda" else _CPU_TILE)[0]
    return [slice(a, min(a + height, rows)) for a in range(0, rows, height)]


def _target_positions(target: Tensor, window: slice) -> tuple[Tensor, Tensor]:
    """Where the targets of a tile's rows lie in the flattened tile, and which of them do ``[rows]``.

    One-dimensional, since torch adds deterministically at one-dimensional positions only.
    """
    column = target - window.start
    width, rows = window.stop - window.start, target.shape[0]
    hit = (column >= 0) & (column < width)
    position = column.clamp_(0, width - 1).mul_(rows)
    return position.add_(torch.arange(rows, device=target.device)), hit


def allocate_kept(projection: Projection, rows: int, columns: int) -> Tensor:
    """A buffer for the exponentials of ``rows`` tokens and the first ``columns`` vocabulary rows of
    the shard, in the weight's dtype."""
    return projection.weight.new_empty(min(columns, projection.real) * rows)


@functools.cache
def _settle_allocator() -> None:
    """Free one buffer of nearly 32 MiB, untouched, once per process.

    glibc gives freed memory back to the kernel, which zeroes it anew for every tile, until the
    largest buffer freed so far tells it otherwise; 32 MiB is the largest that it learns from. Up to
    half of a call's time goes there otherwise.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


@in_own_context
def block_forward(
    projection: Projection,
    x: Tensor,
    target: Tensor | None,
    columns: Columns,
    kept: int,
    buffer: Tensor | None = None,
    out: Tensor | None = None,
    arrival: Arrival | None = None,
) -> tuple[Tensor, Kept]:
    """Partials ``[C, R]`` of ``x [R, D]`` over the shard, and what is kept of its first vocabulary
    rows, ``kept`` or all that there are.

    Kept are the exponentials ``exp(z - maxima) [kept, R]`` in the weight's dtype, which fill
    ``buffer``, at least as large as :func:`allocate_kept` makes it, and the maxima
    ``[windows, R]`` of each window that they are relative to. ``target [R]`` holds ids relative to
    the shard; one outside ``[0, real)`` hits nothing. ``out [C, R]``: where to write the partials.
    ``arrival``: of ``x``, if that is on its way.
    """
    if arrival is not None:
        arrival.wait()
    rows, kept = x.shape[0], min(kept, projection.real)
    cut = windows(projection, kept)
    if x.device.type == "cpu":
        _settle_allocator()
    merged = empty_partial(columns, rows, projection.dtype, x.device, out)
    if not cut:
        return merged, ()
    exponentials = maxima = None
    if kept:
        buffer = allocate_kept(projection, rows, kept) if buffer is None else buffer
        exponentials = buffer[: kept * rows].view(kept, rows)
        maxima = merged.new_empty(sum(w.start < kept for w in cut), rows)
    x = operand(x)
    width = _width(projection)
    counts = merged.new_full((len(cut),), width)
    for number, window in enumerate(cut):
        if window.stop - window.start < width:
            counts[number].fill_(window.stop - window.start)
    tiles = _row_tiles(rows, x.device)
    for group in (tiles[a : a + _GROUP] for a in range(0, len(tiles), _GROUP)):
        first, last = group[0].start, group[-1].stop
        partials = merged.new_zeros(len(cut), columns.count, last - first)
        for number, window in enumerate(cut):
            weight = operand(projection.weight[window])
            for tile in group:
                _reduce_tile(
                    _logits(projection, x[tile], weight, window),
                    None if target is None else target[tile],
                    window,
                    projection.start,
                    columns,
                    partials[number, :, tile.start - first : tile.stop - first],
                    exponentials[window, tile] if window.start < kept else None,
                )
        merged[:, first:last] = merge(partials, counts, columns)
        if kept:
            maxima[:, first:last] = partials[: len(maxima), MAX]
    return merged, (exponentials, maxima) if kept else ()


def _reduce_tile(
    z: Tensor, target: Tensor | None, window: slice, start: int, columns: Columns, partial: Tensor, store: Tensor | None
) -> None:
    """Write the partial ``[C, rows]`` of a tile of logits, which it consumes, and its exponentials."""
    maximum = partial[MAX]
    if columns.argmax:
        ids = integer_view(partial[columns.index])
        top, index = z.max(0)
        maximum.copy_(top)
        ids.copy_(index.add_(start + window.start))
    else:
        torch.amax(z, 0, out=maximum)
    if target is not None:
        position, hit = _target_positions(target, window)
        partial[TARGET].copy_(z.view(-1).index_select(0, position).masked_fill_(~hit, 0.0))
    if columns.mean_logit:
        torch.sum(z, 0, out=partial[columns.total])
    # A token of -inf alone would give -inf - -inf.
    z -= maximum.masked_fill(maximum == -torch.inf, 0.0)
    if columns.mean_log_prob:
        torch.sum(z, 0, out=partial[columns.shifted])
    shifted = z.clamp(min=_LOWEST_SHIFT) if columns.expected_logit else None
    exponentials = torch.exp(z, out=store if store is not None and store.dtype == z.dtype else z)
    torch.sum(exponentials, 0, out=partial[SUM_EXP])
    if shifted is not None:
        torch.sum(shifted.mul_(exponentials), 0, out=partial[columns.weighted])
    if store is not None and store is not exponentials:
        store.copy_(z.mul_(_FP16_SCALE) if store.dtype == torch.float16 else z)


@in_own_context
def block_backward(
    projection: Projection,
    x: Tensor,
    target: Tensor | None,
    statistics: Tensor,
    coefficients: Coefficients,
    kept: Kept,
    to: Destinations,
    scratch: Scratch,
) -> None:
    """Gradients of a block of ``x [R, D]``, written or added where ``to`` says.

    ``statistics [>= 3, R]`` is the merged partial; what is not ``kept`` is projected again. With
    ``to.dx_ready``, dX is completed first and announced, so that its reduction runs beside the rest
    of dW: that of every kept window, and of as many recomputed ones as have their gradients of
    logits held within ``scratch.limit`` bytes. Where that is none, one window is projected once more.
    """
    to.x_ready()
    gradient = _LogitGradient(projection, x, target, statistics, coefficients, kept)
    dx, sums = to.dx, _OpenWindow(to, gradient)
    cut = windows(projection, gradient.kept)
    stored = [w for w in cut if w.start < gradient.kept]
    recomputed = [w for w in cut if w.start >= gradient.kept]
    tiles = _row_tiles(x.shape[0], x.device)
    later, hold = [], False
    if dx is not None and to.dx_ready is not None and (to.dweight or to.dbias):
        width = max((w.stop - w.start for w in recomputed), default=0)
        fitting = scratch.limit // max(1, x.shape[0] * width * gradient.x.element_size())
        hold = fitting > 0
        waiting = fitting if hold or stored else 1
        later = recomputed[max(0, len(recomputed) - waiting) :] + stored
    held: dict[tuple[int, int], Tensor] = {}

    if dx is not None:
        total = dx if dx.dtype == projection.dtype else dx.new_empty(dx.shape, dtype=projection.dtype)
        if not cut:
            total.zero_()
    for number, window in enumerate(recomputed + stored):
        waits = window in later
        weight = operand(projection.weight[window])
        if not waits:
            sums.open(window)
        for tile in tiles:
            tile_gradient = gradient.tile(tile, window, weight)
            if dx is not None:
                accumulate_nt(
                    total[tile], tile_gradient.t(), weight.t(), overwrite=number == 0, factor=gradient.unscale
                )
            if not waits:
                sums.add(tile_gradient, tile)
            elif hold and window.start >= gradient.kept:
                held[window.start, tile.start] = tile_gradient
            del tile_gradient
        if not waits:
            sums.close()
    if dx is not None and total is not dx:
        dx.copy_(total)
    if to.dx_ready is not None:
        to.dx_ready()
    for window in later:
        sums.open(window)
        again = window.start >= gradient.kept and not hold
        weight = operand(projection.weight[window]) if again else None
        for tile in tiles:
            tile_gradient = held.pop((window.start, tile.start), None)
            if tile_gradient is None:
                tile_gradient = gradient.tile(tile, window, weight)
            sums.add(tile_gradient, tile)
            del tile_gradient
        sums.close()


class _LogitGradient:
    """Tiles of a block's gradient of the projection's output ``x @ weight.T + bias``."""

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        statistics: Tensor,
        coefficients: Coefficients,
        kept: Kept,
    ) -> None:
        self.x = operand(x)
        self._projection, self._target = projection, target
        self._exponentials, self._maxima = kept or (None, None)
        self.kept = len(self._exponentials) if kept else 0
        maximum, sum_exp, target_logit = statistics[: TARGET + 1]
        # A row without a finite logit has M = -inf.
        self._maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
        self.unscale: Tensor | None = None
        factor: Tensor | float = projection.scale
        if self.x.dtype == torch.float16:
            power = power_of_two_scale(coefficients, projection.scale)
            factor, self.unscale = factor * power, 1 / power
        # The 1 / s of the probabilities rides on their coefficients.
        self._alpha = coefficients.alpha / sum_exp * factor
        self._beta = _times(coefficients.beta, factor)
        self._gamma = _times(coefficients.gamma, factor)
        self._delta = _times(coefficients.delta, factor)
        if self._delta is not None:
            self._delta = self._delta / sum_exp
        if self._beta is not None and projection.softcap is not None:
            # z of the target from fp32, not from a stored exponential.
            self._beta = self._beta * _chain(projection, target_logit)

    def tile(self, rows: slice, window: slice, weight: Tensor | None = None) -> Tensor:
        """The gradient of a tile, ``[window, rows]``, as an operand of the next products.

        Recomputed windows need ``weight``, their rows as an operand.
        """
        if window.start < self.kept:
            gradient, chain = self._from_kept(rows, window)
        else:
            gradient, chain = self._recomputed(rows, window, weight)
        if self._gamma is not None:
            gradient -= self._gamma[rows]
        if chain is not None:
            gradient *= chain
        if self._beta is not None:
            position, hit = _target_positions(self._target[rows], window)
            beta = self._beta[rows] * -hit.to(gradient.dtype)
            gradient.view(-1).scatter_add_(0, position, beta)
        return gradient.to(self.x.dtype)

    def _from_kept(self, rows: slice, window: slice) -> tuple[Tensor, Tensor | None]:
        stored = self._exponentials[window, rows]
        scale = 1 / _FP16_SCALE if stored.dtype == torch.float16 else 1.0
        maximum = self._maxima[window.start // _width(self._projection), rows]
        coefficient = self._alpha[rows] * torch.exp(maximum - self._maximum[rows])
        gradient = stored * (coefficient * scale)
        chain = None
        if self._projection.softcap is not None:
            z = torch.log(stored.to(gradient.dtype) * scale).add_(maximum)
            chain = _chain(self._projection, z)
        return gradient, chain

    def _recomputed(self, rows: slice, window: slice, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        z = _logits(self._projection, self.x[rows], weight, window)
        chain = _chain(self._projection, z) if self._projection.softcap is not None else None
        z -= self._maximum[rows]
        alpha = self._alpha[rows]
        if self._delta is None:
            return z.exp_().mul_(alpha), chain
        weighted = z.clamp(min=_LOWEST_SHIFT).mul_(self._delta[rows]).add_(alpha)
        return z.exp_().mul_(weighted), chain


class _OpenWindow:
    """dW and dbias of one vocabulary window at a time, from tiles of the gradient of logits."""

    def __init__(self, to: Destinations, source: _LogitGradient) -> None:
        self._gradients = (to.dweight, to.dbias)
        self._source = source

    def open(self, window: slice) -> None:
        self._window = window
        self._sums = [g and list(g.open(window.start, window.stop)) for g in self._gradients]

    def add(self, tile_gradient: Tensor, rows: slice) -> None:
        weight, bias = self._sums
        factor = self._source.unscale
        if weight is not None:
            total, overwrite = weight
            x = self._source.x[rows]
            accumulate_nt(total, tile_gradient, x.t(), overwrite=overwrite, factor=factor)
            weight[1] = False
        if bias is not None:
            total, overwrite = bias
            column_sum = tile_gradient.sum(1, dtype=total.dtype)
            if factor is not None:
                column_sum *= factor
            put(total, column_sum, overwrite)
            bias[1] = False

    def close(self) -> None:
        for gradient, opened in zip(self._gradients, self._sums):
            if gradient is not None:
                gradient.close(self._window.start, self._window.stop, opened[0])


def _times(coefficient: Tensor | None, factor: Tensor | float) -> Tensor | None:
    return None if coefficient is None else coefficient * factor
