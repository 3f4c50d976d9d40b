"""How one call spends its memory: which logits are saved or recomputed, and whether gradients are formed in forward.

A plan is a pure function of numbers that every rank of the group shares, never of the local shard: its blocks decide
how many collectives a call makes. :func:`plan` takes the cheapest possible candidate; each candidate's function states
its condition. "Exponentials" are exp of the logits, which a call may save for backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from parallel_lce.core.budget import DEFAULT_BUDGET

SMALLEST_BLOCK = 64 << 20
"""Smallest working block, in bytes, whatever the budget. Kernels' tiles are not counted."""

GATHERED_BYTES = 256 << 20
"""Most bytes of hidden states in one gather of the forward, for a block that saves nothing."""

NOMINAL_SHARD = 32768
"""Vocabulary rows per rank assumed where the shards are uneven and V is not given."""

LOGIT_COLUMNS = 384
"""Columns of hidden states whose three products take as long as writing and reading the fp32 logits and their
gradient, 14 bytes for each logit."""

FORWARD_COLUMNS = 656
"""Columns of hidden states whose one product takes as long as writing and reading the fp32 logits, 8 bytes for each."""

DENSE_BYTES = 256 << 20
"""Most bytes of fp32 logits of a small problem, whatever the budget: its memory stays small."""

_MULTIPLE = 128
"""Rows of a block are a multiple of this where its bytes allow, since matrix products are tiled so."""


@dataclass(frozen=True)
class Block:
    """Rows ``[start, stop)`` of *every* rank's part of the tokens. Without sequence parallelism all tokens are one
    part. With it a block takes the same rows of P equal parts, so that it can be gathered and reduce-scattered
    alone."""

    start: int
    stop: int
    # The exponentials of the shard's first ``saved`` vocabulary rows are saved for all rows of the block. Exponentials
    # of the other vocabulary rows are recomputed.
    saved: int


@dataclass(frozen=True)
class Plan:
    """The blocks of a call and the memory of its backward. Rows of tokens are counted per part."""

    part_rows: int
    # Rows of the first block, which saves the exponentials of ``saved`` vocabulary rows; 0: there is no such block.
    first_rows: int
    # Most rows of the other blocks; 0: there are no blocks, since there is no backward.
    block_rows: int
    # Vocabulary rows whose exponentials the first block saves or, accumulating, every block.
    saved: int
    # Whether gradients are formed in forward, block by block.
    accumulate: bool
    # Vocabulary rows per rank that the plan assumes, the same on all ranks.
    shard_rows: int
    # Bytes that the exponentials of one block may take.
    block_bytes: int
    # Bytes of logits-shaped scratch memory beside the saved exponentials.
    scratch_bytes: int
    # Bytes of the only block's gathered hidden states, if they are saved.
    hidden_bytes: int
    # Most rows of a forward's block that saves nothing.
    gathered_rows: int
    # Whether the fp32 logits of the only block are made, and saved for a backward, where the rank's shard allows it.
    dense: bool = False

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The backward's blocks; the forward's too, if gradients are accumulated."""
        if not self.block_rows:
            return ()
        blocks = [Block(0, self.first_rows, self.saved)] if self.first_rows else []
        size = balanced(self.part_rows - self.first_rows, self.block_rows)
        for start in range(self.first_rows, self.part_rows, size):
            stop = min(start + size, self.part_rows)
            blocks.append(Block(start, stop, self.saved if self.accumulate else 0))
        return tuple(blocks)

    @cached_property
    def forward_blocks(self) -> tuple[Block, ...]:
        """The forward's blocks. The block that saves exponentials is the backward's first. The other rows are cut only
        where gathered hidden states would exceed :data:`GATHERED_BYTES`."""
        if self.accumulate:
            return self.blocks
        # Decided by ``first_rows``, which all ranks share, not by ``saved``, which :meth:`limited` may lower on this
        # rank.
        blocks = self.blocks[:1] if self.first_rows else ()
        start = self.first_rows
        size = balanced(self.part_rows - start, self.gathered_rows)
        ends = [*range(start, self.part_rows, size), self.part_rows]
        return *blocks, *(Block(a, b, 0) for a, b in zip(ends, ends[1:]))

    @cached_property
    def saves_hidden(self) -> bool:
        """Whether the gathered hidden states are saved."""
        return self.hidden_bytes > 0

    def limited(self, shard_rows: int, itemsize: int, sp_size: int) -> Plan:
        """The plan of this rank, whose shard has ``shard_rows`` real rows. An uneven shard may have more rows than the
        plan assumed. The rank then saves the exponentials of as many as fit, and recomputes the rest. Blocks and
        collectives do not change."""
        size = balanced(self.part_rows, self.block_rows) if self.accumulate else self.first_rows
        if shard_rows <= self.shard_rows or self.saved < self.shard_rows or size == 0:
            return self
        entry = sp_size * size * itemsize
        room = self.block_bytes - self.hidden_bytes
        recomputes = self.first_rows < self.part_rows or shard_rows * entry > room
        if recomputes and not self.accumulate:
            room -= self.scratch_bytes
        return replace(self, saved=min(shard_rows, max(0, room) // entry))


@dataclass(frozen=True)
class GradientTraits:
    """Which gradients the backward must form, and where they are summed."""

    hidden: bool
    weight: bool
    # The hidden states are fp32 (or fp64), so dX itself holds the sum.
    hidden_fp32: bool
    # dW is delivered in fp32 (or fp64), in a tensor that can hold the sum.
    weight_fp32: bool
    # dW is a new tensor; False: it is added to a main_grad.
    weight_new: bool


@dataclass(frozen=True)
class _Candidate:
    plan: Plan
    possible: bool
    # Matrix products of 2 N V D flops each. Recomputing logits counts as one, even if only some are recomputed.
    products: int
    # Bytes of the fp32 accumulator of dW or dX that this candidate needs and others do not.
    accumulator: int = 0
    # Preferred among candidates of equally many products.
    preferred: bool = False

    @property
    def cost(self) -> tuple[int, bool, int]:
        return self.products, not self.preferred, self.accumulator


@dataclass(frozen=True)
class Problem:
    """The numbers of a call from which its plan is made."""

    # N, the tokens of the whole sequence.
    tokens: int
    # ceil(V / P)
    shard_rows: int
    # D
    hidden_size: int
    # Bytes of an input element, and of a saved exponential.
    itemsize: int
    # logits_budget, bytes
    budget: int = DEFAULT_BUDGET
    # P under sequence parallelism, else 1.
    sp_size: int = 1
    # P
    ranks: int = 1
    # None: evaluation.
    gradients: GradientTraits | None = None
    # Whether the backward can work from saved exponentials.
    savable: bool = True
    # Whether the loss is a sum over tokens whose weights are known in forward.
    accumulable: bool = False
    # Fewest tokens of a block for which accumulating is faster than recomputing. Adding to an fp32 dW takes the same
    # time for few tokens as for many.
    smallest_accumulated: int = 1
    # Whether the backend recomputes logits in the memory of the saved exponentials.
    reuses_saved: bool = False
    # Most flops of the three products for which fp32 logits are made; an eighth of it for forward alone.
    dense_flops: float = 0

    @property
    def part_rows(self) -> int:
        return self.tokens // self.sp_size

    @property
    def row_bytes(self) -> int:
        """Bytes of the exponentials of one token."""
        return max(1, self.shard_rows * self.itemsize)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all gathered hidden states."""
        return self.tokens * self.hidden_size * self.itemsize if self.sp_size > 1 else 0

    @property
    def scratch(self) -> int:
        reuses = self.savable and self.reuses_saved and self.budget >= SMALLEST_BLOCK
        return 0 if reuses else SMALLEST_BLOCK

    @property
    def dw_sum(self) -> int:
        """Bytes of an fp32 dW."""
        needed = self.gradients is not None and self.gradients.weight
        return self.shard_rows * self.hidden_size * max(4, self.itemsize) if needed else 0

    @property
    def room(self) -> int:
        """Bytes for exponentials beside the scratch memory."""
        return max(0, self.budget - self.scratch) if self.savable else 0

    def rows_in(self, nbytes: int) -> int:
        """Rows per part of a block whose exponentials take ``nbytes``."""
        return nbytes // (self.row_bytes * self.sp_size)

    def plan(self, **fields) -> Plan:
        """A plan with these fields. The other fields get defaults."""
        gathered_rows = max(1, self.part_rows)
        if self.sp_size > 1:
            gathered_rows = max(1, GATHERED_BYTES // max(1, self.sp_size * self.hidden_size * self.itemsize))
        usual: dict[str, Any] = dict(
            part_rows=self.part_rows,
            shard_rows=self.shard_rows,
            gathered_rows=gathered_rows,
            accumulate=False,
            block_bytes=self.budget,
            scratch_bytes=self.scratch,
            hidden_bytes=0,
        )
        return Plan(**usual | fields)


def _dense(p: Problem) -> _Candidate:
    """Make the fp32 logits of a small problem. For a backward they are saved; their gradient is formed in their memory.

    For so few flops the host needs longer to launch a fused projection than the GPU to run it. Dense logits need fewer
    launches, though the GPU must write and read them. Forward alone has a limit of its own, and gathers hidden states
    as it does without dense logits. A rank whose shard cannot have dense logits runs the same collectives. It saves
    exponentials if its backward can work from them, else nothing.
    """
    saved = _save(p)
    planned = replace(saved.plan, dense=True, saved=p.shard_rows if p.savable else 0)
    logits = p.tokens * p.shard_rows
    if p.gradients is None:
        planned = replace(planned, hidden_bytes=0)
        small = 2 * logits * (p.hidden_size + FORWARD_COLUMNS) <= p.dense_flops / 8
        small = small and p.part_rows <= planned.gathered_rows
    else:
        small = 6 * logits * (p.hidden_size + LOGIT_COLUMNS) <= p.dense_flops
    fits = 4 * logits <= DENSE_BYTES and 4 * logits + planned.hidden_bytes <= p.budget
    return replace(saved, plan=planned, possible=small and fits)


def _save(p: Problem) -> _Candidate:
    """Save every exponential; and the gathered hidden states, if they fit beside them."""
    whole = p.tokens * p.row_bytes
    hidden_bytes = p.gathered_bytes if p.gathered_bytes <= p.budget - whole else 0
    planned = p.plan(
        first_rows=p.part_rows, block_rows=max(1, p.part_rows), saved=p.shard_rows, hidden_bytes=hidden_bytes
    )
    return _Candidate(planned, p.savable and whole <= p.budget, products=3, preferred=True)


def _accumulate(p: Problem, gradients: GradientTraits) -> _Candidate:
    """Form gradients in forward, in blocks of the budget. Possible if that needs no more memory than saving everything,
    and if blocks are large enough to be worth it."""
    whole = p.tokens * p.row_bytes
    # On several ranks the next block is projected while the partials of a block are gathered.
    alive = 2 if p.ranks > 1 else 1
    block_bytes = max(p.budget, SMALLEST_BLOCK) // alive
    block_rows = max(1, p.rows_in(block_bytes))
    block_tokens = p.sp_size * min(balanced(p.part_rows, block_rows), p.part_rows)
    dw_new = p.shard_rows * p.hidden_size * p.itemsize if gradients.weight and gradients.weight_new else 0
    fits = alive * block_tokens * p.row_bytes + p.dw_sum <= whole + dw_new and p.dw_sum <= whole
    worthwhile = block_tokens >= p.smallest_accumulated or block_tokens == p.tokens
    planned = p.plan(
        first_rows=0,
        block_rows=block_rows,
        saved=p.shard_rows,
        accumulate=True,
        block_bytes=block_bytes,
        scratch_bytes=SMALLEST_BLOCK,
    )
    return _Candidate(planned, p.accumulable and p.savable and fits and worthwhile, products=3)


def _recompute_by_rows(p: Problem, gradients: GradientTraits) -> _Candidate:
    """Save everything for the tokens of a first block. The other blocks reuse its memory, and add to an fp32 dW.

    A block of few tokens reads and writes the whole fp32 dW for little work. So if blocks would have too few, nothing
    is saved, and a block has as many tokens as a recomputed slice has entries: the fewest bytes of sums for each logit.
    dX is then summed over slices. Let s be that number of tokens. A block is too small below s / 4; on one rank with
    nothing saved, below s. Not for so few tokens that they would be one block: recomputing by vocabulary then does the
    same, and saves what fits. Measured: docs/benchmarks.md, "Blocks of few tokens".
    """
    first_rows = p.rows_in(p.room)
    whole_rows = max(1, first_rows, p.rows_in(SMALLEST_BLOCK))
    square = max(1, math.isqrt(SMALLEST_BLOCK // p.itemsize) // p.sp_size)
    enough = square if p.ranks == 1 and not first_rows else square / 4
    squared = gradients.weight and whole_rows < enough and p.part_rows > square
    block_rows, first_rows = (square, 0) if squared else (whole_rows, first_rows)
    several = first_rows > 0 or p.part_rows > block_rows
    sums = p.dw_sum if several and not gradients.weight_fp32 else 0
    if squared and gradients.hidden and not gradients.hidden_fp32:
        sums += min(p.tokens, p.sp_size * block_rows) * p.hidden_size * 4
    planned = p.plan(first_rows=first_rows, block_rows=block_rows, saved=p.shard_rows if first_rows > 0 else 0)
    return _Candidate(planned, True, products=4, accumulator=sums)


def _recompute_by_vocabulary(p: Problem, gradients: GradientTraits) -> _Candidate:
    """Save some vocabulary rows for all tokens. The others are recomputed slice by slice, and add to an fp32 dX.

    On one rank this is preferred if the sum of dX takes no more than the budget: an fp32 dW is then read and written
    once, instead of once per block of rows. On several ranks blocks of rows overlap the reduction of dX.
    """
    # An fp32 sum of dX. If dX is reduced in fp32, the reduction's buffer is that sum.
    dx_sum = p.tokens * p.hidden_size * 4 if gradients.hidden and not gradients.hidden_fp32 else 0
    if p.sp_size > 1:
        # One block of all rows also gathers every hidden state and holds the whole dX.
        dx_sum += 2 * p.gathered_bytes
    planned = p.plan(
        first_rows=p.part_rows, block_rows=max(1, p.part_rows), saved=p.room // max(1, p.tokens * p.itemsize)
    )
    by_rows = _recompute_by_rows(p, gradients).plan
    several = by_rows.first_rows > 0 or p.part_rows > by_rows.block_rows
    affordable = gradients.weight and p.ranks == 1 and several and p.room > 0 and dx_sum <= p.budget
    return _Candidate(planned, True, products=4, accumulator=dx_sum, preferred=affordable)


def plan(problem: Problem) -> Plan:
    """The plan of the possible candidate with the fewest matrix products. Among equals: a preferred candidate (saving
    all; recomputing by vocabulary if its fp32 dX fits the budget), then the smallest fp32 accumulator, then the first
    in the list. Without gradients: dense logits if possible, else nothing is kept."""
    dense = _dense(problem)
    if (gradients := problem.gradients) is None:
        return dense.plan if dense.possible else problem.plan(first_rows=0, block_rows=0, saved=0)
    # On several ranks blocks of rows come first: dX of one block is reduced while the next is computed.
    recomputations = _recompute_by_vocabulary(problem, gradients), _recompute_by_rows(problem, gradients)
    if problem.ranks > 1:
        recomputations = recomputations[::-1]
    candidates = dense, _save(problem), _accumulate(problem, gradients), *recomputations
    return min((c for c in candidates if c.possible), key=lambda c: c.cost).plan


def balanced(rows: int, most: int) -> int:
    """Rows of each block but the last, at most ``most``, for as few blocks of one size as possible."""
    number = max(1, -(-rows // most))
    size = -(-rows // number)
    rounded = -(-size // _MULTIPLE) * _MULTIPLE
    return max(1, rounded if rounded <= most else size)


def blocks_within(budget: int, rows: int, row_bytes: int, fewest: int = 1) -> tuple[Block, ...]:
    """Blocks of ``rows`` tokens of each part, which save nothing: the largest that fit in the budget, or in
    :data:`SMALLEST_BLOCK` if that is more; at least ``fewest`` rows."""
    size = balanced(rows, max(max(budget, SMALLEST_BLOCK) // max(1, row_bytes), fewest))
    return tuple([Block(a, min(a + size, rows), 0) for a in range(0, rows, size)])


def shared_shard_rows(local_rows: int, ranks: int, vocab_start: int | None, vocab_size: int | None) -> int:
    """Vocabulary rows per rank that :func:`plan` assumes: the same number on every rank."""
    if vocab_size is not None:
        return -(-vocab_size // ranks)
    return local_rows if vocab_start is None or ranks == 1 else NOMINAL_SHARD
