"""`python -m benchmarks.token_loss`: PPO's clipped objective with an entropy bonus, forward + backward.

By `token_loss`, and by the same function of the results of `token_statistics`, with the default budget, with 512 MiB
and with 0. They are compared with the three bare matrix products of forward, dX and dW in the input's dtype, without
collectives, and with the mean cross-entropy. Under torchrun all ranks are one tensor-parallel group.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from parallel_lce import linear_cross_entropy, token_loss, token_statistics

from .engine import ways
from .engine.problem import IGNORE_INDEX, Problem, Shape, make_problem
from .engine.report import MIB, new_parser, parse, session

PRODUCTS = "products"
BUDGETS = {"": None, "@512MiB": 512 * MIB, "@0": 0}
CHECKED = 128  # tokens whose dX is compared with float64
USUAL = {"cuda": [Shape(8192, 128256, 4096), Shape(4096, 152064, 3584)], "cpu": [Shape(256, 4096, 256)]}


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.token_loss", __doc__, "--shape", "--rounds")
    options = parse(parser, arguments)
    caption = f"of products: speed relative to the three bare matrix products. {ways.GRADIENT_CAPTION}"
    with session(options) as run:
        for shape in options.shape or USUAL[options.device]:
            problem = make_problem(shape, options.dtype, run.team)
            rows = measure(problem, options.rounds)
            size = problem.weight.numel() * 4 / MIB
            title = f"{problem}, {options.dtype}, forward + backward. An fp32 dW has {size:.0f} MiB"
            run.say(ways.table(title, caption, rows, "of products", ways.GRADIENT_COLUMNS))


def measure(problem: Problem, rounds: int) -> list[dict]:
    """A row for the products and for each way and budget."""
    team, target, x, w = problem.team, problem.target, problem.hidden, problem.weight
    generator = torch.Generator(team.device).manual_seed(1)
    old, advantage = torch.randn(2, len(target), device=team.device, generator=generator)
    given, values = (x.requires_grad_(), w.requires_grad_(), target), (old - 12, advantage)
    losses = {"token_loss": _by_token_loss, "token_statistics": _by_statistics, "mean cross-entropy": _mean}
    calls: dict[str, Callable] = {PRODUCTS: partial(_products, x.detach(), w.detach())}
    for suffix, budget in BUDGETS.items():
        options = dict(process_group=team.group, logits_budget=budget)
        for name, loss in losses.items():
            calls[name + suffix] = partial(_gradients, loss, given, values, options)
    truth = _dense(*given, *values) if team.group is None else None
    truths = {} if truth is None else {name: truth for name in calls if name.startswith("token")}
    return ways.measure(calls, team, rounds, ways.against(truths))


def ppo(statistics, old, advantage):
    ratio = (statistics.target_log_prob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain - 0.01 * statistics.entropy, {"clipped": (ratio - 1).abs() > 0.2}


def _by_token_loss(given, values, options):
    total, _ = token_loss(*given, ppo, *values, entropy=True, **options)
    return total


def _by_statistics(given, values, options):
    losses, _ = ppo(token_statistics(*given, entropy=True, **options), *values)
    return losses.where(given[2] != IGNORE_INDEX, 0.0).sum()


def _mean(given, values, options):
    return linear_cross_entropy(*given, ignore_index=IGNORE_INDEX, **options)


def _gradients(loss, given, values, options):
    """The loss, dX and dW."""
    total = loss(given, values, options)
    return total.detach(), *torch.autograd.grad(total, given[:2])


def _dense(x, w, target, old, advantage):
    """dX of the first tokens, in float64."""
    x, target = x[:CHECKED].detach().double().requires_grad_(), target[:CHECKED]
    log_p = (x @ w.detach().double().T).log_softmax(-1)
    picked = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    losses, _ = ppo(SimpleNamespace(target_log_prob=picked, entropy=entropy), old[:CHECKED], advantage[:CHECKED])
    (dx,) = torch.autograd.grad(losses.where(target != IGNORE_INDEX, 0.0).sum(), x)
    return dx


def _products(x, w):
    z = x @ w.T
    return z @ w, z.T @ x


if __name__ == "__main__":
    main()
