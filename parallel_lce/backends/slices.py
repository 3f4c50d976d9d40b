"""The backward of the triton backend: gradients of the logits in slices of the vocabulary, and their two
products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from parallel_lce.backends.blocks import (
    PRODUCT_ROWS,
    Coefficients,
    Destinations,
    Kept,
    Projection,
    Scratch,
    power_of_two_scale,
)
from parallel_lce.backends.gemm import accumulate_nt, matmul_nt, put
from parallel_lce.kernels import dlogits
from parallel_lce.kernels.launch import next_power_of_2
from parallel_lce.kernels.projection import Operands, logits_gradient
from parallel_lce.kernels.targets import add_targets, finished_rows, place_targets, target_gradients
from parallel_lce.weight_grad import ShardGradient

# Leading dimensions of kept exponentials are multiples of this: cuBLAS and TMA want 16 bytes.
ALIGNED = 64
# Bytes of a product in fp32 on its way to a low-precision gradient.
_PRODUCT_BYTES = 128 << 20


def stride_of(columns: int) -> int:
    """Elements from one token's kept exponentials to the next one's."""
    return -(-columns // ALIGNED) * ALIGNED


def operands_of(projection: Projection, x: Tensor, start: int, stop: int) -> Operands:
    """The product of ``x`` with the shard's rows ``[start, stop)``."""
    bias = None if projection.bias is None else projection.bias[start:stop]
    weight = projection.weight[start:stop]
    return Operands(x, weight, bias, projection.scale, projection.softcap)


def dense(x: Tensor) -> Tensor:
    """``x`` in one piece and aligned, which a copy of this size makes for little."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class Awaited:
    """``x [R, D]`` in one piece and aligned, once it is there."""

    def __init__(self, x: Tensor, ready: Callable[[], object]) -> None:
        self._x, self._ready, self.rows = x, ready, x.shape[0]

    @cached_property
    def tensor(self) -> Tensor:
        self._ready()
        return dense(self._x)


@dataclass
class Slice:
    """``gradient [R, stop - start]`` of the logits of the shard's rows ``[start, stop)``, to be multiplied by
    ``row_scale [R]`` in dX and ``x_scale [R]`` in dW, None for 1."""

    start: int
    stop: int
    gradient: Tensor
    row_scale: Tensor | None
    x_scale: Tensor | None


class Slices:
    """The gradient of a block's logits, in slices of the vocabulary that follow each other in the
    same memory: a slice must be used before the next one is asked for."""

    def __init__(
        self,
        projection: Projection,
        x: Awaited,
        target: Tensor | None,
        statistics: Tensor,
        coefficients: Coefficients,
        kept: Kept,
        to: Destinations,
        scratch: Scratch,
    ) -> None:
        self._x = x
        self._projection, self._target = projection, target
        self._statistics = statistics.contiguous()
        self._coefficients = coefficients.map(Tensor.contiguous)
        self._kept, self._scratch = kept, scratch
        # The bias's gradient is a sum over rows, which are then best complete.
        self._rewrite = to.dbias is not None
        self._power: Tensor | None = None
        self.unscale: Tensor | None = None
        if projection.weight.dtype == torch.float16:
            self._power = power_of_two_scale(coefficients, projection.scale)
            self.unscale = 1 / self._power
        # What the entries of the targets leave of their gradients, and whether a target is one token's.
        self._rest = self._alone = None
        self._has_targets = target is not None and self._coefficients.beta is not None
        self._count = to.dweight is not None or to.dbias is not None
        if self._has_targets and kept:
            self._find_targets()
        # Used first, and free from then on.
        self._spent = kept[0].view(-1) if kept else projection.weight.new_empty(0)
        self._kept_columns = min(kept[0].shape[1], projection.real) if kept else 0
        self._cuts = self._recomputed()
        self.single = bool(kept) + len(self._cuts) == 1

    @property
    def x(self) -> Tensor:
        return self._x.tensor

    def _find_targets(self, placed: tuple | None = None) -> None:
        projection = self._projection
        self._rest, self._alone = target_gradients(
            self._target,
            projection.real,
            self._statistics,
            *self._coefficients.each,
            projection.scale,
            projection.softcap,
            self._count,
            placed,
        )

    def _recomputed(self) -> list[tuple[int, int]]:
        """The recomputed slices: as even as whole windows allow, each within the scratch memory."""
        start, real = self._kept_columns, self._projection.real
        if start == real:
            return []
        width = operands_of(self._projection, self.x, start, real).tile.columns
        rows, dtype = self.x.shape[0], self.x.dtype
        held = self._spent.numel()
        fitting = max(width, max(held, self._scratch.capacity(dtype)) // rows // width * width)
        number = -(-(real - start) // fitting)
        step = -(-(real - start) // (number * width)) * width
        return [(a, min(a + step, real)) for a in range(start, real, step)]

    def __iter__(self) -> Iterator[Slice]:
        projection, statistics = self._projection, self._statistics
        alpha, _, gamma, delta = self._coefficients.each
        if self._kept:
            stored, maxima, *common = self._kept
            gradient = stored[:, : self._kept_columns]
            # Of what is kept, not of the operands: after saved-tensor hooks these may be aligned anew,
            # and another tile's.
            width = next_power_of_2(-(-projection.real // maxima.shape[0]))
            row_scale = dlogits.settle(
                gradient,
                maxima,
                *(common or (None, None)),
                width,
                statistics,
                alpha,
                gamma,
                self._rest,
                self._power,
                projection.scale,
                projection.softcap,
                self._rewrite,
            )
            yield self._slice(0, self._kept_columns, gradient, row_scale)
        for start, stop in self._cuts:
            shape = self._x.rows, stride_of(stop - start)
            elements = shape[0] * shape[1]
            memory = self._spent[:elements]
            if memory.numel() < elements:
                memory = self._scratch.take(elements, self.x.dtype)
            gradient = memory.view(shape)[:, : stop - start]
            operands = operands_of(projection, self.x, start, stop)
            logits_gradient(operands, statistics, alpha, gamma, delta, self._power, gradient)
            yield self._slice(start, stop, gradient, None)

    def _slice(self, start: int, stop: int, gradient: Tensor, row_scale: Tensor | None) -> Slice:
        x_scale = row_scale
        if self._has_targets and self._rest is None:
            self._find_targets((gradient, start, self._power))
        elif self._has_targets:
            x_scale = place_targets(gradient, start, self._target, self._rest, self._alone, row_scale, self._power)
        return Slice(start, stop, gradient, row_scale, x_scale)

    def finish(self, source: Tensor, row_scale: Tensor | None, rows: slice, dx: Tensor) -> None:
        """``dx`` of some rows, from their sum over all slices but for ``row_scale``."""
        targets = None
        if self._has_targets:
            weight = self._projection.weight[: self._projection.real]
            targets = self._target[rows], self._rest[rows], weight
        factor = self.unscale if row_scale is None else row_scale[rows]
        finished_rows(source, factor, targets, dx)

    def add_targets(self, total: Tensor, x: Tensor, start: int) -> None:
        """What the targets' gradients add to the shard's rows from ``start`` on."""
        if self._has_targets:
            add_targets(total, start, self._target, self._rest, self._alone, x)

    def scaled(self, part: Slice, product: HiddenProduct | None) -> Tensor:
        """``c x [R, D]``, in dX's memory as long as that is not written."""
        if part.x_scale is None:
            return self.x
        memory = product.idle_memory() if product is not None else None
        memory = torch.empty_like(self.x) if memory is None else memory
        return finished_rows(self.x, part.x_scale, None, memory)

    @property
    def plain(self) -> bool:
        """Whether sums over slices without a ``row_scale`` are dX as they are."""
        return self.unscale is None and not self._has_targets


class HiddenProduct:
    """dX ``[R, D]`` from the slices of the gradient of the logits; its rows are announced as they are done, but
    for the last."""

    def __init__(self, to: Destinations, weight: Tensor, slices: Slices) -> None:
        self._dx, self._weight, self._slices = to.dx, weight, slices
        self._ready = to.dx_ready
        self._sum: Tensor | None = None
        self._written = False

    def add(self, part: Slice) -> None:
        weight = self._weight[part.start : part.stop].t()
        if self._slices.single:
            self._complete(part, weight)
            self._written = True
        elif self._sum is None:
            self._sum = matmul_nt(part.gradient, weight)
            if part.row_scale is not None:
                finished_rows(self._sum, part.row_scale, None, self._sum)
        else:
            accumulate_nt(self._sum, part.gradient, weight, overwrite=False)

    def _complete(self, part: Slice, weight: Tensor) -> None:
        """One product, finished in fp32 before it is rounded, in pieces."""
        if self._slices.plain and part.row_scale is None:
            accumulate_nt(self._dx, part.gradient, weight, overwrite=True)
            return
        rows = _PRODUCT_BYTES // (4 * weight.shape[0]) // PRODUCT_ROWS * PRODUCT_ROWS or PRODUCT_ROWS
        for first in range(0, self._dx.shape[0], rows):
            some = slice(first, first + rows)
            piece = matmul_nt(part.gradient[some], weight)
            self._slices.finish(piece, part.row_scale, some, self._dx[some])
            del piece  # before the next one is allocated
            if self._ready is not None and some.stop < self._dx.shape[0]:
                self._ready(some.stop)

    def finish(self) -> None:
        if self._sum is None:
            return
        self._slices.finish(self._sum, None, slice(None), self._dx)
        self._sum, self._written = None, True

    def idle_memory(self) -> Tensor | None:
        """dX's memory where it is like x's and still unwritten."""
        fits = self._dx.dtype == self._weight.dtype and self._dx.is_contiguous()
        return self._dx if fits and not self._written else None


def add_weight_gradient(dweight: ShardGradient, part: Slice, slices: Slices, product: HiddenProduct | None) -> None:
    """``dW[start:stop] += G.T @ x``, in one product where it needs no fp32 buffer."""
    x = slices.scaled(part, product)
    step = part.stop - part.start
    if slices.unscale is not None or dweight.buffered:
        step = max(256, _PRODUCT_BYTES // (4 * x.shape[1]) // 256 * 256)
    for start in range(part.start, part.stop, step):
        stop = min(start + step, part.stop)
        gradient = part.gradient[:, start - part.start : stop - part.start].t()
        total, overwrite = dweight.open(start, stop, whole=True)
        if slices.unscale is None:
            accumulate_nt(total, gradient, x.t(), overwrite=overwrite)
            slices.add_targets(total, slices.x, start)
        else:
            piece = matmul_nt(gradient, x.t()).mul_(slices.unscale)
            slices.add_targets(piece, slices.x, start)
            put(total, piece, overwrite)
            del piece  # before the next one is allocated
        dweight.close(start, stop, total)
        del total
