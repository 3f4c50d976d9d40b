"""The fused loss and the fused statistics, for the public functions, Megatron's output layer and the benchmark."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.backends import is_meta_or_fake
from parallel_lce.backends.loss_formula import counted, mean_loss
from parallel_lce.call.prepare import autocasted, check, prepare
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.options import Options, Tensors, as_int64
from parallel_lce.run import ops
from parallel_lce.run.statistics import TokenStatistics


def fused_loss(
    options: Options, tensors: Tensors, group: dist.ProcessGroup | None, *, main_grad: MainGrad | None = None
) -> Tensor:
    """The loss, of the tokens' shape or 0-dimensional. Arguments as in :func:`parallel_lce.call.prepare.prepare`."""
    weights, reduction = tensors.token_weight, options.reduction
    if not (isinstance(weights, Tensor) and weights.requires_grad and torch.is_grad_enabled()):
        loss, shape = _called(options, tensors, group, main_grad)
        # A view would add a node to autograd's graph, which costs host time.
        return loss if reduction != "none" or len(shape) == 1 else loss.view(shape)
    losses, shape = _called(options._replace(token_weight_gradient=True), tensors, group, main_grad)
    target, weights = as_int64(tensors.target).reshape(-1), weights.reshape(-1).to(losses.dtype)
    losses = torch.where(counted(target, options.ignore_index), losses * weights, 0.0)
    if reduction == "none":
        return losses.view(shape)
    return mean_loss(losses, target, weights, options.ignore_index)[0] if reduction == "mean" else losses.sum()


def fused_statistics(
    options: Options, tensors: Tensors, group: dist.ProcessGroup | None, *, main_grad: MainGrad | None = None
) -> TokenStatistics:
    """The statistics that the options ask for, of the tokens' shape. Arguments as in :func:`fused_loss`."""
    statistics, shape = _called(options, tensors, group, main_grad)
    return TokenStatistics(*statistics).view(shape)


def _called(options: Options, tensors: Tensors, group: dist.ProcessGroup | None, main_grad: MainGrad | None):
    """The call's results, for flattened tokens, and the tokens' shape. In a compiled graph, and for tensors without
    values, an operator runs the call."""
    weight = tensors.linear_weight
    if torch.compiler.is_compiling() or (isinstance(weight, Tensor) and is_meta_or_fake(weight)):
        tensors = autocasted(tensors)
        options, layout, shape = check(options, tensors, group, None, main_grad)
        return ops.call(options, tensors, layout, main_grad), shape
    call, inputs = prepare(options, tensors, group, main_grad=main_grad)
    return ops.function_of(call).apply(*inputs, call), call.shape
