"""This package's loss in Megatron-core, chosen by Megatron's configuration."""

from parallel_lce.megatron.install import install, uninstall
from parallel_lce.megatron.lazy_logits import LogitsWarning
from parallel_lce.megatron.log_probs import TokenLogProbs, token_log_probs

__all__ = ["LogitsWarning", "TokenLogProbs", "install", "token_log_probs", "uninstall"]
