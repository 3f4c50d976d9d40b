"""How far roundings may move each result: first-order error analysis of the formulas in ``parallel_lce.statistics``.

``u`` is half the spacing of the statistics' dtype, ``low`` that of the computed one. Sums of n terms are given
``8 + sqrt(n)`` roundings of the sum of their magnitudes, products over D as many less 4. In low precision the
entries of the logits' gradient are rounded three times at most, kept exponential, slope and result, each time on
its own; their sums are given seven standard deviations of that, and one rounding of the sum of their magnitudes
where all logits are so near each other that their exponentials are rounded alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

from cases import DTYPES
from fuzz_draw import FIELDS, Configuration
from fuzz_values import MASKED, Whole, ignore_index
from parallel_lce.partials import accumulation_dtype

if TYPE_CHECKING:
    from fuzz_judge import Operands

_FP16_REACH = 3e4
"""Sums of terms beyond this may overflow in fp16."""
_SMALLEST = 2.0**-25
"""Half the spacing of the smallest fp16 numbers."""


def _sum(terms: int) -> float:
    return 8 + terms**0.5


def _half_spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _deviations(elements: int) -> float:
    """Seven standard deviations, in roundings, of the norm of so many sums: three uniform roundings have 0.75."""
    return 0.75 * (2 + 7 / (2 * max(1, elements)) ** 0.5)


class Analysis:
    """Magnitudes and errors ``[N, V]`` and ``[N]`` of everything between the operands and the results.

    ``truth`` has the reference's. ``alpha [N]``: the signed coefficient of the probabilities.
    """

    def __init__(self, c: Configuration, o: Operands, truth: dict[str, Tensor]) -> None:
        self._c, self._o, self._truth = c, o, truth
        computed = DTYPES[c.computed]
        wide = accumulation_dtype(computed)
        # In float64 the truth is rounded as often.
        self._u = u = _half_spacing(wide) * (2 if wide == torch.float64 else 1)
        self._low = _half_spacing(computed) if computed.itemsize == 2 else 0.0
        # Gradients have the leaves' dtype, which under autocast is not the computed one.
        self._rounded = max(self._low, _half_spacing(DTYPES[c.dtype]), u)
        self._fp16, self._tiny = computed == torch.float16, torch.finfo(wide).tiny
        self._logits(u)
        self._statistics(u)
        self.nothing_counts = False
        self._coefficients(u)

    def _logits(self, u: float) -> None:
        c, o = self._c, self._o
        self._x, self._w = o.x.double(), o.weight.double()
        bias = torch.zeros(c.V) if o.bias is None else o.bias.double()
        finite = bias.masked_fill(o.masked, 0.0)
        v = linear(self._x, self._w, bias.masked_fill(o.masked, MASKED).double()) * c.scale
        magnitude = abs(c.scale) * linear(self._x.abs(), self._w.abs(), finite.abs().double())
        error = (4 + c.D**0.5) * u * magnitude
        self.chain = torch.ones_like(v)
        self.z = v
        self._chain_error = torch.zeros_like(v)
        if c.softcap is not None:
            self.z = c.softcap * torch.tanh(v / c.softcap)
            self.chain = 1 - torch.tanh(v / c.softcap).square()
            error = error * (self.chain + error / c.softcap).clamp(max=1.0)
        gone = o.masked[None, :] & torch.tensor(c.softcap is None)
        # What -inf adds to sums of magnitudes is nobody's error.
        self._reach = self.z.abs().masked_fill(gone, 0.0)
        self.top = self.z.amax(1, keepdim=True) if c.N else self.z[:, :1]
        self._from_top = (self.z - self.top).abs().masked_fill(gone, 0.0)
        self._e = (error + 4 * u * (self._reach + self.top.abs())).masked_fill(gone, 0.0)
        if c.softcap is not None:
            self._chain_error = 2 * self.z.abs() / c.softcap * (self._e / c.softcap) + 4 * u + 2 * self._low

    def _statistics(self, u: float) -> None:
        c, o, truth = self._c, self._o, self._truth
        log_p = torch.log_softmax(self.z, 1)
        self._p, self._lse = log_p.exp(), torch.logsumexp(self.z, 1)
        mean_e = torch.logsumexp(log_p + self._e, 1).clamp(min=0.0)
        self._relative = torch.expm1((self._e + mean_e[:, None]).clamp(max=50.0)) + _sum(c.V) * u
        top, log_sum = self.top[:, 0].abs(), self._lse - self.top[:, 0]
        errors = {"lse": mean_e + _sum(c.V) * u + 4 * u * (self._lse.abs() + top), "max_logit": self._e.amax(1)}
        weighted = (self._p * self._from_top).sum(1)
        spread = (self._p * (self._e + self._relative * self._from_top)).sum(1) + _sum(c.V) * u * weighted
        errors["mean_logit"] = self._e.mean(1) + _sum(c.V) * u * self._reach.mean(1)
        errors["mean_log_prob"] = self._e.mean(1) + errors["lse"] + _sum(c.V) * u * self._from_top.mean(1)
        errors["expected_logit"] = spread + 4 * u * top
        errors["entropy"] = spread + mean_e + _sum(c.V) * u * (1 + log_sum)
        self._inside = torch.zeros(c.N, dtype=torch.bool)
        self._own = torch.zeros_like(self.z)
        if o.target is not None:
            self._inside = (o.target >= 0) & (o.target < c.V)
            at = o.target.clamp(0, c.V - 1)
            self._own = one_hot(at, c.V).double() * self._inside[:, None]
            errors["target_logit"] = (self._own * (self._e + 2 * u * self._reach)).sum(1)
            errors["target_log_prob"] = (
                errors["target_logit"] + errors["lse"] + 4 * u * ((self._own * self._from_top).sum(1) + log_sum)
            )
        self._errors = errors
        expected = truth.get("expected_logit")
        expected = (self._p * self.z).sum(1) if expected is None else expected
        self._slope_reach = self._from_top + (expected - self.top[:, 0]).abs()[:, None]

    def _coefficients(self, u: float) -> None:
        """Magnitudes of alpha, beta, gamma and delta, and alpha's error, all relative errors of all."""
        c, o = self._c, self._o
        zero = torch.zeros(c.N, dtype=torch.float64)
        if c.kind == "statistics":
            up = {name: o.upstream[name].double() if name in o.upstream else zero for name in FIELDS}
            size = {name: value.abs() for name, value in up.items()}
            self.alpha = up["lse"] - up["target_log_prob"] - up["mean_log_prob"] + up["expected_logit"]
            self._alpha = size["lse"] + size["target_log_prob"] + size["mean_log_prob"] + size["expected_logit"]
            self._beta = size["target_logit"] + size["target_log_prob"]
            self._gamma = (size["mean_logit"] + size["mean_log_prob"]) / c.V
            self._delta = size["expected_logit"] + size["entropy"]
            self._alpha_error, self._common = zero, 8 * u
            return
        weight = torch.ones(c.N, dtype=torch.float64) if o.token_weight is None else o.token_weight.double()
        weight = weight.masked_fill((o.target == ignore_index(c)) | o.outside, 0.0)
        self._divisor, self._common = 1.0, 8 * u
        if c.reduction == "mean":
            total = weight.sum().item()
            self.nothing_counts = total == 0
            self._divisor = abs(total) or torch.inf
            self._common += _sum(c.N) * u * weight.abs().sum().item() / self._divisor
        signed = o.upstream["loss"].double() * weight / self._divisor
        size, self._weight = signed.abs(), weight.abs()
        slope = 2 * abs(c.z_loss) * self._lse.abs()
        self.alpha = signed * (1 + 2 * c.z_loss * self._lse)
        self._alpha = size * (1 + slope)
        self._alpha_error = size * 2 * abs(c.z_loss) * self._errors["lse"]
        self._beta, self._gamma = size * (1 - c.label_smoothing), size * c.label_smoothing / c.V
        self._delta = zero

    def _terms(self) -> tuple[Tensor, Tensor]:
        """Sums of the magnitudes of the terms of G ``[N, V]``, and G's error in the statistics' dtype."""
        column = lambda value: value[:, None]  # noqa: E731
        level = column(self._alpha) + column(self._delta) * self._slope_reach
        raw = self._p * level + column(self._beta) * self._own + column(self._gamma)
        error = self._p * (
            self._relative * level
            + column(self._alpha_error)
            + column(self._delta) * (self._e + column(self._errors["expected_logit"]))
        )
        error = self.chain * (error + self._common * raw) + self._chain_error * raw
        scale = abs(self._c.scale)
        # The truth's own error, of entropies whose terms cancel.
        noise = self._p * column(self._delta) * (1 + column(self._lse.abs()) + self._reach)
        error = error + 16 * torch.finfo(torch.float64).eps * noise
        # Exponentials below the smallest normal number may count as 0.
        error = error + self._tiny * (column(self._alpha) + column(self._delta) * (1 + self._slope_reach))
        if self._fp16 and raw.numel():
            # The largest coefficient is brought near 2^10, whose smallest fraction in fp16 is 2^-34.
            largest = sum(v.amax() for v in (self._alpha, self._beta, self._gamma, self._delta))
            error = error + 2.0**-34 * largest + 2.0**-65
        return scale * self.chain * raw, scale * error

    def bounds(self, partial_sums: Tensor) -> dict[str, Tensor]:
        """The largest error of each result, of its shape; infinite where fp16 may overflow."""
        c, u, low = self._c, self._u, self._low
        bounds = dict(self._errors)
        if c.kind == "loss":
            bounds |= self._losses()
        terms, error = self._terms()
        ones = torch.ones(c.N, 1, dtype=torch.float64)
        tokens, entries = self._alike(0), self._alike(1)
        bounds["dinput"] = self._product(terms, error, self._w, self._truth["dinput"], entries)
        bounds["dinput"] += (c.ranks + 1) * (low or u) * partial_sums if c.ranks > 1 else 0.0
        bounds["dweight"] = self._product(terms.t(), error.t(), self._x, self._truth["dweight"], tokens)
        of_bias = self._truth["G"].sum(0)[:, None]
        bounds["dbias"] = self._product(terms.t(), error.t(), ones, of_bias, tokens)[:, 0]
        return bounds

    def _alike(self, dimension: int) -> bool:
        """Whether the logits of all tokens, or of all entries, are within 16 roundings of each other or repeated."""
        if self.z.shape[dimension] < 2 or self._c.layouts[dimension] == "expanded":
            return True
        spread = self.z.amax(dimension) - self.z.amin(dimension)
        return bool((spread < 16 * self._low).all())

    def _product(self, terms: Tensor, error: Tensor, other: Tensor, truth: Tensor, alike: bool) -> Tensor:
        """Of ``G @ other``; ``alike``: what is summed is rounded alike."""
        size = terms @ other.abs()
        bound = error @ other.abs() + (_sum(terms.shape[1]) * self._u) * size + self._rounded * truth.abs()
        bound += self._tiny
        if self._low:
            spread = (terms.square() @ other.square()).sqrt()
            bound += self._low * torch.minimum(3 * size, _deviations(other.shape[1]) * spread + alike * size)
        if self._fp16 or self._c.dtype == "fp16":
            bound += (self._c.ranks + 1) * _SMALLEST
            bound = bound.masked_fill(size > _FP16_REACH, torch.inf)
        return bound

    def _losses(self) -> dict[str, Tensor]:
        c, o, u, truth = self._c, self._o, self._u, self._truth
        e, smoothing = self._errors, c.label_smoothing
        log_p = torch.log_softmax(self.z, 1)
        # Infinite ones have no rounding.
        own = (self._own * log_p.abs()).sum(1)
        mean = log_p.abs().mean(1) if smoothing else 0.0
        terms = (1 - smoothing) * own + smoothing * mean + abs(c.z_loss) * self._lse.square()
        error = (1 - smoothing) * e["target_log_prob"] + smoothing * e["mean_log_prob"] + 6 * u * terms
        error = error + abs(c.z_loss) * (2 * self._lse.abs() + e["lse"]) * e["lse"]
        each = self._weight * (error + 2 * u * terms)
        bounds = {"loss": each}
        size = (self._weight * terms).sum() / self._divisor
        total_error = each.sum() / self._divisor + (self._common + _sum(c.N) * u) * size
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
                rounded = _half_spacing(dtype) * truth["dtoken_weight"].abs()
                rounded = rounded + (_SMALLEST if dtype == torch.float16 else 0.0)
            bounds["dtoken_weight"] = upstream * of_weight + rounded
            if c.weight_dtype == "float16":
                beyond = truth["dtoken_weight"].abs() > _FP16_REACH
                bounds["dtoken_weight"] = bounds["dtoken_weight"].masked_fill(beyond, torch.inf)
        return bounds


def of_logits(c: Configuration, whole: Whole) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Truth and bounds of ``vocab_parallel_cross_entropy``, as its docstring has it."""
    z = whole.logits.double()
    target = whole.target.long()
    dtype = DTYPES[c.dtype]
    wide = accumulation_dtype(dtype)
    u = _half_spacing(wide) * (2 if wide == torch.float64 else 1)
    entries = c.V // c.ranks
    smoothing = c.label_smoothing * entries / (entries - 1) if c.label_smoothing else 0.0
    log_p, lse, top = torch.log_softmax(z, -1), torch.logsumexp(z, -1), z.amax(-1)
    inside = (target >= 0) & (target < c.V)
    own = one_hot(target.clamp(0, c.V - 1), c.V).double() * inside.unsqueeze(-1)
    picked = torch.where(inside, (own * z).sum(-1), top)
    means = log_p.unflatten(-1, (c.ranks, entries)).mean(-1).movedim(-1, 0)
    losses = (1 - smoothing) * (lse - picked) - smoothing * means
    if not c.label_smoothing:
        losses = losses[0]
    upstream = whole.upstream["loss"].double()
    gradient = log_p.exp() - (1 - smoothing) * own - smoothing / entries
    error = 4 * u * (z.abs() + top.abs().unsqueeze(-1))
    worst = error.amax(-1)
    terms = log_p.exp() + abs(1 - smoothing) * own + smoothing / entries
    loss_bound = 3 * worst + _sum(c.V) * u * (1 + z.abs().amax(-1)) + 8 * u * losses.abs()
    relative = torch.expm1((error + worst.unsqueeze(-1)).clamp(max=50.0)) + _sum(c.V) * u
    size = upstream.abs().unsqueeze(-1)
    tiny = torch.finfo(wide).tiny
    bound = tiny + size * (tiny + log_p.exp() * relative + 8 * u * terms + _half_spacing(dtype) * gradient.abs())
    if dtype == torch.float16:
        bound = (bound + _SMALLEST).masked_fill(size * terms > _FP16_REACH, torch.inf)
    truth = {"loss": losses, "dinput": upstream.unsqueeze(-1) * gradient}
    bounds = {"loss": loss_bound, "dinput": bound}
    for found in (truth, bounds):
        found["dinput again"] = found["dinput"]
    return truth, bounds
