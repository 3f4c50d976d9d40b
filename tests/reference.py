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


def loss(
    z: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
) -> Tensor:
    """``linear_cross_entropy`` from logits ``z [..., V]``, in z's dtype."""
    found = statistics(z, target)
    per_token = -(1 - label_smoothing) * found["target_log_prob"]
    per_token = per_token - label_smoothing * found["mean_log_prob"] + z_loss * found["lse"] ** 2
    counted = target != ignore_index
    inside = (target >= 0) & (target < z.shape[-1])
    per_token = torch.where(inside, per_token, torch.nan)
    weight = counted.to(z.dtype)
    if token_weight is not None:
        weight = torch.where(counted, token_weight.to(z.dtype), 0.0)
    per_token = torch.where(counted, per_token * weight, 0.0)
    if reduction == "none":
        return per_token
    total = per_token.sum()
    if reduction == "sum":
        return total
    return total / torch.where(weight.sum() == 0, 1.0, weight.sum())
