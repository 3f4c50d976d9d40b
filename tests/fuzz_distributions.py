"""How far roundings may move log-probabilities among selected entries, and divergences: first-order error analysis of
the formulas in ``parallel_lce.selected_log_probs`` and ``parallel_lce.run.divergence``.

Sums, products and low precision as in :mod:`fuzz_bounds`, with two differences. Of selected entries nothing is rounded
to low precision but what is delivered. The gradient of a divergence's logits is rounded once; and where gradients are
formed with the loss, they are rounded before they are multiplied by the upstream gradient and again after it.

A log-ratio d = log(p / q) has the errors of both log-probabilities. log(p / r) and log(q / r) follow it with slopes
beta q / r and (1 - beta) p / r, between 0 and 1, which an error of d multiplies by its exponential at most. They have a
few roundings of 1, of themselves and of the logarithm that both have. Terms are counted apart: the divergence of
nearly equal distributions is far smaller than they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz_configuration import Configuration
from fuzz_logits import Gradients, Logits, Precision, column, sum_of
from fuzz_truth import INFINITE, Operands, log_ratios


class SelectedAnalysis:
    """Of ``selected_log_probs``: errors ``[E]``."""

    nothing_counts = False

    def __init__(self, c: Configuration, o: Operands, truth: dict[str, Tensor]) -> None:
        self._c, self._o, self._truth = c, o, truth
        self._precision = precision = Precision.of(c)
        self.logits = z = Logits(o.layer, precision.u, precision.low)
        entries, u = o.entries, precision.u
        self._summed = sum_of(entries.most) * u
        at = entries.owner, entries.ids
        self._there = entries.inside & (truth["log_probs"] > -INFINITE)
        self._p = truth["log_probs"].exp()
        self.miss = 1 - entries.maxima(self._p, c.N)
        logits = z.z[at].masked_fill(~self._there, -torch.inf)
        top = entries.maxima(logits, c.N)[entries.owner]
        from_top = (top - logits).masked_fill(~self._there, 0.0)
        error = (z.error[at] + 2 * u * from_top).masked_fill(~self._there, 0.0)
        mean = entries.sums(self._p * error.clamp(max=50.0).exp(), c.N).clamp(min=1.0).log()
        log_sum = entries.sums((logits - top).exp().where(self._there, 0.0), c.N).clamp(min=1.0).log()
        of_sum = (mean + self._summed + 4 * u * log_sum)[entries.owner]
        self._error = error + of_sum + 4 * u * from_top

    def bounds(self) -> dict[str, Tensor]:
        c, entries, u, z = self._c, self._o.entries, self._precision.u, self.logits
        upstream = self._o.upstream["log_probs"].double().abs().where(self._there, 0.0)
        others = self._p * entries.sums(upstream, c.N)[entries.owner]
        terms = entries.spread(upstream + others, z.z.shape)
        relative = torch.expm1(self._error.clamp(max=50.0)) + self._summed
        error = entries.spread(others * relative, z.z.shape) + (8 * u + self._summed) * terms
        error = z.scale.abs() * (z.chain * error + z.chain_error * terms)
        longest = len(entries.ids)
        gradients = Gradients(c, self._o, self._precision, z, longest=longest, roundings=0)
        self.terms = z.scale.abs() * z.chain * terms
        return {"log_probs": self._error, **gradients.bounds(self.terms, error, self._truth)}

    def moved(self) -> None:
        """The gradient of the logits is not rounded."""


class DivergenceAnalysis:
    """Of ``distillation.divergence``: errors ``[N, V]`` and ``[N]``."""

    nothing_counts = False

    def __init__(self, c: Configuration, o: Operands, truth: dict[str, Tensor]) -> None:
        self._c, self._o, self._truth = c, o, truth
        self._precision = precision = Precision.of(c)
        self.logits = Logits(o.layer, precision.u, precision.low)
        self.miss = self.logits.miss
        sides = self.logits, Logits(o.teacher, precision.u, 0.0)
        # Of the log-probabilities, and of the probabilities relative to them.
        errors = [self._log_prob_error(side) for side in sides]
        self._relative = [torch.expm1(e.clamp(max=50.0)) for e in errors]
        self._p = [side.p for side in sides]
        d = sides[0].z.log_softmax(1) - sides[1].z.log_softmax(1)
        # Where one is infinite, its p is 0.
        self._ratios = [ratio.masked_fill(ratio.abs() > INFINITE, 0.0) for ratio in log_ratios(d, c.beta)]
        self._ratio_errors = self._errors_of_ratios(d, sum(errors))
        found = [self._sum(side) for side in range(2)]
        shares = (1.0, 1.0) if c.beta in (0, 1) else (1 - c.beta, c.beta)
        shares = [share * (c.beta != unused) for share, unused in zip(shares, (0, 1))]
        self._sizes, self._errors = (sum(s * part for s, part in zip(shares, parts)) for parts in zip(*found))
        # What a token's divergence counts in the result.
        counted = (~o.quiet).double()
        self._weight = counted / counted.sum().clamp(min=1.0) if c.reduction == "mean" else counted

    def _log_prob_error(self, side: Logits) -> Tensor:
        u = self._precision.u
        of_sum = side.mean_error + sum_of(self._c.V) * u + 4 * u * side.log_sum
        return side.error + column(of_sum) + 4 * u * side.from_top

    def _errors_of_ratios(self, d: Tensor, error: Tensor) -> list[Tensor]:
        """Of log(p / r) and log(q / r), if that of ``d`` is ``error``."""
        beta, u = self._c.beta, self._precision.u
        if beta in (0, 1):
            return [error, error]
        of_p, of_q = self._ratios
        common = torch.where(d > 0, of_p, of_q).abs()
        found = []
        for share, mine, other in ((beta, of_p, of_q), (1 - beta, of_q, of_p)):
            slope = (share * other.exp() * error.clamp(max=50.0).exp()).clamp(max=1.0)
            found.append(slope * error + 4 * u * (1 + mine.abs() + common))
        return found

    def _sum(self, side: int) -> tuple[Tensor, Tensor]:
        """Of the terms p log(p / r) ``[N]``: the sum of their magnitudes, and their sum's error."""
        p, ratio, relative = self._p[side], self._ratios[side].abs(), self._relative[side]
        size = (p * ratio).sum(1)
        moved = p * (relative * ratio + (1 + relative) * self._ratio_errors[side])
        # Probabilities below the smallest normal number may count as 0.
        return size, (moved + self._precision.tiny * ratio).sum(1) + (4 + sum_of(self._c.V)) * self._precision.u * size

    def bounds(self) -> dict[str, Tensor]:
        c, u, z = self._c, self._precision.u, self.logits
        each = self._weight * (self._errors + 4 * u * self._sizes)
        loss = each if c.reduction == "none" else each.sum() + sum_of(c.N) * u * (self._weight * self._sizes).sum()
        factor = self._o.upstream["loss"].double().abs() * self._weight * z.scale[:, 0]
        factor = factor * (1 - c.beta if 0 < c.beta < 1 else 1.0)
        error = column(factor) * self._gradient_error()
        if self._precision.fp16 and error.numel():
            # 64 times the largest factor is brought near 2^10, whose smallest fraction in fp16 is 2^-34.
            error = error + 2.0**-34 * 64 * factor.amax() + 2.0**-65
        deliveries = 1 if c.reduction == "none" else 2
        gradients = Gradients(c, self._o, self._precision, z, roundings=1, deliveries=deliveries)
        self.terms = column(factor) * self._magnitudes()
        return {"loss": loss, **gradients.bounds(self._truth["G"].abs(), error, self._truth)}

    def _magnitudes(self) -> Tensor:
        """Of the two terms of which the gradient of the logits is the difference, without its factor."""
        p, q = self._p
        if self._c.beta == 0:
            return p + q
        return p * (self._ratios[0].abs() + column((p * self._ratios[0]).sum(1)).abs())

    def _gradient_error(self) -> Tensor:
        """Of the gradient of the logits, in the statistics' dtype, without its factor."""
        u, tiny, (p, q) = self._precision.u, self._precision.tiny, self._p
        relative = self._relative[0]
        if self._c.beta == 0:
            return p * relative + q * self._relative[1] + 4 * u * (p + q) + 2 * tiny
        of_p, mean = self._ratios[0], column((p * self._ratios[0]).sum(1))
        moved = self._ratio_errors[0] + column(self._sum(0)[1])
        terms = of_p.abs() + mean.abs()
        return p * (relative * (of_p - mean).abs() + (1 + relative) * moved + 4 * u * terms) + tiny * (1 + terms)

    def moved(self) -> Tensor:
        return self._truth["G"]
