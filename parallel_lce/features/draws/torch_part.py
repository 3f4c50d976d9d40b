"""Entries at given places of the running sum of exponentials, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import Projection
from parallel_lce.backends.torch_tiles import projected_tiles
from parallel_lce.core.partials import MAX, SUM_EXP

# Tokens and entries of a tile of logits.
_TILE = 1024, 4096


def entries_at(
    projection: Projection, x: Tensor, windows: list[Any], partial: Tensor, place: Tensor, owned: Tensor | None
) -> Tensor:
    """The id ``[R]`` int64 of the entry at each token's ``place``, in the whole vocabulary.

    ``place [R]`` fp64 in (0, 1): a fraction of the shard's sum of exponentials (:mod:`parallel_lce.features.draws`). A
    token that is not ``owned [R]`` gets an arbitrary id. ``windows``: what the backend kept of the block's forward.
    ``partial [2, R]``: the shard's maxima and sums. This function ignores the windows, and projects again, one tile of
    logits at a time.
    """
    ids = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
    maximum = partial[MAX].masked_fill(partial[MAX] == -torch.inf, 0.0).unsqueeze(1)
    threshold = (place * partial[SUM_EXP].double()).unsqueeze(1)
    reached, found = torch.zeros_like(threshold), torch.zeros_like(threshold, dtype=torch.bool)
    largest_logit = torch.full_like(maximum, -torch.inf)
    for rows, window, z in projected_tiles(projection, x, *_TILE):
        ends = reached[rows] + (z - maximum[rows]).exp_().double().cumsum(1)
        last, here = ends[:, -1:], (ends <= threshold[rows]).sum(1, keepdim=True)
        # The sum in the partial is rounded: a place may lie behind the last entry. That token gets its largest one.
        top, largest_here = z.max(1, keepdim=True)
        passed = last <= threshold[rows]
        taken = ~found[rows] & (~passed | (top > largest_logit[rows]))
        ids[rows] = torch.where(taken, torch.where(passed, largest_here, here) + window.start, ids[rows])
        reached[rows], found[rows] = last, found[rows] | ~passed
        largest_logit[rows] = torch.maximum(largest_logit[rows], top)
    return ids.squeeze(1) + projection.start
