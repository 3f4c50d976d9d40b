"""One persistent matrix product ``x @ weight.T`` and what becomes of a tile of it in registers.

A tile of logits is ``[BLOCK_M tokens, BLOCK_N vocabulary rows]``, summed over D in fp32; its columns
are a *window* of the vocabulary. Three epilogues share the mainloop (:func:`_logits_tile`):

    partials   per token and window: maximum, sum of exponentials, the target's logit, and on request
               the sums and the argmax of ``parallel_lce.partials``. No logits are written.
    keep       the same, and ``exp(z - reference)`` in the input's dtype.
    gradient   ``p (alpha + delta (z - M)) - gamma`` times the chain of scale and soft-cap, in the
               input's dtype, from statistics that are known: the gradient of the logits but for the
               targets' own entries, which :mod:`parallel_lce.kernels.dlogits` writes.

The reference of a kept window is the token's own (``common``, a value near its largest logits,
known beforehand) unless the window's maximum lies further from it than ``REACH``; then it is that
maximum. So where all windows agree, as they nearly always do, one factor per token turns kept
exponentials into gradients, and the products of the backward take them as they are.

Every result has one writer. Offsets into what has rows times vocabulary are 64-bit: N * V passes
2^31 in ordinary use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.tuning import Tile, addressable, descriptor, interpreted, processors, tile_of

REACH = 32.0
"""How far a window's maximum may lie from the common reference: e^32 and e^-32 leave bf16, whose
exponents are those of fp32, ample room on both sides."""

FP16_SCALE = 2.0**15
"""fp16 keeps exp(z - maximum) in [0, 1] times this, so that it loses nothing down to e^-20."""

_INT_MAX = tl.constexpr(2**31 - 1)
# exp(-1e4) is 0 in every dtype, and -1e4 * 0 is no NaN as -inf * 0 would be.
_LOWEST_SHIFT = tl.constexpr(-1e4)


@triton.jit
def softcapped(u, cap):
    """cap * tanh(u / cap), by exponentials of negative numbers alone."""
    ratio = u / cap
    e = tl.exp(-2.0 * tl.abs(ratio))
    magnitude = cap * ((1.0 - e) / (1.0 + e))
    return tl.where(ratio < 0.0, -magnitude, magnitude)


@triton.jit
def finite_base(maximum):
    """The maximum, or 0 for a token of -inf alone, since -inf - -inf is NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def window_reference(maximum, common, REACH: tl.constexpr):
    """What a window's kept exponentials are relative to; its maximum where ``REACH`` is negative."""
    within = (tl.abs(maximum - common) <= REACH) | ((maximum == -float("inf")) & (REACH >= 0))
    return tl.where(within, common, finite_base(maximum))


@triton.jit
def _load(source, row, k, rows, depth, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        tile = source.load([row, k])
    else:
        r = row + tl.arange(0, BLOCK)
        c = k + tl.arange(0, BLOCK_K)
        inside = (r < rows)[:, None] & (c < depth)[None, :]
        tile = tl.load(source + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _store(destination, row, first, rows, columns, stride, tile, TMA: tl.constexpr):
    if TMA:
        destination.store([row, first], tile.to(destination.dtype))
    else:
        r = row + tl.arange(0, tile.shape[0])
        c = first + tl.arange(0, tile.shape[1])
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        pointers = destination + r.to(tl.int64)[:, None] * stride + c[None, :]
        tl.store(pointers, tile.to(destination.dtype.element_ty), mask=inside)


@triton.jit
def _position(tile, row_blocks, windows, GROUP: tl.constexpr):
    """Row block and window of a tile: groups of row blocks walk the windows together, so that both
    operands are met in the L2 cache."""
    per_group = GROUP * windows
    group = tile // per_group
    size = min(row_blocks - group * GROUP, GROUP)
    inside = tile - group * per_group
    return group * GROUP + inside % size, inside // size


@triton.jit
def _logits_tile(
    x, weight, bias, row, first, rows, columns, depth, x_stride, weight_stride, scale, cap,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The mainloop: logits ``[BLOCK_M, BLOCK_N]`` in fp32 from row ``row`` and column ``first``."""
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        a = _load(x, row, k, rows, depth, x_stride, BLOCK_M, BLOCK_K, TMA)
        b = _load(weight, first, k, columns, depth, weight_stride, BLOCK_N, BLOCK_K, TMA)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        # fp32 operands must not be rounded to tf32.
        z = tl.dot(a, b.T, z, input_precision="ieee")
    if HAS_BIAS:
        c = first + tl.arange(0, BLOCK_N)
        z += tl.load(bias + c, mask=c < columns, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        z *= scale
    if CAPPED:
        z = softcapped(z, cap)
    return z


@triton.jit
def _partials_kernel(
    x, weight, bias, target, common, partials, target_logit, out,
    rows, columns, kept_columns, depth, x_stride, weight_stride, out_stride, scale, cap,
    KEEP: tl.constexpr, REACH: tl.constexpr, KEPT_SCALE: tl.constexpr, OUT_TMA: tl.constexpr,
    HAS_TARGET: tl.constexpr, SHIFTED: tl.constexpr, TOTAL: tl.constexpr,
    WEIGHTED: tl.constexpr, ARGMAX: tl.constexpr, MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(rows, BLOCK_M)
    windows = tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_blocks * windows, tl.num_programs(0), flatten=FLATTEN):
        row_block, window = _position(tile, row_blocks, windows, GROUP)
        row, first = row_block * BLOCK_M, window * BLOCK_N
        z = _logits_tile(
            x, weight, bias, row, first, rows, columns, depth, x_stride, weight_stride, scale, cap,
            HAS_BIAS, SCALED, CAPPED, BLOCK_M, BLOCK_N, BLOCK_K, TMA, UPCAST,
        )  # fmt: skip
        r = row + tl.arange(0, BLOCK_M)
        c = first + tl.arange(0, BLOCK_N)
        valid = r < rows
        # Partials [column, window, row], but for the target's, of which a token has one at most.
        here = partials + window.to(tl.int64) * rows + r
        column_stride = windows.to(tl.int64) * rows

        if HAS_TARGET:
            wanted = tl.load(target + r, mask=valid, other=-1)
            # A target of the next shard may equal a column of the mask.
            hit = (wanted >= first) & (wanted < min(first + BLOCK_N, columns))
            if tl.max(hit.to(tl.int32), 0) > 0:
                found = tl.sum(tl.where(c[None, :] == wanted[:, None], z, 0.0), 1)
                tl.store(target_logit + r, found, mask=hit)
        if TOTAL:
            total = tl.sum(tl.where(c[None, :] < columns, z, 0.0), 1)
            tl.store(here + (2 + SHIFTED) * column_stride, total, mask=valid)
        if MASKED:
            z = tl.where(c[None, :] < columns, z, -float("inf"))
        top = tl.max(z, 1)
        base = finite_base(top)
        if ARGMAX:
            index = tl.min(tl.where(z == top[:, None], c[None, :], _INT_MAX), 1)
            place = here + (2 + SHIFTED + TOTAL + WEIGHTED) * column_stride
            tl.store(place, index.to(tl.float32, bitcast=True), mask=valid)
        if SHIFTED:
            moved = tl.where(c[None, :] < columns, z - base[:, None], 0.0)
            tl.store(here + 2 * column_stride, tl.sum(moved, 1), mask=valid)
        reference = base
        if KEEP:
            if REACH >= 0:
                known = tl.load(common + r, mask=valid, other=0.0)
                reference = window_reference(top, known, REACH)
        # tl.max drops NaN; it comes back here, through its exponential.
        e = tl.exp(z - reference[:, None])
        tl.store(here, top, mask=valid)
        tl.store(here + column_stride, tl.sum(e, 1), mask=valid)
        if WEIGHTED:
            ez = tl.sum(e * tl.maximum(z - base[:, None], _LOWEST_SHIFT), 1)
            tl.store(here + (2 + SHIFTED + TOTAL) * column_stride, ez, mask=valid)
        if KEEP:
            if first < kept_columns:
                _store(out, row, first, rows, kept_columns, out_stride, e * KEPT_SCALE, OUT_TMA)


@triton.jit
def _gradient_kernel(
    x, weight, bias, statistics, alpha, gamma, delta, power, out,
    rows, columns, depth, x_stride, weight_stride, out_stride, scale, cap,
    HAS_GAMMA: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_POWER: tl.constexpr, OUT_TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(rows, BLOCK_M)
    windows = tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_blocks * windows, tl.num_programs(0), flatten=FLATTEN):
        row_block, window = _position(tile, row_blocks, windows, GROUP)
        row, first = row_block * BLOCK_M, window * BLOCK_N
        z = _logits_tile(
            x, weight, bias, row, first, rows, columns, depth, x_stride, weight_stride, scale, cap,
            HAS_BIAS, SCALED, CAPPED, BLOCK_M, BLOCK_N, BLOCK_K, TMA, UPCAST,
        )  # fmt: skip
        r = row + tl.arange(0, BLOCK_M)
        valid = r < rows
        base = finite_base(tl.load(statistics + r, mask=valid, other=0.0))
        factor = scale
        if HAS_POWER:
            factor *= tl.load(power)
        per_sum = factor / tl.load(statistics + rows + r, mask=valid, other=1.0)
        shifted = z - base[:, None]
        g = tl.exp(shifted)
        if HAS_DELTA:
            slope = (tl.load(delta + r, mask=valid, other=0.0) * per_sum)[:, None]
            level = (tl.load(alpha + r, mask=valid, other=0.0) * per_sum)[:, None]
            g *= level + slope * tl.maximum(shifted, _LOWEST_SHIFT)
        else:
            g *= (tl.load(alpha + r, mask=valid, other=0.0) * per_sum)[:, None]
        if HAS_GAMMA:
            g -= (tl.load(gamma + r, mask=valid, other=0.0) * factor)[:, None]
        if CAPPED:
            g *= 1.0 - (z / cap) * (z / cap)
        _store(out, row, first, rows, columns, out_stride, g, OUT_TMA)


@dataclass(frozen=True)
class Operands:
    """``x [R, D]``, ``weight [K, D]`` and ``bias [K]`` of one product and what follows it, as the
    kernels take them; a soft-cap of None is none. D is contiguous in both."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def tma(self) -> bool:
        return addressable(self.x, self.weight)

    @property
    def tile(self) -> Tile:
        return tile_of(self.weight, self.tma)

    @property
    def windows(self) -> int:
        return triton.cdiv(self.weight.shape[0], self.tile.columns)

    def launch(self, kernel, out: torch.Tensor | None, tensors: tuple, sizes: tuple, **switches) -> None:
        """Start ``kernel``: operands, its ``tensors`` (the last is ``out``), its ``sizes``."""
        tile, tma = self.tile, self.tma
        x, weight, out_tma = self.x, self.weight, False
        strides = x.stride(0), weight.stride(0), 0 if out is None else out.stride(0)
        if tma:
            x = descriptor(x, tile.rows, tile.depth)
            weight = descriptor(weight, tile.columns, tile.depth)
            out_tma = out is not None and addressable(out)
            out = descriptor(out, tile.rows, tile.columns) if out_tma else out
        tiles = triton.cdiv(self.x.shape[0], tile.rows) * self.windows
        kernel[(min(tiles, processors(self.x.device)),)](
            x,
            weight,
            self.bias,
            *tensors,
            out,
            self.x.shape[0],
            self.weight.shape[0],
            *sizes,
            self.x.shape[1],
            *strides,
            float(self.scale),
            1.0 if self.softcap is None else float(self.softcap),
            OUT_TMA=out_tma,
            HAS_BIAS=self.bias is not None,
            SCALED=self.scale != 1.0,
            CAPPED=self.softcap is not None,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            GROUP=tile.group,
            TMA=tma,
            FLATTEN=tile.flatten,
            # Triton's interpreter multiplies bf16 wrongly.
            UPCAST=interpreted() and self.x.dtype == torch.bfloat16,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **switches,
        )


def window_partials(
    operands: Operands,
    target: torch.Tensor | None,
    target_logit: torch.Tensor,
    *,
    shifted: bool = False,
    total: bool = False,
    weighted: bool = False,
    argmax: bool = False,
    kept: torch.Tensor | None = None,
    common: torch.Tensor | None = None,
) -> torch.Tensor:
    """Partials ``[columns, windows, R]`` fp32: max, sum_exp, then those asked for, in this order.

    ``target [R]`` int64 holds columns; those outside ``[0, K)`` hit nothing. ``target_logit [R]``
    fp32 is written for those that do. ``kept [R, C]`` receives the exponentials of the first C
    columns, relative to :func:`window_reference` of ``common [R]`` fp32 or, if that is None, to each
    window's maximum; C is K or a multiple of the tile's columns. In fp16 they are times
    ``FP16_SCALE``. The argmax is a column, bit-cast.
    """
    rows, entries = operands.x.shape[0], operands.weight.shape[0]
    columns = 2 + shifted + total + weighted + argmax
    partials = operands.x.new_empty(columns, operands.windows, rows, dtype=torch.float32)
    operands.launch(
        _partials_kernel,
        kept,
        (target, common, partials, target_logit),
        (0 if kept is None else kept.shape[1],),
        KEEP=kept is not None,
        REACH=-1.0 if common is None else REACH,
        KEPT_SCALE=FP16_SCALE if kept is not None and kept.dtype == torch.float16 else 1.0,
        HAS_TARGET=target is not None,
        SHIFTED=shifted,
        TOTAL=total,
        WEIGHTED=weighted,
        ARGMAX=argmax,
        MASKED=entries % operands.tile.columns != 0,
    )
    return partials


def logits_gradient(
    operands: Operands,
    statistics: torch.Tensor,
    alpha: torch.Tensor,
    gamma: torch.Tensor | None,
    delta: torch.Tensor | None,
    power: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write ``p (alpha + delta (z - M)) - gamma``, times scale and soft-cap's slope, to ``out [R, K]``.

    ``statistics [>= 2, R]`` fp32, contiguous: maximum and sum of exponentials; ``alpha``, ``gamma``,
    ``delta [R]`` fp32; ``power``: a 0-dimensional factor of everything.
    """
    operands.launch(
        _gradient_kernel,
        out,
        (statistics, alpha, gamma, delta, power),
        (),
        HAS_GAMMA=gamma is not None,
        HAS_DELTA=delta is not None,
        HAS_POWER=power is not None,
    )
