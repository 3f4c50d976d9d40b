"""The same answers as torch's own losses, and gradcheck in float64."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import parallel_lce
from cases import DTYPES, Case, check, error, run
from parallel_lce.run import autograd
from tools import DIFFERENTIABLE, everywhere, shrunk
from world import Member

has_linear_cross_entropy = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"),
    reason=f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy (2.13 has)",
)


@dataclass(frozen=True)
class Call:
    leading: tuple[int, ...]
    V: int
    D: int
    dtype: str = "fp64"
    reduction: str = "mean"
    bias: bool = False
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    target_dtype: torch.dtype = torch.int64
    budget: int | None = None
    seed: int = 0

    @property
    def options(self) -> dict:
        chosen = dict(reduction=self.reduction, label_smoothing=self.label_smoothing)
        return chosen | ({} if self.ignore_index is None else {"ignore_index": self.ignore_index})

    def __str__(self) -> str:
        defaults = type(self).__dataclass_fields__
        changed = [
            f"{n}={v}" for n, v in vars(self).items() if n not in ("leading", "V", "D") and v != defaults[n].default
        ]
        return "-".join([f"{'x'.join(map(str, self.leading)) or 'scalar'}_{self.V}x{self.D}", *changed])


CALLS = [
    Call((), 11, 6),
    Call((), 11, 6, reduction="none", bias=True),
    Call((), 11, 6, "fp32", reduction="sum", label_smoothing=0.2),
    Call((80,), 125, 64, bias=True),
    Call((80,), 125, 64, "fp32", reduction="none", ignore_index=7, label_smoothing=0.1),
    Call((80,), 125, 64, "bf16", reduction="sum", ignore_index=None),
    Call((80,), 125, 64, "fp16", bias=True),
    Call((4, 9), 63, 17, reduction="none", target_dtype=torch.int32),
    Call((4, 9), 63, 17, "fp32", budget=0, bias=True),
    Call((4, 9), 63, 17, "bf16", budget=0, target_dtype=torch.uint8),
    Call((3, 2, 5), 40, 12, reduction="none", label_smoothing=1.0),
    Call((3, 2, 5), 40, 12, "fp32", budget=0, label_smoothing=0.3, target_dtype=torch.int16),
    Call((64,), 40, 4, "fp64", budget=0, bias=True, ignore_index=3, label_smoothing=0.1),
    Call((64,), 40, 4, "bf16", budget=0, reduction="sum", bias=True),
    Call((1, 2), 2, 1, "fp64", ignore_index=0),
]


def tensors(call: Call, device: str):
    generator = torch.Generator().manual_seed(call.seed)
    dtype = DTYPES[call.dtype]

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)

    x = normal(*call.leading, call.D)
    weight = normal(call.V, call.D, scale=call.D**-0.5)
    bias = normal(call.V) if call.bias else None
    target = torch.randint(call.V, call.leading, generator=generator)
    ignore = -100 if call.ignore_index is None else call.ignore_index
    if call.leading and not (call.target_dtype == torch.uint8 and ignore < 0):
        target[..., ::4] = ignore
    upstream = torch.randn(call.leading if call.reduction == "none" else (), generator=generator)
    return x, weight, bias, target.to(call.target_dtype).to(device), upstream.to(device)


def gradients(loss_of, tensors_, upstream, dtype):
    leaves = [None if v is None else v.detach().to(dtype).requires_grad_() for v in tensors_]
    loss = loss_of(*leaves)
    loss.backward(upstream.to(loss.dtype))
    return [loss.detach(), *(v.grad for v in leaves if v is not None)]


def torchs(call: Call, x, weight, bias, target, upstream, dtype, fused=False):
    """torch's cross-entropy; the logits of half-precision input in fp32, as ours."""
    flat = target.long().flatten() if target.dim() > 1 else target.long()

    def loss_of(x, weight, bias):
        x = x.flatten(0, -2) if x.dim() > 2 else x
        if fused:
            loss = F.linear_cross_entropy(x, weight, flat, linear_bias=bias, **call.options)
        else:
            z = F.linear(x, weight, bias)
            z = z if z.dtype == torch.float64 else z.float()
            loss = F.cross_entropy(z, flat, **call.options)
        return loss.view(target.shape) if call.reduction == "none" else loss

    return gradients(loss_of, (x, weight, bias), upstream, dtype)


def ours(call: Call, x, weight, bias, target, upstream, module=False):
    def loss_of(x, weight, bias):
        options = call.options | {"ignore_index": call.ignore_index, "logits_budget": call.budget}
        if module:
            return parallel_lce.LinearCrossEntropy(**options)(x, weight, target, bias)
        return parallel_lce.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)

    with shrunk(2048, (16, 32)):
        return gradients(loss_of, (x, weight, bias), upstream, DTYPES[call.dtype])


def compare(call: Call, found, peer, exact) -> None:
    labels = ("loss", "dx", "dweight", "dbias")
    for name, value, its, truth in zip(labels, found, peer, exact):
        assert value.shape == truth.shape, name
        floor = torch.finfo(value.dtype).eps * truth.double().norm().item()
        floor *= 32 if call.dtype == "fp64" else 1
        if value.dtype == torch.float16:
            floor += 2**-24 * value.numel() ** 0.5
        # A bf16 peer rounds its own loss; ours is fp32 and never worse.
        assert error(value, truth) <= 1.2 * error(its, truth) + floor, (
            f"{name}: error {error(value, truth):.3g}, torch's {error(its, truth):.3g}"
        )
    if call.dtype == "fp64":
        for value, its in zip(found, peer):
            torch.testing.assert_close(value, its, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_cross_entropy(call, device):
    t = tensors(call, device)
    exact = torchs(call, *t, torch.float64)
    compare(call, ours(call, *t), torchs(call, *t, DTYPES[call.dtype]), exact)


@has_linear_cross_entropy
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_linear_cross_entropy(call, device):
    t = tensors(call, device)
    exact = torchs(call, *t, torch.float64, fused=True)
    compare(call, ours(call, *t), torchs(call, *t, DTYPES[call.dtype], fused=True), exact)


@has_linear_cross_entropy
def test_a_large_hidden_dimension(device):
    call = Call((521,), 2560, 2048, "fp32", budget=0)
    t = tensors(call, device)
    exact = torchs(call, *t, torch.float64)
    options = call.options | {"logits_budget": 0}
    found = gradients(
        lambda x, w, b: parallel_lce.linear_cross_entropy(x, w, t[3], linear_bias=b, **options),
        t[:3],
        t[4],
        torch.float32,
    )
    compare(call, found, torchs(call, *t, torch.float32, fused=True), exact)


@pytest.mark.parametrize(
    "case",
    [
        Case(137, 640, 2048, "bf16", ranks=3, reduction="none", budget=0, bias=True),
        Case(522, 2560, 2048, "fp32", ranks=2, sequence_parallel=True),
    ],
    ids=str,
)
def test_a_large_hidden_dimension_over_ranks(case, worlds, device):
    check(case, run(case, worlds, device), factor=2.0, device=device)


@pytest.mark.parametrize("call", CALLS[::4], ids=str)
def test_module(call, device):
    t = tensors(call, device)
    for value, expected in zip(ours(call, *t, module=True), ours(call, *t)):
        assert torch.equal(value, expected)


def test_module_owns_no_parameters_and_checks_its_options():
    assert not list(parallel_lce.LinearCrossEntropy().parameters())
    with pytest.raises(ValueError, match=r"label_smoothing must be .* \[0, 1\], got 2"):
        parallel_lce.LinearCrossEntropy(label_smoothing=2)
    with pytest.raises(ValueError, match="sequence_parallel must be True or False, got 'no'"):
        parallel_lce.LinearCrossEntropy(sequence_parallel="no")
    assert "z_loss=0.5" in repr(parallel_lce.LinearCrossEntropy(z_loss=0.5))


@pytest.mark.parametrize("budget", [None, 0])
def test_mean_of_nothing_is_zero_where_torch_says_nan(budget, device):
    call = Call((12,), 9, 4, "fp32", budget=budget)
    x, weight, bias, target, _ = tensors(call, device)
    target.fill_(-100)
    assert F.cross_entropy(x @ weight.t(), target).isnan()
    found = ours(call, x, weight, bias, target, torch.ones((), device=device))
    assert all(torch.equal(value, torch.zeros_like(value)) for value in found)


def test_losses_of_half_input_are_fp32(device):
    for dtype, expected in (("bf16", torch.float32), ("fp16", torch.float32), ("fp64", torch.float64)):
        call = Call((5,), 9, 4, dtype)
        x, weight, bias, target, _ = tensors(call, device)
        assert parallel_lce.linear_cross_entropy(x, weight, target).dtype == expected


def test_autocast_as_linear_does(device):
    """Under autocast fp32 operands enter in bf16, and gradients come back in fp32."""
    call = Call((20,), 33, 8, "fp32", bias=True)
    x, weight, bias, target, upstream = tensors(call, device)
    leaves = [v.clone().requires_grad_() for v in (x, weight, bias)]
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = parallel_lce.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2])
    loss.backward()
    low = [v.bfloat16().requires_grad_() for v in (x, weight, bias)]
    expected = parallel_lce.linear_cross_entropy(*low[:2], target, linear_bias=low[2])
    expected.backward()
    assert torch.equal(loss, expected)
    for leaf, other in zip(leaves, low):
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad, other.grad.float())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_backward_within_autocast_rounds_no_product(reduction, device):
    """``backward()`` called inside the context forms the same gradients as outside of it."""
    call = Call((20,), 33, 8, "fp32", bias=True)
    x, weight, bias, target, _ = tensors(call, device)

    def gradients(inside: bool):
        leaves = [v.clone().requires_grad_() for v in (x, weight, bias)]
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = parallel_lce.linear_cross_entropy(
                *leaves[:2], target, linear_bias=leaves[2], reduction=reduction, logits_budget=0
            ).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [leaf.grad for leaf in leaves]

    for a, b in zip(gradients(True), gradients(False)):
        assert torch.equal(a, b)


# --- gradcheck -------------------------------------------------------------------------------------


class _SumOfRanks(torch.autograd.Function):
    """The whole weight, on every rank, whose gradient is the sum of what each shard's rank finds."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.group is not None:
            torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


# (reduction, logits_budget): blocks of two rows at 6 vocabulary rows a rank of 8 bytes.
STRATEGIES = {"save": ("none", None), "recompute": ("none", 0), "accumulate": ("mean", 0)}
LOSSES = {
    "plain": {},
    "smoothing and z-loss": dict(label_smoothing=0.2, z_loss=0.1, logit_scale=1.3),
    "soft-cap": dict(label_smoothing=0.2, logit_softcap=3.0, logit_scale=1.3),
}


@contextmanager
def _unconsumed():
    """Every walk of a graph uses what forward saved, as gradcheck walks one again and again: a copy, since a backward
    overwrites it."""
    original = autograd.backward

    def backward(call, hidden, weight, bias, partial, gathered, saved, coefficients, needs, _):
        saved = [t if t is None else t.clone() for t in saved]
        return original(call, hidden, weight, bias, partial, gathered, saved, coefficients, needs, False)

    autograd.backward = backward
    try:
        yield
    finally:
        autograd.backward = original


def _gradcheck(member: Member, strategy: str, sequence_parallel: bool) -> list[str]:
    """Checks the losses and the statistics; returns what was checked, to compare over the ranks."""
    reduction, budget = STRATEGIES[strategy]
    generator = torch.Generator().manual_seed(2)
    N, V, D = 6, 4 * member.ranks + 1, 1
    rows = -(-V // member.ranks)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(member.device).requires_grad_()

    x, weight, bias = normal(N, D), normal(rows * member.ranks, D), normal(rows * member.ranks)
    target = torch.tensor([0, V - 1, -100, 3, 2, 1], device=member.device)
    token_weight = torch.rand(N, generator=generator, dtype=torch.float64).to(member.device)
    shard = slice(rows * member.rank, rows * (member.rank + 1))
    group = member.group if member.ranks > 1 else None
    parallel = dict(process_group=group, sequence_parallel=sequence_parallel, vocab_size=V, logits_budget=budget)
    checked, plans = [], set()

    def operands(x, weight, bias):
        if sequence_parallel:
            # Each rank's dX is of its part alone.
            x = _SumOfRanks.apply(x, group).chunk(member.ranks)[member.rank]
        weight, bias = (_SumOfRanks.apply(v, group)[shard] for v in (weight, bias))
        return x, weight, bias

    def loss(x, weight, bias, **options):
        x, weight, bias = operands(x, weight, bias)
        found = parallel_lce.linear_cross_entropy(
            x, weight, target, linear_bias=bias, reduction=reduction, token_weight=token_weight, **parallel, **options
        )
        if "logit_softcap" not in options:  # with which fp64 saves nothing, and accumulates nothing
            plans.add(_kind(found))
        return found

    def statistics(x, weight, bias, **options):
        x, weight, bias = operands(x, weight, bias)
        found = parallel_lce.token_statistics(
            x,
            weight,
            target,
            linear_bias=bias,
            mean_logit=True,
            expected_logit=True,
            sum_p_squared=True,
            **parallel,
            **options,
        )
        return tuple(getattr(found, name) for name in DIFFERENTIABLE)

    with shrunk(rows * 8 * 2 * member.ranks, (2, 3)), _unconsumed():
        for name, options in LOSSES.items():
            torch.autograd.gradcheck(lambda *a: loss(*a, **options), (x, weight, bias))
            checked.append(name)
        assert plans == {strategy == "accumulate"}
        if reduction == "none":
            torch.autograd.gradcheck(lambda *a: statistics(*a, logit_softcap=3.0, logit_scale=1.3), (x, weight, bias))
            checked.append("statistics")
    return checked


def _kind(loss) -> bool:
    """Whether a loss was accumulated in forward."""
    node = loss.grad_fn
    while not type(node).__name__.startswith("_"):
        node = node.next_functions[0][0]
    return "AccumulatedLoss" in type(node).__name__


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.thinned
def test_gradcheck(strategy, ranks, sequence_parallel, worlds, device):
    checked = everywhere(worlds, device, ranks, _gradcheck, strategy, sequence_parallel)
    assert checked == [checked[0]] * ranks and len(checked[0]) == 3 + (strategy != "accumulate")
