"""Which windows of the gradient of the logits matter, before they are projected again, and what stands for the others.

The forward keeps the maximum and the sum of exponentials of each token's windows. So the largest probability of a
window and its mass are known, and a window without a large one is not projected. Its tiles share the window's mass, and
entries share a tile's.

A sample of the tokens is projected in full. For dX entries share in proportion to their sums over the sample, of which
those tokens count whose tile is skipped (:func:`parallel_lce.kernels.filter.tiles.entry_shares`). In dW the error of an
entry's share adds up over all tokens, and a sample's noise is larger than what exp of the mean logit of all tokens is
off. There the shares are in proportion to that, and so are those that tiles have of a window's mass, and those for dX
where the sample has no such token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import exponential_from, finite_base, window_shift
from parallel_lce.kernels.filter.tiles import TILE, load_gradient, new_masses
from parallel_lce.kernels.relaunch import Relaunched, next_power_of_2

FEWEST_SAMPLED = 4
"""A sample has as many tokens as so many row blocks at least."""

# Tokens that a sample has together.
_GROUP = 16
# A sample is one in so many groups. Odd primes: others would meet sequences, or micro-batches, of usual sizes at the
# same few places. Where it would be more than one in three, everything is projected.
_STEPS = 3, 5, 7, 11, 13

_TILE, _TOKENS = tl.constexpr(TILE), tl.constexpr(_GROUP)
# Groups that a program sums one after the other, and its warps.
_SUMMED, _WARPS = 4, 2
# Row blocks that are projected together, so that what they share stays in the L2 cache; windows of a list that one
# looks at at a time.
_TOGETHER, _LISTED = 16, 1024


class TokenSample(NamedTuple):
    """Some of a gradient's groups of 16 tokens: ``count``, from ``first`` on, each ``step`` after the one before."""

    first: int
    step: int
    count: int

    def of(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Their rows of a tensor whose dimension ``dim`` has all rows."""
        groups = rows.narrow(dim, 0, rows.shape[dim] // _GROUP * _GROUP).unflatten(dim, (-1, _GROUP))
        return groups[(slice(None),) * dim + (slice(self.first, None, self.step),)].flatten(dim, dim + 1)

    def of_tiles(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of ``numbers [row blocks, T]`` those of the tiles that its groups are part of, ``[count, T]``."""
        parts = numbers[:, None].expand(-1, TILE // _GROUP, -1).flatten(0, 1)
        return parts[self.first :: self.step][: self.count].contiguous()


def sample_tokens(rows: int) -> TokenSample | None:
    """A sample of so many tokens; None: it would not be much less than all of them."""
    steps = [step for step in _STEPS if step <= rows // TILE // FEWEST_SAMPLED]
    if not steps:
        return None
    step = steps[-1]
    return TokenSample(step // 2, step, -(-(rows // _GROUP - step // 2) // step))


class WindowPartials(NamedTuple):
    """What a forward knows of its windows, ``[windows, R]`` fp32 each."""

    max: torch.Tensor
    # Relative to ``arithmetic.window_shift`` of the softmax shift, or to the window's maximum without one
    sum_exp: torch.Tensor
    # [R] fp32, or None
    softmax_shift: torch.Tensor | None

    def of_rows(self, rows: slice) -> WindowPartials:
        shift = self.softmax_shift
        return WindowPartials(self.max[:, rows], self.sum_exp[:, rows], shift if shift is None else shift[rows])


class RowTerms(NamedTuple):
    """What turns the tokens' probabilities into rows of G, fp32; None: 1. Targets: as in ``targets.add_targets``."""

    # [>= 3, R], contiguous: the merged partial
    partial: torch.Tensor
    # [R]
    alpha: torch.Tensor
    token_scale: torch.Tensor | None
    # 0-dimensional
    fp16_scale: torch.Tensor | None
    # [R] int64, fp32 and uint8; None without targets
    target: torch.Tensor | None
    residual: torch.Tensor | None
    unshared: torch.Tensor | None


class MeanShares(NamedTuple):
    """How masses are spread in proportion to exp of the mean logit, fp32."""

    # [128 T]: q for dW, of the entries of each tile
    of_entries: torch.Tensor
    # [T]: logarithms of what the tiles have
    of_tiles: torch.Tensor


class Places(NamedTuple):
    """Some windows of a shard, of ``entries`` in all: ``first`` is the number of the first one."""

    first: int
    entries: int
    # entries of a window, a multiple of 128
    window: int

    @property
    def tiles(self) -> int:
        return -(-self.entries // TILE)


@Relaunched
@triton.jit(do_not_specialize=["rows", "groups"])
def lce_backward_sample_sums(
    gradient, inverse_limits, sums, rows, entries, stride, groups, MASKED: tl.constexpr, GROUPS: tl.constexpr
):
    """A block of entries in ``GROUPS`` groups."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    first = tl.program_id(1) * GROUPS
    for group in range(first, tl.minimum(first + GROUPS, groups)):
        r = group * _TOKENS + tl.arange(0, _TOKENS)
        g = load_gradient(gradient, r, c, rows, entries, stride, MASKED)
        inverse = tl.load(inverse_limits + r, mask=r < rows, other=0.0)
        tl.store(sums + group * (tiles.to(tl.int64) * _TILE) + c, tl.sum(tl.abs(g) * inverse[:, None], 0))


@Relaunched
@triton.jit
def lce_backward_mean_shares(logits, shares, of_tiles, entries, scale):
    tile = tl.program_id(0)
    c = tile * _TILE + tl.arange(0, _TILE)
    inside = c < entries
    z = tl.where(inside, tl.load(logits + c, mask=inside, other=0.0) * scale, -float("inf"))
    top = finite_base(tl.max(z, 0))
    expected = tl.exp(z - top)
    whole = tl.sum(expected, 0)
    # A token with NaN must not reach others.
    is_usable = (whole > 0.0) & (whole < float("inf"))
    even = inside.to(tl.float32) / tl.minimum(entries - tile * _TILE, _TILE)
    tl.store(shares + c, tl.where(is_usable, expected / whole, even))
    tl.store(of_tiles + tile, tl.where(is_usable, top + tl.log(tl.where(is_usable, whole, 1.0)), -float("inf")))


@triton.jit
def _parts_of_window(of_tiles, window, tiles, TILES: tl.constexpr):
    """``[TILES]``: of a window's mass, what its tiles have."""
    t = window * TILES + tl.arange(0, TILES)
    logits = tl.load(of_tiles + t, mask=t < tiles, other=-float("inf"))
    expected = tl.exp(logits - finite_base(tl.max(logits, 0)))
    whole, even = tl.sum(expected, 0), (t < tiles).to(tl.float32) / tl.minimum(tiles - window * TILES, TILES)
    return tl.where(whole > 0.0, expected / whole, even)


@Relaunched
@triton.jit(do_not_specialize=["rows", "first_window", "stop"])
def lce_backward_window_masses(
    maxima,
    sums,
    shift,
    terms,
    of_tiles,
    largest,
    masses,
    eps,
    rows,
    tiles,
    first_window,
    stride,
    masses_stride,
    scale,
    stop,
    WINDOW: tl.constexpr,
):
    """``stop``: after the last real entry of the last window."""
    window, block = tl.program_id(0), tl.program_id(1)
    r = block * _TILE + tl.arange(0, _TILE)
    valid = r < rows
    here = (first_window + window).to(tl.int64) * stride + r
    top = tl.load(maxima + here, mask=valid, other=-float("inf"))
    base = finite_base(tl.load(terms.partial + r, mask=valid, other=0.0))
    sum_exp = tl.load(terms.partial + rows + r, mask=valid, other=1.0)
    # In units of the token's limit.
    bound, reference = exponential_from(top, base) / sum_exp, finite_base(top)
    if shift is not None:
        reference = window_shift(top, tl.load(shift + r, mask=valid, other=0.0))
    p = tl.load(sums + here, mask=valid, other=0.0)
    # A window of -inf alone adds nothing, but NaN beside -inf must get through.
    p = tl.where(p == 0.0, 0.0, p * exponential_from(reference, base) / sum_exp)
    # A maximum may leave out NaN, a sum does not.
    bound = tl.where(p == p, bound, float("inf"))
    factor = tl.load(terms.alpha + r, mask=valid, other=0.0) * scale
    if terms.token_scale is not None:
        factor *= tl.load(terms.token_scale + r, mask=valid, other=0.0)
    if terms.fp16_scale is not None:
        factor *= tl.load(terms.fp16_scale)
    # A gradient of 0 has no limit.
    bound = tl.where(factor == 0.0, 0.0, tl.where(factor == factor, bound, float("inf")))
    if terms.target is not None:
        # An unshared target has 0 in G. A shared one's gradient is in G, whatever the others are.
        begin = (first_window + window) * WINDOW
        wanted = tl.load(terms.target + r, mask=valid, other=-1)
        hit = (wanted >= begin) & (wanted < begin + WINDOW) & (wanted < stop)
        logit = tl.load(terms.partial + 2 * rows + r, mask=hit, other=0.0)
        p = tl.where(hit, tl.maximum(p - exponential_from(logit, base) / sum_exp, 0.0), p)
        is_shared = tl.load(terms.unshared + r, mask=hit, other=1) == 0
        has_gradient = (tl.load(terms.residual + r, mask=hit, other=0.0) != 0.0) | (factor != 0.0)
        bound = tl.where(hit & is_shared & has_gradient, float("inf"), bound)
    found = tl.max(tl.where(bound == bound, bound, float("inf")), 0)
    TILES: tl.constexpr = WINDOW // _TILE
    t = window * TILES + tl.arange(0, TILES)
    tl.store(largest + block * tiles + t, tl.zeros((TILES,), tl.float32) + found, mask=t < tiles)
    mass = tl.where(found > eps, 0.0, p * factor)
    part = _parts_of_window(of_tiles, window, tiles, TILES)
    pointers = masses + t.to(tl.int64)[:, None] * masses_stride + r[None, :]
    inside = (t < tiles)[:, None] & valid[None, :]
    tl.store(pointers, (part[:, None] * mass[None, :]).to(masses.dtype.element_ty), mask=inside)


@Relaunched
@triton.jit(do_not_specialize=["row_blocks", "windows"])
def lce_backward_list_windows(
    largest, listed, eps, row_blocks, windows, tiles, TILES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr
):
    found = 0
    of_group = TOGETHER * windows
    for start in range(0, tl.cdiv(row_blocks, TOGETHER) * of_group, BLOCK):
        place = start + tl.arange(0, BLOCK)
        window = place % of_group // TOGETHER
        block = place // of_group * TOGETHER + place % TOGETHER
        bound = tl.load(largest + block * tiles + window * TILES, mask=block < row_blocks, other=0.0)
        is_active = (bound > eps).to(tl.int32)
        position = found + tl.cumsum(is_active, 0)
        tl.store(listed + position, window * row_blocks + block, mask=is_active != 0)
        found += tl.sum(is_active, 0)
    tl.store(listed, found)


def sample_sums(gradient: torch.Tensor, inverse_limits: torch.Tensor) -> torch.Tensor:
    """``[groups, 128 T]`` fp32: sums over the tokens of each group of ``|gradient [R, C]|``, in units of their limits,
    of a sample. ``gradient`` and ``inverse_limits``: as for
    :func:`parallel_lce.kernels.filter.tiles.find_active_tiles`."""
    (rows, entries), tiles = gradient.shape, -(-gradient.shape[1] // TILE)
    groups = -(-rows // _GROUP)
    sums = gradient.new_empty(groups, tiles * TILE, dtype=torch.float32)
    lce_backward_sample_sums.launch(
        (tiles, -(-groups // _SUMMED)),
        gradient,
        inverse_limits,
        sums,
        rows,
        entries,
        gradient.stride(0),
        groups,
        MASKED=entries % TILE != 0,
        GROUPS=_SUMMED,
        num_warps=_WARPS,
    )
    return sums


def mean_shares(mean_logits: torch.Tensor, scale: float) -> MeanShares:
    """By the softmax of ``scale * mean_logits [C]``, fp32."""
    entries = len(mean_logits)
    tiles = -(-entries // TILE)
    shares = MeanShares(mean_logits.new_empty(tiles * TILE), mean_logits.new_empty(tiles))
    lce_backward_mean_shares.launch((tiles,), mean_logits, *shares, entries, float(scale))
    return shares


def window_masses(
    windows: WindowPartials,
    terms: RowTerms,
    places: Places,
    scale: float,
    of_tiles: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds ``[row blocks, T]`` fp32 of the largest entries of tiles, in units of their tokens' limits: those of their
    windows. And the masses ``[T, R]`` of the tiles, 0 where a bound exceeds ``eps``. ``of_tiles [T]``: of
    :func:`mean_shares`."""
    rows, (first, entries, window) = len(terms.alpha), places
    row_blocks = -(-rows // TILE)
    masses = new_masses(places.tiles, rows, of_tiles, dtype)
    largest = windows.max.new_empty(row_blocks, places.tiles)
    lce_backward_window_masses.launch(
        (-(-entries // window), row_blocks),
        windows.max,
        windows.sum_exp,
        windows.softmax_shift,
        terms,
        of_tiles,
        largest,
        masses,
        float(eps),
        rows,
        places.tiles,
        first,
        windows.max.stride(0),
        masses.stride(0),
        float(scale),
        first * window + entries,
        WINDOW=window,
    )
    return largest, masses


def list_active_windows(largest: torch.Tensor, window: int, eps: float) -> torch.Tensor:
    """The windows of so many entries whose bound exceeds ``eps``, as
    :meth:`parallel_lce.kernels.projection.Product.launch` takes them. ``largest``: of :func:`window_masses`."""
    (row_blocks, tiles), per_window = largest.shape, window // TILE
    windows = -(-tiles // per_window)
    listed = largest.new_empty(1 + row_blocks * windows, dtype=torch.int32)
    together = min(_TOGETHER, next_power_of_2(row_blocks))
    lce_backward_list_windows.launch(
        (1,),
        largest,
        listed,
        float(eps),
        row_blocks,
        windows,
        tiles,
        TILES=per_window,
        TOGETHER=together,
        BLOCK=_LISTED,
    )
    return listed
