"""Gradients of which only tiles of large probabilities are exact, beside their definition in float64. Recomputed ones
project only the windows with a large probability again. Those of the torch backend are all exact."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES, Tensors, normal, part
from measures import assert_close, relative_error
from parallel_lce import LinearCrossEntropy, linear_cross_entropy, token_statistics
from parallel_lce.backends.interface import Scratch
from parallel_lce.features.filter import choice, form
from parallel_lce.features.filter.kernels import products, windows
from parallel_lce.features.filter.kernels.products import sparse_product
from parallel_lce.features.filter.kernels.tiles import TILE, active_tile_lists
from tools import chosen_backend, on_ranks, results_of, shrunk, unchecked

EPS = 2**-7


@pytest.fixture(autouse=True)
def _chosen(kernels):
    choice.forget()
    with chosen_backend("triton"):
        yield
    choice.forget()


def problem(dtype="bf16", device="cpu", N=150, V=400, slope=2.5, noise=0.4) -> list[Tensor]:
    """Hidden states, a weight whose first rows are the likely ones, and targets: drawn from the softmax, but for some
    ignored ones, and shared and unshared ones where nothing is likely."""
    x, weight = normal(N, 16), noise * normal(V, 16, seed=1)
    x[:, 0] = 3.0
    x[::9, 1:] *= 4.0  # ignored ones, sure of other entries
    weight[:, 0] = torch.linspace(slope, -slope, V)
    x, weight = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    p = (x.double() @ weight.double().T).softmax(1)
    target = p.multinomial(1, generator=torch.Generator().manual_seed(2)).squeeze(1)
    target[::9], target[1 :: max(17, N // 3)], target[3:4] = -100, max(0, V - 60), max(0, V - 70)
    return [x.to(device).requires_grad_(), weight.to(device).requires_grad_(), target.to(device)]


def gradients(x, weight, target, upstream=1.0, **options) -> tuple[Tensor, ...]:
    """dX and dW, and dbias if the bias needs one."""
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


@pytest.mark.parametrize(("dtype", "rtol"), [("fp32", 3e-6), ("bf16", 8e-3), ("fp16", 8e-3)])
@pytest.mark.parametrize("options", [{}, dict(logits_budget=0, reduction="none")], ids=["saved", "recomputed"])
@pytest.mark.thinned
def test_the_gradients_are_those_of_the_definition(options, dtype, rtol, device):
    """And losses are those without a filter, bit for bit."""
    if device == "cuda" and dtype == "fp32":
        pytest.skip("fp32 is the torch backend's on a GPU, unless it is asked not to be")
    t = problem(dtype=dtype, device=device)
    dx, dw, active = expected(*t)
    assert 0.2 < active < 0.8
    losses = [linear_cross_entropy(*t, gradient_filter=eps, **options) for eps in (EPS, None)]
    scale = (t[2] >= 0).sum() if "reduction" in options else 1
    found, exact = (torch.autograd.grad(loss.sum() / scale, t[:2]) for loss in losses)
    assert torch.equal(*losses)
    assert_close(found[0].cpu(), dx, rtol)
    assert_close(found[1].cpu(), dw, rtol)
    assert not torch.equal(found[0], exact[0])


@pytest.mark.parametrize("logits_budget", [1 << 30, 0])
def test_gradients_of_a_likely_target_of_several_tokens_are_exact(logits_budget, device):
    """The gradient that a model has learned nearly by heart is not smeared."""
    x, weight = 0.02 * normal(128, 16), 0.02 * normal(512, 16, seed=1)
    x[:, 0], weight[7, 0] = 13.0, 1.0
    t = [value.bfloat16().to(device).requires_grad_() for value in (x, weight)]
    t.append(torch.full((128,), 7, device=device))
    exact, found = (gradients(*t, gradient_filter=f, logits_budget=logits_budget) for f in (None, 2**-6))
    assert_close(found[0], exact[0].double(), 0.05)
    assert_close(found[1][7], exact[1][7].double(), 0.05)


def test_the_gradient_of_the_bias_is_not_filtered(device):
    """Nor where tokens have other coefficients, so that what stands for a tile has other sums over tokens."""
    t, bias = problem(device=device), torch.zeros(400, dtype=torch.bfloat16, device=device)
    token_weight = torch.linspace(-1, 1, len(t[0]), device=device)
    options = dict(linear_bias=bias.requires_grad_(), token_weight=token_weight)
    exact, found = (gradients(*t, gradient_filter=eps, **options) for eps in (None, EPS))
    assert torch.equal(found[2], exact[2]) and not torch.equal(found[1], exact[1])


SIZES = (700, 904), (700, 528), (900, 528)
KINDS = {
    "dX": dict(transposed=False, add=True),
    "dW": dict(transposed=True, add=False),
    "dW of pairs of tiles": dict(transposed=True, add=False, width=2 * TILE),
    "dW in fp32": dict(transposed=True, add=True),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned
def test_products_of_listed_tiles(kind, dtype, device, monkeypatch):
    """More tiles of the result than programs, ragged ones, and some whose lists are empty."""
    monkeypatch.setattr(products, "num_sms", lambda device: 3)
    R, C, D, options = 700, 900, 528, {"width": TILE} | KINDS[kind]
    gradient, x, weight = (normal(*size, seed=i).to(device, DTYPES[dtype]) for i, size in enumerate(SIZES))
    gradient = gradient[:, :C]
    largest = (normal(-(-R // TILE), -(-C // options["width"]), seed=3) > 0).float().to(device)
    largest[1::3], largest[:, 2] = 0.0, 0.0
    listed = active_tile_lists(largest, 0.5, C, options["width"])[options["transposed"]]
    active = largest.repeat_interleave(TILE, 0).repeat_interleave(options["width"], 1)[:R, :C]
    g, other = gradient.double() * active, weight
    if options["transposed"]:
        g, other = g.t(), x
        shares, spread = (v.float().to(device) for v in (normal(C, seed=4), normal(largest.shape[1], D, seed=5)))
        options["rank_one"] = shares, spread
    # Rows with padding.
    sums = torch.float32 if options["add"] else DTYPES[dtype]
    total = normal(len(g), D + 16, seed=6).to(device, sums)[:, :D]
    exact = g @ other.double() + (total.double() if options["add"] else 0)
    if options["transposed"]:
        exact += shares[:, None].double() * spread.double().repeat_interleave(options["width"], 0)[:C]
    sparse_product(total, gradient, other, listed, **options)
    assert relative_error(total, exact) < (4e-6 if options["add"] else torch.finfo(sums).eps / 2)


@pytest.mark.parametrize("cause", ["target", "hidden states"])
@pytest.mark.parametrize("name", ["", "softcap", "windows"])
@pytest.mark.thinned
def test_nan_reaches_what_it_would_reach_without_a_filter(name, cause, device, request):
    options = dict(logit_softcap=30.0 if name == "softcap" else None)
    x, weight, target = problem(device=device)
    if name == "windows":
        request.getfixturevalue("listed")
        x, weight, target = wide_problem(device=device)
        options = dict(logits_budget=0)
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


@functools.cache
def of_the_function(device: str):
    """Tensors, and their gradients with a filter and without."""
    t = problem(device=device)
    t[2].clamp_(min=0)
    return t, *(gradients(*t, gradient_filter=eps) for eps in (EPS, None))


@pytest.mark.parametrize("name", DOORS)
def test_every_door_gives_the_same(name, device):
    t, expected, exact = of_the_function(device)
    assert "gradient_filter=0.0078125" in repr(DOORS["module"])
    for a, b, c in zip(torch.autograd.grad(DOORS[name](*t), t[:2]), expected, exact):
        assert_close(a, b.double(), 1e-5)
        assert not torch.equal(a, c)


@pytest.mark.thinned
@pytest.mark.parametrize("shape", [(0, 700), (1, 1), (1, 700), (129, 257), (256, 256)])
def test_odd_shapes(shape, device):
    t = problem("bf16", device, *shape)
    t[2].clamp_(max=shape[1] - 1)
    for a, b in zip(gradients(*t, gradient_filter=EPS), gradients(*t)):
        assert a.shape == b.shape and a.isfinite().all()
        assert_close(a, b.double(), 0.3, floor=1e-3)


# --- recomputation of active windows ---------------------------------------------------------------

# Tokens, entries, and those of a window in the tests' dtypes. A slice has two windows.
N, V, WINDOW = 404, 700, 256
BLOCKS = 4  # of tokens
WIDE_EPS = 2**-6


@pytest.fixture
def listed(monkeypatch):
    """The lists of windows that were projected since, ``[1 + n]`` each. A third of the tokens are a sample, and a slice
    has two windows."""
    monkeypatch.setattr(windows, "FEWEST_SAMPLED", 1)
    monkeypatch.setattr(form, "WINDOWED_BYTES", 2 * WINDOW * N * 2)
    with shrunk(40_000), results_of(form, "list_active_windows") as found:
        yield found


def wide_problem(dtype="bf16", device="cpu", N=N, V=V):
    return problem(dtype, device, N, V, slope=1.5, noise=0.3)


def recomputed(*t, budget=0, **options):
    return gradients(*t, logits_budget=budget, **{"reduction": "none", **options})


WIDE_OPTIONS = {
    "none": {},
    "partly saved": {"budget": N * WINDOW * 2 + 50_000, "z_loss": 1e-3},
    "bias": {"linear_bias": normal(V, seed=5), "logit_scale": torch.full((N,), 0.4), "vocab_size": V - 50},
}


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", WIDE_OPTIONS)
def test_the_error_is_near_that_of_the_definition(name, dtype, listed, device, monkeypatch):
    """By which whole G is formed and scanned; here the shares are those of a sample. Whoever scales the loss scales its
    gradient."""
    t, options = wide_problem(dtype, device), dict(WIDE_OPTIONS[name])
    if name == "bias":
        options |= dict(linear_bias=options["linear_bias"].to(t[0]), logit_scale=options["logit_scale"].to(device))
    exact = recomputed(*t, **options)
    factor = -(2.0**-12)
    upstreams = (1.0, factor) if (name, dtype) == ("none", "bf16") else (1.0,)
    found, *scaled = (recomputed(*t, upstream, gradient_filter=WIDE_EPS, **options) for upstream in upstreams)
    slices = 1 if name == "partly saved" else 2
    assert len(listed) == slices * len(upstreams)
    assert 0 < sum(n[0].item() for n in listed[:slices]) < 3 * BLOCKS
    monkeypatch.setattr(form, "fills_sample", lambda rows: False)
    whole = recomputed(*t, gradient_filter=WIDE_EPS, **options)
    for a, b, c in zip(found, exact, whole):
        assert 0.004 < relative_error(c, b.double())
        assert relative_error(a, b.double()) <= 1.5 * relative_error(c, b.double())
    for each in scaled:
        assert all(torch.equal(a * factor, b) for a, b in zip(found, each))


def test_a_filter_below_every_probability_changes_nothing(listed, device):
    t = wide_problem(device=device)
    for found, exact in zip(recomputed(*t, gradient_filter=1e-30), recomputed(*t)):
        assert_close(found, exact.double(), 6e-3)
    assert len(listed) == 2 and all(n[0] > 0 for n in listed)


def test_what_is_not_projected_is_not_read(listed, device, monkeypatch):
    """Windows with a large probability, or a target of several tokens, are projected."""
    x, weight, target = t = wide_problem(device=device)
    borrow = Scratch.borrow

    def filled(number):
        monkeypatch.setattr(Scratch, "borrow", lambda *given: borrow(*given).fill_(number))
        return recomputed(*t, gradient_filter=WIDE_EPS)

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
    assert found[tiles > 1.01 * WIDE_EPS].all() and not found[tiles < 0.99 * WIDE_EPS].any()


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
    x, weight, target = wide_problem(device=device)
    bias = (x.detach() @ weight.detach().T).float().mean(0).to(x.dtype)
    bias[300] += 3.9
    p = bias.double().softmax(0)[300]
    assert 0.7 * WIDE_EPS < p < WIDE_EPS
    target[:], target[10] = -100, 300
    target[[0, 130, 260]] = 600  # their window is projected for all blocks but the last, and so for the whole sample
    x, ones = (0 * x.detach()).requires_grad_(), torch.ones_like(weight).requires_grad_()
    found = token_statistics(x, ones, target, linear_bias=bias, logits_budget=0, gradient_filter=WIDE_EPS)
    dx, _ = torch.autograd.grad(found.lse.sum(), (x, ones), retain_graph=True)
    assert_close(dx, torch.ones_like(dx).double(), 4e-3)
    dx, _ = torch.autograd.grad(found.target_log_prob[10], (x, ones))
    assert dx.abs().max() < 0.3 * p
    assert len(listed) == 4 and not projected(listed[:2])[1].any()


@pytest.mark.parametrize("gradient_filter", [pytest.param(1e-30, marks=pytest.mark.slow), WIDE_EPS])
@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_targets_and_scales_of_tokens(scaled, gradient_filter, listed, device):
    """The gradient of a target's logit is formed exactly, shared or not, where nothing else has a gradient."""
    x, weight, target = wide_problem(device=device)
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
        assert relative_error(a, b.double()) < (6e-3 if gradient_filter < WIDE_EPS else limit)
    assert_close(found[0][:200], exact[0][:200].double(), 6e-3)


@pytest.mark.parametrize("options", [dict(logit_scale=0.0), dict(temperature=torch.inf), dict(logit_scale=1e-38)])
def test_tokens_without_a_unit(options, listed, device):
    """The gradients of tokens whose logits are all 0 reach no other token's."""
    x, weight, target = wide_problem(device=device)
    (name, value), others = *options.items(), 1.0
    each = torch.full((N,), others, device=device)
    each[::7] = value
    found = recomputed(x, weight, target, gradient_filter=WIDE_EPS, **{name: each})
    for f, e in zip(found, recomputed(x, weight, target, **{name: each})):
        assert relative_error(f, e.double()) < 0.05
    assert found[0][::7].abs().max() < 1e-30 and len(listed) == 2


def test_a_window_of_no_probability_is_not_projected(listed, device):
    x, weight, target = wide_problem(device=device)
    bias = torch.full((V,), -200.0, dtype=x.dtype, device=device)
    bias[WINDOW : 2 * WINDOW] = -torch.inf
    target[:] = 3
    recomputed(x, weight, target, gradient_filter=1e-30, linear_bias=bias)
    assert projected(listed).any(1).tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["none", pytest.param("partly saved", marks=pytest.mark.slow)])
def test_a_second_backward(name, listed, device):
    """What the first one has overwritten is formed anew; what is known of windows stays."""
    t, budget = wide_problem(device=device), WIDE_OPTIONS[name].get("budget", 0)
    loss = linear_cross_entropy(*t, reduction="none", logits_budget=budget, gradient_filter=WIDE_EPS).sum()
    first = torch.autograd.grad(loss, t[:2], retain_graph=True)
    number = len(listed)
    second = torch.autograd.grad(loss, t[:2])
    assert (len(listed) == 2 * number) == (name == "none")
    for a, b in zip(first, second):
        assert_close(b, a.double(), 0.2)
        assert name != "none" or torch.equal(a, b)


@pytest.mark.parametrize("reason", ["no filter", "softcap", "gradient of the bias", "few tokens", None])
def test_windows_are_kept_only_where_they_are_of_use(reason, listed, device, monkeypatch):
    options = dict(gradient_filter=None if reason == "no filter" else WIDE_EPS)
    options["logit_softcap"] = 20.0 if reason == "softcap" else None
    if reason == "gradient of the bias":
        options["linear_bias"] = torch.zeros(V, dtype=torch.bfloat16, device=device, requires_grad=True)
    if reason == "few tokens":
        monkeypatch.setattr(windows, "FEWEST_SAMPLED", 4)
    shapes, t = [], wide_problem(device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        linear_cross_entropy(*t, reduction="none", logits_budget=0, **options)
    # Maxima and sums of exponentials, but no exponentials.
    assert (shapes[-2:] == [(3, N)] * 2 and (N, V) not in shapes) == (reason is None)


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@on_ranks(2)
def test_ranks(member, sequence_parallel):
    """Shards of whole windows have the windows of the whole. One of the ranks may choose exact gradients."""
    x, weight, target = given = wide_problem(N=512, V=1024, device=member.device)
    t = part(Tensors(x, weight, target), member, sequence_parallel)
    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, gradient_filter=WIDE_EPS)
    with mock.patch.object(windows, "FEWEST_SAMPLED", 1), results_of(form, "list_active_windows") as lists:
        found = recomputed(t.x, t.weight, target, **options)
        assert sum(n[0].item() for n in lists) > 0
        lists.clear()
        alone = mock.Mock(**{"begin.return_value": (member.rank == 1, False)})
        with mock.patch.object(form, "choice_for", return_value=alone):
            mixed = recomputed(t.x, t.weight, target, **options)
        assert bool(lists) == (member.rank == 1)
        exact = recomputed(*given)
        dx, dw = recomputed(*given, gradient_filter=WIDE_EPS)
    of_rank = exact[1].chunk(2)[member.rank].double()
    assert_close(mixed[1], of_rank, 0.2 if member.rank else 1e-2)
    assert_close(mixed[0], (exact[0].chunk(2)[member.rank] if sequence_parallel else exact[0]).double(), 0.2)
    assert_close(found[0], dx.chunk(2)[member.rank].double() if sequence_parallel else dx.double(), 1e-2)
    assert_close(found[1], dw.chunk(2)[member.rank].double(), 1e-2)


# --- whether to filter -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(logits_budget=0, reduction="none")], ids=["saved", "recomputed"])
def test_a_filter_that_would_skip_little_is_left_out(options, listed, device, monkeypatch):
    """From two calls after a count on, in which nearly all tiles are active, until two calls after the next one. The
    second call is walked twice, and has one choice."""
    monkeypatch.setattr(choice, "PERIOD", 3)
    sizes = (260, 512) if options else (130, 260)
    x, weight, target = sure = problem("bf16", device, *sizes, slope=5.0)
    unsure = [t.detach().div(16).requires_grad_() for t in (x, weight)]  # whose probabilities are all nearly equal
    found, walked = [], []
    for t in [[*unsure, target]] * 3 + [sure] * 3:
        loss = linear_cross_entropy(*t, gradient_filter=0.5 / sizes[1], **options).sum()
        with mock.patch.object(form, "FilteredGradient", wraps=form.FilteredGradient) as products:
            walked = [torch.autograd.grad(loss, t[:2], retain_graph=True) for _ in range(1 + (len(found) == 1))]
        found.append("F" if products.call_count else "-")
        assert len(found) != 2 or products.call_count == (4 if options else 3)  # slices
        if len(found) == 3:
            assert all(map(torch.equal, walked[0], gradients(*t, **options)))
    assert "".join(found) == "FF-F-F"


def test_a_call_is_counted_once(device):
    """Not in a second backward after another call has begun."""
    chosen, lists = choice.Choice(), SimpleNamespace(counts=torch.tensor([4], device=device), numbers=torch.zeros(4))
    for _ in range(2):
        chosen.begin()
        chosen.count(lists)
    assert chosen.begin() == (False, False)  # all tiles are active


def test_a_backward_in_a_captured_graph_is_not_counted(monkeypatch):
    """Its numbers are those of a replay. The call before may have begun outside."""
    chosen, lists = choice.Choice(), SimpleNamespace(counts=torch.tensor([4]), numbers=torch.zeros(4))
    chosen.begin()
    chosen.count(lists)
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        chosen.count(SimpleNamespace(counts=mock.Mock(is_cuda=True), numbers=torch.zeros(40)))
    chosen.begin()
    assert chosen.begin() == (False, False)  # all 4 tiles are active


@pytest.mark.gpu
def test_a_count_is_copied_behind_the_stream_that_made_it():
    """The next call may be on another."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")
    counts, other, chosen = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.cuda.Stream(), choice.Choice()
    other.wait_stream(torch.cuda.current_stream())
    chosen.begin()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
        chosen.count(SimpleNamespace(counts=counts.fill_(4), numbers=torch.zeros(4)))
    chosen.begin()
    assert chosen.begin() == (False, False)  # all tiles are active


@pytest.mark.parametrize(("row_blocks", "number"), [(1, 1), (19, 3), (33, 1)])
def test_the_list_of_active_windows(row_blocks, number, device, monkeypatch):
    """16 row blocks after the other, window by window; in several steps."""
    monkeypatch.setattr(windows, "LISTED", 16)
    largest = (normal(row_blocks, number) > 0.2).float().to(device)
    listed = windows.list_active_windows(largest, 0.5).tolist()
    order = [(w, r) for g in range(0, row_blocks, 16) for w in range(number) for r in range(g, min(g + 16, row_blocks))]
    assert listed[1 : 1 + listed[0]] == [w * row_blocks + r for w, r in order if largest[r, w]]
