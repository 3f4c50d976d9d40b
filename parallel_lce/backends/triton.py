"""The triton backend: a fused projection for the forward and for recomputed logits, cuBLAS for dX and dW.

A block of R tokens saves ``e = exp(z)`` of its first vocabulary entries; in windows far from 0 another multiple
(``kernels.arithmetic.scale_of``). The gradient of the logits is then c e, with one coefficient c per token, except in
the target's column. So no pass over R * V is needed between the forward and the products of the backward
(:mod:`parallel_lce.backends.triton_backward`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends import torch_backend
from parallel_lce.backends.interface import Projection
from parallel_lce.backends.triton_backward import BlockBackward
from parallel_lce.backends.triton_forward import block_forward
from parallel_lce.backends.triton_operands import aligned_contiguous, product_of, stride_of
from parallel_lce.core.options import Wanted
from parallel_lce.core.partials import Columns
from parallel_lce.core.picked import Picked
from parallel_lce.kernels import dense_logits, partials
from parallel_lce.kernels import picked as kernels
from parallel_lce.kernels.picked import gradient_of_sets, log_softmax_of_sets, picked_rows
from parallel_lce.kernels.results import Results, mean_loss, results_of, statistics_gradient, without_factor
from parallel_lce.kernels.token_gradients import Saved, scale_and_add_targets
from parallel_lce.kernels.tuning import MEASURED

# What this module imports and does not call are functions of :class:`parallel_lce.backends.interface.Backend`.
NAME: str = "triton"
FLOPS_PER_BYTE: float = MEASURED.flops_per_byte
SAME_BITS: bool = True
REUSES_SAVED: bool = True
CODES: bool = True


def allocate_saved(projection: Projection, rows: int, entries: int) -> Tensor:
    return projection.weight.new_empty(rows * stride_of(min(entries, projection.real_rows)))


def recovers_differences(dtype: torch.dtype) -> bool:
    # fp16 lacks the range for logits beside exponentials.
    return dtype != torch.float16


def merge_ranks(
    packed: Tensor, columns: Columns, rows: int, vocab_size: int | None, wanted: Wanted | None
) -> tuple[Tensor, Tensor, Any]:
    results = None if wanted is None else Results.new(wanted, packed, rows)
    merged, size = partials.merge_ranks(packed, columns, rows, vocab_size, results)
    return merged, size, None if results is None else results.found()


def picked_logits(projection: Projection, x: Tensor, picked: Picked) -> None:
    kernels.picked_logits(product_of(projection, aligned_contiguous(x), 0, projection.real_rows), picked)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.dim() == 1 or gradient.numel() == 0 or not gradient.is_contiguous():
        return torch_backend.scaled(gradient, factor, dtype)
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    rows, of_result = (t.view(-1, t.shape[-1]) for t in (gradient, result))
    scale_and_add_targets(rows, factor, None, of_result)
    return result


def logits_partial(logits: Tensor, target: Tensor, shifted: bool, partial: Tensor) -> None:
    of = dense_logits if logits.stride(1) == 1 else torch_backend
    of.logits_partial(logits, target, shifted, partial)


def logits_gradient(logits: Tensor, target: Tensor, partial: Tensor, coefficients: Tensor) -> Tensor:
    if logits.stride(1) != 1:
        return torch_backend.logits_gradient(logits, target, partial, coefficients)
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    dense_logits.logits_gradient(logits, target, partial, coefficients, gradient)
    return gradient


block_backward = BlockBackward
