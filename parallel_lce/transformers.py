"""The fused loss in Hugging Face transformers: ``patch(model)``.

In training, the model's output layer returns lazy logits, which record what the model's forward does to them: a scale,
a soft-cap, a cast. ``model.loss_function`` computes the loss from the hidden states and the weight. Any other use makes
the real logits. So there is no code for a single model. This module imports nothing of transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as _modules

from parallel_lce.core.budget import lean_budget
from parallel_lce.core.options import NO_LABEL, as_int64
from parallel_lce.functional import linear_cross_entropy, token_statistics
from parallel_lce.lazy_logits import RecordedLogits
from parallel_lce.modules import LinearCrossEntropy
from parallel_lce.run.transforms import transforming

_Model = TypeVar("_Model", bound=nn.Module)
_FSDP = ("torch.distributed.fsdp", "torch.distributed._composable")


class LogitsWarning(UserWarning):
    """In training a patched model made the logits, and computed its own loss."""


class _LazyLogits(RecordedLogits):
    """The logits ``[..., V]`` of ``layer``. ``origin``: the lazy logits that the layer returned, before all steps."""

    layer: _Head
    origin: _LazyLogits

    def __init__(self, layer: _Head, hidden: Tensor) -> None:
        # FSDP gathers a layer that is wrapped on its own only while the layer runs.
        weight, bias = (None, None) if isinstance(layer, FSDPModule) else (layer.weight, layer.bias)
        trainable = any([p is not None and p.requires_grad for p in layer._parameters.values()])
        self._capture(layer, hidden, weight, bias, trainable, steps=(), origin=self)

    def reason(self, vocab_size: int) -> str | None:
        """Why the loss needs real logits; None if it does not."""
        layer, weight = self.layer, self.layer.weight
        hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
        hooks = [hook for hook in hooks if not (getattr(hook, "__module__", None) or "").startswith(_FSDP)]
        hooks += [*layer._backward_hooks.values(), *layer._backward_pre_hooks.values()]
        if self.made is not None or self.epilogue() is None:
            return f"its forward computes {[name for name, _ in self.steps]}"
        if vocab_size != layer.out_features:
            return f"its loss has {vocab_size} entries, its output layer {layer.out_features}"
        if "forward" in vars(layer) and not layer.is_sharded_by_plan():
            return "the forward of its output layer was replaced"
        if hooks or _modules._global_forward_hooks or _modules._global_forward_pre_hooks:
            return "its output layer has hooks"
        plain = isinstance(weight, DTensor) or type(weight) in (Tensor, nn.Parameter)
        return None if plain else f"the weight of its output layer is a {type(weight).__name__}"

    def check(self) -> None:
        super().check()
        weight, lost = self.weight, self.origin.has_loss
        if weight is not None:
            has_storage = type(weight) is not DTensor and not transforming()
            freed = has_storage and weight.numel() > 0 and weight.untyped_storage().size() == 0
            lost = freed or self.layer._parameters.get("weight", weight) is not weight
        if lost and self.made is None:
            after = "after FSDP has taken back the output layer's weight: read output.logits in eval mode"
            raise RuntimeError(f"parallel_lce: the logits of this forward are wanted {after}")

    def _warn(self, use: str) -> None:
        self.layer.logits_made_by = use

    def _stock(self) -> Tensor:
        return nn.Module.__call__(self.layer, self.hidden)

    def _empty(self) -> Tensor:
        dtype = torch.float32 if ("to", (torch.float32,)) in self.steps else self.autocast_dtype
        one = self.hidden.new_empty((), dtype=dtype or self.hidden.dtype)
        return one.expand(*self.hidden.shape[:-1], self.layer.out_features)


class _Head(nn.Linear):
    """An output layer that returns lazy logits. ``lazy`` says when: in "training", "always" or "never"."""

    lazy = "never"
    logits_made_by: str | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        wanted = self.lazy == "always" or (self.lazy == "training" and self.training)
        # A replica of DataParallel returns its logits to another thread.
        if not wanted or len(arguments) != 1 or options or getattr(self, "_is_replica", False):
            return super().__call__(*arguments, **options)
        return _lazy(self, arguments[0])

    def through_hooks(self, forward: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """``forward(hidden)`` instead of the layer's own, between its hooks."""
        before = vars(self).get("forward")
        vars(self)["forward"] = forward
        try:
            return super().__call__(hidden)
        finally:
            del self.forward
            vars(self).update({} if before is None else {"forward": before})

    def is_sharded_by_plan(self) -> bool:
        """Whether transformers' tensor parallelism has replaced the layer's forward by one that gathers the logits."""
        return ".install_forward.<locals>." in getattr(vars(self).get("forward"), "__qualname__", "")


@torch.compiler.disable(reason="lazy logits are Python objects")
def _lazy(layer: _Head, hidden: Tensor) -> _LazyLogits:
    layer.logits_made_by = None
    return _LazyLogits(layer, hidden)


class _Loss:
    """``model.loss_function``. Lazy logits get the fused loss, other logits the model's own loss, ``own``."""

    def __init__(self, own: Callable[..., Tensor], token_accuracy: bool, options: dict[str, Any]) -> None:
        self.own, self.token_accuracy, self.options = own, token_accuracy, options
        # By thread, since DataParallel's replicas share this object; for _finish: the accuracy, and why real logits.
        self.found: dict[int, tuple[Tensor | None, str | None]] = {}
        self.said: set[str] = set()

    @torch.compiler.disable(reason="lazy logits are Python objects")
    def __call__(self, logits: Any, labels: Any, vocab_size: int, *rest: Any, **given: Any) -> Tensor:
        """As transformers' ``ForCausalLMLoss``."""
        given.update(zip(("num_items_in_batch", "ignore_index", "shift_labels"), rest))
        ignore, target = given.get("ignore_index", -100), given.get("shift_labels")
        if target is None:
            target = nn.functional.pad(as_int64(labels), (0, 1), value=ignore)[..., 1:]
        target = as_int64(target)
        lazy, accuracy = isinstance(logits, _LazyLogits), None
        reason = logits.reason(vocab_size) if lazy else "its loss gets no lazy logits"
        if reason is None:
            loss, accuracy = self._fused(logits, target, given.get("num_items_in_batch"), ignore)
        else:
            logits = logits.materialize("the loss") if lazy else logits
            loss = self.own(logits, labels, vocab_size, **given)
            if self.token_accuracy:
                top = logits.detach().argmax(-1)
                accuracy = _accuracy(top, target.to(top.device).view(top.shape), ignore)
        self.found[threading.get_ident()] = accuracy, reason
        return loss

    def _fused(self, logits: _LazyLogits, target: Tensor, items: Any, ignore: int) -> tuple[Tensor, Tensor | None]:
        logits.check()
        layer, hidden = logits.layer, logits.hidden
        arguments = {**self.options, **(logits.epilogue() or {})}
        arguments["logits_budget"] = lean_budget(arguments["logits_budget"])
        target, tokens = target.to(hidden.device), hidden.shape[:-1]
        target = target.reshape(tokens) if target.numel() == tokens.numel() else target
        top, by_plan = [], layer.is_sharded_by_plan()

        def forward(hidden: Tensor) -> tuple[Tensor]:
            """Runs in place of the layer's own forward, between FSDP's hooks. Returns a tuple, where the hooks look for
            tensors."""
            weight, arguments["linear_bias"] = layer.weight, layer.bias
            if by_plan and isinstance(weight, DTensor) and weight.device_mesh.ndim == 1:
                arguments["process_group"] = weight.device_mesh  # its dimension may have no name
            if not self.token_accuracy:
                arguments.update(reduction="mean" if items is None else "sum", ignore_index=ignore)
                return (_whole(linear_cross_entropy(hidden, weight, target, **arguments)),)
            counted = target != ignore
            labels = target.masked_fill(~counted, NO_LABEL)
            found = token_statistics(hidden, weight, labels, argmax=True, **arguments)
            assert found.target_log_prob is not None and found.argmax is not None
            top.append(_whole(found.argmax))
            total = -_whole(found.target_log_prob).sum()
            return (total / counted.sum().clamp(min=1) if items is None else total,)

        with torch.set_grad_enabled(logits.grad_enabled and torch.is_grad_enabled()), logits.autocast():
            (loss,) = layer.through_hooks(forward, hidden) if isinstance(layer, FSDPModule) else forward(hidden)
        logits.has_loss = logits.origin.has_loss = True
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        return loss, _accuracy(top[0], target, ignore) if top else None


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _accuracy(top: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    counted = target != ignore_index
    return ((top == target) & counted).sum() / counted.sum().clamp(min=1)


@functools.cache
def _with_accuracy(kind: type) -> type:
    """The output's class with the field ``token_accuracy``. DDP copies outputs field by field: it must be one."""
    field = ("token_accuracy", Any, dataclasses.field(default=None))
    return dataclasses.make_dataclass(kind.__name__, [field], bases=(kind,)) if dataclasses.is_dataclass(kind) else kind


@torch.compiler.disable(reason="lazy logits are Python objects")
def _finish(model: Any, arguments: tuple, output: Any) -> Any:
    """A forward hook: no lazy logits leave a forward without a fused loss. Puts the accuracy into the output."""
    loss, layer = model.loss_function, model.get_output_embeddings()
    found = loss.found.pop(threading.get_ident(), None) if isinstance(loss, _Loss) else (None, None)
    use = getattr(layer, "logits_made_by", None)
    if found is None:  # the loss function was not called
        own = use is not None and isinstance(output, dict) and output.get("loss") is not None
        found = None, "it has a loss of its own" if own else None
    accuracy, reason = found
    if reason is not None and model.training and torch.is_grad_enabled():
        if not isinstance(layer, _Head):
            reason = "its output layer was replaced after patch()"
        elif use not in (None, "the loss"):
            reason = f"its forward makes them by {use}"
        if reason not in loss.said:
            loss.said.add(reason)
            message = f"parallel_lce: {type(model).__name__} computes its own loss, of all logits: {reason}"
            warnings.warn(message, LogitsWarning, stacklevel=3)

    def real(value: Any) -> Any:
        unused = isinstance(value, _LazyLogits) and not value.origin.has_loss
        return value.materialize("a forward without a fused loss") if unused else value

    if isinstance(output, dict):
        for name in [name for name, value in output.items() if isinstance(value, _LazyLogits)]:
            output[name] = real(output[name])
        if accuracy is not None and output.get("loss") is not None:
            return _with_accuracy(type(output))(**output, token_accuracy=accuracy)
    return tuple(real(value) for value in output) if type(output) is tuple else output


def patch(
    model: _Model,
    *,
    token_accuracy: bool = False,
    eval_logits: bool = True,
    logits_budget: int | None = None,
    gradient_filter: float | None = None,
) -> _Model:
    """Lets a causal language model of transformers compute its training loss without logits.

    With labels, in training mode, the loss is :func:`parallel_lce.linear_cross_entropy` of the hidden states ``[b, s,
    D]`` that the output layer gets, with its bias and the model's scale and soft-cap: 0-dimensional, fp32 (fp64 for
    fp64); 0, not NaN, if no label counts. ``labels [b, s]`` are shifted as by transformers; ``shift_labels``,
    ``num_items_in_batch`` and ``ignore_index`` mean the same. ``output.logits`` are made when they are used. Without
    labels, and in eval mode, the model is as before. Where the fused loss might not be the same, the model's own loss
    stays, with a :class:`LogitsWarning` in training: if the model's forward does anything else to the logits, or the
    output layer has hooks, a replaced forward or a quantized weight.

    Args:
        model: one whose ``get_output_embeddings()`` is an ``nn.Linear`` and whose ``loss_function`` is
            ``ForCausalLMLoss``, before or after it is sharded, but not wrapped in another module. Of PEFT's models the
            base model is patched. Its parameters, state dict and ``forward`` stay. A second call replaces the options.
        token_accuracy: the output of a forward with labels gets ``token_accuracy``, 0-dimensional fp32: the fraction of
            this call's counted tokens whose label has the largest logit. Tuples get none.
        eval_logits: False: in eval mode a loss makes no logits either, and ``output.logits`` are no tensor until they
            are used. For evaluation of the loss alone.
        logits_budget: as in :func:`parallel_lce.linear_cross_entropy`, but by default the environment's, else 128 MiB.
            A larger one makes the loss faster, and the peak of a step higher.
        gradient_filter: as in :func:`parallel_lce.linear_cross_entropy`.

    Returns ``model``. Collectives: FSDP's as before; under a tensor-parallel plan those of the fused function,
    :func:`parallel_lce.linear_cross_entropy` or with ``token_accuracy`` :func:`parallel_lce.token_statistics`, instead
    of the gather of the logits.

    Raises:
        ValueError: another kind of model, or an option that the fused functions refuse; in a forward, as these do.
        RuntimeError: ``output.logits`` are used after FSDP or the optimizer has changed the weight.
    """
    owner: Any = _owner(model)
    options = dict(logits_budget=logits_budget, gradient_filter=gradient_filter)
    LinearCrossEntropy(logits_budget=logits_budget, gradient_filter=gradient_filter)  # raises for invalid options
    layer: Any = owner.get_output_embeddings()
    own, name, kind = owner.loss_function, type(owner).__name__, type(layer)
    own = own.own if isinstance(own, _Loss) else own  # patched before
    if getattr(own, "__name__", None) != "ForCausalLMLoss":
        raise ValueError(f"the loss_function of {name} must be ForCausalLMLoss, got {own!r}")
    if not issubclass(kind, nn.Linear) or kind.forward is not nn.Linear.forward:
        raise ValueError(f"the output layer of {name} must be an nn.Linear, got {kind}")
    if not issubclass(kind, _Head):
        layer.__class__ = _Head if kind is nn.Linear else type(kind.__name__, (_Head, kind), {})  # fully_shard's
    layer.lazy = "training" if eval_logits else "always"
    owner.loss_function = _Loss(own, token_accuracy, options)
    if _finish not in owner._forward_hooks.values():
        owner.register_forward_hook(_finish)
    return model


def unpatch(model: _Model) -> _Model:
    """Undoes :func:`patch`, if it was called."""
    owner: Any = _owner(model)
    owner.loss_function = getattr(owner.loss_function, "own", owner.loss_function)
    for key in [key for key, hook in owner._forward_hooks.items() if hook is _finish]:
        del owner._forward_hooks[key]
    if isinstance(layer := owner.get_output_embeddings(), _Head):
        layer.lazy = "never"
    return model


def _owner(model: Any) -> Any:
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(type(owner), "loss_function") or not hasattr(owner, "get_output_embeddings"):
        raise ValueError(f"model must be a causal language model of transformers, got a {type(owner).__name__}")
    return owner
