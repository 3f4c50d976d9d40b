"""`python -m benchmarks.gradient_filter FILE.safetensors ...`: speed and errors with gradient_filter.

Measures each snapshot with gradient_filter None and 2^-13 to 2^-10, in two orders of the vocabulary: the snapshot's own
order, and descending mean probability of the entries. docs/benchmarks.md explains the figures.

Under torchrun each of the P ranks has V / P entries. In the snapshot's own order they are consecutive; in the other
order the entries are dealt to the ranks in turn. The bare matrix products have the size of one rank's products, and no
collectives.

A training by configs/snapshots.yaml writes the files. Exit status: 0; 2 for a file that cannot be measured.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log2
from typing import Any

import torch
from torch import Tensor

from parallel_lce import linear_cross_entropy

from .engine import snapshots
from .engine.accuracy import Answers, answers
from .engine.peers import ALL, FORWARD_BACKWARD, GEMM_ONLY, RANKS, calls_of, named
from .engine.problem import Problem
from .engine.report import NONE, Session, milliseconds, new_parser, new_table, parse, session, spread_text
from .engine.team import NotMeasured, Team, release
from .engine.timing import interleaved, ratios, spread, timer

FILTERS = (None, 2**-13, 2**-12, 2**-11, 2**-10)
BUDGETS = {"saved": ALL, "budget 0": 0}  # logits_budget
NATURAL, BY_PROBABILITY = "natural", "by probability"
ROUNDED_LOGITS, EXACT = "bf16 logits", "exact gradients"
CAPTION = (
    "of GEMM-only: speed of forward + backward relative to the three bare products in the same round, medians "
    "(min–max). saved: all exponentials saved; budget 0: with logits_budget=0. Errors of dX and dW relative to float64 "
    "(Frobenius norm); of rows: error of a row of dW relative to this row, mean over the rows."
)

Errors = dict[str, float]  # {'dX', 'dW': relative error, 'dW rows': mean over the rows of each row's relative error}


def measure(whole: Problem, rounds: int, run: Session) -> dict:
    """The errors and times of a snapshot, as JSON has them. Calls are timed interleaved, round by round. Prints their
    table. Raises NotMeasured if V is no multiple of the ranks."""
    team = run.team
    if whole.shape.v % team.ranks:
        raise NotMeasured(f"{whole.name}: {team.ranks} ranks cannot share a vocabulary of {whole.shape.v} entries")
    truth, dtype = answers(whole, torch.float64), whole.hidden.dtype
    rounded, references = answers(whole, torch.float64, logits=torch.bfloat16), {}
    natural = torch.arange(whole.shape.v, device=team.device)
    for name, found in ((EXACT, truth), (ROUNDED_LOGITS, rounded)):
        references[name] = _errors([found.grad_x.to(dtype), found.grad_weight.to(dtype)], truth, natural, whole.team)
    case = {"name": whole.name, **vars(whole.shape), "tp": team.ranks, "dtype": str(dtype).removeprefix("torch.")}
    case |= {"loss": truth.loss.item(), "reference_errors": references, "results": []}
    for name, order in ((NATURAL, natural), (BY_PROBABILITY, by_probability(whole, team.ranks))):
        case["results"] += _in_order(name, order, whole, truth, rounds, team)
    run.say(filter_table(case))
    return case


def _in_order(name: str, order: Tensor, whole: Problem, truth: Answers, rounds: int, team: Team) -> list[dict]:
    """One result per value of gradient_filter. `order [V]`: the old ids in the new order of the vocabulary."""
    if team.device.type == "cuda":  # elsewhere nothing is filtered, and there may be no Triton
        from parallel_lce.features.filter.gradient import forget

        forget()  # what another order's tiles were
    own = order.chunk(team.ranks)[team.rank]
    # New row i of the vocabulary is old row order[i].
    problem = replace(whole, team=team, weight=whole.weight[own], target=order.argsort()[whole.target])
    calls: dict[Any, Callable] = {GEMM_ONLY: calls_of(named(GEMM_ONLY, RANKS), problem)[FORWARD_BACKWARD]}
    results = []
    for value in FILTERS:
        results.append({"order": name, "gradient_filter": value})
        for memory, budget in BUDGETS.items():
            options = {"gradient_filter": value, "logits_budget": budget, "process_group": team.group}
            ours = replace(named("ours", RANKS), build=lambda *_: partial(linear_cross_entropy, **options))
            call = calls[value, memory] = calls_of(ours, problem)[FORWARD_BACKWARD]
            results[-1][memory] = {"errors": _errors(call()[1:], truth, own, team)}
    release(team.device)
    seconds = interleaved({key: timer(call, team) for key, call in calls.items()}, team, rounds)
    for result in results:
        result["gemm_only_seconds"] = seconds[GEMM_ONLY]
        for memory in BUDGETS:
            own_seconds = seconds[result["gradient_filter"], memory]
            result[memory] |= {"seconds": own_seconds, "of_gemm_only": ratios(seconds[GEMM_ONLY], own_seconds)}
    return results


def by_probability(problem: Problem, ranks: int = 1) -> Tensor:
    """The ids `[V]` in descending order of their mean probability over the tokens, dealt to the ranks in turn.

    The ids of the first rank come first. The order is nearly the order of unigram frequency."""
    weight = problem.weight.float()
    total = weight.new_zeros(len(weight))
    for tokens in problem.blocks:
        total += (problem.hidden[tokens].float() @ weight.T).softmax(1).sum(0)
    return total.argsort(descending=True, stable=True).view(-1, ranks).t().flatten()


def _errors(gradients, truth: Answers, own: Tensor, team: Team) -> Errors:
    """The errors of the `gradients` dX and dW. `own`: the ids of this rank's rows of dW. Rows of dW that are truly 0
    have no relative error and are left out of the mean over the rows."""
    # [2, rows]: norms of the rows of the error, and of the truth. All ranks have the same dX, so summing over the ranks
    # keeps the ratio of its sums of squares.
    x_norms, weight_norms = (
        torch.stack([torch.linalg.vector_norm(t, dim=1) for t in (gradient - true, true)])
        for gradient, true in zip(gradients, (truth.grad_x, truth.grad_weight[own]))
    )
    counted = weight_norms[1] != 0
    row_errors = torch.stack([(weight_norms[0] / weight_norms[1])[counted].sum(), counted.sum()])
    sums = torch.stack([x_norms.square().sum(1), weight_norms.square().sum(1), row_errors])
    dx, dw, means = team.reduce(sums)
    errors = torch.stack([(dx[0] / dx[1]).sqrt(), (dw[0] / dw[1]).sqrt(), means[0] / means[1]])
    return dict(zip(("dX", "dW", "dW rows"), errors.tolist()))


def filter_table(case: dict):
    """A row per order of the vocabulary and value of gradient_filter, then the errors of gradients without a filter."""
    ranks = f"TP {case['tp']}, " * (case["tp"] > 1)
    title = "{name}: {}N={n}, V={v}, D={d}, {dtype}, loss {loss:.4f}".format(ranks, **case)
    columns = []
    for memory in BUDGETS:
        columns += [f"{memory}, ms", "of GEMM-only", "dX error", "dW error", "of rows"]
    table = new_table(title, CAPTION, ["vocabulary", "gradient_filter"], columns)
    for result in case["results"]:
        value = result["gradient_filter"]
        row = [result["order"], "none" if value is None else f"2^{log2(value):g}"]
        for timed in (result[memory] for memory in BUDGETS):
            median = milliseconds(spread(timed["seconds"])[0])
            row += [median, spread_text(timed["of_gemm_only"]), *_texts(timed["errors"])]
        table.add_row(*row, style="bold" if value is None else None)
    for name, errors in case["reference_errors"].items():
        table.add_row(name, *[NONE] * 3, *_texts(errors), *[NONE] * 5)
    return table


def _texts(errors: Errors) -> list[str]:
    return [f"{errors[name]:.2e}" for name in ("dX", "dW", "dW rows")]


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.gradient_filter", __doc__, "--json", "--rounds")
    parser.add_argument("files", nargs="+", metavar="FILE", help="safetensors files of hidden, weight and target")
    options = parse(parser, arguments)
    sources = [partial(snapshots.read, path) for path in options.files]
    with session(options) as run:
        return snapshots.report_on(sources, run, partial(measure, rounds=options.rounds, run=run))


if __name__ == "__main__":
    sys.exit(main())
