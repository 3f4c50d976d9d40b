"""`python -m benchmarks.parity [FILE.safetensors ...]`: errors of log-probabilities, entropies and their gradients.

Compares three ways to compute them with float64, all from the same hidden states and the same weight in bf16:

ours           `token_statistics`
bf16 logits    logits in bf16, converted to fp32 for the softmax, as trainers do
fp32 head      hidden states and weight converted to fp32, products in full fp32 (no TF32)

A training by configs/snapshots.yaml writes the files. The report also measures random inputs: normal logits with four
standard deviations, and targets drawn from the softmax.

Exit status: 0 if the errors of ours are within the limits of docs/benchmarks.md, else 1; 2 for a file that cannot be
measured.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce import token_statistics

from .engine import snapshots
from .engine.problem import Problem, Shape
from .engine.report import new_parser, new_table, parse, session
from .engine.team import Team

DEVIATIONS = (0.01, 1.0, 5.0, 20.0)  # standard deviations of random logits; the first ones are nearly flat
DEFAULT_SHAPE = {"cpu": Shape(512, 8192, 512), "cuda": Shape(8192, 131072, 4096)}
BAND = 0.01  # ratios outside of 1 ± BAND are counted
# Ours may differ by twice the fp32 head's error plus this number of fp32 roundings of the largest sum of magnitudes:
# tensor cores truncate where an fp32 product rounds.
ROUNDINGS = 4
OURS, ROUNDED, FP32_HEAD = "ours", "bf16 logits", "fp32 head"
# Edges of the groups of tokens, as 1 - p of a token's largest entry. Gradients are as small as 1 - p: in one group, the
# gradients of other tokens would hide the errors of confident ones.
EDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 0.0)
OUTPUTS = "log-probability", "entropy"
FEWEST = 8  # smaller groups are not judged: the errors of few tokens may be small by luck
CAPTION = (
    "Differences from float64, in nats, of the target's log-probability and of the entropy. ratio: exp(difference), "
    "the importance ratio that PPO would see for an unchanged policy; outside: share of the tokens whose ratio is not "
    f"within 1 ± {BAND:g}."
)
GRADIENT_CAPTION = (
    "Relative errors of dX over the tokens whose largest entry has this 1 - p: ours / bf16 logits / fp32 head."
)


class Found(NamedTuple):
    """The results of one way: of each of the OUTPUTS its values, and the gradient of their sum."""

    values: Sequence[Tensor]  # [N] each, fp32 or fp64, in nats
    gradients: Sequence[Tensor]  # dX, [N, D] each
    tops: Tensor = torch.empty(0)  # [N], log-probabilities of the tokens' largest entries; of `dense` alone
    largest_logit: float = 0.0  # max |z|; of `dense` alone


def ours(problem: Problem) -> Found:
    """The results of `token_statistics`."""
    x = problem.hidden.detach().requires_grad_()
    statistics = token_statistics(x, problem.weight, problem.target, entropy=True)
    assert statistics.target_log_prob is not None and statistics.entropy is not None  # asked for
    values = statistics.target_log_prob, statistics.entropy
    gradients = [torch.autograd.grad(value.sum(), x, retain_graph=True)[0] for value in values]
    return Found([value.detach() for value in values], gradients)


def dense(problem: Problem, dtype: torch.dtype) -> Found:
    """The results of plain torch, with logits in `dtype` and a softmax at least in fp32."""
    weight = problem.weight.to(dtype)
    values, gradients, tops, largest_logit = [], [], [], 0.0
    for tokens in problem.blocks:
        x = problem.hidden[tokens].to(dtype).requires_grad_()
        z = x @ weight.T
        largest_logit = max(largest_logit, z.detach().abs().max().item())
        log_p = z.to(torch.promote_types(dtype, torch.float32)).log_softmax(1)
        tops.append(log_p.detach().amax(1))
        of_target = log_p.gather(1, problem.target[tokens, None]).squeeze(1)
        of_block = of_target, -(log_p.exp() * log_p).sum(1)
        gradients.append([torch.autograd.grad(value.sum(), x, retain_graph=True)[0] for value in of_block])
        values.append([value.detach() for value in of_block])
    of_values, of_gradients = ([torch.cat(blocks) for blocks in zip(*each)] for each in (values, gradients))
    return Found(of_values, of_gradients, torch.cat(tops), largest_logit)


def measure(problem: Problem) -> dict:
    """The errors of all three ways relative to float64, as JSON has them."""
    truth, deviations = dense(problem, torch.float64), {}
    groups = _groups(truth.tops)
    ways = {OURS: ours, ROUNDED: partial(dense, dtype=torch.bfloat16), FP32_HEAD: partial(dense, dtype=torch.float32)}
    for way, compute in ways.items():
        found = compute(problem)
        deviations[way] = _deviation(found, truth)
        for name, dx, true in zip(OUTPUTS, found.gradients, truth.gradients):
            off, size = (dx - true).norm(dim=1), true.norm(dim=1)
            for group, tokens in groups:
                group["errors"].setdefault(name, {})[way] = (off[tokens].norm() / size[tokens].norm()).item()
    # Roundings of a target's logit are relative to the sum of |x_k w_k|. This is the largest such sum.
    largest_sum = max(
        (problem.hidden[tokens].float() * problem.weight[problem.target[tokens]].float()).abs().sum(1).max().item()
        for tokens in problem.blocks
    )
    slack = ROUNDINGS * torch.finfo(torch.float32).eps * max(1.0, largest_sum)
    for group, _ in groups:
        group["holds"] = group_holds(group)
    allowed = {name: 2 * deviations[FP32_HEAD][name] + slack for name in ("largest", "entropy_largest")}
    return {
        "name": problem.name,
        **vars(problem.shape),
        "max_abs_logit": truth.largest_logit,
        "max_sum_of_magnitudes": largest_sum,
        "allowed": allowed,
        "holds": all(deviations[OURS][name] <= allowed[name] for name in allowed)  # not for NaN
        and all(group["holds"] for group, _ in groups),
        "deviations": deviations,
        "groups": [group for group, _ in groups],
    }


def _groups(tops: Tensor) -> list[tuple[dict, Tensor]]:
    """The groups that have tokens: each the report's entry, and a mask `[N]` of its tokens."""
    miss = tops.expm1().neg().clamp(min=1e-300)
    groups = []
    for high, low in zip(EDGES, EDGES[1:]):
        tokens = (miss > low) & (miss <= high)
        if tokens.any():
            groups.append(({"low": low, "high": high, "tokens": int(tokens.sum()), "errors": {}}, tokens))
    return groups


def group_holds(group: dict) -> bool:
    """Whether each error of ours is at most twice the error of rounded logits plus one rounding of the result."""
    rounding = torch.finfo(torch.bfloat16).eps / 2
    ways = group["errors"].values()
    return group["tokens"] < FEWEST or all(way[OURS] <= 2 * way[ROUNDED] + rounding for way in ways)  # not for NaN


def _deviation(found: Found, truth: Found) -> dict[str, float]:
    """Absolute differences over the tokens. NaN in a value gives NaN."""
    off, entropy_off = (value.double() - true for value, true in zip(found.values, truth.values))
    ratio = off.exp()
    within = (ratio >= 1 - BAND) & (ratio <= 1 + BAND)  # false for NaN
    return {
        "largest": off.abs().max().item(),
        "smallest_ratio": ratio.min().item(),
        "largest_ratio": ratio.max().item(),
        "outside": 1 - within.double().mean().item(),
        "entropy_largest": entropy_off.abs().max().item(),
    }


@torch.no_grad()
def random_problem(shape: Shape, deviation: float, team: Team) -> Problem:
    """bf16 inputs whose logits are normal with standard deviation `deviation`: x ~ N(0, 1), W ~ N(0, deviation^2 / D).
    Targets are drawn from the softmax, as tokens are sampled from a policy."""
    options = {"generator": torch.Generator(team.device).manual_seed(0), "device": team.device}
    hidden = torch.randn(shape.n, shape.d, **options).bfloat16()
    weight = torch.randn(shape.v, shape.d, **options).mul_(deviation * shape.d**-0.5).bfloat16()
    target = torch.empty(shape.n, dtype=torch.int64, device=team.device)
    problem = Problem(shape, team, hidden, weight, target, name=f"random, std {deviation:g}")
    for tokens in problem.blocks:
        z = (hidden[tokens] @ weight.T).float()
        target[tokens] = z.softmax(1).multinomial(1, generator=options["generator"]).squeeze(1)
    return problem


def tables(cases: list[dict]) -> list:
    """Two tables: the differences of each way, and the errors of dX by groups of tokens."""
    columns = ["largest", "ratio, smallest–largest", "outside", "entropy, largest"]
    values = new_table("Log-probabilities against float64", CAPTION, ["inputs", "max |z|", "computed by"], columns)
    gradients = new_table("dX against float64", GRADIENT_CAPTION, ["inputs", "1 - p", "tokens"], [*OUTPUTS])
    for case in cases:
        title = "{name}: N={n}, V={v}, D={d}".format_map(case)
        for way, its in case["deviations"].items():
            ratio = f"{its['smallest_ratio']:.6f}–{its['largest_ratio']:.6f}"
            row = [f"{its['largest']:.1e}", ratio, f"{its['outside']:.2%}", f"{its['entropy_largest']:.1e}"]
            values.add_row(title, f"{case['max_abs_logit']:.1f}", way, *row, style="bold" if way == OURS else None)
        for group in case["groups"]:
            errors = (" / ".join(f"{off:.1e}" for off in ways.values()) for ways in group["errors"].values())
            edges = f"{group['low']:.0e} to {group['high']:.0e}" if group["low"] else f"at most {group['high']:.0e}"
            gradients.add_row(title, edges, str(group["tokens"]), *errors)
    return [values, gradients]


def verdict(case: dict) -> str:
    """Names the limits that ours exceeds."""
    its, allowed = case["deviations"][OURS], case["allowed"]
    words = [f"{name} is {its[name]:.1e}, allowed {allowed[name]:.1e}" for name in allowed]
    words += [f"dX is off where 1 - p is at most {group['high']:.0e}" for group in case["groups"] if not group["holds"]]
    return f"{case['name']}: {'ours holds' if case['holds'] else 'FAILED'}: {'; '.join(words)}"


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.parity", __doc__, "--json", "--shape")
    parser.add_argument("files", nargs="*", metavar="FILE", help="safetensors files of hidden, weight and target")
    options = parse(parser, arguments)
    torch.set_float32_matmul_precision("highest")  # no TF32
    with session(options) as run:
        sources = [partial(snapshots.read, path) for path in options.files]
        for shape in options.shape or [DEFAULT_SHAPE[options.device]]:
            sources += [partial(random_problem, shape, deviation) for deviation in DEVIATIONS]
        status, cases = snapshots.report_on(sources, run, measure), run.content["cases"]
        for part in (*tables(cases), *map(verdict, cases)):
            run.say(part)
    return status or int(not all(case["holds"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
