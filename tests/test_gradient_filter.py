"""Gradients of which only tiles of large probabilities are exact, beside their definition in float64. Those of the
torch backend are all exact."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import one_hot

import parallel_lce
from cases import DTYPES, normal
from measures import assert_close, relative_error
from parallel_lce import LinearCrossEntropy, linear_cross_entropy, token_statistics
from tools import chosen_backend, shrunk, small

EPS = 2**-7
TILE = 128
REFUSED = r"gradient_filter must be None or a number between 0 and 1, such as 2\*\*-13, got "


@pytest.fixture(autouse=True)
def _chosen(kernels):
    with chosen_backend("triton"):
        yield


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


def problem(N=150, V=400, D=16, dtype="fp32", device="cpu"):
    """Hidden states, a weight whose first rows are the likely ones, and targets drawn from the softmax."""
    x, weight = normal(N, D), 0.4 * normal(V, D, seed=1)
    x[:, 0] = 3.0
    weight[:, 0] = torch.linspace(2.5, -2.5, V)
    x, weight = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    p = (x.double() @ weight.double().T).softmax(1)
    target = p.multinomial(1, generator=torch.Generator().manual_seed(2)).squeeze(1)
    target[::9] = -100
    target[1::17] = V - 1
    return [x.to(device).requires_grad_(), weight.to(device).requires_grad_(), target.to(device)]


def gradients(x, weight, target, upstream=1.0, **options):
    """dX and dW, and dbias if there is one."""
    loss = linear_cross_entropy(x, weight, target, **options)
    leaves = [t for t in (x, weight, options.get("linear_bias")) if t is not None]
    return torch.autograd.grad(loss.sum() * upstream, leaves)


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
@pytest.mark.thinned("dtype")
def test_the_gradients_are_those_of_the_definition(dtype, rtol, device):
    """And losses are those without a filter, bit for bit."""
    if device == "cuda" and dtype == "fp32":
        pytest.skip("fp32 is the torch backend's on a GPU, unless it is asked not to be")
    t = problem(dtype=dtype, device=device)
    dx, dw, active = expected(*t)
    assert 0.2 < active < 0.8
    losses = [linear_cross_entropy(*t, gradient_filter=eps) for eps in (EPS, None)]
    found, exact = (torch.autograd.grad(loss, t[:2]) for loss in losses)
    assert torch.equal(*losses)
    assert_close(found[0].cpu(), dx, rtol)
    assert_close(found[1].cpu(), dw, rtol)
    assert not torch.equal(found[0], exact[0])


@pytest.mark.thinned
@pytest.mark.parametrize("logits_budget", [1 << 30, 0])
def test_gradients_of_likely_targets_are_exact(logits_budget, device):
    """Whether tokens share a target or not: what a model has learned nearly by heart is not smeared."""
    N, V, D = 256, 512, 16
    x, weight = 0.02 * normal(N, D), 0.02 * normal(V, D, seed=1)
    target = torch.cat([torch.full((128,), 7), torch.arange(200, 328)])
    x[:128, 0], weight[7, 0] = 13.0, 1.0
    weight[200:328, 1:8] = torch.eye(7).repeat(19, 1)[:128] * 3 + 0.2 * normal(128, 7, seed=2)
    x[128:, 1:8] = 1.5 * weight[200:328, 1:8]
    t = [x.bfloat16().to(device).requires_grad_(), weight.bfloat16().to(device).requires_grad_(), target.to(device)]
    eps = 2.0**-6
    p = (t[0].double() @ t[1].double().T).softmax(1).gather(1, t[2][:, None])
    assert 0.5 * eps < 1 - p[:128].mean().item() + 1e-2 and (1 - p[:128]).max() < eps
    exact = [g.double() for g in gradients(*t, logits_budget=logits_budget)]
    found = gradients(*t, gradient_filter=eps, logits_budget=logits_budget)
    assert_close(found[0][:128], exact[0][:128], 0.05)
    assert_close(found[1][7:8], exact[1][7:8], 0.05)


def test_sums_over_tokens_are_kept(device):
    """With hidden states of one number 1, and a weight of 0, dW is the sums over tokens. Those have the same
    coefficient."""
    x, weight, target = problem(dtype="bf16", device=device)
    bias = (x.detach() @ weight.detach().T).float().mean(0).to(x.dtype)
    one, zero = torch.ones_like(x[:, :8]).requires_grad_(), (0 * weight[:, :8]).detach().requires_grad_()
    options = dict(linear_bias=bias.requires_grad_())
    exact, found = (gradients(one, zero, target.clamp(min=0), gradient_filter=eps, **options) for eps in (None, EPS))
    assert_close(found[1], exact[1].double(), 1e-2)


def test_the_gradient_of_the_bias_is_not_filtered(device):
    """Nor where tokens have other coefficients, so that what stands for a tile has other sums over tokens."""
    t, bias = problem(dtype="bf16", device=device), torch.zeros(400, dtype=torch.bfloat16, device=device)
    token_weight = torch.linspace(-1, 1, len(t[0]), device=device)
    options = dict(linear_bias=bias.requires_grad_(), token_weight=token_weight)
    exact, found = (gradients(*t, gradient_filter=eps, **options) for eps in (None, EPS))
    assert torch.equal(found[2], exact[2]) and not torch.equal(found[1], exact[1])


OPTIONS = {
    "none": dict(reduction="none"),
    "sum": dict(reduction="sum"),
    "recomputed": dict(logits_budget=0, reduction="none"),
    "accumulated": dict(logits_budget=0),
    "partly saved": dict(logits_budget=70_000, reduction="none"),
    "softcap": dict(logit_softcap=20.0),
    "scale": dict(logit_scale=0.9),
    "z_loss": dict(z_loss=1e-3),
}


@pytest.mark.thinned("name")
@pytest.mark.parametrize("name", OPTIONS)
def test_whoever_scales_the_loss_scales_its_gradient(name, device):
    """The limit is a probability, whatever the gradient is multiplied by. A filter below every probability changes
    nothing."""
    t, factor = problem(dtype="bf16", device=device), -(2.0**12)
    with shrunk(40_000 if "logits_budget" in OPTIONS[name] else None):
        exact, all_active, once, scaled = (
            gradients(*t, upstream, gradient_filter=eps, **OPTIONS[name])
            for upstream, eps in ((1.0, None), (1.0, 1e-30), (1.0, EPS), (factor, EPS))
        )
    for a, b, c, d in zip(exact, all_active, once, scaled):
        assert_close(b, a.double(), 6e-3)
        torch.testing.assert_close(c * factor, d, rtol=1e-2, atol=0.1)
        assert_close(c, a.double(), 0.2)


def test_tokens_of_weight_zero_activate_no_tile(device):
    x, weight, target = problem(dtype="bf16", device=device)
    token_weight = torch.ones(len(x), device=device)
    # These alone have large probabilities.
    with torch.no_grad():
        x[:100:2] *= 5.0
        token_weight[:100:2] = 0.0
    found = gradients(x, weight, target, token_weight=token_weight, gradient_filter=0.9)
    ignoring = target.clone()
    ignoring[:100:2] = -100
    same = gradients(x, weight, ignoring, token_weight=token_weight, gradient_filter=0.9)
    for a, b in zip(found, same):
        assert_close(a, b.double(), 1e-2)


@pytest.mark.thinned
@pytest.mark.parametrize("options", [{}, {"logit_softcap": 30.0}], ids=["", "softcap"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_nan_reaches_what_it_would_reach_without_a_filter(reduction, options, device):
    x, weight, target = problem(dtype="bf16", device=device)
    options = dict(reduction=reduction, **options)
    truth, near = (gradients(x, weight, target, gradient_filter=eps, **options)[0] for eps in (None, EPS))
    target[5] = 10_000
    exact, found = (gradients(x, weight, target, gradient_filter=eps, **options) for eps in (None, EPS))
    for a, b in zip(found, exact):
        assert torch.equal(a.isnan(), b.isnan())
    if reduction == "none":
        others = torch.arange(len(x)) != 5
        allowed = 1.5 * relative_error(near[others], truth[others].double())
        assert relative_error(found[0][others], truth[others].double()) <= allowed


def test_a_token_of_nan_leaves_what_stands_for_the_tiles_of_others(device):
    """Where all tiles but those of its 128 tokens are approximated."""
    t = small(device, N=256, V=512, D=16, sharpness=0.2)
    target = torch.arange(256, device=device)  # a target of several tokens makes a tile active
    with torch.no_grad():
        t.weight += 1.0

    def of_others(eps):
        return gradients(t.x, t.weight, target, gradient_filter=eps, reduction="none")[0][128:]

    truth, near = of_others(None), of_others(EPS)
    target[5] = 10_000
    assert 1e-3 < relative_error(near, truth)
    assert relative_error(of_others(EPS), truth) <= 1.1 * relative_error(near, truth)


def test_statistics_with_gradients_of_probabilities(device):
    t = problem(dtype="bf16", device=device)
    with torch.no_grad():
        t[2].clamp_(min=0)
    found = token_statistics(*t, argmax=True, gradient_filter=EPS)
    statistics = torch.autograd.grad(found.target_log_prob.sum(), t[:2])
    losses = gradients(*t, -1.0, reduction="none", gradient_filter=EPS)
    for a, b in zip(statistics, losses):
        assert_close(a, b.double(), 1e-5)


@pytest.mark.parametrize("value", [0, 1, -0.1, 2.0, float("nan"), True, "", "auto", "0.1", [0.1], torch.tensor(0.1)])
def test_a_filter_that_is_no_probability_is_refused(value):
    t = small()
    with pytest.raises(ValueError, match=REFUSED):
        linear_cross_entropy(t.x, t.weight, t.target, gradient_filter=value)
    with pytest.raises(ValueError, match=REFUSED):
        LinearCrossEntropy(gradient_filter=value)


@pytest.mark.parametrize("name", ["mean_logit", "expected_logit", "sum_p_squared", "selected", "label_smoothing"])
def test_gradients_that_are_no_probabilities_are_refused(name):
    t = small()
    asked = {"selected": t.target[:, None], "label_smoothing": 0.1}.get(name, True)
    with pytest.raises(ValueError, match=f"gradient_filter=0.01 cannot be combined with {name}"):
        if name == "label_smoothing":
            LinearCrossEntropy(gradient_filter=0.01, label_smoothing=0.1)
        else:
            token_statistics(t.x, t.weight, t.target, gradient_filter=0.01, **{name: asked})


def test_the_module_passes_it_on(device):
    t = problem(dtype="bf16", device=device)
    module = LinearCrossEntropy(gradient_filter=EPS)
    assert "gradient_filter=0.0078125" in repr(module)
    found = torch.autograd.grad(module(*t), t[:2])
    for a, b in zip(found, gradients(*t, gradient_filter=EPS)):
        assert torch.equal(a, b)


def test_second_backward_filters_too(device):
    t = problem(dtype="bf16", device=device)
    loss = linear_cross_entropy(*t, reduction="none", gradient_filter=EPS).sum()
    first = torch.autograd.grad(loss, t[:2], retain_graph=True)
    second = torch.autograd.grad(loss, t[:2])
    exact = gradients(*t, reduction="none")
    for a, b, c in zip(first, second, exact):
        assert_close(b, a.double(), 1e-2)
        assert not torch.equal(b, c)


def test_compiled(device):
    """Operators are told of it."""
    t = problem(dtype="bf16", device=device)
    compiled = torch.compile(lambda *t, eps: linear_cross_entropy(*t, gradient_filter=eps), backend="aot_eager")
    for eps in (EPS, EPS / 8):
        found = torch.autograd.grad(compiled(*t, eps=eps), t[:2])
        for a, b in zip(found, gradients(*t, gradient_filter=eps)):
            assert torch.equal(a, b)


def test_those_of_the_torch_backend_are_exact(device):
    t = problem(device=device)
    with chosen_backend("torch"):
        assert all(map(torch.equal, gradients(*t, gradient_filter=EPS), gradients(*t)))


@pytest.mark.thinned
@pytest.mark.parametrize("shape", [(0, 700), (1, 1), (1, 700), (129, 257), (256, 256)])
def test_odd_shapes(shape, device):
    t = problem(*shape, dtype="bf16", device=device)
    t[2].clamp_(max=shape[1] - 1)
    for a, b in zip(gradients(*t, gradient_filter=EPS), gradients(*t)):
        assert a.shape == b.shape and a.isfinite().all()
        assert_close(a, b.double(), 0.3, floor=1e-3)


def test_megatron_takes_it_from_install_or_the_environment(monkeypatch):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from parallel_lce.megatron import choices

    assert choices.choose().gradient_filter is None
    monkeypatch.setenv("PARALLEL_LCE_GRADIENT_FILTER", "0.001")
    assert choices.choose().gradient_filter == 0.001
    monkeypatch.setenv("PARALLEL_LCE_GRADIENT_FILTER", "auto")
    expected = r"a number between 0 and 1, such as 0.0001220703125, which is 2\*\*-13, got 'auto'"
    with pytest.raises(ValueError, match=f"PARALLEL_LCE_GRADIENT_FILTER must be {expected}"):
        choices.choose()
    monkeypatch.delenv("PARALLEL_LCE_GRADIENT_FILTER")
    try:
        parallel_lce.megatron.install(gradient_filter=0.01)
        assert choices.choose().gradient_filter == 0.01
        parallel_lce.megatron.install(gradient_filter=torch.tensor(0.25).numpy()[()])
        assert type(choices.choose().gradient_filter) is float
        with pytest.raises(ValueError, match="gradient_filter=0.25 needs cross_entropy='output_layer'.* earlier"):
            parallel_lce.megatron.install(cross_entropy="logits")
        for value in (3, "auto"):
            with pytest.raises(ValueError, match=REFUSED + repr(value)):
                parallel_lce.megatron.install(gradient_filter=value)
    finally:
        parallel_lce.megatron.uninstall()
