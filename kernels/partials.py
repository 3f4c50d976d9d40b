"""Merging partials of windows and of ranks, and logits that exist already: their partials in one read,
their gradient in one read and one write.

One program takes its rows and walks their windows, ranks or columns, so that no program waits for another
and every result has one writer. Rows are addressed in int64: N * V passes 2^31 in ordinary use.
The plain torch of merging is ``parallel_lce.partials``, that of the others ``parallel_lce.backends.logits``.
"""

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.epilogues import REACH, finite_base, rebased, window_reference
from parallel_lce.kernels.launch import Relaunched, cdiv, next_power_of_2

_BLOCK = 4096
# Rows and windows of a merge's tile: whole 64-byte sectors, and enough programs for few tokens.
_MERGE_ROWS, _MERGE_WINDOWS = 16, 128
# Tokens of a program that merges ranks.
_RANKS_ROWS = 128
_INT_MAX = tl.constexpr(2**31 - 1)


# An argument of 1 would become a Python number, which has no `to`.
@Relaunched
@triton.jit(do_not_specialize=["rows", "windows"])
def _merge_kernel(
    maxima,
    sums,
    common,
    merged,
    agreed,
    rows,
    windows,
    entries,
    start,
    REACH: tl.constexpr,
    SHIFTED: tl.constexpr,
    TOTAL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ARGMAX: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = r < rows
    step = windows.to(tl.int64) * rows
    top = tl.full((BLOCK_R,), -float("inf"), tl.float32)
    for first in range(0, windows, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        inside = (w < windows)[:, None] & valid[None, :]
        here = w.to(tl.int64)[:, None] * rows + r[None, :]
        top = tl.maximum(top, tl.max(tl.load(maxima + here, mask=inside, other=-float("inf")), 0))
    base = finite_base(top)
    known = tl.zeros((BLOCK_R,), tl.float32)
    if REACH >= 0:
        known = tl.load(common + r, mask=valid, other=0.0)
    sum_exp = tl.zeros((BLOCK_R,), tl.float32)
    shifted = tl.zeros((BLOCK_R,), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    weighted = tl.zeros((BLOCK_R,), tl.float32)
    strangers = tl.zeros((BLOCK_R,), tl.int32)
    index = tl.full((BLOCK_R,), _INT_MAX, tl.int32)
    for first in range(0, windows, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        inside = (w < windows)[:, None] & valid[None, :]
        here = w.to(tl.int64)[:, None] * rows + r[None, :]
        m = tl.load(maxima + here, mask=inside, other=-float("inf"))
        s = tl.load(sums + here, mask=inside, other=0.0)
        reference = window_reference(m, known[None, :], REACH)
        strangers += tl.sum((inside & (reference != known[None, :])).to(tl.int32), 0)
        missing = m == -float("inf")
        shift = tl.where(missing, 0.0, m - base[None, :])
        # A window of -inf alone has nothing to rescale, but NaN beside -inf must get through.
        factor = tl.where(missing & (s == 0.0), 0.0, rebased(reference, base[None, :]))
        sum_exp += tl.sum(s * factor, 0)
        if SHIFTED:
            count = tl.minimum(entries - w * WINDOW, WINDOW).to(tl.float32)
            zs = tl.load(sums + step + here, mask=inside, other=0.0)
            shifted += tl.sum(tl.where(inside, zs + count[:, None] * shift, 0.0), 0)
        if TOTAL:
            total += tl.sum(tl.load(sums + (1 + SHIFTED) * step + here, mask=inside, other=0.0), 0)
        if WEIGHTED:
            ez = tl.load(sums + (1 + SHIFTED + TOTAL) * step + here, mask=inside, other=0.0)
            weighted += tl.sum((ez + s * shift) * factor, 0)
        if ARGMAX:
            place = sums + (1 + SHIFTED + TOTAL + WEIGHTED) * step + here
            ids = tl.load(place, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            ids = tl.where(inside & (m == top[None, :]) & (ids != _INT_MAX), ids + start, _INT_MAX)
            index = tl.minimum(index, tl.min(ids, 0))
    # tl.max drops NaN; the sum has kept it.
    broken = (sum_exp != sum_exp) & (top != float("inf"))
    top = tl.where(broken, float("nan"), top)
    tl.store(merged + r, top, mask=valid)
    tl.store(merged + rows + r, sum_exp, mask=valid)
    if SHIFTED:
        tl.store(merged + 3 * rows + r, shifted, mask=valid)
    if TOTAL:
        tl.store(merged + (3 + SHIFTED) * rows + r, total, mask=valid)
    if WEIGHTED:
        tl.store(merged + (3 + SHIFTED + TOTAL) * rows + r, weighted, mask=valid)
    if ARGMAX:
        index = tl.where(broken, _INT_MAX, index)
        place = merged + (3 + SHIFTED + TOTAL + WEIGHTED) * rows + r
        tl.store(place, index.to(tl.float32, bitcast=True), mask=valid)
    if REACH >= 0:
        tl.store(agreed + r, (strangers == 0).to(tl.uint8), mask=valid)


def merge_windows(
    maxima: torch.Tensor,
    sums: torch.Tensor,
    merged: torch.Tensor,
    common: torch.Tensor | None,
    *,
    window: int,
    entries: int,
    start: int,
    shifted: bool,
    total: bool,
    weighted: bool,
    argmax: bool,
) -> torch.Tensor | None:
    """Merge what ``projection.window_partials`` gave into ``merged [C, R]``.

    All columns of ``parallel_lce.partials.Columns`` but the target's, which is the caller's. Windows
    of ``window`` columns, of ``entries`` in all; ``start``: global id of the first. Returns
    ``agreed [R]`` uint8: whether all of a token's windows are relative to ``common``; None without
    ``common``.
    """
    windows, rows = maxima.shape
    agreed = None if common is None else torch.empty_like(common, dtype=torch.uint8)
    _merge_kernel[(cdiv(rows, _MERGE_ROWS),)](
        maxima,
        sums,
        common,
        merged,
        agreed,
        rows,
        windows,
        entries,
        start,
        REACH=-1.0 if common is None else REACH,
        SHIFTED=shifted,
        TOTAL=total,
        WEIGHTED=weighted,
        ARGMAX=argmax,
        WINDOW=window,
        BLOCK_R=_MERGE_ROWS,
        BLOCK_W=_MERGE_WINDOWS,
    )
    return agreed


@Relaunched
@triton.jit(do_not_specialize=["rows", "ranks", "vocab_size"])
def _ranks_kernel(
    messages,
    bounds,
    merged,
    size,
    rows,
    ranks,
    stride,
    vocab_size,
    BOUNDED: tl.constexpr,
    SHIFTED: tl.constexpr,
    TOTAL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ARGMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    COLUMNS: tl.constexpr = 3 + SHIFTED + TOTAL + WEIGHTED
    p = tl.arange(0, BLOCK_P)
    ends = bounds + p.to(tl.int64) * stride + (COLUMNS + ARGMAX) * rows
    starts = tl.load(ends, mask=p < ranks, other=0).to(tl.int64)
    sizes = tl.load(ends + 1, mask=p < ranks, other=0).to(tl.int64)
    real = sizes
    if BOUNDED:
        real = tl.minimum(tl.maximum(vocab_size - starts, 0), sizes)
    # Each shard that is not empty must begin where those before it end.
    before = starts[None, :] < starts[:, None]
    before |= (starts[None, :] == starts[:, None]) & (p[None, :] < p[:, None])
    begin = tl.sum(tl.where(before, sizes[None, :], 0), 1)
    misplaced = tl.sum(((begin != starts) & (sizes > 0)).to(tl.int32), 0)
    covered = misplaced == 0
    if BOUNDED:
        covered &= tl.sum(sizes, 0) >= vocab_size
    if tl.program_id(0) == 0:
        tl.store(size, tl.sum(real, 0))

    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = r < rows
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    here = messages + r
    for _ in range(0, ranks):
        m = tl.load(here, mask=valid, other=-float("inf"))
        broken |= (m != m).to(tl.int32)
        top = tl.maximum(top, m)
        here += stride
    # tl.maximum drops NaN.
    top = tl.where(broken != 0, float("nan"), top)
    sum_exp = tl.zeros((BLOCK,), tl.float32)
    target = tl.zeros((BLOCK,), tl.float32)
    shifted = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    index = tl.full((BLOCK,), _INT_MAX, tl.int32)
    here = messages + r
    for rank in range(0, ranks):
        m = tl.load(here, mask=valid, other=-float("inf"))
        missing = m == -float("inf")
        # -inf - -inf is NaN: a shard without a finite maximum has nothing to rescale.
        shift = tl.where(missing, 0.0, m - top)
        factor = tl.where(missing, 0.0, tl.exp(shift))
        s = tl.load(here + rows, mask=valid, other=0.0)
        sum_exp += s * factor
        target += tl.load(here + 2 * rows, mask=valid, other=0.0)
        if SHIFTED:
            entries = tl.sum(tl.where(p == rank, real, 0), 0).to(tl.float32)
            shifted += tl.load(here + 3 * rows, mask=valid, other=0.0) + entries * shift
        if TOTAL:
            total += tl.load(here + (3 + SHIFTED) * rows, mask=valid, other=0.0)
        if WEIGHTED:
            moved = tl.load(here + (3 + SHIFTED + TOTAL) * rows, mask=valid, other=0.0)
            weighted += (moved + s * shift) * factor
        if ARGMAX:
            ids = tl.load(here + COLUMNS * rows, mask=valid, other=0.0).to(tl.int32, bitcast=True)
            index = tl.minimum(index, tl.where(m == top, ids, _INT_MAX))
        here += stride
    gap = tl.where(covered, 0.0, float("nan"))
    tl.store(merged + r, top + gap, mask=valid)
    tl.store(merged + rows + r, sum_exp + gap, mask=valid)
    tl.store(merged + 2 * rows + r, target + gap, mask=valid)
    if SHIFTED:
        tl.store(merged + 3 * rows + r, shifted + gap, mask=valid)
    if TOTAL:
        tl.store(merged + (3 + SHIFTED) * rows + r, total + gap, mask=valid)
    if WEIGHTED:
        tl.store(merged + (3 + SHIFTED + TOTAL) * rows + r, weighted + gap, mask=valid)
    if ARGMAX:
        index = tl.where(covered, index, _INT_MAX)
        tl.store(merged + COLUMNS * rows + r, index.to(tl.float32, bitcast=True), mask=valid)


def merge_messages(
    messages: torch.Tensor, columns, rows: int, vocab_size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`parallel_lce.partials.merge_messages` of ``messages [P, M]`` fp32, contiguous."""
    merged = messages.new_empty(columns.count, rows)
    size = messages.new_empty((), dtype=torch.int64)
    with torch.cuda.device_of(messages):  # Triton launches on the current device
        # At least one program, which tells V.
        _ranks_kernel[(max(1, cdiv(rows, _RANKS_ROWS)),)](
            messages,
            messages.view(torch.int32),
            merged,
            size,
            rows,
            messages.shape[0],
            messages.shape[1],
            0 if vocab_size is None else vocab_size,
            BOUNDED=vocab_size is not None,
            SHIFTED=columns.mean_log_prob,
            TOTAL=columns.mean_logit,
            WEIGHTED=columns.expected_logit,
            ARGMAX=columns.argmax,
            BLOCK=_RANKS_ROWS,
            BLOCK_P=next_power_of_2(messages.shape[0]),
        )
    return merged, size


@Relaunched
@triton.jit
def _partials_kernel(
    logits, target, partial, shifted, rows, columns, row_stride, start, SHIFTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    z_row = logits + row * row_stride
    wanted = tl.load(target + row) - start
    offsets = tl.arange(0, BLOCK)
    maximum = -float("inf")
    sum_exp = 0.0
    sum_shifted = 0.0
    hit = 0.0
    for first in range(0, columns, BLOCK):
        column = first + offsets
        valid = column < columns
        z = tl.load(z_row + column, mask=valid, other=-float("inf")).to(tl.float32)
        top = tl.maximum(maximum, tl.max(z, 0))
        # Nothing but -inf so far: shift by 0, since -inf - -inf is NaN.
        base = tl.where(top == -float("inf"), 0.0, top)
        moved = tl.where(maximum == -float("inf"), 0.0, maximum - base)
        # tl.max drops NaN; it comes back here, through its exponential.
        sum_exp = sum_exp * tl.exp(moved) + tl.sum(tl.exp(z - base), 0)
        if SHIFTED:
            sum_shifted += first * moved + tl.sum(tl.where(valid, z - base, 0.0), 0)
        # A target of the next shard may equal a column of the mask.
        hit += tl.sum(tl.where(valid & (column == wanted), z, 0.0), 0)
        maximum = top
    tl.store(partial + row, maximum)
    tl.store(partial + rows + row, sum_exp)
    tl.store(partial + 2 * rows + row, hit)
    if SHIFTED:
        tl.store(shifted + row, sum_shifted)


@Relaunched
@triton.jit
def _gradient_kernel(
    logits, target, maximum, scale, uniform, on_target, gradient, columns, row_stride, start, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < columns
    z = tl.load(logits + row * row_stride + column, mask=valid, other=-float("inf")).to(tl.float32)
    wanted = tl.load(target + row) - start
    g = tl.exp(z - tl.load(maximum + row)) * tl.load(scale + row) - tl.load(uniform + row)
    g -= tl.where(column == wanted, tl.load(on_target + row), 0.0)
    tl.store(gradient + row * columns + column, g.to(gradient.dtype.element_ty), mask=valid)


def logits_partial(
    logits: torch.Tensor, target: torch.Tensor, start: int, want_shifted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Partial ``[3, N]`` fp32 (max, sum of exponentials, target logit) of ``logits [N, K]``.

    ``target [N]`` int64 ids, of which those in ``[start, start + K)`` hit; bf16, fp16 or fp32
    logits, contiguous in K. ``want_shifted`` adds sum(z - max) ``[N]``.
    """
    assert logits.stride(1) == 1 and target.is_contiguous()
    rows, columns = logits.shape
    partial = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    shifted = torch.empty_like(partial[0]) if want_shifted else None
    if rows:
        _partials_kernel[(rows,)](
            logits,
            target,
            partial,
            shifted,
            rows,
            columns,
            logits.stride(0),
            start,
            SHIFTED=want_shifted,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return partial, shifted


def logits_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    start: int,
    maximum: torch.Tensor,
    scale: torch.Tensor,
    uniform: torch.Tensor,
    on_target: torch.Tensor,
) -> torch.Tensor:
    """``scale * exp(z - maximum) - uniform - on_target [j = target]``, ``[N, K]``, in logits' dtype.

    All per-row tensors are ``[N]`` fp32, contiguous.
    """
    per_row = (target, maximum, scale, uniform, on_target)
    assert logits.stride(1) == 1 and all(t.is_contiguous() for t in per_row)
    rows, columns = logits.shape
    gradient = torch.empty(rows, columns, dtype=logits.dtype, device=logits.device)
    if rows and columns:
        _gradient_kernel[(rows, cdiv(columns, _BLOCK))](
            logits,
            target,
            maximum,
            scale,
            uniform,
            on_target,
            gradient,
            columns,
            logits.stride(0),
            start,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return gradient
