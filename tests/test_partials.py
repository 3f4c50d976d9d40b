"""The algebra of partials: any split, in any order and grouping, says the same of a token."""

from __future__ import annotations

import itertools
from dataclasses import fields

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_lce.core.partials import (
    MAX,
    NOBODY,
    SUM_EXP,
    TARGET,
    Columns,
    bounds_of,
    empty_partial,
    integer_view,
    merge,
    merge_ranks,
)

ALL = Columns(*[True] * len(fields(Columns)))
EVERY = [Columns(*asked) for asked in itertools.product([False, True], repeat=len(fields(Columns)))]
RELAXED = settings(deadline=None, derandomize=True, max_examples=60)


def partial_of(z: torch.Tensor, start: int, targets, columns: Columns = ALL) -> torch.Tensor:
    """The partial ``[C, N]`` of the logits ``z [N, K]`` with global ids from ``start``, by its definition."""
    N, K = z.shape
    partial = empty_partial(columns, N, z.dtype, z.device)
    if K == 0:
        return partial
    partial[MAX] = top = z.amax(1)
    shifted = z - top.masked_fill(top == -torch.inf, 0.0).unsqueeze(1)
    e = shifted.exp()
    partial[SUM_EXP] = e.sum(1)
    targets = torch.as_tensor(targets).expand(N) - start
    picked = z.gather(1, targets.clamp(0, K - 1)[:, None])[:, 0]
    partial[TARGET] = torch.where((targets >= 0) & (targets < K), picked, 0.0)
    sums = dict(shifted=shifted, total=z, weighted=e * shifted.clamp(min=-1e4), squared=e.square())
    for name in columns.requested:
        if name in sums:
            partial[columns[name]] = sums[name].sum(1)
    if columns.argmax:
        ids = integer_view(partial[columns["argmax"]])
        first = (z == top[:, None]).int().argmax(1) + start
        ids.copy_(torch.where(top.isnan(), torch.iinfo(ids.dtype).max, first))
    return partial


def joined(items: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Of partials and the numbers of their entries."""
    return merge(torch.stack([partial for partial, _ in items]), torch.tensor([count for _, count in items]), ALL)


def assert_same(found: torch.Tensor, expected: torch.Tensor, columns: Columns = ALL, rtol=1e-12, atol=1e-12) -> None:
    if columns.argmax:
        # An empty slice has no index that means anything.
        real = expected[MAX] != -torch.inf
        ids, expected_ids = integer_view(found[columns["argmax"]]), integer_view(expected[columns["argmax"]])
        assert torch.equal(ids[real], expected_ids[real])
    some = slice(columns["argmax"])
    torch.testing.assert_close(found[some], expected[some], rtol=rtol, atol=atol, equal_nan=True)


@st.composite
def sliced_logits(draw):
    """Logits ``[2, V]`` cut into slices, some of them empty; entries tie, are far apart, or -inf; the first token may
    have a NaN."""
    V = draw(st.integers(1, 14))
    entry = st.one_of(st.integers(-6, 6).map(float), st.sampled_from([-800.0, 750.0, -torch.inf]))
    z = torch.tensor([draw(st.lists(entry, min_size=V, max_size=V)) for _ in range(2)], dtype=torch.float64)
    where = draw(st.one_of(st.none(), st.integers(0, V - 1)))
    if where is not None:
        z[0, where] = torch.nan
    cuts = sorted(draw(st.lists(st.integers(0, V), min_size=0, max_size=5)))
    bounds = [0, *cuts, V]
    return z, list(zip(bounds, bounds[1:])), draw(st.integers(0, V - 1))


@RELAXED
@given(sliced_logits(), st.randoms(use_true_random=False))
def test_any_split_order_and_grouping(case, random):
    z, slices, target = case
    whole = partial_of(z, 0, target)
    items = [(partial_of(z[:, a:b], a, target), b - a) for a, b in slices]
    random.shuffle(items)
    assert_same(joined(items), whole)
    while len(items) > 1:
        i = random.randrange(len(items) - 1)
        pair = items[i : i + 2][:: random.choice([1, -1])]
        items[i : i + 2] = [(joined(pair), sum(count for _, count in pair))]
    assert_same(items[0][0], whole)
    # The empty slice is the identity, to the bit.
    empty = empty_partial(ALL, 2, z.dtype, z.device), 0
    for some in ([(whole, z.shape[1]), empty], [empty, empty, (whole, z.shape[1])]):
        assert_same(joined(some), whole, rtol=0, atol=0)
    assert_same(joined([empty, empty]), empty[0], rtol=0, atol=0)


# --- packed of ranks -----------------------------------------------------------------------------


def packed_of(z: torch.Tensor, shards, targets: torch.Tensor, columns: Columns, vocab_size=None) -> torch.Tensor:
    """What ranks with ``shards`` (start, rows) of the logits ``z [N, V]`` send; rows from ``vocab_size`` on are
    padding."""
    N = len(z)
    packed = z.new_full((len(shards), columns.count * N + 2), torch.nan)
    for message, (start, rows) in zip(packed, shards):
        real = rows if vocab_size is None else max(0, min(rows, vocab_size - start))
        part = partial_of(z[:, start : start + real], start, targets, columns)
        message[: part.numel()].view_as(part).view(torch.int32).copy_(part.view(torch.int32))
        bounds_of(message).copy_(torch.tensor([start, rows]))
    return packed


def in_shards(*sizes: int) -> list[tuple[int, int]]:
    return [(sum(sizes[:rank]), rows) for rank, rows in enumerate(sizes)]


def some_logits(rows: int, V: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[rows, V]`` fp32 with ties for the largest, and targets, some of them nobody's."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, V, generator=generator) * 4
    for row in range(0, rows, 2):
        z[row, torch.randperm(V, generator=generator)[: 1 + row % 3]] = 30.0
    targets = torch.randint(-2, V + 2, (rows,), generator=generator)
    return z, targets


def merged(packed: torch.Tensor, columns: Columns, vocab_size: int | None, device: str, rows: int):
    """What torch and the kernel make of packed, which neither may change; compared, and the kernel's."""
    from parallel_lce.kernels import partials as kernels

    given_, before = packed.to(device), packed.clone()
    found, V = kernels.merge_ranks(given_, columns, rows, vocab_size)
    expected, expected_V = merge_ranks(given_, columns, rows, vocab_size)
    assert torch.equal(given_.cpu().view(torch.int32), before.view(torch.int32))
    assert V.item() == expected_V.item() and V.dtype == expected_V.dtype and V.shape == ()
    assert found.shape == expected.shape and found.dtype == expected.dtype
    exact = [MAX, TARGET]
    torch.testing.assert_close(found[exact], expected[exact], rtol=0, atol=0, equal_nan=True)
    # The order of sums over ranks, and exponentials.
    for row in range(columns["argmax"]):
        torch.testing.assert_close(found[row], expected[row], rtol=2e-6, atol=2e-5, equal_nan=True)
    if columns.argmax:
        assert torch.equal(integer_view(found[columns["argmax"]]), integer_view(expected[columns["argmax"]]))
    return found.cpu(), V.item()


@st.composite
def shard_sets(draw):
    """Shards (start, rows): a partition in any order, at times with one of them moved, resized or doubled;
    and V or None."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    shards = in_shards(*sizes)
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


@settings(RELAXED, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=shard_sets(), columns=st.sampled_from(EVERY), rows=st.sampled_from([0, 1, 2, 5, 130]))
def test_packed_of_any_shards(kernels, device, case, columns, rows):
    """The kernel gives what torch gives, and both what the whole vocabulary says: of tokens and shards of -inf, too;
    and a token's NaN is its own. Padding is left out of every column. Of shards that are no partition all columns are
    NaN, and the argmax nobody's."""
    shards, vocab_size = case
    z, targets = some_logits(rows, 40)
    if rows == 5:
        z[0] = z[1, :3] = z[2, 5:] = z[4, 1:] = -torch.inf
    z[3:4, 1] = torch.nan
    found, V = merged(packed_of(z, shards, targets, columns, vocab_size), columns, vocab_size, device, rows)
    limit = sum(rows for _, rows in shards) if vocab_size is None else vocab_size
    assert V == sum(max(0, min(rows, limit - start)) if vocab_size else rows for start, rows in shards)
    if covers(shards, vocab_size):
        whole = packed_of(z, [(0, limit)], targets, columns)[0, : found.numel()].view(found.shape)
        assert_same(found, whole, columns, rtol=1e-5, atol=1e-4)
    else:
        assert found[: columns["argmax"]].isnan().all()
        assert not columns.argmax or (integer_view(found[columns["argmax"]]) == NOBODY).all()
