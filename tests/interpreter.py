"""Triton's interpreter, made to round as GPUs do, so that one bound serves for both.

By itself it cuts fp32 off to bf16 where a GPU rounds to nearest, and rounds a fused multiply-add
twice, which loses at |z| of 300 what the kernels take care to keep.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float


def _rounded(data, source, destination, rounding_mode):
    if source != tl.float32 or destination != tl.bfloat16:
        return _convert(data, source, destination, rounding_mode)
    bits = np.ascontiguousarray(data).view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), nearest)


def _fma(self, x, y, z):
    with np.errstate(all="ignore"):  # infinities and NaN are as good as numbers
        found = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(found.astype(z.data.dtype), z.dtype.scalar)


def round_as_gpus_do() -> None:
    interpreter._convert_float = _rounded
    interpreter.InterpreterBuilder.create_fma = _fma
