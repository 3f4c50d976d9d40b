"""Which tiles of a slice of the gradient of the logits are active, and what stands for the others.

:mod:`parallel_lce.kernels.filter` has the definitions.
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
# Largest number of fp32: stands for 1 / 0.
_FINITE = tl.constexpr(3.4028234663852886e38)
# Rows of a program that finds limits.
_ROWS = 1024
# Row blocks that a program scans one after the other. Rows that it looks at at a time, stages of its loads, its warps.
_SCANNED, _CHUNK, _STAGES, _WARPS = 4, 16, 3, 2
# Places of a list that one looks at at a time, and row blocks.
_LISTED, _SUMMED = 1024, 16
# Hidden elements of a program that forms a centroid, and rows of the weight that it reads at a time.
_HIDDEN, _STRIP = 128, 64


class TokenTargets(NamedTuple):
    """Of :func:`parallel_lce.kernels.targets.place_targets`: a shared target's gradient is an entry of G, whose tile is
    active if its token's gradient is not 0."""

    # [R] int64
    target: torch.Tensor
    # [R] uint8
    unshared: torch.Tensor


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
    # [T, R], its rows 16 bytes aligned: m, 0 where the tile is active
    masses: torch.Tensor
    # [128 T] fp32: q for dX, and for dW
    of_hidden: torch.Tensor
    of_weight: torch.Tensor


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_inverse_limits(
    alpha, factor, token_scale, fp16_scale, dx_factor, result, scale, rows, factor_stride, BLOCK: tl.constexpr
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < rows
    limit = tl.abs(tl.load(alpha + r, mask=inside, other=0.0) * scale)
    if factor is not None:
        limit *= tl.abs(tl.load(factor + r * factor_stride, mask=inside, other=0.0))
    if token_scale is not None:
        limit *= tl.abs(tl.load(token_scale + r, mask=inside, other=0.0))
    if fp16_scale is not None:
        limit *= tl.load(fp16_scale)
    inverse = 1.0 / limit
    if dx_factor is not None:
        inverse = tl.abs(tl.load(dx_factor + r, mask=inside, other=0.0)) / limit
    # Finite, so that 0 times it is 0.
    inverse = tl.where(inverse == inverse, tl.minimum(inverse, _FINITE), 0.0)
    tl.store(result + r, inverse, mask=inside)


def inverse_limits(
    alpha: torch.Tensor,
    scale: float,
    factors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    dx_factor: torch.Tensor | None,
) -> torch.Tensor:
    """``|dx_factor| / |scale alpha factors| [R]`` fp32, as :func:`find_active_tiles` takes it.

    ``alpha [R]``, ``dx_factor [R]`` and the factors are fp32; None: 1. Of the factors the first is ``[R]`` or one
    number for all tokens, the second ``[R]``, and the third 0-dimensional and positive. A row whose ``dx_factor`` is 0
    has no limit. In a row without probabilities every number but 0 lies beyond the limit.
    """
    factor, token_scale, fp16_scale = factors
    rows, result = len(alpha), torch.empty_like(alpha)
    lce_backward_inverse_limits.launch(
        (-(-rows // _ROWS),),
        alpha,
        factor,
        token_scale,
        fp16_scale,
        dx_factor,
        result,
        float(scale),
        rows,
        0 if factor is None or factor.dim() == 0 else factor.stride(0),
        BLOCK=_ROWS,
    )
    return result


@Relaunched
@triton.jit(do_not_specialize=["rows", "blocks", "first_entry"])
def lce_backward_scan(
    gradient,
    inverse_limits,
    largest,
    masses,
    column_sums,
    targets,
    eps,
    rows,
    entries,
    stride,
    masses_stride,
    blocks,
    first_entry,
    MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of entries in ``BLOCKS`` row blocks."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    first = tl.program_id(1) * BLOCKS
    for block in range(first, tl.minimum(first + BLOCKS, blocks)):
        of_tile = masses + tile.to(tl.int64) * masses_stride + block * _TILE
        # Elementwise over some rows at a time: threads have less to tell each other.
        tops = tl.zeros((CHUNK, _TILE), tl.float32)
        sums = tl.zeros((CHUNK, _TILE), tl.float32)
        marked = tl.zeros((CHUNK,), tl.int32)
        for start in tl.range(0, _TILE, CHUNK, num_stages=STAGES):
            lane = start + tl.arange(0, CHUNK)
            r = block * _TILE + lane
            g = load_gradient(gradient, r, c, rows, entries, stride, MASKED)
            inverse = tl.load(inverse_limits + r, mask=r < rows, other=0.0)
            relative = tl.abs(g) * inverse[:, None]
            tops = tl.maximum(tops, relative)
            # NaN stays.
            sums += tl.where(relative > eps, 0.0, relative)
            if targets is not None:
                place = tl.load(targets.target + r, mask=r < rows, other=-1) - first_entry - tile * _TILE
                is_shared = tl.load(targets.unshared + r, mask=r < rows, other=1) == 0
                # Where a token's coefficient is 0, its entries alone decide.
                has_limit = (inverse > 0.0) & (inverse < _FINITE)
                marked = tl.maximum(marked, ((place >= 0) & (place < _TILE) & is_shared & has_limit).to(tl.int32))
            tl.store(of_tile + lane, tl.sum(g, 1).to(masses.dtype.element_ty), mask=r < rows)
        of_entries = tl.sum(sums, 0)
        # A maximum may leave out NaN, a sum does not.
        total = tl.sum(of_entries, 0)
        is_known = (total == total) & (tl.max(marked, 0) == 0)
        top = tl.where(is_known, tl.max(tl.max(tops, 0), 0), float("inf"))
        tl.store(largest + block * tiles + tile, top)
        tl.store(column_sums + block * (tiles.to(tl.int64) * _TILE) + c, of_entries)
        if top > eps:
            tl.debug_barrier()
            lane = tl.arange(0, _TILE)
            zero = tl.zeros((_TILE,), masses.dtype.element_ty)
            tl.store(of_tile + lane, zero, mask=block * _TILE + lane < rows)


@triton.jit
def load_gradient(gradient, r, c, rows, entries, stride, MASKED: tl.constexpr):
    """Rows ``r`` and entries ``c`` of a gradient, in fp32. ``MASKED``: some entries may not be there."""
    # What follows the last entry in its granule of 16 bytes is read, too: loads are then of whole granules.
    inside = (r < rows)[:, None] & (c < tl.cdiv(entries, 8) * 8)[None, :]
    g = tl.load(gradient + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    if MASKED:
        g = tl.where((c < entries)[None, :], g, 0.0)
    return g.to(tl.float32)


@Relaunched
@triton.jit(do_not_specialize=["row_blocks", "tiles"])
def lce_backward_list_tiles(largest, listed, eps, row_blocks, tiles, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """One list: of the gradient, of its row blocks and then of its blocks of entries; then so of the masses."""
    number = tl.program_id(0)
    of_rows, of_entries, masses_of_rows, masses_of_groups = listed
    if number < row_blocks:
        _list_active(largest + number * tiles, 1, of_rows, number, tiles, eps, BLOCK)
    elif number < row_blocks + tiles:
        number -= row_blocks
        _list_active(largest + number, tiles, of_entries, number, row_blocks, eps, BLOCK)
    elif number < 2 * row_blocks + tiles:
        number -= row_blocks + tiles
        found = 0
        for place in range(0, tl.cdiv(tiles, _TILE)):
            is_listed = _some_skipped(largest, number + tl.arange(0, 1), place, row_blocks, tiles, eps)
            found = _append(masses_of_rows, number, tl.cdiv(tiles, _TILE), place + tl.arange(0, 1), is_listed, found)
        tl.store(masses_of_rows[1] + number, found)
    else:
        number -= 2 * row_blocks + tiles
        found = 0
        for start in range(0, row_blocks, WIDE):
            block = start + tl.arange(0, WIDE)
            is_listed = _some_skipped(largest, block, number, row_blocks, tiles, eps)
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
def _some_skipped(largest, block, group, row_blocks, tiles, eps):
    """Of some row blocks: whether a tile of the group is skipped."""
    t = group * _TILE + tl.arange(0, _TILE)
    inside = (block < row_blocks)[:, None] & (t < tiles)[None, :]
    value = tl.load(largest + block[:, None] * tiles + t[None, :], mask=inside, other=float("inf"))
    return tl.min(value, 1) <= eps


@triton.jit
def _append(lists, block, places, place, is_listed, found):
    """Add to a block's list, which has ``found`` numbers; how many it then has."""
    is_listed = is_listed.to(tl.int32)
    position = found + tl.cumsum(is_listed, 0) - 1
    tl.store(lists[0] + block * places + position, place, mask=is_listed != 0)
    return found + tl.sum(is_listed, 0)


@Relaunched
@triton.jit(do_not_specialize=["row_blocks"])
def lce_backward_entry_shares(largest, column_sums, otherwise, shares, eps, row_blocks, BLOCK: tl.constexpr):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    sums = tl.zeros((_TILE,), tl.float32)
    for start in range(0, row_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        is_active = tl.load(largest + block * tiles + tile, mask=block < row_blocks, other=float("inf")) > eps
        offsets = block.to(tl.int64)[:, None] * (tiles * _TILE) + c[None, :]
        sums += tl.sum(tl.load(column_sums + offsets, mask=~is_active[:, None], other=0.0), 0)
    total, unknown = tl.sum(sums, 0), tl.zeros((_TILE,), tl.float32)
    if otherwise is not None:
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
    largest: torch.Tensor, column_sums: torch.Tensor, eps: float, otherwise: torch.Tensor | None = None
) -> torch.Tensor:
    """q ``[128 T]`` fp32, from the ``column_sums [row blocks, 128 T]`` of the tiles whose ``largest [row blocks, T]``
    is within ``eps``. Of a block of entries whose tiles all exceed it, or whose sums are 0 or not finite: ``otherwise
    [128 T]``, or 0."""
    row_blocks, tiles = largest.shape
    shares = column_sums.new_empty(tiles * TILE)
    lce_backward_entry_shares.launch(
        (tiles,),
        largest,
        column_sums,
        otherwise,
        shares,
        float(eps),
        row_blocks,
        BLOCK=min(_SUMMED, next_power_of_2(row_blocks)),
    )
    return shares


def list_tiles(largest: torch.Tensor, eps: float) -> ListedTiles:
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
    lce_backward_list_tiles.launch(
        (2 * row_blocks + tiles + groups,),
        largest,
        listed,
        float(eps),
        row_blocks,
        tiles,
        BLOCK=min(_LISTED, next_power_of_2(max(row_blocks, tiles))),
        WIDE=min(_SUMMED, next_power_of_2(row_blocks)),
    )
    return listed


def find_active_tiles(
    gradient: torch.Tensor,
    inverse_limits: torch.Tensor,
    eps: float,
    targets: TokenTargets | None = None,
    first: int = 0,
) -> ActiveTiles:
    """The tiles of ``gradient [R, C]`` whose largest entry, in units of its token's limit, exceeds ``eps``, and what
    stands for the others.

    The rows of ``gradient`` lie in memory of a multiple of 8 elements each. ``inverse_limits [R]`` fp32, finite; 0 for
    a token without a limit. ``first``: the id of the first entry, as ``targets`` are counted. A tile with NaN, or with
    the shared target of a token that has a limit, is active.
    """
    (rows, entries), row_blocks, tiles = gradient.shape, -(-len(gradient) // TILE), -(-gradient.shape[1] // TILE)
    largest = gradient.new_empty(row_blocks, tiles, dtype=torch.float32)
    # Sums of |G| u over the tokens of a row block, without what exceeds the limit.
    column_sums = gradient.new_empty(row_blocks, tiles * TILE, dtype=torch.float32)
    masses = new_masses(tiles, rows, gradient, gradient.dtype)
    lce_backward_scan.launch(
        (tiles, -(-row_blocks // _SCANNED)),
        gradient,
        inverse_limits,
        largest,
        masses,
        column_sums,
        targets,
        float(eps),
        rows,
        entries,
        gradient.stride(0),
        masses.stride(0),
        row_blocks,
        first,
        MASKED=entries % TILE != 0,
        BLOCKS=_SCANNED,
        CHUNK=_CHUNK,
        STAGES=_STAGES,
        num_warps=_WARPS,
    )
    shares = entry_shares(largest, column_sums, eps)
    return ActiveTiles(list_tiles(largest, eps), masses, shares, shares)


def new_masses(tiles: int, rows: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised masses ``[T, rows]``."""
    return like.new_empty(tiles, -(-rows // 8) * 8, dtype=dtype)[:, :rows]


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
        STRIP=_STRIP,
        BLOCK=_HIDDEN,
        num_warps=2,
    )
    return result
