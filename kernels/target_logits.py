"""The targets' logits in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import softcapped
from parallel_lce.kernels.projection import Product
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.tuning import interpreted

# Tokens of a tile.
_TOKENS = 64


@Relaunched
@triton.jit(do_not_specialize=["rows"])
def lce_forward_target_logits(
    x,
    weight,
    bias,
    target,
    result,
    rows,
    entries,
    k_size,
    x_stride,
    weight_stride,
    scale,
    cap,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = r < rows
    wanted = tl.load(target + r, mask=valid, other=-1)
    hit = (wanted >= 0) & (wanted < entries)
    x_rows = x + r.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + tl.where(hit, wanted, 0)[:, None] * weight_stride
    z = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, k_size, BLOCK_K):
        c = k + tl.arange(0, BLOCK_K)
        inside = (c < k_size)[None, :]
        # Tokens whose targets lie in other shards read nothing.
        a = tl.load(x_rows + c[None, :], mask=hit[:, None] & inside, other=0.0)
        b = tl.load(weight_rows + c[None, :], mask=hit[:, None] & inside, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    own = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
    logit = tl.sum(tl.where(own, z, 0.0), 1)
    if bias is not None:
        logit += tl.load(bias + wanted, mask=hit, other=0.0).to(tl.float32)
    logit *= scale
    if cap is not None:
        logit = softcapped(logit, cap)
    tl.store(result + r, tl.where(hit, logit, 0.0), mask=valid)


def target_logits(product: Product, target: torch.Tensor, result: torch.Tensor) -> None:
    """Write the targets' logits into ``result [R]`` fp32: 0 for a ``target [R]`` int64 outside ``[0, V)``.

    They are the diagonal of a product with the targets' rows of the weight. It is summed in the mainloop's order, so a
    target that is a token's maximum equals it to the bit. The mainloop does not pick targets out of its tiles:
    tiles would then differ in time, and its programs would fall out of step.
    """
    x, weight = product.x, product.weight
    lce_forward_target_logits.launch(
        (-(-x.shape[0] // _TOKENS),),
        x,
        weight,
        product.bias,
        target,
        result,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        float(product.scale),
        None if product.softcap is None else float(product.softcap),
        UPCAST=interpreted() and x.dtype == torch.bfloat16,
        BLOCK=_TOKENS,
        BLOCK_K=64 if x.element_size() == 2 else 32,
        num_warps=4,
        num_stages=4,
    )
