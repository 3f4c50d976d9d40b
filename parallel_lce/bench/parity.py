"""`python -m parallel_lce.bench.parity [FILE.safetensors ...]`: how exact are log-probabilities?

Compares three ways to compute the log-probabilities of targets and the entropies, each from the same bf16 hidden states
and the same bf16 weight, with float64:

ours           `token_statistics`
bf16 logits    the logits in the inputs' dtype, converted to fp32 for the softmax, as trainers do
fp32 head      hidden states and weight converted to fp32, products in full fp32 (no TF32)

A file has the tensors `hidden [N, D]` and `weight [V, D]`, bf16 or fp16, and `target [N]` of an integer dtype, as
launch/snapshots.py writes them. Random inputs have normal logits of three standard deviations, and targets that are
drawn from their softmax. `./launch/parity.sh` trains a model, then runs this on its snapshots.

Exit status: 0 if the largest differences of ours, in log-probabilities and in entropies, are at most twice the fp32
head's plus four fp32 roundings of the largest sum |x_k w_k| that is a target's logit; else 1; 2 for input that cannot
be measured.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .exactness import Inputs, measure, random_inputs
from .machine import machine
from .options import parse_shape
from .problem import Shape

PROGRAM = "python -m parallel_lce.bench.parity"
DEVIATIONS = (1.0, 5.0, 20.0)  # standard deviations of random logits
DEFAULT_SHAPE = {"cpu": Shape(512, 8192, 512), "cuda": Shape(8192, 131072, 4096)}
TENSORS = ("hidden", "weight", "target")


def read_inputs(path: str, device: torch.device) -> Inputs:
    """The inputs in a safetensors file. Raises ValueError for a file that cannot be measured."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            missing = [name for name in TENSORS if name not in file.keys()]
            if missing:
                raise ValueError(f"{path} has no tensor {', '.join(missing)}, but {sorted(file.keys())}")
            hidden, weight, target = map(file.get_tensor, TENSORS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    check_inputs(path, hidden, weight, target)
    return Inputs(path, hidden.to(device), weight.to(device), target.to(device, torch.int64))


def check_inputs(path: str, hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    if hidden.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != hidden.dtype:
        given = f"hidden {hidden.dtype}, weight {weight.dtype}"
        raise ValueError(f"{path}: hidden and weight must both be bf16, or both fp16, got {given}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"{path}: target must be of an integer dtype, got {target.dtype}")
    shapes = [list(tensor.shape) for tensor in (hidden, weight, target)]
    if (
        [len(shape) for shape in shapes] != [2, 2, 1]
        or shapes[0][1] != shapes[1][1]
        or shapes[0][0] != shapes[2][0]
        or 0 in shapes[0] + shapes[1]
    ):
        given = "hidden {}, weight {}, target {}".format(*shapes)
        raise ValueError(f"{path}: expected hidden [N, D], weight [V, D] and target [N], none empty, got {given}")
    smallest, largest = (value.item() for value in target.long().aminmax())
    if smallest < 0 or largest >= len(weight):
        raise ValueError(f"{path}: targets must lie in [0, {len(weight)}), got {smallest} to {largest}")


def parse_arguments(arguments: list[str] | None, program: str = PROGRAM) -> argparse.Namespace:
    """The command line. Ends the program, with status 2, for one that cannot be run."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="safetensors files of hidden, weight and target")
    words = "tokens, vocabulary and hidden size of random inputs; may be repeated"
    parser.add_argument("--random", action="append", metavar="N,V,D", type=parse_shape, help=words)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--json", metavar="PATH", help="write all figures, again after each of the inputs")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, found none")
    for package in ["rich"] + ["safetensors"] * bool(options.files):
        if importlib.util.find_spec(package) is None:
            parser.error(f"the report needs {package}: pip install 'parallel-lce[bench]'")
    missing = [path for path in options.files if not Path(path).is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    if options.json and Path(options.json).is_dir():
        parser.error(f"--json: {options.json} is a folder")
    options.random = options.random or [DEFAULT_SHAPE[options.device]]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from .parity_table import parity_table, verdict
    from .tables import new_console, say

    device = torch.device(options.device)
    facts, console, cases, status = machine(device), new_console(), [], 0
    say(console, "; ".join(f"{name}: {text}" for name, text in facts.items()))
    for source in _sources(options, device):
        try:
            cases.append(measure(source()))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
            continue
        print(f"measured {cases[-1].name}, {cases[-1].shape}", file=sys.stderr, flush=True)
        if options.json:
            content = {"machine": facts, "cases": [case.as_dict() for case in cases]}
            Path(options.json).parent.mkdir(parents=True, exist_ok=True)
            Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    say(console, parity_table(cases))
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
