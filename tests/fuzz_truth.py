"""What a configuration's results should be, on all logits, in float64 or as torch's path has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import reference
from fuzz_draw import Configuration
from fuzz_values import INFINITE, Entries, Operands, ignore_index


def dense(c: Configuration, o: Operands, dtype: torch.dtype, wide: torch.dtype) -> dict[str, Tensor]:
    """Every result and gradient with all logits, projected in ``dtype``, the rest in ``wide``; ``G [N, V]``: the
    gradient of the projection."""
    leaves = o.layer.leaves(dtype)
    z, product = o.layer.logits(leaves, wide)
    if o.token_weight is not None:
        leaves["token_weight"] = o.token_weight.to(wide).detach().requires_grad_()
    upstream = {name: value.to(wide) for name, value in o.upstream.items()}
    if c.kind == "divergence":
        y, _ = o.teacher.logits(o.teacher.leaves(dtype), wide)
        found = {"loss": _reduced(c, o, _divergences(z, y.detach(), c.beta))}
    elif c.kind == "selected":
        found = {"log_probs": _among_selected(z, o.entries)}
        # An entry of probability 0 has no gradient.
        upstream["log_probs"] = upstream["log_probs"].masked_fill(found["log_probs"].detach() < -INFINITE, 0.0)
    elif c.kind == "loss":
        options = {name: getattr(c, name) for name in ("reduction", "label_smoothing", "z_loss")}
        weight = leaves.get("token_weight")
        found = {"loss": reference.loss(z, o.target, ignore_index=ignore_index(c), token_weight=weight, **options)}
    elif c.kind == "logits":
        losses, source = _megatrons(c, o.target, z)
        found = {"loss": losses}
    else:
        found = reference.statistics(z, o.target)
        if o.entries is not None:
            log_p, each = torch.log_softmax(z, 1), o.entries
            picked = log_p[each.owner, each.ids]
            found["selected_log_prob"] = torch.where(each.inside, picked, -found["lse"][each.owner])
    sources = {"loss": source} if c.kind == "logits" else found
    gradients = torch.autograd.grad(
        [sources[name] for name in upstream],
        [*leaves.values(), product],
        [*upstream.values()],
        allow_unused=True,
        materialize_grads=True,
    )
    results = {name: value.detach() for name, value in found.items()}
    return results | dict(zip([*(f"d{name}" for name in leaves), "G"], gradients))


def smoothing_of_logits(c: Configuration) -> float:
    """The share that ``vocab_parallel_cross_entropy`` spreads over the entries of a rank."""
    entries = c.V // c.ranks
    return c.label_smoothing * entries / (entries - 1) if c.label_smoothing else 0.0


def _megatrons(c: Configuration, target: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The losses ``[N]``, with label smoothing those of each rank ``[ranks, N]``; and what has their gradient."""
    smoothing, log_p = smoothing_of_logits(c), torch.log_softmax(z, 1)
    inside, own = (target >= 0) & (target < c.V), target.clamp(0, c.V - 1)[:, None]
    source = z.logsumexp(1) - (1 - smoothing) * z.gather(1, own)[:, 0].where(inside, 0.0)
    source = source - smoothing * c.ranks * z.mean(1)
    # A target outside has the largest logit's loss.
    losses = (smoothing - 1) * torch.where(inside, log_p.gather(1, own)[:, 0], log_p.amax(1))
    if smoothing:
        losses = losses - smoothing * log_p.unflatten(1, (c.ranks, c.V // c.ranks)).mean(2).t()
    return losses, source


def _among_selected(z: Tensor, entries: Entries) -> Tensor:
    """``[E]``: the log-softmax of each token's selected entries."""
    logits = z[entries.owner, entries.ids].masked_fill(~entries.inside, -torch.inf)
    rows = z.new_full((len(z), entries.most), -torch.inf).index_put((entries.owner, entries.places), logits)
    return rows.log_softmax(1)[entries.owner, entries.places].masked_fill(~entries.inside, -torch.inf)


def _divergences(z: Tensor, y: Tensor, beta: float) -> Tensor:
    """``[N]``"""
    log_p, log_q = z.log_softmax(1), y.log_softmax(1)
    of_p, of_q = log_ratios(log_p - log_q, beta)
    found = torch.zeros_like(z[:, 0])
    if beta < 1:
        found = found + (beta or 1.0) * (log_q.exp() * of_q).sum(1)
    if beta > 0:
        found = found + (1 - beta if beta < 1 else 1.0) * (log_p.exp() * of_p).sum(1)
    return found


def log_ratios(d: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / r) and log(q / r) from log(p / q), with the reference r of :mod:`parallel_lce.run.divergence`."""
    if beta in (0, 1):
        return d, -d
    log_beta, log_rest = torch.full_like(d, math.log(beta)), torch.full_like(d, math.log1p(-beta))
    return -torch.logaddexp(log_rest, log_beta - d), -torch.logaddexp(log_rest + d, log_beta)


def _reduced(c: Configuration, o: Operands, each: Tensor) -> Tensor:
    each = each.masked_fill(o.quiet, 0.0)
    if c.reduction == "none":
        return each
    return each.sum() / (max(1, int((~o.quiet).sum())) if c.reduction == "mean" else 1)
