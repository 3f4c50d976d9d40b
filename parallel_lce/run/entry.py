"""The fused loss and the fused statistics, for public functions (:func:`parallel_lce.call.checks.public`), for the door
into TRL, which has no group, and for the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.call import LossFunction
from parallel_lce.call.prepare import autocasted, check, prepare
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.options import Options, Tensors
from parallel_lce.run.compile import call_in_graph
from parallel_lce.run.results import TokenStatistics
from parallel_lce.run.schedule import function_of
from parallel_lce.run.token_count import compacted


def fused_loss(
    options: Options,
    tensors: Tensors,
    group: dist.ProcessGroup | None,
    *,
    mask: Tensor | None = None,
    counted_tokens: Any = None,
    main_grad: MainGrad | None = None,
) -> Tensor:
    """The loss, of the tokens' shape or 0-dimensional. With a ``mask``, bool of that shape, the other tokens are
    ignored. Other arguments as in :func:`parallel_lce.run.token_count.compacted`."""
    options, tensors, compaction = compacted(options, tensors, group, mask, counted_tokens, main_grad)
    loss, shape = _called(options, tensors, group, main_grad)
    if options.reduction != "none":
        return compaction.checked(loss)
    # A view would add a node to autograd's graph, which costs host time.
    return compaction.spread(loss if len(shape) == 1 else loss.view(shape))


def fused_statistics(
    options: Options,
    tensors: Tensors,
    group: dist.ProcessGroup | None,
    *,
    mask: Tensor | None = None,
    counted_tokens: Any = None,
    main_grad: MainGrad | None = None,
) -> TokenStatistics:
    """The statistics that the options ask for, of the tokens' shape. With a ``mask``, bool of that shape, tokens that
    do not count get 0, and ids -1. Other arguments as in :func:`fused_loss`."""
    options, tensors, compaction = compacted(options, tensors, group, mask, counted_tokens, main_grad)
    found, shape = _called(options, tensors, group, main_grad)
    statistics = TokenStatistics(*found).view(shape)
    if mask is None:
        return statistics
    return statistics.changed(lambda value: compaction.spread(value, 0 if value.is_floating_point() else -1))


def fused_token_loss(
    options: Options,
    tensors: Tensors,
    group: dist.ProcessGroup | None,
    loss: Callable[..., Any],
    values: tuple[Tensor, ...],
    *,
    counted_tokens: Any = None,
    main_grad: MainGrad | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, 0-dimensional, by a caller's function, and its metrics, of the tokens' shape. ``values``: per token,
    checked. Other arguments as in :func:`fused_loss`. In debug mode every rank raises if the function raises on one,
    or if the ranks' losses or metrics differ: an exchange after the call's (:func:`parallel_lce.call.debug.agree`)."""
    options, tensors, compaction = compacted(options, tensors, group, None, counted_tokens, main_grad)
    call, inputs = prepare(options, tensors, group, main_grad=main_grad)
    function, layout = LossFunction(loss), call.layout
    flat = tuple([compaction.of(value).reshape(-1).contiguous() for value in values])
    total = function_of(call).apply(*inputs, call._replace(loss_function=function, values=flat))
    if function.differentiable == {False}:  # a backward through losses that are constants is refused by PyTorch
        total = total.detach()
    # A second backward fills new ones.
    metrics, function.metrics = {name: metric.view(call.shape) for name, metric in function.metrics.items()}, {}
    if function.failures:
        reason = f"loss raised {type(function.failures[0]).__name__}: {function.failures[0]}"
        debug.report_refusal(layout, RuntimeError(reason))
        raise function.failures.pop()
    if debug.enabled() and layout.ranks > 1:
        compared = {"the metrics of loss": [*metrics], "the loss": total}
        compared |= {f"the metric {name!r} of loss": metric for name, metric in metrics.items()}
        debug.agree(layout, f"{options.function}, whose loss has returned", compared)
    return compaction.checked(total), {name: compaction.spread(metric) for name, metric in metrics.items()}


def _called(options: Options, tensors: Tensors, group: dist.ProcessGroup | None, main_grad: MainGrad | None):
    """The call's results, for flattened tokens, and the tokens' shape. In a compiled graph an operator runs the call,
    without main_grad: Megatron's loss is outside of graphs."""
    if torch.compiler.is_compiling():
        tensors = autocasted(tensors)
        options, layout, shape = check(options, tensors, group)
        return call_in_graph(options, tensors, layout), shape
    call, inputs = prepare(options, tensors, group, main_grad=main_grad)
    return function_of(call).apply(*inputs, call), call.shape
