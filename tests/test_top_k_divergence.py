"""Divergences from stored log-probabilities of a teacher's largest entries, against float64 on all logits."""

from __future__ import annotations

import pytest
import torch

from cases import DTYPES, normal
from measures import assert_no_worse, size, smallest_steps
from parallel_lce.distillation import divergence, top_k_divergence
from test_distillation import of_logits
from tools import alone, chosen_backend, debug_mode, everywhere
from world import Member

N, V, D, K = 12, 90, 24, 6
TEMPERATURE = 1.3
SHARDS = {1: (90,), 2: (60, 30)}


def problem(dtype):
    """Hidden states, weight, the teacher's logits, its largest ids and their log-probabilities, and targets."""
    x, w = normal(N, D).to(dtype), (normal(V, D, seed=1) / 2).to(dtype)
    teacher = 2 * normal(N, V, seed=2)
    stored = teacher.log_softmax(-1).topk(K, -1)
    ids, log_probs = stored.indices.int(), stored.values.float()
    ids[1, 4:] = -1  # fewer entries
    log_probs[2, 5] = -torch.inf
    target = torch.zeros(N, dtype=torch.int64)
    target[3] = -100
    return x, w, ids, log_probs, target


def classes(log_probs, ids, there, tail):
    """``[N, K]`` or, with the tail, ``[N, K + 1]`` log-probabilities of all ``[N, V]``; -inf for none."""
    found = log_probs.gather(1, ids.long().clamp(min=0)).masked_fill(~there, -torch.inf)
    if tail == "renormalize":
        return found
    others = torch.ones_like(log_probs).scatter(1, ids.long().clamp(min=0), (~there).to(log_probs.dtype))
    # Entry 0 stands for ids that there are not.
    others[:, 0] = ~((ids == 0) & there).any(1)
    return torch.cat([found, (log_probs.exp() * others).sum(1, keepdim=True).log()], 1)


def dense(name, dtype, tail, beta):
    x, w, ids, log_probs, target = problem(DTYPES[name])
    leaves = [v.to(dtype).requires_grad_() for v in (x, w)]
    wide = torch.promote_types(dtype, torch.float32)
    log_p = (torch.nn.functional.linear(*leaves).to(wide) / TEMPERATURE).log_softmax(-1)
    there = (ids >= 0) & (log_probs != -torch.inf)
    teacher = log_probs.to(wide).masked_fill(~there, -torch.inf)
    if tail == "class":
        teacher = torch.cat([teacher, (1 - teacher.exp().sum(1, keepdim=True)).log()], 1)
    student = classes(log_p, ids, there, tail)
    lowest = -1e4  # instead of -inf, whose gradients are NaN
    student, teacher = (v.masked_fill(v == -torch.inf, lowest) for v in (student, teacher))
    found = (of_logits(student, teacher, beta) * (target != -100)).sum() / (N - 1)
    return [found.detach(), *torch.autograd.grad(found, leaves)]


def _found(member: Member, name, tail, beta, backend, sequence_parallel):
    x, w, ids, log_probs, target = (v.to(member.device) for v in problem(DTYPES[name]))
    shards = SHARDS[member.ranks]
    start = sum(shards[: member.rank])
    x = x.chunk(member.ranks)[member.rank] if sequence_parallel else x
    leaves = [v.clone().requires_grad_() for v in (x, w[start : start + shards[member.rank]])]
    options = dict(tail=tail, beta=beta, temperature=TEMPERATURE, target=target)
    if member.ranks > 1:
        options |= dict(process_group=member.group, vocab_start=start, sequence_parallel=sequence_parallel)
    with chosen_backend(backend):
        found = top_k_divergence(*leaves, ids, log_probs, **options)
        return [v.detach().cpu() for v in (found, *torch.autograd.grad(found, leaves))]


def check(parts, name, tail, beta, sequence_parallel, factor):
    truth, yardstick = (dense(name, dtype, tail, beta) for dtype in (torch.float64, DTYPES[name]))
    assert all(torch.equal(part[0], parts[0][0]) for part in parts)
    dx = torch.cat([p[1] for p in parts]) if sequence_parallel else parts[0][1]
    found = parts[0][0], dx, torch.cat([p[2] for p in parts])
    for label, ours, exact, other in zip(("loss", "dx", "dweight"), found, truth, yardstick):
        # The tail is a difference from 1; and torch may be right by luck in a single number.
        floor = 16 * torch.finfo(torch.float32).eps * size(exact) + smallest_steps(ours)
        assert_no_worse(ours, exact, other, factor, floor, label)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", ["class", "renormalize"])
@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16"])
@pytest.mark.thinned
def test_on_one_rank(name, tail, beta, backend, device):
    if backend == "triton" and name == "fp64":
        pytest.skip("float64 is always torch's")
    parts = [_found(alone(device), name, tail, beta, backend, False)]
    # Triton's interpreter truncates to bf16.
    check(parts, name, tail, beta, False, 8.0 if backend == "triton" and device == "cpu" else 1.1)


@pytest.mark.parametrize(
    ("name", "tail", "beta", "sequence_parallel"),
    [("fp32", "class", 0.0, True), ("fp32", "class", 0.5, False), ("fp64", "renormalize", 1.0, True)],
)
def test_over_ranks(name, tail, beta, sequence_parallel, worlds, device):
    parts = everywhere(worlds, device, 2, _found, name, tail, beta, "torch", sequence_parallel)
    check(parts, name, tail, beta, sequence_parallel, 2.0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", ["class", "renormalize"])
def test_all_entries_are_the_whole_divergence(tail, beta):
    x, w, *_ = problem(torch.float64)
    y, u = normal(N, 8, seed=5), normal(V, 8, seed=6)
    ids = torch.arange(V).expand(N, V).contiguous()
    stored = (y @ u.T).log_softmax(-1)
    expected = divergence(x, w, y, u, beta=beta, reduction="none")
    found = top_k_divergence(x, w, ids, stored, tail=tail, beta=beta, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tail", ["class", "renormalize"])
def test_a_token_without_an_entry(tail):
    x, w, ids, log_probs, _ = problem(torch.float32)
    ids[5] = -1
    for beta in (0.0, 0.5, 1.0):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        found = top_k_divergence(*leaves, ids, log_probs, tail=tail, beta=beta, reduction="none")
        dx, dw = torch.autograd.grad(found.sum(), leaves)
        assert abs(found[5].item()) < 1e-6 and dx[5].abs().max() < 1e-5
        assert found.isfinite().all() and dx.isfinite().all() and dw.isfinite().all()


@pytest.mark.parametrize("tail", ["class", "renormalize"])
def test_gradcheck(tail):
    x, w, ids, log_probs, target = problem(torch.float64)
    x, w = x[:, :6].contiguous(), w[:, :6].contiguous()

    def found(*student):
        return top_k_divergence(*student, ids, log_probs.double(), tail=tail, beta=0.4, target=target)

    assert torch.autograd.gradcheck(found, (x.requires_grad_(), w.requires_grad_()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1000.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", ["class", "renormalize"])
def test_what_is_stored_of_ignored_tokens_may_be_anything(tail, beta, value):
    x, w, ids, log_probs, target = problem(torch.float32)
    found = []
    for stored in (log_probs, log_probs.index_fill(0, torch.tensor([3]), value)):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = top_k_divergence(*leaves, ids, stored, tail=tail, beta=beta, target=target)
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize("tail", ["class", "renormalize"])
def test_an_entry_that_the_student_excludes(tail, beta):
    """Its probability is 0, not its divergence NaN."""
    x, w, ids, log_probs, _ = (v[:1] if len(v) == N else v for v in problem(torch.float64))
    excluded = torch.zeros(V, dtype=torch.float64)
    excluded[ids[0, 0].long()] = -torch.inf
    x.requires_grad_()

    def found(bias, beta):
        return top_k_divergence(x, w, ids, log_probs.double(), tail=tail, beta=beta, student_bias=bias)

    ours, lowest = found(excluded, beta), found(excluded.clamp(min=-700), beta)
    torch.testing.assert_close(ours, lowest)
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(lowest, x))
    assert found(excluded, 0.0).item() == torch.inf


def test_other_target_dtypes_and_no_ignore_index():
    x, w, ids, log_probs, _ = problem(torch.float32)
    target = torch.full((N,), 156, dtype=torch.uint8)  # -100 in eight bits
    options = dict(reduction="none")
    assert top_k_divergence(x, w, ids, log_probs, target=target, **options).all()
    target = torch.full((N,), -100)
    assert not top_k_divergence(x, w, ids, log_probs, target=target, ignore_index=None, **options).any()


def _disagreeing(member: Member, what):
    x, w, ids, log_probs, _ = (v.to(member.device) for v in problem(torch.float32))
    beta = 0.5 * member.rank if what == "beta" else 0.0
    stored = log_probs - member.rank if what == "teacher_log_probs" else log_probs
    hidden = None if what == "student_hidden" and member.rank else x
    with debug_mode(), pytest.raises(ValueError, match=what):
        top_k_divergence(hidden, w.chunk(2)[member.rank], ids, stored, beta=beta, process_group=member.group)
    return True


@pytest.mark.parametrize("what", ["beta", "teacher_log_probs", "student_hidden"])
def test_debug_mode_tells_all_ranks(what, worlds):
    assert all(worlds(2).run(_disagreeing, what))


BAD = {
    "tail must be": dict(tail="none"),
    "student_hidden must be a tensor": dict(student_hidden=None),
    "student_weight .* two dimensions": dict(student_weight=torch.zeros(V)),
    "teacher_ids must be ids of shape": dict(student_hidden=torch.zeros(N - 1, D)),
    "logits_budget must be": dict(logits_budget="x"),
    "process_group must be": dict(process_group=5),
    r"both be \[..., K\]": dict(teacher_ids=torch.zeros(N, K + 1, dtype=torch.int64)),
    "must be tensors": dict(teacher_ids=None),
    "must be floating-point": dict(teacher_log_probs=torch.zeros(N, K, dtype=torch.int64)),
    "teacher_ids must be of an integer dtype": dict(teacher_ids=torch.zeros(N, K)),
    "target must be None or ids": dict(target=torch.zeros(N)),
    "target must be": dict(target=torch.zeros(N, K, dtype=torch.int64)),
    "beta must be": dict(beta=-1),
    "temperature must be": dict(temperature=float("inf")),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    x, w, ids, log_probs, _ = problem(torch.float32)
    given = dict(student_hidden=x, student_weight=w, teacher_ids=ids, teacher_log_probs=log_probs)
    with pytest.raises(ValueError, match=message):
        top_k_divergence(**given | BAD[message])
