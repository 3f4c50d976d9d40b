"""The order of the largest entries, and odd selections. The fuzz compares every value and gradient with float64."""

import pytest
import torch

import parallel_lce
from cases import normal
from measures import relative_error
from parallel_lce.features.top_k import largest
from tools import on_ranks, shrunk, small, statistics


@pytest.mark.parametrize("ranks", [1, 3])
@on_ranks()
def test_the_lowest_of_equals_comes_first(member, backend):
    """Every logit is 1 or 0, but one token's NaN, of three of six tokens at a time, in shards in another order."""
    x = torch.tensor([torch.nan, *[1.0] * 5], device=member.device).view(2, 3, 1).repeat(1, 1, 4)
    shard = torch.zeros(40, 4, device=member.device)
    shard[[7, 30]] = 0.25
    where = dict(process_group=member.group, vocab_start=40 * (member.ranks - 1 - member.rank))
    with shrunk(320):
        found = statistics(x, shard, None, top_k=8, **where)
    assert found.top_logits[0, 0].isnan().all() and (found.top_ids[0, 0] == -1).all()
    assert found.argmax.tolist() == [[-1, 7, 7], [7, 7, 7]] and found.top_logits.shape == (2, 3, 8)
    others = [0, 1, 2, 3, 4, 5] if member.ranks == 1 else [47, 70, 87, 110, 0, 1]
    assert found.top_ids[1, 2].tolist() == [7, 30, *others]
    assert found.top_logits[1, 2].tolist() == [1.0] * 2 * member.ranks + [0.0] * (8 - 2 * member.ranks)
    if member.ranks > 1:  # shards of fewer entries than are asked for, all of which lie below 0
        where["vocab_start"] = 3 * (member.ranks - 1 - member.rank)
        found = statistics(-x, shard[:3] + 0.25, None, top_k=8, **where)
        assert (found.top_logits[1] == -1).all() and found.top_ids[1, 2].tolist() == [*range(8)]
    assert largest(torch.tensor([[-0.0, 0.0, -1.0]]), torch.arange(3)[None], 2)[1].tolist() == [[0, 1]]


OFFSETS = [[0, 2, 4, 5, 5], [1, 2, 4, 5, 6], [0, 4, 2, 5, 6], [0, 2, 4, 2**40, 6], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.thinned
def test_offsets_that_are_invalid_give_nan(offsets, backend, device, monkeypatch):
    """Also in entries that belong to no token. Nothing is read out of bounds, and nobody waits for the device."""
    t = small(device, N=len(offsets) - 1)
    ids = torch.arange(6, device=device)
    selected = ids, torch.tensor(offsets, device=device)
    # New memory is not NaN by chance, as where NaN was freed.
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    filled = lambda t: t.fill_(7) if t.is_floating_point() else t  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *given, **options: filled(new_empty(*given, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *given, **options: filled(empty_like(*given, **options)))
    found = parallel_lce.token_statistics(t.x, t.weight, None, selected=selected)
    assert found.selected_log_prob.isnan().all() and found.lse.isfinite().all()
    among = parallel_lce.selected_log_probs(t.x, t.weight, selected)
    assert among.shape == ids.shape and among.isnan().all()
    assert torch.autograd.grad(among.sum(), t.weight)[0][ids].isnan().all()


def test_gradients_of_an_entry_that_most_tokens_select_do_not_drift(device):
    """A sum in fp32, one term after another, drifts: the larger the sum, the more of each term is rounded away."""
    x, w = normal(4096, 8).abs(), normal(4, 8, seed=1)
    ids = torch.arange(4).expand(4096, 4)
    upstream = normal(4096, 4, seed=2).abs()

    def gradient(log_probs, dtype, device):
        leaf = w.to(device, dtype).requires_grad_()
        found = log_probs(x.to(device, dtype), leaf, ids.to(device))
        return torch.autograd.grad(found, leaf, upstream.to(found))[0]

    def torchs(x, w, ids):
        return (x @ w.t()).gather(1, ids).log_softmax(1)

    truth = gradient(torchs, torch.float64, "cpu")
    its = relative_error(gradient(torchs, torch.float32, device), truth)
    found = gradient(parallel_lce.selected_log_probs, torch.float32, device)
    assert relative_error(found, truth) <= 1.1 * its, f"torch's {its}"


def test_only_selected_rows_are_read(backend, device):
    t = small(device, N=6, V=90)
    ids = t.target[:, None].add(torch.arange(5, device=device)).remainder(90)
    for chosen in (ids, ids[:, :0]):
        expected = parallel_lce.selected_log_probs(t.x, t.weight, chosen)
        others = torch.ones(90, dtype=torch.bool, device=device)
        others[chosen] = False
        leaves = t.x, t.weight.detach().masked_fill(others[:, None], torch.nan).requires_grad_()
        found = parallel_lce.selected_log_probs(*leaves, chosen)
        assert found.shape == chosen.shape and torch.equal(found, expected)
        for gradient in torch.autograd.grad(found.sum(), leaves):
            assert gradient.isfinite().all() and (chosen.numel() > 0 or not gradient.any())
