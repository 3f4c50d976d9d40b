"""What is measured: shapes, strategies of ours, and the peers beside them."""

from dataclasses import dataclass

from .peers import FORWARD, ONE, PASSES, RANKS, SAVED
from .problem import Shape


@dataclass(frozen=True)
class Suite:
    shapes: tuple[Shape, ...]
    ours: tuple[str, ...]  # names of peers
    others: tuple[str, ...] | None = None  # names of peers; None for everyone who can run here
    passes: tuple[str, ...] = PASSES


SUITES = {
    # Sizes for which this package has speed targets.
    "bars": Suite(
        (Shape(8192, 128256, 4096), Shape(4096, 128256, 4096), Shape(32768, 131072, 4096), Shape(1024, 262144, 4096)),
        (SAVED, "ours-per-token@512MiB", "ours-main-grad@512MiB", "ours@1GiB"),
    ),
    # The sizes of the paper's Table 2, and its pass.
    "table2": Suite(
        tuple(Shape(n, 2**k, 4096) for n in (1024, 4096, 8192, 16384, 32768) for k in (15, 16, 17, 18)),
        (SAVED,),
        ("torch",),
        passes=(FORWARD,),
    ),
}
_RECOMPUTED = ("ours@0", "ours-per-token@0")
_OVER_RANKS = (SAVED, "ours", "ours@128MiB", "ours-main-grad@64MiB", "ours-per-token@0")
DEFAULTS = {  # without --suite. CPU: small enough for a laptop. CUDA: micro-batches of a large model.
    (ONE, "cpu"): Suite((Shape(2048, 32768, 512),), _RECOMPUTED),
    (ONE, "cuda"): Suite((Shape(8192, 128256, 4096),), (*_RECOMPUTED, "ours", "ours-per-token")),
    (RANKS, "cpu"): Suite((Shape(256, 4096, 64), Shape(512, 4096, 64)), _OVER_RANKS),
    (RANKS, "cuda"): Suite((Shape(8192, 131072, 4096), Shape(32768, 131072, 4096)), _OVER_RANKS),
}
