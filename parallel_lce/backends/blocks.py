"""What a backend is given for a block of tokens, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_lce.weight_grad import ShardGradient, accumulation_dtype


@dataclass(frozen=True)
class Projection:
    """``z = softcap(scale * (x @ weight.T + bias))`` for the real rows of a vocabulary shard.

    ``weight [V/P, D]``, ``bias [V/P]`` or None; ``start``: global id of the first row; ``real``:
    rows that are no padding; ``softcap(u) = cap * tanh(u / cap)``.
    """

    weight: Tensor
    bias: Tensor | None
    start: int
    real: int
    scale: float = 1.0
    softcap: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.weight.dtype)


Kept = tuple[Tensor, ...]
"""What a block keeps of its first vocabulary rows for its backward, the exponentials first; ``()``
is nothing. Only the backend that made it knows its shapes, and may overwrite it in backward."""


@dataclass(frozen=True)
class Coefficients:
    """Per-token ``[R]`` upstream coefficients of the logits' gradient; None is zero."""

    alpha: Tensor
    beta: Tensor | None
    gamma: Tensor | None
    delta: Tensor | None


@dataclass(frozen=True)
class Destinations:
    """Where a block's gradients go; None where one is not wanted.

    ``dx [R, D]`` is written, then ``dx_ready`` called; ``dweight`` and ``dbias`` are added to.
    """

    dx: Tensor | None
    dx_ready: Callable[[], None] | None
    dweight: ShardGradient | None
    dbias: ShardGradient | None


class Scratch:
    """Working memory of one backward, shared by its blocks.

    ``limit``: bytes that a block may use beside what is kept.
    """

    def __init__(self, limit: int, device: torch.device | str = "cpu") -> None:
        self.limit = limit
        self._device = device
        self._memory: Tensor | None = None

    def adopt(self, tensor: Tensor) -> None:
        """Take over the memory of a tensor that nobody reads any more, if it is larger than what
        there is, and in one piece."""
        size = tensor.numel() * tensor.element_size()
        held = self.limit if self._memory is None else self._memory.numel()
        if size > held and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
            self._memory = tensor.view(-1).view(torch.uint8)

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements that :meth:`take` can give."""
        held = 0 if self._memory is None else self._memory.numel()
        return max(self.limit, held) // dtype.itemsize

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """``[elements]`` of uninitialised memory: the same memory at each call, allocated at the
        first one."""
        if self._memory is None:
            self._memory = torch.empty(self.limit, dtype=torch.uint8, device=self._device)
        return self._memory.narrow(0, 0, elements * dtype.itemsize).view(dtype)
