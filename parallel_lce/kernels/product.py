"""The projection: one persistent matrix product ``x @ weight.T``, run by a mainloop, with an epilogue.

In all kernels of this package each output element is written by one program, without atomics and without waits between
programs, and sums have a fixed order. Offsets into ``[tokens, vocabulary]`` are 64-bit: N * V passes 2^31 in ordinary
use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from parallel_lce.core.logit_map import LogitMap
from parallel_lce.core.partials import Coefficients
from parallel_lce.kernels.arithmetic import SAVED_FP16_SCALE
from parallel_lce.kernels.descriptors import addressable
from parallel_lce.kernels.device import blocks_per_launch, num_sms
from parallel_lce.kernels.epilogue import BackwardEpilogue, ForwardEpilogue
from parallel_lce.kernels.mainloop_choice import mainloop_of, tile_of
from parallel_lce.kernels.partials import PartialColumns
from parallel_lce.kernels.relaunch import Bound
from parallel_lce.kernels.tuning import Tile

Epilogue = ForwardEpilogue | BackwardEpilogue


@dataclass(frozen=True)
class Product:
    """``logit_map(x @ weight.T + bias)``. The K dimension is contiguous in both operands."""

    # [R, D]
    x: torch.Tensor
    # [V, D], rows of a vocabulary shard
    weight: torch.Tensor
    # [V]
    bias: torch.Tensor | None = None
    logit_map: LogitMap = LogitMap()

    def of_rows(self, rows: slice) -> Product:
        return replace(self, x=self.x[rows], logit_map=self.logit_map.of_rows(rows))

    @cached_property
    def tma(self) -> bool:
        return addressable(self.x, self.weight)

    @cached_property
    def tile(self) -> Tile:
        return tile_of(self.weight, self.tma)

    @cached_property
    def windows(self) -> int:
        return -(-self.weight.shape[0] // self.tile.entries)

    @cached_property
    def row_blocks(self) -> int:
        return -(-self.x.shape[0] // self.tile.rows)

    def launch(self, out: torch.Tensor | None, epilogue: Epilogue, tile_list: torch.Tensor | None = None) -> None:
        """Start the product with an epilogue. ``tile_list [1 + n]`` int32: n, then the numbers ``window * row_blocks +
        row block`` of the only tiles to form; None: all."""
        operands = self.operands(self.x, self.weight, out)
        for bound in self.bound(out, epilogue, tile_list):
            bound.once(*operands, self.bias, self.logit_map, epilogue, tile_list)

    @cached_property
    def operands(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple]:
        """What a launch of a product of these sizes and alignments takes first: ``operands`` of the mainloop."""
        operands, tile, tma = mainloop_of(self.tile.mainloop).operands, self.tile, self.tma
        return lambda x, weight, out: operands(x, weight, out, tile, tma)[0]

    def bound(self, out: torch.Tensor | None, epilogue: Epilogue, tile_list: torch.Tensor | None = None) -> list[Bound]:
        """The launches of :meth:`launch` for operands of these sizes. Each takes the :attr:`operands`, the bias, the
        map, the epilogue and the list."""
        tile, mainloop = self.tile, mainloop_of(self.tile.mainloop)
        (rows, k_size), entries = self.x.shape, self.weight.shape[0]
        saves_fp16 = isinstance(epilogue, ForwardEpilogue) and out is not None and out.dtype == torch.float16
        saves_fp16 = saves_fp16 and self.logit_map.softcap is None
        _, strides, options = mainloop.operands(self.x, self.weight, out, tile, self.tma)
        options |= dict(
            KIND=epilogue.KIND,
            SCALED=self.logit_map.scale != 1.0,
            MASKED=entries % tile.entries != 0,
            SAVED_SCALE=SAVED_FP16_SCALE if saves_fp16 else 1.0,
            num_warps=tile.warps,
        )
        row_blocks, windows = self.row_blocks, self.windows
        programs = num_sms(self.x.device)
        step = blocks_per_launch(row_blocks, windows, programs, tile.rows * k_size * self.x.element_size())
        step = step if tile_list is None else max(1, row_blocks)
        bounds = []
        for first in range(0, row_blocks, step):
            number = min(step, row_blocks - first)
            numbers = rows, entries, k_size, first, number, *strides
            bounds.append(Bound(mainloop.projection, (min(number * windows, programs),), numbers, **options))
        return bounds


def new_window_partials(like: torch.Tensor, windows: int, columns) -> PartialColumns:
    """Uninitialised partials of all windows of the rows of ``like``, ``[windows, R]`` each, for the ``columns``."""
    shape, fp32, fp64 = (windows, like.shape[0]), torch.float32, torch.float64

    # One allocation per column: maxima may outlive the others.
    def new(dtype: torch.dtype, present: bool = True) -> torch.Tensor | None:
        return like.new_empty(shape, dtype=dtype) if present else None

    total = new(fp64, columns.total or columns.shifted)
    others = new(fp32, columns.weighted), new(fp64, columns.squared), new(fp32, columns.argmax)
    return PartialColumns(new(fp32), new(fp64), None, None, total, *others)


def logits_gradient(
    product: Product,
    partial: torch.Tensor,
    coefficients: Coefficients,
    fp16_scale: torch.Tensor | None,
    out: torch.Tensor,
    tile_list: torch.Tensor | None = None,
) -> None:
    """Write to ``out [R, V]`` the gradient of the logits without the targets' terms (:class:`BackwardEpilogue`).

    ``partial [>= 2, R]`` fp32, contiguous: the maximum and the sum of exponentials. ``coefficients``: without a factor;
    beta is not read. Rows of ``out`` are 16 bytes aligned. TMA stores 16-byte granules, so the padding after a row's
    last entry is overwritten up to the next boundary. ``tile_list``: as for :meth:`Product.launch`.
    """
    alpha, _, gamma, delta, epsilon, _, factor = coefficients
    assert factor is None
    epilogue = BackwardEpilogue(partial[0], partial[1], alpha, gamma, delta, epsilon, fp16_scale)
    product.launch(out, epilogue, tile_list=tile_list)
