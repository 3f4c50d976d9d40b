"""The mainloop of :mod:`.products` for Hopper: that of :mod:`parallel_lce.kernels.mainloop_hopper`, whose steps are
the listed tiles of G.

dX has few tiles, with long lists, some of which may be empty: those of tokens that are ignored. Each tile gets a
program of its own, which the GPU starts where another has ended. dW has many tiles, with short lists. There a program
forms several tiles: the loads for one overlap the end of the one before. Tiles with the same list follow one another,
so that they read the same tiles of G together.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from parallel_lce.features.filter.kernels.tiles import TILE, grouped_tile
from parallel_lce.kernels.mainloop_hopper import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    WARPS,
    async_load,
    async_store,
    multiply,
    new_ring,
)
from parallel_lce.kernels.relaunch import Relaunched

_TILE = gl.constexpr(TILE)


@gluon.jit
def _turn(first):
    """The number of the program's tile among those from ``first`` on, one for each program. Tiles come by the lengths
    of their lists. Every other turn goes backwards, so that the programs' lists have equal lengths in sum."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    number = first + program
    if first // programs % 2 == 1:
        number = first + programs - 1 - program
    return number


@gluon.jit
def _result_tile(number, order, blocks, hidden_blocks, TRANSPOSED: gl.constexpr):
    if TRANSPOSED:
        return gl.load(order + number // hidden_blocks).to(gl.int32), number % hidden_blocks
    else:
        return grouped_tile(number, order, blocks, hidden_blocks)


@gluon.jit
def _produce(gradient, other, ring, lists, sizes, TRANSPOSED: gl.constexpr):
    gradient_slots, other_slots, full, empty = ring
    STAGES: gl.constexpr = gradient_slots.shape[0]
    STEP: gl.constexpr = other.block_type.shape[0]
    HIDDEN: gl.constexpr = other.block_type.shape[1]
    numbers, counts, order = lists
    rows, hidden_size, blocks, capacity = sizes
    hidden_blocks = gl.cdiv(hidden_size, HIDDEN)
    count = 0
    results = blocks * hidden_blocks
    for turn in range(0, results, gl.num_programs(0)):
        result = _turn(turn)
        if result < results:
            block, hidden_block = _result_tile(result, order, blocks, hidden_blocks, TRANSPOSED)
            tile_list = numbers + block * capacity
            number = gl.load(tile_list)
            for position in range(0, gl.load(counts + block)):
                first = number * _TILE
                # Loaded ahead: this warp then waits for slots.
                number = gl.load(tile_list + gl.minimum(position + 1, capacity - 1))
                for k in gl.static_range(0, _TILE, STEP):
                    slot = count % STAGES
                    mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
                    arrived = full.index(slot)
                    mbarrier.expect(arrived, gradient.block_type.nbytes + other.block_type.nbytes)
                    if TRANSPOSED:
                        async_load(gradient, [first + k, block * _TILE], arrived, gradient_slots.index(slot))
                    else:
                        async_load(gradient, [block * _TILE, first + k], arrived, gradient_slots.index(slot))
                    async_load(other, [first + k, hidden_block * HIDDEN], arrived, other_slots.index(slot))
                    count += 1


@gluon.jit
def _consume(
    operands,
    WARPGROUP: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ADD: gl.constexpr,
    TILES: gl.constexpr,
    STAGED: gl.constexpr,
):
    ring, total, staged, lists, sizes, rank_one, total_stride = operands
    HIDDEN: gl.constexpr = ring[1].shape[2]
    PER_TILE: gl.constexpr = _TILE // ring[1].shape[1]
    HALF: gl.constexpr = _TILE // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HIDDEN, 16])
    numbers, counts, order = lists
    rows, hidden_size, blocks, capacity = sizes
    shares, spread = rank_one
    hidden_blocks = gl.cdiv(hidden_size, HIDDEN)
    count = 0
    results = blocks * hidden_blocks
    for turn in range(0, results, gl.num_programs(0)):
        result = _turn(turn)
        if result < results:
            block, hidden_block = _result_tile(result, order, blocks, hidden_blocks, TRANSPOSED)
            row = block * _TILE + WARPGROUP * HALF
            r = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
            h = hidden_block * HIDDEN + gl.arange(0, HIDDEN, gl.SliceLayout(0, layout))
            # The product is added to what is there in its own registers.
            z = gl.zeros((HALF, HIDDEN), gl.float32, layout)
            if ADD:
                inside = (r < rows)[:, None] & (h < hidden_size)[None, :]
                z = gl.load(total + r.to(gl.int64)[:, None] * total_stride + h[None, :], mask=inside, other=0.0)
            if shares is not None:
                share = gl.load(shares + r, mask=r < rows, other=0.0)
                of_window = gl.load(spread + block // TILES * hidden_size + h, mask=h < hidden_size, other=0.0)
                z += share[:, None] * of_window[None, :]
            steps = gl.load(counts + block) * PER_TILE
            if steps > 0:
                z = multiply(z, ring, count, steps, WARPGROUP * HALF, TRANSPOSED, False, True)
            count += steps
            if STAGED:
                tma.store_wait(0)
                staged.index(WARPGROUP).store(z.to(total.dtype))
                fence_async_shared()
                async_store(total, [row, hidden_block * HIDDEN], staged.index(WARPGROUP))
            else:
                inside = (r < rows)[:, None] & (h < hidden_size)[None, :]
                pointers = total + r.to(gl.int64)[:, None] * total_stride + h[None, :]
                gl.store(pointers, z.to(total.dtype.element_ty), mask=inside)
    if STAGED:
        tma.store_wait(0)


@Relaunched
@gluon.jit(do_not_specialize=["rows", "blocks", "capacity"])
def lce_backward_sparse_product(
    gradient,
    other,
    total,
    lists,
    rank_one,
    rows,
    hidden_size,
    blocks,
    capacity,
    total_stride,
    TRANSPOSED: gl.constexpr,
    ADD: gl.constexpr,
    TILES: gl.constexpr,
    STAGED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``gradient`` and ``other`` are TMA descriptors, and so is ``total`` if ``STAGED``: in halves of a tile's rows."""
    ring = new_ring(gradient, other, STAGES)
    staged = ring[0]
    if STAGED:
        HALVES: gl.constexpr = [2] + total.block_type.shape
        staged = gl.allocate_shared_memory(gradient.dtype, HALVES, total.layout)
    sizes = (rows, hidden_size, blocks, capacity)
    operands = (ring, total, staged, lists, sizes, rank_one, total_stride)
    gl.warp_specialize(
        [
            (_consume, (operands, 0, TRANSPOSED, ADD, TILES, STAGED)),
            (_consume, (operands, 1, TRANSPOSED, ADD, TILES, STAGED)),
            (_produce, (gradient, other, ring, lists, sizes, TRANSPOSED)),
        ],
        [WARPS, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
