"""The mainloop for Hopper: one warp loads by TMA, two warpgroups multiply a tile between them.

The loads run ahead over tile boundaries through a ring of ``STAGES`` slots, so the tensor cores wait
for nothing but the epilogue. What the epilogue needs of the tile's rows is asked for before the
mainloop. All tiles take the same time whatever the data: the programs stay in step then, and their
loads of the same operands meet in the L2 cache.

Two teams that take turns, one multiplying while the other runs its epilogue, would keep the tensor
cores busier as long as all programs walk the vocabulary in step; but their smaller tiles ask more of
the L2 cache, and once the programs drift apart operands come from memory again and again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from parallel_lce.kernels.epilogues import (
    finished_logits,
    gradient_epilogue,
    gradient_rows,
    partials_epilogue,
    partials_rows,
)
from parallel_lce.kernels.launch import Relaunched

# Warps of the consumers, and registers of a producer's thread.
_WARPS = gl.constexpr(8)
_PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _produce(x, weight, ring, sizes, STAGES: gl.constexpr):
    x_slots, weight_slots, full, empty = ring
    rows, columns, depth, first_block, blocks, all_blocks = sizes
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    count = 0
    for tile in range(gl.program_id(0), blocks * gl.cdiv(columns, BLOCK_N), gl.num_programs(0)):
        row = (first_block + tile % blocks) % all_blocks * BLOCK_M
        first = (tile // blocks) * BLOCK_N
        for k in range(0, depth, BLOCK_K):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            arrived = full.index(slot)
            mbarrier.expect(arrived, x.block_type.nbytes + weight.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [row, k], arrived, x_slots.index(slot))
            tma.async_copy_global_to_shared(weight, [first, k], arrived, weight_slots.index(slot))
            count += 1


@gluon.jit
def _multiply(
    ring, count, steps, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr
):
    """One tile's product, from ``steps`` slots of the ring from ``count`` on."""
    x_slots, weight_slots, full, empty = ring
    z = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
    last = count % STAGES
    for k in range(0, steps):
        slot = count % STAGES
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        token = warpgroup_mma(
            x_slots.index(slot), weight_slots.index(slot).permute((1, 0)), z, use_acc=k > 0, is_async=True
        )
        z = warpgroup_mma_wait(1, deps=[token])
        mbarrier.arrive(empty.index(last), count=1, pred=k > 0)
        last = slot
        count += 1
    z = warpgroup_mma_wait(0, deps=[z])
    mbarrier.arrive(empty.index(last), count=1)
    return z


@gluon.jit
def _consume(
    ring,
    out,
    staged,
    sizes,
    bias,
    scale,
    cap,
    arguments,
    HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    GRADIENT: gl.constexpr,
    SWITCHES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    STORES: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BLOCK_N, 16])
    rows, columns, depth, first_block, blocks, all_blocks = sizes
    a0, a1, a2, a3, a4 = arguments
    windows = gl.cdiv(columns, BLOCK_N)
    steps = gl.cdiv(depth, BLOCK_K)
    count = 0
    for tile in range(gl.program_id(0), blocks * windows, gl.num_programs(0)):
        window = tile // blocks
        row = (first_block + tile % blocks) % all_blocks * BLOCK_M
        first = window * BLOCK_N
        r = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        c = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        if GRADIENT:
            base, level, slope, uniform = gradient_rows(
                r, rows, a0, a1, a2, a3, a4, scale, SWITCHES[0], SWITCHES[1], SWITCHES[2]
            )
        else:
            known = partials_rows(r, rows, a0, SWITCHES[0])
        z = _multiply(ring, count, steps, STAGES, BLOCK_M, BLOCK_N, layout)
        count += steps
        z = finished_logits(z, c, bias, columns, scale, cap, HAS_BIAS, SCALED, CAPPED)
        if GRADIENT:
            z = gradient_epilogue(z, base, level, slope, uniform, cap, SWITCHES[0], SWITCHES[1], CAPPED)
        else:
            z = partials_epilogue(
                z,
                r,
                c,
                window,
                windows,
                rows,
                columns,
                known,
                a1,
                a2,
                SWITCHES[0],
                SWITCHES[1],
                SWITCHES[2],
                SWITCHES[3],
                SWITCHES[4],
                SWITCHES[5],
                SWITCHES[6],
            )
        if STORES:
            tma.store_wait(0)
            staged.store(z.to(out.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [row, first], staged)
    if STORES:
        tma.store_wait(0)


@Relaunched
@gluon.jit(do_not_specialize=["rows", "first_block", "blocks", "all_blocks"])
def projection(
    x,
    weight,
    out,
    bias,
    rows,
    columns,
    depth,
    first_block,
    blocks,
    all_blocks,
    scale,
    cap,
    a0,
    a1,
    a2,
    a3,
    a4,
    HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    GRADIENT: gl.constexpr,
    SWITCHES: gl.constexpr,
    STAGES: gl.constexpr,
    STORES: gl.constexpr,
):
    """``blocks`` row blocks from ``first_block`` on, the first after the last, with either epilogue; ``a0`` to
    ``a4`` are its tensors and ``SWITCHES`` its switches, in its order."""
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    weight_slots = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    staged = x_slots.index(0)
    if STORES:
        staged = gl.allocate_shared_memory(x.dtype, [BLOCK_M, BLOCK_N], out.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    ring = (x_slots, weight_slots, full, empty)
    sizes = (rows, columns, depth, first_block, blocks, all_blocks)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    ring,
                    out,
                    staged,
                    sizes,
                    bias,
                    scale,
                    cap,
                    (a0, a1, a2, a3, a4),
                    HAS_BIAS,
                    SCALED,
                    CAPPED,
                    GRADIENT,
                    SWITCHES,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    STORES,
                ),
            ),
            (_produce, (x, weight, ring, sizes, STAGES)),
        ],
        [1],
        [_PRODUCER_REGISTERS],
    )
