"""Logits of entries that are selected for each token, and their gradients: only those rows of the weight are read.

A *selection* gives token r of a block the ids ``ids[begin[r]:end[r]]``. They are relative to the shard, and those
outside ``[0, entries)`` are left out. The kernels move one row of the weight, or of the hidden states, per selected
entry. They wait for memory and not for arithmetic.

Each output element is written by one program, and sums have a fixed order. Offsets into tensors are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import Cap, caps_of, softcapped
from parallel_lce.kernels.projection import Product
from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2

# Entries of a tile of rows, its hidden elements at most, and warps. Measured on an H200 with D=4096: 1, 8 and 64
# entries of each token, or 8 for dW, whose rows are mostly selected once.
_LOGITS = 8, 256, 1
_FOR_HIDDEN = 8, 512, 2
_FOR_WEIGHT = 4, 2048, 4
# Entries of one token whose places in G a program finds at a time.
_PLACED = 64


@triton.jit
def _columns(ids, e, stop, first, entries):
    """Of the selected entries e before ``stop``: where their ids lie in ``[first, first + entries)``, -1 for others."""
    column = tl.load(ids + e, mask=e < stop, other=-1) - first
    return tl.where((column >= 0) & (column < entries), column, -1)


@triton.jit
def _tile(rows, ids, valid, k, k_size, stride, BLOCK_K: tl.constexpr):
    """``rows[ids, k : k + BLOCK_K]`` in fp32, 0 where not ``valid``."""
    c = k + tl.arange(0, BLOCK_K)
    here = rows + tl.where(valid, ids, 0)[:, None] * stride + c[None, :]
    return tl.load(here, mask=valid[:, None] & (c < k_size)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _hidden(x, token, k, k_size, stride, BLOCK_K: tl.constexpr):
    """``x[token, k : k + BLOCK_K]`` in fp32."""
    c = k + tl.arange(0, BLOCK_K)
    return tl.load(x + token.to(tl.int64) * stride + c, mask=c < k_size, other=0.0).to(tl.float32)


@Relaunched
@triton.jit(do_not_specialize=["entries"])
def lce_forward_selected_logits(
    x,
    weight,
    bias,
    token_scale,
    ids,
    begin,
    end,
    logits,
    entries,
    k_size,
    x_stride,
    weight_stride,
    scale,
    cap,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0)
    stop = tl.load(end + token)
    factor = scale
    if token_scale is not None:
        factor *= tl.load(token_scale + token)
    for first in range(tl.load(begin + token), stop, ENTRIES):
        e = first + tl.arange(0, ENTRIES)
        wanted = _columns(ids, e, stop, 0, entries)
        hit = wanted >= 0
        logit = tl.zeros((ENTRIES,), tl.float32)
        for k in range(0, k_size, BLOCK_K):
            row = _hidden(x, token, k, k_size, x_stride, BLOCK_K)
            logit += tl.sum(_tile(weight, wanted, hit, k, k_size, weight_stride, BLOCK_K) * row[None, :], 1)
        if bias is not None:
            logit += tl.load(bias + wanted, mask=hit, other=0.0).to(tl.float32)
        logit *= factor
        if cap is not None:
            logit = softcapped(logit, caps_of(cap, token, True))
        tl.store(logits + e, tl.where(hit, logit, 0.0), mask=e < stop)


@Relaunched
@triton.jit(do_not_specialize=["first", "slice_entries"])
def lce_backward_place_selected(
    gradient, ids, begin, end, values, fp16_scale, slice_entries, stride, first, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    start, stop = tl.load(begin + token), tl.load(end + token)
    row = gradient + token.to(tl.int64) * stride
    factor = 1.0
    if fp16_scale is not None:
        factor = tl.load(fp16_scale)
    for here in range(start, stop, BLOCK):
        e = here + tl.arange(0, BLOCK)
        wanted = _columns(ids, e, stop, first, slice_entries).to(tl.int32)
        hit = wanted >= 0
        # An id may be selected twice. The first of its entries adds the values of all.
        total = tl.zeros((BLOCK,), tl.float32)
        earlier = tl.zeros((BLOCK,), tl.float32)
        for there in range(start, stop, BLOCK):
            other = there + tl.arange(0, BLOCK)
            same = _columns(ids, other, stop, first, slice_entries).to(tl.int32)[None, :] == wanted[:, None]
            value = tl.load(values + other, mask=other < stop, other=0.0)
            total += tl.sum(tl.where(same, value[None, :], 0.0), 1)
            before = same & (other[None, :] < e[:, None])
            earlier = tl.maximum(earlier, tl.max(tl.where(before, 1.0, 0.0), 1))
        adds = hit & (earlier == 0.0)
        entry = tl.load(row + wanted, mask=adds, other=0.0).to(tl.float32)
        tl.store(row + wanted, (entry + factor * total).to(gradient.dtype.element_ty), mask=adds)


@Relaunched
@triton.jit(do_not_specialize=["entries"])
def lce_backward_selected_hidden(
    ids,
    begin,
    end,
    values,
    weight,
    dx,
    entries,
    k_size,
    weight_stride,
    dx_stride,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token, k = tl.program_id(0), tl.program_id(1) * BLOCK_K
    stop = tl.load(end + token)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(tl.load(begin + token), stop, ENTRIES):
        e = first + tl.arange(0, ENTRIES)
        wanted = _columns(ids, e, stop, 0, entries)
        hit = wanted >= 0
        value = tl.load(values + e, mask=hit, other=0.0)
        total += tl.sum(_tile(weight, wanted, hit, k, k_size, weight_stride, BLOCK_K) * value[:, None], 0)
    c = k + tl.arange(0, BLOCK_K)
    here = dx + token.to(tl.int64) * dx_stride + c
    tl.store(here, total.to(dx.dtype.element_ty), mask=c < k_size)


@Relaunched
@triton.jit
def lce_backward_selected_weight(
    starts,
    order,
    owner,
    values,
    x,
    dweight,
    dbias,
    k_size,
    x_stride,
    dweight_stride,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``order``: the selected entries, sorted by id; those of row r are ``order[starts[r]:starts[r + 1]]``. ``owner``:
    the row of ``x`` of each selected entry."""
    row, k = tl.program_id(0), tl.program_id(1) * BLOCK_K
    stop = tl.load(starts + row + 1)
    total = tl.zeros((BLOCK_K,), tl.float32)
    sum_of_values = 0.0
    for first in range(tl.load(starts + row), stop, ENTRIES):
        e = first + tl.arange(0, ENTRIES)
        at = tl.load(order + e, mask=e < stop, other=0)
        value = tl.load(values + at, mask=e < stop, other=0.0)
        token = tl.load(owner + at, mask=e < stop, other=0)
        total += tl.sum(_tile(x, token, e < stop, k, k_size, x_stride, BLOCK_K) * value[:, None], 0)
        sum_of_values += tl.sum(value, 0)
    c = k + tl.arange(0, BLOCK_K)
    here = dweight + row.to(tl.int64) * dweight_stride + c
    tl.store(here, total.to(dweight.dtype.element_ty), mask=c < k_size)
    if dbias is not None:
        tl.store(dbias + row, sum_of_values.to(dbias.dtype.element_ty), mask=tl.program_id(1) == 0)


def _tile_of(sizes: tuple[int, int, int], hidden_size: int) -> dict[str, int]:
    entries, width, warps = sizes
    return {"ENTRIES": entries, "BLOCK_K": min(width, next_power_of_2(hidden_size)), "num_warps": warps}


def selected_logits(
    product: Product, ids: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, logits: torch.Tensor
) -> None:
    """Write the logits of the selected entries to ``logits [E]`` fp32; 0 for ids of other shards.

    ``ids [E]``, ``begin [R]`` and ``end [R]`` int64, contiguous: the selection for the rows of ``product.x [R, D]``.
    """
    x, weight = product.x, product.weight
    lce_forward_selected_logits.launch(
        (x.shape[0],),
        x,
        weight,
        product.bias,
        product.token_scale,
        ids,
        begin,
        end,
        logits,
        weight.shape[0],
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        float(product.scale),
        Cap.of(product.softcap),
        **_tile_of(_LOGITS, x.shape[1]),
    )


def place_selected(
    gradient: torch.Tensor,
    first: int,
    ids: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    values: torch.Tensor,
    fp16_scale: torch.Tensor | None,
) -> None:
    """Add ``fp16_scale * values [E]`` to the selected entries of ``gradient [R, C]``, whose columns are the shard's
    entries from ``first`` on. ``fp16_scale``: 0-dimensional, or None for 1."""
    lce_backward_place_selected.launch(
        (gradient.shape[0],),
        gradient,
        ids,
        begin,
        end,
        values,
        fp16_scale,
        gradient.shape[1],
        gradient.stride(0),
        first,
        BLOCK=_PLACED,
    )


def hidden_gradient(
    weight: torch.Tensor,
    ids: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    values: torch.Tensor,
    dx: torch.Tensor,
) -> None:
    """``dx [R, D]``: of each row the sum of ``values [E]`` times the selected rows of ``weight [V, D]``, in fp32."""
    tile = _tile_of(_FOR_HIDDEN, dx.shape[1])
    lce_backward_selected_hidden.launch(
        (dx.shape[0], -(-dx.shape[1] // tile["BLOCK_K"])),
        ids,
        begin,
        end,
        values,
        weight,
        dx,
        weight.shape[0],
        dx.shape[1],
        weight.stride(0),
        dx.stride(0),
        **tile,
    )


def weight_gradient(
    x: torch.Tensor,
    ids: torch.Tensor,
    owner: torch.Tensor,
    values: torch.Tensor,
    dweight: torch.Tensor,
    dbias: torch.Tensor | None,
) -> None:
    """Write to ``dweight [V, D]``, of each row, the sum of the ``values [E]`` that select it, times ``x[owner]``, in
    fp32; and to ``dbias [V]``, if it is given, that of the values.

    ``owner [E]`` int64: the row of ``x [R, D]`` of each selected entry.
    """
    sorted_ids, order = ids.sort(stable=True)
    rows = len(dweight)
    starts = torch.searchsorted(sorted_ids, torch.arange(rows + 1, device=ids.device))
    tile = _tile_of(_FOR_WEIGHT, x.shape[1])
    lce_backward_selected_weight.launch(
        (rows, -(-x.shape[1] // tile["BLOCK_K"])),
        starts,
        order,
        owner,
        values,
        x,
        dweight,
        dbias,
        x.shape[1],
        x.stride(0),
        dweight.stride(0),
        **tile,
    )
