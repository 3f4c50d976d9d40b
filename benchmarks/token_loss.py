"""`python -m benchmarks.token_loss`: PPO's clipped objective with an entropy bonus, forward + backward.

By `token_loss`, and by the same function of the results of `token_statistics`, with a default budget and with those
given. They are compared with the three bare matrix products of forward, dX and dW in the input's dtype, without
collectives, and with the mean cross-entropy. Under torchrun all ranks are one tensor-parallel group.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace

import torch
import torch.distributed as dist

from parallel_lce import linear_cross_entropy, token_loss, token_statistics

from .options import DEFAULT_DTYPE
from .peak_memory import peak_memory
from .problem import IGNORE_INDEX, Problem, Shape, make_problem
from .report import DTYPES, MIB, machine, mebibytes, milliseconds, new_parser, new_table, parse, parse_shape, speaker
from .team import Team
from .timing import interleaved, ratios

PRODUCTS = "products"
CHECKED = 128  # tokens whose dX is compared with float64
USUAL = {"cuda": [Shape(8192, 128256, 4096), Shape(4096, 152064, 3584)], "cpu": [Shape(256, 4096, 256)]}


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.token_loss", __doc__)
    words = "tokens, vocabulary of all ranks, hidden size; may be repeated"
    parser.add_argument("--shape", action="append", metavar="N,V,D", type=parse_shape, help=words)
    parser.add_argument("--budgets", type=int, nargs="*", default=[1024, 512, 0], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES)
    options = parse(parser, arguments)
    team, dtype = Team.here(options.device), getattr(torch, options.dtype or DEFAULT_DTYPE[options.device])
    say = speaker(team.rank == 0)
    say(", ".join(f"{name} {value}" for name, value in machine(team.device).items()))
    caption = (
        "Forward + backward. of products: speed relative to the three bare matrix products, median (smallest to "
        "largest). MiB: peak beyond the gradients. dX error: relative to float64, over the first "
        f"{CHECKED} tokens."
    )
    for shape in options.shape or USUAL[options.device]:
        rows = measure(make_problem(shape, dtype, team), [None, *options.budgets], options.rounds)
        title = f"{shape}, TP {team.ranks}, {dtype}. An fp32 dW has {shape.v * shape.d * 4 / team.ranks / MIB:.0f} MiB"
        table = new_table(title, caption, ["way"], ["ms", "of products", "MiB", "dX error"])
        for name, seconds, memory, error in rows:
            middle, least, most = ratios(rows[0][1], seconds)
            speed = f"{middle:.3f} ({least:.3f} to {most:.3f})"
            shown = "–" if error is None else f"{error:.1e}"
            table.add_row(name, milliseconds(median(seconds)), speed, mebibytes(memory), shown)
        say(table)
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(problem: Problem, budgets: list[int | None], rounds: int) -> list:
    """`[(name, seconds per round, bytes beyond the results, relative error of dX or None)]`. `budgets`: in MiB."""
    team, target, x, w = problem.team, problem.target, problem.hidden, problem.weight
    generator = torch.Generator(team.device).manual_seed(1)
    old, advantage = torch.randn(2, len(target), device=team.device, generator=generator)
    given, values = (x.requires_grad_(), w.requires_grad_(), target), (old - 12, advantage)
    calls: dict[str, Callable] = {PRODUCTS: partial(_products, x.detach(), w.detach())}
    for budget in budgets:
        options = dict(process_group=team.group, logits_budget=None if budget is None else budget * MIB)
        named = "" if budget is None else f"@{budget}MiB"
        calls[f"token_loss{named}"] = partial(_gradients, _by_token_loss, given, values, options)
        calls[f"token_statistics{named}"] = partial(_gradients, _by_statistics, given, values, options)
        calls[f"mean cross-entropy{named}"] = partial(_gradients, _mean, given, values, options)
    truth, errors = _dense(*given, *values) if team.group is None else None, {}
    for name, call in calls.items():
        if truth is not None and name.startswith("token"):
            off = call()[1][:CHECKED].double() - truth
            errors[name] = (off.norm() / truth.norm()).item()
    memory = {name: peak_memory(call, team.device) for name, call in calls.items()}
    seconds = interleaved(calls, team, rounds)
    return [(name, seconds[name], memory[name][0] - memory[name][1], errors.get(name)) for name in calls]


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
