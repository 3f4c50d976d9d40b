"""Vocabulary entries picked for each token: K for each token, or sets of any size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import Backend, Picked, PickedLogits, Projection
from parallel_lce.backends.torch_logits import largest
from parallel_lce.core.collectives import Layout, Shard
from parallel_lce.core.options import as_int64
from parallel_lce.core.partials import NOBODY, integer_view
from parallel_lce.core.plan import Block


def ids_and_offsets(selected: object) -> tuple[Any, Tensor | None]:
    """Split the argument ``selected`` into ids and offsets; without offsets these are None. Raises ``ValueError`` for a
    pair that is not two tensors."""
    if not isinstance(selected, (tuple, list)) or len(selected) != 2:
        return selected, None
    ids, offsets = selected
    if not (isinstance(ids, Tensor) and isinstance(offsets, Tensor)):
        given = f"{type(ids).__name__} and {type(offsets).__name__}"
        raise ValueError(f"selected must be a tensor of ids, or a pair of ids and offsets, got {given}")
    return ids, offsets


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
        """The selection of a block. ``start``: global id of the shard's first row."""
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


class BesidePartials:
    """Results of a forward that are gathered with the partials: logits of selected entries, and each token's largest
    logits. This rank's results are written block by block."""

    def __init__(self, selected: PickedIds | None, top_k: int, tokens: int, shard: Shard, layout: Layout) -> None:
        self._selected, self._top_k, self.tokens = selected, top_k, tokens
        self._shard, self._layout = shard, layout
        self._counts = 0 if selected is None else selected.count, tokens * top_k, tokens * top_k
        # Elements of each rank; None if the call asks for neither.
        self.size = None if selected is None and not top_k else sum(self._counts)

    def _views(self, elements: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In ``elements [P, size]``: the selected logits ``[P, E]``, the largest ``[P, N, K]`` and their ids."""
        selected, top, ids = elements.split(self._counts, 1)
        shape = self.tokens, self._top_k
        return selected, top.unflatten(1, shape), integer_view(ids).unflatten(1, shape)

    def begin(self, elements: Tensor | None) -> None:
        """``elements [1, size]``: this rank's memory for the results."""
        self._own = None if elements is None else self._views(elements)
        if elements is not None:
            elements.zero_()

    def selected_of(self, block: Block) -> PickedLogits | None:
        """Memory for the logits of the block's selected entries."""
        if self._selected is None or self._own is None:
            return None
        return PickedLogits(self._selected.of_block(self._layout, block, self._shard.start), self._own[0][0])

    def find_top(self, backend: Backend, projection: Projection, x: Tensor, block: Block) -> None:
        """Write the largest logits of a block's hidden states ``x [R, D]``."""
        if self._own is not None and self._top_k:
            _, top, ids = self._own
            for own, of_block in zip((top, ids), backend.top_k(projection, x, self._top_k)):
                self._layout.put(own[0].t(), block, of_block.t())

    def merged(self, elements: Tensor | None) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """The selected logits ``[E]``, and the largest logits ``[N, K]`` with their ids, from all ranks' ``elements
        [P, size]``."""
        if elements is None:
            return None, None
        selected, top, ids = self._views(elements)
        merged_top = None
        if self._top_k:
            # [N, P * K]
            flat_top, flat_ids = (t.transpose(0, 1).flatten(1) for t in (top, ids.long()))
            values, places = largest(flat_top, flat_ids, self._top_k)
            merged_top = values, places.masked_fill(places == NOBODY, -1)
        # Ranks without an entry hold 0.
        return (None if self._selected is None else selected.sum(0)), merged_top
