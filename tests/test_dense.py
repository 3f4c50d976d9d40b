"""Losses of logits that exist: small problems, whose fp32 logits are saved (:mod:`parallel_lce.backends.triton_dense`);
and vocab_parallel_cross_entropy. The kernels are interpreted on the CPU, compiled with ``-m gpu``."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton
from torch.nn.functional import cross_entropy

from blocks import launches
from cases import dense_loss
from fuzz import program
from fuzz.draw import Configuration
from fuzz.run import execute
from parallel_lce import linear_cross_entropy, vocab_parallel_cross_entropy
from parallel_lce.call import prepare
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.kernels import loss_kernels
from parallel_lce.run.entry import fused_loss
from tools import chosen_backend, debug_mode, everywhere, given, on_ranks, small
from world import Member


@pytest.fixture(autouse=True)
def dense(kernels):
    with chosen_backend("dense"):
        yield


SHAPE = dict(N=40, V=208, D=32, dtype="bf16", sharpness=4.0)


def saved_logits() -> bool:
    """Whether the plan of the call that was made last says so."""
    return [*prepare.KNOWN.values()][-1].dense is not None


def _small(c: Configuration) -> Configuration:
    """With sizes of which every rank saves dense logits. Of the last rank's at most 8 rows are padding."""
    rows = [-(-n // 8) * 8 for _, n in c.shards]
    shards = tuple((sum(rows[:rank]), n) for rank, n in enumerate(rows))
    frozen = ("bias", *(name for name in c.frozen if name != "bias"))[:2]
    V, D = sum(rows) - 8 * (c.size_given and rows[-1] > 8), max(8, c.D // 8 * 8)
    changes = dict(dtype="bf16", autocast="", counted="", budget=None, block_bytes=None)
    if c.N % 3 == 0:
        changes["mode"] = "inference" if c.N % 2 else "no_grad"
    return replace(c, V=V, D=D, shards=shards, frozen=frozen, **changes)


def _executed(member: Member, c: Configuration) -> dict[str, torch.Tensor]:
    with launches() as found:
        results = execute(member, c, "dense")
    kernels = {each.kernel for each in found}
    if c.kind == "logits" and c.N and c.layout("input") == "plain":
        assert "lce_forward_dense" in kernels
    if c.kind == "loss" and c.N and c.shards[member.rank][1]:
        assert ("lce_backward_dense" if c.mode == "train" else "lce_forward_dense") in kernels
        few = member.ranks == 1 and "checkpoint" not in c.walk
        assert not few or kernels <= {"lce_forward_dense", "lce_forward_mean", "lce_backward_dense"}
    return results


@pytest.mark.parametrize(
    ("kind", "ranks", "count", "fewer"),
    [("loss", 1, 16, 8), ("loss", 2, 6, 4), ("logits", 1, 40, 14), ("logits", 2, 14, 5)],
)
def test_random_configurations(kind, ranks, count, fewer, worlds, device, request):
    """Of small problems, and of logits that exist, as in test_fuzz.py."""
    settings = program.Settings(seed=5, backend="triton", device=device)
    drawn = (settings.draw(ranks, index) for index in itertools.count())
    chosen = (_small(c) if kind == "loss" else c for c in drawn if c.kind == kind and c.dtype != "fp64" and not c.own)
    for c in itertools.islice(chosen, count if request.config.option.all else fewer):
        _, finding = program.examine(c, lambda c: everywhere(worlds, device, ranks, _executed, c))
        assert not finding, f"{c}\n{finding}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_main_grad_is_added_to(dtype, device):
    t = small(device, **SHAPE)
    options, tensors = given(t.x, t.weight, t.target, reduction="none", ignore_index=-100)
    [expected] = torch.autograd.grad(fused_loss(options, tensors, None).sum(), [t.weight])
    total = torch.ones(208, 32, device=device, dtype=dtype)
    for _ in range(2):
        fused_loss(options, tensors, None, main_grad=MainGrad(total, lambda memory: None)).sum().backward()
    assert saved_logits() == (dtype == torch.float32)
    with torch.no_grad():  # nothing is added
        fused_loss(options, tensors, None, main_grad=MainGrad(total, lambda memory: None))
    assert saved_logits()
    torch.testing.assert_close(total.double(), 1 + 2 * expected.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shards", [(208,), (104, 104), (208, 0), (104, 101), (107, 101)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_forward_alone_gives_the_loss_of_training(reduction, shards, worlds, device):
    """With and without a bias; to the bit where all ranks with entries have dense logits, which takes multiples of 8
    entries."""
    everywhere(worlds, device, len(shards), _evaluated, reduction, shards)


def _evaluated(member: Member, reduction: str, shards: tuple[int, ...]) -> None:
    t, start = small(member.device, **SHAPE | dict(V=sum(shards), bias=True)), sum(shards[: member.rank])
    exact = all([n % 8 == 0 for n in shards])
    rows = slice(start, start + shards[member.rank])
    given = t.x.chunk(member.ranks)[member.rank], t.weight[rows]
    options = dict(reduction=reduction, process_group=member.group, sequence_parallel=member.ranks > 1)
    options |= dict(vocab_start=start, vocab_size=sum(shards))
    for bias in (None, t.bias[rows].detach()):
        values = []
        with chosen_backend("dense"):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode(), launches() as found:
                    values.append(linear_cross_entropy(*given, t.target, linear_bias=bias, **options))
                dense = len(t.weight[rows]) % 8 == 0 and len(t.weight[rows]) > 0
                assert saved_logits() == ("lce_forward_dense" in {each.kernel for each in found}) == dense
        trained, *alone = values
        assert trained.requires_grad and not any([v.requires_grad for v in alone])
        for value in alone:
            torch.testing.assert_close(value, trained.detach(), rtol=0.0 if exact else 1e-6, atol=0.0)


@pytest.mark.parametrize("changes", [dict(dtype="fp16"), dict(bias=True), dict(V=207)], ids=str)
def test_other_calls_save_exponentials(changes, device):
    """So do those with a gradient of the bias. test_plan.py has the size and the budget."""
    t = small(device, **SHAPE | changes)
    linear_cross_entropy(t.x, t.weight, t.target, linear_bias=t.bias)
    assert not saved_logits()


@pytest.mark.parametrize("name", ["triton", "dense"])
def test_a_target_outside_the_vocabulary_as_in_megatron(name, device):
    """Its loss is the log-sum-exp less the largest logit."""
    t = small(device, **SHAPE)
    t.target[::5] = 208
    options = dict(reduction="none", ignore_index=-100, outside_is_nan=False)
    with chosen_backend(name):
        loss = fused_loss(*given(t.x, t.weight, t.target, **options), None)
        [dx] = torch.autograd.grad(loss[::5].sum(), [t.x])
    x = t.x.detach().double().requires_grad_()
    lse = (x @ t.weight.double().t()).logsumexp(1)[::5]
    torch.testing.assert_close(loss[::5].double(), lse - (x @ t.weight.double().t()).amax(1)[::5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.double(), torch.autograd.grad(lse.sum(), [x])[0], rtol=2e-2, atol=2e-2)


@on_ranks(2)
def test_ranks_whose_biases_differ_run_the_same_collectives(member):
    """An empty shard without a bias saves nothing, whatever the other rank saves for its bias's gradient."""
    t = small(member.device, **SHAPE | dict(bias=True))
    rows = 208 if member.rank == 0 else 0
    options = dict(process_group=member.group, sequence_parallel=True, vocab_start=208 * member.rank, vocab_size=208)
    x = t.x.detach().chunk(2)[member.rank].clone().requires_grad_()
    with chosen_backend("dense"):
        loss = linear_cross_entropy(x, t.weight[:rows], t.target, linear_bias=t.bias if rows else None, **options)
        [found] = torch.autograd.grad(loss, [x])
        assert not saved_logits()
    torch.testing.assert_close(found.double(), dense_loss(t)["dx"].chunk(2)[member.rank], rtol=2e-2, atol=1e-4)


@on_ranks(2)
def test_ranks_without_dense_logits_exchange_and_gather_in_the_same_order(member):
    """The last rank's 13 entries are no multiple of 8; the budget has no room for gathered hidden states."""
    t, found = small(member.device, N=32, V=32, D=64, dtype="bf16"), []
    for debug in (False, True):
        x, weight = (each.detach().chunk(2)[member.rank].requires_grad_() for each in (t.x, t.weight))
        options = dict(process_group=member.group, sequence_parallel=True, vocab_size=29, logits_budget=3000)
        with debug_mode() if debug else nullcontext(), launches() as run:
            loss = linear_cross_entropy(x, weight, t.target % 29, reduction="none", **options)
            found.append(torch.autograd.grad(loss.sum(), [x, weight]))
        assert ("lce_backward_dense" in {each.kernel for each in run}) == (member.rank == 0)
    assert all(map(torch.equal, *found))


def test_a_nan_from_above_of_an_ignored_token_reaches_no_gradient(device):
    found = []
    for number in (1.0, torch.nan):
        t = small(device, **SHAPE)
        t.target[3] = -100
        upstream = torch.ones(len(t.x), device=device)
        upstream[3] = number
        losses = linear_cross_entropy(t.x, t.weight, t.target, reduction="none")
        assert saved_logits()
        found.append(torch.autograd.grad(losses, [t.x, t.weight], upstream))
    assert all(map(torch.equal, *found))


def test_a_mean_of_more_tokens_than_are_added_at_a_time(device, monkeypatch):
    if interpreted := device == "cpu":
        monkeypatch.setattr(loss_kernels, "_SUMMED", triton.language.constexpr(64))
    t = small(device, N=200 if interpreted else 5000, V=16, D=8, dtype="bf16", token_weight=True)
    loss = linear_cross_entropy(t.x, t.weight, t.target, token_weight=t.token_weight, ignore_index=3)
    assert saved_logits()
    z = t.x.detach().double() @ t.weight.detach().double().t()
    weight = t.token_weight.double() * (t.target != 3)
    each = weight * cross_entropy(z, t.target, reduction="none")
    torch.testing.assert_close(loss.double(), each.sum() / weight.sum(), rtol=1e-5, atol=0)


def test_what_the_largest_logit_leaves_is_not_rounded_away(device):
    """1e-6 beside 1, of 12288 entries."""
    logits = torch.full((2, 12289), -23.0, device=device)
    logits[:, 77] = 0.0
    losses = vocab_parallel_cross_entropy(logits, torch.full((2,), 77, device=device))
    truth = torch.tensor(12288.0).double().mul(torch.tensor(-23.0).double().exp()).log1p()
    # Half a rounding of 1, in each of two sums.
    assert ((losses.double() - truth.to(device)).abs() <= 2**-24).all()
