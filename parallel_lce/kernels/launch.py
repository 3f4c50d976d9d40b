"""How kernels are launched: facts of a device, TMA descriptors, and launches of compiled kernels.

Triton finds a launch's compiled kernel from a description of all arguments, and asks the driver about every pointer.
This takes longer than the launch itself, and longer than the GPU's work on a small vocabulary shard.
:class:`Relaunched` describes only the properties for which Triton compiles: dtypes, alignment, which integers are 1 or
divisible by 16, and constants. It passes pointers as numbers."""

from __future__ import annotations

import functools
import os
import threading

import torch
from torch import Tensor
from torch.nn import Parameter
from triton.tools.tensor_descriptor import TensorDescriptor

from parallel_lce.kernels.tuning import MOST_HIDDEN_BYTES, MOST_ROW_BLOCKS, MOST_WAVES, ROW_BLOCKS


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def generation(device: torch.device) -> int:
    """8 for Ampere, 9 for Hopper and the interpreter, 10 for Blackwell."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of SMs (4 for the interpreter): a persistent kernel starts one program on each."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def blocks_per_launch(row_blocks: int, windows: int, programs: int, block_bytes: int) -> int:
    """Row blocks per launch: few enough that the operands stay in the L2 cache, and enough that the last wave is
    nearly full. A row block of x has ``block_bytes``.

    In a long launch the programs drift apart until they no longer share loads in the L2 cache. The next launch starts
    them in step again. A launch over few windows is short and may have more row blocks, which saves host time.
    """
    waves = MOST_WAVES * programs // windows
    more = min(MOST_ROW_BLOCKS, waves, MOST_HIDDEN_BYTES // block_bytes)
    candidates = range(ROW_BLOCKS[0], max(ROW_BLOCKS[-1], more) + 1)
    if row_blocks <= candidates[-1]:
        return max(1, row_blocks)

    def cost(blocks: int) -> tuple[int, int, int]:
        whole, rest = divmod(row_blocks, blocks)
        waves = whole * -(-blocks * windows // programs) + -(-rest * windows // programs)
        return waves, whole + (rest > 0), abs(blocks - 16)

    return min(candidates, key=cost)


def addressable(*tensors: torch.Tensor) -> bool:
    """Whether TMA can address these matrices: Hopper and later, with contiguous rows 16 bytes aligned."""
    for t in tensors:
        aligned = t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0
        if not (aligned and t.stride(1) == 1 and min(t.shape) > 0 and generation(t.device) >= 9):
            return False
    return True


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A TMA descriptor of an :func:`addressable` matrix in blocks of ``[rows, columns]``."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


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
        # Compiled kernels, each loaded for one device, with what a launch needs: the functions of Triton that launch it
        # and that find the current stream, the handle of the driver, metadata, and constants.
        self._compiled: dict[tuple, tuple] = {}
        # Triton's cache of compiled kernels has none: of two threads one may find a kernel that is not loaded yet.
        self._lock = threading.Lock()

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        """Launch on the current stream of the first argument's device."""
        first = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        device = getattr(first, "base", first).get_device()
        described: list = [device, *constants, *constants.values()]
        values = _describe(arguments, described)
        key = tuple(described)
        known = self._compiled.get(key)
        if known is None:
            with self._lock:
                known = self._compiled.get(key)
                if known is None:
                    return self._compile(key, grid, arguments, constants)
        _, run, stream, function, metadata, last = known
        x, y, z = (*grid, 1, 1)[:3]
        # The three None: launch metadata, and the hooks on entry and exit.
        run(x, y, z, stream(device), function, metadata, None, None, None, *values, *last)

    def _compile(self, key: tuple, grid: tuple[int, ...], arguments: tuple, constants: dict) -> None:
        """Launch through Triton, which compiles the kernel; in its interpreter it does not."""
        # Triton 3.10 changes the default: whether a product and a sum are fused into one instruction.
        compiled = self._function[grid](*arguments, **constants, enable_fp_fusion=True)
        if not hasattr(compiled, "packed_metadata"):
            return
        from triton.runtime import driver

        stream = driver.active.get_current_stream
        last = tuple(constants[name] for name in self._function.arg_names[len(arguments) :])
        # Triton unloads a kernel when ``compiled`` is freed.
        self._compiled[key] = compiled, compiled.run, stream, compiled.function, compiled.packed_metadata, last


def _describe(arguments: tuple, described: list) -> list:
    """The arguments for the driver, tensors as addresses. Adds all properties on which Triton specializes, and possibly
    more, to ``described``."""
    values = []
    for argument in arguments:
        kind = type(argument)
        if argument is None or kind is float:
            described.append(kind)
        elif kind is int:
            # Whether it is 1, whether it is divisible by 16, and, beyond 32 bits, its width.
            described.append(1 if argument == 1 else 2 if argument & 15 else 16)
            if not -(2**31) <= argument < 2**31:
                described.append(64 if argument < 2**63 else 65)
        elif isinstance(argument, tuple):
            described += kind, len(argument)
            argument = tuple(_describe(argument, described))
        elif isinstance(argument, Tensor):
            if kind is not Tensor and kind is not Parameter:
                argument = argument.as_subclass(Tensor)
                if type(argument) is not Tensor:
                    raise ValueError(f"no kernel can read a {kind.__name__}, which has a __torch_dispatch__ of its own")
            address = argument.data_ptr()
            # A tuple marks an address that is not 16 bytes aligned.
            described.append((argument.dtype,) if address & 15 else argument.dtype)
            argument = address
        elif hasattr(kind, "from_tensor"):
            described += kind, argument.base.dtype, *argument.block_shape
        else:
            raise TypeError(f"a {kind.__name__} is no argument of a kernel")
        values.append(argument)
    return values
