"""Logits that exist already: their partials in one read, their gradient in one read and one write.

The plain torch of both is :mod:`parallel_lce.backends.dense_logits`. Rows are addressed in int64: N * V passes 2^31 in
ordinary use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched

_BLOCK = tl.constexpr(4096)


@Relaunched
@triton.jit
def lce_forward_logits_partials(logits, target, partial, shifted, rows, entries, row_stride, start):
    row = tl.program_id(0).to(tl.int64)
    z_row = logits + row * row_stride
    wanted = tl.load(target + row) - start
    offsets = tl.arange(0, _BLOCK)
    maximum = -float("inf")
    sum_exp = 0.0
    sum_shifted = 0.0
    hit = 0.0
    for first in range(0, entries, _BLOCK):
        column = first + offsets
        valid = column < entries
        z = tl.load(z_row + column, mask=valid, other=-float("inf")).to(tl.float32)
        top = tl.maximum(maximum, tl.max(z, 0))
        # Nothing but -inf so far: shift by 0, since -inf - -inf is NaN.
        base = tl.where(top == -float("inf"), 0.0, top)
        moved = tl.where(maximum == -float("inf"), 0.0, maximum - base)
        # tl.max drops NaN; it comes back here, through its exponential.
        sum_exp = sum_exp * tl.exp(moved) + tl.sum(tl.exp(z - base), 0)
        if shifted is not None:
            sum_shifted += first * moved + tl.sum(tl.where(valid, z - base, 0.0), 0)
        # Columns past ``entries`` can equal a target of the next shard.
        hit += tl.sum(tl.where(valid & (column == wanted), z, 0.0), 0)
        maximum = top
    tl.store(partial + row, maximum)
    tl.store(partial + rows + row, sum_exp)
    tl.store(partial + 2 * rows + row, hit)
    if shifted is not None:
        tl.store(shifted + row, sum_shifted)


@Relaunched
@triton.jit
def lce_backward_logits(
    logits, target, maximum, scale, smoothing_grad, target_grad, gradient, entries, row_stride, start
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    valid = column < entries
    z = tl.load(logits + row * row_stride + column, mask=valid, other=-float("inf")).to(tl.float32)
    wanted = tl.load(target + row) - start
    g = tl.exp(z - tl.load(maximum + row)) * tl.load(scale + row) - tl.load(smoothing_grad + row)
    g -= tl.where(column == wanted, tl.load(target_grad + row), 0.0)
    tl.store(gradient + row * entries + column, g.to(gradient.dtype.element_ty), mask=valid)


def logits_partial(
    logits: torch.Tensor, target: torch.Tensor, start: int, want_shifted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Partial ``[3, N]`` fp32 (max, sum of exponentials, target logit) of ``logits [N, K]``.

    ``target [N]``: int64 ids, of which those in ``[start, start + K)`` are in this shard. Logits are bf16, fp16 or
    fp32, contiguous in K. ``want_shifted`` adds sum(z - max) ``[N]``.
    """
    assert logits.stride(1) == 1 and target.is_contiguous()
    rows, entries = logits.shape
    partial = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    shifted = torch.empty_like(partial[0]) if want_shifted else None
    if rows:
        sizes = rows, entries, logits.stride(0), start
        lce_forward_logits_partials.launch((rows,), logits, target, partial, shifted, *sizes, num_warps=8)
    return partial, shifted


def logits_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    start: int,
    maximum: torch.Tensor,
    scale: torch.Tensor,
    smoothing_grad: torch.Tensor,
    target_grad: torch.Tensor,
) -> torch.Tensor:
    """``scale * exp(z - maximum) - smoothing_grad - target_grad [j = target]``, ``[N, K]``, in logits' dtype.

    All per-row tensors are ``[N]`` fp32, contiguous.
    """
    per_row = (target, maximum, scale, smoothing_grad, target_grad)
    assert logits.stride(1) == 1 and all(t.is_contiguous() for t in per_row)
    rows, entries = logits.shape
    gradient = torch.empty(rows, entries, dtype=logits.dtype, device=logits.device)
    if rows and entries:
        grid = rows, -(-entries // _BLOCK.value)
        sizes = entries, logits.stride(0), start
        lce_backward_logits.launch(grid, logits, *per_row, gradient, *sizes, num_warps=8)
    return gradient
