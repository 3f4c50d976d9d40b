"""The fused loss in Hugging Face transformers: ``patch(model)``. This module imports nothing of transformers.

The output layer of a patched model returns deferred logits, and ``model.loss_function`` takes their operands.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from parallel_lce import neighbours
from parallel_lce.core import private
from parallel_lce.core.options import NO_LABEL, as_int64
from parallel_lce.core.plan import lean_budget
from parallel_lce.deferred import THE_LOSS, DeferredLogits, Source
from parallel_lce.functional import linear_cross_entropy, token_loss
from parallel_lce.modules import LinearCrossEntropy
from parallel_lce.neighbours import is_unit
from parallel_lce.patching import Derived, LogitsWarning, fused_class, is_own, unfuse, warn, why_no_product
from parallel_lce.run.results import TokenStatistics
from parallel_lce.run.token_count import LabelCount

_Model = TypeVar("_Model", bound=nn.Module)
_DOOR = "_parallel_lce"
_NO_ONE_GRAPH = "parallel_lce breaks the graph where it fuses a loss: leave fullgraph at False, or unpatch(model)"
# Within a patched model's forward: its labels' count, whether the loss got deferred logits, and the metrics.
_running: ContextVar[SimpleNamespace | None] = ContextVar("_running", default=None)


class _Door:
    """What :func:`patch` leaves in a model and in its output layer: the options, the loss, what was said, and whether a
    fused loss ran."""

    def __init__(self, name: str, accuracy: bool, metrics: bool, eval_logits: bool, options: dict[str, Any]) -> None:
        self.name, self.token_accuracy, self.token_metrics, self.eval_logits = name, accuracy, metrics, eval_logits
        self.options, self.said, self.ran = options, dict[str, str](), False
        # The output layer's unit of FSDP, if that is of more than the layer. A checkpoint asks for it in backward.
        self.in_a_unit = ""

    def __deepcopy__(self, memo: dict) -> _Door:
        return self  # also that of a copy of the output layer alone, as PEFT makes one

    def say(self, what: str, key: str | None = None) -> None:
        if (key or what) not in self.said:
            self.said[key or what] = what
            warn(f"parallel_lce: {self.name} {what}", LogitsWarning)

    def reasons(self) -> list[str]:
        """Why losses made logits. Uses beside a loss are no reason."""
        return [what for key, what in self.said.items() if not key.startswith(("beside", "without"))]

    def say_use(self, call: SimpleNamespace | None, source: Source, use: str) -> None:
        if source.grad:
            labelled = call is None or call.labelled
            where = "beside its fused loss" if source.has_loss else "before its loss" if labelled else "without labels="
            by_adapter = labelled and not source.has_loss and use != "cross_entropy"
            remedy = "; if an adapter does so, merge it" if by_adapter else ""
            self.say(f"makes its logits {where}, since {use!r} wants them{remedy}", where)

    @private.outside_graphs
    def loss(
        self, model, own, logits, labels=None, vocab_size=None, num_items_in_batch=None, ignore_index=NO_LABEL, **others
    ) -> Tensor:
        """``model.loss_function``: the fused loss of deferred logits, and transformers' ``own`` of real ones."""
        if type(logits) is not DeferredLogits:
            if not self.reasons() and torch.is_grad_enabled():
                ours = [each for each in model.get_output_embeddings().modules() if vars(each).get(_DOOR) is self]
                if not ours or any(each not in ours for each in _output_layers(model)):
                    why = "was replaced after patch(model): call it again"
                else:
                    is_on = any(map(_door_of, ours))
                    why = "was not called, or has a forward of its own" if is_on else "is in eval mode"
                self.say(f"computes its own loss: its output layer {why}")
            return own(logits, labels, vocab_size, num_items_in_batch, ignore_index, **others)
        call, count, given = _running.get(), None, others.get("shift_labels")
        shifted = given is None
        given = labels if shifted else given
        if call is not None:
            call.deferred = True
            count = call.counted.of(given, shifted) if ignore_index == NO_LABEL else None
        target = as_int64(given).to(logits.device)
        if shifted:
            target = nn.functional.pad(target, (0, 1), value=ignore_index)[..., 1:]
        reason = logits.why_not_fused()
        if (*target.shape, vocab_size) != logits.shape:
            reason = "the shape of its labels, or vocab_size, is not that of its logits"
        elif not is_own(nn.functional.cross_entropy, "torch.nn.functional", "cross_entropy"):
            reason = "torch.nn.functional.cross_entropy was replaced"
        if reason is None:
            loss, metrics = self._fused(logits, target, ignore_index, num_items_in_batch, count)
            if call is not None:
                call.metrics = metrics
            return loss
        if logits.source.grad:
            self.say(f"computes its own loss, of all logits: {reason}")
        return own(logits.computed(THE_LOSS), labels, vocab_size, num_items_in_batch, ignore_index, **others)

    def _fused(self, logits: DeferredLogits, target: Tensor, ignore: int, items: Any, count: Any) -> tuple:
        """The loss, and the metrics as fields of the output. ``items``: what the sum is divided by; None: the mean."""
        metrics, counted, self.ran = dict[str, Tensor](), target != ignore, True
        options: dict[str, Any] = {**self.options, **(logits.epilogue() or {})}
        options["logits_budget"] = lean_budget(options["logits_budget"])
        options.update(reduction="mean" if items is None else "sum", ignore_index=ignore, counted_tokens=count)

        def of_tokens(each: TokenStatistics) -> tuple[Tensor, dict[str, Any]]:
            of_each = dict(log_probs=each.target_log_prob, entropies=each.entropy) if self.token_metrics else {}
            return -cast(Tensor, each.target_log_prob), {"predicted_ids": each.argmax, **of_each}

        def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
            options["linear_bias"] = bias
            if not (self.token_accuracy or self.token_metrics):
                loss = linear_cross_entropy(hidden, weight, target, **options)
            else:
                options.update(argmax=True, entropy=self.token_metrics)
                loss, found = token_loss(hidden, weight, target, of_tokens, **options)
                if self.token_accuracy:
                    right = (found["predicted_ids"] == target) & counted
                    metrics["token_accuracy"] = right.sum() / counted.sum().clamp(min=1)
                if self.token_metrics:
                    metrics.update(found, predicted_ids=found["predicted_ids"].masked_fill(~counted, -1))
            if items is not None:
                return (loss / (items.to(loss.device) if isinstance(items, Tensor) else items),)
            return (loss.where(counted.any(), float("nan")),)  # the mean of no tokens, as transformers'

        (loss,) = logits.run(loss_of)
        if logits.source.within is not None:
            logits.source.close_after(loss)
        return loss.float(), metrics  # as transformers' of fp64 logits


class Linear(Derived, nn.Linear):
    """A patched model's output layer."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """A unit that only gathers its weight runs no hooks for deferred logits: they run with the loss."""
        if _door_of(self) is not None and is_unit(self) and len(arguments) == 1 and _only_gathers(self):
            call = _running.get()
            if call is not None and call.labelled:
                if (logits := _deferred(self, arguments[0], in_a_call=True)) is not None:
                    return logits
        return nn.Module.__call__(self, *arguments, **options)

    def forward(self, input: Tensor, loss: Callable[[Tensor, Any, Any], tuple] | None = None) -> Any:
        """Logits; or ``loss(input, weight, bias)`` where the weight is whole in a call of the layer alone."""
        if loss is not None:
            return loss(input, self.weight, self.bias)
        logits = None if _door_of(self) is None else _deferred(self, input)
        return nn.Linear.forward(self, input) if logits is None else logits


def _only_gathers(layer: Any) -> bool:
    """Whether a call of the layer is that of its weight's product, and its hooks do no more than gather the weight."""
    around = private.hooks(layer, "forward", "forward_pre")
    gathers = all(private.comes_from(hook, *private.FSDP_MODULES, *neighbours.ZERO_MODULES) for hook in around)
    is_plain = type(layer).forward is Linear.forward and "forward" not in vars(layer)
    return gathers and is_plain and not private.hooks(layer, "backward", "backward_pre")


def _in_a_call(layer: Any, hidden: Tensor, loss: Callable[[Tensor, Any, Any], tuple]) -> tuple:
    """``loss(hidden, weight, bias)``, a tuple of tensors, in a call of the layer in place of its logits. Collectives:
    those of the layer's hooks, and the loss's."""
    made: tuple = ()

    def within(*operands: Any) -> tuple:
        nonlocal made
        # Copies of views: a change of one in place would drop the hook that FSDP2 puts on it.
        made = tuple([value.clone() if value._is_view() else value for value in loss(*operands)])
        return made

    result = layer(hidden, within)
    # FSDP2's hooks are on these tensors. It casts its result by a policy for logits.
    return made if isinstance(layer, FSDPModule) else result


def _door_of(module: nn.Module) -> _Door | None:
    """That of a patched model or of its output layer. None where no logits are deferred: everything is stock then."""
    door = None if private.exporting() else module.__dict__.get(_DOOR)  # as Dynamo can trace it
    return door if door is not None and (module.training or not door.eval_logits) else None


@private.outside_graphs
def _deferred(layer: Any, hidden: Tensor, in_a_call: bool = False) -> DeferredLogits | None:
    """The deferred logits of this call; None if it must make real ones, for a reason that is said. ``in_a_call``: the
    loss is computed in a further call of the layer, where its weight is whole."""
    door = vars(layer)[_DOOR]
    weight, bias = (None, None) if in_a_call else (layer.weight, layer.bias)
    reason = why_no_product(weight, hidden)
    if door.in_a_unit:
        reason = f"its output layer is in a unit of {door.in_a_unit}"
    elif not in_a_call and is_unit(layer):
        others = "hooks or a forward of its own, or the model's call has no labels="
        reason = f"its output layer gathers its weight for itself, and has {others}"
    if reason is not None:
        if torch.is_grad_enabled():
            door.say(f"makes its logits: {reason}")
        return None
    make, within, dtype = nn.functional.linear, None, None
    if in_a_call:
        within = functools.partial(_in_a_call, layer)
        dtype = private.fsdp_output_dtype(layer) if isinstance(cast(object, layer), FSDPModule) else None

        def of_a_call(hidden: Tensor) -> Tensor:
            (logits,) = _in_a_call(layer, hidden, lambda *operands: (nn.functional.linear(*operands),))
            return logits.to(dtype or hidden.dtype)

        make = of_a_call
    operands = tuple(each for each in (weight, bias) if each is not None)
    say = functools.partial(door.say_use, _running.get())
    source = Source(layer, hidden, weight, bias, make, say, operands, within)
    entries = layer.out_features if weight is None else len(weight)
    return DeferredLogits.of(source, (*hidden.shape[:-1], entries), dtype)


@functools.cache
def _with_fields(kind: type, names: tuple[str, ...]) -> type:
    """An output's class with these fields. DDP copies outputs field by field: they must be fields."""
    if not dataclasses.is_dataclass(kind):
        return kind
    fields = [(name, Any, dataclasses.field(default=None)) for name in names]
    made_by = {"_made_by": (_with_fields, kind, names)}
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(Derived, kind), namespace=made_by)


@private.outside_graphs
def _begun(door: _Door, model: Any, labels: Any, target: Any) -> SimpleNamespace:
    """What is known of a patched model's call. ``labels``, ``target``: as the model got them, and already shifted."""
    counted = LabelCount(labels if target is None else target, shifted=target is None)
    door.in_a_unit = ""
    for module in model.get_output_embeddings().modules():
        if isinstance(module, FullyShardedDataParallel):
            door.in_a_unit = "FSDP1: let its wrapping policy leave that layer out"
        elif isinstance(module, FSDPModule) and not isinstance(module, Linear):
            door.in_a_unit = "FSDP with more than the layer: fully_shard it alone"
    return SimpleNamespace(labelled=labels is not None, counted=counted, deferred=False, metrics={})


@functools.partial(private.outside_graphs, reason=_NO_ONE_GRAPH, calls_too=False)
def _run(door: _Door, model: Any, forward: Callable, *arguments: Any, **named: Any) -> Any:
    """A patched model's forward: its labels are counted before, and its metrics put into the output after it."""
    call = _begun(door, model, named.get("labels"), named.get("shift_labels"))
    token = _running.set(call)
    try:
        output = forward(model, *arguments, **named)
    finally:
        _running.reset(token)
    if call.labelled and not call.deferred and not door.reasons() and model.training and torch.is_grad_enabled():
        door.say("computes its own loss: its forward does not call model.loss_function")
    if call.metrics and isinstance(output, dict) and output.get("loss") is not None:
        return _with_fields(type(output), (*call.metrics,))(**output, **call.metrics)
    return output


@functools.cache
def _patched(base: type) -> Any:
    """A subclass of a model's class, of the same name. Without :func:`patch` its objects are those of ``base``."""
    if issubclass(base, Derived):  # fully_shard has derived it from ours
        return base
    traceable = base.loss_function.fget

    class Patched(Derived, base):
        _made_by = _patched, base

        def forward(self, *arguments, **named):
            if (door := _door_of(self)) is None:
                return base.forward(self, *arguments, **named)
            return _run(door, self, base.forward, *arguments, **named)  # pyright: ignore[reportCallIssue]

        # Without __wrapped__, by which accelerate would find the forward that it puts into the model.
        forward.__signature__ = inspect.signature(base.forward)  # pyright: ignore[reportFunctionMemberAccess]

        def _loss_of(self):
            own = traceable(self) if torch.compiler.is_compiling() else super().loss_function
            door = _door_of(self)
            if door is None or not neighbours.is_causal_lm_loss(own):
                return own
            return functools.partial(door.loss, self, own)

        loss_function = property(_loss_of, base.loss_function.fset)

    Patched.__name__, Patched.__qualname__, Patched.__module__ = base.__name__, base.__qualname__, base.__module__
    return Patched


def patch(
    model: _Model,
    *,
    token_accuracy: bool = False,
    token_metrics: bool = False,
    eval_logits: bool = True,
    logits_budget: int | None = None,
    gradient_filter: float | None = None,
) -> _Model:
    """Lets a causal language model of transformers compute its training loss without logits: docs/transformers.md.
    Returns ``model``. A second call replaces the options. Collectives: those of the model.

    Args:
        model: one whose ``get_output_embeddings()`` is, or contains, an ``nn.Linear`` and whose ``loss_function`` is
            transformers' ``ForCausalLMLoss``, also sharded, but not within another module other than PEFT's.
        token_accuracy: outputs with a fused loss get ``token_accuracy``, 0-dimensional fp32: the fraction of this
            call's counted tokens whose label has the largest logit. Tuples get none.
        token_metrics: outputs with a fused loss get, for each position's next token, ``predicted_ids``, the id of the
            largest logit, ``log_probs`` of the label and ``entropies`` in nats: ``[b, s]`` each, without gradients; -1
            and 0 where no label counts. Not with a ``gradient_filter``.
        eval_logits: False, or with metrics: in eval mode a loss makes no logits either.
        logits_budget, gradient_filter: as in :func:`parallel_lce.linear_cross_entropy`, but the default budget is the
            environment's, else 128 MiB.

    Raises ``ValueError``: another kind of model; metrics of a model whose ``forward`` was replaced, as by accelerate;
    as the fused functions, also in a forward. ``RuntimeError``: logits get a hook after the loss, or are used for the
    first time when the weight may have changed.
    """
    if token_metrics and gradient_filter is not None:
        raise ValueError(f"gradient_filter={gradient_filter} cannot be combined with token_metrics=True")
    LinearCrossEntropy(logits_budget=logits_budget, gradient_filter=gradient_filter)  # raises for invalid options
    owner: Any = _owner(model)
    name, layers, given = type(owner).__name__, _output_layers(owner), vars(owner).get("forward")
    if not layers:
        needed, given = "must be an nn.Linear, or hold one and have a weight", type(owner.get_output_embeddings())
        raise ValueError(f"the output layer of {name} {needed}, got a {given.__name__}")
    if (token_accuracy or token_metrics) and given is not None:
        raise ValueError(f"metrics need {name}.forward, which was replaced: patch the model before that")
    own, door = owner.loss_function, vars(owner).get(_DOOR)
    is_ours = door is not None and getattr(own, "func", None) == door.loss
    is_property = isinstance(type(owner).loss_function, property)
    if not (is_property and (is_ours or neighbours.is_causal_lm_loss(own))):
        found = getattr(own, "__qualname__", type(own).__name__) + ("" if is_property else " in place of a property")
        raise ValueError(f"the loss_function of {name} must be transformers' ForCausalLMLoss, got {found}")
    unpatch(model)
    kind = type(owner)
    eval_logits = eval_logits and not (token_accuracy or token_metrics)
    options = dict(logits_budget=logits_budget, gradient_filter=gradient_filter)
    door = _Door(name, token_accuracy, token_metrics, eval_logits, options)
    owner.__class__, vars(owner)[_DOOR] = _patched(kind), door
    for layer in layers:
        layer.__class__, vars(layer)[_DOOR] = fused_class(type(layer), Linear), door
    if neighbours.is_of(neighbours.LIGER, inspect.unwrap(given or kind.forward)):
        door.say("has Liger's forward, with a fused loss of its own")
    return model


def unpatch(model: _Model) -> _Model:
    """Undoes :func:`patch`, if it was called."""
    for module in _owner(model).modules():
        if vars(module).pop(_DOOR, None) is not None:
            unfuse(module)
    return model


def explain(model: nn.Module) -> str:
    """ "fused" after a fused loss; or why losses of ``model`` make logits, if it was said. Collectives: none."""
    door = vars(_owner(model)).get(_DOOR)
    if door is None:
        return "patch(model) was not called"
    fused = "fused" if door.ran else "no fused loss has run yet"
    return next(iter(door.reasons()), fused)


def _output_layers(model: Any) -> list[nn.Linear]:
    """The ``nn.Linear`` that is the model's output layer; or those in its wrapper whose weight has its weight's shape,
    as PEFT's."""
    layer = model.get_output_embeddings()
    if isinstance(layer, nn.Linear):
        return [layer]
    within = [m for m in layer.modules() if isinstance(m, nn.Linear)] if isinstance(layer, nn.Module) else []
    weight = getattr(layer, "weight", None)
    shapes = [getattr(getattr(each, "weight", None), "shape", None) for each in within]
    return [each for each, shape in zip(within, shapes) if weight is not None and shape == weight.shape]


def _owner(model: Any) -> Any:
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(type(owner), "loss_function") or not hasattr(owner, "get_output_embeddings"):
        raise ValueError(f"model must be a causal language model of transformers, got a {type(owner).__name__}")
    return owner
