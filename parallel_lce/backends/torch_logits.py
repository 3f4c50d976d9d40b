"""Logits of a block in the torch backend: all of them, or those of selected entries. The largest logits, for both
backends."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, matmul_nt, operand
from parallel_lce.backends.interface import Projection, SelectedGradient, Selection
from parallel_lce.backends.torch_tiles import finished, logits
from parallel_lce.core.partials import MAX, NOBODY, SUM_EXP, Columns, empty_partial

# Bytes of the rows that are gathered or exponentiated at a time. Up to eight further tensors have their shape.
_BYTES = 32 << 20
# Tokens and entries of a tile of logits in top_k.
_TOP_K_TILE = 2048, 8192
# Rows begin at multiples of this many elements: cuBLAS wants 16 bytes, in half precision too.
_ALIGNED = 8


def block_logits(projection: Projection, x: Tensor) -> tuple[Tensor, Tensor]:
    """The logits ``[R, V/P]`` of the real rows, in the statistics' dtype, and their partial ``[3, R]``, whose target
    column is 0. The stride of the rows is a multiple of 8 elements, so that rows are aligned to 16 bytes in every
    dtype."""
    real, bias = projection.real_rows, projection.bias
    partial = empty_partial(Columns(), len(x), projection.dtype, x.device)
    if x.is_cuda:
        z = aligned(x, len(x), real, projection.dtype)
        accumulate_nt(z, x, projection.weight[:real], overwrite=True)
    else:
        z = matmul_nt(x, projection.weight[:real])
    if real == 0:
        return z, partial
    finished(z.t(), projection, None if bias is None else bias[:real, None])
    for rows in tiles_of_rows(*z.shape, z.element_size()):
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


def selected_logits(projection: Projection, x: Tensor, selection: Selection, out: Tensor) -> None:
    """Write the logits of a block's selected entries to ``out [E]``. ``out`` holds 0 for those of other shards."""
    row, hit = selection.places()
    hit &= selection.inside(0, projection.real_rows)
    ids = selection.ids.where(hit, 0)
    if projection.real_rows == 0 or len(x) == 0:
        return
    for some in tiles_of_rows(len(ids), x.shape[1], out.element_size()):
        of_entry, at = row[some], ids[some]
        z = (x[of_entry].to(out.dtype) * projection.weight[at].to(out.dtype)).sum(1)
        bias = None if projection.bias is None else projection.bias[at]
        finished(z, projection.of_rows(of_entry), bias)
        out[some] = z.where(hit[some], out[some])


def selected_hidden_gradient(weight: Tensor, gradient: SelectedGradient, dx: Tensor) -> None:
    """Write ``dx [R, D]``: the sums of the selected rows of ``weight [V, D]``, times their values."""
    row, hit = gradient.selection.places()
    hit &= gradient.selection.inside(0, len(weight))
    if len(weight):
        ids, values = gradient.selection.ids.where(hit, 0), gradient.values.where(hit, 0.0)
        _sum_rows(dx, row, values, weight, ids)
    else:
        dx.zero_()


def selected_weight_gradient(
    x: Tensor, owner: Tensor, gradient: SelectedGradient, dweight: Tensor, dbias: Tensor | None
) -> None:
    """Write ``dweight [V, D]`` and ``dbias [V]``, 0 in rows that are not selected. ``owner [E]``: the row of
    ``x [R, D]`` of each entry."""
    hit = gradient.selection.inside(0, len(dweight))
    ids, values = gradient.selection.ids.where(hit, 0), gradient.values.where(hit, 0.0)
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
        part = source[:, columns]
        total = torch.zeros_like(out[:, columns], dtype=torch.float64)
        for some in tiles_of_rows(len(index), total.shape[1], total.element_size()):
            added = part[rows[some]].to(total.dtype) * values[some].unsqueeze(1)
            total.index_put_((index[some],), added, accumulate=True)
        out[:, columns] = total


def top_k(projection: Projection, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest logits ``[R, k]`` of each token, and their ids in the whole vocabulary, int64: the largest
    first, and the lowest id among equals. Where the shard has fewer, -inf and the id ``partials.NOBODY``. Projects
    again, one tile of logits at a time."""
    values = x.new_full((len(x), k), -torch.inf, dtype=projection.dtype)
    ids = torch.full((len(x), k), NOBODY, device=x.device)
    height, width = _TOP_K_TILE[0], max(k, _TOP_K_TILE[1])
    for a in range(0, len(x), height):
        rows = slice(a, a + height)
        of_rows, x_rows = projection.of_rows(rows), operand(x[rows])
        for first in range(0, projection.real_rows, width):
            window = slice(first, min(first + width, projection.real_rows))
            weight = operand(projection.weight[window])
            z = logits(of_rows, x_rows, weight, window, values.new_empty(len(weight), len(x_rows))).t()
            here = torch.arange(window.start, window.stop, device=x.device) + projection.start
            found = largest(z, here.expand(len(z), -1), min(k, z.shape[1]))
            both = torch.cat([values[rows], found[0]], 1), torch.cat([ids[rows], found[1]], 1)
            values[rows], ids[rows] = largest(*both, k)
    return values, ids


def largest(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of ``values [R, C]`` with their ``ids``, the largest first, the lowest id among equals."""
    if values.dtype == torch.float64:
        ids, order = ids.sort(dim=1, stable=True)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids.gather(1, order)[:, :k]
    # One integer for both: the value's bits in the order of the values, then the id, negated. -0.0 equals 0.0.
    bits = (values + 0.0).view(torch.int32).long()
    keys = (bits ^ (bits >> 63 & 0x7FFFFFFF)) << 32 | (NOBODY - ids)
    keys = keys.topk(k, 1).values
    bits = keys >> 32
    bits = (bits ^ (bits >> 63 & 0x7FFFFFFF)).int()
    return bits.view(torch.float32), NOBODY - (keys & 0xFFFFFFFF)
