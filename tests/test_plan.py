"""The plan: a pure function of numbers that all ranks share."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallel_lce.core.plan import DEFAULT_BUDGET, GATHERED_BYTES, SMALLEST_BLOCK, GradientTraits, Problem
from parallel_lce.core.plan import plan as plan_of

RELAXED = settings(deadline=None, derandomize=True, max_examples=300)
MiB = 1 << 20

FP32 = GradientTraits(hidden=True, weight=True, hidden_fp32=True, weight_fp32=True, weight_new=True)
BF16 = replace(FP32, hidden_fp32=False, weight_fp32=False)
MAIN_GRAD = replace(BF16, weight_fp32=True)


def plan(*numbers, **others):
    return plan_of(Problem(*numbers, **others))


@st.composite
def calls(draw):
    ranks = draw(st.integers(1, 8))
    sp_size = ranks if draw(st.booleans()) else 1
    itemsize = draw(st.sampled_from([2, 4, 8]))
    fp32 = itemsize > 2
    gradients = None
    if draw(st.integers(0, 5)):
        gradients = GradientTraits(
            hidden=draw(st.booleans()),
            weight=draw(st.booleans()),
            hidden_fp32=fp32,
            weight_fp32=fp32 or draw(st.booleans()),
            weight_new=draw(st.booleans()),
        )
    rows = sp_size * draw(st.one_of(st.integers(0, 70), st.integers(0, 20000)))
    shard_rows = draw(st.one_of(st.integers(1, 100), st.integers(1, 200000)))
    hidden_size = draw(st.integers(1, 8192))
    # Of all logits, and of the gathered hidden states beside them, to the byte.
    edges = rows * itemsize * shard_rows, rows * itemsize * (shard_rows + hidden_size)
    edge = st.builds(lambda edge, more: max(0, edge + more), st.sampled_from(edges), st.integers(-1, 1))
    return dict(
        tokens=rows,
        shard_rows=shard_rows,
        hidden_size=hidden_size,
        itemsize=itemsize,
        budget=draw(st.one_of(st.just(0), st.integers(0, 4 * DEFAULT_BUDGET), edge)),
        sp_size=sp_size,
        ranks=ranks,
        gradients=gradients,
        savable=draw(st.booleans()),
        accumulable=draw(st.booleans()),
        smallest_accumulated=draw(st.sampled_from([1, 1, 128, 1024])),
        reuses_saved=draw(st.booleans()),
    )


def sizes_of(call: dict, found) -> SimpleNamespace:
    """Bytes: of the logits of one token, of a token of each part, of an entry of all tokens, of all; of what is saved
    from forward to backward, or of all blocks when accumulating; and of the hidden states of all ranks."""
    parts, itemsize = call["sp_size"], call["itemsize"]
    row, token = call["shard_rows"] * itemsize, call["tokens"] * itemsize
    saved = sum((b.stop - b.start) * parts * b.saved * itemsize for b in found.blocks)
    gathered = call["tokens"] * call["hidden_size"] * itemsize
    return SimpleNamespace(
        row=row, rows=parts * row, token=token, whole=call["tokens"] * row, saved=saved, gathered=gathered
    )


def assert_tiled(call: dict, blocks) -> None:
    """The blocks are the tokens of each part."""
    ends = [0, *(b.stop for b in blocks)]
    assert [b.start for b in blocks] == ends[:-1]
    assert ends[-1] == call["tokens"] // call["sp_size"]


def square_of(call: dict) -> int:
    """Rows of each part of a block with as many tokens as a recomputed slice has entries."""
    return math.isqrt(SMALLEST_BLOCK // call["itemsize"]) // call["sp_size"]


def too_few(call: dict, rows: int, saves: bool) -> bool:
    """Whether blocks of these ``rows`` would add to dW too often. ``saves``: a block's exponentials fit the budget."""
    enough = square_of(call) if call["ranks"] == 1 and not saves else square_of(call) / 4
    return call["gradients"].weight and rows < enough and call["tokens"] // call["sp_size"] > square_of(call)


# One rank, whose blocks of rows are a quarter as many as the entries that are recomputed at a time.
NARROW = dict(tokens=8192, shard_rows=23172, hidden_size=64, itemsize=2, budget=0, sp_size=1, ranks=1)


@RELAXED
@example(NARROW | dict(gradients=MAIN_GRAD))
@given(calls())
def test_blocks_are_few_and_balanced(call):
    """As many as the bytes of one demand, all of a size but the last, of 128s of rows if they fit."""
    found = plan(**call)
    sizes, blocks, limit = sizes_of(call, found), list(found.blocks), SMALLEST_BLOCK
    if call["gradients"] is None:
        assert not blocks, "an evaluation has no backward"
        return
    assert_tiled(call, blocks)
    if found.accumulate:
        limit = max(call["budget"], limit) // (2 if call["ranks"] > 1 else 1)
    elif len(blocks) <= 1:
        return  # all saved, or a slice of the vocabulary
    elif blocks[0].saved:
        limit = max(limit, sizes.saved)
        del blocks[0]
    per_part = sum(b.stop - b.start for b in blocks)
    most = max(1, limit // sizes.rows)
    fitting = max(0, call["budget"] - found.scratch_bytes) // sizes.rows if call.get("savable", True) else 0
    if not found.accumulate and not found.blocks[0].saved and too_few(call, max(most, fitting), fitting > 0):
        most = square_of(call)
    assert len(blocks) == -(-per_part // most)
    rows = [b.stop - b.start for b in blocks]
    even = -(-per_part // max(1, len(blocks)))
    assert all(even <= size < even + 128 and size <= most for size in rows[:-1])
    assert all(size % 128 == 0 or size == even for size in rows[:-1])


# Three quarters of the vocabulary rows fit the budget, of all tokens.
MOST = dict(tokens=1500, shard_rows=128256, hidden_size=4096, itemsize=2, budget=340 * 2**20, gradients=BF16)
# One row fits the budget.
SINGLE = dict(tokens=1024, shard_rows=128256, hidden_size=64, itemsize=2, budget=SMALLEST_BLOCK + 2 * 128256)


@RELAXED
@example(SINGLE | dict(sp_size=1, ranks=2, gradients=MAIN_GRAD, savable=True))
@example(MOST | dict(sp_size=1, ranks=2, savable=True))
@given(calls())
def test_strategy(call):
    found = plan(**call)
    sizes = sizes_of(call, found)
    if call["gradients"] is None or not call["savable"]:
        assert not found.accumulate and sizes.saved == 0, "evaluation keeps nothing"
    elif sizes.whole <= call["budget"]:
        assert not found.accumulate and sizes.saved == sizes.whole, "all that fits is saved"
        assert len(found.blocks) == (call["tokens"] > 0)
        fits = sizes.whole + sizes.gathered <= call["budget"]
        assert found.saves_hidden == (fits and call["sp_size"] > 1 and sizes.gathered > 0)
        return
    elif found.accumulate:
        assert call["accumulable"] and sizes.saved == sizes.whole
        most = max((b.stop - b.start) * call["sp_size"] for b in found.blocks)
        assert most >= call["smallest_accumulated"] or len(found.blocks) == 1
        # The next block is projected while the last one waits for the other ranks' partials. Neither they, nor an fp32
        # dW, take more than saving everything and dW would.
        dw = call["shard_rows"] * call["hidden_size"] * call["gradients"].weight
        dw_new = dw * call["itemsize"] * call["gradients"].weight_new
        alive = (2 if call["ranks"] > 1 else 1) * most * sizes.row
        assert alive + dw * max(4, call["itemsize"]) <= sizes.whole + dw_new
    else:
        assert sizes.saved < sizes.whole
        if len(found.blocks) == 1:  # all vocabulary rows that fit
            assert found.blocks[0].saved == max(0, call["budget"] - found.scratch_bytes) // sizes.token
        # What fits beside the scratch is saved, but for less than a row of each part or a column, and but for rows that
        # are too few for a block.
        room = call["budget"] - found.scratch_bytes
        piece = sizes.rows if len(found.blocks) > 1 else call["tokens"] * call["itemsize"]
        fitting = max(room, SMALLEST_BLOCK) // sizes.rows
        assert room - piece < sizes.saved <= max(0, room) or (not sizes.saved and too_few(call, fitting, room > piece))
        assert found.scratch_bytes <= SMALLEST_BLOCK
        if len(found.blocks) > 1:
            first, *others = found.blocks
            assert first.saved in (0, call["shard_rows"]), "rows are saved with all their columns"
            assert not any(b.saved for b in others)
    assert not found.saves_hidden


AXIS = dict(tokens=1024, shard_rows=128256, hidden_size=4096, itemsize=2, budget=0, ranks=2, gradients=BF16)
ONE = AXIS | dict(tokens=8192, budget=512 * MiB, ranks=1, gradients=MAIN_GRAD)
# A GiB of exponentials, of which a block of 4096 tokens and an fp32 dW are exactly two blocks and a bf16 dW.
HEAD = dict(tokens=8192, shard_rows=128256, hidden_size=4096, itemsize=2, budget=DEFAULT_BUDGET, gradients=BF16)
SMALL = dict(tokens=8192, shard_rows=32768, hidden_size=2048, itemsize=2, budget=0, gradients=BF16)
LONG = dict(tokens=1 << 16, shard_rows=32768, hidden_size=512, itemsize=4, budget=0, gradients=FP32)
EXISTING = replace(BF16, weight_new=False)
FEW = dict(tokens=256, shard_rows=32768, hidden_size=1024, itemsize=2, gradients=BF16, dense_flops=1e12)
EVALUATED = FEW | dict(gradients=None)
# Each has a call, what changes of it, and whether the plan then is so.
CHOICES = {
    # The axis with the smaller accumulator; but one rank sums dX if that takes no more than the budget.
    "by vocabulary": [
        (AXIS, {}, True),
        (AXIS, dict(tokens=65536, shard_rows=4096), False),
        (AXIS, dict(tokens=8192, gradients=MAIN_GRAD), False),  # an fp32 main_grad takes dW for nothing
        # Neither needs one: the first in the list, on several ranks blocks of rows.
        (AXIS, dict(tokens=8192, itemsize=4, gradients=FP32, ranks=1), True),
        (AXIS, dict(tokens=8192, itemsize=4, gradients=FP32), False),
        (AXIS, dict(tokens=1500, budget=340 * MiB), True),  # three quarters of it are saved
        # Blocks of 5792 rows sum dX too.
        (AXIS, dict(tokens=128255 + 5792), True),
        (AXIS, dict(tokens=128257 + 5792), False),
        # Slices of the vocabulary add to each row of an fp32 main_grad once, blocks of rows each time.
        (ONE, {}, True),
        (ONE, dict(ranks=2), False),
        (ONE, dict(tokens=32768), True),  # as much as the budget
        (ONE, dict(tokens=33024), False),
    ],
    # Where it keeps no more than saving.
    "accumulate": [
        (HEAD, {}, True),
        (HEAD, dict(hidden_size=4097), False),
        # Saving then allocates no dW, and the fp32 dW of accumulating has to be paid by the logits alone.
        (HEAD, dict(gradients=EXISTING), False),
        (HEAD, dict(gradients=EXISTING, tokens=12288), True),
        (SMALL, {}, True),
        (SMALL, dict(hidden_size=4800), False),  # an fp32 dW alone is larger than all logits
        # Adding to an fp32 dW costs the same whatever the rows of a block are.
        (LONG, dict(smallest_accumulated=512), True),
        (LONG, dict(smallest_accumulated=513), False),
        # A whole of fewer rows is as good.
        (LONG, dict(smallest_accumulated=513, tokens=200, hidden_size=64), True),
    ],
    # Small problems save logits that fit the budget.
    "dense": [
        (FEW, dict(dense_flops=7.1e10), True),  # of 6 * 256 * 32768 * (1024 + 384)
        (FEW, dict(dense_flops=7.0e10), False),
        (FEW, dict(tokens=2048, hidden_size=256), True),
        (FEW, dict(tokens=2049, hidden_size=256), False),
        (FEW, dict(budget=256 * 32768 * 4), True),
        (FEW, dict(budget=256 * 32768 * 4 - 1), False),
        (FEW, dict(savable=False), True),
        # Forward alone: 8 * 2 * 256 * 32768 * (1024 + 656). It keeps no hidden states, and gathers at most 256 MiB.
        (EVALUATED, dict(dense_flops=2.26e11), True),
        (EVALUATED, dict(dense_flops=2.25e11), False),
        (EVALUATED, dict(ranks=4, sp_size=4, budget=256 * 32768 * 4), True),
        (EVALUATED, dict(budget=256 * 32768 * 4 - 1), False),
        (EVALUATED, dict(tokens=1 << 17, shard_rows=64, ranks=8, sp_size=8), True),
        (EVALUATED, dict(tokens=(1 << 17) + 8, shard_rows=64, ranks=8, sp_size=8), False),
        (FEW, dict(ranks=4, sp_size=4, budget=256 * (32768 * 4 + 1024 * 2)), True),
        (FEW, dict(ranks=4, sp_size=4, budget=256 * (32768 * 4 + 1024 * 2) - 1), False),
    ],
}


@pytest.mark.parametrize(
    ("name", "call", "changed", "expected"), [(name, *row) for name, rows in CHOICES.items() for row in rows], ids=str
)
def test_choices(name, call, changed, expected):
    call = call | changed | dict(accumulable=name == "accumulate")
    found = plan(**call)
    assert (len(found.blocks) == 1 if name == "by vocabulary" else getattr(found, name)) == expected
    if name == "dense" and expected:
        # A rank whose shard cannot have dense logits runs the same collectives, and may use no more memory.
        other = plan(**call | dict(dense_flops=0, budget=DEFAULT_BUDGET))
        if call["gradients"] is None:
            assert len(found.forward_blocks) == len(other.forward_blocks) == 1 and not found.saves_hidden
            return
        assert len(found.blocks) == 1 and found.saves_hidden == other.saves_hidden
        assert found.saved == (0 if changed.get("savable") is False else 32768)


ACCUMULATED = dict(tokens=4096, shard_rows=10000, hidden_size=8, itemsize=4, budget=80 * MiB, ranks=2, sp_size=1)
ACCUMULATED |= dict(gradients=FP32, accumulable=True)
EIGHT = dict(shard_rows=16384, hidden_size=1024, itemsize=2, sp_size=8, ranks=8, gradients=BF16)
SAVED = EIGHT | dict(tokens=4096, budget=136 * MiB)  # with the gathered hidden states, to the byte


@pytest.mark.parametrize(
    ("call", "shard_rows", "saved"),
    [
        (ACCUMULATED, 9000, 10000),
        (ACCUMULATED, 18000, 40 * MiB // (1024 * 4)),
        (SAVED, 16384, 16384),
        (SAVED, 16896, 8192),  # beside 64 MiB in which the others are recomputed
        (EIGHT | dict(tokens=4096, shard_rows=4, hidden_size=1 << 16, budget=1 << 15), 5, 0),
    ],
    ids=str,
)
def test_a_larger_shard_than_the_plan_s_saves_what_fits(call, shard_rows, saved):
    """Nothing collective changes: under sequence parallelism each block of the forward is a collective, too."""
    found = plan(**call)
    limited = found.limited(shard_rows, call["itemsize"], call["sp_size"])
    assert limited.saved == saved and replace(limited, saved=found.saved) == found
    starts = [[b.start for b in some.forward_blocks] for some in (found, limited)]
    assert starts[0] == starts[1]


@RELAXED
@example(NARROW | dict(gradients=MAIN_GRAD, hidden_size=1 << 16))
@given(calls())
def test_a_forward_that_keeps_nothing_gathers_few_hidden_states_at_once(call):
    """At most ``GATHERED_BYTES``, or a row of each part, in as few blocks as that allows; but a block
    whose exponentials are saved is one in forward too."""
    found = plan(**call)
    forward = list(found.forward_blocks)
    assert_tiled(call, forward)
    if found.accumulate:
        assert tuple(forward) == found.blocks
        return
    if found.blocks and found.blocks[0].saved:
        assert forward.pop(0) == found.blocks[0]
    assert all(b.saved == 0 for b in forward)
    if call["sp_size"] == 1:
        assert len(forward) <= 1, "nothing is gathered"
        return
    row = call["sp_size"] * call["hidden_size"] * call["itemsize"]
    assert all((b.stop - b.start) * row <= max(GATHERED_BYTES, row) for b in forward)
    most = max(1, GATHERED_BYTES // row)
    assert len(forward) == -(-sum(b.stop - b.start for b in forward) // most)
