"""linear_cross_entropy beside float64: its errors are at most those of torch's path, in either backend and by each
strategy. test_fuzz.py draws options, layouts and shapes."""

from dataclasses import replace

import pytest

from cases import Case, assemble, check, ours
from tools import everywhere, shrunk
from world import Member

BLOCK = 33_000  # bytes: 64 tokens of a window of 256 vocabulary rows
EVERYTHING = dict(bias=True, label_smoothing=0.1, z_loss=1e-2, logit_scale=0.7, logit_softcap=9.0, token_weight=True)
SAVED = Case(64, 700, 24, reduction="none")
STRATEGIES = {
    "saved": SAVED,
    "saved, a mean": replace(SAVED, reduction="mean", bias=True),
    "recomputed": replace(SAVED, budget=0),
    "some columns saved": replace(SAVED, budget=64 * 300 * 2),
    "some rows saved": Case(250, 130, 48, reduction="none", budget=BLOCK),
    "accumulated": replace(SAVED, reduction="mean", budget=0),
}


def _ours(member: Member, case: Case, block: int):
    with shrunk(block):
        return ours(member, case)


def assert_holds(case: Case, block: int, factor: float, worlds, device: str) -> None:
    check(case, assemble(case, everywhere(worlds, device, case.ranks, _ours, case, block)), factor, device)


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.thinned
def test_strategies(strategy, everything, dtype, worlds, backend, device):
    if device == "cuda" and (dtype == "fp32") != (backend == "torch"):
        pytest.skip("a GPU's are those of the backend that it takes by itself")
    case = replace(STRATEGIES[strategy], dtype=dtype, **(EVERYTHING if everything else {}))
    # What was accumulated is rounded again when the upstream gradient comes.
    factor = 1.5 if strategy == "accumulated" else 1.1 if backend == "torch" else 1.0
    assert_holds(case, BLOCK, factor, worlds, device)


# The target's entry of dlogits is a number of few bits here, and most of a gradient: torch's error is little more than
# the rounding of the result. Ours is where a token has a target of its own, as most of a few have.
FLAT = Case(64, 700, 64, "bf16", reduction="none", ignored="none", upstream=2.0**-6)
FLATS = FLAT, replace(FLAT, budget=0), replace(FLAT, reduction="mean", budget=0)
PIECES = Case(600, 700, 24, "bf16", reduction="none", budget=0)
OVER_RANKS = Case(64, 700, 24, "bf16", ranks=2, reduction="none")
# A block's targets and weights lie N/P apart in those of the sequence.
ONE_ROW = Case(10, 700, 4, ranks=2, sequence_parallel=True, budget=0, ignored="none", token_weight=True)
# Three blocks and more, of which the larger shard saves a part alone. A block's consumed exponentials must not serve a
# block whose buffer is already another's.
UNEVEN = Case(512, 1280, 64, "bf16", ranks=2, shards=(1024, 256), budget=327680, ignored="none", sharpness=2.0)
FP16 = dict(dtype="fp16", ignored="none")
KERNELS = [
    *((case, BLOCK, 1.1) for case in FLATS),
    # Rows are cut where ranges of entries would be narrow.
    *((replace(PIECES, dtype=dtype), 2 * 512 * 512, 1.0) for dtype in ("bf16", "fp16")),
    (replace(OVER_RANKS, shards=(700, 0), sequence_parallel=True, label_smoothing=0.1), 20_000, 1.1),
    (replace(OVER_RANKS, shards=(100, 600), budget=0, sequence_parallel=True, bias=True), 20_000, 1.1),
    (replace(OVER_RANKS, reduction="mean", budget=0, V=699, z_loss=1e-2), 20_000, 1.1),
    (replace(OVER_RANKS, dtype="fp16", shards=(300, 400), budget=BLOCK + 30_000, logit_softcap=8.0), 20_000, 1.1),
    *((replace(ONE_ROW, reduction=reduction), 1, 1.5) for reduction in ("none", "mean")),
    (UNEVEN, 16_384, 1.5),
]


@pytest.mark.parametrize(("case", "block", "factor"), KERNELS, ids=str)
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_blocks_pieces_and_shards(case, block, factor, worlds, backend, device):
    assert_holds(case, block, factor, worlds, device)


HARD = [
    # Sums of many terms, and several windows of rows and entries.
    Case(137, 640, 2048, "bf16", ranks=3, reduction="none", budget=0, bias=True),
    Case(138, 640, 2048, ranks=2, sequence_parallel=True),
    Case(96, 4999, 32, "bf16", bias=True, label_smoothing=0.1),
    Case(252, 507, 123, "fp16", ranks=2, shards=(127, 380), budget=0),
    *(
        Case(64, 300, 8, **FP16, reduction="none", budget=0, upstream=1.0, logit_scale=scale, sharpness=1e-3)
        for scale in (0.0, 1e-4, 1000.0)
    ),
    # A loss scale lifts gradients of a mean over many tokens out of the subnormal numbers.
    *(Case(4096, 64, 16, **FP16, upstream=65536.0, sharpness=1e-2, budget=budget) for budget in (None, 0)),
]


@pytest.mark.parametrize("case", HARD, ids=str)
def test_long_sums_and_scales(case, worlds, device):
    # Partial dX are summed in their own dtype over the ranks.
    assert_holds(case, 1 << 16, 1.1 if case.ranks == 1 else 2.0, worlds, device)
