"""Cross-entropy of tokens from their merged partials, and the coefficients of its gradient, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.partials import MAX, SUM_EXP, TARGET


def token_losses(
    partial: Tensor,
    vocab_size: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    outside_is_nan: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``w (-(1 - eps) log p_y - eps mean_j log p_j + z_loss lse^2)`` of each token ``[R]``, and its gradient
    ``alpha p_j - beta [j = y] - gamma`` by the logits.

    Label smoothing eps as in ``torch.nn.functional.cross_entropy`` (Szegedy et al. 2015, arXiv:1512.00567) over
    all real entries, and the z-loss of PaLM (Chowdhery et al. 2022, arXiv:2204.02311).

    From the merged ``partial [C, R]``, whose shifted sums are column 3 if labels are smoothed, and V,
    0-dimensional int64. ``target [R]``: ids in the whole vocabulary; outside it the loss is NaN, or, as Megatron has
    it, ``lse - max`` with the gradient of lse. ``token_weight [R]``; None for 1. Tokens whose target is
    ``ignore_index`` count 0 whatever their logits are.
    """
    top, log_sum = partial[MAX], partial[SUM_EXP].log()
    log_prob = (partial[TARGET] - top) - log_sum
    inside = (target >= 0) & (target < vocab_size)
    weight = torch.ones_like(top) if token_weight is None else token_weight
    of_target = 1 - label_smoothing
    if outside_is_nan:
        # A factor, so that the token's gradient is NaN as its loss is.
        weight = weight.masked_fill(~inside, torch.nan)
    else:
        log_prob = torch.where(inside, log_prob, -log_sum)
        of_target = of_target * inside
    loss = -(1 - label_smoothing) * log_prob
    if label_smoothing:
        loss = loss - label_smoothing * (partial[3] / vocab_size - log_sum)
    slope = None
    if z_loss:
        lse = top + log_sum
        loss = loss + z_loss * lse.square()
        slope = 1 + 2 * z_loss * lse
    loss = loss * weight
    if ignore_index is not None:
        ignored = target == ignore_index
        loss, weight = loss.masked_fill(ignored, 0.0), weight.masked_fill(ignored, 0.0)
    alpha = weight if slope is None else (weight * slope).masked_fill_(weight == 0, 0.0)
    gamma = weight * label_smoothing / vocab_size if label_smoothing else None
    return loss, alpha, weight * of_target, gamma
