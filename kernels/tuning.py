"""Tiles by architecture and shape, and what else a launch needs to know of its device.

Nothing is tuned on the hot path: the table below was measured once, by ``python -m
parallel_lce.bench.tune``, which re-derives it on the machine it runs on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tile:
    """Tokens, vocabulary rows and hidden elements of a tile, and how it is run.

    ``specialised``: by the warp-specialised mainloop of :mod:`parallel_lce.kernels.hopper`, which
    gives up a stage for what it stores.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    specialised: bool = False


_SPECIALISED = Tile(128, 256, 64, 8, 4, specialised=True)
# (major compute capabilities, TMA, bytes per element) -> tile; elsewhere _MODEST, which fits the shared
# memory of every device since Ampere, and the registers that sums without tensor cores take in fp32.
_TABLE = {((9, 10), True, 2): Tile(128, 256, 64, 8, 3)}
_MODEST = {2: Tile(128, 128, 32, 8, 3), 4: Tile(64, 64, 32, 4, 2)}
# Row blocks of a launch, which walk the vocabulary together; more, up to so many, of at most so many waves and
# bytes, of which the L2 cache has room for most.
_BLOCKS = range(12, 21)
_MORE_BLOCKS, _WAVES, _BYTES = 33, 32, 36 << 20
# Processors that NCCL takes for a collective of large tensors, and the flops of a product while a byte arrives: an
# H200 does some 700e12 a second and receives 340e9 bytes.
_COLLECTIVE, _FLOPS_PER_BYTE = 24, 2048
_forced: tuple[Tile, int] | None = None


def tile_of(weight: torch.Tensor, tma: bool) -> Tile:
    """The tile for operands of the weight's dtype on its device, loaded by TMA or by pointers.

    It must not depend on the epilogue: the backward meets the forward's windows again.
    """
    major = _capability(weight.device) // 10
    if _forced is not None:
        return _forced[0]
    if tma and major == 9 and weight.element_size() == 2 and _has_gluon():
        return _SPECIALISED
    for (majors, with_tma, itemsize), tile in _TABLE.items():
        if major in majors and tma == with_tma and weight.element_size() == itemsize:
            return tile
    return _MODEST[weight.element_size()]


@contextmanager
def forced(tile: Tile, blocks: int) -> Iterator[None]:
    """This tile and these row blocks per launch for every product: for measuring them."""
    global _forced
    before = _forced
    _forced = tile, blocks
    blocks_per_launch.cache_clear()
    try:
        yield
    finally:
        _forced = before
        blocks_per_launch.cache_clear()


@functools.cache
def _has_gluon() -> bool:
    """Whether Triton has Gluon, which is experimental, in the form that the kernel is written in and
    tested with. Its interpreter has none."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return (3, 6) <= version < (3, 8) and not interpreted()


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def processors(device: torch.device) -> int:
    """Programs that a persistent kernel starts."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def beside_collective(programs: int) -> int:
    """Programs that are started where a collective has some of the processors: those for which there is none
    would wait until it ends, or the others do."""
    return max(programs // 2, programs - _COLLECTIVE)


def rows_beside_gather(rows: int, itemsize: int, columns: int) -> int:
    """Rows whose product with ``columns`` vocabulary rows takes about as long as receiving ``rows`` such rows."""
    return max(1, rows * itemsize * _FLOPS_PER_BYTE // (2 * columns))


@functools.cache
def blocks_per_launch(row_blocks: int, windows: int, programs: int, block_bytes: int) -> int:
    """Row blocks of ``block_bytes`` each to give a launch, so that both operands are met in the L2 cache and
    little is lost in last waves.

    Programs drift apart in a long launch, until they no longer share what they load; the next one
    starts in step again. Launches over few windows are short, and may have more row blocks: the fewer
    launches, the better for the host.
    """
    if _forced is not None:
        return max(1, min(row_blocks, _forced[1]))
    more = min(_MORE_BLOCKS, _WAVES * programs // windows, _BYTES // block_bytes)
    candidates = range(_BLOCKS[0], max(_BLOCKS[-1], more) + 1)
    if row_blocks <= candidates[-1]:
        return max(1, row_blocks)

    def cost(blocks: int) -> tuple[int, int, int]:
        whole, rest = divmod(row_blocks, blocks)
        waves = whole * -(-blocks * windows // programs) + -(-rest * windows // programs)
        return waves, whole + (rest > 0), abs(blocks - 16)

    return min(candidates, key=cost)


def addressable(*tensors: torch.Tensor) -> bool:
    """Whether TMA can address the tensors, ``[rows, columns]`` each: Hopper and later, and rows that
    begin at multiples of 16 bytes and are contiguous."""
    return all(
        _capability(t.device) >= 90
        and t.data_ptr() % 16 == 0
        and t.stride(1) == 1
        and t.stride(0) * t.element_size() % 16 == 0
        and min(t.shape) > 0
        for t in tensors
    )


def descriptor(tensor: torch.Tensor, rows: int, columns: int, gluon: bool):
    """A TMA descriptor of ``tensor [R, C]`` in blocks of ``[rows, columns]``, for Triton or Gluon."""
    if not gluon:
        return TensorDescriptor.from_tensor(tensor, [rows, columns])
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    layout = _shared_layout(rows, columns, tensor.dtype)
    return GluonDescriptor.from_tensor(tensor, [rows, columns], layout)


@functools.cache
def _shared_layout(rows: int, columns: int, dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    element = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)
