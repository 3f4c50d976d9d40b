"""Tiles by architecture and shape, and what else a launch needs to know of its device.

Nothing is tuned on the hot path: the table below was measured once, by ``python -m
parallel_lce.bench.tune``, which re-derives it on the machine it runs on.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tile:
    """Tokens, vocabulary rows and hidden elements of a tile, and how it is run.

    ``group``: row blocks that walk the vocabulary together; ``flatten``: one loop over tiles and K,
    so that the next tile's loads run under this tile's epilogue.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int
    flatten: bool = False


# (least compute capability, TMA, bytes per element) -> tile; the first that fits. The columns, and so
# the windows, must not depend on the epilogue: kept exponentials meet them again in backward.
_TABLE = (
    (90, True, 2, Tile(128, 256, 64, 8, 3, 16, True)),
    (90, True, 4, Tile(128, 128, 32, 8, 3, 16)),
    (80, False, 2, Tile(128, 128, 32, 8, 3, 16)),
    (0, False, 4, Tile(64, 64, 32, 4, 2, 16)),
)


def tile_of(weight: torch.Tensor, tma: bool) -> Tile:
    """The tile for operands of the weight's dtype on its device, loaded by TMA or by pointers."""
    capability = _capability(weight.device)
    for least, needs_tma, itemsize, tile in _TABLE:
        if capability >= least and tma >= needs_tma and weight.element_size() <= itemsize:
            return tile
    raise ValueError(f"no tile for {weight.dtype} on a device of compute capability {capability}")


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


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A TMA descriptor of ``tensor [R, C]`` in blocks of ``[rows, columns]``."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns])
