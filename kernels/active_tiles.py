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

TILE = 128
"""Tokens and entries of a tile."""

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
    """What :func:`find_active_tiles` finds of a gradient ``[R, C]`` with T blocks of entries."""

    of_rows: TileLists
    of_entries: TileLists
    # [T, R], its rows 16 bytes aligned, in the gradient's dtype: m, 0 where the tile is active
    masses: torch.Tensor
    # [row blocks, 128 T] fp32: sums of |G| u over the tokens of a row block, 0 where the tile is active
    column_sums: torch.Tensor


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_scan(gradient, inverse_limits, active, masses, column_sums, rows, entries, stride, masses_stride):
    tile, tiles, block = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    c = tile * _TILE + tl.arange(0, _TILE)
    r = block * _TILE + tl.arange(0, _TILE)
    # What follows the last entry in its granule of 16 bytes is read, too: loads are then of whole granules.
    inside = (r < rows)[:, None] & (c < tl.cdiv(entries, 8) * 8)[None, :]
    g = tl.load(gradient + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    g = tl.where((c < entries)[None, :], g, 0.0)
    relative = tl.abs(g) * tl.load(inverse_limits + r, mask=r < rows, other=0.0)[:, None]
    mass = tl.sum(g, 1)
    # A maximum may leave out NaN, a sum does not.
    beyond = tl.maximum(tl.max(relative, 1), tl.where(mass == mass, 0.0, 2.0))
    is_active = tl.max(beyond, 0) > 1.0
    mass = tl.where(is_active, 0.0, mass).to(masses.dtype.element_ty)
    tl.store(masses + tile.to(tl.int64) * masses_stride + r, mass, mask=r < rows)
    tl.store(column_sums + block.to(tl.int64) * (tiles * _TILE) + c, tl.where(is_active, 0.0, tl.sum(relative, 0)))
    tl.store(active + block * tiles + tile, is_active.to(tl.uint8))


@Relaunched
@triton.jit(do_not_specialize=["places", "list_stride", "place_stride"])
def lce_backward_list_tiles(active, numbers, counts, places, list_stride, place_stride, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    found = 0
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_active = tl.load(active + block * list_stride + place * place_stride, mask=place < places, other=0).to(
            tl.int32
        )
        position = found + tl.cumsum(is_active, 0) - 1
        tl.store(numbers + block * places + position, place, mask=is_active != 0)
        found += tl.sum(is_active, 0)
    tl.store(counts + block, found)


@Relaunched
@triton.jit(do_not_specialize=["row_blocks"])
def lce_backward_entry_shares(column_sums, shares, row_blocks, BLOCK: tl.constexpr):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    sums = tl.zeros((_TILE,), tl.float32)
    for start in range(0, row_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        offsets = block.to(tl.int64)[:, None] * (tiles * _TILE) + c[None, :]
        sums += tl.sum(tl.load(column_sums + offsets, mask=(block < row_blocks)[:, None], other=0.0), 0)
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
        inside = (c < entries)[:, None] & (h < hidden_size)[None, :]
        w = tl.load(weight + c.to(tl.int64)[:, None] * weight_stride + h[None, :], mask=inside, other=0.0)
        total += tl.sum(w.to(tl.float32) * tl.load(shares + c)[:, None], 0)
    tl.store(
        centroids + tile.to(tl.int64) * hidden_size + h, total.to(centroids.dtype.element_ty), mask=h < hidden_size
    )


def find_active_tiles(gradient: torch.Tensor, inverse_limits: torch.Tensor) -> ActiveTiles:
    """The tiles of ``gradient [R, C]`` with an entry beyond its token's limit, and what is known of the others.

    The rows of ``gradient`` lie in memory of a multiple of 8 elements each. ``inverse_limits [R]`` fp32, finite; 0 for
    a token without a limit. An entry that is NaN lies beyond every limit.
    """
    rows, entries = gradient.shape
    row_blocks, tiles = -(-rows // TILE), -(-entries // TILE)
    active = gradient.new_empty(row_blocks, tiles, dtype=torch.uint8)
    masses = gradient.new_empty(tiles, -(-rows // 8) * 8)[:, :rows]
    column_sums = gradient.new_empty(row_blocks, tiles * TILE, dtype=torch.float32)
    lce_backward_scan.launch(
        (tiles, row_blocks),
        gradient,
        inverse_limits,
        active,
        masses,
        column_sums,
        rows,
        entries,
        gradient.stride(0),
        masses.stride(0),
        num_warps=4,
    )
    of_rows = _listed(active, row_blocks, tiles, tiles, 1)
    of_entries = _listed(active, tiles, row_blocks, 1, tiles)
    return ActiveTiles(of_rows, of_entries, masses, column_sums)


def _listed(active: torch.Tensor, blocks: int, places: int, list_stride: int, place_stride: int) -> TileLists:
    numbers = active.new_empty(blocks, places, dtype=torch.int32)
    counts = active.new_empty(blocks, dtype=torch.int32)
    block = min(_LISTED, next_power_of_2(places))
    lce_backward_list_tiles.launch((blocks,), active, numbers, counts, places, list_stride, place_stride, BLOCK=block)
    return TileLists(numbers, counts)


def entry_shares(column_sums: torch.Tensor) -> torch.Tensor:
    """The shares ``q [128 T]`` fp32: 0 in a tile that is active for every token."""
    row_blocks, padded = column_sums.shape
    shares = column_sums.new_empty(padded)
    block = min(_SUMMED, next_power_of_2(row_blocks))
    lce_backward_entry_shares.launch((padded // TILE,), column_sums, shares, row_blocks, BLOCK=block)
    return shares


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
