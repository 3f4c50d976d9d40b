"""What reports on snapshots share: the files, the command line, and the JSON.

A snapshot is a safetensors file of what an output layer sees, as launch/snapshots.py writes it: `hidden [N, D]` and
`weight [V, D]`, bf16 or fp16, and `target [N]` of an integer dtype.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .exactness import Inputs

Found = TypeVar("Found")

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


def report_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments that every report has. `check_options` is to be called with what the parser finds."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=description, formatter_class=form)
    parser.add_argument("files", nargs="*", metavar="FILE", help="safetensors files of hidden, weight and target")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--json", metavar="PATH", help="write all figures, again after each of the inputs")
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program, with status 2, for options that cannot be run."""
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


def attempted(work: Callable[[], Found], speaks: bool = True) -> Found | None:
    """What `work` gives; None for input that cannot be measured, which is reported if this rank `speaks`."""
    try:
        return work()
    except ValueError as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        return None


def write_json(path: str, content: dict) -> None:
    """Makes the file's folder too."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
