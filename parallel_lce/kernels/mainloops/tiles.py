"""The tiles of a projection, which all mainloops form in the same order, and the kernel's names and arguments."""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments whose values vary between launches: a new value does not compile a new kernel.
UNSPECIALIZED = ["rows", "first_block", "num_blocks"]


def projection_name(specialization) -> str:
    return "lce_backward_projection" if specialization.constants["KIND"] == "backward" else "lce_forward_projection"


@triton.jit
def tile_count(listed, num_blocks, windows):
    """Number of tiles to form: all windows of the row blocks, or the tiles ``listed``."""
    number = num_blocks * windows
    if listed is not None:
        number = tl.load(listed)
    return number


@triton.jit
def tile_start(listed, number, first_block, num_blocks, BLOCK_M: tl.constexpr):
    """First row of a tile, and its window. Row blocks vary fastest and begin at ``first_block``."""
    tile = number
    if listed is not None:
        tile = tl.load(listed + 1 + number)
    return (first_block + tile % num_blocks) * BLOCK_M, tile // num_blocks
