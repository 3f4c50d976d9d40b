"""The triton backend: a fused projection for the forward and for what is recomputed, cuBLAS for dX, dW.

A block of R tokens keeps ``exp(z - r)`` of its first vocabulary rows, r being one reference per token
wherever its logits allow it (:mod:`parallel_lce.kernels.projection`). Then dlogits = c e but for the
targets' entries, with one coefficient c per token, and no pass over R * V is needed between the
forward and the products of the backward:

    dX = c (G @ weight)        dW = G.T @ (c x)        G = e with the targets' entries replaced

and what the rounding of these entries would take away is added to the results in fp32
(:mod:`parallel_lce.kernels.targets`). Recomputed rows of the vocabulary write their gradients to scratch
memory, slice by slice; there c is 1. The formula of the gradient is that of
:mod:`parallel_lce.backends.eager`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from triton import next_power_of_2

from parallel_lce.backends.blocks import (
    Coefficients,
    Destinations,
    Kept,
    Projection,
    Scratch,
    in_own_context,
    power_of_two_scale,
)
from parallel_lce.backends.gemm import accumulate_nt, matmul_nt, put
from parallel_lce.kernels import dlogits
from parallel_lce.kernels.losses import token_losses  # noqa: F401
from parallel_lce.kernels.partials import merge_windows
from parallel_lce.kernels.projection import Operands, logits_gradient, window_partials
from parallel_lce.kernels.targets import (
    add_targets,
    finished_rows,
    place_targets,
    target_gradients,
    target_logits,
)
from parallel_lce.partials import TARGET, Columns, empty_partial
from parallel_lce.weight_grad import ShardGradient

# Adding to an fp32 dW moves 8 D bytes per vocabulary row whatever the block's rows are: from about
# this many on, that costs less than projecting again.
SMALLEST_ACCUMULATED = 1024

# Vocabulary rows of the weight whose logits tell a token's reference.
_SAMPLED = 128
# Leading dimensions of kept exponentials are multiples of this: cuBLAS and TMA want 16 bytes.
_ALIGNED = 64
# Bytes of window partials of an evaluation, which needs them no longer than a merge.
_PARTIAL_BYTES = 32 << 20
# Bytes of a product in fp32 on its way to a low-precision gradient.
_PRODUCT_BYTES = 128 << 20
# Exponent of e down to which kept exponentials have their full precision, less a margin.
_RANGE = {torch.float16: 20.0}
_DEFAULT_RANGE = 80.0


def keepable(dtype: torch.dtype, softcap: float | None) -> bool:
    """Whether kept exponentials still tell z, which the chain of a soft-cap needs."""
    return softcap is None or 2 * softcap <= _RANGE.get(dtype, _DEFAULT_RANGE)


def _stride(columns: int) -> int:
    return -(-columns // _ALIGNED) * _ALIGNED


def allocate_kept(projection: Projection, rows: int, columns: int) -> Tensor:
    """A buffer for the exponentials of ``rows`` tokens and ``columns`` vocabulary rows."""
    return projection.weight.new_empty(rows * _stride(min(columns, projection.real)))


def _operands(projection: Projection, x: Tensor, start: int, stop: int) -> Operands:
    """The product of ``x`` with the shard's rows ``[start, stop)``."""
    bias = None if projection.bias is None else projection.bias[start:stop]
    weight = projection.weight[start:stop]
    return Operands(x, weight, bias, projection.scale, projection.softcap)


def _dense(x: Tensor) -> Tensor:
    """``x`` in one piece and aligned, which a copy of this size makes for little."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@in_own_context
def block_forward(
    projection: Projection,
    x: Tensor,
    target: Tensor | None,
    columns: Columns,
    kept: int,
    buffer: Tensor | None = None,
) -> tuple[Tensor, Kept]:
    """Partials ``[C, R]`` of ``x [R, D]`` over the shard, and its first ``kept`` rows' exponentials:
    ``[R, >= kept]``, rounded down to whole windows, with the windows' maxima ``[windows, R]``
    and, but for fp16, ``common [R]`` and ``agreed [R]`` (``kernels.partials``). See :mod:`parallel_lce.backends.eager`.
    """
    rows, real = x.shape[0], projection.real
    if rows == 0 or real == 0:
        return empty_partial(columns, rows, projection.dtype, x.device), ()
    x = _dense(x)
    operands = _operands(projection, x, 0, real)
    width = operands.tile.columns
    assert width % _ALIGNED == 0
    kept = real if kept >= real else kept // width * width
    merged = x.new_empty(columns.count, rows, dtype=projection.dtype)
    if target is None:
        merged[TARGET].zero_()
    else:
        target_logits(operands, target, merged[TARGET])
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
            maxima, sums, merged, common,
            window=width, entries=real, start=projection.start, **wanted,
        )  # fmt: skip
        return (maxima,) if common is None else (maxima, common, agreed)

    if kept:
        stored = allocate_kept(projection, rows, kept) if buffer is None else buffer
        stored = stored[: rows * _stride(kept)].view(rows, -1)
        common = _common_reference(projection, x)
        references = reduce(operands, merged, kept=stored[:, :kept], common=common)
        return merged, (stored, *references)
    fitting = max(1, _PARTIAL_BYTES // (4 * operands.windows * (columns.count - 1)))
    # Even pieces of whole tiles.
    height = operands.tile.rows
    step = -(-rows // (-(-rows // fitting) * height)) * height
    if rows <= step:
        reduce(operands, merged)
        return merged, ()
    for first in range(0, rows, step):
        part = slice(first, first + step)
        piece = merged[:, part].contiguous()
        reduce(_operands(projection, x[part], 0, real), piece)
        merged[:, part] = piece
    return merged, ()


def _common_reference(projection: Projection, x: Tensor) -> Tensor | None:
    """A logit near each token's largest ``[R]`` fp32: the largest of a sample of the vocabulary.

    None for fp16, whose exponentials must be relative to each window's maximum.
    """
    if x.dtype == torch.float16:
        return None
    if projection.softcap is not None:
        return x.new_zeros(x.shape[0], dtype=torch.float32)
    step = -(-projection.real // _SAMPLED)
    sample = torch.mm(x, projection.weight[: projection.real : step].t()).float()
    if projection.bias is not None:
        sample += projection.bias[: projection.real : step]
    reference = (sample * projection.scale).amax(1)
    # A sample of -inf alone, by its biases, says nothing.
    return reference.masked_fill_(reference.isinf(), 0.0)


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
    it, and a copy of x.
    """
    rows, real = x.shape[0], projection.real
    if rows == 0 or real == 0:
        if to.dx is not None:
            to.dx.zero_()
        if to.dx_ready is not None:
            to.dx_ready()
        return
    slices = _Slices(projection, _dense(x), target, statistics, coefficients, kept, to, scratch)
    product = None if to.dx is None else _HiddenProduct(to.dx, projection.weight, slices)
    for part in slices:
        if product is not None:
            product.add(part)
        if part.stop == real:
            if product is not None:
                product.finish()
            if to.dx_ready is not None:
                to.dx_ready()
        if to.dweight is not None:
            _add_weight_gradient(to.dweight, part, slices, product)
        if to.dbias is not None:
            total, overwrite = to.dbias.open(part.start, part.stop)
            column_sum = part.gradient.sum(0, dtype=total.dtype)
            if slices.unscale is not None:
                column_sum *= slices.unscale
            put(total, column_sum, overwrite)
            slices.add_targets(total.unsqueeze(1), slices.x.new_ones(1, 1).expand(rows, 1), part.start)
            to.dbias.close(part.start, part.stop, total)


@dataclass
class _Slice:
    """``gradient [R, stop - start]`` of the logits of the shard's rows ``[start, stop)``, to be multiplied by
    ``row_scale [R]`` in dX and ``x_scale [R]`` in dW, None for 1."""

    start: int
    stop: int
    gradient: Tensor
    row_scale: Tensor | None
    x_scale: Tensor | None


class _Slices:
    """The gradient of a block's logits, in slices of the vocabulary that follow each other in the
    same memory: a slice must be used before the next one is asked for."""

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        statistics: Tensor,
        coefficients: Coefficients,
        kept: Kept,
        to: Destinations,
        scratch: Scratch,
    ) -> None:
        self.x = x
        self._projection, self._target = projection, target
        self._statistics = statistics.contiguous()
        self._coefficients = coefficients.map(Tensor.contiguous)
        self._kept, self._scratch = kept, scratch
        # The bias's gradient is a sum over rows, which are then best complete.
        self._rewrite = to.dbias is not None
        self._power: Tensor | None = None
        self.unscale: Tensor | None = None
        if x.dtype == torch.float16:
            self._power = power_of_two_scale(coefficients, projection.scale)
            self.unscale = 1 / self._power
        # What the entries of the targets leave of their gradients, and whether a target is one token's.
        self._rest = self._alone = None
        if target is not None and self._coefficients.beta is not None:
            self._rest, self._alone = target_gradients(
                target, projection.real, self._statistics, *self._coefficients.each, projection.scale,
                projection.softcap, count=to.dweight is not None or to.dbias is not None,
            )  # fmt: skip
        # Used first, and free from then on.
        self._spent = kept[0].view(-1) if kept else x.new_empty(0)
        self._kept_columns = min(kept[0].shape[1], projection.real) if kept else 0
        self._cuts = self._recomputed()
        self.single = bool(kept) + len(self._cuts) == 1

    def _recomputed(self) -> list[tuple[int, int]]:
        """The recomputed slices: as even as whole windows allow, each within the scratch memory."""
        start, real = self._kept_columns, self._projection.real
        if start == real:
            return []
        width = _operands(self._projection, self.x, start, real).tile.columns
        rows, dtype = self.x.shape[0], self.x.dtype
        held = self._spent.numel()
        fitting = max(width, max(held, self._scratch.capacity(dtype)) // rows // width * width)
        number = -(-(real - start) // fitting)
        step = -(-(real - start) // (number * width)) * width
        return [(a, min(a + step, real)) for a in range(start, real, step)]

    def __iter__(self) -> Iterator[_Slice]:
        projection, statistics = self._projection, self._statistics
        alpha, _, gamma, delta = self._coefficients.each
        if self._kept:
            stored, maxima, *common = self._kept
            gradient = stored[:, : self._kept_columns]
            # Of what is kept, not of the operands: after saved-tensor hooks these may be aligned anew,
            # and another tile's.
            width = next_power_of_2(-(-projection.real // maxima.shape[0]))
            row_scale = dlogits.settle(
                gradient, maxima, *(common or (None, None)), width, statistics, alpha, gamma, self._rest,
                self._power, projection.scale, projection.softcap, self._rewrite,
            )  # fmt: skip
            yield self._slice(0, self._kept_columns, gradient, row_scale)
        for start, stop in self._cuts:
            shape = self.x.shape[0], _stride(stop - start)
            elements = shape[0] * shape[1]
            memory = self._spent[:elements]
            if memory.numel() < elements:
                memory = self._scratch.take(elements, self.x.dtype)
            gradient = memory.view(shape)[:, : stop - start]
            operands = _operands(projection, self.x, start, stop)
            logits_gradient(operands, statistics, alpha, gamma, delta, self._power, gradient)
            yield self._slice(start, stop, gradient, None)

    def _slice(self, start: int, stop: int, gradient: Tensor, row_scale: Tensor | None) -> _Slice:
        x_scale = row_scale
        if self._rest is not None:
            x_scale = place_targets(
                gradient, start, self._target, self._rest, self._alone, row_scale, self._power
            )
        return _Slice(start, stop, gradient, row_scale, x_scale)

    def finish(self, source: Tensor, row_scale: Tensor | None, rows: slice, dx: Tensor) -> None:
        """``dx`` of some rows, from their sum over all slices but for ``row_scale``."""
        targets = None
        if self._rest is not None:
            weight = self._projection.weight[: self._projection.real]
            targets = self._target[rows], self._rest[rows], weight
        factor = self.unscale if row_scale is None else row_scale[rows]
        finished_rows(source, factor, targets, dx)

    def add_targets(self, total: Tensor, x: Tensor, start: int) -> None:
        """What the targets' gradients add to the shard's rows from ``start`` on."""
        if self._rest is not None:
            add_targets(total, start, self._target, self._rest, self._alone, x)

    def scaled(self, part: _Slice, product: _HiddenProduct | None) -> Tensor:
        """``c x [R, D]``, in dX's memory as long as that is not written."""
        if part.x_scale is None:
            return self.x
        memory = product.idle_memory() if product is not None else None
        memory = torch.empty_like(self.x) if memory is None else memory
        return finished_rows(self.x, part.x_scale, None, memory)

    @property
    def plain(self) -> bool:
        """Whether sums over slices without a ``row_scale`` are dX as they are."""
        return self.unscale is None and self._rest is None


class _HiddenProduct:
    """dX ``[R, D]`` from the slices of the gradient of the logits."""

    def __init__(self, dx: Tensor, weight: Tensor, slices: _Slices) -> None:
        self._dx, self._weight, self._slices = dx, weight, slices
        self._sum: Tensor | None = None
        self._written = False

    def add(self, part: _Slice) -> None:
        weight = self._weight[part.start : part.stop].t()
        if self._slices.single:
            self._complete(part, weight)
            self._written = True
        elif self._sum is None:
            self._sum = matmul_nt(part.gradient, weight)
            if part.row_scale is not None:
                finished_rows(self._sum, part.row_scale, None, self._sum)
        else:
            accumulate_nt(self._sum, part.gradient, weight, overwrite=False)

    def _complete(self, part: _Slice, weight: Tensor) -> None:
        """One product, finished in fp32 before it is rounded, in pieces."""
        if self._slices.plain and part.row_scale is None:
            accumulate_nt(self._dx, part.gradient, weight, overwrite=True)
            return
        rows = max(1024, _PRODUCT_BYTES // (4 * weight.shape[0]) // 1024 * 1024)
        for first in range(0, self._dx.shape[0], rows):
            some = slice(first, first + rows)
            piece = matmul_nt(part.gradient[some], weight)
            self._slices.finish(piece, part.row_scale, some, self._dx[some])
            del piece  # before the next one is allocated

    def finish(self) -> None:
        if self._sum is None:
            return
        self._slices.finish(self._sum, None, slice(None), self._dx)
        self._sum, self._written = None, True

    def idle_memory(self) -> Tensor | None:
        """dX's memory where it is like x's and still unwritten."""
        x = self._slices.x
        fits = self._dx.dtype == x.dtype and self._dx.is_contiguous()
        return self._dx if fits and not self._written else None


def _add_weight_gradient(
    dweight: ShardGradient, part: _Slice, slices: _Slices, product: _HiddenProduct | None
) -> None:
    """``dW[start:stop] += G.T @ x``, in one product where it needs no fp32 buffer."""
    x = slices.scaled(part, product)
    step = part.stop - part.start
    if slices.unscale is not None or dweight.buffered:
        step = max(256, _PRODUCT_BYTES // (4 * x.shape[1]) // 256 * 256)
    for start in range(part.start, part.stop, step):
        stop = min(start + step, part.stop)
        gradient = part.gradient[:, start - part.start : stop - part.start].t()
        total, overwrite = dweight.open(start, stop, whole=True)
        if slices.unscale is None:
            accumulate_nt(total, gradient, x.t(), overwrite=overwrite)
            slices.add_targets(total, slices.x, start)
        else:
            piece = matmul_nt(gradient, x.t()).mul_(slices.unscale)
            slices.add_targets(piece, slices.x, start)
            put(total, piece, overwrite)
            del piece  # before the next one is allocated
        dweight.close(start, stop, total)
        del total
