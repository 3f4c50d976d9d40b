"""TokenStatistics: every field and its gradient against float64, and the hazards of design.md.

Bodies run on a rank of a real group or alone; errors are measured against the same-dtype dense path.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

import parallel_lce
from cases import DTYPES, Case, error, make
from parallel_lce import functional, reference
from parallel_lce.backends import eager
from parallel_lce.statistics import DIFFERENTIABLE
from tools import alone, everywhere, shrunk
from world import Member

EVERYTHING = dict(mean_logit=True, expected_logit=True, argmax=True)


@dataclass(frozen=True)
class Call:
    """A call of ``token_statistics``. ``shards``: rows per rank; None for equal shards, the last
    rows of which are padding that holds NaN."""

    N: int
    V: int
    D: int
    dtype: str = "fp32"
    ranks: int = 1
    sequence_parallel: bool = False
    budget: int | None = None
    block_bytes: int | None = None
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    shards: tuple[int, ...] | None = None
    sharpness: float = 1.0

    def __str__(self) -> str:
        defaults = type(self).__dataclass_fields__
        changed = [f"{n}={v}" for n, v in vars(self).items() if n not in "NVD" and v != defaults[n].default]
        return "-".join([f"{self.N}x{self.V}x{self.D}", *changed])


def tensors(call: Call, device="cpu"):
    t = make(Case(call.N, call.V, call.D, call.dtype, bias=call.bias, sharpness=call.sharpness), device)
    outside = torch.tensor([-1, call.V, call.V + 3, -(2**63), 2**62], device=t.target.device)
    t.target[1::3] = outside.repeat(call.N)[: len(t.target[1::3])]
    generator = torch.Generator().manual_seed(5)
    upstream = {
        name: torch.randn(call.N, generator=generator, dtype=torch.float64).to(device)
        for name in DIFFERENTIABLE
    }
    return t, upstream


def ours(member: Member, call: Call, fields=DIFFERENTIABLE) -> dict[str, torch.Tensor]:
    """Every field, and dX, dW, dbias of each field alone, each from the first backward of a graph."""
    t, upstream = tensors(call, member.device)
    rows = -(-call.V // call.ranks) if call.shards is None else call.shards[member.rank]
    start = rows * member.rank if call.shards is None else sum(call.shards[: member.rank])
    real = max(0, min(rows, call.V - start))
    weight = t.weight.new_full((rows, call.D), torch.nan)
    weight[:real] = t.weight[start : start + real]
    bias = None
    if t.bias is not None:
        bias = t.bias.new_full((rows,), torch.nan)
        bias[:real] = t.bias[start : start + real]
        bias.requires_grad_()
    x = t.x.chunk(call.ranks)[member.rank] if call.sequence_parallel else t.x
    leaves = [x.clone().requires_grad_(), weight.requires_grad_()] + ([] if bias is None else [bias])
    with shrunk(call.block_bytes, (32, 64)):
        compute = lambda: parallel_lce.token_statistics(  # noqa: E731
            leaves[0],
            weight,
            t.target,
            linear_bias=bias,
            logit_scale=call.scale,
            logit_softcap=call.softcap,
            process_group=member.group,
            sequence_parallel=call.sequence_parallel,
            vocab_start=start if call.shards else None,
            vocab_size=call.V,
            logits_budget=call.budget,
            **EVERYTHING,
        )
        found = compute()
        results = {name: value.detach().cpu() for name, value in vars(found).items()}
        assert torch.equal(parallel_lce.log_prob(found), found.target_log_prob)
        assert torch.equal(parallel_lce.entropy(found), found.entropy)
        for name in fields:
            value = getattr(compute(), name)
            gradients = torch.autograd.grad(value, leaves, upstream[name].to(value.dtype))
            for label, gradient in zip(("dx", "dweight", "dbias"), gradients):
                if label != "dx":
                    assert torch.count_nonzero(gradient[real:]) == 0, "gradient of padding"
                    gradient = gradient[:real]
                results[f"{label} of {name}"] = gradient.cpu()
    return results


def dense(call: Call, dtype: torch.dtype, z_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same from all logits: projected in ``dtype``, statistics in ``z_dtype``."""
    t, upstream = tensors(call)
    leaves = [v.to(dtype).requires_grad_() for v in (t.x, t.weight, t.bias) if v is not None]
    z = torch.nn.functional.linear(*leaves).to(z_dtype) * call.scale
    if call.softcap is not None:
        z = call.softcap * torch.tanh(z / call.softcap)
    results = reference.statistics(z, t.target)
    found = {name: value.detach() for name, value in results.items()}
    for name in DIFFERENTIABLE:
        gradients = torch.autograd.grad(
            results[name], leaves, upstream[name].to(z_dtype), retain_graph=True
        )
        found |= {f"{l} of {name}": g for l, g in zip(("dx", "dweight", "dbias"), gradients)}
    return found


def whole(call: Call, parts: list[dict]) -> dict[str, torch.Tensor]:
    """What the ranks found together; per-token values agree to the bit."""
    results = {}
    for name, value in parts[0].items():
        everyone = [p[name] for p in parts]
        if name.startswith(("dweight", "dbias")) or (name.startswith("dx") and call.sequence_parallel):
            results[name] = torch.cat(everyone)
        else:
            assert all(torch.equal(value, other) for other in everyone[1:]), f"{name} differs by rank"
            results[name] = value
    return results


def check(call: Call, found: dict[str, torch.Tensor], factor: float) -> None:
    dtype = DTYPES[call.dtype]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    truth = dense(call, torch.float64, torch.float64)
    yardstick = dense(call, dtype, wide)
    assert found.pop("vocab_size").item() == call.V
    operands = (v if v is None else v.double() for v in _operands(call))
    z = reference.logits(*operands, scale=call.scale, softcap=call.softcap)
    picked = z.gather(1, found.pop("argmax").unsqueeze(1)).squeeze(1)
    slack = 1e-12 if dtype == torch.float64 else 1e-5
    assert (picked >= z.amax(1) - slack * z.abs().amax()).all(), "argmax is not the largest"
    for name, value in found.items():
        expected = wide if " of " not in name else dtype
        assert value.dtype == expected, name
        assert value.shape == truth[name].shape, name
        size = truth[name].norm().item()
        if name in ("mean_logit", "expected_logit"):
            # A sum relative to the largest logit, plus that: rounded at the larger of the two.
            size = max(size, truth["max_logit"].norm().item())
        floor = torch.finfo(value.dtype).eps * size
        floor *= 32 if dtype == torch.float64 else 1
        if dtype == torch.float16 and " of " in name:
            floor += 2**-24 * value.numel() ** 0.5
        its = error(yardstick[name], truth[name])
        assert error(value, truth[name]) <= factor * its + floor, (
            f"{name}: error {error(value, truth[name]):.3g}, torch's {its:.3g}, "
            f"norm {truth[name].norm():.3g}"
        )


def _operands(call: Call):
    t, _ = tensors(call)
    return t.x, t.weight, t.bias


ONE = [
    Call(80, 125, 64),
    Call(80, 125, 64, "fp64", budget=0, block_bytes=5000),
    Call(63, 257, 33, "bf16", bias=True),
    Call(63, 257, 33, "bf16", bias=True, budget=0, block_bytes=9000),
    Call(40, 130, 24, "fp16", scale=0.5),
    Call(40, 130, 24, "fp16", budget=0, softcap=6.0),
    Call(33, 200, 16, "fp32", softcap=4.0, scale=2.0, bias=True),
    Call(33, 200, 16, "fp32", softcap=4.0, scale=2.0, bias=True, budget=0, block_bytes=9000),
    Call(1, 7, 8),
    Call(3, 1, 5, "fp64"),
]
MANY = [
    Call(41, 125, 64, ranks=2),
    Call(42, 125, 64, "bf16", ranks=2, sequence_parallel=True, bias=True),
    Call(40, 260, 31, "fp64", ranks=2, budget=0, block_bytes=4000, softcap=5.0),
    Call(36, 260, 31, "fp32", ranks=2, sequence_parallel=True, budget=0, block_bytes=4000, bias=True),
    Call(40, 130, 24, ranks=3, scale=0.3, bias=True),
    Call(39, 200, 24, "bf16", ranks=3, sequence_parallel=True, shards=(150, 0, 50), bias=True),
    Call(39, 200, 24, "fp64", ranks=3, sequence_parallel=True, shards=(3, 190, 9), budget=0, block_bytes=4000),
    Call(37, 507, 23, ranks=4, bias=True, softcap=3.0),
    Call(36, 9, 23, "fp64", ranks=4, bias=True),  # shards of 3, 3, 3 rows and one of padding alone
    Call(36, 300, 16, "fp16", ranks=4, sequence_parallel=True, budget=0, block_bytes=4000),
]  # fmt: skip


@pytest.mark.parametrize("call", ONE, ids=str)
def test_every_field_on_one_rank(call, device):
    check(call, ours(alone(device), call), factor=1.1)


@pytest.mark.parametrize("call", MANY, ids=str)
def test_every_field_over_ranks(call, worlds, device):
    parts = everywhere(worlds, device, call.ranks, ours, call)
    check(call, whole(call, parts), factor=2.0)


# --- targets ---------------------------------------------------------------------------------------


def statistics(x, weight, target, **options):
    return parallel_lce.token_statistics(x, weight, target, **{**EVERYTHING, **options})


def small(device="cpu", N=24, V=150, D=16, dtype="fp32", sharpness=1.0, seed=0, **options):
    t = make(Case(N, V, D, dtype, ignored="none", sharpness=sharpness, seed=seed, **options), device)
    t.x.requires_grad_()
    t.weight.requires_grad_()
    return t


def test_no_target(device):
    t = small(device)
    with_target = statistics(t.x, t.weight, t.target)
    without = statistics(t.x, t.weight, None)
    assert without.target_logit is None and without.target_log_prob is None
    for name, value in vars(without).items():
        if value is not None:
            assert torch.equal(value, getattr(with_target, name)), name
    found = torch.autograd.grad(without.entropy.sum() + without.lse.sum(), [t.x, t.weight])
    expected = torch.autograd.grad(with_target.entropy.sum() + with_target.lse.sum(), [t.x, t.weight])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_fields_that_were_not_asked_for_are_none(device):
    t = small(device)
    lean = parallel_lce.token_statistics(t.x, t.weight, t.target)
    rich = statistics(t.x, t.weight, t.target)
    for name, value in vars(lean).items():
        asked = name in ("lse", "target_logit", "target_log_prob", "max_logit", "vocab_size")
        assert (value is not None) == asked, name
        assert value is None or torch.equal(value, getattr(rich, name)), name


@pytest.mark.parametrize("budget", [None, 0])
def test_targets_outside_have_statistics_and_no_gradient(budget, device):
    t = small(device, N=6)
    outside = torch.tensor([-100, -1, 150, 151, 2**62, -(2**63)], device=device)
    found = statistics(t.x, t.weight, outside, logits_budget=budget)
    assert torch.count_nonzero(found.target_logit) == 0
    assert torch.equal(found.target_log_prob, -found.lse)
    for g in torch.autograd.grad(found.target_logit.sum(), [t.x, t.weight], retain_graph=True):
        assert torch.count_nonzero(g) == 0
    ours_ = torch.autograd.grad(found.target_log_prob.sum(), [t.x, t.weight], retain_graph=True)
    lse = torch.autograd.grad(-found.lse.sum(), [t.x, t.weight])
    assert all(torch.equal(a, b) for a, b in zip(ours_, lse))


def _in_padding(member: Member):
    """vocab_size 9 on 2 ranks of 5: id 9 is a row of rank 1, but padding (ml-cross-entropy #59)."""
    t = small(member.device, N=5, V=10)
    shard = t.weight.detach().chunk(2)[member.rank].clone().requires_grad_()
    t.target[:] = 9
    found = statistics(t.x, shard, t.target, process_group=member.group, vocab_size=9)
    assert torch.count_nonzero(found.target_logit) == 0
    found.target_logit.sum().backward()
    assert torch.count_nonzero(shard.grad) == 0 and torch.count_nonzero(t.x.grad) == 0
    loss = parallel_lce.linear_cross_entropy(
        t.x, shard, t.target, process_group=member.group, vocab_size=9, reduction="none"
    )
    assert loss.isnan().all()
    return found.lse.detach().cpu()


def test_target_in_padding_hits_nothing(worlds, device):
    t = small(N=5, V=10)
    expected = torch.logsumexp((t.x @ t.weight.t())[:, :9], 1).detach()
    for lse in worlds(2).run(_in_padding):
        torch.testing.assert_close(lse, expected)


def _tied(member: Member):
    """Equal largest logits in every window and shard; products of small integers are exact."""
    x = torch.ones(3, 4, device=member.device)
    shard = torch.zeros(40, 4, device=member.device)
    shard[[7, 30, 39]] = 1.0
    with shrunk(tile=(2, 8)):
        found = statistics(x, shard, None, process_group=member.group)
    return found.argmax.tolist(), found.max_logit.tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_argmax_takes_the_lowest_of_equals(ranks, worlds, device):
    for ids, top in everywhere(worlds, device, ranks, _tied):
        assert ids == [7, 7, 7] and top == [4.0, 4.0, 4.0]


# --- hazards of design.md --------------------------------------------------------------------------

STRATEGIES = {"save": (None, None), "recompute": (0, 4096)}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    """``logits_budget``, with blocks and tiles of a size that makes many of both."""
    budget, block = STRATEGIES[request.param]
    with shrunk(block, (16, 32)):
        yield budget


def field_gradients(found, names, leaves):
    total = sum(getattr(found, name).sum() * (i + 1) for i, name in enumerate(names))
    return torch.autograd.grad(total, leaves)


def dense_double(t, names, bias=None, softcap=None):
    x, w = t.x.detach().double().requires_grad_(), t.weight.detach().double().requires_grad_()
    z = reference.logits(x, w, None if bias is None else bias.double(), softcap=softcap)
    found = reference.statistics(z, t.target)
    total = sum(found[name].sum() * (i + 1) for i, name in enumerate(names))
    return found, torch.autograd.grad(total, [x, w])


def assert_near(found, expected, rtol):
    scale = expected.abs().max().item()
    assert not found.isnan().any()
    difference = (found.detach().double() - expected.detach()).abs().max().item()
    assert difference <= rtol * scale, f"{difference:.3g} of {scale:.3g}"


PLAIN = ["lse", "target_logit", "target_log_prob", "mean_logit", "mean_log_prob"]


@pytest.mark.parametrize("names", [PLAIN, list(DIFFERENTIABLE)], ids=["kept", "expected"])
def test_underflow(strategy, names, device):
    """Logits thousands below the maximum: stored exponentials are 0, and log 0 * 0 is no number."""
    t = small(device)
    bias = torch.zeros(150, device=device)
    bias[40:90] = -5000.0  # more than one window of them
    bias[100] = 5.0
    found = statistics(t.x, t.weight, t.target, linear_bias=bias, logits_budget=strategy)
    truth, gradients = dense_double(t, names, bias)
    for name in DIFFERENTIABLE:
        assert_near(getattr(found, name), truth[name], 1e-5)
    for ours_, exact in zip(field_gradients(found, names, [t.x, t.weight]), gradients):
        assert_near(ours_, exact, 1e-5)


@pytest.mark.parametrize("whole_window", [False, True])
def test_bias_of_minus_infinity_removes_entries(strategy, whole_window, device):
    """An entry of -inf has probability 0 and no gradient; a window, or the first one, may be all -inf."""
    t = small(device)
    t.target.clamp_(min=100)
    gone = slice(0, 64) if whole_window else slice(3, 90, 5)
    bias = torch.zeros(150, device=device)
    bias[gone] = -torch.inf
    found = statistics(t.x, t.weight, t.target, linear_bias=bias, logits_budget=strategy)
    keep = (bias == 0).cpu()
    x, w = t.x.detach().double(), t.weight.detach().double()
    x.requires_grad_()
    w.requires_grad_()
    z = (x @ w.t())[:, keep.to(device)]
    target_logit = (x * w[t.target]).sum(1)
    log_p = z.log_softmax(1)
    truth = {
        "lse": z.logsumexp(1),
        "target_log_prob": target_logit - z.logsumexp(1),
        "expected_logit": (log_p.exp() * z).sum(1),
        "entropy": -(log_p.exp() * log_p).sum(1),
    }
    assert (found.mean_logit == -torch.inf).all()
    for name, value in truth.items():
        assert_near(getattr(found, name), value, 1e-5)
    for names in (["lse", "target_log_prob"], list(truth)):
        exact = torch.autograd.grad(
            sum(truth[n].sum() * (i + 1) for i, n in enumerate(names)), [x, w], retain_graph=True
        )
        found = statistics(t.x, t.weight, t.target, linear_bias=bias, logits_budget=strategy)
        for ours_, expected in zip(field_gradients(found, names, [t.x, t.weight]), exact):
            assert_near(ours_, expected, 1e-5)


def _one_shard_gone(member: Member, budget):
    """All logits of one rank are -inf, padding elsewhere; the others' answer stands."""
    t = small(member.device, V=120)
    shard = t.weight.detach().chunk(3)[member.rank].clone().requires_grad_()
    bias = torch.full((40,), -torch.inf if member.rank == 1 else 0.0, device=member.device)
    t.target[:] = 3
    with shrunk(4096, (16, 32)):
        loss = parallel_lce.linear_cross_entropy(
            t.x, shard, t.target, linear_bias=bias, process_group=member.group, logits_budget=budget
        )
        loss.backward()
    return loss.detach().cpu(), t.x.grad.cpu(), shard.grad.cpu()


@pytest.mark.parametrize("budget", [None, 0])
def test_a_shard_of_minus_infinity(budget, worlds, device):
    t = small(V=120)
    x, w = t.x.detach().double().requires_grad_(), t.weight.detach().double().requires_grad_()
    left = torch.cat([w[:40], w[80:]])
    torch.nn.functional.cross_entropy(x @ left.t(), torch.full((24,), 3)).backward()
    for rank, (loss, dx, dw) in enumerate(worlds(3).run(_one_shard_gone, budget)):
        assert_near(loss, torch.nn.functional.cross_entropy(x @ left.t(), torch.full((24,), 3)), 1e-6)
        assert_near(dx, x.grad, 1e-5)
        exact = w.grad[40 * rank : 40 * rank + 40]
        assert torch.equal(dw, torch.zeros_like(dw)) if rank == 1 else True
        assert (dw.double() - exact).abs().max() <= 1e-5 * w.grad.abs().max()


@pytest.mark.parametrize("names", [PLAIN, list(DIFFERENTIABLE)], ids=["kept", "expected"])
@pytest.mark.parametrize(("softcap", "dtype"), [(39.0, "fp32"), (60.0, "fp32"), (60.0, "bf16"), (9.0, "fp16"), (20.0, "fp16")])
def test_softcap_range(strategy, softcap, dtype, names, device):
    """Logits over the whole range of the cap. Beyond what the dtype's exponentials span, saved rows
    are recomputed; up to there log(stored) still tells z."""
    t = small(device, D=8, dtype=dtype, sharpness=softcap)
    found = statistics(t.x, t.weight, t.target, logit_softcap=softcap, logits_budget=strategy)
    truth, exact = dense_double(t, names, softcap=softcap)
    spread = found.max_logit.max().item() - reference.logits(
        t.x.detach().double(), t.weight.detach().double(), softcap=softcap
    ).min().item()
    assert spread > 1.9 * softcap, "the case must span the range"
    x, w = (v.detach().clone().requires_grad_() for v in (t.x, t.weight))
    z = torch.nn.functional.linear(x, w).float()
    dense_found = reference.statistics(softcap * torch.tanh(z / softcap), t.target)
    total = sum(dense_found[n].sum() * (i + 1) for i, n in enumerate(names))
    yardstick = torch.autograd.grad(total, [x, w])
    for ours_, its, expected in zip(field_gradients(found, names, [t.x, t.weight]), yardstick, exact):
        # Rounding dX to its dtype is the floor; stored exponentials in half precision get twice the yardstick.
        floor = torch.finfo(t.x.dtype).eps * expected.norm().item()
        assert error(ours_, expected) <= 2 * error(its, expected) + 2 * floor


def _planned(call_options, device="cpu", accumulable=False):
    """The plan of a call of ``token_statistics``."""
    seen = []
    original = functional._token_statistics

    def watch(call, *rest):
        seen.append(call.plan)
        return original(call, *rest)

    functional._token_statistics = watch
    try:
        t = small(device, dtype=call_options.pop("dtype", "fp32"))
        statistics(t.x, t.weight, t.target, **call_options)
    finally:
        functional._token_statistics = original
    return seen[0]


@pytest.mark.parametrize(
    ("dtype", "softcap", "saved"),
    [("fp32", 40.0, True), ("fp32", 41.0, False), ("bf16", 41.0, False), ("fp16", 10.0, True), ("fp16", 11.0, False)],
)
def test_softcap_beyond_the_exponentials_range_saves_nothing(dtype, softcap, saved, device):
    plan = _planned(dict(dtype=dtype, logit_softcap=softcap), device)
    assert [b.kept for b in plan.blocks] == [150 if saved else 0]


REDUCED = {
    "save": dict(logits_budget=None, reduction="mean"),
    "recompute": dict(logits_budget=0, reduction="none"),
    "accumulate": dict(logits_budget=0, reduction="mean"),
}


# Walked again, a graph recomputes what its first backward took from stored exponentials.
WALKED = REDUCED | {"save some": dict(logits_budget=17000, reduction="none")}
STORED_ERROR = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}


def _walked(member: Member, name: str, dtype: str):
    """Four backwards through one graph: one with a zero upstream and one with it doubled."""
    t = small(member.device, N=48, V=200, D=8, dtype=dtype)
    shard = t.weight.detach().chunk(member.ranks)[member.rank].clone().requires_grad_()
    bias = torch.zeros(len(shard), dtype=shard.dtype, device=member.device).requires_grad_()
    leaves = [t.x, shard, bias]
    with shrunk(8192, (16, 32)):
        loss = parallel_lce.linear_cross_entropy(
            t.x, shard, t.target, linear_bias=bias, process_group=member.group, **WALKED[name]
        ).sum()
        accumulates = "AccumulatedLoss" in type(_parent(loss)).__name__
        # dX of fp16 waits for the upstream gradient, which may be a loss scale.
        assert accumulates == (name == "accumulate" and dtype != "fp16")
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        copies = [g.clone() for g in first]
        nothing = torch.autograd.grad(loss, leaves, torch.zeros_like(loss), retain_graph=True)
        double = torch.autograd.grad(loss, leaves, torch.full_like(loss, 2.0), retain_graph=True)
        again = torch.autograd.grad(loss, leaves)
    for one, copy, zero, two, last in zip(first, copies, nothing, double, again):
        assert torch.count_nonzero(copy), "a gradient to compare with"
        assert torch.equal(one, copy), "a later backward wrote into the first one's result"
        assert torch.count_nonzero(zero) == 0
        if name.startswith("save"):
            assert error(last, one) <= STORED_ERROR[dtype] * one.double().norm()
        else:
            assert torch.equal(last, one)
        # Powers of two scale exactly, but in the subnormal numbers of fp16.
        assert torch.equal(two, 2 * last) or dtype == "fp16"
    return [g.cpu() for g in first]


def _parent(loss):
    """The package's node behind a chain of plain operations."""
    node = loss.grad_fn
    while not type(node).__name__.startswith("_"):
        node = node.next_functions[0][0]
    return node


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", WALKED)
def test_second_backward(name, ranks, worlds, device):
    for dtype in ("fp32", "bf16", "fp16"):
        parts = everywhere(worlds, device, ranks, _walked, name, dtype)
        t = small(N=48, V=200, D=8, dtype=dtype)
        x, w = t.x.detach().double().requires_grad_(), t.weight.detach().double().requires_grad_()
        reduction = "sum" if WALKED[name]["reduction"] == "none" else "mean"
        torch.nn.functional.cross_entropy(x @ w.t(), t.target, reduction=reduction).backward()
        tolerance = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}[dtype]
        assert_near(parts[0][0], x.grad, tolerance)
        assert_near(torch.cat([p[1] for p in parts]), w.grad, tolerance)


@pytest.mark.parametrize("names", [["lse", "target_logit"], ["entropy"]], ids=["kept", "expected"])
@pytest.mark.parametrize("budget", [None, 30000])
def test_a_backend_may_write_over_what_is_kept(budget, names, device, monkeypatch):
    """Its memory is scratch afterwards: for the blocks that follow, and for a second backward."""
    original, capacities = eager.block_backward, []

    def spoiling(*arguments):
        *others, kept, to, scratch = arguments
        capacities.append((len(kept), scratch.capacity(torch.uint8)))
        original(*others, kept, to, scratch)
        for tensor in kept:
            tensor.fill_(torch.nan)
        scratch.take(scratch.capacity(torch.uint8), torch.uint8).fill_(255)

    monkeypatch.setattr(eager, "block_backward", spoiling)
    t = small(device, N=64, V=150, D=600)
    weight = t.weight.detach().to(torch.bfloat16).requires_grad_()
    x = t.x.detach().to(torch.bfloat16)
    with shrunk(4000, (16, 32)):
        found = statistics(x, weight, t.target, logits_budget=budget)
        total = sum(getattr(found, name).sum() for name in names)
        first, second = (torch.autograd.grad(total, weight, retain_graph=True)[0] for _ in range(2))
    truth = weight.detach().double().requires_grad_()
    exact = reference.statistics(x.double() @ truth.t(), t.target)
    (expected,) = torch.autograd.grad(sum(exact[name].sum() for name in names), truth)
    for dw in (first, second):
        assert_near(dw, expected, 1e-2)
    kept = min(64, (30000 - 4000) // 300 if budget else 64) * 300
    uses = names == ["lse", "target_logit"]
    blocks = len(capacities) // 2
    assert capacities[0] == (2 * uses, 4000 if uses else kept)
    assert capacities[1:] == [(0, kept)] * (2 * blocks - 1)


def test_first_backward_with_zero_upstream_spoils_nothing(device):
    """The accumulated sums are scaled in place by the first backward: by 0, here."""
    t = small(device, N=48, V=200, D=8)
    with shrunk(8192):
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, logits_budget=0)
        torch.autograd.grad(loss, [t.x], torch.zeros_like(loss), retain_graph=True)
        found = torch.autograd.grad(loss, [t.x, t.weight])
        fresh = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, logits_budget=0)
        expected = torch.autograd.grad(fresh, [t.x, t.weight])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def exact_logits(device):
    """Logits around 300 that fp32 holds exactly, and whose distances are small: all error of a
    statistic is then its own."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (64, 4), generator=generator) / 4
    w = torch.randint(-4, 5, (96, 4), generator=generator) / 4
    bias = torch.full((96,), 300.0)
    target = torch.randint(96, (64,), generator=generator)
    return [v.to(device) for v in (x, w, bias, target)]


def test_no_cancellation_at_large_logits(device):
    x, w, bias, target = exact_logits(device)
    with shrunk(tile=(16, 32)):
        found = statistics(x, w, target, linear_bias=bias)
        loss = parallel_lce.linear_cross_entropy(x, w, target, linear_bias=bias, reduction="none")
        smooth = parallel_lce.linear_cross_entropy(
            x, w, target, linear_bias=bias, reduction="none", label_smoothing=0.3
        )
    z = x.double() @ w.double().t()  # the offset changes neither loss nor entropy
    exact = reference.statistics(z, target)
    exact_loss = torch.nn.functional.cross_entropy(z, target, reduction="none")
    exact_smooth = torch.nn.functional.cross_entropy(z, target, reduction="none", label_smoothing=0.3)
    pairs = {
        "loss": (loss, found.lse - found.target_logit, exact_loss),
        "smoothing": (
            smooth,
            0.7 * (found.lse - found.target_logit) + 0.3 * (found.lse - found.mean_logit),
            exact_smooth,
        ),
        "entropy": (found.entropy, found.lse - found.expected_logit, exact["entropy"]),
    }
    for name, (ours_, naive, truth) in pairs.items():
        assert error(ours_, truth) <= 4 * torch.finfo(torch.float32).eps * truth.norm().item(), name
        assert error(ours_, truth) < error(naive, truth) / 8, f"{name}: no better than the difference"


def test_gradients_at_large_logits(strategy, device):
    x, w, bias, target = exact_logits(device)
    x.requires_grad_()
    w.requires_grad_()
    found = statistics(x, w, target, linear_bias=bias, logits_budget=strategy)
    names = ["target_log_prob", "mean_log_prob", "entropy"]
    ours_ = field_gradients(found, names, [x, w])
    a, b = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    exact = reference.statistics(a @ b.t(), target)
    total = sum(exact[n].sum() * (i + 1) for i, n in enumerate(names))
    for g, truth in zip(ours_, torch.autograd.grad(total, [a, b])):
        assert_near(g, truth, 2e-6)


@contextmanager
def half_operands(half: bool):
    """Gradients of logits enter their products in fp16 on a CPU too, as they do on CUDA."""
    if not half:
        yield
        return
    saved = eager.operand, eager.matmul_nt, eager.accumulate_nt

    def accumulate_nt(total, a, b, **options):
        saved[2](total, a.float(), b.float(), **options)

    eager.operand = lambda tensor: tensor
    eager.matmul_nt = lambda a, b: saved[1](a.float(), b.float())
    eager.accumulate_nt = accumulate_nt
    try:
        yield
    finally:
        eager.operand, eager.matmul_nt, eager.accumulate_nt = saved


@pytest.mark.parametrize("half", [False, True], ids=["", "half operands"])
@pytest.mark.parametrize("name", REDUCED)
def test_fp16_gradients_of_a_large_mean_do_not_underflow(name, half, device):
    """1 / N and a small loss weight push the logits' gradients below fp16's 6e-8; weights of norm
    2^10 bring dX back into its range. torch's own path loses most of it."""
    if half and device == "cuda":
        pytest.skip("CUDA's operands are fp16 anyway")
    t = small(device, N=512, V=96, D=4, dtype="fp16")
    big = (t.weight.detach() * 2**10).requires_grad_()
    x = (t.x.detach() * 2**-10).requires_grad_()
    upstream = 2.0**-14
    with shrunk(16384, (64, 32)), half_operands(half):
        loss = parallel_lce.linear_cross_entropy(x, big, t.target, **REDUCED[name])
        if loss.dim():
            loss = loss.sum() / 512
        dx, dw = torch.autograd.grad(loss, [x, big], torch.full_like(loss, upstream))
    a, b = x.detach().double().requires_grad_(), big.detach().double().requires_grad_()
    exact = torch.autograd.grad(
        torch.nn.functional.cross_entropy(a @ b.t(), t.target) * upstream, [a, b]
    )
    z = torch.nn.functional.linear(x, big).float()
    its = torch.autograd.grad(torch.nn.functional.cross_entropy(z, t.target) * upstream, [x, big])
    # fp16 holds dX in steps of 2^-24, and operands to 2^-11.
    floor = 2**-24 * dx.numel() ** 0.5 + 2**-11 * exact[0].norm().item()
    assert exact[0].abs().max() > 2**-19, "the case must be one that fp16 can hold"
    assert error(its[0], exact[0]) > 0.2 * exact[0].norm(), "torch's path underflows here"
    assert error(dx, exact[0]) <= floor < 0.25 * error(its[0], exact[0])
    assert error(dw, exact[1]) <= error(its[1], exact[1]) + 2**-24 * dw.numel() ** 0.5


@pytest.mark.parametrize("name", REDUCED)
def test_sharp_logits_in_bf16(name, device):
    """max |z| near 28: bf16 logits have lost their digits, stored exponentials have not."""
    t = small(device, N=96, V=512, D=64, dtype="bf16", sharpness=6.0)
    exact_x, exact_w = (v.detach().double().requires_grad_() for v in (t.x, t.weight))
    z = exact_x @ exact_w.t()
    assert 22 < z.abs().max() < 34
    truth = torch.autograd.grad(
        torch.nn.functional.cross_entropy(z, t.target), [exact_x, exact_w]
    )
    half = torch.nn.functional.linear(t.x, t.weight).float()
    its = torch.autograd.grad(torch.nn.functional.cross_entropy(half, t.target), [t.x, t.weight])
    with shrunk(32768, (32, 128)):
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **REDUCED[name])
        loss = loss if loss.dim() == 0 else loss.mean()
        found = torch.autograd.grad(loss, [t.x, t.weight])
    for g, torchs, exact in zip(found, its, truth):
        assert error(g, exact) <= 0.5 * error(torchs, exact)


def test_upstream_zeros_give_zero(strategy, device):
    t = small(device)
    found = statistics(t.x, t.weight, t.target, logits_budget=strategy)
    for name in DIFFERENTIABLE:
        value = getattr(found, name)
        for g in torch.autograd.grad(value, [t.x, t.weight], torch.zeros_like(value), retain_graph=True):
            assert torch.count_nonzero(g) == 0, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_upstream_of_any_layout(strategy, dtype, device):
    """Zeros in places, expanded, strided, transposed: the same bits as a contiguous copy gives."""
    t = small(device, dtype=dtype)
    x = t.x.detach().view(4, 6, -1).requires_grad_()
    target = t.target.view(4, 6)

    def gradients(upstream):
        loss = parallel_lce.linear_cross_entropy(
            x, t.weight, target, reduction="none", logits_budget=strategy
        )
        return torch.autograd.grad(loss, [x, t.weight], upstream)

    sparse = torch.randn(4, 6, device=device)
    sparse[1] = 0
    layouts = {
        "expanded": torch.tensor(0.25, device=device).expand(4, 6),
        "rows expanded": torch.randn(6, device=device).expand(4, 6),
        "strided": torch.randn(4, 12, device=device)[:, ::2],
        "transposed": torch.randn(6, 4, device=device).t(),
        "zeros in places": sparse,
    }
    for name, upstream in layouts.items():
        found, expected = gradients(upstream), gradients(upstream.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(found, expected)), name
        a, b = (v.detach().double().requires_grad_() for v in (x, t.weight))
        loss = torch.nn.functional.cross_entropy((a @ b.t()).flatten(0, 1), t.target, reduction="none")
        tolerance = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}[dtype]
        for g, exact in zip(found, torch.autograd.grad(loss, [a, b], upstream.double().flatten())):
            assert_near(g, exact, tolerance)
    loss = parallel_lce.linear_cross_entropy(x, t.weight, target, reduction="none", logits_budget=strategy)
    by_sum = torch.autograd.grad(loss.sum(), [x, t.weight])
    assert all(torch.equal(a, b) for a, b in zip(by_sum, gradients(torch.ones(4, 6, device=device))))


def _with_nan(member: Member, poisoned: bool, budget):
    t = small(member.device, N=24, V=150)
    shard = t.weight.detach().chunk(member.ranks)[member.rank].clone().requires_grad_()
    x = t.x.detach().clone()
    if poisoned:
        x[5, 3] = torch.nan
    x.requires_grad_()
    with shrunk(4096, (16, 32)):
        options = dict(process_group=member.group, logits_budget=budget)
        found = statistics(x, shard, t.target, **options)
        loss = parallel_lce.linear_cross_entropy(x, shard, t.target, reduction="none", **options)
        upstream = torch.ones_like(loss)
        (dx,) = torch.autograd.grad(loss, x, upstream)
    values = {n: v.detach().cpu() for n, v in vars(found).items() if n != "vocab_size"}
    return values | {"loss": loss.detach().cpu(), "dx": dx.cpu()}


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nan_in_one_row_stays_there(ranks, budget, worlds, device):
    others = torch.arange(24) != 5
    clean = everywhere(worlds, device, ranks, _with_nan, False, budget)
    poisoned = everywhere(worlds, device, ranks, _with_nan, True, budget)
    for before, after in zip(clean, poisoned):
        for name, value in after.items():
            assert torch.equal(value[others], before[name][others]), name
            if name == "argmax":
                assert value[5] == -1
            elif name != "target_logit" or ranks == 1:
                assert value[5].isnan().all(), name


def test_evaluation_gives_the_same_bits(device):
    t = small(device)
    trained = statistics(t.x, t.weight, t.target)
    with torch.no_grad():
        evaluated = statistics(t.x, t.weight, t.target)
    with torch.inference_mode():
        inferred = statistics(t.x, t.weight, t.target)
    for name, value in vars(trained).items():
        assert torch.equal(value, getattr(evaluated, name)), name
        assert torch.equal(value, getattr(inferred, name)), name
        assert not getattr(evaluated, name).requires_grad


@pytest.mark.parametrize("budget", [None, 0])
def test_a_second_derivative_is_refused_in_words(budget, device):
    t = small(device, N=48, V=200, D=8)
    with shrunk(8192):
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, logits_budget=budget)
        scale = torch.ones((), device=device, requires_grad=True)
        (dx,) = torch.autograd.grad(loss * scale, t.x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.square().sum().backward()


def test_entropy_needs_its_column(device):
    t = small(device)
    with pytest.raises(ValueError, match="expected_logit=True, got False"):
        parallel_lce.entropy(parallel_lce.token_statistics(t.x, t.weight, t.target))


def test_softmax_policy_gradient_from_statistics(strategy, device):
    """A loss of one's own: advantage-weighted log-probabilities with an entropy bonus."""
    t = small(device)
    advantage = torch.randn(24, device=device)

    def objective(found):
        log_prob, entropy = found["target_log_prob"], found["entropy"]
        return -(log_prob.exp() * advantage.to(log_prob.dtype)).sum() - 0.01 * (entropy**2).sum()

    found = vars(statistics(t.x, t.weight, t.target, logits_budget=strategy))
    ours_ = torch.autograd.grad(objective(found), [t.x, t.weight])
    a, b = (v.detach().double().requires_grad_() for v in (t.x, t.weight))
    exact = torch.autograd.grad(objective(reference.statistics(a @ b.t(), t.target)), [a, b])
    for g, truth in zip(ours_, exact):
        assert_near(g, truth, 1e-5)
