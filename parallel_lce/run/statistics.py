"""Per-token statistics of the logits: from merged partials, and back to the gradient of the logits.

Any loss is plain PyTorch on the ``[N]`` statistics. Upstream gradients of the statistics are folded into five per-token
coefficients of the gradient of the logits. The formulas: :mod:`parallel_lce.backends.statistics_formula`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from parallel_lce.backends.interface import Coefficients
from parallel_lce.call.call import Call
from parallel_lce.call.seam import features_of
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import Merged

FEATURE = {"column": "feature"}


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each token's logits.

    Fields have the target's shape, or without a target the hidden states' leading shape, unless a comment gives
    another. They are fp32, or fp64 for fp64 input. Fields that were not asked for are None. Fields from ``max_logit``
    on have no gradient.
    """

    # metadata["column"] names a column of the partial, or "target". If the call lacks it, the field is None. Fields of
    # FEATURE are None unless a feature of the call fills them. Fields without metadata always exist.

    # Log-sum-exp of the V real entries.
    lse: Tensor
    # For both: 0 for the target -100, NaN for another outside [0, V).
    target_logit: Tensor | None = field(metadata={"column": "target"})
    # ``target_logit - lse``, summed relative to the maximum: large logits do not cancel.
    target_log_prob: Tensor | None = field(metadata={"column": "target"})
    # Mean over the V real entries.
    mean_logit: Tensor | None = field(metadata={"column": "total"})
    # ``mean_logit - lse``, summed relative to the maximum: large logits do not cancel.
    mean_log_prob: Tensor | None = field(metadata={"column": "shifted"})
    # Sum of p z.
    expected_logit: Tensor | None = field(metadata={"column": "weighted"})
    # ``lse - expected_logit``, summed relative to the maximum: large logits do not cancel.
    entropy: Tensor | None = field(metadata={"column": "weighted"})
    # Sum of p^2: the probability that two independent samples are equal.
    sum_p_squared: Tensor | None = field(metadata={"column": "squared"})
    # log p of the selected entries, [..., K], or [E] for sets given with offsets. -inf for an id outside [0, V).
    selected_log_prob: Tensor | None = field(metadata=FEATURE)
    max_logit: Tensor
    # int64 global id, the lowest among equals. If a logit of the token is NaN, even beside inf, or the shards are no
    # partition, ids are -1, and all fields but ``target_logit`` are NaN, except where the target is -100.
    # (``torch.argmax`` and ``torch.topk`` take NaN for the largest.)
    argmax: Tensor | None = field(metadata={"column": "argmax"})
    # [..., K], the largest first; all NaN if a logit of the token is NaN.
    top_logits: Tensor | None = field(metadata=FEATURE)
    # [..., K] int64 global ids, the lowest among equals first; -1 as ``argmax``.
    top_ids: Tensor | None = field(metadata=FEATURE)
    # V, 0-dimensional int64.
    vocab_size: Tensor

    def view(self, shape: tuple[int, ...]) -> TokenStatistics:
        """The same with every per-token field in this shape."""
        if shape == self.lse.shape:
            return self
        values: dict[str, Any] = {name: getattr(self, name) for name in NAMES}
        for name, value in values.items():
            if value is not None and value.dim() == 2:
                values[name] = value.view((*shape, value.shape[1]))
            elif value is not None and name not in ("selected_log_prob", "vocab_size"):
                values[name] = value.view(shape)
        return TokenStatistics(**values)


NAMES = tuple(f.name for f in fields(TokenStatistics))
_COLUMNS = tuple(f.metadata.get("column") for f in fields(TokenStatistics))
DIFFERENTIABLE = NAMES[: NAMES.index("max_logit")]


class Residuals(NamedTuple):
    """Tensors for the backward of a call, beside the merged partial."""

    # For a loss, [N] each: coefficients of the gradient of the logits.
    alpha: Tensor | None = None
    beta: Tensor | None = None
    gamma: Tensor | None = None
    delta: Tensor | None = None
    epsilon: Tensor | None = None
    excess: Tensor | None = None
    # For a mean, 0-dimensional: divisor of the sum of the losses.
    divisor: Tensor | None = None
    # For statistics: V, 0-dimensional int64.
    vocab_size: Tensor | None = None


def present(options: Options, tensors: Tensors) -> list[str]:
    """The fields of :class:`TokenStatistics` that are not None."""
    columns = {*options.columns.requested, None} | ({"target"} if tensors.target is not None else set())
    filled = [name for feature in features_of(options, tensors) for name in feature.results]
    return [name for name, column in zip(NAMES, _COLUMNS) if column in columns or name in filled]


def outputs(call: Call, merged: Merged) -> tuple[list[Tensor | None], Residuals]:
    """The statistics in the order of ``NAMES``, and the residuals of their backward."""
    values = call.backend.token_statistics(*merged, call.target, call.columns, call.options, bool(call.features))
    vocab_size = values["vocab_size"]
    assert vocab_size is not None
    for feature in call.features:
        values |= feature.outputs(call, Merged(merged.partial, vocab_size), values)
    return [values.get(name) for name in NAMES], Residuals(vocab_size=vocab_size)


def coefficients(
    call: Call, partial: Tensor, residuals: Residuals, upstream: tuple[Tensor | None, ...]
) -> Coefficients:
    """Coefficients of the gradient of the logits. ``upstream``: the gradients of the differentiable statistics, in the
    order of ``DIFFERENTIABLE``."""
    given, vocab_size = dict(zip(DIFFERENTIABLE, upstream)), residuals.vocab_size
    assert vocab_size is not None
    backend, columns = call.backend, call.columns
    result = backend.statistics_gradient(given, partial, vocab_size, call.target, columns, call.options)
    for feature in call.features:
        result = feature.coefficients(call, Merged(partial, vocab_size), given, result)
    return result
