"""What is made of a token's merged partial: its loss and the coefficients of the loss's gradient, or its statistics.

The kernel that merges partials forms both at once (:mod:`parallel_lce.kernels.partials`). The formulas, in plain torch:
:mod:`parallel_lce.backends.formulas`.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.memory import empty_if, on_device_of
from parallel_lce.core.options import Options, Wanted
from parallel_lce.core.partials import Coefficients, Columns
from parallel_lce.kernels.arithmetic import factor_of, times
from parallel_lce.kernels.launch import Relaunched

# Tokens per program; tokens per step of the mean's only program.
_TOKENS, _SUMMED = tl.constexpr(128), tl.constexpr(4096)


class _Losses(NamedTuple):
    """The losses of R tokens, an output, and what they depend on."""

    # [R], outputs: the losses, and the coefficients of their gradient. None: 0
    losses: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor
    gamma: torch.Tensor | None
    excess: torch.Tensor | None
    token_weight: torch.Tensor | None
    # None: the kernel is compiled without the term.
    ignore_index: int | None
    smoothing: float | None
    z_loss: float | None
    # 1, or None: the loss of a target outside the vocabulary is not NaN.
    outside_is_nan: int | None


# Of each statistic, the column of the partial without which it is None; "target": without targets; "": never.
_COLUMN_OF = dict(
    lse="",
    target_logit="target",
    target_log_prob="target",
    mean_logit="total",
    mean_log_prob="shifted",
    expected_logit="weighted",
    entropy="weighted",
    sum_p_squared="squared",
    max_logit="",
    argmax="argmax",
)
# The statistics of R tokens, outputs ``[R]``; V, and log s, None if it is not asked for; and an option.
_Statistics = namedtuple("_Statistics", [*_COLUMN_OF, "vocab_size", "log_sum", "ignore_index"])
# Gradients of the statistics that have one, ``[R]`` each; and their strides, in the same order.
_Upstream = namedtuple("_Upstream", _Statistics._fields[: _Statistics._fields.index("max_logit")])


class Results(NamedTuple):
    """Memory for the results of R tokens, for the kernels that fill it, and what they need to know."""

    kind: str
    outputs: _Losses | _Statistics
    # [R] int64 ids in the whole vocabulary, or None
    target: torch.Tensor | None

    @classmethod
    def new(cls, wanted: Wanted, like: torch.Tensor, rows: int) -> Results:
        """``like``: of the results' device. Each result has memory of its own: users may change one in place."""
        options, target, device = wanted.options, wanted.target, like.device
        if wanted.kind == "loss":
            smoothing, z_loss = options.label_smoothing or None, options.z_loss or None
            present = True, True, True, smoothing is not None, z_loss is not None
            memory = [empty_if(there, rows, device) for there in present]
            terms = options.ignore_index, smoothing, z_loss, 1 if options.outside_is_nan else None
            return cls("loss", _Losses(*memory, wanted.token_weight, *terms), target)
        columns = {"", *options.columns.requested, *(["target"] if target is not None else [])}
        memory = [
            empty_if(column in columns, rows, device, torch.int64 if name == "argmax" else torch.float32)
            for name, column in _COLUMN_OF.items()
        ]
        vocab_size, log_sum = empty_if(True, (), device, torch.int64), empty_if(wanted.log_sum, rows, device)
        return cls("statistics", _Statistics(*memory, vocab_size, log_sum, options.ignore_index), target)

    def of_rows(self, rows: slice) -> Results:
        """The memory of some of the tokens."""
        outputs: Any = [v[rows] if isinstance(v, torch.Tensor) and v.dim() else v for v in self.outputs]
        target = None if self.target is None else self.target[rows]
        return self._replace(outputs=type(self.outputs)(*outputs), target=target)

    def found(self) -> Any:
        """For a loss the losses ``[R]`` and the coefficients; else the statistics by name."""
        if isinstance(self.outputs, _Losses):
            losses, alpha, beta, gamma, excess, *_ = self.outputs
            return losses, Coefficients(alpha, beta, gamma, excess=excess)
        *statistics, _ = self.outputs
        return dict(zip(_Statistics._fields, statistics))


@triton.jit
def store_losses(out, token, columns, entries):
    """Form losses and coefficients of the tokens ``r``. ``token``: r, whether there is such a token, and its target.
    ``columns``: maximum, sum of exponentials, the target's logit and, with smoothing, the shifted sum."""
    r, valid, target_id = token
    top, sum_exp, logit, shifted = columns
    log_sum = tl.log(sum_exp)
    inside = (target_id >= 0) & (target_id < entries)
    weight = tl.full(top.shape, 1.0, tl.float32)
    if out.token_weight is not None:
        weight = tl.load(out.token_weight + r, mask=valid, other=0.0)
    smoothing = 0.0
    if out.smoothing is not None:
        smoothing = out.smoothing
    log_prob, of_target = (logit - top) - log_sum, 1.0 - smoothing
    if out.outside_is_nan is not None:
        weight = tl.where(inside, weight, float("nan"))
    else:
        log_prob = tl.where(inside, log_prob, -log_sum)
        of_target = tl.where(inside, of_target, 0.0)
    loss = -(1.0 - smoothing) * log_prob
    if out.smoothing is not None:
        loss -= smoothing * (shifted / (entries + 0.0) - log_sum)
    of_lse = 0.0
    if out.z_loss is not None:
        lse = top + log_sum
        loss += out.z_loss * lse * lse
        of_lse = 2.0 * out.z_loss * lse
    loss *= weight
    if out.ignore_index is not None:
        ignored = target_id == out.ignore_index
        loss = tl.where(ignored, 0.0, loss)
        weight = tl.where(ignored, 0.0, weight)
    tl.store(out.losses + r, loss, mask=valid)
    tl.store(out.alpha + r, tl.where(weight == 0.0, 0.0, weight * (1.0 + of_lse)), mask=valid)
    tl.store(out.beta + r, weight * of_target, mask=valid)
    if out.gamma is not None:
        tl.store(out.gamma + r, weight * (smoothing / (entries + 0.0)), mask=valid)
    if out.excess is not None:
        excess = tl.where(weight == 0.0, 0.0, weight * ((1.0 - of_target) + of_lse))
        tl.store(out.excess + r, excess, mask=valid)


@triton.jit
def _elsewhere(target_id, ignore_index):
    """The value of a statistic of a target that is no id: 0 without a label, else NaN."""
    return tl.where(target_id == ignore_index, 0.0, float("nan"))


@triton.jit
def store_statistics(out, token, columns, sums, entries):
    """Form the statistics of the tokens ``r``. ``token``: as for :func:`store_losses`. ``columns``: maximum, sum of
    exponentials, the target's logit and the argmax. ``sums``: shifted, total, weighted and squared. Those of columns
    that are not asked for are not read."""
    r, valid, target_id = token
    top, sum_exp, logit, argmax = columns
    shifted, total, weighted, squared = sums
    size = entries.to(tl.float32)
    log_sum = tl.log(sum_exp)
    tl.store(out.lse + r, top + log_sum, mask=valid)
    tl.store(out.max_logit + r, top, mask=valid)
    if out.target_logit is not None:
        log_prob = (logit - top) - log_sum
        if out.ignore_index is not None:
            inside = (target_id >= 0) & (target_id < entries)
            elsewhere = _elsewhere(target_id, out.ignore_index)
            logit, log_prob = tl.where(inside, logit, elsewhere), tl.where(inside, log_prob, elsewhere)
        tl.store(out.target_logit + r, logit, mask=valid)
        tl.store(out.target_log_prob + r, log_prob, mask=valid)
    if out.mean_logit is not None:
        tl.store(out.mean_logit + r, tl.div_rn(total, size), mask=valid)
    if out.mean_log_prob is not None:
        tl.store(out.mean_log_prob + r, tl.div_rn(shifted, size) - log_sum, mask=valid)
    if out.entropy is not None:
        expected = tl.div_rn(weighted, sum_exp)
        tl.store(out.expected_logit + r, top + expected, mask=valid)
        tl.store(out.entropy + r, log_sum - expected, mask=valid)
    if out.sum_p_squared is not None:
        tl.store(out.sum_p_squared + r, tl.div_rn(squared, sum_exp * sum_exp), mask=valid)
    if out.argmax is not None:
        # A NaN's own id would depend on the windows.
        tl.store(out.argmax + r, tl.where(top != top, -1, argmax).to(tl.int64), mask=valid)
    if out.log_sum is not None:
        tl.store(out.log_sum + r, log_sum, mask=valid)
    if tl.program_id(0) == 0:
        tl.store(out.vocab_size, entries.to(tl.int64))


@Relaunched
@triton.jit(do_not_specialize=["rows", "ignore_index"])
def lce_forward_mean(losses, target, token_weight, mean, divisor, rows, ignore_index):
    total, weights = tl.zeros((_SUMMED,), tl.float32), tl.zeros((_SUMMED,), tl.float32)
    for first in range(0, rows, _SUMMED):
        row = first + tl.arange(0, _SUMMED)
        valid = row < rows
        total += tl.load(losses + row, mask=valid, other=0.0)
        counted = valid
        if ignore_index is not None:
            counted &= tl.load(target + row, mask=valid, other=0) != ignore_index
        weight = tl.full((_SUMMED,), 1.0, tl.float32)
        if token_weight is not None:
            weight = tl.load(token_weight + row, mask=valid, other=0.0)
        weights += tl.where(counted, weight, 0.0)
    whole = tl.sum(weights, 0)
    # If all weights are 0, the mean and its gradients are 0.
    whole = tl.where(whole == 0.0, float("inf"), whole)
    tl.store(divisor, whole)
    tl.store(mean, tl.sum(total, 0) / whole)


def mean_loss(
    losses: torch.Tensor, target: torch.Tensor, token_weight: torch.Tensor | None, ignore_index: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of ``losses [R]`` and its divisor, both 0-dimensional fp32. The divisor is the sum of the weights of all
    tokens that are not ignored. One program adds in a fixed order."""
    mean, divisor = (torch.empty((), dtype=torch.float32, device=losses.device) for _ in range(2))
    with on_device_of(losses):
        given = losses, target, token_weight, mean, divisor, len(losses), ignore_index
        lce_forward_mean.launch((1,), *given, num_warps=16)
    return mean, divisor


@triton.jit
def _upstream_of(gradient, stride, row, valid):
    """The upstream gradient of a statistic; 0 without one."""
    if gradient is not None:
        return tl.load(gradient + row * stride, mask=valid, other=0.0)
    else:
        return tl.zeros(row.shape, tl.float32)


@Relaunched
@triton.jit(do_not_specialize=["rows", "ignore_index"])
def lce_backward_statistics(
    partial,
    vocab_size,
    target,
    upstream,
    strides,
    out,
    rows,
    ignore_index,
    WEIGHTED: tl.constexpr,
    SQUARED: tl.constexpr,
):
    row = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    valid = row < rows
    entries = tl.load(vocab_size)
    inside, elsewhere = valid, tl.zeros((_TOKENS,), tl.float32)
    if ignore_index is not None:
        if target is not None:
            target_id = tl.load(target + row, mask=valid, other=0)
            inside = (target_id >= 0) & (target_id < entries)
            elsewhere = _elsewhere(target_id, ignore_index)
    of_lse = _upstream_of(upstream.lse, strides.lse, row, valid)
    of_logit = _upstream_of(upstream.target_logit, strides.target_logit, row, valid)
    of_target = _upstream_of(upstream.target_log_prob, strides.target_log_prob, row, valid)
    of_mean = _upstream_of(upstream.mean_logit, strides.mean_logit, row, valid)
    of_mean_log_prob = _upstream_of(upstream.mean_log_prob, strides.mean_log_prob, row, valid)
    of_expected = _upstream_of(upstream.expected_logit, strides.expected_logit, row, valid)
    of_entropy = _upstream_of(upstream.entropy, strides.entropy, row, valid)
    # NaN from a target outside the vocabulary, unless the caller has masked it; that of its logit, which no rank has,
    # through lse.
    of_target = tl.where(inside, of_target, tl.where(of_target == 0.0, 0.0, elsewhere))
    of_lse += tl.where(inside | (of_logit == 0.0), 0.0, elsewhere)
    # alpha without the target's log-probability
    rest = 0.0 + of_lse - of_mean_log_prob + of_expected
    gamma = 0.0 - of_mean - of_mean_log_prob
    delta = 0.0 + of_expected - of_entropy
    sum_exp = tl.load(partial + rows + row, mask=valid, other=1.0)
    if out.delta is not None:
        # delta multiplies z - M, so the expected logit is taken relative to M, too.
        rest -= delta * tl.div_rn(tl.load(partial + WEIGHTED * rows + row, mask=valid, other=0.0), sum_exp)
        tl.store(out.delta + row, delta, mask=valid)
    if out.epsilon is not None:
        epsilon = 2.0 * _upstream_of(upstream.sum_p_squared, strides.sum_p_squared, row, valid)
        squared = tl.load(partial + SQUARED * rows + row, mask=valid, other=0.0)
        rest -= epsilon * tl.div_rn(squared, sum_exp * sum_exp)
        tl.store(out.epsilon + row, epsilon, mask=valid)
    tl.store(out.alpha + row, rest - of_target, mask=valid)
    if out.beta is not None:
        tl.store(out.beta + row, -(of_target + of_logit), mask=valid)
    if out.excess is not None:
        tl.store(out.excess + row, rest + of_logit, mask=valid)
    if out.gamma is not None:
        tl.store(out.gamma + row, tl.div_rn(gamma, entries.to(tl.float32)), mask=valid)


def statistics_gradient(
    upstream: dict[str, torch.Tensor | None],
    partial: torch.Tensor,
    vocab_size: torch.Tensor,
    target: torch.Tensor | None,
    columns: Columns,
    options: Options,
) -> Coefficients:
    """:func:`parallel_lce.backends.formulas.statistics_gradient` in one launch."""
    # Saved-tensor hooks may have changed the strides.
    partial, rows = partial.contiguous(), partial.shape[1]
    given = _Upstream(*[upstream.get(name) for name in _Upstream._fields])
    strides = _Upstream(*[0 if each is None else each.stride(0) for each in given])  # pyright: ignore[reportArgumentType]

    def memory(*names: str) -> torch.Tensor | None:
        return empty_if(any([upstream.get(name) is not None for name in names]), rows, partial.device)

    coefficients = Coefficients(
        alpha=torch.empty(rows, dtype=torch.float32, device=partial.device),
        beta=memory("target_logit", "target_log_prob"),
        gamma=memory("mean_logit", "mean_log_prob"),
        delta=memory("expected_logit", "entropy"),
        epsilon=memory("sum_p_squared"),
        excess=memory("target_log_prob"),
    )
    with on_device_of(partial):
        lce_backward_statistics.launch(
            (max(1, -(-rows // _TOKENS.value)),),
            partial,
            vocab_size,
            target,
            given,
            strides,
            coefficients,
            rows,
            options.ignore_index,
            WEIGHTED=columns.rows["WEIGHTED"],
            SQUARED=columns.rows["SQUARED"],
        )
    return coefficients


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_coefficients(given, out, rows, factor_stride):
    r = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    valid = r < rows
    factor = factor_of(given, factor_stride, r, valid)
    for n in tl.static_range(6):  # from alpha to excess
        if given[n] is not None:
            tl.store(out[n] + r, times(tl.load(given[n] + r, mask=valid, other=0.0), factor), mask=valid)


def factor_stride_of(coefficients: Coefficients) -> int:
    """The stride of the factor; 0 for one number."""
    factor = coefficients.factor
    return 0 if factor is None or factor.dim() == 0 else factor.stride(0)


def without_factor(coefficients: Coefficients) -> Coefficients:
    """:func:`parallel_lce.backends.formulas.without_factor` in one launch."""
    if coefficients.factor is None and coefficients.divisor is None:
        return coefficients
    rows, stride = coefficients.alpha.shape[0], factor_stride_of(coefficients)
    out = coefficients.each(torch.empty_like)
    lce_backward_coefficients.launch((max(1, -(-rows // _TOKENS.value)),), coefficients, out, rows, stride)
    return out
