"""This package's loss in Megatron-core, chosen by Megatron's configuration or by ``fuse(model)``."""

from parallel_lce.megatron.log_probs import TokenLogProbs, token_log_probs, token_loss
from parallel_lce.megatron.loss import TokenMetrics, token_metrics
from parallel_lce.megatron.settings import LogitsWarning
from parallel_lce.megatron.switch import explain, fuse, patch, unpatch

__all__ = [
    "LogitsWarning",
    "TokenLogProbs",
    "TokenMetrics",
    "explain",
    "fuse",
    "patch",
    "token_log_probs",
    "token_loss",
    "token_metrics",
    "unpatch",
]
