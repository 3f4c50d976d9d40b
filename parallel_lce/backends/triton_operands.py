"""Operands of the kernels, with the strides and alignment that they need."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from parallel_lce.backends.interface import Coefficients, Projection
from parallel_lce.core.memory import some_rows
from parallel_lce.kernels.product import Product, logits_gradient
from parallel_lce.kernels.token_gradients import Targets

# Row strides of saved exponentials are multiples of this many elements: cuBLAS and TMA want 16 bytes.
ALIGNED = 64


def stride_of(entries: int) -> int:
    """Elements from one token's saved exponentials to the next one's."""
    return -(-entries // ALIGNED) * ALIGNED


def product_of(projection: Projection, x: Tensor, start: int, stop: int) -> Product:
    """The product of ``x`` with the shard's rows ``[start, stop)``."""
    bias = None if projection.bias is None else some_rows(projection.bias, start, stop)
    weight = some_rows(projection.weight, start, stop)
    return Product(x, weight, bias, projection.logit_map)


def aligned_contiguous(x: Tensor) -> Tensor:
    """``x`` contiguous and aligned to 16 bytes, a copy if it is not. A copy of this size costs little."""
    x = x.contiguous()
    if len(x) == 1:  # a contiguous row may have any stride, on which the tile depends
        x = x.view(-1).view(1, -1)
    return x if x.data_ptr() % 16 == 0 else x.clone()


class GradientOperands(NamedTuple):
    """Some tokens, and the tensors from which their rows of G are formed."""

    # [R, D]
    x: Tensor
    projection: Projection
    # [>= 3, R], contiguous
    partial: Tensor
    # without a factor
    coefficients: Coefficients
    # 0-dimensional, or None
    fp16_scale: Tensor | None
    # None: they are not known
    targets: Targets | None = None

    def form(self, start: int, stop: int, gradient: Tensor) -> None:
        """Write ``gradient [R, stop - start]`` of the shard's entries ``[start, stop)``, without the targets' terms."""
        product = product_of(self.projection, self.x, start, stop)
        logits_gradient(product, self.partial, self.coefficients, self.fp16_scale, gradient)
