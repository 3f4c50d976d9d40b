"""Backends: the work on one block of tokens against one vocabulary shard, without collectives.

Each is a module with the same functions over :mod:`parallel_lce.backends.blocks`; ``eager``, the
torch backend, says what they do:

    SMALLEST_ACCUMULATED: int
    keepable(dtype, softcap) -> bool
    allocate_kept(projection, rows, columns) -> Tensor
    block_forward(projection, x, target, columns, kept, buffer=None) -> (partial, Kept)
    block_backward(projection, x, target, statistics, coefficients, kept, to, scratch) -> None
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

VARIABLE = "PARALLEL_LCE_BACKEND"
CHOICES = ("", "torch", "triton")


def backend_of(weight: Tensor) -> ModuleType:
    """The backend for a weight's device and dtype, or the one that ``PARALLEL_LCE_BACKEND`` names.

    By default triton for bf16 and fp16 on CUDA devices of capability 8.0 and later where Triton is
    installed, else torch. float64 is always torch's.
    """
    return importlib.import_module(f"parallel_lce.backends.{_name(weight)}")


def _name(weight: Tensor) -> str:
    asked = os.environ.get(VARIABLE, "")
    if asked not in CHOICES:
        raise ValueError(
            f"{VARIABLE}={asked!r} is none of 'torch', 'triton' and '' (the default)"
        )
    if asked == "torch" or weight.dtype == torch.float64:
        return "eager"
    if asked == "triton":
        if not _triton_installed():
            raise ValueError(f"{VARIABLE}=triton, but the package triton is not installed")
        if not weight.is_cuda and os.environ.get("TRITON_INTERPRET", "0") != "1":
            raise ValueError(
                f"{VARIABLE}=triton on {weight.device}: kernels run on CUDA devices, and "
                "elsewhere only under TRITON_INTERPRET=1"
            )
        return "triton"
    suits = weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
    if suits and _triton_installed() and _capability(weight.device) >= (8, 0):
        return "triton"
    return "eager"


@functools.cache
def _triton_installed() -> bool:
    names = ("triton", "parallel_lce.backends.triton")
    return all(importlib.util.find_spec(name) is not None for name in names)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
