"""Which tiles of the gradient of the logits matter, and what stands for the others.

A trained softmax is mostly empty: nearly all of it lies in few tiles of 128 tokens by 128 vocabulary entries. A tile of
G is *active* if one of its entries exceeds its token's limit. The backward's products take the active tiles alone. In
each of the others G is replaced by a product of a number per token and one per entry, whose sums over entries and over
tokens are those of G:

    G_ij ~ m_it q_j        m_it = sum_j G_ij over tile t        q_j = sum_i |G_ij| u_i / sum_j sum_i |G_ij| u_i

The sums of q run over the tokens whose tile is not active, and ``u_i = 1 / limit_i`` counts each token's probabilities
alike. Then

    dX_i gets m_it c_t, with the centroid c_t = sum_j q_j W_j        dW_j gets q_j S_t, with S_t = sum_i m_it x_i

The masses m are exact, and with weights u in proportion to the coefficients of the tokens so are the sums over tokens.
Both products with m have 1/128 of the full products' size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2
from parallel_lce.kernels.tile_scan import TILE, ScannedTiles, limit_of, scan_tiles

_TILE = tl.constexpr(TILE)
# Hidden elements of a program that forms a centroid, and places of a list that one looks at at a time.
_HIDDEN, _LISTED = 128, 1024
# Rows of the weight that it reads at a time.
_ROWS = 64
# Row blocks whose sums are added at a time.
_SUMMED = 16


class TileLists(NamedTuple):
    """The active tiles of each row block, or of each block of entries."""

    # [blocks, places] int32: the numbers of the active tiles, ascending; what follows them is undefined
    numbers: torch.Tensor
    # [blocks] int32: how many they are
    counts: torch.Tensor

    def of_blocks(self, start: int, stop: int) -> TileLists:
        return TileLists(self.numbers[start:stop], self.counts[start:stop])


class ActiveTiles(NamedTuple):
    """The active tiles of a gradient, and what stands for the others."""

    of_rows: TileLists
    of_entries: TileLists
    # [T, R]: m, 0 where the tile is active
    masses: torch.Tensor
    # [128 T] fp32: q for dX, and for dW
    of_hidden: torch.Tensor
    of_weight: torch.Tensor


@Relaunched
@triton.jit(do_not_specialize=["row_blocks", "tiles"])
def lce_backward_list_tiles(largest, chosen, of_rows, of_entries, eps, row_blocks, tiles, BLOCK: tl.constexpr):
    """The list of one row block, or after all of those of one block of entries."""
    number = tl.program_id(0)
    if chosen is not None:
        eps = tl.load(chosen)
    if number < row_blocks:
        _list(largest + number * tiles, 1, of_rows, number, tiles, eps, BLOCK)
    else:
        number -= row_blocks
        _list(largest + number, tiles, of_entries, number, row_blocks, eps, BLOCK)


@triton.jit
def _list(largest, stride, lists, block, places, eps, BLOCK: tl.constexpr):
    numbers, counts = lists
    found = 0
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_active = (tl.load(largest + place * stride, mask=place < places, other=0.0) > eps).to(tl.int32)
        position = found + tl.cumsum(is_active, 0) - 1
        tl.store(numbers + block * places + position, place, mask=is_active != 0)
        found += tl.sum(is_active, 0)
    tl.store(counts + block, found)


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_clear_active(masses, largest, chosen, eps, rows, masses_stride):
    tile, tiles, block = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    if chosen is not None:
        eps = tl.load(chosen)
    if tl.load(largest + block * tiles + tile) > eps:
        r = block * _TILE + tl.arange(0, _TILE)
        pointers = masses + tile.to(tl.int64) * masses_stride + r
        tl.store(pointers, tl.zeros((_TILE,), masses.dtype.element_ty), mask=r < rows)


@Relaunched
@triton.jit(do_not_specialize=["row_blocks"])
def lce_backward_entry_shares(largest, chosen, column_sums, shares, eps, row_blocks, BLOCK: tl.constexpr):
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
    total = tl.sum(sums, 0)
    tl.store(shares + c, tl.where(total > 0.0, sums / total, 0.0))


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


def _entry_shares(scanned: ScannedTiles, eps: float | torch.Tensor) -> torch.Tensor:
    """q ``[128 T]`` of the tiles whose largest entry is within ``eps``, 0 where all of a block's tiles exceed it."""
    row_blocks, tiles = scanned.largest.shape
    shares = scanned.column_sums.new_empty(tiles * TILE)
    chosen, number = limit_of(eps)
    lce_backward_entry_shares.launch(
        (tiles,),
        scanned.largest,
        chosen,
        scanned.column_sums,
        shares,
        number,
        row_blocks,
        BLOCK=min(_SUMMED, next_power_of_2(row_blocks)),
    )
    return shares


def list_active_tiles(largest: torch.Tensor, eps: float | torch.Tensor) -> tuple[TileLists, TileLists]:
    """Of each row block, and of each block of entries, the tiles whose ``largest [row blocks, T]`` exceeds ``eps``."""
    row_blocks, tiles = largest.shape
    of_rows, of_entries = (
        TileLists(largest.new_empty(shape, dtype=torch.int32), largest.new_empty(shape[0], dtype=torch.int32))
        for shape in ((row_blocks, tiles), (tiles, row_blocks))
    )
    block = min(_LISTED, next_power_of_2(max(row_blocks, tiles)))
    chosen, number = limit_of(eps)
    lce_backward_list_tiles.launch(
        (row_blocks + tiles,), largest, chosen, of_rows, of_entries, number, row_blocks, tiles, BLOCK=block
    )
    return of_rows, of_entries


def find_active_tiles(gradient: torch.Tensor, inverse_limits: torch.Tensor, eps: float | torch.Tensor) -> ActiveTiles:
    """The tiles of ``gradient [R, C]`` whose largest entry exceeds ``eps``, and what stands for the others.

    The arguments: as for :func:`scan_tiles`.
    """
    return _active_tiles(scan_tiles(gradient, inverse_limits, eps), eps)


def active_tiles_of(scanned: ScannedTiles, eps: float | torch.Tensor) -> ActiveTiles:
    """The same of tiles that were scanned without a limit. Their masses become 0 where a tile is active."""
    (tiles, rows), (chosen, number) = scanned.masses.shape, limit_of(eps)
    lce_backward_clear_active.launch(
        (tiles, len(scanned.largest)),
        scanned.masses,
        scanned.largest,
        chosen,
        number,
        rows,
        scanned.masses.stride(0),
        num_warps=1,
    )
    return _active_tiles(scanned, eps)


def _active_tiles(scanned: ScannedTiles, eps: float | torch.Tensor) -> ActiveTiles:
    shares = _entry_shares(scanned, eps)
    return ActiveTiles(*list_active_tiles(scanned.largest, eps), scanned.masses, shares, shares)


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
