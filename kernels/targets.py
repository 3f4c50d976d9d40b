"""The gradients of the targets' logits in fp32, and what they add to dX and dW.

``t_i`` is the gradient of the logit of token i's target y. It is formed in fp32 from that logit. It is large, so
rounding it in G, the low-precision gradient of the logits, would dominate the error of dX and dW. Row i of G is still
to be multiplied by ``c_i``.

dX: the product takes G's entry of the target as it is, and what the entry leaves of ``t_i`` is added in fp32:

    dX_i = c_i sum_j G_ij W_j + r_i W_y                r_i = t_i - c_i G_iy

dW, if no other token of G's rows has the target: G's entry is 0, and ``t_i x_i`` is added in fp32. A low-precision
dW_y is then rounded once more, which is better than a rounded entry in the product:

    dW_y = sum_k G_ky (c_k x_k) + t_i x_i

dW, if several tokens share the target: their terms may cancel, so all go through one product, with G's entry ``t_i /
c_i``, rounded. If rows of G have factors, ``x_i`` is multiplied by ``t_i / G_iy`` instead of ``c_i``: the target's
term then has no rounding of ``G_iy``, and the row's other terms change by about one such rounding. If no row of G has
a factor (it was recomputed, or every row was rewritten), the rounding stays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2

# Tokens of a program with one token per thread, and of a program that adds to dW.
_TOKENS, _ADDED = tl.constexpr(128), tl.constexpr(4)
# Hidden elements of a program that adds to dW, and of one that finishes dX.
_WIDTH, _HIDDEN = 2048, 4096


class Targets(NamedTuple):
    """The targets of some tokens, and what :func:`parallel_lce.kernels.token_gradients.token_gradients` found of them,
    ``[R]`` each."""

    # int64, relative to the shard
    target: torch.Tensor
    residual: torch.Tensor
    unshared: torch.Tensor


@triton.jit
def place(gradient, row, column, stride, here, t, factor, unshared):
    """Write the entries of the targets that are ``here``; returns them, and what they leave of ``t``."""
    entry = tl.where(unshared | (factor == 0.0), 0.0, t / factor).to(gradient.dtype.element_ty)
    tl.store(gradient + row.to(tl.int64) * stride + column, entry, mask=here)
    entry = entry.to(tl.float32)
    return entry, tl.where(here, t - factor * entry, t)


@Relaunched
@triton.jit(do_not_specialize=["rows", "first"])
def lce_backward_place_targets(gradient, targets, fp16_scale, rows, slice_entries, stride, first):
    row = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    wanted = tl.load(targets.target + row, mask=row < rows, other=-1)
    hit = (wanted >= first) & (wanted < first + slice_entries)
    t = tl.load(targets.residual + row, mask=hit, other=0.0)
    factor = tl.full((_TOKENS,), 1.0, tl.float32)
    if fp16_scale is not None:
        factor /= tl.load(fp16_scale)
    is_unshared = tl.load(targets.unshared + row, mask=hit, other=1) != 0
    _, left = place(gradient, row, wanted - first, stride, hit, t, factor, is_unshared)
    tl.store(targets.residual + row, left, mask=hit)


def place_targets(gradient: torch.Tensor, first: int, targets: Targets, fp16_scale: torch.Tensor | None) -> None:
    """Write the targets' entries of a later slice ``gradient [R, C]``, whose columns are the entries from ``first`` on.

    The rows of ``gradient`` are still to be divided by ``fp16_scale``. Entries of targets that are ``unshared`` become
    0. ``residual`` is reduced to what the entries leave of it.
    """
    (rows, slice_entries), stride = gradient.shape, gradient.stride(0)
    grid = (-(-rows // _TOKENS.value),)
    lce_backward_place_targets.launch(grid, gradient, targets, fp16_scale, rows, slice_entries, stride, first)


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
        wanted = tl.load(target + row)
        hit = (wanted >= 0) & (wanted < entries)
        weight_row = weight + tl.where(hit, wanted, 0) * weight_stride + c
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
    for number in tl.static_range(_ADDED):
        row = tl.program_id(0) * _ADDED + number
        wanted = tl.load(targets.target + row, mask=row < rows, other=-1)
        is_unshared = tl.load(targets.unshared + row, mask=row < rows, other=0) != 0
        if (wanted >= first) & (wanted < first + slice_entries) & is_unshared:
            here = total + (wanted - first) * row_stride + c.to(tl.int64) * column_stride
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
