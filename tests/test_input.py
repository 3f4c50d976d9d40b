"""Input that is not refused: bad ids and shards give NaN, and odd but legal input just works."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives

import parallel_lce
import reference
from cases import Case, make, normal
from parallel_lce.backends import named
from parallel_lce.core import options
from parallel_lce.core.partials import Columns, bounds_of, merge_ranks
from tools import REDUCED, D, N, V, call, debug_mode, everywhere, good, shrunk
from world import Member

# --- without debug mode ----------------------------------------------------------------------------


def _uncovered(member: Member, changed: dict, budget):
    """``changed``: what rank 1 says of its shard, or every rank."""
    call_ = good(member.device) | dict(process_group=member.group, vocab_start=10 * member.rank, logits_budget=budget)
    call_ |= changed if member.rank or "vocab_size" in changed else {}
    found = call(call_ | dict(reduction="none")), call(call_), call(call_, parallel_lce.token_statistics).lse
    return [value.isnan().all().item() for value in found]


@pytest.mark.parametrize(
    "changed", [dict(vocab_start=9), dict(vocab_start=11), dict(vocab_start=0), dict(vocab_size=25)], ids=str
)
def test_a_gap_or_an_overlap_gives_nan(changed, worlds, device):
    for budget in (None, 0):
        assert worlds(2).run(_uncovered, changed, budget) == [[True] * 3] * 2


def _empty_anywhere(member: Member, start: int):
    """Rank 1 of 3 has no rows; where it says they start means nothing."""
    arguments = good(member.device) | dict(process_group=member.group)
    weight = make(Case(N, 20, D, seed=1), member.device).weight
    shard = (slice(0, 10), slice(0, 0), slice(10, 20))[member.rank]
    arguments |= dict(linear_weight=weight[shard], vocab_start=(0, start, 10)[member.rank])
    plain = call(arguments)
    with debug_mode():
        checked = call(arguments)
    z = reference.logits(arguments["input"].double(), weight.double())
    return plain.item(), checked.item(), reference.loss(z, arguments["target"]).item()


@pytest.mark.parametrize("start", [0, 7, 1000])
def test_an_empty_shard_may_start_anywhere(start, worlds, device):
    for plain, checked, exact in worlds(3).run(_empty_anywhere, start):
        assert plain == checked and abs(plain - exact) < 1e-6


def _out_of_range(member: Member, budget):
    call_ = good(member.device) | dict(process_group=member.group, logits_budget=budget)
    call_["input"].requires_grad_()
    call_["target"] = torch.tensor([1, 10 * member.ranks, -1, 2**62, -(2**63), 3], device=member.device)
    with shrunk(1, (2, 3)):
        found = [call(call_ | dict(reduction="none", ignore_index=ignored)) for ignored in (-100, -1)]
        mean = call(call_)
        (dx,) = torch.autograd.grad(found[0].sum(), call_["input"])
    return [v.isnan().tolist() for v in (*found, mean, dx.sum(1))]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [None, 0])
def test_a_target_out_of_range_has_loss_and_gradient_nan(ranks, budget, worlds, device):
    outside = [False, True, True, True, True, False]
    ignoring = [False, True, False, True, True, False]
    for found in everywhere(worlds, device, ranks, _out_of_range, budget):
        assert found == [outside, ignoring, True, outside]


# --- dtypes and weights of tokens -------------------------------------------------------------------


SIGNED = [torch.int8, torch.int16, torch.int32]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
def test_targets_of_any_integer_dtype(dtype, device):
    arguments = good(device) | dict(linear_weight=make(Case(N, 300, D), device).weight)
    most = min(torch.iinfo(dtype).max, 299)
    arguments["target"] = torch.tensor([0, 1, most - 1, most, most // 2, 3], device=device)
    ignored = 3 if dtype in UNSIGNED else -100
    arguments["target"][5] = ignored
    found, want = (
        call(arguments | dict(target=arguments["target"].to(kind), ignore_index=ignored))
        for kind in (dtype, torch.int64)
    )
    assert torch.equal(found, want) and found.isfinite()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64], ids=str)
def test_token_weight_of_any_real_dtype(dtype, device):
    arguments = good(device)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], device=device)
    expected = call(arguments | dict(token_weight=mask.float()))
    assert torch.equal(call(arguments | dict(token_weight=mask.to(dtype))), expected)


def _group_of_one(member: Member):
    alone_group = [dist.new_group([r]) for r in range(member.ranks)][member.rank]
    arguments = good(member.device)
    groups = itertools.product((None, alone_group), (False, True))
    found = [call(arguments | dict(process_group=group, sequence_parallel=sp)) for group, sp in groups]
    return all(torch.equal(found[0], f) for f in found)


def test_one_rank_is_no_parallelism(worlds, device):
    assert all(worlds(2).run(_group_of_one))


def more(device) -> dict:
    """A bias and weights of tokens for the arguments of :func:`tools.good`."""
    return dict(
        linear_bias=normal(V, seed=1).float().to(device), token_weight=normal(N, seed=2).abs().float().to(device)
    )


def test_inputs_are_left_alone(backend, device):
    arguments = good(device) | more(device)
    for name in ("input", "linear_weight", "linear_bias"):
        arguments[name].requires_grad_()
    arguments["target"][0] = -100
    before = {k: v.detach().clone() for k, v in arguments.items()}
    for strategy in REDUCED.values():
        with shrunk(64, (2, 3)):
            call(arguments | strategy).sum().backward()
        for name, value in before.items():
            assert torch.equal(arguments[name], value), name


# --- memory that is not what it looks like ----------------------------------------------------------


def _functional_collectives(member: Member, name: str, grad: bool) -> list[torch.Tensor]:
    """Hidden states, or the whole weight, by a functional all-gather, which nobody has waited for."""
    arguments = good(member.device) | more(member.device)
    # The first of the ranks' parts: the other ranks' are the same.
    part = arguments[name].chunk(member.ranks)[member.rank].clone().requires_grad_(grad)
    gather = collectives.all_gather_tensor_autograd if grad else collectives.all_gather_tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gathered = gather(part, 0, member.group)
    assert grad or isinstance(gathered, collectives.AsyncCollectiveTensor)
    loss = call(arguments | {name: gathered})
    whole = arguments[name].clone().requires_grad_(grad)
    want = call(arguments | {name: whole})
    if not grad:
        return [loss, want]
    loss.backward()
    want.backward()
    return [loss.detach(), want.detach(), part.grad, member.ranks * whole.grad.chunk(member.ranks)[member.rank]]


TENSORS = ("input", "linear_weight", "linear_bias", "token_weight", "target")


@pytest.mark.parametrize(("name", "grad"), [*itertools.product(TENSORS[:4], (False, True)), ("target", False)])
@pytest.mark.thinned
def test_results_of_functional_collectives(name, grad, backend, worlds, device):
    for found in everywhere(worlds, device, 2, _functional_collectives, name, grad):
        for mine, truth in zip(found[::2], found[1::2]):
            torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("name", TENSORS)
def test_negative_views(name, backend, device):
    arguments = good(device) | more(device)
    plain = call(arguments)
    for _ in range(2):  # whether or not the signature is known
        assert torch.equal(call(arguments | {name: torch._neg_view(-arguments[name])}), plain)


# --- no features, no values -------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("shape", [(5, 0), (2, 3, 0), (0,), (0, 0)], ids=str)
def test_no_features(shape, budget, backend, device):
    """Every logit is 0, or the bias."""
    x, weight = (torch.zeros(s, device=device, requires_grad=True) for s in (shape, (7, 0)))
    target = torch.full(shape[:-1], 3, device=device)
    bias = torch.arange(7.0, device=device, requires_grad=True)
    loss = parallel_lce.linear_cross_entropy(x, weight, target, reduction="none", logits_budget=budget)
    assert loss.shape == shape[:-1] and torch.allclose(loss, torch.full_like(loss, math.log(7)))
    loss = parallel_lce.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="sum", logits_budget=budget)
    loss.backward()
    assert x.grad.shape == shape and weight.grad.shape == (7, 0)
    expected = target.numel() * (torch.softmax(bias.detach(), 0) - (torch.arange(7, device=device) == 3).float())
    torch.testing.assert_close(bias.grad, expected)


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [*REDUCED.values(), dict(logits_budget=4000, reduction="none", label_smoothing=0.1)], ids=str
)
@pytest.mark.thinned
def test_tensors_without_values_give_shapes(options, dtype, kind, device):
    """The shapes, dtypes and devices of results and gradients are those of a call with values."""

    def results(device) -> list[torch.Tensor]:
        shapes = (8, 3, 16), (150, 16), (150,)
        x, weight, bias = leaves = [torch.empty(s, dtype=dtype, device=device, requires_grad=True) for s in shapes]
        target = torch.zeros(8, 3, dtype=torch.int64, device=device)
        loss = parallel_lce.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)
        columns = dict(mean_logit=True, expected_logit=True, argmax=True, sum_p_squared=True)
        found = parallel_lce.token_statistics(x, weight, target, selected=target.unsqueeze(-1), top_k=2, **columns)
        total = found.entropy.sum() + found.selected_log_prob.sum()
        gradients = *torch.autograd.grad(loss.sum(), leaves), *torch.autograd.grad(total, leaves[:2])
        with torch.no_grad():
            evaluated = parallel_lce.linear_cross_entropy(x, weight, target, reduction="none")
        logits = parallel_lce.vocab_parallel_cross_entropy(weight.t(), target[:, 0].repeat(2))
        return [loss, *gradients, *vars(found).values(), evaluated, logits]

    with shrunk(4096, (16, 32)):
        real = results(device)
        if kind == "meta":
            found = results("meta")
        else:
            with FakeTensorMode():
                found = results(device)
    for one, other in zip(found, real, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.device.type == ("meta" if kind == "meta" else other.device.type)


# --- vocabularies beyond fp32's integers ------------------------------------------------------------

LARGE = 2**24 + 3


def _of_a_large_vocabulary(member: Member, dtype: torch.dtype) -> list[torch.Tensor]:
    """Uneven shards of ids that fp32 cannot tell apart."""
    device = member.device
    first = 2**24 - 5 if member.ranks > 1 else LARGE
    start, stop = ((0, first), (first, LARGE))[member.rank]
    weight = (torch.arange(LARGE, device=device)[:, None] % 7 - 3)[start:stop].to(dtype)
    x = torch.tensor([[0.5], [1.0], [-1.0], [2.0], [0.25]], dtype=dtype, device=device)
    target = torch.tensor([LARGE - 1, LARGE - 2, 2**24, 2**24 - 1, LARGE], device=device)
    options = dict(process_group=member.group, vocab_start=start) if member.ranks > 1 else {}
    loss = parallel_lce.linear_cross_entropy(x, weight, target, reduction="none", **options)
    found = parallel_lce.token_statistics(x, weight, target, argmax=True, mean_logit=True, **options)
    return [v.cpu() for v in (loss, found.target_logit, found.vocab_size, found.argmax, found.mean_logit)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_vocabulary_beyond_2_to_the_24(ranks, dtype, worlds, device):
    z = (torch.arange(LARGE) % 7 - 3).double() * torch.tensor([[0.5], [1.0], [-1.0], [2.0], [0.25]])
    target = torch.tensor([LARGE - 1, LARGE - 2, 2**24, 2**24 - 1])
    expected = -torch.log_softmax(z[:4], -1).gather(1, target[:, None])[:, 0]
    for loss, target_logit, vocab_size, argmax, mean in everywhere(
        worlds, device, ranks, _of_a_large_vocabulary, dtype
    ):
        torch.testing.assert_close(loss[:4].double(), expected, rtol=1e-5, atol=1e-5)
        assert loss[4].isnan() and target_logit[4] == 0
        torch.testing.assert_close(target_logit[:4].double(), z[:4].gather(1, target[:, None])[:, 0])
        assert vocab_size == LARGE and vocab_size.dtype == torch.int64
        assert torch.equal(argmax, z.argmax(1))
        torch.testing.assert_close(mean.double(), z.mean(1), rtol=1e-3, atol=1e-5)


def test_backends_tell_ids_beyond_2_to_the_24_apart(backend, device):
    """Losses and merged shards of made-up partials: the interpreter would project for hours."""
    module = named(backend)
    target = torch.tensor([LARGE - 1, LARGE, 2**24], device=device)
    partial = torch.tensor([[1.0] * 3, [2.0] * 3, [0.5] * 3, [-4.0] * 3], device=device)
    smoothed = options.Options("", label_smoothing=0.1)
    losses, _, _, gamma = module.token_losses(partial, torch.tensor(LARGE, device=device), target, None, smoothed)
    assert losses.isnan().tolist() == [False, True, False]
    assert torch.allclose(gamma[::2], torch.full_like(gamma[::2], 0.1 / LARGE), rtol=1e-6)
    messages = torch.zeros(2, 3 * 3 + 2, device=device)
    bounds_of(messages, Columns(), 3).copy_(torch.tensor([[0, 2**24], [2**24, 3]]))
    for merge in (module.merge_ranks, merge_ranks):
        for vocab in (None, LARGE - 1):
            _, total = merge(messages, Columns(), 3, vocab)
            assert total.dtype == torch.int64 and total == (vocab or LARGE)
