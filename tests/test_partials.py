"""The merge of the ranks' packed partials, by the kernel and in plain torch. The fuzz has the algebra of partials."""

import itertools
from dataclasses import fields

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_lce.core.partials import (
    MAX,
    NOBODY,
    TARGET,
    Columns,
    bounds_of,
    empty_partial,
    integer_view,
    merge_ranks,
    tile_partial,
)

EVERY = [Columns(*asked) for asked in itertools.product([False, True], repeat=len(fields(Columns)))]


def packed_of(z: torch.Tensor, shards, targets: torch.Tensor, columns: Columns, vocab_size: int | None) -> torch.Tensor:
    """The messages of ranks with ``shards`` (start, rows) of the logits ``z [N, V]``; rows from ``vocab_size`` on are
    padding."""
    N = len(z)
    packed = z.new_full((len(shards), columns.count * N + 2), torch.nan)
    for message, (start, rows) in zip(packed, shards):
        real = rows if vocab_size is None else max(0, min(rows, vocab_size - start))
        part = empty_partial(columns, N, z.dtype, z.device, message[:-2].view(columns.count, N))
        inside = (targets >= start) & (targets < start + real)
        if real:
            tile_partial(z[:, start : start + real].t().clone(), start, columns, part)
            part[TARGET, inside] = z[inside, targets[inside]]
        bounds_of(message).copy_(torch.tensor([start, rows]))
    return packed


@st.composite
def shard_sets(draw):
    """Shards (start, rows): a partition in any order, at times with one of them moved, resized or doubled;
    and V or None."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    shards = [(sum(sizes[:rank]), rows) for rank, rows in enumerate(sizes)]
    for _ in range(draw(st.integers(0, 2))):
        which = draw(st.integers(0, len(shards) - 1))
        start, rows = shards[which]
        shards[which] = draw(
            st.sampled_from([(start + 1, rows), (max(0, start - 1), rows), (start, rows + 1), shards[0]])
        )
    total = sum(rows for _, rows in shards)
    vocab_size = draw(st.one_of(st.none(), st.integers(1, total + 2)))
    return draw(st.permutations(shards)), vocab_size


def covers(shards, vocab_size: int | None) -> bool:
    """Every id below the sum of the sizes lies in one shard, every other one in none; and these are enough."""
    held = [i for start, rows in shards for i in range(start, start + rows)]
    return sorted(held) == list(range(len(held))) and (vocab_size is None or len(held) >= vocab_size)


@settings(
    deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=shard_sets(), columns=st.sampled_from(EVERY), rows=st.sampled_from([0, 1, 2, 5, 130]))
def test_packed_of_any_shards(kernels, device, case, columns, rows):
    """The kernel gives what torch gives: of ties, of tokens and shards of -inf, and of a NaN, which is its token's own.
    Of shards that are no partition all columns are NaN, and the argmax nobody's. The fuzz has the values."""
    from parallel_lce.kernels import partials as compiled

    shards, vocab_size = case
    generator = torch.Generator().manual_seed(0)
    z = torch.randint(-3, 4, (rows, 40), generator=generator) * 4.0
    targets = torch.randint(-2, 42, (rows,), generator=generator)
    if rows == 5:
        z[0] = z[1, :3] = z[2, 5:] = z[4, 1:] = -torch.inf
    z[3:4, 1] = torch.nan
    packed = packed_of(z, shards, targets, columns, vocab_size).to(device)
    before = packed.clone()
    found, V = compiled.merge_ranks(packed, columns, rows, vocab_size)
    expected, expected_V = merge_ranks(packed, columns, rows, vocab_size)
    assert torch.equal(packed.view(torch.int32), before.view(torch.int32)), "neither changes what was gathered"
    assert torch.equal(V, expected_V) and found.shape == expected.shape and found.dtype == expected.dtype
    exact, some, ids = [MAX, TARGET], slice(columns["argmax"]), slice(columns["argmax"], None)
    torch.testing.assert_close(found[exact], expected[exact], rtol=0, atol=0, equal_nan=True)
    # The order of sums over ranks, and exponentials.
    torch.testing.assert_close(found[some], expected[some], rtol=2e-6, atol=2e-5, equal_nan=True)
    assert torch.equal(integer_view(found[ids]), integer_view(expected[ids]))
    limit = sum(rows for _, rows in shards) if vocab_size is None else vocab_size
    assert V == sum(max(0, min(rows, limit - start)) if vocab_size else rows for start, rows in shards)
    if not covers(shards, vocab_size):
        assert found[some].isnan().all() and (integer_view(found[ids]) == NOBODY).all()
    else:
        assert (found[some].isnan().any(0).cpu() <= (z.isnan().any(1) | (z.amax(1) == -torch.inf))).all()
