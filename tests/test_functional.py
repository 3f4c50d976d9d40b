"""linear_cross_entropy against float64, over strategies, layouts, dtypes and options."""

from __future__ import annotations

import pytest

from cases import Case, check, run

# (strategy, reduction, budget): a budget of 0 accumulates sums and means where D is small enough,
# and recomputes the rest.
SHAPES = [(252, 507, 123), (80, 125, 64), (1, 7, 8), (96, 4999, 32)]
STRATEGIES = {"save": ("none", None), "recompute": ("none", 0), "accumulate": ("mean", 0)}


def _single() -> list[Case]:
    cases = []
    for i, shape in enumerate(SHAPES):
        for j, (reduction, budget) in enumerate(STRATEGIES.values()):
            for k, dtype in enumerate(("fp64", "fp32", "bf16", "fp16")):
                turn = i + j + k
                cases.append(
                    Case(
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
                )
    return cases


def _parallel() -> list[Case]:
    cases = []
    for i, case in enumerate(_single()):
        ranks = 2 + i % 3
        N = case.N + -case.N % ranks if i % 2 else case.N
        shards = None
        if i % 4 == 3 and case.V > 100:
            uneven = [case.V // (2 * ranks)] * (ranks - 1)
            shards = (*uneven, case.V - sum(uneven))
        parallel = dict(N=N, ranks=ranks, sequence_parallel=i % 2 == 1, shards=shards)
        cases.append(Case(**{**vars(case), **parallel}))
    return cases


@pytest.mark.parametrize("case", _single(), ids=str)
def test_one_rank(case, worlds, device):
    check(case, run(case, worlds, device), factor=1.1, device=device)


@pytest.mark.parametrize("case", _parallel(), ids=str)
def test_ranks(case, worlds, device):
    # Partial dX are summed in their own dtype over the ranks.
    check(case, run(case, worlds, device), factor=2.0, device=device)
