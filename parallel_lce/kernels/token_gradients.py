"""Prepares the rows of G, the gradient of the logits, for the backward's products: :func:`token_gradients`.

It forms the gradient of each target's logit, prepares the token's row of G, and writes the target's entry into it.

A recomputed row of G is complete except at the target. A saved row of G holds exponentials ``e_ij = exp(z_ij)``. The
products need ``p_ij (alpha_i + delta_i (z_ij - M_i) + epsilon_i p_ij) - gamma_i``, with the token's maximum M and sum
of exponentials s. With alpha alone, this is ``c_i e_ij`` with one factor per token, ``c_i = alpha_i exp(-M_i) / s_i``,
times ``RoundedSums.mass`` for bf16. The saved row then stays, and the products apply ``c_i``: to the rows of the result
of ``G @ weight``, and to the rows of ``x`` in ``G.T @ x``.

Saved rows are rewritten for
- tokens of logits near a number c, whose saved numbers are ``exp(z_ij - c) - 1`` if a gradient may be a small
  difference;
- tokens with a window far from 0, whose exponentials are not ``exp(z)``;
- tokens whose ``c_i`` is so small (< 2^-90) or so large that ``c_i x_i`` would lose precision or overflow, unless both
  ``alpha_i`` and the target's gradient are 0;
- confident tokens whose largest entry is not the target: that entry's gradient dominates, and ``e_ij`` is rounded where
  ``p_ij`` is almost 1;
- all tokens, if a soft-cap, ``gamma``, ``delta`` or ``epsilon`` acts on every entry, with selected entries, or in
  fp16.

The last, recomputed rows, and those of which a part is recomputed hold the gradient of the logits except at the target,
with ``c_i = 1``. The others hold p, with ``c_i = alpha_i``, if that is in the range of c: an entry of 1 is not rounded.
They are computed from

    p = e exp(-M) / s           z - M = log e - M

and, in windows far from 0, from e and their reference (``arithmetic.slope_and_reference``). Where e underflowed, p is
0, and the gradient is -gamma. The rounding of e gives p a relative error, and z an absolute error of the same size.
Under a soft-cap the saved numbers are what it is applied to, and give z, p and the slope.

``t_i`` is the gradient of the logit of token i's target y, formed in fp32 from that logit. Rounded to the low precision
of G, this large number would dominate the errors of dX and dW. If no other token of G's rows has the target, ``G_iy``
is therefore 0. If several tokens share the target, ``G_iy`` is ``t_i / c_i``, rounded.

The rows of the weight may share a mean, which the sum of a token's gradients, 0, keeps out of dX. Where a row of G
holds gradients, t_i therefore takes away what the rounding of its largest entry adds. With selected entries, which are
rounded, it is rounded, too.

dX: the remainder d_i, which is ``t_i`` for an unshared target, is added in fp32:

    dX_i = c_i sum_j G_ij W_j + d_i W_y                d_i = t_i - c_i G_iy

dW, unshared target: ``t_i x_i`` is added in fp32. A low-precision dW_y is rounded once more by this sum:

    dW_y = sum_k G_ky (c_k x_k) + t_i x_i

dW, shared target: the tokens' terms may cancel, so one product sums them all. If rows of G have factors, ``x_i`` is
multiplied by ``t_i / G_iy`` instead of ``c_i``. The term of the target then has no rounding error, and the row's other
terms change by about one rounding. If no row of G has a factor (all rows were recomputed or rewritten), the rounding
error of ``G_iy`` stays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.memory import empty_if
from parallel_lce.core.partials import NEAR, ONE_LARGE_ENTRY
from parallel_lce.kernels.arithmetic import (
    LOWEST_SHIFT,
    SAVED_FP16_SCALE,
    exponential,
    factor_of,
    finite_base,
    flattened,
    gradient_of,
    gradient_of_entry,
    loaded,
    local_ids,
    logit_above,
    of_saved,
    power_from,
    slope_and_reference,
    times,
    unflattened,
)
from parallel_lce.kernels.epilogue import GradientTerms
from parallel_lce.kernels.launch import Relaunched, next_power_of_2
from parallel_lce.kernels.logit_map import caps_of, recapped, scales_of, slope_of

_ONE_LARGE_ENTRY, _NEAR = tl.constexpr(ONE_LARGE_ENTRY), tl.constexpr(NEAR)
# Smallest c for which c * x keeps the full precision of bf16 for x down to 2^-36. Its inverse is the largest c.
_LEAST_COEFFICIENT, _LARGEST_COEFFICIENT = tl.constexpr(2.0**-90), tl.constexpr(2.0**90)
# Most tokens per program, whose rows are rewritten one by one, and fewest programs that have several; tokens per step
# of the search for shared targets.
_TOKENS, _PROGRAMS, _COMPARED = 16, 128, tl.constexpr(512)
# Rewriting: entries per program, and per step.
_SPAN, _BLOCK = tl.constexpr(16384), tl.constexpr(2048)
# Tokens per program: where targets are placed (one per thread), and where their terms are added to dW.
_WRITTEN, _ADDED = tl.constexpr(128), tl.constexpr(4)
# Hidden elements per program: of the terms added to dW, and of dX.
_WIDTH, _HIDDEN = 2048, 4096


class Targets(NamedTuple):
    """The targets of some tokens and their gradients, tensors ``[R]``; None each without targets."""

    # int64, relative to the shard: an id outside the shard's ``[0, entries)`` has no logit here
    target: Any = None
    # fp32: d_i, or t_i until the slice of G with the target is formed. 0 for a target outside the shard.
    residual: Any = None
    # uint8: whether the target lies in this shard and, with ``find_shared``, no other token of these rows has it.
    unshared: Any = None


@triton.jit
def write_target(gradient, row, column, stride, here, t, factor, unshared):
    """Write the targets' entries, masked by ``here``. Returns the entries and ``t - factor * entry``."""
    entry = tl.where(unshared | (factor == 0.0), 0.0, t / factor).to(gradient.dtype.element_ty)
    tl.store(gradient + row.to(tl.int64) * stride + column, entry, mask=here)
    entry = entry.to(tl.float32)
    return entry, tl.where(here, t - factor * entry, t)


@Relaunched
@triton.jit(do_not_specialize=["rows", "first"])
def lce_backward_write_targets(gradient, targets, fp16_scale, rows, slice_entries, stride, first):
    row = tl.program_id(0) * _WRITTEN + tl.arange(0, _WRITTEN)
    target_id = tl.load(targets.target + row, mask=row < rows, other=-1)
    hit = (target_id >= first) & (target_id < first + slice_entries)
    t = tl.load(targets.residual + row, mask=hit, other=0.0)
    factor = tl.full((_WRITTEN,), 1.0, tl.float32)
    if fp16_scale is not None:
        factor /= tl.load(fp16_scale)
    is_unshared = tl.load(targets.unshared + row, mask=hit, other=1) != 0
    _, left = write_target(gradient, row, target_id - first, stride, hit, t, factor, is_unshared)
    tl.store(targets.residual + row, left, mask=hit)


def write_targets(gradient: torch.Tensor, first: int, targets: Targets, fp16_scale: torch.Tensor | None) -> None:
    """Write the targets' entries of a later slice ``gradient [R, C]``, whose columns are the entries from ``first`` on:
    0 for ``unshared`` targets, else ``residual * fp16_scale``, rounded. Its ``residual`` becomes the rounding error."""
    (rows, slice_entries), stride = gradient.shape, gradient.stride(0)
    grid = (-(-rows // _WRITTEN.value),)
    lce_backward_write_targets.launch(grid, gradient, targets, fp16_scale, rows, slice_entries, stride, first)


@Relaunched
@triton.jit
def lce_backward_scale_and_add_targets(
    source,
    factor,
    targets,
    result,
    hidden_size,
    entries,
    source_stride,
    factor_stride,
    weight_stride,
    result_stride,
    BLOCK: tl.constexpr,
):
    target, residual, weight = targets
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < hidden_size
    value = tl.load(source + row * source_stride + c, mask=inside, other=0.0).to(tl.float32)
    if factor is not None:
        value *= tl.load(factor + row * factor_stride)
    if target is not None:
        target_id = tl.load(target + row)
        hit = (target_id >= 0) & (target_id < entries)
        weight_row = weight + tl.where(hit, target_id, 0) * weight_stride + c
        value += tl.load(residual + row) * tl.load(weight_row, mask=inside & hit, other=0.0).to(tl.float32)
    tl.store(result + row * result_stride + c, value.to(result.dtype.element_ty), mask=inside)


def scale_and_add_targets(
    source: torch.Tensor,
    factor: torch.Tensor | None,
    targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    result: torch.Tensor,
) -> torch.Tensor:
    """Write ``factor * source + residual * weight[target]`` into ``result [R, D]``, rounded once.

    ``result`` may be ``source [R, D]``. ``factor``: ``[R]`` or 0-dimensional, None for 1. ``targets``: ``target [R]``
    int64, ``residual [R]`` and ``weight [V, D]``, or None. A target outside ``[0, V)`` adds nothing.
    """
    rows, hidden_size = source.shape
    _, _, weight = targets = targets or (None, None, None)
    block = min(next_power_of_2(hidden_size), _HIDDEN)
    lce_backward_scale_and_add_targets.launch(
        (rows, -(-hidden_size // block)),
        source,
        factor,
        targets,
        result,
        hidden_size,
        0 if weight is None else weight.shape[0],
        source.stride(0),
        0 if factor is None or factor.dim() == 0 else 1,
        0 if weight is None else weight.stride(0),
        result.stride(0),
        BLOCK=block,
    )
    return result


@Relaunched
@triton.jit(do_not_specialize=["rows", "first"])
def lce_backward_add_targets(
    total, targets, x, rows, first, slice_entries, hidden_size, row_stride, column_stride, x_stride, BLOCK: tl.constexpr
):
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < hidden_size
    for number in range(_ADDED):
        row = tl.program_id(0) * _ADDED + number
        target_id = tl.load(targets.target + row, mask=row < rows, other=-1)
        is_unshared = tl.load(targets.unshared + row, mask=row < rows, other=0) != 0
        if (target_id >= first) & (target_id < first + slice_entries) & is_unshared:
            here = total + (target_id - first) * row_stride + c.to(tl.int64) * column_stride
            x_row = tl.load(x + row.to(tl.int64) * x_stride + c, mask=inside, other=0.0)
            value = tl.load(targets.residual + row) * x_row.to(tl.float32)
            value += tl.load(here, mask=inside, other=0.0).to(tl.float32)
            tl.store(here, value.to(total.dtype.element_ty), mask=inside)


def add_targets(total: torch.Tensor, first: int, targets: Targets, x: torch.Tensor) -> None:
    """``total[y_i - first] += residual_i x_i`` for the tokens whose target is ``unshared``, in fp32.

    ``total [C, D]``: dW of the entries from ``first`` on. ``x [R, D]``.
    """
    (rows, hidden_size), entries = x.shape, len(total)
    block = min(next_power_of_2(hidden_size), _WIDTH)
    grid = -(-rows // _ADDED.value), -(-hidden_size // block)
    strides = *total.stride(), x.stride(0)
    lce_backward_add_targets.launch(grid, total, targets, x, rows, first, entries, hidden_size, *strides, BLOCK=block)


class Saved(NamedTuple):
    """Saved exponentials of a block's first C vocabulary entries, and statistics of all windows."""

    # [R, C] in the input's dtype, rows 16 bytes aligned; in fp16 times SAVED_FP16_SCALE. Or, in uint8, their codes
    # (:mod:`parallel_lce.kernels.codes`). Or, under a soft-cap, the bits of fp16 numbers: what it is applied to.
    exponentials: torch.Tensor
    # [windows, R] fp32: each window's maximum
    maxima: torch.Tensor
    # [R] fp32: see RoundedSums. None: every row is rewritten.
    mass: torch.Tensor | None = None
    # [R] fp32: the exponentials are those of ``arithmetic.flattened``. None: no token is flat.
    flat: torch.Tensor | None = None
    # [windows, R]: see ForwardEpilogue. None: there are no codes.
    shift: torch.Tensor | None = None
    lowest: torch.Tensor | None = None


# Triton 3.6 compares no tuple with None that contains one.
_NOTHING_SAVED = Saved(*[None] * 6)  # pyright: ignore[reportArgumentType]


@triton.jit
def rewrite_row(
    saved, gradient, row, token, values, terms, rows, first, stop, SAVED_SCALE: tl.constexpr, WINDOW: tl.constexpr
):
    """Turn the ``saved`` exponentials of the token ``row``, of ``[first, stop)``, into its row of ``gradient``, in the
    same memory: ``p (alpha + delta (z - M) + epsilon p) - gamma``, times the soft-cap's slope. ``token``: offset of the
    row, the token's maximum, sum of exponentials, ``flat`` if there are flat tokens, and cap. ``values``: as in
    :func:`gradient_of`, for ``exp(z - M)`` in place of p."""
    here, base, sum_exp, flat, cap = token
    exponentials, maxima = saved.exponentials + here, saved.maxima + row
    gradient += here
    # Several windows per step: values that are constant in a window are computed once.
    WINDOWS: tl.constexpr = _BLOCK // WINDOW
    # A confident token's exp(z - M) is exactly 1 at its largest entry, whose terms nearly cancel, and < 1/2 elsewhere.
    least = tl.where(sum_exp < _ONE_LARGE_ENTRY, 0.75, float("inf"))
    for start in range(first, stop, _BLOCK):
        c = start + (tl.arange(0, WINDOWS) * WINDOW)[:, None] + tl.arange(0, WINDOW)[None, :]
        inside = c < stop
        stored = tl.load(exponentials + c, mask=inside, other=0.0).to(tl.float32)
        if terms.logit_map.softcap is not None:
            z, slope = recapped(stored, cap)
            below_max = tl.maximum(tl.minimum(z - base, 0.0), LOWEST_SHIFT)
            rebased = exponential(below_max)
            alone = rebased > least
        else:
            e = stored * (1.0 / SAVED_SCALE)
            window = start // WINDOW + tl.arange(0, WINDOWS)
            top = tl.load(maxima + window.to(tl.int64) * rows, mask=window * WINDOW < stop, other=0.0)
            factor, unit, shift = of_saved(top, base, SAVED_SCALE != 1.0)
            if saved.flat is not None:
                # What the largest entry was saved as: entries that were rounded alike are as large as that.
                slope, reference = slope_and_reference(top)
                largest = flattened(power_from(base, slope, reference), flat)
                largest = largest.to(exponentials.dtype.element_ty).to(tl.float32)
                e = unflattened(stored, flat)
            # In a window of only -inf, or of -inf and NaN, the factor might be infinite, and 0 times infinity is NaN.
            rebased = e * tl.where(top == -float("inf"), 0.0, factor)[:, None]
            alone = rebased > least
            if saved.flat is not None:
                alone |= (stored == largest[:, None]) & (rebased > 0.9)
            below_max = logit_above(e, unit[:, None], shift[:, None])
        rebased, below_max = tl.where(alone, 1.0, rebased), tl.where(alone, 0.0, below_max)
        g = gradient_of(rebased, below_max, values, terms.coefficients)
        if terms.logit_map.softcap is not None:
            g *= slope
        tl.store(gradient + c, g.to(gradient.dtype.element_ty), mask=inside)


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_rewrite(
    saved, gradient, terms, rows, slice_entries, stride, SAVED_SCALE: tl.constexpr, WINDOW: tl.constexpr
):
    row = tl.program_id(0)
    first = tl.program_id(1) * _SPAN
    coefficients = terms.coefficients
    grad_scale = scales_of(terms.logit_map, row, True)
    if terms.fp16_scale is not None:
        grad_scale *= tl.load(terms.fp16_scale)
    base = finite_base(tl.load(terms.partial + row))
    sum_exp, is_flat = tl.load(terms.partial + rows + row), loaded(saved.flat, row, True, 1.0)
    if saved.mass is not None:
        # Of flat tokens what is saved has no common rounding.
        factor = tl.load(saved.mass + row)
        has_factor = factor > 0.0
        if saved.flat is not None:
            has_factor &= is_flat == 0.0
        sum_exp /= tl.where(has_factor, factor, 1.0)
    over_sum = grad_scale / sum_exp
    rewrite_row(
        saved,
        gradient,
        row,
        (row.to(tl.int64) * stride, base, sum_exp, is_flat, caps_of(terms.logit_map, row, True)),
        (
            tl.load(coefficients.alpha + row) * over_sum,
            loaded(coefficients.gamma, row, True, grad_scale),
            loaded(coefficients.delta, row, True, over_sum),
            loaded(coefficients.epsilon, row, True, over_sum / sum_exp),
        ),
        terms,
        rows,
        first,
        tl.minimum(first + _SPAN, slice_entries),
        SAVED_SCALE,
        WINDOW,
    )


def rewrite_rows(gradient: torch.Tensor, saved: Saved, terms: GradientTerms, window: int) -> None:
    """Rewrite every row of ``gradient [R, C]``, the exponentials of ``saved``. The forward's windows have ``window``
    entries."""
    (rows, entries), is_capped = gradient.shape, terms.logit_map.softcap is not None
    is_scaled = gradient.dtype == torch.float16 and not is_capped
    lce_backward_rewrite.launch(
        (rows, -(-entries // _SPAN.value)),
        saved._replace(exponentials=gradient.view(torch.float16) if is_capped else gradient),
        gradient,
        terms,
        rows,
        entries,
        gradient.stride(0),
        SAVED_SCALE=SAVED_FP16_SCALE if is_scaled else 1.0,
        WINDOW=window,
    )


class TokenGradients(NamedTuple):
    """Results of :func:`token_gradients`. Factors are fp32 ``[R]``; None: 1"""

    targets: Targets
    # Of the rows of G in ``G @ weight``.
    dx_factor: torch.Tensor | None
    # Of the rows of x in ``G.T @ x``.
    dw_factor: torch.Tensor | None


@triton.jit
def _target_gradient(row, hit, token, terms, alpha, upstream, scale):
    """The gradient of each target's logit, 0 for targets outside the shard; and that of the largest logit, 0 if it is
    the target's. ``token``: maximum, sum of exponentials, and the target's logit."""
    base, sum_exp, logit = token
    beta = times(tl.load(terms.coefficients.beta + row, mask=hit, other=0.0), upstream)
    excess = alpha - beta
    if terms.coefficients.excess is not None:
        excess = times(tl.load(terms.coefficients.excess + row, mask=hit, other=0.0), upstream)
    g = gradient_of_entry(logit, base, sum_exp, excess, beta, terms.coefficients, row, hit)
    g = tl.where(hit, g * scale * slope_of(logit, terms.logit_map, row, hit), 0.0)
    largest = gradient_of_entry(base, base, sum_exp, alpha, 0.0, terms.coefficients, row, hit)
    largest *= scale * slope_of(base, terms.logit_map, row, hit)
    is_largest = (logit >= base) | ((sum_exp < _ONE_LARGE_ENTRY) & (logit > base - _NEAR))
    return g, tl.where(hit & (is_largest == 0), largest, 0.0)


@triton.jit
def _keeps_digits(c):
    """Whether ``c * x`` neither loses precision nor overflows."""
    return (tl.abs(c) >= _LEAST_COEFFICIENT) & (tl.abs(c) <= _LARGEST_COEFFICIENT)


@triton.jit
def _rounded(gradient, g, of_fp16):
    """``g`` as G holds it, times ``of_fp16``."""
    return (g * of_fp16).to(gradient.dtype.element_ty).to(tl.float32) / of_fp16


@triton.jit
def _made_up(gradient, t, largest, of_fp16):
    """The target's gradient ``t``, without what the rounding of the ``largest`` entry adds to the row."""
    added = _rounded(gradient, largest, of_fp16) - largest
    # By more than a rounding of its own t would lose what is left of it.
    ROUNDING: tl.constexpr = 2.0**-11 if gradient.dtype.element_ty == tl.float16 else 2.0**-8
    cancels = ((t < 0.0) != (largest < 0.0)) & (tl.abs(added) <= tl.abs(t) * ROUNDING)
    return t - tl.where(cancels, added, 0.0)


@triton.jit
def _number_of(values, lane, number):
    """``values[number]``."""
    return tl.sum(tl.where(lane == number, values, 0.0), 0)


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_backward_token_gradients(
    gradient,
    saved,
    terms,
    outputs,
    rows,
    entries,
    slice_entries,
    stride,
    FIND_SHARED: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
):
    lane = tl.arange(0, TOKENS)
    row = tl.program_id(0) * TOKENS + lane
    valid = row < rows
    coefficients, partial, fp16_scale = terms.coefficients, terms.partial, terms.fp16_scale
    targets = outputs.targets
    upstream = factor_of(coefficients, terms.factor_stride, row, valid)
    alpha = times(tl.load(coefficients.alpha + row, mask=valid, other=0.0), upstream)
    grad_scale = scales_of(terms.logit_map, row, valid)
    base = finite_base(tl.load(partial + row, mask=valid, other=0.0))
    sum_exp = tl.load(partial + rows + row, mask=valid, other=1.0)
    logit = tl.full((TOKENS,), -float("inf"), tl.float32)
    t = tl.zeros((TOKENS,), tl.float32)
    if targets.target is not None:
        target_id = local_ids(targets.target, row, rows, entries)
        hit = target_id >= 0
        logit = tl.load(partial + 2 * rows + row, mask=valid, other=0.0)
        t, largest = _target_gradient(row, hit, (base, sum_exp, logit), terms, alpha, upstream, grad_scale)
        unshared = hit
        if FIND_SHARED:
            # In fp32: Triton compiles an integer maximum of bits to arrays on the stack.
            shared = tl.zeros((TOKENS,), tl.float32)
            for start in range(0, rows, _COMPARED):
                other = start + tl.arange(0, _COMPARED)
                same = local_ids(targets.target, other, rows, entries)[None, :] == target_id[:, None]
                same &= other[None, :] != row[:, None]
                shared = tl.maximum(shared, tl.max(tl.where(same, 1.0, 0.0), 1))
            unshared &= shared == 0.0
    if fp16_scale is not None:
        grad_scale *= tl.load(fp16_scale)
    c = tl.full((TOKENS,), 1.0, tl.float32)
    holds_gradient = valid
    if saved.maxima is not None:
        alpha_over_sum = alpha * (grad_scale / sum_exp)
        factor = tl.load(saved.mass + row, mask=valid, other=1.0)
        coefficient = alpha_over_sum * exponential(-base) * factor
        # Comparisons with NaN are false, so rows with NaN are rewritten.
        keeps = factor > 0.0
        is_flat = tl.zeros((TOKENS,), tl.float32)
        if saved.flat is not None:
            is_flat = tl.load(saved.flat + row, mask=valid, other=0.0)
            keeps &= is_flat == 0.0
        # The coefficient may be 0 by underflow alone.
        keeps &= _keeps_digits(coefficient) | ((alpha == 0.0) & (t == 0.0))
        keeps &= (sum_exp >= _ONE_LARGE_ENTRY) | (logit > base - _NEAR) | (alpha == 0.0)
        is_part = slice_entries < entries
        whole = tl.where(_keeps_digits(alpha * grad_scale) & (is_part == 0), alpha * grad_scale, 1.0)
        c = tl.where(keeps, coefficient, whole)
        rewritten = valid & (keeps == 0)
        holds_gradient = rewritten & is_part
        # Only alpha is given: with other coefficients, or a soft-cap, all rows were rewritten before.
        if tl.max(tl.where(rewritten, 1.0, 0.0), 0) != 0.0:
            for number in range(TOKENS):
                if tl.max(tl.where(rewritten & (lane == number), 1.0, 0.0), 0) != 0.0:
                    token = tl.program_id(0) * TOKENS + number
                    of_token = (
                        token.to(tl.int64) * stride,
                        _number_of(base, lane, number),
                        _number_of(sum_exp, lane, number),
                        _number_of(is_flat, lane, number),
                        1.0,
                    )
                    values = (_number_of(alpha_over_sum / whole, lane, number), 0.0, 0.0, 0.0)
                    rewrite_row(saved, gradient, token, of_token, values, terms, rows, 0, slice_entries, 1.0, WINDOW)
            # The targets' entries are written after their rows.
            tl.debug_barrier()
    if outputs.dx_factor is not None:
        tl.store(outputs.dx_factor + row, c, mask=valid)
    if targets.target is not None:
        factor, of_fp16 = c, 1.0
        if fp16_scale is not None:
            of_fp16 = tl.load(fp16_scale)
            factor /= of_fp16
        if SELECTED:
            t = _rounded(gradient, t, of_fp16)
        else:
            t = tl.where(holds_gradient, _made_up(gradient, t, largest, of_fp16), t)
        here = hit & (target_id < slice_entries)
        entry, left = write_target(gradient, row, target_id, stride, here, t, factor, unshared)
        tl.store(targets.residual + row, left, mask=valid)
        tl.store(targets.unshared + row, unshared.to(tl.uint8), mask=valid)
        if outputs.dw_factor is not None:
            tl.store(outputs.dw_factor + row, tl.where(here & (entry != 0.0), t / entry, factor), mask=valid)


def token_gradients(
    gradient: torch.Tensor,
    saved: Saved | None,
    target: torch.Tensor | None,
    terms: GradientTerms,
    *,
    entries: int,
    window: int,
    find_shared: bool,
    selected: bool,
) -> TokenGradients:
    """Prepare the rows of G and write the targets' entries into it.

    ``gradient [R, C]``: G of the shard's first entries, recomputed, or the exponentials of ``saved`` from a forward
    with windows of ``window`` entries. The shard has ``entries``. G contains the scales, the soft-cap's slope and
    ``fp16_scale``. Its rows are still to be multiplied by ``dx_factor``.

    ``target [R]``: of :class:`Targets`; with ``saved`` it may be None. ``find_shared``: compare every token's target
    with all others'. ``selected``: G has selected entries.
    """
    keeps_rows, has_target, rows, device = saved is not None, target is not None, gradient.shape[0], gradient.device
    residual, unshared = empty_if(has_target, rows, device), empty_if(has_target, rows, device, torch.uint8)
    outputs = TokenGradients(
        Targets(target, residual, unshared),
        dx_factor=empty_if(keeps_rows, rows, device),
        dw_factor=empty_if(has_target and keeps_rows, rows, device),
    )
    tokens = max(1, min(_TOKENS, next_power_of_2(rows) // _PROGRAMS))
    lce_backward_token_gradients.launch(
        (-(-rows // tokens),),
        gradient,
        saved or _NOTHING_SAVED,
        terms,
        outputs,
        rows,
        entries,
        gradient.shape[1],
        gradient.stride(0),
        FIND_SHARED=find_shared,
        SELECTED=selected,
        WINDOW=window,
        TOKENS=tokens,
    )
    return outputs if has_target else outputs._replace(dw_factor=outputs.dx_factor)
