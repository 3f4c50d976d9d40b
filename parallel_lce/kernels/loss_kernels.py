"""Losses of tokens and the coefficients of their gradients, from merged partials, in one launch; the mean in another.

Plain torch takes about twenty elementwise operations (``parallel_lce.backends.loss_formula``). For a small vocabulary
shard the host needs longer for these than the GPU for the projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.memory import on_device_of
from parallel_lce.core.options import Options
from parallel_lce.core.partials import Coefficients
from parallel_lce.kernels.relaunch import Bound, Relaunched, kept

# Tokens per program; tokens per step of the mean's only program.
_TOKENS, _SUMMED = tl.constexpr(128), tl.constexpr(4096)


class LossTerms(NamedTuple):
    """A loss's options for the kernels. None: the kernel is compiled without the term."""

    ignore_index: int | None = None
    smoothing: float = 0.0
    z_loss: float | None = None

    @staticmethod
    def of(options: Options) -> LossTerms:
        return LossTerms(options.ignore_index, float(options.label_smoothing), float(options.z_loss) or None)


@triton.jit
def loss_of(
    top, log_sum, logit, shifted, target_id, weight, entries, terms, SMOOTHED: tl.constexpr, OUTSIDE_NAN: tl.constexpr
):
    """Losses, alpha, beta, gamma and excess of tokens from the columns of their merged partials. ``target_id``: the
    targets, relative to the first of the ``entries``."""
    inside = (target_id >= 0) & (target_id < entries)
    log_prob = (logit - top) - log_sum
    smoothing, of_target = terms.smoothing, 1.0 - terms.smoothing
    if OUTSIDE_NAN:
        weight = tl.where(inside, weight, float("nan"))
    else:
        log_prob = tl.where(inside, log_prob, -log_sum)
        of_target = tl.where(inside, of_target, 0.0)
    loss = -(1.0 - smoothing) * log_prob
    if SMOOTHED:
        loss -= smoothing * (shifted / (entries + 0.0) - log_sum)
    of_lse = 0.0
    if terms.z_loss is not None:
        lse = top + log_sum
        loss += terms.z_loss * lse * lse
        of_lse = 2.0 * terms.z_loss * lse
    loss *= weight
    if terms.ignore_index is not None:
        ignored = target_id == terms.ignore_index
        loss = tl.where(ignored, 0.0, loss)
        weight = tl.where(ignored, 0.0, weight)
    alpha = tl.where(weight == 0.0, 0.0, weight * (1.0 + of_lse))
    excess = tl.where(weight == 0.0, 0.0, weight * ((1.0 - of_target) + of_lse))
    return loss, alpha, weight * of_target, weight * (smoothing / (entries + 0.0)), excess


@Relaunched
@triton.jit(do_not_specialize=["rows", "entries"])
def lce_forward_losses(
    partial, vocab_size, target, token_weight, losses, out, entries, rows, terms, OUTSIDE_NAN: tl.constexpr
):
    row = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    valid = row < rows
    top = tl.load(partial + row, mask=valid, other=0.0)
    log_sum = tl.log(tl.load(partial + rows + row, mask=valid, other=1.0))
    logit = tl.load(partial + 2 * rows + row, mask=valid, other=0.0)
    if vocab_size is not None:
        entries = tl.load(vocab_size)
    weight = tl.full((_TOKENS,), 1.0, tl.float32)
    if token_weight is not None:
        weight = tl.load(token_weight + row, mask=valid, other=0.0)
    SMOOTHED: tl.constexpr = out.gamma is not None
    shifted = top  # Not read without smoothing.
    if SMOOTHED:
        shifted = tl.load(partial + 3 * rows + row, mask=valid, other=0.0)
    target_id = tl.load(target + row, mask=valid, other=0)
    loss, of_all, of_target, of_others, beyond = loss_of(
        top, log_sum, logit, shifted, target_id, weight, entries, terms, SMOOTHED, OUTSIDE_NAN
    )
    tl.store(losses + row, loss, mask=valid)
    tl.store(out.alpha + row, of_all, mask=valid)
    tl.store(out.beta + row, of_target, mask=valid)
    if SMOOTHED:
        tl.store(out.gamma + row, of_others, mask=valid)
    if out.excess is not None:
        tl.store(out.excess + row, beyond, mask=valid)


def token_losses(
    partial: torch.Tensor,
    vocab_size: torch.Tensor | int,
    target: torch.Tensor,
    token_weight: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, Coefficients]:
    """:func:`parallel_lce.backends.loss_formula.token_losses` in one launch. ``partial``: contiguous."""
    rows, smoothed = target.shape[0], options.label_smoothing > 0
    # A separate allocation: users may change the losses in place.
    losses, (alpha, beta, gamma, excess) = partial.new_empty(rows), partial.new_empty(4, rows).unbind()
    coefficients = Coefficients(alpha, beta, gamma if smoothed else None, excess=excess if options.z_loss else None)
    size, entries = (None, vocab_size) if isinstance(vocab_size, int) else (vocab_size, 0)
    terms, weight = LossTerms.of(options), None if token_weight is None else token_weight.dtype
    traits = rows, partial.get_device(), size is None, entries, weight, terms, options.outside_is_nan
    launch = kept(_LOSSES, traits, lambda: _bound_losses(rows, entries, terms, options.outside_is_nan))
    with on_device_of(partial):
        launch(partial, size, target, token_weight, losses, coefficients)
    return losses, coefficients


_LOSSES: dict[tuple, Bound] = {}


def _bound_losses(rows: int, entries: int, terms: LossTerms, outside_is_nan: bool) -> Bound:
    numbers = entries, rows, terms
    return Bound(lce_forward_losses, (-(-rows // _TOKENS.value),), numbers, OUTSIDE_NAN=outside_is_nan)


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
    # If all weights are 0, the mean and its gradients are 0.
    whole = tl.where(whole == 0.0, float("inf"), whole)
    tl.store(divisor, whole)
    tl.store(mean, tl.sum(total, 0) / whole)


def mean_loss(
    losses: torch.Tensor, target: torch.Tensor, token_weight: torch.Tensor | None, ignore_index: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of ``losses [R]`` and its divisor, both 0-dimensional fp32. The divisor is the sum of the weights of all
    tokens that are not ignored. One program adds in a fixed order. Arguments: as for :func:`token_losses`."""
    mean, divisor = losses.new_empty(()), losses.new_empty(())
    with on_device_of(losses):
        lce_forward_mean.launch((1,), losses, target, token_weight, mean, divisor, losses.shape[0], ignore_index)
    return mean, divisor
