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

from parallel_lce.kernels.arithmetic import (
    LOWEST_SHIFT,
    caps_of,
    exponential_from,
    finite_base,
    loaded,
    scaled,
    softcapped,
)
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
def tile_rows(epilogue, scaling, r, rows, GRADIENT: tl.constexpr):
    """What :func:`finish_tile` needs of the tile's tokens. Each token's scale is the first."""
    valid = r < rows
    if GRADIENT:
        return _gradient_rows(epilogue, scaling, loaded(scaling.of_token, r, valid, 1.0), r, valid)
    else:
        return (loaded(scaling.of_token, r, valid, 1.0), loaded(epilogue.softmax_shift, r, valid, 1.0))


@triton.jit
def finish_tile(
    z,
    row_values,
    epilogue,
    bias,
    scaling,
    place,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    SAVED_SCALE: tl.constexpr,
):
    """What is stored of a tile, from its product ``z = x @ weight.T``. ``place``: row and column numbers, the window,
    and how many rows and entries there are."""
    r, c, window, rows, entries = place
    if bias is not None:
        z += tl.load(bias + c, mask=c < entries, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        z = scaled(z, scaling.scale)
    if scaling.of_token is not None:
        z = scaled(z, row_values[0][:, None])
    caps = None
    if scaling.cap is not None:
        caps = caps_of(scaling, r, r < rows)
        if scaling.token_cap is not None:
            caps = caps[:, None]
        z = softcapped(z, caps)
    if GRADIENT:
        return _gradient(z, row_values, epilogue, caps)
    else:
        if epilogue.logits is not None:
            inside = (r < rows)[:, None] & (c < entries)[None, :]
            tl.store(epilogue.logits + r.to(tl.int64)[:, None] * epilogue.logits_stride + c[None, :], z, mask=inside)
        HAS_SHIFT: tl.constexpr = epilogue.softmax_shift is not None
        return store_partials(z, place, row_values[1], epilogue.partials, MASKED, HAS_SHIFT) * SAVED_SCALE


@triton.jit
def _gradient_rows(epilogue, scaling, token_scales, r, valid):
    """Of each token: its scale, the maximum, the factor of its exponentials, alpha, delta and epsilon beside that
    factor, and gamma.

    Without delta and epsilon, alpha is part of the factor. Factor and gamma contain the scales and ``fp16_scale``.
    Epsilon contains what turns an exponential into p.
    """
    base = finite_base(tl.load(epilogue.max + r, mask=valid, other=0.0))
    grad_scale = scaling.scale
    if scaling.of_token is not None:
        grad_scale = token_scales * scaling.scale
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
def _gradient(z, row_values, epilogue, cap):
    _, base, factor, alpha, delta, epsilon, gamma = row_values
    e = exponential_from(z, base[:, None])
    g = e * factor[:, None]
    # The terms are as given, rounded only here: they nearly cancel where z is near the expected logit.
    if epilogue.delta is not None or epilogue.epsilon is not None:
        terms = alpha[:, None]
        if epilogue.delta is not None:
            terms += delta[:, None] * tl.maximum(z - base[:, None], LOWEST_SHIFT)
        if epilogue.epsilon is not None:
            terms += epsilon[:, None] * e
        g *= terms
    if epilogue.gamma is not None:
        g -= gamma[:, None]
    if cap is not None:
        g *= 1.0 - (z / cap) * (z / cap)
    return g
