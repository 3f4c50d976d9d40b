"""Which windows of the gradient of the logits matter, before they are projected again, and what stands for the others.

The forward keeps the maximum and the sum of exponentials of each token's windows. So the largest probability of a
window and its mass are known, and a window without a large one is not projected. Its entries share the mass.

A sample of the tokens is projected in full. For dX entries share in proportion to their sums over the sample, of which
those tokens count whose window is skipped. In dW the error of
an entry's share adds up over all tokens, and a sample's noise is larger than what exp of the mean logit of all tokens
is off. There the shares are in proportion to that, and so are those for dX where the sample has no such token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import exponential_from, finite_base, window_shift
from parallel_lce.kernels.filter.tiles import TILE, new_masses
from parallel_lce.kernels.partials import WindowPartials
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.token_gradients import Targets

FEWEST_SAMPLED = 4
"""A sample has as many tokens as so many row blocks at least."""

# Tokens that a sample has together.
_GROUP = 16
# A sample is one in so many groups. Odd primes: others would meet sequences, or micro-batches, of usual sizes at the
# same few places. Where it would be more than one in three, everything is projected.
_STEPS = 3, 5, 7, 11, 13

_TILE = tl.constexpr(TILE)
# Row blocks that are projected together, so that what they share stays in the L2 cache.
_TOGETHER = 16


class TokenSample(NamedTuple):
    """Some of a gradient's groups of 16 tokens: ``count``, from ``first`` on, each ``step`` after the one before."""

    first: int
    step: int
    count: int

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Theirs of all ``rows``."""
        groups = rows[: len(rows) // _GROUP * _GROUP].unflatten(0, (-1, _GROUP))
        return groups[self.first :: self.step].flatten(0, 1)

    def sums(self, gradient: torch.Tensor, largest: torch.Tensor, width: int, eps: float) -> torch.Tensor:
        """``[count, C]`` fp32: of each group the sums of ``|gradient [16 count, C]|``, 0 in windows of ``width``
        entries whose ``largest [row blocks, windows]`` exceeds ``eps``."""
        sums = torch.linalg.vector_norm(gradient.unflatten(0, (-1, _GROUP)), 1, dim=1, dtype=torch.float32)
        is_active = largest.repeat_interleave(TILE // _GROUP, 0)[self.first :: self.step][: self.count] > eps
        return sums.masked_fill_(is_active.repeat_interleave(width, 1)[:, : sums.shape[1]], 0.0)


def sample_tokens(rows: int) -> TokenSample | None:
    """A sample of so many tokens; None: it would not be much less than all of them."""
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
    limits,
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
    """``stop``: after the last real entry of the last window."""
    maxima, sums, shift = windows
    target, residual, unshared = targets
    window, block, number = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    r = block * _TILE + tl.arange(0, _TILE)
    valid = r < rows
    here = (first_window + window).to(tl.int64) * stride + r
    top = tl.load(maxima + here, mask=valid, other=-float("inf"))
    base = finite_base(tl.load(partial + r, mask=valid, other=0.0))
    sum_exp = tl.load(partial + rows + r, mask=valid, other=1.0)
    # In units of the token's limit.
    bound, reference = exponential_from(top, base) / sum_exp, finite_base(top)
    if shift is not None:
        reference = window_shift(top, tl.load(shift + r, mask=valid, other=0.0))
    p = tl.load(sums + here, mask=valid, other=0.0)
    # A window of -inf alone adds nothing, but NaN beside -inf must get through.
    p = tl.where(p == 0.0, 0.0, p * exponential_from(reference, base) / sum_exp)
    # A maximum may leave out NaN, a sum does not.
    bound = tl.where(p == p, bound, float("inf"))
    factor = tl.load(limits + r, mask=valid, other=0.0)
    # A gradient of 0 has no limit.
    bound = tl.where(factor == 0.0, 0.0, tl.where(factor == factor, bound, float("inf")))
    if target is not None:
        # An unshared target has 0 in G. A shared one's gradient is in G, whatever the others are.
        begin = (first_window + window) * WINDOW
        wanted = tl.load(target + r, mask=valid, other=-1)
        hit = (wanted >= begin) & (wanted < begin + WINDOW) & (wanted < stop)
        logit = tl.load(partial + 2 * rows + r, mask=hit, other=0.0)
        p = tl.where(hit, tl.maximum(p - exponential_from(logit, base) / sum_exp, 0.0), p)
        is_shared = tl.load(unshared + r, mask=hit, other=1) == 0
        has_gradient = (tl.load(residual + r, mask=hit, other=0.0) != 0.0) | (factor != 0.0)
        bound = tl.where(hit & is_shared & has_gradient, float("inf"), bound)
    found = tl.max(tl.where(bound == bound, bound, float("inf")), 0)
    tl.store(largest + block * number + window, found)
    mass = tl.where(found > eps, 0.0, p * factor)
    here = masses + window.to(tl.int64) * masses_stride + r
    tl.store(here, mass.to(masses.dtype.element_ty), mask=valid)


def mean_shares(mean_logits: torch.Tensor, width: int) -> torch.Tensor:
    """q ``[windows * width]`` for dW: of each window the softmax of ``mean_logits [C]``, fp32."""
    padded = torch.nn.functional.pad(mean_logits, (0, -len(mean_logits) % width), value=-torch.inf)
    # A token with NaN must not reach others.
    return padded.view(-1, width).softmax(1).nan_to_num_(1 / width).flatten()


def window_masses(
    windows: WindowPartials,
    partial: torch.Tensor,
    limits: torch.Tensor,
    targets: Targets | None,
    first: int,
    width: int,
    entries: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds ``[row blocks, windows]`` fp32 of the windows' largest entries, in units of their tokens' limits, and
    masses ``[windows, R]``, 0 where a bound exceeds ``eps``: of so many ``entries`` from window ``first`` on, of
    ``width`` entries each.

    ``partial [>= 3, R]``, contiguous: the merged one. ``limits [R]`` fp32: rows of G where the probability is 1.
    """
    rows, number = len(limits), -(-entries // width)
    row_blocks = -(-rows // TILE)
    masses = new_masses(number, rows, limits, dtype)
    largest = limits.new_empty(row_blocks, number)
    lce_backward_window_masses.launch(
        (number, row_blocks),
        windows,
        partial,
        limits,
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


def list_active_windows(largest: torch.Tensor, eps: float) -> torch.Tensor:
    """The windows whose bound exceeds ``eps``, as :meth:`parallel_lce.kernels.projection.Product.launch` takes them.
    ``largest``: of :func:`window_masses`."""
    row_blocks, windows = largest.shape
    numbers = torch.arange(largest.numel(), device=largest.device).view(windows, row_blocks)
    numbers = torch.cat([some.flatten() for some in numbers.split(_TOGETHER, 1)])
    is_active = largest.t().flatten()[numbers] > eps
    active_first = is_active.to(torch.uint8).argsort(descending=True, stable=True)
    return torch.cat([is_active.sum(0, keepdim=True), numbers[active_first]]).int()
