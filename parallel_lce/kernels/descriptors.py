"""TMA descriptors: how a kernel addresses a matrix in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from parallel_lce.kernels.device import hopper_or_later

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
