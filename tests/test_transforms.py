"""What no call supports ends in words, of PyTorch or of ours, and in no number: transforms of torch.func, batches of
gradients, forward mode, second derivatives, tensors without values, torch.export and other traces."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import parallel_lce
from cases import normal
from parallel_lce.distillation import divergence
from tools import shrunk, statistics

N, V, D = 6, 16, 8
TARGET = torch.tensor([3, -100, 9, 0, 3, 7])


def _statistics(x, w):
    found = statistics(x, w, TARGET.to(x.device), selected=TARGET[:, None].to(x.device), top_k=2)
    return found.entropy + found.target_log_prob + found.selected_log_prob[:, 0]


def _loss(**options):
    return lambda x, w: parallel_lce.linear_cross_entropy(x, w, TARGET.to(x.device), **options)


FUNCTIONS = {
    "none": _loss(reduction="none"),
    "accumulated": _loss(logits_budget=0),
    "statistics": _statistics,
    "selected": lambda x, w: parallel_lce.selected_log_probs(x, w, TARGET[:, None].to(x.device)),
    "divergence": lambda x, w: divergence(x, w, x.new_ones(x.shape), w.new_ones(w.shape), beta=0.5),
    "logits": lambda x, w: parallel_lce.vocab_parallel_cross_entropy(x @ w.t(), TARGET.to(x.device)),
}


def _penalty(f, x, w, *leaves):
    value = f(x, w).sum()
    (dx,) = torch.autograd.grad(value, x, create_graph=True)
    return (value + 10 * dx.square().sum()).backward(inputs=leaves)


def _pushed(f, x, w):
    """Kernels do not see tangents: the derivative would be 0."""
    x, w = x.detach(), w.detach()
    f(x, w)  # a good call of the same signature
    with forward_ad.dual_level():
        f(x, forward_ad.make_dual(w, torch.ones_like(w)))


_compiled = torch.compile(backend="eager")


def _batched(f, x, w):
    values = f(x, w)
    return torch.autograd.grad(values, x, values.new_ones(3, *values.shape), is_grads_batched=True)


def _fake(f, x, w):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        f(*map(mode.from_tensor, (x, w)))


def _exported(f, x, w):
    class Module(torch.nn.Module):
        def forward(self, x):
            return f(x, w)

    return torch.export.export(Module(), (x,))


TRANSFORM, TWICE, VALUES = "setup_context", "differentiated twice", "needs tensors with values"
# What is asked of a function of x and w: the error and its words.
ASKED = {
    "grad": (lambda f, x, w: grad(lambda x: f(x, w).sum())(x), RuntimeError, TRANSFORM),
    "vmap": (lambda f, x, w: vmap(lambda x: f(x, w))(torch.stack([x, x])), RuntimeError, TRANSFORM),
    "a batch of gradients": (_batched, RuntimeError, None),
    "jvp": (_pushed, NotImplementedError, "has a tangent"),
    "penalty, by x": (lambda f, x, w: _penalty(f, x, w, x), RuntimeError, TWICE),
    "penalty, by the weight": (lambda f, x, w: _penalty(f, x, w, w), RuntimeError, TWICE),
    "penalty, compiled": (lambda f, x, w: _penalty(_compiled(f), x, w, x), RuntimeError, "twice|double backward"),
    "meta": (lambda f, x, w: f(x.to("meta"), w.to("meta")), ValueError, VALUES),
    "fake": (_fake, ValueError, VALUES),
    "exported": (_exported, ValueError, VALUES),
    "traced": (lambda f, x, w: (f(x, w), torch.jit.trace(f, (x, w))), ValueError, VALUES),  # after a good call
    "make_fx": (lambda f, x, w: (f(x, w), make_fx(f)(x, w)), ValueError, VALUES),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.thinned
def test_what_no_call_supports_is_refused(name, asked, device, monkeypatch):
    ask, error, words = ASKED[asked]
    x, w = (normal(*size).float().to(device).requires_grad_() for size in ((N, D), (V, D)))
    if asked == "meta":
        monkeypatch.setitem(globals(), "TARGET", TARGET.to("meta"))
    with shrunk(2 * V * 4, (4, 4)), pytest.raises(error, match=words):
        ask(FUNCTIONS[name], x, w)
