"""The projection: one persistent matrix product ``x @ weight.T``, run by a mainloop, with an epilogue.

In all kernels of this package each output element is written by one program, without atomics and without waits between
programs, and sums have a fixed order. Offsets into ``[tokens, vocabulary]`` are 64-bit: N * V passes 2^31 in ordinary
use.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import triton

from parallel_lce.core.logit_map import LogitMap, Projection
from parallel_lce.core.memory import empty_if, some_rows
from parallel_lce.core.partials import Columns
from parallel_lce.kernels import mainloop_plain
from parallel_lce.kernels.arithmetic import SAVED_FP16_SCALE
from parallel_lce.kernels.epilogue import ForwardEpilogue, GradientTerms
from parallel_lce.kernels.launch import addressable, blocks_per_launch, generation, interpreted, num_sms
from parallel_lce.kernels.partials import PartialColumns
from parallel_lce.kernels.tuning import HOPPER_TILE, MODEST_TILES, TMA_TILE, Tile

# Tiles of 16-bit operands that TMA loads, by the device's generation. A tile names its mainloop.
_TILES = {9: HOPPER_TILE, 10: TMA_TILE}
# Newest Triton whose Gluon runs the mainloop for Hopper. PyTorch's releases have 3.6 and later.
_GLUON = 3, 9
# Row strides of saved exponentials are multiples of this many elements: cuBLAS and TMA want 16 bytes.
ALIGNED = 64


@dataclass
class Product:
    """``logit_map(x @ weight.T + bias)``. The K dimension is contiguous in both operands."""

    # [R, D]
    x: torch.Tensor
    # [V, D], rows of a vocabulary shard
    weight: torch.Tensor
    # [V]
    bias: torch.Tensor | None = None
    logit_map: LogitMap = LogitMap()

    @classmethod
    def of(cls, projection: Projection, x: torch.Tensor, start: int, stop: int) -> Product:
        """The product of ``x`` with the shard's rows ``[start, stop)``."""
        bias = None if projection.bias is None else some_rows(projection.bias, start, stop)
        return cls(x, some_rows(projection.weight, start, stop), bias, projection.logit_map)

    def __post_init__(self) -> None:
        self.tma = addressable(self.x, self.weight)
        self.tile = tile_of(self.weight, self.tma)
        self.windows = -(-self.weight.shape[0] // self.tile.entries)
        self.row_blocks = -(-self.x.shape[0] // self.tile.rows)

    def of_rows(self, rows: slice) -> Product:
        return replace(self, x=self.x[rows], logit_map=self.logit_map.of_rows(rows))

    def launch(self, out: torch.Tensor | None, epilogue: ForwardEpilogue | GradientTerms) -> None:
        """Start the product with an epilogue. Rows of ``out [R, V]``, which receives its exponentials or the gradient,
        are 16 bytes aligned. TMA stores 16-byte granules, so the padding after a row's last entry is overwritten up to
        the next boundary. Coefficients of a gradient have no factor."""
        x, weight, tile, windows = self.x, self.weight, self.tile, self.windows
        (rows, k_size), entries, mainloop = x.shape, weight.shape[0], mainloop_of(tile.mainloop)
        saves_fp16 = out is not None and out.dtype == torch.float16 and epilogue.KIND == "forward"
        operands, strides, options = mainloop.operands(x, weight, out, tile, self.tma)
        operands = *operands, self.bias, self.logit_map, epilogue
        programs = num_sms(x.device)
        step = blocks_per_launch(self.row_blocks, windows, programs, tile.rows * k_size * x.element_size())
        for first in range(0, self.row_blocks, step):
            number = min(step, self.row_blocks - first)
            mainloop.projection.launch(
                (min(number * windows, programs),),
                *operands,
                rows,
                entries,
                k_size,
                first,
                number,
                *strides,
                KIND=epilogue.KIND,
                SCALED=self.logit_map.scale != 1.0,
                MASKED=entries % tile.entries != 0,
                SAVED_SCALE=SAVED_FP16_SCALE if saves_fp16 and self.logit_map.softcap is None else 1.0,
                **options,
                num_warps=tile.warps,
            )


def stride_of(entries: int) -> int:
    """Elements from one token's saved exponentials to the next one's."""
    return -(-entries // ALIGNED) * ALIGNED


def aligned_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` contiguous and aligned to 16 bytes, a copy if it is not. A copy of this size costs little."""
    x = x.contiguous()
    if len(x) == 1:  # a contiguous row may have any stride, on which the tile depends
        x = x.view(-1).view(1, -1)
    return x if x.data_ptr() % 16 == 0 else x.clone()


def new_window_partials(
    like: torch.Tensor, windows: int, columns: Columns, maxima: torch.Tensor | None = None
) -> PartialColumns:
    """Uninitialised partials of all windows of the rows of ``like``, ``[windows, R]`` each, for the ``columns``.
    ``maxima``: memory for theirs, which may outlive the others."""
    shape, device, fp64 = (windows, like.shape[0]), like.device, torch.float64
    return PartialColumns(
        max=torch.empty(shape, dtype=torch.float32, device=device) if maxima is None else maxima,
        sum_exp=torch.empty(shape, dtype=fp64, device=device),
        target=None,
        shifted=None,
        total=empty_if(columns.total or columns.shifted, shape, device, fp64),
        weighted=empty_if(columns.weighted, shape, device),
        squared=empty_if(columns.squared, shape, device, fp64),
        argmax=empty_if(columns.argmax, shape, device),
    )


def mainloop_of(name: str) -> ModuleType:
    """A mainloop, by the name in its tile. One for another GPU is a file beside this one, a tile in ``_TILES``, and an
    import here. It has

        projection     the kernel, a ``Relaunched``
        operands       the arguments of a launch that only this mainloop takes so: descriptors or pointers of ``x``,
                       ``weight`` and ``out``; strides, which follow the common arguments; and constants. ``tma``:
                       whether TMA can address ``x`` and ``weight``.
    """
    if name == "hopper":
        from parallel_lce.kernels import mainloop_hopper  # not every Triton can import it

        return mainloop_hopper
    return mainloop_plain


def tile_of(weight: torch.Tensor, tma: bool) -> Tile:
    """The tile for operands of the weight's dtype on its device, loaded by TMA or by pointers.

    The tile does not depend on the epilogue: the backward reads partials by the forward's windows.
    """
    tile = _TILES.get(generation(weight.device)) if tma and weight.element_size() == 2 else None
    if tile is None:
        return MODEST_TILES[weight.element_size()]
    return tile if tile.mainloop != "hopper" or _has_gluon() else TMA_TILE


@functools.cache
def _has_gluon() -> bool:
    """Whether the mainloop for Hopper is tested with this Triton's Gluon, which is experimental. Warns if not, except
    in Triton's interpreter, which has no Gluon."""
    if interpreted():
        return False
    tested = tuple(map(int, triton.__version__.split(".")[:2])) <= _GLUON
    if not tested:
        warnings.warn(
            f"Triton {triton.__version__}: parallel_lce runs its plain mainloop on this GPU, since the one for Hopper "
            "needs the Gluon of Triton 3.6 to 3.9. Results are the same up to rounding. The projection takes up to "
            "10 % longer.",
            stacklevel=2,
        )
    return tested
