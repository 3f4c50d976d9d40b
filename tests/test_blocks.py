"""The work of either backend on one block beside float64, entry by entry: Triton's kernels interpreted on the CPU,
compiled with ``-m gpu``.

Each row of x picks a column of the weight, so that logits are known exactly. The gradient of the weight then shows the
gradient of each logit.
"""

import itertools
from contextlib import ExitStack
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton.language as tl
from triton import jit

from blocks import block_backward, block_forward, launches
from cases import DTYPES, normal
from parallel_lce import linear_cross_entropy
from parallel_lce.backends import torch_backend, triton, triton_backward
from parallel_lce.backends.interface import GradBuffers, HiddenGrad, Projection, Scratch
from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.core.partials import SUM_EXP, TARGET, Coefficients, Columns, integer_view
from parallel_lce.kernels import product
from parallel_lce.kernels.arithmetic import LOWEST_SHIFT, REACH, logit_above
from parallel_lce.kernels.logit_map import slope_at, softcapped
from tools import chosen_backend, shrunk, small

pytestmark = pytest.mark.usefixtures("kernels")

ALL = Columns(*[True] * len(fields(Columns)))
START = 11  # global id of the first entry
KINDS = 9  # of tokens, in turn

EVERY = dict(gamma=True, delta=True, epsilon=True)
# R, V, D and what a block is given; ``save`` and ``scratch``: entries and bytes.
CASES = {
    "saved": {},
    "recomputed": dict(save=0, scratch=40_000),
    "some saved": dict(save=300, scratch=20_000),
    "every coefficient": EVERY,
    "every coefficient, recomputed": EVERY | dict(save=0, bias=True),
    "a gradient of the bias": dict(bias=True),
    "recomputed, dX last": dict(save=0, scratch=40_000, last=True),
    "rows in pieces": dict(R=600, V=700, D=72, save=0, scratch=2 * 512 * 512),
    "rows in pieces, dX last": dict(R=600, V=700, D=72, save=0, scratch=2 * 512 * 512, last=True, bias=True),
    "hidden states that arrive after dX": dict(late=True),
    "several launches": dict(R=300, D=72, row_blocks=2),
    "logits far from 0": dict(far=304.0),
    "whole tiles": dict(R=128, V=256, D=128),
    "windows of two tiles of the merge": dict(R=20, V=16600, D=25, forward_alone=True),
    "row blocks of two launches": dict(R=35 * 128 - 5, V=40, D=8, forward_alone=True),
    "products of some rows": dict(R=1100, V=300, D=8, products=1),
    "products of some rows, recomputed": dict(R=1100, V=300, D=8, products=1, save=0, scratch=4 << 20),
}
SLOW = [*CASES][-2:]


def problem(dtype, device, *, R=40, V=700, D=136, bias=False, far=0.0, **_) -> SimpleNamespace:
    """Operands, and their logits ``z [R, V]`` in float64, of tokens of each kind.

    0 and 8: as they are. 1: one window far below the others. 2: a logit that no sample meets, far above its window; 3:
    one in each window. 4: the maximum of all ranks far above this shard's. 5 to 7: what :func:`coefficients` says. 6:
    sure of its target, 7: of another entry.
    """
    kind = torch.arange(R) % KINDS
    # Tokens of one column have one kind.
    column = torch.arange(R) % D
    assert R <= D or D % KINDS == 0 or V < 500
    column_kind = torch.arange(D) % KINDS
    target = torch.randint(V, (R,), generator=torch.Generator().manual_seed(0))
    target[::3] = min(7, V - 1)
    target[1::5] = torch.tensor([-1, V, -(2**63), 2**62]).repeat(R)[: len(target[1::5])]
    target[5::18] = min(7, V - 1)  # shared, of kind 5
    picked = normal(D, V, seed=1)
    if V > 500:
        picked[column_kind == 1, 256:512] -= 2 * REACH
        picked[column_kind == 2, 5] += 3 * REACH
        picked[column_kind == 3, 5::128] += 3 * REACH
        sure = (kind == 6) & (target >= 0) & (target < V)
        picked[column[sure], target[sure]] += 16
        picked[column_kind == 7, 17] += 20
    bias_of = torch.where(torch.arange(V) % 50 == 3, -torch.inf, normal(V, seed=2)) if bias else None
    if far:
        picked, bias_of = (picked * 4).round() / 4, torch.full((V,), far)
    x, weight = (v.to(device, dtype) for v in (torch.eye(D)[column], picked.t().contiguous()))
    bias_of = None if bias_of is None else bias_of.to(device, dtype)
    z = weight.t().double()[column.to(device)] + (0 if bias_of is None else bias_of.double())
    projection = Projection(weight, bias_of, START, V)
    return SimpleNamespace(x=x, projection=projection, z=z, target=target.to(device), kind=kind.to(device))


def coefficients(t, **given) -> Coefficients:
    """5: of zero, but for the target's; and with that. 6: nearly cancel at the target. 8: tiny."""
    R, device = len(t.x), t.x.device
    alpha, beta, gamma, delta, epsilon = normal(5, R, seed=4).abs().float().to(device) + 0.1
    alpha[t.kind == 5], alpha[t.kind == 7], alpha[t.kind == 8] = 0.0, 1.0, 1e-25
    beta[(t.kind == 5) & (torch.arange(R, device=device) % 2 == 0)] = 0.0
    beta = torch.where(t.kind == 6, alpha, beta)
    some = {"gamma": gamma / t.z.shape[1], "delta": delta, "epsilon": epsilon}
    return Coefficients(alpha, beta, *(value if given.get(name) else None for name, value in some.items()))


def check_forward(partial: torch.Tensor, t) -> None:
    """All columns. Logits are exact."""
    top, size = t.z.amax(1), t.z.abs().nan_to_num(posinf=0.0).sum(1) + t.z.shape[1]
    moved = t.z - top[:, None]
    e = moved.exp()
    # Sums of terms of either sign, whose roundings are those of their size.
    for name, true, rtol, slack in (
        ("max", top, 3e-6, 0.0),
        ("sum_exp", e.sum(1), 3e-6, 0.0),
        ("shifted", moved.sum(1), 3e-6, 1e-6 * size),
        ("total", t.z.sum(1), 3e-6, 1e-6 * size),
        ("weighted", (e * moved.clamp(min=-1e4)).sum(1), 3e-6, 2e-6 * e.sum(1)),
        ("squared", e.square().sum(1), 6e-6, 0.0),
    ):
        found = partial[ALL.names.index(name)].double()
        assert ((found - true).abs() <= rtol * true.abs() + slack).logical_or(found == true).all(), name
    hit = (t.target >= 0) & (t.target < t.z.shape[1])
    picked = t.z.gather(1, t.target.clamp(0, t.z.shape[1] - 1)[:, None])[:, 0]
    torch.testing.assert_close(partial[TARGET].double(), torch.where(hit, picked, 0.0), rtol=1e-6, atol=0)
    ids = integer_view(partial[ALL["argmax"]]).long() - START
    first = (t.z == top[:, None]).int().argmax(1)
    assert torch.equal(ids, first)


def merged_with_another_rank(partial: torch.Tensor, t) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The partial, the maximum and the sum of exponentials, of this shard and logits elsewhere."""
    lse = t.z.logsumexp(1)
    other = torch.where(t.kind == 4, lse + REACH + 20, lse - 9)
    top = torch.maximum(t.z.amax(1), other)
    total = (lse - top).exp() + (other - top).exp()
    merged = partial.clone()
    merged[0], merged[SUM_EXP] = top.to(partial), total.to(partial)
    return merged, top, total


def gradient_of_logits(t, c: Coefficients, top, total) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[R, V]`` each: the gradient without the targets', the targets' and the magnitude of what is summed."""
    a, b, g, d, q = (torch.zeros_like(top) if v is None else v.double() for v in c[:5])
    moved = (t.z - top[:, None]).clamp(min=-1e4)
    p = moved.exp() / total[:, None]
    size = p * (a.abs()[:, None] + d.abs()[:, None] * (1 + moved.abs()) + q.abs()[:, None] * p) + g.abs()[:, None]
    gradient = p * (a[:, None] + d[:, None] * moved + q[:, None] * p) - g[:, None]
    hit = torch.arange(t.z.shape[1], device=t.z.device) == t.target[:, None]
    at_target = torch.where(hit, gradient - b[:, None], 0.0)
    return gradient.masked_fill(hit, 0.0), at_target, size + hit * b[:, None].abs()


def assert_within(found: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor, name: str) -> None:
    # The result itself is rounded.
    allowed = allowed + torch.finfo(found.dtype).eps / 2 * exact.abs() + 1e-30
    worst = ((found.double() - exact).abs() / allowed).max().item()
    assert worst <= 1, f"{name} is off by {worst:.3g} of what it may be"


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param((backend, name), marks=[pytest.mark.slow] * (name in SLOW))
        for backend, name in itertools.product((torch_backend, triton), CASES)
    ],
    ids=lambda choice: f"{choice[0].NAME}, {choice[1]}",
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.thinned
def test_a_block(choice, dtype, device, monkeypatch):
    backend, name = choice
    if dtype == "fp32" and device == "cuda" and backend is triton:
        pytest.skip("fp32 is the torch backend's on a GPU, unless it is asked not to be")
    case = dict(CASES[name])
    if backend is torch_backend:
        case.pop("late", None)  # it reads hidden states first
    if "products" in case:
        monkeypatch.setattr(triton_backward, "PRODUCT_BYTES", case["products"])
    t = problem(DTYPES[dtype], device, **case)
    (R, V), projection = t.z.shape, t.projection
    save = case.get("save", V)
    late = t.x.clone().fill_(torch.nan)
    buffer = backend.allocate_saved(projection, R + 3, V).fill_(7.0)

    with ExitStack() as stack:
        stack.enter_context(shrunk(tile=(64, 256)))
        if "row_blocks" in case and backend is triton:
            stack.enter_context(mock.patch.object(product, "blocks_per_launch", lambda *_: case["row_blocks"]))
        partial, saved = block_forward(backend, projection, t.x, t.target, ALL, save, buffer=buffer)
        check_forward(partial, t)
        if saved and backend is triton:
            held = saved.exponentials
            assert held.data_ptr() == buffer.data_ptr() and (buffer[R * held.stride(0) :] == 7).all()
            if saved.on_shift is not None and V > 500:
                # Rows of the former need not be rewritten.
                assert saved.on_shift[t.kind == 0].all() and not saved.on_shift[t.kind == 1].any()

        if case.get("forward_alone"):
            return
        c = coefficients(t, **case)
        merged, top, total = merged_with_another_rank(partial, t)
        weight, dx = projection.weight, torch.full_like(t.x, torch.nan)
        closed, announced = [], []

        class Watched(GradBuffer):
            def close(self, start, stop, rows):
                closed.append(stop)
                super().close(start, stop, rows)

        def ready() -> None:
            announced.append(dx.clone())
            # dW of the last slice is formed beside the sum of dX.
            assert backend is not triton or (V in closed) == ("last" in case and dtype != "fp32")
            if case.get("late"):
                late.copy_(t.x)

        dweight = Watched(weight, V, 1, dtype=torch.float32)
        dbias = GradBuffer(projection.bias, V, 1) if case.get("bias") else None

        def new_dx() -> torch.Tensor:
            assert "last" not in case or dtype == "fp32" or scratch._memory is None, "its bytes hold logits"
            return dx

        grads = GradBuffers(HiddenGrad(new_dx, last="last" in case), dweight, dbias)
        if case.get("late"):
            late.fill_(torch.nan)
        some = late if case.get("late") and save == V else t.x
        scratch = Scratch(case.get("scratch", 0), device)
        block_backward(backend, projection, some, t.target, merged, c, saved, grads, scratch, announce=ready)

    others, targets, size = gradient_of_logits(t, c, top, total)
    rounding, near = torch.finfo(t.x.dtype).eps, 1e-5 if dtype == "fp32" else 2e-6
    # In fp16 the largest gradient is brought near 2^10.
    smallest = 2.0**-32 * size.max() if dtype == "fp16" else 0.0
    # The triton backend forms the gradient of a target anew, from its logit.
    stored = size if backend is torch_backend else size.masked_fill(targets != 0, 0.0)
    whole = rounding * (others.abs() + stored) + near * size + smallest
    if V > 500 and not {"gamma", "bias"} & {*case}:
        # Of a token that is sure of an entry that is known exactly. Its gradient is a number of few bits, but for 1e-4.
        sure = (t.kind == 7)[:, None] & (others.abs() > 0.9)
        assert R < KINDS or sure.any()
        whole = torch.where(sure, 2e-4 * size, whole)
    exact = others + targets
    # The target of several tokens is rounded once, others are not.
    allowed = whole + 0.51 * rounding * targets.abs()
    # On a GPU the torch backend rounds every gradient before the products.
    of_dx = allowed if backend is torch_backend and device == "cuda" else whole
    assert_within(dx, exact @ weight.double(), of_dx @ weight.double().abs(), "dX")
    assert len(announced) == 1 and torch.equal(announced[0], dx)
    assert_within(dweight.deliver(), exact.t() @ t.x.double(), allowed.t() @ t.x.double(), "dW")
    if dbias is not None:
        assert_within(dbias.deliver(), exact.sum(0), allowed.sum(0), "dbias")


SLICES = {
    "with the bytes of dX too": (600, 256, 0, 2 * 600 * 256, [512, 188]),
    "without them, since they are long enough": (300, 256, 0, 2 * 300 * 256, [256, 256, 188]),
    "in the memory of two windows that were saved": (40, 16, 40 * 512 * 2 + 256, 256, [188]),
    "in that of an earlier block": (100, 256, 90_000, 256, [700]),
    "of pieces of rows, where those of all would be narrow": (600, 16, 0, 2 * 512 * 512, [512, 512, 188, 188]),
}


@pytest.mark.parametrize(("N", "D", "budget", "block", "slices"), SLICES.values(), ids=SLICES)
def test_slices_that_are_projected_again(N, D, budget, block, slices, device, monkeypatch):
    """A budget is one buffer, not two, and slices are as large as it. On one rank they also take the bytes in which dX
    is written at the end."""
    if N == 300:
        monkeypatch.setattr(triton_backward, "MEASURED", replace(triton_backward.MEASURED, longest_slice=256))
    if N == 40:
        monkeypatch.setattr(Scratch, "borrow", lambda *_: pytest.fail("more memory than what was saved"))
    t = small(device, N=N, V=700, D=D, dtype="bf16")
    t.weight.requires_grad_(N != 100)  # else columns would be saved, not rows
    freed = mock.Mock(wraps=Scratch.release)
    monkeypatch.setattr(Scratch, "release", lambda scratch: freed(scratch))
    with chosen_backend("triton"), shrunk(block), launches() as found:
        loss = linear_cross_entropy(t.x, t.weight, t.target, reduction="none", logits_budget=budget)
        loss.sum().backward()
    assert freed.called == (N in (300, 600))  # nothing was saved
    assert [each.given["entries"] for each in found if each.of_gradient] == slices


@jit
def _values(x, cap, capped, slope, logarithm, n, BLOCK: tl.constexpr):
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + here, mask=here < n, other=1.0)
    z = softcapped(value, cap)
    tl.store(capped + here, z, mask=here < n)
    tl.store(slope + here, slope_at(z, cap), mask=here < n)
    tl.store(logarithm + here, logit_above(tl.abs(value), 0.0, 0.0), mask=here < n)


def _capped(x, cap) -> tuple[torch.Tensor, ...]:
    """``softcapped(x)``, its derivative, and log |x|."""
    found = [torch.empty_like(x) for _ in range(3)]
    _values[(-(-len(x) // 1024),)](x, cap, *found, len(x), BLOCK=1024)
    return tuple(found)


@pytest.mark.parametrize("cap", [2.0**-126, 1e-3, 1.0, 30.0, 1e4, 1e30])
def test_soft_caps_and_logarithms_keep_their_digits(cap, device):
    """On a GPU both use approximate instructions."""
    near, far = torch.linspace(-12, 12, 20_001), torch.logspace(-30, 2, 10_000)
    x = (torch.cat([near, far]).double() * cap).float().to(device)
    x = x[x.abs() >= 2.0**-126]
    capped, slope, logarithm = _capped(x, cap)
    exact = cap * torch.tanh(x.double() / cap)
    assert ((capped - exact) / exact).abs().max() <= 8 * 2.0**-24
    assert (slope - (1 - (exact / cap) ** 2)).abs().max() <= 16 * 2.0**-24
    exact = x.double().abs().log()
    assert ((logarithm - exact).abs() / (1 + exact.abs())).max() <= 2.0**-22


@pytest.mark.parametrize("cap", [1e-40, 2.0**-126, 30.0, 3e38])
def test_soft_caps_of_numbers_beyond_all_others(cap, device):
    x = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")], device=device)
    capped, slope, logarithm = _capped(x, cap)
    assert capped[0] == 0 and slope[0] == 1 and logarithm[0] == LOWEST_SHIFT.value
    cap = torch.tensor(cap).item()
    assert capped[1:3].tolist() == [cap, -cap] and slope[1:3].abs().max() <= (1 if cap < 2.0**-126 else 16 * 2.0**-24)
    assert capped[3].isnan() and slope[3].isnan()
