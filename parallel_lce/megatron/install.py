"""The switch: two methods of Megatron-core's LanguageModule learn one more loss implementation."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_lce.logits import vocab_parallel_cross_entropy
from parallel_lce.megatron.lazy_logits import LazyLogits
from parallel_lce.megatron.output_layer import fused_loss, is_lazy, lazy_class

IMPLEMENTATION = "parallel_lce"


@dataclass
class _Installed:
    originals: dict[str, Callable]
    logits_budget: int | None


_installed: _Installed | None = None


def install(logits_budget: int | None = None) -> None:
    """Let ``TransformerConfig(cross_entropy_loss_fusion=True,
    cross_entropy_fusion_impl="parallel_lce")`` choose this package's loss.

    Call it before the model is built; models with any other configuration are not touched. Wraps
    ``LanguageModule.setup_embeddings_and_output_layer``, after which the output layer returns lazy
    logits, and ``LanguageModule.compute_language_model_loss``, which takes them. Calling it again
    changes the budget alone; :func:`uninstall` takes both wrappers away.

    ``logits_budget``: bytes per rank and call, as in :func:`parallel_lce.linear_cross_entropy`;
    None means the environment's ``PARALLEL_LCE_LOGITS_BUDGET``, else 1 GiB. The same on all ranks.

    Raises:
        ImportError: megatron-core is missing (``pip install 'parallel-lce[megatron]'``).
        ValueError: when a model is built with settings that the switch does not support.
    """
    global _installed
    from megatron.core.models.common.language_module.language_module import LanguageModule

    budget = logits_budget if logits_budget is not None else _budget_of_environment()
    if budget is not None and (type(budget) is not int or budget < 0):
        raise ValueError(f"logits_budget must be None or a number of bytes >= 0, got {budget!r}")
    if _installed is not None:
        _installed.logits_budget = budget
        return
    wrappers = {
        "setup_embeddings_and_output_layer": _wrap_setup,
        "compute_language_model_loss": _wrap_loss,
    }
    originals = {name: getattr(LanguageModule, name) for name in wrappers}
    _installed = _Installed(originals, budget)
    for name, wrap in wrappers.items():
        setattr(LanguageModule, name, wrap(originals[name]))


def uninstall() -> None:
    """Undo :func:`install` for models built from now on; those built before must not be used."""
    global _installed
    if _installed is None:
        return
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for name, original in _installed.originals.items():
        setattr(LanguageModule, name, original)
    _installed = None


def _budget_of_environment() -> int | None:
    text = os.environ.get("PARALLEL_LCE_LOGITS_BUDGET", "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"PARALLEL_LCE_LOGITS_BUDGET must be a number of bytes, got {text!r}"
        ) from None


def _asked_for(config) -> bool:
    return config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == IMPLEMENTATION


def _wrap_setup(original: Callable) -> Callable:
    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self) -> None:
        original(self)
        if not (_asked_for(self.config) and getattr(self, "post_process", True)):
            return
        if getattr(self.config, "defer_embedding_wgrad_compute", False):
            raise ValueError(
                "cross_entropy_fusion_impl='parallel_lce' does not support "
                "defer_embedding_wgrad_compute=True, which keeps the gradients of whole logits: "
                "set it to False"
            )
        layer = getattr(self, "output_layer", None)
        if layer is not None and not is_lazy(layer):
            layer.__class__ = lazy_class(type(layer))

    return setup_embeddings_and_output_layer


def _wrap_loss(original: Callable) -> Callable:
    @functools.wraps(original)
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if not _asked_for(self.config):
            return original(self, labels, logits)
        # Megatron's labels and losses are [b, s], its activations [s, b, ...].
        target = labels.transpose(0, 1).contiguous()
        if isinstance(logits, LazyLogits):
            loss = fused_loss(logits, target, _installed.logits_budget)
        else:
            if torch.is_grad_enabled() and self.training:
                warnings.warn(
                    "parallel_lce: the output layer gave the whole logits to the loss during "
                    "training: the model was built before install(), gathers its output, or has "
                    "fully sharded or separately biased output weights",
                    stacklevel=2,
                )
            loss = vocab_parallel_cross_entropy(logits, target, tp_group=self.pg_collection.tp)
        return loss.transpose(0, 1).contiguous()

    return compute_language_model_loss
