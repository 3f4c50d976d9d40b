"""Log-softmax over each token's set of entries, and its gradient. The plain torch is in
:mod:`parallel_lce.backends.set_log_probs`.

Token n has the entries ``offsets[n] ... offsets[n + 1] - 1``. One program works on one token.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.relaunch import Relaunched

_ENTRIES = 32


@triton.jit
def _log_1_plus(x):
    """log(1 + x) for x >= 0, without the rounding of 1 + x (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0, by its series where exp(x) is near 1."""
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0)))
    return tl.where(x > -0.05, series, 1.0 - tl.exp(x))


@triton.jit
def _logits_of(packed, ids, e, stop, ranks, stride, vocab_size, BLOCK: tl.constexpr):
    """The sums over the ranks of some entries' logits; -inf outside the vocabulary, and from ``stop`` on."""
    logit = tl.zeros((BLOCK,), tl.float32)
    for rank in range(0, ranks):
        logit += tl.load(packed + rank * stride + e, mask=e < stop, other=0.0)
    wanted = tl.load(ids + e, mask=e < stop, other=-1)
    return tl.where((wanted >= 0) & (wanted < vocab_size), logit, -float("inf"))


@Relaunched
@triton.jit(do_not_specialize=["ranks", "stride", "entries"])
def lce_forward_set_log_probs(
    packed, ids, offsets, broken, vocab_size, log_probs, logits, ranks, stride, entries, BLOCK: tl.constexpr
):
    """``vocab_size``: a number in memory, or None for ``entries``."""
    token = tl.program_id(0)
    first, stop = tl.load(offsets + token), tl.load(offsets + token + 1)
    size = entries.to(tl.int64)
    if vocab_size is not None:
        size = tl.load(vocab_size)
    stride = stride.to(tl.int64)
    maximum = -float("inf")
    for start in range(first, stop, BLOCK):
        z = _logits_of(packed, ids, start + tl.arange(0, BLOCK), stop, ranks, stride, size, BLOCK)
        maximum = tl.maximum(maximum, tl.max(z, 0))
    # A token without an entry in the vocabulary: -inf - -inf is NaN.
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    # All exponentials but one of the largest. The sum of all would round away a confident token's 1 - p.
    others, largest = 0.0, 0.0
    for start in range(first, stop, BLOCK):
        z = _logits_of(packed, ids, start + tl.arange(0, BLOCK), stop, ranks, stride, size, BLOCK)
        others += tl.sum(tl.where(z == maximum, 0.0, tl.exp(z - base)), 0)
        largest += tl.sum(tl.where(z == maximum, 1.0, 0.0), 0)
    log_sum = _log_1_plus(others + tl.maximum(largest - 1.0, 0.0))
    for start in range(first, stop, BLOCK):
        e = start + tl.arange(0, BLOCK)
        z = _logits_of(packed, ids, e, stop, ranks, stride, size, BLOCK)
        log_p = tl.where(z == -float("inf"), z, z - base - log_sum)
        if broken is not None:
            log_p = tl.where(tl.load(broken), float("nan"), log_p)
        tl.store(log_probs + e, log_p, mask=e < stop)
        tl.store(logits + e, tl.where(z == -float("inf"), 0.0, z), mask=e < stop)


@triton.jit
def _of_entries(log_probs, upstream, e, stop):
    """Log-probabilities, and their upstream gradients. A probability of 0 has no gradient, whatever its log-probability
    has."""
    log_p = tl.load(log_probs + e, mask=e < stop, other=-float("inf"))
    u = tl.load(upstream + e, mask=e < stop, other=0.0)
    return log_p, tl.where(log_p == -float("inf"), 0.0, u)


@Relaunched
@triton.jit
def lce_backward_set_log_probs(log_probs, upstream, offsets, gradient, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    first, stop = tl.load(offsets + token), tl.load(offsets + token + 1)
    total = 0.0
    for start in range(first, stop, BLOCK):
        log_p, u = _of_entries(log_probs, upstream, start + tl.arange(0, BLOCK), stop)
        total += tl.sum(u, 0)
    for start in range(first, stop, BLOCK):
        e = start + tl.arange(0, BLOCK)
        log_p, u = _of_entries(log_probs, upstream, e, stop)
        # u - p total, without the difference where p is near 1.
        tl.store(gradient + e, u * _one_minus_exp(log_p) - tl.exp(log_p) * (total - u), mask=e < stop)


def set_log_probs(
    packed: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    broken: torch.Tensor | None,
    vocab_size: torch.Tensor | int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities ``[E]`` of each token's entries among each other, and their logits ``[E]``.

    ``packed [P, >= E]`` fp32: each rank's logits, 0 for ids of others. ``ids [E]`` and ``offsets [N + 1]``, from 0 to E
    and not decreasing: int64. ``broken``, 0-dimensional bool: all is NaN. An id outside ``[0, vocab_size)`` has -inf,
    and the logit 0.
    """
    # Wrong offsets leave entries without a token.
    log_probs, logits = packed.new_full((2, len(ids)), math.nan).unbind()
    known = isinstance(vocab_size, int)
    if len(offsets) > 1:
        lce_forward_set_log_probs.launch(
            (len(offsets) - 1,),
            packed,
            ids,
            offsets,
            broken,
            None if known else vocab_size,
            log_probs,
            logits,
            len(packed),
            packed.stride(0),
            vocab_size if known else 0,
            BLOCK=_ENTRIES,
            num_warps=1,
        )
    return log_probs, logits


def set_gradient(log_probs: torch.Tensor, upstream: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``[E]``: the gradient of the logits of :func:`set_log_probs`. ``upstream [E]`` fp32."""
    gradient = torch.full_like(log_probs, math.nan)  # of entries without a token, too
    arguments = log_probs, upstream, offsets, gradient
    if len(offsets) > 1:
        lce_backward_set_log_probs.launch((len(offsets) - 1,), *arguments, BLOCK=_ENTRIES, num_warps=1)
    return gradient
