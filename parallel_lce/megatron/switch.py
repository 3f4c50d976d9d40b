"""The switch: lets Megatron-core's language models use this package's loss."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from parallel_lce.lazy_logits import LogitsTensor, watch_optimizers
from parallel_lce.megatron import settings
from parallel_lce.megatron.cross_entropy import apply_of, check_release, functions, own_loss
from parallel_lce.megatron.lazy_logits import LazyLogits, warn_of_logits
from parallel_lce.megatron.masks import count_of, wrapped_forward
from parallel_lce.megatron.output_layer import make_lazy, of_another_kind
from parallel_lce.megatron.own_code import is_megatrons
from parallel_lce.patching import Replacements

IMPLEMENTATION = "parallel_lce"
KEPT: Any = type("Kept", (), {"__repr__": lambda self: "KEPT"})()
"""Default of a setting: that of an earlier call, else its own."""
_replacements = Replacements()


def patch(
    logits_budget: int | None = KEPT,
    *,
    cross_entropy: str | None = KEPT,
    reduce_dtype: torch.dtype | None = KEPT,
    gradient_filter: float | None = KEPT,
    skip_masked: bool | None = KEPT,
    z_loss: float | None = KEPT,
    label_smoothing: float | None = KEPT,
    vocab_size: int | None = KEPT,
    token_metrics: bool | None = KEPT,
) -> None:
    """Let ``TransformerConfig(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="parallel_lce")`` choose this
    package's loss.

    Call it before the model is built. Models with any other configuration do not change. The output layer returns lazy
    logits, and ``compute_language_model_loss``, which may be wrapped or overridden, ends in a cross-entropy that takes
    them. Where the fused loss would not give the same, a model makes its logits as without it, and a
    :class:`LogitsWarning` says why. A later call changes the given settings and keeps the others; None gives a setting
    its default again.

    Args:
        logits_budget: bytes per rank and call, as in :func:`parallel_lce.linear_cross_entropy`, the same on all ranks.
            Default: ``PARALLEL_LCE_LOGITS_BUDGET``, else the loss's own default, divided by ``1 + mtp_num_layers``.
        cross_entropy: ``"output_layer"`` fuses the projection into the loss. ``"logits"`` leaves the output layer as it
            is, and computes :func:`parallel_lce.vocab_parallel_cross_entropy` of the real logits, also for all callers
            of ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy``; a model that is built under it keeps its
            logits. Default: ``"output_layer"``.
        reduce_dtype: dtype in which dX is summed over the ranks, as in :func:`parallel_lce.linear_cross_entropy`.
            Default: the hidden states' dtype, as in stock.
        gradient_filter: a probability, as in :func:`parallel_lce.linear_cross_entropy`; only with ``"output_layer"``.
            Default: gradients are exact.
        skip_masked: True: tokens that the model's ``loss_mask`` masks, and labels of -100, have the loss 0, no gradient
            and no cost; only with ``"output_layer"``. Within the model's forward masked labels are -100. Default:
            False.
        z_loss, label_smoothing: as in :func:`parallel_lce.linear_cross_entropy`, exact over all ranks; of models in
            training mode. In evaluation mode the loss is the cross-entropy. Default: 0.
        vocab_size: the number of real entries. Rows from this id on are padding: they are left out of the softmax and
            have no gradient. Default: all rows take part, as in stock.
        token_metrics: True: the loss also gives the metrics of its tokens, for :func:`token_metrics`. Default: False.

    Raises:
        ImportError: megatron-core is missing, or older than 0.14.
        ValueError: a value is not allowed.
    """
    given: dict[str, object] = dict(cross_entropy=cross_entropy, logits_budget=logits_budget, reduce_dtype=reduce_dtype)
    given |= dict(gradient_filter=gradient_filter, skip_masked=skip_masked, token_metrics=token_metrics)
    given |= dict(z_loss=z_loss, label_smoothing=label_smoothing, vocab_size=vocab_size)
    resolved = settings.resolve(**{name: value for name, value in given.items() if value is not KEPT})
    if importlib.util.find_spec("megatron") is None:
        remedy = "pip install 'megatron-core>=0.14', or pip install '.[megatron]' in a checkout of parallel_lce"
        raise ImportError(f"parallel_lce.megatron needs megatron-core: {remedy}")
    check_release()
    from megatron.core.models.common.language_module.language_module import LanguageModule

    settings.current = resolved
    watch_optimizers()
    _replacements.replace(LanguageModule, "setup_embeddings_and_output_layer", _wrap_setup)
    _replacements.replace(LanguageModule, "compute_language_model_loss", _wrap_loss)
    for function in functions():
        _replacements.replace(function, "apply", functools.partial(apply_of, function))


def unpatch() -> None:
    """Undo :func:`patch` for models built from now on.

    Models built before must not be used: their output layers still return lazy logits, and Megatron's own loss raises
    ``UnboundLocalError`` for ``cross_entropy_fusion_impl="parallel_lce"``.
    """
    settings.current = settings.Settings()
    _replacements.restore()


def _wrap_setup(own: Callable) -> Callable:
    @functools.wraps(own)
    def setup_embeddings_and_output_layer(self) -> None:
        own(self)
        if self.config.cross_entropy_fusion_impl != IMPLEMENTATION:
            return
        if not self.config.cross_entropy_loss_fusion:
            said = "cross_entropy_fusion_impl='parallel_lce' has no effect with cross_entropy_loss_fusion=False"
            warnings.warn(f"parallel_lce: {said}: this model trains with Megatron's loss", RuntimeWarning, stacklevel=2)
            return
        for kind in type(self).__mro__:  # an override may call what LanguageModule had before patch()
            if "compute_language_model_loss" in vars(kind):
                _replacements.replace(kind, "compute_language_model_loss", _wrap_loss, again=True)
            if is_megatrons(vars(kind).get("forward")):
                _replacements.replace(kind, "forward", wrapped_forward)
        layer: Any = getattr(self, "output_layer", None)
        if getattr(self, "post_process", True) and not (of_another_kind(layer) or settings.takes_logits()):
            make_lazy(layer)

    return setup_embeddings_and_output_layer


def _wrap_loss(own: Any) -> Any:
    if not inspect.isfunction(own):  # a staticmethod, which has no model
        return own

    @functools.wraps(own)
    def compute_language_model_loss(self, *given, **named):
        config = self.config
        if not config.cross_entropy_loss_fusion or config.cross_entropy_fusion_impl != IMPLEMENTATION:
            return own(self, *given, **named)
        if not (settings.takes_logits() or any(map(_is_lazy, (*given, *named.values())))):
            _say_why(self)
        return _run_own_loss(own, self, *given, **named)

    return compute_language_model_loss


def _is_lazy(value: Any) -> bool:
    return isinstance(value, (LazyLogits, LogitsTensor))


@torch.compiler.disable(reason="lazy logits and main_grad are Python objects")
def _run_own_loss(own: Callable, model: Any, *arguments: Any, **named: Any) -> Any:
    with own_loss(model, count_of(model, (*arguments, *named.values()))):
        return own(model, *arguments, **named)


def _say_why(model: Any) -> None:
    """Say why the model's loss got real logits, unless its output layer, or one inside of that, has said so."""
    layer = model.output_layer
    if isinstance(layer, torch.nn.Module) and any(["_parallel_lce_said" in vars(m) for m in layer.modules()]):
        return
    reason = of_another_kind(layer)
    if reason is None and not hasattr(layer, "returns_lazy_logits"):
        reason = "the model was built before patch() or for cross_entropy='logits', or its output layer was replaced"
    if reason is not None:
        warn_of_logits(model, reason)
