"""The operator among autograd's tools: checkpointing, hooks, loss scaling, second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import parallel_lce
from cases import Case, dense, error, make
from parallel_lce.backends import eager
from tools import shrunk

CASE = Case(64, 300, 8, ignored="none")


def _leaves(device: str, dtype: str = "fp32"):
    t = make(Case(CASE.N, CASE.V, CASE.D, dtype=dtype, ignored="none"), device)
    return t, t.x.clone().requires_grad_(), t.weight.clone().requires_grad_()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpointed_loss_is_computed_twice_and_no_more(reduction, reentrant, device, monkeypatch):
    t, x, w = _leaves(device)
    calls = []
    original = eager.block_forward
    monkeypatch.setattr(eager, "block_forward", lambda *a: calls.append(1) or original(*a))

    def loss(x, w):
        return parallel_lce.linear_cross_entropy(
            x, w, t.target, reduction=reduction, logits_budget=0
        ).sum()

    with shrunk(8000):
        want = torch.autograd.grad(loss(x, w), (x, w))
        once = len(calls)
        assert once > 1 or reduction == "none", "several blocks accumulate"
        x.grad = w.grad = None
        checkpoint(loss, x, w, use_reentrant=reentrant).backward()
    # The plain call, the checkpoint's forward (without gradients if reentrant) and its recomputation.
    assert len(calls) == 2 * once + (1 if reentrant else once)
    assert torch.equal(x.grad, want[0]) and torch.equal(w.grad, want[1])


@pytest.mark.parametrize("budget", [None, 0])
def test_loss_scaling_keeps_fp16_gradients(budget, device):
    """A loss scale lifts gradients of a mean over many tokens out of fp16's subnormal numbers."""
    case = Case(4096, 64, 16, dtype="fp16", ignored="none")
    t = make(case, device)
    t.upstream.fill_(65536.0)
    x, w = t.x.clone().requires_grad_(), t.weight.clone().requires_grad_()
    with shrunk(1 << 16):
        loss = parallel_lce.linear_cross_entropy(x, w, t.target, logits_budget=budget)
        loss.backward(t.upstream)
    truth = dense(case, t, torch.float64, torch.float64)
    yardstick = dense(case, t, torch.float16, torch.float32)
    for name, leaf in (("dx", x), ("dweight", w)):
        its = error(yardstick[name], truth[name])
        assert error(leaf.grad, truth[name]) <= 1.5 * its, name


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1000.0])
def test_fp16_survives_any_logit_scale(scale, device):
    t, x, w = _leaves(device, "fp16")
    w.data *= 1e-3
    loss = parallel_lce.linear_cross_entropy(
        x, w, t.target, logit_scale=scale, reduction="none", logits_budget=0
    )
    loss.sum().backward()
    X, W = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(scale * (X @ W.t()), t.target, reduction="sum").backward()
    for found, truth in ((x.grad, X.grad), (w.grad, W.grad)):
        assert found.isfinite().all()
        floor = 2**-24 * found.numel() ** 0.5
        assert error(found, truth) <= 2e-3 * truth.norm() + floor


@pytest.mark.parametrize("budget", [None, 0])
def test_gradients_cannot_be_differentiated_in_silence(budget, device):
    t, x, w = _leaves(device)
    with shrunk(8000):
        loss = parallel_lce.linear_cross_entropy(x, w, t.target, logits_budget=budget)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        (loss + dx.square().sum()).backward()


def test_none_of_torch_s_own_defaults_is_refused(device):
    t, x, w = _leaves(device)
    want = parallel_lce.linear_cross_entropy(x, w, t.target)
    assert torch.equal(
        parallel_lce.linear_cross_entropy(x, w, t.target, weight=None, options=None), want
    )


def test_a_target_out_of_range_shows_in_the_gradient(device):
    t, x, w = _leaves(device)
    target = t.target.clone()
    target[5] = CASE.V
    loss = parallel_lce.linear_cross_entropy(x, w, target, reduction="none")
    loss.sum().backward()
    assert loss.isnan().nonzero().flatten().tolist() == [5]
    assert x.grad.isnan().any(1).nonzero().flatten().tolist() == [5]
