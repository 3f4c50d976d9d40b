"""`python -m benchmarks.tune`: times candidate tiles for this GPU.

Every candidate runs three calls of `token_statistics` on each shape: forward alone, forward that saves all
exponentials, and forward + backward with logits_budget=0. Speeds are relative to bare matrix products in the same
round: one product for a forward, three for forward + backward. `kernels/tuning.py` should have the fastest tile.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from math import inf
from statistics import median
from unittest import mock

import torch

from parallel_lce import token_statistics
from parallel_lce.kernels import product
from parallel_lce.kernels.tuning import Tile

from .engine import ways
from .engine.options import SUITES
from .engine.peers import ALL, FORWARD, FORWARD_BACKWARD, GEMM_ONLY, ONE, calls_of, named
from .engine.problem import Problem, make_problem
from .engine.report import new_parser, parse, session

# Tile(rows, entries, elements of the K dimension per step, warps, stages)
SPECIALIZED = [
    Tile(*size, 64, 4, stages, mainloop="hopper")
    for size, stages in itertools.product([(128, 256), (256, 128)], [3, 4])
]
_SIZES = [(128, 256), (128, 128), (64, 128)]
PORTABLE = [Tile(*size, *rest) for size, rest in itertools.product(_SIZES, itertools.product((32, 64), (4, 8), (3, 4)))]
BLOCKS = (8, 16, 32)  # row blocks per launch
SHOWN = 8  # fastest candidates that are printed for each call


@contextmanager
def forced(tile: Tile, blocks: int) -> Iterator[None]:
    """Every product uses this tile, and launches of at most `blocks` row blocks."""
    of_launch = mock.patch.object(product, "blocks_per_launch", lambda count, *_: max(1, min(count, blocks)))
    with of_launch, mock.patch.object(product, "tile_of", lambda *_: tile):
        yield


def tune(problem: Problem, rounds: int, tiles: list[Tile], blocks: tuple[int, ...] = BLOCKS) -> dict[str, list[dict]]:
    """`{use: rows of the bare products, then of each tile and number of row blocks}`."""
    products, found = calls_of(named(GEMM_ONLY, ONE), problem), {}
    x, weight = problem.x.detach().requires_grad_(), problem.weight.detach().requires_grad_()

    def statistics(budget: int, gradients: bool, backward: bool = False):
        with nullcontext() if gradients else torch.no_grad():
            result = token_statistics(x, weight, problem.target.clamp(min=0), logits_budget=budget)
        if backward:
            assert result.target_log_prob is not None  # there is a target
            torch.autograd.grad(result.target_log_prob.sum(), (x, weight))

    uses = {  # the pass of the bare products for comparison, and the call
        "forward": (FORWARD, partial(statistics, 0, False)),
        "saving forward": (FORWARD, partial(statistics, ALL, True)),
        "forward + backward": (FORWARD_BACKWARD, partial(statistics, 0, True, True)),
    }
    for use, (kind, call) in uses.items():
        calls = {GEMM_ONLY: products[kind]}
        for tile, count in itertools.product(tiles, blocks):
            calls[f"{tile}, {count} row blocks a launch"] = forced(tile, count)(call)
        found[use] = ways.measure(calls, problem.team, rounds, lambda *_: {})
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.tune", __doc__, "--shape", "--rounds")
    options = parse(parser, arguments)
    tiles = SPECIALIZED if torch.cuda.get_device_capability()[0] == 9 else PORTABLE
    with session(options) as run:
        for shape in options.shape or SUITES["bars"].shapes:
            problem = make_problem(shape, torch.bfloat16, run.team)
            for use, (bare, *rows) in tune(problem, options.rounds, tiles).items():
                rows.sort(key=lambda row: median(row.get("seconds", [inf])))
                run.say(ways.table(f"{shape}, {use}", "", [bare, *rows[:SHOWN]], "of the bare products", {}))


if __name__ == "__main__":
    main()
