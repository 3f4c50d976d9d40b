"""Cross-entropy of tokens from their merged partials, and the coefficients of its gradient, in one launch; and its mean
in another.

Plain torch takes about twenty elementwise operations (``parallel_lce.backends.loss``). For a small vocabulary shard
these take the host longer than the GPU takes for the projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from parallel_lce.core.memory import on_device_of
from parallel_lce.core.options import Options
from parallel_lce.kernels.relaunch import Relaunched

# Tokens of a program; tokens that the program of the mean adds at a time.
_TOKENS, _SUMMED = tl.constexpr(128), tl.constexpr(4096)


@Relaunched
@triton.jit(do_not_specialize=["rows", "entries", "ignore_index"])
def lce_forward_losses(
    partial,
    vocab_size,
    entries,
    target,
    token_weight,
    out,
    rows,
    ignore_index,
    smoothing,
    z_loss,
    OUTSIDE_NAN: tl.constexpr,
):
    losses, alpha, beta, gamma = out
    row = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    valid = row < rows
    top = tl.load(partial + row, mask=valid, other=0.0)
    log_sum = tl.log(tl.load(partial + rows + row, mask=valid, other=1.0))
    log_prob = (tl.load(partial + 2 * rows + row, mask=valid, other=0.0) - top) - log_sum
    if vocab_size is not None:
        entries = tl.load(vocab_size)
    wanted = tl.load(target + row, mask=valid, other=0)
    inside = (wanted >= 0) & (wanted < entries)
    weight = tl.full((_TOKENS,), 1.0, tl.float32)
    if token_weight is not None:
        weight = tl.load(token_weight + row, mask=valid, other=0.0)
    target_coefficient = tl.full((_TOKENS,), 1.0, tl.float32) - smoothing
    if OUTSIDE_NAN:
        weight = tl.where(inside, weight, float("nan"))
    else:
        log_prob = tl.where(inside, log_prob, -log_sum)
        target_coefficient = tl.where(inside, target_coefficient, 0.0)
    loss = -(1.0 - smoothing) * log_prob
    if gamma is not None:
        shifted = tl.load(partial + 3 * rows + row, mask=valid, other=0.0)
        loss -= smoothing * (shifted / entries.to(tl.float32) - log_sum)
    lse_factor = tl.full((_TOKENS,), 1.0, tl.float32)
    if z_loss is not None:
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
    vocab_size: torch.Tensor | int,
    target: torch.Tensor,
    token_weight: torch.Tensor | None,
    options: Options,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """:func:`parallel_lce.backends.loss.token_losses` in one launch.

    ``partial [C, R]`` fp32, merged, contiguous; its column 3 holds the shifted sums if labels are smoothed.
    ``vocab_size``: V, 0-dimensional int64, or a number. ``target [R]`` int64. ``token_weight [R]`` fp32. ``out``: the
    results' memory, without gamma.
    """
    rows, label_smoothing, z_loss = target.shape[0], options.label_smoothing, options.z_loss
    gamma = None
    if out is None:
        # The losses have memory of their own: their users may change them in place.
        losses, (alpha, beta, *others) = partial.new_empty(rows), partial.new_empty(3 if label_smoothing else 2, rows)
        gamma = others[0] if others else None
    else:
        losses, alpha, beta = out
    known = isinstance(vocab_size, int)
    with on_device_of(partial):
        lce_forward_losses.launch(
            (-(-rows // _TOKENS.value),),
            partial,
            None if known else vocab_size,
            vocab_size if known else 0,
            target,
            token_weight,
            (losses, alpha, beta, gamma),
            rows,
            options.ignore_index,
            float(label_smoothing),
            float(z_loss) if z_loss else None,
            OUTSIDE_NAN=options.outside_is_nan,
        )
    return losses, alpha, beta, gamma


@Relaunched
@triton.jit(do_not_specialize=["rows", "ignore_index"])
def lce_forward_mean(losses, target, token_weight, mean, divisor, rows, ignore_index):
    total, weights = tl.zeros((_SUMMED,), tl.float32), tl.zeros((_SUMMED,), tl.float32)
    for first in range(0, rows, _SUMMED):
        row = first + tl.arange(0, _SUMMED)
        valid = row < rows
        total += tl.load(losses + row, mask=valid, other=0.0)
        counted = valid
        if ignore_index is not None:
            counted &= tl.load(target + row, mask=valid, other=0) != ignore_index
        weight = tl.full((_SUMMED,), 1.0, tl.float32)
        if token_weight is not None:
            weight = tl.load(token_weight + row, mask=valid, other=0.0)
        weights += tl.where(counted, weight, 0.0)
    whole = tl.sum(weights, 0)
    # The mean of nothing and its gradients are 0.
    whole = tl.where(whole == 0.0, float("inf"), whole)
    tl.store(divisor, whole)
    tl.store(mean, tl.sum(total, 0) / whole)


def mean_loss(
    losses: torch.Tensor,
    target: torch.Tensor,
    token_weight: torch.Tensor | None,
    ignore_index: int | None,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of ``losses [R]`` over that of the weights of the tokens that are not ignored, and the latter sum; both
    0-dimensional, fp32.

    One program adds in a fixed order. ``out``: the results' memory. The arguments are those of :func:`token_losses`.
    """
    mean, divisor = out or (losses.new_empty(()), losses.new_empty(()))
    with on_device_of(losses):
        lce_forward_mean.launch((1,), losses, target, token_weight, mean, divisor, losses.shape[0], ignore_index)
    return mean, divisor
