"""Partials and gradient of the user's logits, in plain torch; in kernels: parallel_lce.kernels.dense_logits."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.core.partials import MAX, SUM_EXP, TARGET, Columns, accumulation_dtype, tile_partial

# Bytes of the fp32 copy of a range of rows. Torch computes in such ranges, so no second [N, V/P] tensor exists.
_CPU_BLOCK, _CUDA_BLOCK = 32 << 20, 256 << 20


def _row_blocks(logits: Tensor) -> list[slice]:
    row_bytes = logits.shape[1] * accumulation_dtype(logits.dtype).itemsize
    rows = max(1, (_CUDA_BLOCK if logits.is_cuda else _CPU_BLOCK) // row_bytes)
    return [slice(a, a + rows) for a in range(0, logits.shape[0], rows)]


def _target_positions(column: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Positions of the targets in the flattened range of rows, and which targets lie in this shard ``[rows]``."""
    inside = column.clamp(0, entries - 1)
    return torch.arange(len(column), device=column.device) * entries + inside, inside == column


def logits_partial(logits: Tensor, target: Tensor, shifted: bool, partial: Tensor) -> None:
    """Write the ``partial [3, N]``, or with ``shifted`` ``[4, N]``, of the user's ``logits [N, V/P]``. ``target [N]``:
    relative to the shard."""
    for block in _row_blocks(logits):
        z = logits[block].to(partial.dtype, copy=True, memory_format=torch.contiguous_format)
        position, hit = _target_positions(target[block], logits.shape[1])
        partial[TARGET, block] = z.view(-1).index_select(0, position).masked_fill_(~hit, 0.0)
        tile_partial(z.t(), 0, Columns(shifted), partial[:, block])


def logits_gradient(logits: Tensor, target: Tensor, partial: Tensor, coefficients: Tensor) -> Tensor:
    """The gradient of :func:`logits_partial`'s logits, in their dtype: ``p alpha - beta [j = target] - gamma``.
    ``partial``: merged over all ranks. ``coefficients [3, N]``."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alpha, beta, gamma = coefficients
    for block in _row_blocks(logits):
        z = logits[block].contiguous().to(partial.dtype) - partial[MAX, block].unsqueeze(1)
        z.exp_().mul_((alpha[block] / partial[SUM_EXP, block]).unsqueeze(1)).sub_(gamma[block].unsqueeze(1))
        position, hit = _target_positions(target[block], logits.shape[1])
        z.view(-1).scatter_add_(0, position, beta[block] * -hit.to(z.dtype))
        gradient[block] = z
    return gradient
