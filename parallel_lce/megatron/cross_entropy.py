"""Megatron's two cross-entropies, also of lazy logits.

A loss of Megatron's models ends in ``apply`` of one of two ``torch.autograd.Function``s, with logits ``[s, b, V/P]``,
targets ``[s, b]`` and the model's tensor-parallel group. This module takes over there. So all that a program puts
around it stays in force: a ``compute_language_model_loss`` that is wrapped, overridden or takes further arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.megatron import choices
from parallel_lce.megatron.lazy_logits import LazyLogits
from parallel_lce.megatron.output_layer import fused_losses
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

# Models whose own compute_language_model_loss is running, the innermost last.
_running: list[Any] = []


def check_release() -> None:
    """Raise ``ImportError`` for a megatron-core older than 0.14, whose models do not pass on their process groups."""
    import megatron.core
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if "tp_group" not in inspect.signature(ColumnParallelLinear.__init__).parameters:
        version = getattr(megatron.core, "__version__", "an unknown version")
        raise ImportError(f"parallel_lce.megatron needs megatron-core 0.14 or newer, found {version}")


def functions() -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """Those of ``cross_entropy_loss_fusion`` True and False."""
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.tensor_parallel import cross_entropy

    return fused_cross_entropy._VocabParallelCrossEntropy, cross_entropy._VocabParallelCrossEntropy


def apply_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The ``apply`` of one of :func:`functions`, which was ``original``: the fused loss of lazy logits; the loss of
    :func:`parallel_lce.vocab_parallel_cross_entropy` within :func:`own_loss` and, with ``cross_entropy="logits"``,
    for all callers of the unfused function; otherwise ``original``."""

    def apply(logits: Any, target: Tensor, *others: Any) -> Tensor:
        smoothing = next((v for v in others if isinstance(v, (int, float))), 0.0)
        if isinstance(logits, LazyLogits):
            if logits.made is None and not smoothing and target.shape == logits.shape[:-1]:
                return fused_losses(logits, target)
            logits = logits.materialize("Megatron's cross-entropy")
        if not _running and not (choices.takes_logits() and original.__self__ is functions()[1]):
            return original(logits, target, *others)
        group = next((v for v in others if isinstance(v, dist.ProcessGroup)), None)
        if _running:
            logits = _shard(logits, group, getattr(_running[-1], "vocab_size", None))
        return vocab_parallel_cross_entropy(logits, target, smoothing, group)

    return apply


def _shard(logits: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None) -> Tensor:
    """This rank's part of logits that the output layer has gathered over the ranks; others as they are."""
    if group is None or group.size() == 1 or logits.shape[-1] != vocab_size:
        return logits
    return logits.chunk(group.size(), dim=-1)[group.rank()]


@contextmanager
def own_loss(model: Any) -> Iterator[None]:
    """A context in which Megatron's own ``compute_language_model_loss`` of ``model`` ends in this module, whatever
    loss its configuration chooses."""
    config = model.config
    chosen = config.cross_entropy_fusion_impl
    for_now = [function for function in functions() if "apply" not in vars(function)]  # without install()
    for function in for_now:
        function.apply = apply_of(function.apply)
    # The one fused loss that needs no further package. Megatron's code does not know this package's name.
    config.cross_entropy_fusion_impl = "native"
    _running.append(model)
    try:
        yield
    finally:
        _running.pop()
        config.cross_entropy_fusion_impl = chosen
        for function in for_now:
            del function.apply
