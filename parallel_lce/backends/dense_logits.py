"""Partials and gradient of logits that exist already: by kernels where the backend is triton, else in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce import partials
from parallel_lce.backends import uses_kernels
from parallel_lce.memory import on_device_of
from parallel_lce.partials import MAX, SUM_EXP, TARGET, Columns, accumulation_dtype

# Bytes of the fp32 copy of a block of rows. Torch computes in such blocks, so no second [N, V/P] tensor exists.
_CPU_BLOCK, _CUDA_BLOCK = 32 << 20, 256 << 20


def logits_partial(logits: Tensor, target: Tensor, start: int, want_shifted: bool) -> tuple[Tensor, Tensor | None]:
    """Partial ``[3, N]`` of ``logits [N, V/P]`` and, if wanted, sum(z - max) ``[N]``.

    ``start``: global id of the first entry. ``target [N]``: global ids.
    """
    if logits.stride(1) == 1 and uses_kernels(logits):
        from parallel_lce.kernels import dense_logits as kernels

        with on_device_of(logits):
            return kernels.logits_partial(logits, target, start, want_shifted)
    return torch_logits_partial(logits, target, start, want_shifted)


def logits_gradient(
    logits: Tensor,
    target: Tensor,
    start: int,
    maximum: Tensor,
    scale: Tensor,
    smoothing_grad: Tensor,
    target_grad: Tensor,
) -> Tensor:
    """``scale * exp(z - maximum) - smoothing_grad - target_grad [j = target]``, ``[N, V/P]``, in the logits' dtype."""
    if logits.stride(1) == 1 and uses_kernels(logits):
        from parallel_lce.kernels import dense_logits as kernels

        with on_device_of(logits):
            return kernels.logits_gradient(logits, target, start, maximum, scale, smoothing_grad, target_grad)
    return torch_logits_gradient(logits, target, start, maximum, scale, smoothing_grad, target_grad)


def merge_ranks(packed: Tensor, columns: Columns, rows: int, vocab_size: int | None) -> tuple[Tensor, Tensor]:
    """``partials.merge_ranks``, by the kernel where there is one."""
    if uses_kernels(packed):
        from parallel_lce.kernels import partials as kernels

        return kernels.merge_ranks(packed, columns, rows, vocab_size)
    return partials.merge_ranks(packed, columns, rows, vocab_size)


def _row_blocks(logits: Tensor) -> list[slice]:
    row_bytes = max(1, logits.shape[1] * accumulation_dtype(logits.dtype).itemsize)
    rows = max(1, (_CUDA_BLOCK if logits.is_cuda else _CPU_BLOCK) // row_bytes)
    return [slice(a, min(a + rows, logits.shape[0])) for a in range(0, logits.shape[0], rows)]


def _target_positions(target: Tensor, start: int, entries: int) -> tuple[Tensor, Tensor]:
    """Positions of the targets in the flattened block of rows, and which targets lie in this shard ``[rows]``."""
    column = target - start
    hit = (column >= 0) & (column < entries)
    first = torch.arange(target.shape[0], device=target.device) * entries
    return column.clamp_(0, max(0, entries - 1)).add_(first), hit


def torch_logits_partial(
    logits: Tensor, target: Tensor, start: int, want_shifted: bool
) -> tuple[Tensor, Tensor | None]:
    """:func:`logits_partial` in plain torch."""
    rows, entries = logits.shape
    dtype = accumulation_dtype(logits.dtype)
    partial = logits.new_empty(3, rows, dtype=dtype)
    shifted = logits.new_empty(rows, dtype=dtype) if want_shifted else None
    for block in _row_blocks(logits):
        z = logits[block].to(dtype, copy=True, memory_format=torch.contiguous_format)
        maximum = torch.amax(z, 1, out=partial[MAX, block])
        position, hit = _target_positions(target[block], start, entries)
        partial[TARGET, block] = z.view(-1).index_select(0, position).masked_fill_(~hit, 0.0)
        z -= maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(1)
        if shifted is not None:
            torch.sum(z, 1, out=shifted[block])
        torch.sum(z.exp_(), 1, out=partial[SUM_EXP, block])
    return partial, shifted


def torch_logits_gradient(
    logits: Tensor,
    target: Tensor,
    start: int,
    maximum: Tensor,
    scale: Tensor,
    smoothing_grad: Tensor,
    target_grad: Tensor,
) -> Tensor:
    """:func:`logits_gradient` in plain torch."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for block in _row_blocks(logits):
        z = logits[block].contiguous().to(maximum.dtype) - maximum[block].unsqueeze(1)
        z.exp_().mul_(scale[block].unsqueeze(1)).sub_(smoothing_grad[block].unsqueeze(1))
        position, hit = _target_positions(target[block], start, logits.shape[1])
        z.view(-1).scatter_add_(0, position, target_grad[block] * -hit.to(z.dtype))
        gradient[block] = z
    return gradient
