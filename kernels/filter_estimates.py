"""The errors that filtering the gradient of the logits adds to dX and dW, estimated before the products.

Let R be what a filter takes from G: 0 in active tiles, ``G_ij - m_it q_j`` in the others
(:mod:`parallel_lce.kernels.active_tiles`). For random signs O ``[D, 4]`` and S ``[C, 4]``

    E |R (W O)|^2 = 4 |R W|^2        E |(R S).T x|^2 = 4 |R.T x|^2

in Frobenius norms. So the errors of both products need R times one *sketch* ``[W O | S]`` of 8 columns. A tile's part
of that is ``A_t - m_t (q_t.T B_t)``, with ``A_t`` the tile of G times the rows ``B_t`` of the sketch that are the
tile's. It needs G no more once the ``A_t`` of all tiles are known, whatever the filter. ``B_t`` is taken relative to
its mean. That changes nothing in R, whose rows sum to 0 in every tile; G's own product gets the masses times the means.
The shares q may be others for dW than for dX.

The errors are estimated at ``LEVELS`` filters, those of :func:`filter_of`. What is not finite is an error too large.
Norms from four signs vary: the worst case is an error of rank 1, whose estimate has a standard deviation of a third.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2
from parallel_lce.kernels.tile_scan import GROUP, TILE, BlockSample, ScannedTiles
from parallel_lce.kernels.tuning import interpreted

LEVELS = 8
"""Filters at which the errors are estimated."""
SIGNS = 4
"""Columns of O, and of S."""

_TILE, _LEVELS, _SIGNS = tl.constexpr(TILE), tl.constexpr(LEVELS), tl.constexpr(SIGNS)
_COLUMNS = tl.constexpr(2 * SIGNS)
SLOTS = 16
"""Columns of a product: one per level, one for G unfiltered. A product has 16 at least."""
_SLOTS = tl.constexpr(SLOTS)
# Numbers of the signs of a program, row blocks that are summed at a time.
_DRAWN, _SUMMED = 1024, 8
# Blocks of entries per step of a program that has ``GROUP`` tokens.
_STEP = 32


class RowFactors(NamedTuple):
    """What the rows of a gradient ``[R, C]`` lack that is added beside the products.

    ``dx_factor [R]`` and ``dw_factor [R]``: they are still to be multiplied by these; None: 1. ``fp16_scale``,
    0-dimensional: they are still to be divided by it; None: 1. ``target [R]`` and ``residual [R]``: of
    :func:`parallel_lce.kernels.targets.add_targets`, or None.
    """

    dx_factor: torch.Tensor | None
    dw_factor: torch.Tensor | None
    fp16_scale: torch.Tensor | None
    target: torch.Tensor | None
    residual: torch.Tensor | None


class LevelProducts(NamedTuple):
    """R of every level times the sketch."""

    # [n, 16] fp32, of which the first 9 are read: norms of dX's part, of some tokens each; at last of G's own product
    norms: torch.Tensor
    # [3 * 8 * 4, R]: dW's part, which is still to be multiplied by x, of every other row block; of the others; of all
    signed: torch.Tensor
    # [T, 8] fp32: how many tiles of a block of entries each level skips
    skipped: torch.Tensor


@triton.jit
def filter_of(level):
    """2^-10, 2^-11, ..., 2^-15, 2^-17 and 2^-19, from the bits of the exponent. Small filters are needed early in a
    training. There a filter twice as large skips few more tiles, so that every other power of two is enough."""
    exponent = 10 + level + tl.maximum(level - 5, 0)
    return ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@Relaunched
@triton.jit
def lce_backward_signs(signs, columns, stride, SEED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.randint(SEED, c)
    for row in tl.static_range(COUNT):
        sign = 1.0 - 2.0 * ((bits >> row) & 1).to(tl.float32)
        tl.store(signs + row * stride + c, sign.to(signs.dtype.element_ty), mask=c < columns)


@Relaunched
@triton.jit(do_not_specialize=["row_blocks"])
def lce_backward_level_means(
    largest,
    column_sums,
    of_weight,
    sketch,
    means,
    skipped,
    only_if,
    row_blocks,
    entries,
    sketch_stride,
    BLOCK: tl.constexpr,
):
    """The means of a block of rows of the sketch by the shares of each level, ``q_t.T B_t``, relative to the plain
    mean; and at last what the plain mean takes from G's own product. ``of_weight``: the shares of dW, else each
    level's. ``skipped [T, 8]``: how many of the block's tiles each level skips."""
    if only_if is not None:
        # Without row blocks there is little to do, and without blocks of entries below.
        row_blocks = tl.where(tl.load(only_if) > 0.0, row_blocks, 0)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    level, column = tl.arange(0, _LEVELS), tl.arange(0, _COLUMNS)
    sums = tl.zeros((_LEVELS, _TILE), tl.float32)
    count = tl.zeros((_LEVELS,), tl.float32)
    for start in range(0, row_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        valid = block < row_blocks
        found = tl.load(largest + block * tiles + tile, mask=valid, other=float("inf"))
        is_skipped = found[:, None] <= filter_of(level)[None, :]
        count += tl.sum(is_skipped.to(tl.float32), 0)
        offsets = block.to(tl.int64)[:, None] * (tiles * _TILE) + c[None, :]
        values = tl.load(column_sums + offsets, mask=valid[:, None], other=0.0)
        sums += tl.sum(tl.where(is_skipped[:, :, None], values[:, None, :], 0.0), 0)
    tl.store(skipped + tile * _LEVELS + level, count)
    total = tl.sum(sums, 1)[:, None]
    shares = tl.where(total > 0.0, sums / total, 0.0)
    b = tl.load(sketch + column[:, None] * sketch_stride + c[None, :], mask=(c < entries)[None, :], other=0.0)
    b = b.to(tl.float32)
    plain = tl.sum(b, 1) / tl.minimum(entries - tile * _TILE, _TILE)
    b = tl.where((c < entries)[None, :], b - plain[:, None], 0.0)
    mean = tl.sum(shares[:, None, :] * b[None, :, :], 2)
    if of_weight is not None:
        given = tl.sum(tl.load(of_weight + c)[None, :] * b, 1)
        mean = tl.where((column >= _SIGNS)[None, :], given[None, :], mean)
    of_tile = means + tile * ((_LEVELS + 1) * _COLUMNS)
    tl.store(of_tile + level[:, None] * _COLUMNS + column[None, :], mean)
    tl.store(of_tile + _LEVELS * _COLUMNS + column, -plain)


@Relaunched
@triton.jit(do_not_specialize=["rows", "tiles", "first", "first_block"])
def lce_backward_level_errors(
    largest,
    masses,
    sketched,
    means,
    sketch,
    factors,
    hidden_norms,
    signed,
    only_if,
    rows,
    tiles,
    entries,
    first,
    masses_stride,
    sketch_stride,
    signed_stride,
    first_block,
    block_step,
    HEIGHT: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Some tokens' R times the sketch at each level: norms of the columns that are for dX, also of G's own product, and
    the columns that are for dW, in two halves and as a whole."""
    if only_if is not None:
        tiles = tl.where(tl.load(only_if) > 0.0, tiles, 0)
    program = tl.program_id(0)
    block = program * TOKENS // HEIGHT
    r = program * TOKENS + tl.arange(0, TOKENS)
    flat = program * (TOKENS * _COLUMNS) + tl.arange(0, TOKENS * _COLUMNS)
    slot, place = tl.arange(0, _SLOTS), tl.arange(0, _SLOTS * _COLUMNS)
    level = place // _COLUMNS
    parts = tl.zeros((TOKENS * _COLUMNS, _SLOTS), tl.float32)
    replaced = tl.zeros((TOKENS, _SLOTS * _COLUMNS), tl.float32)
    for start in range(0, tiles, STEP):
        t = start + tl.arange(0, STEP)
        found = tl.load(largest + block * tiles + t, mask=t < tiles, other=float("inf"))
        skipped = (slot < _LEVELS)[None, :] & (found[:, None] <= filter_of(slot)[None, :])
        taken = (skipped | (slot == _LEVELS)[None, :]).to(tl.float32)
        tile_offsets = t.to(tl.int64)[None, :] * (tl.cdiv(rows, HEIGHT) * (HEIGHT * _COLUMNS))
        inside = (flat < rows * _COLUMNS)[:, None] & (t < tiles)[None, :]
        a = tl.load(sketched + tile_offsets + flat[:, None], mask=inside, other=0.0)
        inside = (level < _LEVELS)[None, :] & (found[:, None] <= filter_of(level)[None, :])
        inside |= (level == _LEVELS)[None, :] & (t < tiles)[:, None]
        u = tl.load(means + t[:, None] * ((_LEVELS + 1) * _COLUMNS) + place[None, :], mask=inside, other=0.0)
        inside = (r < rows)[:, None] & (t < tiles)[None, :]
        m = tl.load(masses + t.to(tl.int64)[None, :] * masses_stride + r[:, None], mask=inside, other=0.0)
        u = u.to(m.dtype)
        if UPCAST:
            a = a.to(tl.float32)
            m = m.to(tl.float32)
            u = u.to(tl.float32)
        parts = tl.dot(a, taken.to(a.dtype), parts)
        replaced = tl.dot(m, u, replaced)
    # Tokens, columns of the sketch, slots.
    replaced = tl.permute(tl.reshape(replaced, (TOKENS, _SLOTS, _COLUMNS)), (0, 2, 1))
    z = tl.reshape(parts, (TOKENS, _COLUMNS, _SLOTS)) - replaced
    column = tl.arange(0, _COLUMNS)
    of_hidden = (column < _SIGNS)[None, :]
    # Of a sample's rows: where they are among all.
    row = (first_block + block * block_step) * HEIGHT + r - block * HEIGHT
    ones = tl.full((TOKENS,), 1.0, tl.float32)
    dx_factor, dw_factor = ones, ones
    if factors.dx_factor is not None:
        dx_factor = tl.load(factors.dx_factor + row, mask=r < rows, other=0.0)
    if factors.dw_factor is not None:
        dw_factor = tl.load(factors.dw_factor + row, mask=r < rows, other=0.0)
    z *= tl.where(of_hidden, dx_factor[:, None], dw_factor[:, None])[:, :, None]
    if factors.target is not None:
        entry = tl.load(factors.target + row, mask=r < rows, other=-1) - first
        hit = (entry >= 0) & (entry < entries)
        left = tl.load(factors.residual + row, mask=hit, other=0.0)
        if factors.fp16_scale is not None:
            left *= tl.load(factors.fp16_scale)
        inside = hit[:, None] & of_hidden
        b = tl.load(sketch + column[None, :] * sketch_stride + entry[:, None], mask=inside, other=0.0)
        target = left[:, None] * b.to(tl.float32)
        z += tl.where((slot == _LEVELS)[None, None, :], target[:, :, None], 0.0)
    squares = tl.sum(tl.sum(tl.where(of_hidden[:, :, None], z * z, 0.0), 1), 0)
    tl.store(hidden_norms + program * _SLOTS + slot, tl.sqrt(squares))
    to = slot[None, :] * _SIGNS + column[:, None] - _SIGNS
    inside = (slot < _LEVELS)[None, :] & (column >= _SIGNS)[:, None]
    inside = inside[None, :, :] & (r < rows)[:, None, None]
    pointers = signed + to[None, :, :] * signed_stride + r[:, None, None]
    half: tl.constexpr = _LEVELS * _SIGNS
    z = z.to(signed.dtype.element_ty)
    zero = tl.zeros_like(z)
    is_first = block % 2 == 0
    tl.store(pointers, tl.where(is_first, z, zero), mask=inside)
    tl.store(pointers + half * signed_stride, tl.where(is_first, zero, z), mask=inside)
    tl.store(pointers + 2 * half * signed_stride, z, mask=inside)


def signs(result: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill ``result [4, n]`` with signs: the same for the same seed, without a state of a generator."""
    count, columns = result.shape
    lce_backward_signs.launch(
        (-(-columns // _DRAWN),), result, columns, result.stride(0), SEED=seed, COUNT=count, BLOCK=_DRAWN
    )
    return result


def level_products(
    scanned: ScannedTiles,
    sketch: torch.Tensor,
    factors: RowFactors,
    first: int,
    sample: BlockSample | None = None,
    of_weight: torch.Tensor | None = None,
    only_if: torch.Tensor | None = None,
) -> LevelProducts:
    """``sketch [8, C]`` fp32, of which ``scanned`` holds the products, of a multiple of ``GROUP`` rows in each row
    block. ``first``: the id of the first entry of ``factors``' targets. ``sample``: the row blocks that are scanned, of
    those that ``factors`` have; None: all, of equal heights. ``of_weight [128 T]``: the shares of dW; None: those of
    the column sums, as for dX. ``only_if [1]`` fp32: if it is 0, the results mean nothing.
    """
    assert scanned.sketched is not None
    (row_blocks, tiles), rows, entries = scanned.largest.shape, scanned.masses.shape[1], sketch.shape[1]
    means, skipped = sketch.new_empty(tiles, LEVELS + 1, 2 * SIGNS), sketch.new_empty(tiles, LEVELS)
    lce_backward_level_means.launch(
        (tiles,),
        scanned.largest,
        scanned.column_sums,
        of_weight,
        sketch,
        means,
        skipped,
        only_if,
        row_blocks,
        entries,
        sketch.stride(0),
        BLOCK=min(_SUMMED, next_power_of_2(row_blocks)),
    )
    programs = -(-rows // GROUP)
    norms = means.new_empty(programs, _SLOTS.value)
    signed = scanned.masses.new_empty(3 * LEVELS * SIGNS, -(-rows // 8) * 8)[:, :rows]
    lce_backward_level_errors.launch(
        (programs,),
        scanned.largest,
        scanned.masses,
        scanned.sketched,
        means,
        sketch,
        factors,
        norms,
        signed,
        only_if,
        rows,
        tiles,
        entries,
        first,
        scanned.masses.stride(0),
        sketch.stride(0),
        signed.stride(0),
        0 if sample is None else sample.first,
        1 if sample is None else sample.step,
        HEIGHT=scanned.sketched.shape[1] // row_blocks,
        TOKENS=GROUP,
        STEP=_STEP,
        # Triton's interpreter multiplies bf16 wrongly.
        UPCAST=interpreted() and signed.element_size() == 2,
        num_warps=4,
    )
    return LevelProducts(norms, signed, skipped)
