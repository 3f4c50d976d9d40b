"""The targets' own part, kept out of the matrix products: their logits, their gradients and what these add
to dX and dW, in fp32.

A token's gradient is mostly its target's. As an entry of dlogits it would be rounded with everything
else, and cancel where p is nearly 1; so that entry is 0 there, and

    dX_i = sum_{j != y_i} g_ij W_j + t_i W_{y_i}        dW_v = sum_{i: y_i != v} g_iv x_i + sum_{i: y_i = v} t_i x_i

with ``t_i`` from the target's own logit. Tokens of the same target are added up in the order of the tokens,
by one program: nothing is atomic, and runs are equal to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.epilogues import LOWEST_SHIFT, finite_base, softcapped
from parallel_lce.kernels.projection import Operands
from parallel_lce.kernels.tuning import interpreted

# Tokens of a tile of target logits, and of a program where one thread has one token.
_TARGETS, _TOKENS = 64, 128
# Up to so many tokens, comparing all pairs is faster than sorting; tokens of a program, and of a comparison.
_FEW = 16384
_RANKED, _COMPARED = 16, 1024
# Tokens and hidden elements that a program adds to dW at a time; hidden elements of dX.
_ADDED, _WIDTH, _HIDDEN = 8, 2048, 4096


@triton.jit(do_not_specialize=["rows"])
def _targets_kernel(
    x, weight, bias, target, result, rows, columns, depth, x_stride, weight_stride, scale, cap,
    HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = r < rows
    wanted = tl.load(target + r, mask=valid, other=-1)
    hit = (wanted >= 0) & (wanted < columns)
    x_rows = x + r.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + tl.where(hit, wanted, 0)[:, None] * weight_stride
    z = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, depth, BLOCK_K):
        c = k + tl.arange(0, BLOCK_K)
        inside = (c < depth)[None, :]
        a = tl.load(x_rows + c[None, :], mask=valid[:, None] & inside, other=0.0)
        b = tl.load(weight_rows + c[None, :], mask=hit[:, None] & inside, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    own = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
    logit = tl.sum(tl.where(own, z, 0.0), 1)
    if HAS_BIAS:
        logit += tl.load(bias + wanted, mask=hit, other=0.0).to(tl.float32)
    logit *= scale
    if CAPPED:
        logit = softcapped(logit, cap)
    tl.store(result + r, tl.where(hit, logit, 0.0), mask=valid)


def target_logits(operands: Operands, target: torch.Tensor, result: torch.Tensor) -> None:
    """The targets' logits ``[R]`` fp32; 0 for a ``target [R]`` int64 outside ``[0, K)``.

    The diagonal of a product with the targets' rows of the weight, gathered: tensor cores sum it in
    the order of the mainloop, so that a target which is a token's maximum equals it to the bit.
    Looking for targets in the mainloop's tiles costs some tiles more time than others, after which
    the programs fall out of step.
    """
    x, weight = operands.x, operands.weight
    _targets_kernel[(triton.cdiv(x.shape[0], _TARGETS),)](
        x,
        weight,
        operands.bias,
        target,
        result,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        float(operands.scale),
        1.0 if operands.softcap is None else float(operands.softcap),
        HAS_BIAS=operands.bias is not None,
        CAPPED=operands.softcap is not None,
        UPCAST=interpreted() and x.dtype == torch.bfloat16,
        BLOCK=_TARGETS,
        BLOCK_K=64 if x.element_size() == 2 else 32,
        num_warps=4,
        num_stages=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _gradients_kernel(
    target, statistics, alpha, beta, gamma, delta, result, rows, entries, scale, cap,
    HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(target + row, mask=row < rows, other=-1)
    hit = (wanted >= 0) & (wanted < entries)
    base = finite_base(tl.load(statistics + row, mask=hit, other=0.0))
    sum_exp = tl.load(statistics + rows + row, mask=hit, other=1.0)
    logit = tl.load(statistics + 2 * rows + row, mask=hit, other=0.0)
    shifted = logit - base
    g = tl.load(alpha + row, mask=hit, other=0.0)
    if HAS_DELTA:
        g += tl.load(delta + row, mask=hit, other=0.0) * tl.maximum(shifted, LOWEST_SHIFT)
    g *= tl.exp(shifted) / sum_exp
    if HAS_GAMMA:
        g -= tl.load(gamma + row, mask=hit, other=0.0)
    g = (g - tl.load(beta + row, mask=hit, other=0.0)) * scale
    if CAPPED:
        g *= 1.0 - (logit / cap) * (logit / cap)
    tl.store(result + row, g, mask=row < rows)


def target_gradients(
    target: torch.Tensor,
    entries: int,
    statistics: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    gamma: torch.Tensor | None,
    delta: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """``p (alpha + delta (z - M)) - beta - gamma`` of the targets, times scale and the slope of the soft-cap:
    ``[R]`` fp32, 0 for targets outside ``[0, entries)``.

    ``target [R]`` int64; ``statistics [>= 3, R]`` the merged partial; the coefficients ``[R]``. All but the
    target fp32, and contiguous.
    """
    rows, result = target.shape[0], torch.empty_like(alpha)
    _gradients_kernel[(triton.cdiv(rows, _TOKENS),)](
        target,
        statistics,
        alpha,
        beta,
        gamma,
        delta,
        result,
        rows,
        entries,
        float(scale),
        1.0 if softcap is None else float(softcap),
        HAS_GAMMA=gamma is not None,
        HAS_DELTA=delta is not None,
        CAPPED=softcap is not None,
        BLOCK=_TOKENS,
    )
    return result


@triton.jit(do_not_specialize=["rows"])
def _clear_kernel(gradient, target, rows, columns, stride, first, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(target + row, mask=row < rows, other=-1)
    hit = (wanted >= first) & (wanted < first + columns)
    place = gradient + row.to(tl.int64) * stride + (wanted - first)
    tl.store(place, tl.zeros((BLOCK,), gradient.dtype.element_ty), mask=hit)


def clear_targets(gradient: torch.Tensor, target: torch.Tensor, first: int) -> None:
    """Make the targets' entries of ``gradient [R, C]``, the columns from ``first`` on, 0."""
    rows, columns = gradient.shape
    _clear_kernel[(triton.cdiv(rows, _TOKENS),)](
        gradient, target, rows, columns, gradient.stride(0), first, BLOCK=_TOKENS
    )


@triton.jit
def _hidden_kernel(
    source, factor, target, entry, weight, result, columns, entries,
    source_stride, factor_stride, weight_stride, result_stride,
    HAS_FACTOR: tl.constexpr, HAS_TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    value = tl.load(source + row * source_stride + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        value *= tl.load(factor + row * factor_stride)
    if HAS_TARGET:
        wanted = tl.load(target + row)
        hit = (wanted >= 0) & (wanted < entries)
        of_target = weight + tl.where(hit, wanted, 0) * weight_stride + c
        value += tl.load(entry + row) * tl.load(of_target, mask=inside & hit, other=0.0).to(tl.float32)
    tl.store(result + row * result_stride + c, value.to(result.dtype.element_ty), mask=inside)


def finished_rows(
    source: torch.Tensor,
    factor: torch.Tensor | None,
    targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    result: torch.Tensor,
) -> torch.Tensor:
    """``result = factor * source + entry * weight[target]``, all ``[R, D]``, rounded once; it may be ``source``.

    ``factor``: ``[R]`` or 0-dimensional, None for 1; ``targets``: ``target [R]`` int64, of which those outside
    the weight hit nothing, ``entry [R]`` and ``weight [K, D]``, or None.
    """
    rows, columns = source.shape
    target, entry, weight = targets or (None, None, None)
    block = min(triton.next_power_of_2(columns), _HIDDEN)
    _hidden_kernel[(rows, triton.cdiv(columns, block))](
        source,
        factor,
        target,
        entry,
        weight,
        result,
        columns,
        0 if weight is None else weight.shape[0],
        source.stride(0),
        0 if factor is None or factor.dim() == 0 else 1,
        0 if weight is None else weight.stride(0),
        result.stride(0),
        HAS_FACTOR=factor is not None,
        HAS_TARGET=targets is not None,
        BLOCK=block,
    )
    return result


@triton.jit(do_not_specialize=["rows"])
def _order_kernel(target, order, rows, entries, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The chunk that these tokens lie in: tokens of the same target before it come first.
    own = tl.program_id(0) * BLOCK // CHUNK * CHUNK
    wanted = tl.load(target + i, mask=i < rows, other=-1)
    key = tl.where((wanted >= 0) & (wanted < entries), wanted, entries).to(tl.int32)
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(target + j, mask=j < rows, other=0)
        others = tl.where((other >= 0) & (other < entries), other, entries).to(tl.int32)
        others = tl.where(j < rows, others, 2**31 - 1)
        bound = key + (first < own).to(tl.int32)
        place += tl.sum((others[None, :] < bound[:, None]).to(tl.int32), 1)
        if first == own:
            tie = (others[None, :] == key[:, None]) & (j[None, :] < i[:, None])
            place += tl.sum(tie.to(tl.int32), 1)
    tl.store(order + place, i.to(tl.int64), mask=i < rows)


def order_of(target: torch.Tensor, entries: int) -> torch.Tensor:
    """``[R]`` int64: the tokens by their ``target [R]`` int64, then by their number; those whose targets are
    outside ``[0, entries)`` last."""
    rows = target.shape[0]
    if rows > _FEW:
        outside = (target < 0) | (target >= entries)
        return target.to(torch.int32).masked_fill_(outside, entries).sort(stable=True).indices
    order = torch.empty_like(target)
    _order_kernel[(triton.cdiv(rows, _RANKED),)](
        target, order, rows, entries, BLOCK=_RANKED, CHUNK=_COMPARED
    )
    return order


@triton.jit(do_not_specialize=["rows", "first"])
def _add_kernel(
    total, order, target, entry, x, rows, first, columns, depth, total_stride, x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < depth
    wanted = tl.load(target + tl.load(order + at))
    before = tl.load(order + at - 1, mask=at > 0, other=0)
    leads = (at == 0) | (tl.load(target + before) != wanted)
    if leads & (wanted >= first) & (wanted < first + columns):
        value = tl.zeros((BLOCK,), tl.float32)
        more = True
        while more:
            place = at + tl.arange(0, ROWS)
            token = tl.load(order + place, mask=place < rows, other=0)
            same = (place < rows) & (tl.load(target + token) == wanted)
            g = tl.load(entry + token, mask=same, other=0.0)
            rows_of_x = x + token[:, None] * x_stride + c[None, :]
            part = tl.load(rows_of_x, mask=same[:, None] & inside[None, :], other=0.0)
            value += tl.sum(g[:, None] * part.to(tl.float32), 0)
            at += ROWS
            more = tl.min(same.to(tl.int32), 0) == 1
        here = total + (wanted - first) * total_stride + c
        value += tl.load(here, mask=inside, other=0.0).to(tl.float32)
        tl.store(here, value.to(total.dtype.element_ty), mask=inside)


def add_targets(
    total: torch.Tensor,
    order: torch.Tensor,
    target: torch.Tensor,
    entry: torch.Tensor,
    x: torch.Tensor,
    first: int,
) -> None:
    """``total[v - first] += sum of entry_i x_i over the tokens of target v``.

    ``total [C, D]``: the rows from ``first`` on; ``order`` of :func:`order_of`; ``entry [R]`` fp32; ``x [R, D]``.
    The sum is fp32, and rounded once into ``total``.
    """
    rows, depth = x.shape
    block = min(triton.next_power_of_2(depth), _WIDTH)
    _add_kernel[(rows, triton.cdiv(depth, block))](
        total,
        order,
        target,
        entry,
        x,
        rows,
        first,
        total.shape[0],
        depth,
        total.stride(0),
        x.stride(0),
        ROWS=_ADDED,
        BLOCK=block,
        num_warps=8,
    )
