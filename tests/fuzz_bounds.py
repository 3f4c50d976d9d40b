"""How far roundings may move each result: first-order error analysis of what ``parallel_lce.run.statistics`` says.

``u`` is half the spacing of the statistics' dtype, ``low`` that of the computed one. Sums of n terms are given
``8 + sqrt(n)`` roundings of the sum of their magnitudes, products over D as many less 4. In low precision the
entries of the logits' gradient are rounded three times at most, kept exponential, slope and result, each time on
its own; what targets and selected entries add is rounded with the result alone. Their sums are given seven standard
deviations of that, and one rounding of the sum of their magnitudes where all logits are so near each other that their
exponentials are rounded alike. The square of a probability moves twice as far as the probability. Logits that a
backward takes from saved exponentials, as their logarithm, are off by one rounding of 1, however near the largest they
lie.

An entry with p > 2/3 is the largest, and its exponential is exactly 1, saved or not. What is as small as 1 - p is as
exact as the exponentials of the others, but for roundings of 1 in the statistics' dtype, and then rounded.

The K-th largest of some numbers moves no further than one of them does, so the largest logits have the error of the
largest one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from cases import DTYPES
from fuzz_configuration import FIELDS, Configuration
from fuzz_logits import (
    FP16_REACH,
    FP16_SMALLEST,
    ROUNDINGS_OF_1,
    Gradients,
    Logits,
    Precision,
    column,
    half_spacing,
    sum_of,
)
from fuzz_truth import Operands
from fuzz_values import Whole
from parallel_lce.backends.interface import recovers_logits
from parallel_lce.core.partials import accumulation_dtype


class Analysis:
    """Of a loss and of statistics: magnitudes and errors ``[N, V]`` and ``[N]`` of everything between the operands and
    the results.

    ``truth`` has the reference's. ``alpha [N]``: the signed coefficient of the probabilities.
    """

    def __init__(self, c: Configuration, o: Operands, truth: dict[str, Tensor]) -> None:
        self._c, self._o, self._truth = c, o, truth
        self._precision = precision = Precision.of(c)
        self._u = precision.u
        self.logits = Logits(o.layer, precision.u, precision.low)
        self.miss = self.logits.miss
        # Of the magnitudes of what single entries get, [N, V].
        self._points = torch.zeros_like(self.logits.z)
        self._statistics(precision.u)
        self.nothing_counts = False
        self._coefficients(precision.u)

    def _statistics(self, u: float) -> None:
        c, o, truth, z = self._c, self._o, self._truth, self.logits
        error, summed = z.error, sum_of(c.V) * u
        errors = {"lse": z.lse_error, "max_logit": error.amax(1)}
        weighted = (z.p * z.from_top).sum(1)
        spread = (z.p * (error + z.relative * z.from_top)).sum(1) + summed * weighted
        # The largest entry's distance from itself is exact.
        apart = error + (z.alone * error).sum(1, keepdim=True)
        rest = z.p.masked_fill(z.alone, 0.0)
        of_rest = (rest * (apart + torch.expm1(apart.clamp(max=50.0)) * z.from_top)).sum(1) + z.others * (1 + weighted)
        self._expected_error = torch.minimum(spread, of_rest + summed * weighted)
        errors["mean_logit"] = error.mean(1) + summed * z.reach.mean(1)
        errors["mean_log_prob"] = error.mean(1) + z.lse_error + summed * z.from_top.mean(1)
        # The truth has a rounding of its own: that of a sum of p z.
        truths = sum_of(c.V) * torch.finfo(torch.float64).eps * (z.p * z.z.abs()).sum(1)
        errors["expected_logit"] = spread + 4 * u * z.top[:, 0].abs() + truths
        log_sum_error = torch.minimum(z.mean_error + summed * (1 + z.log_sum), z.others)
        errors["entropy"] = self._expected_error + log_sum_error
        self._squared = z.p.square().sum(1)
        moved = (z.p.square() * ((1 + z.relative).square() - 1)).sum(1)
        of_rest = summed * rest.square().sum(1) + ROUNDINGS_OF_1 * u
        summed_squares = torch.where(z.alone.any(1), of_rest, summed * self._squared)
        errors["sum_p_squared"] = moved + summed_squares + c.V * self._precision.tiny
        own_error = error + 2 * u * z.reach
        log_prob_error = own_error + column(z.lse_error) + 4 * u * (z.from_top + column(z.log_sum))
        log_prob_error = torch.where(z.alone, torch.minimum(log_prob_error, column(z.others)), log_prob_error)
        self._inside = torch.zeros(c.N, dtype=torch.bool)
        self._own = torch.zeros_like(z.z)
        if o.target is not None:
            self._inside = (o.target >= 0) & (o.target < c.V)
            at = o.target.clamp(0, c.V - 1)
            self._own = one_hot(at, c.V).double() * self._inside[:, None]
            errors["target_logit"] = (self._own * own_error).sum(1)
            errors["target_log_prob"] = torch.where(
                self._inside, (self._own * log_prob_error).sum(1), z.lse_error + 4 * u * z.log_sum
            )
        if o.entries is not None:
            at, outside = (o.entries.owner, o.entries.ids), (z.lse_error + 4 * u * z.log_sum)[o.entries.owner]
            errors["selected_log_prob"] = torch.where(o.entries.inside, log_prob_error[at], outside)
        self._errors = errors
        expected = truth.get("expected_logit")
        expected = (z.p * z.z).sum(1) if expected is None else expected
        self._expected_reach = (expected - z.top[:, 0]).abs()
        self._slope_reach = z.from_top + column(self._expected_reach)

    def _coefficients(self, u: float) -> None:
        """Magnitudes of alpha, beta, gamma, delta and epsilon, and alpha's error, all relative errors of all."""
        c, o = self._c, self._o
        zero = torch.zeros(c.N, dtype=torch.float64)
        if c.kind == "statistics":
            up = {name: o.upstream[name].double() if name in o.upstream else zero for name in FIELDS}
            size = {name: value.abs() for name, value in up.items()}
            self.alpha = up["lse"] - up["target_log_prob"] - up["mean_log_prob"] + up["expected_logit"]
            self._alpha = size["lse"] + size["target_log_prob"] + size["mean_log_prob"] + size["expected_logit"]
            self._alpha_error = self._point_error = zero
            if "selected_log_prob" in o.upstream:
                self._select(up["selected_log_prob"], u)
            self._beta = size["target_logit"] + size["target_log_prob"]
            self._gamma = (size["mean_logit"] + size["mean_log_prob"]) / c.V
            self._delta = size["expected_logit"] + size["entropy"]
            self._epsilon = 2 * size["sum_p_squared"]
            self._alpha_error = self._alpha_error + self._epsilon * self._errors["sum_p_squared"]
            self._common = 8 * u
            return
        weight = torch.ones(c.N, dtype=torch.float64) if o.token_weight is None else o.token_weight.double()
        weight = weight.masked_fill(o.quiet | o.outside, 0.0)
        self._divisor, self._common = 1.0, 8 * u
        if c.reduction == "mean":
            total = weight.sum().item()
            self.nothing_counts = total == 0
            self._divisor = abs(total) or torch.inf
            self._common += sum_of(c.N) * u * weight.abs().sum().item() / self._divisor
        signed = o.upstream["loss"].double() * weight / self._divisor
        size, self._weight = signed.abs(), weight.abs()
        slope = 2 * abs(c.z_loss) * self.logits.lse.abs()
        self.alpha = signed * (1 + 2 * c.z_loss * self.logits.lse)
        self._alpha = size * (1 + slope)
        self._alpha_error = size * 2 * abs(c.z_loss) * self._errors["lse"]
        self._beta, self._gamma = size * (1 - c.label_smoothing), size * c.label_smoothing / c.V
        self._delta = self._epsilon = zero

    def _select(self, upstream: Tensor, u: float) -> None:
        """Add what the selected entries get of ``upstream [E]``. A token's are summed for alpha, equal ones for G."""
        entries = self._o.entries
        self.alpha = self.alpha - entries.sums(upstream, self._c.N)
        size = entries.sums(upstream.abs(), self._c.N)
        self._alpha = self._alpha + size
        self._alpha_error = sum_of(entries.most) * u * size
        self._points = entries.spread(upstream.abs(), self._points.shape)

    def _terms(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums of the magnitudes of the terms of G ``[N, V]``, and G's error in the statistics' dtype; magnitudes of
        its entries, and of what is rounded three times."""
        z, scale = self.logits, self.logits.scale.abs()
        # As p moves: the derivatives of p log p, where the logarithm is taken of a saved one, and of epsilon p (p - Q).
        recovered = float(recovers_logits(DTYPES[self._c.computed]))
        level = column(self._alpha) + column(self._delta) * (self._slope_reach + recovered * ~z.alone)
        level = level + column(self._epsilon) * (2 * z.p + column(self._squared))
        raw = z.p * level + column(self._beta) * self._own + column(self._gamma) + self._points
        # NumPy's products, in the interpreter, round a row in another way if it is at another place in a tile.
        c, again = self._c, 0.0
        if c.budget is not None or c.softcap is not None or c.computed == "fp16":
            again = z.alone * 2 * self._u * z.reach
        error = z.p * (
            (z.relative + again) * level
            + column(self._alpha_error)
            + column(self._delta) * (z.error * ~z.alone + again + column(self._expected_error))
            + column(self._epsilon) * z.p * z.relative.square()
        )
        common = self._common * raw
        if self._o.entries is not None:
            common = common + sum_of(self._o.entries.most) * self._u * self._points
        # An entry that is alone is formed first, then multiplied by its slope. The others' terms have one each.
        formed = self._truth["G"].abs()
        sloped = torch.where(z.alone & (z.chain > 0), formed / (scale * z.chain), raw).nan_to_num(torch.inf)
        error = z.chain * (error + common) + z.chain_error * torch.minimum(sloped, raw)
        # The truth's own error, of entropies whose terms cancel.
        noise = z.p * column(self._delta) * (1 + column(z.lse.abs()) + z.reach)
        error = error + 16 * torch.finfo(torch.float64).eps * noise
        # Exponentials below the smallest normal number may count as 0.
        reach = column(self._alpha + self._epsilon) + column(self._delta) * (1 + self._slope_reach)
        error = scale * (error + self._precision.tiny * reach)
        if self._precision.fp16 and raw.numel():
            # The largest coefficient is brought near 2^10, whose smallest fraction in fp16 is 2^-34.
            alpha = self._alpha + self._delta * self._expected_reach + self._epsilon * self._squared
            each = alpha, self._beta, self._gamma, self._delta, self._epsilon
            largest = sum((v * scale[:, 0]).amax() for v in each) + (scale * self._points).amax()
            error = error + 2.0**-34 * largest + 2.0**-65
        rounded = torch.where(z.alone, formed, (2 * scale * z.chain * z.p * level + formed) / 3)
        return scale * z.chain * raw, error, formed + error, rounded

    def bounds(self) -> dict[str, Tensor]:
        """The largest error of each result, of its shape; infinite where fp16 may overflow."""
        bounds = dict(self._errors)
        if self._c.kind == "loss":
            bounds |= self._losses()
        gradients = Gradients(self._c, self._o, self._precision, self.logits)
        self.terms, error, formed, rounded = self._terms()
        return bounds | gradients.bounds(self.terms, error, self._truth, formed, rounded)

    def moved(self) -> Tensor:
        """G from exponentials that are rounded once."""
        z, fp16 = self.logits, self._precision.fp16
        exact = torch.exp(z.z - z.top)
        factor = 2.0**15 if fp16 else 1.0
        stored = (exact * factor).to(DTYPES[self._c.computed]).double() / factor
        slope = column(self.alpha) * z.scale * z.chain
        return self._truth["G"] + (stored - exact) / exact.sum(1, keepdim=True) * slope

    def _losses(self) -> dict[str, Tensor]:
        c, o, u, truth = self._c, self._o, self._u, self._truth
        e, smoothing = self._errors, c.label_smoothing
        log_p = torch.log_softmax(self.logits.z, 1)
        # Infinite ones have no rounding.
        own = (self._own * log_p.abs()).sum(1)
        mean = log_p.abs().mean(1) if smoothing else 0.0
        terms = (1 - smoothing) * own + smoothing * mean + abs(c.z_loss) * self.logits.lse.square()
        error = (1 - smoothing) * e["target_log_prob"] + smoothing * e["mean_log_prob"] + 6 * u * terms
        error = error + abs(c.z_loss) * (2 * self.logits.lse.abs() + e["lse"]) * e["lse"]
        each = self._weight * (error + 2 * u * terms)
        bounds = {"loss": each}
        size = (self._weight * terms).sum() / self._divisor
        total_error = each.sum() / self._divisor + (self._common + sum_of(c.N) * u) * size
        if c.reduction != "none":
            bounds["loss"] = total_error
        if o.token_weight is not None:
            upstream = o.upstream["loss"].double().abs() / self._divisor
            of_weight = error + (8 * u + self._common) * terms
            if c.reduction == "mean":
                of_weight = of_weight + total_error + 2 * self._common * size
            rounded = 0.0
            if c.weight_learns:
                dtype = getattr(torch, c.weight_dtype)
                rounded = half_spacing(dtype) * truth["dtoken_weight"].abs()
                rounded = rounded + (FP16_SMALLEST if dtype == torch.float16 else 0.0)
            bounds["dtoken_weight"] = upstream * of_weight + rounded
            if c.weight_dtype == "float16":
                beyond = truth["dtoken_weight"].abs() > FP16_REACH
                bounds["dtoken_weight"] = bounds["dtoken_weight"].masked_fill(beyond, torch.inf)
        return bounds


def dense_of_logits(c: Configuration, whole: Whole, wide: torch.dtype) -> dict[str, Tensor]:
    """Results of ``vocab_parallel_cross_entropy``, as its docstring has them, computed in ``wide``."""
    z, (own, inside), smoothing = whole.logits.to(wide), _own(c, whole), _smoothing(c)
    log_p = torch.log_softmax(z, -1)
    # A target outside has the largest logit's loss.
    picked = torch.where(inside, (own * log_p).sum(-1), log_p.amax(-1))
    means = log_p.unflatten(-1, (c.ranks, c.V // c.ranks)).mean(-1).movedim(-1, 0)
    losses = (smoothing - 1) * picked - smoothing * means
    gradient = log_p.exp() - (1 - smoothing) * own.to(wide) - smoothing * c.ranks / c.V
    gradient = whole.upstream["loss"].to(wide).unsqueeze(-1) * gradient
    return {"loss": losses if c.label_smoothing else losses[0], "dinput": gradient}


def _own(c: Configuration, whole: Whole) -> tuple[Tensor, Tensor]:
    target = whole.target.long()
    inside = (target >= 0) & (target < c.V)
    return one_hot(target.clamp(0, c.V - 1), c.V) * inside.unsqueeze(-1), inside


def _smoothing(c: Configuration) -> float:
    entries = c.V // c.ranks
    return c.label_smoothing * entries / (entries - 1) if c.label_smoothing else 0.0


def of_logits(c: Configuration, whole: Whole) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Truth and bounds of ``vocab_parallel_cross_entropy``."""
    z = whole.logits.double()
    dtype = DTYPES[c.dtype]
    wide = accumulation_dtype(dtype)
    u = half_spacing(wide) * (2 if wide == torch.float64 else 1)
    smoothing, (own, _) = _smoothing(c), _own(c, whole)
    truth = dense_of_logits(c, whole, torch.float64)
    log_p, top = torch.log_softmax(z, -1), z.amax(-1)
    upstream = whole.upstream["loss"].double()
    error = 4 * u * (z.abs() + top.abs().unsqueeze(-1))
    worst = error.amax(-1)
    terms = log_p.exp() + abs(1 - smoothing) * own + smoothing * c.ranks / c.V
    loss_bound = 3 * worst + sum_of(c.V) * u * (1 + z.abs().amax(-1)) + 8 * u * truth["loss"].abs()
    relative = torch.expm1((error + worst.unsqueeze(-1)).clamp(max=50.0)) + sum_of(c.V) * u
    size = upstream.abs().unsqueeze(-1)
    tiny = torch.finfo(wide).tiny
    bound = tiny + size * (tiny + log_p.exp() * relative + 8 * u * terms)
    bound += half_spacing(dtype) * truth["dinput"].abs()
    if dtype == torch.float16:
        bound = (bound + FP16_SMALLEST).masked_fill(size * terms > FP16_REACH, torch.inf)
    bounds = {"loss": loss_bound, "dinput": bound}
    for found in (truth, bounds):
        found["dinput again"] = found["dinput"]
    return truth, bounds
