"""Random shapes, splits, budgets and options: no hang, right against float64, the same bits on every
rank and from run to run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import DTYPES, Case, assemble, dense, make, ours
from measures import assert_no_worse, size, smallest_steps
from parallel_lce.core.partials import accumulation_dtype
from tools import alone, shrunk
from world import Member

RELAXED = settings(
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def problems(draw, ranks: int):
    """A case, the smallest block in bytes and the tile."""
    V = draw(st.integers(ranks, 150))
    D = draw(st.integers(1, 20))
    sequence_parallel = ranks > 1 and draw(st.booleans())
    N = draw(st.integers(0, 60))
    if sequence_parallel:
        N += -N % ranks
    shards = None
    if ranks > 1 and draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, V), min_size=ranks - 1, max_size=ranks - 1)))
        shards = tuple(b - a for a, b in zip([0, *cuts], [*cuts, V]))
    dtype = draw(st.sampled_from(["fp64", "fp32", "fp32", "bf16", "fp16"]))
    case = Case(
        N,
        V,
        D,
        dtype=dtype,
        ranks=ranks,
        sequence_parallel=sequence_parallel,
        reduction=draw(st.sampled_from(["none", "mean", "sum"])),
        budget=draw(st.one_of(st.none(), st.just(0), st.integers(0, 40000))),
        bias=draw(st.booleans()),
        ignored=draw(st.sampled_from(["none", "some", "some", "all"])),
        label_smoothing=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        z_loss=draw(st.sampled_from([0.0, 0.0, 1e-2])),
        logit_scale=draw(st.sampled_from([1.0, 1.0, 0.5, -1.5])),
        logit_softcap=draw(st.sampled_from([None, None, 2.0, 50.0])),
        token_weight=draw(st.booleans()),
        shards=shards,
        give_vocab_size=draw(st.booleans()),
        sharpness=draw(st.sampled_from([0.1, 1.0, 3.0])),
        frozen=draw(st.sampled_from(["", "", "x", "weight", "weight bias", "x weight"])),
        seed=draw(st.integers(0, 5)),
    )
    tile = (draw(st.integers(1, 64)), draw(st.integers(1, 200)))
    return case, draw(st.integers(1, 8000)), tile


def twice(member: Member, case: Case, block_bytes: int, tile: tuple[int, int]) -> dict[str, torch.Tensor]:
    with shrunk(block_bytes, tile):
        first, second = ours(member, case), ours(member, case)
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs from run to run"
    return first


def terms(case: Case) -> dict[str, float]:
    """Norms of the terms that each result sums; rounding shows in these where a sum nearly cancels."""
    t = make(case)
    x, w = t.x.double(), t.weight.double()
    z = torch.nn.functional.linear(x, w, None if t.bias is None else t.bias.double()) * case.logit_scale
    reach = 1 + z.abs().amax(1) + case.z_loss * z.square().amax(1)  # [N]: of a token's loss
    g = t.upstream.double().abs() * (1 + 2 * case.z_loss * z.abs().amax(1)) * abs(case.logit_scale)
    weight = torch.ones(case.N) if t.token_weight is None else t.token_weight.double()
    weight = torch.where(t.target == -100, 0.0, weight)
    if case.reduction == "mean" and weight.sum() > 0:
        weight = weight / weight.sum()
    g, reach = g * weight, reach * weight
    return {
        "loss": (reach if case.reduction == "none" else reach.sum()).norm().item(),
        "dx": (g * w.norm(dim=1).amax()).norm().item(),
        "dweight": (g * x.norm(dim=1)).sum().item(),
        "dbias": g.sum().item(),
    }


def hold(parts: list, case: Case, device: str) -> None:
    """Right against float64: no worse than torch's own path, or a few roundings of result and terms."""
    for part in parts:
        assert not part["loss"].isnan().any()
        assert torch.equal(part["loss"], parts[0]["loss"])
    t = make(case, device)
    dtype = DTYPES[case.dtype]
    wide = accumulation_dtype(dtype)
    truth, yardstick = dense(case, t), dense(case, t, dtype)
    sizes = terms(case)
    for name, value in assemble(case, parts).items():
        assert value.shape == truth[name].shape, name
        floor = torch.finfo(value.dtype).eps * size(truth[name]) + smallest_steps(value)
        if value.dtype != wide:
            # Kept exponentials have the input's precision. Partial dX are summed over ranks in it.
            floor += torch.finfo(value.dtype).eps / 2 * sizes[name]
        floor += 8 * torch.finfo(wide).eps * sizes[name]
        what = f"{case}: {name} of terms {sizes[name]:.3g}:"
        assert_no_worse(value, truth[name], yardstick[name], 2, floor, what)


@settings(RELAXED, max_examples=60)
@given(problems(1))
def test_one_rank(device, problem):
    hold([twice(alone(device), *problem)], problem[0], device)


@RELAXED
@given(problems(2))
def test_two_ranks(worlds, device, problem):
    hold(worlds(2).run(twice, *problem, timeout=30), problem[0], device)


@RELAXED
@given(problems(3))
@pytest.mark.slow
def test_three_ranks(worlds, device, problem):
    hold(worlds(3).run(twice, *problem, timeout=30), problem[0], device)


@RELAXED
@given(problems(4))
@pytest.mark.slow
def test_four_ranks(worlds, device, problem):
    hold(worlds(4).run(twice, *problem, timeout=30), problem[0], device)
