"""Divergences of a teacher's and a student's output layers, against float64 on all logits."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peak_memory import peak_memory
from cases import DTYPES, normal
from measures import assert_no_worse, size, smallest_steps
from parallel_lce.backends import torch_logits
from parallel_lce.call import prepare
from parallel_lce.distillation import divergence
from parallel_lce.run import divergence as schedule
from tools import alone, chosen_backend, debug_mode, everywhere, shrunk, started
from world import Member

N, V, D, E = 12, 90, 24, 16
REAL = V - 10
IGNORED = 3, 7
SHARDS = {1: (90,), 2: (60, 30), 3: (0, 50, 40)}
TEMPERATURE = 1.7


@pytest.fixture(autouse=True)
def _many_blocks():
    fewest, schedule._FEWEST_TOKENS = schedule._FEWEST_TOKENS, 1
    with shrunk(3000):
        yield
    schedule._FEWEST_TOKENS = fewest


def problem(dtype):
    """The student's hidden states, weight and bias, the teacher's three, targets, and an upstream gradient."""
    shapes = (N, D), (V, D), (V,), (N, E), (V, E), (V,)
    operands = [
        (normal(*shape, seed=seed) / (1 if seed in (0, 3) else 2)).to(dtype) for seed, shape in enumerate(shapes)
    ]
    target = torch.zeros(N, dtype=torch.int32)
    target[list(IGNORED)] = -100
    return *operands, target, normal(N, seed=9)


def _found(member: Member, name, beta, reduction, backend, sequence_parallel, more):
    *operands, target, upstream = (v.to(member.device) for v in problem(DTYPES[name]))
    shards = SHARDS[member.ranks]
    start = sum(shards[: member.rank])
    shard = slice(start, start + shards[member.rank])
    x, w, b, y, u, c = (v if i % 3 == 0 else v[shard] for i, v in enumerate(operands))
    if sequence_parallel:
        x, y = (v.chunk(member.ranks)[member.rank] for v in (x, y))
    leaves = [v.clone().requires_grad_() for v in (x, w, b)]
    given = dict(more)
    if member.ranks > 1:
        given |= dict(process_group=member.group, vocab_start=start, sequence_parallel=sequence_parallel)
    with chosen_backend(backend):
        found = divergence(
            *leaves[:2],
            y,
            u,
            beta=beta,
            temperature=TEMPERATURE,
            reduction=reduction,
            target=target,
            student_bias=leaves[2],
            teacher_bias=c,
            vocab_size=REAL,
            logits_budget=0,
            **given,
        )
        upstream = upstream if reduction == "none" else upstream[0]
        gradients = [torch.autograd.grad(found, leaves, upstream.to(found.dtype), retain_graph=True) for _ in range(2)]
    for first, second in zip(*gradients):
        assert torch.equal(first, second)
    return [v.detach().cpu() for v in (found, *gradients[0])]


def of_logits(z, y, beta):
    """The divergence of each row of logits."""
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if beta in (0, 1):
        return (q * (log_q - log_p)).sum(-1) if beta == 0 else (p * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


def dense(name, dtype, beta, reduction):
    """Of operands that are rounded to the dtype of that name, computed in ``dtype``."""
    x, w, b, y, u, c, target, upstream = problem(DTYPES[name])
    leaves = [v.to(dtype).requires_grad_() for v in (x, w, b)]
    wide = torch.promote_types(dtype, torch.float32)
    z = torch.nn.functional.linear(*leaves).to(wide)[:, :REAL] / TEMPERATURE
    y = torch.nn.functional.linear(*(v.to(dtype) for v in (y, u, c))).to(wide)[:, :REAL] / TEMPERATURE
    found = of_logits(z, y, beta) * (target != -100)
    if reduction != "none":
        found = found.sum() / (N - len(IGNORED) if reduction == "mean" else 1)
    upstream = upstream if reduction == "none" else upstream[0]
    return [found.detach(), *torch.autograd.grad(found, leaves, upstream.to(wide))]


def check(parts, name, beta, reduction, sequence_parallel, factor):
    truth, yardstick = (dense(name, dtype, beta, reduction) for dtype in (torch.float64, DTYPES[name]))
    assert all(torch.equal(part[0], parts[0][0]) for part in parts)
    dx = torch.cat([p[1] for p in parts]) if sequence_parallel else parts[0][1]
    found = [parts[0][0], dx, *(torch.cat([p[i] for p in parts]) for i in (2, 3))]
    assert found[0].dtype == (torch.float64 if name == "fp64" else torch.float32)
    assert torch.count_nonzero(found[1][list(IGNORED)]) == 0
    assert torch.count_nonzero(found[2][REAL:]) == torch.count_nonzero(found[3][REAL:]) == 0
    for label, ours, exact, other in zip(("loss", "dx", "dweight", "dbias"), found, truth, yardstick):
        # Torch may be right by luck in a single number.
        steps = 32 if name == "fp64" else 4 if ours.dim() == 0 else 1
        floor = steps * torch.finfo(ours.dtype).eps * size(exact) + smallest_steps(ours)
        assert_no_worse(ours, exact, other, factor, floor, label)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.thinned
def test_on_one_rank(name, beta, reduction, backend, device):
    if backend == "triton" and name == "fp64":
        pytest.skip("float64 is always torch's")
    parts = [_found(alone(device), name, beta, reduction, backend, False, {})]
    check(parts, name, beta, reduction, False, 1.3)


@pytest.mark.parametrize(
    ("ranks", "name", "beta", "reduction", "sequence_parallel", "backend", "more"),
    [
        (2, "fp64", 0.0, "mean", True, "torch", {}),
        (3, "fp64", 0.3, "none", False, "torch", {}),
        (2, "fp32", 1.0, "sum", False, "torch", {}),
        (2, "bf16", 0.5, "mean", True, "triton", {"reduce_dtype": torch.float32}),
        (2, "bf16", 0.0, "none", False, "triton", {}),
        (2, "fp16", 1.0, "mean", True, "torch", {}),
    ],
)
def test_over_ranks(ranks, name, beta, reduction, sequence_parallel, backend, more, worlds, device, request):
    if backend == "triton":
        request.getfixturevalue("kernels")
    given = name, beta, reduction, backend, sequence_parallel, more
    parts = everywhere(worlds, device, ranks, _in_blocks, *given)
    check(parts, name, beta, reduction, sequence_parallel, 2.0)


def _in_blocks(member, *given):
    """In a process of its own, which the fixture does not reach."""
    schedule._FEWEST_TOKENS = 1
    with shrunk(3000):
        return _found(member, *given)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradcheck(beta, reduction):
    x, w, b, y, u, c, target, _ = problem(torch.float64)
    some = [v[:5].clone() for v in (x, w, b)]
    others = [v[:5] for v in (y, u, c)]

    def found(*student):
        return divergence(
            *student[:2],
            *others[:2],
            beta=beta,
            temperature=0.6,
            reduction=reduction,
            target=target[:5],
            student_bias=student[2],
            teacher_bias=others[2],
        )

    assert torch.autograd.gradcheck(found, [v.requires_grad_() for v in some])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_distributions_have_none(beta, backend, device):
    x, w, *_ = (v.to(device) for v in problem(torch.float32))
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    found = divergence(*leaves, x, w, beta=beta)
    assert abs(found.item()) < 1e-6
    for gradient in torch.autograd.grad(found, leaves):
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_entries_that_both_exclude(beta, backend, device):
    """Of logit -inf for student and teacher."""
    x, w, b, y, u, c, *_ = (v.to(device) for v in problem(torch.float32))
    kept = torch.arange(V, device=device) % 3 != 0
    b, c = (v.masked_fill(~kept, -torch.inf) for v in (b, c))
    leaves = [v.clone().requires_grad_() for v in (x, w, b)]
    found = divergence(*leaves[:2], y, u, beta=beta, student_bias=leaves[2], teacher_bias=c)
    gradients = torch.autograd.grad(found, leaves)
    leaves = [v.clone().requires_grad_() for v in (x, w[kept], b[kept])]
    expected = divergence(*leaves[:2], y, u[kept], beta=beta, student_bias=leaves[2], teacher_bias=c[kept])
    torch.testing.assert_close(found, expected)
    of_kept = torch.autograd.grad(expected, leaves)
    for ours, others in zip(gradients, of_kept):
        torch.testing.assert_close(ours if len(ours) == N else ours[kept], others, rtol=1e-4, atol=1e-6)


def test_no_token_counts(backend, device):
    x, w, _, y, u, *_ = (v.to(device) for v in problem(torch.float32))
    leaves = x.requires_grad_(), w.requires_grad_()
    for tokens in (N, 0):
        target = torch.full((tokens,), -100, device=device)
        found = divergence(x[:tokens], w, y[:tokens], u, target=target)
        assert found.item() == 0
        assert not any(g.any() for g in torch.autograd.grad(found, leaves))


def test_a_narrow_number_of_numpy_beside_a_large_budget():
    """NumPy refuses a difference of its int32 and a number of bytes beyond 2^31."""
    x, w, _, y, u, *_ = problem(torch.float32)
    found = [divergence(x, w, y, u, vocab_size=size, logits_budget=1 << 33) for size in (V - 2, np.int32(V - 2))]
    assert torch.equal(*found)


def test_numbers_of_numpy_and_no_ignore_index():
    x, w, _, y, u, _, target, _ = problem(torch.float32)
    found = divergence(x, w, y, u, beta=np.float32(0.5), temperature=np.int64(2), target=target, ignore_index=None)
    assert torch.equal(found, divergence(x, w, y, u, beta=0.5, temperature=2, target=target))


def test_frozen_tensors_and_no_gradient(backend, device):
    x, w, _, y, u, *_ = (v.to(device) for v in problem(torch.float32))
    expected = divergence(x.clone().requires_grad_(), w.clone().requires_grad_(), y, u)
    for leaf in (x, w):
        expected_gradient = torch.autograd.grad(divergence(x.requires_grad_(), w.requires_grad_(), y, u), leaf)
        x.requires_grad_(leaf is x), w.requires_grad_(leaf is w)
        found = divergence(x, w, y.requires_grad_(), u)
        torch.testing.assert_close(torch.autograd.grad(found, leaf), expected_gradient)
        assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(divergence(x, w, y, u), expected)


def test_second_derivatives_are_refused():
    x, w, _, y, u, *_ = problem(torch.float32)
    for reduction in ("none", "mean"):
        found = divergence(x.requires_grad_(), w, y, u, reduction=reduction)
        (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            gradient.sum().backward()


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation made."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor):
            self.bytes = max(self.bytes, found.numel() * found.element_size())
        return found


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_tensor_of_the_logits_shape(reduction):
    tokens = 64
    x, w, y, u = (normal(*s).float() for s in ((tokens, 4), (V, 4), (tokens, 8), (V, 8)))
    with _Largest() as largest:
        divergence(x.requires_grad_(), w.requires_grad_(), y, u, reduction=reduction, logits_budget=0).sum().backward()
    assert 0 < largest.bytes <= 4 * max(x.numel(), w.numel(), u.numel(), 12 * V) < tokens * V


def test_leading_dimensions_autocast_and_meta(backend, device):
    x, w, _, y, u, *_ = (v.to(device) for v in problem(torch.float32))
    expected = divergence(x.bfloat16(), w.bfloat16(), y.bfloat16(), u.bfloat16(), reduction="none")
    with torch.autocast(device, torch.bfloat16):
        found = divergence(x.view(3, 4, D), w, y.view(3, 4, E), u, reduction="none")
    assert torch.equal(found, expected.view(3, 4))
    x, w, y, u = (v.to("meta") for v in (x, w, y, u))
    assert divergence(x, w, y, u, reduction="none").shape == (N,)
    assert divergence(x, w, y, u).shape == ()


def given(device, dtype=torch.float32):
    """``x, w, y, u`` on a device; the first two need gradients."""
    x, w, _, y, u, *_ = (v.to(device) for v in problem(dtype))
    return x.requires_grad_(), w.requires_grad_(), y, u


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_teacher_of_ignored_tokens_may_be_anything(reduction, beta, value, backend, device):
    x, w, y, u = given(device)
    target = problem(torch.float32)[6].to(device)
    options = dict(beta=beta, reduction=reduction, target=target)
    upstream = torch.ones(N, device=device) if reduction == "none" else None
    expected = divergence(x, w, y, u, **options)
    expected = expected, *torch.autograd.grad(expected, [x, w], upstream)
    y[list(IGNORED)] = value
    found = divergence(x, w, y, u, **options)
    for ours, other in zip((found, *torch.autograd.grad(found, [x, w], upstream)), expected):
        assert torch.equal(ours, other)


def test_no_gradient_flows_to_the_teacher():
    x, w, y, u = given("cpu")
    walked = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, upstream):
            walked.append(upstream)
            return upstream

    for reduction in ("none", "mean"):
        teacher = Watched.apply(y.clone().requires_grad_())
        divergence(x, w, teacher, u, reduction=reduction).sum().backward()
        frozen = divergence(x.detach(), w.detach(), teacher, u, reduction=reduction)
        assert not walked and not frozen.requires_grad


def test_a_teacher_made_in_inference_mode(backend, device):
    x, w, y, u = given(device)
    expected = torch.autograd.grad(divergence(x, w, y, u), [x, w])
    with torch.inference_mode():
        teacher = y.clone(), u.clone()
    assert all(map(torch.equal, torch.autograd.grad(divergence(x, w, *teacher), [x, w]), expected))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_hooks_that_save_at_other_strides(reduction, backend, device):
    x, w, y, u = given(device)

    def gradients():
        return torch.autograd.grad(divergence(x, w, y, u, beta=0.5, reduction=reduction).sum(), [x, w])

    expected = gradients()
    strided = lambda t: t.t().contiguous().t() if t.dim() == 2 else t.clone()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(strided, strided):
        assert all(map(torch.equal, gradients(), expected))


def test_other_target_dtypes_and_no_ignore_index():
    x, w, y, u = given("cpu")
    target = torch.full((N,), 156, dtype=torch.uint8)  # -100 in eight bits
    assert divergence(x, w, y, u, reduction="none", target=target).all()
    target = torch.full((N,), -100)
    assert not divergence(x, w, y, u, reduction="none", target=target, ignore_index=None).any()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_under_autocast(reduction, backend, device):
    """Are those of operands in its dtype: nothing else is rounded."""
    x, w, y, u = given(device, torch.bfloat16)

    def gradients():
        found = divergence(x, w, y, u, beta=0.5, reduction=reduction).sum()
        # The second backward of a mean forms them again.
        return [torch.autograd.grad(found, [x, w], retain_graph=True) for _ in range(2)]

    expected = gradients()
    with torch.autocast(device, torch.bfloat16):
        for ours, others in zip(gradients(), expected):
            assert all(map(torch.equal, ours, others))


def test_the_upstream_gradient_is_not_rounded(backend, device):
    """To the gradients' dtype."""
    x, w, y, u = given(device, torch.bfloat16)
    upstream = torch.tensor(1 + 2**-9, device=device)
    ones, scaled = (torch.autograd.grad(divergence(x, w, y, u), w, v)[0] for v in (torch.ones_like(upstream), upstream))
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


def _collectives(member: Member, reduction, sequence_parallel):
    x, w, _, y, u, *_ = (v.to(member.device) for v in problem(torch.float32))
    w, u = (v.chunk(2)[member.rank] for v in (w, u))
    if sequence_parallel:
        x, y = (v.chunk(2)[member.rank] for v in (x, y))
    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, reduction=reduction)
    with started() as found:
        loss = divergence(x.requires_grad_(), w.requires_grad_(), y, u, **options)
        forward = [*found]
        loss.sum().backward()
    return tuple([(each.kind, each.size) for each in some] for some in (forward, found[len(forward) :]))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_collectives_are_those_of_the_docstring(sequence_parallel, worlds):
    gathers = [("all_gather", N // 2 * D), ("all_gather", N // 2 * E)] if sequence_parallel else []
    reduction = [("reduce_scatter" if sequence_parallel else "all_reduce", N * D)]
    sums = [("all_gather", 4 * N + 2), ("all_gather", 2 * N)]
    for found in worlds(2).run(_collectives, "mean", sequence_parallel):
        assert found == (gathers + sums + reduction, [])
    for found in worlds(2).run(_collectives, "none", sequence_parallel):
        assert found == (gathers + sums, gathers + reduction)


def _padded(member: Member):
    """Student and teacher with other padding, of which rank 1 has nothing else."""
    x, w, _, y, u, *_ = (v.to(member.device) for v in problem(torch.float32))
    size = 20
    whole = divergence(x, w[:size], y, u[:size], reduction="none")
    w, u = (
        torch.cat([v[:size], v.new_full((rows * 2 - size, v.shape[1]), torch.nan)]) for v, rows in ((w, 25), (u, 24))
    )
    w, u = (v.chunk(2)[member.rank].clone() for v in (w, u))
    found = divergence(x, w, y, u, reduction="none", process_group=member.group, vocab_size=size)
    torch.testing.assert_close(found, whole)
    return True


def test_other_padding_of_the_teacher(worlds):
    x, w, _, y, u, *_ = problem(torch.float32)
    expected = divergence(x, w[:REAL], y, u[:REAL])
    torch.testing.assert_close(divergence(x, w, y, u[: REAL + 3], vocab_size=REAL), expected)
    assert all(worlds(2).run(_padded))


BAD = {
    "teacher_hidden .* other tokens": dict(teacher_hidden=normal(N - 1, E).float()),
    r"\[0, 89\).*\[0, 90\)": dict(teacher_weight=normal(V - 1, E).float()),
    "teacher_hidden has 15 features": dict(teacher_hidden=normal(N, 15).float()),
    "student_weight is torch.bfloat16": dict(student_weight=normal(V, D).bfloat16()),
    "both or none must be float64": dict(teacher_hidden=normal(N, E).double(), teacher_weight=normal(V, E).double()),
    "teacher_bias must have shape": dict(teacher_bias=normal(V - 1).float()),
    "beta must be": dict(beta=1.5),
    "beta must be 0, 1": dict(beta=1e-9),
    "target must hold": dict(target=torch.zeros(N)),
    "temperature must be": dict(temperature=0),
    "reduction must be": dict(reduction="batchmean"),
    "target must have shape": dict(target=torch.zeros(N + 1, dtype=torch.int64)),
    "student_hidden must be a tensor": dict(student_hidden=None),
    "teacher_weight must be a tensor": dict(teacher_weight=None),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    x, w, _, y, u, *_ = problem(torch.float32)
    given = dict(student_hidden=x, student_weight=w, teacher_hidden=y, teacher_weight=u)
    with pytest.raises(ValueError, match=message):
        divergence(**given | BAD[message])


def _disagreeing(member: Member, what):
    x, w, _, y, u, *_ = (v.to(member.device) for v in problem(torch.float32))
    w, u = (v.chunk(2)[member.rank] for v in (w, u))
    more = dict(beta=0.1 * member.rank) if what == "beta" else {}
    if what == "refused" and member.rank == 1:
        y = y[:-1]
    prepare.KNOWN.clear()
    with debug_mode(), pytest.raises((ValueError, RuntimeError), match="beta" if what == "beta" else "tokens"):
        divergence(x, w, y, u, process_group=member.group, **more)
    return True


@pytest.mark.parametrize("what", ["beta", "refused"])
def test_debug_mode_tells_all_ranks(what, worlds):
    assert all(worlds(2).run(_disagreeing, what))


def _broken(member: Member):
    x, w, _, y, u, *_ = (v.to(member.device) for v in problem(torch.float32))
    start = 46 * member.rank  # a gap of one
    options = dict(process_group=member.group, vocab_start=start, reduction="none")
    return divergence(x, w[:45], y, u[:45], **options).isnan().all().item()


def test_shards_with_a_gap_give_nan(worlds):
    assert all(worlds(2).run(_broken))
