"""One id per token, drawn from the softmax of its logits: the argument ``sample_seed`` of
:func:`parallel_lce.token_statistics`.

Inverse transform sampling: the entries of a token lie side by side on a line, in the order of their ids. Each is as
long as its exponential. A uniform number u in (0, 1) marks the draw point ``u * sum of exponentials``, and the id drawn
is the entry at that draw point. u depends on the seed and on the token's position alone. So the id is the same, except
where a rounding decides, for every number of ranks, split of the vocabulary, budget and backend. No entry needs a
random number of its own.

Every rank knows the sums of all ranks, and from them which tokens' draw points lie in its shard. It finds the entries
there, in a second pass over the blocks: ``torch_part`` projects each block again, ``triton_part`` one tile per draw
point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.backends import part
from parallel_lce.backends.interface import ForwardTask
from parallel_lce.call.seam import Feature, ForwardPass, Shapes
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import MAX, SUM_EXP, Merged
from parallel_lce.core.plan import Block

# SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Bits of a uniform number. With 48, u * sum < sum in fp64.
_BITS = 48


class Draws(Feature):
    results = ("sampled_id",)
    needs_position = True

    def __init__(self, options: Options, tensors: Tensors) -> None:
        assert options.sample_seed is not None  # asked
        self._seed, self._position = options.sample_seed, tensors.position
        # By block: what the backend keeps of it until the ids are drawn.
        self._kept: dict[Block, list] = {}

    @classmethod
    def asked(cls, options: Options, tensors: Tensors) -> bool:
        return options.sample_seed is not None

    @classmethod
    def shapes(cls, options: Options, tensors: Tensors, tokens: int) -> Shapes:
        return {"sampled_id": ((tokens,), torch.int64)}

    def before_block(self, call: Any, task: ForwardTask, block: Block, save: bool) -> ForwardTask:
        return task._replace(window_partials=self._kept.setdefault(block, []))

    def merged(self, forward: ForwardPass, messages: Tensor) -> None:
        """Collectives: with several blocks, under sequence parallelism, the all-gathers of hidden states again; then on
        several ranks one all-reduce of N int64."""
        call, partials = forward.call, forward.partials
        layout, of_backend, position = call.layout, part(__name__, call.backend), self._position
        if position is None:
            position = torch.arange(call.shape.numel(), device=partials.local.device)
        draw_point, owned = uniforms(self._seed, position.flatten()), None
        if layout.ranks > 1:
            draw_point, owned = _in_shard(draw_point, *partials.of_ranks(), layout.rank)
        ids = torch.empty_like(draw_point, dtype=torch.int64)
        for block, x, projection in forward.blocks():
            local = layout.take(partials.local[: SUM_EXP + 1], block).contiguous()
            where = layout.take(draw_point, block), layout.take(owned, block)
            layout.put(ids, block, of_backend.entries_at(projection, x, self._kept.pop(block), local, *where))
        if owned is not None:
            ids = ids.masked_fill(~owned, -1)
            work = dist.all_reduce(ids, dist.ReduceOp.MAX, group=layout.group, async_op=True)
            assert work is not None  # None only on a rank outside the group
            work.wait()
        self._ids = ids

    def outputs(self, call: Any, merged: Merged, statistics: Mapping[str, Any]) -> Mapping[str, Tensor]:
        ids = self._ids.where(statistics["lse"].isfinite(), -1)
        del self._ids
        return {"sampled_id": ids}


def uniforms(seed: int, positions: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), fp64, of the tokens at these ``positions`` int64: SplitMix64 as a counter-based
    generator, whose counters begin at a number that depends on the ``seed``."""
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


def _in_shard(uniform: Tensor, partials: Tensor, starts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Each token's draw point in this rank's shard, in (0, 1), and whether it lies there ``[N]``.

    ``partials [P, >= 2, N]``: of all ranks. ``starts [P]``: the shards' first ids. Every rank computes the same ends,
    so each draw point lies in one shard."""
    maxima, sums = partials[:, MAX].double(), partials[:, SUM_EXP].double()
    top = maxima.amax(0)
    order = starts.argsort(stable=True)
    ends = (sums * (maxima - top).exp()).masked_fill(maxima == -torch.inf, 0.0)[order].cumsum(0)
    draw_point = uniform * ends[-1]
    # The number of this rank's shard in the order of ids.
    own = (order == rank).long().argmax(0, keepdim=True)
    end = ends.index_select(0, own)[0]
    before = ends.index_select(0, (own - 1).clamp(min=0))[0].where(own > 0, 0.0)
    within = ((draw_point - before) / (end - before)).clamp(2.0**-_BITS, 1 - 2.0**-_BITS)
    return within, (ends <= draw_point).sum(0) == own
