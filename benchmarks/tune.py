"""`python -m benchmarks.tune`: times candidate tiles for this GPU.

With each candidate `token_statistics` runs without gradients; and forward + backward, once with all exponentials saved
and once with logits_budget=0. `kernels/tuning.py` should have the fastest tiles.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product as combinations
from math import inf
from statistics import median
from unittest import mock

import torch

from parallel_lce.kernels import product
from parallel_lce.kernels.tuning import Tile

from .engine.accuracy import Judge, answers
from .engine.cells import measure_cell, show
from .engine.measure import SECONDS
from .engine.options import SUITES
from .engine.peers import FORWARD_BACKWARD, GEMM_ONLY, ONE, named
from .engine.problem import Problem, make_problem
from .engine.report import new_parser, parse, session

# Tile(rows, entries, elements of the K dimension per step, warps, stages)
SPECIALIZED = [
    Tile(*size, 64, 4, stages, mainloop="hopper") for size, stages in combinations([(128, 256), (256, 128)], [3, 4])
]
_SIZES, _REST = [(128, 256), (128, 128), (64, 128)], combinations((32, 64), (4, 8), (3, 4))
PORTABLE = [Tile(*size, *rest) for size, rest in combinations(_SIZES, _REST)]
BLOCKS = (8, 16, 32)  # row blocks per launch
SHOWN = 8  # fastest candidates of each budget that are printed
BUDGETS = ("all", "0")


@contextmanager
def forced(tile: Tile, blocks: int) -> Iterator[None]:
    """Every product uses this tile, and launches of at most `blocks` row blocks."""
    of_launch = mock.patch.object(product, "blocks_per_launch", lambda count, *_: max(1, min(count, blocks)))
    with of_launch, mock.patch.object(product, "tile_of", lambda *_: tile):
        yield


def tune(problem: Problem, budget: str, rounds: int, tiles: list[Tile], blocks: tuple[int, ...] = BLOCKS) -> dict:
    """The cell of the bare products and of every tile and number of row blocks, the fastest ones first."""
    ours = named(f"ours-statistics@{budget}", ONE)
    peers = [named(GEMM_ONLY, ONE)]
    for tile, count in combinations(tiles, blocks):
        name = f"{ours.name}, {tile}, {count} row blocks a launch"
        peers.append(replace(ours, name=name, context=partial(forced, tile, count)))
    truth, plain = (answers(problem, dtype) for dtype in (torch.float64, problem.hidden.dtype))
    cell = measure_cell(peers, Judge(problem, truth, plain), rounds)
    bare, *rows = cell["peers"]
    rows.sort(key=lambda row: inf if row["refused"] else median(row[FORWARD_BACKWARD][SECONDS]))
    return cell | {"peers": [bare, *rows]}


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.tune", __doc__, "--shape", "--rounds")
    options = parse(parser, arguments)
    tiles = SPECIALIZED if torch.cuda.get_device_capability()[0] == 9 else PORTABLE
    with session(options) as run:
        for shape in options.shape or SUITES["bars"].shapes:
            problem = make_problem(shape, torch.bfloat16, run.team)
            for budget in BUDGETS:
                show(tune(problem, budget, options.rounds, tiles), run, 1 + SHOWN)


if __name__ == "__main__":
    main()
