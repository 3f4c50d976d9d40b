"""Snapshots of a training: reading them, and functions of the reports on them.

A snapshot is a safetensors file with the operands of an output layer, as launch/snapshots.py writes it: `hidden [N, D]`
and `weight [V, D]`, bf16 or fp16, and `target [N]` of an integer dtype.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .problem import Problem, Shape
from .report import write_json
from .team import NotMeasured, Team

TENSORS = ("hidden", "weight", "target")


def read(path: str, team: Team) -> Problem:
    """The problem in a file, with the whole weight. Raises NotMeasured for an unreadable or wrong file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            missing = [name for name in TENSORS if name not in file.keys()]
            if missing:
                raise NotMeasured(f"{path} has no tensor {', '.join(missing)}, but {sorted(file.keys())}")
            hidden, weight, target = map(file.get_tensor, TENSORS)
    except (OSError, SafetensorError) as error:
        raise NotMeasured(f"{path} cannot be read: {error}") from None
    dtypes = hidden.dtype, weight.dtype, target.dtype
    is_integer = not (dtypes[2].is_floating_point or dtypes[2].is_complex or dtypes[2] == torch.bool)
    if dtypes[0] not in (torch.bfloat16, torch.float16) or dtypes[1] != dtypes[0] or not is_integer:
        given = "hidden {}, weight {}, target {}".format(*dtypes)
        raise NotMeasured(f"{path}: expected hidden and weight both bf16, or both fp16, and integers, got {given}")
    shapes = [list(tensor.shape) for tensor in (hidden, weight, target)]
    n, d, v = len(hidden), hidden.shape[-1], len(weight)
    if shapes != [[n, d], [v, d], [n]] or 0 in (n, v, d):
        given = "hidden {}, weight {}, target {}".format(*shapes)
        raise NotMeasured(f"{path}: expected hidden [N, D], weight [V, D] and target [N], none empty, got {given}")
    smallest, largest = (value.item() for value in target.long().aminmax())
    if smallest < 0 or largest >= v:
        raise NotMeasured(f"{path}: targets must lie in [0, {v}), got {smallest} to {largest}")
    tensors = hidden.to(team.device), weight.to(team.device), target.to(team.device, torch.int64)
    return Problem(Shape(n, v, d), team, *tensors, name=path)


def report_on(sources: list[Callable], options: Namespace, content: dict, show: Callable, speaks: bool = True) -> int:
    """Calls each source, appends its case to `content["cases"]`, shows the case, and writes the JSON again.

    Returns the exit status: 2 if a source raises NotMeasured, else 0. A rank that `speaks` prints the reason."""
    status = 0
    for source in sources:
        try:
            case = source()
        except NotMeasured as error:
            status = 2
            if speaks:
                print(f"error: {error}", file=sys.stderr)
            continue
        content["cases"].append(case)
        show(case)
        if options.json and speaks:
            write_json(options.json, content)
    return status


@torch.no_grad()
def log_softmax(problem: Problem, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, float]]:
    """Yields for each block of R tokens: their slice, their log-probabilities `[R, V]`, and max |z|. Logits are in
    `dtype`, the softmax at least in fp32."""
    weight = problem.weight.to(dtype)
    for tokens in problem.blocks:
        z = problem.hidden[tokens].to(dtype) @ weight.T
        largest = z.abs().max().item()
        log_p = z.to(torch.promote_types(dtype, torch.float32)).log_softmax(1)
        del z
        yield tokens, log_p, largest
