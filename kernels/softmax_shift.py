"""The softmax shift: a value near each token's largest logits that is known before the projection.

It is the largest logit over a sample of the vocabulary. Exponentials relative to it stay within bf16's range.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.projection import Product
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.tuning import interpreted

# Tokens of a program; vocabulary rows of the sample.
_TOKENS, _SAMPLED = 64, 64


@Relaunched
@triton.jit(do_not_specialize=["rows", "step"])
def lce_forward_softmax_shift(
    x,
    weight,
    bias,
    result,
    rows,
    entries,
    k_size,
    step,
    x_stride,
    weight_stride,
    scale,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.arange(0, SAMPLED) * step
    valid, sampled = r < rows, entry < entries
    x_rows = x + r.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + entry.to(tl.int64)[:, None] * weight_stride
    z = tl.zeros((BLOCK, SAMPLED), tl.float32)
    for k in range(0, k_size, BLOCK_K):
        c = k + tl.arange(0, BLOCK_K)
        inside = (c < k_size)[None, :]
        a = tl.load(x_rows + c[None, :], mask=valid[:, None] & inside, other=0.0)
        b = tl.load(weight_rows + c[None, :], mask=sampled[:, None] & inside, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    if bias is not None:
        z += tl.load(bias + entry, mask=sampled, other=0.0).to(tl.float32)[None, :]
    top = tl.max(tl.where(sampled[None, :], z * scale, -float("inf")), 1)
    # A bias may make every sampled logit -inf.
    tl.store(result + r, tl.where(tl.abs(top) == float("inf"), 0.0, top), mask=valid)


def sample_softmax_shift(product: Product, start: int, stop: int, result: torch.Tensor) -> None:
    """Write the softmax shift of the tokens ``[start, stop)`` into ``result [R]`` fp32.

    The shift is the largest logit over ``_SAMPLED`` evenly spaced rows of the weight, or 0 where that is infinite.
    Not called under a soft-cap, where the shift is 0.
    """
    x, weight = product.x[start:stop], product.weight
    step = -(-weight.shape[0] // _SAMPLED)
    lce_forward_softmax_shift.launch(
        (-(-x.shape[0] // _TOKENS),),
        x,
        weight,
        product.bias,
        result[start:stop],
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        step,
        x.stride(0),
        weight.stride(0),
        float(product.scale),
        UPCAST=interpreted() and x.dtype == torch.bfloat16,
        BLOCK=_TOKENS,
        SAMPLED=_SAMPLED,
        BLOCK_K=64 if x.element_size() == 2 else 32,
        num_warps=8,
        num_stages=4,
    )
