"""What is measured: shapes, strategies of ours, and the peers beside them."""

from dataclasses import dataclass

from .peers import FORWARD, FORWARD_BACKWARD, ONE, PASSES, RANKS, SAVED
from .problem import Shape


@dataclass(frozen=True)
class Suite:
    shapes: tuple[Shape, ...]
    ours: tuple[str, ...]  # names of peers
    others: tuple[str, ...] | None = None  # names of peers; None for everyone who can run here
    passes: tuple[str, ...] = PASSES
    rounds: int = 5
    reading: float = 1.0  # length of a reading, relative to that in timing.py
    host: bool = False  # also the time of the host, and the GPU operations of a call


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
    # So little work for the GPU that the host decides how long a call takes.
    "host": Suite(
        (Shape(1024, 8192, 1024),),
        ("ours-per-token", "ours", "ours@0", "ours-statistics"),
        ("torch", "torch-compile"),
        host=True,
    ),
    # What a first small model has: ours at its defaults.
    "small": Suite(
        tuple(
            Shape(n, v, d)
            for d, v in ((1024, 32768), (2048, 50304), (2048, 65536), (4096, 128256))
            for n in (256, 1024, 2048, 4096, 8192)
        ),
        ("ours-per-token",),
        ("torch", "torch-compile", "megatron-fused"),
        passes=(FORWARD_BACKWARD,),
        rounds=3,
        reading=1 / 3,
    ),
    # What post-training asks for, saved and recomputed.
    "post": Suite(
        (Shape(8192, 128256, 4096),),
        (
            "ours-statistics@all",
            "ours-entropy@all",
            "ours-entropy@0",
            "ours-selected@all",
            "ours-masked@all",
            "ours-replay",
        ),
        ("verl",),
    ),
    # No memory for exponentials: a whole vocabulary, and a shard of TP 8.
    "lean": Suite(
        tuple(Shape(n, v, 4096) for n, v in ((32768, 131072), (8192, 128256), (32768, 16384), (8192, 16384))),
        ("ours-per-token@0",),
        (),
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
