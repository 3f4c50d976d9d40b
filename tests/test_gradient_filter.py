"""Gradients of which only tiles of large probabilities are exact, beside their definition in float64."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES, Tensors, normal, part
from measures import assert_close, relative_error
from parallel_lce import LinearCrossEntropy, linear_cross_entropy, token_statistics
from parallel_lce.core.memory import HostNumber
from parallel_lce.features.filter import gradient as form
from parallel_lce.features.filter.tiles import TILE
from tools import chosen_backend, on_ranks, shrunk, unchecked

EPS, SEARCHED = 2**-7, form.SEARCHED


@pytest.fixture(autouse=True)
def _chosen(kernels):
    form.choice_for.cache_clear()
    with chosen_backend("triton"), mock.patch.object(form, "SEARCHED", 0):  # D is small in these tests
        yield
    form.choice_for.cache_clear()


@pytest.fixture
def slices(monkeypatch):
    monkeypatch.setattr(form, "SLICE_BYTES", 0)
    with shrunk(40_000):
        yield


def problem(dtype="bf16", device="cpu", N=150, V=400, slope=2.5, noise=0.4, D=16) -> list[Tensor]:
    """Hidden states, a weight whose first rows are the likely ones, and targets: drawn from the softmax, but for some
    ignored ones, and shared and unshared ones where nothing is likely."""
    x, weight = normal(N, D), noise * (16 / D) ** 0.5 * normal(V, D, seed=1)
    x[:, 0] = 3.0
    x[::9, 1:] *= 4.0  # ignored ones, sure of other entries
    weight[:, 0] = torch.linspace(slope, -slope, V)
    x, weight = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    p = (x.double() @ weight.double().T).softmax(1)
    target = p.multinomial(1, generator=torch.Generator().manual_seed(2)).squeeze(1)
    target[::9], target[1 :: max(17, N // 3)], target[3:4] = -100, max(0, V - 60), max(0, V - 70)
    return [x.to(device).requires_grad_(), weight.to(device).requires_grad_(), target.to(device)]


def gradients(x, weight, target, upstream=1.0, **options) -> tuple[Tensor, ...]:
    loss = linear_cross_entropy(x, weight, target, **options)
    bias = options.get("linear_bias")
    leaves = [x, weight] if bias is None or not bias.requires_grad else [x, weight, bias]
    return torch.autograd.grad(loss.sum() * upstream, leaves)


def filtered(g: torch.Tensor, p: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: ``g [N, V]`` filtered, and which of its tiles are active."""
    result, active = g.clone(), torch.zeros(-(-g.shape[0] // TILE), -(-g.shape[1] // TILE), dtype=torch.bool)
    for b, c in enumerate(range(0, g.shape[1], TILE)):
        columns = slice(c, c + TILE)
        rows = [slice(a, a + TILE) for a in range(0, g.shape[0], TILE)]
        active[:, b] = torch.tensor([bool((p[r, columns].abs() > eps).any()) for r in rows])
        others = [r for r, is_active in zip(rows, active[:, b]) if not is_active]
        share = sum((p[r, columns].abs().sum(0) for r in others), torch.zeros(g[:, columns].shape[1]).double())
        share = share / share.sum() if share.sum() else share
        for r in others:
            result[r, columns] = g[r, columns].sum(1, keepdim=True) * share
    return result, active


def expected(x, weight, target, eps=EPS):
    """dX and dW of the mean, and the share of active tiles."""
    x, weight, target = x.detach().double().cpu(), weight.detach().double().cpu(), target.cpu()
    counted = target >= 0
    p = (x @ weight.T).softmax(1) * counted[:, None]
    hit = one_hot(target.clamp(min=0), len(weight)).double() * counted[:, None]
    # The gradient of a target that no other token has is formed beside G, in which it is 0. Shared ones are in G.
    alone = hit * (hit.sum(0) == 1)
    within, shared = p * (1 - alone), (hit - alone).bool()
    g, active = filtered(within - shared.double(), within.masked_fill(shared, torch.inf), eps)
    g += (p - 1) * alone
    g /= counted.sum()
    return g @ weight, g.T @ x, active.double().mean().item()


@pytest.mark.parametrize(("dtype", "rtol"), [("bf16", 8e-3), ("fp16", 8e-3)])
@pytest.mark.parametrize("options", [{}, dict(logits_budget=0, reduction="none")], ids=["saved", "recomputed"])
@pytest.mark.parametrize("D", [16, 528])
@pytest.mark.thinned
def test_the_gradients_are_those_of_the_definition(options, D, dtype, rtol, device):
    """And losses are those without a filter, bit for bit. ``D``: of one tile of the products, or of ragged ones."""
    t = problem(dtype=dtype, device=device, D=D)
    dx, dw, active = expected(*t)
    assert 0.2 < active < 0.8
    losses = [linear_cross_entropy(*t, gradient_filter=eps, **options) for eps in (EPS, None)]
    scale = (t[2] >= 0).sum() if "reduction" in options else 1
    found, exact = (torch.autograd.grad(loss.sum() / scale, t[:2]) for loss in losses)
    assert torch.equal(*losses)
    assert_close(found[0].cpu(), dx, rtol)
    assert_close(found[1].cpu(), dw, rtol)
    filtered_rows = slice(TILE, 2 * TILE)  # with D=528 none of their entries is exact
    assert_close(found[1].cpu()[filtered_rows], dw[filtered_rows], rtol)
    assert not torch.equal(found[0], exact[0])


def test_the_gradient_of_the_bias_is_not_filtered(device):
    """Nor where tokens have other coefficients, so that what stands for a tile has other sums over tokens."""
    t, bias = problem(device=device), torch.zeros(400, dtype=torch.bfloat16, device=device)
    token_weight = torch.linspace(-1, 1, len(t[0]), device=device)
    options = dict(linear_bias=bias.requires_grad_(), token_weight=token_weight)
    exact, found = (gradients(*t, gradient_filter=eps, **options) for eps in (None, EPS))
    assert torch.equal(found[2], exact[2]) and not torch.equal(found[1], exact[1])


@pytest.mark.parametrize("cause", ["target", "hidden states"])
@pytest.mark.parametrize("options", [{}, dict(logit_softcap=30.0), dict(logits_budget=0)], ids=str)
@pytest.mark.thinned
def test_nan_reaches_what_it_would_reach_without_a_filter(options, cause, device, slices):
    x, weight, target = problem(device=device)
    with torch.no_grad():
        (target if cause == "target" else x)[20] = 10_000 if cause == "target" else torch.nan
    with unchecked():
        exact, found = (
            gradients(x, weight, target, reduction="none", gradient_filter=f, **options) for f in (None, EPS)
        )
    for a, b in zip(found, exact):
        assert torch.equal(a.isnan(), b.isnan())


DOORS = {
    "module": LinearCrossEntropy(gradient_filter=EPS),
    "statistics": lambda *t: -token_statistics(*t, argmax=True, gradient_filter=EPS).target_log_prob.mean(),
    "compiled": torch.compile(lambda *t: linear_cross_entropy(*t, gradient_filter=EPS), backend="aot_eager"),
}


def test_every_door_gives_the_same(device):
    t = problem(device=device)
    t[2].clamp_(min=0)
    expected, exact = (gradients(*t, gradient_filter=eps) for eps in (EPS, None))
    for door in DOORS.values():
        for a, b, c in zip(torch.autograd.grad(door(*t), t[:2]), expected, exact):
            assert_close(a, b.double(), 1e-5)
            assert not torch.equal(a, c)


# Tokens and entries of four row blocks, and of six tiles.
N, V = 404, 700
WIDE_EPS = 2**-6


def wide_problem(dtype="bf16", device="cpu", N=N, V=V):
    return problem(dtype, device, N, V, slope=1.5, noise=0.3)


def recomputed(*t, **options):
    return gradients(*t, logits_budget=0, **{"reduction": "none", **options})


def test_masses_of_tokens_are_kept(slices, device):
    """With a weight of equal rows, dX is the sum of the gradient of the token's logits: 1 for the log-sum-exp, and 0
    for the log-probability of a target, whose own probability is no part of the mass of its tile."""
    x, weight, target = wide_problem(device=device)
    bias = (x.detach() @ weight.detach().T).float().mean(0).to(x.dtype)
    bias[300] += 3.9
    p = bias.double().softmax(0)[300]
    assert 0.7 * WIDE_EPS < p < WIDE_EPS
    target[:], target[10] = -100, 300
    x, ones = (0 * x.detach()).requires_grad_(), torch.ones_like(weight).requires_grad_()
    found = token_statistics(x, ones, target, linear_bias=bias, logits_budget=0, gradient_filter=WIDE_EPS)
    dx, _ = torch.autograd.grad(found.lse.sum(), (x, ones), retain_graph=True)
    assert_close(dx, torch.ones_like(dx).double(), 4e-3)
    dx, _ = torch.autograd.grad(found.target_log_prob[10], (x, ones))
    assert dx.abs().max() < 0.3 * p


def test_tokens_without_a_unit_reach_no_other_token(slices, device):
    x, weight, target = wide_problem(device=device)
    scale, temperature = torch.ones(N, device=device), torch.ones(N, device=device)
    scale[::7], scale[1::7], temperature[2::7] = 0.0, 1e-38, torch.inf
    options = dict(logit_scale=scale, temperature=temperature)
    found = recomputed(x, weight, target, gradient_filter=WIDE_EPS, **options)
    for f, e in zip(found, recomputed(x, weight, target, **options)):
        assert relative_error(f, e.double()) < 0.05
    for first in range(3):
        assert found[0][first::7].abs().max() < 1e-30


PARTLY_SAVED = N * 256 * 2 + 50_000


@pytest.mark.parametrize("budget", [pytest.param(0, marks=pytest.mark.slow), PARTLY_SAVED])
def test_a_second_backward_forms_what_the_first_has_overwritten(budget, slices, device):
    """What the first one has overwritten is formed anew. Both are filtered, or neither."""
    t = wide_problem(device=device)
    loss = linear_cross_entropy(*t, reduction="none", logits_budget=budget, gradient_filter=WIDE_EPS).sum()
    first = torch.autograd.grad(loss, t[:2], retain_graph=True)
    second = torch.autograd.grad(loss, t[:2])
    for a, b in zip(first, second):
        assert_close(b, a.double(), 0.02)
        assert budget or torch.equal(a, b)


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@on_ranks(2)
def test_ranks_filter_the_tiles_of_the_whole(member, sequence_parallel):
    """Shards of whole tiles have the tiles of the whole. One of the ranks may choose exact gradients."""
    x, weight, target = given = wide_problem(N=256, V=768, device=member.device)
    t = part(Tensors(x, weight, target), member, sequence_parallel)
    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, gradient_filter=WIDE_EPS)
    form.choice_for.cache_clear()
    found = recomputed(t.x, t.weight, target, **options)
    alone = mock.Mock(**{"begin.return_value": (member.rank == 1, None)})
    with mock.patch.object(form, "choice_for", return_value=alone):
        mixed = recomputed(t.x, t.weight, target, **options)
    exact, (dx, dw) = recomputed(*given), recomputed(*given, gradient_filter=WIDE_EPS)
    assert not torch.equal(dw, exact[1])
    of_rank = exact[1].chunk(2)[member.rank].double()
    assert_close(mixed[1], of_rank, 0.2 if member.rank else 1e-2)
    assert_close(mixed[0], (exact[0].chunk(2)[member.rank] if sequence_parallel else exact[0]).double(), 0.2)
    assert_close(found[0], dx.chunk(2)[member.rank].double() if sequence_parallel else dx.double(), 1e-2)
    assert_close(found[1], dw.chunk(2)[member.rank].double(), 1e-2)


@pytest.mark.parametrize("options", [{}, pytest.param(dict(logits_budget=0, reduction="none"), marks=pytest.mark.slow)])
def test_a_filter_that_would_skip_little_is_left_out(options, slices, device, monkeypatch):
    """From two calls after a count on, in which nearly all tiles are active, until two calls after the next one. The
    second call is walked twice, and has one choice."""
    monkeypatch.setattr(form, "PERIOD", 3)
    sizes = (260, 512) if options else (130, 260)
    x, weight, target = sure = problem("bf16", device, *sizes, slope=5.0)
    unsure = [t.detach().div(16).requires_grad_() for t in (x, weight)]  # whose probabilities are all nearly equal
    found, walked = [], []
    for t in [[*unsure, target]] * 3 + [sure] * 3:
        loss = linear_cross_entropy(*t, gradient_filter=0.5 / sizes[1], **options).sum()
        with mock.patch.object(form, "FilteredSlice", wraps=form.FilteredSlice) as products:
            walked = [torch.autograd.grad(loss, t[:2], retain_graph=True) for _ in range(1 + (len(found) == 1))]
        found.append("F" if products.call_count else "-")
        assert len(found) != 2 or products.call_count == (4 if options else 3)  # slices
        if len(found) == 3:
            assert all(map(torch.equal, walked[0], gradients(*t, **options)))
    assert "".join(found) == "FF-F-F"


def test_few_hidden_elements_pay_only_for_few_active_tiles(monkeypatch):
    monkeypatch.setattr(form, "SEARCHED", SEARCHED)
    assert [form.choice_for(size)._most_active for size in (4096, 2048, 1024, 512)] == [0.75, 0.75, 0.5, 0.0]
    for hidden_size in (4096, 1024):
        choice = form.choice_for(hidden_size, "any kind")
        _, counts = choice.begin()
        counts.append((HostNumber(torch.tensor(6)), 10))
        choice.begin()
        assert choice.begin() == (hidden_size == 4096, None)
