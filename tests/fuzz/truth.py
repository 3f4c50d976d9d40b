"""What a configuration's results should be, and how far roundings may move them.

Everything is computed on all logits: in float64 it is the truth, in the computed dtype torch's own path. A
:class:`Rounding` moves each number on the way, at random, as far as the package's roundings may; a few samples of that,
in a dimension before all others, show how far the results move."""

import math

import torch
from torch import Tensor
from torch.nn.functional import linear

from cases import DTYPES
from fuzz.draw import Configuration
from fuzz.values import INFINITE, MASKED, Layer, Operands, real_rows
from parallel_lce.core.partials import accumulation_dtype

_FP16_SMALLEST = 2.0**-25
"""Half the spacing of the smallest fp16 numbers."""
_FP16_REACH = 3e4
"""Sums of terms beyond this may overflow in fp16."""
_SAMPLES = 24
_FURTHER = 3.5
"""Results may move so many times as far as in any sample. Of normally distributed numbers four in 10^7 do. That is less
than one in the 10^6 rows of a thousand configurations. With 12 samples and a factor of 4, on average the same bound, it
would be one in 10^5."""
_SPLIT = 4
"""Samples beside those, of the worst case of nearly equal tokens: most have the same rounding, but where a boundary of
the dtype lies between them, roundings go with what tells them apart. That is rare in one row, so that the others miss
it, and no multiple of it is allowed."""


def half_spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _sum_of(terms: int) -> float:
    """Roundings of a sum of so many."""
    return 8 + terms**0.5


class Rounding:
    """``u``: half the spacing of the statistics' dtype, ``tiny`` its smallest normal number; ``low``: half the spacing
    of the computed dtype if it has 16 bits, else 0; ``delivered``: of the gradients'; ``any_fp16``: whether they or the
    products are of that dtype. Without ``samples`` nothing is moved. ``truth``: what :func:`dense` gives."""

    def __init__(self, c: Configuration, samples: int = 0, truth: dict[str, Tensor] | None = None) -> None:
        self._c, self._truth, computed = c, truth, DTYPES[c.computed]
        wide = accumulation_dtype(computed)
        # In float64 the truth is rounded as often, and not by the same operations.
        self.u = half_spacing(wide) * (3 if wide == torch.float64 else 1)
        self.low = half_spacing(computed) if computed.itemsize == 2 else 0.0
        # Under autocast the gradient of a cast rounds once more, from the computed dtype. So it does in PyTorch.
        self.delivered = max(half_spacing(DTYPES[c.dtype]), self.u) + (self.low if c.computed != c.dtype else 0.0)
        self.tiny, self.any_fp16 = torch.finfo(wide).tiny, "fp16" in (c.computed, c.dtype)
        self.samples, self._generator = samples, torch.Generator().manual_seed(0)
        # Tokens with the same logits have the same roundings, which add up in dW and dbias. Roundings of others do not
        # cancel where their gradients do: tokens with the same x and another temperature T, which divides the logit and
        # the cap, have the same slope of the soft-cap, but other roundings of it.
        self._equal_tokens = None if truth is None else truth["equal"]

    def _random(self, like: Tensor, alike: bool) -> Tensor:
        """From -1 to 1, never near 0; ``alike``: the same for all numbers of a sample."""
        shape = [n if place == 0 or not alike else 1 for place, n in enumerate(like.shape)]
        number = torch.rand(shape, generator=self._generator) - 0.5
        if len(shape) > 2 and shape[1] == self._c.N:
            number = number[:, self._equal_tokens]
        return number + number.sign() / 2

    def moved(self, value: Tensor, roundings: Tensor | float, alike: bool = False) -> Tensor:
        """By at most half so many roundings; ``alike``: and all numbers by the same part, where those are."""
        if not self.samples:
            return value
        part = self._random(value, False)
        part = self._random(value, True) + part / 2 if alike else part
        return value + part * (self.u / 2 * roundings)

    def sum(self, terms: Tensor) -> Tensor:
        return self.moved(terms.sum(-1), _sum_of(terms.shape[-1]) * terms.detach().abs().sum(-1))

    def rounded(self, value: Tensor, half: float) -> Tensor:
        """Rounded to a dtype of this half spacing, equal numbers alike, to multiples of a unit that nobody knows: in
        the last samples one that puts a boundary between an entry's numbers."""
        if not self.samples:
            return value
        unit = 2 + self._random(value, alike=True).expand(value.shape).clone()
        if value.shape[1]:
            middle = value[-_SPLIT:].median(1, keepdim=True).values * unit[-_SPLIT:]
            mantissa = torch.frexp(middle)[0]
            boundary = ((mantissa / half).floor() + 0.5) * half
            unit[-_SPLIT:] *= torch.where(mantissa == 0, 1.0, boundary / mantissa)
        mantissa, exponent = torch.frexp(value * unit)
        return torch.ldexp((mantissa / half).round() * half, exponent) / unit

    def logits(self, layer: Layer, uncapped: Tensor) -> Tensor:
        z = layer.capped(uncapped)
        if not self.samples:
            return z
        moved = self.moved(z, _logit_roundings(layer, uncapped.detach(), self.u))
        if layer.softcap is not None:
            # The slope 1 - (z / cap)^2, too: its error does not shrink with it, and it is that of the moved logit.
            # Where the product's terms are much larger than the cap, this is many roundings off.
            slope = self.moved(torch.zeros_like(z), 4 + 2 * self.low / self.u, alike=True)
            slope = slope + ((z - moved) * (z + moved)).detach() / layer.softcap**2
            moved = moved + slope * (uncapped - uncapped.detach())
        return moved

    def softmax(self, z: Tensor, of_backward: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """log p, p and the log-sum-exp. What is as small as 1 - p is as exact as the exponentials of the others, but
        for roundings of 1. ``of_backward``: log p and p themselves are rounded to low precision, not only their slopes,
        as in the exponentials that the backward reads."""
        log_p, lse = torch.log_softmax(z, -1), z.logsumexp(-1, keepdim=True)
        if not self.samples or not z.numel():
            return log_p, log_p.exp(), lse[..., 0]
        exact = log_p.detach()
        top = exact.amax(-1, keepdim=True)
        common = self.moved(top, 12 - 4 * top + z.shape[-1] ** 0.5 * -torch.expm1(top), alike=True) - top
        moved = exact + common
        p, alone = moved.exp(), exact > math.log(2 / 3)
        kept = p
        if self.low and self._c.kind in ("loss", "statistics"):
            # The exponential of what is alone is exactly 1; those of others are rounded, and so are their slopes.
            kept = torch.where(alone, kept, self.rounded(self.rounded(kept, self.low), self.low))
            if of_backward:
                p, moved = kept, torch.where(kept > 0, kept.log(), moved)
        mean = (kept.detach() * z).sum(-1, keepdim=True)
        log_p = z - mean + (moved - (z - mean)).detach()
        lse = mean + (lse - common - mean).detach()
        return log_p, p + kept * (log_p - log_p.detach()), lse[..., 0]

    def gradient(self, G: Tensor) -> Tensor:
        """Of the projection, on its way to dX and dW."""
        if not self.samples:
            return G
        if self.low and self._c.kind not in ("selected", "logits"):
            G = self.rounded(G, self.low)
        # The largest coefficient is brought near 2^10, whose smallest fraction in fp16 is 2^-34.
        fraction = (2.0**-34 * self._truth["coefficient"] + 2.0**-65) * (self._c.computed == "fp16")
        return self.moved(G, _sum_of(self._c.K) * self._truth["terms"] + fraction / self.u)


def _logit_roundings(layer: Layer, uncapped: Tensor, u: float) -> Tensor:
    """How many roundings the logits ``[N, V]`` of a layer have."""
    x, weight, z = layer.x.double(), layer.weight.double(), layer.capped(uncapped)
    bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.double().masked_fill(layer.masked, 0.0)
    # A row of the unit matrix has one.
    terms = int((weight != 0).sum(1).amax()) if weight.numel() else 0
    found = (3 + terms**0.5) * layer.scale.abs() * linear(x.abs(), weight.abs(), bias.abs().double())
    if layer.softcap is not None:
        below, above = (layer.capped(uncapped + sign * u * found) for sign in (-1, 1))
        found = torch.maximum(z - below, above - z) / u
    found = found + 3 * (z.abs() + z.amax(-1, keepdim=True).abs())
    # What -inf adds to sums of magnitudes is nobody's error.
    return found if layer.softcap is not None else found.masked_fill(layer.masked, 0.0)


def _equal_tokens(layer: Layer) -> Tensor:
    """``[N]``: a number that only tokens with the same logits share."""
    x = layer.x.double() if layer.weight.any() else layer.x[:, :0].double()
    maps = [layer.scale] if layer.softcap is None else [layer.scale, layer.softcap]
    return torch.cat([x, *maps], 1).unique(dim=0, return_inverse=True)[1]


def dense(
    c: Configuration, o: Operands, dtype: torch.dtype, wide: torch.dtype, rounding: Rounding | None = None
) -> dict[str, Tensor]:
    """Every result and gradient with all logits, projected in ``dtype``, the rest in ``wide``. Without a rounding also
    the logits ``z``, their ``error``, their softmax ``log_p``, which tokens are ``equal``, and of the projection the
    gradient ``G [N, V]``, magnitudes of its ``terms``, its largest ``coefficient`` and its errors if exponentials are
    ``coded``."""
    r = rounding or Rounding(c)
    z, product = _logits(o.layer, dtype, wide, r)
    weight = None if o.token_weight is None else o.token_weight.to(wide)
    if weight is not None and r.samples:
        weight = weight.expand(r.samples, c.N)
    upstream, among, each = {name: value.to(wide) for name, value in o.upstream.items()}, z, o.entries
    if c.kind == "selected":
        among = z.new_full((*z.shape[:-1], each.most), MASKED)
        among[..., each.owner, each.places] = z[..., each.owner, each.ids].masked_fill(~each.inside, MASKED)
    log_p, p, lse = r.softmax(among)
    if c.kind == "divergence":
        y, _ = _logits(o.teacher, dtype, wide, r)
        found = {"loss": _divergence(c, o, log_p, p, *r.softmax(y.detach())[:2], r)}
    elif c.kind == "selected":
        found = {"log_probs": log_p[..., each.owner, each.places].masked_fill(~each.inside, -torch.inf)}
        # An entry of probability 0 has no gradient.
        upstream["log_probs"] = upstream["log_probs"].where(found["log_probs"].detach() >= -INFINITE, 0.0)
    else:
        found = _statistics(o, z, log_p, p, lse, r)
    sources = found
    if c.kind == "statistics" and r.samples and r.low and c.budget != 0:
        # With a budget of 0 the backward projects again, and reads no exponentials.
        sources = _statistics(o, z, *r.softmax(among, of_backward=True), r)
    if c.kind == "loss":
        found = sources = {"loss": _loss(c, o, found, weight, r)}
    if c.kind == "logits":
        losses, source = _megatrons(c, o, found, log_p)
        found, sources = {"loss": losses}, {"loss": source}
    G, of_among, of_log_p = torch.autograd.grad(
        [sources[name] for name in upstream],
        [product, among, log_p],
        [value.expand_as(sources[name]) for name, value in upstream.items()],
        allow_unused=True,
        materialize_grads=True,
        retain_graph=not r.samples,
    )
    G = r.gradient(G)
    results = {name: r.moved(value.detach(), 2 * value.detach().abs()) for name, value in found.items()}
    x, W = o.layer.x.to(dtype), o.layer.weight.to(dtype)
    results |= {"dinput": G @ W, "dweight": G.mT @ x, "dbias": G.sum(-2), "G": G}
    if not r.samples:
        error = r.u * _logit_roundings(o.layer, (product.detach() * o.layer.scale), r.u)
        terms = _terms(sources, upstream, among, log_p)
        (results["terms"],) = (value.abs() for value in torch.autograd.grad(among, product, terms))
        if c.softcap and r.low and among is z:
            # The cap's slope is 1 - (z / cap)^2, of a z from an exponential: off by roundings of 1, even where it is 0.
            results["terms"] += o.layer.scale.abs().to(wide) * terms
        sizes = o.layer.scale.abs().to(wide) * (of_log_p.sum(1, keepdim=True).abs() + of_among.abs() + of_log_p.abs())
        results |= {"z": z.detach(), "error": error, "log_p": log_p.detach(), "equal": _equal_tokens(o.layer)}
        results["coefficient"] = sizes.amax() if sizes.numel() else 0.0
        if c.kind == "divergence" and c.N:
            # In fp16 all gradients are scaled by what the largest might be: a log-ratio of 64.
            largest = 64 * o.upstream["loss"].abs().amax() * o.layer.scale.abs().amax()
            results["coefficient"] = largest / (max(1, int((~o.quiet).sum())) if c.reduction == "mean" else 1)
        # Of a probability, or of a gradient, that underflows. The probability lies 88 nats below 1, and entropies and
        # expected logits multiply it by that.
        each = sizes.amax(1, keepdim=True) if sizes.numel() else torch.zeros(c.N, 1, dtype=wide)
        results["underflow"] = 88 * r.tiny * each.clamp(min=1.0).expand(c.N, c.V)
        results["coded"] = torch.zeros_like(z)
        if c.kind in ("loss", "statistics"):
            results["coded"] = each * _coded(log_p.detach().exp(), o.target)
    return results


def _coded(p: Tensor, target: Tensor | None) -> Tensor:
    """How far codes of one byte (:mod:`parallel_lce.kernels.codes`) move probabilities: half a step of f, times
    ``|de / df| <= 8 e / f``. The largest is that of a window, and at most that of all entries. Targets have no code."""
    if not p.numel():
        return p
    if target is not None:
        inside = (target >= 0) & (target < p.shape[1])
        p = p.scatter(1, target.clamp(0, p.shape[1] - 1)[:, None], 0.0).where(inside[:, None], p)
    largest = p.amax(1, keepdim=True)
    return 0.02 * p**0.75 * largest**0.25 + 1e-9 * largest


def _terms(sources: dict[str, Tensor], upstream: dict[str, Tensor], among: Tensor, log_p: Tensor) -> Tensor:
    """Magnitudes of the terms of the gradient of the logits ``among``. A sum of numbers u is off by roundings of
    sum |u|, however small it is itself. So each source's terms count apart, and upstream gradients, of which those of
    one token's selected ids are summed, without their signs."""
    terms = torch.zeros_like(among)
    for name, value in upstream.items():
        of_among, of_log_p = torch.autograd.grad(
            sources[name],
            [among, log_p],
            value.abs().expand_as(sources[name]),
            allow_unused=True,
            materialize_grads=True,
            retain_graph=True,
        )
        of_p = log_p.detach().exp() * of_log_p.sum(1, keepdim=True)
        terms += of_log_p.abs() + of_p.abs() + (of_among - of_log_p + of_p).abs()
    return terms.detach()


def _logits(layer: Layer, dtype: torch.dtype, wide: torch.dtype, r: Rounding) -> tuple[Tensor, Tensor]:
    """The logits ``[N, V]``, and the product that they come from."""
    bias = None if layer.bias is None else layer.bias.double().masked_fill(layer.masked, MASKED).to(dtype)
    product = linear(layer.x.to(dtype), layer.weight.to(dtype), bias)
    product = product.expand(*[r.samples] * bool(r.samples), *product.shape).requires_grad_()
    return r.logits(layer, product.to(wide) * layer.scale.to(wide)), product


def _statistics(o: Operands, z: Tensor, log_p: Tensor, p: Tensor, lse: Tensor, r: Rounding) -> dict[str, Tensor]:
    """Every field of ``TokenStatistics``."""
    V, top = z.shape[-1], z.detach().amax(-1)
    below = z - top[..., None]
    if r.samples:  # The backward's logits are logarithms of its exponentials.
        below = below + (log_p - log_p.amax(-1, keepdim=True) - below).detach()
    lse = r.moved(lse, 3 * (lse.abs() + top.abs()).detach())
    found = {
        "lse": lse,
        "mean_logit": r.sum(z) / V,
        "mean_log_prob": r.sum(below) / V + (top - lse),
        "expected_logit": r.moved(top + r.sum(p * below), 4 * top.abs()),
        "entropy": -r.sum(p * log_p),
        "sum_p_squared": p.square().sum(-1),
        "max_logit": top,
    }
    if o.target is not None:
        inside, own = (o.target >= 0) & (o.target < V), (..., torch.arange(len(o.target)), o.target.clamp(0, V - 1))
        found["target_logit"] = z[own].where(inside, 0.0)
        found["target_log_prob"] = log_p[own].where(inside, 0.0)
    if (each := o.entries) is not None:
        found["selected_log_prob"] = log_p[..., each.owner, each.ids].where(each.inside, -torch.inf)
    return found


def _loss(c: Configuration, o: Operands, found: dict[str, Tensor], weight: Tensor | None, r: Rounding) -> Tensor:
    terms = [(c.label_smoothing - 1) * found["target_log_prob"], c.z_loss * found["lse"].square()]
    if c.label_smoothing:
        terms.append(-c.label_smoothing * found["mean_log_prob"])
    weight = torch.ones_like(found["lse"]) if weight is None else weight
    weight = weight.masked_fill(o.quiet, 0.0)
    each = weight * r.moved(sum(terms), 6 * sum(term.detach().abs() for term in terms))
    if c.reduction == "none":
        return each
    # Documented: a mean without any weight is 0 whatever the weights.
    divisor = (r.sum(weight) if weight.sum() else torch.inf) if c.reduction == "mean" else 1.0
    return r.sum(each) / divisor


def _megatrons(c: Configuration, o: Operands, found: dict[str, Tensor], log_p: Tensor) -> tuple[Tensor, Tensor]:
    """The losses ``[N]``, with label smoothing those of each rank ``[ranks, N]``; and what has their gradient."""
    # The share that is spread over the entries of a rank.
    entries = c.V // c.ranks
    smoothing = c.label_smoothing * entries / (entries - 1) if c.label_smoothing else 0.0
    source = found["lse"] - (1 - smoothing) * found["target_logit"] - smoothing * c.ranks * found["mean_logit"]
    # A target outside has the largest logit's loss.
    inside = (o.target >= 0) & (o.target < c.V)
    losses = (smoothing - 1) * torch.where(inside, found["target_log_prob"], log_p.amax(-1))
    if smoothing:
        of_ranks = log_p.unflatten(-1, (c.ranks, entries)).mean(-1).mT
        losses = losses.unsqueeze(-2) - smoothing * of_ranks
    return losses, source


def _divergence(
    c: Configuration, o: Operands, log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, r: Rounding
) -> Tensor:
    """With the reference of :mod:`parallel_lce.distillation.blocks`."""
    d, beta = log_p - log_q, c.beta
    # Log-probabilities are rounded at their own size, beside which the difference of nearly equal ones is small. Slopes
    # stay those of the exact ratios: the package's gradient has none, as they cancel.
    inexact = r.rounded(log_p.detach(), r.u) - r.rounded(log_q, r.u)
    ratios = zip(_log_ratios(d, beta), _log_ratios(inexact, beta))
    of_p, of_q = (exact + (off - exact).detach() for exact, off in ratios)
    # Roundings of both ratios, and of the logarithm that they share.
    shared = 1 + torch.where(d > 0, of_p, of_q).detach().abs()
    widths = [4 * (shared + ratio.detach().abs()) for ratio in (of_p, of_q)]
    of_p, of_q = (r.moved(ratio, w, alike=True) for ratio, w in zip((of_p, of_q), widths))
    each = torch.zeros_like(d[..., 0])
    if beta < 1:
        each = each + (beta or 1.0) * r.sum(q * of_q)
    if beta > 0:
        each = each + (1 - beta if beta < 1 else 1.0) * r.sum(p * of_p)
    each = each.masked_fill(o.quiet, 0.0)
    if c.reduction == "none":
        return each
    return r.sum(each) / (max(1, int((~o.quiet).sum())) if c.reduction == "mean" else 1)


def _log_ratios(d: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / r) and log(q / r) from log(p / q)."""
    if beta in (0, 1):
        return d, -d
    log_beta, log_rest = torch.full_like(d, math.log(beta)), torch.full_like(d, math.log1p(-beta))
    return -torch.logaddexp(log_rest, log_beta - d), -torch.logaddexp(log_rest + d, log_beta)


def of_product(c: Configuration, o: Operands, truth: dict[str, Tensor], name: str, part: str) -> tuple[Tensor, Tensor]:
    """Of dX, dW or dbias: a part of the gradient of the logits times magnitudes of the other factor; and the roundings
    of what is delivered, and of each rank's part of dX."""
    r, layer, exact = Rounding(c), o.layer, truth[name].abs()
    other = {"dinput": layer.weight, "dweight": layer.x, "dbias": torch.ones(c.N, 1)}[name].double().abs()
    of_logits = truth[part].abs() if name == "dinput" else truth[part].abs().t()
    rounded = r.delivered * exact + c.ranks * _FP16_SMALLEST * r.any_fp16
    if name == "dinput" and c.ranks > 1 and c.kind != "logits":
        shards = [slice(start, start + real_rows(c, rank)) for rank, (start, _) in enumerate(c.shards)]
        parts = sum((truth["G"][:, mine] @ layer.weight[mine].double()).abs() for mine in shards)
        rounded = rounded + c.ranks * (r.low or r.u) * parts
    return (of_logits @ other).view_as(exact), rounded


def bounds(c: Configuration, o: Operands, truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """How far roundings may move each result; infinite where fp16 may overflow."""
    r = Rounding(c)
    samples = dense(c, o, torch.float64, torch.float64, Rounding(c, _SAMPLES + _SPLIT, truth))
    moved = {name: (value - truth[name]).abs().nan_to_num(0.0, 0.0, 0.0) for name, value in samples.items()}
    parts = {name: value.split([_SAMPLES, _SPLIT]) for name, value in moved.items()}
    found = {name: torch.maximum(_FURTHER * each.amax(0), split.amax(0)) for name, (each, split) in parts.items()}
    for name in ("dinput", "dweight", "dbias"):
        n = c.V if name == "dinput" else c.N
        (size, rounded), (terms, _) = (of_product(c, o, truth, name, part) for part in ("G", "terms"))
        found[name] += r.u * _sum_of(n) * size + rounded
        found[name] += sum(of_product(c, o, truth, name, part)[0] for part in ("underflow", "coded")) + r.tiny * n
        if c.kind == "divergence" and c.reduction != "none":
            # Gradients that are formed with the loss are rounded before they are multiplied by its upstream gradient.
            found[name] += r.delivered * truth[name].abs()
        if name == "dbias":
            # A target's gradient is exact where another token's equal entry, which may cancel it, is rounded.
            found[name] += r.low * size
        if r.any_fp16:
            found[name] = (found[name] + _FP16_SMALLEST).masked_fill(terms > _FP16_REACH, torch.inf)
    return found
