"""Tensors as kernels read them: with their final values in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


class _Waited(torch.autograd.Function):
    """The result of a functional collective, complete, since kernels read its memory."""

    @staticmethod
    def forward(ctx, result: AsyncCollectiveTensor) -> Tensor:
        return result.trigger_wait()

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        return upstream


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its final values in memory: waits for a functional collective, and materializes a negated
    view."""
    if torch.compiler.is_compiling():
        return tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = _Waited.apply(tensor)
    return tensor.resolve_neg()
