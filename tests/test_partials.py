"""The algebra of partials: any split, in any order and grouping, says the same of a token."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import normal
from parallel_lce.core.partials import (
    MAX,
    SUM_EXP,
    TARGET,
    Columns,
    bounds_of,
    covered,
    empty_partial,
    integer_view,
    merge,
    merge_ranks,
    packed_size,
)

ALL = Columns(*[True] * len(fields(Columns)))
EVERY = [Columns(*asked) for asked in itertools.product([False, True], repeat=len(fields(Columns)))]
LAST = torch.iinfo(torch.int64).max
RELAXED = settings(deadline=None, derandomize=True, max_examples=60)


def partial_of(z: torch.Tensor, start: int, target: int, columns: Columns = ALL) -> torch.Tensor:
    """The partial ``[C, N]`` of the logits ``z [N, K]`` with global ids from ``start``, by its definition."""
    N, K = z.shape
    partial = torch.zeros(columns.count, N, dtype=z.dtype)
    top = z.amax(1) if K else torch.full((N,), -torch.inf, dtype=z.dtype)
    shifted = z - top.masked_fill(top == -torch.inf, 0.0).unsqueeze(1)
    partial[MAX] = top
    partial[SUM_EXP] = shifted.exp().sum(1)
    if start <= target < start + K:
        partial[TARGET] = z[:, target - start]
    if columns.shifted:
        partial[columns["shifted"]] = shifted.sum(1)
    if columns.total:
        partial[columns["total"]] = z.sum(1)
    if columns.weighted:
        partial[columns["weighted"]] = torch.where(shifted == -torch.inf, 0.0, shifted.exp() * shifted).sum(1)
    if columns.squared:
        partial[columns["squared"]] = shifted.exp().square().sum(1)
    if columns.argmax:
        first = [int((row == row.max()).int().argmax()) + start if K else 0 for row in z]
        integer_view(partial[columns["argmax"]]).copy_(torch.tensor(first))
    return partial


def joined(partials: list[torch.Tensor], counts: list[int], columns: Columns = ALL) -> torch.Tensor:
    return merge(torch.stack(partials), torch.tensor(counts), columns)


def assert_same(found: torch.Tensor, expected: torch.Tensor, columns: Columns = ALL) -> None:
    if columns.argmax:
        # An empty slice has no index that means anything.
        real = expected[MAX] != -torch.inf
        ids, expected_ids = integer_view(found[columns["argmax"]]), integer_view(expected[columns["argmax"]])
        assert torch.equal(ids[real], expected_ids[real])
        found, expected = found[: columns["argmax"]], expected[: columns["argmax"]]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@st.composite
def sliced_logits(draw):
    """Logits ``[2, V]`` cut into slices, some of them empty; entries tie, are far apart, or -inf."""
    V = draw(st.integers(1, 14))
    entry = st.one_of(st.integers(-6, 6).map(float), st.sampled_from([-800.0, 750.0, -torch.inf]))
    z = torch.tensor([draw(st.lists(entry, min_size=V, max_size=V)) for _ in range(2)], dtype=torch.float64)
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
    assert_same(joined(*map(list, zip(*items))), whole)
    while len(items) > 1:
        i = random.randrange(len(items) - 1)
        (left, n), (right, m) = items[i], items[i + 1]
        if random.random() < 0.5:
            left, right, n, m = right, left, m, n
        items[i : i + 2] = [(joined([left, right], [n, m]), n + m)]
    assert_same(items[0][0], whole)


@RELAXED
@given(sliced_logits(), st.integers(0, 3))
def test_the_empty_slice_is_the_identity_to_the_bit(case, where):
    z, _, target = case
    whole = partial_of(z, 0, target)
    empty = empty_partial(ALL, 2, z.dtype, z.device)
    parts, counts = [empty] * 3, [0] * 3
    parts.insert(where, whole)
    counts.insert(where, z.shape[1])
    found = joined(parts, counts)
    assert torch.equal(found[: ALL["argmax"]], whole[: ALL["argmax"]])
    real = whole[MAX] != -torch.inf
    assert torch.equal(integer_view(found[ALL["argmax"]])[real], integer_view(whole[ALL["argmax"]])[real])
    nothing = joined([empty, empty], [0, 0])
    assert torch.equal(nothing[: ALL["argmax"]], empty[: ALL["argmax"]])


def test_ties_take_the_lowest_id_in_any_order():
    z = torch.tensor([[1.0, 7.0, 7.0, 0.0, 7.0], [2.0, 2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    slices = [(0, 1), (1, 2), (2, 4), (4, 5)]
    parts = [partial_of(z[:, a:b], a, 0) for a, b in slices]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]):
        found = joined([parts[i] for i in order], [slices[i][1] - slices[i][0] for i in order])
        assert integer_view(found[ALL["argmax"]]).tolist() == [1, 0]


def test_nan_makes_its_own_token_nan_and_no_other():
    z = normal(3, 8)
    z[1, 5] = torch.nan
    found = joined([partial_of(z[:, a:b], a, 2) for a, b in ((0, 3), (3, 6), (6, 8))], [3, 3, 2])
    clean = joined([partial_of(z[:, a:b].nan_to_num(), a, 2) for a, b in ((0, 3), (3, 6), (6, 8))], [3, 3, 2])
    for row in (MAX, SUM_EXP, ALL["shifted"], ALL["total"], ALL["weighted"]):
        assert found[row].isnan().tolist() == [False, True, False]
    assert integer_view(found[ALL["argmax"]])[1] == LAST, "an id that no vocabulary has"
    assert torch.equal(found[:, [0, 2]].view(torch.int64), clean[:, [0, 2]].view(torch.int64))


def test_slices_of_minus_infinity_leave_no_nan():
    z = torch.tensor([[-torch.inf, -torch.inf, 1.0, 2.0]], dtype=torch.float64)
    columns = Columns(weighted=True)
    parts = [partial_of(z[:, a : a + 2], a, 3, columns) for a in (0, 2)]
    for order in (parts, parts[::-1]):
        assert_same(joined(order, [2, 2], columns), partial_of(z, 0, 3, columns), columns)
    nothing = joined([parts[0], parts[0]], [2, 2], columns)
    assert nothing.squeeze(1).tolist() == [-torch.inf, 0.0, 0.0, 0.0]


def test_uneven_counts_give_the_mean_of_all_entries():
    z = normal(4, 90, seed=1) + 300
    slices = [(0, 64), (64, 65), (65, 90)]
    found = joined([partial_of(z[:, a:b], a, 0) for a, b in slices], [b - a for a, b in slices])
    mean = found[MAX] + found[ALL["shifted"]] / 90
    torch.testing.assert_close(mean, z.mean(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(found[ALL["total"]] / 90, z.mean(1), rtol=1e-14, atol=0)


def test_columns_do_not_depend_on_each_other():
    """A merge of fewer columns gives the same bits as one of all."""
    z = normal(5, 12, seed=2)
    everything = joined([partial_of(z[:, a : a + 4], a, 7) for a in (0, 4, 8)], [4] * 3)
    for columns in EVERY:
        found = joined([partial_of(z[:, a : a + 4], a, 7, columns) for a in (0, 4, 8)], [4] * 3, columns)
        assert torch.equal(found[:3], everything[:3])
        for name in columns.requested:
            assert torch.equal(found[columns[name]], everything[ALL[name]]), name


# --- packed of ranks -----------------------------------------------------------------------------

NOBODY = torch.iinfo(torch.int32).max


def packed_of(
    z: torch.Tensor, shards: list[tuple[int, int]], targets: torch.Tensor, columns: Columns, vocab_size=None
) -> torch.Tensor:
    """What ranks with ``shards`` (start, rows) of the logits ``z [N, V]`` send; rows from ``vocab_size`` on are
    padding."""
    N = len(z)
    packed = z.new_full((len(shards), packed_size(columns, N)), torch.nan)
    for message, (start, rows) in zip(packed, shards):
        real = rows if vocab_size is None else max(0, min(rows, vocab_size - start))
        part = (
            torch.stack(
                [
                    partial_of(z[i : i + 1, start : start + real], start, int(targets[i]), columns)[:, 0]
                    if real
                    else empty_partial(columns, 1, z.dtype, z.device)[:, 0]
                    for i in range(N)
                ],
                1,
            )
            if N
            else z.new_empty(columns.count, 0)
        )
        message[: part.numel()].view_as(part).view(torch.int32).copy_(part.view(torch.int32))
        bounds_of(message, columns, N).copy_(torch.tensor([start, rows]))
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


def both(packed: torch.Tensor, columns: Columns, vocab_size: int | None, device: str, rows: int):
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


@pytest.mark.parametrize("columns", EVERY, ids=lambda c: "".join(str(int(v)) for v in vars(c).values()))
@pytest.mark.parametrize("sizes", [(37,), (20, 17), (5, 0, 32), (9, 1, 0, 8, 3, 7, 2, 7)], ids=str)
@pytest.mark.thinned
def test_packed_of_ranks(sizes, columns, kernels, device):
    """The kernel gives what torch gives, and both what the whole vocabulary says."""
    for rows in (1, 5, 130):
        z, targets = some_logits(rows, 37)
        found, V = both(packed_of(z, in_shards(*sizes), targets, columns), columns, None, device, rows)
        whole = packed_of(z.double(), [(0, 37)], targets, columns)[0, : found.numel()].view(found.shape)
        torch.testing.assert_close(
            found[: columns["argmax"]].double(), whole[: columns["argmax"]], rtol=1e-5, atol=1e-4
        )
        if columns.argmax:
            # The lowest among equals.
            largest = z == z.amax(1, keepdim=True)
            assert torch.equal(integer_view(found[columns["argmax"]]).long(), largest.int().argmax(1))
        assert V == 37


def test_packed_of_no_tokens_tell_the_vocabulary(kernels, device):
    packed = packed_of(torch.empty(0, 9), in_shards(4, 5), torch.empty(0), ALL)
    found, V = both(packed, ALL, 8, device, 0)
    assert found.shape == (ALL.count, 0) and V == 8


@pytest.mark.parametrize("vocab_size", [None, 31, 20, 37])
def test_shards_in_any_order(vocab_size, kernels, device):
    """Ranks may hold the vocabulary in an order of their own; padding is left out of every column."""
    z, targets = some_logits(5, 37)
    shards = in_shards(20, 0, 11, 6)
    V = 37 if vocab_size is None else vocab_size
    whole = packed_of(z[:, :V], [(0, V)], targets, ALL)[0]
    whole = whole[: ALL.count * 5].view(ALL.count, 5)
    for order in itertools.islice(itertools.permutations(shards), 0, None, 5):
        found, size = both(packed_of(z, list(order), targets, ALL, vocab_size), ALL, vocab_size, device, 5)
        torch.testing.assert_close(found[: ALL["argmax"]], whole[: ALL["argmax"]], rtol=1e-5, atol=1e-4)
        assert torch.equal(integer_view(found[ALL["argmax"]]), integer_view(whole[ALL["argmax"]]))
        assert size == V


def test_tokens_and_shards_of_minus_infinity(kernels, device):
    """A shard of nothing finite has no say, and a token of nothing finite is -inf and no NaN."""
    z, targets = some_logits(5, 24)
    z[0] = -torch.inf
    z[1, :8] = z[2, 8:16] = z[3, 16:] = -torch.inf
    z[4, 1:] = -torch.inf
    for columns in EVERY:
        if columns.total or columns.shifted:
            continue  # -inf by themselves
        found, _ = both(packed_of(z, in_shards(8, 8, 8), targets, columns), columns, None, device, 5)
        assert found[MAX, 0] == -torch.inf and found[SUM_EXP, 0] == 0
        assert not found[: columns["argmax"]].isnan().any()
        torch.testing.assert_close(found[SUM_EXP, 1:], (z - z.amax(1, True)).exp().sum(1)[1:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_nan_of_one_shard_is_its_token_s(shard, kernels, device):
    z, targets = some_logits(130, 24)
    clean = packed_of(z, in_shards(8, 8, 8), targets, ALL)
    z[[3, 129], 8 * shard + 5] = torch.nan
    found, _ = both(packed_of(z, in_shards(8, 8, 8), targets, ALL), ALL, None, device, 130)
    others = torch.ones(130, dtype=torch.bool)
    others[[3, 129]] = False
    for row in (MAX, SUM_EXP, ALL["shifted"], ALL["total"], ALL["weighted"]):
        assert found[row, ~others].isnan().all() and not found[row, others].isnan().any()
    ids = integer_view(found[ALL["argmax"]])
    assert (ids[~others] == NOBODY).all() and (ids[others] < 24).all()
    unharmed, _ = both(clean, ALL, None, device, 130)
    assert torch.equal(found[:, others].view(torch.int32), unharmed[:, others].view(torch.int32))


BROKEN = {
    "gap": ([(0, 8), (9, 8)], None),
    "gap at the front": ([(1, 8), (9, 8)], None),
    "overlap": ([(0, 8), (7, 9)], None),
    "twice the same": ([(0, 8), (0, 8)], None),
    "twice the same, and one of its size missing": ([(0, 8), (0, 8), (16, 8)], None),
    "everybody the first": ([(0, 8)] * 8, 24),
    "gap that an overlap makes up for": ([(0, 8), (4, 8), (16, 8)], None),
    "less than the vocabulary": ([(0, 8), (8, 8)], 17),
    "nothing at all": ([(0, 0), (0, 0)], 3),
}


@pytest.mark.parametrize("name", BROKEN)
def test_shards_that_are_no_partition(name, kernels, device):
    """Every column of every token is NaN, and its argmax nobody."""
    shards, vocab_size = BROKEN[name]
    z, targets = some_logits(130, 24)
    for columns in (Columns(), ALL):
        packed = packed_of(z, shards, targets, columns, vocab_size)
        found, _ = both(packed, columns, vocab_size, device, 130)
        assert found[: columns["argmax"]].isnan().all()
        if columns.argmax:
            assert (integer_view(found[columns["argmax"]]) == NOBODY).all()


@st.composite
def shard_sets(draw):
    """Shards (start, rows): a partition in any order, at times with one of them moved, resized or doubled;
    and V or None."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
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


@settings(RELAXED, max_examples=400)
@given(shard_sets())
def test_a_cover_by_counting(case):
    shards, vocab_size = case
    starts, sizes = torch.tensor(shards).unbind(1)
    assert covered(starts, sizes, vocab_size).item() == covers(shards, vocab_size)


@settings(RELAXED, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=shard_sets())
def test_packed_of_any_shards(kernels, device, case):
    shards, vocab_size = case
    z, targets = some_logits(2, 16)
    found, V = both(packed_of(z, shards, targets, ALL, vocab_size), ALL, vocab_size, device, 2)
    assert found[MAX].isnan().any() == (not covers(shards, vocab_size))
    limit = sum(rows for _, rows in shards) if vocab_size is None else vocab_size
    assert V == sum(max(0, min(rows, limit - start)) if vocab_size else rows for start, rows in shards)
