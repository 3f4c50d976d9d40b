"""Makes Megatron's output layers return lazy logits, and computes the loss and the statistics of lazy logits."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parallel_lce.call.checks import dispatches
from parallel_lce.core.budget import default_budget, lean_budget
from parallel_lce.core.grad_buffers import MainGrad, within
from parallel_lce.core.options import NO_LABEL, Options, Tensors, as_int64, split_per_token
from parallel_lce.core.private import accumulates, backward_id, has_hooks, hooks, parameters_of, pytree, submodules_of
from parallel_lce.gathered import called_with, is_gathering
from parallel_lce.lazy_logits import LogitsTensor
from parallel_lce.megatron import settings
from parallel_lce.megatron.lazy_logits import LazyLogits, are_asked_for, keep_autograd_gradient, warn_of_logits
from parallel_lce.megatron.losses import Terms
from parallel_lce.megatron.own_code import is_megatrons, mixin_on_the_way, replaced_on_the_way
from parallel_lce.patching import replaced
from parallel_lce.run.compaction import counted_loss, counted_statistics
from parallel_lce.run.entry import fused_loss, fused_statistics, fused_token_loss
from parallel_lce.run.statistics import TokenStatistics
from parallel_lce.run.token_count import TokenCount, count_of_labels
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

# Whose computation the fused loss replaces. LinearCrossEntropyModule is in Megatron's development branch.
_FORWARDS = ("ColumnParallelLinear.forward", "LinearCrossEntropyModule.forward")
_AUTOGRAD = ("LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight")
_FUNCTIONS = "linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"


def make_lazy(layer: torch.nn.Module) -> None:
    """Make an output layer return lazy logits wherever its call does nothing else than what the fused loss does."""
    if not hasattr(layer, "returns_lazy_logits"):
        layer.__class__ = _lazy_class(type(layer))


@contextmanager
def without_logits(layer: torch.nn.Module, function: str) -> Iterator[None]:
    """A context in which an output layer returns lazy logits. A use that would make real logits raises an error that
    names ``function``.

    Raises:
        ValueError: each call of the layer would make real logits. (Other reasons are those of a call: FSDP may make the
            weight whole until then.)
    """
    stock = type(layer)
    reason = of_another_kind(layer) or _unsupported(layer, getattr(stock, "stock", stock))
    if reason is not None:
        raise ValueError(f"{function} makes no logits: {reason}")
    with replaced(layer, logits_refused_by=function):
        make_lazy(layer)
        try:
            yield
        finally:
            layer.__class__ = stock


def of_another_kind(layer: object) -> str | None:
    """Why this output layer cannot return lazy logits, with a remedy; None if it can."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if not isinstance(layer, ColumnParallelLinear):
        return f"the output layer is a {type(layer).__name__}; use Megatron's ColumnParallelLinear, without an adapter"
    return "the output layer's forward was replaced; leave Megatron's in place" if "forward" in vars(layer) else None


@functools.cache
def _lazy_class(base: type) -> type:
    """A subclass of an output layer's class, with the same name, parameters, state-dict keys and sharded-state-dict
    keys. Its forward returns lazy logits."""

    class Lazy(base):
        returns_lazy_logits = True
        stock = base

        @torch.compiler.disable(reason="lazy logits are Python objects")
        def __call__(self, *given, **named):
            """Of a unit of FSDP2 of its own lazy logits, before its hooks, which run with the loss. Whoever asks for
            logits gets real ones, since these could be made later by some ranks alone."""
            own = parameters_of(self).get("weight")
            if isinstance(self, FSDPModule) and own is not None and not (_as_stock(self) or _unsupported(self, base)):
                call = _Call(*given, **named)
                wanted = call.weight is not None or call.output_cross_entropy_loss or are_asked_for()
                if not wanted and _why_logits(self, own, True, unit=True) is None:
                    return self._lazy(call, unit=True), None
            return super().__call__(*given, **named)

        @torch.compiler.disable(reason="lazy logits are Python objects")
        def forward(self, *given, **named):
            """Lazy logits ``[s, b, V/P]`` and no bias; what the stock layer returns where these cannot take its place.

            With ``output_cross_entropy_loss`` (Megatron's development branch) the losses of ``labels [b, s]``, 0 where
            they are ``ignore_index``. ``reduction="sum"`` adds them up on this rank; ``"mean"``, as Megatron's kernel,
            divides it by the number of tokens that are not ignored, and is NaN without such tokens.
            """
            if _as_stock(self):
                return base.forward(self, *given, **named)
            passed = named.get("weight", given[1] if len(given) > 1 else None)
            unsupported = _unsupported(self, base)
            # Parametrizations, which are unsupported, may compute another weight each time.
            own = self.weight if unsupported is None else parameters_of(self).get("weight")
            used = own if passed is None else passed
            if (reason := unsupported or _why_logits(self, used, passed is None)) is not None:
                warn_of_logits(self, reason)
                keep_autograd_gradient(used)
            if unsupported:
                return base.forward(self, *given, **named)
            call = _Call(*given, **named)
            labels = _swapped(as_int64(call.labels)) if call.output_cross_entropy_loss else None
            if reason is not None:
                gather = call.runtime_gather_output if labels is None else False
                logits, bias = base.forward(self, call.input_, weight=passed, runtime_gather_output=gather)
                if labels is None:
                    return logits, bias
                logits = logits if bias is None else logits + bias
                losses = vocab_parallel_cross_entropy(logits, labels, tp_group=self.tp_group)
                return call.reduced(losses.masked_fill(labels == call.ignore_index, 0.0), labels)
            expected = [self.output_size_per_partition, self.input_size]
            if used is None or list(used.shape) != expected:
                shape = "no weight of its own and none" if used is None else list(used.shape)
                raise ValueError(f"the output layer needs a weight {expected}, got {shape}")
            logits = self._lazy(call)
            if labels is None:
                # A mixin of the layer may record its soft-cap, or handle a tensor.
                return LogitsTensor.of(logits) if mixin_on_the_way(sys._getframe(1), self) else logits, None
            count = count_of_labels(call.labels) if call.ignore_index == NO_LABEL else None
            return call.reduced(losses_of_lazy(logits, labels, call.ignore_index, count), labels)

        def _lazy(self, call, unit=False):
            gather = self.gather_output if call.runtime_gather_output is None else call.runtime_gather_output
            ranks = 1 if self.tp_group is None else self.tp_group.size()
            stock = partial(base.forward, self)
            return LazyLogits(self, call.input_, call.weight, bool(gather) and ranks > 1, stock, unit)

    Lazy.__name__, Lazy.__qualname__, Lazy.__module__ = (base.__name__, base.__qualname__, base.__module__)
    return Lazy


def _as_stock(layer: torch.nn.Module) -> bool:
    """Whether the layer makes logits, as ``patch(cross_entropy="logits")`` says, except for :func:`without_logits`."""
    return settings.takes_logits() and not hasattr(layer, "logits_refused_by")


class _Call(NamedTuple):
    """Arguments of a call of Megatron's output layer."""

    input_: Any
    weight: Tensor | None = None
    runtime_gather_output: bool | None = None
    # Of the development branch.
    output_cross_entropy_loss: bool = False
    labels: Any = None
    reduction: str = "none"
    ignore_index: int = -100

    def reduced(self, losses: Tensor, labels: Tensor) -> Tensor:
        """Of losses and labels ``[s, b]``; those of each token are ``[b, s]``."""
        total = _swapped(losses) if self.reduction == "none" else _swapped(losses).sum()
        return total / (labels != self.ignore_index).sum() if self.reduction == "mean" else total


def _unsupported(layer: Any, base: type) -> str | None:
    """The reason why the fused loss cannot replace the layer's computation, with a remedy; None if it can. ``base`` is
    the layer's class without lazy logits."""
    if getattr(layer.config, "defer_embedding_wgrad_compute", False):
        return "defer_embedding_wgrad_compute keeps the gradients of whole logits; set it to False"
    if "parametrizations" in submodules_of(layer):
        return "the output layer's parametrizations may give another weight each time; fold them into the weight"
    layers, own = sys.modules["megatron.core.tensor_parallel.layers"], layer._forward_impl
    parts = [(base.forward, _FORWARDS), (getattr(own, "__func__", own), ("ColumnParallelLinear._forward_impl",))]
    parts += [(getattr(layers, name), (name,)) for name in (*_FUNCTIONS, "copy_to_tensor_model_parallel_region")]
    for name in _AUTOGRAD:
        kind = getattr(layers, name)
        # A Function's apply is inherited.
        parts += [(getattr(kind, m), (f"{name}.{m}",)) for m in ("forward", "backward", "apply") if m in vars(kind)]
    for function, names in parts:
        if not is_megatrons(function, *names):
            return f"{names[0]} is not Megatron's own, or not that of {base.__name__}; leave Megatron's in place"
    return None


def _why_logits(layer: Any, weight: Tensor | None, of_layer: bool, unit: bool = False) -> str | None:
    """The reason why this call must make real logits, with a remedy; None if it need not. ``of_layer``: the weight is
    the layer's own, whose shape stock does not check. ``unit``: the loss is computed where FSDP2 has gathered it."""
    refused = hasattr(layer, "logits_refused_by")
    if not refused:
        name = replaced_on_the_way(sys._getframe(2), layer)  # above this function and the layer's forward
        if name is None and backward_id() != -1:  # a checkpoint runs the layer again
            name = vars(layer).get("_parallel_lce_replaced")
        vars(layer)["_parallel_lce_replaced"] = name
        if name:
            return f"{name} may handle them and is not Megatron's own; take its term from token_statistics instead"
    # The passed weight may be a detached view of the layer's own.
    weights = [w for w in (weight, layer.weight) if w is not None]
    sharded = any(hasattr(w, "__fsdp_param__") or (hasattr(w, "to_local") and not unit) for w in weights)
    other_unit = FSDPModule in type(layer).__mro__ and not unit
    if sharded or other_unit or getattr(layer, "gtp_remat_size", 1) > 1:
        return "the output weight is fully sharded, and not whole for the loss; use the distributed optimizer"
    expected = [layer.output_size_per_partition, layer.input_size]
    if of_layer and weight is not None and list(weight.shape) != expected:
        return f"the output layer was built with a weight {expected} and has {list(weight.shape)}; build it anew"
    if weight is not None and not unit and dispatches(type(weight)):
        return f"the output weight is a {type(weight).__name__}; use one of bf16, fp16 or fp32"
    if layer.skip_bias_add and layer.bias is not None:
        return "the output layer leaves its bias to others; build it with skip_bias_add=False"
    if getattr(layer, "disable_grad_reduce", False):
        return "the output layer leaves the reduction of dX to others; build it with disable_grad_reduce=False"
    if not refused and any(not (unit and is_gathering(hook)) for hook in hooks(layer, "forward")):
        return "the output layer has forward hooks, which may skip what is no tensor; put them on the layer before it"
    if hooks(layer, "backward", "backward_pre"):
        return "the output layer has backward hooks, which take the gradient of the logits; remove them"
    return None


def losses_of_lazy(
    logits: LazyLogits, target: Tensor, ignore_index: int | None = None, count: TokenCount | None = None
) -> Tensor:
    """Per-token loss of ``target [s, b]``, fp32 ``[s, b]``, of logits that are not made, as stock computes it.

    A target outside the vocabulary has loss ``lse - max``, and only lse has a gradient. A token with the target
    ``ignore_index`` has loss 0 and no gradient; it costs nothing if the other tokens were counted, ``count``. Padding
    rows stay in the softmax.

    Collectives: as in :func:`parallel_lce.linear_cross_entropy` with ``reduction='none'``.
    """
    options = Options("Megatron's output layer", reduction="none", ignore_index=ignore_index, outside_is_nan=False)
    entry = fused_loss if count is None else partial(counted_loss, counted_tokens=count)
    return _called(entry, logits, target, options)


def terms_of_lazy(logits: LazyLogits, target: Tensor, count: TokenCount | None, smoothed: bool) -> Terms:
    """What the losses of ``target [s, b]`` are made of, and the ids of the largest logits, by one projection. With a
    ``count`` of the targets that are not -100 the others cost nothing, and have 0.

    Collectives: as in :func:`parallel_lce.token_statistics`.
    """
    # Without an ignore_index any target is allowed.
    options = Options("Megatron's output layer", argmax=True, mean_logit=smoothed)
    found = _called(_statistics_entry(target, count), logits, target, options)
    assert found.target_logit is not None and found.argmax is not None
    top = found.lse, found.max_logit, found.target_logit, found.argmax
    return Terms(*top, found.mean_log_prob, found.vocab_size)


def statistics_of_lazy(
    logits: LazyLogits, labels: Tensor, temperature: float | Tensor, entropy: bool, count: TokenCount | None
) -> tuple[Tensor, ...]:
    """Log-probabilities of ``labels [b, s]`` and, with ``entropy``, entropies, ``[b, s]`` each. The logits are divided
    by ``temperature``, a number or ``[b, s]``. Padding rows stay in the softmax, unless settings say which they are.
    With a ``count`` of the labels that are not -100 the others cost nothing, and their entropy is 0.

    Collectives: as in :func:`parallel_lce.token_statistics`.
    """
    options = Options("token_log_probs", ignore_index=NO_LABEL, entropy=entropy)
    labels = _swapped(labels)
    statistics = _called(_statistics_entry(labels, count), logits, labels, options, temperature)
    return tuple([_swapped(value) for value in (statistics.target_log_prob, statistics.entropy) if value is not None])


def _statistics_entry(target: Tensor, count: TokenCount | None) -> Callable[..., TokenStatistics]:
    """What computes statistics: with a ``count`` of the targets that are not -100, of these alone."""
    if count is None:
        return fused_statistics
    return partial(counted_statistics, mask=as_int64(target) != NO_LABEL, counted_tokens=count)


def token_loss_of_lazy(
    logits: LazyLogits,
    labels: Tensor,
    temperature: float | Tensor,
    options: Options,
    loss: Callable[..., Any],
    values: tuple[Tensor, ...],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a caller's function and its metrics ``[b, s]``, as :func:`parallel_lce.token_loss` computes them, of
    ``labels`` and ``values [b, s]``. ``temperature`` and padding rows as in :func:`statistics_of_lazy`."""
    entry = partial(fused_token_loss, loss=loss, values=tuple(map(_swapped, values)))
    total, metrics = _called(entry, logits, _swapped(labels), options._replace(ignore_index=NO_LABEL), temperature)
    return total, {name: _swapped(metric) for name, metric in metrics.items()}


def _swapped(tokens: Tensor) -> Tensor:
    """``[b, s]``, as Megatron's labels and losses, to ``[s, b]``, as its activations; or the reverse."""
    return tokens.transpose(0, 1).contiguous()


@torch.compiler.disable(reason="lazy logits and main_grad are Python objects")
def _called(
    entry: Callable[..., Any], logits: LazyLogits, target: Tensor, options: Options, temperature: float | Tensor = 1.0
) -> Any:
    """Run ``entry`` of :mod:`parallel_lce.run.entry`, in the autocast and grad mode of the output layer's call.
    ``target [s, b]``; ``temperature``: a number or ``[b, s]``."""
    logits.check()
    layer = logits.layer
    # Each head for multi-token prediction makes a call, and all calls keep saved memory until backward.
    heads = 1 + (getattr(layer.config, "mtp_num_layers", None) or 0)
    options = settings.current.of_call(options, layer.training)
    if heads > 1:
        share = default_budget(logits.hidden.device) // heads
        options = options._replace(logits_budget=lean_budget(options.logits_budget, share))
    _, number, _, each = split_per_token(1.0, temperature)
    if number != 1.0:
        options = options._replace(temperature=number)
    each = each if each is None else each.transpose(0, 1)
    epilogue = logits.epilogue()
    assert epilogue is not None  # else whoever calls makes real logits
    options = options._replace(sequence_parallel=logits.sequence_parallel, **epilogue)
    grad_enabled = logits.grad_enabled and torch.is_grad_enabled()
    results: list[Any] = []

    def forward(hidden: Tensor) -> tuple[Tensor, ...]:
        weight, bias = (layer.weight, layer.bias) if logits.unit else (logits.weight, logits.bias)
        tensors = Tensors(hidden, weight, target, bias, temperature=each)
        main_grad = main_grad_of(weight, layer.config.gradient_accumulation_fusion, logits.shared)
        result = entry(options, tensors, layer.tp_group, main_grad=main_grad)
        results.append(_without_views(result) if logits.unit else result)
        found = vars(results[0]) if isinstance(result, TokenStatistics) else results[0]
        return tuple([leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)])

    with torch.set_grad_enabled(grad_enabled), logits.autocast():
        called_with(layer, forward, logits.hidden) if logits.unit else forward(logits.hidden)
    logits.has_loss = True
    return results[0]


def _without_views(result: Any) -> Any:
    """The result of an entry, without views: a later change of one in place would drop FSDP2's hook on it."""

    def own(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and value.requires_grad else value

    if isinstance(result, TokenStatistics):
        return dataclasses.replace(result, **{name: own(value) for name, value in vars(result).items()})
    return pytree.tree_map(own, result)


def main_grad_of(weight: Any, fusion: bool, shared: bool) -> MainGrad | None:
    """The ``main_grad`` of Megatron's DistributedDataParallel (DDP), to which dW is added. None: autograd delivers dW.

    The weight's other uses, such as a tied embedding, give it a gradient by autograd. DDP must add it to main_grad
    (:func:`keep_autograd_gradient`), except where stock drops it: with ``fusion`` (gradient_accumulation_fusion) and
    the output layer's own weight (not ``shared``).

    If main_grad is replaced between forward and backward, dW is added to the new one, as in stock. With fusion dW is
    added to the forward's main_grad, which becomes the weight's again. Without fusion dW goes to autograd wherever that
    makes a difference: if the weight has hooks, or its gradient is not accumulated in this backward, as in
    ``torch.autograd.grad`` and ``backward(inputs=...)``. A main_grad that is not DDP's counts with fusion alone.
    """
    tensor, of_ddp = getattr(weight, "main_grad", None), hasattr(weight, "grad_added_to_main_grad")
    if tensor is None or not weight.requires_grad or not (fusion or of_ddp):
        return None
    if of_ddp and (shared or not fusion):
        keep_autograd_gradient(weight)

    def in_backward(weight_node: Any) -> Tensor | None:
        if fusion:
            weight.main_grad = tensor
        elif has_hooks(weight) or not accumulates(weight_node):
            return None
        return weight.main_grad

    def placeholder(memory: Tensor | None) -> Tensor | None:
        if not of_ddp:
            return None
        # DDP's hook fires when autograd has a gradient, whose values it then ignores or adds.
        weight.grad_added_to_main_grad = True
        gradient = within(memory, weight)
        return gradient.zero_() if getattr(weight, "zero_out_wgrad", False) else gradient

    return MainGrad(tensor, placeholder, in_backward)
