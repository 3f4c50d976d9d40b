"""Second derivatives are refused in words, by whatever way autograd is asked for them."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import parallel_lce
from parallel_lce.distillation import divergence
from tools import shrunk, small

WAYS = {
    "none": dict(reduction="none"),
    "mean": dict(),
    "recompute": dict(reduction="none", logits_budget=0),
    "accumulate": dict(logits_budget=0),
    "token_weight": dict(token_weight=torch.ones(48)),
    "statistics": None,
    "real logits": None,
    "selected": None,
    "divergence": dict(reduction="none"),
    "mean divergence": dict(reduction="mean"),
}


def _loss(way: str, x, weight, target):
    """A number, linear in nothing: its second derivative is not 0."""
    if way == "real logits":
        return parallel_lce.vocab_parallel_cross_entropy(x @ weight.t(), target).square().sum()
    if way == "statistics":
        found = parallel_lce.token_statistics(
            x, weight, target, mean_logit=True, expected_logit=True, sum_p_squared=True
        )
        return (found.lse + found.entropy + found.mean_logit).sum()
    if way == "selected":
        return parallel_lce.selected_log_probs(x, weight, torch.stack([target, 0 * target], 1)).square().sum()
    if "divergence" in way:
        return divergence(x, weight, x.detach() + 1, weight.detach(), **WAYS[way]).sum()
    options = {k: v.to(x.device) if isinstance(v, torch.Tensor) else v for k, v in WAYS[way].items()}
    return parallel_lce.linear_cross_entropy(x, weight, target, **options).sum()


@pytest.fixture(params=WAYS)
def problem(request, device):
    """``loss(x, weight)`` and two leaves; blocks are so small that strategies differ."""
    t = small(device, N=48, V=200, D=8)
    with shrunk(8192, (16, 64)):
        yield (lambda x, weight: _loss(request.param, x, weight, t.target)), t.x, t.weight


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
    for change in (
        torch.Tensor.detach_,
        lambda g: torch.nn.utils.clip_grad_norm_([x], 0.1),
        lambda g: g.detach().mul_(0.5),
    ):
        recorded = torch.autograd.grad(loss(x * 1.0, weight), [x, weight], create_graph=True)
        for a, b in zip(plain, recorded):
            assert torch.equal(a, b) and b.requires_grad and not a.requires_grad
        x.grad, _ = recorded
        with torch.no_grad():
            change(x.grad)
            assert (2 * x.grad.mul_(2) - 1).norm().isfinite()
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
    loss = torch.compile(lambda x, weight: _loss(way, x, weight, t.target), fullgraph=True, backend=compiler)
    x = t.x.detach().view(6, 8, 8).clone().requires_grad_() if way == "recompute" else t.x
    if way == "recompute":
        t.target = t.target.view(6, 8)
    with shrunk(8192), pytest.raises(RuntimeError, match="twice|double backward"):
        ASKED[asked](loss, x, t.weight)
