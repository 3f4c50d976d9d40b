"""The triton backend: a fused projection for the forward and for what is recomputed, cuBLAS for dX, dW.

A block of R tokens keeps ``exp(z - r)`` of its first vocabulary rows, r being one reference per token
wherever its logits allow it (:mod:`parallel_lce.kernels.projection`). Then dlogits = c e but for the
targets' entries, with one coefficient c per token, and no pass over R * V is needed between the
forward and the products of the backward:

    dX = c (G @ weight)        dW = G.T @ (c x)        G = e with the targets' entries replaced

and what the rounding of these entries would take away is added to the results in fp32
(:mod:`parallel_lce.kernels.targets`). Recomputed rows of the vocabulary write their gradients to scratch
memory, slice by slice; there c is 1. The formula of the gradient is that of
:mod:`parallel_lce.backends.eager`, the slices are :mod:`parallel_lce.backends.slices`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel_lce.backends.blocks import (
    Arrival,
    Coefficients,
    Destinations,
    Kept,
    Projection,
    Scratch,
    in_own_context,
    keepable,  # noqa: F401
)
from parallel_lce.backends.gemm import put
from parallel_lce.backends.slices import (
    ALIGNED,
    Awaited,
    HiddenProduct,
    Slices,
    add_weight_gradient,
    dense,
    operands_of,
    stride_of,
)
from parallel_lce.kernels.losses import token_losses  # noqa: F401
from parallel_lce.kernels.partials import merge_messages, merge_windows  # noqa: F401
from parallel_lce.kernels.projection import Operands, window_partials
from parallel_lce.kernels.reference import sampled_maximum
from parallel_lce.kernels.targets import target_logits
from parallel_lce.kernels.tuning import rows_beside_gather
from parallel_lce.partials import TARGET, Columns, empty_partial

# Adding to an fp32 dW moves 8 D bytes per vocabulary row whatever the block's rows are: from about
# this many on, that costs less than projecting again.
SMALLEST_ACCUMULATED = 1024
REUSES_KEPT = True

# Bytes of window partials of an evaluation, which needs them no longer than a merge.
_PARTIAL_BYTES = 32 << 20


def allocate_kept(projection: Projection, rows: int, columns: int) -> Tensor:
    """A buffer for the exponentials of ``rows`` tokens and ``columns`` vocabulary rows."""
    return projection.weight.new_empty(rows * stride_of(min(columns, projection.real)))


@in_own_context
def block_forward(
    projection: Projection,
    x: Tensor,
    target: Tensor | None,
    columns: Columns,
    kept: int,
    buffer: Tensor | None = None,
    out: Tensor | None = None,
    arrival: Arrival | None = None,
) -> tuple[Tensor, Kept]:
    """Partials ``[C, R]`` of ``x [R, D]`` over the shard, and its first ``kept`` rows' exponentials:
    ``[R, >= kept]``, rounded down to whole windows, with the windows' maxima ``[windows, R]``
    and, but for fp16, ``common [R]`` and ``agreed [R]`` (``kernels.partials``). See :mod:`parallel_lce.backends.eager`.
    Whole tiles of rows that are there are projected before the ``arrival`` of the others is waited for, unless
    the partials of all windows are too many to be alive at once.
    """
    rows, real = x.shape[0], projection.real
    if rows == 0 or real == 0:
        return empty_partial(columns, rows, projection.dtype, x.device, out), ()
    given, x = x, dense(x)
    assert arrival is None or x is given, "a copy would be of rows that are not there"
    operands = operands_of(projection, x, 0, real)
    width = operands.tile.columns
    assert width % ALIGNED == 0
    kept = real if kept >= real else kept // width * width
    merged = x.new_empty(columns.count, rows, dtype=projection.dtype) if out is None else out
    wanted = {
        "shifted": columns.mean_log_prob,
        "total": columns.mean_logit,
        "weighted": columns.expected_logit,
        "argmax": columns.argmax,
    }

    def reduce(part: Operands, merged: Tensor, **keep) -> Kept:
        maxima, sums = window_partials(part, **wanted, **keep)
        common = keep.get("common")
        agreed = merge_windows(
            maxima, sums, merged, common, window=width, entries=real, start=projection.start, **wanted
        )
        return (maxima,) if common is None else (maxima, common, agreed)

    fitting = rows if kept else max(1, _PARTIAL_BYTES // (4 * operands.windows * (columns.count - 1)))
    # Even pieces of whole tiles.
    height = operands.tile.rows
    step = -(-rows // (-(-rows // fitting) * height)) * height
    result: Kept = ()
    if kept:
        stored = allocate_kept(projection, rows, kept) if buffer is None else buffer
        stored = stored[: rows * stride_of(kept)].view(rows, -1)
        common = _common_reference(operands)
        order = _in_order(operands, arrival, common)
        result = (stored, *reduce(operands, merged, kept=stored[:, :kept], common=common, order=order))
    elif rows <= step:
        reduce(operands, merged, order=_in_order(operands, arrival, None))
    else:
        if arrival is not None:
            arrival.wait()
        for first in range(0, rows, step):
            part = slice(first, first + step)
            piece = merged.new_empty(len(merged), x[part].shape[0])
            reduce(operands_of(projection, x[part], 0, real), piece)
            merged[:, part] = piece
    if target is None:
        merged[TARGET].zero_()
    else:
        target_logits(operands, target, merged[TARGET])
    return merged, result


def _in_order(operands: Operands, arrival: Arrival | None, common: Tensor | None) -> Iterator[tuple[range, bool]]:
    """The row blocks of a product in the order in which their hidden states arrive, and whether others are
    still on their way beside it. ``common`` is filled on the way."""
    rows, height = operands.x.shape[0], operands.tile.rows
    blocks = -(-rows // height)
    refers = common is not None and operands.softcap is None
    known = range(0)
    if arrival is not None:
        coming = rows - (arrival.stop - arrival.start)
        beside = rows_beside_gather(coming, operands.x.element_size(), operands.weight.shape[0])
        first = -(-arrival.start // height)
        last = blocks if arrival.stop == rows else arrival.stop // height
        known = range(first, max(first, min(first - (-beside // height), last)))
    if known:
        if refers:
            sampled_maximum(operands, height * known.start, min(height * known.stop, rows), common)
        yield known, True
    if arrival is not None:
        arrival.wait()
    if refers:
        # Once more those that are known: they cost less than another launch.
        sampled_maximum(operands, 0, rows, common)
    yield range(known.stop, blocks + known.start), False


def _common_reference(operands: Operands) -> Tensor | None:
    """Room for a logit near each token's largest ``[R]`` fp32, of :func:`_in_order`; 0 under a soft-cap.

    None for fp16, whose exponentials must be relative to each window's maximum.
    """
    x = operands.x
    if x.dtype == torch.float16:
        return None
    if operands.softcap is not None:
        return x.new_zeros(x.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape[0], dtype=torch.float32)


@in_own_context
def block_backward(
    projection: Projection,
    x: Tensor,
    target: Tensor | None,
    statistics: Tensor,
    coefficients: Coefficients,
    kept: Kept,
    to: Destinations,
    scratch: Scratch,
) -> None:
    """Gradients of a block of ``x [R, D]``, written or added where ``to`` says.

    The kept exponentials are overwritten, and their memory then serves what this block recomputes.
    dX is complete and announced before the last slice's dW product is started. Beside what is kept
    and ``scratch``: fp32 products of at most 128 MiB, or the size of dX where several slices add to
    it, and a copy of x. What is kept of the block needs x for dW alone.
    """
    rows, real = x.shape[0], projection.real
    if rows == 0 or real == 0:
        to.x_ready()
        if to.dx is not None:
            to.dx.zero_()
        if to.dx_ready is not None:
            to.dx_ready()
        return
    operand = Awaited(x, to.x_ready)
    slices = Slices(projection, operand, target, statistics, coefficients, kept, to, scratch)
    product = None if to.dx is None else HiddenProduct(to, projection.weight, slices)
    for part in slices:
        if product is not None:
            product.add(part)
        if part.stop == real:
            if product is not None:
                product.finish()
            if to.dx_ready is not None:
                to.dx_ready()
        if to.dweight is not None:
            add_weight_gradient(to.dweight, part, slices, product)
        if to.dbias is not None:
            total, overwrite = to.dbias.open(part.start, part.stop)
            column_sum = part.gradient.sum(0, dtype=total.dtype)
            if slices.unscale is not None:
                column_sum *= slices.unscale
            put(total, column_sum, overwrite)
            slices.add_targets(total.unsqueeze(1), projection.weight.new_ones(1, 1).expand(rows, 1), part.start)
            to.dbias.close(part.start, part.stop, total)
