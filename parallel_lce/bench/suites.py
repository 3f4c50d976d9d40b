"""What `--suite` measures: shapes, strategies of ours, and the peers beside them."""

from dataclasses import dataclass

from .peers import ALL, FORWARD, MIB, PASSES
from .problem import IGNORED, Shape

GIB = 2**30
SAVED, RECOMPUTED = ("ours-per-token", ALL), ("ours-per-token", 0)
LEAN, LEAN_MAIN_GRAD = ("ours-per-token", 512 * MIB), ("ours-main-grad", 512 * MIB)
ACCUMULATED = ("ours", GIB)


@dataclass(frozen=True)
class Suite:
    """Every shape is measured with every deviation and share of ignored targets."""

    shapes: tuple
    ours: tuple  # pairs of a peer's name and its `logits_budget`
    others: tuple | None = None  # names of the other peers; None for everyone who can run here
    passes: tuple = PASSES
    deviations: tuple = (1.0,)  # standard deviations of the logits
    ignored: tuple = (IGNORED,)  # shares of the targets
    timed: bool = True  # else accuracy alone
    neighbours: bool = False  # measure each shape beside a round one of about its size

    def shapes_beside(self, shapes):
        """`shapes`, each after its round neighbour where they are wanted, none twice."""
        pairs = [(round_neighbour(s), s) if self.neighbours else (s,) for s in shapes]
        return tuple(dict.fromkeys(s for pair in pairs for s in pair))


# Seed 000, Table 2 (GB200, D=4096, forward): {(N, V): (canonical ms, its ms, canonical MB, its MB)}, inputs included.
PUBLISHED = {
    (1024, 32768): (0.73, 0.69, 1064, 280),
    (1024, 65536): (1.40, 0.97, 2088, 536),
    (1024, 131072): (2.76, 1.27, 4136, 1048),
    (1024, 262144): (5.46, 1.83, 8232, 2072),
    (4096, 32768): (1.66, 1.16, 1904, 304),
    (4096, 65536): (3.34, 1.69, 3696, 561),
    (4096, 131072): (6.78, 2.86, 7280, 1073),
    (4096, 262144): (13.70, 5.22, 14448, 2099),
    (8192, 32768): (2.93, 1.70, 3024, 337),
    (8192, 65536): (6.08, 2.90, 5840, 593),
    (8192, 131072): (13.25, 5.58, 11472, 1107),
    (8192, 262144): (27.77, 10.79, 22736, 2133),
    (16384, 32768): (5.62, 3.43, 5264, 401),
    (16384, 65536): (12.41, 6.61, 10128, 659),
    (16384, 131072): (26.67, 13.20, 19856, 1173),
    (16384, 262144): (50.15, 25.43, 39312, 2203),
    (32768, 32768): (11.42, 7.00, 9744, 531),
    (32768, 65536): (25.64, 13.80, 18704, 790),
    (32768, 131072): (50.24, 27.06, 36624, 1307),
    (32768, 262144): (96.52, 53.61, 72464, 2342),
}

ODD_TOKENS, ODD_VOCABULARIES = (1, 7, 1000, 4097, 8191), (50257, 151936, 152063)


def round_neighbour(shape):
    """The nearest multiples: of 128 tokens and of 256 vocabulary entries, at least one of each."""
    n, v = (max(step, (size + step // 2) // step * step) for size, step in ((shape.n, 128), (shape.v, 256)))
    return Shape(n, v, shape.d)


SUITES = {
    # The sizes that the targets of this package are stated for.
    "bars": Suite(
        (Shape(8192, 128256, 4096), Shape(4096, 128256, 4096), Shape(32768, 131072, 4096), Shape(1024, 262144, 4096)),
        (SAVED, LEAN, LEAN_MAIN_GRAD, ACCUMULATED),
    ),
    "table2": Suite(tuple(Shape(n, v, 4096) for n, v in PUBLISHED), (SAVED,), ("torch",), passes=(FORWARD,)),
    "ragged": Suite(
        tuple(Shape(n, 128256, 4096) for n in ODD_TOKENS) + tuple(Shape(8192, v, 4096) for v in ODD_VOCABULARIES),
        (SAVED, LEAN),
        (),
        neighbours=True,
    ),
    # One rank of TP=8 without its communication.
    "shards": Suite((Shape(8192, 16384, 4096), Shape(32768, 16384, 4096)), (SAVED, RECOMPUTED)),
    "hidden": Suite(
        tuple(Shape(8192, 128256, d) for d in (2048, 5120, 8192)),
        (SAVED, LEAN, LEAN_MAIN_GRAD, ACCUMULATED),
        ("torch", "torch-compile"),
    ),
    # Flat logits, and sharp ones: max |z| about 28. The mean of a power of two of tokens is that of which torch rounds
    # least.
    "accuracy": Suite(
        (Shape(8192, 128256, 4096), Shape(4097, 50257, 4096)),
        (SAVED, LEAN, LEAN_MAIN_GRAD, ACCUMULATED),
        deviations=(1.0, 4.6),
        ignored=(IGNORED, 0.0),
        timed=False,
    ),
}
DEFAULTS = {  # without --suite: a minute or a few on a laptop; one training micro-batch of a large model on a GPU
    "cpu": Suite((Shape(2048, 32768, 512),), (("ours", 0), ("ours-per-token", 0))),
    "cuda": Suite(
        (Shape(8192, 128256, 4096),), (("ours", 0), ("ours-per-token", 0), ("ours", None), ("ours-per-token", None))
    ),
}
