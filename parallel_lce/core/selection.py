"""Vocabulary entries selected for each token, K for each or sets of any size, in compressed sparse rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.core.collectives import Layout
from parallel_lce.core.plan import Block


class Selection(NamedTuple):
    """Token r has the selected entries ``ids[begin[r]:end[r]]``."""

    # [E] int64, of all tokens of the call: ids in the whole vocabulary, or relative to a shard.
    ids: Tensor
    # [R] int64, not decreasing
    begin: Tensor
    end: Tensor
    # Shape of the ids as they were given: [N, K], or [E] with offsets.
    shape: torch.Size = torch.Size()
    # Whether the given offsets are invalid, 0-dimensional bool; None: there are none.
    invalid: Tensor | None = None
    # [E] in the statistics' dtype: the entries' logits.
    logits: Any = None
    # [E] in the statistics' dtype: the entries' terms of the gradient of ``x @ weight.T + bias``.
    gradient: Any = None

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor | None, tokens: int) -> Selection:
        """``ids [..., K]``, or ``ids [E]`` with ``offsets [N + 1]``, int64. With offsets that do not begin with 0, do
        not end with E, or decrease, no token has an entry."""
        if offsets is None:
            shape, invalid = torch.Size((tokens, ids.shape[-1])), None
            bounds = torch.arange(tokens + 1, device=ids.device) * ids.shape[-1]
        else:
            shape = ids.shape
            invalid = (offsets[0] != 0) | (offsets[-1] != len(ids)) | (offsets.diff() < 0).any()
            bounds = offsets.masked_fill(invalid, 0)
        return cls(ids.reshape(-1).contiguous(), bounds[:-1], bounds[1:], shape, invalid)

    def of_rows(self, rows: slice) -> Selection:
        return self._replace(begin=self.begin[rows], end=self.end[rows])

    def of_block(self, layout: Layout, block: Block, start: int) -> Selection:
        """Those of a block's tokens, relative to the shard that begins with the id ``start``."""
        begin, end = layout.take(self.begin, block), layout.take(self.end, block)
        return self._replace(ids=self.ids - start, begin=begin, end=end)

    @property
    def owner(self) -> Tensor:
        """The token of each entry ``[E]``; any token for an entry without one."""
        entry = torch.arange(len(self.ids), device=self.ids.device)
        # The first token that ends after the entry.
        return torch.searchsorted(self.end, entry, right=True).clamp_(max=len(self.end) - 1)

    def inside(self, start: int, stop: int | Tensor) -> Tensor:
        """Which ids lie in ``[start, stop)``, ``[E]``."""
        return (self.ids >= start) & (self.ids < stop)

    def located(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each entry, ``[E]``: its :attr:`owner`; its id relative to ``start``; and whether it has an owner and an
        id in ``[start, stop)``. If not, the second is 0."""
        entry, owner = torch.arange(len(self.ids), device=self.ids.device), self.owner
        owned = (entry >= self.begin[owner]) & (entry < self.end[owner])
        hit = owned & self.inside(start, stop)
        return owner, (self.ids - start).where(hit, 0), hit

    def sums(self, values: Tensor) -> Tensor:
        """The sum of each token's entries of ``values [E]``, ``[R]``, in a fixed order."""
        return torch.segment_reduce(values, "sum", lengths=self.end - self.begin, unsafe=True)
