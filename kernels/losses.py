"""Cross-entropy of tokens from their merged partials, and the coefficients of its gradient, in one launch.

Plain torch takes about twenty elementwise operations (``parallel_lce.backends.loss``). For a small vocabulary shard
these take the host longer than the GPU takes for the projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched

_TOKENS = 128


@Relaunched
@triton.jit(do_not_specialize=["rows", "ignore_index"])
def lce_forward_losses(
    partial,
    vocab_size,
    target,
    token_weight,
    losses,
    alpha,
    beta,
    gamma,
    rows,
    ignore_index,
    smoothing,
    z_loss,
    SQUARED: tl.constexpr,
    OUTSIDE_NAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    top = tl.load(partial + row, mask=valid, other=0.0)
    log_sum = tl.log(tl.load(partial + rows + row, mask=valid, other=1.0))
    log_prob = (tl.load(partial + 2 * rows + row, mask=valid, other=0.0) - top) - log_sum
    entries = tl.load(vocab_size)
    wanted = tl.load(target + row, mask=valid, other=0)
    inside = (wanted >= 0) & (wanted < entries)
    weight = tl.full((BLOCK,), 1.0, tl.float32)
    if token_weight is not None:
        weight = tl.load(token_weight + row, mask=valid, other=0.0)
    target_coefficient = tl.full((BLOCK,), 1.0, tl.float32) - smoothing
    if OUTSIDE_NAN:
        weight = tl.where(inside, weight, float("nan"))
    else:
        log_prob = tl.where(inside, log_prob, -log_sum)
        target_coefficient = tl.where(inside, target_coefficient, 0.0)
    loss = -(1.0 - smoothing) * log_prob
    if gamma is not None:
        shifted = tl.load(partial + 3 * rows + row, mask=valid, other=0.0)
        loss -= smoothing * (shifted / entries.to(tl.float32) - log_sum)
    lse_factor = tl.full((BLOCK,), 1.0, tl.float32)
    if SQUARED:
        lse = top + log_sum
        loss += z_loss * lse * lse
        lse_factor += 2.0 * z_loss * lse
    loss *= weight
    if ignore_index is not None:
        ignored = wanted == ignore_index
        loss = tl.where(ignored, 0.0, loss)
        weight = tl.where(ignored, 0.0, weight)
    tl.store(losses + row, loss, mask=valid)
    tl.store(alpha + row, tl.where(weight == 0.0, 0.0, weight * lse_factor), mask=valid)
    tl.store(beta + row, weight * target_coefficient, mask=valid)
    if gamma is not None:
        tl.store(gamma + row, weight * (smoothing / entries.to(tl.float32)), mask=valid)


def token_losses(
    partial: torch.Tensor,
    vocab_size: torch.Tensor,
    target: torch.Tensor,
    token_weight: torch.Tensor | None,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    outside_is_nan: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """:func:`parallel_lce.backends.loss.token_losses` in one launch.

    ``partial [C, R]`` fp32, merged, contiguous; its column 3 holds the shifted sums if labels are smoothed.
    ``vocab_size``: V, 0-dimensional int64. ``target [R]`` int64. ``token_weight [R]`` fp32.
    """
    rows = target.shape[0]
    losses, alpha, beta = [torch.empty_like(partial[0]) for _ in range(3)]
    gamma = torch.empty_like(alpha) if label_smoothing else None
    with torch.cuda.device_of(partial):  # Triton launches on the current device
        lce_forward_losses.launch(
            (-(-rows // _TOKENS),),
            partial,
            vocab_size,
            target,
            token_weight,
            losses,
            alpha,
            beta,
            gamma,
            rows,
            ignore_index,
            float(label_smoothing),
            float(z_loss),
            SQUARED=z_loss != 0,
            OUTSIDE_NAN=outside_is_nan,
            BLOCK=_TOKENS,
        )
    return losses, alpha, beta, gamma
