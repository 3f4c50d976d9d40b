"""Filtered backwards that project only the windows with a large probability again."""

from __future__ import annotations

import pytest
import torch

from cases import DTYPES, normal
from measures import assert_close, relative_error
from parallel_lce import linear_cross_entropy, token_statistics
from parallel_lce.call import prepare
from tools import arguments_to, chosen_backend, everywhere, results_of, shrunk
from world import Member

pytest.importorskip("triton", reason="needs triton")


from parallel_lce.backends import triton_backward, triton_filter, triton_windows
from parallel_lce.backends.interface import Scratch
from parallel_lce.kernels.filter import windows
from parallel_lce.kernels.filter.tiles import TILE
from parallel_lce.kernels.filter.windows import sample_tokens

EPS = 2**-6
# Tokens, entries, and those of a window in the tests' dtypes. A slice has two windows.
N, V, WINDOW = 532, 700, 256
# Four windows.
MORE = {"N": 788, "V": 1000}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """A third of the tokens are a sample, and a slice has two windows."""
    monkeypatch.setattr(windows, "FEWEST_SAMPLED", 1)
    monkeypatch.setattr(triton_backward, "WINDOWED_BYTES", 2 * WINDOW * N * 2)
    with chosen_backend("triton"), shrunk(40_000):
        yield


@pytest.fixture
def two_sampled(monkeypatch):
    """A third of the tokens of MORE are a sample."""
    monkeypatch.setattr(windows, "FEWEST_SAMPLED", 2)
    monkeypatch.setattr(triton_backward, "WINDOWED_BYTES", 2 * WINDOW * MORE["N"] * 2)
    with shrunk(60_000):
        yield


@pytest.fixture
def listed():
    """The lists of windows that were projected since, ``[1 + n]`` each."""
    prepare.KNOWN.clear()
    with results_of(triton_windows, "list_active_windows") as found:
        yield found


def problem(dtype="bf16", device="cpu", N=N, V=V, slope=1.5, kind="ordered", noise=0.3):
    """Hidden states, a weight whose first rows are the likely ones, and targets drawn from the softmax. ``halves``: of
    a window the second tile is less likely; ``tokens``: half of them prefer the first tile, half the second one."""
    x, weight = normal(N, 16), noise * normal(V, 16, seed=1)
    x[:, 0] = 3.0
    weight[:, 0] = torch.linspace(slope, -slope, V)
    second = torch.arange(V) // 128 % 2
    if kind == "halves":
        weight[:, 0] -= second
    elif kind == "tokens":
        x[:, 1], weight[:, 1] = 1 - 2.0 * (torch.arange(N) % 2), 2 - 4.0 * second
    x, weight = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    p = (x.double() @ weight.double().T).softmax(1)
    target = p.multinomial(1, generator=torch.Generator().manual_seed(2)).squeeze(1)
    target[::9] = -100
    # Shared and unshared targets where nothing is likely.
    target[1::170], target[3] = V - 60, V - 70
    return [x.to(device).requires_grad_(), weight.to(device).requires_grad_(), target.to(device)]


def gradients(x, weight, target, upstream=1.0, budget=0, **options):
    loss = linear_cross_entropy(x, weight, target, logits_budget=budget, **{"reduction": "none", **options})
    return torch.autograd.grad(loss.sum() * upstream, (x, weight))


OPTIONS = {
    "none": {},
    "partly saved": {"budget": N * WINDOW * 2 + 50_000, "z_loss": 1e-3},
    "bias": {"linear_bias": 0.1 * normal(V, seed=5), "logit_scale": 0.9, "vocab_size": V - 50},
}


def options_of(name, dtype, device):
    return {k: v.to(DTYPES[dtype]).to(device) if torch.is_tensor(v) else v for k, v in OPTIONS[name].items()}


@pytest.mark.thinned("dtype")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_filter_below_every_probability_changes_nothing(name, dtype, listed, device):
    t, options = problem(dtype, device), options_of(name, dtype, device)
    found = gradients(*t, gradient_filter=1e-30, **options)
    assert len(listed) == (1 if name == "partly saved" else 2) and all(n[0] > 0 for n in listed)
    for a, b in zip(found, gradients(*t, **options)):
        assert_close(a, b.double(), 6e-3)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_error_is_near_that_of_the_definition(name, dtype, listed, device, monkeypatch):
    """By which whole G is formed and scanned. Here the shares are those of a sample."""
    t, options = problem(dtype, device), options_of(name, dtype, device)
    exact = gradients(*t, **options)
    found = gradients(*t, gradient_filter=EPS, **options)
    number = sum(n[0].item() for n in listed)
    assert 0 < number < 3 * 5
    monkeypatch.setattr(triton_backward, "fills_sample", lambda rows: False)
    whole = gradients(*t, gradient_filter=EPS, **options)
    for a, b, c in zip(found, exact, whole):
        assert 0.004 < relative_error(c, b.double())
        assert relative_error(a, b.double()) <= 1.5 * relative_error(c, b.double())


def test_what_is_not_projected_is_not_read(listed, device, monkeypatch):
    t, borrow = problem(device=device), Scratch.borrow

    def filled(number):
        monkeypatch.setattr(Scratch, "borrow", lambda *given: borrow(*given).fill_(number))
        return gradients(*t, gradient_filter=EPS)

    for a, b in zip(filled(torch.nan), filled(1.0)):
        assert torch.equal(a, b) and a.isfinite().all()


def test_windows_with_a_large_probability_or_a_shared_target_are_projected(listed, device):
    x, weight, target = problem(device=device)
    gradients(x, weight, target, gradient_filter=EPS)
    p = (x.detach().double() @ weight.detach().double().T).softmax(1).cpu()
    p[target.cpu() < 0] = 0.0
    ids, counts = target.cpu().unique(return_counts=True)
    for y in ids[(counts > 1) & (ids >= 0)]:
        p[target.cpu() == y, y] = 1.0
    blocks = [p[a : a + 128, b : b + WINDOW].max() for b in range(0, V, WINDOW) for a in range(0, N, 128)]
    blocks = torch.stack(blocks).view(3, 5)
    found = torch.zeros(3, 5, dtype=torch.bool)
    for number, n in enumerate(listed):
        for tile in n[1 : 1 + n[0]].tolist():
            found[2 * number + tile // 5, tile % 5] = True
    # Probabilities from bf16 operands are exact here; sums are rounded.
    assert found[blocks > 1.01 * EPS].all() and not found[blocks < 0.99 * EPS].any()


def test_masses_of_tokens_are_kept(device):
    """With a weight of equal rows, dX of the log-sum-exp is the sum of the token's probabilities."""
    x, weight, _ = problem(device=device)
    bias = (x.detach() @ weight.detach().T).float().mean(0).to(x.dtype)
    x, ones = 0 * x.detach(), torch.ones_like(weight)
    x.requires_grad_()
    found = token_statistics(x, ones, None, linear_bias=bias, logits_budget=0, gradient_filter=EPS)
    (dx,) = torch.autograd.grad(found.lse.sum(), x)
    assert_close(dx, torch.ones_like(dx).double(), 4e-3)


def test_scales_of_tokens(listed, device):
    x, weight, target = problem(device=device)
    scale = torch.linspace(0.5, 1.5, len(x), device=device)
    with torch.no_grad():
        target.clamp_(min=0)

    def gradient(**options):
        found = token_statistics(x, weight, target, logit_scale=scale, logits_budget=0, **options)
        return torch.autograd.grad(found.target_log_prob.sum(), (x, weight))

    exact, all_active, some = gradient(), gradient(gradient_filter=1e-30), gradient(gradient_filter=EPS)
    assert len(listed) == 4
    for a, b, c in zip(exact, all_active, some):
        assert_close(b, a.double(), 6e-3)
        assert relative_error(c, a.double()) < 0.2


def test_a_bias_beside_scales_of_tokens(listed, device, monkeypatch):
    """A token's scale multiplies its bias, too."""
    x, weight, _ = problem(device=device)
    bias, scale = 2.0 * normal(V, seed=5).to(x.dtype).to(device), torch.full((N,), 0.1, device=device)

    def gradient():
        options = dict(logit_scale=scale, linear_bias=bias, logits_budget=0, gradient_filter=2**-5)
        return torch.autograd.grad(token_statistics(x, weight, None, **options).lse.sum(), (x, weight))

    found = gradient()
    assert sum(n[0] for n in listed) == 0
    monkeypatch.setattr(triton_backward, "fills_sample", lambda rows: False)
    for a, b in zip(found, gradient()):
        assert relative_error(a, b.double()) < 0.02


@pytest.mark.parametrize("gradient_filter", [pytest.param(1e-30, marks=pytest.mark.slow), EPS])
def test_targets_of_tokens_without_a_softmax_in_their_gradient(gradient_filter, listed, device):
    """The gradient of a target's logit is formed exactly, shared or not, where nothing else has a gradient."""
    x, weight, target = problem(device=device)
    target = target.clamp(min=0)

    def gradient(**options):
        found = token_statistics(x, weight, target, **options)
        first = torch.arange(N, device=device) < 200
        return torch.autograd.grad(torch.where(first, found.target_logit, found.target_log_prob).sum(), (x, weight))

    found, exact = gradient(logits_budget=0, gradient_filter=gradient_filter), gradient()
    assert listed
    for a, b in zip(found, exact):
        assert relative_error(a, b.double()) < (6e-3 if gradient_filter < EPS else 0.03)
    # Of these tokens alone every part is exact.
    for a, b in zip(found[0][:200], exact[0][:200]):
        assert_close(a, b.double(), 6e-3)


def test_a_window_of_no_probability_is_not_projected(listed, device):
    x, weight, target = problem(device=device)
    bias = torch.full((V,), -200.0, dtype=x.dtype, device=device)
    bias[WINDOW : 2 * WINDOW] = -torch.inf
    target[:] = 3
    gradients(x, weight, target, gradient_filter=1e-30, linear_bias=bias)
    projected = {tile // 5 + 2 * number for number, n in enumerate(listed) for tile in n[1 : 1 + n[0]].tolist()}
    assert projected == {0, 2}


def test_whoever_scales_the_loss_scales_its_gradient(listed, device):
    t, factor = problem(device=device), -(2.0**-12)
    once, scaled = (gradients(*t, upstream, gradient_filter=EPS) for upstream in (1.0, factor))
    assert listed
    for a, b in zip(once, scaled):
        assert torch.equal(a * factor, b)


def test_nan_reaches_what_it_would_reach_without_a_filter(device):
    x, weight, target = problem(device=device)
    with torch.no_grad():
        x[200] = torch.nan
        target[77] = 10_000
    found, exact = (gradients(x, weight, target, gradient_filter=f) for f in (EPS, None))
    for a, b in zip(found, exact):
        assert torch.equal(a.isnan(), b.isnan())


def test_tokens_of_the_sample_count_where_their_window_is_skipped(two_sampled, device):
    """The sample is projected once for each slice."""
    t = problem(device=device, slope=4.0, **MORE)
    with arguments_to(triton_windows, "entry_shares") as shared, results_of(triton_windows, "window_masses") as masses:
        gradients(*t, gradient_filter=EPS)
    assert len(shared) == 2
    sample = sample_tokens(MORE["N"])
    blocks = [(sample.first + k * sample.step) * 16 // TILE for k in range(sample.count)]
    for (sums, *_), (bounds, _) in zip(shared, masses, strict=True):
        skipped = (bounds[blocks] <= EPS).repeat_interleave(WINDOW, 1)[:, : sums.shape[1]]
        assert torch.equal(sums != 0, skipped) and 0 < skipped.sum() < skipped.numel()


@pytest.mark.parametrize("name", ["none", "partly saved"])
def test_a_second_backward(name, listed, device):
    """What the first one has overwritten is formed anew; what is known of windows stays."""
    t, budget = problem(device=device), OPTIONS[name].get("budget", 0)
    loss = linear_cross_entropy(*t, reduction="none", logits_budget=budget, gradient_filter=EPS).sum()
    first = torch.autograd.grad(loss, t[:2], retain_graph=True)
    number = len(listed)
    second = torch.autograd.grad(loss, t[:2])
    assert (len(listed) == 2 * number) == (name == "none")
    for a, b in zip(first, second):
        assert_close(b, a.double(), 0.2)
        assert name != "none" or torch.equal(a, b)


@pytest.mark.parametrize(
    "reason", ["no filter", "softcap", "gradient of the bias", "few tokens", "small products", None]
)
def test_windows_are_kept_only_where_they_are_of_use(reason, device, monkeypatch):
    options = dict(gradient_filter=None if reason == "no filter" else EPS)
    if reason == "softcap":
        options["logit_softcap"] = 20.0
    if reason == "gradient of the bias":
        options["linear_bias"] = torch.zeros(V, dtype=torch.bfloat16, device=device, requires_grad=True)
    if reason == "few tokens":
        monkeypatch.setattr(windows, "FEWEST_SAMPLED", 4)
    if reason == "small products":
        monkeypatch.setattr(triton_filter, "SMALLEST_FILTERED", 1e9)
    shapes, t = [], problem(device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        linear_cross_entropy(*t, reduction="none", logits_budget=0, **options)
    # Maxima and sums of exponentials, but no exponentials.
    assert (shapes[-2:] == [(3, N)] * 2 and (N, V) not in shapes) == (reason is None)


def _on_ranks(member: Member, sequence_parallel: bool):
    windows.FEWEST_SAMPLED = 1
    x, weight, target = problem(N=512, V=1024, device=member.device)
    rows, tokens = 1024 // member.ranks, 512 // member.ranks
    part = slice(member.rank * tokens, (member.rank + 1) * tokens) if sequence_parallel else slice(None)
    x = x.detach()[part].requires_grad_()
    weight = weight.detach()[member.rank * rows : (member.rank + 1) * rows].requires_grad_()
    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, gradient_filter=EPS)
    try:
        with chosen_backend("triton"), results_of(triton_windows, "list_active_windows") as lists:
            found = [g.cpu() for g in gradients(x, weight, target, **options)]
    finally:
        windows.FEWEST_SAMPLED = 4
    assert sum(n[0].item() for n in lists) > 0
    return found


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks(sequence_parallel, device, worlds):
    """Shards of whole windows have the windows of the whole."""
    found = everywhere(worlds, device, 2, _on_ranks, sequence_parallel)
    dx, dw = gradients(*problem(N=512, V=1024, device=device), gradient_filter=EPS)
    assert_close(torch.cat([weight for _, weight in found]), dw.cpu().double(), 1e-2)
    parts = torch.cat([x for x, _ in found]) if sequence_parallel else found[0][0]
    assert_close(parts, dx.cpu().double(), 1e-2)
