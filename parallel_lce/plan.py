"""How one call spends its memory: which logits are saved, which are recomputed, or whether gradients are accumulated.

A plan is a pure function of numbers that every rank of the group shares, never of the local shard: its blocks decide
how many collectives a call makes. :func:`plan` lists candidates, each with its cost and its condition, and takes the
cheapest one that is possible. "Exponentials" below are those of the logits; they are what is saved.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import cached_property

DEFAULT_BUDGET = 1 << 30
"""``logits_budget=None``: bytes per rank and call."""

_LARGEST_BUDGET = 1 << 60

SMALLEST_BLOCK = 32 << 20
"""Bytes of a block of logits that a call may use whatever its budget is. A few tiles come on top."""

GATHERED_BYTES = 256 << 20
"""Bytes of hidden states of one gather in a forward under sequence parallelism, where nothing is saved."""

NOMINAL_SHARD = 32768
"""Vocabulary rows per rank assumed where the shards are uneven and V is not given."""

PIECE_ROWS = 1024
"""Where dX is formed or reduced in pieces, their rows are a multiple of this."""

_MULTIPLE = 128
"""Rows of a block are a multiple of this where its bytes allow: matrix products come in such tiles."""


@dataclass(frozen=True)
class Block:
    """Rows ``[start, stop)`` of *every* rank's part of the tokens.

    Without sequence parallelism there is one part, the whole. With it there are P equal parts, and a block is chunk
    ``[start, stop)`` of each, so that it can be gathered and reduce-scattered alone.
    """

    start: int
    stop: int
    # The exponentials of the shard's first ``saved`` vocabulary rows stay from forward to backward, for all rows of
    # the block. Those of the other vocabulary rows are recomputed.
    saved: int


@dataclass(frozen=True)
class Plan:
    """The blocks of a call and the memory of its backward. Rows are counted per part of the tokens."""

    # Rows of a part.
    rows: int
    # Rows of the first block, which saves exponentials; 0: there is no such block.
    first: int
    # Most rows of the other blocks; 0: there is no backward.
    most: int
    # Vocabulary rows whose exponentials the first block saves or, accumulating, every block.
    saved: int
    # Gradients are formed in forward, block by block, and nothing is recomputed.
    accumulate: bool
    # Vocabulary rows per rank that were counted. ``saved == shard_rows`` means everything.
    shard_rows: int
    # Bytes that the exponentials of one block may take.
    block_bytes: int
    # Bytes of logits-shaped scratch memory beside what is saved.
    scratch_bytes: int
    # Bytes of fp32 sums beside the gradients: a low-precision dW over several blocks, a low-precision dX over
    # vocabulary slices, or a dX that is reduced over the ranks in fp32.
    accumulator_bytes: int
    # Bytes of the only block's gathered hidden states, if they are saved.
    hidden_bytes: int
    # Most rows of a forward's block that saves nothing.
    gathered: int
    # ``scratch_bytes`` of a backward that finds nothing of what was to be saved.
    scratch_alone: int

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The backward's blocks; the forward's too, if gradients are accumulated."""
        if not self.most:
            return ()
        blocks = [Block(0, self.first, self.saved)] if self.first else []
        size = balanced(self.rows - self.first, self.most)
        for start in range(self.first, self.rows, size):
            stop = min(start + size, self.rows)
            blocks.append(Block(start, stop, self.saved if self.accumulate else 0))
        return tuple(blocks)

    @cached_property
    def forward_blocks(self) -> tuple[Block, ...]:
        """The forward's blocks: the backward's where exponentials are saved. Other rows take no memory of the logits'
        shape, so their blocks are as few as the gathered hidden states allow."""
        if self.accumulate:
            return self.blocks
        # By ``first``, not by what this rank saves: all ranks gather as much at once.
        blocks = self.blocks[:1] if self.first else ()
        start = self.first
        size = balanced(self.rows - start, self.gathered)
        ends = [*range(start, self.rows, size), self.rows]
        return *blocks, *(Block(a, b, 0) for a, b in zip(ends, ends[1:]))

    @property
    def saves_hidden(self) -> bool:
        """Whether the gathered hidden states stay from forward to backward."""
        return self.hidden_bytes > 0

    def limited(self, shard_rows: int, itemsize: int, sp_size: int) -> Plan:
        """The plan of this rank, whose shard has ``shard_rows`` rows that are no padding.

        If these are more than were counted, a block that would save everything saves what fits its bytes, and the rest
        is recomputed. Blocks and collectives do not change.
        """
        size = balanced(self.rows, self.most) if self.accumulate else self.first
        if shard_rows <= self.shard_rows or self.saved < self.shard_rows or size == 0:
            return self
        entry = sp_size * size * itemsize
        room = self.block_bytes - self.hidden_bytes
        recomputes = self.first < self.rows or shard_rows * entry > room
        if recomputes and not self.accumulate:
            room -= self.scratch_bytes
        return replace(self, saved=min(shard_rows, max(0, room) // entry))


@dataclass(frozen=True)
class Gradients:
    """What the backward must produce."""

    input: bool
    weight: bool
    # dX is fp32, so its sums need no accumulator.
    input_fp32: bool
    # dW's destination takes fp32 sums in place.
    weight_fp32: bool
    # dW is a new tensor, not one that exists already.
    weight_new: bool = True
    # dX is reduced over the ranks in an fp32 buffer, though the hidden states are not fp32.
    input_buffered: bool = False


@dataclass(frozen=True)
class _Candidate:
    """A way to spend memory."""

    plan: Plan
    possible: bool
    # Matrix products of 2 N V D flops each, those of recomputed logits counted in full.
    products: int
    # Bytes of the fp32 accumulator of dW or dX that this way needs and others do not.
    accumulator: int = 0
    # Preferred among candidates of as many products.
    preferred: bool = False

    @property
    def cost(self) -> tuple[int, bool, int]:
        return self.products, not self.preferred, self.accumulator


def plan(
    rows: int,
    shard_rows: int,
    hidden: int,
    itemsize: int,
    *,
    budget: int | None = None,
    sp_size: int = 1,
    ranks: int = 1,
    gradients: Gradients | None = None,
    savable: bool = True,
    accumulable: bool = False,
    smallest_accumulated: int = 1,
    reuses_saved: bool = False,
) -> Plan:
    """Split ``rows`` tokens into blocks.

    Candidates, in order of preference where they cost the same:

    - save everything: three products. Possible if it fits the budget. The gathered hidden states are saved, too, if
      they fit beside it.
    - accumulate gradients in forward, in blocks of the budget: three products. Possible for an accumulable loss where
      it never needs more memory than saving everything would.
    - recompute by vocabulary: four products, less what is saved. One block saves some of the vocabulary rows for all
      tokens, and recomputes the others slice by slice, adding to an fp32 dX.
    - recompute by rows: four products, less what is saved. A first block saves everything for some tokens; the others
      reuse its memory and add to an fp32 dW.

    Of the last two the one with the smaller accumulator is taken. On one rank it is the former if its sum of dX takes
    no more than the budget: there no reduction of dX waits for blocks, and slices of the vocabulary read and write an
    fp32 dW once, blocks of rows each time.

    Args:
        rows: N, the tokens of the whole sequence.
        shard_rows: ceil(V / P).
        hidden: D.
        itemsize: bytes of an input element, which are also those of a saved exponential.
        sp_size: P under sequence parallelism, else 1.
        ranks: P.
        gradients: None means evaluation.
        savable: the saved exponentials are enough for the backward.
        accumulable: the loss is a sum with weights known in forward.
        smallest_accumulated: rows of a block from which on accumulating is worth its time. Adding to an fp32 dW costs
            the same whatever the rows.
        reuses_saved: what is recomputed needs no memory beside that of what was saved.
    """
    # An operator's numbers have 64 bits.
    budget = DEFAULT_BUDGET if budget is None else min(budget, _LARGEST_BUDGET)
    row_bytes = max(1, shard_rows * itemsize)
    whole = rows * row_bytes
    part = rows // sp_size
    gathered_bytes = rows * hidden * itemsize if sp_size > 1 else 0
    gathered = max(1, part)
    if sp_size > 1:
        gathered = max(1, GATHERED_BYTES // max(1, sp_size * hidden * itemsize))
    scratch = 0 if savable and reuses_saved and budget >= SMALLEST_BLOCK else SMALLEST_BLOCK
    common = dict(rows=part, shard_rows=shard_rows, gathered=gathered, scratch_alone=SMALLEST_BLOCK)
    if gradients is None:
        return Plan(
            first=0,
            most=0,
            saved=0,
            accumulate=False,
            block_bytes=budget,
            scratch_bytes=scratch,
            accumulator_bytes=0,
            hidden_bytes=0,
            **common,
        )
    dw_sum = shard_rows * hidden * max(4, itemsize) if gradients.weight else 0
    dw_split = dw_sum if not gradients.weight_fp32 else 0

    def rows_in(nbytes: int) -> int:
        return nbytes // (row_bytes * sp_size)

    def dx_buffer(block_rows: int) -> int:
        """Bytes of dX that is reduced in fp32: of the block whose dX is formed and of the one on its way."""
        buffered = gradients.input and gradients.input_buffered
        return min(rows, 2 * block_rows * sp_size) * hidden * 4 if buffered else 0

    save = Plan(
        first=part,
        most=max(1, part),
        saved=shard_rows,
        accumulate=False,
        block_bytes=budget,
        scratch_bytes=scratch,
        accumulator_bytes=dx_buffer(part),
        hidden_bytes=gathered_bytes if gathered_bytes <= budget - whole else 0,
        **common,
    )

    # Over ranks a block's gradients wait for its statistics while the next block is projected.
    alive = 2 if ranks > 1 else 1
    block_bytes = max(budget, SMALLEST_BLOCK) // alive
    most = max(1, rows_in(block_bytes))
    block_rows = sp_size * min(balanced(part, most), part)
    dw_new = shard_rows * hidden * itemsize if gradients.weight and gradients.weight_new else 0
    accumulate = Plan(
        first=0,
        most=most,
        saved=shard_rows,
        accumulate=True,
        block_bytes=block_bytes,
        scratch_bytes=SMALLEST_BLOCK,
        accumulator_bytes=dw_split + dx_buffer(most),
        hidden_bytes=0,
        **common,
    )
    no_more_than_saving = alive * block_rows * row_bytes + dw_sum <= whole + dw_new and dw_sum <= whole
    worthwhile = block_rows >= smallest_accumulated or block_rows == rows

    room = max(0, budget - scratch) if savable else 0
    recompute = dict(accumulate=False, block_bytes=budget, scratch_bytes=scratch, hidden_bytes=0, **common)
    first = rows_in(room)
    most = max(1, first, rows_in(SMALLEST_BLOCK))
    several = first > 0 or part > most
    dw_rows = dw_split if several else 0
    by_rows = Plan(
        first=first,
        most=most,
        saved=shard_rows if first > 0 else 0,
        accumulator_bytes=dw_rows + dx_buffer(most),
        **recompute,
    )
    # A buffer in which dX is reduced in fp32 is this accumulator.
    dx_sum = rows * hidden * 4 if gradients.input and not gradients.input_fp32 else 0
    if sp_size > 1:
        # One block of all rows would also gather every hidden state and hold the whole dX.
        dx_sum += 2 * gathered_bytes
    by_vocabulary = Plan(
        first=part, most=max(1, part), saved=room // max(1, rows * itemsize), accumulator_bytes=dx_sum, **recompute
    )
    affordable = gradients.weight and ranks == 1 and several and room > 0 and dx_sum <= budget
    vocabulary = _Candidate(by_vocabulary, True, 4, dx_sum, preferred=affordable)
    by_row = _Candidate(by_rows, True, 4, dw_rows)
    # Over ranks blocks of rows come first: their reductions overlap.
    recomputations = (vocabulary, by_row) if ranks == 1 else (by_row, vocabulary)
    best = None
    for candidate in (
        _Candidate(save, savable and whole <= budget, 3, preferred=True),
        _Candidate(accumulate, accumulable and savable and no_more_than_saving and worthwhile, 3),
        *recomputations,
    ):
        if candidate.possible and (best is None or candidate.cost < best.cost):
            best = candidate
    return best.plan


# In eager mode a plan is looked up by its numbers.
cached_plan = functools.lru_cache(maxsize=1024)(plan)


def balanced(rows: int, most: int) -> int:
    """Rows of each block but the last, at most ``most``, for as few blocks of one size as possible."""
    number = max(1, -(-rows // most))
    size = -(-rows // number)
    rounded = -(-size // _MULTIPLE) * _MULTIPLE
    return max(1, rounded if rounded <= most else size)


def shared_shard_rows(local_rows: int, ranks: int, vocab_start: int | None, vocab_size: int | None) -> int:
    """Vocabulary rows per rank as :func:`plan` may count them: the same on every rank."""
    if vocab_size is not None:
        return -(-vocab_size // ranks)
    return local_rows if vocab_start is None or ranks == 1 else NOMINAL_SHARD
