"""The command line of `python -m benchmarks`: peers, shapes and output files."""

from argparse import Namespace
from functools import partial
from typing import NamedTuple

from .peers import ONE, OTHERS, RANKS, SAVED, named
from .problem import Shape
from .report import new_parser, parse


class Suite(NamedTuple):
    shapes: tuple[Shape, ...]
    ours: tuple[str, ...]  # names of peers
    others: tuple[str, ...]  # names of peers; those of another setting are left out
    host: bool = False  # also measures the host time


MEGATRON = ("megatron-fused", "megatron", "megatron-fused-main-grad", "megatron-main-grad")
FUSED = ("liger", "liger-scaled", "cut-cross-entropy", "quack")
ON_GPU = ("torch", "torch-compile", *MEGATRON, "verl", *FUSED)
ON_CPU = ("torch",)
POST = (
    "statistics@all entropy@all entropy@0 selected@all masked@all token-loss token-loss@512MiB token-loss@0 "
    "token-statistics@512MiB distillation"
)
SUITES = {
    # Sizes for which this package has speed targets.
    "bars": Suite(
        (Shape(8192, 128256, 4096), Shape(4096, 128256, 4096), Shape(32768, 131072, 4096), Shape(1024, 262144, 4096)),
        (SAVED, "ours-per-token@512MiB", "ours-main-grad@512MiB", "ours@1GiB"),
        ON_GPU,
    ),
    # The GPU has so little work that a call is bound by its host time.
    "host": Suite(
        (Shape(1024, 8192, 1024),),
        ("ours-per-token", "ours", "ours@0", "ours-statistics"),
        ("torch", "torch-compile"),
        host=True,
    ),
    # The functions of post-training, with saved and with recomputed logits.
    "post": Suite(
        (Shape(8192, 128256, 4096),), tuple(f"ours-{kind}" for kind in POST.split()), ("verl", "torch-distillation")
    ),
}
_RECOMPUTED = ("ours@0", "ours-per-token@0")
_OVER_RANKS = (SAVED, "ours", "ours@128MiB", "ours-main-grad@64MiB", "ours-per-token@0")
DEFAULTS = {  # without --suite. CPU: shapes for a laptop. CUDA: micro-batches of a large model.
    (ONE, "cpu"): Suite((Shape(2048, 32768, 512),), _RECOMPUTED, ON_CPU),
    (ONE, "cuda"): Suite((Shape(8192, 128256, 4096),), (*_RECOMPUTED, "ours", "ours-per-token"), ON_GPU),
    (RANKS, "cpu"): Suite((Shape(256, 4096, 64), Shape(512, 4096, 64)), _OVER_RANKS, ON_CPU),
    (RANKS, "cuda"): Suite((Shape(8192, 131072, 4096), Shape(32768, 131072, 4096)), _OVER_RANKS, ON_GPU),
}


def parse_arguments(arguments: list[str] | None, ranks: int | None = None, here: int | None = None) -> Namespace:
    """Parses the command line. `ranks`: of the whole run, None for one process; `here`: see `parse`. Adds
    `shapes` and `host`, and `chosen`, the Peers to measure."""
    setting = ONE if ranks is None else RANKS
    program = "python -m benchmarks" if setting == ONE else "./launch/bench.sh"
    parser = new_parser(program, "parallel_lce against its peers.", "--json", "--rounds", "--shape")
    add = parser.add_argument
    add("--suite", choices=SUITES, help="a set of shapes and peers; other options override it")
    words = "only these peers and the GEMM-only baseline; ours may have a logits_budget: ours@512MiB or ours@all"
    add("--peers", nargs="+", metavar="NAME", type=partial(named, setting=setting), help=words)
    words = "TP sizes (the powers of two up to the number of ranks, and the number of ranks)"
    add("--tp", nargs="+", type=int, metavar="P", help=words)
    options = parse(parser, arguments, here)

    suite = SUITES[options.suite] if options.suite else DEFAULTS[setting, options.device]
    options.shapes, options.host = options.shape or suite.shapes, suite.host
    here_too = [peer for peer in OTHERS if setting in peer.settings]
    wanted = options.peers
    if wanted is None:
        wanted = [named(name, setting) for name in suite.ours]
        wanted += [peer for peer in here_too if peer.name in suite.others]
    baselines = [peer for peer in here_too if peer.build is None]
    first, rest = ([peer for peer in wanted if peer.is_ours is ours and peer.build] for ours in (True, False))
    options.chosen = [*first, *baselines, *rest]

    ranks = ranks or 1
    powers = {2**k for k in range(ranks.bit_length())}
    options.tp = sorted(set(options.tp or powers | {ranks}))
    if not 1 <= options.tp[0] <= options.tp[-1] <= ranks:
        parser.error(f"--tp must lie in 1 to {ranks}, the number of ranks, got {options.tp}")
    for tp in options.tp:
        for shape in options.shapes:
            if shape.n % tp or shape.v % tp:
                parser.error(f"--shape: N and V must be multiples of the TP size, got {shape} for TP {tp}")
    return options
