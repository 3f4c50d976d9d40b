"""Calls on the tokens that count alone: nothing is computed for the others, and bad counts are refused. The fuzz has
the results, and wrong counts."""

from functools import partial

import pytest
import torch

import parallel_lce
from blocks import counted_forwards
from cases import Case, make, part
from parallel_lce.backends import backend_of
from tools import debug_mode, on_ranks, small

N, V, D = 48, 120, 16


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.thinned
@on_ranks()
def test_the_others_are_not_projected(member, reduction, sequence_parallel, backend):
    t = part(make(Case(N, V, D, ignored="some"), member.device), member, sequence_parallel)
    options = dict(reduction=reduction, process_group=member.group, sequence_parallel=sequence_parallel)
    count, results = int((t.target != -100).sum()), []
    assert 0 < count < N
    for counted in (dict(counted_tokens=count), {}):
        with counted_forwards(backend_of(t.weight)) as rows:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options, **counted)
        assert sum(rows) == counted.get("counted_tokens", N)
        results.append([loss, *torch.autograd.grad(loss.sum(), [t.x, t.weight])])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_wrong_number_gives_nan_and_no_id(device):
    t = small(device, N=N, ignored="some")
    mask = t.target != -100
    counted = dict(mask=mask, counted_tokens=int(mask.sum()) + 1)
    found = parallel_lce.token_statistics(t.x, t.weight, None, argmax=True, **counted)
    assert found.lse.isnan().all() and (found.argmax == -1).all()


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


@pytest.mark.parametrize("with_target", [False, True])
@on_ranks(2)
def test_debug_mode_compares_masks(member, with_target):
    t = small(member.device, N=N)
    shard, mask = t.weight.chunk(member.ranks)[member.rank], torch.arange(N, device=member.device) >= 8
    target, where = t.target if with_target else None, dict(process_group=member.group)
    call = partial(parallel_lce.token_statistics, t.x, shard, target, **where)
    with debug_mode():
        with pytest.raises(ValueError, match="disagree about mask at position 0: rank 0 has 0, rank 1 has 1"):
            call(mask=mask.roll(-8) if member.rank else mask, counted_tokens=N - 8)
        assert call(mask=mask, counted_tokens=40).lse.isfinite().all()


ALL = torch.ones(N, dtype=torch.bool)
LOSS, STATISTICS = parallel_lce.linear_cross_entropy, parallel_lce.token_statistics
SETS = torch.zeros(3, dtype=torch.int64), torch.zeros(N + 1, dtype=torch.int64)
BAD = [
    *((LOSS, dict(counted_tokens=n), f"tokens from 0 to 48, got {n}") for n in (N + 1, -1, 3.0)),
    (LOSS, dict(counted_tokens=3, process_group="tp"), "process_group must be .* got str"),
    (LOSS, dict(counted_tokens=3, ignore_index="a"), "ignore_index must be an integer .* got 'a'"),
    (LOSS, dict(counted_tokens=3, target=SETS[0]), r"target must have shape \[48\]"),
    (STATISTICS, dict(mask=ALL), "given together, got Tensor and NoneType"),
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
