"""Log-softmax over each token's set of entries, and its gradient; the plain torch is in
:mod:`parallel_lce.selected_log_probs`.

Token n has the entries ``offsets[n] ... offsets[n + 1] - 1``. One program works on one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import Cap, caps_of, log_1_plus, one_minus_exp
from parallel_lce.kernels.relaunch import Relaunched

_ENTRIES = 32


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
    # All exponentials but one of the largest. The sum of all would round away what is left of a token that is sure.
    others, largest = 0.0, 0.0
    for start in range(first, stop, BLOCK):
        z = _logits_of(packed, ids, start + tl.arange(0, BLOCK), stop, ranks, stride, size, BLOCK)
        others += tl.sum(tl.where(z == maximum, 0.0, tl.exp(z - base)), 0)
        largest += tl.sum(tl.where(z == maximum, 1.0, 0.0), 0)
    log_sum = log_1_plus(others + tl.maximum(largest - 1.0, 0.0))
    for start in range(first, stop, BLOCK):
        e = start + tl.arange(0, BLOCK)
        z = _logits_of(packed, ids, e, stop, ranks, stride, size, BLOCK)
        found = tl.where(z == -float("inf"), z, z - base - log_sum)
        if broken is not None:
            found = tl.where(tl.load(broken), float("nan"), found)
        tl.store(log_probs + e, found, mask=e < stop)
        tl.store(logits + e, tl.where(z == -float("inf"), 0.0, z), mask=e < stop)


@Relaunched
@triton.jit
def lce_backward_set_log_probs(
    log_probs, logits, upstream, offsets, token_scale, values, scale, cap, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    first, stop = tl.load(offsets + token), tl.load(offsets + token + 1)
    factor = scale
    if token_scale is not None:
        factor = tl.load(token_scale + token) * scale
    total = 0.0
    for start in range(first, stop, BLOCK):
        e = start + tl.arange(0, BLOCK)
        log_p = tl.load(log_probs + e, mask=e < stop, other=-float("inf"))
        u = tl.load(upstream + e, mask=e < stop, other=0.0)
        # A probability of 0 has no gradient, whatever its log-probability has.
        total += tl.sum(tl.where(log_p == -float("inf"), 0.0, u), 0)
    for start in range(first, stop, BLOCK):
        e = start + tl.arange(0, BLOCK)
        log_p = tl.load(log_probs + e, mask=e < stop, other=-float("inf"))
        u = tl.load(upstream + e, mask=e < stop, other=0.0)
        u = tl.where(log_p == -float("inf"), 0.0, u)
        # u - p total, without the difference where p is near 1.
        g = (u * one_minus_exp(log_p) - tl.exp(log_p) * (total - u)) * factor
        if cap.number is not None:
            z = tl.load(logits + e, mask=e < stop, other=0.0) / caps_of(cap, token, True)
            g *= 1.0 - z * z
        tl.store(values + e, g, mask=e < stop)


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
    log_probs, logits = packed.new_empty(2, len(ids)).unbind()
    in_memory = isinstance(vocab_size, torch.Tensor)
    lce_forward_set_log_probs.launch(
        (len(offsets) - 1,),
        packed,
        ids,
        offsets,
        broken,
        vocab_size if in_memory else None,
        log_probs,
        logits,
        len(packed),
        packed.stride(0),
        0 if in_memory else vocab_size,
        BLOCK=_ENTRIES,
        num_warps=1,
    )
    return log_probs, logits


def gradient_of_logits(
    log_probs: torch.Tensor,
    logits: torch.Tensor,
    upstream: torch.Tensor,
    offsets: torch.Tensor,
    token_scale: torch.Tensor | None,
    scale: float,
    softcap: float | torch.Tensor | None,
) -> torch.Tensor:
    """``[E]``: the gradient before scale and soft-cap of the logits that :func:`set_log_probs` was given. ``upstream
    [E]`` fp32; ``token_scale [N]`` fp32, or None for 1; ``softcap``: a number, or ``[N]`` fp32."""
    values = torch.empty_like(log_probs)
    lce_backward_set_log_probs.launch(
        (len(offsets) - 1,),
        log_probs,
        logits,
        upstream,
        offsets,
        token_scale,
        values,
        float(scale),
        Cap.of(softcap),
        BLOCK=_ENTRIES,
        num_warps=1,
    )
    return values
