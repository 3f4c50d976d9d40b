"""Statistics of tokens from merged partials in one launch, and the coefficients of their gradient in another.

Plain torch takes about fifteen elementwise operations for each (:mod:`parallel_lce.backends.statistics_formula`, which
has the formulas): for a few hundred tokens the host needs longer for these than the GPU for the projection.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.memory import on_device_of
from parallel_lce.core.options import Options
from parallel_lce.core.partials import Coefficients, Columns
from parallel_lce.kernels.relaunch import Relaunched

# Tokens per program.
_TOKENS = tl.constexpr(128)


class _Statistics(NamedTuple):
    """The statistics ``[R]`` of a call, by their names; None for one that is not asked for."""

    lse: torch.Tensor
    target_logit: torch.Tensor | None
    target_log_prob: torch.Tensor | None
    mean_logit: torch.Tensor | None
    mean_log_prob: torch.Tensor | None
    expected_logit: torch.Tensor | None
    entropy: torch.Tensor | None
    sum_p_squared: torch.Tensor | None
    max_logit: torch.Tensor
    argmax: torch.Tensor | None
    vocab_size: torch.Tensor
    log_sum: torch.Tensor | None


# Gradients of the statistics that have one, ``[R]`` each; and their strides, in the same order.
_Upstream = namedtuple("_Upstream", _Statistics._fields[: _Statistics._fields.index("max_logit")])


@triton.jit
def _elsewhere(target_id, ignore_index):
    """The value of a statistic of a target that is no id: 0 without a label, else NaN."""
    return tl.where(target_id == ignore_index, 0.0, float("nan"))


@Relaunched
@triton.jit(do_not_specialize=["rows", "entries", "ignore_index"])
def lce_forward_statistics(
    partial,
    vocab_size,
    target,
    out,
    rows,
    entries,
    ignore_index,
    SHIFTED: tl.constexpr,
    TOTAL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SQUARED: tl.constexpr,
    ARGMAX: tl.constexpr,
):
    """``SHIFTED`` to ``ARGMAX``: the columns' rows in the partial."""
    row = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    valid = row < rows
    if vocab_size is not None:
        entries = tl.load(vocab_size)
    size = entries.to(tl.float32)
    top = tl.load(partial + row, mask=valid, other=0.0)
    sum_exp = tl.load(partial + rows + row, mask=valid, other=1.0)
    log_sum = tl.log(sum_exp)
    tl.store(out.lse + row, top + log_sum, mask=valid)
    tl.store(out.max_logit + row, top, mask=valid)
    if out.target_logit is not None:
        logit = tl.load(partial + 2 * rows + row, mask=valid, other=0.0)
        log_prob = (logit - top) - log_sum
        if ignore_index is not None:
            target_id = tl.load(target + row, mask=valid, other=0)
            inside = (target_id >= 0) & (target_id < entries)
            elsewhere = _elsewhere(target_id, ignore_index)
            logit, log_prob = tl.where(inside, logit, elsewhere), tl.where(inside, log_prob, elsewhere)
        tl.store(out.target_logit + row, logit, mask=valid)
        tl.store(out.target_log_prob + row, log_prob, mask=valid)
    if out.mean_logit is not None:
        total = tl.load(partial + TOTAL * rows + row, mask=valid, other=0.0)
        tl.store(out.mean_logit + row, tl.div_rn(total, size), mask=valid)
    if out.mean_log_prob is not None:
        shifted = tl.load(partial + SHIFTED * rows + row, mask=valid, other=0.0)
        tl.store(out.mean_log_prob + row, tl.div_rn(shifted, size) - log_sum, mask=valid)
    if out.entropy is not None:
        expected = tl.div_rn(tl.load(partial + WEIGHTED * rows + row, mask=valid, other=0.0), sum_exp)
        tl.store(out.expected_logit + row, top + expected, mask=valid)
        tl.store(out.entropy + row, log_sum - expected, mask=valid)
    if out.sum_p_squared is not None:
        squared = tl.load(partial + SQUARED * rows + row, mask=valid, other=0.0)
        tl.store(out.sum_p_squared + row, tl.div_rn(squared, sum_exp * sum_exp), mask=valid)
    if out.argmax is not None:
        ids = tl.load(partial + ARGMAX * rows + row, mask=valid, other=0.0).to(tl.int32, bitcast=True)
        # A NaN's own id would depend on the windows.
        tl.store(out.argmax + row, tl.where(top != top, -1, ids).to(tl.int64), mask=valid)
    if out.log_sum is not None:
        tl.store(out.log_sum + row, log_sum, mask=valid)
    if tl.program_id(0) == 0:
        tl.store(out.vocab_size, entries.to(tl.int64))


def token_statistics(
    partial: torch.Tensor,
    vocab_size: torch.Tensor | int,
    target: torch.Tensor | None,
    columns: Columns,
    options: Options,
    log_sum: bool = False,
) -> dict[str, torch.Tensor | None]:
    """:func:`parallel_lce.backends.statistics_formula.token_statistics` in one launch. ``partial``: contiguous."""
    rows, known = partial.shape[1], isinstance(vocab_size, int)

    def new(present: bool, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        # A tensor of its own for each: users may change one in place.
        return partial.new_empty(rows, dtype=dtype) if present else None

    has_target, entropy = target is not None, columns.weighted
    statistics = _Statistics(
        partial.new_empty(rows),
        new(has_target),
        new(has_target),
        new(columns.total),
        new(columns.shifted),
        new(entropy),
        new(entropy),
        new(columns.squared),
        partial.new_empty(rows),
        new(columns.argmax, torch.int64),
        partial.new_empty((), dtype=torch.int64),
        new(log_sum),
    )
    with on_device_of(partial):
        lce_forward_statistics.launch(
            (max(1, -(-rows // _TOKENS.value)),),
            partial,
            None if known else vocab_size,
            target,
            statistics,
            rows,
            vocab_size if known else 0,
            options.ignore_index,
            **columns.rows,
        )
    return statistics._asdict()


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
    # alpha without the target's log-probability
    rest, of_target = tl.zeros((_TOKENS,), tl.float32), tl.zeros((_TOKENS,), tl.float32)
    of_logit, gamma = tl.zeros((_TOKENS,), tl.float32), tl.zeros((_TOKENS,), tl.float32)
    delta = tl.zeros((_TOKENS,), tl.float32)
    if upstream.lse is not None:
        rest += tl.load(upstream.lse + row * strides.lse, mask=valid, other=0.0)
    if upstream.target_logit is not None:
        of_logit = tl.load(upstream.target_logit + row * strides.target_logit, mask=valid, other=0.0)
        # Through lse: no rank has the logit of a target outside the vocabulary.
        rest += tl.where(inside | (of_logit == 0.0), 0.0, elsewhere)
    if upstream.target_log_prob is not None:
        given = tl.load(upstream.target_log_prob + row * strides.target_log_prob, mask=valid, other=0.0)
        # NaN from such a target, unless the caller has masked it.
        of_target = tl.where(inside, given, tl.where(given == 0.0, 0.0, elsewhere))
    if upstream.mean_logit is not None:
        gamma -= tl.load(upstream.mean_logit + row * strides.mean_logit, mask=valid, other=0.0)
    if upstream.mean_log_prob is not None:
        given = tl.load(upstream.mean_log_prob + row * strides.mean_log_prob, mask=valid, other=0.0)
        rest -= given
        gamma -= given
    if upstream.expected_logit is not None:
        given = tl.load(upstream.expected_logit + row * strides.expected_logit, mask=valid, other=0.0)
        rest += given
        delta += given
    if upstream.entropy is not None:
        delta -= tl.load(upstream.entropy + row * strides.entropy, mask=valid, other=0.0)
    sum_exp = tl.load(partial + rows + row, mask=valid, other=1.0)
    if out.delta is not None:
        # delta multiplies z - M, so the expected logit is taken relative to M, too.
        rest -= delta * tl.div_rn(tl.load(partial + WEIGHTED * rows + row, mask=valid, other=0.0), sum_exp)
        tl.store(out.delta + row, delta, mask=valid)
    if out.epsilon is not None:
        epsilon = 2.0 * tl.load(upstream.sum_p_squared + row * strides.sum_p_squared, mask=valid, other=0.0)
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
    """:func:`parallel_lce.backends.statistics_formula.statistics_gradient` in one launch."""
    # Saved-tensor hooks may have changed the strides.
    partial, rows = partial.contiguous(), partial.shape[1]
    given = _Upstream(*[upstream.get(name) for name in _Upstream._fields])
    strides = _Upstream(*[0 if each is None else each.stride(0) for each in given])  # pyright: ignore[reportArgumentType]
    of_target = given.target_logit is not None or given.target_log_prob is not None
    of_mean = given.mean_logit is not None or given.mean_log_prob is not None
    of_entropy = given.expected_logit is not None or given.entropy is not None
    # One allocation takes the host less time than six. Each vector begins on a boundary of 16 bytes.
    vectors = partial.new_empty(6, -(-rows // 4) * 4)[:, :rows].unbind()
    of_log_prob = given.target_log_prob is not None
    present = True, of_target, of_mean, of_entropy, given.sum_p_squared is not None, of_log_prob
    coefficients = Coefficients(*[v if there else None for v, there in zip(vectors, present)])  # pyright: ignore[reportArgumentType]
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
