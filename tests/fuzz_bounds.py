"""How far roundings may move each result: first-order error analysis of what ``parallel_lce.run.statistics``,
``parallel_lce.selected_log_probs`` and ``parallel_lce.run.divergence`` say.

``u`` is half the spacing of the statistics' dtype, ``low`` that of the computed one. Sums of n terms are given
``8 + sqrt(n)`` roundings of the sum of their magnitudes, and n / 2 more where the terms are equal: their roundings all
go the same way. Products over D have as many less 4. In low precision the entries of the logits' gradient are rounded
three times at most, kept exponential, slope and result, each time on its own; what targets and selected entries add is
rounded with the result alone. Their sums are given seven standard deviations of that, and one rounding of the sum of
their magnitudes where all logits are so near each other that their exponentials are rounded alike. The square of a
probability moves twice as far as the probability. Logits that a backward takes from saved exponentials, as their
logarithm, are off by one rounding of 1, however near the largest they lie.

A log-probability moves as its logit's distances from the others do: by (1 - p) of its own logit's error and p of each
other's. So what is as small as 1 - p is as exact as the exponentials of the others, but for roundings of 1 in the
statistics' dtype. An entry with p > 2/3 is the largest, and its exponential is exactly 1, saved or not.

The K-th largest of some numbers moves no further than one of them does, so the largest logits have the error of the
largest one. Selected entries are a softmax of their own, whose gradient is not rounded to low precision.

A divergence and the gradient of its logits move as all log-probabilities of both sides do, and have a few roundings of
log-ratios, of which the logarithm of 1 is one. The gradient is rounded once; and where gradients are formed with the
loss, they are rounded before they are multiplied by the upstream gradient and again after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

from cases import DTYPES
from fuzz_draw import FIELDS, Configuration
from fuzz_run import real_rows
from fuzz_truth import log_ratios, smoothing_of_logits
from fuzz_values import INFINITE, MASKED, Entries, Layer, Operands
from parallel_lce.backends.interface import recovers_logits
from parallel_lce.core.partials import accumulation_dtype

FP16_REACH = 3e4
"""Sums of terms beyond this may overflow in fp16."""
FP16_SMALLEST = 2.0**-25
"""Half the spacing of the smallest fp16 numbers."""
ROUNDINGS_OF_1 = 12
"""Of a sum of exponentials with a 1 among them, and of what it divides. Torch adds up to six times to the 1."""


def sum_of(terms: int) -> float:
    """Roundings of a sum of so many."""
    return 8 + terms**0.5


def half_spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def column(value: Tensor) -> Tensor:
    return value[:, None]


def growth(error: Tensor) -> Tensor:
    """Relative error of the exponential of what has this error."""
    return torch.expm1(error.clamp(max=50.0))


@dataclass(frozen=True)
class Precision:
    """``u``: half the spacing of the statistics' dtype; ``low``: of the computed one if it has 16 bits, else 0;
    ``delivered``: of the gradients'; ``tiny``: the smallest normal number of the statistics' dtype."""

    u: float
    low: float
    delivered: float
    tiny: float
    # Whether the products are of fp16, and whether they or the gradients are.
    fp16: bool
    any_fp16: bool

    @classmethod
    def of(cls, c: Configuration) -> Precision:
        computed = DTYPES[c.computed]
        wide = accumulation_dtype(computed)
        # In float64 the truth is rounded as often.
        u = half_spacing(wide) * (2 if wide == torch.float64 else 1)
        low = half_spacing(computed) if computed.itemsize == 2 else 0.0
        # Under autocast the gradient of a cast rounds once more, from the computed dtype. So it does in PyTorch.
        delivered = max(half_spacing(DTYPES[c.dtype]), u) + (low if c.computed != c.dtype else 0.0)
        fp16 = computed == torch.float16
        return cls(u, low, delivered, torch.finfo(wide).tiny, fp16, fp16 or c.dtype == "fp16")


class Logits:
    """Logits ``z [N, V]`` and their softmax ``p``, and the errors of both: ``error`` of z, ``relative`` of p.

    ``from_top``: distance from the ``top [N, 1]``; ``gone``: entries that are -inf; ``chain``: the soft-cap's slope,
    which is off by ``chain_error``; ``scale [N, 1]``; ``miss [N]``: 1 - p of the largest entry.
    """

    def __init__(self, u: float, z: Tensor, error: Tensor, gone: Tensor, slope: tuple[Tensor, Tensor, Tensor]) -> None:
        self._u, self.z, self.gone = u, z, gone
        self.scale, self.chain, self.chain_error = slope
        # What -inf adds to sums of magnitudes is nobody's error.
        self.error, self.reach = error.masked_fill(gone, 0.0), z.abs().masked_fill(gone, 0.0)
        self.top = z.amax(1, keepdim=True) if z.numel() else z[:, :1]
        self.from_top = (z - self.top).abs().masked_fill(gone, 0.0)
        self.log_p, self.lse = torch.log_softmax(z, 1), torch.logsumexp(z, 1)
        self.p, self.log_sum = self.log_p.exp(), self.lse - self.top.sum(1)
        self.miss = -torch.expm1(self.log_p.amax(1)) if z.numel() else self.lse
        mean_error = torch.logsumexp(self.log_p + self.error, 1).clamp(min=0.0)
        self.lse_error = mean_error + sum_of(z.shape[1]) * u + 4 * u * (self.lse.abs() + self.top.abs().sum(1))
        # A log-probability moves as its logit's distances from the others do. Of the largest entry they count (1 - p).
        # In float64 the truth is less exact.
        rest = -torch.expm1(self.log_p) if u > 1e-12 else torch.ones_like(z)
        moved = self.p * growth(self.error)
        moved = rest * self.error + (moved.sum(1, keepdim=True) - moved).clamp(min=0.0).log1p()
        roundings = ROUNDINGS_OF_1 + z.shape[1] ** 0.5 * rest + 4 * (self.from_top + column(self.log_sum))
        self.log_prob_error = moved + u * roundings
        self.relative = growth(self.log_prob_error)

    @classmethod
    def of(cls, layer: Layer, precision: Precision) -> Logits:
        u, x, weight, softcap = precision.u, layer.x.double(), layer.weight.double(), layer.softcap
        bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.double()
        finite = bias.masked_fill(layer.masked, 0.0).abs().double()
        z = linear(x, weight, bias.masked_fill(layer.masked, MASKED).double()) * layer.scale
        # A row of the unit matrix has one.
        terms = int((weight != 0).sum(1).amax()) if weight.numel() else 0
        error = (4 + terms**0.5) * u * layer.scale.abs() * linear(x.abs(), weight.abs(), finite)
        chain, chain_error = torch.ones_like(z), torch.zeros_like(z)
        gone = (layer.masked & torch.tensor(softcap is None)).expand_as(z)
        if softcap is not None:
            z = layer.capped(z)
            chain = 1 - (z / softcap).square()
            error = error * (chain + error / softcap).clamp(max=1.0)
        error = error + 4 * u * (z.abs() + z.amax(1, keepdim=True).abs())
        if softcap is not None:
            chain_error = 2 * z.abs() / softcap * (error / softcap) + 4 * u + 2 * precision.low
        return cls(u, z, error, gone, (layer.scale, chain, chain_error))

    def among(self, entries: Entries) -> Logits:
        """Those of each token's selected entries, ``[N, most]``."""

        def rows(values: Tensor, fill: float) -> Tensor:
            at = entries.owner, entries.places
            values = values[entries.owner, entries.ids].masked_fill(~entries.inside, fill)
            return values.new_full((len(self.z), entries.most), fill).index_put(at, values)

        slope = self.scale, rows(self.chain, 1.0), rows(self.chain_error, 0.0)
        gone = rows(self.gone.double(), 1.0) > 0
        return Logits(self._u, rows(self.z, MASKED), rows(self.error, 0.0), gone, slope)


@dataclass
class OfLogits:
    """Of the gradient of the logits ``[N, V]``, on its way to that of the projection: magnitudes of its ``terms``, its
    ``error`` in the statistics' dtype, the magnitudes that are ``formed`` before they are summed to dX and dW, and what
    is ``rounded`` to low precision, ``roundings`` times; what is delivered is rounded ``deliveries`` times."""

    terms: Tensor
    error: Tensor
    formed: Tensor
    rounded: Tensor
    roundings: int
    deliveries: int = 1


class Analysis:
    """Of all but divergences: magnitudes and errors ``[N, V]`` and ``[N]`` of everything between the operands and the
    results. ``truth`` has the reference's.

    G is p times alpha and what entropies and squares add (delta, epsilon), less beta at the target, gamma everywhere
    and the upstream gradient at selected entries (points).
    """

    def __init__(self, c: Configuration, o: Operands, truth: dict[str, Tensor]) -> None:
        self._c, self._o, self._truth = c, o, truth
        self._precision = Precision.of(c)
        self._u = self._precision.u
        self.logits = self._z = Logits.of(o.layer, self._precision)
        self._entries, self._width = o.entries, c.V
        if c.kind == "selected":
            self._z = self.logits.among(o.entries)
            self._entries = replace(o.entries, ids=o.entries.places)
        self.miss = self._z.miss
        self._statistics()
        self.nothing_counts, self._common = False, 8 * self._u
        self._points = torch.zeros_like(self._z.z)
        zero = torch.zeros(c.N, dtype=torch.float64)
        self._alpha = self._alpha_error = self._beta = self._gamma = self._delta = self._epsilon = zero
        if c.kind == "loss":
            self._of_loss()
        elif c.kind == "logits":
            size, smoothing = o.upstream["loss"].double().abs(), smoothing_of_logits(c)
            self._weight, self._divisor = torch.ones_like(size), 1.0
            self._alpha, self._beta, self._gamma = size, size * abs(1 - smoothing), size * smoothing * c.ranks / c.V
        else:
            self._of_mixture()

    def _statistics(self) -> None:
        o, z, u = self._o, self._z, self._u
        V = z.z.shape[1]
        error, summed = z.error, sum_of(V) * u
        # Of the largest logit's distance from the mean.
        self._slope_error = (z.p * (z.relative + summed) * z.from_top).sum(1)
        # The truth has a rounding of its own: that of a sum of p z.
        truths = sum_of(V) * torch.finfo(torch.float64).eps * (z.p * z.z.abs()).sum(1)
        self._squared, entropy = z.p.square().sum(1), -(z.p * z.log_p).sum(1)
        of_entropy = (z.p * (z.log_p.abs() + column(entropy)) * z.relative).sum(1)
        self._errors = errors = {
            "lse": z.lse_error,
            "max_logit": error.amax(1) if V else z.lse_error,
            "mean_logit": error.mean(1) + summed * z.reach.mean(1),
            "mean_log_prob": error.mean(1) + z.lse_error + summed * z.from_top.mean(1),
            "expected_logit": (z.p * error).sum(1) + self._slope_error + 4 * u * z.top.abs().sum(1) + truths,
            "entropy": of_entropy + summed * (z.p * z.from_top).sum(1) + ROUNDINGS_OF_1 * u,
            "sum_p_squared": (z.p.square() * ((1 + z.relative).square() - 1)).sum(1) + V * self._precision.tiny,
        }
        of_nobody, log_prob_error = z.lse_error + 4 * u * z.log_sum, z.log_prob_error
        self._own = torch.zeros_like(z.z)
        if o.target is not None and self._c.kind != "selected":
            inside = (o.target >= 0) & (o.target < V)
            self._own = one_hot(o.target.clamp(0, V - 1), V).double() * column(inside)
            errors["target_logit"] = (self._own * (error + 2 * u * z.reach)).sum(1)
            errors["target_log_prob"] = torch.where(inside, (self._own * log_prob_error).sum(1), of_nobody)
        if self._entries is not None:
            each = self._entries
            of_entry = log_prob_error[each.owner, each.ids]
            errors["selected_log_prob"] = torch.where(each.inside, of_entry, of_nobody[each.owner])
            errors["log_probs"] = errors["selected_log_prob"]
        expected = self._truth.get("expected_logit", (z.p * z.z).sum(1))
        self._expected_reach = (expected - z.top.sum(1)).abs()

    def _of_mixture(self) -> None:
        o, each, zero = self._o, self._entries, self._alpha
        size = {name: o.upstream[name].double().abs() if name in o.upstream else zero for name in FIELDS}
        self._alpha = size["lse"] + size["target_log_prob"] + size["mean_log_prob"] + size["expected_logit"]
        self._beta = size["target_logit"] + size["target_log_prob"]
        self._gamma = (size["mean_logit"] + size["mean_log_prob"]) / self._c.V
        self._delta = size["expected_logit"] + size["entropy"]
        self._epsilon = 2 * size["sum_p_squared"]
        self._alpha_error = self._epsilon * self._errors["sum_p_squared"]
        for name in {"selected_log_prob", "log_probs"} & {*o.upstream}:
            # A token's are summed for alpha, equal ones for G. A probability of 0 has no gradient.
            upstream = o.upstream[name].double().abs().where(self._truth[name] > -INFINITE, 0.0)
            of_selected = each.sums(upstream, self._c.N)
            self._alpha = self._alpha + of_selected
            self._alpha_error = self._alpha_error + sum_of(each.most) * self._u * of_selected
            self._points = each.spread(upstream, self._points.shape)

    def _of_loss(self) -> None:
        c, o, u = self._c, self._o, self._u
        weight = torch.ones(c.N, dtype=torch.float64) if o.token_weight is None else o.token_weight.double()
        weight = weight.masked_fill(o.quiet | o.outside, 0.0)
        self._weight, self._divisor = weight.abs(), 1.0
        if c.reduction == "mean":
            total = weight.sum().item()
            self.nothing_counts = total == 0
            self._divisor = abs(total) or torch.inf
            self._common += sum_of(c.N) * u * self._weight.sum().item() / self._divisor
        size = o.upstream["loss"].double().abs() * self._weight / self._divisor
        self._alpha = size * (1 + 2 * abs(c.z_loss) * self._z.lse.abs())
        self._alpha_error = size * 2 * abs(c.z_loss) * self._errors["lse"]
        self._beta, self._gamma = size * (1 - c.label_smoothing), size * c.label_smoothing / c.V

    def bounds(self) -> dict[str, Tensor]:
        """The largest error of each result, of its shape; infinite where fp16 may overflow."""
        found = self._gradient_of_logits()
        self.terms = found.terms
        bounds = self._errors | (self._losses() if self._c.kind in ("loss", "logits") else {})
        return bounds | bounds_of_products(self._c, self._o, self.logits, self._truth, found)

    def _gradient_of_logits(self) -> OfLogits:
        c, z, u, each = self._c, self._z, self._u, self._entries
        scale, formed = z.scale.abs(), self._truth["G"].abs()
        if c.kind == "selected":
            formed = formed[self._o.entries.owner, self._o.entries.ids]
            formed = torch.zeros_like(z.z).index_put((each.owner, each.places), formed)
        alone = z.p > 2 / 3
        # As p moves: the derivatives of p log p, where the logarithm is taken of a saved one, and of epsilon p (p - Q).
        recovered = float(recovers_logits(DTYPES[c.computed]))
        slope_reach = z.from_top + column(self._expected_reach)
        level = column(self._alpha) + column(self._delta) * (slope_reach + recovered * ~alone)
        level = level + column(self._epsilon) * (2 * z.p + column(self._squared))
        raw = z.p * level + column(self._beta) * self._own + column(self._gamma) + self._points
        # NumPy's products, in the interpreter, round a row in another way if it is at another place in a tile.
        again = 0.0
        if c.budget is not None or c.softcap is not None or c.computed == "fp16":
            again = alone * 2 * u * z.reach
        error = z.p * (
            (z.relative + again) * level
            + column(self._alpha_error)
            + column(self._delta) * (z.log_prob_error + again + column(self._slope_error))
            + column(self._epsilon) * z.p * z.relative.square()
        )
        common = self._common * raw
        if each is not None:
            common = common + sum_of(each.most) * u * self._points
        # An entry that is alone is formed first, then multiplied by its slope. The others' terms have one each.
        sloped = torch.where(alone & (z.chain > 0), formed / (scale * z.chain), raw).nan_to_num(torch.inf)
        error = z.chain * (error + common) + z.chain_error * torch.minimum(sloped, raw)
        # Exponentials below the smallest normal number may count as 0.
        reach = column(self._alpha + self._epsilon) + column(self._delta) * (1 + slope_reach)
        error = scale * (error + self._precision.tiny * reach)
        if self._precision.fp16 and raw.numel():
            # The largest coefficient is brought near 2^10, whose smallest fraction in fp16 is 2^-34.
            alpha = self._alpha + self._delta * self._expected_reach + self._epsilon * self._squared
            sizes = alpha, self._beta, self._gamma, self._delta, self._epsilon
            largest = sum((v * scale[:, 0]).amax() for v in sizes) + (scale * self._points).amax()
            error = error + 2.0**-34 * largest + 2.0**-65
        rounded = torch.where(alone, formed, (2 * scale * z.chain * z.p * level + formed) / 3)
        parts = scale * z.chain * raw, error, formed + error, rounded
        if c.kind == "selected":
            entries = self._o.entries
            parts = [entries.spread(v[entries.owner, entries.places], self.logits.z.shape) for v in parts]
        return OfLogits(*parts, roundings=0 if c.kind in ("selected", "logits") else 3)

    def _losses(self) -> dict[str, Tensor]:
        c, o, u, truth, e = self._c, self._o, self._u, self._truth, self._errors
        smoothing = smoothing_of_logits(c) if c.kind == "logits" else c.label_smoothing
        log_p = self._z.log_p
        # Infinite ones have no rounding.
        own, mean = (self._own * log_p.abs()).sum(1), log_p.abs().mean(1) if smoothing else 0.0
        of_mean = e["mean_log_prob"]
        if c.kind == "logits":
            # The mean is over one rank's entries, and a target outside has the largest logit's loss.
            own, mean, of_mean = own + self._z.log_sum, mean * c.ranks, of_mean * c.ranks
        terms = abs(1 - smoothing) * own + smoothing * mean + abs(c.z_loss) * self._z.lse.square()
        error = abs(1 - smoothing) * e["target_log_prob"] + smoothing * of_mean + 6 * u * terms
        error = error + abs(c.z_loss) * (2 * self._z.lse.abs() + e["lse"]) * e["lse"]
        each = self._weight * (error + 2 * u * terms)
        bounds = {"loss": each.expand(truth["loss"].shape) if truth["loss"].dim() else each}
        size = (self._weight * terms).sum() / self._divisor
        total_error = each.sum() / self._divisor + (self._common + sum_of(c.N) * u) * size
        if c.reduction != "none":
            bounds["loss"] = total_error
        if o.token_weight is not None:
            of_weight = error + (8 * u + self._common) * terms
            if c.reduction == "mean":
                of_weight = of_weight + total_error + 2 * self._common * size
            of_weight = o.upstream["loss"].double().abs() / self._divisor * of_weight
            if c.weight_learns:
                of_weight = of_weight + half_spacing(getattr(torch, c.weight_dtype)) * truth["dtoken_weight"].abs()
            if c.weight_dtype == "float16":
                beyond = truth["dtoken_weight"].abs() > FP16_REACH
                of_weight = (of_weight + FP16_SMALLEST).masked_fill(beyond, torch.inf)
            bounds["dtoken_weight"] = of_weight
        return bounds


def _as_moved(values: Tensor, sources: list[Tensor], errors: list[Tensor]) -> Tensor:
    """Errors of ``values``, each computed from the elements at the same place of ``sources``, which have ``errors``."""
    slopes = torch.autograd.grad(values.sum(), sources, retain_graph=True, materialize_grads=True)
    return sum(slope.abs() * error for slope, error in zip(slopes, errors))


class DivergenceAnalysis:
    """Of ``distillation.divergence``: errors ``[N, V]`` and ``[N]``."""

    nothing_counts = False

    def __init__(self, c: Configuration, o: Operands, truth: dict[str, Tensor]) -> None:
        self._c, self._o, self._truth = c, o, truth
        self._precision = precision = Precision.of(c)
        u, beta = precision.u, c.beta
        self.logits, teacher = Logits.of(o.layer, precision), Logits.of(o.teacher, replace(precision, low=0.0))
        self.miss = self.logits.miss
        log_p, log_q = sources = [side.log_p.clone().requires_grad_() for side in (self.logits, teacher)]
        # An entry that hardly counts in its softmax does so through its logarithm alone.
        errors = [s.p * s.relative + (1 - s.p) * s.log_prob_error for s in (self.logits, teacher)]
        p, q = (side.exp() for side in sources)
        # Where a ratio is infinite, its p is 0.
        ratios = [r.masked_fill(r.abs() > INFINITE, 0.0) for r in log_ratios(log_p - log_q, beta)]
        of_p, of_q = p * ratios[0], q * ratios[1]
        shares = {0: (0.0, 1.0), 1: (1.0, 0.0)}.get(beta, (1 - beta, beta))
        # Roundings of both ratios, of the logarithm that they share, and probabilities that may count as 0.
        shared = 1 + torch.where(log_p > log_q, *ratios).abs()
        of_p_ratio, of_q_ratio = (4 * u * (shared + r.abs()) for r in ratios)
        tiny = precision.tiny * shared
        self._sizes = (shares[0] * of_p.abs() + shares[1] * of_q.abs()).sum(1).detach()
        moved = _as_moved(shares[0] * of_p + shares[1] * of_q, sources, errors)
        moved = moved + shares[0] * p * of_p_ratio + shares[1] * q * of_q_ratio + tiny
        self._errors = moved.sum(1).detach() + sum_of(c.V) * u * self._sizes
        if beta == 0:
            self._terms = (p + q).detach()
            moved = _as_moved(p - q, sources, errors) + 4 * u * self._terms + tiny
        else:
            mean = of_p.sum(1, keepdim=True).detach().expand_as(p).clone().requires_grad_()
            of_mean = (_as_moved(of_p, sources, errors) + p * of_p_ratio + tiny).sum(1, keepdim=True)
            self._terms = (p * (ratios[0].abs() + mean.abs())).detach()
            moved = _as_moved(p * (ratios[0] - mean), [*sources, mean], [*errors, of_mean])
            moved = moved + p * of_p_ratio + sum_of(c.V) * u * self._terms + tiny
        self._of_logits = moved.detach()
        # What a token's divergence counts in the result.
        counted = (~o.quiet).double()
        self._weight = counted / counted.sum().clamp(min=1.0) if c.reduction == "mean" else counted

    def bounds(self) -> dict[str, Tensor]:
        c, u, truth = self._c, self._precision.u, self._truth
        each = self._weight * (self._errors + 4 * u * self._sizes)
        loss = each if c.reduction == "none" else each.sum() + sum_of(c.N) * u * (self._weight * self._sizes).sum()
        factor = self._o.upstream["loss"].double().abs() * self._weight * self.logits.scale[:, 0]
        factor = factor * (1 - c.beta if 0 < c.beta < 1 else 1.0)
        self.terms, error = column(factor) * self._terms, column(factor) * self._of_logits
        if self._precision.fp16 and error.numel():
            # 64 times the largest factor is brought near 2^10, whose smallest fraction in fp16 is 2^-34.
            error = error + 2.0**-34 * 64 * factor.amax() + 2.0**-65
        size = truth["G"].abs()
        found = OfLogits(size, error, size, size, roundings=1, deliveries=1 if c.reduction == "none" else 2)
        return {"loss": loss} | bounds_of_products(c, self._o, self.logits, truth, found)


def _deviations(elements: int, roundings: int) -> float:
    """Seven standard deviations, in roundings, of the norm of so many sums. A rounding has 0.433: three have 0.75."""
    return 0.75 * (roundings / 3) ** 0.5 * (2 + 7 / (2 * max(1, elements)) ** 0.5)


def partial_sums(c: Configuration, layer: Layer, G: Tensor) -> Tensor:
    """Sum over the ranks of the magnitude of their part of dX ``[N, D]``."""
    shards = [slice(start, start + real_rows(c, rank)) for rank, (start, _) in enumerate(c.shards)]
    return sum((G[:, mine] @ layer.weight[mine].double()).abs() for mine in shards)


def bounds_of_products(
    c: Configuration, o: Operands, logits: Logits, truth: dict[str, Tensor], of_logits: OfLogits
) -> dict[str, Tensor]:
    """Of dX, dW and dbias, products of the gradient ``G [N, V]`` of the logits."""
    precision, layer = Precision.of(c), o.layer

    def alike(dimension: int) -> Tensor:
        """Of which rows of a gradient the exponentials of all tokens, or of all entries, are within 16 roundings of
        each other or repeated."""
        below = logits.from_top
        if below.shape[dimension] < 2 or c.layouts[dimension] == "expanded":
            return torch.ones(below.shape[1 - dimension], dtype=torch.bool)
        spread = below.amax(dimension) - below.masked_fill(logits.gone, torch.inf).amin(dimension)
        return spread < 16 * precision.low

    def product(turn, other: Tensor, exact: Tensor, alike: Tensor) -> Tensor:
        """Of ``G @ other``; ``alike``: of which rows what is summed is rounded alike."""
        found, size = of_logits, other.abs()
        n = len(other)
        sums = precision.u * (sum_of(n) + column(alike) * n / 2)
        bound = turn(found.error) @ size + sums * (turn(found.formed) @ size)
        bound += found.deliveries * precision.delivered * exact.abs() + precision.tiny
        if precision.low:
            rounded = turn(found.rounded)
            spread = (rounded.square() @ other.square()).sqrt() * _deviations(other.shape[1], found.roundings)
            rounded = rounded @ size
            bound += precision.low * torch.minimum(found.roundings * rounded, spread + column(alike) * rounded)
        if precision.any_fp16:
            bound += (c.ranks + 1) * FP16_SMALLEST
            bound = bound.masked_fill(turn(found.terms) @ size > FP16_REACH, torch.inf)
        return bound

    bounds = {"dinput": product(lambda part: part, layer.weight.double(), truth["dinput"], alike(1))}
    if c.ranks > 1 and c.kind != "logits":
        bounds["dinput"] += (c.ranks + 1) * (precision.low or precision.u) * partial_sums(c, layer, truth["G"])
    ones, of_bias = torch.ones(c.N, 1, dtype=torch.float64), column(truth["G"].sum(0))
    for name, other, exact in (("dweight", layer.x.double(), truth["dweight"]), ("dbias", ones, of_bias)):
        bounds[name] = product(torch.t, other, exact, alike(0))
    return bounds | {"dbias": bounds["dbias"][:, 0]}
