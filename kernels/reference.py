"""A value near each token's largest logits, before any is known: the largest of a sample."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.launch import Relaunched, cdiv
from parallel_lce.kernels.projection import Operands
from parallel_lce.kernels.tuning import interpreted

# Tokens of a program; vocabulary rows of the sample.
_TOKENS, _SAMPLED = 64, 64


@Relaunched
@triton.jit(do_not_specialize=["rows", "step"])
def _reference_kernel(
    x,
    weight,
    bias,
    result,
    rows,
    columns,
    depth,
    step,
    x_stride,
    weight_stride,
    scale,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.arange(0, SAMPLED) * step
    valid, sampled = r < rows, entry < columns
    x_rows = x + r.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + entry.to(tl.int64)[:, None] * weight_stride
    z = tl.zeros((BLOCK, SAMPLED), tl.float32)
    for k in range(0, depth, BLOCK_K):
        c = k + tl.arange(0, BLOCK_K)
        inside = (c < depth)[None, :]
        a = tl.load(x_rows + c[None, :], mask=valid[:, None] & inside, other=0.0)
        b = tl.load(weight_rows + c[None, :], mask=sampled[:, None] & inside, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    if HAS_BIAS:
        z += tl.load(bias + entry, mask=sampled, other=0.0).to(tl.float32)[None, :]
    top = tl.max(tl.where(sampled[None, :], z * scale, -float("inf")), 1)
    # A sample of -inf alone, by its biases, says nothing.
    tl.store(result + r, tl.where(tl.abs(top) == float("inf"), 0.0, top), mask=valid)


def sampled_maximum(operands: Operands, start: int, stop: int, result: torch.Tensor) -> None:
    """The largest logit of each token from ``start`` to ``stop`` over rows of the weight at even distances, or
    0 where that is infinite, to ``result [R]`` fp32. Without the soft-cap."""
    x, weight = operands.x[start:stop], operands.weight
    step = cdiv(weight.shape[0], _SAMPLED)
    _reference_kernel[(cdiv(x.shape[0], _TOKENS),)](
        x,
        weight,
        operands.bias,
        result[start:stop],
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        step,
        x.stride(0),
        weight.stride(0),
        float(operands.scale),
        HAS_BIAS=operands.bias is not None,
        UPCAST=interpreted() and x.dtype == torch.bfloat16,
        BLOCK=_TOKENS,
        SAMPLED=_SAMPLED,
        BLOCK_K=64 if x.element_size() == 2 else 32,
        num_warps=8,
        num_stages=4,
    )
