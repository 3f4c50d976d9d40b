"""Small problems in the triton backend: fp32 logits by cuBLAS, and a kernel forward and backward.

The gradient of the logits, in the input's dtype, takes the first half of each row of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, put
from parallel_lce.backends.interface import BackwardTask, ForwardTask, Projection
from parallel_lce.backends.triton_operands import dense, stride_of
from parallel_lce.core.memory import some_rows
from parallel_lce.core.partials import empty_partial
from parallel_lce.kernels.dense_logits import Affine, dense_gradient, dense_partial
from parallel_lce.kernels.rewrite import Saved, TokenCoefficients


def _affine(projection: Projection) -> Affine:
    return Affine(projection.bias, projection.scale, projection.token_scale, projection.softcap)


def _products(projection: Projection, x: Tensor, memory: Tensor | None = None) -> Tensor:
    """``x @ weight.T [R, stride_of(V)]`` in fp32, of the real rows."""
    real = projection.real_rows
    shape = len(x), stride_of(real)
    products = x.new_empty(shape, dtype=torch.float32) if memory is None else memory.view(shape)
    accumulate_nt(products[:, :real], dense(x), some_rows(projection.weight, 0, real), overwrite=True)
    return products


class DenseForward:
    """Partials of a block over the shard; its fp32 logits are saved."""

    def __init__(self, task: ForwardTask) -> None:
        self._task, rows, dtype = task, len(task.x), task.projection.dtype
        self._empty = rows == 0 or task.projection.real_rows == 0
        if self._empty:
            self.partial = empty_partial(task.columns, rows, dtype, task.x.device, task.out)
        else:
            self.partial = task.x.new_empty(task.columns.count, rows, dtype=dtype) if task.out is None else task.out

    def project_local(self, local: range) -> None:
        """Does nothing: two products of a small problem take longer than one."""

    def project_rest(self) -> Saved | tuple[()]:
        if self._empty:
            return ()
        projection, x, target, columns, *_ = self._task
        products = _products(projection, x)
        logits = products[:, : projection.real_rows]
        dense_partial(logits, target, columns, self.partial, _affine(projection), projection.start)
        return Saved(products, None)


class DenseBackward:
    """Gradients of a block. Logits that are not saved, or were consumed, are projected again."""

    def __init__(self, task: BackwardTask) -> None:
        self._task, self._real = task, task.projection.real_rows
        self._empty = len(task.x) == 0 or self._real == 0
        self.reads_hidden_first = not (self._empty or task.saved)
        # [R, V]: of the products
        self._gradient = task.x

    def hidden_grad(self) -> Iterator[int]:
        """Form dX; yields R when it is complete."""
        projection, x, target, partial, coefficients, saved, grads, scratch, *_ = self._task
        dx, real = grads.dx, self._real
        if self._empty:
            yield len(x if dx is None else dx.zero_())
            return
        if saved:
            products = saved.exponentials
        else:
            products = _products(projection, x, scratch.borrow(len(x) * stride_of(real), torch.float32))
        logits = products[:, :real]
        self._gradient = gradient = products.view(x.dtype)[:, :real]
        others = [c if c is None else c.contiguous() for c in coefficients.each]
        of_tokens = TokenCoefficients(*others, coefficients.factor)
        dense_gradient(logits, target, partial.contiguous(), of_tokens, gradient, _affine(projection))
        if dx is not None:
            # A sum over a number of entries that is no multiple of 8 is two products, which fp32 adds.
            whole = real % 8 == 0 or dx.dtype == torch.float32
            total = dx if whole else dx.new_empty(dx.shape, dtype=torch.float32)
            accumulate_nt(total, gradient, some_rows(projection.weight, 0, real).t(), overwrite=True)
            if total is not dx:
                dx.copy_(total)
        yield len(x)

    def weight_grad(self) -> None:
        """dW and dbias."""
        grads, gradient, real = self._task.grads, self._gradient, self._real
        if self._empty:
            return
        if grads.dweight is not None:
            total, empty = grads.dweight.open(0, real, whole=True)
            accumulate_nt(total, gradient.t(), self._task.x.t(), overwrite=empty)
            grads.dweight.close(0, real, total)
        if grads.dbias is not None:
            total, empty = grads.dbias.open(0, real, whole=True)
            put(total, gradient.sum(0, dtype=torch.float32), empty)
            grads.dbias.close(0, real, total)
