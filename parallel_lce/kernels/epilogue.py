"""Epilogues: what is computed from a tile of logits before it leaves registers.

    forward    stores the partials of every tile and, on request, its exponentials in the input's dtype, or their codes
               (:mod:`parallel_lce.kernels.codes`). Logits are not written.
    backward   writes the gradient of the logits in the input's dtype. :mod:`parallel_lce.kernels.token_gradients` adds
               the targets' entries.

An epilogue takes a tile ``z [BLOCK_M tokens, BLOCK_N vocabulary entries]`` in fp32; ``r`` and ``c`` are its row and
column numbers. A mainloop calls :func:`tile_rows` before a tile's product, so that its loads overlap the product, and
:func:`scale_tile` and :func:`finish_tile` after it. A forward that saves stores what ``finish_tile`` returns. Under a
soft-cap it stores what ``scale_tile`` returns, at once: both would take more registers than there are. ``KIND``: the
epilogue's. The functions run under Triton and Gluon. An absent tensor is None: Triton compiles the kernel without it.

Saved exponentials are those of ``arithmetic.slope_and_reference``; in fp16 the largest one of each window is 1. Under a
soft-cap what that is applied to is saved in their place (:class:`parallel_lce.kernels.token_gradients.Saved`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel_lce.core.logit_map import LogitMap
from parallel_lce.core.partials import NO_ENTRY, Coefficients
from parallel_lce.kernels.arithmetic import (
    LOWEST_SHIFT,
    exponential,
    finite_base,
    flattened,
    largest_of,
    loaded,
    local_ids,
    rounded_to_bf16,
)
from parallel_lce.kernels.codes import encoded
from parallel_lce.kernels.logit_map import caps_of, scaled, slope_at, softcapped
from parallel_lce.kernels.partials import PartialColumns, store_partials

_NO_ENTRY = tl.constexpr(NO_ENTRY)
# Of all mainloops: arguments whose values vary between launches. A new value does not compile a new kernel.
UNSPECIALIZED = ["rows", "first_block", "num_blocks"]


def projection_name(specialization) -> str:
    return "lce_backward_projection" if specialization.constants["KIND"] == "backward" else "lce_forward_projection"


@triton.jit
def tile_start(number, first_block, num_blocks, BLOCK_M: tl.constexpr):
    """First row of a tile, and its window, in the order of all mainloops. Row blocks vary fastest and begin at
    ``first_block``."""
    return (first_block + number % num_blocks) * BLOCK_M, number // num_blocks


class ForwardEpilogue(NamedTuple):
    """Stores partials ``[windows, R]`` of each tile and, on request, its logits."""

    KIND = "forward"
    partials: PartialColumns
    # [R, V] fp32, an output, and its row stride. None: logits are not stored.
    logits: torch.Tensor | None = None
    logits_stride: int = 0
    # [R] fp32: see ``arithmetic.flattened``. None: no token is flat.
    flat: torch.Tensor | None = None
    # [windows, R] fp32, an output: sums of the exponentials as bf16 rounds them. None: not needed.
    rounded_sums: torch.Tensor | None = None
    # [windows, R] int32 and fp32, outputs: 4 times each window's shift, and its lowest f, of tiles that become codes
    # (:mod:`parallel_lce.kernels.codes`). None: tiles become exponentials.
    shift: torch.Tensor | None = None
    lowest: torch.Tensor | None = None
    # Beside codes: [R] int64 ids relative to the shard. None: no targets.
    target: torch.Tensor | None = None


class GradientTerms(NamedTuple):
    """Operands of the gradient of R tokens' logits, beside the logits or their exponentials:
    ``(p (alpha + delta (z - max) + epsilon p) - gamma) * fp16_scale`` times the derivative of scale and soft-cap, with
    p = exp(z - lse). As an epilogue they turn logits into it, without the targets' terms."""

    KIND = "backward"
    # [>= 3, R] fp32, contiguous: the merged partial
    partial: torch.Tensor
    # fp32, contiguous
    coefficients: Coefficients
    # Stride of the coefficients' factor; 0 for one number. Triton specializes integers in tuples. Only
    # :func:`parallel_lce.kernels.token_gradients.token_gradients` takes a factor.
    factor_stride: int
    # 0-dimensional: the gradient is stored times this number; None: 1
    fp16_scale: torch.Tensor | None
    logit_map: LogitMap


@triton.jit
def tile_rows(epilogue, logit_map, r, rows, KIND: tl.constexpr):
    """Values of the tile's tokens for :func:`finish_tile`. The first are the tokens' scales."""
    valid = r < rows
    if KIND == "backward":
        return _gradient_rows(epilogue, logit_map, loaded(logit_map.token_scale, r, valid, 1.0), r, rows)
    else:
        scales, flat = loaded(logit_map.token_scale, r, valid, 1.0), loaded(epilogue.flat, r, valid, 1.0)
        if epilogue.shift is None:
            return (scales, flat)
        elif epilogue.target is None:
            return (scales, flat, r)  # a placeholder: functions of Triton 3.6 cannot return None
        else:
            return (scales, flat, local_ids(epilogue.target, r, rows, _NO_ENTRY))


@triton.jit
def scale_tile(z, row_values, bias, logit_map, position, SCALED: tl.constexpr):
    """Turn a tile's product ``x @ weight.T`` into its logits, before a soft-cap. ``SCALED``: whether the map's scale is
    not 1."""
    _, c, _, _, entries = position
    if bias is not None:
        z += tl.load(bias + c, mask=c < entries, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        z = scaled(z, logit_map.scale)
    if logit_map.token_scale is not None:
        z = scaled(z, row_values[0][:, None])
    return z


@triton.jit
def finish_tile(
    z, row_values, epilogue, logit_map, position, KIND: tl.constexpr, MASKED: tl.constexpr, SAVED_SCALE: tl.constexpr
):
    """Turn a tile ``z`` of :func:`scale_tile` into its exponentials, storing its partials, or into its gradient.
    ``position``: row numbers, column numbers, window, number of rows, number of entries."""
    r, c, window, rows, entries = position
    caps = caps_of(logit_map, r, r < rows)
    if logit_map.token_softcap is not None:
        caps = caps[:, None]
    if logit_map.softcap is not None:
        z = softcapped(z, caps)
    if KIND == "backward":
        return _gradient(z, row_values, epilogue.coefficients, logit_map, caps)
    else:
        if epilogue.logits is not None:
            inside = (r < rows)[:, None] & (c < entries)[None, :]
            tl.store(epilogue.logits + r.to(tl.int64)[:, None] * epilogue.logits_stride + c[None, :], z, mask=inside)
        e, top = store_partials(z, position, epilogue.partials, MASKED)
        if epilogue.shift is not None:
            return encoded(e, top, row_values[2], position, epilogue)
        else:
            if SAVED_SCALE != 1.0:
                e *= (SAVED_SCALE / largest_of(top))[:, None]
            saved = e
            if epilogue.rounded_sums is not None:
                saved = rounded_to_bf16(e)
                rounded = tl.sum(saved, 1)
                tl.store(epilogue.rounded_sums + window.to(tl.int64) * rows + r, rounded, mask=r < rows)
            if epilogue.flat is not None:
                saved = flattened(e, row_values[1][:, None])
            return saved


@triton.jit
def _gradient_rows(epilogue, logit_map, token_scales, r, rows):
    """Values per token: scale, maximum, factor of the exponentials, alpha, delta, epsilon, gamma.

    The factor contains 1 / sum_exp and, without delta and epsilon, alpha. Factor and gamma contain the scales and
    ``fp16_scale``. Epsilon contains 1 / sum_exp.
    """
    valid = r < rows
    base = finite_base(tl.load(epilogue.partial + r, mask=valid, other=0.0))
    grad_scale = logit_map.scale
    if logit_map.token_scale is not None:
        grad_scale = token_scales * logit_map.scale
    if epilogue.fp16_scale is not None:
        grad_scale *= tl.load(epilogue.fp16_scale)
    to_p = 1.0 / tl.load(epilogue.partial + rows + r, mask=valid, other=1.0)
    factor = to_p * grad_scale
    given = epilogue.coefficients
    alpha = tl.load(given.alpha + r, mask=valid, other=0.0)
    delta, epsilon = loaded(given.delta, r, valid, 1.0), loaded(given.epsilon, r, valid, to_p)
    if given.delta is None and given.epsilon is None:
        factor *= alpha
    return (token_scales, base, factor, alpha, delta, epsilon, loaded(given.gamma, r, valid, grad_scale))


@triton.jit
def _gradient(z, row_values, given, logit_map, cap):
    _, base, factor, alpha, delta, epsilon, gamma = row_values
    e = exponential(z - base[:, None])
    g = e * factor[:, None]
    # Summed before the product with the factor: the terms nearly cancel where z is near the expected logit.
    if given.delta is not None or given.epsilon is not None:
        terms = alpha[:, None]
        if given.delta is not None:
            terms += delta[:, None] * tl.maximum(z - base[:, None], LOWEST_SHIFT)
        if given.epsilon is not None:
            terms += epsilon[:, None] * e
        g *= terms
    if given.gamma is not None:
        g -= gamma[:, None]
    if logit_map.softcap is not None:
        g *= slope_at(z, cap)
    return g
