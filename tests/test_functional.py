"""linear_cross_entropy against float64, over strategies, layouts, dtypes and options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cases import Case, check, run

SHAPES = [(252, 507, 123), (80, 125, 64), (1, 7, 8), (96, 4999, 32)]
# Reduction and budget: saved, recomputed, accumulated.
STRATEGIES = [("none", None), ("none", 0), ("mean", 0)]


def _grid() -> Iterator[Case]:
    """Every shape, strategy and dtype, on one rank and over some; the other options take turns."""
    grid = itertools.product(enumerate(SHAPES), enumerate(STRATEGIES), enumerate(("fp64", "fp32", "bf16", "fp16")))
    for number, ((i, shape), (j, (reduction, budget)), (k, dtype)) in enumerate(grid):
        turn = i + j + k
        case = Case(
            *shape,
            dtype=dtype,
            reduction=reduction if turn % 3 or reduction == "none" else "sum",
            budget=budget,
            bias=turn % 2 == 0,
            ignored=("none", "some", "all")[turn % 3],
            label_smoothing=0.1 * (turn % 4 == 1),
            z_loss=1e-3 * (turn % 5 == 2),
            logit_scale=0.7 if turn % 4 == 3 else 1.0,
            logit_softcap=5.0 if turn % 3 == 1 else None,
            token_weight=turn % 4 == 2,
            seed=turn,
        )
        yield case
        ranks, split, shards = 2 + number % 3, number % 2 == 1, None
        if number % 4 == 3 and case.V > 100:
            few = case.V // (2 * ranks)
            shards = (*[few] * (ranks - 1), case.V - few * (ranks - 1))
        N = case.N + -case.N % ranks if split else case.N
        yield replace(case, N=N, ranks=ranks, sequence_parallel=split, shards=shards)


AWKWARD = [
    Case(0, 10, 4),
    Case(0, 10, 4, "bf16", reduction="sum", budget=0, bias=True),
    Case(0, 12, 4, ranks=2, bias=True),
    Case(0, 12, 4, ranks=2, sequence_parallel=True, reduction="none"),
    Case(0, 12, 4, "bf16", ranks=2, budget=0, sequence_parallel=True, bias=True),
    Case(1, 1, 1, "fp64"),
    Case(1, 11, 3, ranks=3, bias=True, ignored="none"),
    Case(3, 11, 3, ranks=3, sequence_parallel=True, ignored="none", reduction="sum"),
    Case(20, 10, 4, ranks=2, ignored="all", budget=0, bias=True, label_smoothing=0.1),
    Case(20, 10, 4, ranks=2, ignored="all", reduction="none", sequence_parallel=True),
    Case(20, 37, 5, ranks=2, shards=(37, 0), bias=True),
    Case(20, 37, 5, ranks=3, shards=(0, 0, 37), give_vocab_size=False, reduction="none"),
    Case(20, 37, 5, ranks=2, shards=(0, 37), sequence_parallel=True, budget=0, label_smoothing=0.2),
    Case(20, 2, 5, ranks=4, bias=True),  # two of the shards are padding alone
    Case(40, 1025, 9, "fp16", ranks=2, reduction="sum"),
]
LONG_SUMS = [
    Case(137, 640, 2048, "bf16", ranks=3, reduction="none", budget=0, bias=True),
    Case(138, 640, 2048, ranks=2, sequence_parallel=True),
]
FP16 = dict(dtype="fp16", ignored="none")
# A loss scale lifts gradients of a mean over many tokens out of the subnormal numbers.
SCALED_LOSS = [Case(4096, 64, 16, **FP16, upstream=65536.0, budget=budget) for budget in (None, 0)]
SCALED_LOGITS = [
    Case(64, 300, 8, **FP16, reduction="none", budget=0, upstream=1.0, logit_scale=scale, sharpness=1e-3)
    for scale in (0.0, 1e-4, 1000.0)
]


@pytest.mark.parametrize("case", [*_grid(), *AWKWARD, *LONG_SUMS, *SCALED_LOSS, *SCALED_LOGITS], ids=str)
def test_loss_and_gradients(case, worlds, device):
    # Partial dX are summed in their own dtype over the ranks.
    check(case, run(case, worlds, device), factor=1.1 if case.ranks == 1 else 2.0, device=device)
