"""Launch a compiled kernel at little more than the driver's price.

Triton finds the compiled kernel of a launch from a description of all its arguments, and asks the driver about every
pointer. That takes the host longer than the launch itself, and longer than the GPU takes for a small vocabulary shard.
:class:`Relaunched` describes only what Triton compiles for: dtypes, alignment, which integers are 1 or divisible by 16,
and constants. It passes pointers as numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter


def next_power_of_2(n: int) -> int:
    """As ``triton.next_power_of_2``, which takes the host several microseconds."""
    return 1 << max(0, n - 1).bit_length()


_thread = threading.local()


class _Compiled(NamedTuple):
    """A compiled kernel, loaded for one device."""

    run: Callable
    function: Any
    metadata: Any
    stream: Callable[[int], int]
    device: int
    # Values of the constants, which come after the other arguments.
    last: tuple

    def start(self, grid: tuple[int, ...], values: Sequence) -> None:
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
        self._compiled: dict[tuple, _Compiled] = {}
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        first = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        # A kernel is loaded for one device.
        device = getattr(first, "base", first).get_device()
        described, values = [device, *constants.values()], []
        _describe(arguments, described, values)
        key = tuple(described)
        known = self._compiled.get(key)
        if known is None:
            known = self._compile(key, grid, arguments, constants)
        else:
            known.start(grid, values)
        launches = getattr(_thread, "launches", None)
        if launches is not None:
            launches.append((known, grid, arguments))

    def _compile(self, key: tuple, grid: tuple[int, ...], arguments: tuple, constants: dict) -> _Compiled | None:
        """Launch it by Triton, which compiles it. None in Triton's interpreter, which does not."""
        # Triton 3.10 changes the default of whether a product and a sum become one instruction.
        compiled = self._function[grid](*arguments, **constants, enable_fp_fusion=True)
        if not hasattr(compiled, "packed_metadata"):
            return None
        from triton.runtime import driver

        last = tuple(constants[name] for name in self._function.arg_names[len(arguments) :])
        stream = driver.active.get_current_stream
        known = _Compiled(compiled.run, compiled.function, compiled.packed_metadata, stream, key[0], last)
        self._compiled[key] = known
        return known

    def __getattr__(self, name: str):
        return getattr(self._function, name)


def _describe(arguments: tuple, described: list, values: list) -> None:
    """Add to ``values`` the arguments as the driver takes them: a tensor as its address. Add to ``described``
    everything that Triton specializes on, and possibly more. Arguments of different types are described differently."""
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            address = argument.data_ptr()
            values.append(address)
            # Whether it is 16 bytes aligned.
            described.append((argument.dtype,) if address & 15 else argument.dtype)
        elif kind is int:
            values.append(argument)
            if -(2**31) <= argument < 2**31:
                # 1, and whether it is divisible by 16
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


class Launches:
    """Launches that one piece of code makes again and again, with other tensors of the same kinds.

    The first run of a kind makes them as they are written. Later runs start the same compiled kernels with the same
    numbers and the new tensors' addresses: between two launches the host has nothing else to do.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[_Compiled, tuple[int, ...], _Template]]] = {}

    def run(self, kind: Hashable, tensors: Sequence[Tensor | None], make: Callable[[], None]) -> None:
        """``make()``, which does nothing but launches, or these again. All memory that they use is in ``tensors``,
        contiguous or as TMA takes it. ``kind`` tells everything on which the launches depend but the tensors'
        addresses: also what these are modulo 16."""
        known = self._known.get(kind)
        if known is not None:
            addresses = [0 if t is None else t.data_ptr() for t in tensors]
            for compiled, grid, template in known:
                compiled.start(grid, template.filled(addresses, tensors))
            return
        _thread.launches = launches = []
        try:
            make()
        finally:
            _thread.launches = None
        made: list | None = []
        for compiled, grid, arguments in launches:
            template = None if compiled is None else _Template.of(arguments, tensors)
            made = None if made is None or template is None else [*made, (compiled, grid, template)]
        if made is not None:
            self._known[kind] = made


class _Template(NamedTuple):
    """The arguments of a launch, with places for what changes: their positions."""

    values: list
    # Position, number of the tensor, and bytes after its first.
    addresses: list[tuple[int, int, int]]
    # Position, class, fields but the tensor, and number of the tensor.
    descriptors: list[tuple[int, type, dict, int]]
    nested: list[tuple[int, _Template]]

    @classmethod
    def of(cls, arguments: Sequence, tensors: Sequence[Tensor | None]) -> _Template | None:
        """None if an argument lies in none of ``tensors``."""
        new = cls(list(arguments), [], [], [])
        for position, argument in enumerate(arguments):
            if isinstance(argument, tuple):
                nested = cls.of(argument, tensors)
                if nested is None:
                    return None
                new.nested.append((position, nested))
                continue
            tensor = getattr(argument, "base", None) if hasattr(type(argument), "from_tensor") else argument
            if not isinstance(tensor, Tensor):
                continue
            place = _place(tensor, tensors)
            if place is None or (tensor is not argument and place[1]):
                return None
            new.values[position] = None  # No tensor is kept alive.
            if tensor is argument:
                new.addresses.append((position, *place))
            else:
                fields = {name: value for name, value in vars(argument).items() if name != "base"}
                new.descriptors.append((position, type(argument), fields, place[0]))
        return new

    def filled(self, addresses: Sequence[int], tensors: Sequence[Tensor | None]) -> list:
        values = self.values.copy()
        for position, number, offset in self.addresses:
            values[position] = addresses[number] + offset
        for position, kind, fields, number in self.descriptors:
            # The checks of its constructor were made at the first run.
            values[position] = descriptor = object.__new__(kind)
            descriptor.__dict__.update(fields, base=tensors[number])
        for position, template in self.nested:
            values[position] = tuple(template.filled(addresses, tensors))
        return values


def _place(tensor: Tensor, tensors: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """In which of ``tensors`` it begins, and how many bytes after the first. None if it is not one alone."""
    address, found = tensor.data_ptr(), []
    for number, other in enumerate(tensors):
        if other is not None and tensor.numel() and other.numel():
            offset = address - other.data_ptr()
            if 0 <= offset < other.numel() * other.element_size():
                found.append((number, offset))
    return found[0] if len(found) == 1 else None
