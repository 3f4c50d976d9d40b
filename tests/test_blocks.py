"""Statistics and their gradients beside float64, entry by entry, in either backend: Triton's kernels interpreted on the
CPU, compiled with ``-m gpu``.

Each row of x picks a column of the weight, so that logits are known exactly. The gradient of the weight then shows the
gradient of each logit.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import DTYPES, normal
from parallel_lce import token_statistics
from parallel_lce.backends import triton_backward
from tools import on_ranks, shrunk

KINDS = 9  # of tokens, in turn
# A logit 2 FAR below 0 or 3 FAR above changes its window's reference.
FAR = 32.0
PIECES = dict(R=600, V=700, D=72, budget=0, block=2 * 512 * 512)
PRODUCTS = dict(R=1100, V=300, D=8, products=1)
# R, V, D and the options of a call; ``block``: bytes of recomputed logits.
CASES = {
    "saved": {},
    "recomputed": dict(budget=0, block=40_000),
    "some saved": dict(budget=20_000 + 300 * 40 * 2, block=20_000),
    "every statistic": dict(every=True),
    "every statistic, recomputed": dict(every=True, budget=0, bias=True),
    "a gradient of the bias": dict(bias=True),
    "rows in pieces": PIECES,
    "rows in pieces, a bias": PIECES | dict(bias=True),
    "logits far from 0": dict(far=304.0),
    "whole tiles": dict(R=128, V=256, D=128),
    "windows of two tiles of the merge": dict(R=20, V=16600, D=25),
    "row blocks of two launches": dict(R=35 * 128 - 5, V=40, D=8),
    "products of some rows": PRODUCTS,
    "products of some rows, recomputed": PRODUCTS | dict(budget=0, block=4 << 20),
}
SLOW = [*CASES][-3:]


def problem(dtype, device, *, R=40, V=700, D=136, bias=False, far=0.0, **_) -> SimpleNamespace:
    """Operands, and their logits ``z [R, V]`` in float64, of tokens of each kind.

    0 and 8: as they are. 1: one window far below the others. 2: a logit that no sample meets, far above its window; 3:
    one in each window. 4: the last one far above all others. 5 to 8: what :func:`upstream_of` says. 6: sure of its
    target, 7: of another entry.
    """
    kind = torch.arange(R) % KINDS
    # Tokens of one column have one kind.
    column = torch.arange(R) % D
    assert R <= D or D % KINDS == 0 or V < 500
    column_kind = torch.arange(D) % KINDS
    target = torch.randint(V, (R,), generator=torch.Generator().manual_seed(0))
    target[::3] = min(7, V - 1)
    target[1::5] = -100
    target[5::18] = min(7, V - 1)  # shared, of kind 5
    picked = normal(D, V, seed=1)
    if V > 500:
        picked[column_kind == 1, 256:512] -= 2 * FAR
        picked[column_kind == 2, 5] += 3 * FAR
        picked[column_kind == 3, 5::128] += 3 * FAR
        picked[column_kind == 4, V - 1] += FAR + 20
        sure = (kind == 6) & (target >= 0)
        picked[column[sure], target[sure]] += 16
        picked[column_kind == 7, 17] += 20
    bias_of = torch.where(torch.arange(V) % 50 == 3, -torch.inf, normal(V, seed=2)) if bias else None
    if far:
        picked, bias_of = (picked * 4).round() / 4, torch.full((V,), far)
    x, weight = (v.to(device, dtype) for v in (torch.eye(D)[column], picked.t().contiguous()))
    bias_of = None if bias_of is None else bias_of.to(device, dtype)
    z = weight.t().double()[column.to(device)] + (0 if bias_of is None else bias_of.double())
    tensors = dict(x=x, weight=weight, bias=bias_of, target=target.to(device), kind=kind.to(device))
    return SimpleNamespace(z=z, p=z.softmax(1), **tensors)


def upstream_of(t, every: bool) -> dict[str, torch.Tensor]:
    """Gradients of statistics ``[R]``. 5: of the target's logit alone, or of nothing. 6: of a log-probability, so that
    its terms nearly cancel at the target. 8: tiny."""
    R, device = len(t.x), t.x.device
    lse, target, mean, expected, squared = normal(5, R, seed=4).abs().float().to(device) + 0.1
    lse[t.kind == 5], lse[t.kind == 7], lse[t.kind == 8] = 0.0, 1.0, 1e-25
    target[(t.kind == 5) & (torch.arange(R, device=device) % 2 == 0)] = 0.0
    found = dict(lse=lse, target_logit=-torch.where(t.kind == 6, lse, target))
    return found | (dict(mean_logit=-mean, expected_logit=expected, sum_p_squared=squared / 2) if every else {})


def check_statistics(found, t) -> None:
    """All of them. Logits are exact."""
    top, size = t.z.amax(1), t.z.abs().nan_to_num(posinf=0.0).mean(1) + 1
    moved = (t.z - top[:, None]).clamp(min=-1e4)
    picked = t.z.gather(1, t.target.clamp(min=0)[:, None])[:, 0]
    # Sums of terms of either sign, whose roundings are those of their size.
    for name, true, slack in (
        ("lse", t.z.logsumexp(1), 0.0),
        ("max_logit", top, 0.0),
        ("mean_logit", t.z.mean(1), 1e-6 * size),
        ("expected_logit", top + (t.p * moved).sum(1), 2e-6 + 3e-6 * top.abs()),
        ("entropy", -(t.p * t.p.clamp(min=1e-300).log()).sum(1), 4e-6),
        ("sum_p_squared", t.p.square().sum(1), 0.0),
        ("target_logit", torch.where(t.target >= 0, picked, 0.0), 0.0),
    ):
        value = getattr(found, name).detach().double()
        rtol = 9e-6 if name == "sum_p_squared" else 3e-6
        assert ((value - true).abs() <= rtol * true.abs() + slack).logical_or(value == true).all(), name
    assert torch.equal(found.argmax, (t.z == top[:, None]).int().argmax(1))


def gradient_of_logits(t, upstream: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[R, V]`` each: the gradient without the targets', the targets' and the magnitude of what is summed."""
    u = {name: value.double()[:, None] for name, value in upstream.items()}
    mean, expected, squared = (u.get(name, 0 * u["lse"]) for name in ("mean_logit", "expected_logit", "sum_p_squared"))
    moved, V = (t.z - t.z.amax(1, keepdim=True)).clamp(min=-1e4), t.z.shape[1]
    below, total = (t.p * moved).sum(1, keepdim=True), t.p.square().sum(1, keepdim=True)
    of_all = u["lse"] + expected * (1 - below) - 2 * squared * total
    gradient = t.p * (of_all + expected * moved + 2 * squared * t.p) + mean / V
    size = u["lse"].abs() + expected.abs() * (2 - below - moved) + 2 * squared.abs() * (total + t.p)
    size = t.p * size + mean.abs() / V
    hit = torch.arange(V, device=t.z.device) == t.target[:, None]
    at_target = torch.where(hit, gradient + u["target_logit"], 0.0)
    return gradient.masked_fill(hit, 0.0), at_target, size + hit * u["target_logit"].abs()


def assert_within(found: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor, name: str) -> None:
    # The result itself is rounded, in fp16 to multiples of 2^-24.
    least = 2.0**-24 if found.dtype == torch.float16 else 1e-30
    allowed = allowed + torch.finfo(found.dtype).eps / 2 * exact.abs() + least
    worst = ((found.double() - exact).abs() / allowed).max().item()
    assert worst <= 1, f"{name} is off by {worst:.3g} of what it may be"


NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.thinned
@on_ranks()
def test_a_call(member, name, dtype, backend):
    """On two ranks another one adds up the parts of dX, which then are formed first."""
    if dtype == "fp32" and member.device.type == "cuda" and backend == "triton":
        return  # fp32 is the torch backend's on a GPU, unless it is asked not to be
    case = CASES[name]
    t = problem(DTYPES[dtype], member.device, **case)
    V, upstream = t.z.shape[1], upstream_of(t, case.get("every"))
    rows = slice(V // 3 * member.rank, V if member.rank == member.ranks - 1 else V // 3)
    leaves = [v.clone().requires_grad_() for v in (t.x, t.weight[rows], *([] if t.bias is None else [t.bias[rows]]))]
    asked = dict(mean_logit=True, entropy=True, sum_p_squared=True, argmax=True)
    where = dict(process_group=member.group, vocab_start=rows.start, logits_budget=case.get("budget"))
    limit = mock.patch.object(triton_backward, "PRODUCT_BYTES", case.get("products", triton_backward.PRODUCT_BYTES))
    with shrunk(case.get("block", 1 << 24), (64, 256)), limit:
        bias = leaves[2] if len(leaves) > 2 else None
        found = token_statistics(*leaves[:2], t.target, linear_bias=bias, **asked, **where)
        check_statistics(found, t)
        gradients = torch.autograd.grad([getattr(found, n) for n in upstream], leaves, [*upstream.values()])

    others, targets, size = gradient_of_logits(t, upstream)
    rounding, near = torch.finfo(t.x.dtype).eps, 1e-5 if dtype == "fp32" else 2e-6
    # In fp16 the largest gradient is brought near 2^10.
    smallest = 2.0**-32 * size.max() if dtype == "fp16" else 0.0
    # The triton backend forms the gradient of a target anew, from its logit.
    stored = size if backend == "torch" else size.masked_fill(targets != 0, 0.0)
    whole = rounding * (others.abs() + stored) + near * size + smallest
    if V > 500 and not {"every", "bias"} & {*case}:
        # Of a token that is sure of an entry that is known exactly. Its gradient is a number of few bits, but for 1e-4.
        sure = (t.kind == 7)[:, None] & (others.abs() > 0.9)
        assert sure.any()
        whole = torch.where(sure, 2e-4 * size, whole)
    exact = others + targets
    # The target of several tokens is rounded once, others are not. Each rank's part of dX is rounded.
    allowed = whole + 0.51 * rounding * targets.abs()
    # On a GPU the torch backend rounds every gradient before the products.
    of_dx = allowed if backend == "torch" and member.device.type == "cuda" else whole
    of_dx = of_dx @ t.weight.double().abs()
    for part in (slice(0, V // 3), slice(V // 3, V)) if member.ranks > 1 else ():
        of_dx += rounding * (exact[:, part] @ t.weight[part].double()).abs()
    assert_within(gradients[0], exact @ t.weight.double(), of_dx, "dX")
    assert_within(gradients[1], exact[:, rows].t() @ t.x.double(), allowed[:, rows].t() @ t.x.double(), "dW")
    if bias is not None:
        assert_within(gradients[2], exact[:, rows].sum(0), allowed[:, rows].sum(0), "dbias")
