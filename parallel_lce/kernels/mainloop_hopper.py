"""The mainloop for Hopper: one warp loads by TMA, and each of two warpgroups multiplies half of a tile's rows.

The loads run ahead across tile boundaries through a ring of ``STAGES`` slots. All tiles take the same time whatever the
data. The programs therefore stay in step, and their loads of the same operands hit the L2 cache.

The warpgroups are partitions of their own, without a barrier between them. A slot is free once both have read it, so
one warpgroup may be up to ``STAGES`` slots ahead. Its epilogue then overlaps up to ``STAGES`` steps of the other's
product.

Alternatives that were slower or did not compile:

- Warpgroups that take turns, each with a tile of its own, need smaller tiles, which read more from the L2 cache.
- Three warpgroups, which would read less, do not compile with Triton 3.6: of 512 threads each has 128 registers, and
  ptxas needs 154 for a product of 64 x 256.
- Clusters of two programs that share the loads of the weight (TMA multicast, from Triton 3.8 on) were not faster on an
  H200.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from parallel_lce.kernels.epilogue import UNSPECIALIZED, finish_tile, projection_name, scale_tile, tile_rows, tile_start
from parallel_lce.kernels.launch import Relaunched, addressable
from parallel_lce.kernels.tuning import Tile

# Warps of a warpgroup, and registers per thread of the second warpgroup and of the producer. Triton leaves 240 to the
# first warpgroup.
_WARPS, _CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(4), gl.constexpr(240), gl.constexpr(24)
# Triton 3.8 renamed both functions. 3.9 has only the new names.
_async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.uint8: gl.uint8}


@gluon.jit
def _produce(x, weight, ring, sizes):
    x_slots, weight_slots, full, empty = ring
    STAGES: gl.constexpr = x_slots.shape[0]
    rows, entries, k_size, first_block, num_blocks = sizes
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    count = 0
    tiles = num_blocks * gl.cdiv(entries, BLOCK_N)
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, window = tile_start(number, first_block, num_blocks, BLOCK_M)
        for k in range(0, k_size, BLOCK_K):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            arrived = full.index(slot)
            mbarrier.expect(arrived, x.block_type.nbytes + weight.block_type.nbytes)
            _async_load(x, [row, k], arrived, x_slots.index(slot))
            _async_load(weight, [window * BLOCK_N, k], arrived, weight_slots.index(slot))
            count += 1


@gluon.jit
def _new_ring(x, weight, STAGES: gl.constexpr):
    """``STAGES`` slots for a tile of ``x`` and a tile of ``weight``, and two barriers per slot: full, and empty."""
    OF_X: gl.constexpr = [STAGES] + x.block_type.shape
    OF_WEIGHT: gl.constexpr = [STAGES] + weight.block_type.shape
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    x_slots = gl.allocate_shared_memory(x.dtype, OF_X, x.layout)
    weight_slots = gl.allocate_shared_memory(x.dtype, OF_WEIGHT, weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        # Both warpgroups read every slot.
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return (x_slots, weight_slots, full, empty)


@gluon.jit
def _multiply(z, ring, count, steps, first_row: gl.constexpr):
    """The product of ``steps`` slots of the ring, at least one, from slot ``count % STAGES`` on, in the registers of
    ``z``. Of x the rows from ``first_row`` on."""
    x_slots, weight_slots, full, empty = ring
    STAGES: gl.constexpr = x_slots.shape[0]
    last = count % STAGES
    for k in range(0, steps):
        slot = count % STAGES
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        rows = x_slots.index(slot).slice(first_row, z.shape[0])
        weight = weight_slots.index(slot).permute((1, 0))
        token = warpgroup_mma(rows, weight, z, use_acc=k > 0, is_async=True)
        z = warpgroup_mma_wait(1, deps=[token])
        mbarrier.arrive(empty.index(last), count=1, pred=k > 0)
        last = slot
        count += 1
    z = warpgroup_mma_wait(0, deps=[z])
    mbarrier.arrive(empty.index(last), count=1)
    return z


@gluon.jit
def _store(out, row, first, tile, staged):
    tma.store_wait(0)
    staged.store(tile.to(out.dtype))
    fence_async_shared()
    _async_store(out, [row, first], staged)


@gluon.jit
def _consume(
    operands,
    WARPGROUP: gl.constexpr,
    KIND: gl.constexpr,
    SCALED: gl.constexpr,
    MASKED: gl.constexpr,
    SAVED_SCALE: gl.constexpr,
):
    ring, out, staged, sizes, bias, logit_map, epilogue = operands
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    BLOCK_K: gl.constexpr = ring[0].shape[2]
    HALF: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BLOCK_N, 16])
    rows, entries, k_size, first_block, num_blocks = sizes
    steps = gl.cdiv(k_size, BLOCK_K)
    count = 0
    tiles = num_blocks * gl.cdiv(entries, BLOCK_N)
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, window = tile_start(number, first_block, num_blocks, BLOCK_M)
        row += WARPGROUP * HALF
        first = window * BLOCK_N
        r = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        c = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        row_values = tile_rows(epilogue, logit_map, r, rows, KIND)
        z = gl.zeros((HALF, BLOCK_N), gl.float32, layout)
        z = _multiply(z, ring, count, steps, WARPGROUP * HALF)
        count += steps
        position = (r, c, window, rows, entries)
        z = scale_tile(z, row_values, bias, logit_map, position, SCALED)
        UNCAPPED: gl.constexpr = KIND == "forward" and logit_map.softcap is not None
        if out is not None and UNCAPPED:
            _store(out, row, first, z, staged.index(WARPGROUP))
        z = finish_tile(z, row_values, epilogue, logit_map, position, KIND, MASKED, SAVED_SCALE)
        if out is not None and not UNCAPPED:
            _store(out, row, first, z, staged.index(WARPGROUP))
    if out is not None:
        tma.store_wait(0)


@Relaunched
@gluon.jit(do_not_specialize=UNSPECIALIZED, repr=projection_name)
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
    KIND: gl.constexpr,
    SCALED: gl.constexpr,
    MASKED: gl.constexpr,
    SAVED_SCALE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As ``plain.projection``. ``x``, ``weight`` and ``out`` are TMA descriptors; a block of ``out`` has
    half the rows of a tile."""
    ring = _new_ring(x, weight, STAGES)
    staged = ring[0]
    if out is not None:
        HALVES: gl.constexpr = [2] + out.block_type.shape
        staged = gl.allocate_shared_memory(out.dtype, HALVES, out.layout)
    sizes = (rows, entries, k_size, first_block, num_blocks)
    operands = (ring, out, staged, sizes, bias, logit_map, epilogue)
    gl.warp_specialize(
        [
            (_consume, (operands, 0, KIND, SCALED, MASKED, SAVED_SCALE)),
            (_consume, (operands, 1, KIND, SCALED, MASKED, SAVED_SCALE)),
            (_produce, (x, weight, ring, sizes)),
        ],
        [_WARPS, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


@functools.cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([*block], _ELEMENTS[dtype])


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """As :func:`parallel_lce.kernels.launch.descriptor`, for Gluon."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns], _layout((rows, columns), tensor.dtype))


def operands(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, tile: Tile, tma: bool
) -> tuple[tuple, tuple[int, ...], dict[str, Any]]:
    """See :mod:`parallel_lce.kernels.product`. A launch that stores 16 bits per entry has one stage less."""
    stored = out if out is None or not addressable(out) else descriptor(out, tile.rows // 2, tile.entries)
    given = descriptor(x, tile.rows, tile.k), descriptor(weight, tile.entries, tile.k), stored
    return given, (), dict(STAGES=tile.stages - (out is not None and out.element_size() > 1))
