"""The targets' own part, beside float64: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES, normal
from parallel_lce.core.partials import Coefficients
from parallel_lce.kernels import targets as kernels
from parallel_lce.kernels.rewrite import GradientTerms
from parallel_lce.kernels.token_gradients import token_gradients

pytestmark = pytest.mark.usefixtures("kernels")

R, K = 300, 150
OUTSIDE = [-1, K, -(2**63), 2**62]


@pytest.fixture(params=["fp32", "bf16", "fp16"])
def dtype(request) -> torch.dtype:
    return DTYPES[request.param]


def some_targets(device: str, rows: int = R) -> torch.Tensor:
    """A third of one, some that are nowhere, and of the others some alone."""
    target = torch.randint(K, (rows,), generator=torch.Generator().manual_seed(0))
    target[::3] = 7
    target[1::5] = torch.tensor(OUTSIDE).repeat(rows)[: len(target[1::5])]
    return target.to(device)


def hits(target: torch.Tensor) -> torch.Tensor:
    return (target >= 0) & (target < K)


def counts(target: torch.Tensor) -> torch.Tensor:
    """How many tokens have each token's target; 0 for those that are nowhere."""
    same = target[:, None] == target[None, :]
    return torch.where(hits(target), same.sum(1), 0)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_gradients(options, softcap, device):
    """Of sure tokens too, whose p is 1 - 1e-4: nothing cancels."""
    alpha, beta, gamma, delta, logit, epsilon, token_scale = normal(7, R).float().to(device)
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
        gamma = delta = epsilon = token_scale = None
    operands = SimpleNamespace(scale=-0.5, token_scale=token_scale, softcap=softcap)
    # G has none of the targets.
    found, unshared, *factors = token_gradients(
        torch.empty(R, 8, device=device),
        None,
        target,
        GradientTerms.of(statistics, Coefficients(alpha, beta, gamma, delta, epsilon, None), None, operands),
        entries=K,
        first=K,
        find_shared=options == "all",
    )
    assert factors == [None, None]
    if options == "all":
        assert 20 < (counts(target) == 1).sum() < 200 and torch.equal(unshared, (counts(target) == 1).byte())
    else:
        assert torch.equal(unshared, hits(target).byte())
    top, total, z = statistics.double()
    shifted = z - top.masked_fill(top == -torch.inf, 0.0)
    nothing = torch.zeros_like(z)
    a, b, g, d, q = (nothing if c is None else c.double() for c in (alpha, beta, gamma, delta, epsilon))
    p = shifted.exp() / total
    exact = p * (a + d * shifted.clamp(min=-1e4) + q * p) - b - g
    if token_scale is not None:
        exact *= token_scale.double()
    if softcap is not None:
        exact *= 1 - (z / softcap) ** 2
    expected = torch.where(hits(target), -0.5 * exact, 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    cancelled = expected[sure][hits(target)[sure]]
    if options == "plain" and softcap is None:
        assert (cancelled.abs() < 2e-4).all() and (cancelled != 0).all()
        error = (found[sure].double() - expected[sure]).abs()
        assert (error <= 1e-2 * expected[sure].abs() + 1e-7 * alpha[sure].abs()).all()


@pytest.mark.parametrize("scaled", [False, True])
def test_placed_targets(scaled, dtype, device):
    """An entry and what it leaves are the gradient."""
    target = some_targets(device) + 20
    unshared = (counts(target - 20) == 1).byte()
    t = normal(R, seed=1).float().to(device)
    fp16_scale = torch.tensor(4.0, device=device) if scaled else None
    factor = 0.25 if scaled else 1.0
    gradient = torch.full((R, 160), 3.0, dtype=dtype, device=device)
    residual = t.clone()
    kernels.place_targets(gradient[:, :90], 20, kernels.Targets(target, residual, unshared), fp16_scale)
    hit = (target >= 20) & (target < 110)
    entries = gradient[torch.arange(R, device=device), (target - 20).clamp(0, 89)].float()
    others = torch.ones_like(gradient, dtype=torch.bool)
    others[hit, target[hit] - 20] = False
    assert (gradient[others] == 3).all()
    assert torch.equal(residual[~hit], t[~hit])
    assert (entries[hit & (unshared != 0)] == 0).all() and torch.equal(residual[unshared != 0], t[unshared != 0])
    placed = hit & (unshared == 0)
    assert placed.sum() > 60
    eps = torch.finfo(dtype).eps
    assert ((entries - t / factor)[placed].abs() <= (eps / 2 + 1e-6) * (t / factor)[placed].abs()).all()
    torch.testing.assert_close((factor * entries + residual)[placed], t[placed], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("of", ["rows", "one", "none"])
@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("D", [1, 300, 5000])
@pytest.mark.thinned
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
    found = kernels.scale_and_add_targets(source, factor, targets, memory[:-1, :-2])
    assert found.data_ptr() == memory.data_ptr()
    rounding = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= (rounding + 1e-6) * exact.abs() + 1e-6).all()
    assert (memory[-1] == 7).all() and (memory[:, -2:] == 7).all()
    again = kernels.scale_and_add_targets(source, factor, targets, source)
    assert torch.equal(again.to(dtype), found)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("total_dtype", ["fp32", "same"])
@pytest.mark.parametrize(("D", "first", "columns"), [(1, 0, K), (70, 5, 60), (300, 0, K)])
@pytest.mark.thinned
def test_added_targets(D, first, columns, total_dtype, transposed, dtype, device, monkeypatch):
    """Those that are alone; rounded once."""
    monkeypatch.setattr(kernels, "_WIDTH", 128)
    target = some_targets(device)
    unshared = counts(target) == 1
    x = normal(R, D + 3, seed=1).to(device).to(dtype)[:, :D]
    residual = normal(R, seed=2).float().to(device)
    total_dtype = torch.float32 if total_dtype == "fp32" else dtype
    shape = (D + 2, columns + 1) if transposed else (columns + 1, D + 2)
    memory = torch.full(shape, 7.0, dtype=total_dtype, device=device)
    memory = memory.t() if transposed else memory
    total = memory[:-1, :-2].copy_(normal(columns, D, seed=3))
    before = total.clone()
    exact = before.double()
    some = unshared & (target >= first) & (target < first + columns)
    assert some.sum() > 10
    exact[target[some] - first] += residual[some].double()[:, None] * x[some].double()
    kernels.add_targets(total, first, kernels.Targets(target, residual, unshared.byte()), x)
    rounding = torch.finfo(total_dtype).eps / 2
    size = exact.abs() + before.double().abs()
    assert ((total.double() - exact).abs() <= rounding * exact.abs() + 2e-6 * size).all()
    untouched = torch.ones(columns, dtype=torch.bool, device=device)
    untouched[target[some] - first] = False
    assert torch.equal(total[untouched], before[untouched])
    assert (memory[-1] == 7).all() and (memory[:, -2:] == 7).all()
