"""`python -m benchmarks.parity [FILE.safetensors ...]`: errors of log-probabilities and entropies.

Compares three ways to compute them with float64, all from the same hidden states and the same weight in bf16:

ours           `token_statistics`
bf16 logits    logits in bf16, converted to fp32 for the softmax, as trainers do
fp32 head      hidden states and weight converted to fp32, products in full fp32 (no TF32)

A training by configs/snapshots.yaml writes the files. The report also measures random inputs: normal logits with four
standard deviations, and targets drawn from the softmax.
"""

from dataclasses import replace

import torch
from torch import Tensor

from parallel_lce import token_statistics

from .engine.problem import Problem, Shape, make_problem, read_snapshot
from .engine.report import new_parser, new_table, parse, session
from .engine.team import Team

DEVIATIONS = (0.01, 1.0, 5.0, 20.0)  # standard deviations of random logits; the first ones are nearly flat
DEFAULT_SHAPE = {"cpu": Shape(512, 8192, 512), "cuda": Shape(8192, 131072, 4096)}
BAND = 0.01  # ratios outside of 1 ± BAND are counted
OURS, ROUNDED, FP32_HEAD = "ours", "bf16 logits", "fp32 head"
CAPTION = (
    "In nats, of the target's log-probability and of the entropy. outside: share of the tokens whose importance ratio, "
    f"exp(difference), is not within 1 ± {BAND:g} for an unchanged policy."
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
    outside = ~((off.exp() - 1).abs() <= BAND)  # true for NaN
    return {
        "log-probability": off.abs().max().item(),
        "outside": outside.double().mean().item(),
        "entropy": entropy_off.abs().max().item(),
    }


@torch.no_grad()
def random_problem(shape: Shape, deviation: float, team: Team) -> Problem:
    """bf16 inputs whose logits are normal with standard deviation `deviation`. Targets are drawn from the softmax, as
    tokens are sampled from a policy."""
    problem = make_problem(shape, torch.bfloat16, team)
    problem.weight.mul_(deviation)
    generator = torch.Generator(team.device).manual_seed(0)
    for tokens in problem.blocks:
        p = (problem.hidden[tokens] @ problem.weight.T).float().softmax(1)
        problem.target[tokens] = p.multinomial(1, generator=generator).squeeze(1)
    return replace(problem, name=f"random, std {deviation:g}, ")


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.parity", __doc__, "--json", "--shape")
    parser.add_argument("files", nargs="*", metavar="FILE", help="safetensors files of hidden, weight and target")
    options = parse(parser, arguments)
    torch.set_float32_matmul_precision("highest")  # no TF32
    columns = ["log-probability", "outside", "entropy"]
    table = new_table("Largest differences from float64", CAPTION, ["inputs", "computed by"], columns)
    with session(options) as run:
        cases = run.content["cases"] = [measure(read_snapshot(path, run.team)) for path in options.files]
        for shape in options.shape or [DEFAULT_SHAPE[options.device]]:
            cases += [measure(random_problem(shape, deviation, run.team)) for deviation in DEVIATIONS]
        for case in cases:
            for way, its in case["deviations"].items():
                texts = f"{its['log-probability']:.1e}", f"{its['outside']:.2%}", f"{its['entropy']:.1e}"
                table.add_row(case["name"], way, *texts, style="bold" if way == OURS else None)
        run.say(table)
        run.save()


if __name__ == "__main__":
    main()
