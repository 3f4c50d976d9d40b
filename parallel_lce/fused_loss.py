"""The entries of every fused loss, and of statistics without one: the public functions, Megatron's output layer and
the benchmark use them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from parallel_lce.arguments import Arguments, LossOptions
from parallel_lce.autograd import accumulated_loss, fused, reduced_loss, token_losses
from parallel_lce.grad_buffers import MainGrad
from parallel_lce.losses import WeightedLoss
from parallel_lce.partials import Columns, accumulation_dtype
from parallel_lce.prepare import prepare
from parallel_lce.statistics import TokenStatistics


def fused_loss(
    arguments: Arguments,
    options: LossOptions,
    *,
    function: str = "linear_cross_entropy",
    extra_check: Callable[[], None] | None = None,
    main_grad: MainGrad | None = None,
) -> Tensor:
    """The loss of ``arguments`` and ``options``: of the tokens' shape, or 0-dimensional.

    ``function``: what the user called, the same on all ranks. ``extra_check`` is called with the other checks; it
    raises if an argument that is not among ``arguments`` is wrong. ``main_grad``: dW is added to it, and no gradient
    is formed in forward.
    """
    smoothing, reduction = options.label_smoothing, options.reduction
    prepared = prepare(
        arguments,
        Columns(shifted=isinstance(smoothing, (int, float)) and smoothing > 0),
        function=function,
        options=options,
        extra_check=extra_check,
        accumulable=reduction != "none" and main_grad is None,
        main_grad=main_grad,
    )
    call, inputs = prepared.call, prepared.inputs
    assert call.target is not None  # check_arguments has refused it
    loss = WeightedLoss(
        call.target, prepared.token_weight, options.ignore_index, smoothing, options.z_loss, options.outside_is_nan
    )
    if call.plan.accumulate:
        divisor = loss.divisor(reduction, accumulation_dtype(inputs[0].dtype))
        return accumulated_loss(call, inputs, loss, divisor)
    if reduction == "none":
        losses = token_losses(call, inputs, loss, prepared.differentiable)
        # A view is a node of the graph, and time of the host.
        return losses if len(prepared.shape) == 1 else losses.view(prepared.shape)
    return reduced_loss(call, inputs, loss, reduction == "mean", prepared.differentiable)


def fused_statistics(
    arguments: Arguments,
    columns: Columns,
    *,
    function: str = "token_statistics",
    extra_check: Callable[[], None] | None = None,
    main_grad: MainGrad | None = None,
) -> TokenStatistics:
    """The statistics of ``arguments`` that ``columns`` tell, of the tokens' shape. The other arguments are those of
    :func:`fused_loss`."""
    prepared = prepare(arguments, columns, function=function, extra_check=extra_check, main_grad=main_grad)
    call = prepared.call
    found = TokenStatistics(*fused(call, prepared.inputs, call.statistics(), prepared.differentiable))
    return found.view(prepared.shape)
