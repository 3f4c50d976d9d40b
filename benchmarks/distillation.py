"""`python -m benchmarks.distillation`: divergences of a student from a teacher, forward and backward, beside
the bare matrix products and the dense way. Under torchrun all ranks are one tensor-parallel group.

The bare products are those of the student's forward, dX and dW and of the teacher's forward, in the input's
dtype, without collectives. The dense way makes the logits, and their softmax in float32 as trainers do.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.distillation import divergence

from .machine import machine
from .options import DEFAULT_DTYPE, parse_shape
from .peak_memory import peak_memory
from .problem import IGNORE_INDEX, Shape, make_problem
from .tables import mebibytes, milliseconds, new_console, new_table, say
from .team import Team, join
from .timing import timer

PRODUCTS, DENSE = "products", "dense"
CHECKED = 256  # tokens whose dX is compared with float64
ALL_OPTIONS = ["mean", "none"]


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    team: Team | None = Team(device)
    if "RANK" in os.environ:
        device = join(options.device)
        team = Team.of(int(os.environ["WORLD_SIZE"]), device)
    assert team is not None  # of all ranks
    dtype = getattr(torch, options.dtype or DEFAULT_DTYPE[options.device])
    rows = measure(team, options.shape, options.teacher or options.shape.d, dtype, options.beta, options.rounds)
    if team.rank == 0:
        console = new_console()
        say(console, ", ".join(f"{name} {value}" for name, value in machine(device).items()))
        say(console, _table(options, dtype, team, rows))
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(team: Team, shape: Shape, teacher_size: int, dtype: torch.dtype, betas: list[float], rounds: int) -> list:
    """`[(name, seconds per round, MiB beyond the results, relative errors of loss and dX or None)]`"""
    student = make_problem(shape, dtype, team, seed=0)
    teacher = make_problem(Shape(shape.n, shape.v, teacher_size), dtype, team, seed=1000)
    x, w = (t.requires_grad_() for t in (student.hidden, student.weight))
    y, u, target = teacher.hidden, teacher.weight, student.target
    calls: dict[str, Callable] = {PRODUCTS: _products(x.detach(), w.detach(), y, u)}
    errors: dict[str, tuple[float, float]] = {}
    checked, count = slice(0, min(CHECKED, shape.n)), int(student.counted.sum())
    for beta in betas:
        truth = None
        if team.alone:
            exact = [t.detach().double() for t in (x[checked], w, y[checked], u)]
            truth = _dense(exact[0], exact[1], exact[2], exact[3], target[checked], beta, count, weight_gradient=False)
            del exact
            calls[f"{DENSE}, beta {beta:g}"] = partial(_dense, x, w, y, u, target, beta, count)
        for reduction in ALL_OPTIONS:
            loss = partial(divergence, x, w, y, u, beta=beta, target=target, process_group=team.group)
            calls[f"ours, beta {beta:g}, {reduction}"] = partial(_ours, loss, reduction, x, w, student.counted)
        for name in [name for name in calls if name not in errors and name != PRODUCTS]:
            if truth is not None:
                found = calls[name]()
                errors[name] = _errors(found, truth, checked)
                del found
    memory = {name: peak_memory(call, team.device) for name, call in calls.items()}
    readers = {name: timer(call, team) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, read in readers.items():
            seconds[name].append(read())
    return [(name, seconds[name], memory[name][0] - memory[name][1], errors.get(name)) for name in calls]


def _ours(loss: Callable, reduction: str, x: Tensor, w: Tensor, counted: Tensor):
    found = loss(reduction=reduction)
    found = found if found.dim() == 0 else found.sum() / counted.sum()
    return found.detach(), *torch.autograd.grad(found, (x, w))


def _dense(
    x: Tensor, w: Tensor, y: Tensor, u: Tensor, target: Tensor, beta: float, count: int, weight_gradient: bool = True
):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_(weight_gradient)
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.no_grad():
        log_q = (y @ u.T).to(wide).log_softmax(-1)
    log_p = (x @ w.T).to(wide).log_softmax(-1)
    if beta in (0, 1):
        one, other = (log_p, log_q) if beta == 0 else (log_q, log_p)
        found = torch.nn.functional.kl_div(one, other, reduction="none", log_target=True).sum(-1)
    else:
        logs = torch.tensor([beta, 1 - beta], dtype=wide, device=x.device).log()
        log_m = torch.logsumexp(torch.stack([log_q + logs[0], log_p + logs[1]]), 0)
        of_teacher, of_student = (
            torch.nn.functional.kl_div(log_m, of, reduction="none", log_target=True).sum(-1) for of in (log_q, log_p)
        )
        found = beta * of_teacher + (1 - beta) * of_student
    found = (found * (target != IGNORE_INDEX)).sum() / count
    return found.detach(), *torch.autograd.grad(found, (x, w) if weight_gradient else (x,))


def _products(x: Tensor, w: Tensor, y: Tensor, u: Tensor) -> Callable:
    def call():
        z = x @ w.T
        torch.mm(y, u.T, out=z)
        return z @ w, z.T @ x

    return call


def _errors(found: tuple, truth: tuple, checked: slice) -> tuple[float, float]:
    """Of dX of the checked tokens: of the whole, and of the worst token beside the root mean square."""
    difference = found[1][checked].double() - truth[1]
    rows, scale = difference.norm(dim=1), truth[1].norm() / len(truth[1]) ** 0.5
    return (difference.norm() / truth[1].norm()).item(), (rows.max() / scale).item()


def _table(options, dtype: torch.dtype, team: Team, rows: list):
    where = f"{options.shape}, teacher D={options.teacher or options.shape.d}, TP {team.ranks}, {dtype}"
    caption = (
        "Forward and backward. of products: speed relative to the four bare matrix products. MiB: peak beyond the "
        f"gradients. dX error: relative to float64, of the first {CHECKED} tokens; row: of the worst token."
    )
    table = new_table(where, caption, ["way"], ["ms", "of products", "MiB", "dX error", "row"])
    products = rows[0][1]
    for name, seconds, memory, errors in rows:
        ratio = median(p / s for p, s in zip(products, seconds))
        shown = ["–"] * 2 if errors is None else [f"{e:.1e}" for e in errors]
        table.add_row(name, milliseconds(median(seconds)), f"{ratio:.3f}", mebibytes(memory), *shown)
    return table


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    cuda = torch.cuda.is_available()
    usual = Shape(8192, 128256, 4096) if cuda else Shape(256, 4096, 256)
    parser.add_argument("--shape", type=parse_shape, default=usual, help="N,V,D of the student")
    parser.add_argument("--teacher", type=int, help="hidden size of the teacher; the student's by default")
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not cuda:
        parser.error("--device cuda needs a GPU, found none")
    if wrong := [beta for beta in options.beta if not 0 <= beta <= 1]:
        parser.error(f"--beta must lie in [0, 1], got {wrong[0]:g}")
    return options


if __name__ == "__main__":
    main()
