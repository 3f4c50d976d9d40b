"""Finds the active windows from the forward's partials, before any logit is projected again, and computes each entry's
share q of the mass of a skipped window.

For dX, a sample of the tokens is projected in full. An entry's share is its sum over the sampled tokens whose window is
skipped. For dW, the errors of a share add up over all tokens, and a sample would be too noisy. The shares for dW are
the softmax, within each window, of the mean logits of all tokens. dX uses them where no sampled token skips the window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.features.filter.kernels.tiles import LISTED, TILE, append_active, new_masses
from parallel_lce.kernels.arithmetic import exponential_from, finite_base, to_base
from parallel_lce.kernels.partials import WindowPartials
from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2
from parallel_lce.kernels.token_gradients import Targets

FEWEST_SAMPLED = 4
"""Fewest tokens of a sample, in row blocks of 128."""

# Consecutive tokens in a group. A sample consists of whole groups.
_GROUP = 16
# A sample takes one group in 3, 5, ... or 13. These are odd primes: other steps would sample the same few positions of
# all sequences, or micro-batches, of usual sizes. If one group in 3 is not enough, everything is projected.
_STEPS = 3, 5, 7, 11, 13

_TILE = tl.constexpr(TILE)
# Row blocks that are projected together, so that the rows of the weight they share stay in the L2 cache.
_TOGETHER = tl.constexpr(16)


class TokenSample(NamedTuple):
    """``count`` groups of 16 tokens: every ``step``-th group from ``first`` on."""

    first: int
    step: int
    count: int

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The sampled tokens' rows of ``rows``."""
        groups = rows[: len(rows) // _GROUP * _GROUP].unflatten(0, (-1, _GROUP))
        return groups[self.first :: self.step].flatten(0, 1)

    def sums(self, gradient: torch.Tensor, largest: torch.Tensor, width: int, eps: float) -> torch.Tensor:
        """``[count, C]`` fp32: each group's sums of ``|gradient [16 count, C]|``; 0 in active windows, which have
        ``width`` entries and a ``largest [row blocks, windows]`` above ``eps``."""
        sums = torch.linalg.vector_norm(gradient.unflatten(0, (-1, _GROUP)), 1, dim=1, dtype=torch.float32)
        is_active = largest.repeat_interleave(TILE // _GROUP, 0)[self.first :: self.step][: self.count] > eps
        return sums.masked_fill_(is_active.repeat_interleave(width, 1)[:, : sums.shape[1]], 0.0)


def sample_tokens(rows: int) -> TokenSample | None:
    """A sample of a gradient's ``rows`` tokens; None if it would contain more than a third of them."""
    steps = [step for step in _STEPS if step <= rows // TILE // FEWEST_SAMPLED]
    if not steps:
        return None
    step = steps[-1]
    return TokenSample(step // 2, step, -(-(rows // _GROUP - step // 2) // step))


@Relaunched
@triton.jit(do_not_specialize=["rows", "first_window", "stop"])
def lce_backward_window_masses(
    windows,
    partial,
    units,
    targets,
    largest,
    masses,
    eps,
    rows,
    first_window,
    stride,
    masses_stride,
    stop,
    WINDOW: tl.constexpr,
):
    """``stop``: the end of the last window's real entries."""
    maxima, sums = windows
    target, residual, unshared = targets
    window, block, number = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    r = block * _TILE + tl.arange(0, _TILE)
    valid = r < rows
    here = (first_window + window).to(tl.int64) * stride + r
    top = tl.load(maxima + here, mask=valid, other=-float("inf"))
    base = finite_base(tl.load(partial + r, mask=valid, other=0.0))
    sum_exp = tl.load(partial + rows + r, mask=valid, other=1.0)
    # The largest probability of the window, for each token.
    bound = exponential_from(top, base) / sum_exp
    p = tl.load(sums + here, mask=valid, other=0.0).to(tl.float32)
    # A window of only -inf has mass 0. If it also has NaN, its sum is NaN and must reach the result.
    p = tl.where(p == 0.0, 0.0, p * to_base(top, base) / sum_exp)
    # A maximum may ignore NaN, a sum does not.
    bound = tl.where(p == p, bound, float("inf"))
    unit = tl.load(units + r, mask=valid, other=0.0)
    # If the unit is 0, the token's row of G is 0.
    bound = tl.where(unit == 0.0, 0.0, tl.where(unit == unit, bound, float("inf")))
    if target is not None:
        # The target's probability is no mass. G holds 0 at an unshared target; a shared one makes the window active.
        begin = (first_window + window) * WINDOW
        target_id = tl.load(target + r, mask=valid, other=-1)
        hit = (target_id >= begin) & (target_id < begin + WINDOW) & (target_id < stop)
        logit = tl.load(partial + 2 * rows + r, mask=hit, other=0.0)
        p = tl.where(hit, tl.maximum(p - exponential_from(logit, base) / sum_exp, 0.0), p)
        is_shared = tl.load(unshared + r, mask=hit, other=1) == 0
        has_gradient = (tl.load(residual + r, mask=hit, other=0.0) != 0.0) | (unit != 0.0)
        bound = tl.where(hit & is_shared & has_gradient, float("inf"), bound)
    highest = tl.max(tl.where(bound == bound, bound, float("inf")), 0)
    tl.store(largest + block * number + window, highest)
    mass = tl.where(highest > eps, 0.0, p * unit)
    here = masses + window.to(tl.int64) * masses_stride + r
    tl.store(here, mass.to(masses.dtype.element_ty), mask=valid)


def mean_shares(mean_logits: torch.Tensor, width: int) -> torch.Tensor:
    """q ``[windows * width]`` for dW: the softmax, within each window, of ``mean_logits [C]`` fp32."""
    padded = torch.nn.functional.pad(mean_logits, (0, -len(mean_logits) % width), value=-torch.inf)
    # A token's NaN makes the mean NaN. It must not reach the rows of other tokens.
    return padded.view(-1, width).softmax(1).nan_to_num_(1 / width).flatten()


def window_masses(
    windows: WindowPartials,
    partial: torch.Tensor,
    units: torch.Tensor,
    targets: Targets | None,
    first: int,
    width: int,
    entries: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper bounds ``[row blocks, windows]`` fp32 of each window's probabilities, infinite with a shared target; and
    masses ``[windows, R]``, 0 where the bound exceeds ``eps``.

    The windows of ``width`` entries contain ``entries`` entries, and the first has the number ``first``.
    ``partial [>= 3, R]``: merged, contiguous. ``units [R]`` fp32.
    """
    rows, number = len(units), -(-entries // width)
    row_blocks = -(-rows // TILE)
    masses = new_masses(number, rows, units, dtype)
    largest = units.new_empty(row_blocks, number)
    lce_backward_window_masses.launch(
        (number, row_blocks),
        windows,
        partial,
        units,
        targets or (None, None, None),
        largest,
        masses,
        float(eps),
        rows,
        first,
        windows.max.stride(0),
        masses.stride(0),
        first * width + entries,
        WINDOW=width,
    )
    return largest, masses


@Relaunched
@triton.jit(do_not_specialize=["row_blocks", "windows"])
def lce_backward_active_windows(largest, listed, eps, row_blocks, windows, BLOCK: tl.constexpr):
    """One program lists all active windows, ``_TOGETHER`` row blocks after the other."""
    count = 0
    for start in range(0, row_blocks * windows, BLOCK):
        position = start + tl.arange(0, BLOCK)
        first = position // (windows * _TOGETHER) * _TOGETHER
        within, width = position - first * windows, tl.minimum(row_blocks - first, _TOGETHER)
        # Beyond the last one a group has no row blocks.
        window, block = within // tl.maximum(width, 1), first + within % tl.maximum(width, 1)
        bound = tl.load(largest + block * windows + window, mask=position < row_blocks * windows, other=0.0)
        count = append_active(listed + 1, count, window * row_blocks + block, bound, eps)
    tl.store(listed, count)


def list_active_windows(largest: torch.Tensor, eps: float) -> torch.Tensor:
    """The list, for :meth:`parallel_lce.kernels.product.Product.launch`, of the windows whose bound exceeds ``eps``.
    ``largest``: the bounds of :func:`window_masses`."""
    row_blocks, windows = largest.shape
    listed = largest.new_empty(1 + largest.numel(), dtype=torch.int32)
    block = min(LISTED, next_power_of_2(largest.numel()))
    lce_backward_active_windows.launch((1,), largest, listed, float(eps), row_blocks, windows, BLOCK=block)
    return listed
