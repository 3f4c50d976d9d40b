"""What a configuration's results should be, on all logits, in float64 or as torch's path has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

import reference
from cases import DTYPES
from fuzz_configuration import Configuration
from fuzz_values import MASKED, Whole, ignore_index


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


@dataclass
class Entries:
    """Selected entries ``[E]``: the token of each, its id, 0 where that is not ``inside`` the vocabulary; ``most``: of
    one token."""

    owner: Tensor
    ids: Tensor
    inside: Tensor
    most: int

    def sums(self, values: Tensor, tokens: int) -> Tensor:
        """``[tokens]``, each the sum of its entries' ``values [E]``."""
        return values.new_zeros(tokens).index_add(0, self.owner, values)

    def maxima(self, values: Tensor, tokens: int) -> Tensor:
        return values.new_full((tokens,), -torch.inf).scatter_reduce(0, self.owner, values, "amax")

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
    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, masked: Tensor, dtype: torch.dtype) -> Layer:
        flat = x.reshape(c.N, x.shape[-1]).to(dtype)
        bias = None if bias is None else bias.to(dtype)
        return Layer(flat, weight.to(dtype), bias, masked, scale, softcap)

    scale = torch.full((c.N, 1), c.scale, dtype=torch.float64)
    if whole.scale is not None:
        scale = whole.scale.reshape(c.N, 1).double()
    temperature = torch.full((c.N, 1), 1.0 if c.kind == "divergence" else c.temperature, dtype=torch.float64)
    if whole.temperature is not None:
        temperature = whole.temperature.reshape(c.N, 1).double()
    scale = scale / temperature
    softcap = None if c.softcap is None else c.softcap / temperature
    mine = layer(whole.x, whole.weight, whole.bias, whole.masked, DTYPES[c.computed])
    teacher = None if whole.teacher is None else layer(*whole.teacher, DTYPES[c.teacher_computed])
    target = None if whole.target is None else whole.target.reshape(-1).long()
    entries = None if whole.ids is None else _entries(c, whole.ids.long(), whole.offsets)
    reduced = c.reduction != "none"
    upstream = {n: v if reduced else v.reshape(-1) for n, v in whole.upstream.items()}
    outside = quiet = torch.zeros(c.N, dtype=torch.bool)
    if c.kind in ("loss", "divergence") and target is not None:
        quiet = target == ignore_index(c)
    if c.kind == "loss":
        outside = ((target < 0) | (target >= c.V)) & ~quiet
        # Any other with a finite loss.
        target = target.masked_fill(outside, int(whole.masked.int().argmin()))
        if not reduced:
            upstream["loss"] = upstream["loss"].masked_fill(outside, 0.0)
    if c.kind == "statistics" and whole.mask is not None:
        quiet = ~whole.mask.reshape(-1)
        for name, value in upstream.items():
            upstream[name] = value.masked_fill(per_result(name, quiet, entries), 0.0)
    token_weight = None if whole.token_weight is None else whole.token_weight.reshape(-1)
    return Operands(mine, teacher, target, token_weight, entries, upstream, outside, quiet)


def _entries(c: Configuration, ids: Tensor, offsets: Tensor | None) -> Entries:
    counts = torch.full((c.N,), c.K) if offsets is None else offsets.long().diff()
    ids = ids.reshape(-1)
    inside = (ids >= 0) & (ids < c.V)
    owner = torch.repeat_interleave(torch.arange(c.N), counts)
    return Entries(owner, ids.where(inside, 0), inside, int(counts.max()) if c.N else 0)


def per_result(name: str, tokens: Tensor, entries: Entries | None) -> Tensor:
    """What is said of each of ``tokens [N]``, for each element of that result."""
    return tokens[entries.owner] if name in ("selected_log_prob", "log_probs") else tokens


def dense(c: Configuration, o: Operands, dtype: torch.dtype, wide: torch.dtype) -> dict[str, Tensor]:
    """Every result and gradient with all logits, projected in ``dtype``, the rest in ``wide``; ``G [N, V]``: the
    gradient of the projection."""
    leaves = _leaves(o.layer, dtype)
    z, product = _logits(o.layer, leaves, wide)
    if o.token_weight is not None:
        leaves["token_weight"] = o.token_weight.to(wide).detach().requires_grad_()
    upstream = {name: value.to(wide) for name, value in o.upstream.items()}
    if c.kind == "divergence":
        with torch.no_grad():
            y, _ = _logits(o.teacher, _leaves(o.teacher, dtype), wide)
        found = {"loss": _reduced(c, o, _divergences(z, y, c.beta))}
    elif c.kind == "selected":
        found = {"log_probs": _among_selected(z, o.entries)}
        # An entry of probability 0 has no gradient.
        upstream["log_probs"] = upstream["log_probs"].masked_fill(found["log_probs"].detach() < -INFINITE, 0.0)
    elif c.kind == "loss":
        found = {
            "loss": reference.loss(
                z,
                o.target,
                reduction=c.reduction,
                ignore_index=ignore_index(c),
                label_smoothing=c.label_smoothing,
                z_loss=c.z_loss,
                token_weight=leaves.get("token_weight"),
            )
        }
    else:
        found = reference.statistics(z, o.target)
        if o.entries is not None:
            log_p, each = torch.log_softmax(z, 1), o.entries
            picked = log_p[each.owner, each.ids]
            found["selected_log_prob"] = torch.where(each.inside, picked, -found["lse"][each.owner])
    gradients = torch.autograd.grad(
        [found[n] for n in upstream], [*leaves.values(), product], [*upstream.values()], allow_unused=True
    )
    results = {name: value.detach() for name, value in found.items()}
    for name, leaf, gradient in zip([*leaves, None], [*leaves.values(), product], gradients):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        results["G" if name is None else f"d{name}"] = gradient
    return results


INFINITE = 1e15
"""Truths beyond this stand for infinity (:data:`fuzz_values.MASKED`)."""


def _leaves(layer: Layer, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = {"input": layer.x.to(dtype), "weight": layer.weight.to(dtype)}
    if layer.bias is not None:
        leaves["bias"] = layer.bias.double().masked_fill(layer.masked, MASKED).to(dtype)
    return {name: value.detach().requires_grad_() for name, value in leaves.items()}


def _logits(layer: Layer, leaves: dict[str, Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The logits ``[N, V]``, and the product that they are of."""
    product = linear(leaves["input"], leaves["weight"], leaves.get("bias"))
    z = product.to(wide) * layer.scale.to(wide)
    if layer.softcap is not None:
        softcap = layer.softcap.to(wide)
        z = softcap * torch.tanh(z / softcap)
    return z, product


def _among_selected(z: Tensor, entries: Entries) -> Tensor:
    """``[E]``: the log-softmax of each token's selected entries."""
    logits = z[entries.owner, entries.ids].masked_fill(~entries.inside, -torch.inf)
    top = entries.maxima(logits.detach(), len(z))
    shifted = logits - top.masked_fill(top == -torch.inf, 0.0)[entries.owner]
    sums = entries.sums(shifted.exp(), len(z))
    found = shifted - sums.masked_fill(sums == 0, 1.0).log()[entries.owner]
    return found.masked_fill(~entries.inside, -torch.inf)


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


def kept(c: Configuration, o: Operands, moved: Tensor) -> dict[str, Tensor]:
    """Gradients from the gradient ``moved [N, V]`` of the projection, whose entries are rounded once more."""
    dtype = DTYPES[c.computed]
    largest = moved.abs().amax().clamp(min=1e-300) if moved.numel() else torch.ones(())
    power = 2.0 ** (10 - torch.frexp(largest).exponent.double()) if dtype == torch.float16 else torch.ones(())
    rounded = (moved * power).to(dtype).double() / power
    x, weight = o.layer.x.double(), o.layer.weight.double()
    return {"dinput": rounded @ weight, "dweight": rounded.t() @ x, "dbias": rounded.sum(0)}
