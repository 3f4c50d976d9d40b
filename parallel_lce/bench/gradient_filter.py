"""`python -m parallel_lce.bench.gradient_filter FILE.safetensors ...`: what does gradient_filter gain, and cost?

For each snapshot, with the vocabulary in its own order and ordered by the mean probability of its entries, and for
gradient_filter None, 'auto' and 2^-13 to 2^-10:

active         share of the tiles of 128 tokens by 128 entries with a larger probability, or a target
of GEMM-only   speed of forward + backward of `linear_cross_entropy`, reduction 'mean', relative to the three bare
               matrix products of the same shapes in the same round: with everything saved, and with logits_budget=0
errors         of dX and dW, relative to float64 (Frobenius norm)

Beside them stand the errors of the exact gradients in the inputs' dtype; and those of logits that are rounded to bf16,
and of a gradient of the logits that is, all else exact, with results in the inputs' dtype and without this rounding.

A file has the tensors `hidden [N, D]` and `weight [V, D]`, bf16 or fp16, and `target [N]` of an integer dtype, as
launch/snapshots.py writes them. `./launch/gradient_filter.sh` trains a model, then runs this on its snapshots.

Exit status: 0; 2 for input that cannot be measured.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from .filtered import measure
from .machine import machine
from .options import picture
from .snapshots import attempted, check_options, read_inputs, report_parser, write_json

PROGRAM = "python -m parallel_lce.bench.gradient_filter"


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
    if program == PROGRAM and not options.files:  # elsewhere those of a training come first
        parser.error("no file is given, and at least one is needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from .filter_plot import plot_over_steps
    from .filter_table import filter_table
    from .tables import new_console, say

    device = torch.device(options.device)
    facts, console, cases, status = machine(device), new_console(), [], 0
    say(console, "; ".join(f"{name}: {text}" for name, text in facts.items()))
    for path in options.files:
        inputs = attempted(partial(read_inputs, path, device))
        if inputs is None:
            status = 2
            continue
        case = measure(inputs, options.rounds)
        cases.append(case.as_dict())
        say(console, filter_table(case))
        if options.json:
            write_json(options.json, {"machine": facts, "settings": {"rounds": options.rounds}, "cases": cases})
    if options.plot:
        Path(options.plot).parent.mkdir(parents=True, exist_ok=True)
        if not plot_over_steps(options.plot, facts, cases):
            say(console, f"no file that was measured is named step-STEP.safetensors: no {options.plot}")
    return status


if __name__ == "__main__":
    sys.exit(main())
