"""Exponentials saved as codes of one byte, for a backward that decodes them slice by slice.

The bits of a positive fp32 number e, read as an integer, are a piecewise linear log2(e) times 2^23. A quarter of that
integer is in turn nearly the bits of the fourth root of e. So with the largest exponential E of the window,

    f(e) = number of the bits (bits(e) >> 2) + shift        shift = bits(1) - (bits(E) >> 2)

lies in (0, 1], costs two instructions, and can be inverted. Code 255 is f = 1, and so exact. The other codes are f,
rounded to one of 255 numbers between the window's lowest f and 1. An entry nearly as large as E has a relative error of
at most 2 %, rms .6 %; one of 1e-4 E up to 10 %, a smaller one more; and less where the window's logits are alike. A row
of dW whose entry is far below E for all tokens may have several times the error of bf16 logits.

Equal entries must not all be rounded up, or all down: their errors would not average out. So a number between 0 and 1
that depends on the entry's row, and on its column in the window, is added before the rounding, and subtracted after it
(subtractive dither: Roberts 1962, "Picture coding using pseudo-random noise").

The token's target is left out of E: it could hide the other entries of a confident token. Its gradient is formed in
fp32 from its logit (:mod:`parallel_lce.kernels.token_gradients`), and its code means nothing. So codes serve only
gradients ``p_j alpha - beta [j = target]``. No small difference of entries may matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import finite_base, largest_of, to_base
from parallel_lce.kernels.launch import Relaunched
from parallel_lce.kernels.logit_map import scales_of

# Entries per program, and per step.
_SPAN, _BLOCK = tl.constexpr(16384), tl.constexpr(4096)
# Bits of an fp32 number: of 1; the fraction's, and the first five of these.
_ONE, _FRACTION, _LEADING = tl.constexpr(0x3F800000), tl.constexpr(0x7FFFFF), tl.constexpr(0x7C0000)
# Of a row's and a column's number, 2^23 times the golden ratio's and the plastic number's inverse: their multiples fill
# an interval evenly.
_OF_ROW, _OF_COLUMN = tl.constexpr(6332475), tl.constexpr(5184443)


@triton.jit
def _number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encoded(e, top, target, position, epilogue):
    """The codes of a tile's exponentials ``e [BLOCK_M, BLOCK_N]``: int32 whose lowest byte is the code. Stores their
    ``shift`` and ``lowest`` in the ``epilogue``.

    ``top``: the tile's largest logits. ``target``: the targets' ids. ``position``: as in
    :func:`parallel_lce.kernels.epilogue.finish_tile`."""
    r, c, window, rows, _ = position
    first = window * e.shape[1]
    largest, least = largest_of(top), tl.min(e, 1)
    if epilogue.target is not None:
        # Few tiles have a target. It gets the code of the smallest entry.
        if tl.max(((target >= first) & (target < first + e.shape[1])).to(tl.int32), 0) != 0:
            e = tl.where(c[None, :] == target[:, None], least[:, None], e)
            largest = tl.max(e, 1)
    shift = _ONE - (largest.to(tl.int32, bitcast=True) >> 2)
    lowest = _number((least.to(tl.int32, bitcast=True) >> 2) + shift)
    here = window.to(tl.int64) * rows + r
    tl.store(epilogue.shift + here, shift << 2, mask=r < rows)
    tl.store(epilogue.lowest + here, lowest, mask=r < rows)
    steps = 1.0 / _step(lowest)
    f = _number((e.to(tl.int32, bitcast=True) >> 2) + shift[:, None])
    # The sum with 2^23 is an integer, in its lowest bits. The dither has added 1.
    code = (f - lowest[:, None]) * steps[:, None] + _dither(r[:, None], (c - first)[None, :]) + (2.0**23 - 1.0)
    return tl.where(f >= 1.0, 255, code.to(tl.int32, bitcast=True))


@triton.jit
def _step(lowest):
    """From one code's f to the next one's. All entries may be equal, and a target the smallest of them."""
    return tl.maximum(1.0 - lowest, 2.0**-10) * (1.0 / 253.0)


@triton.jit
def _dither(row, column):
    """A number in [1, 2). ``column``: in the window."""
    # A thread of the epilogue has columns 8 apart. Their numbers differ in the leading bits: one instruction each.
    mixed = (row * _OF_ROW + column % 8 * _OF_COLUMN) & _FRACTION | _ONE
    return _number(mixed ^ ((column << 15) & _LEADING))


@Relaunched
@triton.jit(do_not_specialize=["rows", "first_row"])
def lce_backward_decode(
    codes,
    maxima,
    shifts,
    lowest,
    terms,
    gradient,
    rows,
    first_row,
    first,
    entries,
    stride,
    windows_stride,
    out_stride,
    WINDOW: tl.constexpr,
):
    row = tl.program_id(0)
    begin = tl.program_id(1) * _SPAN
    WINDOWS: tl.constexpr = _BLOCK // WINDOW
    alpha = tl.load(terms.coefficients.alpha + row) * scales_of(terms.logit_map, row, True)
    base = finite_base(tl.load(terms.partial + row))
    factor = alpha / tl.load(terms.partial + rows + row)
    dither = _dither(row + first_row, tl.arange(0, WINDOW))
    codes += row.to(tl.int64) * stride
    gradient += row.to(tl.int64) * out_stride
    for start in range(begin, tl.minimum(begin + _SPAN, entries), _BLOCK):
        c = start + (tl.arange(0, WINDOWS) * WINDOW)[:, None] + tl.arange(0, WINDOW)[None, :]
        inside = c < entries
        # A thread loads as many codes as it stores numbers, 8. With 16 all would be exchanged in shared memory.
        code = tl.load(codes + tl.max_contiguous(first + c, (1, 8)), mask=inside, other=0).to(tl.float32)
        window = start + tl.arange(0, WINDOWS) * WINDOW
        known = window < entries
        here = ((first + window) // WINDOW).to(tl.int64) * windows_stride + row
        top = tl.load(maxima + here, mask=known, other=-float("inf"))
        low = tl.load(lowest + here, mask=known, other=0.0)
        shift = tl.load(shifts + here, mask=known, other=0)
        step = _step(low)
        f = code * step[:, None] + ((low + step)[:, None] - dither[None, :] * step[:, None])
        # Code 255 lies beyond 1.
        f = tl.minimum(tl.maximum(f, low[:, None]), 1.0)
        e = _number((f.to(tl.int32, bitcast=True) << 2) - shift[:, None])
        # In a window of only -inf this factor might be infinite, and 0 times infinity is NaN. The product of both
        # factors might underflow.
        of_window = tl.where(top == -float("inf"), 0.0, to_base(top, base))
        tl.store(gradient + c, (e * of_window[:, None] * factor).to(gradient.dtype.element_ty), mask=inside)


def decode(saved, rows: slice, terms, first: int, window: int, gradient: torch.Tensor) -> None:
    """Write ``gradient [R, C]`` of some rows of a block, and of the entries from ``first`` on, a multiple of
    ``window``: alpha p times the scales, without the targets' terms.

    ``saved``: :class:`parallel_lce.kernels.token_gradients.Saved`, of the whole block, with windows of ``window``
    entries. ``terms``: :class:`parallel_lce.kernels.epilogue.GradientTerms`, of alpha and beta without a factor.
    """
    entries, codes, maxima = gradient.shape[1], saved.exponentials, saved.maxima
    lce_backward_decode.launch(
        (len(gradient), -(-entries // _SPAN.value)),
        codes[rows],
        *[column[:, rows] for column in (maxima, saved.shift, saved.lowest)],
        terms,
        gradient,
        len(gradient),
        rows.start,
        first,
        entries,
        codes.stride(0),
        maxima.stride(0),
        gradient.stride(0),
        WINDOW=window,
    )
