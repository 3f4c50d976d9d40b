"""Fused output projection and cross-entropy for tensor- and sequence-parallel training."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from parallel_lce import features as _features  # noqa: F401  (fills call.call.FEATURES)
from parallel_lce.functional import linear_cross_entropy, token_loss, token_statistics
from parallel_lce.modules import LinearCrossEntropy
from parallel_lce.run.results import TokenStatistics
from parallel_lce.run.token_count import count_tokens
from parallel_lce.selected_log_probs import selected_log_probs
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

if _TYPE_CHECKING:
    from parallel_lce.style import LinearCrossEntropyParallel

    __version__: str

__all__ = [
    "LinearCrossEntropy",
    "LinearCrossEntropyParallel",
    "TokenStatistics",
    "count_tokens",
    "linear_cross_entropy",
    "selected_log_probs",
    "token_loss",
    "token_statistics",
    "vocab_parallel_cross_entropy",
]


_MODULES = {"distillation", "megatron", "rl", "torchtitan", "transformers", "trl", "verl"}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    if name == "LinearCrossEntropyParallel":
        # Its import takes a second: torch.distributed.tensor.
        from parallel_lce.style import LinearCrossEntropyParallel

        return LinearCrossEntropyParallel
    if name == "__version__":
        globals()[name] = _version()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    """The installed version; in a checkout that is not installed 0.0.0."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("parallel-lce")
    except PackageNotFoundError:
        return "0.0.0"
