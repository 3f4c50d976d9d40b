"""The plan: a pure function of numbers that all ranks share."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from parallel_lce.core.plan import DEFAULT_BUDGET, GATHERED_BYTES, SMALLEST_BLOCK, Needs, Problem
from parallel_lce.core.plan import plan as plan_of
from parallel_lce.kernels.tuning import FLOPS_PER_BYTE

MiB = 1 << 20

ALL = Needs(hidden=True, weight=True, bias=False)


def plan(*numbers, **others):
    return plan_of(Problem(*numbers, **dict(flops_per_byte=FLOPS_PER_BYTE) | others))


def drawn(number: int) -> dict:
    random = Random(number)

    def upto(*ends: int) -> int:
        return random.randrange(random.choice(ends))

    ranks, itemsize = random.randint(1, 8), random.choice([2, 4, 8])
    sp_size = random.choice([1, ranks])
    rows, shard_rows, hidden_size = sp_size * upto(70, 20000), 1 + upto(100, 200_000), 1 + upto(8192)
    # Of all logits, and of the gathered hidden states beside them, to the byte.
    edge = rows * itemsize * (shard_rows + random.choice([0, hidden_size])) + random.randint(-1, 1)
    return dict(
        tokens=rows,
        shard_rows=shard_rows,
        hidden_size=hidden_size,
        itemsize=itemsize,
        budget=random.choice([0, upto(4 * DEFAULT_BUDGET), max(0, edge)]),
        sp_size=sp_size,
        ranks=ranks,
        needs=Needs(*[random.random() < 0.7 for _ in range(3)]),
        main_grad=random.choice([0, 2, 4]),
        savable=random.random() < 0.5,
        accumulable=random.random() < 0.5,
        flops_per_byte=random.choice([0, 8, 230]),
        reuses_saved=random.random() < 0.5,
    )


def assert_tiled(call: dict, blocks) -> None:
    ends = [0, *(b.stop for b in blocks)]
    assert [b.start for b in blocks] == ends[:-1]
    assert ends[-1] == call["tokens"] // call["sp_size"]


def assert_within_budget(call: dict) -> None:
    """All is saved if it fits, else as much as fits. Blocks are few for their bytes, of 128s of rows but the last."""
    found, needs, main_grad = plan(**call), call["needs"], call["main_grad"]
    blocks, savable = list(found.blocks), call.get("savable", True)
    if not any(needs):
        assert not blocks and not found.accumulate and not found.hidden_bytes, "an evaluation has no backward"
        return
    assert_tiled(call, blocks)
    # Bytes of the logits of a token of each part, and of all; and what is saved, or of all blocks when accumulating.
    row = call["sp_size"] * call["shard_rows"] * call["itemsize"]
    whole = call["tokens"] * call["shard_rows"] * call["itemsize"]
    gathered = call["tokens"] * call["hidden_size"] * call["itemsize"]
    saved = sum((b.stop - b.start) * call["sp_size"] * b.saved * call["itemsize"] for b in blocks)
    sizes = [b.stop - b.start for b in blocks]
    if savable and whole <= call["budget"]:
        assert not found.accumulate and saved == whole and len(blocks) == (call["tokens"] > 0)
        fits = whole + gathered <= call["budget"]
        assert (found.hidden_bytes > 0) == (fits and call["sp_size"] > 1 and gathered > 0)
        return
    assert not found.hidden_bytes
    if found.accumulate:
        assert savable and call["accumulable"] and saved == whole
        # Neither a block, nor an fp32 dW, takes more than saving everything and dW would.
        alive = max(sizes) * row
        dw = call["shard_rows"] * call["hidden_size"] * needs.weight
        assert alive + dw * max(4, call["itemsize"]) <= whole + dw * call["itemsize"] * (not main_grad)
        assert max(sizes) == 1 or alive <= max(call["budget"], SMALLEST_BLOCK)
    else:
        room = max(0, call["budget"] - found.scratch_bytes) if savable else 0
        assert saved <= room and found.scratch_bytes <= SMALLEST_BLOCK
        assert all(b.saved in (0, call["shard_rows"]) for b in blocks) or len(blocks) == 1
        assert not any(b.saved for b in blocks[1:]), "the rows of the first block are saved"
        assert not saved or len(blocks) == 1 or room - row < saved, "another row fits"
        if len(blocks) == 1 and savable:
            assert saved == room // (call["tokens"] * call["itemsize"]) * call["tokens"] * call["itemsize"]
        sizes = sizes[1:] if saved else sizes
    if len(blocks) > 1 and sizes:
        even = -(-sum(sizes) // len(sizes))
        assert all(even <= size < even + 128 and (size % 128 == 0 or size == even) for size in sizes[:-1])


AXIS = dict(tokens=1024, shard_rows=128256, hidden_size=4096, itemsize=2, budget=0, ranks=2, needs=ALL)
ONE = AXIS | dict(tokens=8192, budget=512 * MiB, ranks=1, main_grad=4)
# A GiB of exponentials, of which a block of 4096 tokens and an fp32 dW are exactly two blocks and a bf16 dW.
HEAD = dict(tokens=8192, shard_rows=128256, hidden_size=4096, itemsize=2, budget=DEFAULT_BUDGET, needs=ALL)
SMALL = dict(tokens=8192, shard_rows=32768, hidden_size=2048, itemsize=2, budget=0, needs=ALL)
LONG = dict(tokens=1 << 16, shard_rows=32768, hidden_size=512, itemsize=4, budget=0, needs=ALL)
# What is chosen, of a call and what changes of it, and whether that is so.
CHOICES = [
    ("by vocabulary", AXIS, {}, True),
    ("by vocabulary", AXIS, dict(tokens=65536, shard_rows=4096), False),
    # Blocks of 8192 tokens take as long, and less memory where an fp32 dW, or main_grad, costs nothing.
    ("by vocabulary", AXIS, dict(tokens=16384, main_grad=4), False),
    ("by vocabulary", AXIS, dict(tokens=128256 + 8192), True),
    ("by vocabulary", AXIS, dict(tokens=128256 + 8193), False),
    # Slices of the vocabulary add to each row of an fp32 main_grad once, blocks of rows each time.
    ("by vocabulary", ONE, dict(ranks=2), True),
    # Equal in time and memory: on several ranks dX of a block is reduced while the next is computed.
    ("by vocabulary", AXIS, dict(tokens=16384, shard_rows=16384, budget=256 * MiB), False),
    ("by vocabulary", AXIS, dict(tokens=16384, shard_rows=16384, budget=256 * MiB, ranks=1), True),
    # Where it keeps no more than saving.
    ("accumulate", HEAD, {}, True),
    ("accumulate", HEAD, dict(hidden_size=4097), False),
    # Saving then allocates no dW, and the fp32 dW of accumulating has to be paid by the logits alone.
    ("accumulate", HEAD, dict(main_grad=2), False),
    ("accumulate", SMALL, dict(hidden_size=4800), False),  # an fp32 dW alone is larger than all logits
    # Adding to an fp32 dW costs the same whatever the rows of a block are.
    ("accumulate", LONG, dict(flops_per_byte=100), True),
    ("accumulate", LONG, dict(flops_per_byte=200), False),
]


@pytest.mark.parametrize(("name", "call", "changed", "expected"), CHOICES, ids=str)
def test_the_fastest_way_is_chosen_and_of_equals_the_smallest(name, call, changed, expected):
    found = plan(**call | changed | dict(accumulable=name == "accumulate"))
    assert (len(found.blocks) == 1 if name == "by vocabulary" else getattr(found, name)) == expected


ACCUMULATED = dict(tokens=4096, shard_rows=10000, hidden_size=8, itemsize=4, budget=80 * MiB, ranks=2, sp_size=1)
ACCUMULATED |= dict(needs=ALL, accumulable=True)
EIGHT = dict(tokens=4096, shard_rows=16384, hidden_size=1024, itemsize=2, sp_size=8, ranks=8, needs=ALL)
SAVED = EIGHT | dict(budget=136 * MiB)  # with the gathered hidden states, to the byte
LIMITED = [
    (ACCUMULATED, 9000, 10000),
    (ACCUMULATED, 18000, 40 * MiB // (1024 * 4)),
    (SAVED, 16896, 8192),  # beside 64 MiB in which the others are recomputed
]


@pytest.mark.parametrize(("call", "shard_rows", "saved"), LIMITED, ids=str)
def test_a_larger_shard_than_the_plan_s_saves_what_fits(call, shard_rows, saved):
    """Nothing collective changes: under sequence parallelism each block of the forward is a collective, too."""
    found = plan(**call)
    limited = found.limited(shard_rows)
    assert limited.saved == saved and replace(limited, saved=found.saved) == found
    starts = [[b.start for b in some.forward_blocks] for some in (found, limited)]
    assert starts[0] == starts[1]


def assert_few_are_gathered(call: dict) -> None:
    """At most ``GATHERED_BYTES``, or a row of each part, in as few blocks as that allows; but the first block of a plan
    that saves, or that recomputes slices of the vocabulary for all rows, is one in forward too."""
    found = plan(**call)
    forward = list(found.forward_blocks)
    assert_tiled(call, forward)
    if found.accumulate:
        assert tuple(forward) == found.blocks
        return
    if found.first_rows:
        assert forward.pop(0) == found.blocks[0]
    assert all(b.saved == 0 for b in forward)
    if call["sp_size"] == 1:
        assert len(forward) <= 1, "nothing is gathered"
        return
    row = call["sp_size"] * call["hidden_size"] * call["itemsize"]
    assert all((b.stop - b.start) * row <= max(GATHERED_BYTES, row) for b in forward)
    most = max(1, GATHERED_BYTES // row)
    assert len(forward) == -(-sum(b.stop - b.start for b in forward) // most)


@pytest.mark.parametrize("ranks", [1, 4])
def test_codes_are_saved_where_exponentials_do_not_fit(ranks):
    """bf16 exponentials if they fit, else codes if they do, also in part; bf16 where most of them fit."""
    numbers = dict(hidden_size=4096, itemsize=2, ranks=ranks, needs=ALL, codable=True, reuses_saved=True)
    call = partial(plan, 8192, 128256 // ranks, **numbers)
    whole = 2 * 8192 * (128256 // ranks)
    kept, coded, some, most = (
        call(budget=b) for b in (whole, whole // 2 + SMALLEST_BLOCK, whole * 3 // 8, whole * 24 // 25)
    )
    assert not kept.codes and kept.saved == 128256 // ranks
    assert coded.codes and coded.saved == 128256 // ranks and len(coded.blocks) == 1
    assert some.codes == (ranks == 1) or some.saved < 128256 // ranks
    assert not most.codes and most.saved < 128256 // ranks
    assert not replace(call(budget=whole // 2 + SMALLEST_BLOCK, codable=False)).codes
    for rows in (128256 * 17 // (16 * ranks), 2 * 128256 // ranks):
        assert coded.limited(rows).saved * 8192 + coded.scratch_bytes <= coded.block_bytes


def test_a_plan_keeps_to_its_budget_and_gathers_few_hidden_states_at_once():
    for call in map(drawn, range(1000)):
        assert_within_budget(call)
        assert_few_are_gathered(call)
