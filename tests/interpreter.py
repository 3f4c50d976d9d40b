"""Triton's interpreter, made to round as GPUs do, so that one bound serves for both; and without work that shows
nothing, which took most of its time.

By itself it cuts fp32 off to bf16 where a GPU rounds to nearest, and its maximum with NaN is NaN.
"""

import dataclasses
import functools
import math

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_convert = interpreter._convert_float


def _rounded(data, source, destination, rounding_mode):
    if source != tl.float32 or destination != tl.bfloat16:
        return _convert(data, source, destination, rounding_mode)
    bits = np.ascontiguousarray(data).view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), nearest)


def round_as_gpus_do() -> None:
    interpreter._convert_float = _rounded
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)


_patch_lang = interpreter._patch_lang
_broadcast = TritonSemantic.broadcast_impl_value


@functools.cache
def _patched(function):
    """Triton's language stays the interpreter's once it is. The interpreter looks for what to replace at every launch,
    and at every call of one function by another, as often as it is called."""
    scope = _patch_lang(function)
    scope._changes.clear()  # what it would restore
    return scope


def _constants(shape: tuple[int, ...]):
    """What a tensor has for its number of elements, and for its shape."""
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


@functools.cache
def _block(shape: tuple[int, ...]):
    return tl.tuple(shape), validate_block_shape(shape), _constants(shape)


def _init_block_type(self, element_ty, shape) -> None:
    self.element_ty = element_ty
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    self.shape, self.numel, self.constants = _block(sizes)


def _init_tensor(self, handle, type) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.constants


def _spared_broadcast(self, lhs, rhs):
    """Equal shapes are one object."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


def spare_work() -> None:
    interpreter._patch_lang = _patched
    tl.tensor.__init__ = _init_tensor
    tl.dtype.constants = _constants(())
    tl.block_type.__init__ = _init_block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.to_ir = lambda self, builder: self
    TritonSemantic.broadcast_impl_value = _spared_broadcast
    # The kernels' arguments lie on the host. Copies of them would be kept alive by functions that refer to themselves.
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, options: (arguments, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None
    builder = interpreter.interpreter_builder
    # It computes for each sum of integers whether it overflows, and then does not look at the answer.
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
