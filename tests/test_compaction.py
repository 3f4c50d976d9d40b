"""Calls on the tokens that count alone: nothing is computed for the others, and bad counts are refused. The fuzz has
the results, and wrong counts."""

import pytest
import torch

import parallel_lce
from blocks import counted_forwards
from cases import make, part
from parallel_lce.backends import backend_of
from tools import on_ranks, small

N, V, D = 48, 120, 16


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.thinned
@on_ranks()
def test_the_others_are_not_projected(member, reduction, sequence_parallel, backend):
    t = part(make(N, V, D, ignored=True, device=member.device), member, sequence_parallel)
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
    t = small(device, N=N, ignored=True)
    mask = t.target != -100
    counted = dict(mask=mask, counted_tokens=int(mask.sum()) + 1)
    found = parallel_lce.token_statistics(t.x, t.weight, None, argmax=True, **counted)
    assert found.lse.isnan().all() and (found.argmax == -1).all()
