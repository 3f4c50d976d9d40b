"""Per-token losses: two helpers on statistics, and the loss of ``linear_cross_entropy``."""

from __future__ import annotations

from torch import Tensor

from parallel_lce.backends.interface import Coefficients
from parallel_lce.backends.loss_formula import sum_of_weights
from parallel_lce.call.call import Call
from parallel_lce.core.partials import Merged
from parallel_lce.run.statistics import Residuals, TokenStatistics


def log_prob(statistics: TokenStatistics) -> Tensor:
    """log p of each token's target, in the target's shape: ``target_log_prob``. Raises ``ValueError`` if the statistics
    were computed without a target."""
    if statistics.target_log_prob is None:
        raise ValueError("log_prob needs statistics computed with a target, got target=None")
    return statistics.target_log_prob


def entropy(statistics: TokenStatistics) -> Tensor:
    """Entropy of each token's softmax in nats, in the target's shape. Raises ``ValueError`` if the statistics were
    computed without ``entropy=True``."""
    if statistics.entropy is None:
        raise ValueError("entropy needs statistics computed with entropy=True, got False")
    return statistics.entropy


def token_losses(
    call: Call, merged: Merged, target: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Losses ``[R]`` of tokens, and alpha, beta and gamma of the gradient of the sum of these losses."""
    losses, alpha, beta, gamma = call.backend.token_losses(
        merged.partial, merged.vocab_size, target, weight, call.options
    )
    for feature in call.features:
        losses = feature.losses(call, losses, Coefficients(alpha, beta, gamma), merged.partial)
    return losses, alpha, beta, gamma


def outputs(call: Call, merged: Merged) -> tuple[list[Tensor], Residuals]:
    """The call's loss, of each token ``[N]`` or 0-dimensional, and the residuals of its backward."""
    target, weight, reduction = call.target, call.token_weight, call.options.reduction
    assert target is not None  # check_tensors refuses a loss without targets
    losses, alpha, beta, gamma = token_losses(call, merged, target, weight)
    if reduction == "none":
        return [losses], Residuals(alpha, beta, gamma)
    if reduction == "sum":
        return [losses.sum()], Residuals(alpha, beta, gamma)
    mean, divisor = call.backend.mean_loss(losses, target, weight, call.options.ignore_index)
    return [mean], Residuals(alpha, beta, gamma, divisor)


def coefficients(residuals: Residuals, upstream: Tensor) -> Coefficients:
    """Coefficients of the gradient of the logits. ``upstream``: the gradient of the loss, ``[N]`` or 0-dimensional."""
    factor = upstream if residuals.divisor is None else upstream / residuals.divisor
    assert residuals.alpha is not None
    return Coefficients(residuals.alpha, residuals.beta, residuals.gamma, factor=factor)


def divisor_of(call: Call) -> Tensor | None:
    """Divisor of the sum of the losses: for a mean the sum of the tokens' weights. None is 1."""
    if call.options.reduction != "mean":
        return None
    assert call.target is not None
    return sum_of_weights(call.target, call.token_weight, call.options.ignore_index, call.dtype)
