"""Calls on the tokens that count alone: the same results, and nothing is computed for the others."""

from __future__ import annotations

import math

import pytest
import torch

import parallel_lce
from blocks import counted_forwards
from cases import Case, make, normal, part
from on_ranks import on_ranks
from parallel_lce.backends import backend_of
from tools import debug_mode, everywhere, fields, small
from world import Member

N, V, D = 48, 120, 16
LOSSES = {
    "none": dict(reduction="none"),
    "mean": dict(reduction="mean", label_smoothing=0.1),
    "sum": dict(reduction="sum", z_loss=1e-3),
}


def _loss(member: Member, name: str, sequence_parallel: bool) -> None:
    """Loss, dX and dW, with the number of tokens that count and without."""
    t = part(make(Case(N, V, D, ignored="some"), member.device), member, sequence_parallel)
    scale, weight, upstream = (normal(N, seed=seed).abs().to(member.device) + 0.5 for seed in (7, 8, 9))
    options = dict(LOSSES[name], process_group=member.group, sequence_parallel=sequence_parallel)
    options |= dict(logit_scale=scale, token_weight=weight)
    count, results = int((t.target != -100).sum()), []
    assert 0 < count < N
    for counted in (dict(counted_tokens=count), {}):
        with counted_forwards(backend_of(t.weight)) as rows:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options, **counted)
        assert sum(rows) == counted.get("counted_tokens", N)
        grown = upstream.to(loss)[: loss.numel()].view(loss.shape)
        results.append([loss, *torch.autograd.grad(loss, [t.x, t.weight], grown)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.thinned
def test_a_loss(name, ranks, sequence_parallel, worlds, backend, device):
    everywhere(worlds, device, ranks, _loss, name, sequence_parallel)


@pytest.mark.parametrize("shape", [(6, 8), ()], ids=str)
def test_statistics(shape, backend, device):
    """Of the other tokens they are 0, and ids are -1."""
    t = small(device, N=math.prod(shape))
    mask = torch.arange(len(t.x), device=device).view(shape) % 3 == 0
    ids = torch.randint(0, 150, (*shape, 4), device=device)
    everything = dict(mean_logit=True, expected_logit=True, argmax=True, sum_p_squared=True, selected=ids, top_k=3)
    arguments = t.x.view(*shape, -1), t.weight, t.target.view(shape)
    plain = parallel_lce.token_statistics(*arguments, **everything)
    found = parallel_lce.token_statistics(*arguments, **everything, mask=mask, counted_tokens=int(mask.sum()))
    assert found.vocab_size == 150
    for name, value in fields(found).items():
        if name != "vocab_size":
            expected = getattr(plain, name)
            assert value.shape == expected.shape, name
            assert (value[~mask] == (0 if value.is_floating_point() else -1)).all(), name
            torch.testing.assert_close(value[mask], expected[mask], msg=name)
    totals = [s.entropy[mask].sum() + s.selected_log_prob[mask].sum() for s in (found, plain)]
    for a, b in zip(*(torch.autograd.grad(total, [t.x, t.weight]) for total in totals)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_number_gives_nan(wrong, device):
    t = small(device, N=N, ignored="some")
    mask = t.target != -100
    count = int(mask.sum()) + wrong
    for reduction in ("mean", "none"):
        options = dict(reduction=reduction, counted_tokens=count)
        assert parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options).isnan().all()
    found = parallel_lce.token_statistics(t.x, t.weight, None, argmax=True, mask=mask, counted_tokens=count)
    assert found.lse.isnan().all() and (found.argmax == -1).all()
    for gradient in torch.autograd.grad(found.lse.sum(), [t.x, t.weight]):
        assert gradient.isnan().any(), "a step of no gradient would be taken"


@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_of_tokens(autocast, device):
    """All, none, some or one of the tokens count."""
    t = small(device, N=N)
    some = t.target.masked_fill(torch.arange(N, device=device) % 3 == 0, -100)
    narrow = t.target.clamp(max=100).to(torch.int8)
    narrow[::5] = 0  # 2^40 in 8 bits
    for x, target, count, options in (
        (t.x, t.target, N, {}),
        (t.x, torch.full_like(t.target, -100), 0, {}),
        (t.x, some, N - N // 3, {}),
        (t.x[0], t.target[0], 1, dict(reduction="none")),
        # An ignore_index that the target's dtype does not hold.
        (t.x, narrow, N, dict(ignore_index=2**40)),
    ):
        results = []
        for counted in (dict(counted_tokens=count), {}):
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                loss = parallel_lce.linear_cross_entropy(x, t.weight, target, **options, **counted)
            results.append([loss, *torch.autograd.grad(loss, [t.x, t.weight])])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("last", "message"),
    [(-1, "counted_tokens must be a number of tokens"), (N - 1, "disagree about counted_tokens: rank 0")],
)
@on_ranks(2)
def test_debug_mode_raises_on_every_rank(member, last, message):
    t = small(member.device, N=N)
    shard = t.weight.chunk(member.ranks)[member.rank]
    options = dict(counted_tokens=last if member.rank else N, process_group=member.group, sequence_parallel=True)
    with debug_mode(), pytest.raises(ValueError, match=message):
        parallel_lce.linear_cross_entropy(t.x[: N // 2], shard, t.target, **options)


ALL = torch.ones(N, dtype=torch.bool)
LOSS, STATISTICS = parallel_lce.linear_cross_entropy, parallel_lce.token_statistics
SETS = torch.zeros(3, dtype=torch.int64), torch.zeros(N + 1, dtype=torch.int64)
BAD = [
    (LOSS, dict(counted_tokens=N + 1), "counted_tokens must be a number of tokens from 0 to 48, got 49"),
    (LOSS, dict(counted_tokens=-1), "from 0 to 48, got -1"),
    (LOSS, dict(counted_tokens=3.0), "from 0 to 48, got 3.0"),
    (LOSS, dict(counted_tokens=torch.tensor(3)), r"from 0 to 48, got tensor\(3\)"),
    (LOSS, dict(counted_tokens=3, process_group="tp"), "process_group must be .* got str"),
    (LOSS, dict(counted_tokens=3, ignore_index="a"), "ignore_index must be an integer .* got 'a'"),
    (LOSS, dict(counted_tokens=3, target=SETS[0]), r"target must have shape \[48\]"),
    (STATISTICS, dict(mask=ALL), "given together, got Tensor and NoneType"),
    (STATISTICS, dict(counted_tokens=3), "given together, got NoneType and int"),
    (STATISTICS, dict(mask=ALL.float(), counted_tokens=3), r"mask must be torch.bool .* got torch.float32 \[48\]"),
    (STATISTICS, dict(mask=ALL.view(6, 8), counted_tokens=3), r"tokens' shape \[48\], got torch.bool \[6, 8\]"),
    (STATISTICS, dict(mask=ALL.to("meta"), counted_tokens=3), "mask is on meta and input is on cpu"),
    (STATISTICS, dict(mask=ALL, counted_tokens=N, selected=SETS), "without offsets, where counted_tokens is given"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD)
def test_refused(function, arguments, message):
    t = small(N=N)
    with pytest.raises(ValueError, match=message):
        function(**(dict(input=t.x, linear_weight=t.weight, target=t.target) | arguments))
