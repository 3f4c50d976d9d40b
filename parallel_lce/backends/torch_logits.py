"""In plain torch: logits of picked entries, sums of picked rows, log-probabilities within sets; partials and gradient
of the user's logits.

In kernels: parallel_lce.kernels.picked and parallel_lce.kernels.dense_logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.core.logit_map import Projection
from parallel_lce.core.partials import (
    LOWEST_SHIFT,
    MAX,
    SUM_EXP,
    TARGET,
    Coefficients,
    Columns,
    accumulation_dtype,
    tile_partial,
)
from parallel_lce.core.picked import Picked

# Bytes of the rows that are gathered or exponentiated at a time. Up to eight further tensors have the same shape.
_BYTES = 32 << 20
# Bytes of the fp32 copy of a range of rows. Torch computes in such ranges, so no second [N, V/P] tensor exists.
_CPU_BLOCK, _CUDA_BLOCK = 32 << 20, 256 << 20


def tiles_of_rows(count: int, width: int, itemsize: int) -> list[slice]:
    """Row ranges of a tensor ``[count, width]`` of at most ``_BYTES`` each, to bound temporaries."""
    step = max(1, _BYTES // max(1, width * itemsize))
    return [slice(a, a + step) for a in range(0, count, step)]


def picked_logits(projection: Projection, x: Tensor, picked: Picked) -> None:
    if projection.real_rows == 0 or len(x) == 0:
        return
    row, hit = picked.located(0, projection.real_rows)
    ids, out = picked.ids.where(hit, 0), picked.logits
    for some in tiles_of_rows(len(ids), x.shape[1], out.element_size()):
        of_entry, at = row[some], ids[some]
        z = (x[of_entry].to(out.dtype) * projection.weight[at].to(out.dtype)).sum(1)
        if projection.bias is not None:
            z += projection.bias[at]
        z = projection.logit_map.of_rows(of_entry).apply(z)
        out[some] = z.where(hit[some], out[some])


def picked_rows(picked: Picked, source: Tensor, out: Tensor) -> None:
    """index_put_ adds equal indices one after another, in a fixed order, on CUDA too. In fp32 the sum of many terms of
    one sign would drift, so it is fp64."""
    if len(source) == 0 or len(out) == 0:
        out.zero_()
        return
    row, hit = picked.located(0, len(source))
    ids, values, skipped = picked.ids.where(hit, 0), picked.gradient, ~hit.unsqueeze(1)
    for columns in tiles_of_rows(out.shape[1], len(out), torch.float64.itemsize):
        of_columns = source[:, columns]
        total = torch.zeros_like(out[:, columns], dtype=torch.float64)
        for some in tiles_of_rows(len(ids), total.shape[1], total.element_size()):
            added = of_columns[ids[some]].to(total.dtype) * values[some].unsqueeze(1)
            total.index_put_((row[some],), added.masked_fill_(skipped[some], 0.0), accumulate=True)
        out[:, columns] = total


def _row_blocks(logits: Tensor) -> list[slice]:
    row_bytes = logits.shape[1] * accumulation_dtype(logits.dtype).itemsize
    rows = max(1, (_CUDA_BLOCK if logits.is_cuda else _CPU_BLOCK) // row_bytes)
    return [slice(a, a + rows) for a in range(0, logits.shape[0], rows)]


def _target_positions(column: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Positions of the targets in the flattened range of rows, and which targets lie in this shard ``[rows]``."""
    inside = column.clamp(0, entries - 1)
    return torch.arange(len(column), device=column.device) * entries + inside, inside == column


def logits_partial(logits: Tensor, target: Tensor, shifted: bool, partial: Tensor) -> None:
    for block in _row_blocks(logits):
        z = logits[block].to(partial.dtype, copy=True, memory_format=torch.contiguous_format)
        position, hit = _target_positions(target[block], logits.shape[1])
        partial[TARGET, block] = z.view(-1).index_select(0, position).masked_fill_(~hit, 0.0)
        tile_partial(z.t(), 0, Columns(shifted), partial[:, block])


def target_gradient(partial: Tensor, coefficients: Coefficients) -> Tensor:
    """The gradient ``[R]`` of each target's logit, from the fp32 logit. ``partial [>= 3, R]``: merged.
    ``coefficients``: without a factor."""
    alpha, beta, gamma, delta, epsilon, excess, *_ = coefficients
    assert beta is not None  # there are targets
    top = partial[MAX]
    below_max = (partial[TARGET] - top.masked_fill(top == -torch.inf, 0.0)).clamp_(LOWEST_SHIFT, 0.0)
    p = below_max.exp() / partial[SUM_EXP]
    # Where p is near 1, alpha p - beta would lose what is left: both terms of this sum are small.
    of_p = alpha - beta if excess is None else excess
    of_p = of_p if delta is None else of_p + delta * below_max
    of_p = of_p if epsilon is None else of_p + epsilon * p
    gradient = p * of_p + beta * (p - 1)
    return gradient if gamma is None else gradient - gamma


def logits_gradient(logits: Tensor, target: Tensor, partial: Tensor, coefficients: Tensor) -> Tensor:
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alpha, beta, gamma = coefficients
    for block in _row_blocks(logits):
        z = logits[block].contiguous().to(partial.dtype) - partial[MAX, block].unsqueeze(1)
        z.exp_().mul_((alpha[block] / partial[SUM_EXP, block]).unsqueeze(1)).sub_(gamma[block].unsqueeze(1))
        position, hit = _target_positions(target[block], logits.shape[1])
        z.view(-1).scatter_add_(0, position, beta[block] * -hit.to(z.dtype))
        gradient[block] = z
    return gradient


def log_softmax_of_sets(logits: Tensor, picked: Picked) -> Tensor:
    owner, lengths, lowest = picked.owner, picked.end - picked.begin, torch.finfo(logits.dtype).min
    # Of a token without a finite logit this is a number, too.
    maxima = torch.segment_reduce(logits, "max", lengths=lengths, unsafe=True, initial=lowest)
    shifted = logits - maxima[owner]
    # The sum of all exponentials but the largest, which is 1. Adding this 1 would round away a confident token's 1 - p.
    largest = shifted == 0
    others = picked.sums(shifted.exp().masked_fill_(largest, 0.0))
    others += (picked.sums(largest.to(shifted.dtype)) - 1).clamp_(min=0)
    log_probs = shifted - others.log1p()[owner]
    return log_probs.masked_fill_(logits == -torch.inf, -torch.inf)  # also beside a NaN


def gradient_of_sets(log_probs: Tensor, upstream: Tensor, picked: Picked) -> Tensor:
    # A probability of 0 has no gradient, even if its log-probability has an upstream gradient.
    upstream = upstream.where(log_probs != -torch.inf, 0.0)
    # u - p sum(u), without the difference where p is near 1.
    others = picked.sums(upstream)[picked.owner] - upstream
    return -upstream * log_probs.expm1() - log_probs.exp() * others
