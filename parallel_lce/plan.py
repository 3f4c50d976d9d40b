"""How one call spends its memory: which rows are saved, recomputed or accumulated in forward.

A pure function of numbers that every rank of the group shares (never of the local shard), because
the blocks it returns decide how many collectives a call makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DEFAULT_BUDGET = 1 << 30
"""``logits_budget=None``: bytes per rank and call."""

SMALLEST_BLOCK = 32 << 20
"""Bytes of a block of logits that a call may use whatever its budget is; a few tiles come on top."""

NOMINAL_SHARD = 32768
"""Vocabulary rows per rank assumed where the shards are uneven and nobody said how large V is."""


@dataclass(frozen=True)
class Block:
    """Rows ``[start, stop)`` of *every* rank's part of the tokens.

    Without sequence parallelism there is one part, the whole; with it there are P equal parts and a
    block is chunk ``[start, stop)`` of each, so that it can be gathered and reduce-scattered alone.
    The exponentials of its first ``kept`` rows (flattened over the parts) stay from forward to
    backward; those of the others are recomputed.
    """

    start: int
    stop: int
    kept: int


@dataclass(frozen=True)
class Plan:
    """The blocks of a call, in order, and how their gradients come about.

    ``accumulate``: gradients are formed in forward, block by block, and nothing is recomputed.
    ``block_bytes``: what the exponentials of a block may take when accumulating, else the
    logits-shaped scratch beside what is kept.
    ``accumulator_bytes``: fp32 sums beside the gradients themselves (low-precision dW over several
    blocks, or low-precision dX over vocabulary slices).
    """

    blocks: tuple[Block, ...]
    accumulate: bool
    block_bytes: int
    accumulator_bytes: int

    def limited(self, row_bytes: int, budget: int | None) -> Plan:
        """The same blocks, keeping no more than the budget allows on this rank.

        ``row_bytes``: logits of one token on this rank, whose shard may be larger than
        ``shard_rows``. The rows that are not kept are recomputed; collectives do not change.
        """
        budget = DEFAULT_BUDGET if budget is None else budget
        kept_rows = sum(block.kept for block in self.blocks)
        if self.accumulate:
            per_block = self.block_bytes // row_bytes
        elif kept_rows * row_bytes > budget:
            per_block = kept_rows = max(0, budget - SMALLEST_BLOCK) // row_bytes
        else:
            return self
        blocks = []
        for block in self.blocks:
            blocks.append(replace(block, kept=min(block.kept, per_block, kept_rows)))
            kept_rows -= blocks[-1].kept
        return replace(self, blocks=tuple(blocks))


@dataclass(frozen=True)
class Gradients:
    """What the backward must produce. ``*_fp32``: its destination can take fp32 sums in place."""

    input: bool
    weight: bool
    input_fp32: bool
    weight_fp32: bool


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
) -> Plan:
    """Split ``rows`` tokens into blocks.

    ``rows`` N, ``shard_rows`` ceil(V / P), ``hidden`` D; ``itemsize`` bytes of an input element,
    which is also what a kept exponential takes. ``parts``: P under sequence parallelism, else 1;
    ``ranks``: P. ``gradients=None`` means evaluation. ``keepable``: the stored exponentials are
    enough for the backward. ``accumulable``: the loss is a sum with weights known in forward.

    Everything that fits the budget is saved (6 N V D flops). If not everything fits, an accumulable
    loss accumulates in forward (6 N V D), provided that the dX and fp32 dW it keeps are smaller
    than the logits; otherwise what fits is saved and the rest recomputed (8 N V D), in blocks of
    rows or of the vocabulary, whichever needs the smaller fp32 accumulator.
    """
    budget = DEFAULT_BUDGET if budget is None else budget
    row_bytes = max(1, shard_rows * itemsize)
    whole = rows * row_bytes
    per_part = rows // parts

    def blocks_of(block_bytes: int, first: int, kept: bool) -> tuple[Block, ...]:
        size = max(1, block_bytes // (row_bytes * parts))
        return tuple(
            Block(a, b, parts * (b - a) if kept else 0)
            for a in range(first, per_part, size)
            for b in [min(a + size, per_part)]
        )

    def decided(blocks: tuple[Block, ...], accumulator: int = 0) -> Plan:
        return Plan(blocks, False, SMALLEST_BLOCK, accumulator)

    single = () if per_part == 0 else (Block(0, per_part, 0),)
    if gradients is None:
        return decided(blocks_of(SMALLEST_BLOCK, 0, False) if parts > 1 else single)
    if keepable and whole <= budget:
        return decided(tuple(replace(block, kept=rows) for block in single))

    dx_kept = rows // parts * hidden * itemsize if gradients.input else 0
    dw_kept = shard_rows * hidden * max(4, itemsize) if gradients.weight else 0
    if accumulable and keepable and dx_kept + dw_kept < whole:
        # Over ranks a block's gradients wait for its statistics while the next block is projected.
        block_bytes = max(budget - SMALLEST_BLOCK, SMALLEST_BLOCK) // (2 if ranks > 1 else 1)
        blocks = blocks_of(block_bytes, 0, True)
        split = gradients.weight and not gradients.weight_fp32
        return Plan(blocks, True, block_bytes, dw_kept if split else 0)

    kept_rows = max(0, budget - SMALLEST_BLOCK) // row_bytes if keepable else 0
    kept_per_part = kept_rows // parts
    by_rows = blocks_of(SMALLEST_BLOCK, kept_per_part, False)
    if kept_per_part:
        by_rows = (Block(0, kept_per_part, kept_per_part * parts), *by_rows)
    dw_sum = 0 if gradients.weight_fp32 or not gradients.weight or len(by_rows) == 1 else dw_kept
    dx_sum = 0 if gradients.input_fp32 or not gradients.input else rows * hidden * 4
    if parts > 1:
        # One block of all rows would also gather every hidden state and hold the whole dX.
        dx_sum += 2 * rows * hidden * itemsize
    if dx_sum < dw_sum or (dx_sum == dw_sum and ranks == 1):
        blocks = tuple(replace(block, kept=kept_rows) for block in single)
        return decided(blocks, dx_sum)
    return decided(by_rows, dw_sum)


def shared_shard_rows(
    local_rows: int, ranks: int, vocab_start: int | None, vocab_size: int | None
) -> int:
    """Vocabulary rows per rank as :func:`plan` may count them: the same on every rank."""
    if vocab_size is not None:
        return math.ceil(vocab_size / ranks)
    return local_rows if vocab_start is None or ranks == 1 else NOMINAL_SHARD
