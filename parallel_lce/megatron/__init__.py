"""This package's loss in Megatron-core, chosen by Megatron's configuration."""

from parallel_lce.megatron.lazy_logits import LogitsWarning
from parallel_lce.megatron.log_probs import TokenLogProbs, token_log_probs, token_loss
from parallel_lce.megatron.losses import TokenMetrics, token_metrics
from parallel_lce.megatron.switch import patch, unpatch

__all__ = [
    "LogitsWarning",
    "TokenLogProbs",
    "TokenMetrics",
    "patch",
    "token_log_probs",
    "token_loss",
    "token_metrics",
    "unpatch",
]
