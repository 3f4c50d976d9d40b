"""The algebra of partials: softmax statistics of a token over a slice of the vocabulary.

A partial of a slice with logits z is, per token, the columns

    max       m  = max z                      (-inf for an empty slice)
    sum_exp   s  = sum exp(z - m)
    target    t  = the target's logit if the target lies in the slice, else 0
    shifted   zs = sum (z - m)                (on request: mean log-probability)
    total     zt = sum z                      (on request: mean logit)
    weighted  ez = sum exp(z - m) (z - m)     (on request: expected logit, entropy)
    squared   sq = sum exp(z - m)^2           (on request: sum of squared probabilities)
    argmax    the global id of the largest logit, an integer bit-cast (on request)

Partials of disjoint slices merge into the partial of their union. Merging is associative and commutative, and the empty
slice is its identity. The same operator joins vocabulary windows inside a rank and shards across ranks (online softmax:
Milakov and Gimelshein 2018, arXiv:1805.02867; the window epilogue of "From Projection to Prediction", section 3.2.1).

Sums are relative to the maximum, so no statistic is a difference of two large numbers. The mean logit is summed apart
(``total``), because it lies far from the maximum.

The kernels of the same algebra are ``parallel_lce.kernels.partials``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX, SUM_EXP, TARGET = 0, 1, 2
SHIFTED = 3
"""Row of the first requestable column, if a partial has it. Rows of the others: ``Columns.__getitem__``."""

NO_ENTRY = 2**31 - 1
"""Sentinel: the id of no entry. Ids have 31 bits."""

LOWEST_SHIFT = -1e4
"""z - max is clamped to this before it is multiplied by exp(z - max): -inf * 0 would be NaN, and exp(-1e4) is 0."""

LOG2_E = 1.4426950408889634


def exponential_(z: Tensor) -> Tensor:
    """exp(z) in place. On a CPU computed as exp2(z log2(e)): torch.exp, from MKL, takes up to four times as long as
    torch's own exp2. Rounding the product adds a relative error of 2^-24 |z| in fp32, no more than rounding z does."""
    return z.exp_() if z.is_cuda else z.mul_(LOG2_E).exp2_()


ONE_LARGE_ENTRY = 1.5
"""If the sum of exponentials relative to the maximum is below this, only one entry is near the maximum: all others lie
more than ln 2 below it."""

NEAR = 0.3
"""With a sum below ``ONE_LARGE_ENTRY``, a recomputed logit closer than this to the maximum belongs to the largest
entry. Its exact value is the maximum."""

FLAT = 0.5
"""If most logits of a token are closer than this to a number c from -18 to 60, exp(z - c) - 1 is saved in place of its
exponentials, where a gradient may be a small difference (:attr:`Columns.differ`): a rounded exponential has the error
of a rounding of 1 in z."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Columns:
    """Which columns a partial ``[count, N]`` has beside max, sum_exp and target. They follow in the order of the
    fields. ``columns["total"]`` is the row of ``total``; for an absent column, the row that it would have. So
    ``partial[: columns["argmax"]]`` are all floating-point columns."""

    shifted: bool = False
    total: bool = False
    weighted: bool = False
    squared: bool = False
    argmax: bool = False
    # A rank's partial has, after these columns, a second row for each sum: what the first lost by its rounding. Merged
    # partials have none.
    low: bool = False

    @property
    def requested(self) -> list[str]:
        return [name for name in _REQUESTABLE if getattr(self, name)]

    @cached_property
    def differ(self) -> bool:
        """Whether a gradient may be ``p_j`` times a difference that vanishes where all logits are equal."""
        return self.shifted or self.weighted or self.squared

    @cached_property
    def merged(self) -> int:
        """Number of columns of a merged partial."""
        return 3 + len(self.requested)

    @cached_property
    def count(self) -> int:
        sums = self.merged - 2 - self.argmax  # all but max, target and argmax
        return self.merged + (sums if self.low else 0)

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each requestable column, by its name in capitals, as kernels take them; 0 if there is none."""
        return {name.upper(): self[name] if getattr(self, name) else 0 for name in _REQUESTABLE}

    def __getitem__(self, name: str) -> int:
        before = _REQUESTABLE[: _REQUESTABLE.index(name)]
        return 3 + len([other for other in before if getattr(self, other)])


_REQUESTABLE = tuple(field.name for field in fields(Columns) if field.name != "low")


class Merged(NamedTuple):
    """Results of a forward for its N tokens, merged over the ranks."""

    # [C, N]
    partial: Tensor
    # V, 0-dimensional int64 or a number
    vocab_size: Tensor | int


class Coefficients(NamedTuple):
    """Per-token coefficients of the gradient of the logits, ``[R]`` in the statistics' dtype; None is 0.

    dL/dz_j = factor / divisor (p_j (alpha + delta (z_j - max) + epsilon p_j) - beta [j = target] - gamma).
    """

    alpha: Tensor
    beta: Tensor | None = None
    gamma: Tensor | None = None
    delta: Tensor | None = None
    epsilon: Tensor | None = None
    # alpha - beta, formed apart: where a target's p is near 1, its gradient is little more than that, and a difference
    # of both would have their roundings. None: they are not that near to each other, or equal.
    excess: Tensor | None = None
    # [R], or one number for all tokens, 0-dimensional; None is 1. It does not count where a coefficient is 0.
    factor: Tensor | None = None
    # 0-dimensional; None is 1
    divisor: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Coefficients:
        """The coefficients from alpha to excess, each changed, without factor and divisor."""
        changed: Any = [c if c is None else change(c) for c in self[:6]]
        return Coefficients(*changed)

    def of_rows(self, rows: slice) -> Coefficients:
        """The coefficients of some tokens."""
        factor = self.factor if self.factor is None or self.factor.dim() == 0 else self.factor[rows]
        return self.each(lambda c: c[rows])._replace(factor=factor, divisor=self.divisor)


def integer_view(column: Tensor) -> Tensor:
    """The integers bit-cast in a floating-point tensor (int32 in fp32, int64 in fp64)."""
    return column.view(torch.int32 if column.dtype == torch.float32 else torch.int64)


def empty_partial(
    columns: Columns, rows: int, dtype: torch.dtype, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """The identity of :func:`merge`, ``[columns.count, rows]``, in ``out`` if that is given."""
    partial = torch.empty(columns.count, rows, dtype=dtype, device=device) if out is None else out
    partial.zero_()[MAX].fill_(-torch.inf)
    return partial


def tile_partial(z: Tensor, first: int, columns: Columns, partial: Tensor) -> None:
    """Write the partial ``[C, R]`` of a tile of logits ``z [V, R]``, without its target column. ``first``: global id of
    the tile's first entry. ``z`` is overwritten: it holds logits, then z - max, then exponentials."""
    maximum = partial[MAX]
    if columns.argmax:
        top, index = z.max(0)
        maximum.copy_(top)
        integer_view(partial[columns["argmax"]]).copy_(index.add_(first))
    else:
        torch.amax(z, 0, out=maximum)
    if columns.total:
        torch.sum(z, 0, out=partial[columns["total"]])
    # If all logits of a token are -inf, subtract 0: -inf - -inf is NaN.
    z -= maximum.masked_fill(maximum == -torch.inf, 0.0)
    if columns.shifted:
        torch.sum(z, 0, out=partial[columns["shifted"]])
    below_max = z.clamp(min=LOWEST_SHIFT) if columns.weighted else None
    e = exponential_(z)
    torch.sum(e, 0, out=partial[SUM_EXP])
    if columns.squared:
        torch.sum(e * e, 0, out=partial[columns["squared"]])
    if below_max is not None:
        torch.sum(below_max.mul_(e), 0, out=partial[columns["weighted"]])


def merge(partials: Tensor, counts: Tensor, columns: Columns) -> Tensor:
    """Merge the partials of K disjoint slices: ``[K, C, N]`` to ``[C, N]``, in the order given. ``counts [K]``: number
    of entries of each slice. NaN in any slice makes the token's merged columns NaN."""
    maxima = partials[:, MAX]
    merged = torch.empty_like(partials[0])
    top = torch.amax(maxima, 0, out=merged[MAX])
    missing = maxima == -torch.inf
    # -inf - -inf is NaN: the sums of a slice without a finite maximum are not rescaled.
    shift = (maxima - top).masked_fill_(missing, 0.0)
    factor = shift.exp().masked_fill_(missing, 0.0)
    torch.sum(partials[:, SUM_EXP] * factor, 0, out=merged[SUM_EXP])
    torch.sum(partials[:, TARGET], 0, out=merged[TARGET])
    if columns.shifted:
        row, entries = columns["shifted"], counts.to(partials.dtype).unsqueeze(1)
        torch.sum(partials[:, row] + entries * shift, 0, out=merged[row])
    if columns.total:
        row = columns["total"]
        torch.sum(partials[:, row], 0, out=merged[row])
    if columns.weighted:
        row = columns["weighted"]
        below_max = shift.clamp(min=LOWEST_SHIFT)
        torch.sum((partials[:, row] + partials[:, SUM_EXP] * below_max) * factor, 0, out=merged[row])
    if columns.squared:
        row = columns["squared"]
        torch.sum(partials[:, row] * factor.square(), 0, out=merged[row])
    if columns.argmax:
        row = columns["argmax"]
        ids = integer_view(partials[:, row])
        ids = ids.masked_fill(maxima != top, torch.iinfo(ids.dtype).max)
        torch.amin(ids, 0, out=integer_view(merged[row]))
    return merged


TRAILER = 3
"""Numbers at the end of a rank's message: its shard's first id and rows, and a digest of its call."""


def trailer_of(packed: Tensor) -> Tensor:
    """The last ``TRAILER`` numbers of each row of packed partials ``[P, n]``, as integers ``[P, TRAILER]``."""
    return integer_view(packed[:, -TRAILER:])


def merge_ranks(packed: Tensor, columns: Columns, rows: int, vocab_size: int | None) -> tuple[Tensor, Tensor]:
    """Merge the ranks' packed partials ``[P, >= C * R + 3]``, in rank order. Each row begins with a partial ``[C, R]``
    and ends with the rank's trailer, bit-cast.

    Returns the merged partial ``[C, R]`` and V, the number of real entries, 0-dimensional int64. Entries from
    ``vocab_size`` on are padding. If the trailers do not match (:func:`matching`), the columns are NaN, and the argmax
    is the largest integer.
    """
    trailers = trailer_of(packed).long()
    starts, real, _ = trailers.unbind(1)
    if vocab_size is not None:
        real = (vocab_size - starts).clamp(min=0).minimum(real)
    partials = packed[:, : columns.count * rows].unflatten(1, (columns.count, rows))
    merged = merge(partials, real, columns)
    valid = matching(trailers, vocab_size)
    merged[: columns["argmax"]].masked_fill_(~valid, torch.nan)
    if columns.argmax:
        ids = integer_view(merged[columns["argmax"]])
        ids.masked_fill_(~valid, torch.iinfo(ids.dtype).max)
    return merged, real.sum()


def matching(trailers: Tensor, vocab_size: int | None) -> Tensor:
    """Whether the ranks' ``trailers [P, TRAILER]`` int64 are of one call: all digests are equal, and the shards
    ``[start, start + size)`` cover [0, V) without gap or overlap, in any order. Every non-empty shard must start at the
    sum of the sizes of the shards before it. Without ``vocab_size``, V is the sum of all sizes."""
    starts, sizes, digests = trailers.unbind(1)
    place = torch.arange(len(starts), device=starts.device)
    before = starts < starts.unsqueeze(1)
    before |= (starts == starts.unsqueeze(1)) & (place < place.unsqueeze(1))
    covered = ((before * sizes).sum(1) == starts) | (sizes == 0)
    covered = covered.all() & (digests == digests[0]).all()
    return covered if vocab_size is None else covered & (sizes.sum() >= vocab_size)
