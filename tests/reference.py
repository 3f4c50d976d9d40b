"""The reference of the tests: the same mathematics on all logits, in one process.

It computes in its input's dtype: float64 makes it an oracle.
"""

import torch
from torch import Tensor


def logits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """``softcap(scale * (input @ weight.T + bias))`` ``[..., V]`` in the dtype of ``input``."""
    z = torch.nn.functional.linear(input, weight, bias)
    z = z * (scale.unsqueeze(-1).to(z.dtype) if isinstance(scale, Tensor) else scale)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z[..., :vocab_size]


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


def loss(z: Tensor, target: Tensor, *, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    """``linear_cross_entropy`` from logits ``z [..., V]``, in z's dtype. Targets of -100 do not count."""
    found, counted = statistics(z, target), target != -100
    each = (label_smoothing - 1) * found["target_log_prob"] - label_smoothing * found["mean_log_prob"]
    each = torch.where(counted, each, 0.0)
    if reduction == "none":
        return each
    return each.sum() / (counted.sum().clamp(min=1) if reduction == "mean" else 1)
