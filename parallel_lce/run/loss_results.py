"""Per-token losses of ``linear_cross_entropy`` and ``token_loss``.

A loss is known with the merged partials of its token, and so are the coefficients of its gradient
(:func:`of_tokens`). Both can be formed for all tokens, or for a block as soon as its partials are merged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import Coefficients
from parallel_lce.backends.loss_formula import sum_of_weights
from parallel_lce.call import debug
from parallel_lce.call.call import Call, LossFunction
from parallel_lce.call.checks import described
from parallel_lce.core.options import Options
from parallel_lce.core.partials import MAX, Merged
from parallel_lce.core.private import saving_without_hooks, version
from parallel_lce.run import statistics
from parallel_lce.run.statistics import DIFFERENTIABLE, NAMES, Residuals, TokenStatistics

# Relative and absolute difference of two losses of a token in debug mode, beyond which its block matters. A kernel may
# round the last tokens of a vector in another way.
_SAME_LOSS = 1e-4, 1e-6


def of_tokens(call: Call, merged: Merged) -> tuple[Tensor, Coefficients, dict[str, Tensor]]:
    """Losses ``[R]`` of the call's tokens, the coefficients of the gradient of their sum, and the metrics ``[R]`` of a
    caller's function by name. ``call``: with the tensors of these tokens (:meth:`Call.of_tokens`)."""
    if call.loss_function is not None:
        return _of_function(call, call.loss_function, merged)
    target = call.target
    assert target is not None  # check_tensors refuses a loss without targets
    losses, coefficients = call.backend.token_losses(
        merged.partial, merged.vocab_size, target, call.token_weight, call.options
    )
    return losses, coefficients, {}


def _of_function(call: Call, function: LossFunction, merged: Merged) -> tuple[Tensor, Coefficients, dict[str, Tensor]]:
    """:func:`of_tokens` by a caller's function. If it raises, losses and gradients are NaN until :func:`finish` raises
    what it raised, after the call's collectives."""
    values, residuals = statistics.outputs(call, merged)
    given: dict[str, Any] = dict(zip(NAMES, values))
    leaves, upstream = {}, dict.fromkeys(DIFFERENTIABLE)
    try:
        with torch.set_grad_enabled(any(call.needs)), saving_without_hooks():
            if torch.is_grad_enabled():
                leaves = {n: given[n].detach().requires_grad_() for n in DIFFERENTIABLE if given[n] is not None}
            losses, metrics = called(function, TokenStatistics(**given | leaves), call.values)
            if losses.requires_grad:
                ones = torch.ones_like(losses)
                upstream |= zip(leaves, torch.autograd.grad(losses, [*leaves.values()], ones, allow_unused=True))
        if debug.enabled():
            _check_elementwise(call, function, given, losses.detach())
    except Exception as failure:
        function.failure = function.failure or failure
        losses = torch.full_like(merged.partial[MAX], torch.nan)
        return losses, Coefficients(losses, None, None), {}
    coefficients = statistics.coefficients(call, merged.partial, residuals, tuple(upstream.values()))
    # An ignored token has no loss and no gradient, whatever the function makes of its values.
    ignored = call.target == call.options.ignore_index
    coefficients = coefficients.replaced([c.masked_fill(ignored, 0.0) for c in coefficients.present])
    metrics = {name: metric.detach().masked_fill(ignored, 0) for name, metric in metrics.items()}
    return losses.detach().to(call.dtype).masked_fill(ignored, 0.0), coefficients, metrics


def called(
    function: LossFunction, given: TokenStatistics, values: tuple[Tensor, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses and metrics of the function. Raises ``ValueError`` for another result, and for a function that writes
    into its statistics, on which the gradient depends."""
    before, like = _versions(given), given.lse
    result = function.run(given, *values)
    written = [name for name, number in _versions(given).items() if number != before[name]]
    if written:
        raise ValueError(f"loss must not write into its statistics, and it wrote into {written[0]}")
    pair: Any = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    losses, metrics = pair
    fits = lambda v: isinstance(v, Tensor) and v.shape == like.shape and v.device == like.device  # noqa: E731
    if isinstance(metrics, dict):
        wrong = [(name, value) for name, value in metrics.items() if not fits(value)]
    else:
        wrong = [("metrics", metrics)]
    if not (fits(losses) and losses.is_floating_point()):
        wrong = [("losses", losses)]
    for name, value in wrong:
        where = f" on {value.device}" if isinstance(value, Tensor) else ""
        raise ValueError(
            f"loss must return floating-point losses {list(like.shape)} on {like.device}, one for each token, or "
            f"these and a dict of metrics like them; as {name!r} it returned {described(value)}{where}"
        )
    return losses, metrics


def _versions(given: TokenStatistics) -> dict[str, int]:
    """How often each field was written to. Tensors of inference mode do not count that, and have no gradient."""
    tensors = {name: value for name in NAMES if (value := getattr(given, name)) is not None}
    return {name: version(value) for name, value in tensors.items() if not value.is_inference()}


def _check_elementwise(call: Call, function: LossFunction, given: dict[str, Any], losses: Tensor) -> None:
    """Debug mode: raise ``ValueError`` if the loss of a token depends on the other tokens of its block: the function
    runs again on each half of the block."""
    count, half = len(losses), len(losses) // 2
    for rows in (slice(half), slice(half, count)) if half else ():
        of_half = {name: v[rows] if isinstance(v, Tensor) and v.dim() else v for name, v in given.items()}
        with torch.no_grad():
            again, _ = called(function, TokenStatistics(**of_half), tuple([value[rows] for value in call.values]))
        apart = ~losses[rows].double().isclose(again.double(), *_SAME_LOSS, equal_nan=True)
        if apart.any():
            token = int(apart.nonzero()[0])
            raise ValueError(
                f"loss must be elementwise: the loss of one token is {losses[rows][token]:.6g} in a block of {count} "
                f"tokens, and {again[token]:.6g} in a block of {len(again)}. Pass what depends on other tokens, such "
                "as a mean over a sequence, as values per token"
            )


def finish(call: Call, function: LossFunction, losses: Tensor, metrics: dict[str, Tensor]) -> None:
    """After the collectives of a forward: keep the ``metrics`` of a caller's function, and raise what it raised. In
    debug mode every rank raises if one does, or if the ranks' ``losses`` or metrics differ, ``[N]`` each. Collectives:
    in debug mode, those of :func:`parallel_lce.call.debug.agree`."""
    layout = call.layout
    function.metrics, failure, function.failure = metrics, function.failure, None
    if failure is not None:
        debug.report_refusal(layout, RuntimeError(f"loss raised {type(failure).__name__}: {failure}"))
        if layout.ranks > 1:
            failure.add_note(
                "if the function loss raises on this rank alone, the other ranks of process_group wait in a later "
                "collective until its timeout; PARALLEL_LCE_DEBUG=1 raises on every rank"
            )
        try:
            raise failure
        finally:
            del failure  # which its traceback would keep alive, with the call's tensors
    if layout.ranks > 1 and debug.enabled():
        compared = {"the losses of loss": losses} | {f"the metric {name!r} of loss": v for name, v in metrics.items()}
        wide = {name: v.double() if v.is_floating_point() else v.long() for name, v in compared.items()}
        debug.agree(layout, {"the metrics of loss": [*metrics]}, wide)


def outputs(call: Call, merged: Merged) -> tuple[list[Tensor], Residuals]:
    """The call's loss, of each token ``[N]`` or 0-dimensional, and the residuals of its backward."""
    target, weight, reduction = call.target, call.token_weight, call.options.reduction
    losses, coefficients, metrics = of_tokens(call, merged)
    if call.loss_function is not None:
        finish(call, call.loss_function, losses, metrics)
    residuals = Residuals(*coefficients[:6])
    if reduction == "none":
        return [losses], residuals
    if reduction == "sum":
        return [losses.sum()], residuals
    assert target is not None
    mean, divisor = call.backend.mean_loss(losses, target, weight, call.options.ignore_index)
    return [mean], residuals._replace(divisor=divisor)


def of_counted(upstream: Tensor, target: Tensor | None, options: Options) -> Tensor:
    """The gradient of a call's loss, 0 where it is a token's and the token is ignored: it may be NaN there, as that of
    a mean over no tokens, and one NaN in G is one in every row of dW."""
    if not upstream.dim() or options.ignore_index is None or target is None:
        return upstream
    return upstream.masked_fill(target == options.ignore_index, 0.0)


def coefficients(residuals: Residuals, upstream: Tensor) -> Coefficients:
    """Coefficients of the gradient of the logits. ``upstream``: the gradient of the loss, ``[N]`` or 0-dimensional."""
    factor = upstream if residuals.divisor is None else upstream / residuals.divisor
    alpha, *others, _, _ = residuals
    assert alpha is not None
    return Coefficients(alpha, *others, factor)


def divisor_of(call: Call) -> Tensor | None:
    """Divisor of the sum of the losses: for a mean the sum of the tokens' weights. None is 1."""
    if call.options.reduction != "mean":
        return None
    assert call.target is not None
    return sum_of_weights(call.target, call.token_weight, call.options.ignore_index, call.dtype)
