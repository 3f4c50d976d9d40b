"""How one call spends its memory: which logits are saved or recomputed, and whether gradients are formed in forward.

A plan is a pure function of numbers that every rank of the group shares, never of the local shard: its blocks decide
how many collectives a call makes. A candidate's function returns None where it is not possible. :func:`plan` takes the
fastest, by an estimate from its products and its sums in memory (:attr:`Plan.time`). "Exponentials" are
what a call may save for backward: exp of the logits or, under a soft-cap, what it is applied to.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from parallel_lce.core.private import constant_in_graphs

SMALLEST_BLOCK = 64 << 20
"""Smallest working block, in bytes, whatever the budget. Kernels' tiles are not counted."""

FEWEST_TOKENS = 128
"""Smallest block whose logits are kept, whatever the budget: as many tokens as a product's tile has. Adding to an fp32
dW costs the same for few tokens as for many."""

GATHERED_BYTES = 256 << 20
"""Most bytes of hidden states in one gather of the forward, for a block that saves nothing."""

NOMINAL_SHARD = 32768
"""Vocabulary rows per rank assumed where the shards are uneven and V is not given."""

LONG_SLICE = 4096
"""Entries of a recomputed slice of many rows. The backend cuts the rows, too, where its memory holds fewer: the entries
are the K dimension of a product that is added to dX. With fp32 sums of 4096 columns such a product takes 1.6 times as
long as without a sum for K=1024, 1.3 for 2048, 1.05 for 4096."""

NEARLY = 1.01
"""Candidates within this factor of the fastest one's time are equal: the one with the smallest accumulator is taken."""

_MULTIPLE = 128
"""Rows of a block are a multiple of this where its bytes allow, since matrix products are tiled so."""

DEFAULT_BUDGET = 1 << 30
"""Bytes per rank and call on a CPU."""

# Rounded down to whole steps: GPUs of one kind may differ by a few MiB, and all ranks must have the same budget.
_SHARE, _STEP = 32, 256 << 20

BUDGET_VARIABLE = "PARALLEL_LCE_LOGITS_BUDGET"

LEAN_BUDGET = 128 << 20
"""Default of ``logits_budget`` in doors whose loss runs while the activations of all layers exist, bytes: saved
exponentials would raise the peak of a step. Without them the loss takes 30 to 40 % longer, a step a few percent."""


@constant_in_graphs
def budget_of_environment() -> int | None:
    """Bytes, or None if the variable is unset or empty. Raises ``ValueError`` if it is not a number of bytes."""
    text = os.environ.get(BUDGET_VARIABLE, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{BUDGET_VARIABLE} must be a number of bytes, got {text!r}")
    return int(text) if text else None


def lean_budget(given: int | None, lean: int = LEAN_BUDGET) -> int | None:
    """``logits_budget`` of doors with a default of their own: the ``given`` one, else that of the environment (None),
    else ``lean``."""
    return lean if given is None and budget_of_environment() is None else given


def default_budget(device: torch.device) -> int:
    """Bytes per rank and call for ``logits_budget=None``: the environment's budget, if it has one; else on a GPU a
    thirty-second of its memory, and on a CPU 1 GiB."""
    given = budget_of_environment()
    if given is not None:
        return given
    if device.type != "cuda" or not torch.cuda.is_available():
        return DEFAULT_BUDGET
    total = torch.cuda.get_device_properties(device).total_memory
    return max(_STEP, total // _SHARE // _STEP * _STEP)


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


class Needs(NamedTuple):
    """Whether a backward must produce the gradient of each input."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class Problem:
    """The numbers of a call from which its plan is made."""

    # N, the tokens of the whole sequence.
    tokens: int
    # ceil(V / P), or :data:`NOMINAL_SHARD`: the same number on every rank.
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
    # All False: evaluation.
    needs: Needs = Needs(False, False, False)
    # Bytes of an element of the main_grad to which dW is added; 0: dW is a new tensor.
    main_grad: int = 0
    # Whether the backward can work from saved exponentials.
    savable: bool = True
    # Whether exponentials may be saved as codes of one byte.
    codable: bool = False
    # Whether the loss is a sum over tokens whose weights are known in forward.
    accumulable: bool = False
    # Flops of a matrix product that take as long as reading or writing a byte.
    flops_per_byte: float = 0
    # Whether the backend recomputes logits in the memory of the saved exponentials.
    reuses_saved: bool = False

    @cached_property
    def part_rows(self) -> int:
        return self.tokens // self.sp_size

    @property
    def row_bytes(self) -> int:
        """Bytes of the exponentials of one token."""
        return max(1, self.shard_rows * self.itemsize)

    @property
    def entry_bytes(self) -> int:
        """Bytes of the exponentials of one vocabulary entry."""
        return max(1, self.tokens * self.itemsize)

    @property
    def sum_itemsize(self) -> int:
        """Bytes of a number of a sum: of fp32, or of fp64 for fp64."""
        return max(4, self.itemsize)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all gathered hidden states."""
        return self.tokens * self.hidden_size * self.itemsize if self.sp_size > 1 else 0

    @property
    def scratch(self) -> int:
        reuses = self.savable and self.reuses_saved and self.budget >= SMALLEST_BLOCK
        return 0 if reuses else SMALLEST_BLOCK

    @property
    def dx_is_sum(self) -> bool:
        """Whether dX itself can hold the sum, in fp32 (or fp64), or is not needed."""
        return self.itemsize == self.sum_itemsize or not self.needs.hidden

    @property
    def dw_is_sum(self) -> bool:
        """Whether dW itself, or main_grad, can hold the sum, or is not needed."""
        return (self.main_grad or self.itemsize) == self.sum_itemsize or not self.needs.weight

    @property
    def dw_sum(self) -> int:
        """Bytes of an fp32 dW."""
        return self.shard_rows * self.hidden_size * self.sum_itemsize if self.needs.weight else 0

    @property
    def dx_sum(self) -> int:
        """Bytes of an fp32 sum of dX over slices of all rows. If dX is reduced in fp32, the reduction's buffer is that
        sum. Under sequence parallelism one block of all rows also gathers every hidden state and holds the whole dX."""
        return (0 if self.dx_is_sum else self.tokens * self.hidden_size * 4) + 2 * self.gathered_bytes

    @property
    def room(self) -> int:
        """Bytes for exponentials beside the scratch memory."""
        return max(0, self.budget - self.scratch) if self.savable else 0

    def rows_in(self, nbytes: int) -> int:
        """Rows per part of a block whose exponentials take ``nbytes``."""
        return nbytes // (self.row_bytes * self.sp_size)

    def plan(self, first_rows: int = 0, saved: int = 0, block_rows: int = 1, **others: Any) -> Plan:
        """A plan with these fields. The other fields have defaults."""
        usual: dict[str, Any] = dict(block_bytes=self.budget, scratch_bytes=self.scratch)
        return Plan(self, first_rows, saved, block_rows, **usual | others)


@dataclass(frozen=True)
class Plan:
    """The blocks of a call and the memory of its backward. Rows of tokens are counted per part."""

    problem: Problem
    # Rows of the first block, which saves the exponentials of ``saved`` vocabulary rows; 0: there is no such block.
    first_rows: int
    # Vocabulary rows whose exponentials the first block saves or, accumulating, every block.
    saved: int
    # Most rows of the other blocks; 0: there are no blocks, since there is no backward.
    block_rows: int
    # Bytes that the exponentials of one block may take.
    block_bytes: int
    # Bytes of logits-shaped scratch memory beside the saved exponentials.
    scratch_bytes: int
    # Whether gradients are formed in forward, block by block.
    accumulate: bool = False
    # Bytes of the only block's gathered hidden states; 0: they are not saved.
    hidden_bytes: int = 0
    # Whether exponentials are saved as codes of one byte.
    codes: bool = False
    # Parts of the rows that are added to dW one after another; 0: the blocks.
    pieces: int = 0
    # Parts of the vocabulary that are added to dX.
    slices: int = 1
    # Bytes of the fp32 accumulator of dW or dX that this plan needs and others do not.
    accumulator: int = 0

    @cached_property
    def time(self) -> float:
        """Estimated time of the call, in flops of its matrix products. Each part but the first reads and writes an fp32
        sum. A sum that is not the result itself is then read and rounded. Of each code that is decoded, a gradient is
        written."""

        def traffic(elements: int, parts: int, is_result: bool) -> int:
            return elements * (8 * (parts - 1) + (0 if is_result or parts == 1 else 6)) if parts else 0

        p = self.problem
        share = 1 if self.accumulate else self.first_rows / max(1, p.part_rows)
        recomputed = 1 - share * min(1, self.saved / max(1, p.shard_rows))
        products = 1 + p.needs.hidden + p.needs.weight + recomputed
        decoded = p.tokens * self.saved if self.codes else 0
        nbytes = decoded * (1 + p.itemsize)
        if p.needs.weight:
            nbytes += traffic(p.shard_rows * p.hidden_size, self.pieces or len(self.blocks), p.dw_is_sum)
        if p.needs.hidden:
            nbytes += traffic(p.tokens * p.hidden_size, self.slices, p.dx_is_sum)
        return 2 * p.tokens * p.shard_rows * p.hidden_size * products + p.flops_per_byte * nbytes

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The backward's blocks; the forward's too, if gradients are accumulated."""
        if not self.block_rows:
            return ()
        first = [Block(0, self.first_rows, self.saved)] if self.first_rows else []
        saved = self.saved if self.accumulate else 0
        return *first, *_cut(self.first_rows, self.problem.part_rows, self.block_rows, saved)

    @cached_property
    def forward_blocks(self) -> tuple[Block, ...]:
        """The forward's blocks. The block that saves exponentials is the backward's first. The other rows are cut only
        where gathered hidden states would exceed :data:`GATHERED_BYTES`."""
        if self.accumulate:
            return self.blocks
        p = self.problem
        # Decided by ``first_rows``, which all ranks share, not by ``saved``, which :meth:`limited` may lower on this
        # rank.
        first = self.blocks[:1] if self.first_rows else ()
        most = p.part_rows if p.sp_size == 1 else GATHERED_BYTES // max(1, p.sp_size * p.hidden_size * p.itemsize)
        return *first, *_cut(self.first_rows, p.part_rows, max(1, most))

    def limited(self, shard_rows: int) -> Plan:
        """The plan of this rank, whose shard has ``shard_rows`` real rows. An uneven shard may have more rows than the
        plan assumed. The rank then saves the exponentials of as many as fit, and recomputes the rest. Blocks and
        collectives do not change."""
        p = self.problem
        size = balanced(p.part_rows, self.block_rows) if self.accumulate else self.first_rows
        if shard_rows <= p.shard_rows or self.saved < p.shard_rows or size == 0:
            return self
        entry = p.sp_size * size * (1 if self.codes else p.itemsize)
        room = self.block_bytes - self.hidden_bytes
        recomputes = self.first_rows < p.part_rows or shard_rows * entry > room
        if self.codes or (recomputes and not self.accumulate):  # codes are always decoded into scratch memory
            room -= self.scratch_bytes
        return replace(self, saved=min(shard_rows, max(0, room) // entry))


def _accumulate(p: Problem) -> Plan | None:
    """Form gradients in forward, in blocks of the budget. Possible if that needs no more memory than saving
    everything."""
    whole = p.tokens * p.row_bytes
    # On several ranks half of the bytes: hidden states and dX of two blocks are on their way beside the exponentials;
    # and for few large blocks an fp32 dW, which the budget does not count, would be chosen too often.
    block_bytes = max(p.budget, SMALLEST_BLOCK) // (2 if p.ranks > 1 else 1)
    block_rows = max(1, p.rows_in(block_bytes))
    block_tokens = p.sp_size * min(balanced(p.part_rows, block_rows), p.part_rows)
    dw_new = p.shard_rows * p.hidden_size * p.itemsize if p.needs.weight and not p.main_grad else 0
    fits = block_tokens * p.row_bytes + p.dw_sum <= whole + dw_new and p.dw_sum <= whole
    if not (p.accumulable and p.savable and fits):
        return None
    return p.plan(
        saved=p.shard_rows,
        block_rows=block_rows,
        block_bytes=block_bytes,
        scratch_bytes=SMALLEST_BLOCK,
        accumulate=True,
        accumulator=p.dw_sum,
    )


def _by_rows(p: Problem) -> Plan:
    """Save everything for the tokens of a first block. The other blocks reuse its memory, and add to an fp32 dW."""
    first_rows = min(p.part_rows, p.rows_in(p.room))
    block_rows = max(1, first_rows, p.rows_in(SMALLEST_BLOCK))
    planned = p.plan(first_rows, p.shard_rows if first_rows else 0, block_rows)
    return replace(planned, accumulator=p.dw_sum if len(planned.blocks) > 1 and not p.dw_is_sum else 0)


def _by_long_slices(p: Problem) -> Plan | None:
    """Save nothing. Blocks have so many tokens that only :data:`LONG_SLICE` entries of them fit the working memory,
    slice by slice: where both few tokens and few entries would be added to sums too often."""
    block_rows = max(1, SMALLEST_BLOCK // (LONG_SLICE * p.itemsize * p.sp_size))
    if p.part_rows <= block_rows:
        return None
    slices, sums = -(-p.shard_rows // LONG_SLICE), 0 if p.dw_is_sum else p.dw_sum
    if slices > 1 and not p.dx_is_sum:
        sums += p.sp_size * block_rows * p.hidden_size * 4
    return p.plan(block_rows=block_rows, slices=slices, accumulator=sums)


def _by_vocabulary(p: Problem, codes: bool = False) -> Plan:
    """Save as many vocabulary rows as fit, for all tokens, as exponentials or in ``codes`` of one byte. Slices of all
    rows are recomputed, or decoded, and add to an fp32 dX. Exponentials are recomputed in the memory of the saved ones,
    if there are any, and all rows then stay together."""
    scratch, room, saved_bytes = p.scratch, p.room, p.entry_bytes
    if codes:
        left = p.budget - p.tokens * p.shard_rows
        scratch = max(SMALLEST_BLOCK, min(LONG_SLICE * p.entry_bytes, max(left, p.budget // 8)))
        room, saved_bytes = max(0, p.budget - scratch), max(1, p.tokens)
    saved = min(p.shard_rows, room // saved_bytes)
    working = scratch if codes else max(saved * saved_bytes, SMALLEST_BLOCK)
    entries, pieces = working // p.entry_bytes, 1
    if entries < LONG_SLICE and (codes or not saved):
        entries, pieces = LONG_SLICE, -(-p.entry_bytes * LONG_SLICE // working)
    return p.plan(
        first_rows=p.part_rows,
        saved=saved,
        scratch_bytes=scratch,
        codes=codes,
        pieces=pieces,
        slices=-(-p.shard_rows // entries),
        accumulator=p.dx_sum,
    )


def plan(p: Problem) -> Plan:
    """The plan of the fastest possible candidate. Of those that take nearly as long (:data:`NEARLY`), the one with the
    smallest fp32 accumulator, then the first in the list. Without gradients nothing is kept. If the budget holds every
    exponential, all are saved; and the gathered hidden states, if they fit beside them."""
    if not any(p.needs):
        return p.plan(block_rows=0)
    left = p.budget - p.tokens * p.row_bytes
    if p.savable and left >= 0:
        hidden_bytes = p.gathered_bytes if p.gathered_bytes <= left else 0
        return p.plan(first_rows=p.part_rows, saved=p.shard_rows, hidden_bytes=hidden_bytes)
    recomputed = [_by_vocabulary(p), _by_rows(p)]
    if p.ranks > 1:  # dX of one block of rows is reduced while the next is computed
        recomputed.reverse()
    candidates = [_accumulate(p), *recomputed, _by_long_slices(p)]
    if p.codable:
        candidates.append(_by_vocabulary(p, codes=True))
    possible = [c for c in candidates if c is not None and (c.saved or not c.codes)]
    fastest = min([c.time for c in possible])
    return min([c for c in possible if c.time <= NEARLY * fastest], key=lambda c: c.accumulator)


def balanced(rows: int, most: int) -> int:
    """Rows of each block but the last, at most ``most``, for as few blocks of one size as possible."""
    number = max(1, -(-rows // most))
    size = -(-rows // number)
    rounded = -(-size // _MULTIPLE) * _MULTIPLE
    return max(1, rounded if rounded <= most else size)


def _cut(start: int, stop: int, most: int, saved: int = 0) -> list[Block]:
    """The rows ``[start, stop)`` in blocks of :func:`balanced` size."""
    size = balanced(stop - start, most)
    return [Block(first, min(first + size, stop), saved) for first in range(start, stop, size)]


def blocks_within(budget: int, rows: int, token_bytes: int, sp_size: int = 1) -> tuple[Block, ...]:
    """Blocks of ``rows`` tokens of each part, whose logits are kept: the largest that fit in the budget, or in
    :data:`SMALLEST_BLOCK` if that is more, of at least :data:`FEWEST_TOKENS`."""
    fitting = max(budget, SMALLEST_BLOCK) // max(1, sp_size * token_bytes)
    return tuple(_cut(0, rows, max(fitting, -(-FEWEST_TOKENS // sp_size))))
