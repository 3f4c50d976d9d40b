"""`python -m benchmarks` on one GPU, `./launch/bench.sh` on several: `parallel_lce` against its peers.

Over ranks every TP size of `--tp` is measured in one run, each on the first ranks, while the others wait. Exit status:
0 if ours was accurate and measured, 1 if ours was refused or failed anywhere, 2 for a command line that cannot be run.
"""

import importlib.util
import os
import sys
import warnings

import torch
import torch.distributed as dist

from .machine import machine
from .options import parse_arguments
from .peers import OVERLAPPED
from .problem import make_problem
from .team import Team, join


def main(arguments: list[str] | None = None) -> int:
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None  # set by torchrun
    if rank != 0:  # what every rank would say in the same words
        warnings.filterwarnings("ignore")
    options = parse_arguments(arguments, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if importlib.util.find_spec("rich") is None:
        sys.exit("the benchmark needs rich: pip install 'parallel-lce[bench]'")
    from .run import Run

    if options.alone:
        device, facts = torch.device("cuda:0" if options.device == "cuda" else "cpu"), {}
    else:
        device, facts = join(options.device), {"ranks": str(ranks)}
    run = Run(options, machine(device) | facts, speaks=rank == 0)
    for tp in options.tp:
        team = Team(device) if options.alone else Team.of(tp, device)
        for shape in options.plan.shapes if team else ():
            # A single rank has no collectives to overlap.
            peers = [peer for peer in options.chosen if tp > 1 or peer.name != OVERLAPPED]
            run.measure(make_problem(shape, options.dtype, team), peers)
        if not options.alone:
            dist.barrier()  # the ranks outside the team wait here
    run.conclude()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if run.refused else 0


if __name__ == "__main__":
    sys.exit(main())
