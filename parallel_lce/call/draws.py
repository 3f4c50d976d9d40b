"""One id per token, drawn from the softmax of its logits by inverse transform sampling.

The entries of a token lie side by side on a line, in the order of their ids. Each is as long as its exponential. A
uniform number u in (0, 1) marks the place ``u * sum of exponentials``, and the id drawn is the entry at that place. u
depends on the seed and on the token's position alone. So the id is the same, up to the rounding of logits, for every
number of ranks, split of the vocabulary, budget and backend. No entry needs a random number of its own.

Every rank knows the sums of all ranks, and from them which tokens' places lie in its shard. The backend finds the
entries there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.backends.interface import Backend, Projection
from parallel_lce.core.collectives import Layout, PartialsGather
from parallel_lce.core.partials import MAX, SUM_EXP
from parallel_lce.core.plan import Block

# SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Bits of a uniform number. With 48, u * sum < sum in fp64.
_BITS = 48


def uniforms(seed: int, positions: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), fp64, of the tokens at these ``positions`` int64: SplitMix64 as a counter-based
    generator, whose counters begin at a place that depends on the ``seed``."""
    start = _mixed_number(_mixed_number(seed) + _STEP)
    x = positions * _signed(_STEP) + _signed(start)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    x = _shifted(x ^ _shifted(x, 31), 64 - _BITS)
    return (x.double() + 0.5) * 2.0**-_BITS


def _shifted(x: Tensor, bits: int) -> Tensor:
    """The 64 bits of x, shifted to the right without their sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The integer of 64 bits with a sign that has the bits of ``number``."""
    return (number + 2**63) % 2**64 - 2**63


def _mixed_number(x: int) -> int:
    x = (x ^ x >> 30) * _FIRST % 2**64
    x = (x ^ x >> 27) * _SECOND % 2**64
    return x ^ x >> 31


class _Kept(NamedTuple):
    """A block that was projected."""

    block: Block
    projection: Projection
    # [R, D]
    x: Tensor
    # What the backend keeps of its windows, to find a place without projecting all of them again.
    windows: list[Any]


class Draws:
    """The draws of a call with N ``tokens``. It keeps each block's hidden states until the partials of all ranks are
    known. ``uniform [N]``: None for those of the seed and of positions 0 to N - 1."""

    def __init__(self, seed: int, uniform: Tensor | None, tokens: int, backend: Backend, layout: Layout) -> None:
        self._seed, self._uniform, self._tokens = seed, uniform, tokens
        self._backend, self._layout = backend, layout
        self._kept: list[_Kept] = []

    def keep(self, block: Block, projection: Projection, x: Tensor) -> list[Any]:
        """Called before a block is projected. The backend's forward adds to the list that is returned."""
        self._kept.append(_Kept(block, projection, x, []))
        return self._kept[-1].windows

    def ids(self, partials: PartialsGather) -> Tensor:
        """The ids ``[N]`` int64, after the gather of ``partials``. On several ranks one all-reduce of N int64."""
        layout, place, owned = self._layout, self._uniform, None
        if place is None:
            # Only now, so that the host starts the projection first.
            place = uniforms(self._seed, torch.arange(self._tokens, device=partials.local.device))
        if layout.ranks > 1:
            place, owned = _in_shard(place, *partials.of_ranks(), layout.rank)
        ids = torch.empty_like(place, dtype=torch.int64)
        for block, projection, x, windows in self._kept:
            local = layout.take(partials.local[: SUM_EXP + 1], block).contiguous()
            of_block = layout.take(place, block), layout.take(owned, block)
            layout.put(ids, block, self._backend.sampled_ids(projection, x, windows, local, *of_block))
        if owned is not None:
            ids.masked_fill_(~owned, -1)
            work = dist.all_reduce(ids, dist.ReduceOp.MAX, group=layout.group, async_op=True)
            assert work is not None  # None only on a rank outside the group
            work.wait()
        return ids


def _in_shard(uniform: Tensor, partials: Tensor, starts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Each token's place in this rank's shard, in (0, 1), and whether it lies there ``[N]``.

    ``partials [P, >= 2, N]``: of all ranks. ``starts [P]``: the shards' first ids. Every rank computes the same ends,
    so each place lies in one shard."""
    maxima, sums = partials[:, MAX].double(), partials[:, SUM_EXP].double()
    top = maxima.amax(0)
    order = starts.argsort(stable=True)
    ends = (sums * (maxima - top).exp()).masked_fill(maxima == -torch.inf, 0.0)[order].cumsum(0)
    place = uniform * ends[-1]
    # The number of this rank's shard in the order of ids.
    own = (order == rank).long().argmax(0, keepdim=True)
    end = ends.index_select(0, own)[0]
    before = ends.index_select(0, (own - 1).clamp(min=0))[0].where(own > 0, 0.0)
    within = ((place - before) / (end - before)).clamp(2.0**-_BITS, 1 - 2.0**-_BITS)
    return within, (ends <= place).sum(0) == own
