"""Inverse transform sampling. A token's *draw point* is a random point in the running sum of its exponentials. First
the window that contains the draw point is found, then the entry in that window.

See :mod:`parallel_lce.features.draws`. A forward's window partials tell the window. One tile of logits per window and
row block is then formed again, for tokens that are sorted by their windows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import exponential_from, finite_base, to_base
from parallel_lce.kernels.partials import WindowPartials
from parallel_lce.kernels.relaunch import Relaunched

# Tokens per program, and windows per step.
_ROWS, _WINDOWS = 16, 64
# Tokens per step of the only program that lists tiles.
_LISTED = tl.constexpr(4096)


class DrawEpilogue(NamedTuple):
    """Stores the sampled entries of tokens that are sorted by the window in which their draw point lies."""

    KIND = "draw"
    # [R] int32; the number of windows for a token whose draw point lies in none
    window: torch.Tensor
    # [R] int64, the number of each sorted token before it was sorted. The other tensors are not sorted.
    order: torch.Tensor
    # [R] fp32, in units of the window's sum of exponentials
    draw_point: torch.Tensor
    # [R] int64, an output: the entry's global id
    id: torch.Tensor
    # Global id of the shard's first entry.
    start: int


@triton.jit
def store_draw(z, position, draw, MASKED: tl.constexpr):
    """Store the entries of the tokens whose window is the tile of logits ``z [BLOCK_M, BLOCK_N]``. ``position``: as in
    :func:`parallel_lce.kernels.epilogue.finish_tile`."""
    r, c, window, rows, entries = position
    valid = r < rows
    if MASKED:
        z = tl.where((c < entries)[None, :], z, -float("inf"))
    e = exponential_from(z, finite_base(tl.max(z, 1))[:, None])
    token = tl.load(draw.order + r, mask=valid, other=0)
    threshold = tl.load(draw.draw_point + token, mask=valid, other=0.0) * tl.sum(e, 1)
    # Bisection: the first entry up to which the sum exceeds the draw point.
    size = z.shape[1]
    low = r * 0 + window * size
    high = low + size - 1
    step = size
    while step > 1:
        middle = (low + high) // 2
        reached = tl.sum(tl.where(c[None, :] <= middle[:, None], e, 0.0), 1) > threshold
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
        step = step // 2
    here = valid & (tl.load(draw.window + r, mask=valid, other=-1) == window)
    tl.store(draw.id + token, (tl.minimum(high, entries - 1) + draw.start).to(tl.int64), mask=here)


@triton.jit
def _masses(windows, w, r, inside, base, rows):
    """Sums of exponentials of the windows ``w``, relative to ``base``, fp64."""
    here = w.to(tl.int64)[:, None] * rows + r[None, :]
    m = tl.load(windows.max + here, mask=inside, other=-float("inf"))
    s = tl.load(windows.sum_exp + here, mask=inside, other=0.0)
    return tl.where(m == -float("inf"), 0.0, s * to_base(m, base[None, :]))


@Relaunched
@triton.jit(do_not_specialize=["rows", "num_windows"])
def lce_forward_find_windows(
    windows, maximum, draw_point, owned, window, within, rows, num_windows, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Each token's window, and its draw point in units of the window's sum. ``maximum``: of all windows."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = r < rows
    base = finite_base(tl.load(maximum + r, mask=valid, other=0.0))
    # The same sums, in the same order, as in the second loop: a merged sum is rounded, and a draw point behind the last
    # window would go to the entries at the end of the vocabulary.
    total = tl.zeros((BLOCK_R,), tl.float64)
    for first in range(0, num_windows, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        inside = (w < num_windows)[:, None] & valid[None, :]
        total = tl.max(total[None, :] + tl.cumsum(_masses(windows, w, r, inside, base, rows), 0), 0)
    threshold = total * tl.load(draw_point + r, mask=valid, other=0.5)
    total = tl.zeros((BLOCK_R,), tl.float64)
    # Number and end of the windows that end before the draw point; end of the draw point's window.
    passed = tl.zeros((BLOCK_R,), tl.int32)
    before = total
    end = total
    for first in range(0, num_windows, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        inside = (w < num_windows)[:, None] & valid[None, :]
        ends = total[None, :] + tl.cumsum(_masses(windows, w, r, inside, base, rows), 0)
        ended = ends <= threshold[None, :]
        passed += tl.sum((ended & inside).to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(ended, ends, 0.0), 0))
        later = tl.min(tl.where(ended, float("inf"), ends), 0)
        end = tl.where((end == 0.0) & (later < float("inf")), later, end)
        total = tl.max(ends, 0)
    # Below 1, so that the entry exists.
    share = ((threshold - before) / (end - before)).to(tl.float32)
    tl.store(within + r, tl.minimum(share, 1.0 - 2.0**-23), mask=valid)
    # Without a finite sum nothing is found.
    passed = tl.minimum(passed, num_windows - 1)
    if owned is not None:
        passed = tl.where(tl.load(owned + r, mask=valid, other=0) != 0, passed, num_windows)
    tl.store(window + r, passed, mask=valid)


def find_windows(
    ranges: list[WindowPartials], maximum: torch.Tensor, draw_point: torch.Tensor, owned: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The window ``[R]`` int32 of each token's ``draw_point [R]`` fp64, and the draw point in units of the window's
    sum, ``[R]`` fp32. The window of a token that is not ``owned [R]`` bool is the number of windows. ``ranges``: the
    partials of consecutive tokens. ``maximum [R]`` fp32: of the shard."""
    window, within = torch.empty_like(draw_point, dtype=torch.int32), torch.empty_like(draw_point, dtype=torch.float32)
    owned = owned if owned is None else owned.view(torch.uint8)
    first = 0
    for partials in ranges:
        num_windows, rows = partials.max.shape
        some = slice(first, first + rows)
        tensors = maximum[some], draw_point[some], owned if owned is None else owned[some], window[some], within[some]
        grid, sizes = (-(-rows // _ROWS),), dict(BLOCK_R=_ROWS, BLOCK_W=_WINDOWS)
        lce_forward_find_windows.launch(grid, partials, *tensors, rows, num_windows, **sizes)
        first += rows
    return window, within


@Relaunched
@triton.jit(do_not_specialize=["rows", "row_blocks", "num_windows"])
def lce_forward_tiles_of_draws(window, tile_list, rows, row_blocks, num_windows, BLOCK_M: tl.constexpr):
    """One program. ``window``: sorted. Each tile is listed where its first token stands before those of other tiles."""
    number = 0
    for first in range(0, rows, _LISTED):
        r = first + tl.arange(0, _LISTED)
        own = tl.load(window + r, mask=r < rows, other=num_windows)
        tile = own * row_blocks + r // BLOCK_M
        before = tl.load(window + r - 1, mask=(r > 0) & (r < rows), other=-1) * row_blocks + (r - 1) // BLOCK_M
        starts = (own < num_windows) & ((tile != before) | (r == 0))
        slot = number + tl.cumsum(starts.to(tl.int32), 0)
        tl.store(tile_list + slot, tile, mask=starts)
        number += tl.sum(starts.to(tl.int32), 0)
    tl.store(tile_list, number)


def tiles_of_draws(window: torch.Tensor, row_blocks: int, block_rows: int, num_windows: int) -> torch.Tensor:
    """The tiles of sorted tokens that have a ``window [R]``, ``[1 + R]`` int32, for ``Product.launch``."""
    tile_list = window.new_empty(len(window) + 1)
    arguments = window, tile_list, len(window), row_blocks, num_windows
    lce_forward_tiles_of_draws.launch((1,), *arguments, BLOCK_M=block_rows, num_warps=8)
    return tile_list
