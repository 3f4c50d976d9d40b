"""Triton's interpreter, made to round as GPUs do, so that one bound serves for both; and without idle work.

By itself it cuts fp32 off to bf16 where a GPU rounds to nearest, and its maximum with NaN is NaN."""

import functools
import inspect
import math

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_convert = interpreter._convert_float


def _rounded(data, source, destination, rounding_mode):
    if source == tl.bfloat16 and destination == tl.float32:
        return data.astype(np.uint32) << 16
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
_create_splat, _create_dot = interpreter.InterpreterBuilder.create_splat, interpreter.InterpreterBuilder.create_dot


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
    """And types of the shape, by the element's."""
    return tl.tuple(shape), shape, validate_block_shape(shape), _constants(shape), {}


def _init_block_type(self, element_ty, shape) -> None:
    self.element_ty = element_ty
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    self.shape, self.sizes, self.numel, self.constants, self.others = _block(sizes)


def _with_element_ty(self, element_ty):
    name = element_ty.name
    if name not in self.others:
        self.others[name] = tl.block_type(element_ty, self.shape)
    return self.others[name]


def _init_tensor(self, handle, type) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.constants


def _spared_broadcast(self, lhs, rhs):
    """Equal shapes are one object."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


def _patch_attr(owner, name, member, builder, scope) -> None:
    """With one call, not three, around what is called."""
    function = inspect.unwrap(member)

    def call(*arguments, **options):
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **options)

    direct = _DIRECT.get(name) if owner in (tl, tl.core, tl.tensor) else None
    scope.set_attr(owner, name, direct(call) if direct else call)


# --- operators by NumPy alone: Triton checks and converts for longer than NumPy computes ------------------------------
# Each takes Triton's operator, and gives one that calls it for other operands than usual.

# Numbers of these types are NumPy's. bf16 is kept as integers, and fp16 is divided in fp32.
_NUMBERS = {tl.float32: float, tl.float64: float, tl.int32: int, tl.int64: int}
tl.dtype.numbers = None
for _dtype, _kind in _NUMBERS.items():
    _dtype.numbers = _kind


def _result(data, dtype, block: bool):
    return tl.tensor(TensorHandle(data, dtype), _with_element_ty(_of_shape(data.shape), dtype) if block else dtype)


@functools.cache
def _of_shape(shape: tuple[int, ...]):
    return tl.block_type(tl.int1, shape)


def _number(value, kind):
    """A number that takes a tensor's type, or None."""
    value = value.value if isinstance(value, tl.constexpr) else value
    return value if value.__class__ is kind or value.__class__ is int and -(1 << 31) <= value < 1 << 31 else None


def _operator(function, compares=False, swaps=False):
    def direct(call):
        def operator(a, b, **options):
            dtype, y = a.dtype, None
            block, kind = a.type.__class__ is tl.block_type, dtype.numbers
            if kind is not None and (kind is float or function is not np.divide):
                if not isinstance(b, tl.tensor):
                    y = _number(b, kind)
                elif b.dtype is dtype or kind is int and b.dtype.numbers is int:
                    y, block = b.handle.data, block or b.type.__class__ is tl.block_type
                    dtype = dtype if b.dtype is dtype else tl.int64
            elif function is np.add and dtype.__class__ is tl.pointer_type:
                if isinstance(b, tl.tensor) and b.dtype.numbers is int:
                    y, block = _bytes(b.handle.data, dtype.element_ty), block or b.type.__class__ is tl.block_type
            if y is None:
                return call(a, b, **options)
            x = a.handle.data
            return _result(function(y, x) if swaps else function(x, y), tl.int1 if compares else dtype, block)

        return operator

    return direct


def _bytes(elements, dtype):
    return elements.astype(np.uint64) * max(1, dtype.primitive_bitwidth // 8)


_ARITHMETIC = dict(add=np.add, sub=np.subtract, mul=np.multiply, truediv=np.divide)
_COMPARISONS = dict(lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal, eq=np.equal, ne=np.not_equal)
_DIRECT = {f"__{name}__": _operator(function) for name, function in _ARITHMETIC.items()}
_DIRECT |= {f"__r{name}__": _operator(function, swaps=True) for name, function in _ARITHMETIC.items()}
_DIRECT |= {f"__{name}__": _operator(function, compares=True) for name, function in _COMPARISONS.items()}


def _splat(self, type, value):
    if value.dtype.is_block():
        return _create_splat(self, type, value)
    return TensorHandle(np.full(type.sizes, value.data, value.data.dtype), value.dtype)


def _dot(self, a, b, d, *precision):
    """Operands of the sum's type go to BLAS."""
    a, b = (TensorHandle(x.data.astype(d.data.dtype, copy=False), d.dtype) for x in (a, b))
    return _create_dot(self, a, b, d, *precision)


def _reduced(self, parts):
    """By halves, as a tree of whole arrays. The interpreter calls a function of the kernels' own for each element."""
    assert self.axis is not None and not self.keep_dims
    dtypes, arrays = [part.dtype for part in parts], [part.handle.data for part in parts]
    while arrays[0].shape[self.axis] > 1:
        halves = zip(*(np.split(array, 2, self.axis) for array in arrays))
        given = [_result(array, dtype, True) for half in halves for array, dtype in zip(half, dtypes)]
        found = self.combine_fn.fn(*given)
        arrays = [each.handle.data for each in (found if len(parts) > 1 else [found])]
    return [self.to_tensor(array.squeeze(self.axis), dtype) for array, dtype in zip(arrays, dtypes)]


def spare_work() -> None:
    interpreter.ReduceOps.generic_reduce = _reduced
    interpreter._patch_lang, interpreter._patch_attr = _patched, _patch_attr
    TensorHandle.__post_init__ = lambda self: None
    interpreter.InterpreterBuilder.create_splat = _splat
    interpreter.InterpreterBuilder.create_dot = _dot
    tl.block_type.with_element_ty = _with_element_ty
    tl.tensor.__init__ = _init_tensor
    tl.dtype.constants = _constants(())
    tl.block_type.__init__ = _init_block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.to_ir = lambda self, builder: self
    TritonSemantic.broadcast_impl_value = _spared_broadcast
    # The kernels' arguments lie on the host. Copies of them would be kept alive by functions that refer to themselves.
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, options: (arguments, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None
