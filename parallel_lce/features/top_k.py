"""The largest logits of each token, and their ids: the argument ``top_k`` of :func:`parallel_lce.token_statistics`.

Each rank finds the K largest of its shard, projecting the block again, one tile of logits at a time. The ranks send
them with the partials, and each merges all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import Backend, ForwardTask, Picked, Projection
from parallel_lce.backends.torch_tiles import projected_tiles
from parallel_lce.call.seam import Feature, Shapes
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import MAX, NO_ENTRY, Merged, integer_view
from parallel_lce.core.plan import Block

# Tokens and entries of a tile of logits.
_TILE = 2048, 8192


class TopK(Feature):
    results = ("top_logits", "top_ids")

    def __init__(self, options: Options) -> None:
        self._k: int = int(options.top_k)  # pyright: ignore[reportArgumentType]

    @classmethod
    def asked(cls, options: Options, tensors: Tensors) -> bool:
        return options.top_k is not None

    @classmethod
    def check(cls, options: Options, tensors: Tensors, vocab_size: int | None) -> None:
        if options.top_k is not None and vocab_size is not None and options.top_k > vocab_size:
            raise ValueError(f"top_k={options.top_k} exceeds the {vocab_size} entries of the vocabulary")

    @classmethod
    def shapes(cls, options: Options, tensors: Tensors, tokens: int) -> Shapes:
        shape = tokens, int(options.top_k or 0)
        return {"top_logits": (shape, None), "top_ids": (shape, torch.int64)}

    def message_size(self, call: Any) -> int:
        self._shape = 2, call.shape.numel(), self._k
        return math.prod(self._shape)

    def _views(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """In ``messages [..., 2 N K]``: logits ``[..., N, K]`` and their ids."""
        logits, ids = messages.unflatten(-1, self._shape).unbind(-3)
        return logits, integer_view(ids)

    def begin(self, call: Any, message: Tensor) -> None:
        self._own = self._views(message)

    def after_block(self, call: Any, task: ForwardTask, block: Block) -> None:
        found = _of_block(task.projection, task.x, self._k)
        if call.backend.SAME_BITS:
            found = _as_projected(call.backend, task, *found)
        for own, values in zip(self._own, found):
            call.layout.put(own.t(), block, values.t())

    def merged(self, messages: Tensor) -> None:
        logits, ids = self._views(messages)
        # [N, P * K]
        flat = [t.transpose(0, 1).flatten(1) for t in (logits, ids.long())]
        del self._own
        self._top = largest(*flat, k=self._k)

    def outputs(self, call: Any, merged: Merged, statistics: Mapping[str, Any]) -> Mapping[str, Tensor]:
        logits, ids = self._top
        del self._top
        nowhere = merged.partial[MAX].isnan().unsqueeze(1)
        return {
            "top_logits": logits.masked_fill(nowhere, torch.nan),
            "top_ids": ids.masked_fill(nowhere | (ids == NO_ENTRY), -1),
        }


def _of_block(projection: Projection, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest logits ``[R, k]`` of each token in the shard, and their ids in the whole vocabulary, int64: the
    largest first, and the lowest id first among equals. Where the shard has fewer entries, -inf and ``NO_ENTRY``."""
    values = x.new_full((len(x), k), -torch.inf, dtype=projection.dtype)
    ids = torch.full((len(x), k), NO_ENTRY, device=x.device)
    for rows, window, z in projected_tiles(projection, x, _TILE[0], max(k, _TILE[1])):
        here = torch.arange(window.start, window.stop, device=x.device) + projection.start
        of_window = largest(z, here.expand(len(z), -1), min(k, z.shape[1]))
        both = torch.cat([values[rows], of_window[0]], 1), torch.cat([ids[rows], of_window[1]], 1)
        values[rows], ids[rows] = largest(*both, k)
    return values, ids


def _as_projected(backend: Backend, task: ForwardTask, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """These logits ``[R, K]`` with the bits of the fused projection, in their order. A matrix product rounds in a way
    that depends on its number of rows."""
    rows, k = ids.shape
    begin = torch.arange(rows, device=ids.device) * k
    projected = torch.empty_like(logits).flatten()
    picked = Picked((ids - task.projection.start).flatten(), begin, begin + k)
    backend.picked_logits(task.projection, task.x, picked, projected)
    return largest(projected.view(rows, k).masked_fill(ids == NO_ENTRY, -torch.inf), ids, k)


def largest(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of ``values [R, C]`` with their ``ids``, the lowest id first among equals."""
    if values.dtype == torch.float64:
        ids, order = ids.sort(dim=1, stable=True)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids.gather(1, order)[:, :k]
    # One integer for both: bits that are ordered as the values, then the negated id. Adding 0.0 turns -0.0 into 0.0.
    bits = (values + 0.0).view(torch.int32).long()
    keys = (bits ^ (bits >> 63 & 0x7FFFFFFF)) << 32 | (NO_ENTRY - ids)
    keys = keys.topk(k, 1).values
    bits = keys >> 32
    bits = (bits ^ (bits >> 63 & 0x7FFFFFFF)).int()
    return bits.view(torch.float32), NO_ENTRY - (keys & 0xFFFFFFFF)
