"""Makes Megatron's output layers return lazy logits, and computes the loss and the statistics of lazy logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parallel_lce.core.budget import default_budget
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.options import NO_LABEL, Options, Tensors, apart, as_int64
from parallel_lce.megatron import choices
from parallel_lce.megatron.lazy_logits import LazyLogits, keep_autograd_gradient, warn_of_logits
from parallel_lce.run.fused_loss import fused_loss, fused_statistics
from parallel_lce.run.statistics import TokenStatistics
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

# Classes whose forward the fused loss can replace. LinearCrossEntropyModule is in Megatron's development branch.
_KNOWN = ("ColumnParallelLinear", "LinearCrossEntropyModule")


def is_lazy(layer: object) -> bool:
    return getattr(layer, "returns_lazy_logits", False)


def make_lazy(layer: torch.nn.Module, asked_by: str, otherwise: str = "") -> None:
    """Make an output layer return lazy logits.

    Raises:
        ValueError: the fused loss cannot replace the layer's forward. The message begins with ``asked_by`` and ends
            with ``otherwise``.
    """
    if (problem := _unsupported(layer)) is not None:
        raise ValueError(f"{asked_by} {problem}{otherwise}")
    if not is_lazy(layer):
        layer.__class__ = _lazy_class(type(layer))


@contextmanager
def without_logits(layer: torch.nn.Module, function: str) -> Iterator[None]:
    """A context in which an output layer returns lazy logits. A use that would make real logits raises an error that
    names ``function``.

    Raises:
        ValueError: as :func:`make_lazy`.
    """
    before = type(layer)
    make_lazy(layer, function)
    vars(layer)["logits_refused_by"] = function
    try:
        yield
    finally:
        layer.__class__ = before
        vars(layer).pop("logits_refused_by", None)


def _unsupported(layer: torch.nn.Module) -> str | None:
    """The reason why the fused loss cannot replace this output layer's forward, with a remedy; None if it can."""
    if getattr(layer.config, "defer_embedding_wgrad_compute", False):
        return (
            "does not support defer_embedding_wgrad_compute=True, which keeps the gradients of whole logits: set it "
            "to False"
        )
    owner = next(c for c in type(layer).__mro__ if "forward" in vars(c))
    if not is_lazy(layer) and owner.__name__ not in _KNOWN:
        return (
            f"does not know the forward of the output layer {type(layer).__name__}, defined in "
            f"{owner.__module__}.{owner.__name__}: use Megatron's ColumnParallelLinear (no fp8 output projection)"
        )
    return None


@functools.cache
def _lazy_class(base: type) -> type:
    """A subclass of an output layer's class, with the same name, parameters, state-dict keys and sharded-state-dict
    keys. Its forward returns lazy logits."""

    class Lazy(base):
        returns_lazy_logits = True

        def forward(
            self,
            input_,
            weight=None,
            runtime_gather_output=None,
            output_cross_entropy_loss=False,
            labels: Any = None,
            reduction="none",
            ignore_index=-100,
        ):
            """Lazy logits ``[s, b, V/P]`` and no bias; real logits if :func:`_reason` gives a reason.

            With ``output_cross_entropy_loss`` (Megatron's development branch) the losses of ``labels [b, s]``, 0 where
            a label is ``ignore_index``. ``reduction``: ``"none"`` gives ``[b, s]``, ``"sum"`` the sum; ``"mean"``
            divides it by the number of tokens that are not ignored, and is NaN without such tokens.
            """
            used = self.weight if weight is None else weight
            expected = [self.output_size_per_partition, self.input_size]
            if used is None or list(used.shape) != expected:
                given = "no weight of its own and none" if used is None else list(used.shape)
                raise ValueError(f"the output layer needs a weight {expected}, got {given}")
            gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
            ranks = 1 if self.tp_group is None else self.tp_group.size()
            gather = gather and ranks > 1 and not output_cross_entropy_loss
            stock, bias = functools.partial(base.forward, self), None
            reason = _reason(self, used, gather)
            if reason is None:
                logits = LazyLogits(self, input_, weight, self.sequence_parallel, stock)
            else:
                warn_of_logits(self, reason)
                keep_autograd_gradient(used)
                logits, bias = stock(input_, weight=weight, runtime_gather_output=gather)
            if not output_cross_entropy_loss:
                return logits, bias
            if bias is not None:
                logits = logits + bias
            losses = token_losses(logits, labels, self.tp_group, ignore_index)
            if reduction == "none":
                return losses
            total = losses.sum()
            return total if reduction == "sum" else total / (as_int64(labels) != ignore_index).sum()

    Lazy.__name__, Lazy.__qualname__, Lazy.__module__ = (base.__name__, base.__qualname__, base.__module__)
    return Lazy


def _reason(layer: torch.nn.Module, weight: Tensor, gather: bool) -> str | None:
    """The reason why this call must make real logits, with a remedy; None if it need not."""
    if gather:
        return (
            "the output layer gathers them over the tensor-parallel ranks; build the model with "
            "parallel_output=True and leave runtime_gather_output unset"
        )
    # The passed weight may be a detached view of the layer's own.
    weights = [w for w in (weight, layer.weight) if w is not None]
    sharded = any(hasattr(w, "__fsdp_param__") or hasattr(w, "to_local") for w in weights)
    if sharded or isinstance(layer, FSDPModule) or getattr(layer, "gtp_remat_size", 1) > 1:
        return (
            "the output weight is fully sharded and whole only within the output layer's forward; "
            "the distributed optimizer keeps it whole"
        )
    if layer.skip_bias_add and layer.bias is not None:
        return "the output layer leaves its bias to others; build it with skip_bias_add=False"
    if getattr(layer, "disable_grad_reduce", False):
        return (
            "the output layer leaves the reduction of its input's gradient to others; build it with "
            "disable_grad_reduce=False"
        )
    # Both functions include global module hooks.
    if any(layer._get_backward_hooks()) or layer._get_backward_pre_hooks():
        return "the output layer has backward hooks, which take the gradient of the logits; remove them"
    return None


def token_losses(
    logits: LazyLogits | Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None, ignore_index: int | None = None
) -> Tensor:
    """Per-token loss ``[b, s]``, fp32, of logits ``[s, b, V/P]`` and ``labels [b, s]``, as stock computes it.

    A label outside the vocabulary has loss ``lse - max``, and only lse has a gradient. A token with the label
    ``ignore_index`` has loss 0 and no gradient. Padding rows stay in the softmax.

    Collectives: as in :func:`parallel_lce.linear_cross_entropy` with ``reduction='none'``. If the real logits exist: as
    in :func:`parallel_lce.vocab_parallel_cross_entropy`.
    """
    target = _swapped(as_int64(labels))
    if isinstance(logits, LazyLogits) and logits.made is None:
        options = Options("Megatron's output layer", reduction="none", ignore_index=ignore_index, outside_is_nan=False)
        return _swapped(_called(fused_loss, logits, target, options))
    real = logits.made if isinstance(logits, LazyLogits) else logits
    assert real is not None  # lazy logits that are not made returned above
    losses = vocab_parallel_cross_entropy(real, target, tp_group=tp_group)
    return _swapped(losses if ignore_index is None else losses.masked_fill(target == ignore_index, 0.0))


def token_statistics(
    logits: LazyLogits, labels: Tensor, temperature: float | Tensor, entropy: bool
) -> tuple[Tensor, ...]:
    """Log-probabilities of ``labels [b, s]`` and, with ``entropy``, entropies, ``[b, s]`` each. The logits are divided
    by ``temperature``, a number or ``[b, s]``. Padding rows stay in the softmax.

    Collectives: as in :func:`parallel_lce.token_statistics`.
    """
    _, number, _, each = apart(1.0, temperature)
    options = Options("token_log_probs", ignore_index=NO_LABEL, temperature=number, expected_logit=entropy)
    each = each if each is None else each.transpose(0, 1)
    statistics: TokenStatistics = _called(fused_statistics, logits, _swapped(labels), options, each)
    return tuple([_swapped(value) for value in (statistics.target_log_prob, statistics.entropy) if value is not None])


def _swapped(tokens: Tensor) -> Tensor:
    """``[b, s]``, as Megatron's labels and losses, to ``[s, b]``, as its activations; or the reverse."""
    return tokens.transpose(0, 1).contiguous()


@torch.compiler.disable(reason="lazy logits and main_grad are Python objects")
def _called(
    entry: Callable[..., Any], logits: LazyLogits, target: Tensor, options: Options, temperature: Tensor | None = None
) -> Any:
    """Run ``entry`` of :mod:`parallel_lce.run.fused_loss`, in the autocast and grad mode of the output layer's call."""
    logits.check()
    layer, weight = logits.layer, logits.weight
    _, budget, filtered, reduce_dtype = choices.choose()
    # Each head for multi-token prediction makes a call, and all calls keep saved memory until backward.
    heads = 1 + (getattr(layer.config, "mtp_num_layers", None) or 0)
    options = options._replace(
        logit_scale=logits.scale,
        sequence_parallel=logits.sequence_parallel,
        logits_budget=default_budget(weight.device) // heads if budget is None and heads > 1 else budget,
        # The entropy's gradient is large where probabilities are small.
        gradient_filter=None if options.expected_logit else filtered,
        reduce_dtype=reduce_dtype,
    )
    tensors = Tensors(logits.hidden, weight, target, logits.bias, temperature=temperature)
    grad_enabled = logits.grad_enabled and torch.is_grad_enabled()
    with torch.set_grad_enabled(grad_enabled), logits.autocast():
        main_grad = main_grad_of(weight, layer.config.gradient_accumulation_fusion, logits.shared)
        result = entry(options, tensors, layer.tp_group, main_grad=main_grad)
    logits.has_loss = True
    return result


def main_grad_of(weight: Tensor, fusion: bool, shared: bool) -> MainGrad | None:
    """The ``main_grad`` of Megatron's DistributedDataParallel (DDP), to which dW is added. None: autograd delivers dW.

    The weight's other uses, such as a tied embedding, give it a gradient by autograd. DDP must add it to main_grad
    (:func:`keep_autograd_gradient`), except where stock drops it: with ``fusion`` (gradient_accumulation_fusion) and
    the output layer's own weight (not ``shared``).

    If main_grad is replaced between forward and backward, dW is added to the new one, as in stock. With fusion dW is
    added to the forward's main_grad, which becomes the weight's again.
    """
    tensor = getattr(weight, "main_grad", None)
    if tensor is None or not weight.requires_grad or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    if shared or not fusion:
        keep_autograd_gradient(weight)

    def in_backward() -> Tensor:
        if fusion:
            weight.main_grad = tensor  # pyright: ignore[reportAttributeAccessIssue]: Megatron's
        return weight.main_grad  # pyright: ignore[reportAttributeAccessIssue]

    def placeholder() -> Tensor:
        # DDP's hook fires when autograd has a gradient, whose values it then ignores or adds.
        weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]: Megatron's
        added = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if added else torch.empty_like(weight)

    return MainGrad(tensor, placeholder, in_backward)
