"""Input that is not refused: bad ids and shards give NaN, and odd but legal input just works. So do numbers of other
libraries, and copies and pickles of the module."""

from __future__ import annotations

import copy
import fractions
import io
import itertools
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives

import parallel_lce
import reference
from cases import Case, make, normal
from on_ranks import on_ranks
from parallel_lce.backends import named
from parallel_lce.core import options
from parallel_lce.core.partials import Columns, bounds_of, merge_ranks
from tools import REDUCED, D, N, V, call, debug_mode, everywhere, good, shrunk
from world import Member

# --- ids and shards --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed", [dict(vocab_start=9), dict(vocab_start=11), dict(vocab_start=0), dict(vocab_size=25)], ids=str
)
@on_ranks(2)
def test_a_gap_or_an_overlap_gives_nan(member, changed):
    """``changed``: what rank 1 says of its shard, or every rank."""
    for budget in (None, 0):
        call_ = good(member.device) | dict(process_group=member.group, vocab_start=V * member.rank)
        call_ |= dict(logits_budget=budget) | (changed if member.rank or "vocab_size" in changed else {})
        for found in call(call_ | dict(reduction="none")), call(call_), call(call_, parallel_lce.token_statistics).lse:
            assert found.isnan().all()


@pytest.mark.parametrize("start", [0, 7, 1000])
@on_ranks(3)
def test_an_empty_shard_may_start_anywhere(member, start):
    """Rank 1 of 3 has no rows; where it says they start means nothing."""
    arguments = good(member.device) | dict(process_group=member.group)
    weight = make(Case(N, 20, D, seed=1), member.device).weight
    shard = (slice(0, 10), slice(0, 0), slice(10, 20))[member.rank]
    arguments |= dict(linear_weight=weight[shard], vocab_start=(0, start, 10)[member.rank])
    plain = call(arguments)
    with debug_mode():
        assert torch.equal(call(arguments), plain)
    exact = reference.loss(reference.logits(arguments["input"].double(), weight.double()), arguments["target"])
    assert abs(plain.item() - exact.item()) < 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [None, 0])
@on_ranks()
def test_a_target_out_of_range_has_loss_and_gradient_nan(member, budget):
    call_ = good(member.device) | dict(process_group=member.group, logits_budget=budget)
    call_["input"].requires_grad_()
    call_["target"] = torch.tensor([1, V * member.ranks, -1, 2**62, -(2**63), 3], device=member.device)
    with shrunk(1, (2, 3)):
        found = [call(call_ | dict(reduction="none", ignore_index=ignored)) for ignored in (-100, -1)]
        assert call(call_).isnan()
        (dx,) = torch.autograd.grad(found[0].sum(), call_["input"])
    outside, ignoring = [False, True, True, True, True, False], [False, True, False, True, True, False]
    assert [v.isnan().tolist() for v in (*found, dx.sum(1))] == [outside, ignoring, outside]


@pytest.mark.parametrize("bits", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_targets_of_any_integer_dtype(bits, device):
    """Of one that cannot hold V, too; in debug mode, too."""
    dtype, entries = getattr(torch, bits), 40000 if bits == "int16" else 300
    arguments = good(device) | dict(linear_weight=make(Case(N, entries, D), device).weight)
    most, ignored = min(torch.iinfo(dtype).max, entries - 1), 3 if bits.startswith("u") else -100
    target = torch.tensor([0, 1, most - 1, most, most // 2, ignored], device=device)
    arguments |= dict(target=target, ignore_index=ignored)
    want = call(arguments)
    assert torch.equal(call(arguments | dict(target=target.to(dtype))), want) and want.isfinite()
    with debug_mode():
        assert torch.equal(call(arguments | dict(target=target.to(dtype))), want)
    # In the narrow dtype 2^40 is a target.
    learned = dict(token_weight=torch.ones(N, device=device, requires_grad=True), ignore_index=2**40)
    counted = arguments | dict(target=target.clamp(min=0)) | learned
    assert torch.equal(call(counted | dict(target=counted["target"].to(dtype))), call(counted))


# --- memory that is not what it looks like ----------------------------------------------------------


def more(device) -> dict:
    """The arguments of :func:`tools.good` with a bias and weights of tokens."""
    bias, weights = normal(V, seed=1).float(), normal(N, seed=2).abs().float()
    return good(device) | dict(linear_bias=bias.to(device), token_weight=weights.to(device))


def test_inputs_are_left_alone(backend, device):
    arguments = more(device)
    for name in ("input", "linear_weight", "linear_bias"):
        arguments[name].requires_grad_()
    arguments["target"][0] = -100
    before = {k: v.detach().clone() for k, v in arguments.items()}
    for strategy in REDUCED.values():
        with shrunk(64, (2, 3)):
            call(arguments | strategy).sum().backward()
        for name, value in before.items():
            assert torch.equal(arguments[name], value), name


def _functional_collectives(member: Member, name: str, grad: bool) -> None:
    """Hidden states, or the whole weight, by a functional all-gather, which nobody has waited for."""
    arguments = more(member.device)
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
    torch.testing.assert_close(loss, want)
    if grad:
        loss.backward()
        want.backward()
        torch.testing.assert_close(part.grad, member.ranks * whole.grad.chunk(member.ranks)[member.rank])


TENSORS = ("input", "linear_weight", "linear_bias", "token_weight", "target")


@pytest.mark.parametrize(("name", "grad"), [*itertools.product(TENSORS[:4], (False, True)), ("target", False)])
@pytest.mark.thinned
def test_results_of_functional_collectives(name, grad, backend, worlds, device):
    everywhere(worlds, device, 2, _functional_collectives, name, grad)


@pytest.mark.parametrize("name", TENSORS)
def test_negative_views(name, backend, device):
    arguments = more(device)
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_a_vocabulary_beyond_2_to_the_24(member, dtype):
    """Uneven shards of ids that fp32 cannot tell apart."""
    first = 2**24 - 5 if member.ranks > 1 else LARGE
    start, stop = ((0, first), (first, LARGE))[member.rank]
    whole = torch.arange(LARGE, device=member.device) % 7 - 3
    x = torch.tensor([[0.5], [1.0], [-1.0], [2.0], [0.25]], dtype=dtype, device=member.device)
    target = torch.tensor([LARGE - 1, LARGE - 2, 2**24, 2**24 - 1, LARGE], device=member.device)
    given = x, whole[start:stop, None].to(dtype), target
    options = dict(process_group=member.group, vocab_start=start) if member.ranks > 1 else {}
    loss = parallel_lce.linear_cross_entropy(*given, reduction="none", **options)
    found = parallel_lce.token_statistics(*given, argmax=True, mean_logit=True, **options)
    z = whole.double() * x.double()
    expected = -torch.log_softmax(z[:4], -1).gather(1, target[:4, None])[:, 0]
    torch.testing.assert_close(loss[:4].double(), expected, rtol=1e-5, atol=1e-5)
    assert loss[4].isnan() and found.target_logit[4] == 0
    torch.testing.assert_close(found.target_logit[:4].double(), z[:4].gather(1, target[:4, None])[:, 0])
    assert found.vocab_size == LARGE and found.vocab_size.dtype == torch.int64
    assert torch.equal(found.argmax, z.argmax(1))
    torch.testing.assert_close(found.mean_logit.double(), z.mean(1), rtol=1e-3, atol=1e-5)


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
    bounds_of(messages).copy_(torch.tensor([[0, 2**24], [2**24, 3]]))
    for merge in (module.merge_ranks, merge_ranks):
        for vocab in (None, LARGE - 1):
            _, total = merge(messages, Columns(), 3, vocab)
            assert total.dtype == torch.int64 and total == (vocab or LARGE)


# --- numbers of other libraries; copies and pickles -------------------------------------------------

NUMBERS = [
    ("ignore_index", np.int64(3), 3),
    ("label_smoothing", np.float32(0.125), 0.125),
    ("z_loss", fractions.Fraction(1, 8), 0.125),
    ("logit_scale", np.float16(0.5), 0.5),
    ("logit_softcap", np.float64(5.0), 5.0),
    ("temperature", np.int32(2), 2.0),
    ("reduce_hidden_grad", np.bool_(False), False),
    ("logits_budget", np.int32(0), 0),
    ("vocab_size", np.uint8(9), 9),
    ("vocab_start", np.int16(0), 0),
    # Of more digits than a number of 64 bits.
    *((name, 10**20, 1e20) for name in ("z_loss", "logit_scale", "logit_softcap", "temperature")),
]


@pytest.mark.parametrize(("name", "theirs", "plain"), NUMBERS)
def test_numbers_of_other_libraries(name, theirs, plain, backend, device):
    arguments = good(device)
    arguments["target"] %= 9
    arguments["linear_weight"] *= 1e-20
    want = call(arguments | {name: plain})
    for number in [theirs, *[np.float64(plain)] * isinstance(plain, float)]:  # one that compares to no bool
        assert torch.equal(call(arguments | {name: number}), want)
        module = parallel_lce.LinearCrossEntropy(**{name: number})
        assert torch.equal(module(*arguments.values()), want)
        # Triton's kernels have a case for numbers of Python alone, and torch.compile makes tensors of NumPy's.
        assert type(module.options[name]) in (int, float, bool)


@on_ranks(2)
def test_truth_values_of_other_libraries(member):
    same = good(member.device) | dict(process_group=member.group)
    split = same | dict(target=same["target"].repeat(member.ranks))
    for arguments, values in (
        (split, (True, np.bool_(True), 1, np.int8(1))),
        (same, (False, np.bool_(False), 0, np.uint8(0))),
    ):
        first, *others = [call(arguments | dict(sequence_parallel=value)) for value in values]
        assert all(torch.equal(other, first) for other in others)


@on_ranks(2)
def test_a_module_with_a_group_can_be_copied_and_pickled(member):
    positional = good(member.device).values()
    module = torch.nn.Sequential(parallel_lce.LinearCrossEntropy(process_group=member.group, z_loss=0.1))[0]
    want = module(*positional)
    duplicate = copy.deepcopy(torch.nn.ModuleList([module, module]))
    assert duplicate[0] is duplicate[1] and duplicate[0] is not module
    shallow = copy.copy(module)
    assert duplicate[0].options is not module.options and shallow.options is module.options
    for other in (duplicate[0], shallow):
        assert other is not module and other.process_group is member.group and torch.equal(other(*positional), want)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for restored in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        again = pickle.loads(pickle.dumps(copy.deepcopy(restored)))
        for lost in (restored, again):
            with pytest.raises(ValueError, match=rf"pickled with a process_group of {member.ranks} rank"):
                lost(*positional)
            lost.process_group = member.group
            assert torch.equal(lost(*positional), want)
    with pytest.raises(ValueError, match="process_group must be a torch.distributed.ProcessGroup"):
        module.process_group = "tp"


def test_a_module_without_a_group(device):
    """It is pickled whole, owns no parameters, and shows its options."""
    positional = good(device).values()
    module = parallel_lce.LinearCrossEntropy(label_smoothing=0.1, reduce_dtype=torch.float32)
    restored = pickle.loads(pickle.dumps(module))
    assert torch.equal(restored(*positional), module(*positional))
    assert not list(module.parameters())
    assert "label_smoothing=0.1" in repr(module) and "reduce_dtype=torch.float32" in repr(module)
