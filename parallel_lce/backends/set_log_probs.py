"""Log-softmax over each token's set of entries, and its gradient, in plain torch; in kernels:
parallel_lce.kernels.set_log_probs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def set_log_probs(packed: Tensor, sets: Any, broken: Tensor | None, vocab_size: Tensor | int) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[E]`` of each token's entries among each other, and their logits ``[E]``; -inf and 0 for
    ids outside ``[0, vocab_size)``.

    ``packed [P, >= E]``: each rank's logits, 0 for ids of others. ``sets``: the selected entries
    (:class:`parallel_lce.call.selection.Selected`). ``broken``, 0-dimensional bool: all log-probabilities are NaN.
    """
    logits = packed[:, : len(sets.ids)].sum(0)
    outside = (sets.ids < 0) | (sets.ids >= vocab_size)
    logits.masked_fill_(outside, -torch.inf)
    maxima = sets.maxima(logits)
    shifted = logits - sets.spread(maxima.masked_fill(maxima == -torch.inf, 0.0))
    # Sum of all exponentials but the largest. With the largest, 1, the sum would round away a confident token's 1 - p.
    largest = shifted == 0
    others = sets.sums(shifted.exp().masked_fill(largest, 0.0))
    others += (sets.sums(largest.to(shifted.dtype)) - 1).clamp(min=0)
    log_probs = shifted - sets.spread(others.log1p())
    # For a token without a finite logit this replaces -inf - -inf.
    log_probs.masked_fill_(logits == -torch.inf, -torch.inf)
    if broken is not None:
        log_probs.masked_fill_(broken, torch.nan)
    return log_probs, logits.masked_fill_(outside, 0.0)


def set_gradient(log_probs: Tensor, upstream: Tensor, sets: Any) -> Tensor:
    """The gradient ``[E]`` of the logits of :func:`set_log_probs`."""
    # A probability of 0 has no gradient, even if its log-probability has an upstream gradient.
    upstream = upstream.where(log_probs != -torch.inf, 0.0)
    # u - p sum(u), without the difference where p is near 1.
    others = sets.spread(sets.sums(upstream)) - upstream
    return -upstream * log_probs.expm1() - log_probs.exp() * others
