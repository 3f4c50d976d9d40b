"""Epilogues: what the projection computes from a tile of logits before it leaves registers.

There are two. The forward's stores the tile's partials (:func:`parallel_lce.kernels.partials.store_partials`), on
request its logits, and returns its exponentials, which the caller may save. The backward's returns the gradient of the
logits.

A tile is ``z [BLOCK_M tokens, BLOCK_N vocabulary entries]`` in fp32; ``r`` and ``c`` are its row and column numbers.
Both mainloops call :func:`tile_rows` before a tile's product, so that its loads overlap the product, and
:func:`finish_tile` after it. The functions run under Triton and, called from a Gluon kernel, under Gluon. An absent
tensor is None: Triton compiles the kernel without it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.kernels.arithmetic import LOWEST_SHIFT, caps_of, exponential_from, finite_base, scaled, softcapped
from parallel_lce.kernels.partials import PartialColumns, store_partials


class ForwardEpilogue(NamedTuple):
    """Stores partials ``[windows, R]`` of each tile, and its logits if they are wanted."""

    partials: PartialColumns
    # [R] fp32, or None: exponentials are then relative to each window's maximum.
    softmax_shift: torch.Tensor | None
    # [R, V] fp32, or None: where the logits are stored, and the elements from one row to the next.
    logits: torch.Tensor | None = None
    logits_stride: int = 0


class BackwardEpilogue(NamedTuple):
    """``(p (alpha + delta (z - max) + epsilon p) - gamma) * fp16_scale`` times the derivative of scale and soft-cap.

    p = exp(z - lse).

    Tensors are ``[R]`` fp32. ``fp16_scale`` is 0-dimensional.
    """

    max: torch.Tensor
    sum_exp: torch.Tensor
    alpha: torch.Tensor
    gamma: torch.Tensor | None
    delta: torch.Tensor | None
    epsilon: torch.Tensor | None
    fp16_scale: torch.Tensor | None


@triton.jit
def tile_count(listed, num_blocks, windows):
    """How many tiles there are: all of the row blocks' windows, or those that are listed."""
    number = num_blocks * windows
    if listed is not None:
        number = tl.load(listed)
    return number


@triton.jit
def tile_start(listed, number, first_block, num_blocks, all_blocks, BLOCK_M: tl.constexpr):
    """First row of a tile, and its window. Row blocks vary fastest, start at ``first_block`` and wrap around."""
    tile = number
    if listed is not None:
        tile = tl.load(listed + 1 + number)
    return (first_block + tile % num_blocks) % all_blocks * BLOCK_M, tile // num_blocks


@triton.jit
def tile_rows(epilogue, token_scale, r, rows, scale, GRADIENT: tl.constexpr):
    """What :func:`finish_tile` needs of the tile's tokens. Each token's scale is the first."""
    token_scales = r.to(tl.float32)  # Not read without token_scale: Triton needs a value of this type.
    if token_scale is not None:
        token_scales = tl.load(token_scale + r, mask=r < rows, other=0.0)
    if GRADIENT:
        return _gradient_rows(epilogue, token_scale, token_scales, r, rows, scale)
    else:
        shift = token_scales  # Not read without a softmax shift.
        if epilogue.softmax_shift is not None:
            shift = tl.load(epilogue.softmax_shift + r, mask=r < rows, other=0.0)
        return (token_scales, shift)


@triton.jit
def finish_tile(
    z,
    row_values,
    epilogue,
    operands,
    place,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
):
    """What is stored of a tile, from its product ``z = x @ weight.T``. ``operands``: bias, scale of tokens, scale and
    soft-cap. ``place``: row and column numbers, the window, and how many rows and entries there are."""
    bias, token_scale, scale, cap = operands
    r, c, window, rows, entries = place
    if bias is not None:
        z += tl.load(bias + c, mask=c < entries, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        z = scaled(z, scale)
    if token_scale is not None:
        z = scaled(z, row_values[0][:, None])
    CAPPED: tl.constexpr = cap.number is not None
    caps = z  # Not read without a cap.
    if CAPPED:
        caps = caps_of(cap, r, r < rows)
        if cap.of_token is not None:
            caps = caps[:, None]
        z = softcapped(z, caps)
    if GRADIENT:
        return _gradient(z, row_values, epilogue, caps, CAPPED)
    else:
        if epilogue.logits is not None:
            inside = (r < rows)[:, None] & (c < entries)[None, :]
            tl.store(epilogue.logits + r.to(tl.int64)[:, None] * epilogue.logits_stride + c[None, :], z, mask=inside)
        HAS_SOFTMAX_SHIFT: tl.constexpr = epilogue.softmax_shift is not None
        e = store_partials(z, r, c, window, rows, entries, row_values[1], epilogue.partials, MASKED, HAS_SOFTMAX_SHIFT)
        return e * SAVED_SCALE


@triton.jit
def _gradient_rows(epilogue, token_scale, token_scales, r, rows, scale):
    """Of each token: its scale, the maximum, the factor of its exponentials, alpha, delta and epsilon beside that
    factor, and gamma.

    Without delta and epsilon, alpha is part of the factor. Factor and gamma contain the scales and ``fp16_scale``.
    Epsilon contains what turns an exponential into p.
    """
    valid = r < rows
    base = finite_base(tl.load(epilogue.max + r, mask=valid, other=0.0))
    grad_scale = scale
    if token_scale is not None:
        grad_scale = token_scales * scale
    if epilogue.fp16_scale is not None:
        grad_scale *= tl.load(epilogue.fp16_scale)
    to_p = 1.0 / tl.load(epilogue.sum_exp + r, mask=valid, other=1.0)
    factor = to_p * grad_scale
    alpha = tl.load(epilogue.alpha + r, mask=valid, other=0.0)
    delta = alpha  # Not read without delta.
    if epilogue.delta is not None:
        delta = tl.load(epilogue.delta + r, mask=valid, other=0.0)
    epsilon = alpha  # Not read without epsilon.
    if epilogue.epsilon is not None:
        epsilon = tl.load(epilogue.epsilon + r, mask=valid, other=0.0) * to_p
    if epilogue.delta is None and epilogue.epsilon is None:
        factor *= alpha
    scaled_gamma = alpha  # Not read without gamma.
    if epilogue.gamma is not None:
        scaled_gamma = tl.load(epilogue.gamma + r, mask=valid, other=0.0) * grad_scale
    return (token_scales, base, factor, alpha, delta, epsilon, scaled_gamma)


@triton.jit
def _gradient(z, row_values, epilogue, cap, CAPPED: tl.constexpr):
    _, base, factor, alpha, delta, epsilon, scaled_gamma = row_values
    e = exponential_from(z, base[:, None])
    g = e * factor[:, None]
    # The terms are as given, rounded only here: they nearly cancel where z is near the expected logit.
    if epilogue.delta is not None:
        moved = tl.maximum(z - base[:, None], LOWEST_SHIFT)
        if epilogue.epsilon is not None:
            g *= alpha[:, None] + delta[:, None] * moved + epsilon[:, None] * e
        else:
            g *= alpha[:, None] + delta[:, None] * moved
    elif epilogue.epsilon is not None:
        g *= alpha[:, None] + epsilon[:, None] * e
    if epilogue.gamma is not None:
        g -= scaled_gamma[:, None]
    if CAPPED:
        g *= 1.0 - (z / cap) * (z / cap)
    return g
