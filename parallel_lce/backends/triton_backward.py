"""The backward of the triton backend: the gradient of the logits in slices of the vocabulary, and its two products.

A slice's gradient G ``[R, C]`` is either formed from saved exponentials, in their memory, or recomputed into scratch
memory. With one coefficient c per token (1 where G was recomputed or rewritten),

    dX = c (G @ weight)        dW = G.T @ (c x)        G with the targets' entries replaced

A target's gradient is formed in fp32. G holds it rounded, and the rest is added to dX in fp32. If no other token of
the block has the target, G holds 0 and dW gets the whole of it in fp32 (:mod:`parallel_lce.kernels.targets`). The
formula of the gradient is that of :mod:`parallel_lce.backends.eager`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, matmul_nt, put
from parallel_lce.backends.interface import Coefficients, GradBuffers, Projection, Saved, Scratch, power_of_two_scale
from parallel_lce.grad_buffers import GradBuffer
from parallel_lce.kernels.projection import Product, logits_gradient
from parallel_lce.kernels.relaunch import next_power_of_2
from parallel_lce.kernels.targets import add_targets, place_targets, scale_and_add_targets
from parallel_lce.kernels.token_gradients import SavedExponentials, TokenCoefficients, TokenGradients, token_gradients
from parallel_lce.plan import PIECE_ROWS

# Leading dimensions of saved exponentials are multiples of this: cuBLAS and TMA want 16 bytes.
ALIGNED = 64
# Bytes of an fp32 product that is rounded into a low-precision gradient.
_PRODUCT_BYTES = 128 << 20


def stride_of(entries: int) -> int:
    """Elements from one token's saved exponentials to the next one's."""
    return -(-entries // ALIGNED) * ALIGNED


def product_of(projection: Projection, x: Tensor, start: int, stop: int) -> Product:
    """The product of ``x`` with the shard's rows ``[start, stop)``."""
    bias = None if projection.bias is None else projection.bias[start:stop]
    weight = projection.weight[start:stop]
    return Product(x, weight, bias, projection.scale, projection.softcap)


def dense(x: Tensor) -> Tensor:
    """``x`` contiguous and 16 bytes aligned. A copy of this size costs little."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@dataclass
class _Slice:
    """The gradient of the logits of the shard's entries ``[start, stop)``."""

    start: int
    stop: int
    # [R, stop - start]
    gradient: Tensor
    # [R] factors of the rows of gradient @ weight; None: 1
    dx_factor: Tensor | None
    # [R] factors of the rows of x in gradient.T @ x; None: 1
    dw_factor: Tensor | None


class _Slices:
    """Produces the slices of a block. All use the same memory: one must be consumed before the next is formed."""

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        partial: Tensor,
        coefficients: Coefficients,
        saved: Saved,
        scratch: Scratch,
        rewrite: bool,
        find_shared: bool,
    ) -> None:
        self._projection, self._x, self._target, self._scratch = projection, x, target, scratch
        self._partial, self._saved = partial.contiguous(), SavedExponentials(*saved) if saved else None
        # ``rewrite`` every row of saved exponentials, so that there are no row factors.
        self._rewrite, self._find_shared = rewrite, find_shared
        self._fp16_scale: Tensor | None = None
        # 1 / fp16_scale, 0-dimensional: every sum over G is multiplied by it. None except in fp16.
        self.fp16_unscale: Tensor | None = None
        # What was found of the tokens with the first slice. None before.
        self._tokens: TokenGradients | None = None
        self.has_targets = target is not None and coefficients.beta is not None
        if self._saved is None:
            self.saved_entries, self._memory = 0, projection.weight.new_empty(0)
        else:
            exponentials = self._saved.exponentials
            self.saved_entries = min(exponentials.shape[1], projection.real_rows)
            # The saved slice comes first in ``ranges``; recomputed slices overwrite its memory.
            self._memory = exponentials.view(-1)
        # The projection takes coefficients without a factor, and the scale is found from such.
        if self.saved_entries < projection.real_rows or projection.weight.dtype == torch.float16:
            coefficients = coefficients.folded()
        if projection.weight.dtype == torch.float16:
            self._fp16_scale = power_of_two_scale(coefficients, projection.scale)
            self.fp16_unscale = 1 / self._fp16_scale
        contiguous = [c if c is None else c.contiguous() for c in coefficients.each]
        self._coefficients = TokenCoefficients(*contiguous, coefficients.factor)
        self.ranges = self._recomputed_ranges()
        if self._saved is not None:
            self.ranges = [(0, self.saved_entries), *self.ranges]

    def _recomputed_ranges(self) -> list[tuple[int, int]]:
        """Ranges that are as even as whole windows allow, each within the scratch memory."""
        start, real = self.saved_entries, self._projection.real_rows
        if start == real:
            return []
        width = product_of(self._projection, self._x, start, real).tile.entries
        rows, dtype = self._x.shape[0], self._x.dtype
        capacity = max(self._memory.numel(), self._scratch.capacity(dtype))
        fitting = max(width, capacity // rows // width * width)
        number = -(-(real - start) // fitting)
        step = -(-(real - start) // (number * width)) * width
        return [(a, min(a + step, real)) for a in range(start, real, step)]

    def form(self, start: int, stop: int) -> _Slice:
        saved = self._saved if stop <= self.saved_entries else None
        gradient = self._recompute(start, stop) if saved is None else saved.exponentials[:, :stop]
        if self._tokens is not None:
            if self.has_targets:
                residual, unshared = self._tokens.residual, self._tokens.unshared
                place_targets(gradient, start, self._target, residual, unshared, self._fp16_scale)
            return _Slice(start, stop, gradient, None, None)
        if saved is None and not self.has_targets:
            return _Slice(start, stop, gradient, None, None)
        projection, window = self._projection, 1
        if saved is not None:
            # The forward's window, a power of two. The tile of ``product_of`` may differ from the forward's:
            # saved-tensor hooks may change the operands' alignment.
            window = next_power_of_2(-(-projection.real_rows // saved.maxima.shape[0]))
        self._tokens = tokens = token_gradients(
            gradient,
            saved,
            self._target,
            self._partial,
            self._coefficients,
            self._fp16_scale,
            entries=projection.real_rows,
            first=start,
            window=window,
            scale=projection.scale,
            softcap=projection.softcap,
            find_shared=self._find_shared,
            rewrite=self._rewrite,
        )
        return _Slice(start, stop, gradient, tokens.dx_factor, tokens.dw_factor)

    def _recompute(self, start: int, stop: int) -> Tensor:
        shape = self._x.shape[0], stride_of(stop - start)
        elements = shape[0] * shape[1]
        memory = self._memory[:elements]
        if memory.numel() < elements:
            memory = self._scratch.borrow(elements, self._x.dtype)
        gradient = memory.view(shape)[:, : stop - start]
        product, c = product_of(self._projection, self._x, start, stop), self._coefficients
        logits_gradient(product, self._partial, c.alpha, c.gamma, c.delta, self._fp16_scale, gradient)
        return gradient

    def finish_rows(
        self,
        source: Tensor,
        dx_factor: Tensor | None,
        rows: slice,
        dx: Tensor,
        scaled: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Write ``dx`` of some rows. ``source``: their sum over all slices, not yet multiplied by ``dx_factor``.
        ``scaled``: of :func:`scale_and_add_targets`, for all rows."""
        targets = None
        if self.has_targets and self._tokens is not None:
            target, residual = self._target, self._tokens.residual
            targets = target[rows], residual[rows], self._projection.weight[: self._projection.real_rows]
        factor = self.fp16_unscale if dx_factor is None else dx_factor[rows]
        if scaled is not None:
            scaled = tuple([part[rows] for part in scaled])
        scale_and_add_targets(source, factor, targets, dx, scaled)

    def add_targets(self, total: Tensor, x: Tensor, start: int) -> None:
        """Add what the targets' gradients contribute to the shard's rows from ``start`` on."""
        if self.has_targets and self._tokens is not None:
            add_targets(total, start, self._target, self._tokens.residual, self._tokens.unshared, x)


class BlockBackward:
    """Gradients of a block of ``x [R, D]``. ``partial [>= 3, R]``: the merged partial.

    The saved exponentials are overwritten, and what is recomputed reuses their memory. dX is complete before the last
    slice's dW product starts. Beside what is saved and ``scratch``, memory is needed for fp32 products of at most
    128 MiB, or of dX's size where several slices add to it, and for a copy of x.
    """

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        partial: Tensor,
        coefficients: Coefficients,
        saved: Saved,
        grads: GradBuffers,
        scratch: Scratch,
    ) -> None:
        self._projection, self._grads = projection, grads
        # The last slice, whose dW is still to come, and its c x, if that is formed already.
        self._last: _Slice | None = None
        self._scaled: Tensor | None = None
        self._dx_written = False
        self.reads_hidden_first = False
        self._empty = x.shape[0] == 0 or projection.real_rows == 0
        if self._empty:
            return
        self._x = dense(x)
        self._slices = _Slices(
            projection,
            self._x,
            target,
            partial,
            coefficients,
            saved,
            scratch,
            # The bias's gradient is a sum over rows of G, which must have no factors.
            rewrite=grads.dbias is not None,
            find_shared=grads.dweight is not None or grads.dbias is not None,
        )
        self.reads_hidden_first = self._slices.saved_entries < projection.real_rows

    def hidden_grad(self) -> Iterator[int]:
        """Form dX, and dW of all slices but the last; yields how many of dX's first rows are complete."""
        dx = self._grads.dx
        if self._empty:
            if dx is not None:
                yield len(dx.zero_())
            return
        slices = self._slices
        total: Tensor | None = None
        for start, stop in slices.ranges:
            part = slices.form(start, stop)
            if dx is None:
                pass
            elif len(slices.ranges) == 1:
                yield from self._form_hidden(part, dx)
            else:
                total = self._add_hidden(part, dx, total)
            if stop < self._projection.real_rows:
                self._add_weight(part)
            else:
                self._last = part
        if dx is not None and total is not None:
            if total is not dx or slices.has_targets or slices.fp16_unscale is not None:
                slices.finish_rows(total, None, slice(None), dx)
            yield len(dx)
        self._dx_written = True

    def weight_grad(self) -> None:
        """dW and dbias of the last slice."""
        if self._last is not None:
            self._add_weight(self._last)
            self._last = None

    def _form_hidden(self, part: _Slice, dx: Tensor) -> Iterator[int]:
        """dX by one product, finished in fp32 before it is rounded, in pieces of rows."""
        slices, weight = self._slices, self._weight_of(part)
        self._dx_written = True
        if part.dx_factor is None and slices.fp16_unscale is None and not slices.has_targets:
            accumulate_nt(dx, part.gradient, weight, overwrite=True)
            yield len(dx)
            return
        scaled = None
        if part.dw_factor is not None and self._grads.dweight is not None:
            self._scaled = torch.empty_like(self._x)
            scaled = self._x, part.dw_factor, self._scaled
        rows = _PRODUCT_BYTES // (4 * dx.shape[1]) // PIECE_ROWS * PIECE_ROWS or PIECE_ROWS
        for first in range(0, len(dx), rows):
            some = slice(first, min(first + rows, len(dx)))
            piece = matmul_nt(part.gradient[some], weight)
            slices.finish_rows(piece, part.dx_factor, some, dx[some], scaled)
            del piece  # before the next one is allocated
            yield some.stop

    def _add_hidden(self, part: _Slice, dx: Tensor, total: Tensor | None) -> Tensor:
        """The fp32 sum of dX over the slices so far; the first one starts it, in dX's memory if that is fp32."""
        weight = self._weight_of(part)
        if total is not None:
            accumulate_nt(total, part.gradient, weight, overwrite=False)
            return total
        if dx.dtype == self._projection.dtype:
            accumulate_nt(dx, part.gradient, weight, overwrite=True)
            total, self._dx_written = dx, True
        else:
            total = matmul_nt(part.gradient, weight)
        if part.dx_factor is not None:
            scale_and_add_targets(total, part.dx_factor, None, total)
        return total

    def _weight_of(self, part: _Slice) -> Tensor:
        return self._projection.weight[part.start : part.stop].t()

    def _add_weight(self, part: _Slice) -> None:
        """``dW[start:stop] += G.T @ (c x)``, and its row sums to dbias."""
        grads, slices = self._grads, self._slices
        if grads.dweight is not None:
            self._add_dweight(part, grads.dweight)
        if grads.dbias is not None:
            total, empty = grads.dbias.open(part.start, part.stop)
            column_sum = part.gradient.sum(0, dtype=total.dtype)
            if slices.fp16_unscale is not None:
                column_sum *= slices.fp16_unscale
            put(total, column_sum, empty)
            ones = self._projection.weight.new_ones(1, 1).expand(self._x.shape[0], 1)
            slices.add_targets(total.unsqueeze(1), ones, part.start)
            grads.dbias.close(part.start, part.stop, total)

    def _add_dweight(self, part: _Slice, dweight: GradBuffer) -> None:
        """In one product where it needs no fp32 buffer, else in products of ``_PRODUCT_BYTES``."""
        slices, x = self._slices, self._scaled_hidden(part)
        step = part.stop - part.start
        if slices.fp16_unscale is not None or dweight.buffered:
            step = max(256, _PRODUCT_BYTES // (4 * x.shape[1]) // 256 * 256)
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            gradient = part.gradient[:, start - part.start : stop - part.start].t()
            total, empty = dweight.open(start, stop, whole=True)
            if slices.fp16_unscale is None:
                accumulate_nt(total, gradient, x.t(), overwrite=empty)
                slices.add_targets(total, self._x, start)
            else:
                piece = matmul_nt(gradient, x.t()).mul_(slices.fp16_unscale)
                slices.add_targets(piece, self._x, start)
                put(total, piece, empty)
                del piece  # before the next one is allocated
            dweight.close(start, stop, total)
            del total

    def _scaled_hidden(self, part: _Slice) -> Tensor:
        """``c x [R, D]``, in dX's memory while that is not written."""
        if part.dw_factor is None:
            return self._x
        if self._scaled is not None:
            return self._scaled
        memory = self._grads.dx
        if memory is None or self._dx_written or memory.dtype != self._x.dtype or not memory.is_contiguous():
            memory = torch.empty_like(self._x)
        return scale_and_add_targets(self._x, part.dw_factor, None, memory)
