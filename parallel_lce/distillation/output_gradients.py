"""The gradients of the student, of whose logits one block is in memory at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.formulas import fp16_scale_near
from parallel_lce.backends.gemm import accumulate, put
from parallel_lce.backends.interface import Projection
from parallel_lce.call.call import Call, Needs
from parallel_lce.core.plan import Block
from parallel_lce.run.schedule import GradientSums

# Largest log-ratio for which fp16 gradients of the output stay finite.
_LARGEST_LOG_RATIO = 64.0


class OutputGradients(GradientSums):
    """The sums, formed from the gradients of the projection's output, block by block.

    ``factor [N]``: of each token's gradients, which the caller multiplies by :attr:`factor` and rounds to
    :attr:`dtype`. ``dtype``: as of :class:`GradientSums`."""

    def __init__(
        self,
        call: Call,
        hidden: Tensor,
        projection: Projection,
        needs: Needs,
        blocks: int,
        factor: Tensor,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(call, hidden, projection, needs, blocks, dtype)
        # On CPUs low-precision products are slower, and no more exact.
        self.dtype = hidden.dtype if hidden.is_cuda else projection.dtype
        self.factor, self._unscale = factor, None
        if self.dtype == torch.float16 and len(factor):
            # A mean's gradients, 1 / N each, would underflow.
            fp16_scale = fp16_scale_near(factor.abs().nan_to_num(0.0, 0.0).amax() * _LARGEST_LOG_RATIO)
            self.factor, self._unscale = factor * fp16_scale, 1 / fp16_scale

    def add(self, block: Block, x: Tensor, gradient: Tensor) -> None:
        """Add the gradients of a block with ``x [R, D]``, from the ``gradient [R, V/P]`` of its output."""
        real = self.projection.real_rows
        if self.reduction is not None:
            dx = self.reduction.open_block(block)
            accumulate(dx, gradient, self.projection.weight[:real], overwrite=True, factor=self._unscale)
            self.reduction.start(block, dx)
        if self.dweight is not None:
            total, empty = self.dweight.open(0, real, whole=True)
            accumulate(total, gradient.t(), x, overwrite=empty, factor=self._unscale)
            self.dweight.close(0, real, total)
        if self.dbias is not None:
            total, empty = self.dbias.open(0, real, whole=True)
            summed = gradient.sum(0, dtype=self.projection.dtype)
            put(total, summed if self._unscale is None else summed.mul_(self._unscale), empty)
            self.dbias.close(0, real, total)
