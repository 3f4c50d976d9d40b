"""All logits of a block of tokens, in the torch backend."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.eager_tiles import finished
from parallel_lce.backends.gemm import accumulate_nt, matmul_nt
from parallel_lce.backends.interface import Projection
from parallel_lce.partials import MAX, SUM_EXP, Columns, empty_partial

# Bytes of a tile of the logits that are exponentiated at a time. Beside it are up to eight tensors of its shape.
_BYTES = 32 << 20
# Rows begin at multiples of this many elements: cuBLAS wants 16 bytes, of half precision too.
_ALIGNED = 8


def block_logits(projection: Projection, x: Tensor) -> tuple[Tensor, Tensor]:
    real, bias = projection.real_rows, projection.bias
    partial = empty_partial(Columns(), len(x), projection.dtype, x.device)
    if x.is_cuda:
        logits = aligned(x, len(x), real, projection.dtype)
        accumulate_nt(logits, x, projection.weight[:real], overwrite=True)
    else:
        logits = matmul_nt(x, projection.weight[:real])
    if real == 0:
        return logits, partial
    finished(logits.t(), projection, None if bias is None else bias[:real, None])
    for rows in tiles_of_rows(logits):
        maximum = torch.amax(logits[rows], 1, out=partial[MAX, rows])
        # If all logits of a token are -inf, subtract 0: -inf - -inf is NaN.
        shifted = logits[rows] - maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(1)
        torch.sum(shifted.exp_(), 1, out=partial[SUM_EXP, rows])
    return logits, partial


def aligned(like: Tensor, rows: int, entries: int, dtype: torch.dtype) -> Tensor:
    """New memory ``[rows, entries]`` whose rows are 16 bytes aligned."""
    return like.new_empty(rows, -(-entries // _ALIGNED) * _ALIGNED, dtype=dtype)[:, :entries]


def tiles_of_rows(logits: Tensor) -> list[slice]:
    """Rows of ``logits [R, V]`` whose temporaries may be held."""
    row_bytes = max(1, logits.shape[1] * logits.element_size())
    step = max(1, _BYTES // row_bytes)
    return [slice(a, a + step) for a in range(0, len(logits), step)]
