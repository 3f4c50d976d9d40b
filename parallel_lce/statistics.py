"""Per-token statistics of the logits: from merged partials, and back to the gradient of the logits.

Any loss is plain PyTorch on the ``[N]`` statistics. The upstream gradients that autograd hands back for them are
folded into five per-token coefficients of the gradient of the logits (:func:`coefficients`). With the maximum M, p =
softmax(z) and the columns of :mod:`parallel_lce.partials`:

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
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import Backend, Coefficients
from parallel_lce.partials import MAX, SUM_EXP, TARGET, Columns, integer_view


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each token's logits.

    Every field but the last has the target's shape, or the hidden states' leading shape without a target; fp32, or fp64
    for fp64 input. Fields that were not asked for are None. Fields from ``max_logit`` on have no gradient.
    """

    # metadata["column"]: the partial's column that the field needs, or "target". Without it the field is None.

    # Log-sum-exp of the V real entries.
    lse: Tensor
    # 0 for a target outside [0, V).
    target_logit: Tensor | None = field(metadata={"column": "target"})
    # ``target_logit - lse``, computed without that difference.
    target_log_prob: Tensor | None = field(metadata={"column": "target"})
    # Mean over the V real entries.
    mean_logit: Tensor | None = field(metadata={"column": "total"})
    # ``mean_logit - lse``, computed without that difference.
    mean_log_prob: Tensor | None = field(metadata={"column": "shifted"})
    # Sum of p z.
    expected_logit: Tensor | None = field(metadata={"column": "weighted"})
    # ``lse - expected_logit``, computed without that difference.
    entropy: Tensor | None = field(metadata={"column": "weighted"})
    # Sum of p^2: the probability that two independent samples are equal.
    sum_p_squared: Tensor | None = field(metadata={"column": "squared"})
    max_logit: Tensor
    # int64 global id, the lowest among equals; -1 where a logit is NaN or the shards are no partition.
    argmax: Tensor | None = field(metadata={"column": "argmax"})
    # V, 0-dimensional int64.
    vocab_size: Tensor

    def view(self, shape: tuple[int, ...]) -> TokenStatistics:
        """The same with every per-token field reshaped."""
        values = {name: getattr(self, name) for name in NAMES if name != "vocab_size"}
        reshaped: dict[str, Any] = {k: v if v is None else v.view(shape) for k, v in values.items()}
        return TokenStatistics(**reshaped, vocab_size=self.vocab_size)


NAMES = tuple(f.name for f in fields(TokenStatistics))
_COLUMNS = tuple(f.metadata.get("column") for f in fields(TokenStatistics))
DIFFERENTIABLE = NAMES[: NAMES.index("max_logit")]


def requested_columns(
    mean_logit: bool = False, expected_logit: bool = False, argmax: bool = False, sum_p_squared: bool = False
) -> Columns:
    """The columns that the statistics of ``parallel_lce.token_statistics`` need."""
    mean_logit = bool(mean_logit)
    return Columns(mean_logit, mean_logit, bool(expected_logit), bool(sum_p_squared), bool(argmax))


Residuals = tuple[Tensor, Tensor | None, Tensor | None]
"""What the losses save for their coefficients beside the merged partial: alpha, beta and gamma."""


@dataclass(frozen=True)
class StatisticsHead:
    """All statistics that the columns of a partial tell, as outputs in the order of ``NAMES``."""

    columns: Columns
    with_target: bool

    num_differentiable, num_residuals, weights = len(DIFFERENTIABLE), 1, None

    @property
    def present(self) -> list[bool]:
        """Which fields of :class:`TokenStatistics` are not None."""
        columns = {*self.columns.requested, *(["target"] if self.with_target else []), None}
        return [column in columns for column in _COLUMNS]

    def outputs(
        self, backend: Backend, partial: Tensor, vocab_size: Tensor | int
    ) -> tuple[list[Tensor | None], tuple[Tensor]]:
        """The statistics, and what :meth:`coefficients` needs beside the partial: V."""
        if isinstance(vocab_size, int):
            vocab_size = partial.new_full((), vocab_size, dtype=torch.int64)
        found = finish_statistics(partial, vocab_size, self.columns, self.with_target)
        return [getattr(found, name) for name in NAMES], (vocab_size,)

    def coefficients(
        self, partial: Tensor, residuals: tuple[Tensor], upstream: tuple[Tensor | None, ...]
    ) -> Coefficients:
        return coefficients(dict(zip(DIFFERENTIABLE, upstream)), partial, residuals[0], self.columns)


def finish_statistics(partial: Tensor, vocab_size: Tensor, columns: Columns, with_target: bool) -> TokenStatistics:
    """Statistics from a merged partial ``[C, N]``."""
    top, sum_exp, target = partial[MAX], partial[SUM_EXP], partial[TARGET]
    log_sum = sum_exp.log()
    # If all logits are -inf, M is -inf and the sums are relative to 0: lse is -inf, not NaN.
    values: dict[str, Any] = dict.fromkeys(NAMES)
    values.update(lse=top + log_sum, max_logit=top.clone(), vocab_size=vocab_size)
    if with_target:
        values.update(target_logit=target.clone(), target_log_prob=(target - top) - log_sum)
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
        ids = integer_view(partial[columns["argmax"]])
        values["argmax"] = ids.long().masked_fill(ids == torch.iinfo(ids.dtype).max, -1)
    return TokenStatistics(**values)


def coefficients(
    upstream: dict[str, Tensor | None], partial: Tensor, vocab_size: Tensor, columns: Columns
) -> Coefficients:
    """Fold the upstream gradients ``[N]`` of the statistics into coefficients of the gradient of the logits."""

    def total(*terms: tuple[int, str]) -> Tensor | None:
        found = [sign * value for sign, name in terms if (value := upstream.get(name)) is not None]
        return sum(found[1:], start=found[0]) if found else None

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
