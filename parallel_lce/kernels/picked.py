"""Logits of picked entries, and their gradients, without the other rows of the weight.

Token r of a block has the ids ``ids[begin[r]:end[r]]``, relative to the shard. Ids outside
``[0, entries)`` are skipped. The kernels move one row of the weight, or of the hidden states, per picked entry. They
are bound by memory bandwidth. The same functions in plain torch are in :mod:`parallel_lce.backends.torch_logits`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import add_product, exact_logit, finite_base, gradient_of_entry, largest_of
from parallel_lce.kernels.logit_map import entry_logits, scales_of, slope_of
from parallel_lce.kernels.partials import WindowPartials
from parallel_lce.kernels.product import Product
from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2
from parallel_lce.kernels.token_gradients import GradientTerms

# Entries per step, most hidden elements per step, and warps. Measured on an H200 with D=4096: logits and dX with 1, 8
# and 64 entries per token, dW with 8, where most rows are picked once. Logits are products of at least 16 rows.
_LOGITS = 16, 128, 1
_FOR_HIDDEN = 8, 512, 2
_FOR_WEIGHT = 4, 2048, 4
# Entries of one token that a program writes into G per step.
_WRITTEN = tl.constexpr(32)
# ids [E], begin [R] and end [R]
_Picked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _columns(ids, e, stop, first, entries):
    """``ids[e] - first`` of the picked entries e; -1 outside ``[0, entries)`` and from ``stop`` on."""
    column = tl.load(ids + e, mask=e < stop, other=-1) - first
    return tl.where((column >= 0) & (column < entries), column, -1)


@Relaunched
@triton.jit(do_not_specialize=["rows", "entries"])
def lce_forward_picked_logits(
    x,
    weight,
    bias,
    logit_map,
    windows,
    picked,
    logits,
    rows,
    entries,
    k_size,
    x_stride,
    weight_stride,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
):
    token = tl.program_id(0)
    ids, begin, end = picked
    maxima, sums = windows
    stop = tl.load(end + token)
    # The token's row, repeated: the smallest product has ENTRIES rows.
    lane = tl.arange(0, ENTRIES)
    x_rows = x + token.to(tl.int64) * x_stride + tl.zeros((ENTRIES,), tl.int64)[:, None]
    for first in range(tl.load(begin + token), stop, ENTRIES):
        e = first + lane
        entry_id = _columns(ids, e, stop, 0, entries)
        hit = entry_id >= 0
        weight_rows = weight + tl.where(hit, entry_id, 0)[:, None] * weight_stride
        z = tl.zeros((ENTRIES, ENTRIES), tl.float32)
        for k in range(0, k_size, BLOCK_K):
            c = (k + tl.arange(0, BLOCK_K))[None, :]
            a = tl.load(x_rows + c, mask=c < k_size, other=0.0)
            b = tl.load(weight_rows + c, mask=hit[:, None] & (c < k_size), other=0.0)
            z = add_product(a, b.T, z)
        logit = tl.sum(tl.where(lane[:, None] == 0, z, 0.0), 0)
        logit = entry_logits(logit, bias, entry_id, hit, logit_map, token, True)
        if maxima is not None:
            here = (entry_id // WINDOW) * rows + token
            top = tl.load(maxima + here, mask=hit, other=0.0)
            sum_exp = tl.load(sums + here, mask=hit, other=0.0) / largest_of(top)
            logit = exact_logit(logit, top, sum_exp.to(tl.float32))
        tl.store(logits + e, tl.where(hit, logit, 0.0), mask=e < stop)


@Relaunched
@triton.jit(do_not_specialize=["rows", "first", "slice_entries"])
def lce_backward_write_picked(gradient, picked, values, logits, target, terms, rows, slice_entries, stride, first):
    token = tl.program_id(0)
    ids, begin, end = picked
    coefficients, partial = terms.coefficients, terms.partial
    start, stop = tl.load(begin + token), tl.load(end + token)
    row = gradient + token.to(tl.int64) * stride
    fp16_scale = 1.0
    if terms.fp16_scale is not None:
        fp16_scale = tl.load(terms.fp16_scale)
    grad_scale = scales_of(terms.logit_map, token, True)
    base = finite_base(tl.load(partial + token))
    sum_exp = tl.load(partial + rows + token)
    alpha = tl.load(coefficients.alpha + token)
    # The target's entry is written already: its column is skipped.
    target_column = -1
    if target is not None:
        column = tl.load(target + token) - first
        target_column = tl.where((column >= 0) & (column < slice_entries), column, -1).to(tl.int32)
    for here in range(start, stop, _WRITTEN):
        e = here + tl.arange(0, _WRITTEN)
        entry_id = _columns(ids, e, stop, first, slice_entries).to(tl.int32)
        hit = (entry_id >= 0) & (entry_id != target_column)
        # An id may be picked several times. Its first entry adds the values of all.
        total = tl.zeros((_WRITTEN,), tl.float32)
        earlier = tl.zeros((_WRITTEN,), tl.float32)
        for there in range(start, stop, _WRITTEN):
            other = there + tl.arange(0, _WRITTEN)
            same = _columns(ids, other, stop, first, slice_entries).to(tl.int32)[None, :] == entry_id[:, None]
            value = tl.load(values + other, mask=other < stop, other=0.0)
            total += tl.sum(tl.where(same, value[None, :], 0.0), 1)
            before = same & (other[None, :] < e[:, None])
            earlier = tl.maximum(earlier, tl.max(tl.where(before, 1.0, 0.0), 1))
        logit = tl.load(logits + e, mask=hit, other=0.0)
        entry = gradient_of_entry(logit, base, sum_exp, alpha, 0.0, coefficients, token, True) * grad_scale
        entry = (entry * slope_of(logit, terms.logit_map, token, True) + total) * fp16_scale
        tl.store(row + entry_id, entry.to(gradient.dtype.element_ty), mask=hit & (earlier == 0.0))


@Relaunched
@triton.jit(do_not_specialize=["entries"])
def lce_backward_picked_rows(
    begin,
    end,
    order,
    ids,
    values,
    source,
    out,
    bias,
    entries,
    k_size,
    source_stride,
    out_stride,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out[row]``: the sum of ``values[e] * source[ids[e]]`` over the picked entries ``order[begin[row]:end[row]]``;
    without ``order`` over ``begin[row] ... end[row] - 1``. ``bias[row]``: the sum of ``values[e]``."""
    row, k = tl.program_id(0), tl.program_id(1) * BLOCK_K
    stop = tl.load(end + row)
    c = k + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_K,), tl.float32)
    sum_of_values = 0.0
    for first in range(tl.load(begin + row), stop, ENTRIES):
        e = first + tl.arange(0, ENTRIES)
        inside = e < stop
        if order is not None:
            e = tl.load(order + e, mask=inside, other=0)
        entry_id = tl.load(ids + e, mask=inside, other=-1)
        hit = (entry_id >= 0) & (entry_id < entries)
        value = tl.load(values + e, mask=hit, other=0.0)
        here = source + tl.where(hit, entry_id, 0)[:, None] * source_stride + c[None, :]
        tile = tl.load(here, mask=hit[:, None] & (c < k_size)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(tile * value[:, None], 0)
        sum_of_values += tl.sum(value, 0)
    tl.store(out + row.to(tl.int64) * out_stride + c, total.to(out.dtype.element_ty), mask=c < k_size)
    if bias is not None:
        tl.store(bias + row, sum_of_values.to(bias.dtype.element_ty), mask=tl.program_id(1) == 0)


def _tile_of(sizes: tuple[int, int, int], hidden_size: int) -> dict[str, int]:
    entries, width, warps = sizes
    return {"ENTRIES": entries, "BLOCK_K": min(width, max(16, next_power_of_2(hidden_size))), "num_warps": warps}


def picked_logits(
    product: Product, picked: _Picked, logits: torch.Tensor, windows: WindowPartials | None = None
) -> None:
    """Write the logits of the picked entries to ``logits [E]`` fp32; 0 for ids of other shards.

    ``picked``: int64, contiguous, for the rows of ``product.x [R, D]``. The logits are summed in the mainloop's
    order, so that on GPUs they equal the projection's to the bit. ``windows``: the projection's partials. A logit that
    can only be its window's maximum becomes that maximum, on every device.
    """
    x, weight = product.x, product.weight
    lce_forward_picked_logits.launch(
        (x.shape[0],),
        x,
        weight,
        product.bias,
        product.logit_map,
        windows or (None, None),
        picked,
        logits,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        WINDOW=product.tile.entries,
        **_tile_of(_LOGITS, x.shape[1]),
    )


def write_picked(
    gradient: torch.Tensor,
    first: int,
    picked: _Picked,
    values: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor | None,
    terms: GradientTerms,
) -> None:
    """Add ``values [E]`` to the picked entries of ``gradient [R, C]``, whose columns are the shard's entries from
    ``first`` on. The entries of ``target [R]`` are not changed.

    For a confident token, value and gradient are large and nearly cancel. So the entry is formed anew in fp32 from its
    ``logits [E]``, added to the value, and rounded once.
    """
    (rows, slice_entries), stride = gradient.shape, gradient.stride(0)
    lce_backward_write_picked.launch(
        (rows,), gradient, picked, values, logits, target, terms, rows, slice_entries, stride, first
    )


def _add_rows(begin, end, order, ids, values, source, out, bias, sizes: tuple[int, int, int]) -> None:
    (rows, hidden_size), tile = out.shape, _tile_of(sizes, out.shape[1])
    strides = source.stride(0), out.stride(0)
    grid = rows, -(-hidden_size // tile["BLOCK_K"])
    given = begin, end, order, ids, values, source, out, bias
    lce_backward_picked_rows.launch(grid, *given, source.shape[0], hidden_size, *strides, **tile)


def picked_hidden_gradient(weight: torch.Tensor, gradient: Any, dx: torch.Tensor) -> None:
    ids, begin, end = gradient.entries
    _add_rows(begin, end, None, ids, gradient.values, weight, dx, None, _FOR_HIDDEN)


def picked_weight_gradient(
    x: torch.Tensor, owner: torch.Tensor, gradient: Any, dweight: torch.Tensor, dbias: torch.Tensor | None
) -> None:
    if len(dweight):
        ids, order = gradient.entries.ids.sort(stable=True)
        starts = torch.searchsorted(ids, torch.arange(len(dweight) + 1, device=ids.device))
        _add_rows(starts, starts[1:], order, owner, gradient.values, x, dweight, dbias, _FOR_WEIGHT)


_ENTRIES = 32


@triton.jit
def _log_1_plus(x):
    """log(1 + x) for x >= 0, without the rounding of 1 + x (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0, by its series where exp(x) is near 1."""
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0)))
    return tl.where(x > -0.05, series, 1.0 - tl.exp(x))


@triton.jit
def _logits_of(packed, ids, e, stop, ranks, stride, vocab_size, BLOCK: tl.constexpr):
    """Logits of the entries ``e``, summed over the ranks; -inf outside the vocabulary, and from ``stop`` on."""
    logit = tl.zeros((BLOCK,), tl.float32)
    for rank in range(0, ranks):
        logit += tl.load(packed + rank * stride + e, mask=e < stop, other=0.0)
    entry_id = tl.load(ids + e, mask=e < stop, other=-1)
    return tl.where((entry_id >= 0) & (entry_id < vocab_size), logit, -float("inf"))


@Relaunched
@triton.jit(do_not_specialize=["ranks", "stride", "entries"])
def lce_forward_log_softmax_of_sets(
    packed, ids, offsets, broken, vocab_size, log_probs, logits, ranks, stride, entries, BLOCK: tl.constexpr
):
    """``vocab_size``: V in memory; None: V is ``entries``."""
    token = tl.program_id(0)
    first, stop = tl.load(offsets + token), tl.load(offsets + token + 1)
    size = entries.to(tl.int64)
    if vocab_size is not None:
        size = tl.load(vocab_size)
    stride = stride.to(tl.int64)
    maximum = -float("inf")
    for start in range(first, stop, BLOCK):
        z = _logits_of(packed, ids, start + tl.arange(0, BLOCK), stop, ranks, stride, size, BLOCK)
        maximum = tl.maximum(maximum, tl.max(z, 0))
    # 0 for a token without an entry in the vocabulary: -inf - -inf is NaN.
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    # The sum without one largest exponential, which is 1: adding that 1 would round away a confident token's 1 - p.
    others, largest = 0.0, 0.0
    for start in range(first, stop, BLOCK):
        z = _logits_of(packed, ids, start + tl.arange(0, BLOCK), stop, ranks, stride, size, BLOCK)
        others += tl.sum(tl.where(z == maximum, 0.0, tl.exp(z - base)), 0)
        largest += tl.sum(tl.where(z == maximum, 1.0, 0.0), 0)
    log_sum = _log_1_plus(others + tl.maximum(largest - 1.0, 0.0))
    for start in range(first, stop, BLOCK):
        e = start + tl.arange(0, BLOCK)
        z = _logits_of(packed, ids, e, stop, ranks, stride, size, BLOCK)
        log_p = tl.where(z == -float("inf"), z, z - base - log_sum)
        if broken is not None:
            log_p = tl.where(tl.load(broken), float("nan"), log_p)
        tl.store(log_probs + e, log_p, mask=e < stop)
        tl.store(logits + e, tl.where(z == -float("inf"), 0.0, z), mask=e < stop)


@triton.jit
def _log_probs_and_gradients(log_probs, upstream, e, stop):
    """Log-probabilities, and their upstream gradients, which are 0 for a probability of 0."""
    log_p = tl.load(log_probs + e, mask=e < stop, other=-float("inf"))
    u = tl.load(upstream + e, mask=e < stop, other=0.0)
    return log_p, tl.where(log_p == -float("inf"), 0.0, u)


@Relaunched
@triton.jit
def lce_backward_log_softmax_of_sets(log_probs, upstream, offsets, gradient, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    first, stop = tl.load(offsets + token), tl.load(offsets + token + 1)
    total = 0.0
    for start in range(first, stop, BLOCK):
        log_p, u = _log_probs_and_gradients(log_probs, upstream, start + tl.arange(0, BLOCK), stop)
        total += tl.sum(u, 0)
    for start in range(first, stop, BLOCK):
        e = start + tl.arange(0, BLOCK)
        log_p, u = _log_probs_and_gradients(log_probs, upstream, e, stop)
        # u - p * total, without cancellation where p is near 1.
        tl.store(gradient + e, u * _one_minus_exp(log_p) - tl.exp(log_p) * (total - u), mask=e < stop)


def log_softmax_of_sets(
    packed: torch.Tensor, sets: Any, broken: torch.Tensor | None, vocab_size: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, offsets = sets.ids, sets.offsets
    # NaN remains at entries without a token, which wrong offsets leave.
    log_probs, logits = packed.new_full((2, len(ids)), math.nan).unbind()
    known = isinstance(vocab_size, int)
    if len(offsets) > 1:
        lce_forward_log_softmax_of_sets.launch(
            (len(offsets) - 1,),
            packed,
            ids,
            offsets,
            broken,
            None if known else vocab_size,
            log_probs,
            logits,
            len(packed),
            packed.stride(0),
            vocab_size if known else 0,
            BLOCK=_ENTRIES,
            num_warps=1,
        )
    return log_probs, logits


def gradient_of_sets(log_probs: torch.Tensor, upstream: torch.Tensor, sets: Any) -> torch.Tensor:
    # Saved-tensor hooks may have changed strides.
    log_probs, upstream, offsets = log_probs.contiguous(), upstream.contiguous(), sets.offsets
    gradient = torch.full_like(log_probs, math.nan)  # for entries without a token
    if len(offsets) > 1:
        arguments = log_probs, upstream, offsets, gradient
        lce_backward_log_softmax_of_sets.launch((len(offsets) - 1,), *arguments, BLOCK=_ENTRIES, num_warps=1)
    return gradient
