"""The algebra of partials: any split, in any order and grouping, says the same of a token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_lce.partials import MAX, SUM_EXP, TARGET, Columns, empty_partial, integer_view, merge

ALL = Columns(mean_log_prob=True, mean_logit=True, expected_logit=True, argmax=True)
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
    if columns.mean_log_prob:
        partial[columns.shifted] = shifted.sum(1)
    if columns.mean_logit:
        partial[columns.total] = z.sum(1)
    if columns.expected_logit:
        partial[columns.weighted] = torch.where(shifted == -torch.inf, 0.0, shifted.exp() * shifted).sum(1)
    if columns.argmax:
        first = [int((row == row.max()).int().argmax()) + start if K else 0 for row in z]
        integer_view(partial[columns.index]).copy_(torch.tensor(first))
    return partial


def joined(partials: list[torch.Tensor], counts: list[int], columns: Columns = ALL) -> torch.Tensor:
    return merge(torch.stack(partials), torch.tensor(counts), columns)


def assert_same(found: torch.Tensor, expected: torch.Tensor, columns: Columns = ALL) -> None:
    if columns.argmax:
        # An empty slice has no index that means anything.
        real = expected[MAX] != -torch.inf
        ids, expected_ids = integer_view(found[columns.index]), integer_view(expected[columns.index])
        assert torch.equal(ids[real], expected_ids[real])
        found, expected = found[: columns.index], expected[: columns.index]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@st.composite
def sliced_logits(draw):
    """Logits ``[2, V]`` cut into slices, some of them empty; entries tie, are far apart, or -inf."""
    V = draw(st.integers(1, 14))
    entry = st.one_of(st.integers(-6, 6).map(float), st.sampled_from([-800.0, 750.0, -torch.inf]))
    z = torch.tensor(
        [draw(st.lists(entry, min_size=V, max_size=V)) for _ in range(2)], dtype=torch.float64
    )
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
    assert torch.equal(found[: ALL.index], whole[: ALL.index])
    real = whole[MAX] != -torch.inf
    assert torch.equal(integer_view(found[ALL.index])[real], integer_view(whole[ALL.index])[real])
    nothing = joined([empty, empty], [0, 0])
    assert torch.equal(nothing[: ALL.index], empty[: ALL.index])


def test_ties_take_the_lowest_id_in_any_order():
    z = torch.tensor([[1.0, 7.0, 7.0, 0.0, 7.0], [2.0, 2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    slices = [(0, 1), (1, 2), (2, 4), (4, 5)]
    parts = [partial_of(z[:, a:b], a, 0) for a, b in slices]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]):
        found = joined([parts[i] for i in order], [slices[i][1] - slices[i][0] for i in order])
        assert integer_view(found[ALL.index]).tolist() == [1, 0]


def test_nan_makes_its_own_token_nan_and_no_other():
    z = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z[1, 5] = torch.nan
    found = joined([partial_of(z[:, a:b], a, 2) for a, b in ((0, 3), (3, 6), (6, 8))], [3, 3, 2])
    clean = joined([partial_of(z[:, a:b].nan_to_num(), a, 2) for a, b in ((0, 3), (3, 6), (6, 8))], [3, 3, 2])
    for row in (MAX, SUM_EXP, ALL.shifted, ALL.total, ALL.weighted):
        assert found[row].isnan().tolist() == [False, True, False]
    assert integer_view(found[ALL.index])[1] == LAST, "an id that no vocabulary has"
    assert torch.equal(found[:, [0, 2]].view(torch.int64), clean[:, [0, 2]].view(torch.int64))


def test_slices_of_minus_infinity_leave_no_nan():
    z = torch.tensor([[-torch.inf, -torch.inf, 1.0, 2.0]], dtype=torch.float64)
    columns = Columns(expected_logit=True)
    parts = [partial_of(z[:, a : a + 2], a, 3, columns) for a in (0, 2)]
    for order in (parts, parts[::-1]):
        assert_same(joined(order, [2, 2], columns), partial_of(z, 0, 3, columns), columns)
    nothing = joined([parts[0], parts[0]], [2, 2], columns)
    assert nothing.squeeze(1).tolist() == [-torch.inf, 0.0, 0.0, 0.0]


def test_uneven_counts_give_the_mean_of_all_entries():
    z = torch.randn(4, 90, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 300
    slices = [(0, 64), (64, 65), (65, 90)]
    found = joined([partial_of(z[:, a:b], a, 0) for a, b in slices], [b - a for a, b in slices])
    mean = found[MAX] + found[ALL.shifted] / 90
    torch.testing.assert_close(mean, z.mean(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(found[ALL.total] / 90, z.mean(1), rtol=1e-14, atol=0)


def test_columns_do_not_depend_on_each_other():
    """A merge of fewer columns gives the same bits as one of all."""
    z = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    everything = joined([partial_of(z[:, a : a + 4], a, 7) for a in (0, 4, 8)], [4] * 3)
    for number in range(16):
        columns = Columns(*(bool(number & bit) for bit in (1, 2, 4, 8)))
        found = joined([partial_of(z[:, a : a + 4], a, 7, columns) for a in (0, 4, 8)], [4] * 3, columns)
        assert torch.equal(found[:3], everything[:3])
        for name, asked in zip(("shifted", "total", "weighted", "index"), (number & b for b in (1, 2, 4, 8))):
            if asked:
                assert torch.equal(found[getattr(columns, name)], everything[getattr(ALL, name)]), name
