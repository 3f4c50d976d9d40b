"""A token's statistics have the same bits, whatever stands around it: tokens, blocks, saved exponentials, padding rows,
shards of the vocabulary. The triton backend; interpreted on the CPU, where every logit is one number of the weight."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl

from cases import normal
from parallel_lce import linear_cross_entropy, token_statistics
from parallel_lce.kernels.arithmetic import split_sum
from tools import chosen_backend, on_ranks, shrunk

EVERY = dict(mean_logit=True, sum_p_squared=True, argmax=True, top_k=2)
"""Statistics beside those of a loss, but for the entropy."""
NAMES = "target_log_prob", "lse", "max_logit", "mean_logit", "sum_p_squared", "argmax", "top_logits", "top_ids"
CASES = {
    "plain": {},
    "a soft-cap": dict(logit_softcap=4.0),
    "a bias": dict(bias=True),
    "fp16": dict(dtype=torch.float16),
    "logits below -44": dict(far=-70.0),
}
SLOW = "plain", "a soft-cap", "a bias", "fp16"


def problem(device, R, V, *, bias=False, dtype=torch.bfloat16, far=0.0, **options):
    """Hidden states, weight, target, and options. Tokens are ordinary, or sure of their targets, or of another entry.
    On the CPU a logit is one product, so that every tile gives the same."""
    of_gpu = device.type == "cuda"
    D = 512 if of_gpu else 64
    x, weight = normal(R, D, seed=1), normal(V, D, seed=2)
    x = x * 2.5 * D**-0.5 if of_gpu else torch.eye(D)[torch.arange(R) % D]
    target = torch.randint(V, (R,), generator=torch.Generator().manual_seed(3))
    for start, entry in ((0, target[::3]), (1, torch.tensor(V // 2))):
        direction = weight[entry].expand(len(x[start::3]), -1) if of_gpu else 0
        x[start::3] += direction * 18 / D if of_gpu else 0
    if not of_gpu:
        weight[target[::3], torch.arange(R)[::3] % D] += 14
        weight[V // 2, torch.arange(R)[1::3] % D] += 14
    if far or bias:
        options["linear_bias"] = (normal(V, seed=4) * bias + far).to(device, dtype)
    return x.to(device, dtype), weight.to(device, dtype), target.to(device), options


def assert_equal(found, base, rows=slice(None), names=NAMES) -> None:
    for name in names:
        value, expected = getattr(found, name).detach(), getattr(base, name)[rows]
        differing = (value != expected).reshape(len(value), -1).any(1)
        assert not differing.any(), f"{name} of {int(differing.sum())} of {len(value)} tokens differs"


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("stride", [0, 1, 8])
@pytest.mark.thinned
def test_the_layout_of_the_weight_changes_no_bit(offset, stride, device, kernels):
    """TMA cannot load rows that begin anywhere, and another tile would sum a logit in another order."""
    x, weight, target, options = problem(torch.device(device), 48, 1000)
    # NumPy, which the interpreter sums with, rounds by how memory is aligned.
    (V, D), names = weight.shape, (*NAMES, *["entropy"] * (device == "cuda"))
    memory = weight.new_zeros(offset + V * (D + stride))
    laid = memory[offset:].view(V, D + stride)[:, :D].copy_(weight)
    with chosen_backend("triton"):
        ask = dict(**EVERY, entropy=True)
        assert_equal(token_statistics(x, laid, target, **ask), token_statistics(x, weight, target, **ask), names=names)
        losses = [linear_cross_entropy(x, w, target, reduction="none") for w in (laid, weight)]
        assert torch.equal(*losses)


def test_the_largest_logit_of_top_k_has_the_bits_of_the_maximum(device, kernels):
    """It comes from another projection of the token."""
    x, weight = (normal(rows, 200, seed=rows).to(device, torch.bfloat16) for rows in (40, 300))
    with chosen_backend("triton"):
        found = token_statistics(x, weight, None, argmax=True, top_k=2)
    assert torch.equal(found.top_logits[:, 0], found.max_logit) and torch.equal(found.top_ids[:, 0], found.argmax)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_the_tokens_and_the_memory_around_a_token_change_no_bit(name, device, kernels):
    given, device = dict(CASES[name]), torch.device(device)
    R, V = (600, 5000) if device.type == "cuda" else (72, 300)
    x, weight, target, options = problem(device, R, V, **given)
    names = (*NAMES, "entropy", "expected_logit")
    with chosen_backend("triton"):
        ask = dict(**EVERY, entropy=True, **options)
        base = token_statistics(x, weight, target, **ask)
        for count in (1, 16, 70):
            assert_equal(token_statistics(x[:count], weight, target[:count], **ask), base, slice(count), names)
        order = torch.randperm(R, generator=torch.Generator().manual_seed(5)).to(device)
        assert_equal(token_statistics(x[order], weight, target[order], **ask), base, order, names)
        padded = torch.cat([weight, weight[:50]])
        more = dict(ask)
        if "linear_bias" in ask:
            more["linear_bias"] = torch.cat([ask["linear_bias"], ask["linear_bias"][:50]])
        assert_equal(token_statistics(x, padded, target, vocab_size=V, **more), base, names=names)
        # NumPy's logarithm, which the interpreter takes, is not torch's.
        of_loss = dict(reduction="none", **options)
        base_loss = linear_cross_entropy(x, weight, target, **of_loss)
        assert device.type == "cpu" or torch.equal(base_loss, -base.target_log_prob)
        x.requires_grad_()
        with shrunk(20_000):
            for budget in (0, R * V, None):  # the second saves half of the tokens, in a block of their own
                assert_equal(token_statistics(x, weight, target, logits_budget=budget, **ask), base, names=names)
                assert torch.equal(linear_cross_entropy(x, weight, target, logits_budget=budget, **of_loss), base_loss)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "a bias")) for n in CASES if "-44" not in n]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.thinned
@on_ranks()
def test_the_shards_of_the_vocabulary_change_no_bit(member, name, kernels):
    """Even and uneven ones that begin at an even id, and a part of the sequence on each rank."""
    given = dict(CASES[name])
    R, V = (640, 5000) if member.device.type == "cuda" else (32, 600)
    x, weight, target, options = problem(member.device, R, V, **given)
    bias = options.pop("linear_bias", None)
    ends = {2: [[V // 2, V], [V // 3 // 2 * 2, V]], 4: [[k * V // 4 // 2 * 2 for k in (1, 2, 3, 4)], [2, 2, 310, V]]}
    with chosen_backend("triton"):
        base = token_statistics(x, weight, target, linear_bias=bias, **EVERY, **options)
        for stops in ends[member.ranks]:
            rows = slice(stops[member.rank - 1] if member.rank else 0, stops[member.rank])
            where = dict(process_group=member.group, vocab_start=rows.start, **EVERY, **options)
            where["linear_bias"] = bias if bias is None else bias[rows].clone()
            assert_equal(token_statistics(x, weight[rows].clone(), target, **where), base)
            part = x.chunk(member.ranks)[member.rank].clone()
            found = token_statistics(part, weight[rows].clone(), target, sequence_parallel=True, **where)
            assert_equal(found, base)


@triton.jit
def _sum(values, bounds, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    v = tl.load(values + r[:, None] * COLUMNS + c[None, :])
    tl.store(sums + r, split_sum(v, tl.load(bounds + r), r))


@pytest.mark.parametrize("peaked", [False, True])
def test_a_sum_in_another_order_is_the_same_to_far_below_fp32(peaked, device, kernels):
    """Of exponentials of logits that spread as a model's, or of which one is far above the others."""
    logits = normal(16, 256, seed=1) * 3
    logits[:, 77] += 20 * peaked
    values = logits.exp().float()
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2))
    found = []
    for given in (values, values.view(16, 128, 2)[:, order].reshape(16, 256)):
        given, sums = given.to(device), torch.empty(16, dtype=torch.float64, device=device)
        _sum[(1,)](given.contiguous(), given.amax(1), sums, ROWS=16, COLUMNS=256)
        found.append(sums.cpu())
    exact = values.double().sum(1)
    assert ((found[0] - found[1]).abs() <= 2.0**-36 * exact).all()
    # Pairs of columns are added in fp32.
    assert ((found[0] - exact).abs() <= 2.0**-24 * exact).all()
