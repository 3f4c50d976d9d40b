"""How kernels are launched: facts of a device, TMA descriptors, and launches of compiled kernels.

Triton finds a launch's compiled kernel from a description of all arguments, and asks the driver about every pointer.
This takes longer than the launch itself, and longer than the GPU's work on a small vocabulary shard.
:class:`Relaunched` describes only the properties for which Triton compiles: dtypes, alignment, which integers are 1 or
divisible by 16, and constants. It passes pointers as numbers.

PyTorch's launcher of Triton's kernels runs them, but for those with TMA descriptors, which it does not know. Triton's
own needs a compilation by gcc for each kernel in Triton 3.6, together two seconds of a first call."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from parallel_lce.core.private import torch_launcher
from parallel_lce.kernels.tuning import MOST_HIDDEN_BYTES, MOST_ROW_BLOCKS, MOST_WAVES, ROW_BLOCKS

# Types of arguments, as Triton and as PyTorch's launcher of Triton's kernels name them.
_LETTERS = {"i32": "i", "i64": "l", "fp32": "f"}


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

    Constants and options are passed by name, all other arguments by position: tensors, descriptors, Python numbers,
    None, and tuples of these. The first argument is a tensor, a tuple that begins with a tensor, or a descriptor; its
    device must be the current one. Triton's hooks and knobs have no effect, and addresses of other devices are not
    detected.
    """

    def __init__(self, function) -> None:
        self._function = function
        # Launches of compiled kernels, each loaded for one device.
        self._compiled: dict[tuple, Callable[[tuple[int, int, int], list], None]] = {}
        # Of two threads one might find a kernel in Triton's cache that is not loaded yet.
        self._lock = threading.Lock()

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        """Launch on the current stream of the first argument's device."""
        first = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        device = getattr(first, "base", first).get_device()
        described: list = [device, *constants, *constants.values()]
        values = _describe(arguments, described)
        if interpreted():
            return self._function[grid](*arguments, **constants)
        key = tuple(described)
        known = self._compiled.get(key)
        if known is None:
            with self._lock:
                # Triton 3.10 changes a default: whether a product and a sum are fused into one instruction.
                compiled = self._function.warmup(*arguments, **constants, grid=grid, enable_fp_fusion=True)
                last = [constants[name] for name in self._function.arg_names[len(arguments) :]]
                known = self._compiled[key] = _launch_of(compiled, device, last)
        known((*grid, 1, 1)[:3], values)


def _launch_of(compiled: Any, device: int, constants: list) -> Callable[[tuple[int, int, int], list], None]:
    """A function that launches the kernel on a grid with the arguments of :func:`_describe`."""
    stream, metadata = driver.active.get_current_stream, compiled.metadata
    types = _flat(compiled.src.signature.values())
    letters = ["O" if type.startswith("*") else _LETTERS.get(type) for type in types if type != "constexpr"]
    if torch_launcher is None or None in letters:
        # Triton unloads a kernel when ``compiled`` is freed.
        run, packed = compiled.run, compiled.packed_metadata

        def by_triton(grid: tuple[int, int, int], values: list) -> None:
            # The three None: launch metadata, and the hooks on entry and exit.
            run(*grid, stream(device), compiled.function, packed, None, None, None, *values, *constants)

        return by_triton

    path = next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    # The function, its registers and spills; from torch 2.13 on behind the module.
    function = torch_launcher._load_kernel(path, metadata.name, metadata.shared, device)[-3]
    launch, sizes = torch_launcher._launch_kernel, (metadata.num_warps, metadata.shared)
    is_passed, passed = [type != "constexpr" for type in types], "".join(letters) + "OO"

    def by_torch(grid: tuple[int, int, int], values: list) -> None:
        # The two None: memory of Triton's, of which these kernels need none.
        arguments = (*compress(_flat(values), is_passed), None, None)
        launch(function, *grid, *sizes, passed, arguments, stream(device))

    return by_torch


def _flat(values: Iterable) -> list:
    """The values, and those in tuples, in order."""
    flat = []
    for value in values:
        if isinstance(value, tuple):
            flat += _flat(value)
        else:
            flat.append(value)
    return flat


def _describe(arguments: tuple, described: list) -> list:
    """The arguments for the driver, tensors as addresses. Adds all properties on which Triton specializes, and possibly
    more, to ``described``."""
    values = []
    for argument in arguments:
        kind = type(argument)
        if argument is None or kind is float:
            described.append(kind)
        elif kind is int:
            # Whether it is 1, whether it is divisible by 16, and whether it has 32 bits.
            described.append(1 if argument == 1 else 2 if argument & 15 else 16)
            described.append(-(2**31) <= argument < 2**31)
        elif isinstance(argument, tuple):
            described += kind, len(argument)
            argument = tuple(_describe(argument, described))
        elif isinstance(argument, Tensor):
            address = argument.data_ptr()
            if address == 0 and argument.numel():
                raise ValueError(f"no kernel can read a {kind.__name__}, which has no memory")
            described += argument.dtype, address & 15 == 0
            argument = address
        else:
            described += kind, argument.base.dtype, *argument.block_shape
        values.append(argument)
    return values
