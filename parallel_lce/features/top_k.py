"""The largest logits of each token, and their ids: the argument ``top_k`` of :func:`parallel_lce.token_statistics`.

Each rank finds the K largest of its shard, projecting the block again, some rows at a time. The ranks send them with
the partials, and each merges all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import ForwardTask, block_logits
from parallel_lce.call.call import Feature, Shapes
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import MAX, NO_ENTRY, Merged, integer_view
from parallel_lce.core.plan import Block, blocks_within


class TopK(Feature):
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
        return 2 * call.shape.numel() * call.options.top_k

    def before_block(self, call: Any, task: ForwardTask, block: Block, message: Tensor) -> ForwardTask:
        k, projection, x = call.options.top_k, task.projection, task.x
        entries = projection.real_rows
        here, found = torch.arange(entries, device=x.device) + projection.start, min(k, entries)
        # Where the shard has fewer entries, -inf and NO_ENTRY.
        values = x.new_full((len(x), k), -torch.inf, dtype=projection.dtype)
        ids = torch.full((len(x), k), NO_ENTRY, device=x.device)
        for some in blocks_within(0, len(x), entries * projection.dtype.itemsize):
            rows = slice(some.start, some.stop)
            logits, _ = block_logits(call.backend, projection.of_rows(rows), x[rows])
            values[rows, :found], ids[rows, :found] = largest(logits, here.expand(len(logits), -1), found)
        its_values, its_ids = message.view(2, -1, k)
        call.layout.put(its_values.t(), block, values.t())
        call.layout.put(integer_view(its_ids).t(), block, ids.t())
        return task

    def outputs(self, call: Any, merged: Merged, messages: Tensor, statistics: Mapping[str, Any]) -> dict[str, Tensor]:
        ranks, k = len(messages), call.options.top_k
        # [N, P * K]
        values, ids = messages.view(ranks, 2, -1, k).permute(1, 2, 0, 3).flatten(2)
        values, ids = largest(values, integer_view(ids).long(), k)
        nowhere = merged.partial[MAX].isnan().unsqueeze(1)
        return {
            "top_logits": values.masked_fill(nowhere, torch.nan),
            "top_ids": ids.masked_fill(nowhere | (ids == NO_ENTRY), -1),
        }


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
