"""The targets' own part in fp32: their logits, their gradients, and what these add to dX and dW.

The gradient ``t_i`` of a target's logit, formed from that logit, is most of a token's gradient. As an
entry of dlogits, between operands that are rounded too, it would make the larger part of dX's and dW's
error. With ``g_ij = c_i G_ij`` the other entries,

    dX_i = c_i sum_j G_ij W_j + r_i W_{y_i}            r_i = t_i - c_i G_iy

is exact in ``t_i`` whatever G's entry of the target is. In dW, whose rows are sums over tokens,

    dW_v = sum_i G_iv (c_i x_i) + t_k x_k              if k alone has the target v, and G_kv = 0

is, and is rounded once more, when ``t_k x_k`` is added; so it is for a row of one target that this is better
than an entry in the product. Where several tokens have the same target their sum and that of the other
tokens may cancel, and belong into one product: their entries are ``t_i / c_i``, and ``c_i`` in ``c_i x_i``
is what makes up for the rounding of the entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.epilogues import LOWEST_SHIFT, finite_base, softcapped
from parallel_lce.kernels.launch import Relaunched, cdiv, next_power_of_2
from parallel_lce.kernels.projection import Operands
from parallel_lce.kernels.tuning import interpreted

# Tokens of a tile of target logits, and of a program where one thread has one token.
_TARGETS, _TOKENS = 64, 128
# Vocabulary rows of a program that clears their marks.
_CLEARED = 1024
# Tokens and hidden elements of a program that adds to dW; hidden elements of dX.
_ADDED, _WIDTH, _HIDDEN = 4, 2048, 4096


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def _targets_kernel(
    x,
    weight,
    bias,
    target,
    result,
    rows,
    columns,
    depth,
    x_stride,
    weight_stride,
    scale,
    cap,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
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
        # Of the tokens whose targets other shards have nothing is read.
        a = tl.load(x_rows + c[None, :], mask=hit[:, None] & inside, other=0.0)
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
    _targets_kernel[(cdiv(x.shape[0], _TARGETS),)](
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


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def _tag_kernel(target, tags, shared, rows, entries, BLOCK: tl.constexpr, CLEARED: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(target + row, mask=row < rows, other=-1)
    tl.store(tags + wanted, row, mask=(wanted >= 0) & (wanted < entries))
    entry = tl.program_id(0) * CLEARED + tl.arange(0, CLEARED)
    tl.store(shared + entry, tl.zeros((CLEARED,), tl.uint8), mask=entry < entries)


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def _share_kernel(target, tags, shared, rows, entries, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(target + row, mask=row < rows, other=-1)
    hit = (wanted >= 0) & (wanted < entries)
    lost = hit & (tl.load(tags + wanted, mask=hit, other=0) != row)
    tl.store(shared + wanted, tl.full((BLOCK,), 1, tl.uint8), mask=lost)


@triton.jit
def _place(gradient, row, column, stride, here, t, factor, alone):
    """Write the entries of the targets that are ``here``; what they are, and what they leave of ``t``."""
    entry = tl.where(alone | (factor == 0.0), 0.0, t / factor).to(gradient.dtype.element_ty)
    tl.store(gradient + row.to(tl.int64) * stride + column, entry, mask=here)
    entry = entry.to(tl.float32)
    return entry, tl.where(here, t - factor * entry, t)


@Relaunched
@triton.jit(do_not_specialize=["rows", "first"])
def _gradients_kernel(
    target,
    tags,
    shared,
    statistics,
    alpha,
    beta,
    gamma,
    delta,
    result,
    alone,
    rows,
    entries,
    scale,
    cap,
    gradient,
    power,
    columns,
    stride,
    first,
    TAGGED: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    CAPPED: tl.constexpr,
    PLACED: tl.constexpr,
    HAS_POWER: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    only = hit
    if TAGGED:
        only &= tl.load(tags + wanted, mask=hit, other=0) == row
        only &= tl.load(shared + wanted, mask=hit, other=0) == 0
    if PLACED:
        here = hit & (wanted >= first) & (wanted < first + columns)
        factor = tl.full((BLOCK,), 1.0, tl.float32)
        if HAS_POWER:
            factor /= tl.load(power)
        g = _place(gradient, row, wanted - first, stride, here, g, factor, only)[1]
    tl.store(result + row, g, mask=row < rows)
    tl.store(alone + row, only.to(tl.uint8), mask=row < rows)


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
    count: bool,
    placed: tuple[torch.Tensor, int, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``p (alpha + delta (z - M)) - beta - gamma`` of the targets, times scale and the slope of the soft-cap:
    ``[R]`` fp32, 0 for targets outside ``[0, entries)``; and whether no other token has the same target,
    ``[R]`` uint8, or, unless these are to be ``count``-ed, whether a token has a target at all.

    ``target [R]`` int64; ``statistics [>= 3, R]`` the merged partial; the coefficients ``[R]``. All but the
    target fp32, and contiguous. ``placed``: the ``gradient``, ``first`` and ``power`` of a :func:`place_targets`
    that is done in the same launch.
    """
    gradient, first, power = placed or (None, 0, None)
    rows, result = target.shape[0], torch.empty_like(alpha)
    alone = torch.empty_like(alpha, dtype=torch.uint8)
    grid = (cdiv(rows, _TOKENS),)
    tags = shared = None
    if count:
        # Each token writes its number to its target's tag, and any of them stays; those that find another
        # one's tell so. What is found does not depend on which one stayed.
        tags = torch.empty(entries, dtype=torch.int32, device=target.device)
        shared = torch.empty(entries, dtype=torch.uint8, device=target.device)
        programs = max(grid[0], cdiv(entries, _CLEARED))
        _tag_kernel[(programs,)](target, tags, shared, rows, entries, BLOCK=_TOKENS, CLEARED=_CLEARED)
        _share_kernel[grid](target, tags, shared, rows, entries, BLOCK=_TOKENS)
    _gradients_kernel[grid](
        target,
        tags,
        shared,
        statistics,
        alpha,
        beta,
        gamma,
        delta,
        result,
        alone,
        rows,
        entries,
        float(scale),
        1.0 if softcap is None else float(softcap),
        gradient,
        power,
        0 if gradient is None else gradient.shape[1],
        0 if gradient is None else gradient.stride(0),
        first,
        TAGGED=count,
        HAS_GAMMA=gamma is not None,
        HAS_DELTA=delta is not None,
        CAPPED=softcap is not None,
        PLACED=gradient is not None,
        HAS_POWER=power is not None,
        BLOCK=_TOKENS,
    )
    return result, alone


@Relaunched
@triton.jit(do_not_specialize=["rows", "first"])
def _entries_kernel(
    gradient,
    target,
    rest,
    alone,
    row_scale,
    power,
    x_scale,
    rows,
    columns,
    stride,
    first,
    HAS_SCALE: tl.constexpr,
    HAS_POWER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    wanted = tl.load(target + row, mask=valid, other=-1)
    hit = (wanted >= first) & (wanted < first + columns)
    t = tl.load(rest + row, mask=hit, other=0.0)
    factor = tl.full((BLOCK,), 1.0, tl.float32)
    if HAS_SCALE:
        factor = tl.load(row_scale + row, mask=valid, other=1.0)
    if HAS_POWER:
        factor /= tl.load(power)
    only = tl.load(alone + row, mask=hit, other=1) != 0
    entry, left = _place(gradient, row, wanted - first, stride, hit, t, factor, only)
    tl.store(rest + row, left, mask=hit)
    if HAS_SCALE:
        tl.store(x_scale + row, tl.where(entry == 0.0, factor, t / entry), mask=valid)


def place_targets(
    gradient: torch.Tensor,
    first: int,
    target: torch.Tensor,
    rest: torch.Tensor,
    alone: torch.Tensor,
    row_scale: torch.Tensor | None,
    power: torch.Tensor | None,
) -> torch.Tensor | None:
    """Write the targets' entries of ``gradient [R, C]``, the columns from ``first`` on, whose rows are to be
    multiplied by ``row_scale [R]`` and divided by ``power``.

    They are 0 for those ``alone [R]``. ``rest [R]``, the gradients of :func:`target_gradients`, becomes what the
    entries leave of them. Returns what ``x`` is to be multiplied by, row by row, if anything.
    """
    rows, columns = gradient.shape
    x_scale = None if row_scale is None else torch.empty_like(row_scale)
    _entries_kernel[(cdiv(rows, _TOKENS),)](
        gradient,
        target,
        rest,
        alone,
        row_scale,
        power,
        x_scale,
        rows,
        columns,
        gradient.stride(0),
        first,
        HAS_SCALE=row_scale is not None,
        HAS_POWER=power is not None,
        BLOCK=_TOKENS,
    )
    return x_scale


@Relaunched
@triton.jit
def _hidden_kernel(
    source,
    factor,
    target,
    entry,
    weight,
    result,
    columns,
    entries,
    source_stride,
    factor_stride,
    weight_stride,
    result_stride,
    HAS_FACTOR: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    block = min(next_power_of_2(columns), _HIDDEN)
    _hidden_kernel[(rows, cdiv(columns, block))](
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


@Relaunched
@triton.jit(do_not_specialize=["rows", "first"])
def _add_kernel(
    total,
    target,
    rest,
    alone,
    x,
    rows,
    first,
    columns,
    depth,
    row_stride,
    column_stride,
    x_stride,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < depth
    for number in tl.static_range(TOKENS):
        row = tl.program_id(0) * TOKENS + number
        wanted = tl.load(target + row, mask=row < rows, other=-1)
        only = tl.load(alone + row, mask=row < rows, other=0) != 0
        if (wanted >= first) & (wanted < first + columns) & only:
            here = total + (wanted - first) * row_stride + c.to(tl.int64) * column_stride
            of_token = tl.load(x + row.to(tl.int64) * x_stride + c, mask=inside, other=0.0)
            value = tl.load(rest + row) * of_token.to(tl.float32)
            value += tl.load(here, mask=inside, other=0.0).to(tl.float32)
            tl.store(here, value.to(total.dtype.element_ty), mask=inside)


def add_targets(
    total: torch.Tensor, first: int, target: torch.Tensor, rest: torch.Tensor, alone: torch.Tensor, x: torch.Tensor
) -> None:
    """``total[y_i - first] += rest_i x_i`` for the tokens that are ``alone``, in fp32.

    ``total [C, D]``: the rows from ``first`` on; ``rest [R]`` fp32 of :func:`place_targets`; ``x [R, D]``.
    """
    rows, depth = x.shape
    block = min(next_power_of_2(depth), _WIDTH)
    _add_kernel[(cdiv(rows, _ADDED), cdiv(depth, block))](
        total,
        target,
        rest,
        alone,
        x,
        rows,
        first,
        total.shape[0],
        depth,
        total.stride(0),
        total.stride(1),
        x.stride(0),
        TOKENS=_ADDED,
        BLOCK=block,
    )
