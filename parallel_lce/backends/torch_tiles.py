"""Tiles of logits in the torch backend, ``[entries, rows]``: their sizes, their memory, and operations on one tile.

A tile is one window of the vocabulary times some rows of a block. Per-token vectors broadcast along its contiguous
rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate, operand
from parallel_lce.backends.interface import Scratch
from parallel_lce.core.logit_map import Projection
from parallel_lce.core.picked import Picked

# Bytes of a tile and the temporaries of its shape, and of a window of a low-precision weight in fp32. Few and large
# operations are faster on a CPU: each waits for its slowest thread, which the system may have suspended.
_TILE_BYTES = 64 << 20
# Most tensors of a tile's shape, the tile included.
_COPIES = 4
# Most rows of a tile.
_TILE_ROWS = 4096


def row_tiles(rows: int) -> list[slice]:
    return [slice(0, rows)] if 0 < rows <= _TILE_ROWS else even_slices(0, rows, _TILE_ROWS)


def window_size(projection: Projection, rows: int, temporaries: bool) -> int:
    """Most entries of a window, for tiles of ``rows`` rows. ``temporaries``: further tensors of a tile's shape are
    needed."""
    dtype = projection.dtype
    low_precision = projection.weight.dtype != dtype
    nbytes = _TILE_BYTES // _COPIES if temporaries or low_precision else _TILE_BYTES
    return max(1, nbytes // (dtype.itemsize * max(1, rows, projection.weight.shape[1] * low_precision)))


def even_slices(start: int, stop: int, most: int) -> list[slice]:
    """``[start, stop)`` in as few slices of at most ``most`` as possible, of equal size but for the last one."""
    if stop - start <= most:
        return [slice(start, stop)] if stop > start else []
    count = -(-(stop - start) // most)
    size = -(-(stop - start) // count)
    return [slice(a, min(a + size, stop)) for a in range(start, stop, size)]


def logits(
    projection: Projection, x: Tensor, weight: Tensor, window: slice, out: Tensor, uncapped: Tensor | None = None
) -> Tensor:
    """A tile of z in ``out``. ``projection``: of the tile's rows. ``x``, ``weight``: its rows and entries, as operands.
    ``uncapped``: memory for the tile before the soft-cap."""
    accumulate(out, weight, x.t(), overwrite=True)
    if projection.bias is not None:
        out += projection.bias[window, None]
    if uncapped is not None:
        uncapped.copy_(projection.logit_map.scaled(out))
        return projection.logit_map.capped(out)
    return projection.logit_map.apply(out)


def borrowed(scratch: Scratch, rows: slice, window: slice, dtype: torch.dtype) -> Tensor:
    """Memory of a tile."""
    height = rows.stop - rows.start
    return scratch.borrow((window.stop - window.start) * height, dtype).view(-1, height)


def saved_tile(exponentials: Tensor, save: int, rows: slice, window: slice) -> Tensor:
    """A tile of the saved exponentials, which hold ``save`` entries, tile after tile of rows."""
    height = rows.stop - rows.start
    start = rows.start * save + window.start * height
    return exponentials[start : start + (window.stop - window.start) * height].view(-1, height)


def recapped(stored: Tensor, softcap: float, out: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, in ``out``, of what :func:`logits` saved before the soft-cap, and the soft-cap's slope there."""
    ratio = stored.to(out.dtype).div_(softcap)
    torch.tanh(ratio, out=out).mul_(softcap)
    return out, ratio.cosh_().square_().reciprocal_()


def take_targets(tile: Tensor, target: Tensor, window: slice, out: Tensor) -> None:
    """Copy the targets' logits out of a tile to ``out [rows]``, 0 for targets outside the tile."""
    entry = target - window.start
    inside = entry.clamp(0, tile.shape[0] - 1)
    torch.gather(tile, 0, inside.unsqueeze(0), out=out.unsqueeze(0))
    out.masked_fill_(inside != entry, 0.0)


def set_at_targets(tile: Tensor, target: Tensor, window: slice, values: Tensor) -> None:
    """Write ``values [rows]`` to the targets' entries of a tile."""
    position, hit = _target_positions(tile, target, window)
    tile.view(-1).scatter_(0, position, torch.where(hit, values, tile.view(-1)[position]))


def _target_positions(tile: Tensor, target: Tensor, window: slice) -> tuple[Tensor, Tensor]:
    """One-dimensional: only at such positions does torch add deterministically. And whether a target is in the tile."""
    entry = target - window.start
    inside = entry.clamp(0, tile.shape[0] - 1)
    position = torch.add(torch.arange(len(target), device=target.device), inside, alpha=len(target))
    return position, inside == entry


def take_picked(tile: Tensor, picked: Picked, rows: slice, window: slice) -> None:
    """Copy the picked entries' logits out of a tile."""
    position, hit = _picked_positions(picked, rows, window)
    picked.logits.copy_(tile.view(-1).index_select(0, position).where(hit, picked.logits))


def add_picked(tile: Tensor, picked: Picked, rows: slice, window: slice) -> None:
    """Add the picked entries' terms to a tile of the gradient."""
    position, hit = _picked_positions(picked, rows, window)
    # Equal positions are summed in a fixed order, on CUDA too.
    tile.view(-1).index_put_((position,), picked.gradient.where(hit, 0.0), accumulate=True)


def _picked_positions(picked: Picked, rows: slice, window: slice) -> tuple[Tensor, Tensor]:
    """Positions of the picked entries ``[E]`` in a flattened tile, and which of them lie in it."""
    row, hit = picked.of_rows(rows).located(window.start, window.stop)
    height = rows.stop - rows.start
    return ((picked.ids - window.start) * height + row).where(hit, 0), hit


def projected_tiles(
    projection: Projection, x: Tensor, height: int, width: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Projects again: the logits of at most ``height`` rows and a window of at most ``width`` entries of the shard. All
    windows of some rows come before those of the next rows, in the order of ids."""
    for a in range(0, len(x), height):
        rows = slice(a, a + height)
        of_rows, x_rows = projection.of_rows(rows), operand(x[rows])
        for first in range(0, projection.real_rows, width):
            window = slice(first, min(first + width, projection.real_rows))
            weight = operand(projection.weight[window])
            memory = x.new_empty(len(weight), len(x_rows), dtype=projection.dtype)
            yield rows, window, logits(of_rows, x_rows, weight, window, memory).t()
