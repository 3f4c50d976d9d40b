"""What is measured: shapes, strategies of ours, and the peers beside them."""

from dataclasses import dataclass

from .peers import ALL, FORWARD, GIB, MIB, NAMED_OVER_RANKS, ONE, PASSES, RANKS
from .problem import Shape


@dataclass(frozen=True)
class Suite:
    shapes: tuple
    ours: tuple  # strategies: pairs of a kind of ours and its `logits_budget`
    others: tuple | None = None  # names of the other peers; None for everyone who can run here
    passes: tuple = PASSES


SAVED = ("ours-per-token", ALL)
SUITES = {
    # The sizes that the targets of this package are stated for.
    "bars": Suite(
        (Shape(8192, 128256, 4096), Shape(4096, 128256, 4096), Shape(32768, 131072, 4096), Shape(1024, 262144, 4096)),
        (SAVED, ("ours-per-token", 512 * MIB), ("ours-main-grad", 512 * MIB), ("ours", GIB)),
    ),
    # The sizes of the paper's Table 2, and its pass.
    "table2": Suite(
        tuple(Shape(n, 2**k, 4096) for n in (1024, 4096, 8192, 16384, 32768) for k in (15, 16, 17, 18)),
        (SAVED,),
        ("torch",),
        passes=(FORWARD,),
    ),
}
_RECOMPUTED, _DEFAULT = (("ours", 0), ("ours-per-token", 0)), (("ours", None), ("ours-per-token", None))
DEFAULTS = {  # without --suite: a minute or a few on a laptop; training micro-batches of a large model on a GPU
    (ONE, "cpu"): Suite((Shape(2048, 32768, 512),), _RECOMPUTED),
    (ONE, "cuda"): Suite((Shape(8192, 128256, 4096),), _RECOMPUTED + _DEFAULT),
    (RANKS, "cpu"): Suite((Shape(256, 4096, 64), Shape(512, 4096, 64)), tuple(NAMED_OVER_RANKS)),
    (RANKS, "cuda"): Suite((Shape(8192, 131072, 4096), Shape(32768, 131072, 4096)), tuple(NAMED_OVER_RANKS)),
}
