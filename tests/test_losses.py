"""Losses of targets, gradients and numbers of tokens that few calls have, in either backend: kernels are interpreted
on the CPU, compiled with ``-m gpu``."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton
from torch.nn.functional import cross_entropy

from parallel_lce import linear_cross_entropy, vocab_parallel_cross_entropy
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.kernels import results
from parallel_lce.run.entry import fused_loss
from tools import everywhere, given, small
from world import Member

pytestmark = pytest.mark.usefixtures("backend")

SHAPE = dict(N=40, V=208, D=32, dtype="bf16", sharpness=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_main_grad_is_added_to(dtype, device):
    t = small(device, **SHAPE)
    options, tensors = given(t.x, t.weight, t.target, reduction="none", ignore_index=-100)
    [expected] = torch.autograd.grad(fused_loss(options, tensors, None).sum(), [t.weight])
    total = torch.ones(208, 32, device=device, dtype=dtype)
    for _ in range(2):
        fused_loss(options, tensors, None, main_grad=MainGrad(total, lambda memory: None)).sum().backward()
    with torch.no_grad():  # nothing is added
        fused_loss(options, tensors, None, main_grad=MainGrad(total, lambda memory: None))
    torch.testing.assert_close(total.double(), 1 + 2 * expected.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_target_outside_the_vocabulary_as_in_megatron(ranks, worlds, device):
    """Its loss is the log-sum-exp less the largest logit."""
    everywhere(worlds, device, ranks, _outside)


def _outside(member: Member) -> None:
    t = small(member.device, **SHAPE)
    t.target[::5] = 208
    shard = t.weight.chunk(member.ranks)[member.rank]
    options = dict(reduction="none", ignore_index=-100, outside_is_nan=False)
    loss = fused_loss(*given(t.x, shard, t.target, **options), member.group)
    [dx] = torch.autograd.grad(loss[::5].sum(), [t.x])
    x = t.x.detach().double().requires_grad_()
    lse = (x @ t.weight.double().t()).logsumexp(1)[::5]
    torch.testing.assert_close(loss[::5].double(), lse - (x @ t.weight.double().t()).amax(1)[::5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.double(), torch.autograd.grad(lse.sum(), [x])[0], rtol=2e-2, atol=2e-2)


def test_weights_of_tokens_learn_under_autocast(device):
    t = small(device, **SHAPE | dict(dtype="fp32"))
    token_weight = torch.linspace(0, 2, 40, device=device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        given = dict(reduction="none", reduce_dtype=torch.bfloat16)
        losses = linear_cross_entropy(t.x, t.weight, t.target, **given)
        total = linear_cross_entropy(t.x, t.weight, t.target, token_weight=token_weight, **given).sum()
    [found] = torch.autograd.grad(total, [token_weight])
    assert torch.equal(found, losses)


@pytest.mark.parametrize("logits_budget", [None, 0])
def test_a_mean_of_no_weight_is_0_and_has_no_gradient(logits_budget, device):
    t = small(device, **SHAPE)
    options = dict(token_weight=torch.zeros(40, device=device), logits_budget=logits_budget)
    loss = linear_cross_entropy(t.x, t.weight, t.target, **options)
    assert loss == 0 and not any(map(torch.any, torch.autograd.grad(loss, [t.x, t.weight])))


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_a_mean_of_more_tokens_than_are_added_at_a_time(device, monkeypatch):
    if interpreted := device == "cpu":
        monkeypatch.setattr(results, "_SUMMED", triton.language.constexpr(64))
    t = small(device, N=200 if interpreted else 5000, V=16, D=8, dtype="bf16", token_weight=True)
    loss = linear_cross_entropy(t.x, t.weight, t.target, token_weight=t.token_weight, ignore_index=3)
    z = t.x.detach().double() @ t.weight.detach().double().t()
    weight = t.token_weight.double() * (t.target != 3)
    each = weight * cross_entropy(z, t.target, reduction="none")
    torch.testing.assert_close(loss.double(), each.sum() / weight.sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_what_the_largest_logit_leaves_is_not_rounded_away(device):
    """1e-6 beside 1, of 12288 entries."""
    logits = torch.full((2, 12289), -23.0, device=device)
    logits[:, 77] = 0.0
    losses = vocab_parallel_cross_entropy(logits, torch.full((2,), 77, device=device))
    truth = torch.tensor(12288.0).double().mul(torch.tensor(-23.0).double().exp()).log1p()
    # Half a rounding of 1, in each of two sums.
    assert ((losses.double() - truth.to(device)).abs() <= 2**-24).all()
