"""Which windows of the gradient of the logits matter, before they are projected again.

The forward keeps the maximum and the sum of exponentials of each token's windows. So the largest probability of a
window and its mass are known, and a window without a large one is not projected. A sample of the tokens is projected in
full: it tells how masses are shared (:mod:`parallel_lce.kernels.window_shares`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import exponential_from, finite_base, window_shift
from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2
from parallel_lce.kernels.tile_scan import TILE, filter_argument, new_masses
from parallel_lce.kernels.window_shares import parts_of_window

_TILE = tl.constexpr(TILE)
# Row blocks that are projected together, so that what they share stays in the L2 cache; windows of a list that one
# looks at at a time.
_TOGETHER, _LISTED = 16, 1024


class WindowPartials(NamedTuple):
    """What a forward knows of its windows, ``[windows, R]`` fp32 each."""

    max: torch.Tensor
    # Relative to ``arithmetic.window_shift`` of the softmax shift, or to the window's maximum without one; or None
    sum_exp: torch.Tensor | None = None
    # [R] fp32, or None
    softmax_shift: torch.Tensor | None = None

    def of_rows(self, rows: slice) -> WindowPartials:
        sums, shift = self.sum_exp, self.softmax_shift
        sums = sums if sums is None else sums[:, rows]
        return WindowPartials(self.max[:, rows], sums, shift if shift is None else shift[rows])


class RowTerms(NamedTuple):
    """What turns the tokens' probabilities into rows of G, fp32; None: 1. Targets: as in ``targets.add_targets``."""

    # [>= 3, R], contiguous: the merged partial
    partial: torch.Tensor
    # [R]
    alpha: torch.Tensor
    token_scale: torch.Tensor | None
    # 0-dimensional
    fp16_scale: torch.Tensor | None
    # [R] int64, fp32 and uint8; None without targets
    target: torch.Tensor | None
    residual: torch.Tensor | None
    unshared: torch.Tensor | None


@Relaunched
@triton.jit(do_not_specialize=["rows", "first_window", "stop"])
def lce_backward_window_bounds(
    maxima,
    sums,
    shift,
    terms,
    chosen,
    of_tiles,
    largest,
    masses,
    eps,
    rows,
    tiles,
    first_window,
    stride,
    masses_stride,
    scale,
    stop,
    WINDOW: tl.constexpr,
):
    """``stop``: after the last real entry of the last window. ``masses`` None: they are not asked for."""
    window, block = tl.program_id(0), tl.program_id(1)
    r = block * _TILE + tl.arange(0, _TILE)
    valid = r < rows
    here = (first_window + window).to(tl.int64) * stride + r
    top = tl.load(maxima + here, mask=valid, other=-float("inf"))
    base = finite_base(tl.load(terms.partial + r, mask=valid, other=0.0))
    sum_exp = tl.load(terms.partial + rows + r, mask=valid, other=1.0)
    # In units of the token's limit.
    bound, p = exponential_from(top, base) / sum_exp, tl.zeros((_TILE,), tl.float32)
    if sums is not None:
        reference = finite_base(top)
        if shift is not None:
            reference = window_shift(top, tl.load(shift + r, mask=valid, other=0.0))
        p = tl.load(sums + here, mask=valid, other=0.0)
        # A window of -inf alone adds nothing, but NaN beside -inf must get through.
        p = tl.where(p == 0.0, 0.0, p * exponential_from(reference, base) / sum_exp)
        # A maximum may leave out NaN, a sum does not.
        bound = tl.where(p == p, bound, float("inf"))
    factor = tl.load(terms.alpha + r, mask=valid, other=0.0) * scale
    if terms.token_scale is not None:
        factor *= tl.load(terms.token_scale + r, mask=valid, other=0.0)
    if terms.fp16_scale is not None:
        factor *= tl.load(terms.fp16_scale)
    # A gradient of 0 has no limit.
    bound = tl.where(factor == 0.0, 0.0, tl.where(factor == factor, bound, float("inf")))
    if terms.target is not None:
        # An unshared target has 0 in G. A shared one's gradient is in G, whatever the others are.
        begin = (first_window + window) * WINDOW
        wanted = tl.load(terms.target + r, mask=valid, other=-1)
        hit = (wanted >= begin) & (wanted < begin + WINDOW) & (wanted < stop)
        logit = tl.load(terms.partial + 2 * rows + r, mask=hit, other=0.0)
        p = tl.where(hit, tl.maximum(p - exponential_from(logit, base) / sum_exp, 0.0), p)
        is_shared = tl.load(terms.unshared + r, mask=hit, other=1) == 0
        has_gradient = (tl.load(terms.residual + r, mask=hit, other=0.0) != 0.0) | (factor != 0.0)
        bound = tl.where(hit & is_shared & has_gradient, float("inf"), bound)
    found = tl.max(tl.where(bound == bound, bound, float("inf")), 0)
    TILES: tl.constexpr = WINDOW // _TILE
    t = window * TILES + tl.arange(0, TILES)
    tl.store(largest + block * tiles + t, tl.zeros((TILES,), tl.float32) + found, mask=t < tiles)
    if masses is not None:
        if chosen is not None:
            eps = tl.load(chosen)
        mass = tl.where(found > eps, 0.0, p * factor)
        part = parts_of_window(of_tiles, window, tiles, TILES)
        pointers = masses + t.to(tl.int64)[:, None] * masses_stride + r[None, :]
        inside = (t < tiles)[:, None] & valid[None, :]
        tl.store(pointers, (part[:, None] * mass[None, :]).to(masses.dtype.element_ty), mask=inside)


@Relaunched
@triton.jit(do_not_specialize=["row_blocks", "windows"])
def lce_backward_list_windows(
    largest,
    chosen,
    listed,
    eps,
    row_blocks,
    windows,
    tiles,
    TILES: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if chosen is not None:
        eps = tl.load(chosen)
    found = 0
    of_group = TOGETHER * windows
    for start in range(0, tl.cdiv(row_blocks, TOGETHER) * of_group, BLOCK):
        place = start + tl.arange(0, BLOCK)
        window = place % of_group // TOGETHER
        block = place // of_group * TOGETHER + place % TOGETHER
        bound = tl.load(largest + block * tiles + window * TILES, mask=block < row_blocks, other=0.0)
        is_active = (bound > eps).to(tl.int32)
        position = found + tl.cumsum(is_active, 0)
        tl.store(listed + position, window * row_blocks + block, mask=is_active != 0)
        found += tl.sum(is_active, 0)
    tl.store(listed, found)


class Places(NamedTuple):
    """Some windows of a shard, of ``entries`` in all: ``first`` is the number of the first one."""

    first: int
    entries: int
    # entries of a window, a multiple of 128
    window: int

    @property
    def tiles(self) -> int:
        return -(-self.entries // TILE)


def window_bounds(windows: WindowPartials, terms: RowTerms, places: Places, scale: float) -> torch.Tensor:
    """Bounds ``[row blocks, T]`` fp32 of the largest entries of tiles, in units of their tokens' limits: those of
    their windows."""
    return _bounds(windows, terms, places, scale, None, None, 0.0)


def window_masses(
    windows: WindowPartials,
    terms: RowTerms,
    places: Places,
    scale: float,
    of_tiles: torch.Tensor,
    eps: float | torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds, and the masses ``[T, R]`` of the tiles, 0 where a bound exceeds ``eps``. ``of_tiles [T]``: of
    :func:`parallel_lce.kernels.window_shares.mean_shares`."""
    masses = new_masses(places.tiles, len(terms.alpha), of_tiles, dtype)
    return _bounds(windows, terms, places, scale, of_tiles, masses, eps), masses


def _bounds(
    windows: WindowPartials,
    terms: RowTerms,
    places: Places,
    scale: float,
    of_tiles: torch.Tensor | None,
    masses: torch.Tensor | None,
    eps: float | torch.Tensor,
) -> torch.Tensor:
    rows, (first, entries, window) = len(terms.alpha), places
    row_blocks, (chosen, number) = -(-rows // TILE), filter_argument(eps)
    largest = windows.max.new_empty(row_blocks, places.tiles)
    lce_backward_window_bounds.launch(
        (-(-entries // window), row_blocks),
        windows.max,
        windows.sum_exp,
        windows.softmax_shift,
        terms,
        chosen,
        of_tiles,
        largest,
        masses,
        number,
        rows,
        places.tiles,
        first,
        windows.max.stride(0),
        0 if masses is None else masses.stride(0),
        float(scale),
        first * window + entries,
        WINDOW=window,
    )
    return largest


def list_active_windows(largest: torch.Tensor, window: int, eps: float | torch.Tensor) -> torch.Tensor:
    """The windows of so many entries whose bound exceeds ``eps``, as
    :meth:`parallel_lce.kernels.projection.Product.launch` takes them. ``largest``: of :func:`window_bounds`."""
    (row_blocks, tiles), per_window = largest.shape, window // TILE
    windows = -(-tiles // per_window)
    listed = largest.new_empty(1 + row_blocks * windows, dtype=torch.int32)
    together = min(_TOGETHER, next_power_of_2(row_blocks))
    chosen, number = filter_argument(eps)
    lce_backward_list_windows.launch(
        (1,),
        largest,
        chosen,
        listed,
        number,
        row_blocks,
        windows,
        tiles,
        TILES=per_window,
        TOGETHER=together,
        BLOCK=_LISTED,
    )
    return listed
