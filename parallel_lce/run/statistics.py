"""Per-token statistics of the logits: from merged partials, and back to the gradient of the logits.

Any loss is plain PyTorch on the ``[N]`` statistics. Upstream gradients of the statistics are folded into five per-token
coefficients of the gradient of the logits (:func:`coefficients_of`). With the maximum M, p = softmax(z) and the columns
of :mod:`parallel_lce.core.partials`:

    lse               = M + log s                        d/dz_j = p_j
    target_logit      = t                                d/dz_j = [j = y]
    target_log_prob   = (t - M) - log s                  d/dz_j = [j = y] - p_j
    mean_logit        = zt / V                           d/dz_j = 1 / V
    mean_log_prob     = zs / V - log s                   d/dz_j = 1 / V - p_j
    expected_logit E  = M + ez / s                       d/dz_j = p_j (1 + z_j - E)
    entropy           = log s - ez / s                   d/dz_j = -p_j (z_j - E)
    sum_p_squared Q   = sq / s^2                         d/dz_j = 2 p_j (p_j - Q)
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.interface import Coefficients
from parallel_lce.call.call import Call
from parallel_lce.call.seam import features_of
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import MAX, SUM_EXP, TARGET, Columns, Merged, integer_view

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
    # int64 global id, the lowest among equals. If a logit of the token is NaN, or the shards are no partition, ids are
    # -1, and all fields but ``target_logit`` are NaN, except where the target is -100. (``torch.argmax`` and
    # ``torch.topk`` take NaN for the largest.)
    argmax: Tensor | None = field(metadata={"column": "argmax"})
    # [..., K], the largest first; all NaN if a logit of the token is NaN.
    top_logits: Tensor | None = field(metadata=FEATURE)
    # [..., K] int64 global ids, the lowest among equals first; -1 as ``argmax``.
    top_ids: Tensor | None = field(metadata=FEATURE)
    # int64 global id, drawn from the softmax; -1 if a logit of the token is NaN or +inf, if all are -inf, or if the
    # shards are no partition.
    sampled_id: Tensor | None = field(metadata=FEATURE)
    # V, 0-dimensional int64.
    vocab_size: Tensor

    def view(self, shape: tuple[int, ...]) -> TokenStatistics:
        """The same with every per-token field in this shape."""
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
    # For a mean, 0-dimensional: divisor of the sum of the losses.
    divisor: Tensor | None = None
    # For statistics: V, 0-dimensional int64.
    vocab_size: Tensor | None = None
    # [N]: which targets are ids; the value of a target's statistics elsewhere, 0 without a label, else NaN.
    inside: Tensor | None = None
    elsewhere: Tensor | None = None


def present(options: Options, tensors: Tensors) -> list[str]:
    """The fields of :class:`TokenStatistics` that are not None."""
    columns = {*options.columns.requested, None} | ({"target"} if tensors.target is not None else set())
    filled = [name for feature in features_of(options, tensors) for name in feature.results]
    return [name for name, column in zip(NAMES, _COLUMNS) if column in columns or name in filled]


def outputs(call: Call, merged: Merged) -> tuple[list[Tensor | None], Residuals]:
    """The statistics in the order of ``NAMES``, and the residuals of their backward."""
    partial, vocab_size = merged
    if isinstance(vocab_size, int):
        vocab_size = partial.new_full((), vocab_size, dtype=torch.int64)
    inside = elsewhere = None
    if call.target is not None and call.options.ignore_index is not None:
        inside = (call.target >= 0) & (call.target < vocab_size)
        elsewhere = torch.full_like(partial[TARGET], torch.nan)
        elsewhere.masked_fill_(call.target == call.options.ignore_index, 0.0)
    values = finish_statistics(call, partial, vocab_size, inside, elsewhere)
    for feature in call.features:
        values |= feature.outputs(call, Merged(partial, vocab_size), values)
    residuals = Residuals(vocab_size=vocab_size, inside=inside, elsewhere=elsewhere)
    return [values[name] for name in NAMES], residuals


def coefficients(
    call: Call, partial: Tensor, residuals: Residuals, upstream: tuple[Tensor | None, ...]
) -> Coefficients:
    """Coefficients of the gradient of the logits. ``upstream``: the gradients of the differentiable statistics, in the
    order of ``DIFFERENTIABLE``."""
    given = dict(zip(DIFFERENTIABLE, upstream))
    vocab_size = residuals.vocab_size
    assert vocab_size is not None
    of_target, of_logit = given["target_log_prob"], given["target_logit"]
    if residuals.inside is not None and residuals.elsewhere is not None:
        # NaN from a target outside the vocabulary, unless the caller has masked it.
        if of_target is not None:
            elsewhere = residuals.elsewhere.masked_fill(of_target == 0, 0.0)
            given["target_log_prob"] = of_target.where(residuals.inside, elsewhere)
        if of_logit is not None:  # through lse: no rank has the logit of such a target
            elsewhere = residuals.elsewhere.masked_fill(residuals.inside | (of_logit == 0), 0.0)
            given["lse"] = elsewhere if given["lse"] is None else given["lse"] + elsewhere
    result = coefficients_of(given, partial, vocab_size, call.columns)
    for feature in call.features:
        result = feature.coefficients(call, Merged(partial, vocab_size), given, result)
    return result


def finish_statistics(
    call: Call, partial: Tensor, vocab_size: Tensor, inside: Tensor | None, elsewhere: Tensor | None
) -> dict[str, Any]:
    """Statistics from a merged partial ``[C, N]``, by name; None if the partial lacks the column. ``inside``,
    ``elsewhere``: as in :class:`Residuals`."""
    top, sum_exp, logit, columns = partial[MAX], partial[SUM_EXP], partial[TARGET], call.columns
    log_sum = sum_exp.log()
    # If all logits are -inf, M is -inf and the sums are relative to 0: lse is -inf, not NaN.
    values: dict[str, Any] = dict.fromkeys(NAMES)
    values.update(lse=top + log_sum, max_logit=top.clone(), vocab_size=vocab_size)
    if call.target is not None:
        log_prob = (logit - top) - log_sum
        if inside is None or elsewhere is None:
            logit = logit.clone()
        else:
            logit, log_prob = logit.where(inside, elsewhere), log_prob.where(inside, elsewhere)
        values.update(target_logit=logit, target_log_prob=log_prob)
    if columns.total:
        values.update(mean_logit=partial[columns["total"]] / vocab_size)
    if columns.shifted:
        values.update(mean_log_prob=partial[columns["shifted"]] / vocab_size - log_sum)
    if columns.weighted:
        expected = partial[columns["weighted"]] / sum_exp
        values.update(expected_logit=top + expected, entropy=log_sum - expected)
    if columns.squared:
        values["sum_p_squared"] = partial[columns["squared"]] / sum_exp.square()
    if columns.argmax:
        # A NaN's own id would depend on the windows of the backend.
        values["argmax"] = integer_view(partial[columns["argmax"]]).long().masked_fill(top.isnan(), -1)
    return values


def coefficients_of(
    upstream: dict[str, Tensor | None], partial: Tensor, vocab_size: Tensor, columns: Columns
) -> Coefficients:
    """Fold the upstream gradients ``[N]`` of the statistics into coefficients of the gradient of the logits."""

    def total(*terms: tuple[int, str]) -> Tensor | None:
        signed = [sign * value for sign, name in terms if (value := upstream.get(name)) is not None]
        return sum(signed[1:], start=signed[0]) if signed else None

    alpha = total((1, "lse"), (-1, "target_log_prob"), (-1, "mean_log_prob"), (1, "expected_logit"))
    beta = total((-1, "target_logit"), (-1, "target_log_prob"))
    gamma = total((-1, "mean_logit"), (-1, "mean_log_prob"))
    delta = total((1, "expected_logit"), (-1, "entropy"))
    epsilon = total((2, "sum_p_squared"))
    if alpha is None:
        alpha = torch.zeros_like(partial[MAX])
    if delta is not None:
        # delta multiplies z - M, so the expected logit is taken relative to M, too.
        alpha = alpha - delta * (partial[columns["weighted"]] / partial[SUM_EXP])
    if epsilon is not None:
        alpha = alpha - epsilon * (partial[columns["squared"]] / partial[SUM_EXP].square())
    return Coefficients(alpha, beta, None if gamma is None else gamma / vocab_size, delta, epsilon)
