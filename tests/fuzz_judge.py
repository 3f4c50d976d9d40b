"""What a configuration's results should be, in float64, and how far from it they may lie.

Each token and each row of a gradient is judged on its own, so that one wrong row among many shows. Its error
may be twice that of a yardstick, plus a few roundings of the terms that are summed (:mod:`fuzz_bounds`).
The yardstick is torch's path in the same dtype. In low precision that would be too lenient, as it rounds the
logits; there it is exact but for exponentials and gradients of logits that are rounded to the inputs' dtype, which
is how the package is described.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

import fuzz_bounds
from cases import DTYPES
from fuzz_draw import Configuration
from fuzz_run import Wrong, assemble, real_rows
from fuzz_values import MASKED, Whole, ignore_index, make
from parallel_lce import reference
from parallel_lce.partials import accumulation_dtype

INFINITE = 1e15
"""Truths beyond this stand for infinity (:data:`fuzz_values.MASKED`)."""


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


@dataclass
class Operands:
    """Flattened: ``x [N, D]``, ``weight [V, D]``, ``bias [V]``, ``target [N]``, ``token_weight [N]``, each exact in
    the computed dtype; ``outside [N]``: tokens whose loss is NaN, here with upstream gradient 0."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    token_weight: Tensor | None
    upstream: dict[str, Tensor]
    masked: Tensor
    outside: Tensor


def operands(c: Configuration, whole: Whole) -> Operands:
    dtype = DTYPES[c.computed]
    target = None if whole.target is None else whole.target.reshape(-1).long()
    outside = torch.zeros(c.N, dtype=torch.bool)
    reduced = c.kind == "loss" and c.reduction != "none"
    upstream = {n: v if reduced else v.reshape(-1) for n, v in whole.upstream.items()}
    if c.kind == "loss":
        outside = ((target < 0) | (target >= c.V)) & (target != ignore_index(c))
        # Any other with a finite loss.
        target = target.masked_fill(outside, int(whole.masked.int().argmin()))
        if not reduced:
            upstream["loss"] = upstream["loss"].masked_fill(outside, 0.0)
    return Operands(
        whole.x.reshape(c.N, c.D).to(dtype),
        whole.weight.to(dtype),
        None if whole.bias is None else whole.bias.to(dtype),
        target,
        None if whole.token_weight is None else whole.token_weight.reshape(-1),
        upstream,
        whole.masked,
        outside,
    )


def dense(c: Configuration, o: Operands, dtype: torch.dtype, wide: torch.dtype) -> dict[str, Tensor]:
    """Every result and gradient with all logits, projected in ``dtype``, the rest in ``wide``; ``G [N, V]``: the
    gradient of the projection."""
    leaves = {"input": o.x.to(dtype), "weight": o.weight.to(dtype)}
    if o.bias is not None:
        lowest = -6e4 if dtype == torch.float16 else MASKED
        leaves["bias"] = o.bias.double().masked_fill(o.masked, lowest).to(dtype)
    leaves = {name: value.detach().requires_grad_() for name, value in leaves.items()}
    if o.token_weight is not None:
        leaves["token_weight"] = o.token_weight.to(wide).detach().requires_grad_()
    product = linear(leaves["input"], leaves["weight"], leaves.get("bias"))
    z = product.to(wide) * c.scale
    if c.softcap is not None:
        z = c.softcap * torch.tanh(z / c.softcap)
    if c.kind == "loss":
        found = {
            "loss": reference.loss(
                z,
                o.target,
                reduction=c.reduction,
                ignore_index=ignore_index(c),
                label_smoothing=c.label_smoothing,
                z_loss=c.z_loss,
                token_weight=leaves.get("token_weight"),
            )
        }
    else:
        found = reference.statistics(z, o.target)
    names = [*o.upstream]
    gradients = torch.autograd.grad(
        [found[n] for n in names],
        [*leaves.values(), product],
        [o.upstream[n].to(wide) for n in names],
        allow_unused=True,
    )
    results = {name: value.detach() for name, value in found.items()}
    for name, leaf, gradient in zip([*leaves, None], [*leaves.values(), product], gradients):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        results["G" if name is None else f"d{name}"] = gradient
    return results


def kept(c: Configuration, o: Operands, truth: dict[str, Tensor], b: fuzz_bounds.Analysis) -> dict[str, Tensor]:
    """Gradients from G whose exponentials and whose entries are rounded once."""
    dtype = DTYPES[c.computed]
    exact = torch.exp(b.z - b.top)
    factor = 2.0**15 if dtype == torch.float16 else 1.0
    stored = (exact * factor).to(dtype).double() / factor
    moved = truth["G"] + (stored - exact) / exact.sum(1, keepdim=True) * (b.alpha * c.scale)[:, None] * b.chain
    largest = moved.abs().amax().clamp(min=1e-300) if moved.numel() else torch.ones(())
    power = 2.0 ** (10 - torch.frexp(largest).exponent.double()) if dtype == torch.float16 else torch.ones(())
    rounded = (moved * power).to(dtype).double() / power
    return {"dinput": rounded @ o.weight.double(), "dweight": rounded.t() @ o.x.double(), "dbias": rounded.sum(0)}


def judge(c: Configuration, parts: list[dict[str, Tensor]]) -> list[Verdict]:
    """The verdict on each result of the ranks; :class:`Wrong` where they disagree or have another form."""
    found, whole = assemble(c, parts), make(c)
    if c.kind == "logits":
        truth, bounds = fuzz_bounds.of_logits(c, whole)
        return [_worst(c, name, value, truth[name], bounds[name], []) for name, value in found.items()]
    o = operands(c, whole)
    dtype = DTYPES[c.computed]
    wide = accumulation_dtype(dtype)
    truth = dense(c, o, torch.float64, torch.float64)
    analysis = fuzz_bounds.Analysis(c, o, truth)
    bounds = analysis.bounds(_partial_sums(c, o, truth["G"]))
    yardsticks = []
    if dtype == torch.float32:
        yardsticks = [dense(c, o, dtype, dtype)]
    elif dtype != torch.float64:
        yardsticks = [kept(c, o, truth, analysis)]
    if c.reduction == "mean" and c.kind == "loss" and analysis.nothing_counts:
        # Documented; to the reference a weight matters even then.
        truth["dtoken_weight"] = torch.zeros(c.N)
    verdicts = []
    for name, value in found.items():
        base = name.removesuffix(" again")
        if base == "vocab_size":
            _require(value.item() == c.V and value.dtype == torch.int64 and value.dim() == 0, f"vocab_size is {value}")
            continue
        if base in ("dweight", "dbias") and o.outside.any():
            continue
        per_token = base not in ("dinput", "dweight", "dbias") and (base != "loss" or c.reduction == "none")
        if base == "loss" or not base.startswith("d"):
            expected = torch.int64 if base == "argmax" else wide
            _require(value.dtype == expected, f"{name} is {value.dtype}")
            shape = c.shape if per_token else ()
            _require(tuple(value.shape) == tuple(shape), f"{name} is {list(value.shape)}")
        if base == "argmax":
            chosen = value.reshape(-1)
            _require(((chosen >= 0) & (chosen < c.V)).all(), "argmax is outside the vocabulary")
            value, base = analysis.z.gather(1, chosen[:, None])[:, 0], "max_logit"
            verdicts.append(_worst(c, name, value, truth[base], 2 * bounds[base], []))
            continue
        yard = [y[base] for y in yardsticks if base in y]
        value, exact = value.reshape(truth[base].shape), truth[base]
        if base in ("loss", "dinput", "dtoken_weight") and o.outside.any():
            bad = value[o.outside].isnan()
            _require(bad.all(), f"{name} of a token with a target outside is no NaN")
            value, exact = (v.double().index_fill(0, o.outside.nonzero()[:, 0], 0.0) for v in (value, exact))
            yard = [torch.where(o.outside.view(-1, *[1] * (y.dim() - 1)), 0.0, y) for y in yard]
        verdicts.append(_worst(c, name, value, exact, bounds[base], yard))
    return verdicts


def _require(condition: object, message: str) -> None:
    if not condition:
        raise Wrong(message)


def _partial_sums(c: Configuration, o: Operands, G: Tensor) -> Tensor:
    """Sum over the ranks of the magnitude of their part of dX ``[N, D]``."""
    total = torch.zeros(c.N, c.D, dtype=torch.float64)
    for rank, (start, _) in enumerate(c.shards):
        mine = slice(start, start + real_rows(c, rank))
        total += (G[:, mine] @ o.weight[mine].double()).abs()
    return total


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
