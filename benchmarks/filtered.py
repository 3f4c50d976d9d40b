"""What gradient_filter gains and costs on one set of inputs: speed, active tiles, and errors of the gradients.

Over P ranks each has V / P entries of the vocabulary, and all have all tokens.
"""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import log2
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from .accuracy import Answers, answers
from .exactness import Inputs, without_nan
from .measure import release
from .passes import calls_of
from .peers import ALL, FORWARD_BACKWARD, GEMM_ONLY, ONE, RANKS, named
from .problem import Problem, Shape
from .results import spread
from .sparsity import by_probability, reordered, tile_maxima
from .team import Team
from .timing import timer

FILTERS = (None, 2**-13, 2**-12, 2**-11, 2**-10)
SAVED, UNSAVED = "saved", "budget 0"
BUDGETS = {SAVED: ALL, UNSAVED: 0}  # logits_budget
NATURAL, BY_PROBABILITY = "natural", "by probability"
ROUNDED_LOGITS, ROUNDED_GRADIENT, EXACT = "bf16 logits", "bf16 gradient of the logits", "exact gradients"
UNROUNDED = ", results not rounded"
ROUNDINGS: dict[str, dict[str, Any]] = {
    ROUNDED_LOGITS: {"logits": torch.bfloat16},
    ROUNDED_GRADIENT: {"dlogits": torch.bfloat16},
}

Errors = dict[str, float]  # {'dX', 'dW': relative error, 'dW rows': the mean over the rows of a row's relative error}


@dataclass(frozen=True)
class Way:
    """One value of gradient_filter with one logits_budget."""

    errors: Errors
    seconds: list[float] = field(default_factory=list)  # of forward + backward, one per round


@dataclass(frozen=True)
class Filtered:
    """One value of gradient_filter in one order of the vocabulary."""

    order: str
    gradient_filter: float | None
    # Share of the tiles, on the rank that has most.
    active: float
    ways: dict[str, Way]  # by the names of BUDGETS
    gemm_seconds: list[float]  # of the three bare products, one per round

    def of_gemm_only(self, way: str) -> tuple[float, float, float]:
        """(median, min, max) over the rounds of the speed relative to the bare products'."""
        return spread([gemm / ours for gemm, ours in zip(self.gemm_seconds, self.ways[way].seconds)])

    def as_dict(self) -> dict:
        content = {"order": self.order, "gradient_filter": self.gradient_filter, "active_tiles": self.active}
        content["gemm_only_seconds"] = self.gemm_seconds
        for name, way in self.ways.items():
            ratio = self.of_gemm_only(name)
            content[name] = {"seconds": way.seconds, "of_gemm_only": ratio, "errors": way.errors}
        return content


@dataclass(frozen=True)
class Case:
    """All that was measured of one snapshot."""

    name: str
    step: int | None  # of the training; None if the file's name has none
    shape: Shape
    ranks: int
    dtype_name: str
    loss: float
    references: dict[str, Errors]
    results: list[Filtered]

    def as_dict(self) -> dict:
        """For JSON."""
        content = {
            "name": self.name,
            "step": self.step,
            **vars(self.shape),
            "tp": self.ranks,
            "dtype": self.dtype_name,
            "loss": self.loss,
            "reference_errors": self.references,
            "results": [each.as_dict() for each in self.results],
        }
        return without_nan(content)


def measure(inputs: Inputs, rounds: int, team: Team) -> Case:
    """Errors first, then the times of all ways, interleaved round by round in changing orders. Every rank has the same
    inputs. Raises ValueError if the vocabulary cannot be shared evenly."""
    entries = len(inputs.weight)
    if entries % team.ranks:
        raise ValueError(f"{inputs.name}: a vocabulary of {entries} entries cannot be shared by {team.ranks} ranks")
    problem, dtype = _problem(inputs, Team(team.device)), inputs.hidden.dtype
    truth = answers(problem, torch.float64)
    references = {EXACT: _errors([gradient.to(dtype) for gradient in _gradients(truth)], truth)}
    for name, rounding in ROUNDINGS.items():
        found = _gradients(answers(problem, torch.float64, **rounding))
        references[name + UNROUNDED] = _errors(found, truth)
        references[name] = _errors([gradient.to(dtype) for gradient in found], truth)
        del found
    identity = torch.arange(entries, device=team.device)
    results = []
    for name, order in ((NATURAL, identity), (BY_PROBABILITY, by_probability(inputs, team.ranks))):
        own = order.chunk(team.ranks)[team.rank]
        errors_of = partial(_errors, truth=truth, order=own, team=team)
        results += _in_order(name, reordered(inputs, order), errors_of, rounds, team)
    step, loss = step_of(inputs.name), truth.loss.item()
    return Case(inputs.name, step, inputs.shape, team.ranks, inputs.dtype_name, loss, references, results)


def _in_order(name: str, inputs: Inputs, errors_of: Callable[..., Errors], rounds: int, team: Team) -> list[Filtered]:
    """A result per value of gradient_filter, of inputs whose vocabulary is in its order."""
    from parallel_lce import linear_cross_entropy

    problem, maxima, gemm_seconds, results = _problem(inputs, team), tile_maxima(inputs, team.ranks), [], []
    setting = ONE if team.alone else RANKS
    bare = calls_of(named(GEMM_ONLY, setting), problem)[FORWARD_BACKWARD]
    readers = [(gemm_seconds, timer(bare, team))]
    for gradient_filter in FILTERS:
        ways = {}
        for memory, budget in BUDGETS.items():
            options = {"gradient_filter": gradient_filter, "logits_budget": budget, "process_group": team.group}
            loss = partial(linear_cross_entropy, **options)
            call = calls_of(named("ours", setting), problem, loss)[FORWARD_BACKWARD]
            ways[memory] = Way(errors_of(call()[1:]))
            readers.append((ways[memory].seconds, timer(call, team)))
        active = 1.0
        if gradient_filter is not None:
            active = (maxima > gradient_filter).double().mean((0, 2)).max().item()
        results.append(Filtered(name, gradient_filter, active, ways, gemm_seconds))
    release(team.device)
    for number in range(rounds):
        gc.collect()
        # What ran before a call changes the GPU's clock. The order is the same on all ranks.
        for seconds, read in Random(number).sample(readers, len(readers)):
            seconds.append(read())
    return results


def _problem(inputs: Inputs, team: Team) -> Problem:
    shard = inputs.weight.chunk(team.ranks)[team.rank]
    return Problem(inputs.shape, team, inputs.hidden, shard, inputs.target)


def _gradients(found: Answers) -> tuple[Tensor, Tensor]:
    assert found.grad_x is not None and found.grad_weight is not None  # as they are if asked for
    return found.grad_x, found.grad_weight


def _errors(found, truth: Answers, order: Tensor | None = None, team: Team | None = None) -> Errors:
    """Of dX and dW. `order`: the ids of the rows of the found dW, this rank's of the `team`; None: `[0, V)`. Rows of dW
    that are 0 have no relative error, and do not count."""
    grad_x, grad_weight = _gradients(truth)
    # Norms of the rows of what is off and of what is true. dX is the same on all ranks, so that its squares' sums over
    # the ranks have the same ratio.
    of_x, of_weight = (
        torch.stack([torch.linalg.vector_norm(t, dim=1) for t in (its - true, true)])
        for its, true in zip(found, (grad_x, grad_weight if order is None else grad_weight[order]))
    )
    counted = of_weight[1] != 0
    of_rows = torch.stack([(of_weight[0] / of_weight[1])[counted].sum(), counted.sum()])
    sums = torch.stack([of_x.square().sum(1), of_weight.square().sum(1), of_rows])
    dx, dw, rows = (sums if team is None else team.reduce(sums)).unbind()
    errors = torch.stack([(dx[0] / dx[1]).sqrt(), (dw[0] / dw[1]).sqrt(), rows[0] / rows[1]])
    return dict(zip(("dX", "dW", "dW rows"), errors.tolist()))


def step_of(name: str) -> int | None:
    """The training step in the name of a snapshot's file."""
    match = re.fullmatch(r"step-(\d+)\.safetensors", Path(name).name)
    return int(match[1]) if match else None


def filter_name(gradient_filter: float | None) -> str:
    """'2^-12' or 'none'."""
    return "none" if gradient_filter is None else f"2^{log2(gradient_filter):g}"
