"""``token_statistics`` beside the same-dtype dense path. The fuzz compares every value and gradient of it, and of
``selected_log_probs``, with float64 in all configurations."""

from dataclasses import replace

import pytest
import torch

import parallel_lce
import reference
from cases import DTYPES
from measures import assert_no_worse, error, size, smallest_steps
from parallel_lce import backends
from parallel_lce.core.collectives import Shard
from parallel_lce.core.partials import (
    TARGET,
    TRAILER,
    Columns,
    accumulation_dtype,
    empty_partial,
    integer_view,
    tile_partial,
)
from tools import DIFFERENTIABLE, fields, on_ranks, shrunk, small, statistics

FIELDS = *DIFFERENTIABLE, "selected_log_prob"


def results(found, leaves, names):
    """Some fields, and their gradients by name."""
    values = {name: found[name].detach() for name in names}
    for name in names:
        upstream = torch.linspace(-1, 2, found[name].numel(), dtype=torch.float64).view(found[name].shape)
        gradients = torch.autograd.grad(found[name], leaves, upstream.to(found[name]), retain_graph=True)
        values |= {f"{leaf} of {name}": gradient for leaf, gradient in zip(("dx", "dweight", "dbias"), gradients)}
    return values


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.thinned
def test_errors_are_those_of_the_dense_path(dtype, budget, backend, device):
    """A tenth of the selected ids are targets."""
    t, selected = small(device, 63, 257, 33, dtype, bias=True), torch.arange(630).view(63, 10) % 257
    selected[:, 0] = t.target
    leaves, selected = [t.x, t.weight, t.bias], selected.to(device)

    def dense(dtype, where):
        theirs = [v.detach().to(where, dtype).requires_grad_() for v in leaves]
        z = torch.nn.functional.linear(*theirs).to(accumulation_dtype(dtype))
        found = reference.statistics(z, t.target.to(where))
        found["selected_log_prob"] = z.log_softmax(1).gather(1, selected.to(where))
        return results(found, theirs, FIELDS) | dict(max_logit=found["max_logit"])

    truth = dense(torch.float64, "cpu")
    # Torch's functions are less exact on a GPU.
    yardsticks = [dense(DTYPES[dtype], where) for where in {"cpu", device}]
    for field in FIELDS:
        with shrunk(9000, (32, 64)):
            found = statistics(t.x, t.weight, t.target, linear_bias=t.bias, logits_budget=budget, selected=selected)
            found = results(fields(found), leaves, [field])
        for name, value in found.items():
            its = max((each[name] for each in yardsticks), key=lambda v: error(v, truth[name]))
            # A sum relative to the largest logit, plus that, is rounded at the larger of the two.
            larger = "max_logit" if name in ("mean_logit", "expected_logit") else name
            floor = torch.finfo(value.dtype).eps * max(size(truth[name]), size(truth[larger])) + smallest_steps(value)
            assert_no_worse(value, truth[name], its, 1.1, floor, name)


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


# First ids and sizes of the ranks' shards, V if it is given, and whether they are a partition.
SHARDS = {
    "in order": ((0, 3, 7), (3, 4, 2), None, True),
    "in another order": ((7, 0, 3), (2, 3, 4), 9, True),
    "with padding": ((0, 4, 8), (4, 4, 4), 9, True),
    "of padding alone": ((0, 5, 10), (5, 5, 5), 9, True),
    "empty, before one of the same start": ((0, 3, 3), (3, 0, 6), None, True),
    "empty, after one of the same start": ((0, 3, 3), (3, 6, 0), 9, True),
    "empty, inside another": ((0, 2, 6), (6, 0, 3), None, True),
    "of a hundred ranks": (range(100), (1,) * 100, None, True),
    "a gap": ((0, 3, 8), (3, 4, 2), None, False),
    "a gap at the end": ((0, 3, 7), (3, 4, 2), 10, False),
    "an overlap": ((0, 3, 6), (3, 4, 2), None, False),
    "twice the same": ((0, 0, 5), (5, 5, 4), None, False),
}


@pytest.mark.parametrize(("starts", "sizes", "vocab_size", "whole"), SHARDS.values(), ids=SHARDS)
def test_partials_of_shards_merge(starts, sizes, vocab_size, whole, backend, device):
    columns, tokens, V = Columns(*[True] * 5), 4, sum(sizes) if vocab_size is None else vocab_size
    z = torch.randn(V, tokens, generator=torch.Generator().manual_seed(1)).to(device)
    z[3:5, 1], z[:, 2], z[7] = -torch.inf, -torch.inf, z[7] + 3
    packed = z.new_empty(len(starts), columns.count * tokens + TRAILER)
    rows = [
        (z, 0, empty_partial(columns, tokens, z.dtype, z.device)),
        *((z[a : a + n], a, row[:-TRAILER].view(-1, tokens)) for row, a, n in zip(packed, starts, sizes)),
    ]
    for logits, start, partial in rows:
        empty_partial(columns, tokens, z.dtype, z.device, partial)
        if len(logits):
            tile_partial(logits.clone(), start, columns, partial)
            partial[TARGET] += start
    for rank, (start, number) in enumerate(zip(starts, sizes)):
        shard = Shard(start, number, vocab_size)
        shard.write_trailer(packed[rank : rank + 1])
        assert not whole or shard.real_rows == len(z[start : start + number])
    merged, real = backends.named(backend).merge_ranks(packed, columns, tokens, vocab_size)
    ids, floats = integer_view(merged[columns["argmax"]]), merged[: columns["argmax"]]
    if whole:
        expected = rows[0][2]
        expected[TARGET] = sum(a for a, n in zip(starts, sizes) if min(V - a, n) > 0)
        torch.testing.assert_close(floats, expected[: columns["argmax"]], rtol=1e-5, atol=1e-5)
        assert torch.equal(ids, integer_view(expected[columns["argmax"]])) and real == V
    else:
        assert floats.isnan().all() and (ids == torch.iinfo(ids.dtype).max).all()
    for call, first in ((1, 0), (0, 128)) if whole else ():  # the last rank's message is of another call, or block
        replace(shard, digest=call).write_trailer(packed[-1:], first)
        merged, _ = backends.named(backend).merge_ranks(packed, columns, tokens, vocab_size)
        assert merged[: columns["argmax"]].isnan().all()
