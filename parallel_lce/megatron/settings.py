"""The settings of fused models, and what a fused model and its output layer share."""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from parallel_lce.call import debug
from parallel_lce.core.options import Options, check_flag
from parallel_lce.modules import LinearCrossEntropy
from parallel_lce.patching import LogitsWarning, warn

MARK = "_parallel_lce"
"""The attribute of a fused model and of its output layer that holds their :class:`Fusion`."""

IMPLEMENTATION = "parallel_lce"
CHOSEN = str(b"native", "ascii")
""" "native", in the configuration of a model that chose this package, known by its identity: Megatron's own code knows
the name, 0.20 raises for others, and programs write configurations to files, which a subclass of str would hinder.
There ``cross_entropy_loss_fusion`` becomes 0, since Megatron's own loss of real logits is its unfused one. A program
that wants an unfused model sets False in a copy."""

LABELS = {"labels", "lm_labels"}
"""Names of the labels among the arguments of Megatron's models."""

running: ContextVar[Any] = ContextVar("running", default=None)
"""The :class:`parallel_lce.megatron.log_probs.Scoring` of the running call of a model, for its head and its loss."""


_OF_TRAINING = "z_loss", "label_smoothing"
_OF_LOSS = *_OF_TRAINING, "vocab_size", "token_metrics"
"""Settings by which the loss is another one than Megatron's, or says more; the first ones only in training."""


def asks(config: Any) -> bool:
    """Whether a configuration asks for this package's loss."""
    name = config.cross_entropy_fusion_impl
    return (name is CHOSEN or name == IMPLEMENTATION) and config.cross_entropy_loss_fusion is not False


class Settings(NamedTuple):
    """Arguments of :func:`parallel_lce.megatron.patch`, with their defaults."""

    cross_entropy: str = "output_layer"
    logits_budget: int | None = None
    gradient_filter: float | None = None
    reduce_dtype: torch.dtype | None = None
    skip_masked: bool = False
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    vocab_size: int | None = None
    token_metrics: bool = False

    def changes(self, training: bool = True) -> str:
        """The settings by which the loss is another one than Megatron's."""
        names = [name for name in _OF_LOSS if training or name not in _OF_TRAINING]
        return ", ".join(f"{name}={value}" for name in names if (value := getattr(self, name)))


current = Settings()
"""Those of the last ``patch``, else the defaults."""


def resolve(before: Settings, given: dict[str, Any]) -> Settings:
    """``before`` with the given settings, where None means the default. Raises ``ValueError`` as ``patch``."""
    if unknown := given.keys() - {*Settings._fields}:
        raise ValueError(f"{min(unknown)} is no setting: take one of {', '.join(Settings._fields)}")
    defaults = Settings._field_defaults
    settings = before._replace(**{name: defaults[name] if value is None else value for name, value in given.items()})
    if settings.cross_entropy not in ("output_layer", "logits"):
        raise ValueError(f"cross_entropy must be one of 'output_layer', 'logits', got {settings.cross_entropy!r}")
    if settings.reduce_dtype not in (None, torch.float32):
        raise ValueError(f"reduce_dtype must be None or torch.float32, got {settings.reduce_dtype!r}")
    check_flag("skip_masked", settings.skip_masked)
    check_flag("token_metrics", settings.token_metrics)
    LinearCrossEntropy(**{n: value for n, value in settings._asdict().items() if n in Options._fields})  # raises
    if settings.cross_entropy == "logits":
        for name in ("gradient_filter", "skip_masked", *_OF_LOSS):
            if value := getattr(settings, name):
                remedy = "if it is that of an earlier patch(), call unpatch()"
                raise ValueError(f"{name}={value} needs cross_entropy='output_layer', got 'logits'; {remedy}")
    return settings


def _arguments_of(model: Any) -> tuple[list[str], list[str]]:
    """The names of a forward's arguments, and of those by position. A forward that names no labels may pass them on, in
    ``*args`` and ``**kwargs``, to that of a class from which the model's is derived."""
    found, kinds = [], inspect.Parameter
    inherited = [functools.partial(kind.forward, model) for kind in type(model).__mro__ if "forward" in vars(kind)]
    for forward in (model.forward, *inherited):
        parameters = inspect.signature(forward).parameters.values()
        names = [each.name for each in parameters if each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
        positional = [each.name for each in parameters if each.kind <= kinds.POSITIONAL_OR_KEYWORD]
        found.append((names, positional))
        own_names, first = found[0]
        if LABELS & {*names} and {*own_names} <= {*names} and positional[: len(first)] == first:
            return names, positional
    return found[0]


class Fusion:
    """What a model that asked for the fused loss and its output layer share: settings, and what was said. ``own``: its
    settings; None: those of ``patch``."""

    def __init__(self, model: Any, own: Settings | None = None) -> None:
        self.own = own
        # Why it is not fused.
        self.reason: str | None = None
        # The calls of the output layer in a forward: 1, and one for each multi-token prediction.
        self.heads = 1 + (getattr(model.config, "mtp_num_layers", None) or 0)
        self.forward: Any = None
        self.read_arguments(model)
        self.said: list[str] = []
        self.said_no_mask = False
        # Whether the running call of the model got labels, under patch() or fuse(); between calls True.
        self.wants_loss = True
        # Of the last call with gradients, for a checkpoint that runs its output layer again in backward.
        self.wanted_loss = True

    def read_arguments(self, model: Any) -> None:
        """Those of the model's forward, which a program may replace later."""
        forward = getattr(model.forward, "__func__", model.forward)
        if forward is not self.forward:
            self.forward, (self.parameters, self.positional) = forward, _arguments_of(model)
            self.labels = "lm_labels" if "lm_labels" in self.parameters else "labels"

    @property
    def settings(self) -> Settings:
        return self.own or current

    @property
    def scoring(self) -> Any:
        """The ``Scoring`` of the running call, if that is this model's."""
        scoring = running.get()
        return scoring if scoring is not None and scoring.fusion is self else None

    def answer(self) -> str:
        """Of a fused model, what ``explain`` says."""
        if self.settings.cross_entropy == "logits":
            return "its settings have cross_entropy='logits'"
        return self.said[0] if self.said else "fused"

    def refuse_changes(self, reason: str | None, training: bool) -> None:
        """Raise if a setting changes the loss, which is not fused for this reason. Not for losses that nobody wants:
        Megatron 0.19 forms those of MTP heads without labels, too."""
        wanted = self.wants_loss or self.heads == 1 or torch.is_grad_enabled()
        if wanted and (changes := self.settings.changes(training)):
            raise RuntimeError(f"parallel_lce: {changes} needs a fused loss, and this one is not: {reason}")

    def say(self, training: bool, reason: str) -> None:
        """Before real logits are made: a call that scores labels is refused; else training is warned of, once for a
        reason, on one of the ranks that have the output layer."""
        if (scoring := self.scoring) is not None:
            debug.state.awaited = True  # the other ranks' losses begin with an exchange
            raise RuntimeError(f"{scoring.function} makes no logits: {reason}")
        words = f"training makes the whole logits, which need not exist: {reason}"
        if training and torch.is_grad_enabled() and words not in self.said:
            self.said.append(words)
            changes = self.settings.changes()
            say(f"{words}; a program's own loss of them has no {changes}" if changes else words)

    def say_no_mask(self, reason: str) -> None:
        if not self.said_no_mask:
            self.said_no_mask = True
            say(f"skip_masked skips labels of -100 alone, and no loss_mask: {reason}")


def is_megatrons(function: Any) -> bool:
    """Whether Megatron-core wrote a function or class. A program's own, which may have its name, has other globals."""
    if isinstance(function, type):
        return function.__module__.startswith("megatron.core.")
    function = getattr(function, "__func__", function)
    while getattr(getattr(function, "__code__", None), "co_name", None) in ("decorate_fwd", "decorate_bwd"):
        function = function.__wrapped__  # of torch.amp, around its autograd.Functions
    return f"{getattr(function, '__globals__', {}).get('__name__')}.".startswith("megatron.core.")


def say(words: str) -> None:
    """Warn on one of the ranks that have the same part of the pipeline."""
    from megatron.core import parallel_state as ranks

    if ranks.is_initialized():
        if ranks.get_data_parallel_rank(with_context_parallel=True) or ranks.get_tensor_model_parallel_rank():
            return
    warn(f"parallel_lce: {words}", LogitsWarning, on_each_rank=True)
