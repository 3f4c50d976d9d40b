"""Filtered backwards that project only the windows with a large probability again; and what is found of tiles, windows
and samples, one function at a time."""

from __future__ import annotations

import pytest
import torch

import filtering
from cases import Tensors, normal, part
from measures import assert_close, relative_error
from parallel_lce import linear_cross_entropy, token_statistics
from parallel_lce.call import prepare
from tools import arguments_to, chosen_backend, everywhere, results_of, shrunk
from world import Member

pytest.importorskip("triton", reason="needs triton")


from parallel_lce.backends import triton_backward, triton_filter
from parallel_lce.backends.interface import Scratch
from parallel_lce.kernels.filter import windows
from parallel_lce.kernels.filter.tiles import TILE, entry_shares, list_tiles
from parallel_lce.kernels.filter.windows import TokenSample, mean_shares, sample_tokens

EPS = 2**-6
# Tokens, entries, and those of a window in the tests' dtypes. A slice has two windows.
N, V, WINDOW = 404, 700, 256
BLOCKS = 4  # of tokens


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """A third of the tokens are a sample, and a slice has two windows."""
    monkeypatch.setattr(windows, "FEWEST_SAMPLED", 1)
    monkeypatch.setattr(triton_backward, "WINDOWED_BYTES", 2 * WINDOW * N * 2)
    with chosen_backend("triton"), shrunk(40_000):
        yield


@pytest.fixture
def listed():
    """The lists of windows that were projected since, ``[1 + n]`` each."""
    prepare.KNOWN.clear()
    with results_of(triton_filter, "list_active_windows") as found:
        yield found


def problem(dtype="bf16", device="cpu", N=N, V=V, slope=1.5):
    return filtering.problem(dtype, device, N, V, slope, noise=0.3)


def gradients(*t, budget=0, **options):
    return filtering.gradients(*t, logits_budget=budget, **{"reduction": "none", **options})


OPTIONS = {
    "none": {},
    "partly saved": {"budget": N * WINDOW * 2 + 50_000, "z_loss": 1e-3},
    "bias": {"linear_bias": 0.1 * normal(V, seed=5), "logit_scale": 0.9, "vocab_size": V - 50},
}


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_error_is_near_that_of_the_definition(name, dtype, listed, device, monkeypatch):
    """By which whole G is formed and scanned; here the shares are those of a sample. A filter below every probability
    changes nothing, and whoever scales the loss scales its gradient."""
    t, options = problem(dtype, device), dict(OPTIONS[name])
    if "linear_bias" in options:
        options["linear_bias"] = options["linear_bias"].to(t[0])
    exact = gradients(*t, **options)
    all_active = gradients(*t, gradient_filter=1e-30, **options)
    slices = 1 if name == "partly saved" else 2
    assert len(listed) == slices and all(n[0] > 0 for n in listed)
    factor = -(2.0**-12)
    found, scaled = (gradients(*t, upstream, gradient_filter=EPS, **options) for upstream in (1.0, factor))
    assert 0 < sum(n[0].item() for n in listed[slices : 2 * slices]) < 3 * BLOCKS
    monkeypatch.setattr(triton_backward, "fills_sample", lambda rows: False)
    whole = gradients(*t, gradient_filter=EPS, **options)
    for a, b, c, d, e in zip(found, exact, whole, all_active, scaled):
        assert 0.004 < relative_error(c, b.double())
        assert relative_error(a, b.double()) <= 1.5 * relative_error(c, b.double())
        assert_close(d, b.double(), 6e-3)
        assert torch.equal(a * factor, e) or dtype == "fp16"


def test_what_is_not_projected_is_not_read(listed, device, monkeypatch):
    """Windows with a large probability, or a target of several tokens, are projected."""
    x, weight, target = t = problem(device=device)
    borrow = Scratch.borrow

    def filled(number):
        monkeypatch.setattr(Scratch, "borrow", lambda *given: borrow(*given).fill_(number))
        return gradients(*t, gradient_filter=EPS)

    for a, b in zip(filled(torch.nan), filled(1.0)):
        assert torch.equal(a, b) and a.isfinite().all()
    p = (x.detach().double() @ weight.detach().double().T).softmax(1).cpu()
    p[target.cpu() < 0] = 0.0
    ids, counts = target.cpu().unique(return_counts=True)
    for y in ids[(counts > 1) & (ids >= 0)]:
        p[target.cpu() == y, y] = 1.0
    tiles = [p[a : a + 128, b : b + WINDOW].max() for b in range(0, V, WINDOW) for a in range(0, N, 128)]
    tiles, found = torch.stack(tiles).view(3, BLOCKS), projected(listed[:2])
    # Probabilities from bf16 operands are exact here; sums are rounded.
    assert found[tiles > 1.01 * EPS].all() and not found[tiles < 0.99 * EPS].any()


def projected(listed) -> torch.Tensor:
    """Which tiles ``[windows, row blocks]`` were."""
    found = torch.zeros(3, BLOCKS, dtype=torch.bool)
    for number, n in enumerate(listed):
        for tile in n[1 : 1 + n[0]].tolist():
            found[2 * number + tile // BLOCKS, tile % BLOCKS] = True
    return found


def test_masses_of_tokens_are_kept(listed, device):
    """With a weight of equal rows, dX is the sum of the gradient of the token's logits: 1 for the log-sum-exp, and 0
    for the log-probability of a target, whose own probability is no part of the mass of its window."""
    x, weight, target = problem(device=device)
    bias = (x.detach() @ weight.detach().T).float().mean(0).to(x.dtype)
    bias[300] += 3.9
    p = bias.double().softmax(0)[300]
    assert 0.7 * EPS < p < EPS
    target[:], target[10] = -100, 300
    x, ones = (0 * x.detach()).requires_grad_(), torch.ones_like(weight).requires_grad_()
    found = token_statistics(x, ones, target, linear_bias=bias, logits_budget=0, gradient_filter=EPS)
    dx, _ = torch.autograd.grad(found.lse.sum(), (x, ones), retain_graph=True)
    assert_close(dx, torch.ones_like(dx).double(), 4e-3)
    dx, _ = torch.autograd.grad(found.target_log_prob[10], (x, ones))
    assert dx.abs().max() < 0.3 * p
    assert len(listed) == 4 and not projected(listed[:2])[1].any()


@pytest.mark.parametrize("gradient_filter", [pytest.param(1e-30, marks=pytest.mark.slow), EPS])
@pytest.mark.parametrize("scaled", [False, True])
def test_targets_and_scales_of_tokens(scaled, gradient_filter, listed, device):
    """The gradient of a target's logit is formed exactly, shared or not, where nothing else has a gradient."""
    x, weight, target = problem(device=device)
    target = target.clamp(min=0)
    scale = torch.linspace(0.5, 1.5, N, device=device) if scaled else 1.0
    first = torch.arange(N, device=device) < 200

    def gradient(**options):
        found = token_statistics(x, weight, target, logit_scale=scale, **options)
        return torch.autograd.grad(torch.where(first, found.target_logit, found.target_log_prob).sum(), (x, weight))

    found, exact = gradient(logits_budget=0, gradient_filter=gradient_filter), gradient()
    assert listed
    limit = 0.2 if scaled else 0.03
    for a, b in zip(found, exact):
        assert relative_error(a, b.double()) < (6e-3 if gradient_filter < EPS else limit)
    assert_close(found[0][:200], exact[0][:200].double(), 6e-3)


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


def test_a_window_of_no_probability_is_not_projected(listed, device):
    x, weight, target = problem(device=device)
    bias = torch.full((V,), -200.0, dtype=x.dtype, device=device)
    bias[WINDOW : 2 * WINDOW] = -torch.inf
    target[:] = 3
    gradients(x, weight, target, gradient_filter=1e-30, linear_bias=bias)
    assert projected(listed).any(1).tolist() == [True, False, True]


def test_nan_reaches_what_it_would_reach_without_a_filter(device):
    x, weight, target = problem(device=device)
    with torch.no_grad():
        x[200] = torch.nan
        target[77] = 10_000
    found, exact = (gradients(x, weight, target, gradient_filter=f) for f in (EPS, None))
    for a, b in zip(found, exact):
        assert torch.equal(a.isnan(), b.isnan())


def test_tokens_of_the_sample_count_where_their_window_is_skipped(device, monkeypatch):
    """The sample is projected once for each slice."""
    more = dict(N=788, V=1000)
    monkeypatch.setattr(windows, "FEWEST_SAMPLED", 2)
    monkeypatch.setattr(triton_backward, "WINDOWED_BYTES", 2 * WINDOW * more["N"] * 2)
    t = problem(device=device, slope=4.0, **more)
    with (
        shrunk(60_000),
        arguments_to(triton_filter, "entry_shares") as shared,
        results_of(triton_filter, "window_masses") as masses,
    ):
        gradients(*t, gradient_filter=EPS)
    assert len(shared) == 2
    sample = sample_tokens(more["N"])
    blocks = [(sample.first + k * sample.step) * 16 // TILE for k in range(sample.count)]
    for (sums, *_), (bounds, _) in zip(shared, masses, strict=True):
        skipped = (bounds[blocks] <= EPS).repeat_interleave(WINDOW, 1)[:, : sums.shape[1]]
        assert torch.equal(sums != 0, skipped) and 0 < skipped.sum() < skipped.numel()


@pytest.mark.parametrize("name", ["none", pytest.param("partly saved", marks=pytest.mark.slow)])
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
    t = part(Tensors(x, weight, None, target, None, x), member, sequence_parallel)
    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, gradient_filter=EPS)
    try:
        with chosen_backend("triton"), results_of(triton_filter, "list_active_windows") as lists:
            found = [g.cpu() for g in gradients(t.x, t.weight, target, **options)]
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


# --- one function at a time ------------------------------------------------------------------------


@pytest.mark.parametrize(("row_blocks", "tiles", "width"), [(1, 1, TILE), (3, 129, 2 * TILE), (17, 300, TILE)])
def test_lists_have_what_is_active(row_blocks, tiles, width, device):
    each = width // TILE
    largest = normal(row_blocks, -(-tiles // each)).abs().float()
    largest[:, ::5], largest[0, : tiles // 2] = 0.0, torch.inf
    is_active = (largest > 0.25).repeat_interleave(each, 1)[:, :tiles]
    found = list_tiles(largest.to(device), 0.25, tiles * TILE - 5, width)
    for lists, expected in zip(found, (is_active, is_active.T), strict=True):
        assert lists.numbers.shape == expected.shape and lists.numbers.data_ptr() % 16 == 0
        assert lists.counts.data_ptr() % 16 == 0
        for numbers, count, row in zip(lists.numbers.tolist(), lists.counts.tolist(), expected, strict=True):
            assert numbers[:count] == row.nonzero().squeeze(1).tolist()


def test_shares_of_sums_and_of_mean_logits(device):
    """Or others, of the windows that have none. Of windows of which the last is cut, and of one without a number."""
    sums, logits = normal(3, 600).abs().float(), normal(600, seed=2).float().to(device)
    sums[:, WINDOW : 2 * WINDOW] = 0.0
    logits[300] = torch.nan
    shares = mean_shares(logits, WINDOW)
    expected = torch.zeros(768)
    for some in (slice(0, WINDOW), slice(2 * WINDOW, 600)):
        torch.testing.assert_close(shares[some], logits[some].softmax(0))
        expected[some] = sums[:, some].sum(0) / sums[:, some].sum()
    assert shares[WINDOW : 2 * WINDOW].tolist() == [1 / WINDOW] * WINDOW and not shares[600:].any()
    torch.testing.assert_close(entry_shares(sums.to(device), WINDOW).cpu(), expected)
    expected[WINDOW : 2 * WINDOW] = 1 / WINDOW
    torch.testing.assert_close(entry_shares(sums.to(device), WINDOW, shares).cpu(), expected)


def test_the_sums_of_a_sample(device):
    """Of those of its groups whose windows are skipped."""
    gradient = normal(96, 304, seed=2).bfloat16().to(device)[:, :300]
    gradient[40, 70] = torch.nan
    bounds = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.1, 0.1]], device=device)
    found = TokenSample(1, 4, 6).sums(gradient, bounds, WINDOW, 0.5)
    expected = gradient.double().abs().view(6, 16, 300).sum(1)
    # The groups 1, 5, ... 21 of 24.
    expected[:2, WINDOW:], expected[2:4, :WINDOW] = 0.0, 0.0
    assert_close(found, expected, 1e-6)


def test_a_sample_has_groups_of_tokens_at_equal_distances(monkeypatch):
    monkeypatch.undo()
    for rows, step, count in [(1536, 3, 32), (2560, 5, 32), (6655, 11, 38), (6656, 13, 32), (8192, 13, 39)]:
        sample = sample_tokens(rows)
        assert sample is not None and (sample.first, sample.step, sample.count) == (step // 2, step, count)
        groups = range(step // 2, rows // 16, step)
        assert sample.of(torch.arange(rows)).tolist() == [16 * g + i for g in groups for i in range(16)]
    assert sample_tokens(1535) is None, "too few"
