"""`python -m benchmarks.tune`: times candidate tiles for this GPU.

Every candidate runs three calls of `token_statistics` on each shape: forward alone, forward that saves all
exponentials, and forward + backward with logits_budget=0. Speeds are relative to bare matrix products in the same
round: one product for a forward, three for forward + backward. `kernels/tuning.py` should have the fastest tile.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch

from parallel_lce import log_prob, token_statistics
from parallel_lce.kernels import product
from parallel_lce.kernels.tuning import Tile

from .engine.options import SUITES
from .engine.passes import calls_of
from .engine.peers import ALL, FORWARD, FORWARD_BACKWARD, GEMM_ONLY, ONE, named
from .engine.problem import Problem, make_problem
from .engine.report import parse_shape
from .engine.team import NotMeasured, Team
from .engine.timing import ratios, timer

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


def uses_of(problem: Problem) -> dict[str, tuple[str, Callable]]:
    """{name: (pass of the bare products for comparison, call)}"""
    x, weight = problem.x.requires_grad_(), problem.weight.requires_grad_()

    def statistics(budget: int, gradients: bool, backward: bool = False):
        with nullcontext() if gradients else torch.no_grad():
            result = token_statistics(x, weight, problem.target.clamp(min=0), logits_budget=budget)
        if backward:
            torch.autograd.grad(log_prob(result).sum(), (x, weight))

    return {
        "forward": (FORWARD, partial(statistics, 0, False)),
        "saving forward": (FORWARD, partial(statistics, ALL, True)),
        "forward + backward": (FORWARD_BACKWARD, partial(statistics, 0, True, True)),
    }


def tune(problem: Problem, rounds: int, tiles: list[Tile], blocks: tuple[int, ...] = BLOCKS) -> dict:
    """`{(tile, row blocks, use): speed relative to the bare products}`, medians over the rounds."""
    team, readers, seconds, bare = problem.team, {}, {}, {}
    products = calls_of(named(GEMM_ONLY, ONE), problem)
    uses = uses_of(problem)
    for tile, count, (name, (_, call)) in itertools.product(tiles, blocks, uses.items()):
        with forced(tile, count):
            try:
                readers[tile, count, name] = timer(call, team)
            except NotMeasured as reason:  # for example, a tile too large for the GPU
                print(f"{tile} cannot run {name}: {reason}")
    of_products = {kind: timer(call, team) for kind, call in products.items()}
    for _ in range(rounds):
        for key, read in readers.items():
            bare.setdefault(key, []).append(of_products[uses[key[-1]][0]]())
            with forced(*key[:2]):
                seconds.setdefault(key, []).append(read())
    return {key: ratios(bare[key], readings)[0] for key, readings in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__, formatter_class=form)
    parser.add_argument("--shape", metavar="N,V,D", action="append", type=parse_shape)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("tiles are tuned on a CUDA device, and there is none")
    tiles = SPECIALIZED if torch.cuda.get_device_capability()[0] == 9 else PORTABLE
    for shape in options.shape or SUITES["bars"].shapes:
        speeds = tune(make_problem(shape, torch.bfloat16, Team(torch.device("cuda"))), options.rounds, tiles)
        for use in dict.fromkeys(name for _, _, name in speeds):
            rows = [(speed, tile, count) for (tile, count, name), speed in speeds.items() if name == use]
            for speed, tile, count in sorted(rows, key=lambda row: -row[0])[:SHOWN]:
                print(f"{shape} {use}: {speed:.3f} of the bare products: {tile}, {count} row blocks a launch")


if __name__ == "__main__":
    main()
