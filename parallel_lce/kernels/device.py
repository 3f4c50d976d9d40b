"""Facts of a device on which launches depend, and TMA descriptors: how a kernel addresses a matrix in blocks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from parallel_lce.kernels.tuning import MEASURED


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def generation(device: torch.device) -> int:
    """9 for Hopper, 10 for Blackwell."""
    return _capability(device) // 10


def hopper_or_later(device: torch.device) -> bool:
    return _capability(device) >= 90


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of SMs (4 for the interpreter): a persistent kernel starts one program on each."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def blocks_per_launch(row_blocks: int, windows: int, programs: int, block_bytes: int) -> int:
    """Row blocks per launch: few enough that the operands stay in the L2 cache, and enough that the last wave is
    nearly full. A row block of x has ``block_bytes``.

    In a long launch the programs drift apart until they no longer share loads in the L2 cache. The next launch starts
    them in step again. A launch over few windows is short and may have more row blocks, which saves host time.
    """
    waves = MEASURED.most_waves * programs // windows
    more = min(MEASURED.most_row_blocks, waves, MEASURED.most_hidden_bytes // block_bytes)
    usual = MEASURED.row_blocks
    candidates = range(usual[0], max(usual[-1], more) + 1)
    if row_blocks <= candidates[-1]:
        return max(1, row_blocks)

    def cost(blocks: int) -> tuple[int, int, int]:
        whole, rest = divmod(row_blocks, blocks)
        waves = whole * -(-blocks * windows // programs) + -(-rest * windows // programs)
        return waves, whole + (rest > 0), abs(blocks - 16)

    return min(candidates, key=cost)


_MOST_DESCRIPTORS = 1024


def addressable(*tensors: torch.Tensor) -> bool:
    """Whether TMA can address these matrices: Hopper and later, with contiguous rows 16 bytes aligned."""
    for t in tensors:
        aligned = t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0
        if not (aligned and t.stride(1) == 1 and min(t.shape) > 0 and hopper_or_later(t.device)):
            return False
    return True


_descriptors: dict[tuple, tuple[type, dict]] = {}


def descriptor(
    tensor: torch.Tensor,
    rows: int,
    columns: int,
    new: Callable[[torch.Tensor, list[int]], Any] = TensorDescriptor.from_tensor,
) -> Any:
    """A TMA descriptor of an :func:`addressable` matrix in blocks of ``[rows, columns]``, as ``new`` makes it.

    The constructor's checks take most of its time. They are made once per shape, strides, dtype and block,
    but for the address, which the caller has checked."""
    key = tensor.shape, tensor.stride(), tensor.dtype, rows, columns, new
    known = _descriptors.get(key)
    if known is None:
        made = new(tensor, [rows, columns])
        fields = {name: value for name, value in vars(made).items() if name != "base"}
        if len(_descriptors) >= _MOST_DESCRIPTORS:
            _descriptors.clear()
        _descriptors[key] = type(made), fields
        return made
    kind, fields = known
    new = object.__new__(kind)
    new.__dict__.update(fields, base=tensor)
    return new
