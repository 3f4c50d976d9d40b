"""The switch: Megatron-core learns one more implementation of its language models' loss."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from parallel_lce.logits import vocab_parallel_cross_entropy
from parallel_lce.megatron.lazy_logits import LazyLogits, warn_of_logits
from parallel_lce.megatron.output_layer import is_lazy, make_lazy, token_losses

IMPLEMENTATION = "parallel_lce"

CROSS_ENTROPIES = ("output_layer", "logits")


@dataclass
class _Installed:
    cross_entropy: str
    logits_budget: int | None
    originals: list[tuple[object, str, object]]


_installed: _Installed | None = None


def install(logits_budget: int | None = None, *, cross_entropy: str | None = None) -> None:
    """Let ``TransformerConfig(cross_entropy_loss_fusion=True,
    cross_entropy_fusion_impl="parallel_lce")`` choose this package's loss.

    Call it before the model is built; models with any other configuration are not touched. It wraps
    two methods of ``LanguageModule``: ``setup_embeddings_and_output_layer``, after which the output
    layer of such a model returns lazy logits, and ``compute_language_model_loss``, which takes them.
    Calling it again changes what was asked for; :func:`uninstall` takes everything away.

    Args:
        logits_budget: bytes per rank and call, as in :func:`parallel_lce.linear_cross_entropy`. None
            means the environment's ``PARALLEL_LCE_LOGITS_BUDGET``, else 1 GiB. The same on all ranks.
        cross_entropy: ``"output_layer"`` fuses the projection into the loss. ``"logits"`` leaves the
            output layer as it is, has such models take :func:`parallel_lce.vocab_parallel_cross_entropy`
            of the real logits, and replaces the function of that name in
            ``megatron.core.tensor_parallel`` for all its callers; modules that imported the function
            itself before keep Megatron's. None means the environment's
            ``PARALLEL_LCE_CROSS_ENTROPY``, else ``"output_layer"``.

    Raises:
        ImportError: megatron-core is missing (``pip install 'parallel-lce[megatron]'``).
        ValueError: a budget or a cross-entropy that does not exist; later, when a model is built with
            settings that the switch does not support.
    """
    global _installed
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import cross_entropy as functions

    budget = _budget(logits_budget)
    chosen = cross_entropy or os.environ.get("PARALLEL_LCE_CROSS_ENTROPY") or "output_layer"
    if chosen not in CROSS_ENTROPIES:
        raise ValueError(f"cross_entropy must be one of {CROSS_ENTROPIES}, got {chosen!r}")
    if _installed is not None and _installed.cross_entropy == chosen:
        _installed.logits_budget = budget
        return
    uninstall()
    _installed = _Installed(chosen, budget, [])

    def replace(owner: object, name: str, replacement: object) -> None:
        _installed.originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    for name, wrap in (
        ("setup_embeddings_and_output_layer", _wrap_setup),
        ("compute_language_model_loss", _wrap_loss),
    ):
        replace(LanguageModule, name, wrap(getattr(LanguageModule, name)))
    if chosen == "logits":
        for owner in (functions, tensor_parallel):
            replace(owner, "vocab_parallel_cross_entropy", vocab_parallel_cross_entropy)


def uninstall() -> None:
    """Undo :func:`install` for models built from now on; those built before must not be used."""
    global _installed
    if _installed is None:
        return
    for owner, name, original in reversed(_installed.originals):
        setattr(owner, name, original)
    _installed = None


def _budget(logits_budget: int | None) -> int | None:
    if logits_budget is None:
        text = os.environ.get("PARALLEL_LCE_LOGITS_BUDGET", "")
        if not text:
            return None
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"PARALLEL_LCE_LOGITS_BUDGET must be a number of bytes, got {text!r}")
        return int(text)
    if type(logits_budget) is not int or logits_budget < 0:
        raise ValueError(
            f"logits_budget must be None or a number of bytes >= 0, got {logits_budget!r}"
        )
    return logits_budget


def _current_budget() -> int | None:
    return None if _installed is None else _installed.logits_budget


def _asked_for(config) -> bool:
    return config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == IMPLEMENTATION


def _wrap_setup(original: Callable) -> Callable:
    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self) -> None:
        original(self)
        config = self.config
        if config.cross_entropy_fusion_impl == IMPLEMENTATION and not _asked_for(config):
            warnings.warn(
                "parallel_lce: cross_entropy_fusion_impl='parallel_lce' has no effect with "
                "cross_entropy_loss_fusion=False: this model trains with Megatron's loss",
                stacklevel=2,
            )
        layer = getattr(self, "output_layer", None)
        if not _asked_for(config) or layer is None or not getattr(self, "post_process", True):
            return
        if _installed.cross_entropy == "output_layer":
            make_lazy(layer, _current_budget)

    return setup_embeddings_and_output_layer


def _wrap_loss(original: Callable) -> Callable:
    @functools.wraps(original)
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if not _asked_for(self.config):
            return original(self, labels, logits)
        # Megatron's labels and losses are [b, s], its activations [s, b, ...].
        target = labels.transpose(0, 1).contiguous()
        layer = getattr(self, "output_layer", None)
        real = not isinstance(logits, LazyLogits) and not is_lazy(layer)
        if real and self.training and _installed.cross_entropy == "output_layer":
            warn_of_logits(
                self, "the model was built before install(), or its output layer was replaced"
            )
        # Without a group real logits take Megatron's own.
        loss = token_losses(logits, target, getattr(layer, "tp_group", None))
        return loss.transpose(0, 1).contiguous()

    return compute_language_model_loss
