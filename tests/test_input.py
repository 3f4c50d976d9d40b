"""Input that is not refused: what debug mode alone finds gives NaN, and awkward input just works."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel_lce
import reference
from cases import Case, check, make, run
from tools import D, N, V, call, debug_mode, everywhere, good, shrunk
from world import Member

# --- without debug mode ----------------------------------------------------------------------------


def _uncovered(member: Member, shift: int, budget):
    call_ = good(member.device) | dict(
        process_group=member.group,
        vocab_start=10 * member.rank + (shift if member.rank == 1 else 0),
        logits_budget=budget,
    )
    loss = call(call_)
    none = call(call_ | dict(reduction="none"))
    found = call(call_, parallel_lce.token_statistics)
    return bool(loss.isnan()), bool(none.isnan().all()), bool(found.lse.isnan().all())


@pytest.mark.parametrize("shift", [-1, 1, -10, 10])
def test_a_gap_or_an_overlap_gives_nan(shift, worlds, device):
    for budget in (None, 0):
        assert worlds(2).run(_uncovered, shift, budget) == [(True, True, True)] * 2


def _empty_anywhere(member: Member, start: int):
    """Rank 1 of 3 has no rows; where it says they start means nothing."""
    sizes = (10, 0, 10)
    arguments = good(member.device) | dict(process_group=member.group)
    weight = make(Case(N, 20, D, seed=1), member.device).weight
    first = (0, start, 10)[member.rank]
    arguments |= dict(
        linear_weight=weight[first : first + sizes[member.rank]] if sizes[member.rank] else weight[:0],
        vocab_start=first,
    )
    plain = call(arguments)
    with debug_mode():
        checked = call(arguments)
    z = reference.logits(arguments["input"].double(), weight.double())
    return plain.item(), checked.item(), reference.loss(z, arguments["target"]).item()


@pytest.mark.parametrize("start", [0, 7, 10, 20, 1000])
def test_an_empty_shard_may_start_anywhere(start, worlds, device):
    for plain, checked, exact in worlds(3).run(_empty_anywhere, start):
        assert plain == checked
        assert abs(plain - exact) < 1e-6


def _beyond(member: Member):
    """vocab_size says there is more than the shards hold."""
    call_ = good(member.device) | dict(process_group=member.group, vocab_start=10 * member.rank, vocab_size=25)
    return bool(call(call_).isnan())


def test_a_vocab_size_that_nobody_holds_gives_nan(worlds, device):
    assert worlds(2).run(_beyond) == [True] * 2


def _out_of_range(member: Member, budget):
    call_ = good(member.device) | dict(process_group=member.group, logits_budget=budget)
    call_["input"].requires_grad_()
    call_["target"] = torch.tensor([1, 10 * member.ranks, -1, 2**62, -(2**63), 3], device=member.device)
    with shrunk(1, (2, 3)):
        loss = call(call_ | dict(reduction="none"))
        mean = call(call_)
        ignoring = call(call_ | dict(reduction="none", ignore_index=-1))
        (dx,) = torch.autograd.grad(loss, call_["input"], torch.tensor([1.0, 0, 0, 0, 0, 1.0], device=member.device))
    return loss.isnan().tolist(), bool(mean.isnan()), ignoring.isnan().tolist(), dx[[0, 5]].isfinite().all().item()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [None, 0])
def test_a_target_out_of_range_has_loss_nan(ranks, budget, worlds, device):
    for loss, mean, ignoring, finite in everywhere(worlds, device, ranks, _out_of_range, budget):
        assert loss == [False, True, True, True, True, False]
        assert mean
        assert ignoring == [False, True, False, True, True, False]
        assert finite


# --- awkward input that just works -----------------------------------------------------------------

AWKWARD = [
    Case(0, 10, 4),
    Case(0, 10, 4, reduction="none"),
    Case(0, 10, 4, "bf16", reduction="sum", budget=0, bias=True),
    Case(0, 12, 4, ranks=2, bias=True),
    Case(0, 12, 4, ranks=2, sequence_parallel=True, reduction="none"),
    Case(0, 12, 4, "bf16", ranks=2, budget=0, sequence_parallel=True, bias=True),
    Case(1, 10, 4),
    Case(1, 1, 1, "fp64"),
    Case(1, 11, 3, ranks=3, bias=True, ignored="none"),
    Case(3, 11, 3, ranks=3, sequence_parallel=True, ignored="none", reduction="sum"),
    Case(20, 10, 4, ignored="all"),
    Case(20, 10, 4, ranks=2, ignored="all", budget=0, bias=True, label_smoothing=0.1),
    Case(20, 10, 4, ranks=2, ignored="all", reduction="none", sequence_parallel=True),
    Case(20, 37, 5, ranks=2, shards=(37, 0), bias=True),
    Case(20, 37, 5, ranks=3, shards=(0, 0, 37), give_vocab_size=False, reduction="none"),
    Case(20, 37, 5, ranks=2, shards=(0, 37), sequence_parallel=True, budget=0, label_smoothing=0.2),
    Case(20, 2, 5, ranks=4, bias=True),  # two of the shards are padding alone
    Case(21, 131, 7, "bf16", ranks=3, ignored="none", bias=True),
    Case(40, 1025, 9, "fp16", ranks=2, reduction="sum"),
]


@pytest.mark.parametrize("case", AWKWARD, ids=str)
def test_just_works(case, worlds, device):
    check(case, run(case, worlds, device), factor=2.0, device=device)


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)


def _views(device):
    """The same numbers behind other strides and offsets: name -> (input [4, 5, D], weight, bias, target)."""
    base = make(Case(20, 33, 6, bias=True), device)
    x, w, b, y = base.x.view(4, 5, 6), base.weight, base.bias, base.target.view(4, 5)

    def inside(value, *slices):
        big = value.new_full([2 * n + 3 for n in value.shape], torch.nan if value.is_floating_point() else 7)
        view = big[slices]
        view.copy_(value)
        return view

    rows = (slice(2, 2 + 33), slice(1, 7))
    yield "contiguous", (x, w, b, y)
    yield "weight rows in a wider matrix", (x, inside(w, *rows), b, y)
    yield "weight every other row", (x, inside(w, slice(1, 67, 2), slice(0, 6)), b, y)
    yield "weight every other column", (x, inside(w, slice(0, 33), slice(1, 13, 2)), b, y)
    yield "weight transposed", (x, w.t().contiguous().t(), b, y)
    yield "input transposed", (x.transpose(0, 1).contiguous().transpose(0, 1), w, b, y)
    yield "input in a wider one", (inside(x, slice(1, 5), slice(3, 8), slice(2, 8)), w, b, y)
    yield "input every other column", (inside(x, slice(0, 4), slice(0, 5), slice(0, 12, 2)), w, b, y)
    yield "bias every other", (x, w, inside(b, slice(1, 67, 2)), y)
    yield "target transposed", (x, w, b, y.t().contiguous().t())
    yield "target offset", (x, w, b, inside(y, slice(3, 7), slice(1, 6)))
    expanded = x[:1].expand(4, 5, 6)
    yield "input expanded", (expanded, w, b, y)


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_views(budget, reduction, device):
    options = dict(reduction=reduction, logits_budget=budget)
    with shrunk(512, (8, 16)):
        for name, (*tensors, target) in _views(device):
            results = []
            for values in (tensors, [_flat(v) for v in tensors]):
                leaves = [v.detach().requires_grad_() for v in values]
                strides = [v.stride() for v in leaves]
                x, w, b = leaves
                y = target if values is tensors else _flat(target)
                loss = parallel_lce.linear_cross_entropy(x, w, y, linear_bias=b, **options)
                loss.sum().backward()
                assert strides == [v.stride() for v in leaves]
                results.append([loss.detach(), *(v.grad for v in leaves)])
            for found, expected in zip(*results):
                assert not found.isnan().any(), name
                # Strides choose other product kernels.
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_targets_of_any_integer_dtype(dtype, device):
    arguments = good(device)
    arguments["target"][1] = 255 if dtype == torch.uint8 else -100
    ignore = 255 if dtype == torch.uint8 else -100
    expected = call(arguments | dict(ignore_index=ignore))
    found = call(arguments | dict(target=arguments["target"].to(dtype), ignore_index=ignore))
    assert torch.equal(found, expected) and found.isfinite()


def test_uint8_targets_above_127(device):
    arguments = good(device)
    arguments["linear_weight"] = make(Case(N, 300, D), device).weight
    arguments["target"] = torch.tensor([0, 127, 128, 200, 254, 255], device=device)
    assert torch.equal(call(arguments), call(arguments | dict(target=arguments["target"].to(torch.uint8))))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64])
def test_token_weight_of_any_real_dtype(dtype, device):
    arguments = good(device)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], device=device)
    expected = call(arguments | dict(token_weight=mask.float()))
    assert torch.equal(call(arguments | dict(token_weight=mask.to(dtype))), expected)


def test_token_weight_that_learns(device):
    """A weight that needs a gradient gets one, though a mean could otherwise accumulate in forward."""
    arguments = good(device)
    weight = torch.rand(N, device=device, requires_grad=True)
    with shrunk(64):
        loss = call(arguments | dict(token_weight=weight, logits_budget=0))
    (found,) = torch.autograd.grad(loss, weight)
    exact = weight.detach().double().requires_grad_()
    z = reference.logits(arguments["input"].double(), arguments["linear_weight"].double())
    loss = reference.loss(z, arguments["target"], token_weight=exact)
    (expected,) = torch.autograd.grad(loss, exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_negative_and_zero_token_weights(device):
    arguments = good(device)
    arguments["input"].requires_grad_()
    loss = call(arguments | dict(token_weight=torch.zeros(N, device=device)))
    loss.backward()
    assert loss == 0 and torch.count_nonzero(arguments["input"].grad) == 0


def test_sequence_parallel_without_a_group_is_a_no_op(device):
    arguments = good(device)
    assert torch.equal(call(arguments), call(arguments | dict(sequence_parallel=True)))


def _group_of_one(member: Member):
    alone_group = [dist.new_group([r]) for r in range(member.ranks)][member.rank]
    arguments = good(member.device)
    plain = call(arguments)
    found = [call(arguments | dict(process_group=alone_group, sequence_parallel=sp)) for sp in (False, True)]
    return all(torch.equal(plain, f) for f in found)


def test_a_group_of_one_rank_is_no_parallelism(worlds, device):
    assert all(worlds(2).run(_group_of_one))


def test_inputs_are_left_alone(device):
    """Nothing is written to the arguments, the accumulated target views included."""
    arguments = good(device)
    arguments["input"].requires_grad_()
    arguments["linear_weight"].requires_grad_()
    arguments["linear_bias"] = torch.randn(V, device=device, requires_grad=True)
    arguments["token_weight"] = torch.rand(N, device=device)
    arguments["target"][0] = -100
    before = {k: v.detach().clone() for k, v in arguments.items()}
    for options in (dict(), dict(logits_budget=0), dict(logits_budget=0, reduction="none")):
        with shrunk(64, (2, 3)):
            call(arguments | options).sum().backward()
        for name, value in before.items():
            assert torch.equal(arguments[name], value), name
