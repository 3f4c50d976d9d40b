"""Megatron's output layer, without the projection, and the loss of what it returns."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from parallel_lce.checks import Arguments
from parallel_lce.differentiable import token_losses
from parallel_lce.functional import prepare
from parallel_lce.losses import WeightedLoss
from parallel_lce.megatron.lazy_logits import LazyLogits, keep_autograd_gradient
from parallel_lce.partials import Columns
from parallel_lce.weight_grad import MainGrad


@functools.cache
def lazy_class(base: type) -> type:
    """A subclass of an output layer's class, of the same name, whose forward returns lazy logits.

    Parameters, state-dict and sharded-state-dict keys are those of ``base``. Gathered output is the
    caller's wish for real logits, and fully sharded weights exist only within the layer's forward:
    both take the stock path.
    """

    class Lazy(base):
        returns_lazy_logits = True

        def forward(self, input_, weight=None, runtime_gather_output=None):
            gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
            used = self.weight if weight is None else weight
            stock = functools.partial(base.forward, self)
            if gather or self.skip_bias_add or hasattr(used, "__fsdp_param__"):
                if used is not None:
                    keep_autograd_gradient(used)
                return stock(input_, weight=weight, runtime_gather_output=runtime_gather_output)
            if used is None:
                raise RuntimeError(
                    "weight was not supplied to the output layer's forward and "
                    "skip_weight_param_allocation is True"
                )
            return LazyLogits(self, input_, weight, self.sequence_parallel, stock), None

    Lazy.__name__, Lazy.__qualname__, Lazy.__module__ = (
        base.__name__,
        base.__qualname__,
        base.__module__,
    )
    return Lazy


def is_lazy(layer: torch.nn.Module) -> bool:
    return getattr(layer, "returns_lazy_logits", False)


@torch.compiler.disable(reason="lazy logits and main_grad are Python objects")
def fused_loss(logits: LazyLogits, target: Tensor, logits_budget: int | None) -> Tensor:
    """Per-token loss ``[s, b]``, fp32, of lazy logits and ``target [s, b]``, as stock computes it.

    A target outside the vocabulary has loss ``lse - max`` and the gradient of lse alone. Padding
    rows stay in the softmax. Collectives: those of :func:`parallel_lce.token_statistics`.
    """
    layer = logits.layer
    weight = layer.weight if logits.weight is None else logits.weight
    arguments = Arguments(
        input=logits.hidden,
        linear_weight=weight,
        target=target,
        linear_bias=layer.bias,
        logit_scale=logits.scale,
        logit_softcap=None,
        process_group=layer.tp_group,
        sequence_parallel=logits.sequence_parallel,
        vocab_start=None,
        vocab_size=None,
        logits_budget=logits_budget,
    )
    fused = layer.config.gradient_accumulation_fusion and logits.weight is None
    main_grad = main_grad_of(weight, fused)
    prepared = prepare(arguments, Columns(), main_grad=main_grad)
    loss = WeightedLoss(prepared.call.target, outside_is_nan=False)
    losses = token_losses(prepared.call, *prepared.tensors, loss, prepared.differentiable)
    return losses.view(target.shape)


def main_grad_of(weight: Tensor, fused: bool) -> MainGrad | None:
    """Where Megatron's DistributedDataParallel wants dW, or None: then autograd delivers it.

    Once ``grad_added_to_main_grad`` is set, DDP drops what autograd delivers for the parameter,
    unless it has ``zero_out_wgrad``. With ``fused``, ``gradient_accumulation_fusion`` of a weight
    that is the output layer's own, stock drops it as well and nothing is owed; else the weight is
    marked, since no one here knows its other uses.
    """
    tensor = getattr(weight, "main_grad", None)
    if tensor is None or not weight.requires_grad or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    if not fused:
        keep_autograd_gradient(weight)

    def placeholder() -> Tensor:
        # DDP's hook fires when autograd has a gradient, whose values it then ignores or adds.
        weight.grad_added_to_main_grad = True
        added = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if added else torch.empty_like(weight)

    return MainGrad(tensor, placeholder)
