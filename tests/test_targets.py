"""The targets' own part, beside float64: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES
from parallel_lce.kernels import targets as kernels

pytestmark = pytest.mark.usefixtures("kernels")

R, K = 300, 50
OUTSIDE = [-1, K, -(2**63), 2**62]


@pytest.fixture(params=["fp32", "bf16", "fp16"])
def dtype(request) -> torch.dtype:
    return DTYPES[request.param]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_targets(device: str, rows: int = R) -> torch.Tensor:
    """Many of each, a third of one, and some that are nowhere."""
    target = torch.randint(K, (rows,), generator=torch.Generator().manual_seed(0))
    target[::3] = 7
    target[1::5] = torch.tensor(OUTSIDE).repeat(rows)[: len(target[1::5])]
    return target.to(device)


def hits(target: torch.Tensor) -> torch.Tensor:
    return (target >= 0) & (target < K)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_gradients(options, softcap, device):
    """Of sure tokens too, whose p is 1 - 1e-4: nothing cancels."""
    alpha, beta, gamma, delta, logit = normal(5, R).float().to(device)
    sum_exp = 1 + normal(R, seed=1).abs().float().to(device)
    maximum = logit.double() + normal(R, seed=2).abs().to(device)
    sure = slice(0, R, 4)
    maximum[sure], sum_exp[sure], beta[sure] = logit[sure].double(), 1.0001, alpha[sure]
    maximum[5], logit[5], beta[5] = -torch.inf, -torch.inf, 0.0
    if softcap is not None:
        maximum[5], logit[5] = 1.0, 0.5
    statistics = torch.stack([maximum.float(), sum_exp, logit])
    target = some_targets(device)
    if options == "plain":
        gamma = delta = None
    found = kernels.target_gradients(target, K, statistics, alpha, beta, gamma, delta, -0.5, softcap)
    top, total, z = statistics.double()
    shifted = z - top.masked_fill(top == -torch.inf, 0.0)
    nothing = torch.zeros_like(z)
    a, b, g, d = (nothing if c is None else c.double() for c in (alpha, beta, gamma, delta))
    exact = shifted.exp() / total * (a + d * shifted.clamp(min=-1e4)) - b - g
    if softcap is not None:
        exact *= 1 - (z / softcap) ** 2
    expected = torch.where(hits(target), -0.5 * exact, 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    cancelled = expected[sure][hits(target)[sure]]
    if options == "plain" and softcap is None:
        assert (cancelled.abs() < 2e-4).all() and (cancelled != 0).all()
        error = (found[sure].double() - expected[sure]).abs()
        assert (error <= 1e-2 * expected[sure].abs() + 1e-7 * alpha[sure].abs()).all()


def test_cleared(dtype, device):
    target = some_targets(device) + 20
    gradient = torch.full((R, 64), 3.0, dtype=dtype, device=device)
    kernels.clear_targets(gradient[:, :40], target, 20)
    column = torch.arange(64, device=device) + 20
    hit = (column == target[:, None]) & (column < 60)
    assert hit.any() and torch.equal(gradient, torch.where(hit, 0.0, 3.0).to(dtype))


@pytest.mark.parametrize("rows", [1, 5, R, 1025, 2100])
def test_order(rows, device, monkeypatch):
    """By comparisons, and beyond some tokens by torch's sort."""
    monkeypatch.setattr(kernels, "_FEW", 1025)
    monkeypatch.setattr(kernels, "_COMPARED", 256)
    target = some_targets(device, rows)
    key = torch.where(hits(target), target, K)
    assert torch.equal(kernels.order_of(target, K), key.sort(stable=True).indices)


@pytest.mark.parametrize("of", ["rows", "one", "none"])
@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("D", [1, 300, 5000])
def test_finished_rows(D, with_target, of, dtype, device):
    """Rounded once, in place if asked to, and nothing beside it."""
    source = normal(20, D + 3).float().to(device)[:, :D]
    weight = normal(K, D + 1, seed=1).to(device).to(dtype)[:, :D]
    entry = normal(20, seed=2).float().to(device)
    target = some_targets(device, 20)
    factor = {"rows": normal(20, seed=3).float(), "one": torch.tensor(0.25), "none": None}[of]
    factor = None if factor is None else factor.to(device)
    exact = source.double()
    if factor is not None:
        exact = exact * (factor.double()[:, None] if of == "rows" else 0.25)
    if with_target:
        row = torch.where(hits(target), target, 0)
        exact = exact + torch.where(hits(target), entry, 0.0).double()[:, None] * weight[row].double()
    memory = torch.full((21, D + 2), 7.0, dtype=dtype, device=device)
    targets = (target, entry, weight) if with_target else None
    found = kernels.finished_rows(source, factor, targets, memory[:-1, :-2])
    assert found.data_ptr() == memory.data_ptr()
    rounding = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= (rounding + 1e-6) * exact.abs() + 1e-6).all()
    assert (memory[-1] == 7).all() and (memory[:, -2:] == 7).all()
    assert torch.equal(kernels.finished_rows(source, factor, targets, source).to(dtype), found)


@pytest.mark.parametrize("total_dtype", ["fp32", "same"])
@pytest.mark.parametrize(("D", "first", "columns"), [(1, 0, K), (70, 5, 30), (300, 0, K)])
@pytest.mark.parametrize("kind", ["some", "one for all", "nowhere"])
def test_added_targets(kind, D, first, columns, total_dtype, dtype, device, monkeypatch):
    """Rounded once, whatever the number of tokens."""
    monkeypatch.setattr(kernels, "_WIDTH", 128)
    target = some_targets(device)
    if kind != "some":
        target[:] = 7 if kind == "one for all" else K
    x = normal(R, D + 3, seed=1).to(device).to(dtype)[:, :D]
    entry = normal(R, seed=2).float().to(device)
    total_dtype = torch.float32 if total_dtype == "fp32" else dtype
    memory = torch.full((columns + 1, D + 2), 7.0, dtype=total_dtype, device=device)
    total = memory[:-1, :-2].copy_(normal(columns, D, seed=3))
    place = torch.where((target >= first) & (target < first + columns), target - first, columns)
    exact = torch.zeros(columns + 1, D, dtype=torch.float64, device=device)
    exact[:-1] = total
    size = exact.abs().index_add(0, place, (entry[:, None] * x).abs().double())[:-1]
    exact = exact.index_add(0, place, entry[:, None].double() * x.double())[:-1]
    before = total.clone()
    order = kernels.order_of(target, K)
    kernels.add_targets(total, order, target, entry, x, first)
    rounding = torch.finfo(total_dtype).eps / 2
    assert ((total.double() - exact).abs() <= rounding * exact.abs() + 1e-6 * size).all()
    untouched = torch.ones(columns + 1, dtype=torch.bool, device=device).index_fill(0, place, False)[:-1]
    assert torch.equal(total[untouched], before[untouched])
    assert (memory[-1] == 7).all() and (memory[:, -2:] == 7).all()
