"""Snapshots of a training: reading them, and functions of the reports on them.

A snapshot is a safetensors file with the operands of an output layer, as a training by configs/snapshots.yaml writes
it: `hidden [N, D]` and `weight [V, D]`, bf16, and `target [N]` of an integer dtype.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from safetensors import SafetensorError, safe_open

from .problem import Problem, Shape
from .report import Session
from .team import NotMeasured, Team


def read(path: str, team: Team) -> Problem:
    """The problem in a file, with the whole weight. Raises NotMeasured for an unreadable or wrong file."""
    try:
        with safe_open(path, framework="pt") as file:
            hidden, weight, target = map(file.get_tensor, ("hidden", "weight", "target"))
    except (OSError, SafetensorError) as error:
        raise NotMeasured(f"{path} cannot be read: {error}") from None
    n, d, v = len(hidden), hidden.shape[-1], len(weight)
    fits = hidden.shape == (n, d) and weight.shape == (v, d) and target.shape == (n,)
    if not (fits and hidden.dtype == weight.dtype == torch.bfloat16 and 0 <= target.min() <= target.max() < v):
        shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in (hidden, weight, target))
        words = "expected hidden [N, D] and weight [V, D], both bf16, and target [N] in [0, V)"
        raise NotMeasured(f"{path}: {words}, got {shapes}, targets in [{target.min()}, {target.max()}]")
    tensors = hidden.to(team.device), weight.to(team.device), target.to(team.device, torch.int64)
    return Problem(Shape(n, v, d), team, *tensors, name=path)


def report_on(sources: list[Callable[[Team], Problem]], run: Session, measure: Callable[[Problem], dict]) -> int:
    """Measures the problem of each source, appends its case to the report's cases, and writes the JSON again. Each rank
    has the whole problem.

    Returns the exit status: 2 if a rank cannot read a problem or measure it, else 0."""
    status, cases = 0, run.content.setdefault("cases", [])
    for source in sources:
        try:
            cases.append(measure(run.team.agree(partial(source, Team(run.team.device)))))
            run.save()
        except NotMeasured as error:
            status = 2
            if run.team.rank == 0:
                print(f"error: {error}", file=sys.stderr)
    return status
