"""Vocabulary entries picked for each token: K for each token, or sets of any size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from parallel_lce.backends.interface import Picked
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import as_int64
from parallel_lce.core.plan import Block


@dataclass(frozen=True)
class PickedIds:
    """The picked entries of a call's N tokens, in compressed sparse rows."""

    # int64 ids in the whole vocabulary: [N, K], or [E] with offsets
    given_ids: Tensor
    # [N + 1] int64: the entries of token n are ids[offsets[n]:offsets[n + 1]]. None: each token has K.
    given_offsets: Tensor | None
    # N
    tokens: int

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor | None, tokens: int) -> PickedIds:
        """``ids [..., K]``, or ``ids [E]`` with ``offsets [N + 1]``, of any integer dtype."""
        if offsets is not None:
            return cls(as_int64(ids).contiguous(), as_int64(offsets).contiguous(), tokens)
        return cls(as_int64(ids).reshape(tokens, ids.shape[-1]).contiguous(), None, tokens)

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self.given_ids, self.given_offsets

    @cached_property
    def ids(self) -> Tensor:
        """``[E]``"""
        return self.given_ids.flatten()

    @property
    def count(self) -> int:
        """E, the picked entries of all tokens."""
        return self.given_ids.numel()

    @cached_property
    def offsets(self) -> Tensor:
        """``[N + 1]``: the given offsets, forced to lie between 0 and E and not to decrease."""
        if self.given_offsets is not None:
            return self.given_offsets.clamp(0, self.count).cummax(0).values
        return torch.arange(self.tokens + 1, device=self.ids.device) * self.given_ids.shape[1]

    @cached_property
    def owner(self) -> Tensor:
        """The token of each entry, ``[E]`` int64."""
        entries = torch.arange(self.count, device=self.ids.device)
        return torch.searchsorted(self.offsets[1:], entries, right=True).clamp_(max=max(0, self.tokens - 1))

    def forget(self) -> None:
        """What a backward computes again."""
        for name in ("ids", "offsets", "owner"):
            vars(self).pop(name, None)

    def inside(self, vocab_size: Tensor | int) -> Tensor:
        """Which ids are in the vocabulary, ``[E]``."""
        return (self.ids >= 0) & (self.ids < vocab_size)

    @property
    def broken(self) -> Tensor | None:
        """0-dimensional bool: the given offsets do not begin with 0, do not end with E, or decrease."""
        given = self.given_offsets
        if given is None:
            return None
        return (given[0] != 0) | (given[-1] != self.count) | (given.diff() < 0).any()

    def of_block(self, layout: Layout, block: Block, start: int) -> Picked:
        """The picked entries of a block. ``start``: global id of the shard's first row."""
        bounds = layout.take(torch.stack([self.offsets[:-1], self.offsets[1:]]), block)
        return Picked(self.ids - start, *bounds.contiguous().unbind())

    def spread(self, per_token: Tensor) -> Tensor:
        """``[E]``: each entry gets its token's value of ``per_token [N]``."""
        return per_token.index_select(0, self.owner)

    def sums(self, values: Tensor) -> Tensor:
        """``[N]``: the sum of each token's entries of ``values [E]``, in a fixed order."""
        return torch.segment_reduce(values, "sum", offsets=self.offsets, unsafe=True)

    def maxima(self, values: Tensor) -> Tensor:
        """``[N]``: the largest of each token's entries of ``values [E]``; -inf for a token without any."""
        return torch.segment_reduce(values, "max", offsets=self.offsets, unsafe=True, initial=-torch.inf)
