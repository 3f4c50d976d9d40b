"""Fused output projection and cross-entropy for tensor- and sequence-parallel training."""

from pathlib import Path as _Path

if not (_Path(__file__).parent / "kernels").is_dir():
    raise ImportError(
        "parallel_lce/kernels is missing: it is a symbolic link to ../kernels in the repository, "
        "lost by some archive tools and by git with core.symlinks=false; clone with symbolic links "
        "or install the package with pip"
    )

from parallel_lce.functional import linear_cross_entropy, token_statistics
from parallel_lce.modules import LinearCrossEntropy
from parallel_lce.run.losses import entropy, log_prob
from parallel_lce.run.statistics import TokenStatistics
from parallel_lce.selected_log_probs import selected_log_probs
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

__all__ = [
    "LinearCrossEntropy",
    "TokenStatistics",
    "entropy",
    "linear_cross_entropy",
    "log_prob",
    "selected_log_probs",
    "token_statistics",
    "vocab_parallel_cross_entropy",
]
