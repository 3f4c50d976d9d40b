"""The definition of a filtered gradient of the logits."""

from __future__ import annotations

import torch

TILE = 128


def filtered(g: torch.Tensor, p: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: ``g [N, V]`` filtered, and which of its tiles are active."""
    result, active = g.clone(), torch.zeros(-(-g.shape[0] // TILE), -(-g.shape[1] // TILE), dtype=torch.bool)
    for b, c in enumerate(range(0, g.shape[1], TILE)):
        columns = slice(c, c + TILE)
        rows = [slice(a, a + TILE) for a in range(0, g.shape[0], TILE)]
        active[:, b] = torch.tensor([bool((p[r, columns].abs() > eps).any()) for r in rows])
        others = [r for r, is_active in zip(rows, active[:, b]) if not is_active]
        share = sum((p[r, columns].abs().sum(0) for r in others), torch.zeros(g[:, columns].shape[1]).double())
        share = share / share.sum() if share.sum() else share
        for r in others:
            result[r, columns] = g[r, columns].sum(1, keepdim=True) * share
    return result, active
