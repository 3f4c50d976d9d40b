"""`python -m benchmarks.gradient_filter FILE.safetensors ...`: what does gradient_filter gain, and cost?

Measures each snapshot with the vocabulary in its own order and ordered by the mean probability of its entries, and with
gradient_filter None and 2^-13 to 2^-10. docs/benchmarks.md explains the figures.

Under torchrun each of the P ranks has V / P entries of the vocabulary: consecutive ones in its own order, and in the
other one those that are dealt to the ranks in turn. The bare products are a rank's own, without collectives.

A file has the tensors `hidden [N, D]` and `weight [V, D]`, bf16 or fp16, and `target [N]` of an integer dtype, as
launch/snapshots.py writes them. `./launch/gradient_filter.sh` trains a model, then runs this on its snapshots.

Exit status: 0; 2 for input that cannot be measured.
"""

import re
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from math import log2
from pathlib import Path

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
    "(min–max). saved: with everything saved; budget 0: with logits_budget=0. Errors of dX and dW relative to float64 "
    "(Frobenius norm); of rows: the mean over the rows of dW of a row's own relative error."
)

Errors = dict[str, float]  # {'dX', 'dW': relative error, 'dW rows': the mean over the rows of a row's relative error}


def measure(path: str, rounds: int, team: Team) -> dict:
    """Of a snapshot errors first, then the times of all ways, interleaved round by round. Raises NotMeasured, on all
    ranks, if the file cannot be read or the vocabulary cannot be shared evenly."""
    whole = team.agree(partial(snapshots.read, path, Team(team.device)))  # may be unreadable to one rank alone
    if whole.shape.v % team.ranks:
        raise NotMeasured(f"{path}: a vocabulary of {whole.shape.v} entries cannot be shared by {team.ranks} ranks")
    truth, dtype = answers(whole, torch.float64), whole.hidden.dtype
    references = {EXACT: _errors([truth.grad_x.to(dtype), truth.grad_weight.to(dtype)], truth)}
    for name, rounding in ROUNDINGS.items():
        found = answers(whole, torch.float64, **rounding)
        gradients = found.grad_x, found.grad_weight
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
    """A result per value of gradient_filter. `order [V]`: the ids of the vocabulary in their new order."""
    changed = reordered(whole, order)
    own = order.chunk(team.ranks)[team.rank]
    problem = replace(changed, team=team, weight=changed.weight.chunk(team.ranks)[team.rank])
    calls, results = {GEMM_ONLY: calls_of(named(GEMM_ONLY, RANKS), problem)[FORWARD_BACKWARD]}, []
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
            its = seconds[result["gradient_filter"], memory]
            result[memory] |= {"seconds": its, "of_gemm_only": ratios(seconds[GEMM_ONLY], its)}
    return results


def by_probability(problem: Problem, ranks: int = 1) -> Tensor:
    """The ids of the vocabulary `[V]`, the most probable on the tokens first: nearly the order of how frequent they are
    in text. They are dealt to the ranks in turn; those of the first rank come first."""
    mean = sum(log_p.exp_().sum(0) for _, log_p, _ in snapshots.log_softmax(problem, torch.float32))
    order = VocabularyOrder.by_frequency(mean / problem.shape.n, ranks=ranks)
    return order.undo(torch.arange(problem.shape.v, device=problem.weight.device))


def reordered(problem: Problem, order: Tensor) -> Problem:
    """The same problem with the vocabulary's rows in the order of these ids `[V]`."""
    return replace(problem, weight=problem.weight[order], target=order.argsort()[problem.target])


def _errors(found, truth: Answers, order: Tensor | None = None, team: Team | None = None) -> Errors:
    """Of dX and dW. `order`: the ids of the rows of the found dW, this rank's of the `team`; None: `[0, V)`. Rows of dW
    that are 0 have no relative error, and do not count."""
    rows = truth.grad_weight if order is None else truth.grad_weight[order]
    # Norms of the rows of what is off and of what is true. dX is the same on all ranks, so that its squares' sums over
    # the ranks have the same ratio.
    of_x, of_weight = (
        torch.stack([torch.linalg.vector_norm(t, dim=1) for t in (its - true, true)])
        for its, true in zip(found, (truth.grad_x, rows))
    )
    counted = of_weight[1] != 0
    of_rows = torch.stack([(of_weight[0] / of_weight[1])[counted].sum(), counted.sum()])
    sums = torch.stack([of_x.square().sum(1), of_weight.square().sum(1), of_rows])
    dx, dw, means = (sums if team is None else team.reduce(sums)).unbind()
    errors = torch.stack([(dx[0] / dx[1]).sqrt(), (dw[0] / dw[1]).sqrt(), means[0] / means[1]])
    return dict(zip(("dX", "dW", "dW rows"), errors.tolist()))


def filter_table(case: dict):
    """A row per order of the vocabulary and value of gradient_filter, then the errors of other gradients."""
    ranks = f"TP {case['tp']}, " * (case["tp"] > 1)
    title = "{name}: {}N={n}, V={v}, D={d}, {dtype}, loss {loss:.4f}".format(ranks, **case)
    columns = []
    for memory in BUDGETS:
        columns += [f"{memory}, ms", "of GEMM-only", "dX error", "dW error", "of rows"]
    table = new_table(title, CAPTION, ["vocabulary", "gradient_filter"], columns)
    for result in case["results"]:
        row = [result["order"], filter_name(result["gradient_filter"])]
        for its in (result[memory] for memory in BUDGETS):
            row += [milliseconds(spread(its["seconds"])[0]), spread_text(its["of_gemm_only"]), *_texts(its["errors"])]
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
    """Speed relative to the bare products, and errors of dX and dW, against the training step; the vocabulary is
    ordered by probability. A row of two panels per training (folder of snapshots). Returns whether any case has a
    step; else nothing is written."""
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
    """The command line. Ends the program, with status 2, for one that cannot be run."""
    parser = new_parser(program, __doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="safetensors files of hidden, weight and target")
    parser.add_argument("--rounds", type=int, default=5, help="how often each call is timed")
    words = "write a picture of speed and errors against the training step; the suffix chooses the format"
    parser.add_argument("--plot", metavar="PATH", type=picture, help=words)
    options = parse(parser, arguments)
    if program == PROGRAM and not options.files:  # elsewhere those of a training come first
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
