"""Tensor- and sequence-parallel layouts: which collective runs, on what, and when it is waited for.

Every function takes numbers that all ranks share, so that every rank issues the same collectives in
the same order. Work is asynchronous: on NCCL a wait orders streams, never the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.backends.blocks import PRODUCT_ROWS, Arrival
from parallel_lce.partials import Columns, bounds_of, message_size
from parallel_lce.plan import Block
from parallel_lce.weight_grad import accumulation_dtype

# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


REDUCED_BYTES = 64 << 20
"""Bytes of dX that one all-reduce sums where no product of dW comes after: the first ones run beside the rest
of dX's own. Beside dW's, which is longer, one of all bytes costs less."""


@dataclass(frozen=True)
class Layout:
    """How one call is spread: ``ranks`` vocabulary shards and, under sequence parallelism, as many
    equal parts of the tokens. A group of one rank, or none, needs no collective."""

    group: dist.ProcessGroup | None = None
    ranks: int = 1
    rank: int = 0
    sequence_parallel: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Layout:
        if group is None:
            return cls()
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"process_group: this process (global rank {dist.get_rank()}) is not one of its "
                f"{dist.get_process_group_ranks(group)} members"
            )
        return cls(group, ranks, rank, sequence_parallel) if ranks > 1 else cls()

    @property
    def parts(self) -> int:
        return self.ranks if self.sequence_parallel else 1

    def rows(self, tokens: Tensor, block: Block) -> Tensor:
        """The block's tokens of ``[..., N]`` as a view ``[..., parts, stop - start]``."""
        return tokens.unflatten(-1, (self.parts, -1))[..., block.start : block.stop]

    def take(self, tokens: Tensor, block: Block) -> Tensor:
        """The block's tokens of ``[..., N]``, flattened over the parts: ``[..., R]``, contiguous in R."""
        if self.parts == 1:
            return tokens[..., block.start : block.stop]
        # One row of each part would be flattened to a view with gaps, which kernels do not expect.
        return self.rows(tokens, block).flatten(-2).contiguous()

    def put(self, tokens: Tensor, block: Block, values: Tensor) -> None:
        """Write ``values [..., R]`` where :meth:`take` would read them."""
        rows = self.rows(tokens, block)
        rows.copy_(values.unflatten(-1, rows.shape[-2:]))


@dataclass
class Pending:
    """A tensor that is complete after :meth:`wait`; its rows ``[start, stop)`` are before. ``then`` is called
    once it is."""

    tensor: Tensor
    work: dist.Work | None = None
    start: int = 0
    stop: int = 0
    then: Callable[[], None] | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
            if self.then is not None:
                self.then()
        return self.tensor

    def arrival(self) -> Arrival | None:
        """What is to be waited for, if anything."""
        return None if self.work is None else Arrival(self.start, self.stop, self.wait)


def gather_hidden(hidden: Tensor, block: Block, layout: Layout) -> Pending:
    """Hidden states ``[R, D]`` of a block in the TP layout, from this rank's part ``[N/parts, D]``.

    Under sequence parallelism one all-gather of (stop - start) * D elements per rank, in place: this rank's
    rows are there at once. Else a view.
    """
    chunk = hidden[block.start : block.stop]
    if not layout.sequence_parallel:
        return Pending(chunk)
    rows = chunk.shape[0]
    gathered = chunk.new_empty(layout.ranks * rows, chunk.shape[1])
    start = layout.rank * rows
    own = gathered[start : start + rows].copy_(chunk)
    work = _all_gather(gathered, own, group=layout.group, async_op=True)
    return Pending(gathered, work, start, start + rows)


class HiddenGradient:
    """dX of this rank's part ``[N/parts, D]``, summed over the ranks block by block.

    Per block, in order, one all-reduce of R * D elements of ``reduce_dtype`` or, under sequence
    parallelism, one reduce-scatter of the same size; started when the block's dX is done and waited for
    once the next block's is done, so that two blocks' dX are alive at most. ``alone``, without dW, the
    all-reduce is one per :data:`REDUCED_BYTES`, each started when these rows are announced.
    """

    def __init__(self, hidden: Tensor, layout: Layout, reduce_dtype: torch.dtype | None, alone: bool) -> None:
        self._total, self._layout, self._alone = hidden.new_empty(hidden.shape), layout, alone
        self._dtype = hidden.dtype
        if reduce_dtype is not None and layout.ranks > 1:
            self._dtype = reduce_dtype
        # Of each block: what was started, and where its sums go.
        self._pending: deque[list[tuple[dist.Work, Tensor, Tensor, Tensor]]] = deque()

    def destination(self, block: Block) -> Tensor:
        """Where to write the block's local dX ``[R, D]``."""
        part, layout = self._total[block.start : block.stop], self._layout
        self._pending.append([])
        if layout.parts == 1 and self._dtype == part.dtype:
            return part
        return part.new_empty(layout.parts * part.shape[0], part.shape[1], dtype=self._dtype)

    def reduce(self, block: Block, local: Tensor, stop: int | None = None) -> None:
        """Start the sums over the ranks of the rows of ``local`` before ``stop``, or of all, as far as none is on its
        way; ``local`` came from :meth:`destination`, whose last block this is."""
        layout, part = self._layout, self._total[block.start : block.stop]
        started = self._pending[-1]
        if layout.sequence_parallel:
            if stop is not None:  # one message has rows of every rank
                return
            summed = part if self._dtype == part.dtype else torch.empty_like(part, dtype=self._dtype)
            work = _reduce_scatter(summed, local, group=layout.group, async_op=True)
            started.append((work, local, summed, part))
        else:
            size = max(1, local.shape[0])
            if self._alone:
                size = max(1, REDUCED_BYTES // max(1, local[:1].numel() * local.element_size()))
                # As the products that it follows.
                size = size // PRODUCT_ROWS * PRODUCT_ROWS or size
            done = sum(piece.shape[0] for _, piece, *_ in started)
            for first in range(done, local.shape[0], size):
                last = min(first + size, local.shape[0])
                if stop is not None and last > stop:
                    return
                piece = local[first:last]
                work = dist.all_reduce(piece, group=layout.group, async_op=True)
                started.append((work, piece, piece, part[first:last]))
        while len(self._pending) > 1:
            self._complete()

    def _complete(self) -> None:
        for work, _, summed, part in self._pending.popleft():
            work.wait()
            if summed.dtype != part.dtype:
                part.copy_(summed)

    def wait(self) -> Tensor:
        while self._pending:
            self._complete()
        return self._total


@dataclass(frozen=True)
class Shard:
    """Vocabulary rows ``[start, start + rows)`` of this rank; the first ``real`` are no padding."""

    start: int
    rows: int
    vocab_size: int | None

    @property
    def real(self) -> int:
        if self.vocab_size is None:
            return self.rows
        return min(max(self.vocab_size - self.start, 0), self.rows)


class PartialsGather:
    """Merging a block's partials ``[C, R]`` over the ranks.

    ``local`` is where this rank's go; :meth:`start` sends them, :meth:`finish` gives the merged partial
    and the number V of real entries, 0-dimensional int64 (``partials.merge_messages``). One all-gather of
    ``partials.message_size`` elements per rank (fp32, or fp64 for fp64 input), in place; none for a single
    rank. The merge runs in rank order, so all ranks hold the same bits.
    """

    def __init__(self, like: Tensor, rows: int, shard: Shard, columns: Columns, layout: Layout) -> None:
        self._rows, self._shard, self._columns, self._layout = rows, shard, columns, layout
        self._pending: Pending | None = None
        dtype = accumulation_dtype(like.dtype)
        if layout.ranks == 1:
            self.local = like.new_empty(columns.count, rows, dtype=dtype)
            return
        size = message_size(columns, rows)
        self._messages = like.new_empty(layout.ranks, size, dtype=dtype)
        self._own = self._messages[layout.rank]
        self.local = self._own[: columns.count * rows].view(columns.count, rows)

    def start(self) -> None:
        if self._layout.ranks == 1:
            return
        start, rows = bounds_of(self._own, self._columns, self._rows).unbind()
        start.fill_(self._shard.start)
        rows.fill_(self._shard.rows)
        work = _all_gather(self._messages.view(-1), self._own, group=self._layout.group, async_op=True)
        self._pending = Pending(self._messages, work)

    def finish(self, merge: Callable) -> tuple[Tensor, Tensor]:
        """``merge``: ``merge_messages`` of :mod:`parallel_lce.partials`, or a backend's."""
        if self._pending is None:
            return self.local, self.local.new_full((), self._shard.real, dtype=torch.int64)
        return merge(self._pending.wait(), self._columns, self._rows, self._shard.vocab_size)
