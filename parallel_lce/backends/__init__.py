"""Backends: the work on one block of tokens against one vocabulary shard, without collectives.

Each is a module, ``torch_backend`` or ``triton``, that satisfies :mod:`parallel_lce.backends.interface`. This module
chooses one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_lce.core.private import FakeTensor, constant_in_graphs, recording

if TYPE_CHECKING:
    from parallel_lce.backends.interface import Backend

VARIABLE = "PARALLEL_LCE_BACKEND"


def backend_of(matrix: Tensor, suitable: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)) -> Backend:
    """The backend for the device and dtype of a weight, or of logits; or the one that ``PARALLEL_LCE_BACKEND`` names.

    By default triton for the ``suitable`` dtypes on NVIDIA devices of capability 8.0 and later where Triton is
    installed, else torch. float64 always runs in the torch backend. The variable is read at each call, or when the call
    is compiled. Raises ``ValueError`` for a tensor without values, under torch.export, torch.jit.trace and make_fx.
    """
    # For Dynamo every tensor is fake.
    traced = not torch.compiler.is_dynamo_compiling() and (isinstance(matrix, FakeTensor) or recording())
    if matrix.is_meta or traced:
        where = "not on the meta device, fake, in torch.export, torch.jit.trace or make_fx"
        raise ValueError(f"parallel_lce needs tensors with values: {where}")
    # Kernels cannot run with D = 0.
    return named("torch" if matrix.shape[1] == 0 else _name(matrix.device, matrix.dtype, suitable))


def named(name: str) -> Backend:
    if name == "triton":
        from parallel_lce.backends import triton

        return triton
    from parallel_lce.backends import torch_backend

    return torch_backend


def check_choice() -> str:
    """The backend that the environment names. Raises ``ValueError`` for any other name."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "torch", "triton"):
        raise ValueError(f"{VARIABLE}={asked!r} is none of 'torch', 'triton' and '' (the default)")
    return asked


@constant_in_graphs
def _name(device: torch.device, dtype: torch.dtype, suitable: tuple[torch.dtype, ...]) -> str:
    asked, on_cuda = check_choice(), device.type == "cuda" and torch.version.hip is None
    if asked == "torch" or dtype == torch.float64:
        return "torch"
    if asked == "triton":
        if not _triton_installed():
            raise ValueError(f"{VARIABLE}=triton, but the package triton is not installed")
        if not on_cuda and os.environ.get("TRITON_INTERPRET", "0") != "1":
            raise ValueError(
                f"{VARIABLE}=triton on {device}: kernels run on CUDA devices, and elsewhere only "
                "under TRITON_INTERPRET=1"
            )
        return "triton"
    if on_cuda and dtype in suitable and _triton_installed() and torch.cuda.get_device_capability(device) >= (8, 0):
        return "triton"
    return "torch"


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
