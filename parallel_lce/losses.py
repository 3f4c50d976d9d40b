"""Per-token losses: two helpers on statistics, and the head of ``linear_cross_entropy``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_lce.backends.interface import Backend, Coefficients
from parallel_lce.backends.loss import counted, sum_of_weights
from parallel_lce.collectives import Layout
from parallel_lce.partials import Merged
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

    # Numbers of differentiable outputs and of residuals.
    num_differentiable, num_residuals = 1, 3

    @property
    def weights(self) -> Tensor | None:
        """The tensor that the outputs depend on beside partial and target."""
        return self.token_weight

    def outputs(self, backend: Backend, merged: Merged) -> tuple[list[Tensor], Residuals]:
        """Losses ``[N]`` from the tokens' merged partial; alpha, beta and gamma of the gradient of their sum."""
        losses, alpha, beta, gamma = backend.token_losses(
            merged.partial,
            merged.vocab_size,
            self.target,
            self.token_weight,
            self.ignore_index,
            self.label_smoothing,
            self.z_loss,
            self.outside_is_nan,
        )
        return [losses], (alpha, beta, gamma)

    def coefficients(self, partial: Tensor, residuals: Residuals, upstream: tuple[Tensor, ...]) -> Coefficients:
        return Coefficients(*residuals, factor=upstream[0])

    @property
    def counted(self) -> Tensor:
        """Which tokens are not ignored, ``[N]`` bool."""
        return counted(self.target, self.ignore_index)

    def divisor(self, reduction: str, dtype: torch.dtype) -> Tensor | None:
        """What the sum of the losses is divided by: for their mean, the sum of the tokens' weights. None is 1."""
        if reduction != "mean":
            return None
        return sum_of_weights(self.target, self.token_weight, self.ignore_index, dtype)


@dataclass(frozen=True)
class ReducedLoss:
    """The sum of a call's per-token losses, or their mean by weight."""

    losses: WeightedLoss
    mean: bool

    num_differentiable, num_residuals = 1, 4

    @property
    def weights(self) -> Tensor | None:
        return self.losses.token_weight

    def outputs(self, backend: Backend, merged: Merged) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        """The loss, 0-dimensional; the residuals of the per-token losses, and what their sum is divided by."""
        [losses], residuals = self.losses.outputs(backend, merged)
        if not self.mean:
            return [losses.sum()], (*residuals, None)
        one = self.losses
        mean, divisor = backend.mean_loss(losses, one.target, one.token_weight, one.ignore_index)
        return [mean], (*residuals, divisor)

    def coefficients(
        self,
        partial: Tensor,
        residuals: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
        upstream: tuple[Tensor, ...],
    ) -> Coefficients:
        alpha, beta, gamma, divisor = residuals
        return Coefficients(alpha, beta, gamma, factor=upstream[0] if divisor is None else upstream[0] / divisor)
