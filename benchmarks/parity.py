"""`python -m benchmarks.parity [FILE.safetensors ...]`: how exact are log-probabilities?

Compares three ways to compute the log-probabilities of targets and the entropies, each from the same bf16 hidden states
and the same bf16 weight, with float64:

ours           `token_statistics`
bf16 logits    the logits in the inputs' dtype, converted to fp32 for the softmax, as trainers do
fp32 head      hidden states and weight converted to fp32, products in full fp32 (no TF32)

A file has the tensors `hidden [N, D]` and `weight [V, D]`, bf16 or fp16, and `target [N]` of an integer dtype, as
launch/snapshots.py writes them. Random inputs have normal logits of three standard deviations, and targets that are
drawn from their softmax. `./launch/parity.sh` trains a model, then runs this on its snapshots.

Exit status: 0 if the largest differences of ours, in log-probabilities and in entropies, are at most twice the fp32
head's plus four fp32 roundings of the largest sum |x_k w_k| that is a target's logit, and the errors of dX, by how sure
tokens are of an entry, at most twice those of bf16 logits plus one rounding; else 1; 2 for input that cannot be
measured.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from .exactness import Inputs, measure, random_inputs
from .machine import machine
from .options import parse_shape
from .problem import Shape
from .snapshots import attempted, check_options, read_inputs, report_parser, write_json

PROGRAM = "python -m benchmarks.parity"
DEVIATIONS = (1.0, 5.0, 20.0)  # standard deviations of random logits
DEFAULT_SHAPE = {"cpu": Shape(512, 8192, 512), "cuda": Shape(8192, 131072, 4096)}


def parse_arguments(arguments: list[str] | None, program: str = PROGRAM) -> argparse.Namespace:
    """The command line. Ends the program, with status 2, for one that cannot be run."""
    parser = report_parser(program, __doc__)
    words = "tokens, vocabulary and hidden size of random inputs; may be repeated"
    parser.add_argument("--random", action="append", metavar="N,V,D", type=parse_shape, help=words)
    options = parser.parse_args(arguments)
    check_options(parser, options)
    options.random = options.random or [DEFAULT_SHAPE[options.device]]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from .parity_table import gradient_table, parity_table, verdict
    from .tables import new_console, say

    device = torch.device(options.device)
    facts, console, cases, status = machine(device), new_console(), [], 0
    say(console, "; ".join(f"{name}: {text}" for name, text in facts.items()))
    for source in _sources(options, device):
        case = attempted(lambda source=source: measure(source()))
        if case is None:
            status = 2
            continue
        cases.append(case)
        print(f"measured {case.name}, {case.shape}", file=sys.stderr, flush=True)
        if options.json:
            write_json(options.json, {"machine": facts, "cases": [case.as_dict() for case in cases]})
    say(console, parity_table(cases))
    say(console, gradient_table(cases))
    for case in cases:
        say(console, verdict(case))
    return status or int(not all(case.holds for case in cases))


def _sources(options: argparse.Namespace, device: torch.device) -> Iterator[Callable[[], Inputs]]:
    """Of all inputs, in the order of the report: the files, then the random ones."""
    for path in options.files:
        yield partial(read_inputs, path, device)
    for shape in options.random:
        for deviation in DEVIATIONS:
            yield partial(random_inputs, shape, deviation, device)


if __name__ == "__main__":
    sys.exit(main())
