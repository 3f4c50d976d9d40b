"""Products with listed tiles of the gradient of the logits, ``G @ weight`` and ``G.T @ x``.

G ``[R, C]`` is dense in memory; :mod:`.tiles` lists the tiles to multiply. Each tile of the result has a list. The
longest lists come first, so that all programs end at about the same time. Operands are loaded by TMA where it can
address them and hidden sizes are multiples of 16, else by pointers. On Hopper TMA loads for the mainloop of
:mod:`.hopper_products`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.features.filter.kernels.tiles import TILE, TileLists, grouped_tile
from parallel_lce.kernels.arithmetic import add_product
from parallel_lce.kernels.device import addressable, num_sms
from parallel_lce.kernels.mainloop_choice import mainloop_of, tile_of
from parallel_lce.kernels.relaunch import Relaunched

# Hidden elements of a result's tile, terms of the sum per step, and stages: with loads by pointers, by TMA, and with
# Hopper's mainloop, which has one stage less if it stages the result.
_POINTERS, _TMA, _HOPPER = (64, 32, 3), (256, 64, 3), (256, 64, 4)


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
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """``gradient`` and ``other``: TMA descriptors or pointers. ``rows``: of the result. ``summed``: terms of the full
    sums. ``TILES``: tiles per window."""
    numbers, counts, order = lists
    shares, spread = rank_one
    block, hidden_block = grouped_tile(tl.program_id(0), order, blocks, tl.cdiv(hidden_size, BLOCK_N))
    r = block * TILE + tl.arange(0, TILE)
    h = hidden_block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_result = (r < rows)[:, None] & (h < hidden_size)[None, :]
    pointers = total + r.to(tl.int64)[:, None] * total_stride + h[None, :]
    z = tl.zeros((TILE, BLOCK_N), tl.float32)
    if ADD:
        z += tl.load(pointers, mask=in_result, other=0.0)
    if shares is not None:
        share = tl.load(shares + r, mask=r < rows, other=0.0)
        of_window = tl.load(spread + block // TILES * hidden_size + h, mask=h < hidden_size, other=0.0)
        z += share[:, None] * of_window[None, :]
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
    width: int = TILE,
) -> None:
    """``total [M, D] = gradient @ other``, or ``gradient.T @ other`` if ``transposed``, over the listed tiles.

    ``gradient [R, C]``, rows 16 bytes aligned. ``other [C, D]``, or ``[R, D]``. ``lists``: one for each block of 128
    rows of the result. ``add``: to the fp32 ``total``. ``rank_one``: shares ``[M]`` and sums ``[windows, D]``, fp32;
    each of a window's ``width`` rows also gets its share times the window's sum.
    """
    (rows, hidden_size), (blocks, capacity) = total.shape, lists.numbers.shape
    ordered, added = (*lists, lists.counts.argsort(descending=True)), rank_one or (None, None)
    tma, operands = gradient.element_size() == 2 and addressable(gradient, other), (gradient, other)
    # Else the result's mask takes a predicate per element, and the large tile spills registers.
    tma = tma and hidden_size % 16 == 0
    mainloop = tile_of(gradient, tma).mainloop
    hidden, step, stages = _HOPPER if mainloop == "hopper" else _TMA if tma else _POINTERS
    descriptor = mainloop_of(mainloop).descriptor
    if tma:
        block = (step, TILE) if transposed else (TILE, step)
        operands = descriptor(gradient, *block), descriptor(other, step, hidden)
    options = dict(TRANSPOSED=transposed, ADD=add, TILES=width // TILE)
    results = blocks * -(-hidden_size // hidden)
    if mainloop == "hopper":
        from parallel_lce.features.filter.kernels.hopper_products import lce_backward_sparse_product as kernel

        staged = not add and total.dtype == gradient.dtype and addressable(total)
        out = descriptor(total, TILE // 2, hidden) if staged else total
        sizes = rows, hidden_size, blocks, capacity, total.stride(0)
        options |= dict(STAGED=staged, STAGES=stages - staged, num_warps=4)
        programs = min(results, num_sms(total.device)) if transposed else results
        kernel.launch((programs,), *operands, out, ordered, added, *sizes, **options)
        return
    lce_backward_sparse_product.launch(
        (results,),
        *operands,
        total,
        ordered,
        added,
        rows,
        other.shape[0],
        hidden_size,
        blocks,
        capacity,
        gradient.stride(0),
        other.stride(0),
        total.stride(0),
        **options,
        TILE=TILE,
        BLOCK_N=hidden,
        BLOCK_K=step,
        TMA=tma,
        num_warps=8,
        num_stages=stages,
    )
