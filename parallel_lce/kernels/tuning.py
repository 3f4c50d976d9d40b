"""Measured constants, and the facts of a device on which launches depend.

Nothing is tuned on the hot path. ``python -m benchmarks.tune`` compares tiles, and launches of 8, 16 and 32 row blocks.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tile:
    """The tile of a program, and its mainloop's parameters."""

    # tokens
    rows: int
    # vocabulary entries
    entries: int
    # elements of the K dimension per step
    k: int
    # of the program or, if it is warp-specialized, of each of the two halves of its rows
    warps: int
    stages: int
    # Run by parallel_lce.kernels.hopper, which uses one stage less if it stores.
    warp_specialized: bool = False


@dataclass(frozen=True)
class Measured:
    """Constants measured on an H200. Other GPUs use the same numbers."""

    # Tiles of 16-bit operands that TMA loads: in the mainloop for Hopper, by benchmarks.tune, and in the plain one.
    hopper_tile: Tile = Tile(128, 256, 64, 4, 4, warp_specialized=True)
    tma_tile: Tile = Tile(128, 256, 64, 8, 3)
    # Row blocks of one launch: around 16, the middle of the three numbers that benchmarks.tune compares.
    row_blocks: range = range(12, 21)
    # Upper bounds for a launch over few windows: row blocks, waves of programs, and bytes of x, which must stay in L2.
    most_row_blocks: int = 33
    most_waves: int = 32
    most_hidden_bytes: int = 36 << 20
    # Fewest tokens of a block for which adding to an fp32 dW costs less than projecting again. It moves 8 D bytes per
    # vocabulary row.
    smallest_accumulated: int = 1024
    # Three products of fewer flops take the GPU less time (about 1.4 ms) than the host needs to start the launches of a
    # fused projection. So does one product, of forward alone, of an eighth (about 0.2 ms).
    dense_flops: float = 1e12
    # Entries that a program reads at a time from the fp32 logits of such a problem, and its warps.
    dense_block: tuple[int, int] = (1024, 4)
    # Most bytes of window partials at a time, if nothing is saved.
    partial_bytes: int = 32 << 20
    # Most bytes of an fp32 product that is rounded into a low-precision gradient.
    product_bytes: int = 128 << 20
    # K dimension from which adding a product to a sum in memory takes almost no time. With fp32 sums of 4096 columns
    # the product takes 1.6 times as long as without a sum for K=1024, 1.3 for 2048, 1.05 for 4096.
    long_sum: int = 4096
    # dX's bytes lengthen recomputed slices up to this number of entries. Longer slices save at most 1 % of forward +
    # backward; slices of 4096 entries take 2 % longer.
    longest_slice: int = 8192


MEASURED = Measured()

# Fallback tiles, by bytes per element. They fit shared memory and registers of every GPU since Ampere. The fp32 tile is
# smaller: without tensor cores it needs more registers.
_MODEST = {2: Tile(128, 128, 32, 8, 3), 4: Tile(64, 64, 32, 4, 2)}
# Oldest and newest Triton whose Gluon runs kernels.hopper.
_GLUON = (3, 6), (3, 9)
_MOST_DESCRIPTORS = 1024


def tile_of(weight: torch.Tensor, tma: bool) -> Tile:
    """The tile for operands of the weight's dtype on its device, loaded by TMA or by pointers.

    The tile does not depend on the epilogue: the backward reads partials by the forward's windows.
    """
    if tma and runs_gluon(weight):
        return MEASURED.hopper_tile
    if tma and _capability(weight.device) // 10 in (9, 10) and weight.element_size() == 2:
        return MEASURED.tma_tile
    return _MODEST[weight.element_size()]


def runs_gluon(operand: torch.Tensor) -> bool:
    """Whether products with such an operand, if TMA can address it, run the mainloop for Hopper."""
    return _capability(operand.device) // 10 == 9 and operand.element_size() == 2 and _has_gluon()


@functools.cache
def _has_gluon() -> bool:
    """Whether ``kernels.hopper`` is tested with this Triton's Gluon, which is experimental. Warns if not, except in
    Triton's interpreter, which has no Gluon."""
    if interpreted():
        return False
    oldest, newest = _GLUON
    if oldest <= tuple(map(int, triton.__version__.split(".")[:2])) <= newest:
        try:
            importlib.import_module("parallel_lce.kernels.hopper")
            return True
        except (AttributeError, ImportError):
            pass
    first, last = (".".join(map(str, version)) for version in _GLUON)
    warnings.warn(
        f"Triton {triton.__version__}: parallel_lce runs its plain mainloop on this GPU, since the one for Hopper "
        f"needs the Gluon of Triton {first} to {last}. Results are the same up to rounding. The projection "
        "takes up to 10 % longer, a product of filtered gradients a third.",
        stacklevel=2,
    )
    return False


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def hopper_or_later(device: torch.device) -> bool:
    return _capability(device) >= 90


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
    waves = MEASURED.most_waves * programs // windows
    more = min(MEASURED.most_row_blocks, waves, MEASURED.most_hidden_bytes // block_bytes)
    usual = MEASURED.row_blocks
    candidates = range(usual[0], max(usual[-1], more) + 1)
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
        if not (aligned and t.stride(1) == 1 and min(t.shape) > 0 and hopper_or_later(t.device)):
            return False
    return True


_descriptors: dict[tuple, tuple[type, dict]] = {}


def descriptor(tensor: torch.Tensor, rows: int, columns: int, gluon: bool):
    """A TMA descriptor of an :func:`addressable` matrix in blocks of ``[rows, columns]``, for Triton or Gluon.

    The constructor's checks take most of its time. They are made once per shape, strides, dtype and block."""
    key = tensor.shape, tensor.stride(), tensor.dtype, rows, columns, gluon
    known = _descriptors.get(key)
    if known is None:
        made = _new_descriptor(tensor, rows, columns, gluon)
        fields = {name: value for name, value in vars(made).items() if name != "base"}
        if len(_descriptors) >= _MOST_DESCRIPTORS:
            _descriptors.clear()
        _descriptors[key] = type(made), fields
        return made
    kind, fields = known
    new = object.__new__(kind)
    new.__dict__.update(fields, base=tensor)
    return new


def _new_descriptor(tensor: torch.Tensor, rows: int, columns: int, gluon: bool):
    if not gluon:
        return TensorDescriptor.from_tensor(tensor, [rows, columns])
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    element = gl.float16 if tensor.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], element)
    return GluonDescriptor.from_tensor(tensor, [rows, columns], layout)
