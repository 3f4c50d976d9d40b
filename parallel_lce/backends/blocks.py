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


@dataclass(frozen=True)
class Kept:
    """``exp(z - maxima)`` of a block's first rows ``[real, kept]`` in the input's dtype, and the
    maximum of each window and row ``[windows, kept]`` they are relative to."""

    exponentials: Tensor
    maxima: Tensor


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
