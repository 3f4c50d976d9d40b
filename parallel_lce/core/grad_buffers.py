"""Gradient buffers: sum the gradient of a vocabulary shard, and deliver it as a new tensor or add it to a main_grad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel_lce.core.memory import some_rows


@dataclass(frozen=True)
class MainGrad:
    """A gradient buffer of the caller, to which dW is added in backward."""

    # [V/P, D], the weight's shape, which ``prepare`` checks.
    tensor: Tensor
    # Called once dW has been added. Returns the gradient for autograd, whose values do not matter, or None. Its
    # argument is memory that the backward no longer reads, or None: a new tensor would add to the peak.
    placeholder: Callable[[Tensor | None], Tensor | None]
    # Called when a backward begins, with the node of autograd's graph to which the weight's gradient would go: whether
    # dW is added to ``tensor``. If not, it goes to that node.
    in_backward: Callable[[Any], bool] = lambda weight_node: True


def within(memory: Tensor | None, like: Tensor) -> Tensor:
    """An uninitialised tensor like this one, in the ``memory`` if that is large enough, else in new memory."""
    if memory is None or not memory.is_contiguous() or not like.is_contiguous():
        return torch.empty_like(like)
    # Autograd, which may have saved the memory, must not see that it is overwritten.
    elements = memory.data.view(-1).view(torch.uint8)
    size = like.numel() * like.element_size()
    if len(elements) < size or memory.data_ptr() % 16:
        return torch.empty_like(like)
    return elements[:size].view(like.dtype).view(like.shape)


class GradBuffer:
    """Gradient of a weight ``[V/P, D]`` or bias ``[V/P]``, summed in ``sum_dtype``: fp32 (fp64 for fp64).

    ``num_accumulations``: blocks of tokens that will be added; 0 without tokens. With one
    accumulation a low-precision gradient is summed window by window, in an fp32 buffer of one window; with several, in
    an fp32 buffer of the gradient's size. ``dtype``: of a new gradient, by default the parameter's. With ``main_grad``
    the gradient is added to that tensor: in place if it is fp32 (fp64), else by one rounded addition of the whole sum.
    Rows from ``real_rows`` on are padding; their gradient is zero.
    """

    def __init__(
        self,
        parameter: Tensor,
        real_rows: int,
        num_accumulations: int,
        sum_dtype: torch.dtype,
        *,
        dtype: torch.dtype | None = None,
        main_grad: MainGrad | None = None,
    ) -> None:
        self._real = real_rows
        self._main_grad = main_grad
        if main_grad is None:
            self._target = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=parameter.device)
            padding = real_rows if num_accumulations else 0
            if padding < parameter.shape[0]:
                self._target[padding:].zero_()
        else:
            self._target = main_grad.tensor
        self._sum_dtype = sum_dtype
        self._sum: Tensor | None = None
        if self._target.dtype == self._sum_dtype:
            self._sum = self._target
        elif num_accumulations > 1:
            self._sum = torch.empty_like(self._target, dtype=self._sum_dtype)
        self._opened_rows = 0

    def open(self, start: int, stop: int, whole: bool = False) -> tuple[Tensor, bool]:
        """The sum of rows ``[start, stop)``, and whether the caller must overwrite it. ``whole``: the caller writes
        these rows with one product. A new low-precision gradient with one accumulation then needs no fp32 buffer: its
        own rows are returned."""
        if self._sum is None:
            if whole and self._main_grad is None:
                return some_rows(self._target, start, stop), True
            return self._target.new_empty(stop - start, *self._target.shape[1:], dtype=self._sum_dtype), True
        # The first block opens every real row once. Later blocks add.
        holds = self._opened_rows >= self._real or (self._main_grad and self._sum is self._target)
        self._opened_rows += stop - start
        return some_rows(self._sum, start, stop), not holds

    @property
    def buffered(self) -> bool:
        """Whether each product needs an fp32 buffer, because it is added to a low-precision main_grad."""
        return self._sum is None and self._main_grad is not None

    def close(self, start: int, stop: int, total: Tensor) -> None:
        """Store ``total``, the tensor from :meth:`open` to which the caller has added."""
        if self._sum is None and total.dtype != self._target.dtype:
            self._store(self._target[start:stop], total)

    def deliver(self) -> Tensor | None:
        """The finished gradient. None with ``main_grad``."""
        if self._sum is not None and self._sum is not self._target and self._opened_rows:
            self._store(self._target[: self._real], self._sum[: self._real])
        return self._target if self._main_grad is None else None

    def _store(self, rows: Tensor, total: Tensor) -> None:
        rows.copy_(total) if self._main_grad is None else rows.add_(total)
