"""Launches of compiled kernels, with little more host time than the driver's own.

Triton finds a launch's compiled kernel from a description of all arguments, and asks the driver about every pointer.
This takes longer than the launch itself, and longer than the GPU's work on a small vocabulary shard.
:class:`Relaunched` describes only the properties for which Triton compiles: dtypes, alignment, which integers are 1 or
divisible by 16, and constants. It passes pointers as numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter


def next_power_of_2(n: int) -> int:
    """As ``triton.next_power_of_2`` for n > 0, which takes the host several microseconds."""
    return 1 << max(0, n - 1).bit_length()


class Relaunched:
    """A ``triton.jit`` or ``gluon.jit`` function that remembers its compiled kernels.

    Constants and options are passed by name, all other arguments by position. The first argument is a tensor, a tuple
    that begins with a tensor, or a descriptor; its device must be the current one. From a kernel's second launch on,
    Triton's hooks and knobs have no effect, and addresses of other devices are not detected.
    """

    def __init__(self, function) -> None:
        self._function = function
        # The launches of compiled kernels, each loaded for one device.
        self._compiled: dict[tuple, Callable] = {}
        # Triton's cache of compiled kernels has none: of two threads one may find a kernel that is not loaded yet.
        self._lock = threading.Lock()
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        """Launch on the current stream of the first argument's device."""
        first = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        device = getattr(first, "base", first).get_device()
        described: list = [device, *constants, *constants.values()]
        values = _describe(arguments, described)
        key = tuple(described)
        start = self._compiled.get(key)
        if start is None:
            with self._lock:
                start = self._compiled.get(key)
                if start is None:
                    return self._compile(key, grid, arguments, constants)
        start(grid, values)

    def _compile(self, key: tuple, grid: tuple[int, ...], arguments: tuple, constants: dict) -> None:
        """Launch through Triton, which compiles the kernel; in its interpreter it does not."""
        # Triton 3.10 changes the default: whether a product and a sum are fused into one instruction.
        compiled = self._function[grid](*arguments, **constants, enable_fp_fusion=True)
        if not hasattr(compiled, "packed_metadata"):
            return
        from triton.runtime import driver

        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        stream, device = driver.active.get_current_stream, key[0]
        last = tuple(constants[name] for name in self._function.arg_names[len(arguments) :])

        def start(grid: tuple[int, ...], values: Sequence) -> None:
            """Launch on the current stream. ``values``: addresses, numbers and TMA descriptors."""
            x, y, z = (*grid, 1, 1)[:3]
            # The three None: launch metadata, and the hooks on entry and exit.
            run(x, y, z, stream(device), function, metadata, None, None, None, *values, *last)

        start.kernel = compiled  # Triton unloads a kernel when this is freed
        self._compiled[key] = start

    def __getattr__(self, name: str):
        return getattr(self._function, name)


def _describe(arguments: tuple, described: list) -> Sequence:
    """The arguments for the driver, tensors as addresses. Adds all properties on which Triton specializes, and possibly
    more, to ``described``. Most arguments of a launch are None, of which their type says everything."""
    kinds = tuple(map(type, arguments))
    places = _PLACES.get(kinds)
    if places is None:
        places = _PLACES[kinds] = _places_of(kinds)
    kinds, tensors, integers, tuples, others = places
    described.append(kinds)
    if not (tensors or integers or tuples or others):
        return arguments
    values = [*arguments]
    for place in tensors:
        tensor = arguments[place]
        values[place] = address = tensor.data_ptr()
        # A tuple marks an address that is not 16 bytes aligned.
        described.append((tensor.dtype,) if address & 15 else tensor.dtype)
    for place in integers:
        number = arguments[place]
        if -(2**31) <= number < 2**31:
            # Whether it is 1, and whether it is divisible by 16.
            described.append(1 if number == 1 else 2 if number & 15 else 16)
        else:
            width = 32 if number < 2**63 else 64
            described.append(width + (2 if number & 15 else 16))
    for place in tuples:
        values[place] = tuple(_describe(arguments[place], described))
    for place in others:
        argument = arguments[place]
        if isinstance(argument, Tensor):
            plain = argument.as_subclass(Tensor)
            if type(plain) is not Tensor:
                kind = type(argument).__name__
                raise ValueError(f"no kernel can read a {kind}, which has a __torch_dispatch__ of its own")
            [values[place]] = _describe((plain,), described)
        else:
            described += argument.base.dtype, *argument.block_shape
    return values


_PLACES: dict[tuple[type, ...], tuple] = {}
"""By the types of arguments: the types to a kernel, and where there are tensors, integers, tuples, and other things
that are described one by one."""


def _places_of(kinds: tuple[type, ...]) -> tuple:
    tensors, integers, tuples, others = [], [], [], []
    for place, kind in enumerate(kinds):
        if kind is Tensor or kind is Parameter:
            tensors.append(place)
        elif kind is int:
            integers.append(place)
        elif issubclass(kind, tuple):
            tuples.append(place)
        elif issubclass(kind, Tensor) or hasattr(kind, "from_tensor"):
            others.append(place)
        elif kind not in (type(None), float):
            raise TypeError(f"a {kind.__name__} is no argument of a kernel")
    # To a kernel a parameter is a tensor.
    return tuple([Tensor if kind is Parameter else kind for kind in kinds]), tensors, integers, tuples, others
