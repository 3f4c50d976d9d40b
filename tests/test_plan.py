"""The plan: a pure function of numbers that all ranks share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_lce.plan import (
    DEFAULT_BUDGET,
    NOMINAL_SHARD,
    SMALLEST_BLOCK,
    Block,
    Gradients,
    plan,
    shared_shard_rows,
)

RELAXED = settings(deadline=None, derandomize=True, max_examples=300)
MiB = 1 << 20

FP32 = Gradients(input=True, weight=True, input_fp32=True, weight_fp32=True)
BF16 = Gradients(input=True, weight=True, input_fp32=False, weight_fp32=False)


@st.composite
def calls(draw):
    ranks = draw(st.integers(1, 8))
    parts = ranks if draw(st.booleans()) else 1
    itemsize = draw(st.sampled_from([2, 4, 8]))
    fp32 = itemsize > 2
    gradients = None
    if draw(st.integers(0, 5)):
        gradients = Gradients(
            input=draw(st.booleans()),
            weight=draw(st.booleans()),
            input_fp32=fp32,
            weight_fp32=fp32 or draw(st.booleans()),
        )
    rows = parts * draw(st.one_of(st.integers(0, 70), st.integers(0, 20000)))
    return dict(
        rows=rows,
        shard_rows=draw(st.one_of(st.integers(1, 100), st.integers(1, 200000))),
        hidden=draw(st.integers(1, 8192)),
        itemsize=itemsize,
        budget=draw(st.one_of(st.none(), st.just(0), st.integers(0, 4 * DEFAULT_BUDGET))),
        parts=parts,
        ranks=ranks,
        gradients=gradients,
        keepable=draw(st.booleans()),
        accumulable=draw(st.booleans()),
    )


def planned(call: dict):
    return plan(**call)


def accumulators(call: dict) -> int:
    """Bytes of dX and fp32 dW, what accumulating keeps instead of logits."""
    g = call["gradients"]
    dx = call["rows"] // call["parts"] * call["hidden"] * call["itemsize"] if g.input else 0
    dw = call["shard_rows"] * call["hidden"] * max(4, call["itemsize"]) if g.weight else 0
    return dx + dw


@RELAXED
@given(calls(), calls())
def test_pure(call, other):
    first = planned(call)
    planned(other)
    assert planned(call) == first
    assert hash(first) == hash(planned(call)), "immutable, all the way down"


@RELAXED
@given(calls())
def test_blocks_tile_the_rows(call):
    blocks = planned(call).blocks
    ends = [0, *(b.stop for b in blocks)]
    assert [b.start for b in blocks] == ends[:-1]
    assert ends[-1] == call["rows"] // call["parts"]
    assert all(b.start < b.stop and 0 <= b.kept <= (b.stop - b.start) * call["parts"] for b in blocks)


@RELAXED
@given(calls())
def test_bytes_of_logits_stay_within_the_budget(call):
    found = planned(call)
    budget = DEFAULT_BUDGET if call["budget"] is None else call["budget"]
    row = call["shard_rows"] * call["itemsize"]
    limit = max(budget, SMALLEST_BLOCK)
    if found.accumulate:
        # The next block is projected while the last one waits for the other ranks' partials.
        alive = (2 if call["ranks"] > 1 else 1) * max(b.kept for b in found.blocks) * row
        least = (2 if call["ranks"] > 1 else 1) * call["parts"] * row
        assert alive <= max(limit, least)
        return
    kept = sum(b.kept for b in found.blocks) * row
    recomputed = any(b.kept < (b.stop - b.start) * call["parts"] for b in found.blocks)
    assert kept + (found.block_bytes if recomputed else 0) <= limit
    assert found.block_bytes <= SMALLEST_BLOCK


@RELAXED
@given(calls())
def test_strategy(call):
    found = planned(call)
    budget = DEFAULT_BUDGET if call["budget"] is None else call["budget"]
    whole = call["rows"] * call["shard_rows"] * call["itemsize"]
    kept = sum(b.kept for b in found.blocks)
    if call["gradients"] is None:
        assert not found.accumulate and kept == 0, "evaluation keeps nothing"
    elif not call["keepable"]:
        assert not found.accumulate and kept == 0
    elif whole <= budget:
        assert not found.accumulate and kept == call["rows"], "all that fits is saved"
    elif call["accumulable"] and accumulators(call) < whole:
        assert found.accumulate and kept == call["rows"]
    else:
        assert not found.accumulate and kept < call["rows"]
        row = call["shard_rows"] * call["itemsize"]
        room = (budget - SMALLEST_BLOCK) // row - (call["parts"] - 1)
        assert kept >= min(room, call["rows"] - call["parts"]), "what fits beside a block is saved"


@RELAXED
@given(calls(), st.integers(0, 1 << 40))
def test_more_budget_never_saves_less(call, more):
    less = planned(call | {"budget": min(call["budget"] or 0, more)})
    found = planned(call | {"budget": max(call["budget"] or 0, more)})
    if not less.accumulate and not found.accumulate:
        assert sum(b.kept for b in less.blocks) <= sum(b.kept for b in found.blocks)


@RELAXED
@given(calls())
def test_none_is_one_gib(call):
    assert DEFAULT_BUDGET == 1 << 30
    assert planned(call | {"budget": None}) == planned(call | {"budget": 1 << 30})


def test_none_saves_up_to_one_gib_and_no_more():
    fits = plan(8192, 65536, 64, 2, gradients=BF16)
    assert [b.kept for b in fits.blocks] == [8192]
    over = plan(8193, 65536, 64, 2, gradients=BF16)
    assert 0 < sum(b.kept for b in over.blocks) < 8193


def test_smallest_block_is_at_most_64_mib():
    assert SMALLEST_BLOCK <= 64 * MiB


@pytest.mark.parametrize(
    ("name", "rows", "shard", "gradients", "vocabulary"),
    [
        ("dX's sum is smaller", 1024, 128256, BF16, True),
        ("dW's sum is smaller", 65536, 4096, BF16, False),
        ("fp32 main_grad takes dW for nothing", 1024, 128256, replace(BF16, weight_fp32=True), False),
        ("a frozen weight has no sum", 1024, 128256, replace(BF16, weight=False), False),
        ("a frozen input has no sum", 65536, 4096, replace(BF16, input=False), True),
    ],
)
def test_recomputation_takes_the_axis_with_the_smaller_accumulator(
    name, rows, shard, gradients, vocabulary
):
    D = 4096
    found = plan(rows, shard, D, 2, budget=0, ranks=2, gradients=gradients)
    assert (len(found.blocks) == 1) == vocabulary, name
    dx = rows * D * 4 if gradients.input else 0
    dw = shard * D * 4 if gradients.weight and not gradients.weight_fp32 else 0
    assert found.accumulator_bytes == (dx if vocabulary else dw) == min(dx, dw)


def test_a_dw_of_one_visit_needs_no_accumulator():
    """All rows in one working block: nothing is summed over blocks, whatever the dtype."""
    found = plan(64, 4096, 512, 2, budget=0, gradients=BF16)
    assert len(found.blocks) == 1
    assert found.accumulator_bytes == 0


def test_the_2_gib_accumulator_of_a_bf16_head_is_counted():
    bf16 = plan(1 << 20, 128256, 4096, 2, budget=0, gradients=replace(BF16, input_fp32=False))
    assert bf16.accumulator_bytes == 128256 * 4096 * 4


@pytest.mark.parametrize("ranks", [1, 4])
def test_accumulating_under_tp_keeps_two_blocks(ranks):
    call = dict(budget=0, gradients=FP32, accumulable=True, ranks=ranks)
    found = plan(1 << 16, 32768, 512, 4, **call)
    assert found.accumulate
    in_flight = 2 if ranks > 1 else 1
    assert max(b.kept for b in found.blocks) == SMALLEST_BLOCK // (32768 * 4) // in_flight


def test_accumulating_is_not_taken_where_it_keeps_more_than_saving():
    call = dict(itemsize=2, budget=0, gradients=BF16, accumulable=True)
    assert plan(8192, 32768, 2048, **call).accumulate
    assert not plan(1024, 32768, 2048, **call).accumulate, "fp32 dW is larger than 1024 rows of logits"


@RELAXED
@given(st.integers(2, 8), st.data())
def test_uneven_shards_share_one_plan(ranks, data):
    """Ranks with different rows, empty ones among them, count the same numbers."""
    sizes = data.draw(st.lists(st.integers(0, 5000), min_size=ranks, max_size=ranks))
    starts = [sum(sizes[:r]) for r in range(ranks)]
    for vocab_size in (None, max(1, sum(sizes))):
        counted = {shared_shard_rows(n, ranks, s, vocab_size) for n, s in zip(sizes, starts)}
        assert len(counted) == 1
        expected = NOMINAL_SHARD if vocab_size is None else -(-vocab_size // ranks)
        assert counted == {expected}


def test_equal_shards_are_counted_as_they_are():
    assert shared_shard_rows(1000, 4, None, None) == 1000
    assert shared_shard_rows(1000, 4, None, 3970) == 993, "padding is not counted"
    assert shared_shard_rows(1000, 1, 0, None) == 1000


@RELAXED
@given(calls(), st.integers(1, 1 << 22))
def test_limited_keeps_the_blocks_and_what_fits_this_rank(call, row_bytes):
    """A rank with a larger shard than the plan's keeps fewer rows; nothing collective changes."""
    found = planned(call)
    limited = found.limited(row_bytes, call["budget"])
    assert [(b.start, b.stop) for b in limited.blocks] == [(b.start, b.stop) for b in found.blocks]
    assert all(a.kept <= b.kept for a, b in zip(limited.blocks, found.blocks))
    assert replace(limited, blocks=found.blocks) == found
    budget = DEFAULT_BUDGET if call["budget"] is None else call["budget"]
    kept = [b.kept * row_bytes for b in limited.blocks]
    if found.accumulate:
        assert max(kept) <= found.block_bytes
    else:
        assert sum(kept) <= budget
    if row_bytes <= max(1, call["shard_rows"] * call["itemsize"]):
        assert limited == found


def test_sequence_parallel_chunks_hold_every_rank_s_rows():
    """A chunk is ``[start, stop)`` of each of the P parts: P times its rows are in one block."""
    rows, shard, parts = 1 << 14, 32768, 4
    found = plan(rows, shard, 64, 4, budget=0, parts=parts, ranks=parts, gradients=FP32)
    size = SMALLEST_BLOCK // (shard * 4)
    assert found.blocks[0] == Block(0, size // parts, 0)
    assert len(found.blocks) == rows // size


def test_a_larger_shard_than_the_plan_s_accumulates_what_fits_and_recomputes_the_rest():
    found = plan(2048, 10000, 8, 4, budget=70 << 20, ranks=2, gradients=FP32, accumulable=True)
    assert found.accumulate
    large = found.limited(18000 * 4, 70 << 20)
    for block, whole in zip(large.blocks, found.blocks, strict=True):
        assert (block.start, block.stop) == (whole.start, whole.stop)
        assert 0 < block.kept <= whole.kept
        assert block.kept * 18000 * 4 <= found.block_bytes
    assert large.blocks[0].kept < found.blocks[0].kept
