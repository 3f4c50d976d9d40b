"""Second derivatives are refused in words, by whatever way autograd is asked for them."""

import pytest
import torch
from torch.autograd import forward_ad

import parallel_lce
from parallel_lce.distillation import divergence
from tools import shrunk, small, statistics


def _of_loss(**options):
    return lambda x, w, y: parallel_lce.linear_cross_entropy(x, w, y, **options).sum()


def _of_divergence(reduction):
    return lambda x, w, y: divergence(x, w, x.detach() + 1, w.detach(), reduction=reduction).sum()


def _of_statistics(x, w, y):
    found = statistics(x, w, y)
    return (found.lse + found.entropy + found.mean_logit).sum()


WAYS = {
    "none": _of_loss(reduction="none"),
    "mean": _of_loss(),
    "recompute": _of_loss(reduction="none", logits_budget=0),
    "accumulate": _of_loss(logits_budget=0),
    "token_weight": lambda x, w, y: _of_loss(token_weight=x.new_ones(48))(x, w, y),
    "statistics": _of_statistics,
    "real logits": lambda x, w, y: parallel_lce.vocab_parallel_cross_entropy(x @ w.t(), y).square().sum(),
    "selected": lambda x, w, y: parallel_lce.selected_log_probs(x, w, torch.stack([y, 0 * y], 1)).square().sum(),
    "divergence": _of_divergence("none"),
    "mean divergence": _of_divergence("mean"),
}
"""A number each, linear in nothing: its second derivative is not 0."""


@pytest.fixture(params=WAYS)
def problem(request, device):
    """``loss(x, weight)`` and two leaves; blocks are so small that strategies differ."""
    t = small(device, N=48, V=200, D=8)
    with shrunk(8192, (16, 64)):
        yield (lambda x, weight: WAYS[request.param](x, weight, t.target)), t.x, t.weight


def _with_leaves_of_another_graph(loss, x, weight):
    hidden = x * 2
    (dweight,) = torch.autograd.grad(loss(hidden, weight), weight, create_graph=True)
    return torch.autograd.grad(dweight.square().sum(), x)


def _by_the_upstream_gradient(loss, x, weight):
    scale = torch.ones((), device=x.device, requires_grad=True)
    (dx,) = torch.autograd.grad(loss(x, weight) * scale, x, create_graph=True)
    return torch.autograd.grad(dx.sum(), scale)


def _penalty(loss, x, weight, *leaves, after: bool = False):
    value = loss(x, weight)
    if after:
        torch.autograd.grad(value, x, retain_graph=True)
    (dx,) = torch.autograd.grad(value, x, create_graph=True)
    return (value + 10 * dx.square().sum()).backward(inputs=leaves)


_functional = torch.autograd.functional
ASKED = {
    "penalty, by x": lambda loss, x, weight: _penalty(loss, x, weight, x),
    "penalty, by the weight": lambda loss, x, weight: _penalty(loss, x, weight, weight),
    "penalty, frozen weight": lambda loss, x, weight: _penalty(loss, x, weight.detach(), x),
    "later backward": lambda loss, x, weight: _penalty(loss, x, weight, x, after=True),
    "hessian by both": lambda loss, x, weight: _functional.hessian(loss, (x, weight)),
    "hvp": lambda loss, x, weight: _functional.hvp(lambda x: loss(x, weight), x, torch.ones_like(x)),
    "jvp": lambda loss, x, weight: _functional.jvp(lambda x: loss(x, weight), x, torch.ones_like(x)),
    "another graph's leaf": _with_leaves_of_another_graph,
    "upstream gradient": _by_the_upstream_gradient,
}


@pytest.mark.parametrize("asked", ASKED)
def test_refused(asked, problem):
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        ASKED[asked](*problem)


def test_a_recorded_gradient_is_the_gradient_and_may_change_in_place(problem):
    """``create_graph=True`` alone changes nothing. A clipped gradient, or one of a hook, is changed in place."""
    loss, x, weight = problem
    plain = torch.autograd.grad(loss(x, weight), [x, weight])
    recorded = torch.autograd.grad(loss(x * 1.0, weight), [x, weight], create_graph=True)
    for a, b in zip(plain, recorded):
        assert torch.equal(a, b) and b.requires_grad and not a.requires_grad
    x.grad, _ = recorded
    torch.nn.utils.clip_grad_norm_([x], 0.1)
    assert x.grad.norm() < 0.11
    hidden = x * 1.0
    hidden.register_hook(lambda g: g.mul_(2))
    twice, *_ = torch.autograd.grad(loss(hidden, weight), [x], create_graph=True)
    assert torch.allclose(twice, 2 * plain[0])


DUALS = {
    parallel_lce.linear_cross_entropy: ("input", "linear_weight", "linear_bias", "token_weight"),
    parallel_lce.token_statistics: ("input", "linear_weight", "linear_bias"),
    parallel_lce.vocab_parallel_cross_entropy: ("vocab_parallel_logits",),
}


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize(("function", "name"), [(f, name) for f, names in DUALS.items() for name in names])
def test_forward_mode_is_refused(function, name, needs_gradient, device):
    """Kernels do not see tangents: the derivative would be 0."""
    t = small(device, N=12, V=40, D=8, bias=True, token_weight=True)
    given = dict(input=t.x, linear_weight=t.weight, linear_bias=t.bias, token_weight=t.token_weight)
    given["vocab_parallel_logits"] = t.x @ t.weight.t()
    given = {each: given[each].detach() for each in DUALS[function]}
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[name], torch.ones_like(given[name])).requires_grad_(needs_gradient)
        with pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
            function(**given | {name: dual}, target=t.target)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("asked", ["penalty, by x", "penalty, by the weight", "upstream gradient"])
@pytest.mark.parametrize("way", ["none", "recompute", "accumulate", "statistics"])
@pytest.mark.thinned
def test_refused_when_compiled(way, asked, compiler, device):
    """By AOTAutograd in its own words. It loses the second derivatives of any function by a view of an input."""
    torch._dynamo.reset()
    t = small(device, N=48, V=200, D=8)
    loss = torch.compile(lambda x, weight: WAYS[way](x, weight, t.target), fullgraph=True, backend=compiler)
    x = t.x.detach().view(6, 8, 8).clone().requires_grad_() if way == "recompute" else t.x
    if way == "recompute":
        t.target = t.target.view(6, 8)
    with shrunk(8192), pytest.raises(RuntimeError, match="twice|double backward"):
        ASKED[asked](loss, x, t.weight)
