"""`python -m benchmarks.gradient_filter FILE.safetensors ...`: speed and errors with gradient_filter.

Measures each snapshot with gradient_filter None and 2^-13 to 2^-10, with all exponentials saved and with
logits_budget=0, in two orders of the vocabulary: the snapshot's own order, and descending mean probability of the
entries. docs/benchmarks.md explains the figures. A training by configs/snapshots.yaml writes the files.

Under torchrun each of the P ranks has V / P entries: consecutive ones, or by probability dealt to the ranks in turn.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from parallel_lce import linear_cross_entropy

from .engine.accuracy import Answers, Judge, answers
from .engine.cells import measure_cell, show
from .engine.peers import ALL, GEMM_ONLY, RANKS, Peer, named
from .engine.problem import Problem, read_snapshot
from .engine.report import new_parser, parse, session
from .engine.team import Team

FILTERS = {"exact": None, "2^-13": 2**-13, "2^-12": 2**-12, "2^-11": 2**-11, "2^-10": 2**-10}
BUDGETS = {"saved": ALL, "budget 0": 0}  # logits_budget
NATURAL, BY_PROBABILITY = "natural", "by probability"


def peers() -> list[Peer]:
    """Ours with each filter and budget. Their errors are shown, whatever they are."""
    found = [named(GEMM_ONLY, RANKS)]
    for memory, budget in BUDGETS.items():
        for name, value in FILTERS.items():
            loss = partial(linear_cross_entropy, gradient_filter=value, logits_budget=budget)
            build = partial(_with_group, loss)
            found.append(Peer(f"ours, {name}, {memory}", build, (RANKS,), factor=math.inf))
    return found


def _with_group(loss, group, sequence_parallel):
    return partial(loss, process_group=group, sequence_parallel=sequence_parallel)


def judges(whole: Problem, team: Team) -> dict[str, Judge]:
    """The problem of this rank in each order of the vocabulary, with its truth. `whole`: the same on all ranks."""
    if whole.shape.v % team.ranks:
        raise SystemExit(f"error: {team.ranks} ranks cannot share a vocabulary of {whole.shape.v} entries")
    found = answers(whole, torch.float64), answers(whole, whole.hidden.dtype)
    orders = {
        NATURAL: torch.arange(whole.shape.v, device=team.device),
        BY_PROBABILITY: by_probability(whole, team.ranks),
    }
    result = {}
    for name, order in orders.items():
        own = order.chunk(team.ranks)[team.rank]
        # New row i of the vocabulary is old row order[i].
        moved = replace(whole, team=team, weight=whole.weight[own], target=order.argsort()[whole.target])
        moved = replace(moved, name=f"{whole.name}{name}, ")
        result[name] = Judge(moved, *(Answers(its.loss, its.grad_x, its.grad_weight[own]) for its in found))
    return result


def by_probability(problem: Problem, ranks: int = 1) -> Tensor:
    """The ids `[V]` in descending order of their mean probability over the tokens, dealt to the ranks in turn.

    The ids of the first rank come first. The order is nearly the order of unigram frequency."""
    weight = problem.weight.float()
    total = weight.new_zeros(len(weight))
    for tokens in problem.blocks:
        total += (problem.hidden[tokens].float() @ weight.T).softmax(1).sum(0)
    return total.argsort(descending=True, stable=True).view(-1, ranks).t().flatten()


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.gradient_filter", __doc__, "--json", "--rounds")
    parser.add_argument("files", nargs="+", metavar="FILE", help="safetensors files of hidden, weight and target")
    options = parse(parser, arguments)
    with session(options) as run:
        cells = run.content["cells"] = []
        for path in options.files:
            for judge in judges(read_snapshot(path, Team(run.team.device)), run.team).values():
                if options.device == "cuda":  # elsewhere nothing is filtered, and there may be no Triton
                    from parallel_lce.features.filter.gradient import choice_for

                    choice_for.cache_clear()  # what another order's tiles were
                cells.append(measure_cell(peers(), judge, options.rounds))
                show(cells[-1], run)


if __name__ == "__main__":
    main()
