"""Statistics of tokens from their merged partials, and their gradient as coefficients of that of the logits, in plain
torch.

With the maximum M, p = softmax(z) and the columns of :mod:`parallel_lce.core.partials`:

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

import torch
from torch import Tensor

from parallel_lce.core.options import Options
from parallel_lce.core.partials import MAX, SUM_EXP, TARGET, Coefficients, Columns, integer_view


def token_statistics(
    partial: Tensor,
    vocab_size: Tensor | int,
    target: Tensor | None,
    columns: Columns,
    options: Options,
    log_sum: bool = False,
) -> dict[str, Tensor | None]:
    """The statistics ``[R]`` that no feature fills, by name; None if the partial lacks the column.

    Args:
        partial: ``[C, R]``, merged, with these ``columns``.
        vocab_size: V, 0-dimensional int64, or a number. The result of this name is a tensor.
        target: ``[R]`` ids in the whole vocabulary, or None.
        options: with an ``ignore_index``, statistics of a target outside the vocabulary are NaN, of this one 0.
        log_sum: whether to return log s, too: another function's logarithm may differ in its last bit.
    """
    top, sum_exp, logit = partial[MAX], partial[SUM_EXP], partial[TARGET]
    if isinstance(vocab_size, int):
        vocab_size = partial.new_full((), vocab_size, dtype=torch.int64)
    of_sum = sum_exp.log()
    # If all logits are -inf, M is -inf and the sums are relative to 0: lse is -inf, not NaN.
    values: dict[str, Tensor | None] = dict(lse=top + of_sum, max_logit=top.clone(), vocab_size=vocab_size)
    if log_sum:
        values["log_sum"] = of_sum
    if target is not None:
        log_prob = (logit - top) - of_sum
        if options.ignore_index is None:
            logit = logit.clone()
        else:
            inside = (target >= 0) & (target < vocab_size)
            elsewhere = _elsewhere(target, options, top)
            logit, log_prob = logit.where(inside, elsewhere), log_prob.where(inside, elsewhere)
        values.update(target_logit=logit, target_log_prob=log_prob)
    if columns.total:
        values["mean_logit"] = partial[columns["total"]] / vocab_size
    if columns.shifted:
        values["mean_log_prob"] = partial[columns["shifted"]] / vocab_size - of_sum
    if columns.weighted:
        expected = partial[columns["weighted"]] / sum_exp
        values.update(expected_logit=top + expected, entropy=of_sum - expected)
    if columns.squared:
        values["sum_p_squared"] = partial[columns["squared"]] / sum_exp.square()
    if columns.argmax:
        # A NaN's own id would depend on the windows of the backend.
        values["argmax"] = integer_view(partial[columns["argmax"]]).long().masked_fill(top.isnan(), -1)
    return values


def _elsewhere(target: Tensor, options: Options, like: Tensor) -> Tensor:
    """The value of a statistic of the target where that is no id: 0 without a label, else NaN."""
    return torch.full_like(like, torch.nan).masked_fill_(target == options.ignore_index, 0.0)


def statistics_gradient(
    upstream: dict[str, Tensor | None],
    partial: Tensor,
    vocab_size: Tensor,
    target: Tensor | None,
    columns: Columns,
    options: Options,
) -> Coefficients:
    """Fold the ``upstream`` gradients ``[R]`` of the statistics, by name, into coefficients of the gradient of the
    logits. Other arguments as for :func:`token_statistics`."""
    given = dict(upstream)
    of_target, of_logit = given.get("target_log_prob"), given.get("target_logit")
    if target is not None and options.ignore_index is not None:
        # NaN from a target outside the vocabulary, unless the caller has masked it.
        inside = (target >= 0) & (target < vocab_size)
        elsewhere = _elsewhere(target, options, partial[MAX])
        if of_target is not None:
            given["target_log_prob"] = of_target.where(inside, elsewhere.masked_fill(of_target == 0, 0.0))
        if of_logit is not None:  # through lse: no rank has the logit of such a target
            elsewhere = elsewhere.masked_fill(inside | (of_logit == 0), 0.0)
            of_lse = given.get("lse")
            given["lse"] = elsewhere if of_lse is None else of_lse + elsewhere

    def total(*terms: tuple[int, str]) -> Tensor | None:
        signed = [sign * value for sign, name in terms if (value := given.get(name)) is not None]
        return sum(signed[1:], start=signed[0]) if signed else None

    # alpha without the target's log-probability
    rest = total((1, "lse"), (-1, "mean_log_prob"), (1, "expected_logit"))
    gamma = total((-1, "mean_logit"), (-1, "mean_log_prob"))
    delta = total((1, "expected_logit"), (-1, "entropy"))
    epsilon = total((2, "sum_p_squared"))
    if rest is None:
        rest = torch.zeros_like(partial[MAX])
    if delta is not None:
        # delta multiplies z - M, so the expected logit is taken relative to M, too.
        rest = rest - delta * (partial[columns["weighted"]] / partial[SUM_EXP])
    if epsilon is not None:
        rest = rest - epsilon * (partial[columns["squared"]] / partial[SUM_EXP].square())
    of_target, of_logit = given.get("target_log_prob"), given.get("target_logit")
    alpha = rest if of_target is None else rest - of_target
    beta = total((-1, "target_logit"), (-1, "target_log_prob"))
    excess = None if of_target is None else rest if of_logit is None else rest + of_logit
    return Coefficients(alpha, beta, None if gamma is None else gamma / vocab_size, delta, epsilon, excess)
