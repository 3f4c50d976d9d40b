"""Divergences of a student's softmax from a teacher's: of stored log-probabilities, beside float64 on all logits; and
what the fuzz, which has all configurations of two output layers, cannot draw."""

import math
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.peak_memory import peak_memory
from cases import DTYPES, Case, Tensors, assemble, make, normal, operands, unpadded
from measures import assert_no_worse, size
from parallel_lce.backends import torch_logits
from parallel_lce.call import prepare
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.distillation import blocks as schedule
from parallel_lce.distillation import divergence, top_k_divergence
from tools import chosen_backend, debug_mode, everywhere, on_ranks, shrunk, started
from world import Member

N, V, D, E, K = 12, 80, 24, 16, 6
TEMPERATURE = 2
TAILS = "class", "renormalize"
KINDS = "layer", *TAILS
"""Of a teacher: its output layer, or stored log-probabilities with either tail."""


@dataclass(frozen=True)
class Call(Case):
    """Of stored log-probabilities. ``backend``: as the environment's variable."""

    bias: bool = True
    sharpness: float = 2.5
    tail: str = "class"
    beta: float = 0.0
    backend: str = "torch"


@contextmanager
def many_blocks():
    with mock.patch.object(schedule, "_FEWEST_TOKENS", 1), shrunk(3000):
        yield


@pytest.fixture(autouse=True)
def _many_blocks():
    with many_blocks():
        yield


def student(device="cpu", dtype="fp32"):
    """Leaves ``x [N, D]``, ``w [V, D]`` and ``b [V]``."""
    t = make(Call(N, V, D, dtype), device)
    return [v.requires_grad_() for v in (t.x, t.weight, t.bias)]


def teacher(kind, device="cpu", dtype="fp32"):
    """Its arguments."""
    t = make(Call(N, V, E, dtype, seed=1), device)
    if kind == "layer":
        return dict(teacher_hidden=t.x, teacher_weight=t.weight, teacher_bias=t.bias)
    z = torch.nn.functional.linear(t.x.double(), t.weight.double(), t.bias.double())
    log_probs, ids = (2 * z).log_softmax(-1).topk(K, -1)
    ids[1, 4:] = ids[5] = -1  # fewer entries, and none
    ids[4, 1], ids[7, 0] = V, V + 9  # beyond the vocabulary
    log_probs[2, 5] = -torch.inf
    return dict(teacher_ids=ids.int(), teacher_log_probs=log_probs.to(accumulation_dtype(DTYPES[dtype])))


def loss(kind, leaves, given, **options):
    x, w, *b = leaves
    student = dict(student_hidden=x, student_weight=w, student_bias=b[0] if b else None)
    if kind == "layer":
        return divergence(**student, **given, **options)
    return top_k_divergence(**student, **given, tail=kind, **options)


# --- stored log-probabilities ----------------------------------------------------------------------


def tensors(call: Call, device="cpu") -> Tensors:
    """Some entries of the student are excluded, unless the divergence were infinite then."""
    t = make(call, device)
    if call.beta > 0:
        t.bias[::3] = -torch.inf
    return t


def of_classes(log_p, log_q, beta):
    """The divergence of each row of log-probabilities."""
    p, q = log_p.exp(), log_q.exp()
    if beta in (0, 1):
        return (q * (log_q - log_p)).sum(-1) if beta == 0 else (p * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


def classes(log_p, ids, log_q, tail):
    """``[N, K]`` or, with the tail, ``[N, K + 1]`` log-probabilities of student and teacher; -1e4 for none, instead of
    -inf, whose gradients are NaN."""
    there = (ids >= 0) & (ids < V) & (log_q != -torch.inf)
    ids = ids.long().where(there, V)
    log_p = torch.nn.functional.pad(log_p, (0, 1), value=-torch.inf)  # an entry that there is not
    found = [log_p.gather(1, ids), log_q.to(log_p.dtype).masked_fill(~there, -torch.inf)]
    if tail == "class":
        others = log_p.exp().scatter(1, ids, 0.0).sum(1, keepdim=True).log()
        of_teacher = (1 - found[1].exp().sum(1, keepdim=True)).log()
        found = [torch.cat(pair, 1) for pair in zip(found, (others, of_teacher))]
    return [v.masked_fill(v == -torch.inf, -1e4).log_softmax(1) for v in found]


def dense(call: Call, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of operands that are rounded to the call's dtype, computed in ``dtype``."""
    t, wide = tensors(call), accumulation_dtype(dtype)
    leaves = [v.to(dtype).requires_grad_() for v in (t.x, t.weight, t.bias)]
    z = torch.nn.functional.linear(*leaves).to(wide) / TEMPERATURE
    stored = teacher(call.tail, dtype=call.dtype)
    counted = t.target != -100
    found = of_classes(*classes(z.log_softmax(-1), *stored.values(), call.tail), call.beta) * counted
    if call.reduction != "none":
        found = found.sum() / (counted.sum().clamp(min=1) if call.reduction == "mean" else 1)
    gradients = torch.autograd.grad(found, leaves, t.upstream.to(wide))
    return dict(zip(("loss", "dx", "dweight", "dbias"), (found.detach(), *gradients)))


def ours(member: Member, call: Call) -> dict[str, torch.Tensor]:
    """On one rank, of tokens ``[N / 2, 2]``. The teacher of ignored tokens may say anything."""
    folded = lambda v: v.view(-1, 2, *v.shape[1:])  # noqa: E731
    t, given = tensors(call, member.device), teacher(call.tail, member.device, call.dtype)
    leaves, where, real = operands(member, call, t)
    given["teacher_log_probs"][t.target == -100] = torch.tensor(torch.nan).to(given["teacher_log_probs"])
    given = {name: folded(value) for name, value in given.items()} | dict(target=folded(t.target).int())
    # As NumPy's.
    options = dict(beta=np.float32(call.beta), temperature=np.int64(TEMPERATURE), reduction=call.reduction)
    with chosen_backend(call.backend), many_blocks():
        found = loss(call.tail, (folded(leaves["x"]), leaves["weight"], leaves["bias"]), given, **options, **where)
        gradients = torch.autograd.grad(found, [*leaves.values()], t.upstream.to(found).view(found.shape))
    assert found.shape == ((len(t.target) // 2, 2) if call.reduction == "none" else ())
    gradients = {f"d{name}": unpadded(name, gradient, real) for name, gradient in zip(leaves, gradients)}
    return {"loss": found.detach().cpu().view(t.upstream.shape)} | gradients


ALONE = dict(shards=(V + 10,))
PARTS = dict(ranks=2, sequence_parallel=True, shards=(60, 30))
WHOLE = dict(ranks=2, shards=(60, 30))
CALLS = [
    Call(N, V, D, "fp64", **ALONE, beta=0.5, reduction="none"),
    Call(N, V, D, "fp32", **PARTS),
    Call(N, V, D, "bf16", **ALONE, beta=1.0, reduction="sum", backend="triton"),
    Call(N, V, D, "fp32", **WHOLE, beta=0.5, reduction="sum", backend="triton"),
    Call(N, V, D, "fp32", **ALONE, ignored="all"),
    Call(N, V, D, "fp64", **PARTS, tail="renormalize", beta=1.0),
    Call(N, V, D, "fp32", **WHOLE, tail="renormalize", beta=0.5, reduction="none", backend="triton"),
    Call(N, V, D, "bf16", **ALONE, tail="renormalize", backend="triton"),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_stored_log_probabilities(call, worlds, device, request):
    if call.backend == "triton":
        request.getfixturevalue("kernels")
    found = assemble(call, everywhere(worlds, device, call.ranks, ours, call))
    truth, yardstick = (dense(call, dtype) for dtype in (torch.float64, DTYPES[call.dtype]))
    assert found["loss"].dtype == accumulation_dtype(DTYPES[call.dtype])
    assert not found["dx"][make(call).target == -100].any()
    for name, value in found.items():
        # A tail is a difference from 1, in fp64 in another order.
        steps = 16 if call.dtype != "fp64" else 1024 if call.tail == "class" else 32
        floor = steps * torch.finfo(value.dtype).eps * size(truth[name])
        assert_no_worse(value, truth[name], yardstick[name], 1.3 if call.ranks == 1 else 2.0, floor, name)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", TAILS)
def test_all_entries_are_the_whole_divergence(tail, beta):
    """Nothing is left for the tail, whose rounded probability may be less than 0. No gradient flows to the teacher."""
    (x, w, _), (y, u, _) = student(dtype="fp64"), teacher("layer", dtype="fp64").values()
    options = dict(beta=beta, reduction="none")
    expected = loss("layer", (x, w), dict(teacher_hidden=y, teacher_weight=u), **options)
    log_probs = (y @ u.T).log_softmax(-1).requires_grad_()
    found = loss(tail, (x, w), dict(teacher_ids=torch.arange(V).expand(N, V), teacher_log_probs=log_probs), **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert torch.autograd.grad(found.sum(), log_probs, allow_unused=True) == (None,)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("masked", ["one entry", "all of a token's", "all but one"])
@on_ranks(2)
def test_an_entry_that_the_student_masks_counts_in_every_layout(member, masked, tail):
    """It is no padding, which only a rank without ``vocab_size`` could take it for."""
    x, w, b = (v.detach().to(member.device) for v in student(dtype="fp64"))
    given = {name: v.to(member.device) for name, v in teacher(tail, dtype="fp64").items()}
    ids = given["teacher_ids"].long()
    some = {"one entry": ids[0, :1], "all of a token's": ids[0], "all but one": torch.arange(1, V)}[masked]
    b[some] = -torch.inf
    at = [(0, 60), (60, V)][member.rank]
    for beta in (0.0, 0.5, 1.0):
        options = dict(beta=beta, reduction="none")
        expected = loss(tail, (x, w, b), given, **options)
        shards = dict(process_group=member.group, vocab_start=at[0])
        for known in ({}, dict(vocab_size=V)):
            found = loss(tail, (x, w[slice(*at)], b[slice(*at)]), given, **options, **shards, **known)
            torch.testing.assert_close(found, expected, equal_nan=True)


# --- all kinds, and output layers ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_other_target_dtypes_and_no_ignore_index(kind):
    leaves, given = student(), teacher(kind)
    target = torch.full((N,), 156, dtype=torch.uint8)  # -100 in eight bits
    assert torch.equal(loss(kind, leaves, given, target=target), loss(kind, leaves, given))
    target = torch.full((N,), -100)
    assert not loss(kind, leaves, given, reduction="none", target=target, ignore_index=None).any()


EACH = torch.linspace(0.5, 2.0, N).double()
OWN = [dict(), dict(teacher_logit_scale=0.4), dict(teacher_logit_softcap=0.7)]
OWN += [dict(teacher_logit_scale=EACH, teacher_logit_softcap=math.inf)]
OWN = [("layer", own) for own in OWN] + [(tail, {}) for tail in TAILS]


@pytest.mark.parametrize(("kind", "own"), OWN)
@pytest.mark.parametrize("cap", [None, 1.5])
def test_scales_soft_caps_and_temperatures(kind, own, cap):
    """Of all tokens, and of each. With an output layer those of an ignored token may be NaN."""
    given, counted = teacher(kind, dtype="fp64"), torch.arange(N) != 3
    target = torch.full((N,), -100).masked_fill(counted, 0)
    column = lambda value: torch.as_tensor(value, dtype=torch.float64).view(-1, 1)  # noqa: E731
    for beta, scale, temperature, reduction in (
        (0.0, 0.3, EACH, "sum"),
        (0.5, EACH, 0.7, "none"),
        (1.0, -EACH, EACH, "sum"),
    ):

        def log_probs(x, w, b, scale, cap):
            z = column(scale) * torch.nn.functional.linear(x, w, b)
            return ((z if cap in (None, math.inf) else cap * torch.tanh(z / cap)) / column(temperature)).log_softmax(-1)

        leaves = student(dtype="fp64")
        whole = log_probs(*leaves, scale, cap)
        if kind == "layer":
            its = own.get("teacher_logit_scale", scale), own.get("teacher_logit_softcap", cap)
            pair = whole, log_probs(*given.values(), *its)
        else:
            pair = classes(whole, *given.values(), kind)
        expected = of_classes(*pair, beta)[counted].sum()
        options = dict(logit_scale=scale, temperature=temperature)
        if kind == "layer":
            options = {n: v.where(counted, torch.nan) if torch.is_tensor(v) else v for n, v in options.items()}
        options |= dict(logit_softcap=cap, beta=beta, reduction=reduction, target=target) | own
        found = loss(kind, leaves, given, **options).sum()
        gradients = [torch.autograd.grad(value, leaves) for value in (found, expected)]
        torch.testing.assert_close((found, *gradients[0]), (expected, *gradients[1]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_graph_breaks_at_the_call(kind):
    """Dynamo runs a function that reads ``locals()`` in parts, with the arguments' first values."""
    leaves, given = student(), teacher(kind)
    call = lambda each: loss(kind, leaves, given, logit_scale=each, temperature=each.flip(0))  # noqa: E731
    each = EACH.float()
    assert torch.equal(torch.compile(call, backend="eager")(each), call(each))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_what_surrounds_the_call_changes_nothing(reduction, backend, device):
    """Autocast, where backward runs too; a teacher of inference mode; and one that is NaN where tokens are ignored."""
    leaves, given = student(device, "bf16"), teacher("layer", device, "bf16")
    target = torch.tensor([-100, 0], device=device).repeat(N // 2)

    def gradients(given=given):
        found = loss("layer", leaves, given, beta=0.5, reduction=reduction, target=target).sum()
        # The second backward of a mean forms them again.
        return [found, *(g for _ in range(2) for g in torch.autograd.grad(found, leaves, retain_graph=True))]

    expected = gradients()
    with torch.autocast(device, torch.bfloat16):
        assert all(map(torch.equal, gradients(), expected))
    with torch.inference_mode():
        copies = {name: value.clone() for name, value in given.items()}
        copies["teacher_hidden"][::2] = torch.nan
    assert all(map(torch.equal, gradients(copies), expected))
    leaves, given = student("meta"), teacher("layer", "meta")
    assert loss("layer", leaves, given, reduction=reduction).shape == ((N,) if reduction == "none" else ())


@pytest.mark.parametrize("reduction", ["none", "mean", ""])
def test_memory_is_that_of_one_block(reduction):
    """``reduction`` '': no gradients."""
    tokens, entries, block = 512, 2000, 1 << 20
    x, w, y, u = (normal(*s).float() for s in ((tokens, 4), (entries, 4), (tokens, 4), (entries, 4)))
    x.requires_grad_(bool(reduction))

    def call():
        found = divergence(x, w, y, u, reduction=reduction or "mean", logits_budget=0)
        return torch.autograd.grad(found.sum(), x) if reduction else found

    with shrunk(block):
        call()
        # What is exponentiated at a time has a bound of its own.
        with mock.patch.object(torch_logits, "_BYTES", 1 << 14):
            assert 0.5 * block < peak_memory(call, "cpu")[0] < 1.2 * block


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@on_ranks(2)
def test_collectives_are_those_of_the_docstring(member, sequence_parallel):
    (x, w, _), (y, u, _) = student(member.device), teacher("layer", member.device).values()
    w, u = (v.chunk(2)[member.rank].detach() for v in (w, u))
    if sequence_parallel:
        x, y = (v.chunk(2)[member.rank].detach() for v in (x, y))
    x, w = x.detach().requires_grad_(), w.requires_grad_()
    gathers = [("all_gather", N // 2 * D), ("all_gather", N // 2 * E)] if sequence_parallel else []
    reduction = [("reduce_scatter" if sequence_parallel else "all_reduce", N * D)]
    sums = [("all_gather", 4 * N + 3), ("all_gather", 2 * N)]
    expected = {"mean": (gathers + sums + reduction, []), "none": (gathers + sums, gathers + reduction)}
    for name, (in_forward, in_backward) in expected.items():
        options = dict(process_group=member.group, sequence_parallel=sequence_parallel, reduction=name)
        with started() as found:
            value = divergence(x, w, y, u, **options)
            forward = len(found)
            value.sum().backward()
        found = [(each.kind, each.size) for each in found]
        assert (found[:forward], found[forward:]) == (in_forward, in_backward)


BAD = [
    ("layer", "teacher_hidden .* other tokens", dict(teacher_hidden=normal(N - 1, E).float())),
    ("layer", r"\[0, 79\).*\[0, 80\)", dict(teacher_weight=normal(V - 1, E).float(), teacher_bias=None)),
    ("layer", "teacher_hidden has 15 features", dict(teacher_hidden=normal(N, 15).float())),
    ("layer", "both or none must be float64", teacher("layer", dtype="fp64")),
    ("layer", "beta must be 0, 1", dict(beta=1e-9)),
    ("layer", "reduction must be", dict(reduction="batchmean")),
    ("layer", "teacher_weight must be a tensor", dict(teacher_weight=None)),
    ("class", "tail must be", dict(tail="none")),
    ("class", "teacher_ids must be ids of shape", dict(student_hidden=torch.zeros(N - 1, D))),
    ("class", "logits_budget must be", dict(logits_budget="x")),
    ("class", "process_group must be", dict(process_group=5)),
    ("class", r"both be \[..., K\]", dict(teacher_ids=torch.zeros(N, K + 1, dtype=torch.int64))),
    ("class", "must be tensors", dict(teacher_ids=None)),
    ("class", "must be floating-point", dict(teacher_log_probs=torch.zeros(N, K, dtype=torch.int64))),
    ("class", "teacher_ids must be of an integer dtype", dict(teacher_ids=torch.zeros(N, K))),
    ("class", "target must be None or ids", dict(target=torch.zeros(N))),
    ("class", "temperature must be", dict(temperature=float("inf"))),
    ("class", r"temperature must be .* of target's shape \[12\]", dict(temperature=torch.ones(N - 1))),
    ("layer", r"teacher_logit_scale must be .* of target's shape \[12\]", dict(teacher_logit_scale=torch.ones(N - 1))),
    ("layer", "teacher_logit_softcap must be None or", dict(teacher_logit_softcap=0)),
]


def called(kind, device, changes, **more):
    x, w, _ = student(device)
    given = dict(student_hidden=x, student_weight=w) | teacher(kind, device) | more
    given |= {name: v.to(device) if torch.is_tensor(v) else v for name, v in changes.items()}
    return (
        divergence(**given)
        if kind == "layer"
        else top_k_divergence(**given, **({} if "tail" in given else {"tail": kind}))
    )


@pytest.mark.parametrize(("kind", "message", "changes"), BAD)
def test_bad_input_is_refused(kind, message, changes):
    with pytest.raises(ValueError, match=message):
        called(kind, "cpu", changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("layer", dict(beta=0.1), "beta"),
        ("layer", dict(teacher_hidden=torch.zeros(N - 1, E)), "tokens"),
        ("layer", dict(teacher_logit_scale=0.5), "disagree about teacher_logit_scale"),
        ("layer", dict(temperature=torch.full((N,), 2.0)), "temperature: rank 0 has 1.0, rank 1 has 'of each token'"),
        ("renormalize", dict(logit_softcap=2.0), "disagree about logit_softcap"),
        ("class", dict(beta=0.1), "beta"),
        ("class", dict(teacher_log_probs=torch.full((N, K), -3.0)), "teacher_log_probs"),
        ("class", dict(student_hidden=None), "student_hidden"),
    ],
)
@on_ranks(2)
def test_debug_mode_tells_all_ranks(member, kind, changes, message):
    prepare.KNOWN.clear()
    with debug_mode(), pytest.raises((ValueError, RuntimeError), match=message):
        given = dict(vocab_start=V * member.rank, process_group=member.group, beta=0.0)
        given["student_weight"] = student(member.device)[1] + member.rank
        if kind == "layer":
            given["teacher_weight"] = teacher(kind, member.device)["teacher_weight"] + member.rank
        called(kind, member.device, changes if member.rank == 1 else {}, **given)
