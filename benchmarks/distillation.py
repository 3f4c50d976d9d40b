"""`python -m benchmarks.distillation`: divergences between a teacher's and a student's softmax, forward + backward.

They are compared with four bare matrix products and with a dense implementation. The products are the student's
forward, dX and dW, and the teacher's forward, in the input's dtype, without collectives. The dense implementation makes
the logits, and their softmax in float32, as trainers do. Under torchrun all ranks are one tensor-parallel group.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel_lce.distillation import divergence

from .options import DEFAULT_DTYPE
from .peak_memory import peak_memory
from .problem import IGNORE_INDEX, Shape, make_problem
from .report import DTYPES, machine, mebibytes, milliseconds, new_parser, new_table, parse, parse_shape, speaker
from .team import Team
from .timing import interleaved, ratios

PRODUCTS = "products"
CHECKED = 256  # tokens whose dX is compared with float64


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.distillation", __doc__)
    usual = Shape(8192, 128256, 4096) if torch.cuda.is_available() else Shape(256, 4096, 256)
    parser.add_argument("--shape", type=parse_shape, default=usual, metavar="N,V,D", help="of the student")
    parser.add_argument("--teacher", type=int, metavar="D", help="hidden size of the teacher; the student's by default")
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES)
    options = parse(parser, arguments)
    team, dtype = Team.here(options.device), getattr(torch, options.dtype or DEFAULT_DTYPE[options.device])
    teacher = options.teacher or options.shape.d
    rows = measure(team, options.shape, teacher, dtype, options.beta, options.rounds)
    say = speaker(team.rank == 0)
    say(", ".join(f"{name} {value}" for name, value in machine(team.device).items()))
    caption = (
        "Forward + backward. of products: speed relative to the four bare matrix products. MiB: peak beyond the "
        f"gradients. dX error: relative to float64, over the first {CHECKED} tokens."
    )
    title = f"{options.shape}, teacher D={teacher}, TP {team.ranks}, {dtype}"
    table = new_table(title, caption, ["way"], ["ms", "of products", "MiB", "dX error"])
    for name, seconds, memory, error in rows:
        speed = ratios(rows[0][1], seconds)[0]
        shown = "–" if error is None else f"{error:.1e}"
        table.add_row(name, milliseconds(median(seconds)), f"{speed:.3f}", mebibytes(memory), shown)
    say(table)
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(team: Team, shape: Shape, teacher_size: int, dtype: torch.dtype, betas: list[float], rounds: int) -> list:
    """`[(name, seconds per round, bytes beyond the results, relative error of dX or None)]`"""
    student = make_problem(shape, dtype, team, seed=0)
    teacher = make_problem(Shape(shape.n, shape.v, teacher_size), dtype, team, seed=1000)
    x, w = (t.requires_grad_() for t in (student.hidden, student.weight))
    y, u, target = teacher.hidden, teacher.weight, student.target
    calls: dict[str, Callable] = {PRODUCTS: partial(_products, x.detach(), w.detach(), y, u)}
    errors: dict[str, float] = {}
    checked, count = slice(0, CHECKED), int(student.counted.sum())
    for beta in betas:
        ways: dict[str, Callable] = {}
        if team.group is None:
            ways["dense"] = partial(_dense, x, w, y, u, target, beta, count)
        loss = partial(divergence, x, w, y, u, beta=beta, target=target, process_group=team.group)
        for reduction in ("mean", "none"):
            ways[f"ours, {reduction}"] = partial(_ours, partial(loss, reduction=reduction), x, w, count)
        calls |= {f"{way}, beta {beta:g}": call for way, call in ways.items()}
        if team.group is None:
            wide = [t.detach().double() for t in (x[checked], w, y[checked], u)]
            truth = _dense(*wide, target=target[checked], beta=beta, count=count)[1]
            del wide
            for way, call in ways.items():
                off = call()[1][checked].double() - truth
                errors[f"{way}, beta {beta:g}"] = (off.norm() / truth.norm()).item()
    memory = {name: peak_memory(call, team.device) for name, call in calls.items()}
    seconds = interleaved(calls, team, rounds)
    return [(name, seconds[name], memory[name][0] - memory[name][1], errors.get(name)) for name in calls]


def _ours(loss: Callable, x: Tensor, w: Tensor, count: int) -> tuple[Tensor, ...]:
    """The mean divergence, dX and dW."""
    mean = loss()
    mean = mean if mean.dim() == 0 else mean.sum() / count
    return mean.detach(), *torch.autograd.grad(mean, (x, w))


def _dense(x: Tensor, w: Tensor, y: Tensor, u: Tensor, target: Tensor, beta: float, count: int) -> tuple[Tensor, ...]:
    """The same results from plain torch: logits in the input's dtype, softmax at least in fp32."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.no_grad():
        log_q = (y @ u.T).to(wide).log_softmax(-1)
    log_p = (x @ w.T).to(wide).log_softmax(-1)

    def kl(of: Tensor, log_r: Tensor) -> Tensor:
        return F.kl_div(log_r, of, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        divergences = kl(log_q, log_p) if beta == 0 else kl(log_p, log_q)
    else:
        logs = torch.tensor([beta, 1 - beta], dtype=wide, device=x.device).log()
        log_m = torch.logsumexp(torch.stack([log_q + logs[0], log_p + logs[1]]), 0)
        divergences = beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    mean = (divergences * (target != IGNORE_INDEX)).sum() / count
    return mean.detach(), *torch.autograd.grad(mean, (x, w))


def _products(x: Tensor, w: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    z = x @ w.T
    torch.mm(y, u.T, out=z)
    return z @ w, z.T @ x


if __name__ == "__main__":
    main()
