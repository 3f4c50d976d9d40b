"""Tensor- and sequence-parallel layouts, and the collectives of a call.

Which collectives a call issues depends only on numbers that all ranks share, so every rank issues the same ones in
the same order. All collectives are asynchronous. On NCCL a wait orders streams and never stops the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.core.memory import some_rows
from parallel_lce.core.partials import TRAILER, Columns, Merged, accumulation_dtype, trailer_of
from parallel_lce.core.plan import Block
from parallel_lce.core.private import constant_in_graphs

# torch 2.13 renamed these two. With ``async_op=True`` they return a Work to every rank of the group.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Backends of groups that send no CPU tensors.
NCCL_ALONE = "nccl", "cuda:nccl"


@dataclass(frozen=True)
class Layout:
    """How one call is spread over a group. A group of one rank, or none, needs no collective."""

    group: dist.ProcessGroup | None = None
    # P, the number of vocabulary shards.
    ranks: int = 1
    rank: int = 0
    # Number of equal parts of the tokens: ``ranks`` under sequence parallelism, else 1.
    sp_size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Layout:
        if group is None:
            return cls()
        # torch.compile takes the next two numbers as constants, without a guard. The name that it reads is guarded.
        if torch.compiler.is_compiling() and not group.group_name:
            raise ValueError("process_group has no name")
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"process_group: this process (global rank {dist.get_rank()}) is not one of its "
                f"{dist.get_process_group_ranks(group)} members"
            )
        # The option may not be checked yet.
        return cls(group, ranks, rank, ranks if sequence_parallel is True else 1) if ranks > 1 else cls()

    @property
    def sequence_parallel(self) -> bool:
        return self.sp_size > 1

    def take(self, tokens: Any, block: Block) -> Any:
        """The block's values ``[..., R]`` of ``tokens [..., N]``, from all parts, contiguous in R. None for None."""
        if tokens is None:
            return None
        if self.sp_size * (block.stop - block.start) == tokens.shape[-1]:
            return tokens
        if self.sp_size == 1:
            return tokens[..., block.start : block.stop]
        # If the block has one row per part, flatten returns a strided view, and kernels need contiguous tokens.
        return self._rows(tokens, block).flatten(-2).contiguous()

    def put(self, tokens: Tensor, block: Block, values: Tensor) -> None:
        """Write ``values [..., R]`` where :meth:`take` would read them."""
        rows = self._rows(tokens, block)
        rows.copy_(values.unflatten(-1, rows.shape[-2:]))

    def _rows(self, tokens: Tensor, block: Block) -> Tensor:
        return tokens.unflatten(-1, (self.sp_size, -1))[..., block.start : block.stop]


class IncomingHidden:
    """A block's hidden states ``[R, D]``. Other ranks' rows may be missing before :meth:`wait`."""

    def __init__(self, tensor: Tensor, work: dist.Work | None = None) -> None:
        self.tensor, self._work = tensor, work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.tensor


def gather_hidden(hidden: Tensor, block: Block, layout: Layout) -> IncomingHidden:
    """Start gathering the hidden states ``[R, D]`` of a block from this rank's part ``[N/sp_size, D]``. Under sequence
    parallelism one all-gather of (stop - start) * D elements per rank, in place. Else a view."""
    chunk = some_rows(hidden, block.start, block.stop)
    if layout.sp_size == 1:
        return IncomingHidden(chunk)
    rows = chunk.shape[0]
    gathered = chunk.new_empty(layout.ranks * rows, chunk.shape[1])
    start = layout.rank * rows
    own = gathered[start : start + rows].copy_(chunk)
    work = all_gather(gathered, own, group=layout.group, async_op=True)
    return IncomingHidden(gathered, work)


def hidden_of_blocks(hidden: Tensor, blocks: Sequence[Block], layout: Layout) -> Iterable[IncomingHidden]:
    """:func:`gather_hidden` of one block after another, each started a block ahead. At most two are in flight."""
    if layout.sp_size == 1 and len(blocks) == 1:
        return [IncomingHidden(hidden)]
    return _gathered_ahead(hidden, blocks, layout)


def _gathered_ahead(hidden: Tensor, blocks: Sequence[Block], layout: Layout) -> Iterator[IncomingHidden]:
    following: IncomingHidden | None = None
    for number, block in enumerate(blocks):
        incoming = following or gather_hidden(hidden, block, layout)
        if number > 0:
            incoming.wait()
        following = gather_hidden(hidden, blocks[number + 1], layout) if number + 1 < len(blocks) else None
        yield incoming


class HiddenReduction:
    """dX of this rank's part ``[N/sp_size, D]``, summed over the ranks block by block.

    Each block runs one all-reduce of R * D elements of ``reduce_dtype`` or, under sequence parallelism, one
    reduce-scatter of the same size. Each reduction starts when its block's dX is complete, and is waited for once the
    next block's has started. So dX of at most two blocks is alive. ``hidden`` gives the shape and dtype of dX.
    """

    def __init__(self, hidden: Tensor, layout: Layout, reduce_dtype: torch.dtype | None) -> None:
        self._like, self._layout, self.ranks = hidden, layout, layout.ranks
        self._dtype = hidden.dtype if reduce_dtype is None or layout.ranks == 1 else reduce_dtype
        # Of the reduction that runs: its work, this rank's dX, which lives until then, the sum, and its rows of dX.
        self._running: tuple[Any, Tensor, Tensor, Tensor] | None = None

    @cached_property
    def _total(self) -> Tensor:
        """Allocated with the first block."""
        return torch.empty(self._like.shape, dtype=self._like.dtype, device=self._like.device)

    def open_block(self, block: Block) -> Tensor:
        """Memory for the local dX ``[R, D]`` of the next block."""
        rows, sp_size = some_rows(self._total, block.start, block.stop), self._layout.sp_size
        if sp_size == 1 and self._dtype == rows.dtype:
            return rows
        return rows.new_empty(sp_size * rows.shape[0], rows.shape[1], dtype=self._dtype)

    def start(self, block: Block, local: Tensor) -> None:
        """Start the reduction of ``local``, the block's complete dX in the memory from :meth:`open_block`."""
        layout = self._layout
        if layout.ranks == 1:
            return
        rows, summed = some_rows(self._total, block.start, block.stop), local
        if layout.sequence_parallel:
            summed = rows if self._dtype == rows.dtype else torch.empty_like(rows, dtype=self._dtype)
            work = reduce_scatter(summed, local, group=layout.group, async_op=True)
        else:
            work = dist.all_reduce(local, group=layout.group, async_op=True)
        self.wait()
        self._running = work, local, summed, rows

    def wait(self) -> Tensor:
        """dX of all blocks so far, summed over the ranks."""
        if self._running is not None:
            work, _, summed, rows = self._running
            work.wait()
            if summed.dtype != rows.dtype:
                rows.copy_(summed)
            self._running = None
        return self._total


@dataclass(frozen=True)
class Shard:
    """Vocabulary rows ``[start, start + rows)`` of this rank."""

    start: int
    rows: int
    # V; None: the sum of all ranks' rows
    vocab_size: int | None
    # digest_of the arguments that all ranks must share
    digest: int = 0

    @classmethod
    def of(cls, rows: int, layout: Layout, vocab_start: int | None, vocab_size: int | None) -> Shard:
        """By default the ranks' shards are equal, in rank order."""
        return cls(layout.rank * rows if vocab_start is None else vocab_start, rows, vocab_size)

    @cached_property
    def real_rows(self) -> int:
        """Number of rows that are not padding. They come first."""
        if self.vocab_size is None:
            return self.rows
        return min(max(self.vocab_size - self.start, 0), self.rows)

    def write_trailer(self, packed: Tensor, first: int | Tensor = 0) -> None:
        """Write ``start``, ``rows`` and ``digest`` to the end of every row of ``packed [P, n]``. The gather replaces
        those of the other ranks. A rank whose message is too short to do so, which gloo accepts, overlaps this shard,
        unless this is empty, and so gives NaN, whatever an earlier call has left in the memory. ``first``: another
        number that the digest covers, such as the first token of the message's block; may be 0-dimensional."""
        start, rows, digest = trailer_of(packed).unbind(1)
        start.fill_(self.start)
        rows.fill_(self.rows)
        digest.fill_((self.digest + first) % _DIGESTS)


_DIGESTS = 2**31
# Odd, and far from any small ratio: a swap of two ids changes the checksum.
_MIXER = 0x9E3779B1


@constant_in_graphs
def digest_of(*arguments: object) -> int:
    """A digest of the arguments' texts, the same in every process: CRC-32 without its highest bit."""
    return zlib.crc32(repr(arguments).encode()) % _DIGESTS


def checksum_of(*ids: Tensor) -> Tensor:
    """A checksum of int64 ids ``[n]`` in their order, 0-dimensional, computed on their device."""
    flat = torch.cat(ids)
    factors = torch.arange(1, len(flat) + 1, device=flat.device).mul_(_MIXER)
    return ((flat + 1) * factors).sum() % _DIGESTS


class PartialsGather:
    """Merges partials ``[C, R]`` over the ranks.

    The caller writes this rank's partials to :attr:`local`; :meth:`start` sends them, :meth:`finish` merges all ranks'.
    One all-gather of C * R + 3 elements per rank (fp32, or fp64 for fp64 input), in place; none for a single rank. The
    merge runs in rank order, so all ranks hold the same bits. Further ``extra`` elements may be sent with the partials:
    each rank writes :attr:`extra`, and reads all ranks' :attr:`extras` after :meth:`finish`.
    """

    def __init__(self, like: Tensor, rows: int, shard: Shard, columns: Columns, layout: Layout, extra: int = 0) -> None:
        self._rows, self._shard, self._columns, self._layout = rows, shard, columns, layout
        self._work: dist.Work | None = None
        self._extra = extra
        dtype = accumulation_dtype(like.dtype)
        if layout.ranks == 1:
            self.local = like.new_empty(columns.count, rows, dtype=dtype)
            return
        size = columns.count * rows
        self._packed = like.new_empty(layout.ranks, size + extra + TRAILER, dtype=dtype)
        self._own = self._packed[layout.rank]
        self.local = self._own[:size].view(columns.count, rows)

    @cached_property
    def extras(self) -> Tensor:
        """``[P, extra]``. Most calls have none, and need no tensor for them."""
        if self._layout.ranks == 1:
            return self.local.new_empty(1, self._extra)
        return self._packed[:, self._columns.count * self._rows : -TRAILER]

    @property
    def extra(self) -> Tensor:
        """This rank's ``[extra]``"""
        return self.extras[self._layout.rank]

    def start(self, first: int | Tensor = 0) -> None:
        """``first``: as for :meth:`Shard.write_trailer`."""
        if self._layout.ranks == 1:
            return
        self._shard.write_trailer(self._packed, first)
        self._work = all_gather(self._packed.view(-1), self._own, group=self._layout.group, async_op=True)

    def finish(self, backend: Any, wanted: Any = None, found: Any = None) -> tuple[Merged, Any]:
        """The merged partial, and what is ``wanted`` of it. On one rank the latter may be ``found`` already."""
        if self._layout.ranks == 1:
            if wanted is None or found is not None:
                return Merged(self.local, self._shard.real_rows), found
            # Partials of several blocks: what is wanted is made of them as of several ranks'.
            self._packed = self.local.new_empty(1, self.local.numel() + TRAILER)
            self._packed[0, :-TRAILER] = self.local.view(-1)
            self._shard.write_trailer(self._packed)
        else:
            assert self._work is not None  # start() has been called
            self._work.wait()
        shape = self._columns, self._rows, self._shard.vocab_size
        partial, vocab_size, found = backend.merge_ranks(self._packed, *shape, wanted)
        return Merged(partial, vocab_size), found
