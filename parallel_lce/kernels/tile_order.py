"""The tiles of a projection, which all mainloops form in the same order, and the kernel's names and arguments."""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments whose values vary between launches: a new value does not compile a new kernel.
UNSPECIALIZED = ["rows", "first_block", "num_blocks"]


def projection_name(specialization) -> str:
    return "lce_backward_projection" if specialization.constants["KIND"] == "backward" else "lce_forward_projection"


@triton.jit
def tile_start(number, first_block, num_blocks, BLOCK_M: tl.constexpr):
    """First row of a tile, and its window. Row blocks vary fastest and begin at ``first_block``."""
    return (first_block + number % num_blocks) * BLOCK_M, number // num_blocks
