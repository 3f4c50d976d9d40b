"""The mainloop of :mod:`parallel_lce.kernels.filter.products` for Hopper.

As in :mod:`parallel_lce.kernels.hopper`, one warp loads by TMA, ahead across tiles of the result, and two warpgroups
multiply.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from parallel_lce.kernels.filter.products import HOPPER_HIDDEN, HOPPER_STEP, result_tile
from parallel_lce.kernels.filter.tiles import TILE
from parallel_lce.kernels.hopper import PRODUCER_REGISTERS, WARPS, async_load, async_store, multiply, new_ring
from parallel_lce.kernels.relaunch import Relaunched

_TILE, _HIDDEN, _STEP = gl.constexpr(TILE), gl.constexpr(HOPPER_HIDDEN), gl.constexpr(HOPPER_STEP)


@gluon.jit
def _turn(first):
    """The program's next result. Every other round goes backwards: results come by their lengths, and no program may
    always get the longest of a round."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    number = first + program
    if first // programs % 2 == 1:
        number = first + programs - 1 - program
    return number


@gluon.jit
def _produce(gradient, other, ring, lists, sizes, TRANSPOSED: gl.constexpr):
    gradient_slots, other_slots, full, empty = ring
    STAGES: gl.constexpr = gradient_slots.shape[0]
    numbers, counts, order = lists
    rows, hidden_size, blocks, places = sizes
    hidden_blocks = gl.cdiv(hidden_size, _HIDDEN)
    count = 0
    results = blocks * hidden_blocks
    for first_of_round in range(0, results, gl.num_programs(0)):
        result = _turn(first_of_round)
        if result < results:
            block, hidden_block = result_tile(result, order, blocks, hidden_blocks)
            listed = numbers + block * places
            number = gl.load(listed)
            for place in range(0, gl.load(counts + block)):
                first = number * _TILE
                # Ahead, while this warp waits for slots.
                number = gl.load(listed + gl.minimum(place + 1, places - 1))
                for k in gl.static_range(0, _TILE, _STEP):
                    slot = count % STAGES
                    mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
                    arrived = full.index(slot)
                    mbarrier.expect(arrived, gradient.block_type.nbytes + other.block_type.nbytes)
                    if TRANSPOSED:
                        async_load(gradient, [first + k, block * _TILE], arrived, gradient_slots.index(slot))
                    else:
                        async_load(gradient, [block * _TILE, first + k], arrived, gradient_slots.index(slot))
                    async_load(other, [first + k, hidden_block * _HIDDEN], arrived, other_slots.index(slot))
                    count += 1


@gluon.jit
def _consume(
    ring,
    lists,
    sizes,
    total,
    staged,
    rank_one,
    total_stride,
    TRANSPOSED: gl.constexpr,
    ADD: gl.constexpr,
    TILES: gl.constexpr,
    STAGED: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _HIDDEN, 16])
    numbers, counts, order = lists
    rows, hidden_size, blocks, places = sizes
    shares, spread = rank_one
    hidden_blocks = gl.cdiv(hidden_size, _HIDDEN)
    results = blocks * hidden_blocks
    count = 0
    for first_of_round in range(0, results, gl.num_programs(0)):
        result = _turn(first_of_round)
        if result < results:
            block, hidden_block = result_tile(result, order, blocks, hidden_blocks)
            r = block * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, layout))
            h = hidden_block * _HIDDEN + gl.arange(0, _HIDDEN, gl.SliceLayout(0, layout))
            # The sum starts from what is there, in the product's own registers.
            z = gl.zeros((_TILE, _HIDDEN), gl.float32, layout)
            if ADD:
                inside = (r < rows)[:, None] & (h < hidden_size)[None, :]
                z = gl.load(total + r.to(gl.int64)[:, None] * total_stride + h[None, :], mask=inside, other=0.0)
            if shares is not None:
                share = gl.load(shares + r, mask=r < rows, other=0.0)
                of_window = gl.load(spread + block // TILES * hidden_size + h, mask=h < hidden_size, other=0.0)
                z += share[:, None] * of_window[None, :]
            steps = gl.load(counts + block) * (_TILE // _STEP)
            z = multiply(z, ring, count, steps, TRANSPOSED, False, True)
            count += steps
            if STAGED:
                tma.store_wait(0)
                staged.store(z.to(total.dtype))
                fence_async_shared()
                async_store(total, [block * _TILE, hidden_block * _HIDDEN], staged)
            else:
                inside = (r < rows)[:, None] & (h < hidden_size)[None, :]
                pointers = total + r.to(gl.int64)[:, None] * total_stride + h[None, :]
                gl.store(pointers, z.to(total.dtype.element_ty), mask=inside)
    if STAGED:
        tma.store_wait(0)


@Relaunched
@gluon.jit(do_not_specialize=["rows", "blocks", "places"])
def lce_backward_sparse_product(
    gradient,
    other,
    total,
    lists,
    rank_one,
    rows,
    hidden_size,
    blocks,
    places,
    total_stride,
    TRANSPOSED: gl.constexpr,
    ADD: gl.constexpr,
    TILES: gl.constexpr,
    STAGED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``gradient`` and ``other`` are TMA descriptors, and so is ``total`` if ``STAGED``."""
    ring = new_ring(gradient, other, STAGES)
    staged = ring[1].index(0)
    if STAGED:
        staged = gl.allocate_shared_memory(gradient.dtype, [_TILE, _HIDDEN], total.layout)
    sizes = (rows, hidden_size, blocks, places)
    gl.warp_specialize(
        [
            (_consume, (ring, lists, sizes, total, staged, rank_one, total_stride, TRANSPOSED, ADD, TILES, STAGED)),
            (_produce, (gradient, other, ring, lists, sizes, TRANSPOSED)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )
