"""The switch: lets Megatron-core's language models use this package's loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallel_lce.core.options import NO_LABEL, as_int64
from parallel_lce.core.private import hooks, keep_with, outside_graphs
from parallel_lce.megatron import settings
from parallel_lce.megatron.loss import with_fused_loss
from parallel_lce.megatron.settings import CHOSEN, IMPLEMENTATION, MARK, Fusion, asks, is_megatrons
from parallel_lce.patching import Replacements, fused_class
from parallel_lce.run.token_count import LabelCount

KEPT: Any = type("Kept", (), {"__repr__": lambda self: "KEPT"})()  # a setting is that of an earlier call, else its own
_LOSS = "compute_language_model_loss"
_replacements = Replacements()
fuses_native = False
"""The launcher's: models whose configuration says "native" are fused."""


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
    package's loss, of models that are built from now on. Other models say once that they are not fused.

    docs/megatron.md has the settings. The default ``logits_budget`` is divided by ``1 + mtp_num_layers``. A later call
    changes the given settings of all models that it fused, from their next loss on, and keeps the others; None gives a
    setting its default. Replaced are ``__init__``, ``setup_embeddings_and_output_layer`` and
    ``compute_language_model_loss`` of Megatron's ``LanguageModule``.

    Collectives of the loss: those of :func:`parallel_lce.linear_cross_entropy` on the model's tensor-parallel group.
    ``ImportError``: megatron-core is missing, or older than 0.14. ``ValueError``: a value is not allowed.
    """
    resolved = settings.resolve(settings.current, {n: value for n, value in locals().items() if value is not KEPT})
    language_module = _language_module()
    settings.current = resolved
    _replacements.replace(language_module, "__init__", _consuming)
    _replacements.replace(language_module, "setup_embeddings_and_output_layer", _fusing)
    _replacements.replace(language_module, _LOSS, with_fused_loss)


def unpatch() -> None:
    """Undo :func:`patch` and :func:`fuse` for models built from now on, and give the settings their defaults.

    Models that were fused train on, with logits and Megatron's own loss.
    """
    global fuses_native
    settings.current, fuses_native = settings.Settings(), False
    _replacements.restore()


def fuse(model: Any, **given: Any) -> list[str]:
    """Fuse a built Megatron model, whatever loss its configuration names, in any wrappers; or a list of its chunks.

    ``given``: settings of this model, in place of all of :func:`patch`. Without any it keeps those of its own, else
    follows ``patch``. Its output layer becomes a subclass of the same name, with the same parameters and state dict.

    Returns for each chunk "fused", or the reason why not. Collectives: none. Raises as :func:`patch`, and
    ``ValueError`` for a chunk that is no language model of Megatron's.
    """
    chunks, own = _chunks(model), settings.resolve(settings.Settings(), given) if given else None
    _replacements.replace(_language_module(), _LOSS, with_fused_loss)
    for chunk in chunks:
        _fuse_one(chunk, own)
    return [why_not_fused(chunk) or "fused" for chunk in chunks]  # two may share an output layer


def explain(model: Any) -> list[str]:
    """Of each chunk of a Megatron model "fused", or why it is not, or why its training made logits, if it was said."""
    return [why_not_fused(chunk) or vars(chunk)[MARK].answer() for chunk in _chunks(model)]


def _chunks(model: Any) -> list[Any]:
    return [language_model(chunk) for chunk in (model if isinstance(model, (list, tuple)) else [model])]


def why_not_fused(model: Any) -> str | None:
    head, fusion = getattr(model, "output_layer", None), vars(model).get(MARK)
    if head is None:
        return "this pipeline stage has no output layer"
    if fusion is None and asks(model.config):
        return "it was built before patch(); call fuse(model)"
    if fusion is None:
        name, on = model.config.cross_entropy_fusion_impl, model.config.cross_entropy_loss_fusion
        found = f"cross_entropy_loss_fusion={on}, cross_entropy_fusion_impl={name!r}"
        return f"its configuration has {found}, not True and 'parallel_lce'; call fuse(model)"
    if fusion.reason is None and all(vars(each).get(MARK) is not fusion for each in head.modules()):
        return "its output layer was replaced since, or fused for another model; call fuse(model)"
    if fusion.reason is None and not _is_patched():
        return "unpatch() was called; call fuse(model)"
    return fusion.reason


def _is_patched() -> bool:
    return _LOSS in [name for _, name in _replacements]


def _fuse_one(model: Any, own: settings.Settings | None) -> None:
    """Fuse a model, or leave the reason why not in its ``Fusion``."""
    from parallel_lce.megatron.heads import ColumnParallelLinear, layers

    own = own or getattr(vars(model).get(MARK), "own", None)
    fusion, (_, before) = Fusion(model, own), _replacements[_language_module(), _LOSS]
    layer: Any = getattr(model, "output_layer", None)
    layer = getattr(layer, "_orig_mod", layer)  # of torch.compile
    _consume(model.config)
    if not is_megatrons(before):
        fusion.reason = f"LanguageModule.{_LOSS} was replaced before patch(); call patch() first"
    elif model.config.defer_embedding_wgrad_compute:
        fusion.reason = "defer_embedding_wgrad_compute keeps the gradients of whole logits; set it to False"
    elif model.config.cross_entropy_loss_fusion and model.config.cross_entropy_fusion_impl == "linear":
        fusion.reason = "its output layer returns losses of Megatron's own (of its development branch)"
    elif not isinstance(layer, layers.ColumnParallelLinear):
        kind = type(layer).__name__
        fusion.reason = (
            f"the output layer is a {kind}; use Megatron's ColumnParallelLinear, or merge the adapter around it"
        )
    else:
        layer.__class__ = fused_class(type(layer), ColumnParallelLinear)
        vars(layer)[MARK] = fusion
    if _begin_call not in hooks(model, "forward_pre"):
        model.register_forward_pre_hook(_begin_call, with_kwargs=True)
        model.register_forward_hook(_end_call, always_call=True)
    vars(model)[MARK] = fusion


def language_model(model: Any) -> Any:
    """The LanguageModule inside a model's wrappers."""
    kind, inner = _language_module(), model
    while isinstance(inner, nn.Module) and not isinstance(inner, kind):
        # "_orig_mod" is torch.compile's name.
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
    if not isinstance(inner, kind):
        kind = type(model).__name__
        raise ValueError(f"model must be a language model of Megatron's, alone or as .module of wrappers, got {kind}")
    return inner


def _language_module() -> Any:
    """Raises ``ImportError`` if megatron-core is missing, or older than 0.14."""
    try:
        import megatron.core
        from megatron.core.models.common.language_module.language_module import LanguageModule
    except ImportError as missing:
        remedy = "pip install 'megatron-core>=0.14'"
        raise ImportError(f"parallel_lce.megatron needs megatron-core: {remedy}") from missing
    found = megatron.core.__version__
    if tuple(map(int, found.split(".")[:2])) < (0, 14):  # whose models do not pass on their process groups
        raise ImportError(f"parallel_lce.megatron needs megatron-core 0.14 or newer, found {found}")
    return LanguageModule


def _consuming(own: Callable) -> Callable:
    @functools.wraps(own)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        _consume(named.get("config", given[0] if given else None))
        own(self, *given, **named)

    return __init__


def _consume(config: Any) -> None:
    name = getattr(config, "cross_entropy_fusion_impl", None)
    chosen = name == IMPLEMENTATION or (fuses_native and name == "native")
    if chosen and config.cross_entropy_loss_fusion:
        config.cross_entropy_fusion_impl, config.cross_entropy_loss_fusion = CHOSEN, 0


def _fusing(own: Callable) -> Callable:
    @functools.wraps(own)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        own(self)
        if asks(self.config):
            _fuse_one(self, None)
        reason = why_not_fused(self)
        if reason is not None and getattr(self, "post_process", True):
            settings.say(f"a {type(self).__name__} is not fused: {reason}")

    return setup_embeddings_and_output_layer


@outside_graphs
def _begin_call(model: Any, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Before a fused model's forward: whether it wants losses of ours; and with ``skip_masked`` the labels of tokens
    that Megatron's own forward masks become -100, and the count of the others begins."""
    fusion: Fusion = vars(model)[MARK]
    fusion.read_arguments(model)
    arguments = {**dict(zip(fusion.positional, given)), **named}
    labels, mask = arguments.get(fusion.labels), arguments.get("loss_mask")
    patched, chosen = _is_patched(), fusion.settings
    unseen = fusion.labels not in (*fusion.parameters, *named)
    wants = patched and (isinstance(labels, Tensor) or unseen)
    fusion.wants_loss = wants
    if torch.is_grad_enabled():
        fusion.wanted_loss = wants
    if fusion.wants_loss and fusion.reason is None and (reason := why_not_fused(model)) is not None:
        fusion.refuse_changes(reason, model.training)
        fusion.say(model.training, reason)
    if not patched or fusion.reason is not None:
        return None
    if not wants and chosen.cross_entropy == "output_layer" and not arguments.get("runtime_gather_output"):
        fusion.say(model.training, "the model gets no labels; pass them, or call token_log_probs or token_loss")
    if not chosen.skip_masked:
        return None
    if fusion.scoring is not None or not isinstance(mask, Tensor):
        mask = None
    elif not is_megatrons(fusion.forward):
        mask = None
        fusion.say_no_mask(f"the forward of {type(model).__name__} is not Megatron's own, and may shift the labels")
    if not isinstance(labels, Tensor):
        return None
    if fusion.scoring is None:  # a copy: their count is kept with memory, and microbatches may be slices of one tensor
        arguments[fusion.labels] = labels = as_int64(labels).clone()
    if mask is not None:
        if mask.numel() != labels.numel():
            raise ValueError(f"loss_mask must have the labels' shape {[*labels.shape]}, got {[*mask.shape]}")
        labels.masked_fill_(mask.reshape(labels.shape) == 0, NO_LABEL)
    keep_with(labels, LabelCount(labels))  # also for a checkpoint, which computes their loss again
    names = fusion.positional[: len(given)]
    return (*[arguments.pop(name) for name in names], *given[len(names) :]), arguments


def _end_call(model: Any, given: tuple, output: Any) -> None:
    """After a fused model's forward. Whoever then calls its parts, or its forward, shows no labels: losses are ours."""
    vars(model)[MARK].wants_loss = True
