"""One persistent matrix product ``x @ weight.T`` and three things to make of it in registers.

    partials   per token and window of the vocabulary: maximum, sum of exponentials, and on request
               the sums and the argmax of ``parallel_lce.partials``. No logits are written.
    keep       the same, and ``exp(z - reference)`` in the input's dtype.
    gradient   ``p (alpha + delta (z - M)) - gamma`` times the slope of scale and soft-cap, in the
               input's dtype, from statistics that are known: the gradient of the logits but for the
               targets' own entries, which are :mod:`parallel_lce.kernels.targets`'.

:mod:`parallel_lce.kernels.epilogues` has the three; the mainloop is :mod:`parallel_lce.kernels.hopper`
on Hopper, where operands allow TMA, and the one below elsewhere.

The reference of a kept window is the token's own (``common``, a value near its largest logits,
known beforehand) unless the window's maximum lies further from it than ``REACH``; then it is that
maximum. So where all windows agree, as they nearly always do, one factor per token turns kept
exponentials into gradients, and the products of the backward take them as they are.

Every result has one writer. Offsets into what has rows times vocabulary are 64-bit: N * V passes
2^31 in ordinary use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.epilogues import (
    FP16_SCALE,
    REACH,
    finished_logits,
    gradient_epilogue,
    gradient_rows,
    partials_epilogue,
    partials_rows,
)
from parallel_lce.kernels.launch import Relaunched, cdiv
from parallel_lce.kernels.tuning import (
    Tile,
    addressable,
    beside_collective,
    blocks_per_launch,
    descriptor,
    interpreted,
    processors,
    tile_of,
)


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


# What changes from launch to launch and from batch to batch must not compile anew.
@Relaunched
@triton.jit(do_not_specialize=["rows", "first_block", "blocks", "all_blocks"])
def _projection(
    x,
    weight,
    out,
    bias,
    rows,
    columns,
    depth,
    first_block,
    blocks,
    all_blocks,
    scale,
    cap,
    a0,
    a1,
    a2,
    a3,
    a4,
    x_stride,
    weight_stride,
    out_stride,
    out_columns,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    SWITCHES: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``blocks`` row blocks from ``first_block`` on, the first after the last, with either epilogue; ``a0`` to
    ``a4`` are its tensors and ``SWITCHES`` its switches, in its order."""
    windows = tl.cdiv(columns, BLOCK_N)
    for tile in range(tl.program_id(0), blocks * windows, tl.num_programs(0)):
        window = tile // blocks
        row = (first_block + tile % blocks) % all_blocks * BLOCK_M
        first = window * BLOCK_N
        r = row + tl.arange(0, BLOCK_M)
        c = first + tl.arange(0, BLOCK_N)
        if GRADIENT:
            base, level, slope, uniform = gradient_rows(
                r, rows, a0, a1, a2, a3, a4, scale, SWITCHES[0], SWITCHES[1], SWITCHES[2]
            )
        else:
            known = partials_rows(r, rows, a0, SWITCHES[0])
        z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, depth, BLOCK_K):
            a = _load(x, row, k, rows, depth, x_stride, BLOCK_M, BLOCK_K, TMA)
            b = _load(weight, first, k, columns, depth, weight_stride, BLOCK_N, BLOCK_K, TMA)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            # fp32 operands must not be rounded to tf32.
            z = tl.dot(a, b.T, z, input_precision="ieee")
        z = finished_logits(z, c, bias, columns, scale, cap, HAS_BIAS, SCALED, CAPPED)
        if GRADIENT:
            z = gradient_epilogue(z, base, level, slope, uniform, cap, SWITCHES[0], SWITCHES[1], CAPPED)
        else:
            z = partials_epilogue(
                z,
                r,
                c,
                window,
                windows,
                rows,
                columns,
                known,
                a1,
                a2,
                SWITCHES[0],
                SWITCHES[1],
                SWITCHES[2],
                SWITCHES[3],
                SWITCHES[4],
                SWITCHES[5],
                SWITCHES[6],
            )
        if STORES:
            if first < out_columns:
                _store(out, row, first, rows, out_columns, out_stride, z, OUT_TMA)


@dataclass(frozen=True)
class Operands:
    """``x [R, D]``, ``weight [K, D]`` and ``bias [K]`` of one product and what follows it, as the
    kernels take them; a soft-cap of None is none. D is contiguous in both."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @cached_property
    def tma(self) -> bool:
        return addressable(self.x, self.weight)

    @cached_property
    def tile(self) -> Tile:
        return tile_of(self.weight, self.tma)

    @property
    def windows(self) -> int:
        return cdiv(self.weight.shape[0], self.tile.columns)

    def _launch(
        self,
        out: torch.Tensor | None,
        gradient: bool,
        tensors: tuple,
        switches: tuple,
        order: Iterable[tuple[range, bool]] | None = None,
    ) -> None:
        """Start the product with an epilogue: its five ``tensors`` and its ``switches``, in order.

        ``order``: row blocks that follow one another, the first after the last, all of them in the end, and
        whether a collective runs beside these, which then leave it some of the processors.
        """
        tile, tma, x, weight = self.tile, self.tma, self.x, self.weight
        (rows, depth), columns = x.shape, weight.shape[0]
        softcap = 1.0 if self.softcap is None else float(self.softcap)
        options = {
            "HAS_BIAS": self.bias is not None,
            "SCALED": self.scale != 1.0,
            "CAPPED": self.softcap is not None,
            "GRADIENT": gradient,
            "SWITCHES": switches,
            "STORES": out is not None,
            "num_warps": tile.warps,
        }
        if tma:
            x = descriptor(x, tile.rows, tile.depth, tile.specialised)
            weight = descriptor(weight, tile.columns, tile.depth, tile.specialised)
        out_tma = out is not None and tma and addressable(out)
        destination = out
        if out_tma:
            destination = descriptor(out, tile.rows, tile.columns, tile.specialised)
        if tile.specialised:
            from parallel_lce.kernels.hopper import projection as kernel

            strides: tuple[int, ...] = ()
            options["STAGES"] = tile.stages - (out is not None)
        else:
            kernel = _projection
            strides = self.x.stride(0), self.weight.stride(0)
            strides += (0, 0) if out is None else (out.stride(0), out.shape[1])
            options |= {
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.columns,
                "BLOCK_K": tile.depth,
                "TMA": tma,
                "OUT_TMA": out_tma,
                # Triton's interpreter multiplies bf16 wrongly.
                "UPCAST": interpreted() and self.x.dtype == torch.bfloat16,
                "num_stages": tile.stages,
            }
        row_blocks, block_bytes = cdiv(rows, tile.rows), tile.rows * depth * self.x.element_size()
        for part, beside in order or [(range(row_blocks), False)]:
            programs = processors(self.x.device)
            programs = beside_collective(programs) if beside else programs
            step = blocks_per_launch(len(part), self.windows, programs, block_bytes)
            for first in part[::step]:
                blocks = min(step, part.stop - first)
                kernel[(min(blocks * self.windows, programs),)](
                    x,
                    weight,
                    destination,
                    self.bias,
                    rows,
                    columns,
                    depth,
                    first,
                    blocks,
                    row_blocks,
                    float(self.scale),
                    softcap,
                    *tensors,
                    *strides,
                    **options,
                )


def window_partials(
    operands: Operands,
    *,
    shifted: bool = False,
    total: bool = False,
    weighted: bool = False,
    argmax: bool = False,
    kept: torch.Tensor | None = None,
    common: torch.Tensor | None = None,
    order: Iterable[tuple[range, bool]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``maxima [windows, R]`` and ``sums [*, windows, R]`` fp32: sum_exp, then those asked for.

    ``kept [R, C]``, its rows 16 bytes aligned, receives the exponentials of the first C columns, and
    anything in what remains of a row's last 16 bytes, which is as finely as TMA writes; they are
    relative to ``epilogues.window_reference`` of ``common [R]`` fp32 or, if that is None, to each
    window's maximum, and sum_exp likewise; C is K or a multiple of the tile's columns. In fp16 they
    are times ``FP16_SCALE``. The argmax is a column, bit-cast. ``order``: of the row blocks, of
    ``operands.tile.rows`` tokens each, and whether a collective runs beside them; what it does on the way
    happens between their launches.
    """
    x, entries = operands.x, operands.weight.shape[0]
    maxima = x.new_empty(operands.windows, x.shape[0], dtype=torch.float32)
    sums = maxima.new_empty(1 + shifted + total + weighted + argmax, *maxima.shape)
    operands._launch(
        kept,
        False,
        (common, maxima, sums, None, None),
        (
            -1.0 if common is None else REACH,
            FP16_SCALE if kept is not None and kept.dtype == torch.float16 else 1.0,
            shifted,
            total,
            weighted,
            argmax,
            entries % operands.tile.columns != 0,
        ),
        order,
    )
    return maxima, sums


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
    ``delta [R]`` fp32; ``power``: a 0-dimensional factor of everything. Rows of ``out`` are 16 bytes
    aligned, and their last 16 bytes written as a whole.
    """
    operands._launch(
        out, True, (statistics, alpha, gamma, delta, power), (gamma is not None, delta is not None, power is not None)
    )
