"""Which slices of G the triton backend multiplies by their active tiles alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.triton_backward import Piece, Slice
from parallel_lce.core.memory import HostNumber
from parallel_lce.features.filter.tiles import FilteredSlice, multiplies

# Measured on an H200. Fewest flops of a slice's two products that are filtered. The search for the active tiles of a
# smaller slice takes the host longer than exact products take the GPU.
SMALLEST_FILTERED = 1e12
# Bytes that a recomputed slice may take, so that its products are large enough.
SLICE_BYTES = 256 << 20

# The search for active tiles takes as long as the products take over this many of the D hidden elements: with D=4096 a
# GPU takes as long as without a filter where a share of 0.88 is active, with D=1024 where half is.
SEARCHED = 512
# Largest share of active tiles with which a backward is filtered, whatever D: the host takes longer, too.
MOST_ACTIVE = 0.75

# An odd prime: usual numbers of micro-batches, and of losses that take turns, are all counted.
PERIOD, DELAY = 17, 2


def is_large(entries: int, hidden_size: int) -> bool:
    """Whether a slice of so many ``entries`` of G is worth the search for its active tiles."""
    return 4 * entries * hidden_size >= SMALLEST_FILTERED


class Choice:
    """Whether the calls of one kind are filtered: only where few enough tiles are active.

    How many are active depends on the model, on the order of the vocabulary and on the rank. Every ``PERIOD``-th call
    is filtered and counted, and its count decides from ``DELAY`` calls later on. By then the device has passed the copy
    to the host, or has as many calls to do. The choice depends on counts alone, never on when they arrive: equal
    trainings make equal choices.
    """

    def __init__(self, most_active: float) -> None:
        self._calls, self._filters, self._most_active = 0, True, most_active
        # Of each slice of the call that is counted: its active tiles, and all of its tiles.
        self._counts: list[tuple[HostNumber, int]] = []

    def begin(self) -> tuple[bool, list[tuple[HostNumber, int]] | None]:
        """Whether this call's backward is filtered, and where its tiles are to be counted, if they are."""
        turn = self._calls % PERIOD
        self._calls += 1
        if turn == 0:
            self._counts = []
            return True, self._counts
        if turn == DELAY and self._counts:
            active = sum([number.read() for number, _ in self._counts])
            self._filters = active <= self._most_active * sum([tiles for _, tiles in self._counts])
        return self._filters, None


@functools.lru_cache(1024)
def choice_for(hidden_size: int, *kind: Any) -> Choice:
    """The choice for a hidden size, device, dtype, number of real rows and filter: models of the same sizes share one,
    and so do filters of nearly the same size."""
    return Choice(most_active=min(MOST_ACTIVE, 1 - SEARCHED / hidden_size))


class CallFilter:
    """The :attr:`parallel_lce.backends.interface.BackwardTask.filter` of one call's backwards."""

    def __init__(self, eps: float) -> None:
        self._eps = eps
        # Chosen with the first slice that is worth it: whether the call is filtered, and where its tiles are counted.
        self._filters: bool | None = None
        self._counts: list[tuple[HostNumber, int]] | None = None

    def __call__(self, piece: Piece, vocab_slice: Slice) -> Slice:
        x, weight, real, gradient = piece.x, piece.projection.weight, piece.projection.real_rows, vocab_slice.gradient
        if not (is_large(gradient.numel(), x.shape[1]) and multiplies(gradient, x, weight)):
            return vocab_slice
        # A captured CUDA graph repeats its kernels. There every backward is filtered, and none is counted.
        captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._filters is None:
            kind = weight.shape[1], weight.device, weight.dtype, real, round(math.log2(self._eps))
            self._filters, self._counts = (True, None) if captured else choice_for(*kind).begin()
        if not self._filters:
            return vocab_slice
        filtered = FilteredSlice(vocab_slice, _inverse_units(piece, vocab_slice.dx_factor), self._eps)
        if self._counts is not None and not captured:
            numbers, counts = filtered.of_rows
            self._counts.append((HostNumber(counts.sum()), numbers.numel()))
        return filtered


def _inverse_units(piece: Piece, dx_factor: Tensor | None) -> Tensor:
    """``[R]`` fp32: an element of G times this number is a probability. A token's unit is its gradient of a logit whose
    probability is 1, with the factors of its row of G. ``dx_factor [R]``: the factors with which G's rows enter dX;
    None: 1. Factor 0 gives 0. Unit 0 gives the largest fp32 number."""
    logit_map = piece.projection.logit_map
    units = piece.terms.coefficients.alpha * logit_map.scale
    for factor in (logit_map.token_scale, piece.terms.fp16_scale):
        if factor is not None:
            units *= factor
    inverse = units.reciprocal() if dx_factor is None else dx_factor / units
    # Finite, so that 0 times it is 0.
    return inverse.nan_to_num_()
