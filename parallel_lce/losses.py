"""Per-token losses: two helpers on statistics, and the head of ``linear_cross_entropy``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_lce.backends.interface import Backend, Coefficients
from parallel_lce.collectives import Layout
from parallel_lce.plan import Block
from parallel_lce.statistics import Residuals, TokenStatistics


def log_prob(statistics: TokenStatistics) -> Tensor:
    """log p of each token's target, in the target's shape; ``-lse`` for a target outside the vocabulary.

    Raises:
        ValueError: the statistics were computed without a target.
    """
    if statistics.target_log_prob is None:
        raise ValueError("log_prob needs statistics computed with a target, got target=None")
    return statistics.target_log_prob


def entropy(statistics: TokenStatistics) -> Tensor:
    """Entropy of each token's softmax in nats, in the target's shape.

    Raises:
        ValueError: the statistics were computed without ``expected_logit=True``.
    """
    if statistics.entropy is None:
        raise ValueError("entropy needs statistics computed with expected_logit=True, got False")
    return statistics.entropy


@dataclass(frozen=True)
class WeightedLoss:
    """The per-token loss of ``linear_cross_entropy`` and each token's weight in the result."""

    # [N] int64
    target: Tensor
    # [N] in the statistics' dtype; None: 1
    token_weight: Tensor | None = None
    # Tokens with this target have weight 0.
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    # True: another target outside [0, V) has loss NaN. False: it has Megatron's lse - max.
    outside_is_nan: bool = True

    def of_block(self, layout: Layout, block: Block) -> WeightedLoss:
        """The loss of a block's tokens."""
        weight = layout.take(self.token_weight, block)
        return replace(self, target=layout.take(self.target, block), token_weight=weight)

    # Number of differentiable outputs.
    num_differentiable = 1

    def outputs(self, backend: Backend, partial: Tensor, vocab_size: Tensor) -> tuple[list[Tensor], Residuals]:
        """Losses ``[N]`` from the tokens' merged partial; alpha, beta and gamma of the gradient of their sum."""
        losses, alpha, beta, gamma = backend.token_losses(
            partial,
            vocab_size,
            self.target,
            self.token_weight,
            self.ignore_index,
            self.label_smoothing,
            self.z_loss,
            self.outside_is_nan,
        )
        return [losses], (alpha, beta, gamma)

    def coefficients(self, partial: Tensor, residuals: Residuals, upstream: tuple[Tensor, ...]) -> Coefficients:
        return Coefficients(*residuals, None).times(upstream[0])

    @property
    def counted(self) -> Tensor:
        """Which tokens are not ignored, ``[N]`` bool."""
        if self.ignore_index is None:
            return torch.ones_like(self.target, dtype=torch.bool)
        return self.target != self.ignore_index

    def divisor(self, reduction: str, dtype: torch.dtype) -> Tensor | float:
        """What the sum of the losses is divided by: for their mean, the sum of the tokens' weights."""
        if reduction != "mean":
            return 1.0
        # The mean of nothing and its gradients are 0: a sum of 0 is divided by 1, or by infinity.
        if self.token_weight is None:
            return self.counted.sum(dtype=dtype).clamp(min=1)
        total = torch.where(self.counted, self.token_weight, 0.0).sum()
        return total.masked_fill(total == 0, torch.inf)
