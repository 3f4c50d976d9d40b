"""The switch: lets Megatron-core's language models use this package's loss."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from parallel_lce.core.options import as_float
from parallel_lce.lazy_logits import watch_optimizers
from parallel_lce.megatron import choices
from parallel_lce.megatron.cross_entropy import apply_of, check_release, functions, own_loss
from parallel_lce.megatron.lazy_logits import LazyLogits, warn_of_logits
from parallel_lce.megatron.output_layer import is_lazy, make_lazy, of_another_kind

IMPLEMENTATION = "parallel_lce"

# (owner, name) of a replaced attribute: (our attribute, the owner's own before, None if it had none).
_replaced: dict[tuple[type, str], tuple[Any, Any]] = {}


def _replace(owner: type, name: str, make: Callable[[type, Any], Any], again: bool = False) -> None:
    """Replace an attribute by ``make(owner, own)``, once. ``again``: also if other code has replaced ours since."""
    own = vars(owner).get(name)
    if (owner, name) not in _replaced or (again and own is not _replaced[owner, name][0]):
        _replaced[owner, name] = make(owner, own), own
        setattr(owner, name, _replaced[owner, name][0])


def _restore() -> None:
    """Undo all replacements. If other code has replaced ours since, warn instead."""
    while _replaced:
        (owner, name), (ours, own) = _replaced.popitem()
        if vars(owner).get(name) is not ours:
            message = f"{owner.__name__}.{name} has been replaced since install(), so that it stays as it is"
            warnings.warn(f"parallel_lce: {message}: undo that first", RuntimeWarning, stacklevel=3)
        elif own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


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
    ``LanguageModule`` and Megatron's two cross-entropies: after ``setup_embeddings_and_output_layer`` the model's
    output layer returns lazy logits; ``compute_language_model_loss``, which may be wrapped or overridden, ends in a
    cross-entropy that takes them. A model of which the fused loss would not give the same makes its logits as without
    it, and a :class:`LogitsWarning` says why. A later call changes the given settings and keeps the others. To return
    to defaults, call :func:`uninstall` first, which removes all settings.

    Args:
        logits_budget: bytes per rank and call, as in :func:`parallel_lce.linear_cross_entropy`, the same on all ranks.
            Default: the environment's ``PARALLEL_LCE_LOGITS_BUDGET``, else the loss's own default, divided by
            ``1 + mtp_num_layers``.
        cross_entropy: ``"output_layer"`` fuses the projection into the loss. ``"logits"`` leaves the output layer as it
            is, and computes :func:`parallel_lce.vocab_parallel_cross_entropy` of the real logits. All callers of
            ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy`` then get that function's result. Default: the
            environment's ``PARALLEL_LCE_CROSS_ENTROPY``, else ``"output_layer"``.
        reduce_dtype: dtype in which dX is summed over the ranks, as in :func:`parallel_lce.linear_cross_entropy`.
            Default: the hidden states' dtype, as in stock.
        gradient_filter: a probability, as in :func:`parallel_lce.linear_cross_entropy`; only with ``"output_layer"``.
            Default: the environment's ``PARALLEL_LCE_GRADIENT_FILTER``, else gradients are exact.

    Raises:
        ImportError: megatron-core is missing, or older than 0.14.
        ValueError: a value is not allowed; later, when a model is built, ``"parallel_lce"`` is misspelt.
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
    check_release()
    from megatron.core.models.common.language_module.language_module import LanguageModule

    choices.installed = chosen
    watch_optimizers()
    _replace(LanguageModule, "setup_embeddings_and_output_layer", _wrap_setup)
    _replace(LanguageModule, "compute_language_model_loss", _wrap_loss)
    for function in functions():
        _replace(function, "apply", apply_of)


def uninstall() -> None:
    """Undo :func:`install` for models built from now on.

    Models built before must not be used: their output layers still return lazy logits, and Megatron's own loss raises
    ``UnboundLocalError`` for ``cross_entropy_fusion_impl="parallel_lce"``.
    """
    choices.installed = None
    _restore()


def _wrap_setup(_: type, original: Callable) -> Callable:
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
        for kind in type(self).__mro__:  # an override may call what LanguageModule had before install()
            if "compute_language_model_loss" in vars(kind):
                _replace(kind, "compute_language_model_loss", _wrap_loss, again=True)
        layer = getattr(self, "output_layer", None)
        if getattr(self, "post_process", True) and not (of_another_kind(layer) or choices.takes_logits()):
            make_lazy(layer)

    return setup_embeddings_and_output_layer


def _wrap_loss(_: type, original: Any) -> Any:
    if not inspect.isfunction(original):  # a staticmethod, which has no model
        return original

    @functools.wraps(original)
    def compute_language_model_loss(self, *given, **named):
        config = self.config
        if not config.cross_entropy_loss_fusion or config.cross_entropy_fusion_impl != IMPLEMENTATION:
            return original(self, *given, **named)
        if not (choices.takes_logits() or any([isinstance(v, LazyLogits) for v in (*given, *named.values())])):
            _say_why(self)
        return _own_loss(original, self, *given, **named)

    return compute_language_model_loss


@torch.compiler.disable(reason="lazy logits and main_grad are Python objects")
def _own_loss(original: Callable, model: Any, *arguments: Any, **named: Any) -> Any:
    with own_loss(model):
        return original(model, *arguments, **named)


def _say_why(model: Any) -> None:
    """Say why the model's loss got real logits, unless its output layer, or one inside of that, has said so."""
    layer = model.output_layer
    if isinstance(layer, torch.nn.Module) and any(["_parallel_lce_said" in vars(m) for m in layer.modules()]):
        return
    reason = of_another_kind(layer)
    if reason is None and not is_lazy(layer):
        reason = "the model was built before install(), or its output layer was replaced"
    if reason is not None:
        warn_of_logits(model, reason)
