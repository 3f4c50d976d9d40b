"""Megatron's two cross-entropies, also of lazy logits.

A loss of Megatron's models ends in ``apply`` of one of two ``torch.autograd.Function``s, with logits ``[s, b, V/P]``,
targets ``[s, b]`` and the model's tensor-parallel group. This module takes over there, so that all that a program puts
around it stays in force: a ``compute_language_model_loss`` that is wrapped, overridden or takes further arguments.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.core.options import NO_LABEL
from parallel_lce.megatron import settings
from parallel_lce.megatron.lazy_logits import LazyLogits, are_asked_for
from parallel_lce.megatron.losses import keep_metrics, terms_of_logits
from parallel_lce.megatron.output_layer import losses_of_lazy, terms_of_lazy
from parallel_lce.megatron.own_code import is_megatrons
from parallel_lce.patching import replaced
from parallel_lce.run.token_count import TokenCount
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

# Models whose own compute_language_model_loss is running, how many of its labels count, and whether the metrics of its
# tokens may be kept. The innermost is the last.
_running: list[tuple[Any, TokenCount | None, bool]] = []


def _innermost() -> tuple[Any, TokenCount | None, bool]:
    return _running[-1] if _running else (None, None, False)


def check_release() -> None:
    """Raise ``ImportError`` for a megatron-core older than 0.14, whose models do not pass on their process groups."""
    import megatron.core
    from megatron.core.tensor_parallel import ColumnParallelLinear

    parameters = inspect.signature(ColumnParallelLinear.__init__).parameters.values()
    if not any(p.name == "tp_group" or p.kind is p.VAR_KEYWORD for p in parameters):
        version = getattr(megatron.core, "__version__", "an unknown version")
        raise ImportError(f"parallel_lce.megatron needs megatron-core 0.14 or newer, found {version}")


def functions() -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """Those of ``cross_entropy_loss_fusion`` True and False."""
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.tensor_parallel import cross_entropy

    return fused_cross_entropy._VocabParallelCrossEntropy, cross_entropy._VocabParallelCrossEntropy


@functools.cache
def _parts(function: type, *owners: Any) -> list[tuple[Any, str]]:
    """The functions that make a cross-entropy, each by its owner and name. ``owners``: of the helpers."""
    helpers = [(owner, name) for owner in dict.fromkeys(owners) for name in dir(owner)]
    own = [(function, "forward"), (function, "backward")]
    return own + [(owner, name) for owner, name in helpers if name.startswith(("calculate_", "prepare_"))]


def _replaced_part(function: type, apply: object) -> str | None:
    """What of a cross-entropy is not Megatron's own; None if all is. ``apply``: its ``apply`` without this package's;
    None: it is inherited."""
    from megatron.core.tensor_parallel import cross_entropy as unfused

    fused: Any = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    helpers = unfused.VocabParallelCrossEntropy, getattr(fused, "VocabParallelCrossEntropy", fused)
    for owner, name in _parts(function, *helpers, fused):
        part = getattr(owner, name, None)
        # Without torch.compile they are torch.jit's, which keep no code.
        if not (isinstance(part, torch.jit.ScriptFunction) or is_megatrons(part)):
            return f"{function.__name__}.{name}" if owner is function else name
    return None if apply is None or is_megatrons(apply) else "apply"


def apply_of(function: type, theirs: Any) -> Any:
    """The ``apply`` of one of :func:`functions`, whose own attribute was ``theirs``, None if it had none. It gives the
    fused loss of lazy logits; the loss of :func:`parallel_lce.vocab_parallel_cross_entropy` within :func:`own_loss`
    and, with ``cross_entropy="logits"``, for all callers of the unfused function; otherwise what it gave before, and
    so does that of a subclass, or of a function in which a program has replaced something."""

    bind = getattr(type(theirs), "__get__", None)  # a bound method has one only by its class

    def apply(cls: type, logits: Any, target: Tensor, *others: Any) -> Tensor:
        inherited: Any = super(function, cls)
        before = inherited.apply if theirs is None else theirs if bind is None else bind(theirs, None, cls)
        smoothing = next((v for v in others if not (v is None or isinstance(v, dist.ProcessGroup))), 0.0)
        name = cls.__name__ if cls is not function else _replaced_part(function, theirs)
        logits = getattr(logits, "lazy", logits)  # of a mixin of the output layer
        if isinstance(logits, LazyLogits) and logits.made is None and logits.epilogue() is None:
            logits = logits.materialize(f"a loss after {[name for name, _ in logits.steps]}")
        if isinstance(logits, LazyLogits):
            plain = type(smoothing) in (int, float) and not smoothing
            if name is None and logits.made is None and plain and target.shape == logits.shape[:-1]:
                return _of_lazy(logits, target)
            logits = logits.materialize(f"Megatron's cross-entropy{'' if name is None else f', with {name} replaced,'}")
        everywhere = settings.takes_logits() and function is functions()[1]
        if name is not None or not (_running or everywhere):
            return before(logits, target, *others)
        group = next((v for v in others if isinstance(v, dist.ProcessGroup)), None)
        (model, _, kept), chosen = _innermost(), settings.current
        if model is not None and group is not None and group.size() > 1:
            weight, shards = getattr(model.output_layer, "weight", None), group.size()
            shards *= getattr(model.output_layer, "gtp_remat_size", 1)  # a weight may be sharded once more
            whole = getattr(model, "vocab_size", None) if weight is None else len(weight) * shards
            if logits.shape[-1] == whole:  # the output layer has gathered them
                logits = logits.chunk(group.size(), dim=-1)[group.rank()]
        if model is not None and not smoothing and chosen.changes_loss(model.training):
            from megatron.core import parallel_state

            formula = chosen.formula(model.training)
            whole_group: Any = group or parallel_state.get_tensor_model_parallel_group(check_initialized=False)
            terms = terms_of_logits(logits, target, chosen.vocab_size, formula.label_smoothing > 0, whole_group)
            losses, metrics = formula.losses(terms, target)
            if kept:
                keep_metrics(model, metrics)
            return losses
        losses = vocab_parallel_cross_entropy(logits, target, float(smoothing), group)
        return losses.masked_fill(target == NO_LABEL, 0.0) if model is not None and chosen.skip_masked else losses

    vars(apply)["theirs"] = theirs
    return classmethod(apply)  # pyright: ignore[reportArgumentType]


def _of_lazy(logits: LazyLogits, target: Tensor) -> Tensor:
    """The fused losses ``[s, b]``, and under ``patch(token_metrics=True)`` the metrics of their tokens."""
    (model, count, kept), chosen = _innermost(), settings.current
    ignored = NO_LABEL if chosen.skip_masked else None
    if not kept:
        return losses_of_lazy(logits, target, ignored, count)
    formula = chosen.formula(model.training)
    terms = terms_of_lazy(logits, target, count, formula.label_smoothing > 0)
    losses, metrics = formula.losses(terms, target)
    keep_metrics(model, metrics)
    return losses


@contextmanager
def own_loss(model: Any, count: TokenCount | None = None, of_head: bool = False) -> Iterator[None]:
    """A context in which Megatron's own ``compute_language_model_loss`` of ``model`` ends in this module, whatever
    loss its configuration chooses. ``count``: of the labels that are not -100. ``of_head``: a head for multi-token
    prediction computes the last loss of the model's call; without labels one always does."""
    with ExitStack() as stack:
        for function in functions():
            own = vars(function).get("apply")
            if not hasattr(getattr(own, "__func__", None), "theirs"):  # without patch(), or replaced since
                stack.enter_context(replaced(function, apply=apply_of(function, own)))
        # Megatron's code does not know this package's name. "native" needs no further package; a program that has
        # replaced the other cross-entropy means that one.
        unfused = functions()[1]
        fused = _replaced_part(unfused, vars(unfused)["apply"].__func__.theirs) is None
        config = dict(cross_entropy_loss_fusion=fused, cross_entropy_fusion_impl="native")
        stack.enter_context(replaced(model.config, **config))
        kept = settings.current.token_metrics and not (of_head or are_asked_for())
        _running.append((model, count, kept))
        stack.callback(_running.pop)
        yield
