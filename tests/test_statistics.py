"""``token_statistics`` and ``selected_log_probs``: every value and its gradient against float64.

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
    """A case of both functions. The last rows of equal shards are padding that holds NaN.

    Each token selects ``K`` entries; or, if that is 0, up to 5 of them, and one token 40. ``scaled_by_token``: each
    token has a logit_scale of its own. ``temperature``: "" for 1, a number, or a tensor of each token.
    """

    K: int = 7
    top_k: int = 4
    block_bytes: int | None = None
    backend: str = ""
    scaled_by_token: bool = False
    temperature: str = ""


def temperature_of(call: Call, device="cpu"):
    """In fp32 a power of two: the rounding of another one's inverse would be seen beside fp32's own errors."""
    if call.temperature == "tensor":
        power = normal(call.N, seed=98)
        power = power.round() if call.dtype == "fp32" else power
        return (2 ** power.clamp(-1, 2)).float().to(device)
    return 0.5 if call.temperature else 1.0


def tensors(call: Call, device="cpu"):
    """The case's tensors, of which a third of the targets lie outside the vocabulary, and each token's scale."""
    t = make(call, device)
    outside = torch.tensor([-1, call.V, 2**32, call.V + 3, -(2**63), 2**62], device=device)
    t.target[1::3] = outside.repeat(call.N)[: len(t.target[1::3])]
    scale = normal(call.N, seed=99).abs().float().to(device) + 0.2 if call.scaled_by_token else call.logit_scale
    return t, scale


def selection(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[E]``, and how many of them each token has. Some come twice, some are of many tokens. Some are the lower
    32 bits of their token's target: the target, no entry, or an entry that must not be taken for the target."""
    generator = torch.Generator().manual_seed(8)
    counts = torch.full((call.N,), call.K)
    if not call.K:
        counts = torch.randint(0, 6, (call.N,), generator=generator)
        counts[2] = 40
    ids = torch.randint(0, call.V, (int(counts.sum()),), generator=generator)
    ids[3::11] = ids[2::11][: len(ids[3::11])]
    ids[4::10] = min(33, call.V - 1)
    ids[5::7] = tensors(call)[0].target.repeat_interleave(counts)[5::7] & (2**32 - 1)
    return ids, counts


GRADIENTS = {name: [name] for name in DIFFERENTIABLE} | {"both": ["selected_log_prob", "target_log_prob"]}
"""Fields whose gradient is formed, by a name of each gradient."""


def upstream_of(name: str, value: torch.Tensor) -> torch.Tensor:
    seed = DIFFERENTIABLE.index(name) if name in DIFFERENTIABLE else len(DIFFERENTIABLE)
    return normal(value.numel(), seed=5 + seed).to(value).view(value.shape)


def ours(member: Member, call: Call) -> dict[str, torch.Tensor]:
    """Every value, and dX, dW, dbias of each of GRADIENTS, each from the first backward of a graph."""
    t, scale = tensors(call, member.device)
    leaves, where, real = operands(member, call, t, padding=torch.nan)
    ids, counts = (each.to(member.device) for each in selection(call))
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    chosen = dict(selected=ids.view(call.N, call.K) if call.K else (ids.int(), offsets))
    options = dict(
        linear_bias=leaves.get("bias"),
        logit_scale=scale,
        logit_softcap=call.logit_softcap,
        temperature=temperature_of(call, member.device),
        **where,
    )
    results = {}

    def compute(**asked):
        given = options | asked | dict(logits_budget=call.budget)
        return statistics(leaves["x"], leaves["weight"], t.target, **given)

    def differentiate(label: str, values: list[torch.Tensor], names: list[str]) -> None:
        upstream = [upstream_of(name, value) for name, value in zip(names, values)]
        for leaf, gradient in zip(leaves, torch.autograd.grad(values, [*leaves.values()], upstream)):
            results[f"d{leaf} of {label}"] = unpadded(leaf, gradient, real)

    with shrunk(call.block_bytes, (32, 64)), chosen_backend(call.backend):
        found = compute(**chosen, top_k=call.top_k)
        assert torch.equal(parallel_lce.log_prob(found), found.target_log_prob)
        assert torch.equal(parallel_lce.entropy(found), found.entropy)
        for label, names in GRADIENTS.items():
            graph = compute(**chosen if label == "both" else {})
            differentiate(label, [getattr(graph, name) for name in names], names)
        for _ in range(2):  # the kernels' first launch and a later one
            among = parallel_lce.selected_log_probs(leaves["x"], leaves["weight"], **chosen, **options)
            differentiate("among", [among], ["among"])
    assert found.selected_log_prob.shape == among.shape == ((call.N, call.K) if call.K else ids.shape)
    results |= fields(found) | dict(among=among.reshape(-1), selected_log_prob=found.selected_log_prob.reshape(-1))
    return {name: value.detach().cpu() for name, value in results.items()}


def dense(call: Call, dtype: torch.dtype, device="cpu") -> dict[str, torch.Tensor]:
    """The same from all logits: projected in ``dtype``, statistics in fp32, or in fp64 for fp64."""
    z_dtype = accumulation_dtype(dtype)
    t, scale = tensors(call, device)
    ids, counts = (each.to(device) for each in selection(call))
    leaves = [v.to(dtype).requires_grad_() for v in (t.x, t.weight, t.bias) if v is not None]
    z = torch.nn.functional.linear(*leaves).to(z_dtype)
    z = z * (scale.to(z_dtype)[:, None] if call.scaled_by_token else scale)
    if call.logit_softcap is not None:
        z = call.logit_softcap * torch.tanh(z / call.logit_softcap)
    z = z / torch.as_tensor(temperature_of(call, device), dtype=z_dtype, device=device).view(-1, 1)
    owner = torch.arange(call.N, device=device).repeat_interleave(counts)
    inside = ids < call.V
    picked = z[owner, ids.clamp(max=call.V - 1)]
    # Of logit -inf; but gradients of that are NaN.
    of_tokens = picked.masked_fill(~inside, -1e5).split(counts.tolist())
    among = torch.cat([each.log_softmax(0) for each in of_tokens]).masked_fill(~inside, -torch.inf)
    results = reference.statistics(z, t.target) | dict(logits=z, among=among)
    results["selected_log_prob"] = torch.where(inside, picked, 0.0) - results["lse"][owner]
    found = {name: value.detach() for name, value in results.items()}
    for label, names in (GRADIENTS | {"among": ["among"]}).items():
        values = [results[name] for name in names]
        upstream = [upstream_of(name, value) for name, value in zip(names, values)]
        if label == "among":
            upstream = [upstream[0].masked_fill(~inside, 0.0)]
        gradients = torch.autograd.grad(values, leaves, upstream, retain_graph=True)
        found |= {f"{leaf} of {label}": g for leaf, g in zip(("dx", "dweight", "dbias"), gradients)}
    return {name: value.cpu() for name, value in found.items()}


def check(call: Call, found: dict[str, torch.Tensor], factor: float, device: str) -> None:
    dtype = DTYPES[call.dtype]
    wide = accumulation_dtype(dtype)
    truth, yardstick = dense(call, torch.float64), dense(call, dtype)
    if device != "cpu":
        # torch's functions are less exact there, as its tanh.
        for name, value in dense(call, dtype, device).items():
            if call.logit_softcap or not name.endswith(("both", "among", "selected_log_prob")):
                yardstick[name] = max(value, yardstick[name], key=lambda v: error(v, truth[name]))
    assert found.pop("vocab_size").item() == call.V
    z, ids, argmax = truth["logits"], found.pop("top_ids"), found.pop("argmax")
    top = z.topk(call.top_k, 1)
    assert dtype != torch.float64 or torch.equal(ids, top.indices)
    slack = (1e-12 if dtype == torch.float64 else 1e-5) * z.abs().amax()
    assert (z.gather(1, ids) - top.values).abs().max() <= slack, "ids are not those of the largest"
    assert (found.pop("top_logits").double() - top.values).abs().max() <= slack
    assert (z.gather(1, argmax[:, None]) >= z.amax(1, keepdim=True) - slack).all(), "argmax is not the largest"
    finite = truth["among"] != -torch.inf
    assert torch.equal(found["among"] != -torch.inf, finite)
    for values in (found, truth, yardstick):
        values["among"] = values["among"][finite]
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
    Call(80, 125, 64, "fp64", budget=0, block_bytes=5000, K=0),
    Call(63, 257, 33, "bf16", bias=True, budget=0, block_bytes=9000, K=0),
    Call(40, 130, 24, "fp16", logit_scale=0.5),
    Call(40, 130, 24, "fp16", budget=0, logit_softcap=6.0, K=0),
    Call(33, 200, 16, "fp32", logit_softcap=4.0, logit_scale=2.0, bias=True, budget=0, block_bytes=9000),
    Call(1, 7, 8),
    Call(3, 1, 5, "fp64", K=1, top_k=1),
    Call(41, 130, 24, "fp64", scaled_by_token=True, logit_softcap=5.0, K=80, top_k=130),
    Call(63, 300, 40, "bf16", scaled_by_token=True, budget=0, block_bytes=9000, backend="triton"),
    Call(63, 300, 40, "bf16", bias=True, logit_scale=0.7, budget=30000, block_bytes=9000, backend="triton", K=0),
    Call(33, 300, 15, logit_softcap=4.0, bias=True, budget=0, block_bytes=9000, backend="triton"),
    Call(33, 200, 16, temperature="number", logit_softcap=4.0, bias=True),
    Call(33, 200, 16, "fp64", temperature="tensor", logit_softcap=4.0, logit_scale=2.0, budget=0, block_bytes=9000),
    Call(63, 300, 40, "bf16", bias=True, temperature="tensor", logit_softcap=5.0, backend="triton"),
    Call(21, 300, 40, "fp16", scaled_by_token=True, temperature="tensor", logit_softcap=5.0, backend="triton", K=70),
    Call(33, 300, 15, temperature="tensor", logit_softcap=4.0, budget=0, block_bytes=9000, backend="triton", K=0),
    Call(40, 125, 64, ranks=2, K=0),
    Call(42, 125, 64, "bf16", ranks=2, sequence_parallel=True, bias=True),
    Call(40, 260, 31, "fp64", ranks=2, budget=0, block_bytes=4000, logit_softcap=5.0, K=0),
    Call(36, 260, 31, "fp32", ranks=2, sequence_parallel=True, budget=0, block_bytes=4000, bias=True),
    Call(16, 260, 32, "bf16", ranks=2, K=4, backend="triton"),
    Call(40, 130, 24, ranks=3, logit_scale=0.3, bias=True),
    Call(39, 200, 24, "bf16", ranks=3, sequence_parallel=True, shards=(150, 0, 50), bias=True),
    Call(37, 507, 23, ranks=4, bias=True, logit_softcap=3.0),
    # shards of 3, 3, 3 rows and one of padding alone
    Call(36, 9, 23, "fp64", ranks=4, bias=True, top_k=8),
    Call(36, 300, 16, "fp16", ranks=4, sequence_parallel=True, budget=0, block_bytes=4000),
    Call(36, 300, 16, "bf16", ranks=2, sequence_parallel=True, budget=0, block_bytes=4000, scaled_by_token=True, K=0),
    Call(36, 300, 16, ranks=2, sequence_parallel=True, block_bytes=4000, logit_softcap=4.0, temperature="tensor"),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_value(call, worlds, device, request):
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
    """Every logit is 1 or 0, in windows, and in shards that are not in the order of the ranks."""
    x = torch.ones(2, 3, 4, device=member.device)
    shard = torch.zeros(40, 4, device=member.device)
    shard[[7, 30]] = 0.25
    where = dict(process_group=member.group, vocab_start=40 * (member.ranks - 1 - member.rank))
    with shrunk(tile=(2, 8)):
        found = statistics(x, shard, None, top_k=8, **where if member.ranks > 1 else {})
    assert found.top_logits.shape == found.top_ids.shape == (2, 3, 8)
    return found.argmax.tolist(), found.top_ids[1, 2].tolist(), found.top_logits[1, 2].tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_lowest_of_equals_comes_first(ranks, worlds, backend, device):
    expected = {1: [7, 30, 0, 1, 2, 3, 4, 5], 3: [7, 30, 47, 70, 87, 110, 0, 1]}[ranks]
    for argmax, ids, top in everywhere(worlds, device, ranks, _tied):
        assert argmax == [[7] * 3] * 2
        assert ids == expected and top == [1.0] * 2 * ranks + [0.0] * (8 - 2 * ranks)


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
