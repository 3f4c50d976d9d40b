"""The number of counted tokens, counted before the forward and read at the loss."""

import pytest
import torch

import parallel_lce
from cases import make, part
from parallel_lce.backends import backend_of
from parallel_lce.run.token_count import LabelCount
from tools import counted_forwards, debug_mode, on_ranks, small, unchecked

N, V, D = 48, 120, 24
ON_GPUS = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


def test_a_nan_of_a_masked_token_reaches_no_gradient_in_a_graph(device):
    """Where no count can be read: a gradient of 0 times a NaN would be NaN in every row of dW."""
    t = small(device, ignored=True)
    x = t.x.detach().masked_fill((t.target == -100)[:, None], torch.nan).requires_grad_()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x, weight, target):
        counted = parallel_lce.count_tokens(target)
        return parallel_lce.linear_cross_entropy(x, weight, target, counted_tokens=counted)

    found = torch.autograd.grad(loss(x, t.weight, t.target), [x, t.weight])
    exact = torch.autograd.grad(parallel_lce.linear_cross_entropy(t.x, t.weight, t.target), [t.x, t.weight])
    assert all(map(torch.equal, found, exact))


def test_a_transform_reads_nothing():
    t = small("cpu", N=N, ignored=True)
    count = parallel_lce.count_tokens(t.target)
    assert count.read() == int((t.target >= 0).sum())
    read = []
    torch.func.vmap(lambda target: read.append(parallel_lce.count_tokens(target).read()) or target)(t.target[None])
    assert read == [None]


@pytest.mark.parametrize("count", [31, N])
def test_a_wrong_number_is_refused_where_the_host_can_read_it(count, device):
    """On a GPU and in a compiled graph results are NaN."""
    t = small(device, N=N, ignored=True)
    mask, ids = t.target >= 0, t.target.clamp(min=0)
    begun = parallel_lce.count_tokens(torch.arange(N, device=device) < count)
    calls = {
        "loss": lambda: parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, counted_tokens=count),
        "statistics": lambda: parallel_lce.token_statistics(t.x, t.weight, None, mask=mask, counted_tokens=count).lse,
        "own": lambda: parallel_lce.token_loss(t.x, t.weight, t.target, lambda s: s.lse, counted_tokens=count)[0],
        "begun": lambda: parallel_lce.token_statistics(t.x, t.weight, ids, mask=mask, counted_tokens=begun).lse,
        "masked": lambda: parallel_lce.linear_cross_entropy(t.x, t.weight, ids, mask=mask, counted_tokens=begun),
    }
    for name, call in calls.items():
        with debug_mode(), pytest.raises(ValueError, match=f"counted_tokens is {count}, and 32 tokens count"):
            call()
        if device == "cpu":
            with pytest.raises(ValueError, match=f"counted_tokens is {count}, and 32 tokens count"):
                call()
        with unchecked():
            assert call().isnan().all()
        if (name, count) in (("loss", N), ("statistics", 31)):
            found = torch.compile(call, backend="eager", fullgraph=True)()
            (dx,) = torch.autograd.grad(found.sum(), t.x)
            assert found.isnan().all() and dx[mask].isnan().any()


@pytest.mark.parametrize("of", ["statistics", "none", "mean"])
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, True)])
@pytest.mark.thinned
@on_ranks()
def test_a_mask_alone_gives_what_it_gives_with_the_number(member, of, sequence_parallel, backend):
    """Tokens that do not count are projected, and all else is as with their number. Their targets may be no ids."""
    t = part(make(N, V, D, ignored=True, device=member.device), member, sequence_parallel)
    mask = torch.arange(N, device=member.device) % 5 == 1  # other tokens in each rank's part
    of_rank = mask.chunk(member.ranks)[member.rank] if sequence_parallel else mask
    x = t.x.detach().masked_fill(~of_rank[:, None], torch.nan).requires_grad_()
    target, labels = t.target.masked_fill(~mask, 2 * V), t.target.masked_fill(~mask, -100)
    options, found = dict(process_group=member.group, sequence_parallel=sequence_parallel), []
    ones = torch.ones(N, device=member.device).masked_fill(~mask, torch.nan)
    counts = mask if of == "statistics" else labels >= 0
    for count in (parallel_lce.count_tokens(counts), None):
        with counted_forwards(backend_of(t.weight)) as rows:
            if of == "statistics":
                given = dict(mask=mask, counted_tokens=count, entropy=True, argmax=True)
                given |= dict(temperature=ones, logit_scale=ones)
                each = parallel_lce.token_statistics(x, t.weight, target, **given, **options)
                value = torch.stack([each.lse, each.target_log_prob + each.entropy])
                assert each.argmax.eq(-1).equal(~mask)
            else:
                module = parallel_lce.LinearCrossEntropy(reduction=of, **options)
                torch.set_default_dtype(torch.float64)  # of which no result is
                value = module(x, t.weight, target, mask=mask, counted_tokens=count)
                torch.set_default_dtype(torch.float32)
        assert sum(rows) == (N if count is None else counts.sum())
        found.append([value, *torch.autograd.grad(value.sum(), [x, t.weight])])
        assert found[-1][1].untyped_storage().nbytes() == x.nbytes  # without the other ranks' parts
    if of != "statistics":
        found.append([parallel_lce.linear_cross_entropy(t.x, t.weight, labels, reduction=of, **options)])
    for others in found[1:]:
        for one, other in zip(found[0], others):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_labels_keep_their_count_until_they_change():
    labels = torch.tensor([[1, -100, 2]])
    count = LabelCount(labels)
    assert count.of(labels).read() == 2 and count.of(labels.clone()) is None and count.of(labels, shifted=True) is None
    assert LabelCount(labels, shifted=True).of(labels, shifted=True).read() == 1
    labels[0, 1] = 4
    assert count.of(labels) is None
    with torch.inference_mode():
        labels = labels.clone()
    assert LabelCount(labels).of(labels).read() == 3
    for nothing in (None, torch.ones(3, device="meta", dtype=torch.long)):
        assert LabelCount(nothing).of(nothing) is None


def test_what_is_no_ids_is_not_counted():
    for target in (torch.ones(3), [1, 2]):
        with pytest.raises(ValueError, match="target must be a tensor of ids or a mask of bool, got"):
            parallel_lce.count_tokens(target)
    for index in ("pad", 1.5, True, 2**70):
        with pytest.raises(ValueError, match="ignore_index must be an integer of 64 bits or None, got"):
            parallel_lce.count_tokens(torch.arange(3), index)


@ON_GPUS
def test_nobody_waits_for_the_stream(device):
    """The stream sleeps between the count and the loss, and the host reads the number meanwhile."""
    t = small(device, N=N, ignored=True)
    step = lambda count: parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, counted_tokens=count)  # noqa: E731
    step(parallel_lce.count_tokens(t.target))
    torch.cuda.synchronize()
    count = parallel_lce.count_tokens(t.target)
    torch.cuda._sleep(2**30)
    behind = torch.cuda.current_stream().record_event()
    loss = step(count)
    assert count.read() == 32 and not behind.query()
    assert loss.isfinite()


@ON_GPUS
def test_a_captured_graph_runs_the_whole(device):
    t = small(device, N=N, ignored=True)
    counts = [parallel_lce.count_tokens(t.target)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts.append(parallel_lce.count_tokens(t.target))
        assert [count.read() for count in counts] == [None, None]
