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
from parallel_lce.kernels.tuning import interpreted

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


class ScannedTiles(NamedTuple):
    """What :func:`scan_tiles` finds of a gradient ``[R, C]`` with T blocks of entries."""

    # [row blocks, T] fp32: each tile's largest entry, in units of its token's limit
    largest: torch.Tensor
    # [T, R], its rows 16 bytes aligned, in the gradient's dtype: m
    masses: torch.Tensor
    # [row blocks, 128 T] fp32: sums of |G| u over the tokens of a row block
    column_sums: torch.Tensor
    # [T, R, 8], of which tile t holds its own terms of the gradient's product with a sketch, whose rows are
    # relative to their mean in the tile; None: there is no sketch
    sketched: torch.Tensor | None


class ActiveTiles(NamedTuple):
    """What :func:`find_active_tiles` makes of that."""

    of_rows: TileLists
    of_entries: TileLists
    # [T, R]: m, 0 where the tile is active
    masses: torch.Tensor
    # [128 T] fp32: q, 0 in a block of entries that is active for every token
    shares: torch.Tensor


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_scan(
    gradient,
    inverse_limits,
    largest,
    masses,
    column_sums,
    sketch,
    sketched,
    rows,
    entries,
    stride,
    masses_stride,
    sketch_stride,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile, tiles, block = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    c = tile * _TILE + tl.arange(0, _TILE)
    r = block * _TILE + tl.arange(0, _TILE)
    # What follows the last entry in its granule of 16 bytes is read, too: loads are then of whole granules.
    inside = (r < rows)[:, None] & (c < tl.cdiv(entries, 8) * 8)[None, :]
    stored = tl.load(gradient + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    stored = tl.where((c < entries)[None, :], stored, 0.0)
    g = stored.to(tl.float32)
    relative = tl.abs(g) * tl.load(inverse_limits + r, mask=r < rows, other=0.0)[:, None]
    mass = tl.sum(g, 1)
    # A maximum may leave out NaN, a sum does not.
    beyond = tl.where(mass == mass, tl.max(relative, 1), float("inf"))
    tl.store(largest + block * tiles + tile, tl.max(beyond, 0))
    mass = mass.to(masses.dtype.element_ty)
    tl.store(masses + tile.to(tl.int64) * masses_stride + r, mass, mask=r < rows)
    tl.store(column_sums + block.to(tl.int64) * (tiles * _TILE) + c, tl.sum(relative, 0))
    if sketch is not None:
        # A product has 16 columns at least.
        k = tl.arange(0, 16)
        inside = (c < entries)[:, None] & (k < COLUMNS)[None, :]
        s = tl.load(sketch + k[None, :] * sketch_stride + c[:, None], mask=inside, other=0.0).to(tl.float32)
        # Without the mean, which the masses stand for: the rounding of a large mean would hide what filters change.
        mean = tl.sum(s, 0) / tl.minimum(entries - tile * _TILE, _TILE)
        s = tl.where(inside, s - mean[None, :], 0.0).to(stored.dtype)
        if UPCAST:
            stored = stored.to(tl.float32)
            s = s.to(tl.float32)
        product = tl.dot(stored, s).to(sketched.dtype.element_ty)
        offsets = (tile.to(tl.int64) * rows + r)[:, None] * COLUMNS + k[None, :]
        tl.store(sketched + offsets, product, mask=(r < rows)[:, None] & (k < COLUMNS)[None, :])


@Relaunched
@triton.jit(do_not_specialize=["places", "list_stride", "place_stride"])
def lce_backward_list_tiles(
    largest, chosen, numbers, counts, eps, places, list_stride, place_stride, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    if chosen is not None:
        eps = tl.load(chosen)
    found = 0
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        pointers = largest + block * list_stride + place * place_stride
        is_active = (tl.load(pointers, mask=place < places, other=0.0) > eps).to(tl.int32)
        position = found + tl.cumsum(is_active, 0) - 1
        tl.store(numbers + block * places + position, place, mask=is_active != 0)
        found += tl.sum(is_active, 0)
    tl.store(counts + block, found)


@Relaunched
@triton.jit(do_not_specialize=["row_blocks", "rows"])
def lce_backward_entry_shares(
    largest, chosen, column_sums, masses, shares, eps, row_blocks, rows, masses_stride, BLOCK: tl.constexpr
):
    """The shares of a block of entries. Its masses become 0 where its tiles are active."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    if chosen is not None:
        eps = tl.load(chosen)
    lane = tl.arange(0, _TILE)
    c = tile * _TILE + lane
    sums = tl.zeros((_TILE,), tl.float32)
    for start in range(0, row_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        is_active = tl.load(largest + block * tiles + tile, mask=block < row_blocks, other=float("inf")) > eps
        offsets = block.to(tl.int64)[:, None] * (tiles * _TILE) + c[None, :]
        sums += tl.sum(tl.load(column_sums + offsets, mask=~is_active[:, None], other=0.0), 0)
        r = block[:, None] * _TILE + lane[None, :]
        pointers = masses + tile.to(tl.int64) * masses_stride + r
        nothing = tl.zeros((BLOCK, _TILE), masses.dtype.element_ty)
        tl.store(pointers, nothing, mask=is_active[:, None] & (r < rows))
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


def scan_tiles(
    gradient: torch.Tensor, inverse_limits: torch.Tensor, sketch: torch.Tensor | None = None
) -> ScannedTiles:
    """What is known of the tiles of ``gradient [R, C]``.

    The rows of ``gradient`` lie in memory of a multiple of 8 elements each. ``inverse_limits [R]`` fp32, finite; 0 for
    a token without a limit. A tile with NaN has the largest entry infinity. ``sketch [8, C]`` in the gradient's dtype.
    """
    rows, entries = gradient.shape
    row_blocks, tiles = -(-rows // TILE), -(-entries // TILE)
    largest = gradient.new_empty(row_blocks, tiles, dtype=torch.float32)
    masses = gradient.new_empty(tiles, -(-rows // 8) * 8)[:, :rows]
    column_sums = gradient.new_empty(row_blocks, tiles * TILE, dtype=torch.float32)
    columns, sketched = 0 if sketch is None else len(sketch), None
    if sketch is not None:
        # fp16 would not hold every product.
        dtype = torch.bfloat16 if gradient.dtype == torch.float16 else gradient.dtype
        sketched = gradient.new_empty(tiles, rows, columns, dtype=dtype)
    lce_backward_scan.launch(
        (tiles, row_blocks),
        gradient,
        inverse_limits,
        largest,
        masses,
        column_sums,
        sketch,
        sketched,
        rows,
        entries,
        gradient.stride(0),
        masses.stride(0),
        0 if sketch is None else sketch.stride(0),
        COLUMNS=columns,
        # Triton's interpreter multiplies bf16 wrongly.
        UPCAST=interpreted() and gradient.dtype == torch.bfloat16,
        num_warps=4,
    )
    return ScannedTiles(largest, masses, column_sums, sketched)


def find_active_tiles(scanned: ScannedTiles, eps: float | torch.Tensor) -> ActiveTiles:
    """The tiles whose largest entry exceeds ``eps``, a number or fp32 ``[1]``, and what stands for the others.

    The masses of ``scanned`` become 0 in active tiles.
    """
    (row_blocks, tiles), rows = scanned.largest.shape, scanned.masses.shape[1]
    limit = (None, float(eps)) if isinstance(eps, (int, float)) else (eps, 0.0)
    of_rows = _listed(scanned.largest, limit, row_blocks, tiles, tiles, 1)
    of_entries = _listed(scanned.largest, limit, tiles, row_blocks, 1, tiles)
    shares = scanned.column_sums.new_empty(tiles * TILE)
    chosen, number = limit
    lce_backward_entry_shares.launch(
        (tiles,),
        scanned.largest,
        chosen,
        scanned.column_sums,
        scanned.masses,
        shares,
        number,
        row_blocks,
        rows,
        scanned.masses.stride(0),
        BLOCK=min(_SUMMED, next_power_of_2(row_blocks)),
    )
    return ActiveTiles(of_rows, of_entries, scanned.masses, shares)


def _listed(
    largest: torch.Tensor,
    limit: tuple[torch.Tensor | None, float],
    blocks: int,
    places: int,
    list_stride: int,
    place_stride: int,
) -> TileLists:
    numbers = largest.new_empty(blocks, places, dtype=torch.int32)
    counts = largest.new_empty(blocks, dtype=torch.int32)
    block = min(_LISTED, next_power_of_2(places))
    chosen, eps = limit
    lce_backward_list_tiles.launch(
        (blocks,), largest, chosen, numbers, counts, eps, places, list_stride, place_stride, BLOCK=block
    )
    return TileLists(numbers, counts)


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
