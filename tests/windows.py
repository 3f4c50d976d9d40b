"""Partials of windows of logits, and their float64 truth, for the kernels that make and merge them."""

from __future__ import annotations

import torch

from parallel_lce.core.partials import Columns
from parallel_lce.kernels.arithmetic import REACH
from parallel_lce.kernels.epilogues import ForwardEpilogue
from parallel_lce.kernels.projection import Product, new_window_partials

ALL = dict(shifted=True, total=True, weighted=True, squared=True, argmax=True)


def window_partials(operands: Product, saved=None, softmax_shift=None, **requested):
    """``maxima [W, R]``, and of sum_exp and the requested columns ``sums [*, W, R]``."""
    partials = new_window_partials(operands, Columns(**requested))
    operands.launch(saved, ForwardEpilogue(partials, softmax_shift))
    return partials.max, torch.stack([column for column in partials[1:] if column is not None])


def windows(z: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    return z.split(width, 1)


def finite(maximum: torch.Tensor) -> torch.Tensor:
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def reference_of(maximum: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """What a window's exponentials are relative to: its maximum unless it is near ``shift``."""
    if shift is None:
        return finite(maximum)
    shift = shift.double()
    near = ((maximum - shift).abs() <= REACH) | (maximum == -torch.inf)
    return torch.where(near, shift, finite(maximum))


def truth(z: torch.Tensor, width: int, shift: torch.Tensor | None):
    """``maxima [W, R]``, ``sums [5, W, R]`` but for the argmax and ``exp(z - reference) [R, K]``."""
    maxima, sums, saved = [], [], []
    for part in windows(z, width):
        maximum = part.amax(1)
        e = (part - reference_of(maximum, shift)[:, None]).exp()
        shifted = part - finite(maximum)[:, None]
        weighted = (e * shifted.clamp(min=-1e4)).sum(1)
        maxima.append(maximum)
        sums.append(torch.stack([e.sum(1), shifted.sum(1), part.sum(1), weighted, e.square().sum(1)]))
        saved.append(e)
    return torch.stack(maxima), torch.stack(sums, 1), torch.cat(saved, 1)


def merged_truth(z: torch.Tensor) -> torch.Tensor:
    """Columns but the target's and the argmax."""
    top = z.amax(1)
    shifted = z - finite(top)[:, None]
    e = shifted.exp()
    weighted = (e * shifted.clamp(min=-1e4)).sum(1)
    return torch.stack([top, e.sum(1), shifted.sum(1), z.sum(1), weighted, e.square().sum(1)])
