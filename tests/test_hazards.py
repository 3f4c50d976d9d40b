"""Hazards of numbers, in either backend: underflow, -inf, finite masks, soft-caps, cancellation, NaN, fp16."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, normalize

from cases import DTYPES, Tensors, dense_loss, dense_statistics, normal
from measures import assert_close, assert_no_worse, error, relative_error, size, smallest_steps
from parallel_lce import linear_cross_entropy, selected_log_probs, token_statistics, vocab_parallel_cross_entropy
from parallel_lce.backends import torch_backend
from tools import REDUCED, chosen_backend, shrunk, small

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(params=[None, 0])
def budget(request):
    """``logits_budget``, with blocks and tiles of a size that makes many of both."""
    with shrunk(4096, (16, 32)):
        yield request.param


def test_the_z_loss_of_confident_tokens_keeps_its_gradient(budget, device):
    """Nothing but the z-loss is left of a target's gradient whose 1 - p is below fp32's roundings."""
    t = small(device, N=32, V=200, D=32)
    with torch.no_grad():
        t.weight.copy_(normalize(t.weight, dim=1))
        t.x.copy_(40 * t.weight[t.target])

    dense = lambda z: cross_entropy(z, t.target, reduction="sum") + 1e-4 * z.logsumexp(1).square().sum()  # noqa: E731
    exact, torchs = (dense_loss(t, dtype, of=dense) for dtype in (torch.float64, torch.float32))
    loss = linear_cross_entropy(t.x, t.weight, t.target, z_loss=1e-4, reduction="sum", logits_budget=budget)
    found = torch.autograd.grad(loss, [t.x, t.weight])
    for value, of in zip(found, ("dx", "dweight")):
        assert_no_worse(value, exact[of], torchs[of], 2.0)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["z-loss", "pair"])
def test_a_label_beside_another_large_gradient_keeps_its_digits(kind, name, budget, device):
    """Of tokens sure of another entry, under a z-loss: their gradients do not sum to 0. Of pairs with a selected entry:
    they cancel along the mean of the weight's rows."""
    weight, ids = normal(900, 64, seed=1), torch.arange(48, device=device).view(2, 24, 1)
    drawn = normal(24, 64), weight / 8 + normal(1, 64, seed=2)
    drawn = (35 * normalize(weight[100:124]), normalize(weight)) if kind == "z-loss" else drawn
    t = Tensors(*(v.to(DTYPES[name]).to(device).requires_grad_() for v in drawn), ids[0, :, 0])

    def dense(z: Tensor) -> Tensor:
        log_p = z.log_softmax(1)
        other = 0.1 * z.logsumexp(1).square() if kind == "z-loss" else log_p.gather(1, ids[1])[:, 0]
        return other - log_p.gather(1, ids[0])[:, 0]

    upstream = torch.linspace(0.5, 1.5, 24, device=device)
    exact, torchs = (dense_loss(t, dtype, upstream=upstream, of=dense) for dtype in (torch.float64, t.x.dtype))
    if kind == "z-loss":
        found = linear_cross_entropy(t.x, t.weight, t.target, z_loss=0.1, reduction="none", logits_budget=budget)
    else:
        found = token_statistics(t.x, t.weight, t.target, selected=ids[1], logits_budget=budget)
        found = found.selected_log_prob[:, 0] - found.target_log_prob
    dx, dw = torch.autograd.grad(found, [t.x, t.weight], upstream)
    assert_no_worse(dx, exact["dx"], torchs["dx"], 1.1)
    assert_no_worse(dw[:24], exact["dweight"][:24], torchs["dweight"][:24], 1.1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1, z_loss=10.0)], ids=str)
@pytest.mark.parametrize("by", ["upstream", "weight"])
@pytest.mark.thinned
def test_a_nan_of_an_ignored_token_reaches_no_gradient(by, options, dtype, device, budget):
    found = []
    for number in (1.0, torch.nan, torch.inf):
        t = small(device, dtype=dtype, bias=True)
        one = torch.ones(len(t.x), device=device)
        t.target[3], one[3], upstream = -100, number, one
        t.x.data[3] *= 1e37  # an infinite term of the z-loss
        given = dict(linear_bias=t.bias, reduction="none", logits_budget=budget)
        if by == "weight":
            given["token_weight"], upstream = one, torch.ones_like(one)
        loss = linear_cross_entropy(t.x, t.weight, t.target, **given, **options)
        found.append(torch.autograd.grad(loss, [t.x, t.weight, t.bias], upstream))
    for gradients in found[1:]:
        assert all(map(torch.equal, gradients, found[0]))


@pytest.mark.parametrize("cap", [2.0**-126, 1e-3, 1.0, 30.0, 1e4, 1e30])
def test_a_softcap_has_an_error_of_few_roundings(cap, backend, device):
    """Of one entry, whose logit is the log-sum-exp: beside 0, where the polynomial ends, far from it, and at infinity.
    On a GPU with approximate instructions. The only product is exact."""
    u = torch.cat([torch.linspace(-12, 12, 601), torch.logspace(-30, 2, 300)]).double() * cap
    u = torch.cat([u.float()[u.abs() >= 2.0**-126], torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])]).to(device)
    x, one = u[:, None].requires_grad_(), torch.ones(1, 1, device=device)
    found = token_statistics(x, one, None, logit_softcap=cap).lse
    (slope,) = torch.autograd.grad(found.sum(), x)
    exact = cap * torch.tanh(u[:-1].double() / cap)
    assert ((found[:-1] - exact).abs() <= 8 * 2.0**-24 * exact.abs()).all()
    assert ((slope[:-1, 0] - (1 - (exact / cap) ** 2)).abs() <= 16 * 2.0**-24).all()
    assert found[-1].isnan() and slope[-1].isnan()


def test_a_soft_cap_over_a_temperature_may_underflow(backend, device):
    t, hot = small(device), torch.full((24,), 1e30, device=device)
    linear_cross_entropy(t.x, t.weight, t.target, logit_softcap=1e-30, temperature=hot).backward()
    assert t.x.grad.isfinite().all()


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.thinned("name", "backend")
def test_fp16_gradients_of_a_large_mean_do_not_underflow(name, device):
    """1 / N and a small loss weight push the logits' gradients below fp16's 6e-8; weights of norm 2^10 bring dX back
    into its range. torch's own path loses most of it."""
    t = small(device, N=512, V=96, D=4, dtype="fp16")
    t.x, t.weight = ((v.detach() * by).requires_grad_() for v, by in ((t.x, 2.0**-10), (t.weight, 2.0**10)))
    upstream = torch.tensor(2.0**-14, device=device)
    with shrunk(16384, (64, 32)):
        loss = linear_cross_entropy(t.x, t.weight, t.target, **REDUCED[name]).mean()
        dx, dw = torch.autograd.grad(loss, [t.x, t.weight], upstream)
    exact, its = (dense_loss(t, dtype, upstream=upstream) for dtype in (torch.float64, torch.float16))
    # fp16 holds dX in steps of 2^-24, and operands to 2^-11.
    floor, lost = smallest_steps(dx) + 2**-11 * size(exact["dx"]), error(its["dx"], exact["dx"])
    assert lost > 0.2 * size(exact["dx"]), "torch's path underflows here"
    assert error(dx, exact["dx"]) <= floor < 0.25 * lost
    assert_no_worse(dw, exact["dweight"], its["dweight"], floor=smallest_steps(dw))


WINDOW = 256  # entries
N, V, D = 20, 4 * WINDOW + 44, 16


def operands(device) -> list[Tensor]:
    """``x [N, D]``, ``weight [V, D]``, ``bias [V]`` and ``target [N]``."""
    drawn = [normal(*shape, seed=seed).float() / 2 for seed, shape in enumerate(((N, D), (V, D), (V,)))]
    return [value.to(device) for value in (*drawn, torch.arange(N) * 17 % V)]


@pytest.mark.parametrize("budget_of_all", [1 << 30, 0])
def test_logits_as_large_as_fp32_has_them(budget_of_all, backend, device):
    """Of two windows, of either sign. A token's largest logit is alone."""
    x, weight, _, target = operands(device)
    weight[WINDOW - 24 : 2 * WINDOW - 24] *= 1e30
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    with shrunk(4096, (16, WINDOW)):
        losses = linear_cross_entropy(*leaves, target, reduction="none", logits_budget=budget_of_all)
        _, dweight = torch.autograd.grad(losses.sum(), leaves)
    z = linear(x.detach().double(), weight.detach().double()).requires_grad_()
    exact = cross_entropy(z, target, reduction="none")
    assert_close(losses, exact, 1e-5)
    (g,) = torch.autograd.grad(exact.sum(), z)
    assert_close(dweight, g.t() @ x.detach().double(), 1e-5)


def test_a_selected_id_beyond_32_bits_reaches_no_row_of_the_weight(backend, device):
    """Its lowest 32 bits are those of an entry. 0 times an infinite hidden state would be NaN there."""
    x, weight = normal(2, 16).to(device), normal(8, 16, seed=1).to(device)
    x[0, 0] = torch.inf
    x, weight = x.float().requires_grad_(), weight.float().requires_grad_()
    log_probs = selected_log_probs(x, weight, torch.tensor([[2**32 + 3, -1], [5, 6]], device=device))
    (dweight,) = torch.autograd.grad(log_probs[1].sum() + log_probs[0].nan_to_num(0.0, 0.0, 0.0).sum(), weight)
    assert dweight.isfinite().all() and dweight.any(1).nonzero().flatten().tolist() == [5, 6]


def test_sets_of_which_nothing_remains_have_no_gradient(backend, device):
    """Every log-probability is -inf and has no gradient, whether entries are excluded or outside the vocabulary. One
    that is NaN makes the token's others NaN, but those that are -inf."""
    x, weight, bias, _ = operands(device)
    bias[:10] = -torch.inf
    bias[20] = torch.nan
    ids = torch.tensor([[0, 1, 2], [3, -1, V], [V, -1, -2], [4, 30, 31], [5, 30, 20]], device=device)
    leaves = [v.requires_grad_() for v in (x[:5].clone(), weight, bias)]
    found = selected_log_probs(*leaves[:2], ids, linear_bias=leaves[2])
    expected = linear(*(v.detach() for v in leaves)).gather(1, ids.clamp(0, V - 1)).log_softmax(1)
    assert (found[:3] == -torch.inf).all() and found[3, 0] == -torch.inf
    torch.testing.assert_close(found[3], expected[3])
    assert found[4].tolist()[0] == -torch.inf and found[4, 1:].isnan().all()
    dx, dw, db = torch.autograd.grad(found[:4].where(found[:4].isfinite(), 0.0).sum() + found[:3].sum(), leaves)
    assert (dx[:3] == 0).all() and (db[:10] == 0).all() and dx[3].isfinite().all()


def confident(name: str, device):
    """Hidden states, weight and targets. 1 - p of the tokens is between 5e-2 and 2e-6."""
    V, D = 768, 96
    weight = (normal(V, D, seed=3) * (2 / D**0.5)).to(DTYPES[name])
    target = torch.arange(20) * 31
    hidden = normalize(weight.double()[target], dim=1) * torch.linspace(5, 11, 20)[:, None]
    return hidden.to(weight.dtype).to(device), weight.to(device), target.to(device)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_no_log_probability_is_above_zero(name, device):
    """Logits of targets and of selected entries are those of the log-sum-exp."""
    hidden, weight, target = confident(name, device)
    found = token_statistics(hidden, weight, target, selected=target[:, None])
    assert (found.target_log_prob <= 0).all() and (found.target_log_prob > -0.2).all()
    assert torch.equal(found.target_log_prob, found.selected_log_prob[:, 0])


@pytest.mark.parametrize("output", ["target_log_prob", "entropy"])
def test_logits_may_be_recomputed_in_another_order(output, monkeypatch, device):
    """As products of other rows may be: a logit that can only be the largest is the largest."""
    logits, of_tile = torch_backend.logits, torch_backend.LogitsGradient.of_tile

    def in_another_order(*given):
        with monkeypatch.context() as patches:
            patches.setattr(torch_backend, "logits", lambda *operands: logits(*operands).mul_(1 - 2**-21))
            return of_tile(*given)

    monkeypatch.setattr(torch_backend.LogitsGradient, "of_tile", in_another_order)
    hidden, weight, target = confident("fp16", device)
    x = hidden.clone().requires_grad_()
    with chosen_backend("torch"):
        found = token_statistics(x, weight, target, entropy=True, logits_budget=0)
        # A loss scale keeps fp16's digits.
        (ours,) = torch.autograd.grad(getattr(found, output).sum(), x, torch.tensor(2.0**10, device=device))
    exact = dense_loss(Tensors(hidden, weight, target), of=lambda z: dense_statistics(z, target)[output] * 2**10)
    for one, other in zip(ours, exact["dx"]):  # of each token; fp32 has 1 - p = 2e-6 to 7 %
        assert relative_error(one, other) < (0.1 if output == "target_log_prob" else 0.05)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("budget", [None, 0])
def test_a_sum_near_one_keeps_the_other_entries(budget, device):
    """The largest exponential is summed apart: beside its approximation on a GPU the others' 1e-5 would lose three
    times as much. Measured .07 of torch's error, and .28 where all are summed together."""
    V, D, N = 131072, 1024, 64
    generator = torch.Generator(device).manual_seed(0)
    weight = (torch.randn(V, D, generator=generator, device=device) * 2 / D**0.5).bfloat16()
    hidden = torch.randn(N, D, generator=generator, device=device)
    target = torch.randint(V, (N,), generator=generator, device=device)
    along, wide = normalize(weight.float()[target], dim=1), weight.double()
    low, high = (torch.full((N, 1), end, dtype=torch.float64, device=device) for end in (0.0, 200.0))
    for _ in range(30):  # until 1 - p is 1e-5
        middle = (low + high) / 2
        log_p = ((hidden + middle * along).bfloat16().double() @ wide.t()).log_softmax(1)
        far = -log_p.gather(1, target[:, None]) > 1e-5
        low, high = torch.where(far, middle, low), torch.where(far, high, middle)
    hidden = (hidden + high * along).bfloat16()
    truth = cross_entropy(hidden.double() @ wide.t(), target, reduction="none")
    torchs = cross_entropy(linear(hidden, weight).float(), target, reduction="none")
    leaf = hidden.requires_grad_()
    found = linear_cross_entropy(leaf, weight, target, reduction="none", logits_budget=budget)
    assert relative_error(found.detach(), truth) < 0.15 * relative_error(torchs.detach(), truth)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_a_mean_of_more_tokens_than_are_added_at_a_time_is_exact(device, monkeypatch):
    triton, results = pytest.importorskip("triton"), pytest.importorskip("parallel_lce.kernels.results")
    if interpreted := device == "cpu":
        monkeypatch.setattr(results, "_SUMMED", triton.language.constexpr(64))
    t = small(device, N=200 if interpreted else 5000, V=16, D=8, dtype="bf16", token_weight=True)
    loss = linear_cross_entropy(t.x, t.weight, t.target, token_weight=t.token_weight, ignore_index=3)
    z = t.x.detach().double() @ t.weight.detach().double().t()
    weight = t.token_weight.double() * (t.target != 3)
    each = weight * cross_entropy(z, t.target, reduction="none")
    torch.testing.assert_close(loss.double(), each.sum() / weight.sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("budget", [None, 20_000, 0], indirect=True)  # all, a part, and nothing is saved
@pytest.mark.parametrize(("kind", "name"), [("nearly equal", "bf16"), ("sure", "bf16"), ("sure", "fp16")])
def test_roundings_of_one_kind_add_nothing_along_a_mean_of_the_weights_rows(kind, name, budget, backend, device):
    """Of nearly equal exponentials; of the gradients of target and largest logit, where a token is sure of another."""
    x, weight, target = normal(24, 64), normal(900, 64, seed=1), torch.arange(24, device=device)
    x, weight = (400 * normalize(weight[500:524]), normalize(weight)) if kind == "sure" else (x, 0.005 * weight)
    x, weight, bias = (v.to(DTYPES[name]).to(device) for v in (x, weight + normal(1, 64, seed=2), torch.zeros(900)))
    t, upstream = Tensors(x, weight, target, bias), torch.linspace(0.5, 1.5, 24, device=device)
    exact, torchs = (dense_loss(t, dtype, "none", upstream) for dtype in (torch.float64, x.dtype))
    leaves, given = [x.requires_grad_(), weight.requires_grad_()], dict(linear_bias=bias, logits_budget=budget)
    dx, dw = torch.autograd.grad(linear_cross_entropy(*leaves, target, reduction="none", **given), leaves, upstream)
    factor = 1.2 if kind == "sure" or backend == "torch" else 0.01 if budget is None else 0.05
    assert_no_worse(dx, exact["dx"], torchs["dx"], factor)
    assert_no_worse(dw, exact["dweight"], torchs["dweight"], 1.2)


@pytest.mark.parametrize(("common", "other"), [(0.3, 0.0), (20.0, 0.0), (-10.0, 0.0), (3.0, -8.0)])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_entropies_of_nearly_equal_logits_have_exact_gradients(common, other, name, budget, backend, device):
    """They lie near any number, and a tenth elsewhere. What saved exponentials lose would show along the mean."""
    mean, bias = normal(1, 64, seed=2), other * (normal(900, seed=3) > 1.3)
    x = normal(16, 64)
    x += (common - x @ mean.t()) * mean / mean.square().sum()
    x, weight, bias = (v.to(DTYPES[name]).to(device) for v in (x, 4e-4 * normal(900, 64, seed=1) + mean, bias))
    t, entropies = Tensors(x.requires_grad_(), weight, None, bias), lambda z: dense_statistics(z)["entropy"]
    exact, torchs = (dense_loss(t, dtype, of=entropies)["dx"] for dtype in (torch.float64, x.dtype))
    found = token_statistics(x, weight, None, linear_bias=bias, entropy=True, logits_budget=budget)
    (dx,) = torch.autograd.grad(found.entropy.sum(), x)
    assert_no_worse(dx, exact, torchs, 1.0 if backend == "triton" else 1.5)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_what_the_largest_logit_leaves_is_not_rounded_away(device):
    """1e-6 beside 1, of 12288 entries."""
    logits = torch.full((2, 12289), -23.0, device=device)
    logits[:, 77] = 0.0
    losses = vocab_parallel_cross_entropy(logits, torch.full((2,), 77, device=device))
    truth = torch.tensor(12288.0).double().mul(torch.tensor(-23.0).double().exp()).log1p()
    # Half a rounding of 1, in each of two sums.
    assert ((losses.double() - truth.to(device)).abs() <= 2**-24).all()
