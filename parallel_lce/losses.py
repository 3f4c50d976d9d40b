"""Per-token losses as plain PyTorch on statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_lce.statistics import TokenStatistics


def log_prob(statistics: TokenStatistics) -> Tensor:
    """log p of each token's target, ``[N]``; ``-lse`` for a target outside the vocabulary."""
    return statistics.target_log_prob


def entropy(statistics: TokenStatistics) -> Tensor:
    """Entropy of each token's softmax in nats, ``[N]``; needs ``expected_logit=True``."""
    if statistics.entropy is None:
        raise ValueError("entropy needs statistics computed with expected_logit=True, got False")
    return statistics.entropy


def cross_entropy(
    statistics: TokenStatistics, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Cross-entropy of each token, ``[N]``.

    ``-(1 - eps) log p_y - eps mean_j log p_j + z_loss * lse^2``: label smoothing as in
    ``torch.nn.functional.cross_entropy`` (Szegedy et al. 2015, arXiv:1512.00567) over all real
    entries, and the z-loss of PaLM (Chowdhery et al. 2022, arXiv:2204.02311). Smoothing needs
    ``mean_logit=True``, which also gives ``mean_log_prob``.
    """
    loss = -statistics.target_log_prob
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * statistics.mean_log_prob
    if z_loss:
        loss = loss + z_loss * statistics.lse.square()
    return loss


@dataclass(frozen=True)
class WeightedLoss:
    """The per-token loss of ``linear_cross_entropy`` and each token's weight in the result.

    ``weights [N]``: 0 for ignored tokens, else the caller's token weight or 1.
    """

    target: Tensor
    weights: Tensor
    ignored: Tensor
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def per_token(self, statistics: TokenStatistics, select=lambda tokens: tokens) -> Tensor:
        """Weighted losses of the tokens that ``select`` picks out of ``[N]``.

        0 for ignored tokens, NaN for targets outside ``[0, V)``.
        """
        loss = cross_entropy(
            statistics, label_smoothing=self.label_smoothing, z_loss=self.z_loss
        )
        weights = self._marked_weights(statistics.vocab_size, select)
        return (loss * weights).masked_fill(select(self.ignored), 0.0)

    def upstream(self, statistics: TokenStatistics, select, divisor) -> dict[str, Tensor]:
        """The gradients of ``per_token(...).sum() / divisor`` by the statistics that it reads."""
        weights = self._marked_weights(statistics.vocab_size, select)
        weights = weights.masked_fill(select(self.ignored), 0.0) / divisor
        eps = self.label_smoothing
        found = {"target_log_prob": -(1 - eps) * weights}
        if eps:
            found["mean_log_prob"] = -eps * weights
        if self.z_loss:
            found["lse"] = 2 * self.z_loss * statistics.lse * weights
        return found

    def _marked_weights(self, vocab_size: Tensor, select) -> Tensor:
        target, ignored = select(self.target), select(self.ignored)
        outside = ((target < 0) | (target >= vocab_size)) & ~ignored
        # A factor, so that the token's gradient is NaN as its loss is.
        return select(self.weights).masked_fill(outside, torch.nan)

    def divisor(self, reduction: str) -> Tensor | float:
        """What the sum of :meth:`per_token` is divided by."""
        if reduction != "mean":
            return 1.0
        total = self.weights.sum()
        # The mean of nothing is 0, and so are its gradients.
        return total.masked_fill(total == 0, torch.inf)
