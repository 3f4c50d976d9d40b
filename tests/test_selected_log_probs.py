"""Log-probabilities of selected entries among each other, against float64 on all logits."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from cases import DTYPES, normal
from measures import assert_no_worse, relative_error, size, smallest_steps
from on_ranks import on_ranks
from tools import alone, chosen_backend, everywhere
from world import Member

N, V, D = 12, 90, 24
SHARDS = {1: (90,), 2: (60, 30), 3: (0, 50, 40)}


def problem(dtype, kind, device="cpu"):
    """Hidden states, weight, bias, ids, offsets, the token of each id, scales and upstream gradient."""
    generator = torch.Generator().manual_seed(4)
    x, w, b = normal(N, D).to(dtype), (normal(V, D, seed=1) / 2).to(dtype), normal(V, seed=2).to(dtype)
    counts = torch.full((N,), 5) if kind == "K" else torch.randint(0, 40, (N,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(N), counts)
    ids = torch.randint(0, V, (len(owner),), generator=generator)
    ids[1::9] = ids[0::9][: len(ids[1::9])]  # of one token, mostly
    ids[7::10] = 33  # of many tokens
    scale = normal(N, seed=3).abs() + 0.3
    upstream = normal(len(ids), seed=5)
    return [t.to(device) for t in (x, w, b, ids, offsets, owner, scale, upstream)]


def _found(member: Member, name, kind, options, backend, sequence_parallel):
    x, w, b, ids, offsets, _, scale, upstream = problem(DTYPES[name], kind, member.device)
    shards = SHARDS[member.ranks]
    start = sum(shards[: member.rank])
    shard = slice(start, start + shards[member.rank])
    x = x.chunk(member.ranks)[member.rank] if sequence_parallel else x
    leaves = [v.clone().requires_grad_() for v in (x, w[shard], b[shard])]
    given = dict(linear_bias=leaves[2] if "bias" in options else None)
    if "scaled" in options:
        given |= dict(logit_scale=scale, logit_softcap=4.0, temperature=1 / scale.flip(0))
    if member.ranks > 1:
        given |= dict(process_group=member.group, vocab_start=start, sequence_parallel=sequence_parallel)
    with chosen_backend(backend):
        selected = ids.view(N, -1) if kind == "K" else (ids, offsets.int())
        used = leaves if "bias" in options else leaves[:2]
        for _ in range(3):
            found = parallel_lce.selected_log_probs(*leaves[:2], selected, vocab_size=V - 10, **given)
            assert found.shape == (selected.shape if kind == "K" else ids.shape)
            gradients = torch.autograd.grad(found, used, upstream.to(found.dtype).view(found.shape))
    return [v.detach().cpu() for v in (found.reshape(-1), *gradients)]


def dense(name, dtype, kind, options):
    """Of operands that are rounded to the dtype of that name, computed in ``dtype``."""
    x, w, b, ids, _, owner, scale, upstream = problem(DTYPES[name], kind)
    x, w, b = (v.to(dtype) for v in (x, w, b))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [v.requires_grad_() for v in (x, w, b)]
    z = torch.nn.functional.linear(x, w, b if "bias" in options else None).to(wide)
    if "scaled" in options:
        z = 4.0 * torch.tanh(z * scale.to(wide)[:, None] / 4.0) * scale.to(wide).flip(0)[:, None]
    z = z[owner, ids].masked_fill(ids >= V - 10, -torch.inf)
    found = torch.zeros_like(z)
    for token in range(N):
        found = torch.where(owner == token, z - z[owner == token].logsumexp(0), found)
    inside = ids < V - 10
    used = leaves if "bias" in options else leaves[:2]
    gradients = torch.autograd.grad(found[inside], used, upstream[inside].to(wide))
    return [found.detach(), *gradients]


def check(parts, name, kind, options, sequence_parallel, factor):
    truth, yardstick = (dense(name, dtype, kind, options) for dtype in (torch.float64, DTYPES[name]))
    assert all(torch.equal(part[0], parts[0][0]) for part in parts)
    dx = torch.cat([p[1] for p in parts]) if sequence_parallel else parts[0][1]
    found = [parts[0][0], dx, *(torch.cat([p[i] for p in parts]) for i in range(2, len(parts[0])))]
    assert torch.equal(found[0] == -torch.inf, truth[0] == -torch.inf) and (found[0] == -torch.inf).any()
    finite = truth[0] != -torch.inf
    found[0], truth[0], yardstick[0] = (v[0][finite] for v in (found, truth, yardstick))
    for label, ours, exact, other in zip(("log_probs", "dx", "dweight", "dbias"), found, truth, yardstick):
        floor = torch.finfo(ours.dtype).eps * size(exact) * (32 if name == "fp64" else 1) + smallest_steps(ours)
        assert_no_worse(ours, exact, other, factor, floor, label)


@pytest.mark.parametrize("kind", ["K", "sets"])
@pytest.mark.parametrize("options", ["", "bias scaled"])
@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.thinned
def test_on_one_rank(name, options, kind, backend, device):
    if backend == "triton" and name == "fp64":
        pytest.skip("float64 is always torch's")
    parts = [_found(alone(device), name, kind, options, backend, False)]
    check(parts, name, kind, options, False, 1.1)


@pytest.mark.parametrize(
    ("ranks", "name", "kind", "sequence_parallel", "backend"),
    [(2, "fp64", "sets", True, "torch"), (3, "fp32", "K", False, "torch"), (2, "bf16", "sets", True, "triton")],
)
def test_over_ranks(ranks, name, kind, sequence_parallel, backend, worlds, device, request):
    if backend == "triton":
        request.getfixturevalue("kernels")
    given = name, kind, "bias scaled", backend, sequence_parallel
    parts = everywhere(worlds, device, ranks, _found, *given)
    check(parts, *given[:3], sequence_parallel, 2.0)


@on_ranks(2)
def test_shards_with_a_gap_give_nan(member):
    x, w, *_ = problem(torch.float32, "K", member.device)
    ids = torch.zeros(N, 2, dtype=torch.int64, device=member.device)
    start = 46 * member.rank  # a gap of one
    found = parallel_lce.selected_log_probs(x, w[:45], ids, process_group=member.group, vocab_start=start)
    assert found.isnan().all()


def _memory_of_7(monkeypatch) -> None:
    """New memory is not NaN by chance, as where NaN was freed."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    filled = lambda t: t.fill_(7) if t.is_floating_point() else t  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *given, **options: filled(new_empty(*given, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *given, **options: filled(empty_like(*given, **options)))


@pytest.mark.parametrize("first", [2**40, 0, 2])
def test_offsets_that_are_none_give_nan(first, backend, device, monkeypatch):
    """Also in entries that belong to no token."""
    x, w, *_ = problem(torch.float32, "K", device)
    ids, offsets = torch.arange(6, device=device), torch.zeros(N + 1, dtype=torch.int64, device=device)
    if first == 2:
        offsets += 6
    offsets[0] = first
    w.requires_grad_()
    _memory_of_7(monkeypatch)
    found = parallel_lce.selected_log_probs(x, w, (ids, offsets))
    assert found.isnan().all()
    assert torch.autograd.grad(found.sum(), w)[0][ids].isnan().all()


def test_entries_without_tokens_give_nan(backend, device, monkeypatch):
    x, w, *_ = problem(torch.float32, "K", device)
    ids, offsets = torch.arange(6, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    _memory_of_7(monkeypatch)
    assert parallel_lce.selected_log_probs(x[:0], w, (ids, offsets)).isnan().all()


def test_a_token_that_is_sure_of_one_of_its_entries(backend, device):
    """What it leaves to the others, 1e-9 to 1e-2, is in its log-probability and in its gradient."""
    gaps = torch.tensor([20.0, 16.0, 12.0, 8.0, 4.0], device=device)
    x = torch.eye(5, device=device)
    w = torch.stack([gaps, torch.zeros_like(gaps)]).requires_grad_()
    ids = torch.arange(2, device=device).expand(5, 2)
    found = parallel_lce.selected_log_probs(x, w, ids)
    [gradient] = torch.autograd.grad(found[:, 0].sum(), w)
    exact = gaps.double()
    torch.testing.assert_close(found[:, 0].double(), -(-exact).exp().log1p(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient[0].double(), torch.sigmoid(-exact), rtol=1e-6, atol=0)


def test_gradients_of_an_entry_that_most_tokens_select(device):
    """A sum in fp32, one term after another, drifts: the larger the sum, the more of each term is rounded away.

    The kernels form such sums too, but by default only for 16-bit gradients, whose own rounding is far larger.
    """
    tokens, width, entries, dimensions = 256, 16, 4, 8
    ours, its = torch.zeros(3), torch.zeros(3)
    for seed in range(6):
        x, w, b = (normal(*shape, seed=seed) for shape in ((tokens, dimensions), (entries, dimensions), (entries,)))
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(entries, (tokens, width), generator=generator)
        upstream = torch.rand(tokens, width, generator=generator)
        operands = [value.float() for value in (x.abs(), w, b)]

        def gradients(dtype, device, log_probs):
            leaves = [value.to(device, dtype).requires_grad_() for value in operands]
            found = log_probs(*leaves, ids.to(device))
            return torch.autograd.grad(found, leaves, upstream.to(found))

        def torchs(x, w, b, ids):
            return torch.nn.functional.linear(x, w, b).gather(1, ids).log_softmax(1)

        def fused(x, w, b, ids):
            return parallel_lce.selected_log_probs(x, w, ids, linear_bias=b)

        truth = gradients(torch.float64, "cpu", torchs)
        for errors, log_probs in ((ours, fused), (its, torchs)):
            found = gradients(torch.float32, device, log_probs)
            errors += torch.tensor([relative_error(f, t) for f, t in zip(found, truth)])
    assert (ours <= 1.1 * its).all(), f"{ours}, torch's {its}"


def test_meta_tensors_give_the_shape():
    x, w, _, ids, offsets, *_ = (v.to("meta") for v in problem(torch.bfloat16, "sets"))
    found = parallel_lce.selected_log_probs(x, w, (ids, offsets))
    assert found.is_meta and found.shape == ids.shape and found.dtype == torch.float32


def test_only_selected_rows_are_read(backend, device):
    """None of an empty selection."""
    x, w, _, ids, *_ = problem(torch.float32, "K", device)
    for chosen in (ids.view(N, -1), ids.view(N, -1)[:, :0]):
        expected = parallel_lce.selected_log_probs(x, w, chosen)
        others = torch.ones(V, dtype=torch.bool, device=device)
        others[chosen] = False
        leaves = x.clone().requires_grad_(), w.masked_fill(others[:, None], torch.nan).requires_grad_()
        found = parallel_lce.selected_log_probs(*leaves, chosen)
        assert found.shape == chosen.shape and torch.equal(found, expected)
        for gradient in torch.autograd.grad(found.sum(), leaves):
            assert gradient.isfinite().all() and (chosen.numel() > 0 or not gradient.any())


def test_second_derivatives_are_refused(device):
    x, w, _, ids, *_ = problem(torch.float32, "K", device)
    x.requires_grad_()
    found = parallel_lce.selected_log_probs(x, w, ids.view(N, -1))
    (dx,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        (None, "selected must be a tensor, or a pair of ids and offsets, got NoneType"),
        (torch.zeros(N, 2), "selected must be of an integer dtype, got torch.float32"),
        (torch.zeros(3, 2, dtype=torch.int64), r"selected must be ids of shape .* got \[3, 2\]"),
    ],
)
def test_refused(selected, message):
    x, w, *_ = problem(torch.float32, "K")
    with pytest.raises(ValueError, match=message):
        parallel_lce.selected_log_probs(x, w, selected)


def test_hooks_for_saved_tensors_may_return_gaps(backend, device):
    def gapped(tensor):
        return tensor.new_full((*tensor.shape, 2), 7)[..., 0].copy_(tensor)

    x, w, _, ids, offsets, *_ = problem(torch.bfloat16, "sets", device)
    leaves = [x.requires_grad_(), w.requires_grad_()]

    def gradients():
        found = parallel_lce.selected_log_probs(*leaves, (ids, offsets), logit_softcap=3.0)
        return torch.autograd.grad(found.square().sum(), leaves)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, gapped):
        found = gradients()
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
