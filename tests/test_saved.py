"""What the triton backend makes of saved exponentials whose softmax shift does not serve."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from parallel_lce import linear_cross_entropy, prepare
from parallel_lce.backends.interface import Scratch
from tools import chosen_backend, everywhere, shrunk, small
from world import Member


@pytest.fixture(autouse=True)
def _triton(kernels):
    with chosen_backend("triton"):
        yield


def error(found, exact) -> float:
    """Relative, in the Frobenius norm."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def dense(x, weight, target, bias=None, upstream=None):
    """Per-token losses and gradients in float64, gradients of the sum weighted by ``upstream``."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    losses = F.cross_entropy(F.linear(x, weight, bias), target, reduction="none")
    upstream = torch.ones_like(losses) if upstream is None else upstream.double()
    return losses.detach(), *torch.autograd.grad(losses, [x, weight], upstream)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_window_of_minus_infinity_far_above_the_rest(dtype, device):
    """0 times the factor of its reference, which may be infinite, is no NaN."""
    t = small(device, V=600, dtype=dtype)
    bias = torch.full((600,), -120.0, device=device)
    bias[:256] = -torch.inf
    target = t.target % 344 + 256
    bias = bias.to(t.x.dtype)
    loss = linear_cross_entropy(t.x, t.weight, target, linear_bias=bias, reduction="none")
    found = torch.autograd.grad(loss.sum(), [t.x, t.weight])
    losses, *expected = dense(t.x, t.weight, target, bias.double())
    assert error(loss, losses) < 1e-5
    for ours, exact in zip(found, expected):
        assert error(ours, exact) < 1e-2


@pytest.mark.parametrize("scale", [1e-12, 1e-28])
def test_upstream_so_small_that_scaled_hidden_states_would_underflow(scale, device):
    t = small(device, dtype="bf16", V=600)
    with torch.no_grad():
        # A maximum of 25 that the sample which tells the reference does not meet.
        t.x[:, 0], t.weight[7, 0] = 5.0, 5.0
    upstream = torch.full(t.target.shape, scale, device=device)
    loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
    found = torch.autograd.grad(loss, [t.x, t.weight], upstream)
    _, *expected = dense(t.x, t.weight, t.target, upstream=upstream)
    for ours, exact in zip(found, expected):
        assert error(ours.double() / scale, exact / scale) < 1e-2


def test_upstream_of_zero_on_some_tokens(device):
    t = small(device, dtype="bf16")
    upstream = (torch.arange(t.target.shape[0], device=device) % 2).float()
    loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
    dx, dw = torch.autograd.grad(loss, [t.x, t.weight], upstream)
    _, *expected = dense(t.x, t.weight, t.target, upstream=upstream)
    assert not dx[::2].any()
    assert error(dx, expected[0]) < 1e-2 and error(dw, expected[1]) < 1e-2


def test_one_tokens_nan_upstream_leaves_the_others_alone_in_fp16(device):
    t = small(device, dtype="fp16")
    upstream = torch.ones(t.target.shape, device=device)
    loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
    (expected,) = torch.autograd.grad(loss, [t.x], upstream)
    upstream[3] = torch.nan
    loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
    (found,) = torch.autograd.grad(loss, [t.x], upstream)
    assert found[3].isnan().all()
    others = torch.arange(len(upstream), device=device) != 3
    assert error(found[others], expected[others].double()) < 2e-3


def test_a_bias_with_gaps(device):
    """Kernels read biases as if they were contiguous."""
    t = small(device, dtype="bf16", V=300)
    wide = torch.randn(600, device=device, generator=torch.Generator(device).manual_seed(0))
    for bias in (wide.to(t.x.dtype)[::2], wide.to(t.x.dtype)[:1].expand(300)):
        found = linear_cross_entropy(t.x, t.weight, t.target, linear_bias=bias, reduction="none")
        losses, *_ = dense(t.x, t.weight, t.target, bias.double())
        assert error(found, losses) < 1e-5


def test_what_is_recomputed_takes_the_memory_of_what_was_saved(device, monkeypatch):
    """So that a budget is one buffer, not two, and slices are as large as it."""
    monkeypatch.setattr(Scratch, "take", lambda *_: pytest.fail("more memory than what was saved"))
    written = []
    slices = importlib.import_module("parallel_lce.backends.triton_backward")
    monkeypatch.setattr(slices, "logits_gradient", recorded(slices.logits_gradient, written))
    t = small(device, N=40, V=700, dtype="bf16")
    budget = 40 * 512 * 2
    with shrunk(256):
        loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none", logits_budget=budget + 256)
        found = torch.autograd.grad(loss.sum(), [t.x, t.weight])
    assert written == [188], "two windows of 256 are saved, the rest is one slice"
    _, *expected = dense(t.x, t.weight, t.target)
    for ours, exact in zip(found, expected):
        assert error(ours, exact) < 1e-2


def recorded(write, widths):
    def call(operands, *arguments):
        widths.append(operands.weight.shape[0])
        write(operands, *arguments)

    return call


SHARDS = (1024, 256)


def _uneven(member: Member):
    """Three blocks and more, of which the larger shard saves a part alone."""
    device, start = member.device, sum(SHARDS[: member.rank])
    t = small(device, N=512, V=sum(SHARDS), D=64, dtype="bf16", sharpness=2.0)
    weight = t.weight.detach()[start : start + SHARDS[member.rank]].clone().requires_grad_()
    planned, plan = [], prepare._plan

    def record(*arguments):
        planned.append(plan(*arguments))
        return planned[0]

    prepare._plan = record
    try:
        with shrunk(16384):
            loss = linear_cross_entropy(
                t.x,
                weight,
                t.target,
                process_group=member.group,
                vocab_start=start,
                vocab_size=sum(SHARDS),
                logits_budget=327680,
            )
    finally:
        prepare._plan = plan
    blocks = list(planned[0].blocks)
    assert planned[0].accumulate and len(blocks) >= 3
    if member.rank == 0:
        assert 0 < blocks[0].saved < SHARDS[0]
    _, *expected = dense(t.x, t.weight, t.target)
    expected[1] = expected[1][start : start + SHARDS[member.rank]]
    for ours, exact in zip(torch.autograd.grad(loss, [t.x, weight]), expected):
        assert error(ours, exact / len(t.target)) < 1e-2


def test_accumulation_where_the_larger_shard_saves_a_part(worlds, device):
    """A block's consumed exponentials must not serve a block whose buffer is already another's."""
    everywhere(worlds, device, 2, _uneven)
