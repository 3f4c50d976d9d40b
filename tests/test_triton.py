"""The triton backend end to end, beside float64: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import parallel_lce
from blocks import launches
from cases import DTYPES, Case, assemble, check, dense, dense_loss, make, ours, part
from measures import assert_close, assert_no_worse
from tools import chosen_backend, everywhere, shrunk
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
STRATEGIES = {
    "saved": (SAVED, (1, 0)),
    "saved, a mean": (replace(SAVED, reduction="mean", bias=True), (1, 0)),
    "recomputed": (replace(SAVED, budget=0), (0, 3)),
    "some columns saved": (replace(SAVED, budget=64 * 300 * 2), (1, 2)),
    "some rows saved": (Case(250, 130, 48, "bf16", reduction="none", budget=BLOCK), (1, 1)),
    "accumulated": (replace(SAVED, reduction="mean", budget=0), (3, 0)),
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
    case, pieces = STRATEGIES[strategy]
    case = replace(case, dtype=dtype, **(EVERYTHING if everything else {}))
    found, [counts] = run(case, worlds, device)
    if device == "cpu" or torch.cuda.get_device_capability() >= (9, 0):
        assert counts == pieces
    # What was accumulated is rounded again when the upstream gradient comes.
    check(case, found, factor=1.5 if strategy == "accumulated" else 1.0, device=device)


PIECES = Case(600, 700, 24, "bf16", reduction="none", budget=0)


@pytest.mark.parametrize(
    "case",
    [
        PIECES,
        replace(PIECES, **EVERYTHING),
        pytest.param(replace(PIECES, dtype="fp16", bias=True), marks=pytest.mark.slow),
        pytest.param(replace(PIECES, V=500), marks=pytest.mark.slow),
    ],
    ids=["plain", "every option", "fp16", "one range"],
)
def test_recomputed_rows_are_cut_where_ranges_would_be_narrow(case, worlds, device):
    """Into two pieces, whose dW is summed before it is rounded; targets are in one piece or in both."""
    found, [counts] = run(case, worlds, device, block=2 * 512 * 512)
    if device == "cpu" or torch.cuda.get_device_capability() >= (9, 0):
        assert counts == (0, 2 * -(-case.V // 512))
    check(case, found, factor=1.0, device=device)


@pytest.mark.parametrize("N", [1, 64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("reduction", "budget"), [("none", None), ("none", 0), ("mean", 0)], ids=["saved", "recomputed", "accumulated"]
)
def test_gradients_as_exact_as_torchs_where_its_targets_are(reduction, budget, N, worlds, device):
    """Where the upstream gradient is a power of two, and logits are flat, so is the target's entry of
    dlogits to the precision of bf16. It is most of a gradient: torch's error is little more than the
    rounding of the result. Ours is where a token has a target of its own, as most of a few have."""
    case = Case(N, 700, 64, "bf16", reduction=reduction, budget=budget, ignored="none", upstream=2.0**-6)
    check(case, run(case, worlds, device)[0], factor=1.5 if N > 700 else 1.1, device=device)


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
    loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, reduction="none", logits_budget=budget)
    [found] = torch.autograd.grad(loss.sum(), t.weight)
    truth, its = dense_loss(t, reduction="sum"), dense_loss(t, DTYPES[dtype], reduction="sum")
    assert_no_worse(found, truth["dweight"], its["dweight"], 1.5)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 8, "bf16"),
        Case(7, 5, 3, "fp16", reduction="none", bias=True),
        Case(40, 600, 21, "bf16", budget=0, label_smoothing=0.2, reduction="sum"),  # no TMA
        Case(40, 600, 21, "fp16", budget=60_000, reduction="none", logit_scale=-1.5),
        Case(140, 300, 40, "fp32", budget=0, bias=True, z_loss=1e-2, reduction="none"),
        Case(140, 300, 40, "fp32", budget=0, logit_softcap=5.0),
        Case(33, 300, 16, "bf16", ignored="all"),
        *(Case(40, 300, 16, "bf16", bias=True, frozen=f) for f in ("x", "weight", "x bias", "x weight")),
    ],
    ids=str,
)
def test_shapes_and_what_is_frozen(case, worlds, device):
    found, _ = run(case, worlds, device, block=20_000)
    check(case, found, factor=1.1, device=device)


OVER_RANKS = Case(64, 700, 24, "bf16", ranks=2, reduction="none")


@pytest.mark.parametrize(
    "case",
    [
        replace(OVER_RANKS, shards=(500, 200), bias=True),
        replace(OVER_RANKS, shards=(700, 0), sequence_parallel=True, label_smoothing=0.1),
        replace(OVER_RANKS, shards=(100, 600), budget=0, sequence_parallel=True),
        replace(OVER_RANKS, reduction="mean", budget=0, V=699, shards=None, z_loss=1e-2),
        replace(OVER_RANKS, dtype="fp16", shards=(300, 400), budget=BLOCK + 30_000, logit_softcap=8.0),
    ],
    ids=str,
)
def test_over_ranks(case, worlds, device):
    found, _ = run(case, worlds, device, block=20_000)
    check(case, found, factor=1.1, device=device)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_blocks_of_one_row_of_each_part(reduction, worlds, device):
    """Such a block's targets and weights lie N/P apart in those of the sequence."""
    case = Case(
        10, 700, 4, ranks=2, sequence_parallel=True, reduction=reduction, budget=0, ignored="none", token_weight=True
    )
    found, counts = run(case, worlds, device, block=1)
    blocks = {"none": (0, 30), "mean": (5, 0)}  # recomputed window by window, or accumulated
    assert counts == [blocks[reduction]] * 2
    check(case, found, factor=1.5, device=device)


# --- sharp logits ----------------------------------------------------------------------------------


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
@pytest.mark.parametrize("ranks", [1, 2])
def test_references_that_miss(ranks, dtype, worlds, device):
    """A bias lifts a few vocabulary rows of one window by more than a reference reaches: its columns
    are saved relative to their own maximum, and the other shard's lie far below the maximum of all."""
    case = Case(40, 700, 16, dtype, ranks=ranks, reduction="none", offset=60.0)
    found = assemble(case, everywhere(worlds, device, ranks, _lifted, case))
    truth = dense(case, lifted(case, device))
    rounding = torch.finfo(DTYPES[dtype]).eps
    for name in ("dx", "dweight", "dbias"):
        assert_close(found[name], truth[name], 2 * rounding, name=name)
    assert_close(found["loss"], truth["loss"], 1e-6)


def lifted(case: Case, device):
    t = make(case, device)
    t.bias[5:9] += 200
    return t


def _lifted(member: Member, case: Case) -> dict[str, torch.Tensor]:
    t = part(lifted(case, member.device), member)
    leaves = [t.x, t.weight, t.bias]
    loss = parallel_lce.linear_cross_entropy(
        *leaves[:2],
        t.target,
        linear_bias=leaves[2],
        reduction="none",
        process_group=member.group if case.ranks > 1 else None,
    )
    gradients = torch.autograd.grad(loss, leaves, t.upstream)
    found = dict(zip(("dx", "dweight", "dbias"), (g.cpu() for g in gradients)))
    return found | {"loss": loss.detach().cpu()}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("gap", ["every other", "all one"])
def test_targets_and_weights_with_gaps(gap, reduction, device):
    t = make(Case(40, 300, 16, "bf16", token_weight=True, ignored="none"), device)
    spread = {"every other": lambda v: v.repeat_interleave(2)[::2], "all one": lambda v: v[3].expand(40)}[gap]
    found = [
        parallel_lce.linear_cross_entropy(t.x, t.weight, form(target), token_weight=form(weight), reduction=reduction)
        for target, weight in [(spread(t.target), spread(t.token_weight))]
        for form in (lambda v: v, torch.clone)
    ]
    assert not spread(t.target).is_contiguous() and torch.equal(*found)
