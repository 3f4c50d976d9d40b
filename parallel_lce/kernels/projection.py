"""The projection: one persistent matrix product ``x @ weight.T`` with an epilogue, in forward and in backward.

    forward    stores the partials of every tile and, on request, its exponentials in the input's dtype. Logits are
               not written.
    backward   writes the gradient of the logits in the input's dtype. :mod:`parallel_lce.kernels.token_gradients` adds
               the targets' entries.

An epilogue takes a tile ``z [BLOCK_M tokens, BLOCK_N vocabulary entries]`` in fp32; ``r`` and ``c`` are its row and
column numbers. There are two mainloops: :mod:`parallel_lce.kernels.hopper` on Hopper where TMA can address the
operands, and the plain Triton one below. Both call :func:`tile_rows` before a tile's product, so that its loads overlap
the product, and :func:`finish_tile` after it. These functions run under Triton and Gluon. An absent tensor is None:
Triton compiles the kernel without it.

Saved exponentials are relative to ``arithmetic.window_shift``, nearly always the token's softmax shift.

In all kernels of this package each output element is written by one program, without atomics and without waits between
programs, and sums have a fixed order. Offsets into ``[tokens, vocabulary]`` are 64-bit: N * V passes 2^31 in ordinary
use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.logit_map import LogitMap
from parallel_lce.core.partials import Coefficients
from parallel_lce.kernels.arithmetic import (
    LOWEST_SHIFT,
    SAVED_FP16_SCALE,
    add_product,
    exponential_from,
    finite_base,
    flattened,
    loaded,
)
from parallel_lce.kernels.draws import Draw, store_draw
from parallel_lce.kernels.logit_map import slope_at, tile_caps, tile_logits
from parallel_lce.kernels.partials import PartialColumns, store_partials
from parallel_lce.kernels.relaunch import Relaunched
from parallel_lce.kernels.tuning import Tile, addressable, blocks_per_launch, descriptor, num_sms, tile_of


class ForwardEpilogue(NamedTuple):
    """Stores partials ``[windows, R]`` of each tile and, on request, its logits; or finds sampled entries."""

    # None with a ``draw``.
    partials: PartialColumns | None
    # [R] fp32. None: exponentials are relative to each window's maximum.
    softmax_shift: torch.Tensor | None
    # [R, V] fp32, an output, and its row stride. None: logits are not stored.
    logits: torch.Tensor | None = None
    logits_stride: int = 0
    # Nothing else is stored.
    draw: Draw | None = None
    # [R] fp32: see ``arithmetic.flattened``. None: no token is flat.
    flat: torch.Tensor | None = None


class BackwardEpilogue(NamedTuple):
    """``(p (alpha + delta (z - max) + epsilon p) - gamma) * fp16_scale`` times the derivative of scale and soft-cap,
    with p = exp(z - lse). Tensors are ``[R]`` fp32. ``fp16_scale`` is 0-dimensional."""

    max: torch.Tensor
    sum_exp: torch.Tensor
    alpha: torch.Tensor
    gamma: torch.Tensor | None
    delta: torch.Tensor | None
    epsilon: torch.Tensor | None
    fp16_scale: torch.Tensor | None


@triton.jit
def tile_count(listed, num_blocks, windows):
    """Number of tiles to form: all windows of the row blocks, or the tiles ``listed``."""
    number = num_blocks * windows
    if listed is not None:
        number = tl.load(listed)
    return number


@triton.jit
def tile_start(listed, number, first_block, num_blocks, BLOCK_M: tl.constexpr):
    """First row of a tile, and its window. Row blocks vary fastest and begin at ``first_block``."""
    tile = number
    if listed is not None:
        tile = tl.load(listed + 1 + number)
    return (first_block + tile % num_blocks) * BLOCK_M, tile // num_blocks


@triton.jit
def tile_rows(epilogue, logit_map, r, rows, GRADIENT: tl.constexpr):
    """Values of the tile's tokens for :func:`finish_tile`. The first are the tokens' scales."""
    valid = r < rows
    if GRADIENT:
        return _gradient_rows(epilogue, logit_map, loaded(logit_map.token_scale, r, valid, 1.0), r, valid)
    else:
        return (
            loaded(logit_map.token_scale, r, valid, 1.0),
            loaded(epilogue.softmax_shift, r, valid, 1.0),
            loaded(epilogue.flat, r, valid, 1.0),
        )


@triton.jit
def finish_tile(
    z,
    row_values,
    epilogue,
    bias,
    logit_map,
    position,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
):
    """Turn a tile's product ``z = x @ weight.T`` into its exponentials, storing its partials, or into its gradient.
    ``position``: row numbers, column numbers, window, number of rows, number of entries."""
    r, c, window, rows, entries = position
    if bias is not None:
        z += tl.load(bias + c, mask=c < entries, other=0.0).to(tl.float32)[None, :]
    caps = tile_caps(logit_map, r, r < rows)
    z = tile_logits(z, logit_map, row_values[0], caps, SCALED)
    if GRADIENT:
        return _gradient(z, row_values, epilogue, logit_map, caps)
    elif epilogue.draw is not None:
        store_draw(z, position, epilogue.draw, MASKED)
        return z
    else:
        if epilogue.logits is not None:
            inside = (r < rows)[:, None] & (c < entries)[None, :]
            tl.store(epilogue.logits + r.to(tl.int64)[:, None] * epilogue.logits_stride + c[None, :], z, mask=inside)
        HAS_SHIFT: tl.constexpr = epilogue.softmax_shift is not None
        e = store_partials(z, position, row_values[1], epilogue.partials, MASKED, HAS_SHIFT) * SAVED_SCALE
        if epilogue.flat is not None:
            e = flattened(e, row_values[2][:, None])
        return e


@triton.jit
def _gradient_rows(epilogue, logit_map, token_scales, r, valid):
    """Values per token: scale, maximum, factor of the exponentials, alpha, delta, epsilon, gamma.

    The factor contains 1 / sum_exp and, without delta and epsilon, alpha. Factor and gamma contain the scales and
    ``fp16_scale``. Epsilon contains 1 / sum_exp.
    """
    base = finite_base(tl.load(epilogue.max + r, mask=valid, other=0.0))
    grad_scale = logit_map.scale
    if logit_map.token_scale is not None:
        grad_scale = token_scales * logit_map.scale
    if epilogue.fp16_scale is not None:
        grad_scale *= tl.load(epilogue.fp16_scale)
    to_p = 1.0 / tl.load(epilogue.sum_exp + r, mask=valid, other=1.0)
    factor = to_p * grad_scale
    alpha = tl.load(epilogue.alpha + r, mask=valid, other=0.0)
    delta, epsilon = loaded(epilogue.delta, r, valid, 1.0), loaded(epilogue.epsilon, r, valid, to_p)
    if epilogue.delta is None and epilogue.epsilon is None:
        factor *= alpha
    return (token_scales, base, factor, alpha, delta, epsilon, loaded(epilogue.gamma, r, valid, grad_scale))


@triton.jit
def _gradient(z, row_values, epilogue, logit_map, cap):
    _, base, factor, alpha, delta, epsilon, gamma = row_values
    e = exponential_from(z, base[:, None])
    g = e * factor[:, None]
    # Summed before the product with the factor: the terms nearly cancel where z is near the expected logit.
    if epilogue.delta is not None or epilogue.epsilon is not None:
        terms = alpha[:, None]
        if epilogue.delta is not None:
            terms += delta[:, None] * tl.maximum(z - base[:, None], LOWEST_SHIFT)
        if epilogue.epsilon is not None:
            terms += epsilon[:, None] * e
        g *= terms
    if epilogue.gamma is not None:
        g -= gamma[:, None]
    if logit_map.softcap is not None:
        g *= slope_at(z, cap)
    return g


@triton.jit
def _load(source, row, k, rows, k_size, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        tile = source.load([row, k])
    else:
        r = row + tl.arange(0, BLOCK)
        c = k + tl.arange(0, BLOCK_K)
        inside = (r < rows)[:, None] & (c < k_size)[None, :]
        tile = tl.load(source + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _store(out, row, first, rows, entries, stride, tile, TMA: tl.constexpr):
    if TMA:
        out.store([row, first], tile.to(out.dtype))
    else:
        r = row + tl.arange(0, tile.shape[0])
        c = first + tl.arange(0, tile.shape[1])
        inside = (r < rows)[:, None] & (c < entries)[None, :]
        pointers = out + r.to(tl.int64)[:, None] * stride + c[None, :]
        tl.store(pointers, tile.to(out.dtype.element_ty), mask=inside)


def projection_name(specialization) -> str:
    return "lce_backward_projection" if specialization.constants["GRADIENT"] else "lce_forward_projection"


# Arguments that vary between launches. They are not specialized: a new value does not compile a new kernel.
CHANGING = ["rows", "first_block", "num_blocks"]


@Relaunched
@triton.jit(do_not_specialize=CHANGING, repr=projection_name)
def _projection(
    x,
    weight,
    out,
    bias,
    logit_map,
    epilogue,
    listed,
    rows,
    entries,
    k_size,
    first_block,
    num_blocks,
    x_stride,
    weight_stride,
    out_stride,
    out_entries,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
):
    """Persistent GEMM over ``num_blocks`` row blocks from ``first_block`` on. ``GRADIENT`` selects the epilogue. ``x``,
    ``weight`` and ``out`` are TMA descriptors or pointers. ``listed``: the only tiles to form; None: all."""
    tiles = tile_count(listed, num_blocks, tl.cdiv(entries, BLOCK_N))
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, window = tile_start(listed, number, first_block, num_blocks, BLOCK_M)
        first = window * BLOCK_N
        r = row + tl.arange(0, BLOCK_M)
        c = first + tl.arange(0, BLOCK_N)
        row_values = tile_rows(epilogue, logit_map, r, rows, GRADIENT)
        z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, k_size, BLOCK_K):
            a = _load(x, row, k, rows, k_size, x_stride, BLOCK_M, BLOCK_K, TMA)
            b = _load(weight, first, k, entries, k_size, weight_stride, BLOCK_N, BLOCK_K, TMA)
            z = add_product(a, b.T, z)
        position = (r, c, window, rows, entries)
        z = finish_tile(z, row_values, epilogue, bias, logit_map, position, GRADIENT, SCALED, MASKED, SAVED_SCALE)
        if out is not None:
            if first < out_entries:
                _store(out, row, first, rows, out_entries, out_stride, z, OUT_TMA)


@dataclass(frozen=True)
class Product:
    """``logit_map(x @ weight.T + bias)``. The K dimension is contiguous in both operands."""

    # [R, D]
    x: torch.Tensor
    # [V, D], rows of a vocabulary shard
    weight: torch.Tensor
    # [V]
    bias: torch.Tensor | None = None
    logit_map: LogitMap = LogitMap()

    def of_rows(self, rows: slice) -> Product:
        return replace(self, x=self.x[rows], logit_map=self.logit_map.of_rows(rows))

    @cached_property
    def tma(self) -> bool:
        return addressable(self.x, self.weight)

    @cached_property
    def tile(self) -> Tile:
        return tile_of(self.weight, self.tma)

    @cached_property
    def windows(self) -> int:
        return -(-self.weight.shape[0] // self.tile.entries)

    @cached_property
    def row_blocks(self) -> int:
        return -(-self.x.shape[0] // self.tile.rows)

    def launch(
        self, out: torch.Tensor | None, epilogue: ForwardEpilogue | BackwardEpilogue, listed: torch.Tensor | None = None
    ) -> None:
        """Start the product with an epilogue. ``listed [1 + n]`` int32: n, then the numbers ``window * row_blocks + row
        block`` of the only tiles to form; None: all."""
        tile, tma, x, weight = self.tile, self.tma, self.x, self.weight
        (rows, k_size), entries = x.shape, weight.shape[0]
        gradient = isinstance(epilogue, BackwardEpilogue)
        saves_fp16 = not gradient and out is not None and out.dtype == torch.float16
        options = {
            "GRADIENT": gradient,
            "SCALED": self.logit_map.scale != 1.0,
            "MASKED": entries % tile.entries != 0,
            "SAVED_SCALE": SAVED_FP16_SCALE if saves_fp16 else 1.0,
            "num_warps": tile.warps,
        }
        if tma:
            x = descriptor(x, tile.rows, tile.k, tile.warp_specialized)
            weight = descriptor(weight, tile.entries, tile.k, tile.warp_specialized)
        out_tma = out is not None and tma and addressable(out)
        stored = tile.rows // 2 if tile.warp_specialized else tile.rows
        destination = descriptor(out, stored, tile.entries, tile.warp_specialized) if out_tma else out
        strides: tuple[int, ...] = ()
        if tile.warp_specialized:
            from parallel_lce.kernels.hopper import projection as kernel

            options["STAGES"] = tile.stages - (out is not None)
        else:
            kernel = _projection
            strides = self.x.stride(0), self.weight.stride(0)
            strides += (0, 0) if out is None else (out.stride(0), out.shape[1])
            options |= {
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.entries,
                "BLOCK_K": tile.k,
                "TMA": tma,
                "OUT_TMA": out_tma,
                "num_stages": tile.stages,
            }
        row_blocks, windows = self.row_blocks, self.windows
        programs = num_sms(self.x.device)
        step = blocks_per_launch(row_blocks, windows, programs, tile.rows * k_size * self.x.element_size())
        step = step if listed is None else max(1, row_blocks)
        for first in range(0, row_blocks, step):
            number = min(step, row_blocks - first)
            kernel.launch(
                (min(number * windows, programs),),
                x,
                weight,
                destination,
                self.bias,
                self.logit_map,
                epilogue,
                listed,
                rows,
                entries,
                k_size,
                first,
                number,
                *strides,
                **options,
            )


def new_window_partials(product: Product, columns) -> PartialColumns:
    """Uninitialised partials of all windows, ``[windows, R]`` fp32 each, with all ``columns`` but the target's."""
    windows, rows = product.windows, product.x.shape[0]
    # One allocation per column: maxima may outlive the others.
    maximum = product.x.new_empty(windows, rows, dtype=torch.float32)
    sum_exp, wanted = torch.empty_like(maximum), columns.requested
    others = [torch.empty_like(maximum) if name in wanted else None for name in PartialColumns._fields[3:]]
    return PartialColumns(maximum, sum_exp, None, *others)


def logits_gradient(
    product: Product,
    partial: torch.Tensor,
    coefficients: Coefficients,
    fp16_scale: torch.Tensor | None,
    out: torch.Tensor,
    listed: torch.Tensor | None = None,
) -> None:
    """Write to ``out [R, V]`` the gradient of the logits without the targets' terms (:class:`BackwardEpilogue`).

    ``partial [>= 2, R]`` fp32, contiguous: the maximum and the sum of exponentials. ``coefficients``: without a factor;
    beta is not read. Rows of ``out`` are 16 bytes aligned. TMA stores 16-byte granules, so the padding after a row's
    last entry is overwritten up to the next boundary. ``listed``: as for :meth:`Product.launch`.
    """
    alpha, _, gamma, delta, epsilon, factor = coefficients
    assert factor is None
    epilogue = BackwardEpilogue(partial[0], partial[1], alpha, gamma, delta, epsilon, fp16_scale)
    product.launch(out, epilogue, listed=listed)
