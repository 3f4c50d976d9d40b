"""The triton backend end to end, beside float64: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from blocks import launches
from cases import DTYPES, Case, assemble, check, dense, dense_loss, make, ours
from measures import assert_close, assert_no_worse
from parallel_lce import linear_cross_entropy
from parallel_lce.backends.interface import Scratch
from tools import chosen_backend, everywhere, shrunk, small
from world import Member

BLOCK = 33_000  # bytes: a window of 256 vocabulary rows, 64 tokens of it


@pytest.fixture(autouse=True)
def _chosen(kernels):
    with chosen_backend("triton"):
        yield


def watched(member: Member, case: Case, block: int):
    """What :func:`cases.ours` returns, and in how many pieces gradients came from saved exponentials
    and from recomputed logits."""
    with shrunk(block), launches() as found:
        results = ours(member, case)
    kernels = "lce_backward_token_gradients", "lce_backward_rewrite"
    saved = sum(each.kernel in kernels and each.given["maxima"] is not None for each in found)
    return results, (saved, sum(each.of_gradient for each in found))


def run(case: Case, worlds, device: str, block: int = BLOCK):
    parts = everywhere(worlds, device, case.ranks, watched, case, block)
    return assemble(case, [found for found, _ in parts]), [counts for _, counts in parts]


SAVED = Case(64, 700, 24, "bf16", reduction="none")
PIECES = 2 * 512 * 512  # bytes: rows are cut where ranges of entries would be narrow
STRATEGIES = {
    "saved": (SAVED, (1, 0), BLOCK),
    "saved, a mean": (replace(SAVED, reduction="mean", bias=True), (1, 0), BLOCK),
    "recomputed": (replace(SAVED, budget=0), (0, 3), BLOCK),
    "recomputed in pieces": (Case(600, 700, 24, "bf16", reduction="none", budget=0), (0, 4), PIECES),
    "some columns saved": (replace(SAVED, budget=64 * 300 * 2), (1, 2), BLOCK),
    "some rows saved": (Case(250, 130, 48, "bf16", reduction="none", budget=BLOCK), (1, 1), BLOCK),
    "accumulated": (replace(SAVED, reduction="mean", budget=0), (3, 0), BLOCK),
}
EVERYTHING = dict(bias=True, label_smoothing=0.1, z_loss=1e-2, logit_scale=0.7, logit_softcap=9.0, token_weight=True)


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize(
    ("dtype", "strategy"),
    # dX of fp16 waits for the upstream gradient.
    [(d, s) for d in ("bf16", "fp16") for s in STRATEGIES if (d, s) != ("fp16", "accumulated")],
)
@pytest.mark.thinned
def test_strategies(strategy, everything, dtype, worlds, device):
    case, pieces, block = STRATEGIES[strategy]
    case = replace(case, dtype=dtype, **(EVERYTHING if everything else {}))
    found, [counts] = run(case, worlds, device, block)
    if device == "cpu" or torch.cuda.get_device_capability() >= (9, 0):
        assert counts == pieces
    # What was accumulated is rounded again when the upstream gradient comes.
    check(case, found, factor=1.5 if strategy == "accumulated" else 1.0, device=device)


# Where the upstream gradient is a power of two, and logits are flat, so is the target's entry of dlogits to the
# precision of bf16. It is most of a gradient: torch's error is little more than the rounding of the result. Ours is
# where a token has a target of its own, as most of a few have.
FLAT = Case(64, 700, 64, "bf16", reduction="none", ignored="none", upstream=2.0**-6)
FLATS = FLAT, replace(FLAT, budget=0), replace(FLAT, reduction="mean", budget=0)
OVER_RANKS = Case(64, 700, 24, "bf16", ranks=2, reduction="none")
# A block's targets and weights lie N/P apart in those of the sequence.
ONE_ROW = Case(10, 700, 4, ranks=2, sequence_parallel=True, budget=0, ignored="none", token_weight=True)
# Three blocks and more, of which the larger shard saves a part alone. A block's consumed exponentials must not serve a
# block whose buffer is already another's.
UNEVEN = Case(512, 1280, 64, "bf16", ranks=2, shards=(1024, 256), budget=327680, ignored="none", sharpness=2.0)
CASES = [
    *((case, BLOCK, 1.1) for case in FLATS),
    *(pytest.param(replace(case, N=1024), BLOCK, 1.5, marks=pytest.mark.slow) for case in FLATS),
    (replace(OVER_RANKS, shards=(500, 200), bias=True), 20_000, 1.1),
    (replace(OVER_RANKS, shards=(700, 0), sequence_parallel=True, label_smoothing=0.1), 20_000, 1.1),
    (replace(OVER_RANKS, shards=(100, 600), budget=0, sequence_parallel=True), 20_000, 1.1),
    (replace(OVER_RANKS, reduction="mean", budget=0, V=699, shards=None, z_loss=1e-2), 20_000, 1.1),
    (replace(OVER_RANKS, dtype="fp16", shards=(300, 400), budget=BLOCK + 30_000, logit_softcap=8.0), 20_000, 1.1),
    (Case(33, 300, 16, "bf16", ignored="all"), 20_000, 1.1),
    *((Case(40, 300, 16, "bf16", bias=True, frozen=f), 20_000, 1.1) for f in ("x bias", "x weight")),
    *((replace(ONE_ROW, reduction=reduction), 1, 1.5) for reduction in ("none", "mean")),
    (UNEVEN, 16_384, 1.5),
]


@pytest.mark.parametrize(("case", "block", "factor"), CASES, ids=str)
def test_loss_and_gradients(case, block, factor, worlds, device):
    found, counts = run(case, worlds, device, block)
    if case.N == ONE_ROW.N:  # recomputed window by window, or accumulated
        assert counts == [(0, 30) if case.reduction == "none" else (5, 0)] * 2
    if case is UNEVEN:
        (saved, recomputed), (_, of_smaller) = counts
        assert saved >= 3 and recomputed > 0 and of_smaller == 0
    check(case, found, factor=factor, device=device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.slow
def test_rows_of_dw_in_which_targets_and_other_tokens_cancel(budget, dtype, device):
    """Hidden states with a mean, and targets drawn from the model's own softmax."""
    t = make(Case(1024, 24, 32, "fp64", ignored="none"))
    t.x += 2
    probabilities = (t.x @ t.weight.t()).softmax(1)
    t.target = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(0)).squeeze(1).to(device)
    t.x, t.weight = (v.to(device, DTYPES[dtype]).requires_grad_() for v in (t.x, t.weight))
    loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none", logits_budget=budget)
    [found] = torch.autograd.grad(loss.sum(), t.weight)
    truth, its = dense_loss(t, reduction="sum"), dense_loss(t, DTYPES[dtype], reduction="sum")
    assert_no_worse(found, truth["dweight"], its["dweight"], 1.5)


@pytest.mark.parametrize("strategy", ["saved", "recomputed", "accumulated"])
@pytest.mark.parametrize(("sharpness", "smallest"), [(6.0, 20), (90.0, 300)])
@pytest.mark.thinned
def test_sharp_logits_beside_torch(sharpness, smallest, strategy, worlds, device):
    """Logits in bf16 have lost their digits there, saved exponentials have not. At the larger |z| most
    windows are far from a token's reference, and most tokens are sure of one entry."""
    case = replace(STRATEGIES[strategy][0], sharpness=sharpness, D=64)
    t = make(case, device)
    truth, torchs = dense(case, t), dense(case, t, torch.bfloat16)
    assert (t.x.double() @ t.weight.double().t()).abs().max() > smallest
    found, _ = run(case, worlds, device)
    for name, value in found.items():
        assert_no_worse(value, truth[name], torchs[name], 0.5, name=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_window_of_minus_infinity_far_above_the_rest(dtype, device):
    """0 times the factor of its reference, which may be infinite, is no NaN."""
    t = small(device, V=600, dtype=dtype)
    bias = torch.full((600,), -120.0, device=device)
    bias[:256] = -torch.inf
    t.target = t.target % 344 + 256
    loss = linear_cross_entropy(t.x, t.weight, t.target, linear_bias=bias.to(t.x.dtype), reduction="none")
    found = loss, *torch.autograd.grad(loss.sum(), [t.x, t.weight])
    t.bias = bias.clamp(min=-1e4)  # whose exponentials are 0, too
    truth = dense_loss(t, reduction="none")
    for value, name, rtol in zip(found, ("loss", "dx", "dweight"), (1e-5, 1e-2, 1e-2)):
        assert_close(value, truth[name], rtol, name=name)


def test_one_tokens_nan_upstream_leaves_the_others_alone_in_fp16(device):
    t, found = small(device, dtype="fp16"), []
    for number in (1.0, torch.nan):
        upstream = torch.ones(t.target.shape, device=device)
        upstream[3] = number
        loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
        found += torch.autograd.grad(loss, [t.x], upstream)
    assert found[1][3].isnan().all()
    others = torch.arange(len(t.x), device=device) != 3
    assert_close(found[1][others], found[0][others], 2e-3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("gap", ["every other", "all one"])
@pytest.mark.thinned
def test_targets_weights_and_biases_with_gaps(gap, reduction, device):
    """Kernels read them as if they were contiguous."""
    t = make(Case(40, 300, 16, "bf16", bias=True, token_weight=True, ignored="none"), device)
    spread = {"every other": lambda v: v.repeat_interleave(2)[::2], "all one": lambda v: v[3].expand(len(v))}[gap]
    found = []
    for form in (lambda v: v, torch.clone):
        target, weight, bias = (form(spread(v)) for v in (t.target, t.token_weight, t.bias))
        options = dict(token_weight=weight, linear_bias=bias, reduction=reduction)
        found.append(linear_cross_entropy(t.x, t.weight, target, **options))
    assert not spread(t.target).is_contiguous() and torch.equal(*found)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_saved_tensors_may_come_back_elsewhere(dtype, device):
    """Hooks such as ``save_on_cpu`` may give a weight whose rows were not aligned back as one whose
    are, for which other tiles would be chosen; the windows of what is saved stay those of forward."""
    t = make(Case(40, 700, 64, dtype, ignored="none", sharpness=20.0), device)
    memory = torch.empty(700 * 64 + 1, dtype=t.weight.dtype, device=device)
    t.weight = memory[1:].view(700, 64).copy_(t.weight).requires_grad_()
    t.x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
        loss = linear_cross_entropy(t.x, t.weight, t.target)
    truth = dense_loss(t)
    for name, found in zip(("dx", "dweight"), torch.autograd.grad(loss, [t.x, t.weight])):
        assert_close(found, truth[name], 2 * torch.finfo(found.dtype).eps, name=name)


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
    truth = dense_loss(t, reduction="none")
    assert_close(dx, truth["dx"], 1e-2)
    assert_close(dw, truth["dweight"], 1e-2)
