"""Racecheck may report a race in this kernel, which has none: a control of sanitize.py. It hands tiles from one warp to
eight through a ring of slots and mbarriers, as Triton's tutorial of warp specialization does."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

SLOTS, ROWS, DEPTH = 3, 128, 64
_async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _load(source, ring, steps):
    slots, full, empty = ring
    SLOTS: gl.constexpr = slots.shape[0]
    ROWS: gl.constexpr = source.block_type.shape[0]
    DEPTH: gl.constexpr = source.block_type.shape[1]
    for step in range(steps):
        slot = step % SLOTS
        mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(slot), source.block_type.nbytes)
        _async_load(source, [gl.program_id(0) * ROWS, step * DEPTH], full.index(slot), slots.index(slot))


@gluon.jit
def _add(out, ring, steps):
    slots, full, empty = ring
    SLOTS: gl.constexpr = slots.shape[0]
    ROWS: gl.constexpr = slots.shape[1]
    DEPTH: gl.constexpr = slots.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    total = gl.zeros([ROWS, DEPTH], gl.float32, layout)
    for step in range(steps):
        slot = step % SLOTS
        mbarrier.wait(full.index(slot), (step // SLOTS) & 1)
        total += slots.index(slot).load(layout).to(gl.float32)
        mbarrier.arrive(empty.index(slot), count=1)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    gl.store(out + row, gl.sum(total, 1))


@gluon.jit(repr=lambda _: "lce_control_two_partitions")
def two_partitions(source, out, steps, SLOTS: gl.constexpr):
    """The sums of the rows of ``source [programs * ROWS, steps * DEPTH]``, a TMA descriptor, to ``out`` fp32."""
    slots = gl.allocate_shared_memory(source.dtype, [SLOTS] + source.block_type.shape, source.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    ring = (slots, full, empty)
    gl.warp_specialize([(_add, (out, ring, steps)), (_load, (source, ring, steps))], [1], [40])
