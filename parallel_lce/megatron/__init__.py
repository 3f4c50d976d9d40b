"""Megatron-core with this package's loss, switched on by its own configuration."""

from parallel_lce.megatron.install import install, uninstall

__all__ = ["install", "uninstall"]
