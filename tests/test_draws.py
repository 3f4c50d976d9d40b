"""``sampled_id``: frequencies against the softmax, and the same ids however the call is spread. The fuzz compares every
id with the token's draw point among the probabilities in float64."""

from __future__ import annotations

import pytest
import torch

import parallel_lce
from cases import normal
from parallel_lce.backends import triton_forward
from parallel_lce.call import prepare
from parallel_lce.features import draws
from parallel_lce.features.draws import uniforms
from tools import on_ranks, shrunk, small

N, V, D = 24, 90, 16


def test_frequencies_are_probabilities(backend, device):
    """Chi-squared over tokens with equal logits, in several windows. p is 1e-3 or less for 49 degrees of freedom."""
    tokens, entries = 2_500, 50
    x, weight = normal(1, D).float().expand(tokens, D).to(device), normal(entries, D, seed=2).float().to(device) / 3
    with shrunk(tile=(4096, 16)):
        ids = parallel_lce.token_statistics(x, weight, None, sample_seed=11).sampled_id
        other = parallel_lce.token_statistics(x, weight, None, sample_seed=12).sampled_id
    expected = tokens * (x[:1].double() @ weight.double().t()).softmax(1)[0]
    for drawn in (ids, other):
        assert drawn.dtype == torch.int64
        found = torch.bincount(drawn, minlength=entries)
        assert ((found - expected).square() / expected).sum() < 86
    # Two seeds draw independently: equal ids are as frequent as the sum of squared probabilities.
    p = expected / tokens
    assert (ids == other).double().mean().item() == pytest.approx(p.square().sum().item(), abs=0.02)


def test_uniform_numbers():
    """Distinct, in (0, 1), without correlation between neighbouring tokens or seeds."""
    u = uniforms(0, torch.arange(100_000))
    assert 0 < u.min() and u.max() < 1 and u.unique().numel() == len(u)
    for other in (u.roll(1), u.roll(7), uniforms(1, torch.arange(100_000)), uniforms(2**63 - 1, torch.arange(100_000))):
        assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1]) < 0.015
    assert torch.equal(uniforms(0, torch.tensor([5, 3])), u[[5, 3]])
    assert u.histc(20, 0, 1).sub(5000).square().div(5000).sum() < 44


def entries_at(probabilities: torch.Tensor, seed: int) -> torch.Tensor:
    """The entries at the tokens' draw points."""
    draw_point = uniforms(seed, torch.arange(len(probabilities), device=probabilities.device))
    return (probabilities.cumsum(1) <= draw_point[:, None]).sum(1)


def test_one_token_may_have_any_stride(backend, device):
    """A tensor of one row is contiguous with each. The window of a draw is the forward's."""
    wide, weight = normal(1, 65).bfloat16().to(device), normal(700, 64, seed=2).bfloat16().to(device) / 4
    for seed in range(6):
        x = wide[:, :64]
        same = x.flatten()[None]  # a clone would keep the stride
        assert x.is_contiguous() and x.stride(0) == 65 and same.stride(0) == 64
        found, expected = (parallel_lce.token_statistics(v, weight, None, sample_seed=seed) for v in (x, same))
        assert torch.equal(found.sampled_id, expected.sampled_id)


@pytest.mark.parametrize(
    ("ranks", "split", "options"),
    [
        (1, False, dict(logits_budget=0)),
        (2, False, dict(logit_softcap=2.0)),
        (2, True, dict(temperature=torch.linspace(0.5, 2, N, dtype=torch.float64))),
        (2, True, dict(sequence_dim=1)),
        (4, False, dict(uneven=True)),
        (4, True, dict(uneven=True, counted_tokens=N // 2)),
    ],
)
@on_ranks()
def test_the_same_ids_for_every_split(member, split, options):
    """Shards that are uneven, in another order than the ranks, and one of them empty; blocks; counted tokens alone."""
    x, weight = normal(N, D).double(), normal(V, D, seed=2).double() / 2
    options, seed, ranks = dict(options), 2**62 + 5, member.ranks
    z = x @ weight.t()
    if cap := options.get("logit_softcap"):
        z = cap * torch.tanh(z / cap)
    if (temperature := options.get("temperature")) is not None:
        z, options["temperature"] = z / temperature[:, None], temperature.to(member.device)
    expected = entries_at(z.softmax(1), seed)
    bounds = [V * r // ranks for r in range(ranks + 1)]
    if options.pop("uneven", False):
        bounds = [0, 0, 40, 41, V]
    if "counted_tokens" in options:
        counted = torch.arange(N) % 2 == 1
        options["mask"], expected = counted.to(member.device), expected.where(counted, -1)
    own = ranks - 1 - member.rank
    start, stop = bounds[own : own + 2]
    dim = options.get("sequence_dim", 0)
    x, expected = (x.view(4, 6, D), expected.view(4, 6)) if dim else (x, expected)
    part = x.chunk(ranks, dim)[member.rank] if split else x
    with shrunk(300, (8, 16)):
        found = parallel_lce.token_statistics(
            part.to(member.device),
            weight[start:stop].to(member.device),
            None,
            process_group=member.group if ranks > 1 else None,
            sequence_parallel=split,
            vocab_start=start,
            vocab_size=V,
            sample_seed=seed,
            **options,
        )
    assert torch.equal(found.sampled_id.cpu(), expected)


@pytest.mark.parametrize("u", [1 - 2.0**-40, 1 - 2.0**-24, 2.0**-49])
def test_places_at_the_ends(u, backend, device, monkeypatch):
    """The ends of the line belong to entries that have a probability, however the sums are rounded. The last windows
    have together less than 1e-24."""
    monkeypatch.setattr(draws, "uniforms", lambda seed, position: torch.full_like(position, u, dtype=torch.float64))
    if backend == "triton":
        monkeypatch.setattr(triton_forward, "_PARTIAL_BYTES", 1)  # ranges of tokens
    x, weight = normal(150, D).float().to(device), normal(1024, D, seed=2).float().to(device)
    bias = torch.zeros(1024, device=device)
    bias[-300:] = bias[:3] = -60.0
    with shrunk(tile=(64, 128)):
        found = parallel_lce.token_statistics(x, weight, None, linear_bias=bias, sample_seed=0).sampled_id
    assert ((found >= 3) & (found < 724)).all()


def test_ids_beside_saved_exponentials(backend, device):
    """The kernels' sums of windows are then relative to an estimate. Some tokens have a logit far above it."""
    x, weight = normal(N, D).bfloat16(), normal(600, D, seed=2).bfloat16()
    weight[333] = 8 * x[5]
    expected = entries_at((x.double() @ weight.double().t()).softmax(1), 3)
    x, weight = x.to(device).requires_grad_(), weight.to(device)
    found = parallel_lce.token_statistics(x, weight, None, sample_seed=3)
    assert torch.equal(found.sampled_id.cpu(), expected) and found.lse.requires_grad
    assert expected[5] == 333


def test_seeds_share_a_plan(device):
    t = small(device)
    known = set()
    for seed in range(3):
        parallel_lce.token_statistics(t.x, t.weight, None, sample_seed=seed)
        known.add(len(prepare.KNOWN))
    assert len(known) == 1
    with pytest.raises(ValueError, match="sample_seed"):
        parallel_lce.token_statistics(t.x, t.weight, None, sample_seed=2**63)


def test_excluded_entries_and_tokens_without_probabilities(backend, device):
    """Entries of probability 0 are never drawn; -1 where the softmax is undefined; nothing for no tokens."""
    t = small(device, N, V, D)
    bias = torch.full((V,), -torch.inf, device=device)
    bias[[0, 41, V - 1]] = 0.0
    found = parallel_lce.token_statistics(t.x, t.weight, None, linear_bias=bias, sample_seed=0).sampled_id
    assert {*found.tolist()} == {0, 41, V - 1}
    nothing = torch.full_like(bias, -torch.inf)
    found = parallel_lce.token_statistics(t.x, t.weight, t.target, linear_bias=nothing, sample_seed=0)
    assert (found.sampled_id == -1).all()
    assert parallel_lce.token_statistics(t.x[:0], t.weight, None, sample_seed=0).sampled_id.shape == (0,)
    assert parallel_lce.token_statistics(t.x, t.weight, None).sampled_id is None
