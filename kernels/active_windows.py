"""Which windows of the gradient of the logits matter, before they are projected again.

The forward keeps the maximum and the sum of exponentials of each token's windows. So the largest probability of a
window and its mass are known, and a window without a large one is not projected. A sample of the row blocks is
projected in full. It tells how a window's mass is shared among its tiles, and how a tile's is among its entries
(:mod:`parallel_lce.kernels.active_tiles`): for dX in proportion to the sums over the sample of the entries within the
limit. In dW the error of an entry's share adds up over all tokens, and the noise of a sample would be too large. There
the shares are in proportion to exp of the mean logit of all tokens, which is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import finite_base, rebased, window_shift
from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2
from parallel_lce.kernels.tile_scan import TILE, ScannedTiles, limit_of, new_masses

_TILE = tl.constexpr(TILE)
# Row blocks that are projected together, so that what they share stays in the L2 cache; windows of a list that one
# looks at at a time.
_TOGETHER, _LISTED = 16, 1024
# Row blocks whose sums are added at a time.
_SUMMED = 4


class WindowPartials(NamedTuple):
    """What a forward knows of its windows, ``[windows, R]`` fp32 each."""

    max: torch.Tensor
    # Relative to ``arithmetic.window_shift`` of the softmax shift, or to the window's maximum without one.
    sum_exp: torch.Tensor
    # [R] fp32, or None
    softmax_shift: torch.Tensor | None

    def of_rows(self, rows: slice) -> WindowPartials:
        shift = self.softmax_shift
        return WindowPartials(self.max[:, rows], self.sum_exp[:, rows], shift if shift is None else shift[rows])


class RowTerms(NamedTuple):
    """What turns the tokens' probabilities into rows of G, fp32; None: 1. Targets: as in ``targets.add_targets``."""

    # [>= 3, R], contiguous: the merged partial
    partial: torch.Tensor
    # [R]
    alpha: torch.Tensor
    token_scale: torch.Tensor | None
    # 0-dimensional
    fp16_scale: torch.Tensor | None
    # [R] fp32: 1 / limit
    inverse_limits: torch.Tensor
    # [R] int64, [R] uint8; None without targets
    target: torch.Tensor | None
    unshared: torch.Tensor | None


@Relaunched
@triton.jit(do_not_specialize=["row_blocks"])
def lce_backward_sampled_shares(
    column_sums, chosen, logits, bias, of_hidden, of_weight, sampled, row_blocks, entries, scale, BLOCK: tl.constexpr
):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    inside = c < entries
    summed = row_blocks
    if chosen is not None:
        # Without a filter there are no sums.
        summed = tl.where(tl.load(chosen) > 0.0, row_blocks, 0)
    sums = tl.zeros((_TILE,), tl.float32)
    for start in range(0, row_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        offsets = block.to(tl.int64)[:, None] * (tiles * _TILE) + c[None, :]
        sums += tl.sum(tl.load(column_sums + offsets, mask=(block < summed)[:, None], other=0.0), 0)
    total = tl.sum(sums, 0)
    is_known = (total > 0.0) & (total < float("inf"))
    tl.store(sampled + tile, tl.where(is_known, total, 0.0))
    z = tl.load(logits + c, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    z = tl.where(inside, z * scale, -float("inf"))
    expected = tl.exp(z - tl.max(z, 0))
    whole = tl.sum(expected, 0)
    # A token with NaN must not reach others.
    is_usable = (whole > 0.0) & (whole < float("inf"))
    even = inside.to(tl.float32) / tl.minimum(entries - tile * _TILE, _TILE)
    expected = tl.where(is_usable, expected / whole, even)
    tl.store(of_weight + c, expected)
    tl.store(of_hidden + c, tl.where(is_known, sums / total, expected))


@Relaunched
@triton.jit(do_not_specialize=["rows", "first_window"])
def lce_backward_window_bounds(
    maxima,
    sums,
    shift,
    terms,
    chosen,
    sampled,
    largest,
    masses,
    eps,
    rows,
    tiles,
    first_window,
    stride,
    masses_stride,
    scale,
    WINDOW: tl.constexpr,
):
    window, block = tl.program_id(0), tl.program_id(1)
    if chosen is not None:
        eps = tl.load(chosen)
    r = block * _TILE + tl.arange(0, _TILE)
    valid = r < rows
    here = (first_window + window).to(tl.int64) * stride + r
    top = tl.load(maxima + here, mask=valid, other=-float("inf"))
    base = finite_base(tl.load(terms.partial + r, mask=valid, other=0.0))
    sum_exp = tl.load(terms.partial + rows + r, mask=valid, other=1.0)
    reference = finite_base(top)
    if shift is not None:
        reference = window_shift(top, tl.load(shift + r, mask=valid, other=0.0))
    p = tl.load(sums + here, mask=valid, other=0.0) * rebased(reference, base) / sum_exp
    # A maximum may leave out NaN, a sum does not.
    bound = tl.where(p == p, rebased(top, base) / sum_exp, float("inf"))
    if terms.target is not None:
        # An unshared target has 0 in G. The entry of a shared one is large.
        begin = (first_window + window) * WINDOW
        wanted = tl.load(terms.target + r, mask=valid, other=-1)
        hit = (wanted >= begin) & (wanted < begin + WINDOW)
        logit = tl.load(terms.partial + 2 * rows + r, mask=hit, other=0.0)
        p = tl.where(hit, tl.maximum(p - rebased(logit, base) / sum_exp, 0.0), p)
        unshared = tl.load(terms.unshared + r, mask=hit, other=1) != 0
        bound = tl.where(hit & (unshared == 0), 1.0, bound)
    factor = tl.load(terms.alpha + r, mask=valid, other=0.0) * scale
    if terms.token_scale is not None:
        factor *= tl.load(terms.token_scale + r, mask=valid, other=0.0)
    if terms.fp16_scale is not None:
        factor *= tl.load(terms.fp16_scale)
    bound *= tl.abs(factor) * tl.load(terms.inverse_limits + r, mask=valid, other=0.0)
    found = tl.max(tl.where(bound == bound, bound, float("inf")), 0)
    mass = tl.where(found > eps, 0.0, p * factor)
    TILES: tl.constexpr = WINDOW // _TILE
    t = window * TILES + tl.arange(0, TILES)
    part = tl.load(sampled + t, mask=t < tiles, other=0.0)
    whole = tl.sum(part, 0)
    part = tl.where(whole > 0.0, part / whole, (t < tiles).to(tl.float32) / tl.minimum(tiles - window * TILES, TILES))
    tl.store(largest + block * tiles + t, tl.zeros((TILES,), tl.float32) + found, mask=t < tiles)
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


class SampledShares(NamedTuple):
    """What a sample, and the mean logits, tell of T tiles. fp32."""

    # [128 T]: q for dX, and for dW
    of_hidden: torch.Tensor
    of_weight: torch.Tensor
    # [T]: sums over the sample, 0 where they are not known
    sums: torch.Tensor


def sampled_shares(
    column_sums: torch.Tensor,
    eps: float | torch.Tensor,
    mean_logits: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
) -> SampledShares:
    """``column_sums [row blocks, 128 T]``: of the scan of a sample with this limit. ``mean_logits [C]``: still to be
    increased by ``bias [C]`` and multiplied by ``scale``."""
    row_blocks, tiles = column_sums.shape[0], column_sums.shape[1] // TILE
    of_hidden, of_weight = column_sums.new_empty(2, tiles * TILE).unbind()
    found = SampledShares(of_hidden, of_weight, column_sums.new_empty(tiles))
    chosen, _ = limit_of(eps)
    lce_backward_sampled_shares.launch(
        (tiles,),
        column_sums,
        chosen,
        mean_logits,
        bias,
        *found,
        row_blocks,
        len(mean_logits),
        float(scale),
        BLOCK=min(_SUMMED, next_power_of_2(row_blocks)),
    )
    return found


def window_bounds(
    windows: WindowPartials,
    terms: RowTerms,
    gradient: torch.Tensor,
    first: int,
    window: int,
    eps: float | torch.Tensor,
    sampled: torch.Tensor,
    scale: float,
) -> ScannedTiles:
    """Bounds of the largest entries of the tiles of ``gradient [R, C]``, and their masses, 0 where a bound exceeds
    ``eps``. Nothing of ``gradient`` is read; there are no column sums.

    ``first``: the number of its first window, of ``window`` entries each, a multiple of 128. ``sampled [T]``: the
    sums of :func:`sampled_shares`.
    """
    (rows, entries), tiles, row_blocks = gradient.shape, len(sampled), -(-gradient.shape[0] // TILE)
    largest = sampled.new_empty(row_blocks, tiles)
    masses = new_masses(gradient, rows)
    chosen, number = limit_of(eps)
    lce_backward_window_bounds.launch(
        (-(-entries // window), row_blocks),
        windows.max,
        windows.sum_exp,
        windows.softmax_shift,
        terms,
        chosen,
        sampled,
        largest,
        masses,
        number,
        rows,
        tiles,
        first,
        windows.max.stride(0),
        masses.stride(0),
        float(scale),
        WINDOW=window,
    )
    return ScannedTiles(largest, masses, None, None)


def list_active_windows(bounds: ScannedTiles, window: int, eps: float | torch.Tensor) -> torch.Tensor:
    """The windows whose bound exceeds ``eps``, as :meth:`parallel_lce.kernels.projection.Product.launch` takes them."""
    (row_blocks, tiles), per_window = bounds.largest.shape, window // TILE
    windows = -(-tiles // per_window)
    listed = bounds.largest.new_empty(1 + row_blocks * windows, dtype=torch.int32)
    together = min(_TOGETHER, next_power_of_2(row_blocks))
    chosen, number = limit_of(eps)
    lce_backward_list_windows.launch(
        (1,),
        bounds.largest,
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
