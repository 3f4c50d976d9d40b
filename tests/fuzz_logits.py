"""How far roundings may move logits, their softmax, and the gradients that come of the gradient of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from cases import DTYPES
from fuzz_configuration import Configuration
from fuzz_run import real_rows
from fuzz_truth import Layer, Operands
from fuzz_values import MASKED
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
    """Logits ``z [N, V]`` of a layer, their softmax ``p``, and the errors of both: ``error`` of z, ``relative`` of p.

    ``from_top``: distance from the ``top [N, 1]``; ``gone [1, V]``: -inf; ``chain``: the soft-cap's slope.

    ``alone``: entries with p > 2/3. Their logit is the maximum itself, so that their p and those of the others are off
    as ``others [N]`` are: by the errors of differences of logits, times the others' p.
    """

    def __init__(self, layer: Layer, u: float, low: float) -> None:
        self.scale = layer.scale
        x, weight = layer.x.double(), layer.weight.double()
        V, softcap = len(weight), layer.softcap
        bias = torch.zeros(V) if layer.bias is None else layer.bias.double()
        finite = bias.masked_fill(layer.masked, 0.0)
        v = linear(x, weight, bias.masked_fill(layer.masked, MASKED).double()) * self.scale
        magnitude = self.scale.abs() * linear(x.abs(), weight.abs(), finite.abs().double())
        error = (4 + x.shape[1] ** 0.5) * u * magnitude
        self.chain = torch.ones_like(v)
        self.z = v
        self.chain_error = torch.zeros_like(v)
        if softcap is not None:
            self.z = softcap * torch.tanh(v / softcap)
            self.chain = 1 - torch.tanh(v / softcap).square()
            error = error * (self.chain + error / softcap).clamp(max=1.0)
        self.gone = gone = layer.masked[None, :] & torch.tensor(softcap is None)
        # What -inf adds to sums of magnitudes is nobody's error.
        self.reach = self.z.abs().masked_fill(gone, 0.0)
        self.top = self.z.amax(1, keepdim=True) if len(x) else self.z[:, :1]
        self.from_top = (self.z - self.top).abs().masked_fill(gone, 0.0)
        self.error = (error + 4 * u * (self.reach + self.top.abs())).masked_fill(gone, 0.0)
        if softcap is not None:
            self.chain_error = 2 * self.z.abs() / softcap * (self.error / softcap) + 4 * u + 2 * low
        self._softmax(u, sum_of(V) * u)

    def _softmax(self, u: float, summed: float) -> None:
        log_p = torch.log_softmax(self.z, 1)
        self.p, self.lse = log_p.exp(), torch.logsumexp(self.z, 1)
        # 1 - p of the largest entry
        self.miss = log_p.scatter(1, self.z.argmax(1, keepdim=True), -torch.inf).exp().sum(1)
        self.mean_error = torch.logsumexp(log_p + self.error, 1).clamp(min=0.0)
        self.relative = torch.expm1((self.error + self.mean_error[:, None]).clamp(max=50.0)) + summed
        # lse - top and the error of its sum of exponentials
        self.log_sum = self.lse - self.top[:, 0]
        # In float64 the truth is as inexact.
        self.alone = (self.p > 2 / 3) & torch.tensor(u > 1e-12)
        apart = self.error + (self.alone * self.error).sum(1, keepdim=True)
        rest = self.p.masked_fill(self.alone, 0.0)
        moved = (1.5 * rest * torch.expm1(apart.clamp(max=50.0))).sum(1)
        self.others = (moved + 1.5 * summed * rest.sum(1) + ROUNDINGS_OF_1 * u).where(self.alone.any(1), torch.inf)
        self.relative = torch.where(self.alone, torch.minimum(self.relative, self.others[:, None]), self.relative)
        self.lse_error = self.mean_error + summed + 4 * u * (self.lse.abs() + self.top[:, 0].abs())


def _deviations(elements: int, roundings: int) -> float:
    """Seven standard deviations, in roundings, of the norm of so many sums. A rounding has 0.433: three have 0.75."""
    return 0.75 * (roundings / 3) ** 0.5 * (2 + 7 / (2 * max(1, elements)) ** 0.5)


def partial_sums(c: Configuration, layer: Layer, G: Tensor) -> Tensor:
    """Sum over the ranks of the magnitude of their part of dX ``[N, D]``."""
    total, weight = torch.zeros(c.N, c.D, dtype=torch.float64), layer.weight.double()
    for rank, (start, _) in enumerate(c.shards):
        mine = slice(start, start + real_rows(c, rank))
        total += (G[:, mine] @ weight[mine]).abs()
    return total


@dataclass(frozen=True)
class Gradients:
    """Bounds of dX, dW and dbias from the gradient ``G [N, V]`` of the projection.

    ``terms [N, V]``: magnitudes of what is summed to G; ``error [N, V]``: G's, in the statistics' dtype; ``formed``:
    the magnitudes of what is summed to dX and dW. In low precision an entry of G is rounded ``roundings`` times,
    relative to ``rounded``, 0 times if it stays in the statistics' dtype, and what is delivered ``deliveries`` times.
    ``longest``: the most terms of a sum.
    """

    c: Configuration
    o: Operands
    precision: Precision
    logits: Logits
    longest: int = 0
    roundings: int = 3
    deliveries: int = 1

    def bounds(
        self,
        terms: Tensor,
        error: Tensor,
        truth: dict[str, Tensor],
        formed: Tensor | None = None,
        rounded: Tensor | None = None,
    ) -> dict[str, Tensor]:
        c, layer, precision = self.c, self.o.layer, self.precision
        x, weight = layer.x.double(), layer.weight.double()
        ones = torch.ones(c.N, 1, dtype=torch.float64)
        tokens, entries = self._alike(0), self._alike(1)
        of_rows = terms, error, terms if formed is None else formed, terms if rounded is None else rounded
        of_columns = [part.t() for part in of_rows]
        bounds = {"dinput": self._product(*of_rows, weight, truth["dinput"], entries)}
        if c.ranks > 1:
            bounds["dinput"] += (c.ranks + 1) * (precision.low or precision.u) * partial_sums(c, layer, truth["G"])
        bounds["dweight"] = self._product(*of_columns, x, truth["dweight"], tokens)
        of_bias = truth["G"].sum(0)[:, None]
        bounds["dbias"] = self._product(*of_columns, ones, of_bias, tokens)[:, 0]
        return bounds

    def _alike(self, dimension: int) -> Tensor:
        """For which rows of a gradient the exponentials of all tokens, or of all entries, are within 16 roundings of
        each other or repeated."""
        below, gone = self.logits.from_top, self.logits.gone
        if below.shape[dimension] < 2 or self.c.layouts[dimension] == "expanded":
            return torch.ones(below.shape[1 - dimension], dtype=torch.bool)
        spread = below.amax(dimension) - below.masked_fill(gone, torch.inf).amin(dimension)
        return spread < 16 * self.precision.low

    def _product(
        self, terms: Tensor, error: Tensor, formed: Tensor, rounded: Tensor, other: Tensor, truth: Tensor, alike: Tensor
    ) -> Tensor:
        """Of ``G @ other``; ``alike``: of which rows what is summed is rounded alike."""
        precision, roundings = self.precision, self.roundings
        sums = column(torch.full(alike.shape, sum_of(max(terms.shape[1], self.longest)) * precision.u))
        if precision.u < 1e-12:
            # Sums of equal terms drift: a rounding of each goes the same way. In float64 the truth's does so, too, and
            # no yardstick allows for it.
            sums = sums + column(alike) * (precision.u * terms.shape[1] / 2)
        bound = error @ other.abs() + sums * (formed @ other.abs())
        bound += self.deliveries * precision.delivered * truth.abs() + precision.tiny
        if precision.low:
            size = rounded @ other.abs()
            spread = (rounded.square() @ other.square()).sqrt()
            deviations = _deviations(other.shape[1], roundings) * spread
            bound += precision.low * torch.minimum(roundings * size, deviations + column(alike) * size)
        if precision.any_fp16:
            bound += (self.c.ranks + 1) * FP16_SMALLEST
            bound = bound.masked_fill(terms @ other.abs() > FP16_REACH, torch.inf)
        return bound
