"""The results of a call: losses or statistics of its tokens, and the coefficients of the gradient of their logits.

A backend makes losses and statistics of merged partials (``Wanted``). A loss's coefficients are known with it, so both
can be formed for all tokens, or for a block as soon as its partials are merged. Any other loss is plain PyTorch on the
``[N]`` statistics: their upstream gradients are folded into coefficients in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.call import Call, LossFunction, features_of
from parallel_lce.call.checks import described
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import MAX, Coefficients, Merged
from parallel_lce.core.plan import Block
from parallel_lce.core.private import pytree, saving_without_hooks, version

# Relative and absolute difference of two losses of a token in debug mode, beyond which its block matters. A kernel may
# round the last tokens of a vector in another way.
_SAME_LOSS = 1e-4, 1e-6

_FEATURE = {"of": "feature"}


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each token's logits.

    Fields have the target's shape, or without a target the hidden states' leading shape, unless a comment gives
    another. They are fp32, or fp64 for fp64 input. Fields that were not asked for are None. Fields from ``max_logit``
    on have no gradient.
    """

    # metadata["of"] names the option that asks for the field, or "target": without it the field is None. Fields of
    # _FEATURE are None unless a feature of the call fills them. Fields without metadata always exist.

    # Log-sum-exp of the V real entries.
    lse: Tensor
    # For both: 0 for the target -100, NaN for another outside [0, V).
    target_logit: Tensor | None = field(metadata={"of": "target"})
    # ``target_logit - lse``, summed relative to the maximum: large logits do not cancel.
    target_log_prob: Tensor | None = field(metadata={"of": "target"})
    # Mean over the V real entries.
    mean_logit: Tensor | None = field(metadata={"of": "mean_logit"})
    # ``mean_logit - lse``, summed relative to the maximum: large logits do not cancel.
    mean_log_prob: Tensor | None = field(metadata={"of": "mean_logit"})
    # Sum of p z.
    expected_logit: Tensor | None = field(metadata={"of": "entropy"})
    # ``lse - expected_logit``, summed relative to the maximum: large logits do not cancel.
    entropy: Tensor | None = field(metadata={"of": "entropy"})
    # Sum of p^2: the probability that two independent samples are equal.
    sum_p_squared: Tensor | None = field(metadata={"of": "sum_p_squared"})
    # log p of the selected entries, [..., K], or [E] for sets given with offsets. -inf for an id outside [0, V).
    selected_log_prob: Tensor | None = field(metadata=_FEATURE)
    max_logit: Tensor
    # int64 global id, the lowest among equals. If a logit of the token is NaN, even beside inf, or the shards are no
    # partition, ids are -1, and all fields but ``target_logit`` are NaN, except where the target is -100.
    # (``torch.argmax`` and ``torch.topk`` take NaN for the largest.)
    argmax: Tensor | None = field(metadata={"of": "argmax"})
    # [..., K], the largest first; all NaN if a logit of the token is NaN.
    top_logits: Tensor | None = field(metadata=_FEATURE)
    # [..., K] int64 global ids, the lowest among equals first; -1 as ``argmax``.
    top_ids: Tensor | None = field(metadata=_FEATURE)
    # V, 0-dimensional int64.
    vocab_size: Tensor

    def view(self, shape: tuple[int, ...]) -> TokenStatistics:
        """The same with every per-token field ``[N, ...]`` in this shape."""
        if shape == self.lse.shape:
            return self
        return self.changed(lambda value: value.view((*shape, *value.shape[1:])))

    def changed(self, change: Callable[[Tensor], Tensor]) -> TokenStatistics:
        """The same with every per-token field changed."""
        values: dict[str, Any] = {name: getattr(self, name) for name in NAMES}
        for name, value in values.items():
            of_sets = name == "selected_log_prob" and value is not None and value.dim() == self.lse.dim()  # [E]
            if value is not None and name != "vocab_size" and not of_sets:
                values[name] = change(value)
        return TokenStatistics(**values)


# In it wrappers such as DDP look for the tensors that a module returns.
pytree.register_dataclass(TokenStatistics)

NAMES = tuple(f.name for f in fields(TokenStatistics))
_ASKED_BY = {f.name: f.metadata.get("of", "") for f in fields(TokenStatistics)}
DIFFERENTIABLE = NAMES[: NAMES.index("max_logit")]


def present(options: Options, tensors: Tensors) -> list[str]:
    """The results of a call that are not None: "loss", or fields of :class:`TokenStatistics`."""
    if options.kind == "loss":
        return ["loss"]
    asked = {name: getattr(options, name) for name in _ASKED_BY.values() if name in Options._fields}
    asked |= {"target": tensors.target is not None, "": True}
    filled = [name for feature in features_of(options, tensors) for name in feature.shapes(options, tensors, 0)]
    return [name for name, of in _ASKED_BY.items() if asked.get(of) or name in filled]


def loss_of(call: Call, merged: Merged, found: Any) -> tuple[Tensor, Coefficients]:
    """The call's loss, of each token ``[N]`` or 0-dimensional, and the coefficients of its gradient. ``found``: what
    the backend made of the ``merged`` partial."""
    losses, coefficients = of_tokens(call, merged, found, Block(0, call.plan.problem.part_rows, 0))
    reduction = call.options.reduction
    if reduction == "none":
        return losses, coefficients
    if reduction == "sum":
        return losses.sum(), coefficients
    assert call.target is not None
    mean, divisor = call.backend.mean_loss(losses, call.target, call.token_weight, call.options.ignore_index)
    return mean, coefficients._replace(divisor=divisor)


def of_statistics(call: Call, partial: Tensor, vocab_size: Tensor, upstream: dict[str, Tensor | None]) -> Coefficients:
    """Coefficients of the gradient of the logits. ``upstream``: the gradients of the differentiable statistics."""
    backend, columns = call.backend, call.columns
    result = backend.statistics_gradient(upstream, partial, vocab_size, call.target, columns, call.options)
    for feature in call.features:
        result = feature.coefficients(call, Merged(partial, vocab_size), upstream, result)
    return result


def of_tokens(call: Call, merged: Merged, found: Any, block: Block) -> tuple[Tensor, Coefficients]:
    """Losses ``[R]`` of a block's tokens, and the coefficients of the gradient of their sum. ``call``: with the tensors
    of these tokens (:meth:`Call.of_tokens`). ``found``: as for :func:`loss_of`.

    Metrics of a caller's function are kept in its :class:`LossFunction`, as is what it raises: the call's collectives
    go on, with losses and gradients of NaN."""
    function = call.loss_function
    if function is None:
        return found
    try:
        losses, metrics, upstream = _of_function(call, function, found)
    except Exception as failure:
        function.failures = function.failures or [failure]
        losses = torch.full_like(merged.partial[MAX], torch.nan)
        return losses, Coefficients(losses)
    coefficients = of_statistics(call, merged.partial, found["vocab_size"], upstream)
    # An ignored token has no loss and no gradient, whatever the function makes of its values.
    ignored = call.target == call.options.ignore_index
    for name, metric in metrics.items():
        of_call = function.metrics.setdefault(name, metric.new_zeros(call.shape.numel()))
        call.layout.put(of_call, block, metric.detach().masked_fill(ignored, 0))
    losses = losses.to(call.dtype).masked_fill(ignored, 0.0)
    return losses, coefficients.each(lambda c: c.masked_fill(ignored, 0.0))


def _of_function(call: Call, function: LossFunction, found: dict[str, Any]) -> tuple[Tensor, dict, dict]:
    """The losses and metrics of a caller's function, and the derivatives of the losses by the statistics."""
    run = function.run
    given: dict[str, Any] = {name: found.get(name) for name in NAMES}
    upstream: dict[str, Tensor | None] = dict.fromkeys(DIFFERENTIABLE)
    leaves = dict[str, Tensor]()
    with torch.set_grad_enabled(any(call.needs)), saving_without_hooks():
        if torch.is_grad_enabled():
            leaves = {n: given[n].detach().requires_grad_() for n in DIFFERENTIABLE if given[n] is not None}
        losses, metrics = _called(run, given | leaves, call.values)
        function.differentiable.add(losses.requires_grad)
        if losses.requires_grad:
            ones = torch.ones_like(losses)
            upstream |= zip(leaves, torch.autograd.grad(losses, [*leaves.values()], ones, allow_unused=True))
        losses = losses.detach()
        if debug.enabled():
            _check_elementwise(call, run, given, losses)
    return losses, metrics, upstream


class _Asked(TokenStatistics):
    """Statistics for a caller's function, which must not read those that it has not asked for."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is None and name in _ASKED_BY:
            never = _ASKED_BY[name] == "feature"
            needed = "token_loss does not compute" if never else f"is computed with {_ASKED_BY[name]}=True"
            raise ValueError(f"loss reads {name}, which {needed}")
        return value

    def __repr__(self) -> str:
        return repr({name: value for name, value in vars(self).items() if value is not None})


def _called(run: Callable[..., Any], given: dict[str, Any], values: tuple[Tensor, ...]) -> tuple[Tensor, dict]:
    """The losses and metrics of the function. Raises ``ValueError`` for another result, and for a function that writes
    into its statistics, on which the gradient depends."""
    present, like = {name: value for name, value in given.items() if value is not None}, given["lse"]
    before = {name: version(value) for name, value in present.items()}
    result: Any = run(_Asked(**given), *values)
    for name, value in present.items():
        if version(value) != before[name]:
            raise ValueError(f"loss must not write into its statistics, and it wrote into {name}")
    is_pair = isinstance(result, tuple) and len(result) == 2
    losses, metrics = cast(Any, result if is_pair else (result, {}))
    if not isinstance(metrics, dict):
        raise ValueError(f"loss must return losses, or losses and a dict of metrics, got {described(metrics)}")
    for name, value in (("losses", losses), *metrics.items()):
        fits = isinstance(value, Tensor) and value.shape == like.shape and value.device == like.device
        if not fits or (value is losses and not losses.is_floating_point()):
            where = f" on {value.device}" if isinstance(value, Tensor) else ""
            raise ValueError(
                f"loss must return floating-point losses {list(like.shape)} on {like.device}, one for each token, and "
                f"metrics like them; as {name!r} it returned {described(value)}{where}"
            )
    return losses, metrics


def _check_elementwise(call: Call, run: Callable[..., Any], given: dict[str, Any], losses: Tensor) -> None:
    """Debug mode: raise ``ValueError`` if the loss of a token depends on the other tokens of its block: the function
    runs again on half of them, in reverse order."""
    rows = torch.arange(len(losses) - 1, len(losses) // 2 - 1, -1, device=losses.device)
    of_half = {name: v[rows] if isinstance(v, Tensor) and v.dim() else v for name, v in given.items()}
    with torch.no_grad():
        again, _ = _called(run, of_half, tuple([value[rows] for value in call.values]))
    apart = ~losses[rows].double().isclose(again.double(), *_SAME_LOSS, equal_nan=True)
    if apart.any():
        token = int(apart.nonzero()[0])
        raise ValueError(
            f"loss must be elementwise: the loss of one token is {losses[rows][token]:.6g} in a block of "
            f"{len(losses)} tokens, and {again[token]:.6g} in a block of {len(again)}. Pass what depends on other "
            "tokens, such as a mean over a sequence, as values per token"
        )
