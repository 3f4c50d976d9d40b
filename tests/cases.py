"""Random tensors of a call, a rank's part of them, and the loss and the statistics of all logits in one process."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_lce.core.partials import accumulation_dtype
from world import Member

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed fp64 numbers, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Tensors:
    """``x [N, D]``, ``weight [V, D]``, ``bias [V]``, ``target [N]`` and ``token_weight [N]``."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    token_weight: Tensor | None = None


def make(
    N: int,
    V: int,
    D: int,
    dtype: str = "fp32",
    device: torch.device | str = "cpu",
    *,
    bias: bool = False,
    token_weight: bool = False,
    ignored: bool = False,
    sharpness: float = 1.0,
    seed: int = 0,
) -> Tensors:
    """The same tensors on every rank and device. ``ignored``: every third target is -100; ``sharpness``: standard
    deviation of the logits. Every fifth token's weight is 0."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype]).to(device)

    x, weight, bias_of = drawn(N, D), drawn(V, D) * (sharpness / D**0.5), drawn(V)
    target = torch.randint(V, (N,), generator=generator)
    weights = torch.rand(N, generator=generator).to(accumulation_dtype(DTYPES[dtype]))
    if ignored:
        target[::3] = -100
    weights[1::5] = 0
    given = bias_of if bias else None, weights.to(device) if token_weight else None
    return Tensors(x, weight, target.to(device), *given)


def part(t: Tensors, member: Member, sequence_parallel: bool = False, shards: tuple[int, ...] | None = None) -> Tensors:
    """A rank's part of the tensors. Its operands are leaves in memory of their own. ``shards``: the ranks' rows of the
    weight and the bias, None for equal ones."""
    rows = len(t.weight) // member.ranks
    start = rows * member.rank if shards is None else sum(shards[: member.rank])
    stop = start + (rows if shards is None else shards[member.rank])

    def leaf(value: Tensor) -> Tensor:
        return value.detach().clone().requires_grad_()

    x = t.x.chunk(member.ranks)[member.rank] if sequence_parallel else t.x
    bias = None if t.bias is None else leaf(t.bias[start:stop])
    return replace(t, x=leaf(x), weight=leaf(t.weight[start:stop]), bias=bias)


def dense_loss(
    t: Tensors, dtype: torch.dtype = torch.float64, reduction: str = "mean", upstream: Tensor | None = None, of=None
) -> dict[str, Tensor]:
    """Loss and gradients of all logits: projected in ``dtype``, and from there on in fp32, or in fp64 for fp64.
    ``upstream``: of the loss, None for ones. ``of(logits)``: a loss, None for cross-entropy."""
    named = (("x", t.x), ("weight", t.weight), ("bias", t.bias))
    leaves = {name: value.detach().to(dtype).requires_grad_() for name, value in named if value is not None}
    z = torch.nn.functional.linear(*leaves.values()).to(accumulation_dtype(dtype))
    loss = of(z) if of else torch.nn.functional.cross_entropy(z, t.target, reduction=reduction)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    gradients = torch.autograd.grad(loss, [*leaves.values()], upstream)
    return {"loss": loss.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients)}


def dense_statistics(z: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
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
