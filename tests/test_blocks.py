"""The work of either backend on one block beside float64, entry by entry: Triton's kernels interpreted on the CPU,
compiled with ``-m gpu``.

Each row of x picks a column of the weight, so that logits are known exactly. The gradient of the weight then shows the
gradient of each logit.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from blocks import block_backward, block_forward
from cases import DTYPES, normal
from parallel_lce.backends import torch_backend, triton, triton_backward
from parallel_lce.backends.interface import GradBuffers, Projection, Scratch, savable
from parallel_lce.core.grad_buffers import GradBuffer, MainGrad
from parallel_lce.core.partials import SUM_EXP, TARGET, Coefficients, Columns, integer_view
from parallel_lce.kernels import projection as mainloop
from parallel_lce.kernels.arithmetic import REACH
from parallel_lce.kernels.projection import Product
from tools import shrunk

pytestmark = pytest.mark.usefixtures("kernels")

ALL = Columns(*[True] * len(fields(Columns)))
START = 11  # global id of the first entry
KINDS = 9  # of tokens, in turn

EVERY = dict(gamma=True, delta=True, epsilon=True, token_scale=True, scale=-0.5)
# R, V, D and what a block is given; ``save`` and ``scratch``: entries and bytes.
CASES = {
    "saved": {},
    "recomputed": dict(save=0, scratch=40_000),
    "some saved": dict(save=300, scratch=20_000, main=torch.bfloat16),
    "every coefficient": EVERY,
    "every coefficient, recomputed": EVERY | dict(save=0, bias=True),
    "a gradient of the bias": dict(bias=True, main=torch.float32),
    "a frozen weight": dict(frozen="weight", factor="one"),
    "frozen hidden states": dict(frozen="x", factor="each"),
    "factors of tokens": dict(factor="each"),
    "factors of tokens, recomputed": dict(save=0, factor="each"),
    "a factor": dict(factor="one"),
    "soft-cap": dict(softcap=5.0, gamma=True),
    "soft-cap and every coefficient": EVERY | dict(softcap=5.0),
    "soft-caps of tokens": dict(softcap="each", token_scale=True, save=0),
    "rows in pieces": dict(R=600, V=700, D=72, save=0, scratch=2 * 512 * 512),
    "hidden states that arrive after dX": dict(late=True),
    "several launches": dict(R=300, D=72, row_blocks=2),
    "logits far from 0": dict(far=304.0),
    "whole tiles": dict(R=128, V=256, D=128),
    "one token": dict(R=1, V=5, D=8),
    "no TMA": dict(V=301, D=33, R=33),
    "gaps between rows": dict(gap=3),
    "not aligned": dict(offset=1, save=300),
    "windows of two tiles of the merge": dict(R=20, V=16600, D=24, offset=1, forward_alone=True),
    "row blocks of two launches": dict(R=35 * 128 - 5, V=40, D=8, forward_alone=True),
    "products of some rows": dict(R=1100, V=300, D=8, products=1),
    "products of some rows, recomputed": dict(R=1100, V=300, D=8, products=1, save=0, scratch=4 << 20),
}
IN_EACH_DTYPE = [*CASES][:5]
SLOW = [*CASES][-2:]


def laid_out(value: torch.Tensor, dtype: torch.dtype, device: str, gap: int, offset: int) -> torch.Tensor:
    """With ``gap`` elements between rows, and ``offset`` before the first one."""
    rows, columns = value.shape
    memory = torch.full((rows * (columns + gap) + offset,), torch.nan, dtype=dtype, device=device)
    return memory[offset:].view(rows, -1)[:, :columns].copy_(value)


def problem(dtype, device, *, R=40, V=700, D=136, bias=False, far=0.0, gap=0, offset=0, **given) -> SimpleNamespace:
    """Operands, and their logits ``z [R, V]`` in float64, of tokens of each kind.

    0 and 8: as they are. 1: one window far below the others. 2: a logit that no sample meets, far above its window; 3:
    one in each window. 4: the maximum of all ranks far above this shard's. 5 to 7: what :func:`coefficients` says. 6:
    sure of its target, 7: of another entry.
    """
    kind, scale = torch.arange(R) % KINDS, given.get("scale", 1.0)
    # Tokens of one column have one kind.
    column = torch.arange(R) % D
    assert R <= D or D % KINDS == 0 or V < 500
    column_kind = torch.arange(D) % KINDS
    target = torch.randint(V, (R,), generator=torch.Generator().manual_seed(0))
    target[::3] = min(7, V - 1)
    target[1::5] = torch.tensor([-1, V, -(2**63), 2**62]).repeat(R)[: len(target[1::5])]
    picked = normal(D, V, seed=1)
    if given.get("softcap") is None and V > 500:
        picked[column_kind == 1, 256:512] -= 2 * REACH
        picked[column_kind == 2, 5] += 3 * REACH
        picked[column_kind == 3, 5::128] += 3 * REACH
        sure = (kind == 6) & (target >= 0) & (target < V)
        picked[column[sure], target[sure]] += 16
        picked[column_kind == 7, 17] += 20
    # Entries that are masked, unless their logits would be infinite.
    masked = (torch.arange(V) % 50 == 3) & (scale > 0)
    bias_of = torch.where(masked, -torch.inf, normal(V, seed=2)) if bias else None
    if far:
        picked, bias_of = (picked * 4).round() / 4, torch.full((V,), far)
    x = laid_out(torch.eye(D)[column], dtype, device, gap, offset)
    weight = laid_out(picked.t(), dtype, device, gap, offset)
    bias_of = None if bias_of is None else bias_of.to(dtype).to(device)
    scales = normal(R, seed=3).abs().float().to(device) + 0.2 if given.get("token_scale") else None
    softcap = given.get("softcap")
    softcap = torch.linspace(3, 9, R, device=device) if softcap == "each" else softcap
    z = weight.t().double()[column.to(device)] + (0 if bias_of is None else bias_of.double())
    z = z * scale * (1 if scales is None else scales.double()[:, None])
    cap = softcap.double()[:, None] if torch.is_tensor(softcap) else softcap
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    projection = Projection(weight, bias_of, START, V, scale, softcap, scales)
    return SimpleNamespace(x=x, projection=projection, z=z, cap=cap, target=target.to(device), kind=kind.to(device))


def coefficients(t, factor=None, **given) -> Coefficients:
    """5: of zero, but for the target's; and with that. 6: nearly cancel at the target. 8: tiny."""
    R, device = len(t.x), t.x.device
    alpha, beta, gamma, delta, epsilon, each = normal(6, R, seed=4).abs().float().to(device) + 0.1
    alpha[t.kind == 5], alpha[t.kind == 7], alpha[t.kind == 8] = 0.0, 1.0, 1e-25
    beta[(t.kind == 5) & (torch.arange(R, device=device) % 2 == 0)] = 0.0
    beta = torch.where(t.kind == 6, alpha, beta)
    some = {"gamma": gamma / t.z.shape[1], "delta": delta, "epsilon": epsilon}
    some = {name: value for name, value in some.items() if given.get(name)}
    factors = {"each": -each, "one": torch.tensor(-1.5, device=device), None: None}
    return Coefficients(alpha, beta, some.get("gamma"), some.get("delta"), some.get("epsilon"), factors[factor])


def check_forward(partial: torch.Tensor, t) -> None:
    """All columns. Logits are exact, or rounded where they are scaled or capped."""
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
    assert torch.equal(t.z.gather(1, ids[:, None])[:, 0], top)
    rounded = t.cap is not None or t.projection.token_scale is not None or t.projection.scale != 1
    assert rounded or torch.equal(ids, first)


def merged_with_another_rank(partial: torch.Tensor, t) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The partial, the maximum and the sum of exponentials, of this shard and logits elsewhere."""
    lse = t.z.logsumexp(1)
    other = torch.where(t.kind == 4, lse + REACH + 20, lse - 9)
    if t.cap is not None:
        other = lse - 1
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
    slope = t.projection.scale * torch.ones_like(t.z)
    if c.factor is not None:
        slope = slope * (c.factor.double() if c.factor.dim() == 0 else c.factor.double()[:, None])
    if t.projection.token_scale is not None:
        slope = slope * t.projection.token_scale.double()[:, None]
    size = size * slope.abs()
    if t.cap is not None:
        slope = slope * (1 - (t.z / t.cap) ** 2)
        # The slope is that of z from a rounded exponential, and acts on gamma too.
        size = size * (1 + 4 / t.cap)
    hit = torch.arange(t.z.shape[1], device=t.z.device) == t.target[:, None]
    gradient = gradient * slope
    at_target = torch.where(hit, gradient - b[:, None] * slope, 0.0)
    return gradient.masked_fill(hit, 0.0), at_target, size + hit * (b[:, None] * slope).abs()


def assert_within(found: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor, name: str) -> None:
    # The result itself is rounded.
    allowed = allowed + torch.finfo(found.dtype).eps / 2 * exact.abs() + 1e-30
    worst = ((found.double() - exact).abs() / allowed).max().item()
    assert worst <= 1, f"{name} is off by {worst:.3g} of what it may be"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if use and name not in SLOW else pytest.mark.slow)
        for name in CASES
        for dtype in ("bf16", "fp16", "fp32")
        for use in [name in IN_EACH_DTYPE or dtype == ("bf16", "bf16", "fp16")[[*CASES].index(name) % 3]]
    ],
)
@pytest.mark.parametrize("backend", [torch_backend, triton], ids=["torch", "triton"])
def test_a_block(backend, name, dtype, device, monkeypatch):
    if dtype == "fp32" and device == "cuda" and backend is triton:
        pytest.skip("fp32 is the torch backend's on a GPU, unless it is asked not to be")
    case = dict(CASES[name])
    if backend is torch_backend:
        case.pop("late", None)  # it reads hidden states first
    if "products" in case:
        monkeypatch.setattr(triton_backward, "PRODUCT_BYTES", case["products"])
    t = problem(DTYPES[dtype], device, **case)
    (R, D), V, projection = t.x.shape, t.z.shape[1], t.projection
    save = case.get("save", V)
    if isinstance(projection.softcap, float) and not savable(t.x.dtype, projection.softcap):
        save = 0
    if backend is triton:
        aligned = not (case.get("gap") or case.get("offset")) and D * t.x.itemsize % 16 == 0
        tma = Product(t.x, projection.weight).tma
        assert tma == (aligned and (device == "cpu" or torch.cuda.get_device_capability() >= (9, 0)))
    late = t.x.clone().fill_(torch.nan)
    buffer = backend.allocate_saved(projection, R + 3, V).fill_(7.0)

    with ExitStack() as stack:
        stack.enter_context(shrunk(tile=(64, 256)))
        if "row_blocks" in case and backend is triton:
            stack.enter_context(mock.patch.object(mainloop, "blocks_per_launch", lambda *_: case["row_blocks"]))
        partial, saved = block_forward(backend, projection, t.x, t.target, ALL, save, buffer=buffer)
        check_forward(partial, t)
        if saved and backend is triton:
            held = saved.exponentials
            assert held.data_ptr() == buffer.data_ptr() and (buffer[R * held.stride(0) :] == 7).all()

        if case.get("forward_alone"):
            return
        c = coefficients(t, **case)
        merged, top, total = merged_with_another_rank(partial, t)
        frozen, weight = case.get("frozen"), projection.weight
        dx = None if frozen == "x" else torch.full_like(t.x, torch.nan, memory_format=torch.contiguous_format)
        main = case.get("main")
        main_grad = None if main is None else MainGrad(torch.full_like(weight, 3.0, dtype=main), lambda: None)
        closed, announced = [], []

        class Watched(GradBuffer):
            def close(self, start, stop, rows):
                closed.append(stop)
                super().close(start, stop, rows)

        def ready() -> None:
            if dx is not None:
                announced.append(dx.clone())
            assert backend is not triton or V not in closed, "dW of the last slice is formed beside the sum of dX"
            if case.get("late"):
                late.copy_(t.x)

        dweight = Watched(weight, V, 1, dtype=None if main else torch.float32, main_grad=main_grad)
        dweight = None if frozen == "weight" else dweight
        dbias = GradBuffer(projection.bias, V, 1) if case.get("bias") else None
        grads = GradBuffers(dx, dweight, dbias)
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
    if V > 500 and not {"gamma", "softcap", "bias"} & {*case} and case.get("factor") != "each":
        # Of a token that is sure of an entry that is known exactly. Its gradient is a number of few bits, but for 1e-4.
        sure = (t.kind == 7)[:, None] & (others.abs() > 0.9)
        assert R < KINDS or sure.any()
        whole = torch.where(sure, 2e-4 * size, whole)
    exact = others + targets
    # The target of several tokens is rounded once, others are not.
    allowed = whole + 0.51 * rounding * targets.abs()
    if dx is not None:
        # On a GPU the torch backend rounds every gradient before the products.
        of_dx = allowed if backend is torch_backend and device == "cuda" else whole
        assert_within(dx, exact @ weight.double(), of_dx @ weight.double().abs(), "dX")
        assert len(announced) == 1 and torch.equal(announced[0], dx)
    if dweight is not None:
        dw = dweight.deliver()
        extra = 0.0
        if main is not None:
            assert dw is None
            dw = main_grad.tensor.double() - 3
            extra = torch.finfo(main).eps / 2 * (dw.abs() + 6)
        assert_within(dw, exact.t() @ t.x.double(), allowed.t() @ t.x.double() + extra, "dW")
    if dbias is not None:
        assert_within(dbias.deliver(), exact.sum(0), allowed.sum(0), "dbias")


def test_each_column_alone_is_the_same(device):
    t = problem(torch.float16, device)
    given = t.projection, t.x, t.target
    everything, _ = block_forward(triton, *given, ALL, 0)
    for name in ALL.requested:
        columns = Columns(**{name: True})
        alone, _ = block_forward(triton, *given, columns, 0)
        assert torch.equal(alone[: TARGET + 1], everything[: TARGET + 1]), name
        assert torch.equal(alone[columns[name]], everything[ALL[name]]), name
