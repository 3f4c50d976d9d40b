"""The algebra of partials: what a slice of the vocabulary says about a token.

A partial of a slice with logits z is, per token, the columns

    max       m  = max z                      (-inf for an empty slice)
    sum_exp   s  = sum exp(z - m)
    target    t  = the target's logit if the target lies in the slice, else 0
    shifted   zs = sum (z - m)                (on request: mean log-probability)
    total     zt = sum z                      (on request: mean logit)
    weighted  ez = sum exp(z - m) (z - m)     (on request: expected logit, entropy)
    argmax    the global id of the largest logit, an integer bit-cast (on request)

Partials of disjoint slices merge into the partial of their union; merging is associative and
commutative, with the empty slice as identity. The same operator joins vocabulary windows inside a
rank and shards across ranks (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; the
window epilogue of "From Projection to Prediction", section 3.2.1). Sums are kept relative to the
maximum, so no statistic is ever a difference of two large numbers; the mean logit, which lies far
from the maximum, has a sum of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX, SUM_EXP, TARGET = 0, 1, 2


@dataclass(frozen=True)
class Columns:
    """Which columns a partial has; its tensor is ``[count, N]`` in the statistics' dtype."""

    mean_log_prob: bool = False
    mean_logit: bool = False
    expected_logit: bool = False
    argmax: bool = False

    @property
    def shifted(self) -> int:
        return 3

    @property
    def total(self) -> int:
        return 3 + self.mean_log_prob

    @property
    def weighted(self) -> int:
        return self.total + self.mean_logit

    @property
    def index(self) -> int:
        return self.weighted + self.expected_logit

    @property
    def count(self) -> int:
        return self.index + self.argmax


def integer_view(column: Tensor) -> Tensor:
    """The integers that are bit-cast in a floating-point tensor (int32 in fp32, int64 in fp64)."""
    return column.view(torch.int32 if column.dtype == torch.float32 else torch.int64)


def empty_partial(
    columns: Columns, rows: int, dtype: torch.dtype, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """The identity of :func:`merge`, ``[columns.count, rows]``, in ``out`` if that is given."""
    partial = torch.empty(columns.count, rows, dtype=dtype, device=device) if out is None else out
    partial.zero_()[MAX].fill_(-torch.inf)
    return partial


def merge(partials: Tensor, counts: Tensor, columns: Columns) -> Tensor:
    """Merge the partials of K disjoint slices: ``[K, C, N]`` to ``[C, N]``, in the order given.

    ``counts [K]`` holds the number of entries of each slice. NaN in any slice makes the token's
    merged columns NaN.
    """
    maxima = partials[:, MAX]
    merged = torch.empty_like(partials[0])
    top = torch.amax(maxima, 0, out=merged[MAX])
    missing = maxima == -torch.inf
    # -inf - -inf is NaN: a slice without a finite maximum has nothing to rescale.
    shift = (maxima - top).masked_fill_(missing, 0.0)
    factor = shift.exp().masked_fill_(missing, 0.0)
    torch.sum(partials[:, SUM_EXP] * factor, 0, out=merged[SUM_EXP])
    torch.sum(partials[:, TARGET], 0, out=merged[TARGET])
    if columns.mean_logit:
        torch.sum(partials[:, columns.total], 0, out=merged[columns.total])
    if columns.mean_log_prob:
        entries = counts.to(partials.dtype).unsqueeze(1)
        torch.sum(partials[:, columns.shifted] + entries * shift, 0, out=merged[columns.shifted])
    if columns.expected_logit:
        moved = partials[:, columns.weighted] + partials[:, SUM_EXP] * shift
        torch.sum(moved * factor, 0, out=merged[columns.weighted])
    if columns.argmax:
        ids = integer_view(partials[:, columns.index])
        ids = ids.masked_fill(maxima != top, torch.iinfo(ids.dtype).max)
        torch.amin(ids, 0, out=integer_view(merged[columns.index]))
    return merged


def message_size(columns: Columns, rows: int) -> int:
    """Elements of what a rank tells the others of its shard: a partial ``[C, R]`` and, bit-cast, the
    shard's first global id and its rows."""
    return columns.count * rows + 2


def bounds_of(messages: Tensor, columns: Columns, rows: int) -> Tensor:
    """The shards' bounds ``[..., 2]`` in ``messages [..., message_size]``, as integers."""
    end = columns.count * rows
    return integer_view(messages[..., end : end + 2])


def merge_messages(messages: Tensor, columns: Columns, rows: int, vocab_size: int | None) -> tuple[Tensor, Tensor]:
    """The merged partial ``[C, R]`` of the ranks' ``messages [P, message_size]``, in rank order, and V,
    the real entries, 0-dimensional int64. Entries from ``vocab_size`` on are padding.

    Where the shards leave a gap or overlap the columns are NaN, and the argmax is the largest integer.
    """
    starts, sizes = bounds_of(messages, columns, rows).long().unbind(1)
    real = sizes
    if vocab_size is not None:
        real = (vocab_size - starts).clamp(min=0).minimum(sizes)
    partials = messages[:, : columns.count * rows].unflatten(1, (columns.count, rows))
    merged = merge(partials, real, columns)
    covered = _cover(starts, sizes, vocab_size)
    merged[: columns.index].masked_fill_(~covered, torch.nan)
    if columns.argmax:
        ids = integer_view(merged[columns.index])
        ids.masked_fill_(~covered, torch.iinfo(ids.dtype).max)
    return merged, real.sum()


def _cover(starts: Tensor, sizes: Tensor, vocab_size: int | None) -> Tensor:
    """Whether shards ``[starts, starts + sizes)`` tile [0, V) without gap or overlap, in any order.

    Each that is not empty must begin where those before it end. Without ``vocab_size`` V is the sum of
    the sizes.
    """
    place = torch.arange(len(starts), device=starts.device)
    before = starts < starts.unsqueeze(1)
    before |= (starts == starts.unsqueeze(1)) & (place < place.unsqueeze(1))
    covered = ((before * sizes).sum(1) == starts) | (sizes == 0)
    covered = covered.all()
    return covered if vocab_size is None else covered & (sizes.sum() >= vocab_size)
