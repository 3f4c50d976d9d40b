"""Partials on the GPU: the softmax statistics of a tile's tokens, and the merge of partials.

``parallel_lce.core.partials`` has the algebra in plain torch. A *window* is the vocabulary range of one tile. Each
window stores one partial per token. One kernel merges the windows of a rank, and the partials of the ranks.

A window's sums of exponentials are relative to ``arithmetic.window_shift`` or, without a softmax shift, to the window's
maximum. Sums of a merged partial are relative to its maximum. Offsets into ``[windows, tokens]`` are 64-bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.memory import on_device_of
from parallel_lce.core.partials import NOBODY, TRAILER
from parallel_lce.kernels.arithmetic import LOWEST_SHIFT, exact_logit, exponential_from, finite_base, window_shift
from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2

# Sentinel: no argmax, since a logit is NaN or the trailers do not match.
_NOBODY = tl.constexpr(NOBODY)
# Merge of windows: tokens per program (whole 64-byte sectors, and enough programs for few tokens), windows per step.
_MERGE_ROWS, _MERGE_WINDOWS = 16, 128
# Merge of ranks: most elements of a tile, and most tokens of a tile.
_RANKS_TILE, _RANKS_ROWS = 1024, 128


class PartialColumns(NamedTuple):
    """The columns of ``parallel_lce.core.partials``, one tensor each, tokens last. None: absent. ``argmax`` is a
    bit-cast integer."""

    max: torch.Tensor
    sum_exp: torch.Tensor
    target: torch.Tensor | None
    shifted: torch.Tensor | None
    total: torch.Tensor | None
    weighted: torch.Tensor | None
    squared: torch.Tensor | None
    argmax: torch.Tensor | None


class WindowPartials(NamedTuple):
    """Maxima and sums of exponentials of the forward's windows, ``[windows, R]`` fp32 each."""

    max: torch.Tensor
    sum_exp: torch.Tensor
    # [R] fp32, or None
    softmax_shift: torch.Tensor | None

    def of_rows(self, rows: slice) -> WindowPartials:
        shift = self.softmax_shift
        return WindowPartials(self.max[:, rows], self.sum_exp[:, rows], shift if shift is None else shift[rows])


@triton.jit
def store_partials(z, position, shift, partials, MASKED: tl.constexpr, HAS_SHIFT: tl.constexpr):
    """Store the ``partials [windows, rows]`` of the logits ``z [BLOCK_M, BLOCK_N]``. Returns their exponentials.

    ``position``: as in :func:`parallel_lce.kernels.epilogue.finish_tile`. ``shift``: the tokens' softmax shift, if
    ``HAS_SHIFT``. ``MASKED``: the tile may have columns beyond the last vocabulary entry.
    """
    r, c, window, rows, entries = position
    valid = r < rows
    inside = (c < entries)[None, :]
    here = window.to(tl.int64) * rows + r
    if partials.total is not None:
        tl.store(partials.total + here, tl.sum(tl.where(inside, z, 0.0), 1), mask=valid)
    if MASKED:
        z = tl.where(inside, z, -float("inf"))
    top = tl.max(z, 1)
    base = finite_base(top)
    tl.store(partials.max + here, top, mask=valid)
    if partials.argmax is not None:
        ids = tl.min(tl.where(z == top[:, None], c[None, :], _NOBODY), 1)
        tl.store(partials.argmax + here, ids.to(tl.float32, bitcast=True), mask=valid)
    if partials.shifted is not None:
        shifted = tl.where(inside, z - base[:, None], 0.0)
        tl.store(partials.shifted + here, tl.sum(shifted, 1), mask=valid)
    reference = base
    if HAS_SHIFT:
        reference = window_shift(top, shift)
    # tl.max ignores NaN. exp(NaN) makes the sum NaN, which the merge detects.
    e = exponential_from(z, reference[:, None])
    tl.store(partials.sum_exp + here, tl.sum(e, 1), mask=valid)
    if partials.weighted is not None:
        weighted = e * tl.maximum(z - base[:, None], LOWEST_SHIFT)
        tl.store(partials.weighted + here, tl.sum(weighted, 1), mask=valid)
    if partials.squared is not None:
        tl.store(partials.squared + here, tl.sum(e * e, 1), mask=valid)
    return e


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


def _merge_name(specialization) -> str:
    return "lce_forward_merge_ranks" if specialization.constants["RANKS"] else "lce_forward_merge_windows"


# Triton turns an integer argument of 1 into a constant, which has no `to`.
@Relaunched
@triton.jit(do_not_specialize=["rows", "num_slices", "entries", "start"], repr=_merge_name)
def _merge_kernel(
    slices,
    merged,
    softmax_shift,
    on_shift,
    wanted,
    trailers,
    vocab_size,
    rows,
    num_slices,
    stride,
    entries,
    start,
    RANKS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Merge slices of the vocabulary: windows of ``WINDOW`` entries, or the shards of the ranks.

    ``stride``: elements between the columns of neighbouring slices. Windows: ``entries`` and ``start`` describe the
    shard; ``wanted`` holds the targets, and ``merged`` their logits. Ranks: ``entries`` is V, or None; ``vocab_size``
    is an output; all ranks fit one tile (``BLOCK_W >= num_slices``).
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = r < rows
    top = tl.full((BLOCK_R,), -float("inf"), tl.float32)
    broken = tl.zeros((BLOCK_R,), tl.int32)
    for first in range(0, num_slices, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        inside = (w < num_slices)[:, None] & valid[None, :]
        here = w.to(tl.int64)[:, None] * stride + r[None, :]
        m = tl.load(slices.max + here, mask=inside, other=-float("inf"))
        broken = tl.maximum(broken, tl.max((m != m).to(tl.int32), 0))
        top = tl.maximum(top, tl.max(tl.where(m != m, -float("inf"), m), 0))
    base = finite_base(top)
    shift = base
    if softmax_shift is not None:
        shift = tl.load(softmax_shift + r, mask=valid, other=0.0)
    off_shift = tl.zeros((BLOCK_R,), tl.int32)
    sum_exp = tl.zeros((BLOCK_R,), tl.float32)
    target = tl.zeros((BLOCK_R,), tl.float32)
    shifted = tl.zeros((BLOCK_R,), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    weighted = tl.zeros((BLOCK_R,), tl.float32)
    squared = tl.zeros((BLOCK_R,), tl.float32)
    argmax = tl.full((BLOCK_R,), _NOBODY, tl.int32)
    nan = 0.0
    if RANKS:
        real, matching = _shards(trailers, num_slices, stride, entries, BLOCK_W)
        nan = tl.where(matching, 0.0, float("nan"))
        if tl.program_id(0) == 0:
            tl.store(vocab_size, tl.sum(real, 0))
    # Windows whose maximum is the token's: the exponential of that maximum, and the number of these windows.
    largest = exponential_from(top, base)
    if softmax_shift is not None:
        largest = exponential_from(top, window_shift(top, shift))
    number = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, num_slices, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        inside = (w < num_slices)[:, None] & valid[None, :]
        here = w.to(tl.int64)[:, None] * stride + r[None, :]
        m = tl.load(slices.max + here, mask=inside, other=-float("inf"))
        s = tl.load(slices.sum_exp + here, mask=inside, other=0.0)
        missing = m == -float("inf")
        moved = tl.where(missing, 0.0, m - base[None, :])
        if RANKS:
            count = real.to(tl.float32)
            factor = tl.exp(moved)
        else:
            count = tl.minimum(entries - w * WINDOW, WINDOW).to(tl.float32)
            reference = finite_base(m)
            if softmax_shift is not None:
                reference = window_shift(m, shift[None, :])
                off_shift = tl.maximum(off_shift, tl.max((inside & (reference != shift[None, :])).to(tl.int32), 0))
            factor = exponential_from(reference, base[None, :])
        # A slice of only -inf adds nothing. If it also has NaN, its sum is NaN and must reach the result.
        factor = tl.where(missing & (s == 0.0), 0.0, factor)
        if not RANKS:
            # The largest exponentials are added last: small terms, added to them one by one, would be rounded away.
            highest = (m == top[None, :]) & (missing == 0)
            s = tl.where(highest, s - largest[None, :], s)
            number += tl.sum(highest.to(tl.float32), 0)
        sum_exp += tl.sum(s * factor, 0)
        if slices.target is not None:
            target += tl.sum(tl.load(slices.target + here, mask=inside, other=0.0), 0)
        if slices.shifted is not None:
            column = tl.load(slices.shifted + here, mask=inside, other=0.0)
            shifted += tl.sum(tl.where(inside, column + count[:, None] * moved, 0.0), 0)
        if slices.total is not None:
            total += tl.sum(tl.load(slices.total + here, mask=inside, other=0.0), 0)
        if slices.weighted is not None:
            column = tl.load(slices.weighted + here, mask=inside, other=0.0)
            # Far below the maximum the factor is 0. The bound keeps the other operand finite.
            weighted += tl.sum((column + s * tl.maximum(moved, LOWEST_SHIFT)) * factor, 0)
        if slices.squared is not None:
            column = tl.load(slices.squared + here, mask=inside, other=0.0)
            if not RANKS:
                column = tl.where(highest, column - (largest * largest)[None, :], column)
            squared += tl.sum(column * factor * factor, 0)
        if slices.argmax is not None:
            ids = tl.load(slices.argmax + here, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            ids = tl.where(inside & (m == top[None, :]) & (ids != _NOBODY), ids + start, _NOBODY)
            argmax = tl.minimum(argmax, tl.min(ids, 0))
    # Relative to the maximum, each of the largest exponentials is 1.
    sum_exp += number
    squared += number
    # A window's maximum ignores a NaN logit, but the window's sum is NaN.
    broken = (broken != 0) | ((sum_exp != sum_exp) & (top != float("inf")))
    tl.store(merged.max + r, tl.where(broken, float("nan"), top) + nan, mask=valid)
    tl.store(merged.sum_exp + r, sum_exp + nan, mask=valid)
    if wanted is not None:
        target_id = tl.load(wanted + r, mask=valid, other=-1)
        valid_target = (target_id >= 0) & (target_id < entries)
        logit = tl.load(merged.target + r, mask=valid_target, other=0.0)
        tl.store(merged.target + r, exact_logit(logit, top, sum_exp), mask=valid_target)
    if slices.target is not None:
        tl.store(merged.target + r, target + nan, mask=valid)
    if slices.shifted is not None:
        tl.store(merged.shifted + r, shifted + nan, mask=valid)
    if slices.total is not None:
        tl.store(merged.total + r, total + nan, mask=valid)
    if slices.weighted is not None:
        tl.store(merged.weighted + r, weighted + nan, mask=valid)
    if slices.squared is not None:
        tl.store(merged.squared + r, squared + nan, mask=valid)
    if slices.argmax is not None:
        argmax = tl.where(broken, _NOBODY, argmax)
        if RANKS:
            argmax = tl.where(matching, argmax, _NOBODY)
        tl.store(merged.argmax + r, argmax.to(tl.float32, bitcast=True), mask=valid)
    if softmax_shift is not None:
        tl.store(on_shift + r, (off_shift == 0).to(tl.uint8), mask=valid)


@functools.cache
def _column_indices(columns) -> list[int | None]:
    """The row of each of the ``PartialColumns`` in a partial; None: absent."""
    names = columns.names
    return [names.index(name) if name in names else None for name in PartialColumns._fields]


def columns_of(partial: torch.Tensor, columns) -> PartialColumns:
    """The columns of a ``partial [C, R]``. ``columns``: ``parallel_lce.core.partials.Columns``."""
    rows = partial.unbind(0)
    return PartialColumns(*[None if row is None else rows[row] for row in _column_indices(columns)])


def merge_windows(
    windows: PartialColumns,
    merged: torch.Tensor,
    softmax_shift: torch.Tensor | None,
    columns,
    *,
    target: torch.Tensor | None = None,
    window: int,
    entries: int,
    start: int,
) -> torch.Tensor | None:
    """Merge partials ``[windows, R]`` into all columns of ``merged [C, R]`` but the target's.

    With ``target [R]`` int64 the target's column already holds logits. A target that can only be its token's maximum
    gets the maximum as its logit (:func:`parallel_lce.kernels.arithmetic.exact_logit`).

    ``window``: entries of a window. ``entries``: of the shard. ``start``: global id of its first entry. Returns
    ``on_shift [R]`` uint8: whether all windows of a token are relative to its ``softmax_shift [R]`` fp32. Without a
    softmax shift returns None.
    """
    num_windows, rows = windows.max.shape
    on_shift = None if softmax_shift is None else torch.empty_like(softmax_shift, dtype=torch.uint8)
    _merge_kernel.launch(
        (-(-rows // _MERGE_ROWS),),
        windows,
        columns_of(merged, columns),
        softmax_shift,
        on_shift,
        target,
        None,
        None,
        rows,
        num_windows,
        rows,
        entries,
        start,
        RANKS=False,
        WINDOW=window,
        BLOCK_R=_MERGE_ROWS,
        BLOCK_W=_MERGE_WINDOWS,
    )
    return on_shift


def merge_ranks(packed: torch.Tensor, columns, rows: int, vocab_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`parallel_lce.core.partials.merge_ranks` of ``packed [P, M]`` fp32, contiguous."""
    merged = packed.new_empty(columns.count, rows)
    size = packed.new_empty((), dtype=torch.int64)
    ranks, stride = packed.shape
    block_w = next_power_of_2(ranks)
    block_r = max(16, min(_RANKS_ROWS, _RANKS_TILE // block_w))
    # Views of the first rank's columns. The kernel adds rank * stride to their pointers.
    own = packed[0, : columns.count * rows].view(columns.count, rows)
    trailers = packed.view(torch.int32)[0, -TRAILER:]
    with on_device_of(packed):
        # At least one program: it writes V.
        _merge_kernel.launch(
            (max(1, -(-rows // block_r)),),
            columns_of(own, columns),
            columns_of(merged, columns),
            None,
            None,
            None,
            trailers,
            size,
            rows,
            ranks,
            stride,
            vocab_size,
            0,
            RANKS=True,
            WINDOW=1,
            BLOCK_R=block_r,
            BLOCK_W=block_w,
        )
    return merged, size
