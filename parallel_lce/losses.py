"""Per-token losses: of statistics in plain PyTorch, and ``linear_cross_entropy``'s, of partials."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from parallel_lce.backends.blocks import Coefficients
from parallel_lce.statistics import TokenStatistics


def log_prob(statistics: TokenStatistics) -> Tensor:
    """log p of each token's target, ``[N]``; ``-lse`` for a target outside the vocabulary."""
    return statistics.target_log_prob


def entropy(statistics: TokenStatistics) -> Tensor:
    """Entropy of each token's softmax in nats, ``[N]``; needs ``expected_logit=True``."""
    if statistics.entropy is None:
        raise ValueError("entropy needs statistics computed with expected_logit=True, got False")
    return statistics.entropy


@dataclass(frozen=True)
class WeightedLoss:
    """The per-token loss of ``linear_cross_entropy`` and each token's weight in the result.

    ``target [N]`` int64; ``token_weight [N]`` in the statistics' dtype, None for 1. Tokens whose target is
    ``ignore_index`` have weight 0; for other targets outside ``[0, V)`` the loss is NaN or, unless
    ``outside_is_nan``, Megatron's ``lse - max``.
    """

    target: Tensor
    token_weight: Tensor | None = None
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    outside_is_nan: bool = True

    def of_partials(
        self, backend: ModuleType, partial: Tensor, vocab_size: Tensor, select=lambda tokens: tokens
    ) -> tuple[Tensor, Coefficients]:
        """Losses ``[R]`` of the tokens that ``select`` picks out of ``[N]``, whose merged partial this is, and
        the coefficients of their sum."""
        weight = self.token_weight
        losses, *coefficients = backend.token_losses(
            partial,
            vocab_size,
            select(self.target),
            None if weight is None else select(weight),
            self.ignore_index,
            self.label_smoothing,
            self.z_loss,
            self.outside_is_nan,
        )
        return losses, Coefficients(*coefficients, None)

    @property
    def ignored(self) -> Tensor:
        return self.target == self.ignore_index

    def divisor(self, reduction: str, dtype: torch.dtype) -> Tensor | float:
        """What the sum of the losses is divided by: the tokens' weights, for their mean."""
        if reduction != "mean":
            return 1.0
        # The mean of nothing is 0, and so are its gradients.
        if self.token_weight is None:
            return (self.target != self.ignore_index).sum(dtype=dtype).clamp(min=1)
        total = self.token_weight.masked_fill(self.ignored, 0.0).sum()
        return total.masked_fill(total == 0, torch.inf)
