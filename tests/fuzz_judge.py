"""Whether a configuration's results are what they should be.

Each token and each row of a gradient is judged on its own, so that one wrong row among many shows. Its error may be a
few roundings of the terms that are summed (:mod:`fuzz_bounds`), in fp32 plus twice the error of torch's path. In low
precision that would be too lenient, as it rounds the logits.

Roundings of tokens that are sure of an entry are as large as those of others, and their gradients as small as 1 - p. So
tokens that are as sure as each other are judged as a group, too, and tokens that are not sure as another one: in low
precision the norm of a group's error is at most twice that of torch's path, whose logits are rounded, plus the rounding
of what is delivered and a few roundings of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cases import DTYPES
from fuzz_bounds import FP16_SMALLEST, Analysis, DivergenceAnalysis, Logits, Precision, half_spacing, partial_sums
from fuzz_draw import Configuration
from fuzz_run import Wrong, assemble
from fuzz_truth import dense
from fuzz_values import INFINITE, Operands, Whole, make, operands, per_result
from parallel_lce.core.partials import accumulation_dtype

_GRADIENTS = ("dinput", "dweight", "dbias", "dtoken_weight")
_OF_IDS = ("argmax", "top_logits", "top_ids")
_FEWEST = 8
"""Tokens of a group. With fewer of them torch may be right by luck."""
_ROUNDINGS = 2
"""Of 1: of a probability and of the sums that it is formed from. Torch may have fewer. At 1 - p of 1e-6 they are an
eighth of it."""


@dataclass(frozen=True)
class Verdict:
    """Of the worst row of a result: its error, what it may be, and the yardstick's."""

    name: str
    row: int
    error: float
    allowed: float
    yardstick: float
    truth: float

    @property
    def ratio(self) -> float:
        return self.error / self.allowed if self.allowed else (torch.inf if self.error else 0.0)

    @property
    def good(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        return (
            f"{self.name} row {self.row}: error {self.error:.3g}, allowed {self.allowed:.3g}, "
            f"yardstick's {self.yardstick:.3g}, norm {self.truth:.3g}"
        )


def judge(c: Configuration, parts: list[dict[str, Tensor]]) -> list[Verdict]:
    """The verdict on each result of the ranks; :class:`Wrong` where they disagree or have another form."""
    found, whole = assemble(c, parts), make(c)
    for name, value in found.items():
        _check_form(c, whole, name, value)
    found.pop("vocab_size", None)
    if c.counted == "wrong":
        _check_nothing(found, whole)
        return []
    o = operands(c, whole)
    truth = dense(c, o, torch.float64, torch.float64)
    analysis = (DivergenceAnalysis if c.kind == "divergence" else Analysis)(c, o, truth)
    bounds = analysis.bounds()
    yardstick = dense(c, o, torch.float32, torch.float32) if c.computed == "fp32" else {}
    if c.reduction == "mean" and c.kind == "loss" and analysis.nothing_counts:
        # Documented; to the reference a weight matters even then.
        truth["dtoken_weight"] = torch.zeros(c.N)
    verdicts = _of_ids(c, o, found, analysis.logits)
    for name, value in found.items():
        base = name.removesuffix(" again")
        summed = base in ("dweight", "dbias")
        if base in _OF_IDS or (summed and o.outside.any()):
            continue
        exact, yard = truth[base], yardstick.get(base)
        found[name] = value = value.double().reshape(exact.shape)
        if not summed and not (base == "loss" and c.reduction != "none"):
            # What is not a matter of precision.
            for tokens, is_right in ((o.outside, torch.isnan), (o.quiet, lambda value: value == 0)):
                rows = per_result(base, tokens, o.entries)
                if rows.any():
                    _require(is_right(value[rows]).all(), f"{name} of a token that does not count or has no loss")
                    value, exact = (v.index_fill(0, rows.nonzero()[:, 0], 0.0) for v in (value, exact))
                    yard = None if yard is None else yard.index_fill(0, rows.nonzero()[:, 0], 0.0)
        verdicts.append(_worst(name, value, exact, bounds[base], yard))
    return verdicts + _of_groups(c, o, analysis, found, truth, bounds)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise Wrong(message)


def _check_form(c: Configuration, whole: Whole, name: str, value: Tensor) -> None:
    """Whether a result that is no gradient has its dtype and shape."""
    if name == "vocab_size":
        _require(value.item() == c.V and value.dtype == torch.int64 and value.dim() == 0, f"vocab_size is {value}")
    elif name.removesuffix(" again") not in _GRADIENTS:
        expected = torch.int64 if name in ("argmax", "top_ids") else accumulation_dtype(DTYPES[c.computed])
        _require(value.dtype == expected, f"{name} is {value.dtype}")
        shape = c.shape
        if name == "loss" and c.reduction != "none":
            shape = ()
        elif name == "loss" and c.kind == "logits" and c.label_smoothing:
            shape = (c.ranks, *shape)
        elif name in ("selected_log_prob", "log_probs"):
            shape = whole.ids.shape
        elif name in ("top_logits", "top_ids"):
            shape = (*shape, c.top_k)
        _require(tuple(value.shape) == tuple(shape), f"{name} is {list(value.shape)}")


def _check_nothing(found: dict[str, Tensor], whole: Whole) -> None:
    """Whether no result is a number, as the count of tokens is wrong."""
    # Of results without an element, such as the log-probabilities of no selected entry, nothing flows back.
    sources = [name for name in whole.upstream if found[name].numel()]
    for name, value in found.items():
        nothing = value.isnan() if value.is_floating_point() else value == -1
        if name.removesuffix(" again") not in _GRADIENTS:
            _require(nothing.all(), f"{name} is a number, but the count of tokens is wrong")
        elif min(whole.counted, int(whole.mask.sum()), len(sources)) and value.numel():
            _require(nothing.any(), f"{name} has no NaN, but the count of tokens is wrong")


def _of_ids(c: Configuration, o: Operands, found: dict[str, Tensor], logits: Logits) -> list[Verdict]:
    """On the largest logits, and on the logits of the ids that are said to be those."""
    verdicts, counts = [], ~o.quiet
    z, error = logits.z[counts], logits.error[counts]
    widths = {"argmax": 1, "top_logits": c.top_k, "top_ids": c.top_k}
    rows = {name: found[name].reshape(c.N, width) for name, width in widths.items() if name in found}
    for name, value in rows.items():
        nothing = 0 if value.is_floating_point() else -1
        _require((value[o.quiet] == nothing).all(), f"{name} of a token that does not count")
        rows[name] = value = value[counts]
        inside = value.is_floating_point() or ((value >= 0) & (value < c.V)).all()
        _require(inside, f"{name} is outside the vocabulary")
    if "argmax" in rows:
        chosen = z.gather(1, rows["argmax"])[:, 0]
        verdicts.append(_worst("argmax", chosen, z.amax(1), 2 * error.amax(1)))
    if "top_ids" in rows:
        top, ids = rows["top_logits"], rows["top_ids"]
        _require((ids.sort(1).values.diff(dim=1) > 0).all(), "top_ids has an id twice")
        ordered = (top.diff(dim=1) < 0) | ((top[:, 1:] == top[:, :-1]) & (ids.diff(dim=1) > 0))
        _require(ordered.all(), "top_logits do not fall, or top_ids of equal ones do not rise")
        largest = z.topk(c.top_k, 1).values, error.amax(1, keepdim=True).expand(top.shape)
        of_ids = z.gather(1, ids), error.gather(1, ids)
        for name, (exact, allowed) in {"top_logits": largest, "top_ids": of_ids}.items():
            verdicts.append(_worst(name, *(v.double().reshape(-1) for v in (top, exact, allowed))))
    return verdicts


def _of_groups(
    c: Configuration,
    o: Operands,
    analysis: Analysis | DivergenceAnalysis,
    found: dict[str, Tensor],
    truth: dict[str, Tensor],
    bounds: dict[str, Tensor],
) -> list[Verdict]:
    """On tokens that are as sure as each other of an entry, and on those that are not sure."""
    if not c.sure or DTYPES[c.computed].itemsize > 2 or (c.kind == "logits" and c.label_smoothing):
        return []
    torchs, floor = dense(c, o, DTYPES[c.computed], torch.float32), _floor(c, o, analysis, truth)
    counts, miss = ~(o.quiet | o.outside), analysis.miss
    sure = counts & (miss > c.miss / 3) & (miss < 3 * c.miss)
    groups = {"sure": sure, "other": counts & ~sure & (miss > 0.1)}
    verdicts = []
    for name, value in found.items():
        base = name.removesuffix(" again")
        summed = base in ("dweight", "dbias")
        if (
            base in _OF_IDS
            or base not in torchs
            or not truth[base].numel()
            or not truth[base].dim()
            or (summed and o.outside.any())
        ):
            continue
        parts = value - truth[base], torchs[base].double() - truth[base], floor(base), truth[base]
        # What may overflow is not judged.
        judged = (truth[base].abs() < INFINITE) & bounds[base].isfinite()
        judged = judged.reshape(len(judged), -1).all(1)
        for group, tokens in groups.items():
            if tokens.sum() < _FEWEST or (summed and (counts & ~tokens).any()):
                continue  # The others' part of a sum over all tokens hides that of the sure ones.
            rows = judged if summed else judged & per_result(base, tokens, o.entries)
            error, other, least, size = (part[rows].norm().item() for part in parts)
            if math.isfinite(other):
                verdicts.append(Verdict(f"{name} of {group} tokens", -1, error, 2 * other + least, other, size))
    return verdicts


def _floor(
    c: Configuration, o: Operands, analysis: Analysis | DivergenceAnalysis, truth: dict[str, Tensor]
) -> Callable[[str], Tensor]:
    """Of a result's name, how far roundings may move it though torch has none."""
    precision, layer, terms = Precision.of(c), o.layer, analysis.terms
    others = {"dinput": layer.weight, "dweight": layer.x, "dbias": torch.ones(c.N, 1)}

    def floor(base: str) -> Tensor:
        exact = truth[base].abs()
        if base == "dtoken_weight":
            return half_spacing(getattr(torch, c.weight_dtype)) * exact + _ROUNDINGS * precision.u
        if base not in others:
            return precision.u * (exact + _ROUNDINGS)
        summed = (terms if base == "dinput" else terms.t()) @ others[base].double().abs()
        moved = precision.delivered * exact + _ROUNDINGS * precision.u * summed.view_as(exact)
        if base == "dinput" and c.ranks > 1 and c.kind != "logits":
            moved += c.ranks * precision.low * partial_sums(c, layer, truth["G"])
        return moved + (FP16_SMALLEST if precision.any_fp16 else 0.0)

    return floor


def _rows(value: Tensor) -> Tensor:
    """Norms of the rows of a matrix, magnitudes of the elements of anything else."""
    return value.norm(dim=1) if value.dim() == 2 else value.abs().reshape(-1)


def _worst(name: str, found: Tensor, truth: Tensor, bound: Tensor, yardstick: Tensor | None = None) -> Verdict:
    if truth.numel() == 0:
        return Verdict(name, 0, 0.0, 0.0, 0.0, 0.0)
    infinite = truth.abs() > INFINITE
    wrong = infinite & (found != truth.sign() * torch.inf)
    # What may overflow is not judged, and neither is its yardstick.
    aside = infinite | bound.isinf()
    difference = (found - truth).masked_fill(aside, 0.0).masked_fill(wrong, torch.inf)
    error = _rows(difference.nan_to_num(torch.inf, torch.inf, torch.inf))
    its = torch.zeros_like(error)
    if yardstick is not None:
        its = _rows((yardstick.double() - truth).masked_fill(aside, 0.0).nan_to_num(0.0, 0.0, 0.0))
    allowed = 2 * its + _rows(bound.masked_fill(aside, 0.0))
    row = int(torch.where(error == 0, 0.0, error / allowed).argmax())
    norm = _rows(truth.masked_fill(infinite, 0.0))
    return Verdict(name, row, *(v[row].item() for v in (error, allowed, its, norm)))
