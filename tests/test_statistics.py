"""TokenStatistics: every field and its gradient against float64.

Bodies run on a rank of a real group or alone; errors are measured against the same-dtype dense path.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import parallel_lce
import reference
from cases import DTYPES, Case, assemble, make, normal, operands, unpadded
from measures import assert_near, assert_no_worse, error, size, smallest_steps
from parallel_lce.core.partials import accumulation_dtype
from tools import DIFFERENTIABLE, chosen_backend, everywhere, fields, shrunk, small, statistics
from world import Member


@dataclass(frozen=True)
class Call(Case):
    """A case of ``token_statistics``. The last rows of equal shards are padding that holds NaN."""

    block_bytes: int | None = None
    backend: str = ""
    # Each token has a logit_scale of its own.
    scaled_by_token: bool = False
    # "" for 1, a number, or a tensor of each token
    temperature: str = ""


def temperature_of(call: Call, device="cpu"):
    """In fp32 a power of two: the rounding of another one's inverse would be seen beside fp32's own errors."""
    if call.temperature == "tensor":
        power = normal(call.N, seed=98)
        power = power.round() if call.dtype == "fp32" else power
        return (2 ** power.clamp(-1, 2)).float().to(device)
    return 0.5 if call.temperature else 1.0


def tensors(call: Call, device="cpu"):
    t = make(call, device)
    outside = torch.tensor([-1, call.V, call.V + 3, -(2**63), 2**62], device=t.target.device)
    t.target[1::3] = outside.repeat(call.N)[: len(t.target[1::3])]
    scale = normal(call.N, seed=99).abs().float().to(device) + 0.2 if call.scaled_by_token else call.logit_scale
    upstream = {name: normal(call.N, seed=5 + i).to(device) for i, name in enumerate(DIFFERENTIABLE)}
    return t, upstream, scale


def ours(member: Member, call: Call) -> dict[str, torch.Tensor]:
    """Every field, and dX, dW, dbias of each field alone, each from the first backward of a graph."""
    t, upstream, scale = tensors(call, member.device)
    leaves, where, real = operands(member, call, t, padding=torch.nan)

    def compute():
        return statistics(
            leaves["x"],
            leaves["weight"],
            t.target,
            linear_bias=leaves.get("bias"),
            logit_scale=scale,
            logit_softcap=call.logit_softcap,
            temperature=temperature_of(call, member.device),
            logits_budget=call.budget,
            **where,
        )

    with shrunk(call.block_bytes, (32, 64)), chosen_backend(call.backend):
        found = compute()
        results = {name: value.detach().cpu() for name, value in fields(found).items()}
        assert torch.equal(parallel_lce.log_prob(found), found.target_log_prob)
        assert torch.equal(parallel_lce.entropy(found), found.entropy)
        for name in DIFFERENTIABLE:
            value = getattr(compute(), name)
            gradients = torch.autograd.grad(value, [*leaves.values()], upstream[name].to(value.dtype))
            for leaf, gradient in zip(leaves, gradients):
                results[f"d{leaf} of {name}"] = unpadded(leaf, gradient, real)
    return results


def dense(call: Call, dtype: torch.dtype, device="cpu") -> dict[str, torch.Tensor]:
    """The same from all logits: projected in ``dtype``, statistics in fp32, or in fp64 for fp64."""
    z_dtype = accumulation_dtype(dtype)
    t, upstream, scale = tensors(call, device)
    leaves = [v.to(dtype).requires_grad_() for v in (t.x, t.weight, t.bias) if v is not None]
    z = torch.nn.functional.linear(*leaves).to(z_dtype)
    z = z * (scale.to(z_dtype)[:, None] if call.scaled_by_token else scale)
    if call.logit_softcap is not None:
        z = call.logit_softcap * torch.tanh(z / call.logit_softcap)
    z = z / torch.as_tensor(temperature_of(call), dtype=z_dtype, device=device).view(-1, 1)
    results = reference.statistics(z, t.target)
    found = {name: value.detach() for name, value in results.items()}
    for name in DIFFERENTIABLE:
        gradients = torch.autograd.grad(results[name], leaves, upstream[name].to(z_dtype), retain_graph=True)
        found |= {f"{leaf} of {name}": g for leaf, g in zip(("dx", "dweight", "dbias"), gradients)}
    return {name: value.cpu() for name, value in found.items()}


def check(call: Call, found: dict[str, torch.Tensor], factor: float, device: str) -> None:
    dtype = DTYPES[call.dtype]
    wide = accumulation_dtype(dtype)
    truth, yardstick = dense(call, torch.float64), dense(call, dtype)
    if device != "cpu":
        # torch's functions are less exact there, as its tanh.
        for name, value in dense(call, dtype, device).items():
            yardstick[name] = max(value, yardstick[name], key=lambda v: error(v, truth[name]))
    assert found.pop("vocab_size").item() == call.V
    t, _, scale = tensors(call)
    operands = (v if v is None else v.double() for v in (t.x, t.weight, t.bias))
    z = reference.logits(*operands, scale=scale, softcap=call.logit_softcap)
    z /= torch.as_tensor(temperature_of(call)).view(-1, 1)
    picked = z.gather(1, found.pop("argmax").unsqueeze(1)).squeeze(1)
    slack = 1e-12 if dtype == torch.float64 else 1e-5
    assert (picked >= z.amax(1) - slack * z.abs().amax()).all(), "argmax is not the largest"
    for name, value in found.items():
        expected = wide if " of " not in name else dtype
        assert value.dtype == expected, name
        assert value.shape == truth[name].shape, name
        rounded = size(truth[name])
        if name in ("mean_logit", "expected_logit"):
            # A sum relative to the largest logit, plus that: rounded at the larger of the two.
            rounded = max(rounded, size(truth["max_logit"]))
        floor = torch.finfo(value.dtype).eps * rounded
        floor *= 32 if dtype == torch.float64 else 1
        floor += smallest_steps(value)
        assert_no_worse(value, truth[name], yardstick[name], factor, floor, name)


CALLS = [
    Call(80, 125, 64),
    Call(80, 125, 64, "fp64", budget=0, block_bytes=5000),
    Call(63, 257, 33, "bf16", bias=True, budget=0, block_bytes=9000),
    Call(40, 130, 24, "fp16", logit_scale=0.5),
    Call(40, 130, 24, "fp16", budget=0, logit_softcap=6.0),
    Call(33, 200, 16, "fp32", logit_softcap=4.0, logit_scale=2.0, bias=True, budget=0, block_bytes=9000),
    Call(1, 7, 8),
    Call(3, 1, 5, "fp64"),
    Call(41, 130, 24, "fp64", scaled_by_token=True, logit_softcap=5.0),
    Call(63, 300, 40, "bf16", scaled_by_token=True, budget=0, block_bytes=9000, backend="triton"),
    Call(63, 300, 40, "bf16", bias=True, logit_scale=0.7, budget=30000, block_bytes=9000, backend="triton"),
    Call(33, 300, 15, logit_softcap=4.0, bias=True, budget=0, block_bytes=9000, backend="triton"),
    Call(33, 200, 16, temperature="number", logit_softcap=4.0, bias=True),
    Call(33, 200, 16, "fp64", temperature="tensor", logit_softcap=4.0, logit_scale=2.0, budget=0, block_bytes=9000),
    Call(63, 300, 40, "bf16", bias=True, temperature="tensor", logit_softcap=5.0, backend="triton"),
    Call(63, 300, 40, "fp16", scaled_by_token=True, temperature="tensor", logit_softcap=5.0, backend="triton"),
    Call(33, 300, 15, temperature="tensor", logit_softcap=4.0, budget=0, block_bytes=9000, backend="triton"),
    Call(41, 125, 64, ranks=2),
    Call(42, 125, 64, "bf16", ranks=2, sequence_parallel=True, bias=True),
    Call(40, 260, 31, "fp64", ranks=2, budget=0, block_bytes=4000, logit_softcap=5.0),
    Call(36, 260, 31, "fp32", ranks=2, sequence_parallel=True, budget=0, block_bytes=4000, bias=True),
    Call(40, 130, 24, ranks=3, logit_scale=0.3, bias=True),
    Call(39, 200, 24, "bf16", ranks=3, sequence_parallel=True, shards=(150, 0, 50), bias=True),
    Call(37, 507, 23, ranks=4, bias=True, logit_softcap=3.0),
    Call(36, 9, 23, "fp64", ranks=4, bias=True),  # shards of 3, 3, 3 rows and one of padding alone
    Call(36, 300, 16, "fp16", ranks=4, sequence_parallel=True, budget=0, block_bytes=4000),
    Call(36, 300, 16, "bf16", ranks=2, sequence_parallel=True, budget=0, block_bytes=4000, scaled_by_token=True),
    Call(36, 300, 16, ranks=2, sequence_parallel=True, block_bytes=4000, logit_softcap=4.0, temperature="tensor"),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_field(call, worlds, device, request):
    if call.backend == "triton":
        request.getfixturevalue("kernels")
    parts = everywhere(worlds, device, call.ranks, ours, call)
    check(call, assemble(call, parts), 1.1 if call.ranks == 1 else 2.0, device)


def test_fields_that_were_not_asked_for_are_none(backend, device):
    t = small(device)
    rich = statistics(t.x, t.weight, t.target)
    always = {"lse", "max_logit", "vocab_size"}
    of_target = {"target_logit", "target_log_prob"}
    for found, names in (
        (parallel_lce.token_statistics(t.x, t.weight, t.target), always | of_target),
        (statistics(t.x, t.weight, None), fields(rich).keys() - of_target),
    ):
        assert fields(found).keys() == names
        for name in names:
            assert torch.equal(getattr(found, name), getattr(rich, name)), name
    gradients = [torch.autograd.grad(f.entropy.sum() + f.lse.sum(), [t.x, t.weight]) for f in (found, rich)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    lean = parallel_lce.token_statistics(t.x, t.weight, None)
    with pytest.raises(ValueError, match="expected_logit=True, got False"):
        parallel_lce.entropy(lean)
    with pytest.raises(ValueError, match="log_prob needs statistics computed with a target, got target=None"):
        parallel_lce.log_prob(lean)


def _tied(member: Member):
    """Equal largest logits in every window and shard; products of small integers are exact."""
    x = torch.ones(3, 4, device=member.device)
    shard = torch.zeros(40, 4, device=member.device)
    shard[[7, 30, 39]] = 1.0
    with shrunk(tile=(2, 8)):
        found = statistics(x, shard, None, process_group=member.group)
    return found.argmax.tolist(), found.max_logit.tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_argmax_takes_the_lowest_of_equals(ranks, worlds, backend, device):
    for ids, top in everywhere(worlds, device, ranks, _tied):
        assert ids == [7, 7, 7] and top == [4.0, 4.0, 4.0]


def test_evaluation_gives_the_same(backend, device):
    """To the bit; but what the triton backend keeps it sums relative to another reference."""
    t = small(device)
    trained = statistics(t.x, t.weight, t.target)
    with torch.no_grad():
        evaluated = statistics(t.x, t.weight, t.target)
    with torch.inference_mode():
        inferred = statistics(t.x, t.weight, t.target)
    for name, value in fields(trained).items():
        assert torch.equal(getattr(evaluated, name), getattr(inferred, name)), name
        if backend == "torch" or name in ("max_logit", "argmax", "target_logit", "vocab_size"):
            assert torch.equal(value, getattr(evaluated, name)), name
        else:
            assert_near(value, getattr(evaluated, name), 1e-6)
        assert not getattr(evaluated, name).requires_grad
