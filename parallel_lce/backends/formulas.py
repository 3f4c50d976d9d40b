"""Results of tokens from their merged partials, and the coefficients of the gradient of the logits, in plain torch.

Cross-entropies: :func:`token_losses`. Statistics, with the maximum M, p = softmax(z) and the columns of
:mod:`parallel_lce.core.partials`:

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

from parallel_lce.core.logit_map import Projection
from parallel_lce.core.options import Options
from parallel_lce.core.partials import MAX, SHIFTED, SUM_EXP, TARGET, Coefficients, Columns, integer_view
from parallel_lce.core.selection import Selection


def token_losses(
    partial: Tensor, vocab_size: Tensor | int, target: Tensor, token_weight: Tensor | None, options: Options
) -> tuple[Tensor, Coefficients]:
    """Per-token losses ``[R]`` and the coefficients of their gradient.

    The loss is ``w (-(1 - eps) log p_y - eps mean_j log p_j + z_loss lse^2)``; its gradient by the logits is
    ``alpha p_j - beta [j = y] - gamma``. Label smoothing eps as in ``torch.nn.functional.cross_entropy``
    (Szegedy et al. 2015, arXiv:1512.00567), over all real entries. z-loss of PaLM (Chowdhery et al. 2022,
    arXiv:2204.02311).

    Args:
        partial: ``[C, R]``, merged; column 3 holds the shifted sums if labels are smoothed.
        vocab_size: V, 0-dimensional int64, or a number.
        target: ``[R]`` ids in the whole vocabulary.
        token_weight: w ``[R]``; None for 1.
        options: ``ignore_index``: tokens with this target have loss 0, and gradient 0 unless their logits are NaN.
            ``outside_is_nan``: a target outside the vocabulary has loss NaN. If False, as in Megatron, it has loss
            ``lse - max`` and the gradient of lse. ``label_smoothing`` and ``z_loss`` are eps and the factor above.
    """
    ignore_index, label_smoothing, z_loss = options.ignore_index, options.label_smoothing, options.z_loss
    top, log_sum = partial[MAX], partial[SUM_EXP].log()
    loss = log_sum - (partial[TARGET] - top)
    outside = (target < 0) | (target >= vocab_size)
    weight = torch.ones_like(top) if token_weight is None else token_weight
    target_coefficient = 1 - label_smoothing
    if options.outside_is_nan:
        # NaN in the weight makes the loss and its gradient NaN.
        weight = weight.masked_fill(outside, torch.nan)
    else:
        loss = torch.where(outside, log_sum, loss)
        target_coefficient = target_coefficient * (~outside).to(weight.dtype)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * (partial[SHIFTED] / vocab_size - log_sum)
    lse_factor = excess = None
    if z_loss:
        lse = top + log_sum
        loss = loss + z_loss * lse.square()
        lse_factor = 2 * z_loss * lse
    loss = loss * weight
    if ignore_index is not None:
        ignored = target == ignore_index
        loss, weight = loss.masked_fill(ignored, 0.0), weight.masked_fill(ignored, 0.0)
    alpha = weight if lse_factor is None else (weight * (1 + lse_factor)).masked_fill_(weight == 0, 0.0)
    if lse_factor is not None:
        excess = (weight * (1 - target_coefficient + lse_factor)).masked_fill_(weight == 0, 0.0)
    gamma = weight * label_smoothing / vocab_size if label_smoothing else None
    return loss, Coefficients(alpha, weight * target_coefficient, gamma, excess=excess)


def without_factor(coefficients: Coefficients) -> Coefficients:
    """The same gradient without factor and divisor."""
    factor = coefficients.factor
    if coefficients.divisor is not None:
        factor = (1.0 if factor is None else factor) / coefficients.divisor
    if factor is None:
        return coefficients
    return coefficients.each(lambda c: (c * factor).masked_fill_(c == 0, 0.0))


def sum_of_weights(target: Tensor, token_weight: Tensor | None, ignore_index: int | None, dtype: torch.dtype) -> Tensor:
    """Divisor of a mean: the sum of the counted tokens' weights, 0-dimensional. If that sum is 0, the divisor is
    infinity, or 1 without weights, so that the mean and its gradients are 0."""
    counts = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    if token_weight is None:
        return counts.sum(dtype=dtype).clamp(min=1)
    total = torch.where(counts, token_weight, 0.0).sum()
    return total.masked_fill(total == 0, torch.inf)


def mean_loss(
    losses: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """The mean of the ``losses [R]`` and its divisor, both 0-dimensional. Arguments as in :func:`token_losses`."""
    divisor = sum_of_weights(target, token_weight, ignore_index, losses.dtype)
    return losses.sum() / divisor, divisor


def token_statistics(
    partial: Tensor, vocab_size: Tensor | int, target: Tensor | None, options: Options, log_sum: bool = False
) -> dict[str, Tensor | None]:
    """The statistics ``[R]`` that no feature fills, by name; None if the partial lacks the column.

    Args:
        partial: ``[C, R]``, merged, with the columns of the ``options``.
        vocab_size: V, 0-dimensional int64, or a number. The result of this name is a tensor.
        target: ``[R]`` ids in the whole vocabulary, or None.
        options: with an ``ignore_index``, statistics of a target outside the vocabulary are NaN, of this one 0.
        log_sum: whether to return log s, too: another function's logarithm may differ in its last bit.
    """
    top, sum_exp, logit, columns = partial[MAX], partial[SUM_EXP], partial[TARGET], options.columns
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


def fp16_scale_of(
    coefficients: Coefficients, sum_exp: Tensor, projection: Projection, selection: Selection | None = None
) -> Tensor:
    """A power of two that brings the largest gradient of a logit near 2^10 in fp16, 0-dimensional, on the device.

    The gradients of a mean over many tokens, 1 / N each, would underflow without it. A token's NaN or infinity does not
    affect the others. ``coefficients``: without a factor. Gradients that are differences may be far smaller than their
    coefficients: with them, no p counts as more than ``1 / sum_exp [R]``.
    """
    logit_map, (alpha, beta, gamma, delta, epsilon, *_) = projection.logit_map, coefficients
    if any(c is not None for c in (gamma, delta, epsilon)):
        alpha, delta, epsilon = (c if c is None else c / sum_exp for c in (alpha, delta, epsilon))
        epsilon = epsilon if epsilon is None else epsilon / sum_exp
    terms = [c for c in (alpha, beta, gamma, delta, epsilon) if c is not None]
    token_scale = logit_map.token_scale
    scaled = [c.abs() if token_scale is None else (c * token_scale).abs() for c in terms]
    first, *others = [c.nan_to_num(0.0, 0.0).amax() for c in scaled]
    largest = sum(others, start=first) * abs(logit_map.scale)
    if selection is not None and len(selection.ids):
        largest = largest + selection.gradient.abs().nan_to_num(0.0, 0.0).amax()
    return fp16_scale_near(largest)


def fp16_scale_near(largest: Tensor) -> Tensor:
    """A power of two that brings ``largest`` near 2^10, 0-dimensional, on the device."""
    exponent = 10 - torch.frexp(largest).exponent
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(-40, 40))
