"""The tokens' rows of the gradient of the logits, and the targets' own part, beside float64: interpreted on the CPU,
compiled with ``-m gpu``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES, normal
from parallel_lce.kernels import targets as kernels
from parallel_lce.kernels.arithmetic import REACH, SAVED_FP16_SCALE
from parallel_lce.kernels.rewrite import GradientTerms, Saved
from parallel_lce.kernels.token_gradients import token_gradients

pytestmark = pytest.mark.usefixtures("kernels")

WINDOW = 64
R, C = 30, 200
KINDS = 8  # of rows, in turn
TARGET = 11  # of tokens that have one


@pytest.fixture(params=["fp32", "bf16", "fp16"])
def dtype(request) -> torch.dtype:
    return DTYPES[request.param]


def smallest(dtype: torch.dtype) -> float:
    """Half the distance of the smallest numbers, where they matter."""
    return 2**-25 if dtype == torch.float16 else 0.0


def rows(dtype: torch.dtype, device: str, softcap: float | None = None) -> SimpleNamespace:
    """Tokens of each kind, their saved exponentials, and what statistics say of them.

    0: as it is. 1: alpha is 0, but not the gradient of the target. 2: one window relative to its own
    maximum. 3: a maximum of all shards far above the reference. 4: both are 0. 5: p of one entry, which is no target,
    is nearly 1. 6: alpha is tiny. 7: no window near the reference, and one of -inf alone. Tokens of kind 1 and some of
    kind 0 have a target.
    """
    kind = torch.arange(R) % KINDS
    z = normal(R, C)
    if softcap is None:
        z[kind == 2, WINDOW : 2 * WINDOW] -= 2 * REACH
        z[kind == 5, 17] = 13.0
        z[kind == 7, 2 * WINDOW : 3 * WINDOW] = -torch.inf
    else:
        z = softcap * torch.tanh(2 * z / softcap)
    total = z.logsumexp(1)
    elsewhere = total - 1
    if softcap is None:
        elsewhere[kind == 3] = total[kind == 3] + REACH + 20
    maximum = torch.maximum(z.amax(1), elsewhere)
    sum_exp = (torch.logaddexp(total, elsewhere) - maximum).exp()
    alpha, gamma = normal(2, R, seed=1).abs() + 0.1
    alpha[(kind == 1) | (kind == 4)] = 0.0
    beta = normal(R, seed=2).abs() + 0.1
    target = torch.where((kind == 1) | (torch.arange(R) % 16 == 0), TARGET, -1)
    target[16] = TARGET + 1  # that no other token has
    alpha[kind == 6] *= 1e-25
    softmax_shift = on_shift = None
    maxima = torch.stack([part.amax(1) for part in z.split(WINDOW, 1)])
    references = maxima
    if dtype != torch.float16:
        softmax_shift = torch.zeros(R) if softcap is not None else z.amax(1).float() - 2
        softmax_shift[kind == 7] += 150 if softcap is None else 0
        near = ((maxima - softmax_shift).abs() <= REACH) | (maxima == -torch.inf)
        references = torch.where(near, softmax_shift.double(), maxima)
        on_shift = (references == softmax_shift).all(0).to(torch.uint8)
    scale = SAVED_FP16_SCALE if dtype == torch.float16 else 1.0
    memory = torch.full((R, 256), torch.nan, dtype=dtype, device=device)
    finite = references.masked_fill(references == -torch.inf, 0.0)
    saved = memory[:, :C].copy_((z - finite.repeat_interleave(WINDOW, 0)[:C].t()).exp() * scale)
    statistics = torch.stack([maximum, sum_exp, z[torch.arange(R), target.clamp(min=0)]])
    names = "statistics", "alpha", "beta", "gamma", "delta", "epsilon", "token_scale"
    values = statistics, alpha, beta, gamma / C, *normal(3, R, seed=3)
    made = {name: value.float().to(device) for name, value in zip(names, values)}
    made |= dict(z=z.to(device), kind=kind.to(device), target=target.to(device), saved=saved)
    narrow = [t if t is None else t.to(device) for t in (maxima.float(), softmax_shift, on_shift)]
    return SimpleNamespace(**made, stored=Saved(saved, *narrow))


def exact(r, *, gamma=False, of_entries=False, factor=1.0, softcap=None) -> tuple[torch.Tensor, torch.Tensor]:
    """``p alpha - gamma`` times the slope, ``[R, C]`` float64, but for the targets' entries; ``of_entries``: with
    delta, epsilon and token_scale. And the magnitude of its terms."""
    top, sum_exp, _ = r.statistics.double()
    alpha, of_gamma, delta, epsilon, token_scale = (
        v.double()[:, None] for v in (r.alpha, r.gamma, r.delta, r.epsilon, r.token_scale)
    )
    moved = (r.z - top[:, None]).clamp(min=-1e4)
    p = moved.exp() / sum_exp[:, None]
    of_p, size = alpha.expand_as(p), alpha.abs()
    if of_entries:
        of_p = alpha + delta * moved + epsilon * p
        # A rounded exponential tells z to one rounding of 1.
        size = alpha.abs() + delta.abs() * (1 + moved.abs()) + epsilon.abs()
    g, terms = p * of_p, p * size
    if gamma:
        g, terms = g - of_gamma, terms + of_gamma.abs()
    if of_entries:
        g, terms = g * token_scale, terms * token_scale.abs()
    if softcap is not None:
        # The slope is that of z from a rounded exponential, and acts on gamma too.
        g, terms = g * (1 - (r.z / softcap) ** 2), terms * (1 + 4 / softcap)
    return without_targets(g * factor, r), terms * abs(factor)


def formed(r, *, gamma=False, of_entries=False, fp16_scale=None, scale=1.0, softcap=None, rewrite=False, factor=None):
    delta, epsilon, token_scale = (r.delta, r.epsilon, r.token_scale) if of_entries else (None, None, None)
    coefficients = Coefficients(r.alpha, r.beta, r.gamma if gamma else None, delta, epsilon, factor)
    operands = SimpleNamespace(scale=scale, token_scale=token_scale, softcap=softcap)
    terms = GradientTerms.of(r.statistics, coefficients, fp16_scale, operands)
    found = token_gradients(r.saved, r.stored, r.target, terms, entries=C, window=WINDOW, rewrite=rewrite)
    whole = rewrite or gamma or of_entries or softcap is not None or r.stored.softmax_shift is None
    assert (found.dx_factor is None) == (found.dw_factor is None) == whole
    ones = torch.ones_like(r.alpha)
    return found._replace(dx_factor=ones, dw_factor=ones) if whole else found


def without_targets(values: torch.Tensor, r) -> torch.Tensor:
    """``[R, C]`` with 0 for the targets' entries."""
    at = r.target.clamp(min=0)[:, None]
    return values.scatter(1, at, torch.where(r.target[:, None] >= 0, 0.0, values.gather(1, at)).to(values.dtype))


@pytest.mark.parametrize("rewrite", [False, True])
def test_rows_are_rewritten_where_they_must(rewrite, dtype, device):
    r = rows(dtype, device)
    before = r.saved.clone()
    factor = formed(r, rewrite=rewrite).dx_factor
    must = ((r.kind >= 1) & (r.kind <= 3)) | (r.kind >= 5)
    must |= torch.tensor(rewrite or dtype == torch.float16, device=device)
    assert (factor[must] == 1).all() and (factor[~must] != 1).all()
    assert torch.equal(without_targets(before, r)[~must], without_targets(r.saved, r)[~must])
    truth, _ = exact(r)
    gradient = without_targets(r.saved, r).double() * factor[:, None].double()
    # In fp16 p of 1e-5 times a coefficient of 0.1 is a subnormal number, without `power`.
    bound = 1.01 * torch.finfo(dtype).eps * truth.abs() + 3e-6 * r.alpha[:, None] + smallest(dtype)
    assert ((gradient - truth).abs() <= bound).all()
    # No coefficient makes a gradient of zero.
    assert torch.count_nonzero(gradient[(r.kind == 1) | (r.kind == 4)]) == 0


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("gamma", "of_entries"), [(False, False), (True, False), (True, True)])
@pytest.mark.thinned
def test_formed_with_every_coefficient(gamma, of_entries, softcap, dtype, device):
    r = rows(dtype, device, softcap)
    asked = dict(gamma=gamma, of_entries=of_entries)
    fp16_scale = torch.tensor(2.0**6, device=device)
    factor = formed(r, **asked, fp16_scale=fp16_scale, scale=-0.5, softcap=softcap).dx_factor
    truth, terms = exact(r, **asked, factor=-0.5 * 64, softcap=softcap)
    error = (without_targets(r.saved, r).double() * factor[:, None].double() - truth).abs()
    size = r.alpha.abs() + of_entries * (r.delta.abs() + r.epsilon.abs())
    assert (error <= torch.finfo(dtype).eps * (truth.abs() + terms) + 1e-4 * size[:, None] + smallest(dtype)).all()


def test_a_target_is_an_entry_and_what_it_leaves(dtype, device):
    """Rows that are rewritten are so before their targets' entries are placed."""
    r = rows(dtype, device)
    found = formed(r)
    has, shared = r.target >= 0, r.target == TARGET
    assert torch.equal(found.unshared != 0, has & ~shared) and (has & ~shared).sum() == 1 and shared.sum() > 3
    top, sum_exp, z = r.statistics.double()
    t = torch.where(has, (z - top).exp() / sum_exp * r.alpha - r.beta, 0.0)
    entry = r.saved.double()[torch.arange(R, device=device), r.target.clamp(min=0)]
    assert (entry[has & ~shared] == 0).all()
    placed = torch.where(shared, entry, 0.0)
    torch.testing.assert_close(found.dx_factor * placed + found.residual, t, rtol=1e-6, atol=1e-6)
    assert (found.residual[shared].abs() <= torch.finfo(dtype).eps * t[shared].abs() + 1e-6).all()
    if r.stored.softmax_shift is not None:
        torch.testing.assert_close((found.dw_factor * placed)[shared], t[shared], rtol=1e-6, atol=1e-6)
    assert torch.equal(found.dw_factor[~shared], found.dx_factor[~shared])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.thinned
def test_a_factor_multiplies_every_coefficient(per_token, dtype, device):
    factor = normal(R, seed=9).float().to(device) if per_token else torch.tensor(-1.5, device=device)
    one, other = rows(dtype, device), rows(dtype, device)
    other.alpha, other.beta = other.alpha * factor, other.beta * factor
    for found, expected in zip(formed(one, factor=factor), formed(other)):
        assert torch.equal(found, expected)
    assert torch.equal(one.saved, other.saved)


# --- targets ---------------------------------------------------------------------------------------

N, K = 300, 150


def some_targets(device: str, number: int = N) -> torch.Tensor:
    """A third of one, some that are nowhere, and of the others some alone."""
    target = torch.randint(K, (number,), generator=torch.Generator().manual_seed(0))
    target[::3] = 7
    target[1::5] = torch.tensor([-1, K, -(2**63), 2**62]).repeat(number)[: len(target[1::5])]
    return target.to(device)


def hits(target: torch.Tensor) -> torch.Tensor:
    return (target >= 0) & (target < K)


def alone(target: torch.Tensor) -> torch.Tensor:
    """Which targets are somewhere, and no other token's."""
    return hits(target) & ((target[:, None] == target[None, :]).sum(1) == 1)


def surrounded(*shape: int, dtype, device) -> torch.Tensor:
    """Memory of 7 with a row and two columns more, in which :func:`inside` lies."""
    return torch.full((shape[0] + 1, shape[1] + 2), 7.0, dtype=dtype, device=device)


def inside(memory: torch.Tensor) -> torch.Tensor:
    assert (memory[-1] == 7).all() and (memory[:, -2:] == 7).all()
    return memory[:-1, :-2]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("plain", [True, False])
def test_gradients_of_targets(plain, softcap, device):
    """Of sure tokens too, whose p is 1 - 1e-4: nothing cancels."""
    alpha, beta, gamma, delta, logit, epsilon, token_scale = normal(7, N).float().to(device)
    sum_exp = 1 + normal(N, seed=1).abs().float().to(device)
    maximum = logit.double() + normal(N, seed=2).abs().to(device)
    sure = slice(0, N, 4)
    maximum[sure], sum_exp[sure], beta[sure] = logit[sure].double(), 1.0001, alpha[sure]
    if softcap is None:
        maximum[5], logit[5], beta[5] = -torch.inf, -torch.inf, 0.0
    statistics = torch.stack([maximum.float(), sum_exp, logit])
    target = some_targets(device)
    if plain:
        gamma = delta = epsilon = token_scale = None
    operands = SimpleNamespace(scale=-0.5, token_scale=token_scale, softcap=softcap)
    terms = GradientTerms.of(statistics, TokenCoefficients(alpha, beta, gamma, delta, epsilon, None), None, operands)
    # G has none of the targets.
    gradient = torch.empty(N, 8, device=device)
    found, unshared, *factors = token_gradients(
        gradient, None, target, terms, entries=K, first=K, find_shared=not plain
    )
    assert factors == [None, None]
    assert 20 < alone(target).sum() < 200
    assert torch.equal(unshared, (hits(target) if plain else alone(target)).byte())
    top, total, z = statistics.double()
    shifted = (z - top.masked_fill(top == -torch.inf, 0.0)).clamp(min=-1e4)
    a, b, g, d, q = (torch.zeros_like(z) if c is None else c.double() for c in (alpha, beta, gamma, delta, epsilon))
    p = shifted.exp() / total
    exact = p * (a + d * shifted + q * p) - b - g
    if token_scale is not None:
        exact *= token_scale.double()
    if softcap is not None:
        exact *= 1 - (z / softcap) ** 2
    expected = torch.where(hits(target), -0.5 * exact, 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    if plain and softcap is None:
        cancelled = expected[sure][hits(target)[sure]]
        assert (cancelled.abs() < 2e-4).all() and (cancelled != 0).all()
        error = (found[sure].double() - expected[sure]).abs()
        assert (error <= 1e-2 * expected[sure].abs() + 1e-7 * alpha[sure].abs()).all()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.thinned
def test_placed_targets(scaled, dtype, device):
    """An entry and what it leaves are the gradient."""
    target = some_targets(device)
    unshared = alone(target)
    t = normal(N, seed=1).float().to(device)
    factor = 0.25 if scaled else 1.0
    gradient = torch.full((N, 160), 3.0, dtype=dtype, device=device)
    residual = t.clone()
    # The slice of the entries [20, 110).
    targets = kernels.Targets(target + 20, residual, unshared.byte())
    kernels.place_targets(gradient[:, :90], 20, targets, torch.tensor(4.0, device=device) if scaled else None)
    hit = (target >= 0) & (target < 90)
    entries = gradient[torch.arange(N, device=device), target.clamp(0, 89)].float()
    others = torch.ones_like(gradient, dtype=torch.bool)
    others[hit, target[hit]] = False
    assert (gradient[others] == 3).all() and (entries[hit & unshared] == 0).all()
    placed = hit & ~unshared
    assert placed.sum() > 60 and torch.equal(residual[~placed], t[~placed])
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
    factor = {"rows": normal(20, 1, seed=3).float(), "one": torch.tensor(0.25), "none": torch.tensor(1.0)}[of].to(
        device
    )
    exact = source.double() * factor.double()
    factor = None if of == "none" else factor.squeeze()
    if with_target:
        row = torch.where(hits(target), target, 0)
        exact = exact + torch.where(hits(target), entry, 0.0).double()[:, None] * weight[row].double()
    memory = surrounded(20, D, dtype=dtype, device=device)
    targets = (target, entry, weight) if with_target else None
    found = kernels.scale_and_add_targets(source, factor, targets, inside(memory))
    assert torch.equal(found, inside(memory)) and found.data_ptr() == memory.data_ptr()
    rounding = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= (rounding + 1e-6) * exact.abs() + 1e-6).all()
    x, x_factor = normal(20, D + 1, seed=4).to(device).to(dtype)[:, :D], normal(20, seed=5).float().to(device)
    scaled = surrounded(20, D, dtype=dtype, device=device)
    again = kernels.scale_and_add_targets(source, factor, targets, source, (x, x_factor, inside(scaled)))
    assert torch.equal(again.to(dtype), found)
    assert torch.equal(inside(scaled), (x.float() * x_factor[:, None]).to(dtype))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("total_dtype", ["fp32", "same"])
@pytest.mark.parametrize(("D", "first", "columns"), [(1, 0, K), (70, 5, 60), (2100, 0, K)])
@pytest.mark.thinned
def test_added_targets(D, first, columns, total_dtype, transposed, dtype, device):
    """Those that are alone; rounded once. More hidden elements than one program's."""
    target = some_targets(device)
    unshared = alone(target)
    x = normal(N, D + 3, seed=1).to(device).to(dtype)[:, :D]
    residual = normal(N, seed=2).float().to(device)
    total_dtype = torch.float32 if total_dtype == "fp32" else dtype
    memory = surrounded(columns, D, dtype=total_dtype, device=device)
    memory = memory.t().contiguous().t() if transposed else memory
    total = inside(memory).copy_(normal(columns, D, seed=3))
    exact, size = total.double(), total.double().abs()
    some = unshared & (target >= first) & (target < first + columns)
    assert some.sum() > 10
    exact[target[some] - first] += residual[some].double()[:, None] * x[some].double()
    kernels.add_targets(total, first, kernels.Targets(target, residual, unshared.byte()), x)
    rounding = torch.finfo(total_dtype).eps / 2
    changed = (exact - total.double()).abs()
    assert (changed <= rounding * exact.abs() + 2e-6 * (exact.abs() + size)).all()
    inside(memory)
