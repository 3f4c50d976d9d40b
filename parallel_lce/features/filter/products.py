"""Products with listed tiles of the gradient of the logits, ``G @ weight`` and ``G.T @ x``.

G ``[R, C]`` is dense in memory; :mod:`.tiles` lists the tiles to multiply. Each tile of the result has a list. The
longest lists come first, so that all programs end at about the same time. Operands are loaded by TMA where it can
address them and hidden sizes are multiples of 16, else by pointers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.features.filter.tiles import TILE, TileLists
from parallel_lce.kernels.arithmetic import add_product
from parallel_lce.kernels.device import addressable, descriptor
from parallel_lce.kernels.relaunch import Relaunched

# Hidden elements of a result's tile, terms of the sum per step: with loads by pointers, and by TMA.
_POINTERS, _TMA = (64, 32), (256, 64)
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
@triton.jit(do_not_specialize=["rows", "summed", "blocks", "capacity"])
def lce_backward_sparse_product(
    gradient,
    other,
    total,
    lists,
    rank_one,
    rows,
    summed,
    hidden_size,
    blocks,
    capacity,
    gradient_stride,
    other_stride,
    total_stride,
    TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """``gradient`` and ``other``: TMA descriptors or pointers. ``rows``: of the result. ``summed``: terms of the full
    sums."""
    numbers, counts, order = lists
    shares, spread = rank_one
    hidden_blocks = tl.cdiv(hidden_size, BLOCK_N)
    block, hidden_block = _result_tile(tl.program_id(0), order, blocks, hidden_blocks)  # pyright: ignore
    r = block * TILE + tl.arange(0, TILE)
    h = hidden_block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_result = (r < rows)[:, None] & (h < hidden_size)[None, :]
    pointers = total + r.to(tl.int64)[:, None] * total_stride + h[None, :]
    z = tl.zeros((TILE, BLOCK_N), tl.float32)
    if ADD:
        z += tl.load(pointers, mask=in_result, other=0.0)
    if shares is not None:
        share = tl.load(shares + r, mask=r < rows, other=0.0)
        of_tile = tl.load(spread + block * hidden_size + h, mask=h < hidden_size, other=0.0)
        z += share[:, None] * of_tile[None, :]
    PER_TILE: tl.constexpr = TILE // BLOCK_K
    for step in range(0, tl.load(counts + block) * PER_TILE):
        tile = tl.load(numbers + block * capacity + step // PER_TILE)
        first = tile * TILE + step % PER_TILE * BLOCK_K
        if TMA:
            if TRANSPOSED:
                a = gradient.load([first, block * TILE]).T
            else:
                a = gradient.load([block * TILE, first])
            b = other.load([first, hidden_block * BLOCK_N])
        else:
            k = first + tl.arange(0, BLOCK_K)
            inside = (r < rows)[:, None] & (k < summed)[None, :]
            if TRANSPOSED:
                offsets = k.to(tl.int64)[None, :] * gradient_stride + r[:, None]
            else:
                offsets = r.to(tl.int64)[:, None] * gradient_stride + k[None, :]
            a = tl.load(gradient + offsets, mask=inside, other=0.0)
            inside = (k < summed)[:, None] & (h < hidden_size)[None, :]
            b = tl.load(other + k.to(tl.int64)[:, None] * other_stride + h[None, :], mask=inside, other=0.0)
        z = add_product(a, b, z)
    tl.store(pointers, z.to(total.dtype.element_ty), mask=in_result)


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

    ``gradient [R, C]``, rows 16 bytes aligned. ``other [C, D]``, or ``[R, D]``. ``lists``: one for each block of 128
    rows of the result. ``add``: to the fp32 ``total``. ``rank_one``: shares ``[M]`` and sums ``[blocks, D]``, fp32;
    each of a block's rows also gets its share times the block's sum.
    """
    (rows, hidden_size), (blocks, capacity) = total.shape, lists.numbers.shape
    order = lists.counts.argsort(descending=True)
    tma = gradient.element_size() == 2 and addressable(gradient, other)
    # Else the result's mask takes a predicate per element, and the large tile spills registers.
    tma = tma and hidden_size % 16 == 0
    width, step = _TMA if tma else _POINTERS
    operands = gradient, other
    if tma:
        of_gradient = (step, TILE) if transposed else (TILE, step)
        operands = descriptor(gradient, *of_gradient), descriptor(other, step, width)
    lce_backward_sparse_product.launch(
        (blocks * -(-hidden_size // width),),
        *operands,
        total,
        (*lists, order),
        rank_one or (None, None),
        rows,
        other.shape[0],
        hidden_size,
        blocks,
        capacity,
        gradient.stride(0),
        other.stride(0),
        total.stride(0),
        TRANSPOSED=transposed,
        ADD=add,
        TILE=TILE,
        BLOCK_N=width,
        BLOCK_K=step,
        TMA=tma,
        num_warps=8,
        num_stages=3,
    )
