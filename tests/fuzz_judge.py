"""What a configuration's results should be, in float64, and how far from it they may lie.

Each token and each row of a gradient is judged on its own, so that one wrong row among many shows. Its error
may be twice that of a yardstick, plus a few roundings of the terms that are summed (:mod:`fuzz_bounds`).
The yardstick is torch's path in the same dtype. In low precision that would be too lenient, as it rounds the
logits; there it is exact but for exponentials and gradients of logits that are rounded to the inputs' dtype, which
is how the package is described.

Roundings of tokens that are sure of an entry are as large as those of others, and their gradients as small as 1 - p.
So tokens that are as sure as each other are judged as a group, too, and tokens that are not sure as another one: in low
precision the norm of a group's error is at most twice that of torch's path, whose logits are rounded, plus the rounding
of what is delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fuzz_bounds
import fuzz_groups
from cases import DTYPES
from fuzz_configuration import Configuration
from fuzz_distributions import DivergenceAnalysis, SelectedAnalysis
from fuzz_logits import Logits
from fuzz_run import Wrong, assemble
from fuzz_truth import INFINITE, Operands, dense, kept, operands, per_result
from fuzz_values import Whole, make
from parallel_lce.core.partials import accumulation_dtype

_ANALYSES = {"selected": SelectedAnalysis, "divergence": DivergenceAnalysis}
_GRADIENTS = ("dinput", "dweight", "dbias", "dtoken_weight")


@dataclass(frozen=True)
class Verdict:
    """Of the worst row of a result: its error, what it may be, and the yardsticks'."""

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
    if c.kind == "logits":
        truth, bounds = fuzz_bounds.of_logits(c, whole)
        verdicts = [_worst(c, name, value, truth[name], bounds[name], []) for name, value in found.items()]
        if not c.N:
            return verdicts
        flat = [{name: value.reshape(c.N, -1) for name, value in each.items()} for each in (found, truth, bounds)]
        return verdicts + _of_groups(fuzz_groups.of_logits(c, whole), *flat)
    o = operands(c, whole)
    for name, value in found.items():
        _check_form(c, whole, name, value)
    found.pop("vocab_size", None)
    if c.counted == "wrong":
        # Of results without an element, such as the log-probabilities of no selected entry, nothing flows back.
        sources = [name for name in whole.upstream if found[name].numel()]
        for name, value in found.items():
            nothing = _is_nothing(value)
            if name.removesuffix(" again") not in _GRADIENTS:
                _require(nothing.all(), f"{name} is a number, but the count of tokens is wrong")
            elif min(whole.counted, int(whole.mask.sum()), len(sources)) and value.numel():
                _require(nothing.any(), f"{name} has no NaN, but the count of tokens is wrong")
        return []
    dtype = DTYPES[c.computed]
    truth = dense(c, o, torch.float64, torch.float64)
    analysis = _ANALYSES.get(c.kind, fuzz_bounds.Analysis)(c, o, truth)
    bounds = analysis.bounds()
    yardsticks = []
    if dtype == torch.float32:
        yardsticks = [dense(c, o, dtype, dtype)]
    elif dtype != torch.float64 and (moved := analysis.moved()) is not None:
        yardsticks = [kept(c, o, moved)]
    if c.reduction == "mean" and c.kind == "loss" and analysis.nothing_counts:
        # Documented; to the reference a weight matters even then.
        truth["dtoken_weight"] = torch.zeros(c.N)
    verdicts = []
    for name, value in found.items():
        base = name.removesuffix(" again")
        if base in ("dweight", "dbias") and o.outside.any():
            continue
        if base in ("argmax", "top_logits", "top_ids"):
            continue
        yard = [y[base] for y in yardsticks if base in y]
        value, exact = value.reshape(truth[base].shape), truth[base]
        for tokens, is_right in _settled(c, o, base):
            rows = per_result(base, tokens, o.entries)
            _require(is_right(value[rows]).all(), f"{name} of a token that does not count or has no loss")
            value, exact = (v.double().index_fill(0, rows.nonzero()[:, 0], 0.0) for v in (value, exact))
            yard = [torch.where(rows.view(-1, *[1] * (y.dim() - 1)), 0.0, y) for y in yard]
        verdicts.append(_worst(c, name, value, exact, bounds[base], yard))
    verdicts += _of_ids(c, o, found, analysis.logits)
    return verdicts + _of_groups(fuzz_groups.of_operands(c, o, analysis, truth), found, truth, bounds)


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
        elif name in ("selected_log_prob", "log_probs"):
            shape = whole.ids.shape
        elif name in ("top_logits", "top_ids"):
            shape = (*shape, c.top_k)
        _require(tuple(value.shape) == tuple(shape), f"{name} is {list(value.shape)}")


def _is_nothing(value: Tensor) -> Tensor:
    return value.isnan() if value.is_floating_point() else value == -1


def _settled(c: Configuration, o: Operands, base: str) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Tokens whose rows of a result are not a matter of precision, and what these must be."""
    if base in ("dweight", "dbias") or (base == "loss" and c.reduction != "none"):
        return []
    return [(o.outside, torch.isnan), (o.quiet, lambda value: value == 0)]


def _of_ids(c: Configuration, o: Operands, found: dict[str, Tensor], logits: Logits) -> list[Verdict]:
    """On the largest logits, and on the logits of the ids that are said to be those."""
    verdicts, counts = [], ~o.quiet
    z, error = logits.z[counts], logits.error[counts]
    widths = {"argmax": 1, "top_logits": c.top_k, "top_ids": c.top_k}
    rows = {name: found[name].reshape(c.N, width) for name, width in widths.items() if name in found}
    for name, value in rows.items():
        nothing = 0 if value.is_floating_point() else -1
        _require((value[o.quiet] == nothing).all(), f"{name} of a token that does not count")
    rows = {name: value[counts] for name, value in rows.items()}
    for name in ("argmax", "top_ids"):
        if name in rows:
            _require(((rows[name] >= 0) & (rows[name] < c.V)).all(), f"{name} is outside the vocabulary")
    if "argmax" in rows:
        chosen = z.gather(1, rows["argmax"])[:, 0]
        verdicts.append(_worst(c, "argmax", chosen, z.amax(1), 2 * error.amax(1), []))
    if "top_ids" in rows:
        top, ids = rows["top_logits"], rows["top_ids"]
        _require((ids.sort(1).values.diff(dim=1) > 0).all(), "top_ids has an id twice")
        ordered = (top.diff(dim=1) < 0) | ((top[:, 1:] == top[:, :-1]) & (ids.diff(dim=1) > 0))
        _require(ordered.all(), "top_logits do not fall, or top_ids of equal ones do not rise")
        largest = z.topk(c.top_k, 1).values
        bound = error.amax(1, keepdim=True).expand(largest.shape)
        for name, truth, allowed in (
            ("top_logits", largest, bound),
            ("top_ids", z.gather(1, ids), error.gather(1, ids)),
        ):
            verdicts.append(_worst(c, name, *(v.reshape(-1) for v in (top, truth, allowed)), []))
    return verdicts


def _of_groups(
    groups: fuzz_groups.Groups | None, found: dict[str, Tensor], truth: dict[str, Tensor], bounds: dict[str, Tensor]
) -> list[Verdict]:
    """On tokens that are as sure as each other of an entry, and on those that are not sure."""
    verdicts = []
    for name, value in found.items() if groups is not None else ():
        exact = truth[base] if (base := name.removesuffix(" again")) in truth else torch.zeros(())
        if base in groups.torchs and exact.dim() and exact.numel() and value.is_floating_point():
            for group, *numbers in groups.errors(base, value.double().reshape(exact.shape), exact, bounds[base]):
                verdicts.append(Verdict(f"{name} of {group} tokens", -1, *numbers))
    return verdicts


def _require(condition: object, message: str) -> None:
    if not condition:
        raise Wrong(message)


def _rows(value: Tensor) -> Tensor:
    """Norms of the rows of a matrix, magnitudes of the elements of anything else."""
    return value.norm(dim=1) if value.dim() == 2 else value.abs().reshape(-1)


def _worst(
    c: Configuration, name: str, found: Tensor, truth: Tensor, bound: Tensor, yardsticks: list[Tensor]
) -> Verdict:
    _require(found.shape == truth.shape, f"{name} is {list(found.shape)}, not {list(truth.shape)}")
    found = found.double()
    if truth.numel() == 0:
        return Verdict(name, 0, 0.0, 0.0, 0.0, 0.0)
    infinite = truth.abs() > INFINITE
    wrong = infinite & (found != truth.sign() * torch.inf)
    difference = torch.where(infinite, 0.0, found - truth).masked_fill(wrong, torch.inf)
    bound = torch.where(infinite, 0.0, bound)
    # What may overflow is not judged, and neither are its yardsticks.
    beyond = bound.isinf()
    difference = difference.masked_fill(beyond, 0.0).nan_to_num(torch.inf, torch.inf, torch.inf)
    error = _rows(difference)
    its = torch.zeros_like(error)
    for yardstick in yardsticks:
        other = torch.where(infinite | beyond, 0.0, yardstick.double() - truth).nan_to_num(0.0, 0.0, 0.0)
        its = torch.maximum(its, _rows(other))
    allowed = 2 * its + _rows(bound.masked_fill(beyond, 0.0))
    ratio = torch.where(error == 0, 0.0, error / allowed)
    row = int(ratio.argmax())
    norm = _rows(torch.where(infinite, 0.0, truth))[row]
    return Verdict(name, row, *(v.item() for v in (error[row], allowed[row], its[row], norm)))
