"""Megatron-core with this package's loss, switched on by its own configuration."""

from parallel_lce.megatron.install import install, uninstall
from parallel_lce.megatron.lazy_logits import LogitsWarning

__all__ = ["LogitsWarning", "install", "uninstall"]
