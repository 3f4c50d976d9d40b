"""Fused output projection and cross-entropy for tensor- and sequence-parallel training."""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

if not (_Path(__file__).parent / "kernels").is_dir():
    raise ImportError(
        "parallel_lce/kernels is missing: it is a symbolic link to ../kernels in the repository, "
        "lost by some archive tools and by git with core.symlinks=false; clone with symbolic links: "
        "git clone -c core.symlinks=true"
    )

from parallel_lce.functional import linear_cross_entropy, token_statistics
from parallel_lce.modules import LinearCrossEntropy
from parallel_lce.run.losses import entropy, log_prob
from parallel_lce.run.statistics import TokenStatistics
from parallel_lce.sampled import sampled_linear_cross_entropy
from parallel_lce.selected_log_probs import selected_log_probs
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

if _TYPE_CHECKING:
    from parallel_lce.style import LinearCrossEntropyParallel

__all__ = [
    "LinearCrossEntropy",
    "LinearCrossEntropyParallel",
    "TokenStatistics",
    "entropy",
    "linear_cross_entropy",
    "log_prob",
    "sampled_linear_cross_entropy",
    "selected_log_probs",
    "token_statistics",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> object:
    if name == "LinearCrossEntropyParallel":
        # Its import takes a second: torch.distributed.tensor.
        from parallel_lce.style import LinearCrossEntropyParallel

        return LinearCrossEntropyParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
