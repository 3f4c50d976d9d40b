"""Tensor- and sequence-parallel layouts: which collective runs, on what, and when it is waited for.

Every function takes numbers that all ranks share, so that every rank issues the same collectives in
the same order. Work is asynchronous: on NCCL a wait orders streams, never the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.partials import Columns, integer_view, merge
from parallel_lce.plan import Block

# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
        """The block's tokens of ``[..., N]``, flattened over the parts: ``[..., R]``."""
        if self.parts == 1:
            return tokens[..., block.start : block.stop]
        return self.rows(tokens, block).flatten(-2)

    def put(self, tokens: Tensor, block: Block, values: Tensor) -> None:
        """Write ``values [..., R]`` where :meth:`take` would read them."""
        rows = self.rows(tokens, block)
        rows.copy_(values.unflatten(-1, rows.shape[-2:]))


@dataclass
class Pending:
    """A tensor that is complete after :meth:`wait`."""

    tensor: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor


def gather_hidden(hidden: Tensor, block: Block, layout: Layout) -> Pending:
    """Hidden states ``[R, D]`` of a block in the TP layout, from this rank's part ``[N/parts, D]``.

    Under sequence parallelism one all-gather of (stop - start) * D elements per rank; else a view.
    """
    chunk = hidden[block.start : block.stop]
    if not layout.sequence_parallel:
        return Pending(chunk)
    gathered = chunk.new_empty(layout.ranks * chunk.shape[0], chunk.shape[1])
    return Pending(gathered, _all_gather(gathered, chunk, group=layout.group, async_op=True))


@dataclass
class HiddenGradient:
    """dX of this rank's part ``[N/parts, D]``, summed over the ranks block by block.

    Per block, in order, one all-reduce of R * D elements in dX's dtype or, under sequence
    parallelism, one reduce-scatter of the same size; started when the block's dX is done and
    waited for once the next block's is done, so that two blocks' dX are alive at most.
    """

    total: Tensor
    layout: Layout
    pending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def destination(self, block: Block) -> Tensor:
        """Where to write the block's local dX ``[R, D]``."""
        if not self.layout.sequence_parallel:
            return self.total[block.start : block.stop]
        rows = self.layout.ranks * (block.stop - block.start)
        return self.total.new_empty(rows, self.total.shape[1])

    def reduce(self, block: Block, local: Tensor) -> None:
        """Start the sum over the ranks of ``local``, which came from :meth:`destination`."""
        layout = self.layout
        if layout.ranks == 1:
            return
        if layout.sequence_parallel:
            part = self.total[block.start : block.stop]
            work = _reduce_scatter(part, local, group=layout.group, async_op=True)
        else:
            work = dist.all_reduce(local, group=layout.group, async_op=True)
        self.pending.append((work, local))
        while len(self.pending) > 1:
            self.pending.popleft()[0].wait()

    def wait(self) -> Tensor:
        while self.pending:
            self.pending.popleft()[0].wait()
        return self.total


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


def gather_partials(
    partial: Tensor, shard: Shard, columns: Columns, layout: Layout
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Start merging partials ``[C, R]`` over the ranks; the result is a function that ends it.

    That function returns the merged partial ``[C, R]`` and the number V of real entries as a
    0-dimensional tensor. Where the shards leave a gap or overlap the columns are NaN, and the
    argmax is the largest integer. One all-gather of C * R + 2 elements per rank (fp32, or fp64 for fp64 input): the
    partials and the shard's bounds; none for a single rank. The merge runs in rank order, so all
    ranks hold the same bits.
    """
    if layout.ranks == 1:
        size = partial.new_full((), shard.real)
        return lambda: (partial, size)
    message = partial.new_empty(partial.numel() + 2)
    message[:-2].view_as(partial).copy_(partial)
    bounds = integer_view(message[-2:])
    bounds[0].fill_(shard.start)
    bounds[1].fill_(shard.rows)
    gathered = message.new_empty(layout.ranks * message.numel())
    work = _all_gather(gathered, message, group=layout.group, async_op=True)

    def finish(message: Tensor = message) -> tuple[Tensor, Tensor]:
        work.wait()  # until then the message must stay alive, too
        messages = gathered.view(layout.ranks, -1)
        starts, rows = integer_view(messages[:, -2:]).long().unbind(1)
        real = rows
        if shard.vocab_size is not None:
            real = (shard.vocab_size - starts).clamp(min=0).minimum(rows)
        merged = merge(messages[:, :-2].unflatten(1, partial.shape), real, columns)
        covered = _cover(starts, rows, shard.vocab_size)
        merged[: columns.index].masked_fill_(~covered, torch.nan)
        if columns.argmax:
            ids = integer_view(merged[columns.index])
            ids.masked_fill_(~covered, torch.iinfo(ids.dtype).max)
        return merged, real.sum().to(partial.dtype)

    return finish


def _cover(starts: Tensor, rows: Tensor, vocab_size: int | None) -> Tensor:
    """Whether shards ``[starts, starts + rows)`` tile [0, V) without gap or overlap, in any order.

    Without ``vocab_size`` V is the sum of the rows.
    """
    total = rows.sum()
    # An empty shard lies nowhere in particular: sort it behind the others.
    starts = torch.where(rows > 0, starts, total)
    order = starts.argsort(stable=True)
    rows = rows[order]
    covered = (starts[order] == rows.cumsum(0) - rows).all()
    return covered if vocab_size is None else covered & (total >= vocab_size)
