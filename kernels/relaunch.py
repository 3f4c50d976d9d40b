"""Launch a compiled kernel at little more than the driver's price.

Triton finds the compiled kernel of a launch from a description of all its arguments, and asks the driver about every
pointer. That takes the host longer than the launch itself, and longer than the GPU takes for a small vocabulary shard.
:class:`Relaunched` describes only what Triton compiles for: dtypes, alignment, which integers are 1 or divisible by 16,
and constants. It passes pointers as numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter


def next_power_of_2(n: int) -> int:
    """As ``triton.next_power_of_2``, which takes the host several microseconds."""
    return 1 << max(0, n - 1).bit_length()


_thread = threading.local()


@contextmanager
def observed(observer: Callable[[Relaunched, tuple, tuple, dict], None] | None) -> Iterator[None]:
    """This thread's launches call ``observer(kernel, grid, arguments, constants)`` instead of launching."""
    before = getattr(_thread, "observer", None)
    _thread.observer = observer
    try:
        yield
    finally:
        _thread.observer = before


class Compiled(NamedTuple):
    """A compiled kernel, loaded for one device."""

    run: Callable
    function: Any
    metadata: Any
    stream: Callable[[int], int]
    device: int
    # Values of the constants, which come after the other arguments.
    last: tuple

    def start(self, grid: tuple[int, ...], values: list) -> None:
        """Launch it on the current stream with these arguments: addresses, numbers and TMA descriptors."""
        run, function, metadata, stream, device, last = self
        x, y, z = (*grid, 1, 1)[:3]
        # No launch metadata, and no hooks on entry and exit.
        run(x, y, z, stream(device), function, metadata, None, None, None, *values, *last)


class Relaunched:
    """A ``triton.jit`` or ``gluon.jit`` function that remembers what its launches compiled to.

    Constants and options are passed by name, always in the same order; all other arguments by position. From the
    second launch of a kind on, Triton's hooks and knobs have no effect, and nobody checks that an address is the
    device's. The first argument is a tensor, a tuple that begins with one, or a descriptor; its device must be the
    current one.
    """

    def __init__(self, function) -> None:
        self._function = function
        self._compiled: dict[tuple, Compiled] = {}
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> Compiled | None:
        """Launch it; returns what it compiled to, None in Triton's interpreter and where launches are observed."""
        observer = getattr(_thread, "observer", None)
        if observer is not None:
            return observer(self, grid, arguments, constants)
        # A kernel is loaded for one device.
        described: list = [_device(arguments)]
        values = _describe(arguments, described)
        key = (*described, *constants.values())
        known = self._compiled.get(key)
        if known is None:
            return self._compile(key, grid, arguments, constants)
        known.start(grid, values)
        return known

    def _compile(self, key: tuple, grid: tuple[int, ...], arguments: tuple, constants: dict) -> Compiled | None:
        """Launch it by Triton, which compiles it."""
        # Triton 3.10 changes the default of whether a product and a sum become one instruction.
        compiled = self._function[grid](*arguments, **constants, enable_fp_fusion=True)
        # The interpreter compiles nothing.
        if not hasattr(compiled, "packed_metadata"):
            return None
        from triton.runtime import driver

        last = tuple(constants[name] for name in self._function.arg_names[len(arguments) :])
        stream = driver.active.get_current_stream
        known = Compiled(compiled.run, compiled.function, compiled.packed_metadata, stream, key[0], last)
        self._compiled[key] = known
        return known

    def __getattr__(self, name: str):
        return getattr(self._function, name)


def _describe(arguments: tuple, described: list) -> list:
    """The arguments as the driver takes them: a tensor as its address. Adds to ``described`` everything that Triton
    specializes on, and possibly more. Arguments of different types are described differently."""
    values = list(arguments)
    kinds = tuple(map(type, arguments))
    described.append(kinds)
    for index, kind in enumerate(kinds):
        if kind is Tensor or kind is Parameter:
            tensor = arguments[index]
            values[index] = address = tensor.data_ptr()
            described.append(tensor.dtype)
            if address & 15:
                described.append(index)
        elif kind is int:
            number = arguments[index]
            # 1, else the width and whether it is divisible by 16
            width = 0 if -(2**31) <= number < 2**31 else 32 if number < 2**63 else 64
            described.append(1 if number == 1 else width + (2 if number & 15 else 16))
        elif kind is float or kind is NoneType:
            pass
        elif issubclass(kind, Tensor):
            plain = arguments[index].as_subclass(Tensor)
            if type(plain) is not Tensor:
                raise ValueError(f"no kernel can read a {kind.__name__}, which has a __torch_dispatch__ of its own")
            [values[index]] = _describe((plain,), described)
        elif issubclass(kind, tuple):
            values[index] = tuple(_describe(arguments[index], described))
        elif hasattr(kind, "from_tensor"):
            argument = arguments[index]
            described += argument.base.dtype, *argument.block_shape
        else:
            raise TypeError(f"a {kind.__name__} is no argument of a kernel")
    return values


def _device(arguments: tuple) -> int:
    """That of the first tensor or descriptor."""
    first = arguments[0]
    while isinstance(first, tuple):
        first = first[0]
    return getattr(first, "base", first).get_device()
