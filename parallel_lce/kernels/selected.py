"""Logits of single entries, without the other rows of the weight: each token's target, and selected entries, with their
gradients and their log-softmax.

Token r has the ids ``ids[begin[r]:end[r]]``. Ids outside ``[0, entries)`` are skipped. The kernels move one row of the
weight, or of the hidden states, per entry: memory bandwidth bounds them. The log-softmax is a kernel because its
formulas on ``[E]`` numbers would take the host longer than all else. :mod:`parallel_lce.backends.torch_logits` has the
same functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.core.partials import FLAT
from parallel_lce.core.selection import Selection
from parallel_lce.kernels.arithmetic import add_product, exact_logit, finite_base, gradient_of_entry, largest_of
from parallel_lce.kernels.epilogue import GradientTerms
from parallel_lce.kernels.launch import Relaunched, generation, next_power_of_2
from parallel_lce.kernels.logit_map import entry_logits, scales_of, slope_of
from parallel_lce.kernels.product import Product

# Entries per step, most hidden elements per step, and warps. Measured on an H200 with D=4096: logits and dX with 1, 8
# and 64 entries per token, dW with 8 and 64, where a row is selected by few tokens. Logits are products of at least 16
# rows.
_LOGITS = 16, 128, 1
_ROWS = 8, 512, 2
_ROWS_OF_FEW = 4, 2048, 4
# Entries of one token that a program writes into G, or normalises, per step.
_STEP = tl.constexpr(32)
# Of the targets' logits: tokens per program, and vocabulary rows of the sample.
_TOKENS = tl.constexpr(64)
_FLAT = tl.constexpr(FLAT)
# Entries this far below the largest do not count, such as those that a bias masks.
_COUNTED = tl.constexpr(20.0)
# Common logits c for which exponentials are exp(z), and exp(z - c) of other logits does not overflow.
_LOWEST, _HIGHEST = tl.constexpr(-18.0), tl.constexpr(60.0)


@triton.jit
def _columns(ids, e, stop, first, entries):
    """``ids[e] - first`` of the selected entries e; -1 outside ``[0, entries)`` and from ``stop`` on."""
    column = tl.load(ids + e, mask=e < stop, other=-1) - first
    return tl.where((column >= 0) & (column < entries), column, -1)


@Relaunched
@triton.jit(do_not_specialize=["rows", "entries"])
def lce_forward_selected_logits(
    x,
    weight,
    bias,
    logit_map,
    windows,
    selection,
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
    ids, begin, end = selection
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
        tl.store(logits + e, tl.where(hit, logit, -float("inf")), mask=e < stop)


@Relaunched
@triton.jit(do_not_specialize=["rows", "first", "slice_entries"])
def lce_backward_write_selected(gradient, selection, values, logits, terms, rows, slice_entries, stride, first):
    token = tl.program_id(0)
    ids, begin, end = selection
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
    for here in range(start, stop, _STEP):
        e = here + tl.arange(0, _STEP)
        entry_id = _columns(ids, e, stop, first, slice_entries).to(tl.int32)
        hit = entry_id >= 0
        # An id may be selected several times. Each of its entries writes the same number, with the values of all.
        total = tl.zeros((_STEP,), tl.float32)
        for there in range(start, stop, _STEP):
            other = there + tl.arange(0, _STEP)
            same = _columns(ids, other, stop, first, slice_entries).to(tl.int32)[None, :] == entry_id[:, None]
            value = tl.load(values + other, mask=other < stop, other=0.0)
            total += tl.sum(tl.where(same, value[None, :], 0.0), 1)
        logit = tl.load(logits + e, mask=hit, other=0.0)
        entry = gradient_of_entry(logit, base, sum_exp, alpha, 0.0, coefficients, token, True) * grad_scale
        entry = (entry * slope_of(logit, terms.logit_map, token, True) + total) * fp16_scale
        tl.store(row + entry_id, entry.to(gradient.dtype.element_ty), mask=hit)


@Relaunched
@triton.jit(do_not_specialize=["entries"])
def lce_backward_selected_rows(
    selection,
    values,
    source,
    out,
    entries,
    k_size,
    source_stride,
    out_stride,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, k = tl.program_id(0), tl.program_id(1) * BLOCK_K
    ids, begin, end = selection
    stop = tl.load(end + row)
    c = k + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(tl.load(begin + row), stop, ENTRIES):
        e = first + tl.arange(0, ENTRIES)
        entry_id = _columns(ids, e, stop, 0, entries)
        hit = entry_id >= 0
        value = tl.load(values + e, mask=hit, other=0.0)
        here = source + tl.where(hit, entry_id, 0)[:, None] * source_stride + c[None, :]
        tile = tl.load(here, mask=hit[:, None] & (c < k_size)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(tile * value[:, None], 0)
    tl.store(out + row.to(tl.int64) * out_stride + c, total.to(out.dtype.element_ty), mask=c < k_size)


@triton.jit
def _load(values, e, stop):
    """Numbers of the entries e, in fp64, whose 1 - p suffices for a confident token; -inf from ``stop`` on."""
    return tl.load(values + e, mask=e < stop, other=-float("inf")).to(tl.float64)


@Relaunched
@triton.jit
def lce_log_softmax_of_sets(logits, upstream, begin, end, out):
    token = tl.program_id(0)
    start, stop = tl.load(begin + token), tl.load(end + token)
    maximum = tl.full((), -float("inf"), tl.float64)
    for first in range(start, stop, _STEP):
        maximum = tl.maximum(maximum, tl.max(_load(logits, first + tl.arange(0, _STEP), stop), 0))
    base = finite_base(maximum)
    sum_exp = tl.zeros((), tl.float64)
    total = tl.zeros((), tl.float64)
    for first in range(start, stop, _STEP):
        e = first + tl.arange(0, _STEP)
        z = _load(logits, e, stop)
        sum_exp += tl.sum(tl.exp(z - base), 0)
        if upstream is not None:
            total += tl.sum(tl.load(upstream + e, mask=z != -float("inf"), other=0.0).to(tl.float64), 0)
    log_sum = tl.log(sum_exp)
    for first in range(start, stop, _STEP):
        e = first + tl.arange(0, _STEP)
        z = _load(logits, e, stop)
        result = tl.where(z == -float("inf"), z, z - base - log_sum)
        if upstream is not None:
            # A probability of 0 has no gradient, even if its log-probability has an upstream gradient.
            result = tl.load(upstream + e, mask=z != -float("inf"), other=0.0) - tl.exp(result) * total
        tl.store(out + e, result.to(tl.float32), mask=e < stop)


def _tile_of(sizes: tuple[int, int, int], hidden_size: int) -> dict[str, int]:
    entries, width, warps = sizes
    return {"ENTRIES": entries, "BLOCK_K": min(width, max(16, next_power_of_2(hidden_size))), "num_warps": warps}


def selected_logits(
    product: Product, selection: Selection, windows: tuple[torch.Tensor, torch.Tensor] | None = None
) -> None:
    """Write :attr:`Selection.logits`, fp32; -inf for ids of other shards.

    The logits are summed in the mainloop's order, so that on GPUs they equal the projection's to the bit. ``windows``:
    the projection's maxima and sums of exponentials, ``[windows, R]`` each. A logit that can only be its window's
    maximum becomes that maximum, on every device.
    """
    x, weight, (rows, hidden_size) = product.x, product.weight, product.x.shape
    operands = x, weight, product.bias, product.logit_map, windows or (None, None), selection[:3], selection.logits
    sizes = rows, weight.shape[0], hidden_size, x.stride(0), weight.stride(0)
    tile = _tile_of(_LOGITS, hidden_size)
    lce_forward_selected_logits.launch((rows,), *operands, *sizes, WINDOW=product.tile.entries, **tile)


def write_selected(gradient: torch.Tensor, first: int, selection: Selection, terms: GradientTerms) -> None:
    """Add the selected entries' terms to ``gradient [R, C]``, whose columns are the shard's entries from ``first`` on.
    Those of targets are written later.

    For a confident token, term and gradient are large and nearly cancel. So the entry is formed anew in fp32 from its
    logit, added to the term, and rounded once.
    """
    (rows, slice_entries), stride = gradient.shape, gradient.stride(0)
    of_entries = selection[:3], selection.gradient, selection.logits
    lce_backward_write_selected.launch((rows,), gradient, *of_entries, terms, rows, slice_entries, stride, first)


def selected_rows(selection: Selection, source: torch.Tensor, out: torch.Tensor) -> None:
    """As :meth:`parallel_lce.backends.interface.Backend.selected_rows`."""
    (rows, hidden_size), strides = out.shape, (source.stride(0), out.stride(0))
    tile = _tile_of(_ROWS if len(selection.ids) >= _ROWS[0] * rows else _ROWS_OF_FEW, hidden_size)
    grid, sizes = (rows, -(-hidden_size // tile["BLOCK_K"])), (len(source), hidden_size)
    if rows:
        lce_backward_selected_rows.launch(
            grid, selection[:3], selection.gradient, source, out, *sizes, *strides, **tile
        )


def log_softmax_of_sets(
    logits: torch.Tensor, selection: Selection, upstream: torch.Tensor | None = None
) -> torch.Tensor:
    """As :meth:`parallel_lce.backends.interface.Backend.log_softmax_of_sets`."""
    _, begin, end, *_ = selection
    out = torch.full_like(logits, torch.nan)
    if len(begin):
        lce_log_softmax_of_sets.launch((len(begin),), logits, upstream, begin, end, out, num_warps=1)
    return out


@triton.jit
def _mean(sample, chosen):
    return tl.sum(tl.where(chosen, sample, 0.0), 1) / tl.sum(tl.where(chosen, 1.0, 0.0), 1)


@triton.jit
def _flat_of(sample, counted):
    """``flat`` of :func:`parallel_lce.kernels.arithmetic.flattened`, from logits of which some are ``counted``."""
    number = tl.sum(tl.where(counted, 1.0, 0.0), 1)
    common = _mean(sample, counted)
    for _ in tl.static_range(2):  # a few others must not draw the mean away
        distance = tl.where(counted, tl.abs(sample - common[:, None]), 0.0)
        common = _mean(sample, counted & (distance <= (1.01 * tl.sum(distance, 1) / number + 1e-3)[:, None]))
    near = counted & (tl.abs(sample - common[:, None]) < _FLAT)
    is_flat = 2.0 * tl.sum(tl.where(near, 1.0, 0.0), 1) > number
    return tl.where(is_flat & (common > _LOWEST) & (common < _HIGHEST), tl.exp(-common), 0.0)


@Relaunched
@triton.jit(do_not_specialize=["rows", "step"])
def lce_forward_target_logits(
    x,
    weight,
    bias,
    logit_map,
    target,
    partial,
    flat,
    rows,
    entries,
    k_size,
    step,
    x_stride,
    weight_stride,
    BLOCK_K: tl.constexpr,
):
    lane = tl.arange(0, _TOKENS)
    r = tl.program_id(0) * _TOKENS + lane
    valid = r < rows
    x_rows = x + r.to(tl.int64)[:, None] * x_stride
    own, sample = tl.zeros((_TOKENS, _TOKENS), tl.float32), tl.zeros((_TOKENS, _TOKENS), tl.float32)
    read = valid
    if target is not None:
        target_id = tl.load(target + r, mask=valid, other=-1)
        hit = (target_id >= 0) & (target_id < entries)
        own_rows = weight + tl.where(hit, target_id, 0)[:, None] * weight_stride
        if flat is None:
            # Tokens whose targets lie in other shards read nothing.
            read = hit
    if flat is not None:
        entry = lane * step
        sampled = entry < entries
        sample_rows = weight + entry.to(tl.int64)[:, None] * weight_stride
    for k in range(0, k_size, BLOCK_K):
        c = k + tl.arange(0, BLOCK_K)
        inside = (c < k_size)[None, :]
        a = tl.load(x_rows + c[None, :], mask=read[:, None] & inside, other=0.0)
        if target is not None:
            b = tl.load(own_rows + c[None, :], mask=hit[:, None] & inside, other=0.0)
            own = add_product(a, b.T, own)
        if flat is not None:
            b = tl.load(sample_rows + c[None, :], mask=sampled[:, None] & inside, other=0.0)
            sample = add_product(a, b.T, sample)
    if target is not None:
        logit = tl.sum(tl.where(lane[:, None] == lane[None, :], own, 0.0), 1)
        logit = entry_logits(logit, bias, target_id, hit, logit_map, r, valid)
        tl.store(partial + 2 * rows + r, tl.where(hit, logit, 0.0), mask=valid)
    if flat is not None:
        sample = entry_logits(sample, bias, entry[None, :], sampled[None, :], logit_map, r[:, None], valid[:, None])
        top = tl.max(tl.where(sampled[None, :], sample, -float("inf")), 1)
        counted = sampled[None, :] & (sample > top[:, None] - _COUNTED)
        tl.store(flat + r, _flat_of(sample, counted), mask=valid)


def target_logits(
    product: Product, target: torch.Tensor | None, partial: torch.Tensor, flat: torch.Tensor | None
) -> None:
    """Write the targets' logits into the ``partial [C, R]`` fp32, and ``flat [R]`` fp32. ``target`` or ``flat`` may be
    None.

    A ``target [R]`` int64 outside ``[0, V)`` has the logit 0. The targets' logits are the diagonal of a product with
    the targets' rows of the weight. They are summed in the mainloop's order, so a target that is a token's maximum
    equals it to the bit. The mainloop does not pick targets out of its tiles: tiles would then differ in time, and its
    programs would fall out of step.

    ``flat``: exp(-c) for tokens of which most logits are near a number c, of 64 evenly spaced rows of the weight, 0 for
    others (:func:`parallel_lce.kernels.arithmetic.flattened`); None if no gradient can be a small difference.
    """
    x, weight = product.x, product.weight
    (rows, k_size), entries = x.shape, weight.shape[0]
    lce_forward_target_logits.launch(
        (-(-rows // _TOKENS.value),),
        x,
        weight,
        product.bias,
        product.logit_map,
        target,
        partial,
        flat,
        rows,
        entries,
        k_size,
        -(-entries // _TOKENS.value),
        x.stride(0),
        weight.stride(0),
        # Ampere has too few registers for 64.
        BLOCK_K=64 if x.element_size() == 2 and generation(x.device) >= 9 else 32,
        num_warps=8,
        num_stages=4,
    )
