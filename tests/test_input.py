"""Bad input is refused with both sizes named; awkward input just works."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import parallel_lce
from blocks import counted_forwards
from cases import Case, check, make, run
from parallel_lce.backends import backend_of
from parallel_lce.checks import Arguments, LossOptions
from parallel_lce.fused_loss import fused_loss
from parallel_lce.grad_buffers import MainGrad
from tools import D, N, V, call, debug_mode, everywhere, good, recorded, shrunk
from world import Member


class _FakeDTensor(torch.Tensor):
    def to_local(self):
        return self


def _dtensor():
    return torch.zeros(V, D).as_subclass(_FakeDTensor)


# What is changed, and what the message must say.
BAD = {
    "input no tensor": (dict(input=[1.0]), "input must be a tensor, got list"),
    "input of no dimension": (dict(input=torch.tensor(1.0)), r"input must be \[..., D\], got \[\]"),
    "input of integers": (
        dict(input=torch.zeros(N, D, dtype=torch.int64)),
        "input must be bfloat16, float16, float32 or float64, got torch.int64",
    ),
    "input features": (dict(input=torch.zeros(N, 5)), r"input has 5 features and linear_weight \[10, 4\] has 4"),
    "weight no tensor": (dict(linear_weight=None), "linear_weight must be a tensor, got NoneType"),
    "weight of one dimension": (
        dict(linear_weight=torch.zeros(D)),
        r"linear_weight must be \[V, D\] with two dimensions, got \[4\]",
    ),
    "weight of three dimensions": (
        dict(linear_weight=torch.zeros(V, 1, D)),
        r"linear_weight must be .* got \[10, 1, 4\]",
    ),
    "weight dtype": (
        dict(linear_weight=torch.zeros(V, D, dtype=torch.bfloat16)),
        "linear_weight is torch.bfloat16 and input is torch.float32",
    ),
    "weight device": (
        dict(linear_weight=torch.zeros(V, D, device="meta")),
        "linear_weight is on meta and input is on cpu",
    ),
    "weight is a DTensor": (
        dict(linear_weight=_dtensor()),
        r"linear_weight is a DTensor; pass linear_weight.to_local\(\)",
    ),
    "target no tensor": (dict(target=[1, 2]), "target must be a tensor.*, got list"),
    "target None": (dict(target=None), "target must be a tensor.*, got NoneType"),
    "target length": (
        dict(target=torch.zeros(7, dtype=torch.int64)),
        r"target must have shape \[6\] for input \[6, 4\], got \[7\]",
    ),
    "target rank": (
        dict(target=torch.zeros(N, 1, dtype=torch.int64)),
        r"target must have shape \[6\] for input \[6, 4\], got \[6, 1\]",
    ),
    "target of probabilities": (
        dict(target=torch.zeros(N, V)),
        r"target must have shape \[6\].*got \[6, 10\]|integer dtype, got torch.float32",
    ),
    "target of floats": (
        dict(target=torch.zeros(N)),
        "target must hold class indices of an integer dtype, got torch.float32 .*probabilities are not supported",
    ),
    "target of booleans": (
        dict(target=torch.zeros(N, dtype=torch.bool)),
        "target must hold class indices .* got torch.bool",
    ),
    "target device": (
        dict(target=torch.zeros(N, dtype=torch.int64, device="meta")),
        "target is on meta and input is on cpu",
    ),
    "bias length": (
        dict(linear_bias=torch.zeros(9)),
        r"linear_bias must have shape \[10\].* linear_weight \[10, 4\], got \[9\]",
    ),
    "bias rank": (dict(linear_bias=torch.zeros(V, 1)), r"linear_bias must have shape \[10\].* got \[10, 1\]"),
    "bias dtype": (
        dict(linear_bias=torch.zeros(V, dtype=torch.float64)),
        "linear_bias is torch.float64 and input is torch.float32",
    ),
    "bias no tensor": (dict(linear_bias=0.0), "linear_bias must be a tensor or None, got float"),
    "bias device": (dict(linear_bias=torch.zeros(V, device="meta")), "linear_bias is on meta and input is on cpu"),
    "token_weight length": (
        dict(token_weight=torch.zeros(5)),
        r"token_weight must have target's shape \[6\], got \[5\]",
    ),
    "token_weight no tensor": (dict(token_weight=[1.0] * N), "token_weight must be a tensor or None, got list"),
    "token_weight complex": (
        dict(token_weight=torch.zeros(N, dtype=torch.complex64)),
        "token_weight must be real, got torch.complex64",
    ),
    "token_weight device": (
        dict(token_weight=torch.zeros(N, device="meta")),
        "token_weight is on meta and input is on cpu",
    ),
    "reduction": (dict(reduction="average"), "reduction must be 'none', 'mean' or 'sum', got 'average'"),
    "reduction None": (dict(reduction=None), "reduction must be .* got None"),
    "input is sparse": (
        dict(input=torch.zeros(N, D).to_sparse()),
        "input must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    "weight of no rows": (
        dict(linear_weight=torch.zeros(0, D)),
        r"linear_weight \[0, 4\] has no rows: the vocabulary is empty",
    ),
    "ignore_index of 70 bits": (
        dict(ignore_index=2**70),
        "ignore_index must be an integer of 64 bits or None, got 1180591620717411303424",
    ),
    "ignore_index a bool": (dict(ignore_index=True), "ignore_index must be an integer of 64 bits or None, got True"),
    "scale of 400 digits": (
        dict(logit_scale=10**400),
        r"logit_scale must be a finite Python number, got 1000.*\(401 characters\)",
    ),
    "scale beyond fp32": (dict(logit_scale=1e39), "logit_scale must be a finite Python number, got 1e.39"),
    "softcap that fp32 cannot hold": (
        dict(logit_softcap=1e-60),
        "logit_softcap must be None or a positive Python number, got 1e-60",
    ),
    "softcap beyond fp32": (
        dict(logit_softcap=1e300),
        "logit_softcap must be None or a positive Python number, got 1e.300",
    ),
    "z_loss beyond fp32": (
        dict(z_loss=-(10**400)),
        r"z_loss must be a finite Python number, got -1000.*\(402 characters\)",
    ),
    "start beyond 32 bits": (
        dict(vocab_start=2**31),
        "vocab_start must be None or an id >= 0 and < 2.31, got 2147483648",
    ),
    "vocab_size beyond 32 bits": (
        dict(vocab_size=2**31),
        "vocab_size must be None or a number of entries >= 1 and < 2.31, got 2147483648",
    ),
    "ignore_index float": (dict(ignore_index=0.5), "ignore_index must be an integer of 64 bits or None, got 0.5"),
    "smoothing too large": (dict(label_smoothing=1.5), r"label_smoothing must be a Python number in \[0, 1\], got 1.5"),
    "smoothing negative": (dict(label_smoothing=-0.1), r"label_smoothing must be .* got -0.1"),
    "smoothing NaN": (dict(label_smoothing=float("nan")), "label_smoothing must be .* got nan"),
    "z_loss infinite": (dict(z_loss=float("inf")), "z_loss must be a finite Python number, got inf"),
    "z_loss a tensor": (dict(z_loss=torch.tensor(1.0)), r"z_loss must be a finite Python number, got tensor\(1.\)"),
    "scale NaN": (dict(logit_scale=float("nan")), "logit_scale must be a finite Python number, got nan"),
    "scale a tensor": (dict(logit_scale=torch.ones(())), "logit_scale must be a finite Python number, got tensor"),
    "softcap zero": (dict(logit_softcap=0.0), "logit_softcap must be None or a positive Python number, got 0.0"),
    "softcap negative": (dict(logit_softcap=-3.0), "logit_softcap must be .* got -3.0"),
    "softcap infinite": (dict(logit_softcap=float("inf")), "logit_softcap must be .* got inf"),
    "budget negative": (dict(logits_budget=-1), "logits_budget must be None or a number of bytes >= 0, got -1"),
    "budget float": (dict(logits_budget=1e9), "logits_budget must be .* got 1000000000.0"),
    "start negative": (dict(vocab_start=-1), "vocab_start must be None or an id >= 0 and < 2.31, got -1"),
    "start without a group": (dict(vocab_start=3), r"vocab_start=3 without a process group .* \[0, 3\)"),
    "vocab_size zero": (dict(vocab_size=0), "vocab_size must be None or a number of entries >= 1 and < 2.31, got 0"),
    "vocab_size beyond the rows": (dict(vocab_size=11), "vocab_size=11 exceeds the 10 rows of linear_weight on 1 rank"),
    "vocab_size beyond the rows from 0": (dict(vocab_size=11, vocab_start=0), "vocab_size=11 exceeds the 10 rows"),
    "no process group": (
        dict(process_group="tp"),
        "process_group must be a torch.distributed.ProcessGroup or None, got str",
    ),
    "sequence_parallel a text": (dict(sequence_parallel="no"), "sequence_parallel must be True or False, got 'no'"),
    "sequence_parallel None": (dict(sequence_parallel=None), "sequence_parallel must be True or False, got None"),
    "sequence_parallel a tensor": (
        dict(sequence_parallel=torch.tensor(False)),
        r"sequence_parallel must be True or False, got tensor\(False\)",
    ),
    "sequence_parallel a number of ranks": (
        dict(sequence_parallel=2),
        "sequence_parallel must be True or False, got 2",
    ),
    "sequence_parallel a float": (dict(sequence_parallel=1.0), "sequence_parallel must be True or False, got 1.0"),
    "weight of PyTorch's function": (dict(weight=torch.ones(V)), "weight=.* is not supported: use token_weight"),
    "options of PyTorch's function": (dict(options=object()), "options=.* is not supported: .*logits_budget"),
}
_LOSS_ONLY = {"reduction", "ignore_index", "label_smoothing", "z_loss", "token_weight", "weight", "options"}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(good() | changes)
    shared = not _LOSS_ONLY & set(changes) and changes.get("target", 0) is not None
    if shared:
        with pytest.raises(ValueError, match=message):
            call(good() | changes, parallel_lce.token_statistics)


def test_a_typo_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'label_smothing'"):
        call(good() | dict(label_smothing=0.1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'reduction'"):
        call(good() | dict(reduction="mean"), parallel_lce.token_statistics)


def _refused_over_ranks(member: Member):
    """Arguments that are wrong on every rank; nobody reaches a collective."""
    device = member.device
    group = dict(process_group=member.group)
    cases = {
        "sequence parallel target": (
            dict(sequence_parallel=True),
            rf"target must have shape \[{N * member.ranks}\] for input \[6, 4\] of each of "
            rf"{member.ranks} sequence-parallel ranks, got \[6\]",
        ),
        "sequence parallel token_weight": (
            dict(
                sequence_parallel=True,
                target=torch.zeros(N * member.ranks, dtype=torch.int64, device=device),
                token_weight=torch.zeros(N, device=device),
            ),
            rf"token_weight must have target's shape \[{N * member.ranks}\], got \[6\]",
        ),
        "sequence_parallel": (dict(sequence_parallel="no"), "sequence_parallel must be True or False, got 'no'"),
        "vocab_size": (
            dict(vocab_size=10 * member.ranks + 1),
            rf"vocab_size={10 * member.ranks + 1} exceeds the {10 * member.ranks} rows .* {member.ranks} rank",
        ),
        "sequence parallel scalar": (
            dict(sequence_parallel=True, input=torch.zeros(D, device=device), target=torch.tensor(0, device=device)),
            r"sequence_parallel.*\[4\]|input.*\[4\]",
        ),
    }
    found = {}
    for name, (changes, message) in cases.items():
        try:
            call(good(device) | group | changes)
            found[name] = "not refused"
        except ValueError as refusal:
            said = str(refusal)
            good_message = re.search(message, said) and "PARALLEL_LCE_DEBUG=1" in said
            found[name] = "" if good_message else said
        except Exception as other:
            found[name] = f"{type(other).__name__}: {other}"
    # Not a member: a group of rank 0 alone.
    subgroup = dist.new_group([0])
    if member.rank == 1:
        try:
            call(good(device) | dict(process_group=subgroup))
            found["not a member"] = "not refused"
        except ValueError as refusal:
            found["not a member"] = "" if re.search("process_group", str(refusal)) else str(refusal)
        except Exception as other:
            found["not a member"] = f"{type(other).__name__}: {other}"
    return found


def test_refused_over_ranks(worlds, device):
    for rank, found in enumerate(worlds(2).run(_refused_over_ranks)):
        wrong = {name: said for name, said in found.items() if said}
        assert not wrong, f"rank {rank}: {wrong}"


def _main_grad_of_another_shape(member: Member, shape: tuple[int, ...]):
    """What is said, and what has been started by then."""
    given = good(member.device)
    given["linear_weight"].requires_grad_()
    options = dict.fromkeys(("linear_bias", "logit_softcap", "vocab_start", "vocab_size", "logits_budget"))
    layout = dict(process_group=member.group, sequence_parallel=False, logit_scale=1.0)
    main_grad = MainGrad(torch.zeros(shape, device=member.device), lambda: None)
    said = ""
    with recorded(member.group) as events, counted_forwards(backend_of(given["linear_weight"])) as blocks:
        try:
            fused_loss(Arguments(**given, **options, **layout), LossOptions(), main_grad=main_grad)
        except ValueError as refusal:
            said = str(refusal)
    return said, events, blocks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", [(V, D + 1), (V + 1, D), (D, V), (V * D,)], ids=str)
def test_a_main_grad_of_another_shape_is_refused(shape, ranks, worlds, device):
    """Of the weight that it is the gradient of: before any kernel and any collective."""
    message = f"main_grad must have linear_weight's shape {[V, D]}, got {[*shape]}"
    for said, events, blocks in everywhere(worlds, device, ranks, _main_grad_of_another_shape, shape):
        assert said.startswith(message)
        assert events == [] and blocks == []


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
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(20, D, generator=generator).to(member.device)
    first = (0, start, 10)[member.rank]
    arguments |= dict(
        linear_weight=weight[first : first + sizes[member.rank]] if sizes[member.rank] else weight[:0],
        vocab_start=first,
    )
    plain = call(arguments)
    with debug_mode():
        checked = call(arguments)
    exact = torch.nn.functional.cross_entropy(arguments["input"].double() @ weight.double().t(), arguments["target"])
    return plain.item(), checked.item(), exact.item()


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
    arguments["linear_weight"] = torch.randn(300, D, device=device)
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
    z = arguments["input"].double() @ arguments["linear_weight"].double().t()
    per_token = torch.nn.functional.cross_entropy(z, arguments["target"], reduction="none")
    (expected,) = torch.autograd.grad((per_token * exact).sum() / exact.sum(), exact)
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
