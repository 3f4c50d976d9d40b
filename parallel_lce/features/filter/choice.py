"""Whether a backward is filtered: only where few enough tiles are active, by the counts of earlier backwards.

A product with all tiles takes as long as cuBLAS's. The search for the active tiles and the estimates of the others take
7 to 12 % of the backward, so a filter that skips fewer tiles makes it slower. How many are active depends on the model,
on the order of the vocabulary and on the rank: under tensor parallelism the frequent entries may be one rank's.

Every :data:`PERIOD`-th backward is filtered and counted. Its count, on its way to the host meanwhile, decides from
:data:`DELAY` backwards later on. By then the device has passed the copy, or has as many backwards to do. The choice
depends on counts alone, never on when they arrive, so equal trainings make equal choices.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parallel_lce.core.host_number import HostNumber
from parallel_lce.features.filter.kernels.tiles import TileLists

MOST_ACTIVE = 0.75
"""Largest share of active tiles with which a backward is filtered. On an H200, for 8192 tokens, 16384 to 65536 entries
and D=4096, the GPU takes as long as without a filter at a share of about 0.88 where the exponentials were saved, and of
0.92 where they are recomputed. The host takes longer, so a small gain of the GPU is left."""

PERIOD, DELAY = 16, 2


class Choice:
    """The choice for the backwards of one kind, on one device."""

    def __init__(self) -> None:
        self._backwards = 0
        self._filters = True
        # Of the last backward that was counted: its active tiles, and all of its tiles.
        self._active: HostNumber | None = None
        self._tiles = 0

    def begin(self, capturing: bool) -> tuple[bool, bool]:
        """Whether this backward is filtered, and whether its tiles are to be counted. One in a captured CUDA graph,
        which repeats its kernels, does as the one before."""
        if capturing:
            return self._filters, False
        turn = self._backwards % PERIOD
        self._backwards += 1
        if turn == 0:
            self._active, self._tiles = None, 0
        elif turn == DELAY and self._active is not None:
            self._filters = self._active.read() <= MOST_ACTIVE * self._tiles
        return self._filters or turn == 0, turn == 0

    def count(self, lists: TileLists) -> None:
        """Count the tiles of a slice, by the ``lists`` of all its row blocks."""
        active = lists.counts.sum()
        self._active = HostNumber(active if self._active is None else self._active.number + active)
        self._tiles += lists.numbers.numel()


_CHOICES: dict[tuple[Any, ...], Choice] = {}


def choice_for(x: Tensor, entries: int, eps: float, windows: bool) -> Choice:
    """The choice for filtered gradients of hidden states ``x [R, D]`` and ``entries`` vocabulary rows, of which active
    ``windows`` are projected again or not. Models of the same sizes share one."""
    return _CHOICES.setdefault((x.device, x.dtype, x.shape[1], entries, eps, windows), Choice())
