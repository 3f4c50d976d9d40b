"""What the triton backend makes of saved exponentials whose softmax shift does not serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blocks import launches
from cases import dense_loss, normal, part
from measures import assert_close
from parallel_lce import linear_cross_entropy
from parallel_lce.backends.interface import Scratch
from parallel_lce.call.prepare import prepare
from tools import chosen_backend, everywhere, given, shrunk, small
from world import Member


@pytest.fixture(autouse=True)
def _triton(kernels):
    with chosen_backend("triton"):
        yield


def per_token(t, bias=None, **options):
    """Losses and gradients in float64, gradients of the sum weighted by ``upstream``."""
    return dense_loss(replace(t, bias=bias), reduction="none", **options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_window_of_minus_infinity_far_above_the_rest(dtype, device):
    """0 times the factor of its reference, which may be infinite, is no NaN."""
    t = small(device, V=600, dtype=dtype)
    bias = torch.full((600,), -120.0, device=device)
    bias[:256] = -torch.inf
    t.target = t.target % 344 + 256
    bias = bias.to(t.x.dtype)
    loss = linear_cross_entropy(t.x, t.weight, t.target, linear_bias=bias, reduction="none")
    dx, dw = torch.autograd.grad(loss.sum(), [t.x, t.weight])
    truth = per_token(t, bias.clamp(min=-1e4))  # whose exponentials are 0, too
    assert_close(loss, truth["loss"], 1e-5)
    assert_close(dx, truth["dx"], 1e-2)
    assert_close(dw, truth["dweight"], 1e-2)


@pytest.mark.parametrize("scale", [1e-12, 1e-28])
def test_upstream_so_small_that_scaled_hidden_states_would_underflow(scale, device):
    t = small(device, dtype="bf16", V=600)
    with torch.no_grad():
        # A maximum of 25 that the sample which tells the reference does not meet.
        t.x[:, 0], t.weight[7, 0] = 5.0, 5.0
    upstream = torch.full(t.target.shape, scale, device=device)
    loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
    dx, dw = torch.autograd.grad(loss, [t.x, t.weight], upstream)
    truth = per_token(t, upstream=upstream)
    assert_close(dx.double() / scale, truth["dx"] / scale, 1e-2)
    assert_close(dw.double() / scale, truth["dweight"] / scale, 1e-2)


def test_upstream_of_zero_on_some_tokens(device):
    t = small(device, dtype="bf16")
    upstream = (torch.arange(t.target.shape[0], device=device) % 2).float()
    loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
    dx, dw = torch.autograd.grad(loss, [t.x, t.weight], upstream)
    truth = per_token(t, upstream=upstream)
    assert not dx[::2].any()
    assert_close(dx, truth["dx"], 1e-2)
    assert_close(dw, truth["dweight"], 1e-2)


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
    assert_close(found[others], expected[others], 2e-3)


def test_a_bias_with_gaps(device):
    """Kernels read biases as if they were contiguous."""
    t = small(device, dtype="bf16", V=300)
    wide = normal(600).to(device)
    for bias in (wide.to(t.x.dtype)[::2], wide.to(t.x.dtype)[:1].expand(300)):
        found = linear_cross_entropy(t.x, t.weight, t.target, linear_bias=bias, reduction="none")
        assert_close(found, per_token(t, bias)["loss"], 1e-5)


def test_what_is_recomputed_takes_the_memory_of_what_was_saved(device, monkeypatch):
    """So that a budget is one buffer, not two, and slices are as large as it."""
    monkeypatch.setattr(Scratch, "borrow", lambda *_: pytest.fail("more memory than what was saved"))
    t = small(device, N=40, V=700, dtype="bf16")
    budget = 40 * 512 * 2
    with shrunk(256), launches() as found:
        loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none", logits_budget=budget + 256)
        dx, dw = torch.autograd.grad(loss.sum(), [t.x, t.weight])
    written = [each.given["entries"] for each in found if each.of_gradient]
    assert written == [188], "two windows of 256 are saved, the rest is one slice"
    truth = per_token(t)
    assert_close(dx, truth["dx"], 1e-2)
    assert_close(dw, truth["dweight"], 1e-2)


SHARDS = (1024, 256)


def _uneven(member: Member):
    """Three blocks and more, of which the larger shard saves a part alone."""
    whole = small(member.device, N=512, V=sum(SHARDS), D=64, dtype="bf16", sharpness=2.0)
    t, start = part(whole, member, shards=SHARDS), sum(SHARDS[: member.rank])
    rows = slice(start, start + SHARDS[member.rank])
    options = dict(vocab_start=start, vocab_size=sum(SHARDS), logits_budget=327680)
    with shrunk(16384):
        plan = prepare(*given(t.x, t.weight, t.target, reduction="mean", **options), member.group)[0].plan
        loss = linear_cross_entropy(t.x, t.weight, t.target, process_group=member.group, **options)
    assert plan.accumulate and len(plan.blocks) >= 3
    if member.rank == 0:
        assert 0 < plan.blocks[0].saved < SHARDS[0]
    dx, dw = torch.autograd.grad(loss, [t.x, t.weight])
    truth = dense_loss(whole)
    assert_close(dx, truth["dx"], 1e-2)
    assert_close(dw, truth["dweight"][rows], 1e-2)


def test_accumulation_where_the_larger_shard_saves_a_part(worlds, device):
    """A block's consumed exponentials must not serve a block whose buffer is already another's."""
    everywhere(worlds, device, 2, _uneven)
