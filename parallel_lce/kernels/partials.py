"""Partials on the GPU: the softmax statistics of a tile's tokens, and the merge of partials.

``parallel_lce.core.partials`` has the algebra in plain torch. A *window* is the vocabulary range of one tile. Each
window stores one partial per token. One kernel merges the windows of a rank, and the partials of the ranks.

A window's exponentials are those of ``arithmetic.slope_and_reference``. Their sum, the sum of their squares and
``total`` are fp64 (:mod:`parallel_lce.kernels.arithmetic`). ``weighted`` is fp32.

Sums of a merged partial are fp32 and relative to its maximum. On several ranks each sum of a rank's partial has a
second row, ``low``: what the first lost by its rounding. Offsets into ``[windows, tokens]`` are 64-bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.memory import on_device_of
from parallel_lce.core.partials import NO_ENTRY, ONE_LARGE_ENTRY, TRAILER, Columns
from parallel_lce.kernels.arithmetic import (
    LOG2_E,
    LOWEST_SHIFT,
    at_max,
    exact_logit,
    exponential,
    finite_base,
    largest_of,
    power_from,
    power_of_two_above,
    slope_and_reference,
    wide_sum,
)
from parallel_lce.kernels.launch import Relaunched, next_power_of_2
from parallel_lce.kernels.results import Results, store_losses, store_statistics

# Sentinel: no argmax, since a logit is NaN or the trailers do not match.
_NO_ENTRY, _ONE_LARGE_ENTRY = tl.constexpr(NO_ENTRY), tl.constexpr(ONE_LARGE_ENTRY)
# A logit whose exponential counts beside no other. Its exponential is a normal number.
_LEAST = tl.constexpr(-80.0)
# Merge of windows: tokens per program (whole 32-byte sectors, and enough programs for few tokens), windows per step.
_MERGE_ROWS, _MERGE_WINDOWS = 8, 128
# Merge of ranks: most elements of a tile, and most tokens of a tile.
_RANKS_TILE, _RANKS_ROWS = 1024, 128


class PartialColumns(NamedTuple):
    """The columns of ``parallel_lce.core.partials``, one tensor each, tokens last. None: absent. ``argmax`` is a
    bit-cast integer. Windows have ``total`` in place of ``shifted``."""

    max: torch.Tensor
    sum_exp: torch.Tensor
    target: torch.Tensor | None
    shifted: torch.Tensor | None
    total: torch.Tensor | None
    weighted: torch.Tensor | None
    squared: torch.Tensor | None
    argmax: torch.Tensor | None


class RoundedSums(NamedTuple):
    """Sums of the exponentials as the forward saves them. bf16 may round nearly equal ones all up, or all down. The sum
    of a token's gradients would then not be 0, which dX shows if the rows of the weight share a mean."""

    # [windows, R]: fp32, of exponentials in bf16; or fp64, of exact ones
    sums: torch.Tensor
    # [R] fp32, an output: a token's factor with which the rounded exponentials have the sum of the exact ones, both
    # without the target's; 0 if not all exponentials are exp(z).
    mass: torch.Tensor
    # Number of saved vocabulary entries, and of the entries of a window.
    saved: int
    width: int


@triton.jit
def _larger(a, b):
    """The maximum; NaN if one is, which ``tl.max`` ignores."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_partials(z, position, partials, MASKED: tl.constexpr):
    """Store the ``partials [windows, rows]`` of the logits ``z [BLOCK_M, BLOCK_N]``. Returns their exponentials and the
    maxima.

    ``position``: as in :func:`parallel_lce.kernels.epilogue.finish_tile`. ``MASKED``: the tile may have columns beyond
    the last vocabulary entry.
    """
    r, c, window, rows, entries = position
    valid = r < rows
    inside = (c < entries)[None, :]
    here = window.to(tl.int64) * rows + r
    if partials.total is not None:
        logits = tl.where(inside, z, 0.0)
        bound = tl.max(tl.abs(logits), 1)
        # Of huge numbers a sum would overflow.
        unit = tl.where(bound < 2.0**64, 1.0, 2.0**-64)
        total = wide_sum(logits * unit[:, None], bound * unit, r) / unit
        total = tl.where(bound < float("inf"), total, tl.sum(logits, 1).to(tl.float64))
        tl.store(partials.total + here, total, mask=valid)
    if MASKED:
        z = tl.where(inside, z, -float("inf"))
    top = tl.reduce(z, 1, _larger)
    tl.store(partials.max + here, top, mask=valid)
    if partials.argmax is not None:
        ids = tl.min(tl.where(z == top[:, None], c[None, :], _NO_ENTRY), 1)
        tl.store(partials.argmax + here, ids.to(tl.float32, bitcast=True), mask=valid)
    base = finite_base(top)
    slope, reference = slope_and_reference(top)
    e = power_from(z, slope[:, None], reference[:, None])
    largest = largest_of(top)
    tl.store(partials.sum_exp + here, wide_sum(e, largest, r), mask=valid)
    if partials.weighted is not None:
        weighted = tl.sum(e * tl.maximum(z - base[:, None], LOWEST_SHIFT), 1)
        tl.store(partials.weighted + here, weighted, mask=valid)
    if partials.squared is not None:
        # In (0, 1], so that no square overflows.
        unit = power_of_two_above(largest)
        scaled, bound = e * (1.0 / unit)[:, None], largest / unit
        unit = unit.to(tl.float64)
        tl.store(partials.squared + here, wide_sum(scaled * scaled, bound * bound, r) * unit * unit, mask=valid)
    return e, top


@triton.jit
def _offsets(w, stride, r):
    return w.to(tl.int64)[:, None] * stride + r[None, :]


@triton.jit
def _wide(column, here, inside, rows, ROW: tl.constexpr, LOW: tl.constexpr):
    """A sum of windows, or of ranks; fp64. ``ROW``, ``LOW``: as for :func:`_store_wide`, in a rank's partial."""
    value = tl.load(column + here, mask=inside, other=0.0).to(tl.float64)
    if LOW > 0:
        second = column + (LOW - (1 if ROW == 1 else 2)) * rows
        value += tl.load(second + here, mask=inside, other=0.0).to(tl.float64)
    return value


@triton.jit
def _store_wide(value, here, stride, valid, ROW: tl.constexpr, LOW: tl.constexpr):
    """Store a sum in the row ``ROW`` of a partial, and its second row. ``LOW``: the second row of ``sum_exp``, row 1;
    those of the requested columns, from row 3 on, follow it. 0: there are none. Returns the first."""
    rounded = value.to(tl.float32)
    tl.store(here + ROW * stride, rounded, mask=valid)
    if LOW > 0:
        second = here + (ROW + LOW - (1 if ROW == 1 else 2)) * stride
        rest = tl.where(tl.abs(rounded) == float("inf"), 0.0, value - rounded.to(tl.float64))
        tl.store(second, rest.to(tl.float32), mask=valid)
    return rounded


@triton.jit
def _shards(trailers, ranks, stride, vocab_size, BLOCK_W: tl.constexpr):
    """Number of real entries of each rank's shard; whether the trailers match
    (:func:`parallel_lce.core.partials.matching`)."""
    p = tl.arange(0, BLOCK_W)
    here = trailers + p.to(tl.int64) * stride
    starts = tl.load(here, mask=p < ranks, other=0).to(tl.int64)
    sizes = tl.load(here + 1, mask=p < ranks, other=0).to(tl.int64)
    real = sizes
    if vocab_size is not None:
        real = tl.minimum(tl.maximum(vocab_size - starts, 0), sizes)
    # Every shard that is not empty must begin where the shards before it end.
    before = starts[None, :] < starts[:, None]
    before |= (starts[None, :] == starts[:, None]) & (p[None, :] < p[:, None])
    begin = tl.sum(tl.where(before, sizes[None, :], 0), 1)
    others = (tl.load(here + 2, mask=p < ranks, other=0) != tl.load(trailers + 2)) & (p < ranks)
    matching = tl.sum((((begin != starts) & (sizes > 0)) | others).to(tl.int32), 0) == 0
    if vocab_size is not None:
        matching &= tl.sum(sizes, 0) >= vocab_size
    return real, matching


@triton.jit
def _rounding_of(z, rounded):
    """What the saved exp(z) is, divided by exp(z)."""
    if rounded.sums.dtype.element_ty == tl.float64:
        return 1.0
    else:
        exact = power_from(tl.maximum(z, _LEAST), LOG2_E, 0.0)
        return exact.to(tl.bfloat16).to(tl.float64) / exact


@triton.jit
def _mass(others, rounded, sum_exp, is_plain):
    """``RoundedSums.mass`` from the sums of the saved exponentials without the target's, and of these rounded."""
    ratio = (others / rounded).to(tl.float32)
    # A difference of nearly equal sums may be anything. The sum of a confident token is its largest entry's, whose
    # rounding must not move the others.
    ratio = tl.minimum(tl.maximum(ratio, 1.0 - 2.0**-8), 1.0 + 2.0**-8)
    ratio = tl.where((others > 0.0) & (rounded > 0.0) & (sum_exp >= _ONE_LARGE_ENTRY), ratio, 1.0)
    return tl.where(is_plain, ratio, 0.0)


def _merge_name(specialization) -> str:
    return "lce_forward_merge_ranks" if specialization.constants["RANKS"] else "lce_forward_merge_windows"


# Triton turns an integer argument of 1 into a constant, which has no `to`.
@Relaunched
@triton.jit(do_not_specialize=["rows", "num_slices", "stride", "entries", "start"], repr=_merge_name)
def _merge_kernel(
    slices,
    merged,
    rounded,
    targets,
    trailers,
    vocab_size,
    results,
    rows,
    merged_stride,
    num_slices,
    stride,
    entries,
    start,
    RANKS: tl.constexpr,
    RESULTS: tl.constexpr,
    SHIFTED: tl.constexpr,
    TOTAL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SQUARED: tl.constexpr,
    ARGMAX: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Merge slices of the vocabulary: the windows of a shard, or the shards of the ranks.

    ``stride``: elements between the columns of neighbouring slices. ``merged``: a partial whose rows are
    ``merged_stride`` elements apart. ``SHIFTED`` to ``ARGMAX``: its ``Columns.rows``; ``LOW``: of a rank's partial, the
    result of windows or a slice of the ranks, as for :func:`_store_wide`.
    Windows: ``entries`` and ``start`` describe the shard; ``merged`` holds the logits of the ``targets``, ids relative
    to the shard; ``rounded``: a ``RoundedSums``, or None. Ranks: ``entries`` is V, or None; ``vocab_size`` is an
    output; all ranks fit one tile (``BLOCK_W >= num_slices``).

    ``RESULTS``: "loss" or "statistics" of the merged tokens, which fill ``results``; "": nothing is made of them.
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = r < rows
    # Sums over slices are tiles until the end: a reduction in the loop would stop all warps.
    tops = tl.full((BLOCK_W, BLOCK_R), -float("inf"), tl.float32)
    any_nan = tl.zeros((BLOCK_W, BLOCK_R), tl.int32)
    for first in range(0, num_slices, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        inside = (w < num_slices)[:, None] & valid[None, :]
        m = tl.load(slices.max + _offsets(w, stride, r), mask=inside, other=-float("inf"))
        any_nan |= (m != m).to(tl.int32)
        tops = tl.maximum(tops, tl.where(m != m, -float("inf"), m))
    top, broken = tl.max(tops, 0), tl.max(any_nan, 0)
    base = finite_base(top)
    slope, common = slope_and_reference(top)
    own = at_max(base, slope, common)
    off_zero = tl.zeros((BLOCK_W, BLOCK_R), tl.int32)
    sum_exp = tl.zeros((BLOCK_W, BLOCK_R), tl.float64)
    target = tl.zeros((BLOCK_W, BLOCK_R), tl.float32)
    total = tl.zeros((BLOCK_W, BLOCK_R), tl.float64)
    shifted = tl.zeros((BLOCK_W, BLOCK_R), tl.float64)
    weighted = tl.zeros((BLOCK_W, BLOCK_R), tl.float64)
    squared = tl.zeros((BLOCK_W, BLOCK_R), tl.float64)
    saved_sum = tl.zeros((BLOCK_W, BLOCK_R), tl.float64)
    rounded_sum = tl.zeros((BLOCK_W, BLOCK_R), tl.float64)
    argmax = tl.full((BLOCK_W, BLOCK_R), _NO_ENTRY, tl.int32)
    target_id = tl.full((BLOCK_R,), -1, tl.int64)
    if targets is not None:
        target_id = tl.load(targets + r, mask=valid, other=-1)
    count = entries
    nan = 0.0
    READ: tl.constexpr = LOW if RANKS else 0
    STORED: tl.constexpr = 0 if RANKS else LOW
    if RANKS:
        real, matching = _shards(trailers, num_slices, stride, entries, BLOCK_W)
        count = tl.sum(real, 0)
        nan = tl.where(matching, 0.0, float("nan"))
        if tl.program_id(0) == 0:
            tl.store(vocab_size, count)
    # Sums are added in the scale of the largest logit.
    for first in range(0, num_slices, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        inside = (w < num_slices)[:, None] & valid[None, :]
        here = _offsets(w, stride, r)
        m = tl.load(slices.max + here, mask=inside, other=-float("inf"))
        s = _wide(slices.sum_exp, here, inside, rows, 1, READ)
        missing = m == -float("inf")
        its_slope, reference = slope_and_reference(m)
        factor = tl.exp2(at_max(base[None, :], its_slope, reference) - own[None, :]).to(tl.float64)
        if RANKS:
            factor *= largest_of(m).to(tl.float64)
        else:
            off_zero |= (inside & (reference != 0.0)).to(tl.int32)
        # A slice of only -inf adds nothing. If it also has NaN, its sum is NaN and must reach the result.
        factor = tl.where(missing & (s == 0.0), 0.0, factor)
        sum_exp += s * factor
        if rounded is not None:
            is_saved = inside & (w * rounded.width < rounded.saved)[:, None]
            saved_sum += tl.where(is_saved, s * factor, 0.0)
            its_rounded = tl.load(rounded.sums + here, mask=is_saved, other=0.0).to(tl.float64)
            rounded_sum += tl.where(is_saved, its_rounded * factor, 0.0)
        if slices.target is not None:
            target += tl.load(slices.target + here, mask=inside, other=0.0)
        if slices.shifted is not None:
            column = _wide(slices.shifted, here, inside, rows, SHIFTED, READ)
            shifted += tl.where(inside, column + real.to(tl.float64)[:, None] * finite_base(m), 0.0)
        if slices.total is not None:
            total += _wide(slices.total, here, inside, rows, TOTAL, READ)
        if slices.weighted is not None:
            column = _wide(slices.weighted, here, inside, rows, WEIGHTED, READ)
            # Far below the maximum the factor is 0. The bound keeps the other operand finite.
            below_max = tl.where(missing, 0.0, tl.maximum(m.to(tl.float64) - base[None, :], LOWEST_SHIFT))
            weighted += (column + s * below_max) * factor
        if slices.squared is not None:
            squared += _wide(slices.squared, here, inside, rows, SQUARED, READ) * factor * factor
        if slices.argmax is not None:
            ids = tl.load(slices.argmax + here, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            ids = tl.where(inside & (m == top[None, :]) & (ids != _NO_ENTRY), ids + start, _NO_ENTRY)
            argmax = tl.minimum(argmax, ids)
    to_max = 1.0 / largest_of(top).to(tl.float64)
    sum_exp = tl.sum(sum_exp, 0) * to_max
    target, total, shifted = tl.sum(target, 0), tl.sum(total, 0), tl.sum(shifted, 0)
    weighted, squared = tl.sum(weighted, 0), tl.sum(squared, 0)
    broken = broken != 0
    here = merged + r
    largest = top
    top = tl.where(broken, float("nan"), top) + nan
    tl.store(here, top, mask=valid)
    exp_sum = _store_wide(sum_exp + nan, here, merged_stride, valid, 1, STORED)
    if RANKS:
        target += nan
        tl.store(here + 2 * merged_stride, target, mask=valid)
    elif targets is not None:
        hit = (target_id >= 0) & (target_id < entries)
        target = tl.load(here + 2 * merged_stride, mask=hit, other=0.0)
        target = tl.where(hit, exact_logit(target, largest, exp_sum), 0.0)
        tl.store(here + 2 * merged_stride, target, mask=hit)
    # Each is read only where its column exists.
    below_max, sum_of_logits, below, squares = top, top, top, top
    if SHIFTED > 0:
        # Windows have the sum of the logits alone.
        value = (shifted if RANKS else total) - count * base.to(tl.float64) + nan
        below_max = _store_wide(value, here, merged_stride, valid, SHIFTED, STORED)
    if TOTAL > 0:
        sum_of_logits = _store_wide(total + nan, here, merged_stride, valid, TOTAL, STORED)
    if WEIGHTED > 0:
        below = _store_wide(weighted * to_max + nan, here, merged_stride, valid, WEIGHTED, STORED)
    if SQUARED > 0:
        squares = _store_wide(squared * to_max * to_max + nan, here, merged_stride, valid, SQUARED, STORED)
    if ARGMAX > 0:
        argmax = tl.where(broken, _NO_ENTRY, tl.min(argmax, 0))
        if RANKS:
            argmax = tl.where(matching, argmax, _NO_ENTRY)
        tl.store(here + ARGMAX * merged_stride, argmax.to(tl.float32, bitcast=True), mask=valid)
    if RESULTS != "":
        token = (r, valid, target_id + (0 if RANKS else start))
        if RESULTS == "loss":
            store_losses(results, token, (top, exp_sum, target, below_max), count)
        else:
            sums = (below_max, sum_of_logits, below, squares)
            store_statistics(results, token, (top, exp_sum, target, argmax), sums, count)
    if rounded is not None:
        others, others_rounded = tl.sum(saved_sum, 0) * to_max, tl.sum(rounded_sum, 0) * to_max
        is_plain = tl.max(off_zero, 0) == 0
        if targets is not None:
            z = tl.where(hit & (target_id < rounded.saved), target, -float("inf"))
            e = exponential(z - base).to(tl.float64)
            others -= e
            others_rounded -= e * _rounding_of(z, rounded)
        tl.store(rounded.mass + r, _mass(others, others_rounded, sum_exp, is_plain), mask=valid)


def merge_windows(
    windows: PartialColumns,
    merged: torch.Tensor,
    columns: Columns,
    *,
    entries: int,
    start: int,
    rounded: RoundedSums | None = None,
    target: torch.Tensor | None = None,
    results: Results | None = None,
) -> None:
    """Merge partials ``[windows, R]`` into all columns of ``merged [C, R]`` but the target's. ``entries``: of the
    shard. ``start``: global id of its first entry.

    ``target [R]`` int64, relative to the shard: its column already holds logits. A target that can only be its token's
    maximum gets the maximum as its logit (:func:`parallel_lce.kernels.arithmetic.exact_logit`). ``results``: formed of
    the merged tokens, if the shard is the whole vocabulary."""
    num_windows, rows = windows.max.shape
    _merge_kernel.launch(
        (-(-rows // _MERGE_ROWS),),
        windows,
        merged,
        rounded,
        target,
        None,
        None,
        None if results is None else results.outputs,
        rows,
        merged.stride(0),
        num_windows,
        rows,
        entries,
        start,
        RANKS=False,
        RESULTS="" if results is None else results.kind,
        **columns.rows,
        LOW=columns.merged if columns.low else 0,
        BLOCK_R=_MERGE_ROWS,
        BLOCK_W=_MERGE_WINDOWS,
        num_warps=8,
    )


def merge_ranks(
    packed: torch.Tensor, columns: Columns, rows: int, vocab_size: int | None, results: Results | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`parallel_lce.core.partials.merge_ranks` of ``packed [P, M]`` fp32, contiguous, and the ``results``."""
    ranks, stride = packed.shape
    merged, size = packed.new_empty(columns.merged, rows), packed.new_empty((), dtype=torch.int64)
    # Views of the first rank's columns. The kernel adds rank * stride to their pointers.
    own = packed[0, : columns.count * rows].view(columns.count, rows).unbind(0)
    slices = PartialColumns(*own[:3], *[own[row] if row else None for row in columns.rows.values()])
    block_w = next_power_of_2(ranks)
    block_r = max(16, min(_RANKS_ROWS, _RANKS_TILE // block_w))
    with on_device_of(packed):
        _merge_kernel.launch(
            (max(1, -(-rows // block_r)),),  # at least one program: it writes V
            slices,
            merged,
            None,
            None if results is None else results.target,
            packed.view(torch.int32)[0, -TRAILER:],
            size,
            None if results is None else results.outputs,
            rows,
            rows,
            ranks,
            stride,
            vocab_size,
            0,
            RANKS=True,
            RESULTS="" if results is None else results.kind,
            **columns.rows,
            LOW=columns.merged if columns.low else 0,
            BLOCK_R=block_r,
            BLOCK_W=block_w,
        )
    return merged, size
