"""`python -m benchmarks.distillation`: divergences between a teacher's and a student's softmax, forward + backward.

They are compared with four bare matrix products and with a dense implementation. The products are the student's
forward, dX and dW, and the teacher's forward, in the input's dtype, without collectives. The dense implementation makes
the logits, and their softmax in float32, as trainers do. Under torchrun all ranks are one tensor-parallel group.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_lce.distillation import divergence

from .engine import ways
from .engine.problem import IGNORE_INDEX, Shape, make_problem
from .engine.report import new_parser, parse, session
from .engine.team import Team

PRODUCTS = "products"
BETAS = 0.0, 0.5, 1.0
CHECKED = 256  # tokens whose dX is compared with float64
USUAL = {"cuda": [Shape(8192, 128256, 4096)], "cpu": [Shape(256, 4096, 256)]}


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.distillation", __doc__, "--shape", "--rounds")
    options = parse(parser, arguments)
    caption = f"of products: speed relative to the four bare matrix products. {ways.GRADIENT_CAPTION}"
    with session(options) as run:
        for shape in options.shape or USUAL[options.device]:
            rows = measure(run.team, shape, options.dtype, options.rounds)
            title = f"{shape}, TP {run.team.ranks}, {options.dtype}, forward + backward"
            run.say(ways.table(title, caption, rows, "of products", ways.GRADIENT_COLUMNS))


def measure(team: Team, shape: Shape, dtype: torch.dtype, rounds: int) -> list:
    """A row for the products and for each way and beta. Student and teacher have the same hidden size."""
    student, teacher = (make_problem(shape, dtype, team, seed) for seed in (0, 1000))
    x, w = (t.requires_grad_() for t in (student.hidden, student.weight))
    y, u, target = teacher.hidden, teacher.weight, student.target
    calls: dict[str, Callable] = {PRODUCTS: partial(_products, x.detach(), w.detach(), y, u)}
    truths: dict[str, Tensor] = {}
    checked, count = slice(0, CHECKED), int(student.counted.sum())
    for beta in BETAS:
        loss = partial(divergence, x, w, y, u, beta=beta, target=target, process_group=team.group)
        for reduction in ("mean", "none"):
            call = partial(_ours, partial(loss, reduction=reduction), x, w, count)
            calls[f"ours, {reduction}, beta {beta:g}"] = call
        if team.group is None:
            calls[f"dense, beta {beta:g}"] = partial(_dense, x, w, y, u, target, beta, count)
            wide = [t.detach().double() for t in (x[checked], w, y[checked], u)]
            truth = _dense(*wide, target=target[checked], beta=beta, count=count)[1]
            del wide
            truths |= {f"{way}, beta {beta:g}": truth for way in ("dense", "ours, mean", "ours, none")}
    return ways.measure(calls, team, rounds, ways.against(truths))


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
