"""What a backward needs of each token beside the products: :func:`token_gradients`.

It forms the gradient of the target's logit, prepares the token's row of G, the gradient of the logits, and places the
target's entry in it (:mod:`parallel_lce.kernels.targets` says what becomes of the rest).

A row of G is either recomputed, and then complete but for the target, or consists of saved exponentials. The
backward's products need ``p_ij (alpha_i + delta_i (z_ij - M_i) + epsilon_i p_ij) - gamma_i``. What is saved is
``e_ij = exp(z_ij - r_i)``, with the softmax shift r. Where there is only alpha, ``p_ij alpha_i = c_i e_ij`` with one
coefficient per token, ``c_i = alpha_i exp(r_i - M_i) / s_i``. So ``c_i`` is left to the products: it scales the rows of
the result of ``G @ weight``, and the rows of ``x`` in ``G.T @ x``.

Only these tokens' saved rows are rewritten (:mod:`parallel_lce.kernels.rewrite`), and have ``c_i = 1``:
- tokens with a window that was saved relative to its maximum, and tokens whose ``r_i`` lies more than ``REACH`` from
  their maximum over all ranks;
- tokens whose ``c_i`` is so small (< 2^-60) that ``c_i x_i`` would lose precision, unless both ``c_i`` and the target's
  gradient are 0;
- tokens that are sure of another entry than the target: its gradient dominates, and ``e_ij`` is rounded where ``p_ij``
  is almost 1;
- all tokens, where a soft-cap, ``gamma``, ``delta`` or ``epsilon`` acts on every entry, where the bias's gradient is
  wanted, or in fp16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.partials import ALONE, NEAR
from parallel_lce.kernels.arithmetic import (
    REACH,
    exponential_from,
    finite_base,
    gradient_of_entry,
    scales_of,
    softcap_slope,
)
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.rewrite import GradientTerms, Saved, rewrite_row, rewrite_rows
from parallel_lce.kernels.targets import place

_REACH, _ALONE, _NEAR = tl.constexpr(REACH), tl.constexpr(ALONE), tl.constexpr(NEAR)
# Smallest c for which c * x keeps the full precision of bf16.
_LEAST_COEFFICIENT = tl.constexpr(2.0**-60)
# Tokens of a program, which rewrites some of their rows one by one; tokens that it compares with them at a time.
_TOKENS, _COMPARED = tl.constexpr(16), tl.constexpr(512)


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
def _target_gradient(row, hit, terms, alpha, upstream, rows, scale):
    """The gradient of each target's logit, 0 where the target is elsewhere."""
    base = finite_base(tl.load(terms.partial + row, mask=hit, other=0.0))
    sum_exp = tl.load(terms.partial + rows + row, mask=hit, other=1.0)
    logit = tl.load(terms.partial + 2 * rows + row, mask=hit, other=0.0)
    g = gradient_of_entry(logit, base, sum_exp, alpha, terms.coefficients, row, hit, upstream)
    g = (g - tl.load(terms.coefficients.beta + row, mask=hit, other=0.0) * upstream) * scale
    return tl.where(hit, g * softcap_slope(logit, terms.scaling, row, hit), 0.0)


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
    terms,
    found,
    rows,
    entries,
    slice_entries,
    stride,
    first,
    FIND_SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    lane = tl.arange(0, _TOKENS)
    row = tl.program_id(0) * _TOKENS + lane
    valid = row < rows
    coefficients, partial, fp16_scale = terms.coefficients, terms.partial, terms.fp16_scale
    upstream = tl.full((_TOKENS,), 1.0, tl.float32)
    if coefficients.factor is not None:
        upstream = tl.load(coefficients.factor + row * terms.factor_stride, mask=valid, other=0.0)
    alpha = tl.load(coefficients.alpha + row, mask=valid, other=0.0) * upstream
    grad_scale = scales_of(terms.scaling, row, valid)
    t = tl.zeros((_TOKENS,), tl.float32)
    if target is not None:
        wanted = _local_ids(target, row, rows, entries)
        hit = wanted >= 0
        t = _target_gradient(row, hit, terms, alpha, upstream, rows, grad_scale)
        unshared = hit
        if FIND_SHARED:
            # A maximum of bits in integers is compiled to arrays on the stack.
            shared = tl.zeros((_TOKENS,), tl.float32)
            for start in range(0, rows, _COMPARED):
                other = start + tl.arange(0, _COMPARED)
                same = _local_ids(target, other, rows, entries)[None, :] == wanted[:, None]
                same &= other[None, :] != row[:, None]
                shared = tl.maximum(shared, tl.max(tl.where(same, 1.0, 0.0), 1))
            unshared &= shared == 0.0
    if fp16_scale is not None:
        grad_scale *= tl.load(fp16_scale)
    c = tl.full((_TOKENS,), 1.0, tl.float32)
    if maxima is not None:
        base = finite_base(tl.load(partial + row, mask=valid, other=0.0))
        sum_exp = tl.load(partial + rows + row, mask=valid, other=1.0)
        alpha_over_sum = alpha * (grad_scale / sum_exp)
        shift = tl.load(softmax_shift + row, mask=valid, other=0.0)
        coefficient = alpha_over_sum * exponential_from(shift, base)
        # NaN is rewritten.
        keeps = (tl.load(on_shift + row, mask=valid, other=1) != 0) & (tl.abs(base - shift) <= _REACH)
        keeps &= (tl.abs(coefficient) >= _LEAST_COEFFICIENT) | ((coefficient == 0.0) & (t == 0.0))
        logit = tl.full((_TOKENS,), -float("inf"), tl.float32)
        if target is not None:
            logit = tl.load(partial + 2 * rows + row, mask=valid, other=0.0)
        keeps &= (sum_exp >= _ALONE) | (logit > base - _NEAR) | (coefficient == 0.0)
        c = tl.where(keeps, coefficient, 1.0)
        rewritten = valid & (keeps == 0)
        # Here alpha alone is given: with other coefficients, or a cap, all rows were rewritten before.
        if tl.max(tl.where(rewritten, 1.0, 0.0), 0) != 0.0:
            for number in range(_TOKENS):
                if tl.max(tl.where(rewritten & (lane == number), 1.0, 0.0), 0) != 0.0:
                    token = tl.program_id(0) * _TOKENS + number
                    its_base, its_shift = _number_of(base, lane, number), _number_of(shift, lane, number)
                    rewrite_row(
                        gradient + token.to(tl.int64) * stride,
                        maxima + token,
                        (its_base, its_shift, _number_of(sum_exp, lane, number)),
                        (_number_of(alpha_over_sum, lane, number), 0.0, 0.0, 0.0),
                        terms,
                        rows,
                        0,
                        slice_entries,
                        True,
                        1.0,
                        WINDOW,
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


def token_gradients(
    gradient: torch.Tensor,
    saved: Saved | None,
    target: torch.Tensor | None,
    terms: GradientTerms,
    *,
    entries: int,
    first: int = 0,
    window: int = 1,
    find_shared: bool = True,
    rewrite: bool = False,
) -> TokenGradients:
    """Prepare the rows of G and place the targets' entries in it.

    ``gradient [R, C]``: G, whose columns are the shard's entries from ``first`` on: recomputed, or the exponentials of
    ``saved``, whose forward had windows of ``window`` entries. Saved exponentials become the gradient but for the
    target, times the scales, soft-cap's slope and ``fp16_scale``; rows are still to be multiplied by ``dx_factor``.
    ``rewrite`` every row: there are then no factors.

    ``target [R]`` int64: an id outside ``[0, entries)``, the shard, has no logit here; None: no gradient of targets.
    ``find_shared``: compare every token's target with all others'.
    """
    rows, coefficients = gradient.shape[0], terms.coefficients
    maxima = softmax_shift = on_shift = None
    if saved is not None:
        _, maxima, softmax_shift, on_shift, _ = saved
        _, _, *beside_alpha, _ = coefficients
        every = rewrite or terms.scaling.cap is not None or any([c is not None for c in beside_alpha])
        if every or softmax_shift is None:
            rewrite_rows(gradient, saved, terms, window)
            maxima = softmax_shift = on_shift = None
    keeps_rows, target = maxima is not None, target if coefficients.beta is not None else None
    if not keeps_rows and target is None:
        return TokenGradients(None, None, None, None)
    # One allocation takes the host less time than four. Each vector begins on a boundary of 16 bytes.
    vectors = coefficients.alpha.new_empty(4, -(-rows // 4) * 4)[:, :rows]
    dw_factor, unshared, residual, dx_factor = vectors.unbind()
    found = TokenGradients(
        None if target is None else residual,
        None if target is None else unshared.view(torch.uint8)[:rows],
        dx_factor if keeps_rows else None,
        None if target is None or not keeps_rows else dw_factor,
    )
    lce_backward_token_gradients.launch(
        (-(-rows // _TOKENS.value),),
        gradient,
        maxima,
        softmax_shift,
        on_shift,
        target,
        terms,
        found,
        rows,
        entries,
        gradient.shape[1],
        gradient.stride(0),
        first,
        FIND_SHARED=find_shared,
        WINDOW=window,
    )
    return found._replace(dw_factor=found.dx_factor) if target is None else found
