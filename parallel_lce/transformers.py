"""The fused loss in Hugging Face transformers: ``patch(model)``.

A patched model's class has a forward around its own. Where a call wants the loss without logits, the output layer
returns lazy logits during that call, which record what the model's forward does to them: a scale, a soft-cap, a cast.
``model.loss_function`` computes the loss from the hidden states and the weight. Any other use makes the real logits.
Where something might make another number of it, the call runs as without the patch, and says why. So there is no code
for a single model. This module imports nothing of transformers.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallel_lce import gathered
from parallel_lce.core.budget import lean_budget
from parallel_lce.core.options import NO_LABEL, as_int64
from parallel_lce.core.private import (
    FSDP_MODULES,
    DeviceContext,
    fsdp_output_dtype,
    function_modes,
    in_forward_mode,
    linear,
    module_calls,
    must_be_one_graph,
    parameters_of,
    submodules_of,
    transforming,
)
from parallel_lce.functional import linear_cross_entropy, token_statistics
from parallel_lce.lazy_logits import LogitsTensor, RecordedLogits, watch_optimizers
from parallel_lce.modules import LinearCrossEntropy
from parallel_lce.output_metrics import Found, labels_of_caller, with_fields
from parallel_lce.patching import is_own, named_as
from parallel_lce.run.token_count import TokenCount, count_labels, count_of_labels

_Model = TypeVar("_Model", bound=nn.Module)
# Attributes of a patched model: its _Door, and within a call its loss.
_DOOR, _LOSS = "_parallel_lce", "_parallel_lce_loss"


class LogitsWarning(UserWarning):
    """A patched model made logits that it was to do without."""


class _LazyLogits(RecordedLogits):
    """The logits ``[..., V]`` of ``layer`` in ``call``. All that steps have made of them share ``origin``: whether they
    have a fused loss; and its place in the graph, which outlives its tensor, with the model's own loss of real logits.
    """

    call: _Call
    origin: SimpleNamespace

    def __init__(self, call: _Call, layer: nn.Linear, hidden: Tensor) -> None:
        # A unit's weight is whole only while the unit runs.
        weight, bias = (layer.weight, layer.bias) if call.unit is None else (None, None)
        trainable = any([p.requires_grad for p in call.head.parameters()])
        self._capture(
            layer, hidden, weight, bias, trainable, steps=(), origin=SimpleNamespace(has_loss=False), call=call
        )
        self.watch.weight = own = gathered.weight_of(layer)
        entries = own.shape[0] if call.unit is None else layer.out_features
        vars(self).update(vocabulary=entries, kind=(own.dtype, own.device))

    def check(self) -> None:
        super().check()
        if self.made is None and (change := self._change_of_weight()):
            remedy = "use output.logits before, evaluate in eval mode, or call unpatch(model)"
            raise RuntimeError(f"parallel_lce: the logits of this forward are wanted after {change}: {remedy}")

    def _change_of_weight(self) -> str | None:
        """What has happened to the weight since the layer's call."""
        weight, unit = self.weight, self.call.unit
        owner = "ZeRO-3" if gathered.is_partitioned(self.layer) else "FSDP"
        taken = f"{owner} has taken back the output layer's weight"
        if weight is None:  # FSDP2's may stay whole until the backward
            weight = self.layer.weight if self.origin.has_loss and isinstance(unit, FSDPModule) else None
            if self.origin.has_loss and type(weight) in (DTensor, type(None)):
                return taken
        elif (weight.dtype, weight.device) != self.kind:
            return f"the output layer's weight became {weight.dtype} on {weight.device}"
        elif type(weight) is DTensor:
            replaced = parameters_of(self.layer).get("weight", weight) is not weight
            return "the output layer got another weight" if replaced else None
        if weight is None or transforming() or weight.numel() == 0:
            return None
        return taken if weight.untyped_storage().size() == 0 else None

    def _check_function(self) -> None:
        if not self.operands():  # else their tensor has a place in the graph
            super()._check_function()

    def _warn(self, use: str) -> None:
        if self.origin.has_loss:
            said = (
                f"makes the logits beside its fused loss, since {use} of output.logits wants them: take patch(model, "
                "token_metrics=True) for metrics, token_statistics of the hidden states, or unpatch(model)"
            )
            self.call.door.say(self.call.model, said, key="beside")
        elif self.call.made_by is None:
            self.call.made_by = use

    def _stock(self) -> Tensor:
        layer = self.layer
        if self.weight is None and self.origin.has_loss:  # FSDP2's hooks, which cast, run within the forward alone
            logits = nn.functional.linear(self.hidden.to(layer.weight.dtype), layer.weight, layer.bias)
            return logits.to(fsdp_output_dtype(self.call.head) or logits.dtype)
        if self.weight is None or gathered.is_sharded_by_plan(self.layer):
            return nn.Module.__call__(self.call.head, self.hidden)
        return nn.functional.linear(self.hidden, self.weight, self.bias)

    def operands(self) -> tuple[Tensor, ...]:
        if self.weight is None or gathered.is_sharded_by_plan(self.layer):
            return ()
        return tuple(each for each in (self.hidden, self.weight, self.bias) if each is not None)

    def _empty(self) -> Tensor:
        casts = [arguments[0] for name, arguments in self.steps if name == "to"]
        cast = fsdp_output_dtype(self.call.head) if isinstance(self.call.unit, FSDPModule) else None
        one = self.hidden.new_empty((), dtype=[cast or self.autocast_dtype or self.hidden.dtype, *casts][-1])
        return one.expand(*self.hidden.shape[:-1], self.vocabulary)

    @torch.no_grad()
    def _largest(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
        """Waits for the device: a token with a NaN needs real logits."""
        epilogue = self.epilogue()
        if self.weight is None or epilogue is None or not self.is_over_vocabulary(*arguments, **options):
            return None
        self.check()
        with self.autocast():
            options = dict(linear_bias=self.layer.bias, argmax=True, **_options(self, epilogue))
            found = token_statistics(self.hidden, self.layer.weight, None, **options)
        position, top = _whole(found.argmax), _whole(found.max_logit)  # pyright: ignore[reportArgumentType]
        return None if (position < 0).any() else (top.to(self.dtype), position)

    def hook_after_loss(self, name: str, hook: Callable[..., Any] | None = None) -> None:
        """The loss has no logits in its graph: its own hook gets their gradient, of the model's own loss."""
        if (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith(FSDP_MODULES):
            vars(self)["hooks"] = (*self.hooks, hook)  # FSDP puts one on each output, and needs one of them
            return
        node, own = self.origin.loss
        real = self.materialize(repr(name))

        def gradient_of_loss(upstream: tuple[Tensor, ...]) -> None:
            logits = real.detach().requires_grad_()
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(own(logits), logits, upstream[0])
            if hook is None:
                real.grad = gradient if real.grad is None else real.grad + gradient
            elif hook(gradient) is not None:
                said = "a hook changes the gradient of logits after the loss, which was computed without them"
                raise RuntimeError(f"parallel_lce: {said}: call unpatch(model) before the forward")

        getattr(real, name)(*([] if hook is None else [hook]))
        node.register_prehook(gradient_of_loss)


class _Head(nn.Module):
    """An output layer, or its unit, within a call of its model that wants lazy logits."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) != 1 or options:
            return super().__call__(*arguments, **options)
        lazy = _lazy(self, arguments[0])
        return lazy if torch.compiler.is_compiling() else LogitsTensor.of(lazy)


@functools.cache
def _head_of(kind: type) -> type:
    return type(kind.__name__, (_Head, kind), {})


@torch.compiler.disable(reason="lazy logits are Python objects")
def _lazy(head: Any, hidden: Tensor) -> Any:
    call = getattr(_running, "call", None)
    if call is None or call.head is not head:
        return nn.Module.__call__(head, hidden)
    call.called, call.reason = True, call.reason or _reason_of_layer(call, head, hidden)
    return _LazyLogits(call, call.layer, hidden) if call.reason is None else nn.Module.__call__(head, hidden)


def _reason_of_layer(call: _Call, head: nn.Module, hidden: Tensor) -> str | None:
    """Why this call of the output layer, by ``head``, must make real logits; None if it need not."""
    layer, weight = call.layer, gathered.weight_of(call.layer)
    if "forward" in vars(layer) and not gathered.is_sharded_by_plan(layer):
        return "the forward of its output layer was replaced"
    if gathered.other_hooks(head):
        return "its output layer has hooks"
    calls = [is_own(each, nn.Module.__module__, name) for name, each in module_calls().items()]
    calls.append(is_own(nn.Linear.forward, nn.Linear.__module__, "Linear.forward"))
    function = nn.functional.linear
    if not all(calls) or not (function is linear or is_own(function, "deepspeed.runtime.zero.linear")):
        return "nn.Linear, or what that calls, was replaced"
    modes = [type(mode) for mode in function_modes()]
    if others := [kind.__name__ for kind in modes if kind is not DeviceContext]:
        return f"a mode of torch functions is active, {others[-1]}"
    if not (isinstance(weight, DTensor) or type(weight) in (Tensor, nn.Parameter)):
        return f"the weight of its output layer is a {type(weight).__name__}"
    columns = isinstance(weight, DTensor) and any(p.is_shard() and not p.is_shard(0) for p in weight.placements)
    if columns and call.unit is None:  # a unit gathers it
        return f"the weight of its output layer is sharded as {weight.placements}, not by entries of the vocabulary"
    if type(hidden) not in (Tensor, nn.Parameter, DTensor):
        return f"its output layer gets a {type(hidden).__name__}"
    return None


class _Loss:
    """``model.loss_function`` within a call. Lazy logits get the fused loss, other logits the model's own, ``own``."""

    def __init__(self, door: _Door, own: Callable[..., Tensor]) -> None:
        self.door, self.own = door, own

    @torch.compiler.disable(reason="lazy logits are Python objects")
    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        call, given = getattr(_running, "call", None), {**dict(zip(_LOSS_ARGUMENTS, arguments)), **named}
        if call is None:  # another thread's
            return self.own(*arguments, **named)
        call.asked, logits, ignore = True, given.pop("logits", None), given.get("ignore_index", -100)
        lazy: Any = getattr(logits, "lazy", logits)
        target, labels, loss, found = given.get("shift_labels"), given.get("labels"), None, None
        count = count_of_labels(labels if target is None else target, target is None) if ignore == NO_LABEL else None
        if target is None and isinstance(labels, Tensor) and labels.dim():
            target = nn.functional.pad(as_int64(labels), (0, 1), value=ignore)[..., 1:]
        target = as_int64(target)
        if isinstance(lazy, _LazyLogits):
            if lazy.made is None and lazy.epilogue() is None:
                call.reason = f"its forward computes {[name for name, _ in lazy.steps]}"
            elif lazy.made is None and given.get("vocab_size", lazy.vocabulary) != lazy.vocabulary:
                call.reason = f"its loss has {given['vocab_size']} entries, its output layer {lazy.vocabulary}"
            elif lazy.made is None:
                loss, found = self._fused(lazy, target, given.get("num_items_in_batch"), ignore, count)
                lazy.origin.loss = loss.grad_fn, lambda real: self.own(real, **given)
                call.fused = True
            if loss is None:
                logits = lazy.materialize("the loss")
                arguments, named = (logits,), given
        # Of several losses the output layer's has the metrics.
        if self.door.has_metrics and isinstance(target, Tensor) and (isinstance(lazy, _LazyLogits) or not call.metrics):
            if found is None and isinstance(logits, Tensor):
                found = Found.of_logits(logits.detach(), target, ignore, self.door.token_metrics)
            if found is not None and found.argmax.numel() == target.numel():
                target = target.to(found.argmax.device).view(found.argmax.shape)
                call.metrics = found.metrics(target, ignore, self.door.token_accuracy)
        return self.own(*arguments, **named) if loss is None else loss

    def _fused(
        self, logits: _LazyLogits, target: Tensor, items: Any, ignore: int, count: TokenCount | None, smoothing=0.0
    ) -> tuple[Tensor, Found | None]:
        """The loss and, for metrics, what was found of each token. ``count``: of the labels. ``smoothing`` of labels is
        for a loss without metrics."""
        logits.check()
        layer, hidden, door = logits.layer, logits.hidden, self.door
        with_metrics = door.has_metrics and not smoothing
        target, tokens = target.to(hidden.device), hidden.shape[:-1]
        target = target.reshape(tokens) if target.numel() == tokens.numel() else target
        results: list[Found] = []

        def forward(hidden: Tensor) -> tuple[Tensor]:
            arguments, counted = _options(logits, logits.epilogue() or {}), target != ignore
            weight, arguments["linear_bias"] = layer.weight, layer.bias
            if count is not None:
                arguments["counted_tokens"] = count
            if not with_metrics:
                arguments.update(reduction="mean" if items is None else "sum", ignore_index=ignore)
                arguments["label_smoothing"] = smoothing
                loss = _whole(linear_cross_entropy(hidden, weight, target, **arguments))
            else:
                labels = target.masked_fill(~counted, NO_LABEL)
                arguments["mask"] = counted if count is not None else None
                arguments.update(argmax=True, entropy=door.token_metrics)
                found = token_statistics(hidden, weight, labels, **arguments)
                assert found.target_log_prob is not None and found.argmax is not None
                log_prob = _whole(found.target_log_prob)
                entropy = None if found.entropy is None else _whole(found.entropy)
                results.append(Found(_whole(found.argmax), log_prob, entropy))
                total = -log_prob.sum()
                loss = total / counted.sum().clamp(min=1) if items is None else total
            # The mean of no tokens is NaN, as transformers'.
            return (loss if items is not None else loss.where(counted.any(), float("nan")),)

        with torch.set_grad_enabled(logits.grad_enabled and torch.is_grad_enabled()), logits.autocast():
            unit = logits.call.unit
            (loss,) = forward(hidden) if unit is None else gathered.called_with(layer, forward, hidden, unit)
        logits.has_loss = logits.origin.has_loss = True
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        return loss, results[0] if results else None


def _options(logits: _LazyLogits, epilogue: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the fused functions."""
    arguments, weight = {**logits.call.door.options, **epilogue}, gathered.weight_of(logits.layer)
    arguments["logits_budget"] = lean_budget(arguments["logits_budget"])
    if gathered.is_sharded_by_plan(logits.layer) and isinstance(weight, DTensor) and weight.device_mesh.ndim == 1:
        arguments["process_group"] = weight.device_mesh  # its dimension may have no name
    return arguments


class _Smoother:
    """In place of ``label_smoother`` of a transformers Trainer, ``own``, which smooths the labels of a patched model's
    logits: the fused loss of lazy ones, and what ``own`` gives for all others."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "own"), name)

    def __call__(self, output: Any, labels: Tensor, shift_labels: bool = False, **named: Any) -> Tensor:
        logits = output["logits"] if isinstance(output, dict) else output[0]
        lazy: Any = getattr(logits, "lazy", None)
        own, ids, reason = self.own, as_int64(labels), None

        def of(output: Any) -> Tensor:
            return own(output, labels, shift_labels=shift_labels, **named)

        if not isinstance(lazy, _LazyLogits):
            return of(output)
        if lazy.call.door.options["gradient_filter"] is not None:
            reason = "a gradient_filter takes no smoothed labels"
        elif lazy.made is not None:
            reason = f"{lazy.call.made_by} comes before the loss"
        if reason is not None:
            lazy.call.door.say(lazy.call.model, f"has a smoothed loss of all logits: {reason}", key="smoothed")
        if reason is not None or lazy.epilogue() is None:
            return of(output)
        count = count_of_labels(labels, True) if shift_labels and own.ignore_index == NO_LABEL else None
        target = nn.functional.pad(ids, (0, 1), value=own.ignore_index)[..., 1:] if shift_labels else ids
        given = lazy, target, named.get("num_items_in_batch"), own.ignore_index, count, float(own.epsilon)
        loss, _ = _Loss(lazy.call.door, own)._fused(*given)
        lazy.origin.loss = loss.grad_fn, lambda real: of({"logits": real})
        return loss


_LOSS_ARGUMENTS = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Call:
    """One call of a patched model's forward, of ``door``, in which ``layer`` may return lazy logits."""

    def __init__(self, door: _Door, model: Any, layer: Any, wanted: bool, reason: str | None, unit: Any) -> None:
        self.door, self.model, self.layer, self.reason = door, model, layer, reason
        self.unit, self.head = unit, layer if unit is None else unit
        self.lazy = wanted and reason is None
        self.made_by: str | None = None
        self.metrics: dict[str, Tensor] = {}
        self.smoothed = False
        self.asked = self.fused = self.called = False

    @torch.compiler.disable(reason="lazy logits are Python objects")
    def finish(self, output: Any) -> Any:
        """Puts the metrics into the output. No lazy logits leave a forward without a fused loss, except to a Trainer's
        label smoother."""

        def left(value: Any) -> Any:
            lazy = value.lazy if type(value) is LogitsTensor else value
            if not isinstance(lazy, _LazyLogits):
                return value
            if not (lazy.origin.has_loss or (self.smoothed and lazy.epilogue() is not None)) or lazy.made is not None:
                return lazy.materialize("a forward without a fused loss")
            return value if value is not lazy else LogitsTensor.of(lazy)

        if isinstance(output, dict):
            for name, value in [*output.items()]:
                if (real := left(value)) is not value:
                    output[name] = real
        elif type(output) is tuple:
            output = tuple(left(value) for value in output)
        else:
            output = left(output)
        if not self.fused and (not self.model.training or torch.is_grad_enabled()):
            made = self.made_by if self.made_by != "the loss" else None
            # Without a loss of logits, as by TRL's fused head, nothing is to be said.
            asked = (
                self.asked
                or self.smoothed
                or (isinstance(output, dict) and None not in map(output.get, ("loss", "logits")))
            )
            reason = self.reason
            if reason is None and self.lazy and not self.called:
                reason = "its forward does not call its output layer"
            reason = (reason if asked else None) or (made and f"its forward makes them by {made}")
            if reason is not None:
                said = f"computes its own loss, of all logits: {reason}; undo that, or end this by unpatch(model)"
                self.door.say(self.model, said)
        if self.metrics and isinstance(output, dict) and output.get("loss") is not None:
            return with_fields(type(output), (*self.metrics,))(**output, **self.metrics)
        return output


_running, _lock = threading.local(), threading.Lock()


class _Door:
    """What :func:`patch` leaves in a model: its options, and what was said."""

    def __init__(self, token_accuracy: bool, token_metrics: bool, eval_logits: bool, options: dict[str, Any]) -> None:
        self.token_accuracy, self.token_metrics, self.eval_logits = token_accuracy, token_metrics, eval_logits
        self.options, self.has_metrics = options, token_accuracy or token_metrics
        self.said: set[str] = set()
        self.smooths, self.calls = False, 0  # whether a Trainer smooths labels; the calls that run
        self.path: list[str] = []  # names from the model to its output layer

    def say(self, model: Any, what: str, key: str | None = None) -> None:
        if (key or what) not in self.said:
            self.said.add(key or what)
            warnings.warn(f"parallel_lce: {type(model).__name__} {what}", LogitsWarning, stacklevel=3)

    def is_wanted(self, model: Any, arguments: tuple, named: dict[str, Any]) -> bool:
        """Whether this call of the model's forward may do without logits, or has metrics."""
        if not (model.training or not self.eval_logits or self.has_metrics):
            return False
        if _labels(model, arguments, named) is None and (
            torch.compiler.is_compiling()
            or not ((model.training and torch.is_grad_enabled()) or self.smooths)
            or not self._is_smoothed(model)
        ):
            return False
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return False
        if getattr(model, "_is_replica", False):  # it returns its logits to another thread
            self.say(model, "computes its own loss, of all logits, in a replica of DataParallel: take DDP to fuse it")
            return False
        return not (torch.compiler.is_dynamo_compiling() and _is_one_graph())

    def _is_smoothed(self, model: Any) -> bool:
        """Of a call without labels: whether its caller is a Trainer whose label smoother takes the logits with the
        labels. It gets ours. Else says, in training, that a caller keeps the labels for another loss."""
        if "labels" in self.said:
            return False
        labels, trainer = labels_of_caller(sys._getframe(2))
        if trainer is not None:
            own, self.smooths = getattr(trainer.label_smoother, "own", trainer.label_smoother), True
            trainer.label_smoother = _Smoother(own)
            _count(labels, None)
        elif labels is not None and model.training and torch.is_grad_enabled():
            said = (
                "is called without the labels that its caller has: all logits are made for another loss, as by "
                "compute_loss_func, a compute_loss of one's own, or Trainer's label_smoothing_factor under FSDP; "
                "take parallel_lce.linear_cross_entropy of the hidden states there, or give the model the labels"
            )
            self.say(model, said, key="labels")
        return trainer is not None

    @torch.compiler.disable(recursive=False, reason="lazy logits are Python objects")
    def run(self, model: Any, forward: Callable[..., Any], arguments: tuple, named: dict[str, Any]) -> Any:
        """The forward, with lazy logits where these are wanted and possible."""
        before, own = getattr(_running, "call", None), model.loss_function
        own = own.own if isinstance(own, _Loss) else own  # of another thread's call
        if before is not None and before.model is model:  # a forward around a forward
            return forward(*arguments, **named)
        layer, wanted = _output_layer(model), model.training or not self.eval_logits
        _count(labels := _labels(model, arguments, named), named.get("shift_labels"))
        reason, unit = self._reason(model, layer, own) if wanted else (None, None)
        call = _Call(self, model, layer, wanted, reason, unit)
        call.smoothed = labels is None
        with _lock:  # the model is changed for the time of this call, and of those of other threads
            self.calls += 1
            vars(model)[_LOSS] = _Loss(self, own)
            if call.lazy and not isinstance(head := call.head, _Head):
                head.__class__ = _head_of(type(head))
        _running.call = call
        try:
            output = forward(*arguments, **named)
        finally:
            _running.call = before
            with _lock:
                self.calls -= 1
                if self.calls == 0:
                    vars(model).pop(_LOSS, None)
                    if isinstance(head := call.head, _Head):
                        head.__class__ = type(head).__bases__[1]
        return call.finish(output)

    def _reason(self, model: Any, layer: Any, own: Any) -> tuple[str | None, nn.Module | None]:
        """Why a call must make real logits, as far as it is known before, None if it need not; and the unit that
        gathers the output layer's weight for the layer alone."""
        if not _is_stock(model, own):
            return f"its loss_function is {getattr(own, '__qualname__', own)}, or what that calls was replaced", None
        if not is_own(nn.functional.cross_entropy, "torch.nn.functional", "cross_entropy"):
            return "torch.nn.functional.cross_entropy, which its loss calls, was replaced", None
        if layer is None:
            return "its output layer is no nn.Linear", None
        if gathered.is_computed(layer):
            return "the weight or bias of its output layer is parametrized", None
        if getattr(parameters_of(layer).get("weight"), "is_meta", False):
            return "its output layer is on the meta device", None
        if transforming() or in_forward_mode():
            return "a transform of torch.func or forward-mode differentiation runs", None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return gathered.unit_of(layer, self._around(model, layer))
        return None, None

    def _around(self, model: nn.Module, layer: nn.Module) -> list[nn.Module]:
        for _ in range(2):  # by the path of the last call, or anew
            modules: list[Any] = [model]
            for name in self.path:
                modules.append(submodules_of(modules[-1]).get(name) if modules[-1] is not None else None)
            if modules[-1] is layer:
                return modules[1:-1]
            self.path = next((name for name, module in model.named_modules() if module is layer), "").split(".")
        return []


def _labels(model: Any, arguments: tuple, named: dict[str, Any]) -> Any:
    """Among the arguments of a model's forward."""
    place = type(model)._parallel_lce_place
    return arguments[place] if 0 <= place < len(arguments) else named.get("labels")


def _count(labels: Any, shifted: Any) -> None:
    """Starts to count the labels that the loss will count, which are not -100."""
    if isinstance(shifted, Tensor):
        count_labels(shifted)
    elif isinstance(labels, Tensor) and labels.dim():
        count_labels(labels, shifted=True)


@torch.compiler.assume_constant_result
def _is_one_graph() -> bool:
    """Within Dynamo: whether it must not break the graph. Says so, since the traced forward cannot."""
    if found := must_be_one_graph():
        said = "a model compiled with fullgraph=True computes its own loss, of all logits: leave it at False to fuse it"
        warnings.warn(f"parallel_lce: {said}", LogitsWarning, stacklevel=2)
    return found


PACKAGES = {"transformers"}


def _is_stock(model: Any, loss: Any) -> bool:
    """Whether ``loss`` is transformers' own loss, all of it: neither another function of its name nor one that calls
    what somebody has replaced."""
    kinds = [vars(kind) for kind in type(model).__mro__ if "loss_function" in vars(kind)]
    owner = next(own["loss_function"] for own in kinds if "_parallel_lce_base" not in own)
    names, property_names = (getattr(each, "__globals__", {}) for each in (loss, getattr(owner, "fget", None)))
    packages = {each.get("__name__", "").partition(".")[0] for each in (names, property_names)}
    own = getattr(loss, "__name__", None) == "ForCausalLMLoss" and len(packages) == 1 and packages <= PACKAGES
    helper = names.get("fixed_cross_entropy", loss)
    return own and getattr(helper, "__globals__", None) is names


def _output_layer(model: Any) -> Any:
    """The ``nn.Linear`` that is, or within a wrapper gives its weight to, the model's output layer; or None."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        modules = [m for m in layer.modules() if isinstance(m, nn.Linear)] if isinstance(layer, nn.Module) else []
        computed = [m for m in modules if gathered.is_computed(m)]
        weight = None if computed else getattr(layer, "weight", None)
        layer = next((m for m in modules if m in computed or (weight is not None and m.weight is weight)), None)
    return layer if layer is not None and type(layer).forward is nn.Linear.forward else None


def _forward(model: nn.Module, own: Callable[..., Any], arguments: tuple, named: dict[str, Any]) -> Any:
    door = model.__dict__.get(_DOOR)
    if door is None or not door.is_wanted(model, arguments, named):
        return own(*arguments, **named)
    return door.run(model, own, arguments, named)


@functools.cache
def _patched(base: type) -> type:
    """A subclass of a model's class, of the same name. Without :func:`patch` its objects are those of ``base``."""
    own = base.loss_function
    get = own.fget  # by a name that Dynamo can trace

    class Patched(base):
        _parallel_lce_base = base
        _parallel_lce_place = [*inspect.signature(base.forward).parameters, "labels"].index("labels") - 1

        @functools.partial(named_as, base.forward)
        def forward(self, *arguments, **named):
            return _forward(self, functools.partial(base.forward, self), arguments, named)

        @property
        def loss_function(self):
            loss = self.__dict__.get(_LOSS)
            if loss is None and base.loss_function is not own:  # which a program has replaced since
                return super().loss_function
            return get(self) if loss is None else loss

        @loss_function.setter
        def loss_function(self, value):
            base.loss_function.__set__(self, value)

        def __reduce_ex__(self, protocol):
            make, (kind, *rest), *state = super().__reduce_ex__(protocol)
            return (_made, (make, base, *rest), *state) if kind is Patched else (make, (kind, *rest), *state)

    Patched.__name__, Patched.__qualname__, Patched.__module__ = base.__name__, base.__qualname__, base.__module__
    return Patched


def _made(make: Callable[..., Any], base: type, *rest: Any) -> Any:
    """For copies and pickles."""
    watch_optimizers()  # of another process
    return make(_patched(base), *rest)


def patch(
    model: _Model,
    *,
    token_accuracy: bool = False,
    token_metrics: bool = False,
    eval_logits: bool = True,
    logits_budget: int | None = None,
    gradient_filter: float | None = None,
) -> _Model:
    """Lets a causal language model of transformers compute its training loss without logits.

    With labels, in training mode, the loss is :func:`parallel_lce.linear_cross_entropy` of the hidden states ``[b, s,
    D]`` that the output layer gets, with its bias and the model's scale and soft-cap: 0-dimensional, fp32 (fp64 for
    fp64); NaN, as transformers', if no label counts. ``labels [b, s]``, ``shift_labels``, ``num_items_in_batch`` and
    ``ignore_index`` mean the same. ``output.logits`` are a tensor, made at its first use, with a
    :class:`LogitsWarning`. Without labels, and in eval mode, the model is as before. Where the fused loss might not be
    the model's own, that runs, and a :class:`LogitsWarning` says why, once.

    Args:
        model: one whose ``get_output_embeddings()`` is, or contains, an ``nn.Linear`` and whose ``loss_function`` is
            transformers' ``ForCausalLMLoss``, before or after it is sharded, but not wrapped in another module. Of
            PEFT's models the base model is patched. Its class gets a subclass of the same name; parameters, modules and
            state dict stay. A second call replaces the options.
        token_accuracy: the output of a forward with labels gets ``token_accuracy``, 0-dimensional fp32: the fraction of
            this call's counted tokens whose label has the largest logit. Tuples get none.
        token_metrics: the output of a forward with labels gets, for each position's next token, ``predicted_ids``, the
            id of the largest logit, ``log_probs`` of the label and ``entropies`` in nats: ``[b, s]`` each, without
            gradients; -1 and 0 where no label counts. Not with a ``gradient_filter``.
        eval_logits: False: in eval mode a loss makes no logits either, unless ``output.logits`` are used for more than
            ``argmax(-1)``.
        logits_budget, gradient_filter: as in :func:`parallel_lce.linear_cross_entropy`, but the default budget is the
            environment's, else 128 MiB. A larger one makes the loss faster, and the peak of a step higher.

    Returns ``model``. Collectives: FSDP's as before; under a tensor-parallel plan those of the fused function,
    :func:`parallel_lce.linear_cross_entropy` or with ``token_accuracy`` :func:`parallel_lce.token_statistics`, instead
    of the gather of the logits.

    Raises:
        ValueError: another kind of model, or an option that the fused functions refuse; in a forward, as these do.
        RuntimeError: ``output.logits`` are used for the first time after FSDP has taken back the weight, or after an
            optimizer's step that may have changed it, or a write that raises its version; or a hook changes their
            gradient after the loss. A write through ``weight.data`` outside of ``torch.optim.Optimizer`` is not seen.
    """
    owner: Any = _owner(model)
    options = dict(logits_budget=logits_budget, gradient_filter=gradient_filter)
    if token_metrics and gradient_filter is not None:
        raise ValueError(f"gradient_filter={gradient_filter} cannot be combined with token_metrics=True")
    LinearCrossEntropy(logits_budget=logits_budget, gradient_filter=gradient_filter)  # raises for invalid options
    own, name, layer = owner.loss_function, type(owner).__name__, owner.get_output_embeddings()
    if not _is_stock(owner, own):
        raise ValueError(f"the loss_function of {name} must be transformers' ForCausalLMLoss, got {own!r}")
    if not any(isinstance(module, nn.Linear) for module in (layer.modules() if isinstance(layer, nn.Module) else ())):
        raise ValueError(f"the output layer of {name} must be an nn.Linear, got {type(layer)}")
    watch_optimizers()
    unpatch(model)
    owner.__class__ = _patched(type(owner))
    vars(owner)[_DOOR] = _Door(token_accuracy, token_metrics, eval_logits, options)
    if (given := vars(owner).get("forward")) is not None:  # which may not call the class's forward
        vars(owner)["forward"] = named_as(given, functools.partial(_instance_forward, owner, given))
        owner.forward.__wrapped__ = type(owner).forward  # what is left without wrappers
    return model


def _instance_forward(model: nn.Module, own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """In a ``partial``, whose copy in a copy of the model has that model."""
    return _forward(model, own, arguments, named)


def unpatch(model: _Model) -> _Model:
    """Undoes :func:`patch`, if it was called."""
    owner: Any = _owner(model)
    vars(owner).pop(_DOOR, None)
    forward = vars(owner).get("forward")
    if isinstance(forward, functools.partial) and forward.func is _instance_forward:  # else it is in another's
        vars(owner)["forward"] = forward.args[1]
    if "_parallel_lce_base" in vars(type(owner)):  # else fully_shard's class is around it, which then does nothing
        owner.__class__ = type(owner)._parallel_lce_base
    return model


def _owner(model: Any) -> Any:
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(type(owner), "loss_function") or not hasattr(owner, "get_output_embeddings"):
        raise ValueError(f"model must be a causal language model of transformers, got a {type(owner).__name__}")
    return owner
