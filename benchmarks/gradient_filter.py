"""`python -m benchmarks.gradient_filter FILE.safetensors ...`: speed and errors with gradient_filter.

Measures each snapshot with gradient_filter None and 2^-13 to 2^-10, in two orders of the vocabulary: the snapshot's own
order, and descending mean probability of the entries. docs/benchmarks.md explains the figures.

Under torchrun each of the P ranks has V / P entries. In the snapshot's own order they are consecutive; in the other
order the entries are dealt to the ranks in turn. The bare matrix products have the size of one rank's products, and no
collectives.

A file has the tensors `hidden [N, D]` and `weight [V, D]`, bf16 or fp16, and `target [N]` of an integer dtype, as
launch/snapshots.py writes them. `./launch/gradient_filter.sh` trains a model, then runs this report on its snapshots.

Exit status: 0; 2 for a file that cannot be measured.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log2
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce import linear_cross_entropy
from parallel_lce.vocabulary import VocabularyOrder

from . import snapshots
from .accuracy import Answers, answers
from .measure import release
from .passes import calls_of
from .peers import ALL, FORWARD_BACKWARD, GEMM_ONLY, RANKS, named
from .plots import draw
from .problem import Problem
from .report import (
    NONE,
    machine,
    milliseconds,
    new_parser,
    new_table,
    parse,
    picture,
    speaker,
    spread_text,
    with_folder,
)
from .team import NotMeasured, Team
from .timing import interleaved, ratios, spread

PROGRAM = "python -m benchmarks.gradient_filter"
FILTERS = (None, 2**-13, 2**-12, 2**-11, 2**-10)
BUDGETS = {"saved": ALL, "budget 0": 0}  # logits_budget
NATURAL, BY_PROBABILITY = "natural", "by probability"
ROUNDED_LOGITS, EXACT = "bf16 logits", "exact gradients"
ROUNDINGS = {ROUNDED_LOGITS: {"logits": torch.bfloat16}, "bf16 gradient of the logits": {"dlogits": torch.bfloat16}}
CAPTION = (
    "of GEMM-only: speed of forward + backward relative to the three bare products in the same round, medians "
    "(min–max). saved: all exponentials saved; budget 0: with logits_budget=0. Errors of dX and dW relative to float64 "
    "(Frobenius norm); of rows: error of a row of dW relative to this row, mean over the rows."
)

Errors = dict[str, float]  # {'dX', 'dW': relative error, 'dW rows': mean over the rows of each row's relative error}


def measure(path: str, rounds: int, team: Team) -> dict:
    """The errors and times of a snapshot, as JSON has them. Calls are timed interleaved, round by round.

    Raises NotMeasured, on all ranks, if any rank cannot read the file or V is no multiple of the ranks."""
    whole = team.agree(partial(snapshots.read, path, Team(team.device)))  # one rank alone may be unable to read it
    if whole.shape.v % team.ranks:
        raise NotMeasured(f"{path}: a vocabulary of {whole.shape.v} entries cannot be shared by {team.ranks} ranks")
    truth, dtype = answers(whole, torch.float64), whole.hidden.dtype
    references = {EXACT: _errors([truth.grad_x.to(dtype), truth.grad_weight.to(dtype)], truth)}
    for name, rounding in ROUNDINGS.items():
        rounded = answers(whole, torch.float64, **rounding)
        gradients = rounded.grad_x, rounded.grad_weight
        references[f"{name}, results not rounded"] = _errors(gradients, truth)
        references[name] = _errors([gradient.to(dtype) for gradient in gradients], truth)
    step = re.fullmatch(r"step-(\d+)\.safetensors", Path(path).name)
    case = {"name": path, "step": int(step[1]) if step else None, **vars(whole.shape), "tp": team.ranks}
    case |= {"dtype": whole.dtype_name, "loss": truth.loss.item(), "reference_errors": references, "results": []}
    natural = torch.arange(whole.shape.v, device=team.device)
    for name, order in ((NATURAL, natural), (BY_PROBABILITY, by_probability(whole, team.ranks))):
        case["results"] += _in_order(name, order, whole, truth, rounds, team)
    return case


def _in_order(name: str, order: Tensor, whole: Problem, truth: Answers, rounds: int, team: Team) -> list[dict]:
    """One result per value of gradient_filter. `order [V]`: the old ids in the new order of the vocabulary."""
    changed = reordered(whole, order)
    own = order.chunk(team.ranks)[team.rank]
    problem = replace(changed, team=team, weight=changed.weight.chunk(team.ranks)[team.rank])
    calls: dict[Any, Callable] = {GEMM_ONLY: calls_of(named(GEMM_ONLY, RANKS), problem)[FORWARD_BACKWARD]}
    results = []
    for value in FILTERS:
        results.append({"order": name, "gradient_filter": value})
        for memory, budget in BUDGETS.items():
            options = {"gradient_filter": value, "logits_budget": budget, "process_group": team.group}
            loss = partial(linear_cross_entropy, **options)
            call = calls[value, memory] = calls_of(named("ours", RANKS), problem, loss)[FORWARD_BACKWARD]
            results[-1][memory] = {"errors": _errors(call()[1:], truth, own, team)}
    release(team.device)
    seconds = interleaved(calls, team, rounds)
    for result in results:
        result["gemm_only_seconds"] = seconds[GEMM_ONLY]
        for memory in BUDGETS:
            own_seconds = seconds[result["gradient_filter"], memory]
            result[memory] |= {"seconds": own_seconds, "of_gemm_only": ratios(seconds[GEMM_ONLY], own_seconds)}
    return results


def by_probability(problem: Problem, ranks: int = 1) -> Tensor:
    """The ids `[V]` in descending order of their mean probability over the tokens, dealt to the ranks in turn.

    The ids of the first rank come first. The order is nearly the order of unigram frequency."""
    zeros = problem.weight.new_zeros(len(problem.weight), dtype=torch.float32)
    mean = sum((log_p.exp_().sum(0) for _, log_p, _ in snapshots.log_softmax(problem, torch.float32)), zeros)
    order = VocabularyOrder.by_frequency(mean / problem.shape.n, ranks=ranks)
    return order.undo(torch.arange(problem.shape.v, device=problem.weight.device))


def reordered(problem: Problem, order: Tensor) -> Problem:
    """The same problem with new row i of the vocabulary being old row `order[i]`."""
    return replace(problem, weight=problem.weight[order], target=order.argsort()[problem.target])


def _errors(gradients, truth: Answers, order: Tensor | None = None, team: Team | None = None) -> Errors:
    """The errors of the `gradients` dX and dW. `order`: the ids of this rank's rows of dW; None: all ids in order. Rows
    of dW that are truly 0 have no relative error and are left out of the mean over the rows."""
    true_weight = truth.grad_weight if order is None else truth.grad_weight[order]
    # [2, rows]: norms of the rows of the error, and of the truth. All ranks have the same dX, so summing over the ranks
    # keeps the ratio of its sums of squares.
    x_norms, weight_norms = (
        torch.stack([torch.linalg.vector_norm(t, dim=1) for t in (gradient - true, true)])
        for gradient, true in zip(gradients, (truth.grad_x, true_weight))
    )
    counted = weight_norms[1] != 0
    row_errors = torch.stack([(weight_norms[0] / weight_norms[1])[counted].sum(), counted.sum()])
    sums = torch.stack([x_norms.square().sum(1), weight_norms.square().sum(1), row_errors])
    dx, dw, means = (sums if team is None else team.reduce(sums)).unbind()
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
        row = [result["order"], filter_name(result["gradient_filter"])]
        for timed in (result[memory] for memory in BUDGETS):
            median = milliseconds(spread(timed["seconds"])[0])
            row += [median, spread_text(timed["of_gemm_only"]), *_texts(timed["errors"])]
        table.add_row(*row, style="bold" if result["gradient_filter"] is None else None)
    for name, errors in case["reference_errors"].items():
        table.add_row(name, *[NONE] * 3, *_texts(errors), *[NONE] * 5)
    return table


def _texts(errors: Errors) -> list[str]:
    return [f"{errors[name]:.2e}" for name in ("dX", "dW", "dW rows")]


def filter_name(gradient_filter: float | None) -> str:
    """'2^-12' or 'none'."""
    return "none" if gradient_filter is None else f"2^{log2(gradient_filter):g}"


def plot_over_steps(path: Path, facts: dict[str, str], cases: list[dict]) -> bool:
    """Draws speed relative to the bare products, and errors of dX and dW, against the training step. The vocabulary is
    ordered by probability. Each training (folder of snapshots) has a row of two panels. If no case has a step, returns
    False and writes nothing."""
    panels = {}
    for case in sorted((case for case in cases if case["step"] is not None), key=lambda case: case["step"]):
        about = f"{Path(case['name']).parent}: " + "TP {tp}, N={n}, V={v}, D={d}, {dtype}".format_map(case)
        speeds = panels.setdefault((about, "speed relative to the three bare products"), {})
        errors = panels.setdefault((about, "error relative to float64"), {})

        def add(lines: dict, name: str, y: float, low: float, high: float) -> None:
            lines.setdefault(name, []).append((case["step"], (y, low, high)))

        for result in case["results"]:
            if result["order"] == BY_PROBABILITY:
                name = f"gradient_filter {filter_name(result['gradient_filter'])}"
                for memory in BUDGETS:
                    add(speeds, f"{name}, {memory}", *result[memory]["of_gemm_only"])
                for gradient in ("dX", "dW"):
                    add(errors, f"{name}, {gradient}", *[result["saved"]["errors"][gradient]] * 3)
        for gradient in ("dX", "dW"):
            add(errors, f"{ROUNDED_LOGITS}, {gradient}", *[case["reference_errors"][ROUNDED_LOGITS][gradient]] * 3)
    title = f"{facts['device']}, torch {facts['torch']}; vocabulary ordered by probability"
    return draw(path, title, "training step", panels, 2)


def parse_arguments(arguments: list[str] | None, program: str = PROGRAM) -> Namespace:
    """Parses the command line. A wrong one ends the program with status 2."""
    parser = new_parser(program, __doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="safetensors files of hidden, weight and target")
    parser.add_argument("--rounds", type=int, default=5, help="how often each call is timed")
    words = "write a picture of speed and errors against the training step; the suffix chooses the format"
    parser.add_argument("--plot", metavar="PATH", type=picture, help=words)
    options = parse(parser, arguments)
    if program == PROGRAM and not options.files:  # the shell script adds the files of its training
        parser.error("no file is given, and at least one is needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    team = Team.here(options.device)
    speaks, facts = team.rank == 0, machine(team.device)
    say, content = speaker(speaks), {"machine": facts, "settings": {"rounds": options.rounds}, "cases": []}
    say("; ".join(f"{name}: {text}" for name, text in facts.items()))
    sources = [partial(measure, path, options.rounds, team) for path in options.files]
    status = snapshots.report_on(sources, options, content, lambda case: say(filter_table(case)), speaks)
    if options.plot and speaks and not plot_over_steps(with_folder(options.plot), facts, content["cases"]):
        say(f"no file that was measured is named step-STEP.safetensors: no {options.plot}")
    if team.group is not None:
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
