"""How a window's mass is shared where the window is not projected.

Tiles share a window's mass, and entries a tile's (:mod:`parallel_lce.kernels.active_tiles`). For dX entries share in
proportion to their sums over a sample of the tokens, of which those count whose tile is skipped
(:func:`parallel_lce.kernels.active_tiles.entry_shares`). In dW the error of an entry's share adds up over all tokens,
and a sample's noise is larger than what exp of the mean logit of all tokens is off. There the shares are in proportion
to that, and so are those that tiles have of a window's mass, and those for dX where the sample has no such token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import finite_base
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.tile_scan import TILE, ScannedTiles, new_masses

_TILE = tl.constexpr(TILE)
# Rows whose masses are shared at a time.
_SHARED = 64


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
def parts_of_window(of_tiles, window, tiles, TILES: tl.constexpr):
    """``[TILES]``: of a window's mass, what its tiles have."""
    t = window * TILES + tl.arange(0, TILES)
    logits = tl.load(of_tiles + t, mask=t < tiles, other=-float("inf"))
    expected = tl.exp(logits - finite_base(tl.max(logits, 0)))
    whole, even = tl.sum(expected, 0), (t < tiles).to(tl.float32) / tl.minimum(tiles - window * TILES, TILES)
    return tl.where(whole > 0.0, expected / whole, even)


@Relaunched
@triton.jit(do_not_specialize=["rows", "tiles"])
def lce_backward_share_masses(
    of_tiles,
    sketch,
    masses,
    sketched,
    shared_masses,
    shared_sketched,
    rows,
    entries,
    tiles,
    masses_stride,
    sketch_stride,
    sketched_stride,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    window, r = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    parts, number = parts_of_window(of_tiles, window, tiles, TILES), tl.arange(0, TILES)
    first = (window * TILES).to(tl.int64)
    whole = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TILES):
        inside = (r < rows) & (first + i < tiles)
        whole += tl.load(masses + (first + i) * masses_stride + r, mask=inside, other=0.0).to(tl.float32)
    k = tl.arange(0, COLUMNS)
    for i in tl.static_range(TILES):
        tile, inside = first + i, (r < rows) & (first + i < tiles)
        c = tile * _TILE + tl.arange(0, _TILE)
        b = tl.load(sketch + k[:, None] * sketch_stride + c[None, :], mask=(c < entries)[None, :], other=0.0)
        plain = tl.sum(b, 1) / tl.maximum(tl.minimum(entries - tile * _TILE, _TILE), 1)
        place = tile * masses_stride + r
        own = tl.load(masses + place, mask=inside, other=0.0).to(tl.float32)
        given = whole * tl.sum(tl.where(number == i, parts, 0.0), 0)
        tl.store(shared_masses + place, given.to(masses.dtype.element_ty), mask=inside)
        place = tile * sketched_stride + r[:, None] * COLUMNS + k[None, :]
        a = tl.load(sketched + place, mask=inside[:, None], other=0.0).to(tl.float32)
        a += (own - given)[:, None] * plain[None, :]
        tl.store(shared_sketched + place, a.to(sketched.dtype.element_ty), mask=inside[:, None])


class MeanShares(NamedTuple):
    """How masses are spread in proportion to exp of the mean logit, fp32."""

    # [128 T]: q for dW, of the entries of each tile
    of_entries: torch.Tensor
    # [T]: logarithms of what the tiles have
    of_tiles: torch.Tensor


def mean_shares(mean_logits: torch.Tensor, scale: float) -> MeanShares:
    """By the softmax of ``scale * mean_logits [C]``, fp32."""
    entries = len(mean_logits)
    tiles = -(-entries // TILE)
    shares = MeanShares(mean_logits.new_empty(tiles * TILE), mean_logits.new_empty(tiles))
    lce_backward_mean_shares.launch((tiles,), mean_logits, *shares, entries, float(scale))
    return shares


def share_masses(scanned: ScannedTiles, of_tiles: torch.Tensor, sketch: torch.Tensor, window: int) -> ScannedTiles:
    """With each window's mass as its tiles share it, instead of the tiles' own: as in
    :func:`parallel_lce.kernels.active_windows.window_masses`. ``scanned`` has the products of ``sketch [8, C]``;
    ``window``: its entries."""
    assert scanned.sketched is not None
    (tiles, rows), (columns, entries) = scanned.masses.shape, sketch.shape
    if window == TILE:
        return scanned
    masses = new_masses(tiles, rows, scanned.masses, scanned.masses.dtype)
    shared = scanned._replace(masses=masses, sketched=torch.empty_like(scanned.sketched))
    lce_backward_share_masses.launch(
        (-(-entries // window), -(-rows // _SHARED)),
        of_tiles,
        sketch,
        scanned.masses,
        scanned.sketched,
        shared.masses,
        shared.sketched,
        rows,
        entries,
        tiles,
        masses.stride(0),
        sketch.stride(0),
        scanned.sketched.stride(0),
        TILES=window // TILE,
        COLUMNS=columns,
        BLOCK=_SHARED,
    )
    return shared
