"""The plain mainloop: any device and dtype."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import add_product
from parallel_lce.kernels.epilogue import UNSPECIALIZED, finish_tile, projection_name, scale_tile, tile_rows, tile_start
from parallel_lce.kernels.launch import Relaunched, addressable, descriptor
from parallel_lce.kernels.tuning import Tile


@triton.jit
def _load(source, row, k, rows, k_size, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        tile = source.load([row, k])
    else:
        r = row + tl.arange(0, BLOCK)
        c = k + tl.arange(0, BLOCK_K)
        inside = (r < rows)[:, None] & (c < k_size)[None, :]
        tile = tl.load(source + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _store(out, row, first, rows, entries, stride, tile, TMA: tl.constexpr):
    if TMA:
        out.store([row, first], tile.to(out.dtype))
    else:
        r = row + tl.arange(0, tile.shape[0])
        c = first + tl.arange(0, tile.shape[1])
        inside = (r < rows)[:, None] & (c < entries)[None, :]
        pointers = out + r.to(tl.int64)[:, None] * stride + c[None, :]
        tl.store(pointers, tile.to(out.dtype.element_ty), mask=inside)


@Relaunched
@triton.jit(do_not_specialize=UNSPECIALIZED, repr=projection_name)
def projection(
    x,
    weight,
    out,
    bias,
    logit_map,
    epilogue,
    rows,
    entries,
    k_size,
    first_block,
    num_blocks,
    x_stride,
    weight_stride,
    out_stride,
    out_entries,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
):
    """Persistent GEMM over ``num_blocks`` row blocks from ``first_block`` on. ``KIND`` selects the epilogue. ``x``,
    ``weight`` and ``out`` are TMA descriptors or pointers."""
    tiles = num_blocks * tl.cdiv(entries, BLOCK_N)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, window = tile_start(number, first_block, num_blocks, BLOCK_M)
        first = window * BLOCK_N
        r = row + tl.arange(0, BLOCK_M)
        c = first + tl.arange(0, BLOCK_N)
        row_values = tile_rows(epilogue, logit_map, r, rows, KIND)
        z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, k_size, BLOCK_K):
            a = _load(x, row, k, rows, k_size, x_stride, BLOCK_M, BLOCK_K, TMA)
            b = _load(weight, first, k, entries, k_size, weight_stride, BLOCK_N, BLOCK_K, TMA)
            z = add_product(a, b.T, z)
        position = (r, c, window, rows, entries)
        z = scale_tile(z, row_values, bias, logit_map, position, SCALED)
        UNCAPPED: tl.constexpr = KIND == "forward" and logit_map.softcap is not None
        if out is not None and UNCAPPED:
            if first < out_entries:
                _store(out, row, first, rows, out_entries, out_stride, z, OUT_TMA)
        z = finish_tile(z, row_values, epilogue, logit_map, position, KIND, MASKED, SAVED_SCALE)
        if out is not None and not UNCAPPED:
            if first < out_entries:
                _store(out, row, first, rows, out_entries, out_stride, z, OUT_TMA)


def operands(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, tile: Tile, tma: bool
) -> tuple[tuple, tuple[int, ...], dict[str, Any]]:
    """See :mod:`parallel_lce.kernels.product`."""
    strides = x.stride(0), weight.stride(0), *((0, 0) if out is None else (out.stride(0), out.shape[1]))
    out_tma = out is not None and tma and addressable(out)
    given = x, weight, descriptor(out, tile.rows, tile.entries) if out_tma else out
    if tma:
        given = descriptor(x, tile.rows, tile.k), descriptor(weight, tile.entries, tile.k), given[2]
    sizes = dict(BLOCK_M=tile.rows, BLOCK_N=tile.entries, BLOCK_K=tile.k)
    return given, strides, dict(**sizes, TMA=tma, OUT_TMA=out_tma, num_stages=tile.stages)
