"""How one call spends its memory: which logits are saved, recomputed or accumulated in forward.

A pure function of numbers that every rank of the group shares (never of the local shard), because
the blocks it returns decide how many collectives a call makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

DEFAULT_BUDGET = 1 << 30
"""``logits_budget=None``: bytes per rank and call."""

_LARGEST_BUDGET = 1 << 60

SMALLEST_BLOCK = 32 << 20
"""Bytes of a block of logits that a call may use whatever its budget is; a few tiles come on top."""

GATHERED_BYTES = 256 << 20
"""Bytes of hidden states that a forward under sequence parallelism gathers at once, while it projects as
many, where it keeps nothing."""

NOMINAL_SHARD = 32768
"""Vocabulary rows per rank assumed where the shards are uneven and nobody said how large V is."""


_MULTIPLE = 128
"""Rows of a block are a multiple of this where its bytes allow: matrix products come in such tiles."""


@dataclass(frozen=True)
class Block:
    """Rows ``[start, stop)`` of *every* rank's part of the tokens.

    Without sequence parallelism there is one part, the whole; with it there are P equal parts and a
    block is chunk ``[start, stop)`` of each, so that it can be gathered and reduce-scattered alone.
    Of all its rows, the exponentials of the shard's first ``kept`` vocabulary rows stay from
    forward to backward; those of the others are recomputed.
    """

    start: int
    stop: int
    kept: int


@dataclass(frozen=True)
class Plan:
    """The blocks of a call, in order, and how their gradients come about.

    ``rows`` of each part: a block of the first ``first`` of them (0: no such block), then blocks of
    one size, at most ``most``. ``accumulate``: gradients are formed in forward, block by block, and
    nothing is recomputed. ``kept``: vocabulary rows whose exponentials the first block keeps, or,
    accumulating, every block; as many as ``shard_rows``, those per rank that were counted, are
    everything. ``block_bytes``: what the exponentials of a block may take. ``scratch_bytes``: the
    logits-shaped scratch beside what is kept. ``accumulator_bytes``: fp32 sums beside the gradients
    themselves (low-precision dW over several blocks, or low-precision dX over vocabulary slices).
    ``hidden_bytes``: of the only block's gathered hidden states, if they stay from forward to backward.
    ``gathered``: rows of each part that a forward projects at once where it keeps nothing.
    ``scratch_alone``: the scratch of a backward that finds nothing of what was to be kept.
    """

    rows: int
    first: int
    most: int
    kept: int
    accumulate: bool
    shard_rows: int
    block_bytes: int
    scratch_bytes: int
    accumulator_bytes: int
    hidden_bytes: int
    gathered: int
    scratch_alone: int

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        blocks = [Block(0, self.first, self.kept)] if self.first else []
        size = balanced(self.rows - self.first, self.most)
        for start in range(self.first, self.rows, size):
            stop = min(start + size, self.rows)
            blocks.append(Block(start, stop, self.kept if self.accumulate else 0))
        return tuple(blocks)

    @property
    def keeps_hidden(self) -> bool:
        return self.hidden_bytes > 0

    @cached_property
    def forward_blocks(self) -> tuple[Block, ...]:
        """The forward's: the same where something is kept, and as few as the gathered hidden states
        allow of the other rows, which take no memory of the logits' shape."""
        if self.accumulate:
            return self.blocks
        # Not by what this rank keeps: all gather as much at once.
        blocks = self.blocks[:1] if self.first else ()
        start = self.first
        size = balanced(self.rows - start, self.gathered)
        ends = [*range(start, self.rows, size), self.rows]
        return *blocks, *(Block(a, b, 0) for a, b in zip(ends, ends[1:]))

    def limited(self, shard_rows: int, itemsize: int, parts: int) -> Plan:
        """The same blocks on this rank, whose shard has ``shard_rows`` rows that are no padding.

        If these are more than were counted, a block that keeps everything keeps what fits its
        bytes. The rest is recomputed; collectives do not change.
        """
        size = balanced(self.rows, self.most) if self.accumulate else self.first
        if shard_rows <= self.shard_rows or self.kept < self.shard_rows or size == 0:
            return self
        column = parts * size * itemsize
        room = self.block_bytes - self.hidden_bytes
        recomputes = self.first < self.rows or shard_rows * column > room
        if recomputes and not self.accumulate:
            room -= self.scratch_bytes
        return replace(self, kept=min(shard_rows, max(0, room) // column))


@dataclass(frozen=True)
class Gradients:
    """What the backward must produce. ``*_fp32``: its destination can take fp32 sums in place;
    ``weight_new``: dW is a new tensor, none that exists."""

    input: bool
    weight: bool
    input_fp32: bool
    weight_fp32: bool
    weight_new: bool = True


def plan(
    rows: int,
    shard_rows: int,
    hidden: int,
    itemsize: int,
    *,
    budget: int | None = None,
    parts: int = 1,
    ranks: int = 1,
    gradients: Gradients | None = None,
    keepable: bool = True,
    accumulable: bool = False,
    smallest_accumulated: int = 1,
    reuses_kept: bool = False,
) -> Plan:
    """Split ``rows`` tokens into blocks.

    ``rows`` N, ``shard_rows`` ceil(V / P), ``hidden`` D; ``itemsize`` bytes of an input element,
    which is also what a kept exponential takes. ``parts``: P under sequence parallelism, else 1;
    ``ranks``: P. ``gradients=None`` means evaluation. ``keepable``: the stored exponentials are
    enough for the backward. ``accumulable``: the loss is a sum with weights known in forward;
    ``smallest_accumulated``: rows of a block from which on adding to an fp32 dW, which costs the
    same whatever the rows, is worth its time. ``reuses_kept``: what is recomputed needs no memory beside
    that of what was kept.

    Everything that fits the budget is saved (6 N V D flops), and under sequence parallelism the gathered
    hidden states too if they fit beside it; else these are gathered again. If not everything fits, an
    accumulable loss accumulates in forward (6 N V D), in blocks of the budget, provided that this never needs
    more memory than saving everything would. Otherwise what fits is saved and the rest recomputed
    (8 N V D): all rows of some of the vocabulary in one block, or some of the rows in a first block,
    whose memory the following ones reuse; whichever needs the smaller fp32 accumulator, and on one
    rank the former if its sum of dX takes no more than the budget.
    """
    # An operator's numbers have 64 bits.
    budget = DEFAULT_BUDGET if budget is None else min(budget, _LARGEST_BUDGET)
    row_bytes = max(1, shard_rows * itemsize)
    whole = rows * row_bytes
    per_part = rows // parts

    def rows_in(block_bytes: int) -> int:
        return block_bytes // (row_bytes * parts)

    def decided(first: int, most: int, kept: int, accumulator: int = 0) -> Plan:
        return Plan(
            per_part,
            first,
            max(1, most),
            kept,
            False,
            shard_rows,
            budget,
            scratch,
            accumulator,
            0,
            at_once,
            SMALLEST_BLOCK,
        )

    scratch = 0 if keepable and reuses_kept and budget >= SMALLEST_BLOCK else SMALLEST_BLOCK
    gathered = rows * hidden * itemsize if parts > 1 else 0
    at_once = max(1, per_part)
    if parts > 1:
        at_once = max(1, GATHERED_BYTES // max(1, parts * hidden * itemsize))
    if gradients is None:
        return decided(0, rows_in(SMALLEST_BLOCK) if parts > 1 else per_part, 0)
    if keepable and whole <= budget:
        saved = decided(per_part, per_part, shard_rows)
        return replace(saved, hidden_bytes=gathered if gathered <= budget - whole else 0)

    dw_sum = shard_rows * hidden * max(4, itemsize) if gradients.weight else 0
    split = gradients.weight and not gradients.weight_fp32
    if accumulable and keepable:
        # Over ranks a block's gradients wait for its statistics while the next block is projected.
        alive = 2 if ranks > 1 else 1
        block_bytes = max(budget, SMALLEST_BLOCK) // alive
        most = max(1, rows_in(block_bytes))
        block_rows = parts * min(balanced(per_part, most), per_part)
        new = gradients.weight and gradients.weight_new
        saving = whole + (shard_rows * hidden * itemsize if new else 0)
        if (
            alive * block_rows * row_bytes + dw_sum <= saving
            and dw_sum <= whole
            and (block_rows >= smallest_accumulated or block_rows == rows)
        ):
            accumulator = dw_sum if split else 0
            return Plan(
                per_part,
                0,
                most,
                shard_rows,
                True,
                shard_rows,
                block_bytes,
                SMALLEST_BLOCK,
                accumulator,
                0,
                at_once,
                SMALLEST_BLOCK,
            )

    room = max(0, budget - scratch) if keepable else 0
    first = rows_in(room)
    most = max(1, first, rows_in(SMALLEST_BLOCK))
    several = first > 0 or per_part > most
    dw_sum = dw_sum if split and several else 0
    dx_sum = 0 if gradients.input_fp32 or not gradients.input else rows * hidden * 4
    if parts > 1:
        # One block of all rows would also gather every hidden state and hold the whole dX.
        dx_sum += 2 * gathered
    # Every block of rows reads and writes all of an fp32 dW, slices of the vocabulary do so once: on
    # one rank, where no reduction of dX waits for blocks, that is worth a sum as large as the budget.
    affordable = gradients.weight and ranks == 1 and several and room > 0 and dx_sum <= budget
    if dx_sum < dw_sum or (dx_sum == dw_sum and ranks == 1) or affordable:
        return decided(per_part, per_part, room // max(1, rows * itemsize), dx_sum)
    return decided(first, most, shard_rows if first > 0 else 0, dw_sum)


def balanced(rows: int, most: int) -> int:
    """Rows of each block but the last, ``most`` at most, for as few blocks of one size as can be."""
    number = max(1, -(-rows // most))
    size = -(-rows // number)
    rounded = -(-size // _MULTIPLE) * _MULTIPLE
    return max(1, rounded if rounded <= most else size)


def shared_shard_rows(local_rows: int, ranks: int, vocab_start: int | None, vocab_size: int | None) -> int:
    """Vocabulary rows per rank as :func:`plan` may count them: the same on every rank."""
    if vocab_size is not None:
        return -(-vocab_size // ranks)
    return local_rows if vocab_start is None or ranks == 1 else NOMINAL_SHARD
