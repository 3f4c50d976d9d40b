"""Results from logits in plain torch: logits of a block, or of picked entries, with their gradients; the largest
logits, for both backends; log-probabilities within sets; partials and gradient of the user's logits; divergences.

In kernels: parallel_lce.kernels.picked and parallel_lce.kernels.dense_logits. The formulas of the divergence are in
:mod:`parallel_lce.run.divergence`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, matmul_nt, operand
from parallel_lce.backends.interface import LogitsGradient, Pair, Picked, PickedGradient, Projection
from parallel_lce.backends.torch_tiles import logits
from parallel_lce.core.partials import (
    MAX,
    NOBODY,
    SUM_EXP,
    TARGET,
    Columns,
    accumulation_dtype,
    empty_partial,
    tile_partial,
)

# Bytes of the rows that are gathered or exponentiated at a time. Up to eight further tensors have the same shape.
_BYTES = 32 << 20
# Tokens and entries of a tile of logits in top_k.
_TOP_K_TILE = 2048, 8192
# Tokens and entries of a tile of logits in sampled_ids.
_SAMPLED_TILE = 1024, 4096
# Bytes of the fp32 copy of a range of rows. Torch computes in such ranges, so no second [N, V/P] tensor exists.
_CPU_BLOCK, _CUDA_BLOCK = 32 << 20, 256 << 20
# Rows begin at multiples of this many elements: cuBLAS wants 16 bytes, in half precision too.
_ALIGNED = 8


def block_logits(projection: Projection, x: Tensor) -> tuple[Tensor, Tensor]:
    """The logits ``[R, V/P]`` of the real rows, in the statistics' dtype, and their partial ``[3, R]``, whose target
    column is 0. On CUDA rows are :func:`aligned`."""
    real = projection.real_rows
    partial = empty_partial(Columns(), len(x), projection.dtype, x.device)
    if x.is_cuda:
        z = aligned(x, len(x), real, projection.dtype)
        accumulate_nt(z, x, projection.weight[:real], overwrite=True)
    else:
        z = matmul_nt(x, projection.weight[:real])
    if real == 0:
        return z, partial
    if projection.bias is not None:
        z += projection.bias[:real]
    projection.logit_map.apply(z.t())
    for rows in tiles_of_rows(*z.shape, itemsize=z.element_size()):
        maximum = torch.amax(z[rows], 1, out=partial[MAX, rows])
        # If all logits of a token are -inf, subtract 0: -inf - -inf is NaN.
        shifted = z[rows] - maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(1)
        torch.sum(shifted.exp_(), 1, out=partial[SUM_EXP, rows])
    return z, partial


def aligned(like: Tensor, rows: int, entries: int, dtype: torch.dtype) -> Tensor:
    """New memory ``[rows, entries]`` with rows aligned to 16 bytes."""
    return like.new_empty(rows, -(-entries // _ALIGNED) * _ALIGNED, dtype=dtype)[:, :entries]


def tiles_of_rows(count: int, width: int, itemsize: int) -> list[slice]:
    """Row ranges of a tensor ``[count, width]`` of at most ``_BYTES`` each, to bound temporaries."""
    step = max(1, _BYTES // max(1, width * itemsize))
    return [slice(a, a + step) for a in range(0, count, step)]


def picked_logits(projection: Projection, x: Tensor, picked: Picked, out: Tensor) -> None:
    """Write the logits of a block's picked entries to ``out [E]``. Elements of other shards are not written."""
    row, hit = picked.places()
    hit &= picked.inside(0, projection.real_rows)
    ids = picked.ids.where(hit, 0)
    if projection.real_rows == 0 or len(x) == 0:
        return
    for some in tiles_of_rows(len(ids), x.shape[1], out.element_size()):
        of_entry, at = row[some], ids[some]
        z = (x[of_entry].to(out.dtype) * projection.weight[at].to(out.dtype)).sum(1)
        if projection.bias is not None:
            z += projection.bias[at]
        z = projection.logit_map.of_rows(of_entry).apply(z)
        out[some] = z.where(hit[some], out[some])


def picked_hidden_gradient(weight: Tensor, gradient: PickedGradient, dx: Tensor) -> None:
    """Write ``dx [R, D]``: the sums of the picked rows of ``weight [V, D]``, times their values."""
    row, hit = gradient.entries.places()
    hit &= gradient.entries.inside(0, len(weight))
    if len(weight):
        ids, values = gradient.entries.ids.where(hit, 0), gradient.values.where(hit, 0.0)
        _sum_rows(dx, row, values, weight, ids)
    else:
        dx.zero_()


def picked_weight_gradient(
    x: Tensor, owner: Tensor, gradient: PickedGradient, dweight: Tensor, dbias: Tensor | None
) -> None:
    """Write ``dweight [V, D]`` and ``dbias [V]``, 0 in rows that are not picked. ``owner [E]``: the row of
    ``x [R, D]`` of each entry."""
    hit = gradient.entries.inside(0, len(dweight))
    ids, values = gradient.entries.ids.where(hit, 0), gradient.values.where(hit, 0.0)
    if len(dweight):
        _sum_rows(dweight, ids, values, x, owner)
        if dbias is not None:
            _sum_rows(dbias[:, None], ids, values, values.new_ones(len(x), 1), owner)


def _sum_rows(out: Tensor, index: Tensor, values: Tensor, source: Tensor, rows: Tensor) -> None:
    """``out[index] = sum of values * source[rows]``; ``index``, ``values`` and ``rows`` are ``[E]``.

    index_put_ adds equal indices one after another, in a fixed order, on CUDA too. In fp32 the sum of many terms of one
    sign would drift, so it is fp64.
    """
    for columns in tiles_of_rows(out.shape[1], len(out), torch.float64.itemsize):
        of_columns = source[:, columns]
        total = torch.zeros_like(out[:, columns], dtype=torch.float64)
        for some in tiles_of_rows(len(index), total.shape[1], total.element_size()):
            added = of_columns[rows[some]].to(total.dtype) * values[some].unsqueeze(1)
            total.index_put_((index[some],), added, accumulate=True)
        out[:, columns] = total


def top_k(projection: Projection, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest logits ``[R, k]`` of each token, and their ids in the whole vocabulary, int64: the largest
    first, and the lowest id first among equals. Where the shard has fewer entries, -inf and the id ``NOBODY``. Projects
    again, one tile of logits at a time."""
    values = x.new_full((len(x), k), -torch.inf, dtype=projection.dtype)
    ids = torch.full((len(x), k), NOBODY, device=x.device)
    for rows, window, z in _tiles(projection, x, _TOP_K_TILE[0], max(k, _TOP_K_TILE[1])):
        here = torch.arange(window.start, window.stop, device=x.device) + projection.start
        of_window = largest(z, here.expand(len(z), -1), min(k, z.shape[1]))
        both = torch.cat([values[rows], of_window[0]], 1), torch.cat([ids[rows], of_window[1]], 1)
        values[rows], ids[rows] = largest(*both, k)
    return values, ids


def _tiles(projection: Projection, x: Tensor, height: int, width: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Projects again: the logits of at most ``height`` rows and a window of at most ``width`` entries of the shard. All
    windows of some rows come before those of the next rows, in the order of ids."""
    for a in range(0, len(x), height):
        rows = slice(a, a + height)
        of_rows, x_rows = projection.of_rows(rows), operand(x[rows])
        for first in range(0, projection.real_rows, width):
            window = slice(first, min(first + width, projection.real_rows))
            weight = operand(projection.weight[window])
            memory = x.new_empty(len(weight), len(x_rows), dtype=projection.dtype)
            yield rows, window, logits(of_rows, x_rows, weight, window, memory).t()


def largest(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of ``values [R, C]`` with their ``ids``, in the order of :func:`top_k`."""
    if values.dtype == torch.float64:
        ids, order = ids.sort(dim=1, stable=True)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids.gather(1, order)[:, :k]
    # One integer for both: bits that are ordered as the values, then the negated id. Adding 0.0 turns -0.0 into 0.0.
    bits = (values + 0.0).view(torch.int32).long()
    keys = (bits ^ (bits >> 63 & 0x7FFFFFFF)) << 32 | (NOBODY - ids)
    keys = keys.topk(k, 1).values
    bits = keys >> 32
    bits = (bits ^ (bits >> 63 & 0x7FFFFFFF)).int()
    return bits.view(torch.float32), NOBODY - (keys & 0xFFFFFFFF)


def sampled_ids(
    projection: Projection, x: Tensor, windows: list[Any], partial: Tensor, place: Tensor, owned: Tensor | None
) -> Tensor:
    """The sampled id ``[R]`` int64 of each token, in the whole vocabulary: the entry at the token's ``place``.

    ``place [R]`` fp64 in (0, 1): a fraction of the shard's sum of exponentials (:mod:`parallel_lce.call.draws`). A
    token that is not ``owned [R]`` gets an arbitrary id. ``windows``: from the block's forward. ``partial [2, R]``: the
    shard's maxima and sums. This function ignores the windows, and projects again, one tile of logits at a time.
    """
    ids = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
    maximum = partial[MAX].masked_fill(partial[MAX] == -torch.inf, 0.0).unsqueeze(1)
    wanted = (place * partial[SUM_EXP].double()).unsqueeze(1)
    reached, found = torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    largest_logit = torch.full_like(maximum, -torch.inf)
    for rows, window, z in _tiles(projection, x, *_SAMPLED_TILE):
        ends = reached[rows] + (z - maximum[rows]).exp_().double().cumsum(1)
        last, here = ends[:, -1:], (ends <= wanted[rows]).sum(1, keepdim=True)
        # The sum in the partial is rounded: a place may lie behind the last entry. That token gets its largest one.
        top, largest_here = z.max(1, keepdim=True)
        passed = last <= wanted[rows]
        taken = ~found[rows] & (~passed | (top > largest_logit[rows]))
        ids[rows] = torch.where(taken, torch.where(passed, largest_here, here) + window.start, ids[rows])
        reached[rows], found[rows] = last, found[rows] | ~passed
        largest_logit[rows] = torch.maximum(largest_logit[rows], top)
    return ids.squeeze(1) + projection.start


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
    """The gradient ``p alpha - beta [j = target] - gamma`` of the user's ``logits``, in their dtype. ``partial``:
    merged over all ranks. ``coefficients [3, N]``."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alpha, beta, gamma = coefficients
    for block in _row_blocks(logits):
        z = logits[block].contiguous().to(partial.dtype) - partial[MAX, block].unsqueeze(1)
        z.exp_().mul_((alpha[block] / partial[SUM_EXP, block]).unsqueeze(1)).sub_(gamma[block].unsqueeze(1))
        position, hit = _target_positions(target[block], logits.shape[1])
        z.view(-1).scatter_add_(0, position, beta[block] * -hit.to(z.dtype))
        gradient[block] = z
    return gradient


def divergence(pair: Pair, sums: Tensor | None, gradient: LogitsGradient | None) -> None:
    """Write ``sums [2, R]`` of q log(q / r) and of p log(p / r) over the shard's entries, or ``[3, R]`` with those of
    p log p, and the gradient, each unless it is None. A sum that is no term of the divergence is 0."""
    for rows in tiles_of_rows(*pair.student.shape, itemsize=pair.student.element_size()):
        log_p = _log_probs(pair.student, pair.student_normalizer, rows)
        log_q = _log_probs(pair.teacher, pair.teacher_normalizer, rows)
        p, q = log_p.exp(), log_q.exp()
        of_p, of_q = log_ratios(log_p - log_q, pair.beta)
        if sums is not None:
            sums[0, rows] = (q * of_q).masked_fill_(q == 0, 0.0).sum(1) if pair.beta < 1 else 0.0
            sums[1, rows] = (p * of_p).masked_fill_(p == 0, 0.0).sum(1) if pair.beta > 0 else 0.0
            if len(sums) > 2:
                sums[2, rows] = (p * log_p).masked_fill_(p == 0, 0.0).sum(1)
        if gradient is not None:
            if gradient.student_mean is None:
                g = p - q
            else:
                g = (p * (of_p - gradient.student_mean[rows, None])).masked_fill_(p == 0, 0.0)
            slope = gradient.logit_map.of_rows(rows).slope(pair.student[rows].t())
            if slope is not None:
                g *= slope.t()
            factor = gradient.factor[rows, None]
            gradient.out[rows] = g.mul_(factor).masked_fill_(factor == 0, 0.0)


def log_ratios(log_ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / r) and log(q / r) from log(p / q), without the large logarithm of r. Differentiable."""
    if beta in (0, 1):
        return log_ratio, -log_ratio
    up, rest = log_ratio > 0, 1 - beta
    smaller = torch.where(up, -log_ratio, log_ratio).exp()
    log_sum = torch.where(up, rest + beta * smaller, beta + rest * smaller).log()
    return log_ratio.where(~up, 0.0) - log_sum, -log_ratio.where(up, 0.0) - log_sum


def of_classes(log_p: Tensor, log_q: Tensor, there: Tensor, beta: float) -> Tensor:
    """The divergence of ``[..., C]`` log-probabilities, over the classes marked in ``there``; differentiable. The
    teacher's, ``log_q``, must be finite there."""
    # Masked first: if the other classes were masked at the end, their gradients would be 0 * inf.
    log_p, log_q = log_p.masked_fill(~there, 0.0), log_q.masked_fill(~there, 0.0)
    p, q = (torch.where(there, v.exp(), 0.0) for v in (log_p, log_q))
    excluded = log_p == -torch.inf
    _, of_q = log_ratios(log_p - log_q, beta)
    of_p, _ = log_ratios(log_p.masked_fill(excluded, 0.0) - log_q, beta)
    if beta in (0, 1):
        return (q * of_q).sum(-1) if beta == 0 else (p * of_p).sum(-1)
    return (beta * q * of_q + (1 - beta) * p * of_p).sum(-1)


def _log_probs(logits: Tensor, normalizer: Tensor, rows: slice) -> Tensor:
    return logits[rows] - normalizer[0, rows, None] - normalizer[1, rows, None]


def set_log_probs(packed: Tensor, sets: Any, broken: Tensor | None, vocab_size: Tensor | int) -> tuple[Tensor, Tensor]:
    """Log-softmax ``[E]`` over each token's picked entries, and their logits ``[E]``; -inf and 0 for ids outside
    ``[0, vocab_size)``.

    ``packed [P, >= E]``: each rank's logits, 0 for other ranks' ids. ``sets``: the picked entries
    (:class:`parallel_lce.call.picked.Picked`). ``broken``, 0-dimensional bool: all log-probabilities are NaN.
    """
    logits = packed[:, : len(sets.ids)].sum(0)
    outside = (sets.ids < 0) | (sets.ids >= vocab_size)
    logits.masked_fill_(outside, -torch.inf)
    maxima = sets.maxima(logits)
    shifted = logits - sets.spread(maxima.masked_fill(maxima == -torch.inf, 0.0))
    # The sum of all exponentials but the largest, which is 1. Adding this 1 would round away a confident token's 1 - p.
    largest = shifted == 0
    others = sets.sums(shifted.exp().masked_fill(largest, 0.0))
    others += (sets.sums(largest.to(shifted.dtype)) - 1).clamp(min=0)
    log_probs = shifted - sets.spread(others.log1p())
    # Replaces -inf - -inf for a token without a finite logit.
    log_probs.masked_fill_(logits == -torch.inf, -torch.inf)
    if broken is not None:
        log_probs.masked_fill_(broken, torch.nan)
    return log_probs, logits.masked_fill_(outside, 0.0)


def set_gradient(log_probs: Tensor, upstream: Tensor, sets: Any) -> Tensor:
    """The gradient ``[E]`` of the logits of :func:`set_log_probs`."""
    # A probability of 0 has no gradient, even if its log-probability has an upstream gradient.
    upstream = upstream.where(log_probs != -torch.inf, 0.0)
    # u - p sum(u), without the difference where p is near 1.
    others = sets.spread(sets.sums(upstream)) - upstream
    return -upstream * log_probs.expm1() - log_probs.exp() * others
