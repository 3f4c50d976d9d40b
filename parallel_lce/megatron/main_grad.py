"""dW goes to the ``main_grad`` of Megatron's DistributedDataParallel (DDP), as stock's does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.core.grad_buffers import MainGrad, within
from parallel_lce.core.private import accumulates, has_hooks


def keep_autograd_gradient(weight: Tensor | None) -> None:
    """Make DDP add autograd's gradient of ``weight`` to its main_grad. It drops that otherwise, with the gradient of
    real logits: the fused loss, which adds its dW itself, sets ``grad_added_to_main_grad``."""
    if weight is None or getattr(weight, "is_gtp_weight_remat", False):  # the gradient of the latter may be anything
        return
    if torch.is_grad_enabled() and weight.requires_grad:
        weight.zero_out_wgrad = True  # pyright: ignore[reportAttributeAccessIssue]: Megatron's


def main_grad_of(weight: Any, fusion: bool) -> MainGrad | None:
    """The main_grad to which dW is added. None: autograd delivers dW. ``fusion``: gradient_accumulation_fusion
    of the layer.

    With fusion dW is added to the forward's main_grad, which becomes the weight's again; and main_grad need not be
    DDP's. Without fusion dW goes to autograd wherever that makes a difference: if main_grad was replaced since forward,
    if the weight has hooks, or if its gradient is not accumulated in this backward, as in ``torch.autograd.grad`` and
    ``backward(inputs=...)``.
    """
    tensor, of_ddp = getattr(weight, "main_grad", None), hasattr(weight, "grad_added_to_main_grad")
    if tensor is None or not weight.requires_grad or not (fusion or of_ddp):
        return None

    def in_backward(weight_node: Any) -> bool:
        if fusion:
            weight.main_grad = tensor
            return True
        return weight.main_grad is tensor and accumulates(weight_node) and not has_hooks(weight)

    def placeholder(memory: Tensor | None) -> Tensor | None:
        if not of_ddp:
            return None
        # DDP's hook fires when autograd has a gradient, whose values it then ignores or adds.
        weight.grad_added_to_main_grad = True
        gradient = within(memory, weight)
        return gradient.zero_() if getattr(weight, "zero_out_wgrad", False) else gradient

    return MainGrad(tensor, placeholder, in_backward)
