"""Whether the backward of a call is filtered: only where few enough tiles are active, by the counts of earlier calls.

A product with all tiles takes as long as cuBLAS's. The search for the active tiles and the estimates of the others take
7 to 12 % of the backward, so a filter that skips fewer tiles makes it slower. How many are active depends on the model,
on the order of the vocabulary and on the rank: under tensor parallelism the frequent entries may be one rank's.

Every :data:`PERIOD`-th call is filtered and counted. Its count, on its way to the host meanwhile, decides from
:data:`DELAY` calls later on. By then the device has passed the copy, or has as many calls to do. The choice depends on
counts alone, never on when they arrive, so equal trainings make equal choices. One that is resumed counts anew.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from parallel_lce.core.memory import HostNumber
from parallel_lce.features.filter.kernels.tiles import TileLists

MOST_ACTIVE = 0.75
"""Largest share of active tiles with which a backward is filtered. On an H200, for 8192 tokens, 16384 to 65536 entries
and D=4096, the GPU takes as long as without a filter at a share of about 0.88 where the exponentials were saved, and of
0.92 where they are recomputed. The host takes longer, so a small gain of the GPU is left."""

# An odd prime: usual numbers of micro-batches, and of losses that take turns, are all counted.
PERIOD, DELAY = 17, 2


class Choice:
    """The choice for the calls of one kind, on one device."""

    def __init__(self) -> None:
        self._calls = 0
        self._filters = True
        # Of the last call that was counted: its active tiles, on the device, then on their way; and all of its tiles.
        self._active: Tensor | HostNumber | None = None
        self._written: torch.Event | None = None
        self._tiles = 0

    def begin(self) -> tuple[bool, bool]:
        """Whether this call's backward is filtered, and whether its tiles are to be counted."""
        turn = self._calls % PERIOD
        self._calls += 1
        if turn == 0:
            self._active, self._tiles = None, 0
        elif isinstance(self._active, Tensor):
            self._active = HostNumber(self._active, self._written)
        if turn == DELAY and isinstance(self._active, HostNumber):
            self._filters, self._active = self._active.read() <= MOST_ACTIVE * self._tiles, None
        return self._filters or turn == 0, turn == 0

    def count(self, lists: TileLists) -> None:
        """Count the tiles of a slice, by the ``lists`` of all its row blocks. A later backward of a call whose count is
        on its way to the host is not counted."""
        if isinstance(self._active, HostNumber) or _is_captured(lists.counts):
            return
        active = lists.counts.sum()
        self._active = self._active + active if isinstance(self._active, Tensor) else active
        self._written = torch.cuda.current_stream(active.device).record_event() if active.is_cuda else None
        self._tiles += lists.numbers.numel()


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(1024)
def _choice_of(*_: Any) -> Choice:
    return Choice()


def choice_for(x: Tensor, entries: int, eps: float, windows: bool) -> Choice | None:
    """The choice for filtered gradients of hidden states ``x [R, D]`` and ``entries`` vocabulary rows, of which active
    ``windows`` are projected again or not. Models of the same sizes share one, and so do filters of nearly the same
    size. None in a captured CUDA graph, which repeats its kernels: there every backward is filtered."""
    if _is_captured(x):
        return None
    return _choice_of(x.device, x.dtype, x.shape[1], entries, round(math.log2(eps)), windows)


def forget() -> None:
    """Begin to count anew."""
    _choice_of.cache_clear()
