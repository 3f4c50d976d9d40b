"""Cross-entropy of tokens from their merged partials, coefficients of its gradient, and its mean, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.core.options import Options
from parallel_lce.core.partials import MAX, SHIFTED, SUM_EXP, TARGET, Coefficients


def token_losses(
    partial: Tensor, vocab_size: Tensor | int, target: Tensor, token_weight: Tensor | None, options: Options
) -> tuple[Tensor, Coefficients]:
    """Per-token losses ``[R]`` and the coefficients of their gradient.

    The loss is ``w (-(1 - eps) log p_y - eps mean_j log p_j + z_loss lse^2)``; its gradient by the logits is
    ``alpha p_j - beta [j = y] - gamma``. Label smoothing eps as in ``torch.nn.functional.cross_entropy``
    (Szegedy et al. 2015, arXiv:1512.00567), over all real entries. z-loss of PaLM (Chowdhery et al. 2022,
    arXiv:2204.02311).

    Args:
        partial: ``[C, R]``, merged; column 3 holds the shifted sums if labels are smoothed.
        vocab_size: V, 0-dimensional int64, or a number.
        target: ``[R]`` ids in the whole vocabulary.
        token_weight: w ``[R]``; None for 1.
        options: ``ignore_index``: tokens with this target have loss 0, and gradient 0 unless their logits are NaN.
            ``outside_is_nan``: a target outside the vocabulary has loss NaN. If False, as in Megatron, it has loss
            ``lse - max`` and the gradient of lse. ``label_smoothing`` and ``z_loss`` are eps and the factor above.
    """
    ignore_index, label_smoothing, z_loss = options.ignore_index, options.label_smoothing, options.z_loss
    top, log_sum = partial[MAX], partial[SUM_EXP].log()
    loss = log_sum - (partial[TARGET] - top)
    outside = (target < 0) | (target >= vocab_size)
    weight = torch.ones_like(top) if token_weight is None else token_weight
    target_coefficient = 1 - label_smoothing
    if options.outside_is_nan:
        # NaN in the weight makes the loss and its gradient NaN.
        weight = weight.masked_fill(outside, torch.nan)
    else:
        loss = torch.where(outside, log_sum, loss)
        target_coefficient = target_coefficient * ~outside
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * (partial[SHIFTED] / vocab_size - log_sum)
    lse_factor = excess = None
    if z_loss:
        lse = top + log_sum
        loss = loss + z_loss * lse.square()
        lse_factor = 2 * z_loss * lse
    loss = loss * weight
    if ignore_index is not None:
        ignored = target == ignore_index
        loss, weight = loss.masked_fill(ignored, 0.0), weight.masked_fill(ignored, 0.0)
    alpha = weight if lse_factor is None else (weight * (1 + lse_factor)).masked_fill_(weight == 0, 0.0)
    if lse_factor is not None:
        excess = (weight * (1 - target_coefficient + lse_factor)).masked_fill_(weight == 0, 0.0)
    gamma = weight * label_smoothing / vocab_size if label_smoothing else None
    return loss, Coefficients(alpha, weight * target_coefficient, gamma, excess=excess)


def sum_of_weights(target: Tensor, token_weight: Tensor | None, ignore_index: int | None, dtype: torch.dtype) -> Tensor:
    """Divisor of a mean: the sum of the counted tokens' weights, 0-dimensional. If that sum is 0, the divisor is
    infinity, or 1 without weights, so that the mean and its gradients are 0."""
    counts = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    if token_weight is None:
        return counts.sum(dtype=dtype).clamp(min=1)
    total = torch.where(counts, token_weight, 0.0).sum()
    return total.masked_fill(total == 0, torch.inf)


def mean_loss(
    losses: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """The mean of the ``losses [R]`` and its divisor, both 0-dimensional. Arguments as in :func:`token_losses`."""
    divisor = sum_of_weights(target, token_weight, ignore_index, losses.dtype)
    return losses.sum() / divisor, divisor
