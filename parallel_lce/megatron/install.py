"""The switch: lets Megatron-core's language models use this package's loss."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parallel_lce.core.options import as_float
from parallel_lce.lazy_logits import watch_optimizers
from parallel_lce.megatron import choices
from parallel_lce.megatron.lazy_logits import LazyLogits, warn_of_logits
from parallel_lce.megatron.output_layer import is_lazy, make_lazy, token_losses
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

IMPLEMENTATION = "parallel_lce"

# (owner, name) of a replaced attribute: (our attribute, the original attribute).
_replaced: dict[tuple[type | ModuleType, str], tuple[object, object]] = {}


def _replace(owner: type | ModuleType, name: str, make: Callable[[Any], object]) -> None:
    """Replace an attribute by ``make(original)``, once."""
    if (owner, name) not in _replaced:
        original = getattr(owner, name)
        _replaced[owner, name] = make(original), original
        setattr(owner, name, _replaced[owner, name][0])


def _restore(only: str | None = None) -> None:
    """Undo all replacements, or those of the name ``only``. If other code has replaced ours since, warn instead."""
    for owner, name in [place for place in _replaced if only in (None, place[1])]:
        ours, original = _replaced.pop((owner, name))
        if getattr(owner, name) is ours:
            setattr(owner, name, original)
        else:
            message = f"{owner.__name__}.{name} has been replaced since install(), so that it stays as it is"
            warnings.warn(f"parallel_lce: {message}: undo that first", RuntimeWarning, stacklevel=3)


def install(
    logits_budget: int | None = None,
    *,
    cross_entropy: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    gradient_filter: float | None = None,
) -> None:
    """Let ``TransformerConfig(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="parallel_lce")`` choose this
    package's loss.

    Call it before the model is built. Models with any other configuration do not change. It wraps two methods of
    ``LanguageModule``: after ``setup_embeddings_and_output_layer`` the model's output layer returns lazy logits, and
    ``compute_language_model_loss`` computes the loss of lazy logits. A later call changes the given settings and keeps
    the others. To return to defaults, call :func:`uninstall` first, which removes all settings.

    Args:
        logits_budget: bytes per rank and call, as in :func:`parallel_lce.linear_cross_entropy`, the same on all ranks.
            Default: the environment's ``PARALLEL_LCE_LOGITS_BUDGET``, else the loss's own default, divided by
            ``1 + mtp_num_layers``.
        cross_entropy: ``"output_layer"`` fuses the projection into the loss. ``"logits"`` leaves the output layer as it
            is, and computes :func:`parallel_lce.vocab_parallel_cross_entropy` of the real logits. This function then
            also replaces the one in ``megatron.core.tensor_parallel`` for all callers, except for modules that imported
            Megatron's function itself before. Default: the environment's ``PARALLEL_LCE_CROSS_ENTROPY``, else
            ``"output_layer"``.
        reduce_dtype: dtype in which dX is summed over the ranks, as in :func:`parallel_lce.linear_cross_entropy`.
            Default: the hidden states' dtype, as in stock.
        gradient_filter: a probability, as in :func:`parallel_lce.linear_cross_entropy`; only with ``"output_layer"``.
            Default: the environment's ``PARALLEL_LCE_GRADIENT_FILTER``, else gradients are exact.

    Raises:
        ImportError: megatron-core is missing.
        ValueError: a value is not allowed; later, when a model is built, the switch does not support the model's
            settings, or ``"parallel_lce"`` is misspelt.
    """
    chosen = choices.choose(
        cross_entropy=cross_entropy,
        logits_budget=logits_budget,
        gradient_filter=as_float(gradient_filter),
        reduce_dtype=reduce_dtype,
    )
    if importlib.util.find_spec("megatron") is None:
        remedy = "pip install 'megatron-core>=0.14', or pip install '.[megatron]' in a checkout of parallel_lce"
        raise ImportError(f"parallel_lce.megatron needs megatron-core: {remedy}")
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import cross_entropy as functions

    choices.installed = chosen
    watch_optimizers()
    _replace(LanguageModule, "setup_embeddings_and_output_layer", _wrap_setup)
    _replace(LanguageModule, "compute_language_model_loss", _wrap_loss)
    if chosen.cross_entropy == "logits":
        for owner in (functions, tensor_parallel):
            _replace(owner, "vocab_parallel_cross_entropy", lambda original: vocab_parallel_cross_entropy)
    else:
        _restore("vocab_parallel_cross_entropy")


def uninstall() -> None:
    """Undo :func:`install` for models built from now on.

    Models built before must not be used: their output layers still return lazy logits, and Megatron's own loss raises
    ``UnboundLocalError`` for ``cross_entropy_fusion_impl="parallel_lce"``.
    """
    choices.installed = None
    _restore()


def _takes_logits() -> bool:
    return choices.installed is not None and choices.installed.cross_entropy == "logits"


def _wrap_setup(original: Callable) -> Callable:
    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self) -> None:
        original(self)
        name = self.config.cross_entropy_fusion_impl
        if name != IMPLEMENTATION:
            # Megatron does not check the name: its loss would raise UnboundLocalError.
            if difflib.get_close_matches((name or "").lower(), [IMPLEMENTATION], cutoff=0.75):
                raise ValueError(f"cross_entropy_fusion_impl={name!r}: did you mean {IMPLEMENTATION!r}?")
            return
        if not self.config.cross_entropy_loss_fusion:
            warnings.warn(
                "parallel_lce: cross_entropy_fusion_impl='parallel_lce' has no effect with "
                "cross_entropy_loss_fusion=False: this model trains with Megatron's loss",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        layer = getattr(self, "output_layer", None)
        if layer is not None and getattr(self, "post_process", True) and not _takes_logits():
            otherwise = ", or choose another cross_entropy_fusion_impl than 'parallel_lce'"
            make_lazy(layer, "cross_entropy_fusion_impl='parallel_lce'", otherwise)

    return setup_embeddings_and_output_layer


def _wrap_loss(original: Callable) -> Callable:
    @functools.wraps(original)
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        config = self.config
        if not config.cross_entropy_loss_fusion or config.cross_entropy_fusion_impl != IMPLEMENTATION:
            return original(self, labels, logits)
        layer = getattr(self, "output_layer", None)
        if not (isinstance(logits, LazyLogits) or is_lazy(layer) or _takes_logits()):
            warn_of_logits(self, "the model was built before install(), or its output layer was replaced")
        # If the layer has no tp_group, vocab_parallel_cross_entropy uses Megatron's.
        return token_losses(logits, labels, getattr(layer, "tp_group", None))

    return compute_language_model_loss
