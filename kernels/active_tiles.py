"""Which tiles of the gradient of the logits matter, and what stands for the others.

A trained softmax is mostly empty: nearly all of it lies in few tiles of 128 tokens by 128 vocabulary entries. A tile of
G is *active* if one of its entries exceeds its token's limit, or is the gradient of a target that several tokens share.
(Of other targets G has 0: :mod:`parallel_lce.kernels.targets`.) The backward's products take the active tiles alone. In
each of the others G is replaced by a product of a number per token and one per entry, whose sums over entries are those
of G. So are its sums over tokens, if all tokens have the same coefficient:

    G_ij ~ m_it q_j        m_it = sum_j G_ij over tile t        q_j = sum_i |G_ij| u_i / sum_j sum_i |G_ij| u_i

The sums of q run over the tokens whose tile is not active, and ``u_i = 1 / limit_i`` counts each token's probabilities
alike. Then

    dX_i gets m_it c_t, with the centroid c_t = sum_j q_j W_j        dW_j gets q_j S_t, with S_t = sum_i m_it x_i

The masses m are exact. Both products with m have at most 1/128 of the full products' size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2
from parallel_lce.kernels.tile_scan import TILE, ScannedTiles, TokenTargets, filter_argument, scan_tiles

_TILE = tl.constexpr(TILE)
# Hidden elements of a program that forms a centroid, and places of a list that one looks at at a time.
_HIDDEN, _LISTED = 128, 1024
# Rows of the weight that it reads at a time.
_ROWS = 64
# Row blocks that are looked at at a time, and tiles whose masses become 0.
_SUMMED, _CLEARED = 16, 16


class TileLists(NamedTuple):
    """For each block of 128 rows of a product's result, which tiles of the first operand are taken."""

    # [blocks, places] int32: the numbers of these tiles, ascending; what follows them is undefined
    numbers: torch.Tensor
    # [blocks] int32: how many they are
    counts: torch.Tensor

    def of_blocks(self, start: int, stop: int) -> TileLists:
        return TileLists(self.numbers[start:stop], self.counts[start:stop])


class ListedTiles(NamedTuple):
    """Which tiles of a gradient, and of its masses ``[T, R]``, their products take. A *group* is 128 tiles of the
    gradient that follow one another: the masses of a row block in a group are a tile of the masses."""

    # For each row block, which tiles are active.
    of_rows: TileLists
    # For each block of entries, in which row blocks its tile is active.
    of_entries: TileLists
    # For each row block, in which groups a tile is skipped.
    masses_of_rows: TileLists
    # For each group, in which row blocks one of its tiles is skipped.
    masses_of_groups: TileLists


class ActiveTiles(NamedTuple):
    """The active tiles of a gradient, and what stands for the others."""

    listed: ListedTiles
    # [T, R]: m, 0 where the tile is active; undefined where ``listed`` does not have them
    masses: torch.Tensor
    # [128 T] fp32: q for dX, and for dW
    of_hidden: torch.Tensor
    of_weight: torch.Tensor


@Relaunched
@triton.jit(do_not_specialize=["row_blocks", "tiles"])
def lce_backward_list_tiles(largest, chosen, listed, eps, row_blocks, tiles, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """One list: of the gradient, of its row blocks and then of its blocks of entries; then so of the masses."""
    number = tl.program_id(0)
    of_rows, of_entries, masses_of_rows, masses_of_groups = listed
    if chosen is not None:
        eps = tl.load(chosen)
    # Without a filter nothing is skipped, not even what is 0.
    limit = tl.where(eps > 0.0, eps, -1.0)
    if number < row_blocks:
        _list_active(largest + number * tiles, 1, of_rows, number, tiles, eps, BLOCK)
    elif number < row_blocks + tiles:
        number -= row_blocks
        _list_active(largest + number, tiles, of_entries, number, row_blocks, eps, BLOCK)
    elif number < 2 * row_blocks + tiles:
        number -= row_blocks + tiles
        found = 0
        for place in range(0, tl.cdiv(tiles, _TILE)):
            is_listed = _some_skipped(largest, number + tl.arange(0, 1), place, row_blocks, tiles, limit)
            found = _append(masses_of_rows, number, tl.cdiv(tiles, _TILE), place + tl.arange(0, 1), is_listed, found)
        tl.store(masses_of_rows[1] + number, found)
    else:
        number -= 2 * row_blocks + tiles
        found = 0
        for start in range(0, row_blocks, WIDE):
            block = start + tl.arange(0, WIDE)
            is_listed = _some_skipped(largest, block, number, row_blocks, tiles, limit)
            found = _append(masses_of_groups, number, row_blocks, block, is_listed, found)
        tl.store(masses_of_groups[1] + number, found)


@triton.jit
def _list_active(largest, stride, lists, block, places, eps, BLOCK: tl.constexpr):
    found = 0
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_active = tl.load(largest + place * stride, mask=place < places, other=0.0) > eps
        found = _append(lists, block, places, place, (place < places) & is_active, found)
    tl.store(lists[1] + block, found)


@triton.jit
def _some_skipped(largest, block, group, row_blocks, tiles, limit):
    """Of some row blocks: whether a tile of the group is skipped."""
    t = group * _TILE + tl.arange(0, _TILE)
    inside = (block < row_blocks)[:, None] & (t < tiles)[None, :]
    value = tl.load(largest + block[:, None] * tiles + t[None, :], mask=inside, other=float("inf"))
    return tl.min(value, 1) <= limit


@triton.jit
def _append(lists, block, places, place, is_listed, found):
    """Add to a block's list, which has ``found`` numbers; how many it then has."""
    is_listed = is_listed.to(tl.int32)
    position = found + tl.cumsum(is_listed, 0) - 1
    tl.store(lists[0] + block * places + position, place, mask=is_listed != 0)
    return found + tl.sum(is_listed, 0)


@Relaunched
@triton.jit(do_not_specialize=["rows", "tiles"])
def lce_backward_clear_active(masses, largest, chosen, eps, rows, tiles, masses_stride, BLOCK: tl.constexpr):
    block = tl.program_id(1)
    if chosen is not None:
        eps = tl.load(chosen)
    # Without a filter no masses are listed.
    if eps > 0.0:
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_active = tl.load(largest + block * tiles + t, mask=t < tiles, other=0.0) > eps
        r = block * _TILE + tl.arange(0, _TILE)
        pointers = masses + t.to(tl.int64)[:, None] * masses_stride + r[None, :]
        zero = tl.zeros((BLOCK, _TILE), masses.dtype.element_ty)
        tl.store(pointers, zero, mask=is_active[:, None] & (r < rows)[None, :])


@Relaunched
@triton.jit(do_not_specialize=["row_blocks"])
def lce_backward_entry_shares(largest, chosen, column_sums, otherwise, shares, eps, row_blocks, BLOCK: tl.constexpr):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    if chosen is not None:
        eps = tl.load(chosen)
    c = tile * _TILE + tl.arange(0, _TILE)
    sums = tl.zeros((_TILE,), tl.float32)
    for start in range(0, row_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        is_active = tl.load(largest + block * tiles + tile, mask=block < row_blocks, other=float("inf")) > eps
        offsets = block.to(tl.int64)[:, None] * (tiles * _TILE) + c[None, :]
        sums += tl.sum(tl.load(column_sums + offsets, mask=~is_active[:, None], other=0.0), 0)
    total, unknown = tl.sum(sums, 0), tl.zeros((_TILE,), tl.float32)
    if otherwise is not None:
        if eps > 0.0:
            unknown = tl.load(otherwise + c)
    tl.store(shares + c, tl.where((total > 0.0) & (total < float("inf")), sums / total, unknown))


@Relaunched
@triton.jit
def lce_backward_centroids(
    weight, shares, centroids, entries, hidden_size, weight_stride, STRIP: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, _TILE, STRIP):
        c = tile * _TILE + first + tl.arange(0, STRIP)
        share = tl.load(shares + c)
        # Where nothing is skipped, nothing is read.
        if tl.sum(share, 0) != 0.0:
            inside = (c < entries)[:, None] & (h < hidden_size)[None, :]
            w = tl.load(weight + c.to(tl.int64)[:, None] * weight_stride + h[None, :], mask=inside, other=0.0)
            total += tl.sum(w.to(tl.float32) * share[:, None], 0)
    tl.store(
        centroids + tile.to(tl.int64) * hidden_size + h, total.to(centroids.dtype.element_ty), mask=h < hidden_size
    )


def entry_shares(
    largest: torch.Tensor, column_sums: torch.Tensor, eps: float | torch.Tensor, otherwise: torch.Tensor | None = None
) -> torch.Tensor:
    """q ``[128 T]`` fp32, from the ``column_sums [row blocks, 128 T]`` of the tiles whose ``largest [row blocks, T]``
    is within ``eps``. Of a block of entries whose tiles all exceed it, or whose sums are 0 or not finite: ``otherwise
    [128 T]``, or 0. An ``eps`` of 0 skips nothing, and all are 0."""
    row_blocks, tiles = largest.shape
    shares = column_sums.new_empty(tiles * TILE)
    chosen, number = filter_argument(eps)
    lce_backward_entry_shares.launch(
        (tiles,),
        largest,
        chosen,
        column_sums,
        otherwise,
        shares,
        number,
        row_blocks,
        BLOCK=min(_SUMMED, next_power_of_2(row_blocks)),
    )
    return shares


def list_tiles(largest: torch.Tensor, eps: float | torch.Tensor) -> ListedTiles:
    """Active are the tiles whose ``largest [row blocks, T]`` exceeds ``eps``."""
    row_blocks, tiles = largest.shape
    groups = -(-tiles // TILE)
    shapes = (row_blocks, tiles), (tiles, row_blocks), (row_blocks, groups), (groups, row_blocks)
    # Each part begins on a boundary of 16 bytes: kernels are compiled for what is aligned.
    sizes = [(-(-blocks * places // 4) * 4, -(-blocks // 4) * 4) for blocks, places in shapes]
    memory = largest.new_empty(sum(map(sum, sizes)), dtype=torch.int32)
    parts = iter(memory.split([size for pair in sizes for size in pair]))
    listed = ListedTiles(
        *(TileLists(next(parts)[: shape[0] * shape[1]].view(shape), next(parts)[: shape[0]]) for shape in shapes)
    )
    chosen, number = filter_argument(eps)
    lce_backward_list_tiles.launch(
        (2 * row_blocks + tiles + groups,),
        largest,
        chosen,
        listed,
        number,
        row_blocks,
        tiles,
        BLOCK=min(_LISTED, next_power_of_2(max(row_blocks, tiles))),
        WIDE=min(_SUMMED, next_power_of_2(row_blocks)),
    )
    return listed


def find_active_tiles(
    gradient: torch.Tensor,
    inverse_limits: torch.Tensor,
    eps: float | torch.Tensor,
    targets: TokenTargets | None = None,
    first: int = 0,
) -> ActiveTiles:
    """The tiles of ``gradient [R, C]`` whose largest entry exceeds ``eps``, and what stands for the others.

    The arguments: as for :func:`scan_tiles`.
    """
    return _active_tiles(scan_tiles(gradient, inverse_limits, eps, targets=targets, first=first), eps)


def active_tiles_of(scanned: ScannedTiles, eps: float | torch.Tensor) -> ActiveTiles:
    """The same of tiles that were scanned without a limit. Their masses become 0 where a tile is active."""
    (tiles, rows), (chosen, number) = scanned.masses.shape, filter_argument(eps)
    lce_backward_clear_active.launch(
        (-(-tiles // _CLEARED), len(scanned.largest)),
        scanned.masses,
        scanned.largest,
        chosen,
        number,
        rows,
        tiles,
        scanned.masses.stride(0),
        BLOCK=_CLEARED,
        num_warps=2,
    )
    return _active_tiles(scanned, eps)


def _active_tiles(scanned: ScannedTiles, eps: float | torch.Tensor) -> ActiveTiles:
    shares = entry_shares(scanned.largest, scanned.column_sums, eps)
    return ActiveTiles(list_tiles(scanned.largest, eps), scanned.masses, shares, shares)


def centroids(weight: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """``c [T, D]``: the means of the tiles' rows of ``weight [C, D]`` by their shares ``[128 T]``."""
    (entries, hidden_size), tiles = weight.shape, len(shares) // TILE
    result = weight.new_empty(tiles, hidden_size)
    lce_backward_centroids.launch(
        (tiles, -(-hidden_size // _HIDDEN)),
        weight,
        shares,
        result,
        entries,
        hidden_size,
        weight.stride(0),
        STRIP=_ROWS,
        BLOCK=_HIDDEN,
        num_warps=2,
    )
    return result
