"""The entries of every fused loss, and of statistics without one: the public functions, Megatron's output layer and
the benchmark use them.

In a compiled graph, and for tensors without values, the operators of :mod:`parallel_lce.run.ops` take the place of the
functions of :mod:`parallel_lce.run.autograd`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.backends.loss import counted, mean_loss
from parallel_lce.call.call import Call, Inputs
from parallel_lce.call.prepare import prepare
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.options import Options, Tensors
from parallel_lce.run import autograd, ops
from parallel_lce.run.dense import dense_loss
from parallel_lce.run.statistics import TokenStatistics


def fused_loss(
    options: Options, tensors: Tensors, group: dist.ProcessGroup | None, *, main_grad: MainGrad | None = None
) -> Tensor:
    """The loss, of the tokens' shape or 0-dimensional. The arguments are those of
    :func:`parallel_lce.call.prepare.prepare`."""
    call, inputs = prepare(options, tensors, group, main_grad=main_grad)
    if call.plan.accumulate:
        if call.in_graph:
            return ops.accumulated_loss(call, _with_inputs(tensors, inputs))
        return autograd.accumulated_loss(call, inputs)
    reduction, weights = call.options.reduction, call.token_weight
    # The losses are multiplied after the call by weights that need a gradient. A graph reduces losses by itself.
    multiplies = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    if not (multiplies or call.in_graph):
        losses = _fused(call, inputs, tensors)[0]
        # A view would be one more node of the graph, and take the host time.
        return losses if reduction != "none" or len(call.shape) == 1 else losses.view(call.shape)
    call = call.replaced(options=call.options._replace(reduction="none"))
    if multiplies:
        call, tensors = call.replaced(token_weight=None), tensors._replace(token_weight=None)
    target, ignore_index = call.target, call.options.ignore_index
    assert target is not None  # check_tensors has refused it
    losses = _fused(call, inputs, tensors)[0]
    if multiplies:
        losses = torch.where(counted(target, ignore_index), losses * weights, 0.0)
    if reduction == "none":
        return losses.view(call.shape)
    return mean_loss(losses, target, weights, ignore_index)[0] if reduction == "mean" else losses.sum()


def fused_statistics(
    options: Options, tensors: Tensors, group: dist.ProcessGroup | None, *, main_grad: MainGrad | None = None
) -> TokenStatistics:
    """The statistics that the options ask for, of the tokens' shape. The arguments are those of :func:`fused_loss`."""
    call, inputs = prepare(options, tensors, group, main_grad=main_grad)
    return TokenStatistics(*_fused(call, inputs, tensors)).view(call.shape)


def _fused(call: Call, inputs: Inputs, tensors: Tensors) -> tuple[Any, ...]:
    if call.in_graph:
        return ops.fused(call, _with_inputs(tensors, inputs))
    if call.dense is not None:
        return (dense_loss(call, inputs),)
    return autograd.fused(call, inputs)


def _with_inputs(tensors: Tensors, inputs: Inputs) -> Tensors:
    hidden, weight, bias = inputs
    return tensors._replace(input=hidden, linear_weight=weight, linear_bias=bias)
