"""Each token's target logit, and whether its logits are near 0, computed before the projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.core.partials import NEAR_ZERO
from parallel_lce.kernels.arithmetic import add_product, loaded
from parallel_lce.kernels.launch import Relaunched, hopper_or_later
from parallel_lce.kernels.logit_map import entry_logits, tile_caps, tile_logits
from parallel_lce.kernels.product import Product

# Tokens per program, and vocabulary rows of the sample.
_TOKENS = tl.constexpr(64)
_NEAR_ZERO = tl.constexpr(NEAR_ZERO)
# Entries this far below the largest do not count, such as those that a bias masks.
_COUNTED = tl.constexpr(20.0)


@Relaunched
@triton.jit(do_not_specialize=["rows", "step"])
def lce_forward_target_logits(
    x,
    weight,
    bias,
    logit_map,
    target,
    partial,
    flat,
    rows,
    entries,
    k_size,
    step,
    x_stride,
    weight_stride,
    BLOCK_K: tl.constexpr,
):
    lane = tl.arange(0, _TOKENS)
    r = tl.program_id(0) * _TOKENS + lane
    valid = r < rows
    x_rows = x + r.to(tl.int64)[:, None] * x_stride
    own, sample = tl.zeros((_TOKENS, _TOKENS), tl.float32), tl.zeros((_TOKENS, _TOKENS), tl.float32)
    read = valid
    if target is not None:
        target_id = tl.load(target + r, mask=valid, other=-1)
        hit = (target_id >= 0) & (target_id < entries)
        own_rows = weight + tl.where(hit, target_id, 0)[:, None] * weight_stride
        if flat is None:
            # Tokens whose targets lie in other shards read nothing.
            read = hit
    if flat is not None:
        entry = lane * step
        sampled = entry < entries
        sample_rows = weight + entry.to(tl.int64)[:, None] * weight_stride
    for k in range(0, k_size, BLOCK_K):
        c = k + tl.arange(0, BLOCK_K)
        inside = (c < k_size)[None, :]
        a = tl.load(x_rows + c[None, :], mask=read[:, None] & inside, other=0.0)
        if target is not None:
            b = tl.load(own_rows + c[None, :], mask=hit[:, None] & inside, other=0.0)
            own = add_product(a, b.T, own)
        if flat is not None:
            b = tl.load(sample_rows + c[None, :], mask=sampled[:, None] & inside, other=0.0)
            sample = add_product(a, b.T, sample)
    if target is not None:
        logit = tl.sum(tl.where(lane[:, None] == lane[None, :], own, 0.0), 1)
        logit = entry_logits(logit, bias, target_id, hit, logit_map, r, valid)
        tl.store(partial + 2 * rows + r, tl.where(hit, logit, 0.0), mask=valid)
    if flat is not None:
        if bias is not None:
            sample += tl.load(bias + entry, mask=sampled, other=0.0).to(tl.float32)[None, :]
        caps = tile_caps(logit_map, r, valid)
        sample = tile_logits(sample, logit_map, loaded(logit_map.token_scale, r, valid, 1.0), caps, True)
        top = tl.max(tl.where(sampled[None, :], sample, -float("inf")), 1)
        counted = sampled[None, :] & (sample > top[:, None] - _COUNTED)
        near = tl.sum(tl.where(counted & (tl.abs(sample) < _NEAR_ZERO), 1.0, 0.0), 1)
        is_flat = 2.0 * near > tl.sum(tl.where(counted, 1.0, 0.0), 1)
        tl.store(flat + r, is_flat.to(tl.float32), mask=valid)


def target_logits(
    product: Product, target: torch.Tensor | None, partial: torch.Tensor, flat: torch.Tensor | None
) -> None:
    """Write the targets' logits into the ``partial [C, R]`` fp32, and ``flat [R]`` fp32. ``target`` or ``flat`` may be
    None.

    A ``target [R]`` int64 outside ``[0, V)`` has the logit 0. The targets' logits are the diagonal of a product with
    the targets' rows of the weight. They are summed in the mainloop's order, so a target that is a token's maximum
    equals it to the bit. The mainloop does not pick targets out of its tiles: tiles would then differ in time, and its
    programs would fall out of step.

    ``flat``: 1 for tokens of which most logits are near 0, of 64 evenly spaced rows of the weight, 0 for others
    (:func:`parallel_lce.kernels.arithmetic.flattened`); None if no gradient can be a small difference.
    """
    x, weight = product.x, product.weight
    (rows, k_size), entries = x.shape, weight.shape[0]
    lce_forward_target_logits.launch(
        (-(-rows // _TOKENS.value),),
        x,
        weight,
        product.bias,
        product.logit_map,
        target,
        partial,
        flat,
        rows,
        entries,
        k_size,
        -(-entries // _TOKENS.value),
        x.stride(0),
        weight.stride(0),
        # Ampere has too few registers for 64.
        BLOCK_K=64 if x.element_size() == 2 and hopper_or_later(x.device) else 32,
        num_warps=8,
        num_stages=4,
    )
