"""The reference of the tests: the same mathematics on all logits, in one process.

It computes in its input's dtype: float64 makes it an oracle.
"""

import torch
from torch import Tensor


def logits(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, vocab_size: int | None = None) -> Tensor:
    """``input @ weight.T + bias`` of the real entries ``[..., V]``, in the dtype of ``input``."""
    return torch.nn.functional.linear(input, weight, bias)[..., :vocab_size]


def statistics(z: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
    """Every field of ``TokenStatistics`` from logits ``z [..., V]``."""
    log_p = torch.log_softmax(z, -1)
    lse = torch.logsumexp(z, -1)
    found = {
        "lse": lse,
        "mean_logit": z.mean(-1),
        "mean_log_prob": log_p.mean(-1),
        "expected_logit": (log_p.exp() * z).sum(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "sum_p_squared": log_p.exp().square().sum(-1),
        "max_logit": z.amax(-1),
        "argmax": z.argmax(-1),
    }
    if target is not None:
        inside = (target >= 0) & (target < z.shape[-1])
        picked = z.gather(-1, target.clamp(0, z.shape[-1] - 1).long().unsqueeze(-1)).squeeze(-1)
        found["target_logit"] = torch.where(inside, picked, 0.0)
        found["target_log_prob"] = found["target_logit"] - lse
    return found
