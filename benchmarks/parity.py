"""`python -m benchmarks.parity [FILE.safetensors ...]`: errors of log-probabilities and entropies.

Compares three ways to compute them with float64, all from the same hidden states and the same weight in bf16:

ours           `token_statistics`
bf16 logits    logits in bf16, converted to fp32 for the softmax, as trainers do
fp32 head      hidden states and weight converted to fp32, products in full fp32 (no TF32)

A training by configs/snapshots.yaml writes the files. The report also measures random inputs: normal logits with four
standard deviations, and targets drawn from the softmax.
"""

import torch
from torch import Tensor

from parallel_lce import token_statistics

from .engine.problem import Problem, Shape, read_snapshot
from .engine.report import new_parser, new_table, parse, session
from .engine.team import Team

DEVIATIONS = (0.01, 1.0, 5.0, 20.0)  # standard deviations of random logits; the first ones are nearly flat
DEFAULT_SHAPE = {"cpu": Shape(512, 8192, 512), "cuda": Shape(8192, 131072, 4096)}
BAND = 0.01  # ratios outside of 1 ± BAND are counted
OURS, ROUNDED, FP32_HEAD = "ours", "bf16 logits", "fp32 head"
CAPTION = (
    "Differences from float64, in nats, of the target's log-probability and of the entropy. ratio: exp(difference), "
    "the importance ratio that PPO would see for an unchanged policy; outside: share of the tokens whose ratio is not "
    f"within 1 ± {BAND:g}."
)


@torch.no_grad()
def dense(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [N] of plain torch: logits in `dtype`, a softmax at least in fp32."""
    weight, wide = problem.weight.to(dtype), torch.promote_types(dtype, torch.float32)
    log_probs, entropies = [], []
    for tokens in problem.blocks:
        z = problem.hidden[tokens].to(dtype) @ weight.T
        log_p = z.to(wide).log_softmax(1)
        log_probs.append(log_p.gather(1, problem.target[tokens, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(1))
    return torch.cat(log_probs), torch.cat(entropies)


def measure(problem: Problem) -> dict:
    """The errors of all three ways relative to float64, as JSON has them."""
    statistics = token_statistics(problem.hidden, problem.weight, problem.target, entropy=True)
    truth = dense(problem, torch.float64)
    deviations = {
        OURS: _deviation(statistics.target_log_prob, statistics.entropy, *truth),
        ROUNDED: _deviation(*dense(problem, torch.bfloat16), *truth),
        FP32_HEAD: _deviation(*dense(problem, torch.float32), *truth),
    }
    return {"name": f"{problem.name}{problem.shape}", "deviations": deviations}


def _deviation(log_probs: Tensor, entropies: Tensor, true_log_probs: Tensor, true_entropies: Tensor) -> dict:
    """Absolute differences over the tokens. NaN in a value gives NaN."""
    off, entropy_off = log_probs.double() - true_log_probs, entropies.double() - true_entropies
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
    problem = Problem(shape, team, hidden, weight, target, name=f"random, std {deviation:g}, ")
    for tokens in problem.blocks:
        z = (hidden[tokens] @ weight.T).float()
        target[tokens] = z.softmax(1).multinomial(1, generator=options["generator"]).squeeze(1)
    return problem


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.parity", __doc__, "--json", "--shape")
    parser.add_argument("files", nargs="*", metavar="FILE", help="safetensors files of hidden, weight and target")
    options = parse(parser, arguments)
    torch.set_float32_matmul_precision("highest")  # no TF32
    columns = ["largest", "ratio, smallest–largest", "outside", "entropy, largest"]
    table = new_table("Log-probabilities against float64", CAPTION, ["inputs", "computed by"], columns)
    with session(options) as run:
        cases = run.content["cases"] = [measure(read_snapshot(path, run.team)) for path in options.files]
        for shape in options.shape or [DEFAULT_SHAPE[options.device]]:
            cases += [measure(random_problem(shape, deviation, run.team)) for deviation in DEVIATIONS]
        for case in cases:
            for way, its in case["deviations"].items():
                ratio = f"{its['smallest_ratio']:.6f}–{its['largest_ratio']:.6f}"
                row = [f"{its['largest']:.1e}", ratio, f"{its['outside']:.2%}", f"{its['entropy_largest']:.1e}"]
                table.add_row(case["name"], way, *row, style="bold" if way == OURS else None)
        run.say(table)
        run.save()


if __name__ == "__main__":
    main()
