"""Constants measured on an H200. Other GPUs use the same numbers.

Nothing is tuned on the hot path. ``python -m benchmarks.tune`` compares tiles, and launches of 8, 16 and 32 row blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The tile of a program, and its mainloop's parameters."""

    # tokens
    rows: int
    # vocabulary entries
    entries: int
    # elements of the K dimension per step
    k: int
    # Warps of a program; of each warpgroup in the mainloop for Hopper.
    warps: int
    stages: int
    # "plain" or "hopper": kernels/mainloop_*.py
    mainloop: str = "plain"


# Tiles of 16-bit operands that TMA loads: in the mainloop for Hopper, by benchmarks.tune, and in the plain one.
HOPPER_TILE = Tile(128, 256, 64, 4, 4, mainloop="hopper")
TMA_TILE = Tile(128, 256, 64, 8, 3)
# Row blocks of one launch: around 16, the middle of the three numbers that benchmarks.tune compares.
ROW_BLOCKS = range(12, 21)
# Upper bounds for a launch over few windows: row blocks, waves of programs, and bytes of x, which must stay in L2.
MOST_ROW_BLOCKS = 33
MOST_WAVES = 32
MOST_HIDDEN_BYTES = 36 << 20
# Flops of a matrix product that take as long as reading or writing a byte.
FLOPS_PER_BYTE: float = 230
# Most bytes of window partials at a time, if nothing is saved.
PARTIAL_BYTES = 32 << 20
# Most bytes of an fp32 product that is rounded into a low-precision gradient.
PRODUCT_BYTES = 128 << 20
# dX's bytes lengthen recomputed slices up to this number of entries. Longer slices save at most 1 % of forward +
# backward; slices of 4096 entries take 2 % longer.
LONGEST_SLICE = 8192

# Fallback tiles, by bytes per element. They fit shared memory and registers of every GPU since Ampere. The fp32 tile is
# smaller: without tensor cores it needs more registers.
MODEST_TILES = {2: Tile(128, 128, 32, 8, 3), 4: Tile(64, 64, 32, 4, 2)}
