"""Divergences of a student's softmax from a teacher's: of stored log-probabilities, beside float64 on all logits; and
what the fuzz, which has all configurations of two output layers, cannot draw."""

import math
from unittest import mock

import pytest
import torch
from torch.nn.functional import linear

from benchmarks.engine.peak_memory import peak_memory
from cases import DTYPES, make, normal
from measures import assert_close, assert_no_worse, size, smallest_steps
from parallel_lce.backends import torch_logits
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.distillation import divergence, top_k_divergence
from tools import chosen_backend, on_ranks, shrunk, upstream

N, V, D, E, K = 12, 80, 24, 16, 6
EACH = torch.linspace(0.5, 2.0, N).double()


@pytest.fixture(autouse=True)
def _many_blocks():
    with shrunk(3000):
        yield


def _layer(features: int, seed: int, device, dtype: str) -> list[torch.Tensor]:
    """Hidden states ``[N, features]``, the weight ``[V, features]`` and the bias ``[V]``."""
    values = normal(N, features, seed=seed), normal(V, features, seed=seed + 1), normal(V, seed=seed + 2)
    x, w, b = (v.to(device, DTYPES[dtype]) for v in (values[0], 2.5 * values[1] / features**0.5, values[2]))
    return [x, w, b]


def student(device="cpu", dtype="fp32"):
    return [v.requires_grad_() for v in _layer(D, 0, device, dtype)]


def teacher(kind, device="cpu", dtype="fp32"):
    """Its arguments. ``kind``: "layer", or the tail of stored log-probabilities."""
    y, u, c = _layer(E, 3, device, dtype)
    if kind == "layer":
        return dict(teacher_hidden=y, teacher_weight=u, teacher_bias=c)
    log_probs, ids = (2 * linear(y.double(), u.double(), c.double())).log_softmax(-1).topk(K, -1)
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


def log_probs_of(leaves, logit_scale=1.0, logit_softcap=math.inf, temperature=1.0):
    """Scale and temperature: a number, or one for each token."""
    z = linear(*leaves)
    z = z.to(accumulation_dtype(z.dtype))
    scale, temperature = (torch.as_tensor(v, dtype=torch.float64).to(z).view(-1, 1) for v in (logit_scale, temperature))
    z = z * scale
    capped = z if logit_softcap in (None, math.inf) else logit_softcap * torch.tanh(z / logit_softcap)
    return (capped / temperature).log_softmax(-1)


def of_classes(log_p, log_q, beta):
    p, q = log_p.exp(), log_q.exp()
    if beta in (0, 1):
        return (q * (log_q - log_p)).sum(-1) if beta == 0 else (p * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


def classes(log_p, ids, log_q, tail):
    """``[N, K]`` or, with the tail, ``[N, K + 1]`` log-probabilities; -1e4 for -inf, whose gradients are NaN."""
    there = (ids >= 0) & (ids < V) & (log_q != -torch.inf)
    ids = ids.long().where(there, V)
    log_p = torch.nn.functional.pad(log_p, (0, 1), value=-torch.inf)  # an entry that there is not
    found = [log_p.gather(1, ids), log_q.to(log_p.dtype).masked_fill(~there, -torch.inf)]
    if tail == "class":
        others = log_p.exp().scatter(1, ids, 0.0).sum(1, keepdim=True).log()
        of_teacher = (1 - found[1].exp().sum(1, keepdim=True)).log()
        found = [torch.cat(pair, 1) for pair in zip(found, (others, of_teacher))]
    return [v.masked_fill(v == -torch.inf, -1e4).log_softmax(1) for v in found]


CALLS = [
    ("fp64", 1, False, "class", 0.5, "none", "torch", dict(temperature=EACH, logit_softcap=1.5)),
    ("fp32", 2, True, "class", 0.0, "mean", "torch", dict(temperature=EACH, logit_scale=-0.7)),
    ("bf16", 1, False, "class", 1.0, "sum", "triton", dict(temperature=2)),
    ("fp32", 2, False, "class", 0.5, "sum", "triton", dict(temperature=2, logit_scale=EACH)),
    ("fp64", 2, True, "renormalize", 1.0, "mean", "torch", dict(temperature=0.7, logit_scale=EACH, logit_softcap=1.5)),
    ("fp32", 2, False, "renormalize", 0.5, "none", "triton", dict(temperature=2)),
    ("bf16", 1, False, "renormalize", 0.0, "mean", "triton", dict(temperature=EACH, logit_scale=-EACH)),
]


@pytest.mark.parametrize(("dtype", "ranks", "split", "tail", "beta", "reduction", "backend", "scaled"), CALLS)
@pytest.mark.parametrize("ignored", ["some", "all"])
@on_ranks()
def test_stored_log_probs_suffice(member, dtype, split, tail, beta, reduction, ignored, backend, scaled, kernels):
    """Beside the formula on all logits. Some entries of the student are excluded, unless the divergence were infinite
    then. The teacher of ignored tokens may say anything."""
    whole, stored = student(member.device, dtype), teacher(tail, member.device, dtype)
    wide = accumulation_dtype(DTYPES[dtype])
    scaled = {n: v.to(member.device, wide) if torch.is_tensor(v) else v for n, v in scaled.items()}
    if beta > 0:
        whole[2].detach()[::3] = -torch.inf
    counted = torch.arange(N, device=member.device) % 3 > 0
    counted &= ignored == "some"

    def dense(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [v.detach().to(dtype).requires_grad_() for v in whole]
        found = of_classes(*classes(log_probs_of(leaves, **scaled), *stored.values(), tail), beta) * counted
        if reduction != "none":
            found = found.sum() / (counted.sum().clamp(min=1) if reduction == "mean" else 1)
        return [found.detach(), *torch.autograd.grad((found * upstream(found)).sum(), leaves)]

    truth, yardstick = (dense(dtype) for dtype in (torch.float64, DTYPES[dtype]))
    rows = slice(60 * member.rank, V if member.rank == member.ranks - 1 else 60)
    part = slice(N // 2 * member.rank, N // 2 * (member.rank + 1)) if split else slice(0, N)
    leaves = [v.detach()[own].clone().requires_grad_() for v, own in zip(whole, (part, rows, rows))]
    given = dict(teacher_ids=stored["teacher_ids"], target=torch.where(counted, 0, -100).int())
    given["teacher_log_probs"] = stored["teacher_log_probs"].where(counted[:, None], torch.nan)
    folded = lambda v: v.view(-1, 2, *v.shape[1:]) if torch.is_tensor(v) else v  # noqa: E731
    options = dict(beta=beta, reduction=reduction, vocab_start=rows.start, sequence_parallel=split)
    options |= dict(process_group=member.group if member.ranks > 1 else None)
    with chosen_backend(backend), shrunk(3000):
        given = {n: folded(v) for n, v in (given | scaled).items()}
        value = loss(tail, (folded(leaves[0]), *leaves[1:]), given, **options)
        flat = value.view(-1) if reduction == "none" else value
        gradients = torch.autograd.grad((flat * upstream(flat)).sum(), leaves)
    assert value.shape == ((N // 2, 2) if reduction == "none" else ())
    assert value.dtype == wide and not gradients[0][~counted[part]].any()
    for found, *exact, own in zip((flat, *gradients), truth, yardstick, (..., part, rows, rows)):
        # A tail is a difference from 1, in fp64 in another order.
        steps = 16 if dtype != "fp64" else 1024 if tail == "class" else 32
        floor = steps * torch.finfo(found.dtype).eps * size(exact[0])
        assert_no_worse(found, *(v[own] for v in exact), 1.3 if member.ranks == 1 else 2.0, floor)


@pytest.mark.parametrize("beta", [0, 1e-5, 0.3, 1])
@pytest.mark.parametrize("distance", [1e-4, 1e-2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["layer", "class", "renormalize"])
@pytest.mark.thinned
def test_a_student_close_to_its_teacher_has_an_exact_divergence(dtype, distance, beta, kind, backend, device):
    """The divergence of a token is a difference that vanishes. Its error is far below that of torch's sum of q times
    the difference of two log-probabilities."""
    t = make(24, V, 32, dtype, sharpness=2.0)
    moved = (t.x.double() + distance * normal(24, 32, seed=7)).to(t.x.dtype)
    stored, ids = linear(moved.double(), t.weight.double()).log_softmax(1).topk(K)
    given = dict(teacher_ids=ids, teacher_log_probs=stored.float())
    if kind == "layer":
        given = dict(teacher_hidden=moved, teacher_weight=t.weight)
    given = {name: value.to(device) for name, value in given.items()}
    x = t.x.to(device).requires_grad_()
    found = loss(kind, [x, t.weight.to(device)], given, beta=beta, reduction="none")

    def of_logits(wide: torch.dtype) -> list[torch.Tensor]:
        leaf = t.x.to(wide).requires_grad_()
        log_p, log_q = (linear(x, t.weight.to(wide)).log_softmax(1) for x in (leaf, moved.to(wide)))
        both = (log_p, log_q) if kind == "layer" else classes(log_p, ids, log_q.gather(1, ids), kind)
        losses = of_classes(*both, beta)
        return [losses, *torch.autograd.grad(losses.sum(), leaf)]

    (exact, gradient), (others, _) = of_logits(torch.float64), of_logits(torch.float32)
    assert_no_worse(found, exact, others, 0.2 if distance == 1e-2 else 0.01, floor=1e-12)
    if dtype != "fp16":  # in which it underflows
        (dx,) = torch.autograd.grad(found.sum(), x)
        assert (dx.double().cpu() - gradient).norm() <= 0.01 * gradient.norm()


def test_a_stored_log_probability_may_be_any_number(backend, device):
    stored = torch.arange(4, device=device)[None], torch.tensor([[1e-6, -2e4, -1e30, -torch.inf]], device=device)
    for cold, share in ((1, 2e4), (2, 1e30)):  # the student has half of 0 and of this entry
        x, weight = torch.ones(1, 1, device=device), torch.full((4, 1), -1e3, device=device)
        weight[0] = weight[cold] = 0.0
        found = [top_k_divergence(x, weight, *stored, tail=tail, beta=1).item() for tail in ("renormalize", "class")]
        torch.testing.assert_close(found, [share / 2 - math.log(2)] * 2, rtol=1e-6, atol=0)


def test_a_student_close_to_its_teacher_has_an_exact_mixture_with_a_small_share(backend, device):
    test_a_student_close_to_its_teacher_has_an_exact_divergence("bf16", 1e-2, 1e-5, "layer", backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_fp16_gradients_of_a_large_mean_do_not_underflow(name, beta):
    """1 / N times a probability of 1 / V is 1e-8, and fp16's smallest number is 6e-8. On a CPU they are fp32."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")
    t = make(10_000, 8192, 64, "fp16", "cuda")
    given, leaves = dict(teacher_hidden=t.x.flip(0), teacher_weight=t.weight), [t.x, t.weight]
    exact = [v.double().requires_grad_() for v in leaves]
    log_q = linear(t.x.flip(0).double(), t.weight.double()).log_softmax(1)
    truth = torch.autograd.grad(of_classes(linear(*exact).log_softmax(1), log_q, beta).mean(), exact)
    with chosen_backend(name):
        value = loss("layer", [v.requires_grad_() for v in leaves], given, beta=beta, logits_budget=1 << 28)
        found = torch.autograd.grad(value, leaves)
    for gradient, whole in zip(found, truth):
        assert_close(gradient, whole, 0.01, smallest_steps(gradient))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_what_surrounds_the_call_changes_nothing(reduction, backend, device):
    """Autocast, also around backward; compiled autograd; a teacher of inference mode; NaN of ignored tokens."""
    leaves, given = student(device, "bf16"), teacher("layer", device, "bf16")
    target = torch.tensor([-100, 0], device=device).repeat(N // 2)

    scale = EACH.to(device, torch.float32)

    def gradients(given=given, scale=scale):
        options = dict(beta=0.5, reduction=reduction, target=target, logit_scale=scale)
        found = 3 * loss("layer", leaves, given, **options).sum()
        # The second backward of a mean forms them again.
        return [found, *(g for _ in range(2) for g in torch.autograd.grad(found, leaves, retain_graph=True))]

    expected = gradients()
    with torch.autocast(device, torch.bfloat16):
        assert all(map(torch.equal, gradients(), expected))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        assert all(map(torch.equal, gradients(), expected))
    with torch.inference_mode():
        copies = {name: value.clone() for name, value in given.items()}
        copies["teacher_hidden"][::2] = torch.nan
    assert all(map(torch.equal, gradients(copies, scale.where(target == 0, torch.nan)), expected))


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
