"""Where the gradient of a vocabulary shard goes: a new tensor, or a ``main_grad`` that exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class MainGrad:
    """A gradient buffer ``[V/P, D]`` of the caller's that dW is added to in backward.

    ``placeholder`` is called once it has been, and returns what autograd is given for the weight.
    """

    tensor: Tensor
    placeholder: Callable[[], Tensor | None]


class ShardGradient:
    """Gradient of a weight ``[V/P, D]`` or bias ``[V/P]``, summed in fp32 (fp64 for fp64).

    ``visits``: the blocks of tokens, each of which opens every row once; 0 for a gradient of no
    tokens. A low-precision gradient that is complete in one visit is summed in a buffer of one
    window, otherwise in a buffer of its own size. ``dtype`` is that of a new gradient, by default the
    parameter's. ``main_grad`` receives the gradient by addition instead: an fp32 one in place, a
    low-precision one by a single rounded addition of the whole sum. Rows from ``real_rows`` on are
    padding: their gradient is zero.
    """

    def __init__(
        self,
        parameter: Tensor,
        real_rows: int,
        visits: int,
        *,
        dtype: torch.dtype | None = None,
        main_grad: MainGrad | None = None,
    ) -> None:
        self._real = real_rows
        self._main_grad = main_grad
        if main_grad is None:
            self._target = torch.empty_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
            self._target[real_rows if visits else 0 :].zero_()
        else:
            self._target = main_grad.tensor
        sum_dtype = accumulation_dtype(parameter.dtype)
        self._window = self._target.new_empty(0, dtype=sum_dtype)
        self._sum: Tensor | None = None
        if self._target.dtype == sum_dtype:
            self._sum = self._target
        elif visits > 1:
            self._sum = torch.empty_like(self._target, dtype=sum_dtype)
        self._opened_rows = 0

    def open(self, start: int, stop: int, whole: bool = False) -> tuple[Tensor, bool]:
        """The sum of rows ``[start, stop)``; True where it holds nothing yet: overwrite it.

        ``whole``: the caller writes these rows in one product, whose result needs no fp32 buffer:
        a new low-precision gradient of one visit is then handed out itself, in its own dtype.
        """
        if self._sum is None:
            if whole and self._main_grad is None:
                return self._target[start:stop], True
            return self._window.new_empty(stop - start, *self._target.shape[1:]), True
        # Every block opens every row once: those of the first block add up to all real rows.
        holds = self._opened_rows >= self._real or (self._main_grad and self._sum is self._target)
        self._opened_rows += stop - start
        return self._sum[start:stop], not holds

    @property
    def buffered(self) -> bool:
        """Whether even whole rows go through an fp32 buffer: to be added to a low-precision one."""
        return self._sum is None and self._main_grad is not None

    def close(self, start: int, stop: int, total: Tensor) -> None:
        """End a visit; ``total`` is the tensor that :meth:`open` returned."""
        if self._sum is None and total.dtype != self._target.dtype:
            self._store(self._target[start:stop], total)

    def deliver(self) -> Tensor | None:
        """The finished gradient, or ``main_grad``'s placeholder once it has received it."""
        if self._sum is not None and self._sum is not self._target and self._opened_rows:
            self._store(self._target[: self._real], self._sum[: self._real])
        return self._target if self._main_grad is None else self._main_grad.placeholder()

    def _store(self, rows: Tensor, total: Tensor) -> None:
        rows.copy_(total) if self._main_grad is None else rows.add_(total)
