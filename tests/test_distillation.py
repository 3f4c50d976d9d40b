"""Divergences of a student's softmax from a teacher's, of its output layer or of its stored log-probabilities, against
float64 on all logits."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.peak_memory import peak_memory
from cases import DTYPES, Case, assemble, make, normal, operands, unpadded
from measures import assert_no_worse, size, smallest_steps
from on_ranks import on_ranks
from parallel_lce.backends import torch_logits
from parallel_lce.call import prepare
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.distillation import divergence, top_k_divergence
from parallel_lce.run import divergence as schedule
from tools import chosen_backend, debug_mode, everywhere, shrunk, started
from world import Member

N, V, D, E, K = 12, 80, 24, 16, 6
TEMPERATURE = 1.7
TAILS = "class", "renormalize"
KINDS = "layer", *TAILS
"""Of a teacher: its output layer, or stored log-probabilities with either tail."""


@dataclass(frozen=True)
class Call(Case):
    """``backend`` and ``reduce_dtype``: as the environment's variable and the argument."""

    bias: bool = True
    sharpness: float = 2.5
    kind: str = "layer"
    beta: float = 0.0
    backend: str = "torch"
    reduce_dtype: torch.dtype | None = None


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


def with_gradients(kind, leaves, given, **options):
    found = loss(kind, leaves, given, **options)
    return [found, *torch.autograd.grad(found.sum(), [leaf for leaf in leaves if leaf.requires_grad])]


def of_logits(z, y, beta):
    """The divergence of each row of logits."""
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
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
    return [v.masked_fill(v == -torch.inf, -1e4) for v in found]


def dense(call: Call, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of operands that are rounded to the call's dtype, computed in ``dtype``."""
    t, wide = make(call), accumulation_dtype(dtype)
    leaves = [v.to(dtype).requires_grad_() for v in (t.x, t.weight, t.bias)]
    z = torch.nn.functional.linear(*leaves).to(wide) / TEMPERATURE
    given = [*teacher(call.kind, dtype=call.dtype).values()]
    if call.kind == "layer":
        y = torch.nn.functional.linear(*(v.to(dtype) for v in given)).to(wide) / TEMPERATURE
    else:
        z, y = classes(z.log_softmax(-1), *given, call.kind)
    counted = t.target != -100
    found = of_logits(z, y, call.beta) * counted
    if call.reduction != "none":
        found = found.sum() / (counted.sum() if call.reduction == "mean" else 1)
    gradients = torch.autograd.grad(found, leaves, t.upstream.to(wide))
    return dict(zip(("loss", "dx", "dweight", "dbias"), (found.detach(), *gradients)))


def ours(member: Member, call: Call) -> dict[str, torch.Tensor]:
    """On one rank, of tokens ``[N / 2, 2]``."""
    folded = lambda v: v.view(-1, 2, *v.shape[1:])  # noqa: E731
    t = make(call, member.device)
    leaves, where, real = operands(member, call, t)
    # The teacher of ignored tokens may say anything.
    ignored, anything = t.target == -100, torch.tensor([torch.nan, torch.inf, 1000.0, -torch.inf], device=member.device)
    if call.kind == "layer":
        of_teacher = replace(call, D=E, seed=1, frozen="x weight bias")
        y = make(of_teacher, member.device)
        y.x[ignored] = anything[:, None].to(y.x)
        y, *_ = operands(member, of_teacher, y)
        given = dict(teacher_hidden=folded(y["x"]), teacher_weight=y["weight"], teacher_bias=y["bias"])
    else:
        given = teacher(call.kind, member.device, call.dtype)
        given["teacher_log_probs"][ignored] = anything[:, None].to(given["teacher_log_probs"])
        given = {name: folded(value) for name, value in given.items()}
    options = dict(beta=call.beta, temperature=TEMPERATURE, reduction=call.reduction, target=folded(t.target).int())
    options |= where | dict(reduce_dtype=call.reduce_dtype, logits_budget=0)
    with chosen_backend(call.backend), many_blocks():
        found = loss(call.kind, (folded(leaves["x"]), leaves["weight"], leaves["bias"]), given, **options)
        assert found.shape == ((len(t.x) // 2, 2) if call.reduction == "none" else ())
        upstream = t.upstream.to(found).view(found.shape)
        first, again = (torch.autograd.grad(found, [*leaves.values()], upstream, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    gradients = {f"d{name}": unpadded(name, gradient, real) for name, gradient in zip(leaves, first)}
    return {"loss": found.detach().cpu().view(t.upstream.shape)} | gradients


DTYPE_NAMES = {"layer": ("fp64", "fp32", "bf16", "fp16")} | dict.fromkeys(TAILS, ("fp64", "fp32", "bf16"))
PARTS = dict(ranks=2, sequence_parallel=True, shards=(60, 30))
WHOLE = dict(ranks=2, shards=(60, 30))
OVER_RANKS = [
    Call(N, V, D, "fp64", **PARTS),
    Call(N, V, D, "fp64", ranks=3, shards=(0, 50, 40), beta=0.3, reduction="none"),
    Call(N, V, D, **WHOLE, beta=1.0, reduction="sum"),
    Call(N, V, D, "bf16", **PARTS, beta=0.5, backend="triton", reduce_dtype=torch.float32),
    Call(N, V, D, "bf16", **WHOLE, reduction="none", backend="triton"),
    Call(N, V, D, "fp16", **PARTS, beta=1.0),
    Call(N, V, D, **PARTS, kind="class"),
    Call(N, V, D, **WHOLE, kind="class", beta=0.5, reduction="sum"),
    Call(N, V, D, "fp64", **PARTS, kind="renormalize", beta=1.0),
]


def check(call: Call, worlds, device) -> None:
    found = assemble(call, everywhere(worlds, device, call.ranks, ours, call))
    truth, yardstick = (dense(call, dtype) for dtype in (torch.float64, DTYPES[call.dtype]))
    assert found["loss"].dtype == accumulation_dtype(DTYPES[call.dtype])
    assert not found["dx"][make(call).target == -100].any()
    for name, value in found.items():
        # Torch may be right by luck in a single number. A tail is a difference from 1, in fp64 in another order.
        steps = 32 if call.dtype == "fp64" else 16 if call.kind in TAILS else 4 if value.dim() == 0 else 1
        steps *= 32 if call.dtype == "fp64" and call.kind == "class" else 1
        floor = steps * torch.finfo(value.dtype).eps * size(truth[name]) + smallest_steps(value)
        assert_no_worse(value, truth[name], yardstick[name], 1.3 if call.ranks == 1 else 2.0, floor, name)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("of", [f"{kind} {name}" for kind, names in DTYPE_NAMES.items() for name in names])
@pytest.mark.thinned
def test_on_one_rank(of, beta, reduction, backend, worlds, device):
    kind, name = of.split()
    if backend == "triton" and name == "fp64":
        pytest.skip("float64 is always torch's")
    call = Call(N, V, D, name, kind=kind, beta=beta, reduction=reduction, backend=backend, shards=(V + 10,))
    check(call, worlds, device)


@pytest.mark.parametrize("call", OVER_RANKS, ids=str)
def test_over_ranks(call, worlds, device, request):
    if call.backend == "triton":
        request.getfixturevalue("kernels")
    check(call, worlds, device)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_distributions_have_none(beta, backend, device):
    x, w, _ = student(device)
    same = dict(teacher_hidden=x, teacher_weight=w)
    assert all(value.abs().max() < 1e-6 for value in with_gradients("layer", (x, w), same, beta=beta))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_logit_minus_infinity(kind, beta, backend, device):
    """Their probability is 0, as at the lowest logits, and no divergence is NaN."""
    (x, w, b), given = student(device), teacher(kind, device)
    excluded = torch.arange(V, device=device) % 3 == 0

    def results(lowest):
        leaves = x, w, b.detach().masked_fill(excluded, lowest).requires_grad_()
        if kind == "layer":
            given["teacher_bias"] = given["teacher_bias"].masked_fill(excluded, lowest)
        return with_gradients(kind, leaves, given, beta=beta, reduction="none")

    lowest, found = results(-1e4), results(-torch.inf)
    if kind in TAILS and beta == 0:
        assert found[0].isinf().any() and not found[0].isnan().any()
    else:
        for ours, others in zip(found, lowest):
            torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", TAILS)
def test_all_entries_are_the_whole_divergence(tail, beta):
    """Nothing is left for the tail, whose rounded probability may be less than 0."""
    (x, w, _), (y, u, _) = student(dtype="fp64"), teacher("layer", dtype="fp64").values()
    options = dict(beta=beta, reduction="none")
    expected = loss("layer", (x, w), dict(teacher_hidden=y, teacher_weight=u), **options)
    stored = dict(teacher_ids=torch.arange(V).expand(N, V), teacher_log_probs=(y @ u.T).log_softmax(-1))
    torch.testing.assert_close(loss(tail, (x, w), stored, **options), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_counts(kind, backend, device):
    x, w, b = student(device)
    for tokens in (N, 0):
        given = {n: v[:tokens] if len(v) == N else v for n, v in teacher(kind, device).items()}
        target = torch.full((tokens,), -100, device=device)
        found = loss(kind, (x[:tokens], w, b), given, target=target)
        assert found.item() == 0
        assert not any(g.any() for g in torch.autograd.grad(found, (x, w, b)))


@pytest.mark.parametrize("kind", KINDS)
def test_other_target_dtypes_and_no_ignore_index(kind):
    leaves, given = student(), teacher(kind)
    target = torch.full((N,), 156, dtype=torch.uint8)  # -100 in eight bits
    assert torch.equal(loss(kind, leaves, given, target=target), loss(kind, leaves, given))
    target = torch.full((N,), -100)
    assert not loss(kind, leaves, given, reduction="none", target=target, ignore_index=None).any()


def test_numbers_of_numpy():
    leaves, given = student(), teacher("layer")
    # NumPy refuses a difference of its int32 and a number of bytes beyond 2^31.
    options = dict(beta=np.float32(0.5), temperature=np.int64(2), vocab_size=np.int32(V - 2), logits_budget=1 << 33)
    expected = loss("layer", leaves, given, beta=0.5, temperature=2, vocab_size=V - 2)
    torch.testing.assert_close(loss("layer", leaves, given, **options), expected)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_frozen_tensors(reduction, backend, device):
    """No gradient flows to the teacher."""
    leaves, given, walked = student(device), teacher("layer", device), []
    hidden = given["teacher_hidden"].requires_grad_() * 1
    hidden.register_hook(walked.append)
    given |= dict(teacher_hidden=hidden)
    expected, *gradients = with_gradients("layer", leaves, given, reduction=reduction)
    for leaf, gradient in zip(leaves, gradients):
        some = [each if each is leaf else each.detach() for each in leaves]
        found, alone = with_gradients("layer", some, given, reduction=reduction)
        assert torch.equal(found, expected)
        torch.testing.assert_close(alone, gradient)
    frozen = loss("layer", [leaf.detach() for leaf in leaves], given, reduction=reduction)
    with torch.no_grad():
        evaluated = loss("layer", leaves, given, reduction=reduction)
    assert not walked and not frozen.requires_grad
    assert torch.equal(frozen, expected) and torch.equal(evaluated, expected)


def test_autocast_and_meta(backend, device):
    leaves, given = student(device), teacher("layer", device)
    half = [v.bfloat16() for v in leaves], {n: v.bfloat16() for n, v in given.items()}
    with torch.autocast(device, torch.bfloat16):
        found = loss("layer", leaves, given)
    assert torch.equal(found, loss("layer", *half))
    leaves, given = student("meta"), teacher("layer", "meta")
    assert loss("layer", leaves, given, reduction="none").shape == (N,) and loss("layer", leaves, given).shape == ()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_what_surrounds_the_call_changes_no_gradient(reduction, backend, device):
    """Autocast, where backward runs too; hooks that save at other strides; a teacher of inference mode."""
    leaves, given = student(device, "bf16"), teacher("layer", device, "bf16")

    def gradients(given=given):
        found = loss("layer", leaves, given, beta=0.5, reduction=reduction).sum()
        # The second backward of a mean forms them again.
        return [g for _ in range(2) for g in torch.autograd.grad(found, leaves, retain_graph=True)]

    expected = gradients()
    with torch.autocast(device, torch.bfloat16):
        assert all(map(torch.equal, gradients(), expected))
    strided = lambda t: t.t().contiguous().t() if t.dim() == 2 else t.clone()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(strided, strided):
        assert all(map(torch.equal, gradients(), expected))
    with torch.inference_mode():
        copies = {name: value.clone() for name, value in given.items()}
    assert all(map(torch.equal, gradients(copies), expected))


def test_the_upstream_gradient_is_not_rounded(backend, device):
    """To the gradients' dtype."""
    leaves, given = student(device, "bf16"), teacher("layer", device, "bf16")
    upstream = torch.tensor(1 + 2**-9, device=device)
    ones, scaled = (
        torch.autograd.grad(loss("layer", leaves, given), leaves[1], v)[0]
        for v in (torch.ones_like(upstream), upstream)
    )
    assert not torch.equal(ones, scaled)


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
    sums = [("all_gather", 4 * N + 2), ("all_gather", 2 * N)]
    expected = {"mean": (gathers + sums + reduction, []), "none": (gathers + sums, gathers + reduction)}
    for name, (in_forward, in_backward) in expected.items():
        options = dict(process_group=member.group, sequence_parallel=sequence_parallel, reduction=name)
        with started() as found:
            value = divergence(x, w, y, u, **options)
            forward = len(found)
            value.sum().backward()
        found = [(each.kind, each.size) for each in found]
        assert (found[:forward], found[forward:]) == (in_forward, in_backward)


@on_ranks(2)
def test_padding_of_the_teacher_and_gaps(member):
    """Student and teacher have other padding, of which rank 1 has nothing else."""
    (x, w, _), (y, u, _) = student(member.device), teacher("layer", member.device).values()
    entries, w, options = 20, w.detach(), dict(reduction="none", process_group=member.group)
    whole = divergence(x, w[:entries], y, u[:entries], reduction="none")
    torch.testing.assert_close(divergence(x, w, y, u[: entries + 3], reduction="none", vocab_size=entries), whole)
    padded = ((w, 25), (u, 24))
    w_, u_ = (torch.cat([v[:entries], v.new_full((2 * rows - entries, v.shape[1]), torch.nan)]) for v, rows in padded)
    w_, u_ = (v.chunk(2)[member.rank].clone() for v in (w_, u_))
    torch.testing.assert_close(divergence(x, w_, y, u_, vocab_size=entries, **options), whole)
    assert divergence(x, w[:40], y, u[:40], vocab_start=41 * member.rank, **options).isnan().all()  # a gap of one


BAD = [
    ("layer", "teacher_hidden .* other tokens", dict(teacher_hidden=normal(N - 1, E).float())),
    ("layer", r"\[0, 79\).*\[0, 80\)", dict(teacher_weight=normal(V - 1, E).float(), teacher_bias=None)),
    ("layer", "teacher_hidden has 15 features", dict(teacher_hidden=normal(N, 15).float())),
    ("layer", "student_weight is torch.bfloat16", dict(student_weight=normal(V, D).bfloat16())),
    ("layer", "both or none must be float64", teacher("layer", dtype="fp64")),
    ("layer", "teacher_bias must have shape", dict(teacher_bias=normal(V - 1).float())),
    ("layer", "beta must be 0, 1", dict(beta=1e-9)),
    ("layer", "reduction must be", dict(reduction="batchmean")),
    ("layer", "student_hidden must be a tensor", dict(student_hidden=None)),
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
    ("class", "target must be", dict(target=torch.zeros(N, K, dtype=torch.int64))),
    ("class", "beta must be", dict(beta=-1)),
    ("class", "temperature must be", dict(temperature=float("inf"))),
]


@pytest.mark.parametrize(("kind", "message", "changes"), BAD, ids=[f"{kind}-{message}" for kind, message, _ in BAD])
def test_bad_input_is_refused(kind, message, changes):
    x, w, _ = student()
    given = dict(student_hidden=x, student_weight=w) | teacher(kind)
    with pytest.raises(ValueError, match=message):
        (divergence if kind == "layer" else top_k_divergence)(**given | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("layer", dict(beta=0.1), "beta"),
        ("layer", dict(teacher_hidden=torch.zeros(N - 1, E)), "tokens"),
        ("class", dict(beta=0.1), "beta"),
        ("class", dict(teacher_log_probs=torch.full((N, K), -3.0)), "teacher_log_probs"),
        ("class", dict(student_hidden=None), "student_hidden"),
    ],
)
@on_ranks(2)
def test_debug_mode_tells_all_ranks(member, kind, changes, message):
    x, w, _ = student(member.device)
    given = dict(student_hidden=x, student_weight=w.chunk(2)[member.rank], beta=0.0) | teacher(kind, member.device)
    if kind == "layer":
        given |= {name: given[name].chunk(2)[member.rank] for name in ("teacher_weight", "teacher_bias")}
    if member.rank == 1:
        given |= {name: v.to(member.device) if torch.is_tensor(v) else v for name, v in changes.items()}
    prepare.KNOWN.clear()
    with debug_mode(), pytest.raises((ValueError, RuntimeError), match=message):
        (divergence if kind == "layer" else top_k_divergence)(**given, process_group=member.group)
