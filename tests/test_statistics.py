"""Which fields ``token_statistics`` has, and the order of its largest entries. test_functional.py and the fuzz compare
every value and gradient with float64."""

import pytest
import torch

import parallel_lce
from tools import fields, on_ranks, shrunk, small, statistics


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
    assert torch.equal(parallel_lce.log_prob(rich), rich.target_log_prob)
    assert torch.equal(parallel_lce.entropy(rich), rich.entropy)
    lean = parallel_lce.token_statistics(t.x, t.weight, None)
    with pytest.raises(ValueError, match="entropy=True, got False"):
        parallel_lce.entropy(lean)
    with pytest.raises(ValueError, match="log_prob needs statistics computed with a target, got target=None"):
        parallel_lce.log_prob(lean)


@pytest.mark.parametrize("ranks", [1, 3])
@on_ranks()
def test_the_lowest_of_equals_comes_first(member, backend):
    """Every logit is 1 or 0, in windows, and in shards that are not in the order of the ranks."""
    x = torch.ones(2, 3, 4, device=member.device)
    shard = torch.zeros(40, 4, device=member.device)
    shard[[7, 30]] = 0.25
    where = dict(process_group=member.group, vocab_start=40 * (member.ranks - 1 - member.rank))
    with shrunk(tile=(2, 8)):
        found = statistics(x, shard, None, top_k=8, **where)
    assert found.top_logits.shape == found.top_ids.shape == (2, 3, 8) and (found.argmax == 7).all()
    expected = {1: [7, 30, 0, 1, 2, 3, 4, 5], 3: [7, 30, 47, 70, 87, 110, 0, 1]}[member.ranks]
    assert found.top_ids[1, 2].tolist() == expected
    assert found.top_logits[1, 2].tolist() == [1.0] * 2 * member.ranks + [0.0] * (8 - 2 * member.ranks)
