"""Products with listed tiles of the gradient of the logits, ``G @ weight`` and ``G.T @ x``.

G ``[R, C]`` is dense in memory; :mod:`.tiles` lists the tiles to multiply. Each tile of the result has a list. The
longest lists come first, so that all programs end at about the same time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.features.filter.tiles import TILE, TileLists
from parallel_lce.kernels.arithmetic import add_product
from parallel_lce.kernels.device import addressable, descriptor
from parallel_lce.kernels.relaunch import Relaunched

# Hidden elements of a result's tile. Terms of the sum per step.
_WIDTH, _STEP = 256, 64
# Blocks of hidden elements that are formed together, so that the tiles of G they share stay in the L2 cache.
_TOGETHER = tl.constexpr(4)


@triton.jit
def _result_tile(number, order, blocks, hidden_blocks):
    """The block of rows, and the block of hidden elements, of the result's tile ``number``."""
    first = number // (blocks * _TOGETHER) * _TOGETHER
    width = tl.minimum(hidden_blocks - first, _TOGETHER)
    within = number % (blocks * _TOGETHER)
    return tl.load(order + within // width).to(tl.int32), first + within % width


@Relaunched
@triton.jit(do_not_specialize=["rows", "blocks", "capacity"])
def lce_backward_sparse_product(
    gradient,
    other,
    total,
    lists,
    rank_one,
    rows,
    hidden_size,
    blocks,
    capacity,
    total_stride,
    TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """``gradient`` and ``other``: TMA descriptors. ``rows``: of the result."""
    numbers, counts, order = lists
    shares, spread = rank_one
    hidden_blocks = tl.cdiv(hidden_size, WIDTH)
    block, hidden_block = _result_tile(tl.program_id(0), order, blocks, hidden_blocks)  # pyright: ignore
    r = block * TILE + tl.arange(0, TILE)
    h = hidden_block * WIDTH + tl.arange(0, WIDTH)
    in_result = (r < rows)[:, None] & (h < hidden_size)[None, :]
    pointers = total + r.to(tl.int64)[:, None] * total_stride + h[None, :]
    z = tl.zeros((TILE, WIDTH), tl.float32)
    if ADD:
        z += tl.load(pointers, mask=in_result, other=0.0)
    if shares is not None:
        share = tl.load(shares + r, mask=r < rows, other=0.0)
        of_tile = tl.load(spread + block * hidden_size + h, mask=h < hidden_size, other=0.0)
        z += share[:, None] * of_tile[None, :]
    PER_TILE: tl.constexpr = TILE // STEP
    for step in range(0, tl.load(counts + block) * PER_TILE):
        tile = tl.load(numbers + block * capacity + step // PER_TILE)
        first = tile * TILE + step % PER_TILE * STEP
        if TRANSPOSED:
            a = gradient.load([first, block * TILE]).T
        else:
            a = gradient.load([block * TILE, first])
        b = other.load([first, hidden_block * WIDTH])
        z = add_product(a, b, z)
    tl.store(pointers, z.to(total.dtype.element_ty), mask=in_result)


def multiplies(gradient: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether :func:`sparse_product` takes these operands: of 16 bits, which TMA can address, so from Hopper on. With
    hidden sizes that are no multiple of 16 the result's mask takes a predicate per element: registers spill."""
    sizes = [other.shape[1] % 16 for other in others]
    return gradient.element_size() == 2 and not any(sizes) and addressable(gradient, *others)


def sparse_product(
    total: torch.Tensor,
    gradient: torch.Tensor,
    other: torch.Tensor,
    lists: TileLists,
    *,
    transposed: bool,
    add: bool,
    rank_one: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """``total [M, D] = gradient @ other``, or ``gradient.T @ other`` if ``transposed``, over the listed tiles.

    ``gradient [R, C]``. ``other [C, D]``, or ``[R, D]``. ``lists``: one for each block of 128 rows of the result.
    ``add``: to the fp32 ``total``. ``rank_one``: shares ``[M]`` and sums ``[blocks, D]``, fp32; each of a block's rows
    also gets its share times the block's sum.
    """
    (rows, hidden_size), (blocks, capacity) = total.shape, lists.numbers.shape
    of_gradient = (_STEP, TILE) if transposed else (TILE, _STEP)
    lce_backward_sparse_product.launch(
        (blocks * -(-hidden_size // _WIDTH),),
        descriptor(gradient, *of_gradient),
        descriptor(other, _STEP, _WIDTH),
        total,
        (*lists, lists.counts.argsort(descending=True)),
        rank_one or (None, None),
        rows,
        hidden_size,
        blocks,
        capacity,
        total.stride(0),
        TRANSPOSED=transposed,
        ADD=add,
        TILE=TILE,
        WIDTH=_WIDTH,
        STEP=_STEP,
        num_warps=8,
        num_stages=3,
    )
