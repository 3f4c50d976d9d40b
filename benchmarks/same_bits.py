"""`python -m benchmarks.same_bits`: tokens whose statistics change a bit with what surrounds them.

Each row is a situation: other tokens, memory or, under torchrun, shards of the vocabulary. Its numbers are the tokens
whose bits differ from those of one rank, without gradients. A third of the tokens are sure of their targets. More ranks
than GPUs share these, over gloo: `torchrun --nproc-per-node 8 -m benchmarks.same_bits`.
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from parallel_lce import TokenStatistics, token_statistics

from .engine.problem import Shape
from .engine.report import new_parser, new_table, parse, session

COLUMNS = "target_log_prob", "lse", "sum_p_squared", "mean_logit", "entropy", "top_logits"
asked = partial(token_statistics, entropy=True, mean_logit=True, sum_p_squared=True, top_k=3)
USUAL = {
    "cuda": [Shape(4096, 131072, 4096), Shape(4096, 151936, 2048), Shape(4096, 50257, 2048)],
    "cpu": [Shape(48, 300, 16)],
}


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.same_bits", __doc__, "--shape")
    options = parse(parser, arguments, processes=1)  # ranks may share a GPU
    with session(options) as run:
        for shape in options.shape or USUAL[options.device]:
            table = new_table(f"{shape}, {options.dtype}: tokens that differ", None, ["situation"], [*COLUMNS])
            given = tensors(shape, options.dtype, run.team.device)
            base = asked(*given)
            situations = of_memory(*given) if run.team.ranks == 1 else of_shards(*given, run.team)
            for situation, found, tokens in situations:
                table.add_row(situation, *map(str, count(found, base, tokens)))
            run.say(table)


def tensors(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The same on all ranks. Logits are ~ N(0, 1) to N(0, 6), those of sure targets up to 25."""
    options: dict[str, Any] = dict(device=device, generator=torch.Generator(device).manual_seed(0))
    weight = (torch.randn(shape.v, shape.d, **options) * shape.d**-0.5).to(dtype)
    target = torch.randint(shape.v, (shape.n,), **options)
    hidden = torch.randn(shape.n, shape.d, **options) * (1 + 1.5 * torch.rand(shape.n, 1, **options))
    sure = slice(shape.n // 3)
    of_target = weight[target[sure]].float()
    hidden[sure] += 25 * torch.rand(shape.n // 3, 1, **options) * of_target / of_target.square().sum(1, keepdim=True)
    return hidden.to(dtype), weight, target


Situation = tuple[str, TokenStatistics, slice | Tensor]  # its name, and the statistics of these tokens


def of_memory(hidden: Tensor, weight: Tensor, target: Tensor) -> Iterator[Situation]:
    """On one rank."""
    tokens = len(hidden)
    for number in (1, 16, 100, 1000):
        some = slice(min(number, tokens))
        yield f"the first {number} tokens", asked(hidden[some], weight, target[some]), some
    order = torch.randperm(tokens, device=hidden.device)
    yield "another order", asked(hidden[order], weight, target[order]), order
    padded = torch.cat([weight, weight[:128]])
    yield "128 padding rows", asked(hidden, padded, target, vocab_size=len(weight)), slice(None)
    leaf = hidden.clone().requires_grad_()
    for mebibytes in (0, 256, 1 << 16):
        found = asked(leaf, weight, target, logits_budget=mebibytes << 20)
        yield f"gradients, a budget of {mebibytes} MiB", found, slice(None)


def of_shards(hidden: Tensor, weight: Tensor, target: Tensor, team) -> Iterator[Situation]:
    """On several ranks."""
    for situation, stops in shards(len(weight), team.ranks).items():
        start, stop = [0, *stops][team.rank], stops[team.rank]
        where: dict[str, Any] = dict(process_group=team.group, vocab_start=start)
        own, part = weight[start:stop].clone(), hidden.chunk(team.ranks)[team.rank].clone()
        yield situation, asked(hidden, own, target, **where), slice(None)
        if len(hidden) % team.ranks == 0:
            yield f"{situation}, SP", asked(part, own, target, **where, sequence_parallel=True), slice(None)


def shards(entries: int, ranks: int) -> dict[str, list[int]]:
    """The ends of the ranks' shards, by situation."""
    equal = -(-entries // ranks)
    even, odd = entries // ranks // 2 * 2 - 36, entries // ranks // 2 * 2 + 1
    found = {f"TP {ranks}, shards of {equal}": [min(equal * (rank + 1), entries) for rank in range(ranks)]}
    for size in (even, odd):
        ends = list(accumulate([size] * (ranks - 1)))
        found[f"TP {ranks}, the last shard of {entries - ends[-1]}, others of {size}"] = [*ends, entries]
    return found


def count(found: TokenStatistics, base: TokenStatistics, tokens: slice | Tensor = slice(None)) -> list[int]:
    pairs = [(getattr(found, name), getattr(base, name)[tokens]) for name in COLUMNS]
    return [int((value != expected).reshape(len(value), -1).any(1).sum()) for value, expected in pairs]


if __name__ == "__main__":
    main()
