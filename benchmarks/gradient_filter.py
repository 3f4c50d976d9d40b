"""`python -m benchmarks.gradient_filter FILE.safetensors ...`: what does gradient_filter gain, and cost?

For each snapshot, with the vocabulary in its own order and ordered by the mean probability of its entries, and for
gradient_filter None and 2^-13 to 2^-10:

active         share of the tiles of 128 tokens by 128 entries with a larger probability, or a target
of GEMM-only   speed of forward + backward of `linear_cross_entropy`, reduction 'mean', relative to the three bare
               matrix products of the same shapes in the same round: with everything saved, and with logits_budget=0
errors         of dX and dW, relative to float64 (Frobenius norm); and the mean over the rows of dW of a row's own
               relative error, which is large where probabilities are small

Beside them stand the errors of the exact gradients in the inputs' dtype; and those of logits that are rounded to bf16,
and of a gradient of the logits that is, all else exact, with results in the inputs' dtype and without this rounding.

Over P ranks, `torchrun --nproc-per-node=P -m benchmarks.gradient_filter FILE.safetensors ...`, each has V / P
entries of the vocabulary: consecutive ones in its own order, and in the other one those that are dealt to the ranks in
turn. The bare products are a rank's own, without collectives, and active tiles those of the rank that has most.

A file has the tensors `hidden [N, D]` and `weight [V, D]`, bf16 or fp16, and `target [N]` of an integer dtype, as
launch/snapshots.py writes them. `./launch/gradient_filter.sh` trains a model, then runs this on its snapshots.

Exit status: 0; 2 for input that cannot be measured.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from .filtered import Case, measure
from .machine import machine
from .options import picture
from .snapshots import attempted, check_options, read_inputs, report_parser, write_json
from .team import Team

PROGRAM = "python -m benchmarks.gradient_filter"


def parse_arguments(arguments: list[str] | None, program: str = PROGRAM) -> argparse.Namespace:
    """The command line. Ends the program, with status 2, for one that cannot be run."""
    parser = report_parser(program, __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each call is timed")
    words = "write a picture of speed and errors against the training step; the suffix chooses the format"
    parser.add_argument("--plot", metavar="PATH", type=picture, help=words)
    options = parser.parse_args(arguments)
    check_options(parser, options)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if options.device == "cuda" and torch.cuda.device_count() < processes:
        parser.error(f"one GPU per process is needed, this host has {torch.cuda.device_count()} for {processes}")
    if program == PROGRAM and not options.files:  # elsewhere those of a training come first
        parser.error("no file is given, and at least one is needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from .filter_plot import plot_over_steps
    from .filter_table import filter_table
    from .tables import new_console, say

    team = Team.here(options.device)
    speaks = team.rank == 0
    facts, console, cases, status = machine(team.device), new_console(), [], 0
    console.quiet = not speaks
    say(console, "; ".join(f"{name}: {text}" for name, text in facts.items()))
    for path in options.files:
        case = attempted(partial(_measured, path, options.rounds, team), speaks)
        if case is None:
            status = 2
            continue
        cases.append(case.as_dict())
        say(console, filter_table(case))
        if options.json and speaks:
            write_json(options.json, {"machine": facts, "settings": {"rounds": options.rounds}, "cases": cases})
    if options.plot and speaks:
        Path(options.plot).parent.mkdir(parents=True, exist_ok=True)
        if not plot_over_steps(options.plot, facts, cases):
            say(console, f"no file that was measured is named step-STEP.safetensors: no {options.plot}")
    if not team.alone:
        dist.destroy_process_group()
    return status


def _measured(path: str, rounds: int, team: Team) -> Case:
    inputs, refusal = None, ""
    try:
        inputs = read_inputs(path, team.device)
    except ValueError as error:
        refusal = str(error)
    # A file may be unreadable to one rank alone.
    refusals = list(filter(None, team.gather(refusal)))
    if inputs is None or refusals:
        raise ValueError(refusals[0])
    return measure(inputs, rounds, team)


if __name__ == "__main__":
    sys.exit(main())
