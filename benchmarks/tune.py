"""python -m benchmarks.tune: time the tiles that `kernels/tuning.py` could name for this device.

Every candidate runs the projection with three uses of its epilogues on each shape, in rounds A B C A B C, beside
`x @ W.T` alone in the same round. The uses are partials alone, partials with saved exponentials, and the gradient. The
best rows belong in the table of `kernels/tuning.py`.
"""

import argparse
import itertools
from collections.abc import Callable
from statistics import median

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from parallel_lce.core.partials import Columns
from parallel_lce.kernels import tuning
from parallel_lce.kernels.epilogues import ForwardEpilogue
from parallel_lce.kernels.projection import Product, logits_gradient, new_window_partials

from .options import parse_shape
from .problem import Shape
from .suites import SUITES
from .team import Team
from .timing import timer

SPECIALIZED = [
    tuning.Tile(rows, entries, 64, 8, stages, warp_specialized=True)
    for (rows, entries), stages in itertools.product([(128, 256), (256, 128)], [3, 4])
]
PORTABLE = [
    tuning.Tile(rows, entries, k, warps, stages)
    for rows, entries in [(128, 256), (128, 128), (64, 128)]
    for k in (32, 64)
    for warps in (4, 8)
    for stages in (3, 4)
]
BLOCKS = (8, 16, 32)
SHOWN = 8  # best rows of each use


def epilogues(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> dict[str, Callable]:
    """The uses of the epilogues by name. Each is a function that projects `x [N, D]` with `weight [V, D]`; two of them
    write `out [N, V]`."""
    shift = torch.zeros(x.shape[0], device=x.device)
    partial = torch.stack([shift, shift + 1, shift])
    product = Product(x, weight)  # of one tile: it remembers the first that it runs with

    def forward(out, shift):
        product.launch(out, ForwardEpilogue(new_window_partials(product, Columns()), shift))

    return {
        "partials": lambda: forward(None, None),
        "save": lambda: forward(out, shift),
        "gradient": lambda: logits_gradient(product, partial, shift, None, None, None, None, out),
    }


def tune(shape: Shape, rounds: int, specialized: bool) -> dict:
    """`{(tile, blocks, use): time of `x @ W.T` alone / its time}`, medians over the rounds."""
    x = torch.randn(shape.n, shape.d, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(shape.v, shape.d, device="cuda") * shape.d**-0.5).to(x.dtype)
    # All candidates write the same memory, which may have gigabytes. Its rows are aligned as TMA and cuBLAS want.
    out = torch.empty(shape.n, -(-shape.v // 64) * 64, device="cuda", dtype=x.dtype)[:, : shape.v]
    team, runs = Team(x.device), {}
    for tile, blocks in itertools.product(SPECIALIZED if specialized else PORTABLE, BLOCKS):
        for name, function in epilogues(x, weight, out).items():
            with tuning.forced(tile, blocks):
                try:
                    function()
                    torch.cuda.synchronize()
                except (OutOfResources, CompilationError) as error:
                    print(f"{tile} cannot run {name}: {type(error).__name__}")
                    continue
                runs[tile, blocks, name] = timer(function, team)
    gemm = timer(lambda: torch.mm(x, weight.t()), team)
    speeds = {key: [] for key in runs}
    for _ in range(rounds):
        for (tile, blocks, name), read in runs.items():
            alone = gemm()
            with tuning.forced(tile, blocks):
                speeds[tile, blocks, name].append(alone / read())
    return {key: median(values) for key, values in speeds.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--shape", metavar="N,V,D", action="append", type=parse_shape)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("tiles are tuned on a CUDA device, and there is none")
    specialized = torch.cuda.get_device_capability()[0] == 9
    shapes = options.shape or SUITES["bars"].shapes
    for shape in shapes:
        speeds = tune(shape, options.rounds, specialized)
        for name in ("partials", "save", "gradient"):
            rows = [(speed, tile, blocks) for (tile, blocks, of), speed in speeds.items() if of == name]
            for speed, tile, blocks in sorted(rows, key=lambda row: -row[0])[:SHOWN]:
                print(f"{shape} {name:8} {speed:.3f} of x @ W.T alone: {tile}, {blocks} row blocks a launch")


if __name__ == "__main__":
    main()
