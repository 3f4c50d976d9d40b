"""What a backward needs of each token beside the products, in one launch: :func:`token_gradients`.

It forms the gradient of the target's logit, prepares the token's row of G, the gradient of the logits, and places the
target's entry in it (:mod:`parallel_lce.kernels.targets` says what becomes of the rest).

A row of G is either recomputed, and then complete but for the target, or consists of saved exponentials. The
backward's products need ``p_ij (alpha_i + delta_i (z_ij - M_i) + epsilon_i p_ij) - gamma_i``. What is saved is
``e_ij = exp(z_ij - r_i)``, with the softmax shift r. Where there is only alpha, ``p_ij alpha_i = c_i e_ij`` with one
coefficient per token, ``c_i = alpha_i exp(r_i - M_i) / s_i``. So ``c_i`` is left to the products: it scales the rows of
the result of ``G @ weight``, and the rows of ``x`` in ``G.T @ x``.

Only these tokens' saved rows are rewritten, and have ``c_i = 1``:
- tokens with a window that was saved relative to its maximum, and tokens whose ``r_i`` lies more than ``REACH`` from
  their maximum over all ranks;
- tokens whose ``c_i`` is so small (< 2^-60) that ``c_i x_i`` would lose precision, unless both ``c_i`` and the target's
  gradient are 0;
- all tokens, where a soft-cap, ``gamma``, ``delta`` or ``epsilon`` acts on every entry, where the bias's gradient is
  wanted, or in fp16. ``z_ij - M_i`` is then ``log e_ij + r_i - M_i``. Where ``e_ij`` underflowed, ``p_ij`` is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import (
    LOWEST_SHIFT,
    REACH,
    SAVED_FP16_SCALE,
    finite_base,
    logit_above,
    rebased,
    window_shift,
)
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.targets import place

_REACH = tl.constexpr(REACH)
# Smallest c for which c * x keeps the full precision of bf16.
_LEAST_COEFFICIENT = tl.constexpr(2.0**-60)
# Tokens of a program, which rewrites their rows one by one; tokens that it compares with them at a time; entries of a
# row that it rewrites at a time.
_TOKENS, _COMPARED, _REWRITTEN = 16, 512, 1024


class SavedExponentials(NamedTuple):
    """What a block saves of its first C vocabulary entries from forward to backward."""

    # [R, C] in the input's dtype, rows 16 bytes aligned; in fp16 times SAVED_FP16_SCALE
    exponentials: torch.Tensor
    # [windows, R] fp32, of all windows of the forward
    maxima: torch.Tensor
    # [R] fp32, or None where each window is relative to its maximum
    softmax_shift: torch.Tensor | None = None
    # [R] uint8: whether all of a token's windows are relative to its softmax shift
    on_shift: torch.Tensor | None = None


class TokenCoefficients(NamedTuple):
    """Coefficients of the gradient of the logits, fp32, contiguous; None for 0.

    dL/dz_j = factor (p_j (alpha + delta (z_j - max) + epsilon p_j) - beta [j = target] - gamma).
    """

    # [R]
    alpha: torch.Tensor
    beta: torch.Tensor | None
    gamma: torch.Tensor | None
    delta: torch.Tensor | None
    epsilon: torch.Tensor | None
    # [R], or one number for all tokens (a stride of 0); None: 1
    factor: torch.Tensor | None


class TokenGradients(NamedTuple):
    """What :func:`token_gradients` finds, ``[R]`` each."""

    # fp32, what is left of the gradients of the targets' logits: all of it, less what G's entry carries. 0 for a target
    # outside the shard. None without targets.
    residual: torch.Tensor | None
    # uint8: whether the target lies in this shard, and no other token of these rows has it (if others were looked for).
    # None without targets.
    unshared: torch.Tensor | None
    # fp32 factors of the rows of G in ``G @ weight``; None: 1
    dx_factor: torch.Tensor | None
    # fp32 factors of the rows of x in ``G.T @ x``; None: 1
    dw_factor: torch.Tensor | None


@triton.jit
def _target_gradient(row, hit, partial, coefficients, alpha, upstream, rows, scale, cap):
    """The gradient of each target's logit, 0 where the target is elsewhere."""
    base = finite_base(tl.load(partial + row, mask=hit, other=0.0))
    sum_exp = tl.load(partial + rows + row, mask=hit, other=1.0)
    logit = tl.load(partial + 2 * rows + row, mask=hit, other=0.0)
    shifted = logit - base
    g = alpha
    if coefficients.delta is not None:
        delta = tl.load(coefficients.delta + row, mask=hit, other=0.0) * upstream
        g += delta * tl.maximum(shifted, LOWEST_SHIFT)
    p = tl.exp(shifted) / sum_exp
    if coefficients.epsilon is not None:
        g += tl.load(coefficients.epsilon + row, mask=hit, other=0.0) * upstream * p
    g *= p
    if coefficients.gamma is not None:
        g -= tl.load(coefficients.gamma + row, mask=hit, other=0.0) * upstream
    g = (g - tl.load(coefficients.beta + row, mask=hit, other=0.0) * upstream) * scale
    if cap is not None:
        g *= 1.0 - (logit / cap) * (logit / cap)
    return tl.where(hit, g, 0.0)


@triton.jit
def _local_ids(target, row, rows, entries):
    """The targets of some tokens as 32-bit ids of this shard; -1 for those elsewhere."""
    ids = tl.load(target + row, mask=row < rows, other=-1)
    return tl.where((ids >= 0) & (ids < entries), ids, -1).to(tl.int32)


@triton.jit
def _number_of(values, lane, number):
    """One number out of a vector."""
    return tl.sum(tl.where(lane == number, values, 0.0), 0)


@Relaunched
@triton.jit(do_not_specialize=["rows", "first"])
def lce_backward_token_gradients(
    gradient,
    maxima,
    softmax_shift,
    on_shift,
    target,
    token_scale,
    partial,
    coefficients,
    fp16_scale,
    found,
    rows,
    entries,
    slice_entries,
    stride,
    first,
    factor_stride,
    scale,
    cap,
    REWRITE: tl.constexpr,
    FIND_SHARED: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, TOKENS)
    row = tl.program_id(0) * TOKENS + lane
    valid = row < rows
    upstream = tl.full((TOKENS,), 1.0, tl.float32)
    if coefficients.factor is not None:
        upstream = tl.load(coefficients.factor + row * factor_stride, mask=valid, other=0.0)
    alpha = tl.load(coefficients.alpha + row, mask=valid, other=0.0) * upstream
    token_scales = tl.full((TOKENS,), 1.0, tl.float32) * scale
    if token_scale is not None:
        token_scales *= tl.load(token_scale + row, mask=valid, other=0.0)
    t = tl.zeros((TOKENS,), tl.float32)
    if target is not None:
        wanted = _local_ids(target, row, rows, entries)
        hit = wanted >= 0
        t = _target_gradient(row, hit, partial, coefficients, alpha, upstream, rows, token_scales, cap)
        unshared = hit
        if FIND_SHARED:
            # A maximum of bits in integers is compiled to arrays on the stack.
            shared = tl.zeros((TOKENS,), tl.float32)
            for start in range(0, rows, COMPARED):
                other = start + tl.arange(0, COMPARED)
                same = _local_ids(target, other, rows, entries)[None, :] == wanted[:, None]
                same &= other[None, :] != row[:, None]
                shared = tl.maximum(shared, tl.max(tl.where(same, 1.0, 0.0), 1))
            unshared &= shared == 0.0
    grad_scale = token_scales
    if fp16_scale is not None:
        grad_scale *= tl.load(fp16_scale)
    c = tl.full((TOKENS,), 1.0, tl.float32)
    if maxima is not None:
        base = finite_base(tl.load(partial + row, mask=valid, other=0.0))
        sum_exp = tl.load(partial + rows + row, mask=valid, other=1.0)
        over_sum = grad_scale / sum_exp
        alpha_over_sum = alpha * over_sum
        shift = base
        if softmax_shift is not None:
            shift = tl.load(softmax_shift + row, mask=valid, other=0.0)
        rewritten = valid
        if not REWRITE:
            coefficient = alpha_over_sum * rebased(shift, base)
            # NaN is rewritten.
            keeps = (tl.load(on_shift + row, mask=valid, other=1) != 0) & (tl.abs(base - shift) <= _REACH)
            keeps &= (tl.abs(coefficient) >= _LEAST_COEFFICIENT) | ((coefficient == 0.0) & (t == 0.0))
            c = tl.where(keeps, coefficient, 1.0)
            rewritten = valid & (keeps == 0)
        scaled_gamma = alpha_over_sum  # Not read without gamma.
        if coefficients.gamma is not None:
            scaled_gamma = tl.load(coefficients.gamma + row, mask=valid, other=0.0) * upstream * grad_scale
        delta_over_sum = alpha_over_sum  # Not read without delta.
        if coefficients.delta is not None:
            delta_over_sum = tl.load(coefficients.delta + row, mask=valid, other=0.0) * upstream * over_sum
        epsilon_over_sums = alpha_over_sum  # Not read without epsilon.
        if coefficients.epsilon is not None:
            epsilon = tl.load(coefficients.epsilon + row, mask=valid, other=0.0) * upstream
            epsilon_over_sums = epsilon * over_sum / sum_exp
        if tl.max(tl.where(rewritten, 1.0, 0.0), 0) != 0.0:
            for number in range(TOKENS):
                if tl.max(tl.where(rewritten & (lane == number), 1.0, 0.0), 0) != 0.0:
                    token = tl.program_id(0) * TOKENS + number
                    _rewrite(
                        gradient + token.to(tl.int64) * stride,
                        maxima + token,
                        _number_of(base, lane, number),
                        _number_of(shift, lane, number),
                        _number_of(alpha_over_sum, lane, number),
                        _number_of(scaled_gamma, lane, number),
                        _number_of(delta_over_sum, lane, number),
                        _number_of(epsilon_over_sums, lane, number),
                        rows,
                        slice_entries,
                        cap,
                        softmax_shift is not None,
                        coefficients.gamma is not None,
                        coefficients.delta is not None,
                        coefficients.epsilon is not None,
                        SAVED_SCALE,
                        WINDOW,
                        BLOCK,
                    )
            # The targets' entries are written after their rows.
            tl.debug_barrier()
    if found.dx_factor is not None:
        tl.store(found.dx_factor + row, c, mask=valid)
    if target is not None:
        factor = c
        if fp16_scale is not None:
            factor /= tl.load(fp16_scale)
        here = hit & (wanted >= first) & (wanted < first + slice_entries)
        entry, left = place(gradient, row, wanted - first, stride, here, t, factor, unshared)
        tl.store(found.residual + row, left, mask=valid)
        tl.store(found.unshared + row, unshared.to(tl.uint8), mask=valid)
        if found.dw_factor is not None:
            tl.store(found.dw_factor + row, tl.where(here & (entry != 0.0), t / entry, factor), mask=valid)


@triton.jit
def _rewrite(
    saved,
    maxima,
    base,
    shift,
    alpha_over_sum,
    scaled_gamma,
    delta_over_sum,
    epsilon_over_sums,
    rows,
    entries,
    cap,
    HAS_SHIFT: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_EPSILON: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn one token's saved exponentials into ``p (alpha + delta (z - M) + epsilon p) - gamma``, times the soft-cap's
    slope."""
    for first in range(0, entries, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = c < entries
        e = tl.load(saved + c, mask=inside, other=0.0).to(tl.float32) * (1.0 / SAVED_SCALE)
        top = tl.load(maxima + (c // WINDOW).to(tl.int64) * rows, mask=inside, other=0.0)
        reference = finite_base(top)
        if HAS_SHIFT:
            reference = window_shift(top, shift)
        # In a window of -inf alone the factor may be infinite, and 0 times that is NaN.
        empty = (top == -float("inf")) & (e == 0.0)
        rebase = rebased(reference, base)
        g = tl.where(empty, 0.0, e * (alpha_over_sum * rebase))
        if HAS_DELTA or HAS_EPSILON:
            e_of_max = tl.where(empty, 0.0, e * rebase)
            factor = tl.zeros((BLOCK,), tl.float32) + alpha_over_sum
            if HAS_DELTA:
                factor += delta_over_sum * logit_above(e, reference, base)
            if HAS_EPSILON:
                factor += epsilon_over_sums * e_of_max
            g = e_of_max * factor
        if HAS_GAMMA:
            g -= scaled_gamma
        if cap is not None:
            z = logit_above(e, reference, 0.0)
            g *= 1.0 - (z / cap) * (z / cap)
        tl.store(saved + c, g.to(saved.dtype.element_ty), mask=inside)


def token_gradients(
    gradient: torch.Tensor,
    saved: SavedExponentials | None,
    target: torch.Tensor | None,
    partial: torch.Tensor,
    coefficients: TokenCoefficients,
    fp16_scale: torch.Tensor | None,
    *,
    entries: int,
    first: int = 0,
    window: int = 1,
    scale: float = 1.0,
    token_scale: torch.Tensor | None = None,
    softcap: float | None = None,
    find_shared: bool = True,
    rewrite: bool = False,
) -> TokenGradients:
    """Prepare the rows of G and place the targets' entries in it.

    ``gradient [R, C]``: G, whose columns are the shard's entries from ``first`` on: recomputed, or the exponentials of
    ``saved``, whose forward had windows of ``window`` entries. Saved exponentials become the gradient but for the
    target, times the scales, soft-cap's slope and ``fp16_scale``; rows are still to be multiplied by ``dx_factor``.
    ``rewrite`` every row: there are then no factors.

    ``target [R]`` int64: an id outside ``[0, entries)``, the shard, has no logit here; None: no gradient of targets.
    ``partial [>= 3, R]`` fp32, contiguous: the merged partial. ``find_shared``: compare every token's target with all
    others'. ``fp16_scale``: 0-dimensional.
    """
    rows = gradient.shape[0]
    alpha, factor = coefficients.alpha, coefficients.factor
    softmax_shift = on_shift = maxima = None
    keeps_rows = False
    if saved is not None:
        _, maxima, softmax_shift, on_shift = saved
        _, _, *beside_alpha, _ = coefficients
        every = rewrite or softcap is not None or any([c is not None for c in beside_alpha])
        keeps_rows = softmax_shift is not None and not every
    target = target if coefficients.beta is not None else None
    dx_factor = residual = unshared = dw_factor = None
    if keeps_rows or target is not None:
        # One allocation takes the host less time than four. Each vector begins on a boundary of 16 bytes.
        vectors = list(alpha.new_empty(2 * keeps_rows + 2 * (target is not None), -(-rows // 4) * 4).unbind())
        if keeps_rows:
            dx_factor = vectors.pop()[:rows]
        if target is not None:
            residual, unshared = vectors.pop()[:rows], vectors.pop().view(torch.uint8)[:rows]
            dw_factor = vectors.pop()[:rows] if keeps_rows else None
    found = TokenGradients(residual, unshared, dx_factor, dw_factor)
    lce_backward_token_gradients.launch(
        (-(-rows // _TOKENS),),
        gradient,
        maxima,
        softmax_shift,
        on_shift,
        target,
        token_scale,
        partial,
        coefficients,
        fp16_scale,
        found,
        rows,
        entries,
        gradient.shape[1],
        gradient.stride(0),
        first,
        0 if factor is None or factor.dim() == 0 else factor.stride(0),
        float(scale),
        None if softcap is None else float(softcap),
        REWRITE=not keeps_rows,
        FIND_SHARED=find_shared,
        SAVED_SCALE=SAVED_FP16_SCALE if gradient.dtype == torch.float16 else 1.0,
        WINDOW=window,
        TOKENS=_TOKENS,
        COMPARED=_COMPARED,
        BLOCK=_REWRITTEN,
    )
    return found._replace(dw_factor=dx_factor) if target is None else found
