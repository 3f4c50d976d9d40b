"""Launches of compiled kernels, with little more host time than the driver's own.

Triton finds a launch's compiled kernel from a description of all arguments, and asks the driver about every pointer.
This takes longer than the launch itself, and longer than the GPU's work on a small vocabulary shard.
:class:`Relaunched` describes only the properties for which Triton compiles: dtypes, alignment, which integers are 1 or
divisible by 16, and constants. It passes pointers as numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.nn import Parameter

T = TypeVar("T")


def next_power_of_2(n: int) -> int:
    """As ``triton.next_power_of_2`` for n > 0, which takes the host several microseconds."""
    return 1 << max(0, n - 1).bit_length()


class _Compiled(NamedTuple):
    """A compiled kernel, loaded for one device."""

    run: Callable
    function: Any
    metadata: Any
    stream: Callable[[int], int]
    device: int
    # Values of the constants, the last arguments.
    last: tuple
    # Triton's own object, which unloads the kernel when it is freed.
    kernel: Any

    def start(self, grid: tuple[int, ...], values: Sequence) -> None:
        """Launch on the current stream. ``values``: addresses, numbers and TMA descriptors."""
        run, function, metadata, stream, device, last, _ = self
        x, y, z = (*grid, 1, 1)[:3]
        # The three None: launch metadata, and the hooks on entry and exit.
        run(x, y, z, stream(device), function, metadata, None, None, None, *values, *last)


class Relaunched:
    """A ``triton.jit`` or ``gluon.jit`` function that remembers its compiled kernels.

    Constants and options are passed by name, all other arguments by position. The first argument is a tensor, a tuple
    that begins with a tensor, or a descriptor; its device must be the current one. From a kernel's second launch on,
    Triton's hooks and knobs have no effect, and addresses of other devices are not detected.
    """

    def __init__(self, function) -> None:
        self._function = function
        self._compiled: dict[tuple, _Compiled] = {}
        # Triton's cache of compiled kernels has none: of two threads one may find a kernel that is not loaded yet.
        self._lock = threading.Lock()
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> _Compiled | None:
        """Launch, and return the compiled kernel; None in Triton's interpreter, which does not compile."""
        first = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        # A kernel is loaded for one device.
        device = getattr(first, "base", first).get_device()
        described, values = [device, *constants.items()], []
        _describe(arguments, described, values)
        key = tuple(described)
        known = self._compiled.get(key)
        if known is None:
            with self._lock:
                known = self._compiled.get(key)
                if known is None:
                    return self._compile(key, grid, arguments, constants)
        known.start(grid, values)
        return known

    def _compile(self, key: tuple, grid: tuple[int, ...], arguments: tuple, constants: dict) -> _Compiled | None:
        """Launch through Triton, which compiles the kernel."""
        # Triton 3.10 changes the default: whether a product and a sum are fused into one instruction.
        compiled = self._function[grid](*arguments, **constants, enable_fp_fusion=True)
        if not hasattr(compiled, "packed_metadata"):
            return None
        from triton.runtime import driver

        last = tuple(constants[name] for name in self._function.arg_names[len(arguments) :])
        stream = driver.active.get_current_stream
        function, metadata = compiled.function, compiled.packed_metadata
        self._compiled[key] = known = _Compiled(compiled.run, function, metadata, stream, key[0], last, compiled)
        return known

    def __getattr__(self, name: str):
        return getattr(self._function, name)


def _describe(arguments: tuple, described: list, values: list) -> None:
    """Add the arguments for the driver to ``values``, tensors as addresses. Add all properties on which Triton
    specializes, and possibly more, to ``described``. Descriptions of different types differ."""
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            address = argument.data_ptr()
            values.append(address)
            # A tuple marks an address that is not 16 bytes aligned.
            described.append((argument.dtype,) if address & 15 else argument.dtype)
        elif kind is int:
            values.append(argument)
            if -(2**31) <= argument < 2**31:
                # Whether it is 1, and whether it is divisible by 16.
                described.append(1 if argument == 1 else 2 if argument & 15 else 16)
            else:
                width = 32 if argument < 2**63 else 64
                described.append(width + (2 if argument & 15 else 16))
        elif argument is None or kind is float:
            values.append(argument)
            described.append(kind)
        elif issubclass(kind, Tensor):
            plain = argument.as_subclass(Tensor)
            if type(plain) is not Tensor:
                raise ValueError(f"no kernel can read a {kind.__name__}, which has a __torch_dispatch__ of its own")
            _describe((plain,), described, values)
        elif issubclass(kind, tuple):
            inner: list = []
            described += kind, len(argument)
            _describe(argument, described, inner)
            values.append(tuple(inner))
        elif hasattr(kind, "from_tensor"):
            values.append(argument)
            described += kind, argument.base.dtype, *argument.block_shape
        else:
            raise TypeError(f"a {kind.__name__} is no argument of a kernel")


_PLAIN = (Tensor, Parameter)


class Bound:
    """Launches of a kernel that differ only in the addresses of their tensors, which may be in tuples.

    Each argument always has the same shape and dtype, or is always None. If all tensors of a launch are 16 bytes
    aligned, its arguments are not described again.
    """

    def __init__(self, kernel: Relaunched, grid: tuple[int, ...], numbers: tuple, **constants) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._known: _Compiled | None = None

    def once(self, *tensors: Any) -> None:
        """As a call, for launches that are not kept: nothing is remembered but the compiled kernel."""
        self._kernel.launch(self._grid, *tensors, *self._numbers, **self._constants)

    def __call__(self, *tensors: Any) -> None:
        addresses, bits = _addresses(tensors)
        if bits & 15:
            self.once(*tensors)
        elif self._known is None:
            self._known = self._kernel.launch(self._grid, *tensors, *self._numbers, **self._constants)
        else:
            self._known.start(self._grid, [*addresses, *self._numbers])


_MOST_KEPT = 1024


def kept(known: dict, traits: Hashable, make: Callable[[], T]) -> T:
    """The value of these ``traits``, made if it is not known."""
    value = known.get(traits)
    if value is None:
        if len(known) >= _MOST_KEPT:
            known.clear()
        value = known[traits] = make()
    return value


def _addresses(arguments: tuple) -> tuple[list, int]:
    """The arguments with addresses in place of tensors, and the union of the addresses' bits."""
    addresses, bits = [], 0
    for argument in arguments:
        if argument is None:
            pass
        elif type(argument) in _PLAIN:
            argument = argument.data_ptr()
            bits |= argument
        elif isinstance(argument, Tensor):
            # As an unaligned address: tensors of other classes are described, and possibly refused.
            bits |= 1
        elif isinstance(argument, tuple):
            inner, inner_bits = _addresses(argument)
            argument = tuple(inner)
            bits |= inner_bits
        addresses.append(argument)
    return addresses, bits
