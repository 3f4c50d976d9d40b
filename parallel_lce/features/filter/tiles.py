"""The active tiles of a slice of G, the estimates of its other tiles, and products that read the active tiles alone.

:mod:`parallel_lce.features.filter` defines both. G ``[R, C]`` is dense in memory. Each tile of a product's result has a
list of tiles to multiply. The longest lists come first, so that all programs end at about the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_lce.backends.gemm import accumulate, matmul
from parallel_lce.backends.triton_backward import Slice
from parallel_lce.core.memory import some_rows
from parallel_lce.kernels.arithmetic import add_product
from parallel_lce.kernels.launch import Relaunched, addressable, descriptor, next_power_of_2

TILE = 128
"""Tokens and entries of a tile."""

_TILE = tl.constexpr(TILE)
# Smallest fp32 number of full precision.
_TINY = 2.0**-126
# Scan: row blocks per program, rows per step, stages of the loads, warps.
_SCANNED, _CHUNK, _STAGES, _WARPS = tl.constexpr(4), tl.constexpr(16), tl.constexpr(3), 2
# Lists: most tiles per step.
_LISTED = 1024
# Centroids: hidden elements per program, rows of the weight per step.
_HIDDEN, _STRIP = tl.constexpr(128), tl.constexpr(64)
# Products: hidden elements of a result's tile, and terms of the sum per step.
_WIDTH, _STEP = 256, 64
# Blocks of hidden elements that are formed together, so that the tiles of G they share stay in the L2 cache.
_TOGETHER = tl.constexpr(4)


class TileLists(NamedTuple):
    """For each block of 128 rows of a product's result, the tiles of the first operand to multiply."""

    # [blocks, capacity] int32: the tiles' numbers, ascending; undefined from ``counts`` on
    numbers: Tensor
    # [blocks] int32: the number of tiles
    counts: Tensor

    def of_blocks(self, rows: slice) -> TileLists:
        """The lists of the blocks that contain ``rows``, which begin at a multiple of 128."""
        blocks = slice(rows.start // TILE, -(-rows.stop // TILE))
        return TileLists(self.numbers[blocks], self.counts[blocks])


@Relaunched
@triton.jit(do_not_specialize=["rows", "blocks"])
def lce_backward_scan(
    gradient, inverse_units, largest, masses, column_sums, eps, rows, entries, stride, masses_stride, blocks
):
    """One program scans a block of entries in several row blocks."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    first = tl.program_id(1) * _SCANNED
    for block in range(first, tl.minimum(first + _SCANNED, blocks)):
        of_tile = masses + tile.to(tl.int64) * masses_stride + block * _TILE
        # Elementwise over some rows at a time: fewer reductions across threads.
        tops = tl.zeros((_CHUNK, _TILE), tl.float32)
        sums = tl.zeros((_CHUNK, _TILE), tl.float32)
        for start in tl.range(0, _TILE, _CHUNK, num_stages=_STAGES):
            lane = start + tl.arange(0, _CHUNK)
            r = block * _TILE + lane
            # Reads up to the end of the last entry's 16-byte granule, so that all loads are of whole granules.
            inside = (r < rows)[:, None] & (c < tl.cdiv(entries, 8) * 8)[None, :]
            g = tl.load(gradient + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
            g = tl.where((c < entries)[None, :], g, 0.0).to(tl.float32)
            inverse = tl.load(inverse_units + r, mask=r < rows, other=0.0)
            relative = g * inverse[:, None]
            # Negative is only the entry of a target that several tokens share.
            relative = tl.where(relative < 0.0, float("inf"), relative)
            tops = tl.maximum(tops, relative)
            # NaN > eps is false: NaN reaches the sum, while a maximum may ignore it. Larger ones could overflow.
            sums += tl.where(relative > eps, 0.0, relative)
            tl.store(of_tile + lane, tl.sum(g, 1).to(masses.dtype.element_ty), mask=r < rows)
        of_entries = tl.sum(sums, 0)
        total = tl.sum(of_entries, 0)
        top = tl.where(total == total, tl.max(tl.max(tops, 0), 0), float("inf"))
        tl.store(largest + block * tiles + tile, top)
        of_entries = tl.where(top > eps, 0.0, of_entries)
        tl.store(column_sums + block * (tiles.to(tl.int64) * _TILE) + c, of_entries)
        if top > eps:
            tl.debug_barrier()
            lane = tl.arange(0, _TILE)
            zero = tl.zeros((_TILE,), masses.dtype.element_ty)
            tl.store(of_tile + lane, zero, mask=block * _TILE + lane < rows)


@Relaunched
@triton.jit(do_not_specialize=["stride", "step", "capacity"])
def lce_backward_active_tile_lists(largest, lists, eps, stride, step, capacity, BLOCK: tl.constexpr):
    """One program fills a block's list with the numbers of the tiles whose element of ``largest`` exceeds ``eps``."""
    block, count = tl.program_id(0), 0
    numbers, counts = lists
    for start in range(0, capacity, BLOCK):
        number = start + tl.arange(0, BLOCK)
        value = tl.load(largest + block * stride + number * step, mask=number < capacity, other=0.0)
        is_active = (value > eps).to(tl.int32)
        listed = numbers + block * capacity + count + tl.cumsum(is_active, 0) - 1
        tl.store(listed, number, mask=is_active != 0)
        count += tl.sum(is_active, 0)
    tl.store(counts + block, count)


@Relaunched
@triton.jit
def lce_backward_centroids(weight, shares, centroids, entries, hidden_size, weight_stride):
    """Each tile's mean row of the weight, weighted by the shares."""
    tile = tl.program_id(0)
    h = tl.program_id(1) * _HIDDEN + tl.arange(0, _HIDDEN)
    total = tl.zeros((_HIDDEN,), tl.float32)
    for first in tl.static_range(0, _TILE, _STRIP):
        c = tile * _TILE + first + tl.arange(0, _STRIP)
        share = tl.load(shares + c)
        # The shares of tiles that are never skipped are 0: no loads.
        if tl.sum(share, 0) != 0.0:
            inside = (c < entries)[:, None] & (h < hidden_size)[None, :]
            w = tl.load(weight + c.to(tl.int64)[:, None] * weight_stride + h[None, :], mask=inside, other=0.0)
            total += tl.sum(w.to(tl.float32) * share[:, None], 0)
    here = centroids + tile.to(tl.int64) * hidden_size + h
    tl.store(here, total.to(centroids.dtype.element_ty), mask=h < hidden_size)


@triton.jit
def _result_tile(number, order, blocks, hidden_blocks):
    """The block of rows, and the block of hidden elements, of the result's tile ``number``."""
    first = number // (blocks * _TOGETHER) * _TOGETHER
    width = tl.minimum(hidden_blocks - first, _TOGETHER)
    within = number % (blocks * _TOGETHER)
    return tl.load(order + within // width).to(tl.int32), first + within % width


@Relaunched
@triton.jit(do_not_specialize=["rows", "blocks", "capacity"])
def lce_backward_sparse_product(
    gradient,
    other,
    total,
    lists,
    rank_one,
    rows,
    hidden_size,
    blocks,
    capacity,
    total_stride,
    TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """``gradient`` and ``other``: TMA descriptors. ``rows``: of the result."""
    numbers, counts, order = lists
    shares, spread = rank_one
    hidden_blocks = tl.cdiv(hidden_size, WIDTH)
    block, hidden_block = _result_tile(tl.program_id(0), order, blocks, hidden_blocks)  # pyright: ignore
    r = block * TILE + tl.arange(0, TILE)
    h = hidden_block * WIDTH + tl.arange(0, WIDTH)
    in_result = (r < rows)[:, None] & (h < hidden_size)[None, :]
    pointers = total + r.to(tl.int64)[:, None] * total_stride + h[None, :]
    z = tl.zeros((TILE, WIDTH), tl.float32)
    if ADD:
        z += tl.load(pointers, mask=in_result, other=0.0)
    if shares is not None:
        share = tl.load(shares + r, mask=r < rows, other=0.0)
        of_tile = tl.load(spread + block * hidden_size + h, mask=h < hidden_size, other=0.0)
        z += share[:, None] * of_tile[None, :]
    PER_TILE: tl.constexpr = TILE // STEP
    for step in range(0, tl.load(counts + block) * PER_TILE):
        tile = tl.load(numbers + block * capacity + step // PER_TILE)
        first = tile * TILE + step % PER_TILE * STEP
        if TRANSPOSED:
            a = gradient.load([first, block * TILE]).T
        else:
            a = gradient.load([block * TILE, first])
        b = other.load([first, hidden_block * WIDTH])
        z = add_product(a, b, z)
    tl.store(pointers, z.to(total.dtype.element_ty), mask=in_result)


def active_tile_lists(largest: Tensor, eps: float) -> TileLists:
    """The tiles of each row whose ``largest [blocks, tiles]``, of any strides, exceeds ``eps``."""
    blocks, tiles = largest.shape
    lists = TileLists(largest.new_empty(blocks, tiles, dtype=torch.int32), largest.new_empty(blocks, dtype=torch.int32))
    block = min(_LISTED, next_power_of_2(tiles))
    lce_backward_active_tile_lists.launch((blocks,), largest, lists, eps, *largest.stride(), tiles, BLOCK=block)
    return lists


def multiplies(gradient: Tensor, *others: Tensor) -> bool:
    """Whether :func:`sparse_product` takes these operands: of 16 bits, which TMA can address, so from Hopper on. With
    hidden sizes that are no multiple of 16 the result's mask takes a predicate per element: registers spill."""
    sizes = [other.shape[1] % 16 for other in others]
    return gradient.element_size() == 2 and not any(sizes) and addressable(gradient, *others)


def sparse_product(
    total: Tensor,
    gradient: Tensor,
    other: Tensor,
    lists: TileLists,
    *,
    transposed: bool,
    add: bool,
    rank_one: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``total [M, D] = gradient @ other``, or ``gradient.T @ other`` if ``transposed``, over the listed tiles.

    ``gradient [R, C]``. ``other [C, D]``, or ``[R, D]``. ``lists``: one for each block of 128 rows of the result.
    ``add``: to the fp32 ``total``. ``rank_one``: shares ``[M]`` and sums ``[blocks, D]``, fp32; each of a block's rows
    also gets its share times the block's sum.
    """
    (rows, hidden_size), (blocks, capacity) = total.shape, lists.numbers.shape
    of_gradient = (_STEP, TILE) if transposed else (TILE, _STEP)
    operands = descriptor(gradient, *of_gradient), descriptor(other, _STEP, _WIDTH)
    ordered = *lists, lists.counts.argsort(descending=True)
    sizes = rows, hidden_size, blocks, capacity, total.stride(0)
    kind = dict(TRANSPOSED=transposed, ADD=add, TILE=TILE, WIDTH=_WIDTH, STEP=_STEP, num_warps=8, num_stages=3)
    grid = (blocks * -(-hidden_size // _WIDTH),)
    lce_backward_sparse_product.launch(grid, *operands, total, ordered, rank_one or (None, None), *sizes, **kind)


class FilteredSlice(Slice):
    """A slice of which the products read the active tiles alone."""

    def __init__(self, whole: Slice, inverse_units: Tensor, eps: float) -> None:
        """Of a slice whose row stride is a multiple of 8 elements. A probability is ``gradient * inverse_units``.
        ``inverse_units [R]`` fp32, finite; 0 for a token without a unit. Tiles with NaN, or with a negative one, are
        active."""
        super().__init__(whole.start, whole.stop, whole.gradient, whole.dx_factor, whole.dw_factor, whole=False)
        gradient, (rows, entries) = whole.gradient, whole.gradient.shape
        row_blocks, tiles = -(-rows // TILE), -(-entries // TILE)
        largest = gradient.new_empty(row_blocks, tiles, dtype=torch.float32)
        # Sums of |G| u over the tokens of a row block, 0 where the tile is active.
        column_sums = gradient.new_empty(row_blocks, tiles * TILE, dtype=torch.float32)
        # [tiles, R], rows 16 bytes aligned: m, 0 where the tile is active
        self._masses = gradient.new_empty(tiles, -(-rows // 8) * 8)[:, :rows]
        results = largest, self._masses, column_sums
        sizes = rows, entries, gradient.stride(0), self._masses.stride(0), row_blocks
        given = gradient, inverse_units, *results, float(eps), *sizes
        grid = tiles, -(-row_blocks // _SCANNED.value)
        lce_backward_scan.launch(grid, *given, num_warps=_WARPS)
        shares = column_sums.sum(0).view(tiles, TILE)
        # [tiles * 128] fp32: q
        self._shares = torch.nn.functional.normalize(shares, p=1.0, dim=1, eps=_TINY).flatten()
        # Of each row block the active tiles, and of each block of entries the row blocks in which its tile is active.
        self.of_rows, self._of_entries = (active_tile_lists(each, float(eps)) for each in (largest, largest.t()))
        self._spread: Tensor | None = None  # S [tiles, D] fp32

    def add_hidden(self, total: Tensor, weight: Tensor, rows: slice, overwrite: bool) -> None:
        """``rows`` begin at a multiple of 128."""
        weight = some_rows(weight, self.start, self.stop)
        (tiles, _), (entries, hidden_size) = self._masses.shape, weight.shape
        centroids, grid = weight.new_empty(tiles, hidden_size), (tiles, -(-hidden_size // _HIDDEN.value))
        sizes = entries, hidden_size, weight.stride(0)
        lce_backward_centroids.launch(grid, weight, self._shares, centroids, *sizes, num_warps=2)
        accumulate(total, self._masses.t()[rows], centroids, overwrite=overwrite)
        sparse_product(total, self.gradient[rows], weight, self.of_rows.of_blocks(rows), transposed=False, add=True)

    def add_weight(self, total: Tensor, x: Tensor, entries: slice, overwrite: bool) -> None:
        """``entries`` begin at a multiple of 128. All calls have the same ``x``."""
        if self._spread is None:
            self._spread = matmul(self._masses, x)
        lists = self._of_entries.of_blocks(entries)
        estimate = self._shares[entries], self._spread[entries.start // TILE :]
        gradient = self.gradient[:, entries]
        sparse_product(total, gradient, x, lists, transposed=True, add=not overwrite, rank_one=estimate)
