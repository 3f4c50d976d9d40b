"""`python -m benchmarks.losses token_loss` and `... distillation`: two losses other than the mean cross-entropy.

token_loss     PPO's clipped objective with an entropy bonus: by `token_loss`, and by the same function of the results
               of `token_statistics`, with the default budget, with 512 MiB and with 0; beside the mean cross-entropy
distillation   divergences between a teacher's and a student's softmax, beside a dense implementation: logits in the
               input's dtype, and their softmax in float32, as trainers do

Forward + backward is compared with bare matrix products in the input's dtype, without collectives: forward, dX and dW,
and for distillation the teacher's forward. Under torchrun all ranks are one tensor-parallel group.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_lce import linear_cross_entropy, token_loss, token_statistics
from parallel_lce.distillation import divergence

from .engine import ways
from .engine.problem import IGNORE_INDEX, Problem, Shape, make_problem
from .engine.report import MIB, NONE, mebibytes, new_parser, parse, session

PRODUCTS = "products"
CHECKED = slice(256)  # tokens whose dX is compared with float64
BETAS = 0.0, 0.5, 1.0
BUDGETS = {"": None, "@512MiB": 512 * MIB, "@0": 0}
USUAL = {"cuda": [Shape(8192, 128256, 4096), Shape(4096, 152064, 3584)], "cpu": [Shape(256, 4096, 256)]}
CAPTION = (
    "of products: speed relative to the bare matrix products. MiB: peak beyond the gradients. dX error: relative to "
    "float64, over the first tokens."
)
COLUMNS = {
    "MiB": lambda row: mebibytes(row["peak"] - row["kept"]),
    "dX error": lambda row: NONE if row["error"] is None else f"{row['error']:.1e}",
}


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.losses", __doc__, "--shape", "--rounds")
    parser.add_argument("loss", choices=MEASURES)
    options = parse(parser, arguments)
    with session(options) as run:
        for shape in options.shape or USUAL[options.device]:
            problem = make_problem(shape, options.dtype, run.team)
            rows = MEASURES[options.loss](problem, options.rounds)
            size = problem.weight.numel() * 4 / MIB
            title = f"{problem}, {options.dtype}, forward + backward. An fp32 dW has {size:.0f} MiB"
            run.say(ways.table(title, CAPTION, rows, "of products", COLUMNS))


def measure(calls: dict[str, Callable], truths: dict[str, Tensor], problem: Problem, rounds: int) -> list[dict]:
    """A row for each way, with the relative `error` of dX, the second tensor of its result, over the CHECKED tokens.
    None for a way without a truth."""

    def judge(way: str, found: tuple[Tensor, ...], first: tuple[Tensor, ...]) -> dict[str, float | None]:
        if way not in truths:
            return {"error": None}
        truth = truths[way]
        return {"error": ((found[1][CHECKED].double() - truth).norm() / truth.norm()).item()}

    return ways.measure(calls, problem.team, rounds, judge)


def gradients(loss: Callable[[], Tensor], x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The loss, dX and dW."""
    value = loss()
    return value.detach(), *torch.autograd.grad(value, (x, w))


def products(x: Tensor, w: Tensor, *teacher: Tensor) -> tuple[Tensor, ...]:
    z = x @ w.T
    if teacher:
        torch.mm(teacher[0], teacher[1].T, out=z)
    return z @ w, z.T @ x


# --- distillation ----------------------------------------------------------------------------------


def measure_distillation(student: Problem, rounds: int) -> list[dict]:
    """A row for the products and for each way and beta. Student and teacher have the same hidden size."""
    team, target, count = student.team, student.target, int(student.counted.sum())
    teacher = make_problem(student.shape, student.hidden.dtype, team, seed=1000)
    x, w, y, u = student.hidden, student.weight, teacher.hidden, teacher.weight
    calls: dict[str, Callable] = {PRODUCTS: partial(products, x, w, y, u)}
    truths: dict[str, Tensor] = {}
    x, w = (tensor.detach().requires_grad_() for tensor in (x, w))
    for beta in BETAS:
        loss = partial(divergence, x, w, y, u, beta=beta, target=target, process_group=team.group)
        by_token = partial(loss, reduction="none")
        calls[f"ours, mean, beta {beta:g}"] = partial(gradients, partial(loss, reduction="mean"), x, w)
        calls[f"ours, none, beta {beta:g}"] = partial(gradients, lambda each=by_token: each().sum() / count, x, w)
        if team.group is None:
            calls[f"dense, beta {beta:g}"] = partial(gradients, partial(_dense, x, w, y, u, target, beta, count), x, w)
            wide = [t.detach().double().requires_grad_() for t in (x[CHECKED], w, y[CHECKED], u)]
            truth = gradients(partial(_dense, *wide, target[CHECKED], beta, count), *wide[:2])[1]
            del wide
            truths |= {f"{way}, beta {beta:g}": truth for way in ("dense", "ours, mean", "ours, none")}
    return measure(calls, truths, student, rounds)


def _dense(x: Tensor, w: Tensor, y: Tensor, u: Tensor, target: Tensor, beta: float, count: int) -> Tensor:
    """The mean divergence from plain torch: logits in the input's dtype, softmax at least in fp32."""
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
    return (divergences * (target != IGNORE_INDEX)).sum() / count


# --- a loss of one's own ---------------------------------------------------------------------------


def measure_token_loss(problem: Problem, rounds: int) -> list[dict]:
    """A row for the products and for each way and budget."""
    team, target = problem.team, problem.target
    calls: dict[str, Callable] = {PRODUCTS: partial(products, problem.hidden, problem.weight)}
    x, w = (tensor.detach().requires_grad_() for tensor in (problem.hidden, problem.weight))
    generator = torch.Generator(team.device).manual_seed(1)
    old, advantage = torch.randn(2, len(target), device=team.device, generator=generator)
    old -= 12

    def by_token_loss(**options) -> Tensor:
        return token_loss(x, w, target, ppo, old, advantage, entropy=True, **options)[0]

    def by_statistics(**options) -> Tensor:
        losses, _ = ppo(token_statistics(x, w, target, entropy=True, **options), old, advantage)
        return losses.where(target != IGNORE_INDEX, 0.0).sum()

    def mean(**options) -> Tensor:
        return linear_cross_entropy(x, w, target, ignore_index=IGNORE_INDEX, **options)

    losses = {"token_loss": by_token_loss, "token_statistics": by_statistics, "mean cross-entropy": mean}
    for suffix, budget in BUDGETS.items():
        for name, loss in losses.items():
            limited = partial(loss, process_group=team.group, logits_budget=budget)
            calls[name + suffix] = partial(gradients, limited, x, w)
    truths = {}
    if team.group is None:
        truth = _dx(*(t.detach() for t in (x[CHECKED], w, target[CHECKED], old[CHECKED], advantage[CHECKED])))
        truths = {name: truth for name in calls if name.startswith("token")}
    return measure(calls, truths, problem, rounds)


def ppo(statistics, old, advantage):
    ratio = (statistics.target_log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain - 0.01 * statistics.entropy, {"clipped": (ratio - 1).abs() > 0.2}


def _dx(x: Tensor, w: Tensor, target: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """dX in float64."""
    x = x.double().requires_grad_()
    log_p = (x @ w.double().T).log_softmax(-1)
    picked = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    losses, _ = ppo(SimpleNamespace(target_log_prob=picked, entropy=entropy), old, advantage)
    return torch.autograd.grad(losses.where(target != IGNORE_INDEX, 0.0).sum(), x)[0]


MEASURES = {"token_loss": measure_token_loss, "distillation": measure_distillation}


if __name__ == "__main__":
    main()
