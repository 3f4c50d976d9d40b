"""Results and gradients beside float64: their errors are at most once to twice those of torch's path, in either backend
and by each strategy. test_fuzz.py draws options, layouts and shapes, and judges each row on its own."""

from dataclasses import replace

import pytest
import torch

from cases import DTYPES
from fuzz.draw import Configuration
from fuzz.run import assemble, execute
from fuzz.truth import dense
from fuzz.values import make, operands
from measures import assert_no_worse, size, smallest_steps
from parallel_lce.core.partials import accumulation_dtype
from tools import everywhere

BLOCK = 33_000  # bytes: 64 tokens of a window of 256 vocabulary rows


def of(N: int, V: int, D: int, dtype: str = "fp32", rows: tuple[int, ...] = (), **changes) -> Configuration:
    """A loss. ``rows``: of each rank, after each other."""
    rows = rows or (V,)
    shards = tuple((sum(rows[:rank]), n) for rank, n in enumerate(rows))
    options = dict(starts_given=len(rows) > 1, size_given=sum(rows) > V, reduction="none", block_bytes=BLOCK)
    return Configuration("loss", len(rows), (N,), D, V, shards, 1, dtype, **options | changes)


def assert_holds(c: Configuration, factor: float, backend: str, worlds, device: str) -> None:
    """Every error is at most ``factor`` times that of torch's path, 1.5 times for fp16."""
    factor = max(factor, 1.5) if c.dtype == "fp16" else factor
    found = assemble(c, everywhere(worlds, device, c.ranks, execute, c, backend))
    o, dtype, wide = operands(c, make(c)), DTYPES[c.dtype], accumulation_dtype(DTYPES[c.dtype])
    truth, yardstick = dense(c, o, torch.float64, torch.float64), dense(c, o, dtype, wide)
    for name, value in found.items():
        if name in ("vocab_size", "coded"):
            continue
        # Sums in another order. A sum relative to the largest logit, plus that, is rounded at the larger of the two.
        exact, larger = truth[name], "max_logit" if name in ("mean_logit", "expected_logit") else name
        floor = torch.finfo(wide).eps * max(size(exact), size(truth[larger])) + smallest_steps(value)
        if name == "dinput" and c.ranks > 1:
            # Each rank's part is rounded before it is added up, the yardstick has one part.
            floor = max(floor, torch.finfo(dtype).eps * size(exact))
        assert_no_worse(value.view(exact.shape), exact, yardstick[name], factor, floor, f"{c}: {name}")


EVERYTHING = dict(bias="plain", label_smoothing=0.1, z_loss=1e-2, scale=0.7, softcap=9.0, token_weight="zeros")
STRATEGIES = {
    "saved": of(64, 700, 24),
    "saved, a mean": of(64, 700, 24, reduction="mean", bias="plain"),
    "recomputed": of(64, 700, 24, budget=0),
    "some columns saved": of(64, 700, 24, budget=64 * 300 * 2),
    "some rows saved": of(250, 130, 48, budget=BLOCK),
    "accumulated": of(64, 700, 24, reduction="mean", budget=0),
}


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.thinned
def test_strategies(strategy, everything, dtype, worlds, backend, device):
    if device == "cuda" and (dtype == "fp32") != (backend == "torch"):
        pytest.skip("a GPU's are those of the backend that it takes by itself")
    c = replace(STRATEGIES[strategy], dtype=dtype, **(EVERYTHING if everything else {}))
    # What was accumulated is rounded again when the upstream gradient comes.
    assert_holds(c, 1.5 if strategy == "accumulated" else 1.1 if backend == "torch" else 1.0, backend, worlds, device)


# The target's entry of dlogits is a number of few bits here, and most of a gradient: torch's error is little more than
# the rounding of the result. Ours is where a token has a target of its own, as most of a few have.
FLAT = of(64, 700, 64, "bf16", ignored="none", upstream="ones")
SPLIT = dict(sequence_parallel=True, token_weight="zeros", block_bytes=1)
KERNELS = [
    # A block has one row of each rank, whose targets and weights lie N/P apart in those of the sequence.
    (of(10, 700, 4, rows=(350, 350), budget=0, ignored="none", **SPLIT), 1.5),
    (FLAT, 1.1),
    (replace(FLAT, budget=0), 1.1),
    (replace(FLAT, reduction="mean", budget=0), 1.1),
    # Three blocks and more, of which the larger shard saves a part alone. A block's consumed exponentials must not
    # serve a block whose buffer is already another's.
    (of(512, 1280, 64, "bf16", (1024, 256), budget=327680, ignored="none", sharpness=2.0, block_bytes=16_384), 1.5),
]


@pytest.mark.parametrize(("c", "factor"), KERNELS, ids=str)
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_blocks_pieces_and_shards(c, factor, worlds, backend, device):
    assert_holds(c, factor, backend, worlds, device)


def test_long_sums(worlds, device):
    c = of(137, 640, 2048, "bf16", (320, 320), budget=0, bias="plain", block_bytes=1 << 16)
    # Partial dX are summed in their own dtype over the ranks.
    assert_holds(c, 2.0, "", worlds, device)
