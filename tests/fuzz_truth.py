"""What a configuration's results should be, on all logits, in float64 or as torch's path has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

import reference
from cases import DTYPES
from fuzz_draw import Configuration
from fuzz_values import MASKED, Whole, ignore_index

INFINITE = 1e15
"""Truths beyond this stand for infinity (:data:`fuzz_values.MASKED`)."""


@dataclass
class Layer:
    """An output layer and its tokens, exact in the computed dtype: ``x [N, D]``, ``weight [V, D]``, ``bias [V]``;
    ``masked [V]``: where the bias is -inf; ``scale [N, 1]`` and ``softcap [N, 1]`` float64, divided by the
    temperature."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    masked: Tensor
    scale: Tensor
    softcap: Tensor | None

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        found = {"input": self.x, "weight": self.weight}
        if self.bias is not None:
            found["bias"] = self.bias.double().masked_fill(self.masked, MASKED)
        return {name: value.to(dtype).detach().requires_grad_() for name, value in found.items()}

    def logits(self, leaves: dict[str, Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """The logits ``[N, V]``, and the product that they come from."""
        product = linear(leaves["input"], leaves["weight"], leaves.get("bias"))
        z = product.to(wide) * self.scale.to(wide)
        if self.softcap is not None:
            softcap = self.softcap.to(wide)
            z = softcap * torch.tanh(z / softcap)
        return z, product


@dataclass
class Entries:
    """Selected entries ``[E]``: the token of each, its id, 0 where that is not ``inside`` the vocabulary, and its place
    among the token's entries; ``most``: of one token."""

    owner: Tensor
    ids: Tensor
    inside: Tensor
    places: Tensor
    most: int

    @classmethod
    def of(cls, c: Configuration, whole: Whole) -> Entries:
        offsets = whole.offsets
        counts = torch.full((c.N,), c.K) if offsets is None else offsets.long().diff()
        ids, owner = whole.ids.reshape(-1).long(), torch.repeat_interleave(torch.arange(c.N), counts)
        inside = (ids >= 0) & (ids < c.V)
        places = torch.arange(len(ids)) - (counts.cumsum(0) - counts)[owner]
        return cls(owner, ids.where(inside, 0), inside, places, int(counts.max()) if c.N else 0)

    def sums(self, values: Tensor, tokens: int) -> Tensor:
        """``[tokens]``, each the sum of its entries' ``values [E]``."""
        return values.new_zeros(tokens).index_add(0, self.owner, values)

    def spread(self, values: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """``[N, V]``: the sums of equal entries' ``values [E]``; of those inside."""
        place = self.owner[self.inside], self.ids[self.inside]
        return values.new_zeros(shape).index_put(place, values[self.inside], accumulate=True)


@dataclass
class Operands:
    """Of N tokens: ``target``, ``token_weight``; ``outside [N]``: tokens whose loss is NaN, here with upstream
    gradient 0; ``quiet [N]``: those that do not count; ``upstream``: flattened."""

    layer: Layer
    teacher: Layer | None
    target: Tensor | None
    token_weight: Tensor | None
    entries: Entries | None
    upstream: dict[str, Tensor]
    outside: Tensor
    quiet: Tensor


def operands(c: Configuration, whole: Whole) -> Operands:
    def per_token(given: Tensor | None, number: float) -> Tensor:
        return torch.full((c.N, 1), number, dtype=torch.float64) if given is None else given.reshape(c.N, 1).double()

    temperature = per_token(whole.temperature, 1.0 if c.kind == "divergence" else c.temperature)
    scale = per_token(whole.scale, c.scale) / temperature
    softcap = None if c.softcap is None else c.softcap / temperature

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, masked: Tensor, dtype: torch.dtype) -> Layer:
        flat, bias = x.reshape(c.N, x.shape[-1]).to(dtype), None if bias is None else bias.to(dtype)
        return Layer(flat, weight.to(dtype), bias, masked, scale, softcap)

    mine = layer(whole.x, whole.weight, whole.bias, whole.masked, DTYPES[c.computed])
    teacher = None if whole.teacher is None else layer(*whole.teacher, DTYPES[c.teacher_computed])
    target = None if whole.target is None else whole.target.reshape(-1).long()
    entries = None if whole.ids is None else Entries.of(c, whole)
    each = c.reduction == "none"
    upstream = {name: value.reshape(-1) if each else value for name, value in whole.upstream.items()}
    outside = quiet = torch.zeros(c.N, dtype=torch.bool)
    if c.kind in ("loss", "divergence") and target is not None:
        quiet = target == ignore_index(c)
    if c.kind == "loss":
        outside = ((target < 0) | (target >= c.V)) & ~quiet
        # Any other with a finite loss.
        target = target.masked_fill(outside, int(whole.masked.int().argmin()))
        if each:
            upstream["loss"] = upstream["loss"].masked_fill(outside, 0.0)
    if c.kind == "statistics" and whole.mask is not None:
        quiet = ~whole.mask.reshape(-1)
        for name, value in upstream.items():
            upstream[name] = value.masked_fill(per_result(name, quiet, entries), 0.0)
    token_weight = None if whole.token_weight is None else whole.token_weight.reshape(-1)
    return Operands(mine, teacher, target, token_weight, entries, upstream, outside, quiet)


def per_result(name: str, tokens: Tensor, entries: Entries | None) -> Tensor:
    """What is said of each of ``tokens [N]``, for each element of that result."""
    return tokens[entries.owner] if name in ("selected_log_prob", "log_probs") else tokens


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
