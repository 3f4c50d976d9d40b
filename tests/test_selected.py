"""Entries that are selected for each token: odd selections. The fuzz has their values beside float64."""

import pytest
import torch

import parallel_lce
from cases import normal
from measures import relative_error
from tools import debug_mode, on_ranks, small

N, V, D, K = 12, 90, 24, 5


def problem(device="cpu", dtype=torch.float32):
    """Leaves x and weight, and ids ``[N, K]``."""
    ids = torch.randint(0, V, (N, K), generator=torch.Generator().manual_seed(4))
    leaves = [value.to(device, dtype).requires_grad_() for value in (normal(N, D), normal(V, D, seed=1) / 2)]
    return *leaves, ids.to(device)


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


def test_empty_selections(backend, device):
    """Without tokens, or without entries, results are empty and gradients 0."""
    for N, E in ((0, 0), (3, 0)):
        t, (ids, offsets) = small(device, N=N), (torch.zeros(n, dtype=torch.int64, device=device) for n in (E, N + 1))
        for selected in ((ids, offsets), ids.new_zeros(N, 0)):
            found = parallel_lce.token_statistics(t.x, t.weight, None, selected=selected).selected_log_prob
            among = parallel_lce.selected_log_probs(t.x, t.weight, selected)
            assert found.numel() == among.numel() == 0
            for value in (found, among):
                assert not torch.autograd.grad(value.sum(), t.weight)[0].any()


DIFFERENT = {
    "ids": lambda ids, offsets: dict(selected=ids.view(N, K).flip(0)),
    "offsets": lambda ids, offsets: dict(selected=(ids, offsets.clone().index_fill_(0, offsets[:1] + 3, 13))),
    "ids of pairs": lambda ids, offsets: dict(selected=(ids.roll(1), offsets)),
}


@pytest.mark.parametrize("name", DIFFERENT)
@on_ranks(2)
def test_ranks_that_select_different_entries(member, name):
    """Of each rank's own entries a logit would be the sum of two: NaN. In debug mode a refusal."""
    x, w, ids = problem(member.device)
    given = dict(linear_weight=w[member.rank * V // 2 :][: V // 2], process_group=member.group)
    pair = ids.view(-1), torch.arange(N + 1, device=member.device) * K
    changed = DIFFERENT[name](*pair)
    same = dict(selected=pair) if isinstance(changed.get("selected"), tuple) else dict(selected=ids)
    options = changed if member.rank else same
    found = parallel_lce.token_statistics(x, **given, target=None, **options)
    assert found.lse.isnan().all() and found.selected_log_prob.isnan().all()
    assert parallel_lce.selected_log_probs(x, **given, **options).isnan().all()
    agreed = parallel_lce.token_statistics(x, **given, target=None, **same)
    assert agreed.lse.isfinite().all()
    with debug_mode(), pytest.raises(ValueError, match="disagree about (offsets of )?selected"):
        parallel_lce.token_statistics(x, **given, target=None, **options)


OTHERS = torch.zeros(3, 2, dtype=torch.int64)
BAD = [
    (dict(selected=torch.zeros(4, 2)), "selected must be of an integer dtype, got torch.float32"),
    (dict(selected=OTHERS), r"selected must be ids of shape \[..., K\] for tokens of shape \[4\], got \[3, 2\]"),
    (dict(selected=(OTHERS.view(6), torch.arange(4))), r"one more than the tokens, got shapes \[6\] and \[4\]"),
    (dict(selected=(torch.arange(6), torch.zeros(1).long()), N=0), "6 ids, and there is no token that could have them"),
    (dict(selected=(torch.arange(4), torch.arange(5).to("meta"))), "^offsets of selected is on meta"),
    (dict(selected=(None, torch.arange(5))), "or a pair of ids and offsets, got NoneType and Tensor"),
    (dict(top_k=0), "top_k must be None or a number of entries >= 1, got 0"),
    (dict(top_k=151), "top_k=151 exceeds the 150 entries of the vocabulary"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_refused(arguments, message):
    arguments = dict(arguments)
    t = small(N=arguments.pop("N", 4))
    with pytest.raises(ValueError, match=message):
        parallel_lce.token_statistics(t.x, t.weight, None, **arguments)
    if "selected" in arguments:
        with pytest.raises(ValueError, match=message):
            parallel_lce.selected_log_probs(t.x, t.weight, **arguments)
    else:
        with pytest.raises(ValueError, match="got NoneType"):
            parallel_lce.selected_log_probs(t.x, t.weight, None)


def test_in_a_compiled_graph(device):
    x, w, ids = problem(device)
    pair = ids.view(-1), torch.arange(N + 1, device=device) * K

    def both(x, w):
        one = parallel_lce.token_statistics(x, w, ids[:, 0], selected=ids, top_k=2, sample_seed=3)
        other = parallel_lce.token_statistics(x, w, ids[:, 0], selected=pair)
        return one.selected_log_prob.sum() - other.selected_log_prob.square().sum(), one.top_ids, one.sampled_id

    loss, *drawn = both(x, w)
    compiled_loss, *compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(x, w)
    torch.testing.assert_close(compiled_loss, loss)
    assert all(torch.equal(a, b) for a, b in zip(compiled, drawn))
    for a, b in zip(*(torch.autograd.grad(value, [x, w]) for value in (compiled_loss, loss))):
        torch.testing.assert_close(a, b)


# --- selected_log_probs alone ------------------------------------------------------------------------


def test_a_token_that_is_sure_of_one_of_its_entries(backend, device):
    """What it leaves to the others, 1e-9 to 1e-2, is in its log-probability and in its gradient."""
    gaps = torch.tensor([20.0, 16.0, 12.0, 8.0, 4.0], device=device)
    w = torch.stack([gaps, torch.zeros_like(gaps)]).requires_grad_()
    found = parallel_lce.selected_log_probs(torch.eye(5, device=device), w, torch.arange(2, device=device).expand(5, 2))
    [gradient] = torch.autograd.grad(found[:, 0].sum(), w)
    torch.testing.assert_close(found[:, 0].double(), -(-gaps.double()).exp().log1p(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient[0].double(), torch.sigmoid(-gaps.double()), rtol=1e-6, atol=0)


def test_gradients_of_an_entry_that_most_tokens_select(device):
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
    """None of an empty selection."""
    x, w, ids = problem(device)
    for chosen in (ids, ids[:, :0]):
        expected = parallel_lce.selected_log_probs(x, w, chosen)
        others = torch.ones(V, dtype=torch.bool, device=device)
        others[chosen] = False
        leaves = x, w.detach().masked_fill(others[:, None], torch.nan).requires_grad_()
        found = parallel_lce.selected_log_probs(*leaves, chosen)
        assert found.shape == chosen.shape and torch.equal(found, expected)
        for gradient in torch.autograd.grad(found.sum(), leaves):
            assert gradient.isfinite().all() and (chosen.numel() > 0 or not gradient.any())
