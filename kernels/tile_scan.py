"""What one pass over the gradient of the logits tells of its tiles: :func:`scan_tiles`.

:mod:`parallel_lce.kernels.active_tiles` has what is made of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.tuning import interpreted

TILE = 128
"""Tokens and entries of a tile."""
GROUP = 16
"""Tokens that a sample has together, where it need not have whole tiles."""
FEWEST_SAMPLED = 4
"""A sample has as many tokens as so many row blocks at least, if there are so many."""
FINITE = 3.4028234663852886e38
"""Largest number of fp32: stands for 1 / 0."""

_TILE, _FINITE = tl.constexpr(TILE), tl.constexpr(FINITE)
# Row blocks that a program scans one after the other.
_SCANNED = 4
# Rows that it looks at at a time, stages of its loads, and its warps: without a sketch, with one, and with one where
# row blocks are groups. More warps tell each other more, and take longer.
_PLAIN, _SKETCHED, _GROUPED = (16, 3, 2), (32, 1, 2), (16, 1, 1)
_STEPS = 1, 3, 5, 7, 11, 13
# Rows of a program that finds limits.
_ROWS = 1024


class BlockSample(NamedTuple):
    """Some of a gradient's blocks of ``height`` rows: ``count``, from ``first`` on, each ``step`` after the one
    before."""

    first: int
    step: int
    count: int
    height: int = TILE

    def of(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Their rows of a tensor whose dimension ``dim`` has all rows."""
        if self.step == 1:
            return rows
        blocks = rows.narrow(dim, 0, rows.shape[dim] // self.height * self.height).unflatten(dim, (-1, self.height))
        return blocks[(slice(None),) * dim + (slice(self.first, None, self.step),)].flatten(dim, dim + 1)

    def of_tiles(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of ``numbers [row blocks, T]`` those of the tiles that its blocks are part of, ``[count, T]``."""
        parts = numbers[:, None].expand(-1, TILE // self.height, -1).flatten(0, 1)
        return parts[self.first :: self.step][: self.count].contiguous()


def sample_blocks(rows: int, one_in: int, height: int = TILE) -> BlockSample:
    """One in so many of the blocks of ``rows`` rows, or more of them where they would be too few. Steps are odd primes:
    others would meet sequences, or micro-batches, of usual sizes at the same few places."""
    step = max(step for step in _STEPS if step <= max(1, min(one_in, rows // TILE // FEWEST_SAMPLED)))
    first = step // 2 if step > 1 else 0
    blocks = -(-rows // height) if step == 1 else rows // height
    return BlockSample(first, step, -(-(blocks - first) // step), height)


class TokenTargets(NamedTuple):
    """Of :func:`parallel_lce.kernels.targets.place_targets`: a shared target's gradient is an entry of G, whose tile is
    active if its token's gradient is not 0."""

    # [R] int64
    target: torch.Tensor
    # [R] uint8
    unshared: torch.Tensor


class ScannedTiles(NamedTuple):
    """What is found of a gradient ``[R, C]`` with T blocks of entries. ``R``: of the sample, if some were scanned."""

    # [row blocks, T] fp32: each tile's largest entry, in units of its token's limit; infinity where a shared target is.
    # A row block has 128 rows, or the height of the scan.
    largest: torch.Tensor
    # [T, R], its rows 16 bytes aligned, in the gradient's dtype: m
    masses: torch.Tensor
    # [row blocks, 128 T] fp32: sums of |G| u over the tokens of a row block, without what exceeds the limit of the scan
    column_sums: torch.Tensor
    # [T, R, 8], of which tile t holds its own terms of the gradient's product with a sketch, whose rows are
    # relative to their mean in the tile; None: there is no sketch
    sketched: torch.Tensor | None


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
    """``|dx_factor| / |scale alpha factors| [R]`` fp32, as :func:`scan_tiles` takes it.

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


@triton.jit
def _scan_tile(
    gradient,
    inverse_limits,
    found,
    s,
    targets,
    eps,
    sizes,
    first_row,
    tile,
    block,
    LIMITED: tl.constexpr,
    MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
    HEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``s``: the tile's rows of the sketch, if ``COLUMNS``. ``block``: of the ``found`` row blocks."""
    rows, entries, stride, masses_stride, blocks, first_entry = sizes
    tiles = tl.num_programs(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    masses = found.masses + tile.to(tl.int64) * masses_stride + block * HEIGHT
    # Elementwise over some rows at a time: threads have less to tell each other.
    largest = tl.zeros((CHUNK, _TILE), tl.float32)
    sums = tl.zeros((CHUNK, _TILE), tl.float32)
    marked = tl.zeros((CHUNK,), tl.int32)
    for start in tl.range(0, HEIGHT, CHUNK, num_stages=STAGES):
        lane = start + tl.arange(0, CHUNK)
        r = first_row + lane
        # What follows the last entry in its granule of 16 bytes is read, too: loads are then of whole granules.
        inside = (r < rows)[:, None] & (c < tl.cdiv(entries, 8) * 8)[None, :]
        stored = tl.load(gradient + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
        if MASKED:
            stored = tl.where((c < entries)[None, :], stored, 0.0)
        g = stored.to(tl.float32)
        inverse = tl.load(inverse_limits + r, mask=r < rows, other=0.0)
        relative = tl.abs(g) * inverse[:, None]
        largest = tl.maximum(largest, relative)
        if LIMITED:
            # NaN stays.
            relative = tl.where(relative > eps, 0.0, relative)
        sums += relative
        if targets is not None:
            place = tl.load(targets.target + r, mask=r < rows, other=-1) - first_entry - tile * _TILE
            is_shared = tl.load(targets.unshared + r, mask=r < rows, other=1) == 0
            # Where a token's coefficient is 0, its entries alone decide.
            has_limit = (inverse > 0.0) & (inverse < _FINITE)
            marked = tl.maximum(marked, ((place >= 0) & (place < _TILE) & is_shared & has_limit).to(tl.int32))
        tl.store(masses + lane, tl.sum(g, 1).to(found.masses.dtype.element_ty), mask=r < rows)
        if COLUMNS:
            if UPCAST:
                stored = stored.to(tl.float32)
            k = tl.arange(0, 16)
            row = block * HEIGHT + lane
            pointers = found.sketched + tile.to(tl.int64) * (blocks * HEIGHT * COLUMNS)
            pointers += row[:, None] * COLUMNS + k[None, :]
            product = tl.dot(stored, s).to(found.sketched.dtype.element_ty)
            tl.store(pointers, product, mask=(r < rows)[:, None] & (k < COLUMNS)[None, :])
    column_sums = tl.sum(sums, 0)
    # A maximum may leave out NaN, a sum does not.
    total = tl.sum(column_sums, 0)
    is_known = (total == total) & (tl.max(marked, 0) == 0)
    top = tl.where(is_known, tl.max(tl.max(largest, 0), 0), float("inf"))
    tl.store(found.largest + block * tiles + tile, top)
    tl.store(found.column_sums + block * (tiles.to(tl.int64) * _TILE) + c, column_sums)
    if LIMITED:
        if top > eps:
            tl.debug_barrier()
            lane = tl.arange(0, HEIGHT)
            tl.store(masses + lane, tl.zeros((HEIGHT,), found.masses.dtype.element_ty), mask=first_row + lane < rows)


@Relaunched
@triton.jit(do_not_specialize=["rows", "blocks", "first_block", "first_entry"])
def lce_backward_scan(
    gradient,
    inverse_limits,
    chosen,
    found,
    sketch,
    targets,
    eps,
    rows,
    entries,
    stride,
    masses_stride,
    sketch_stride,
    blocks,
    first_block,
    block_step,
    first_entry,
    LIMITED: tl.constexpr,
    MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``LIMITED`` to ``eps``."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    first = tl.program_id(1) * BLOCKS
    stop = tl.minimum(first + BLOCKS, blocks)
    sizes = (rows, entries, stride, masses_stride, blocks, first_entry)
    is_read = eps >= 0.0
    if chosen is not None:
        eps = tl.load(chosen)
        is_read = eps > 0.0
    if is_read:
        s = tile  # Not read without a sketch.
        if COLUMNS:
            # A product has 16 columns at least.
            k, c = tl.arange(0, 16), tile * _TILE + tl.arange(0, _TILE)
            inside = (c < entries)[:, None] & (k < COLUMNS)[None, :]
            s = tl.load(sketch + k[None, :] * sketch_stride + c[:, None], mask=inside, other=0.0).to(tl.float32)
            # Without the mean, which the masses stand for: the rounding of a large mean would hide what filters change.
            mean = tl.sum(s, 0) / tl.minimum(entries - tile * _TILE, _TILE)
            s = tl.where(inside, s - mean[None, :], 0.0)
            if not UPCAST:
                s = s.to(gradient.dtype.element_ty)
        for block in range(first, stop):
            _scan_tile(
                gradient,
                inverse_limits,
                found,
                s,
                targets,
                eps,
                sizes,
                (first_block + block * block_step) * HEIGHT,
                tile,
                block,
                LIMITED,
                MASKED,
                COLUMNS,
                UPCAST,
                HEIGHT,
                CHUNK,
                STAGES,
            )
    else:
        # Every tile is active.
        for block in range(first, stop):
            tl.store(found.largest + block * tiles + tile, float("inf"))


def scan_tiles(
    gradient: torch.Tensor,
    inverse_limits: torch.Tensor,
    eps: float | torch.Tensor | None = None,
    *,
    targets: TokenTargets | None = None,
    first: int = 0,
    only_if: torch.Tensor | None = None,
    sketch: torch.Tensor | None = None,
    sample: BlockSample | None = None,
    height: int = TILE,
) -> ScannedTiles:
    """What is known of the tiles of ``gradient [R, C]``.

    The rows of ``gradient`` lie in memory of a multiple of 8 elements each. ``inverse_limits [R]`` fp32, finite; 0 for
    a token without a limit. ``first``: the id of the first entry, as ``targets`` are counted. A tile with NaN, or with
    the shared target of a token that has a limit, has the largest entry infinity.

    ``eps``: the limit, a number or fp32 ``[1]``. The masses are 0 in tiles whose largest entry exceeds it, and the
    column sums leave out such entries. A tensor of 0 stands for a filter that keeps everything: nothing is read, every
    tile has the largest entry infinity, and the rest is undefined. So it is, without a limit, with 0 in ``only_if``.
    ``sketch [8, C]`` fp32. ``sample``: scan these row blocks alone. ``height``: rows of a row block, without a
    ``sample``.
    """
    assert eps is None or only_if is None
    (rows, entries), tiles = gradient.shape, -(-gradient.shape[1] // TILE)
    sample = sample or sample_blocks(rows, 1, height)
    height = sample.height
    scanned_rows = rows if sample.step == 1 else sample.count * height
    columns, sketched = 0 if sketch is None else len(sketch), None
    if sketch is not None:
        # fp16 would not hold every product. Whole row blocks, whatever the last one has.
        dtype = torch.bfloat16 if gradient.dtype == torch.float16 else gradient.dtype
        sketched = gradient.new_empty(tiles, sample.count * height, columns, dtype=dtype)
    largest = gradient.new_empty(sample.count, tiles, dtype=torch.float32)
    column_sums = gradient.new_empty(sample.count, tiles * TILE, dtype=torch.float32)
    masses = new_masses(tiles, scanned_rows, gradient, gradient.dtype)
    result = ScannedTiles(largest, masses, column_sums, sketched)
    chosen, number = (only_if, 0.0) if eps is None else filter_argument(eps)
    chunk, stages, warps = _PLAIN if sketch is None else _SKETCHED if height == TILE else _GROUPED
    lce_backward_scan.launch(
        (tiles, -(-sample.count // _SCANNED)),
        gradient,
        inverse_limits,
        chosen,
        result,
        sketch,
        targets,
        number,
        rows,
        entries,
        gradient.stride(0),
        result.masses.stride(0),
        0 if sketch is None else sketch.stride(0),
        sample.count,
        sample.first,
        sample.step,
        first,
        LIMITED=eps is not None,
        MASKED=entries % TILE != 0,
        COLUMNS=columns,
        # Triton's interpreter multiplies bf16 wrongly.
        UPCAST=interpreted() and gradient.dtype == torch.bfloat16,
        BLOCKS=_SCANNED,
        HEIGHT=height,
        CHUNK=min(chunk, height),
        STAGES=stages,
        num_warps=warps,
    )
    return result


def new_masses(tiles: int, rows: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised masses ``[T, rows]``."""
    return like.new_empty(tiles, -(-rows // 8) * 8, dtype=dtype)[:, :rows]


def filter_argument(eps: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """How a kernel is given a filter: fp32 ``[1]`` on the device, or None and a number."""
    return (None, float(eps)) if isinstance(eps, (int, float)) else (eps, 0.0)
