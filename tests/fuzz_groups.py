"""Groups of tokens that are judged together, in low precision: those that are as sure as each other of an entry, and
those that are not sure. The norm of a group's error is at most twice that of torch's path, which rounds the logits,
plus the rounding of what is delivered and a few roundings of 1.

The gradients of a token that is sure are as small as 1 - p. An error of that size has no place among others'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cases import DTYPES
from fuzz_bounds import dense_of_logits
from fuzz_configuration import Configuration
from fuzz_logits import FP16_SMALLEST, Precision, half_spacing, partial_sums
from fuzz_truth import INFINITE, Entries, Operands, dense, per_result
from fuzz_values import Whole

_FEWEST = 8
"""Tokens of a group. With fewer of them torch may be right by luck."""
_ROUNDINGS = 2
"""Of 1: of a probability and of the sums that it is formed from. Torch may have fewer. At 1 - p of 1e-6 they are an
eighth of it."""


@dataclass(frozen=True)
class Groups:
    """``tokens``: of each group ``[N]``, among those that ``counts``; ``torchs``: results of torch's path; ``floor``:
    of a result's name and its truth, how far roundings may move it though torch has none."""

    tokens: dict[str, Tensor]
    counts: Tensor
    entries: Entries | None
    torchs: dict[str, Tensor]
    floor: Callable[[str, Tensor], Tensor]

    def errors(
        self, base: str, found: Tensor, truth: Tensor, bound: Tensor
    ) -> Iterator[tuple[str, float, float, float, float]]:
        """Of each group that can be judged: its name, the error, what it may be, torch's, and the truth's norm.
        Tokens that may overflow, whose ``bound`` is infinite, cannot."""
        its = self.torchs[base].double().reshape(truth.shape)
        for group, tokens in self.tokens.items():
            rows = ((truth.abs() < INFINITE) & bound.isfinite()).reshape(len(truth), -1).all(1)
            if base not in ("dweight", "dbias"):
                rows &= per_result(base, tokens, self.entries)
            elif (self.counts & ~tokens).any():
                continue  # Sums over all tokens, where the others' part hides that of the sure ones.
            parts = found - truth, its - truth, self.floor(base, truth), truth
            error, other, floor, size = (part[rows].norm().item() for part in parts)
            if tokens.sum() >= _FEWEST and math.isfinite(other):
                yield group, error, 2 * other + floor, other, size


def _tokens(c: Configuration, miss: Tensor, counts: Tensor) -> dict[str, Tensor]:
    sure = counts & (miss > c.miss / 3) & (miss < 3 * c.miss)
    return {"sure": sure, "other": counts & ~sure & (miss > 0.1)}


def of_operands(c: Configuration, o: Operands, analysis, truth: dict[str, Tensor]) -> Groups | None:
    """``analysis`` has the tokens' ``miss [N]``, 1 - p of the largest entry, and the magnitudes ``terms [N, V]`` of
    what is summed to the gradient of the logits."""
    if not c.sure or DTYPES[c.computed].itemsize > 2:
        return None
    precision, layer, terms = Precision.of(c), o.layer, analysis.terms
    others = {"dinput": layer.weight, "dweight": layer.x, "dbias": torch.ones(c.N, 1)}
    torchs = dense(c, o, DTYPES[c.computed], torch.float32)
    if o.outside.any():
        # dW is NaN.
        torchs = {base: value for base, value in torchs.items() if base not in ("dweight", "dbias")}

    def floor(base: str, exact: Tensor) -> Tensor:
        if base == "dtoken_weight":
            return half_spacing(getattr(torch, c.weight_dtype)) * exact.abs() + _ROUNDINGS * precision.u
        if base not in others:
            return precision.u * (exact.abs() + _ROUNDINGS)
        summed = (terms if base == "dinput" else terms.t()) @ others[base].double().abs()
        moved = precision.delivered * exact.abs() + _ROUNDINGS * precision.u * summed.view_as(exact)
        if precision.any_fp16:
            moved += FP16_SMALLEST
        if base == "dinput" and c.ranks > 1:
            moved += c.ranks * precision.low * partial_sums(c, layer, truth["G"])
        return moved

    counts = ~(o.quiet | o.outside)
    return Groups(_tokens(c, analysis.miss, counts), counts, o.entries, torchs, floor)


def of_logits(c: Configuration, whole: Whole) -> Groups | None:
    """Of ``vocab_parallel_cross_entropy``, whose results are taken as ``[N, 1]`` and ``[N, V]``."""
    if not c.sure or DTYPES[c.dtype].itemsize > 2 or c.label_smoothing:
        return None
    torchs = dense_of_logits(c, whole, torch.float32)
    torchs["dinput"] = torchs["dinput"].to(DTYPES[c.dtype])
    precision = Precision.of(c)

    def floor(base: str, exact: Tensor) -> Tensor:
        moved = precision.u * (exact.abs() + _ROUNDINGS)
        if base == "dinput":
            upstream = whole.upstream["loss"].double().abs().reshape(c.N, 1)
            moved = precision.low * exact.abs() + _ROUNDINGS * precision.u * upstream
        return moved + (FP16_SMALLEST if base == "dinput" and precision.any_fp16 else 0.0)

    log_p = torch.log_softmax(whole.logits.reshape(c.N, c.V).double(), 1)
    counts = torch.ones(c.N, dtype=torch.bool)
    return Groups(_tokens(c, -log_p.amax(1).expm1(), counts), counts, None, torchs, floor)
