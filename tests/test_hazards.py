"""The hazards of design.md, in either backend: underflow, -inf, soft-caps, cancellation, NaN, fp16."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import parallel_lce
import reference
from cases import dense_loss, part
from measures import assert_close, assert_near, assert_no_worse, error, size, smallest_steps
from parallel_lce.call.prepare import prepare
from tools import DIFFERENTIABLE, REDUCED, everywhere, field_gradients, given, shrunk, small, statistics
from world import Member

pytestmark = pytest.mark.usefixtures("backend")

STRATEGIES = {"save": (None, None), "recompute": (0, 4096)}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    """``logits_budget``, with blocks and tiles of a size that makes many of both."""
    budget, block = STRATEGIES[request.param]
    with shrunk(block, (16, 32)):
        yield budget


def dense_path(t, names, dtype, softcap):
    """Statistics, and gradients of the sum of the named ones, of logits in ``dtype``."""
    leaves = [v.detach().to(dtype).requires_grad_() for v in (t.x, t.weight)]
    z = torch.nn.functional.linear(*leaves)
    z = z if dtype == torch.float64 else z.float()
    found = reference.statistics(softcap * torch.tanh(z / softcap), t.target)
    return found, field_gradients(SimpleNamespace(**found), names, leaves)


def _one_shard_gone(member: Member, budget):
    t = part(small(member.device, V=120), member)
    bias = torch.full((40,), -torch.inf if member.rank == 1 else 0.0, device=member.device)
    options = dict(linear_bias=bias, process_group=member.group, logits_budget=budget)
    with shrunk(4096, (16, 32)):
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, torch.full_like(t.target, 3), **options)
        return [v.detach().cpu() for v in (loss, *torch.autograd.grad(loss, [t.x, t.weight]))]


@pytest.mark.parametrize("budget", [None, 0])
def test_a_shard_of_minus_infinity(budget, worlds, device):
    """All logits of one rank are -inf, padding elsewhere; the others' answer stands."""
    t = small(V=120)
    weight = torch.cat([t.weight[:40], t.weight[80:]])
    truth = dense_loss(replace(t, weight=weight, target=torch.full_like(t.target, 3)))
    found = everywhere(worlds, device, 3, _one_shard_gone, budget)
    for loss, dx, _ in found:
        assert_near(loss, truth["loss"], 1e-6)
        assert_near(dx, truth["dx"], 1e-5)
    (_, _, first), (_, _, gone), (_, _, last) = found
    assert torch.count_nonzero(gone) == 0
    assert_near(torch.cat([first, last]), truth["dweight"], 1e-5)


CAPS = {1e-30: 3.0, 0.01: 0.03, 0.3: 3.0, 3.0: 3.0, 9.0: 9.0, 20.0: 20.0, 60.0: 60.0, 1e3: 3.0, 1e6: 3.0, 1e30: 3.0}
"""Soft-cap: standard deviation of the logits. Logits span the whole range of 9 to 60. Beyond what the dtype's
exponentials span, saved rows are recomputed; up to there log(stored) still tells z."""


@pytest.mark.parametrize("all_fields", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.thinned
def test_softcaps(strategy, softcap, dtype, all_fields, device):
    """Statistics and their gradients are as near to float64 as torch's."""
    names = list(DIFFERENTIABLE) if all_fields and softcap > 1 else ["lse", "target_log_prob", "mean_log_prob"]
    t = small(device, D=8, dtype=dtype, sharpness=CAPS[softcap])
    found = statistics(t.x, t.weight, t.target, logit_softcap=softcap, logits_budget=strategy)
    truth, exact = dense_path(t, names, torch.float64, softcap)
    its, yardstick = dense_path(t, names, t.x.dtype, softcap)
    pairs = [(getattr(found, n).detach(), its[n].detach(), truth[n].detach()) for n in names]
    for ours, other, expected in [*pairs, *zip(field_gradients(found, names, [t.x, t.weight]), yardstick, exact)]:
        # Rounding to the dtype is the floor; stored exponentials in half precision get twice the yardstick.
        floor = 2 * torch.finfo(ours.dtype).eps * size(expected) + smallest_steps(ours)
        assert_no_worse(ours, expected, other, 2, floor)


@pytest.mark.parametrize(
    ("dtype", "softcap", "saved"),
    [("fp32", 4.0, False), ("bf16", 0.9, False), ("bf16", 1.0, True), ("bf16", 40.0, True), ("bf16", 41.0, False)]
    + [("fp16", 10.0, True), ("fp16", 11.0, False)],
)
def test_softcap_beyond_the_exponentials_range_saves_nothing(dtype, softcap, saved, device):
    """Exponentials tell logits to one rounding of 1. fp32's logits are off by less, and of a small cap that is much."""
    t = small(device, dtype=dtype)
    columns = dict(mean_logit=True, expected_logit=True, argmax=True)
    plan = prepare(*given(t.x, t.weight, t.target, logit_softcap=softcap, **columns))[0].plan
    assert [b.saved for b in plan.blocks] == [150 if saved else 0]


def test_no_cancellation_at_large_logits(strategy, device):
    """Logits around 300 that fp32 holds exactly, and whose distances are small: all error of a statistic is then its
    own."""
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randint(-4, 5, (rows, 4), generator=generator).to(device) / 4 for rows in (64, 96))
    target = torch.randint(96, (64,), generator=generator).to(device)
    leaves = [v.requires_grad_() for v in (x, w)]
    options = dict(linear_bias=torch.full((96,), 300.0, device=device), logits_budget=strategy)
    found = statistics(x, w, target, **options)
    options["reduction"] = "none"
    loss = parallel_lce.linear_cross_entropy(x, w, target, **options)
    smooth = parallel_lce.linear_cross_entropy(x, w, target, label_smoothing=0.3, **options)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z = doubles[0] @ doubles[1].t()  # the offset changes neither loss nor entropy
    exact, naive = reference.statistics(z, target), found.lse - found.target_logit
    smoothed = reference.loss(z, target, label_smoothing=0.3, reduction="none")
    for name, ours, difference, truth in (
        ("loss", loss, naive, -exact["target_log_prob"]),
        ("smoothing", smooth, 0.7 * naive + 0.3 * (found.lse - found.mean_logit), smoothed),
        ("entropy", found.entropy, found.lse - found.expected_logit, exact["entropy"]),
    ):
        assert_close(ours, truth, 4 * torch.finfo(torch.float32).eps, name=name)
        assert error(ours, truth) < error(difference, truth) / 8, f"{name}: no better than the difference"
    names = ["target_log_prob", "mean_log_prob", "entropy"]
    wanted = field_gradients(SimpleNamespace(**exact), names, doubles)
    for g, truth in zip(field_gradients(found, names, leaves), wanted):
        assert_near(g, truth, 2e-6)


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.thinned
def test_fp16_gradients_of_a_large_mean_do_not_underflow(name, device):
    """1 / N and a small loss weight push the logits' gradients below fp16's 6e-8; weights of norm
    2^10 bring dX back into its range. torch's own path loses most of it."""
    t = small(device, N=512, V=96, D=4, dtype="fp16")
    big = (t.weight.detach() * 2**10).requires_grad_()
    x = (t.x.detach() * 2**-10).requires_grad_()
    upstream = 2.0**-14
    with shrunk(16384, (64, 32)):
        loss = parallel_lce.linear_cross_entropy(x, big, t.target, **REDUCED[name])
        if loss.dim():
            loss = loss.sum() / 512
        dx, dw = torch.autograd.grad(loss, [x, big], torch.full_like(loss, upstream))
    scaled = replace(t, x=x, weight=big)
    exact, its = (dense_loss(scaled, d, upstream=torch.tensor(upstream)) for d in (torch.float64, torch.float16))
    # fp16 holds dX in steps of 2^-24, and operands to 2^-11.
    floor = smallest_steps(dx) + 2**-11 * size(exact["dx"])
    lost = error(its["dx"], exact["dx"])
    assert exact["dx"].abs().max() > 2**-19 and lost > 0.2 * size(exact["dx"]), "torch's path underflows here"
    assert error(dx, exact["dx"]) <= floor < 0.25 * lost
    assert_no_worse(dw, exact["dweight"], its["dweight"], floor=smallest_steps(dw))


@pytest.mark.parametrize("name", REDUCED)
def test_sharp_logits_in_bf16(name, device):
    """max |z| near 28: bf16 logits have lost their digits, stored exponentials have not."""
    t = small(device, N=96, V=512, D=64, dtype="bf16", sharpness=6.0)
    assert 22 < (t.x.double() @ t.weight.double().t()).abs().max() < 34
    truth, its = dense_loss(t), dense_loss(t, torch.bfloat16)
    with shrunk(32768, (32, 128)):
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **REDUCED[name])
        loss = loss if loss.dim() == 0 else loss.mean()
        found = torch.autograd.grad(loss, [t.x, t.weight])
    for name, g in zip(("dx", "dweight"), found):
        assert_no_worse(g, truth[name], its[name], 0.5, name=name)
