"""Whether a configuration's results are what they should be.

Each token and each row of a gradient is judged on its own, so that one wrong row among many shows. Its error may be as
far as roundings move it (:mod:`fuzz.truth`), in fp32 plus twice the error of torch's path. In low precision that would
be too lenient, as it rounds the logits.

A confident token has the usual rounding errors but gradients of size 1 - p; where logits are nearly equal, a gradient
may be as small as their differences. So tokens that are as sure as each other are judged as a group, too, tokens that
are not sure as another one, and those of nearly equal logits as a third: in low precision the norm of a group's error
is at most twice that of torch's path, whose logits are rounded, plus the rounding of what is delivered and a few
roundings of 1."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cases import DTYPES
from fuzz.draw import GROUPED, Configuration
from fuzz.run import assemble, require
from fuzz.truth import Rounding, bounds, dense, of_product
from fuzz.values import INFINITE, OF_TARGET, Operands, Whole, make, operands, per_result
from parallel_lce.core.partials import accumulation_dtype

_SUMMED = ("dweight", "dbias")
"""Gradients that are sums over all tokens."""
_OF_IDS = ("argmax", "top_logits", "top_ids")
_FEWEST = 8
"""Tokens of a group. With fewer of them torch may be right by luck."""
_FLAT = 1.0
"""Nats between the largest and the smallest logit of a token that is flat."""
_ROUNDINGS = 2
"""Allowed roundings of a probability, in units of 1. Torch may have fewer. At a 1 - p of 1e-6 they are an eighth."""


@dataclass(frozen=True)
class Verdict:
    """Of the worst row of a result: its error, what it may be, and the yardstick's."""

    name: str
    row: int
    error: float
    allowed: float
    yardstick: float

    @property
    def good(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        its = f"allowed {self.allowed:.3g}, yardstick's {self.yardstick:.3g}"
        return f"{self.name} row {self.row}: error {self.error:.3g}, {its}"


def judge(c: Configuration, parts: list[dict[str, Tensor]]) -> list[Verdict]:
    """The verdict on each result of the ranks; AssertionError where they disagree or have another form."""
    found, whole = assemble(c, parts), make(c)
    coded = found.pop("coded", False)
    for name, value in found.items():
        _check_form(c, whole, name, value)
    found.pop("vocab_size", None)
    if c.counted == "wrong":
        _check_nothing(c, found, whole)
        return []
    if c.edge == "nan":
        _check_broken(found)
        return []
    o = operands(c, whole)
    truth = dense(c, o, torch.float64, torch.float64)
    truth["coded"] *= coded
    allowed = bounds(c, o, truth)
    yardstick = dense(c, o, torch.float32, torch.float32) if c.computed == "fp32" else truth
    verdicts = _of_ids(c, o, found, truth)
    for name, value in found.items():
        base = name.removesuffix(" again")
        if base in _OF_IDS:
            continue
        exact, yard = truth[base], yardstick[base]
        found[name] = value = value.double().reshape(exact.shape)
        if o.quiet.any() and base not in _SUMMED and (base != "loss" or c.reduction == "none"):
            quiet = per_result(base, o.quiet, o.entries)
            require((value[quiet] == 0).all(), f"{name} of a token that does not count")
            value, exact, yard = (v.index_fill(0, quiet.nonzero()[:, 0], 0.0) for v in (value, exact, yard))
        if base in OF_TARGET:
            require(value[o.nowhere].isnan().all(), f"{name} of a target outside")
            value = value.masked_fill(o.nowhere, 0.0)
        verdicts.append(_worst(name, value, exact, allowed[base], yard))
    return verdicts + _of_groups(c, o, found, truth, allowed)


def _check_form(c: Configuration, whole: Whole, name: str, value: Tensor) -> None:
    if name.startswith("d"):
        return
    shape, dtype = c.shape, accumulation_dtype(DTYPES[c.computed])
    if name == "vocab_size":
        require(value.item() == c.V, f"vocab_size is {value}")
        shape, dtype = (), torch.int64
    elif name == "loss" and c.reduction != "none":
        shape = ()
    elif name == "loss" and c.kind == "logits" and c.label_smoothing:
        shape = (c.ranks, *shape)
    elif name in ("selected_log_prob", "log_probs"):
        shape = whole.tensors["selected"].shape
    elif name in ("top_logits", "top_ids"):
        shape = (*shape, c.top_k)
    dtype = torch.int64 if name in ("argmax", "top_ids") else dtype
    require((*value.shape,) == (*shape,) and value.dtype == dtype, f"{name} is {value.dtype} {list(value.shape)}")


def _check_nothing(c: Configuration, found: dict[str, Tensor], whole: Whole) -> None:
    """Whether no result is a number, as the count of tokens is wrong."""
    # Of results without an element, such as the log-probabilities of no selected entry, nothing flows back.
    flows = whole.counted and whole.counting and any(found[name].numel() for name in whole.upstream)
    # Nor to a token whose weight is 0.
    flows = flows and c.token_weight not in ("zero", "zeros", "mask")
    for name, value in found.items():
        nothing = value.isnan() if value.is_floating_point() else value == -1
        if not name.startswith("d"):
            require(nothing.all(), f"{name} is a number, but the count of tokens is wrong")
        elif flows and value.numel():
            require(nothing.any(), f"{name} has no NaN, but the count of tokens is wrong")


def _check_broken(found: dict[str, Tensor]) -> None:
    """Whether nothing is said of tokens that have a logit of NaN."""
    for name, value in found.items():
        if value.dtype == torch.int64:
            require((value == -1).all(), f"{name} of a token with a NaN")
        elif name != "target_logit" and not name.startswith("d"):
            require(value.isnan().all(), f"{name} of a token with a NaN is a number")


def _of_ids(c: Configuration, o: Operands, found: dict[str, Tensor], truth: dict[str, Tensor]) -> list[Verdict]:
    """On the largest logits, and on the logits of the ids that are said to be those."""
    counts, verdicts, rows = ~o.quiet, [], {}
    z, error = truth["z"][counts], truth["error"][counts]
    most = error.amax(1, keepdim=True)
    for name in {*_OF_IDS} & {*found}:
        value = found[name].reshape(c.N, 1 if name == "argmax" else c.top_k)
        nothing = 0 if value.is_floating_point() else -1
        require((value[o.quiet] == nothing).all(), f"{name} of a token that does not count")
        rows[name] = value = value[counts]
        inside = value.is_floating_point() or ((value >= 0) & (value < c.V)).all()
        require(inside, f"{name} is outside the vocabulary")
    if "argmax" in rows:
        verdicts.append(_worst("argmax", z.gather(1, rows["argmax"])[:, 0], z.amax(1), 2 * most[:, 0]))
    if "top_ids" in rows:
        top, ids = rows["top_logits"].double(), rows["top_ids"]
        require((ids.sort(1).values.diff(dim=1) > 0).all(), "top_ids has an id twice")
        ordered = (top.diff(dim=1) < 0) | ((top[:, 1:] == top[:, :-1]) & (ids.diff(dim=1) > 0))
        require(ordered.all(), "top_logits do not fall, or top_ids of equal ones do not rise")
        # The K-th largest of some numbers moves no further than one of them does.
        largest = z.topk(c.top_k, 1).values, most.expand(top.shape)
        for name, other in {"top_logits": largest, "top_ids": (z.gather(1, ids), error.gather(1, ids))}.items():
            verdicts.append(_worst(name, *(v.reshape(-1) for v in (top, *other))))
    return verdicts


def _of_groups(
    c: Configuration, o: Operands, found: dict[str, Tensor], truth: dict[str, Tensor], allowed: dict[str, Tensor]
) -> list[Verdict]:
    """On tokens as sure as each other of an entry, on those that are not sure, and on those of nearly equal logits."""
    if DTYPES[c.computed].itemsize > 2 or (c.kind == "logits" and c.label_smoothing) or not truth["log_p"].numel():
        return []
    # Of logits that are not made sure of anything: products over few dimensions are nearly exact, and those with a
    # weight of 0 are exact. Saved exponentials are rounded whatever the logits are.
    if not c.sure and (c.D < 16 or c.V < 48 or c.sharpness == 0):
        return []
    torchs, verdicts = dense(c, o, DTYPES[c.computed], torch.float32), []
    counts, miss = ~o.quiet, -torch.expm1(truth["log_p"].amax(1))
    sure = counts & (miss > c.miss / 3) & (miss < 3 * c.miss)
    groups = {"sure": sure, "other": counts & ~sure & (miss > 0.1)}
    if not c.sure:
        groups = {"flat": counts & (truth["log_p"].amax(1) - truth["log_p"].amin(1) < _FLAT)}
    if c.edge in GROUPED:
        groups = {"all": counts}
    for name, value in found.items():
        base = name.removesuffix(" again")
        if base in _OF_IDS or not truth[base].numel() or not truth[base].dim():
            continue
        exact = truth[base]
        parts = value - exact, torchs[base].double() - exact, _floor(c, o, truth, base)
        # What may overflow is not judged.
        judged = ((exact.abs() < INFINITE) & allowed[base].isfinite()).reshape(len(exact), -1).all(1)
        for group, tokens in groups.items():
            if tokens.sum() < _FEWEST or (base in _SUMMED and (counts & ~tokens).any()):
                continue  # The others' part of a sum over all tokens hides that of the sure ones.
            tokens = tokens & ~o.nowhere if base in OF_TARGET else tokens
            rows = judged if base in _SUMMED else judged & per_result(base, tokens, o.entries)
            error, other, least = (part[rows].norm().item() for part in parts)
            if math.isfinite(other):
                verdicts.append(Verdict(f"{name} of {group} tokens", -1, error, 2 * other + least, other))
    return verdicts


def _floor(c: Configuration, o: Operands, truth: dict[str, Tensor], base: str) -> Tensor:
    """How far roundings may move a result though torch has none."""
    u, exact = Rounding(c).u, truth[base].abs()
    if not base.startswith("d"):
        # A log-probability is the difference of two rounded numbers, which may be as large as a soft-cap.
        return _ROUNDINGS * u * (exact + 1)
    terms, rounded = of_product(c, o, truth, base, "terms")
    return _ROUNDINGS * u * terms + rounded + of_product(c, o, truth, base, "coded")[0]


def _norms(value: Tensor) -> Tensor:
    """Of the rows of a matrix, of the elements of anything else."""
    return value.norm(dim=1) if value.dim() == 2 else value.abs().reshape(-1)


def _worst(name: str, found: Tensor, truth: Tensor, bound: Tensor, yardstick: Tensor | None = None) -> Verdict:
    if truth.numel() == 0:
        return Verdict(name, 0, 0.0, 0.0, 0.0)
    infinite = truth.abs() > INFINITE
    wrong = infinite & (found != truth.sign() * torch.inf)
    # What may overflow is not judged, and neither is its yardstick.
    aside = infinite | bound.isinf()
    difference = (found - truth).masked_fill(aside, 0.0).masked_fill(wrong, torch.inf)
    error = _norms(difference.nan_to_num(torch.inf, torch.inf, torch.inf))
    of_torch = (truth if yardstick is None else yardstick.double()) - truth
    its = _norms(of_torch.masked_fill(aside, 0.0).nan_to_num(0.0, 0.0, 0.0))
    allowed = 2 * its + _norms(bound.masked_fill(aside, 0.0))
    row = int(torch.where(error == 0, 0.0, error / allowed).argmax())
    return Verdict(name, row, *(v[row].item() for v in (error, allowed, its)))
