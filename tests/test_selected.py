"""Selected entries and the largest logits: log-probabilities, ids and gradients against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import parallel_lce
import reference
from cases import DTYPES, Case, local_shard, make, normal
from measures import assert_no_worse, size, smallest_steps
from tools import chosen_backend, everywhere, shrunk, small
from world import Member


@dataclass(frozen=True)
class Call(Case):
    """Each token selects ``K`` entries; or, if that is 0, 0 to 5 of them. Some ids come twice, some are targets."""

    K: int = 7
    top_k: int = 4
    block_bytes: int | None = None
    backend: str = ""
    scaled_by_token: bool = False


def problem(call: Call, device="cpu"):
    t = make(call, device)
    t.target.clamp_(min=0)
    generator = torch.Generator().manual_seed(8)
    counts = torch.full((call.N,), call.K) if call.K else torch.randint(0, 6, (call.N,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(call.N), counts)
    ids = torch.randint(0, call.V, (len(owner),), generator=generator)
    ids[3::11] = ids[2::11][: len(ids[3::11])]
    ids[5::7] = t.target.cpu()[owner[5::7]]
    scale = normal(call.N, seed=99).abs().float() + 0.2 if call.scaled_by_token else call.logit_scale
    upstream = normal(len(ids), seed=4), normal(call.N, seed=5)
    return t, ids, offsets, owner, scale, upstream


def ours(member: Member, call: Call) -> dict[str, torch.Tensor]:
    t, ids, offsets, _, scale, upstream = problem(call, member.device)
    start, rows, given = local_shard(call, member.rank)
    real = max(0, min(rows, call.V - start))
    x = t.x.chunk(call.ranks)[member.rank] if call.sequence_parallel else t.x
    # Padding rows hold what must never matter.
    shards = [
        torch.nn.functional.pad(v[start : start + real].t(), (0, rows - real), value=torch.nan).t()
        for v in (t.weight, t.bias)
        if v is not None
    ]
    leaves = [v.clone().requires_grad_() for v in (x, *shards)]
    options = dict(logit_scale=scale.to(member.device) if call.scaled_by_token else scale)
    if call.scaled_by_token and call.logit_softcap:
        # Under a soft-cap a scale of each token comes with a temperature of each.
        options["temperature"] = 1 / options["logit_scale"]
    with shrunk(call.block_bytes, (32, 64)), chosen_backend(call.backend):
        found = parallel_lce.token_statistics(
            *leaves[:2],
            t.target,
            linear_bias=leaves[2] if call.bias else None,
            logit_softcap=call.logit_softcap,
            process_group=member.group,
            sequence_parallel=call.sequence_parallel,
            vocab_start=start if given else None,
            vocab_size=call.V,
            logits_budget=call.budget,
            selected=ids.view(call.N, call.K) if call.K else (ids.int(), offsets),
            top_k=call.top_k,
            **options,
        )
        outputs = [found.selected_log_prob, found.target_log_prob]
        assert outputs[0].shape == ((call.N, call.K) if call.K else ids.shape)
        given = [u.to(o).view(o.shape) for u, o in zip(upstream, outputs)]
        gradients = torch.autograd.grad(outputs, leaves, given)
    results = {"selected": outputs[0].detach().reshape(-1), "top": found.top_logits, "ids": found.top_ids}
    results |= dict(zip(("dx", "dweight", "dbias"), gradients))
    for name in ("dweight", "dbias"):
        if name in results:
            assert torch.count_nonzero(results[name][real:]) == 0, "gradient of padding"
            results[name] = results[name][:real]
    return {name: value.cpu() for name, value in results.items()}


def dense(call: Call, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """From all logits, projected in ``dtype``."""
    t, ids, _, owner, scale, upstream = problem(call)
    leaves = [v.to(dtype).requires_grad_() for v in (t.x, t.weight, t.bias) if v is not None]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = scale.to(wide)[:, None] if call.scaled_by_token else scale
    z = reference.logits(*leaves).to(wide) * scale
    if call.logit_softcap is not None:
        z = call.logit_softcap * torch.tanh(z / call.logit_softcap)
        z = z * scale if call.scaled_by_token else z
    log_p = z.log_softmax(1)
    outputs = [log_p[owner, ids], log_p.gather(1, t.target[:, None]).squeeze(1)]
    gradients = torch.autograd.grad(outputs, leaves, [u.to(wide) for u in upstream])
    found = {"logits": z.detach(), "selected": outputs[0].detach()}
    return found | dict(zip(("dx", "dweight", "dbias"), gradients))


CALLS = [
    Call(40, 130, 24),
    Call(40, 130, 24, "fp64", K=0, bias=True, logit_softcap=5.0),
    Call(63, 257, 33, "bf16", bias=True, scaled_by_token=True),
    Call(63, 257, 33, "bf16", K=0, budget=0, block_bytes=9000),
    Call(40, 130, 24, "fp16", budget=0, logit_scale=0.5),
    Call(40, 130, 24, "fp64", K=80, top_k=130),
    Call(40, 130, 24, "fp32", logit_softcap=3.0, scaled_by_token=True),
    Call(21, 300, 40, "bf16", bias=True, backend="triton"),
    Call(21, 300, 40, "bf16", K=0, budget=10000, block_bytes=3000, backend="triton"),
    Call(9, 300, 40, "fp16", K=70, logit_softcap=6.0, scaled_by_token=True, backend="triton"),
    Call(40, 130, 24, ranks=2, K=0),
    Call(36, 260, 31, "fp64", ranks=2, sequence_parallel=True, budget=0, block_bytes=4000, bias=True),
    Call(36, 260, 31, "bf16", ranks=2, sequence_parallel=True, K=0, budget=0, block_bytes=4000, scaled_by_token=True),
    Call(39, 200, 24, "fp32", ranks=3, sequence_parallel=True, shards=(150, 0, 50), bias=True, logit_softcap=5.0),
    Call(36, 9, 23, "fp64", ranks=4, top_k=8),  # shards of 3, 3, 3 rows and one of padding alone
    Call(16, 260, 32, "bf16", ranks=2, K=4, backend="triton"),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_against_float64(call, worlds, device, request):
    if call.backend == "triton":
        request.getfixturevalue("kernels")
    parts = everywhere(worlds, device, call.ranks, ours, call)
    dtype, found = DTYPES[call.dtype], {}
    truth, yardstick = dense(call, torch.float64), dense(call, dtype)
    for name, value in parts[0].items():
        everyone = [part[name] for part in parts]
        if name in ("dweight", "dbias") or (name == "dx" and call.sequence_parallel):
            found[name] = torch.cat(everyone)
        else:
            assert all(torch.equal(value, other) for other in everyone), f"{name} differs by rank"
            found[name] = value
    top = truth["logits"].topk(call.top_k, 1)
    ids = found.pop("ids")
    if dtype == torch.float64:
        assert torch.equal(ids, top.indices)
    slack = (1e-12 if dtype == torch.float64 else 1e-5) * (1 + top.values.abs().max())
    assert (truth["logits"].gather(1, ids) - top.values).abs().max() <= slack, "ids are not those of the largest"
    assert (found.pop("top").double() - top.values).abs().max() <= slack
    for name, value in found.items():
        floor = torch.finfo(value.dtype).eps * size(truth[name]) * (32 if dtype == torch.float64 else 1)
        factor = 1.1 if call.ranks == 1 else 2.0
        assert_no_worse(value, truth[name], yardstick[name], factor, floor + smallest_steps(value), name)


def _equal_logits(member: Member):
    """Every logit is 1 or 0, in shards that are not in the order of the ranks."""
    start = 20 * (member.ranks - 1 - member.rank)
    x = torch.ones(2, 3, 4, device=member.device)
    shard = torch.zeros(20, 4, device=member.device)
    shard[[5, 17]] = 0.25
    group = dict(process_group=member.group, vocab_start=start, vocab_size=20 * member.ranks)
    found = parallel_lce.token_statistics(x, shard, None, top_k=6, **(group if member.ranks > 1 else {}))
    assert found.top_logits.shape == found.top_ids.shape == (2, 3, 6)
    return found.top_ids[1, 2].tolist(), found.top_logits[1, 2].tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_lowest_of_equals_comes_first(ranks, worlds, backend, device):
    expected = {1: [5, 17, 0, 1, 2, 3], 2: [5, 17, 25, 37, 0, 1]}[ranks]
    for ids, top in everywhere(worlds, device, ranks, _equal_logits):
        assert ids == expected and top == [1.0] * 2 * ranks + [0.0] * (6 - 2 * ranks)


def test_an_id_outside_has_no_logit(backend, device):
    t = small(device, N=4)
    ids = torch.tensor([[-1, 3], [150, 3], [2**40, 3], [-(2**62), 3]], device=device)
    found = parallel_lce.token_statistics(t.x, t.weight, None, selected=ids)
    assert torch.equal(found.selected_log_prob[:, 0], -found.lse)
    gradients = torch.autograd.grad(found.selected_log_prob[:, 0].sum(), [t.x, t.weight], retain_graph=True)
    for a, b in zip(gradients, torch.autograd.grad(-found.lse.sum(), [t.x, t.weight])):
        torch.testing.assert_close(a, b)


def test_a_target_outside_is_no_selected_entry(backend, device):
    """Its lower 32 bits are those of an entry."""
    t = small(device, N=4)
    target = torch.tensor([2**62, -(2**63), 2**32 + 5, 3], device=device)
    ids = torch.tensor([[0, 1], [0, 1], [5, 1], [3, 1]], device=device)
    found = parallel_lce.token_statistics(t.x, t.weight, target, selected=ids)
    loss = found.target_log_prob.sum() + found.selected_log_prob.sum()
    gradients = torch.autograd.grad(loss, [t.x, t.weight])
    z = t.x @ t.weight.t()
    log_p = z.log_softmax(1)
    expected = log_p.gather(1, ids).sum() + log_p[3, 3] - z[:3].logsumexp(1).sum()
    for a, b in zip(gradients, torch.autograd.grad(expected, [t.x, t.weight])):
        torch.testing.assert_close(a, b)


@pytest.mark.thinned("offsets")
@pytest.mark.parametrize("offsets", [[0, 2, 4, 5, 5], [1, 2, 4, 5, 6], [0, 4, 2, 5, 6], [0, 2, 4, 2**40, 6]])
def test_offsets_that_are_none_give_nan(offsets, backend, device):
    """Nothing is read out of bounds, and nobody waits for the device."""
    t = small(device, N=4)
    selected = torch.arange(6, device=device), torch.tensor(offsets, device=device)
    found = parallel_lce.token_statistics(t.x, t.weight, None, selected=selected)
    assert found.selected_log_prob.isnan().all() and found.lse.isfinite().all()


@pytest.mark.parametrize("given", ["ids", "offsets"])
@pytest.mark.thinned
def test_nothing_selected(given, backend, device):
    t = small(device, N=4)
    selected = torch.zeros(4, 0, dtype=torch.int64, device=device)
    if given == "offsets":
        selected = selected.view(-1), torch.zeros(5, dtype=torch.int64, device=device)
    found = parallel_lce.token_statistics(t.x, t.weight, t.target, selected=selected)
    assert found.selected_log_prob.numel() == 0
    plain = parallel_lce.token_statistics(t.x, t.weight, t.target)
    assert torch.equal(found.target_log_prob, plain.target_log_prob)
    loss = found.selected_log_prob.sum() + found.lse.sum()
    for a, b in zip(torch.autograd.grad(loss, [t.x, t.weight]), torch.autograd.grad(plain.lse.sum(), [t.x, t.weight])):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_no_tokens(backend, device):
    t = small(device, N=4)
    ids = torch.zeros(0, 3, dtype=torch.int64, device=device)
    found = parallel_lce.token_statistics(t.x[:0], t.weight, t.target[:0], selected=ids, top_k=2)
    assert found.selected_log_prob.shape == (0, 3) and found.top_ids.shape == (0, 2)
    total = found.selected_log_prob.sum() + found.target_log_prob.sum()
    assert not torch.autograd.grad(total, t.weight)[0].any()
    assert parallel_lce.selected_log_probs(t.x[:0], t.weight, ids).shape == (0, 3)
    ids, nothing = torch.zeros(4, 3, dtype=torch.int64, device=device), torch.zeros(4, dtype=torch.bool, device=device)
    found = parallel_lce.token_statistics(t.x, t.weight, None, selected=ids, mask=nothing, counted_tokens=0)
    assert found.selected_log_prob.shape == (4, 3) and (found.selected_log_prob == 0).all()
    # Entries of nobody.
    sets = torch.arange(3, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    assert parallel_lce.token_statistics(t.x[:0], t.weight, None, selected=sets).selected_log_prob.isnan().all()
    assert parallel_lce.selected_log_probs(t.x[:0], t.weight, sets).isnan().all()
    found = parallel_lce.token_statistics(t.x[:0], t.weight, t.target[:0], selected=sets)
    loss = found.target_log_prob.sum() + found.selected_log_prob.sum()
    assert torch.autograd.grad(loss, t.x)[0].shape == t.x.shape


BAD = {
    "floats": (dict(selected=torch.zeros(4, 2)), "selected must be of an integer dtype, got torch.float32"),
    "shape": (
        dict(selected=torch.zeros(3, 2, dtype=torch.int64)),
        r"selected must be ids of shape \[..., K\] for tokens of shape \[4\], got \[3, 2\]",
    ),
    "offsets": (
        dict(selected=(torch.zeros(6, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))),
        r"offsets \[5\], one more than the tokens, got shapes \[6\] and \[4\]",
    ),
    "no ids": (
        dict(selected=(None, torch.zeros(5, dtype=torch.int64))),
        "selected must be a tensor of ids, or a pair of ids and offsets, got NoneType and Tensor",
    ),
    "no tensor": (dict(selected=[1, 2, 3]), "selected must be a tensor or None, got list"),
    "top_k 0": (dict(top_k=0), "top_k must be None or a number of entries >= 1, got 0"),
    "top_k a text": (dict(top_k="3"), "top_k must be None or a number of entries >= 1, got '3'"),
    "top_k beyond the vocabulary": (dict(top_k=151), "top_k=151 exceeds the 150 entries of the vocabulary"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    arguments, message = BAD[name]
    t = small(N=4)
    with pytest.raises(ValueError, match=message):
        parallel_lce.token_statistics(t.x, t.weight, None, **arguments)


def test_in_a_compiled_graph(device):
    t = small(device, N=12)
    ids = torch.randint(0, 150, (12, 3), device=device)
    offsets = torch.arange(13, device=device) * 3

    def both(x, w):
        one = parallel_lce.token_statistics(x, w, t.target, selected=ids, top_k=2)
        other = parallel_lce.token_statistics(x, w, t.target, selected=(ids.view(-1), offsets))
        return one.selected_log_prob.sum() - other.selected_log_prob.square().sum(), one.top_ids

    loss, top = both(t.x, t.weight)
    compiled_loss, compiled_top = torch.compile(both, fullgraph=True, backend="aot_eager")(t.x, t.weight)
    torch.testing.assert_close(compiled_loss, loss)
    assert torch.equal(compiled_top, top)
    found, expected = (torch.autograd.grad(value, [t.x, t.weight]) for value in (compiled_loss, loss))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
