"""`python -m benchmarks` on one GPU, `./launch/bench.sh` on several: `parallel_lce` against its peers.

On several ranks one run measures every TP size P of `--tp` on ranks 0 to P - 1, while the other ranks wait.

Exit status: 0 if every peer of parallel_lce was measured, 1 if one was refused or failed, 2 for a wrong command line.
"""

import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from .engine.accuracy import Judge, answers
from .engine.cells import measure_cell, show
from .engine.options import parse_arguments
from .engine.peers import OVERLAPPED
from .engine.problem import Problem, make_problem
from .engine.report import session
from .engine.team import Team, release


def main(arguments: list[str] | None = None) -> int:
    ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None  # set by torchrun
    if os.environ.get("RANK", "0") != "0":  # rank 0 prints the same warnings
        warnings.filterwarnings("ignore")
    options = parse_arguments(arguments, ranks)
    with session(options) as run:
        cells = run.content["cells"] = []
        for tp in options.tp:
            team = Team.of(tp, run.team.device)
            for shape in options.shapes if team else ():
                for cell in _cells(make_problem(shape, options.dtype, team), options):
                    cells.append(cell)
                    show(cell, run)
            if ranks:
                dist.barrier()  # the ranks outside the team wait here
    return int(any(row["refused"] for cell in cells for row in cell["peers"] if row["name"].startswith("ours")))


def _cells(problem: Problem, options: Namespace) -> Iterator[dict]:
    """The measurements of the problem, one cell per layout: without and, over ranks, with sequence parallelism."""
    team = problem.team
    # A single rank has no collectives to overlap.
    peers = [peer for peer in options.chosen if team.ranks > 1 or peer.name != OVERLAPPED]
    truth, torch_answers = (answers(problem, dtype) for dtype in (torch.float64, problem.hidden.dtype))
    release(team.device)
    for layout in (False, True) if team.ranks > 1 else (False,):
        judge = Judge(replace(problem, sequence_parallel=layout), truth, torch_answers)
        yield measure_cell(peers, judge, options.rounds, options.host)


if __name__ == "__main__":
    sys.exit(main())
