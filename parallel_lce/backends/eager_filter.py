"""What :mod:`parallel_lce.kernels.filter` leaves out of a gradient, in plain torch and on any device."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128
"""Tokens and entries of a tile."""


def replace_inactive(gradient: Tensor, limits: Tensor) -> Tensor:
    """``gradient [entries, rows]``, whose tiles without an entry beyond its token's ``limits [rows]`` are each replaced
    by the product of its sums over entries and of the entries' shares in all such tiles of these rows."""
    entries, rows = gradient.shape
    padding = 0, -rows % TILE, 0, -entries % TILE
    g = torch.nn.functional.pad(gradient, padding).unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))
    limit = torch.nn.functional.pad(limits, padding[:2], value=torch.inf).view(-1, TILE)
    magnitude = g.abs()
    # NaN is active. Dimensions: blocks of entries, entries, blocks of rows, rows.
    active = (magnitude <= limit).logical_not_().any(3, keepdim=True).any(1, keepdim=True)
    others = g.masked_fill(active, 0.0)
    # A limit of 0, infinity or NaN belongs to a token without probabilities. NaN of one must not reach ``sums``.
    inverse = limit.reciprocal().nan_to_num_(0.0, 0.0)
    sums = others.abs().mul_(inverse).sum((2, 3), keepdim=True)
    total = sums.sum(1, keepdim=True)
    shares = torch.where(total > 0.0, sums / total, 0.0)
    replaced = torch.where(active, g, shares * others.sum(1, keepdim=True))
    return replaced.flatten(2, 3).flatten(0, 1)[:entries, :rows].contiguous()
