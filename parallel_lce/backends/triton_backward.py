"""The backward of the triton backend: the gradient of the logits in slices of the vocabulary, and their products.

With one coefficient c per token (1 where G was recomputed or rewritten), a slice G ``[R, C]`` gives

    dX = c (G @ weight)        dW = G.T @ (c x)        G with the targets' entries replaced

G is either formed from saved exponentials, in their memory, or recomputed into scratch memory. If the scratch memory
held only a narrow slice of all rows, the rows are cut into pieces, too (:meth:`BlockBackward._tiling`).

Rows of G, and the gradients of targets: :mod:`parallel_lce.kernels.token_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_lce.backends.formulas import fp16_scale_of
from parallel_lce.backends.gemm import accumulate, matmul, put
from parallel_lce.backends.interface import BackwardTask, HiddenGrad
from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.core.memory import some_rows
from parallel_lce.core.partials import SUM_EXP
from parallel_lce.core.plan import LONG_SLICE
from parallel_lce.kernels.codes import decode
from parallel_lce.kernels.epilogue import GradientTerms
from parallel_lce.kernels.launch import next_power_of_2
from parallel_lce.kernels.product import Product, aligned_contiguous, stride_of
from parallel_lce.kernels.results import factor_stride_of, without_factor
from parallel_lce.kernels.selected import write_selected
from parallel_lce.kernels.token_gradients import (
    Saved,
    Targets,
    add_targets,
    rewrite_rows,
    scale_and_add_targets,
    token_gradients,
    write_targets,
)
from parallel_lce.kernels.tuning import LONGEST_SLICE, PRODUCT_BYTES

# Rows of a piece are a multiple of this, since matrix products are tiled so.
_MULTIPLE = 128
# Rows of a product are a multiple of this.
_ROWS = 1024


def window_of(saved: Saved, real_rows: int) -> int:
    """Width of the forward's windows, a power of two; for a shard of one window the next power of two suffices.
    ``Product.of`` may now choose another tile, since saved-tensor hooks may change the operands' alignment."""
    return next_power_of_2(-(-real_rows // saved.maxima.shape[0]))


@dataclass
class Slice:
    """The gradient of the logits of the shard's entries ``[start, stop)``, for one piece of the rows."""

    start: int
    stop: int
    # [R, stop - start]
    gradient: Tensor
    # [R] factors of the rows of gradient @ weight; None: 1
    dx_factor: Tensor | None
    # [R] factors of the rows of x in gradient.T @ x; None: 1
    dw_factor: Tensor | None
    # Whether ``gradient`` is multiplied whole.
    whole: bool = True

    def add_hidden(self, total: Tensor, weight: Tensor, rows: slice, overwrite: bool) -> None:
        """``total += gradient[rows] @ weight[start:stop]``, or ``=``. ``weight``: the shard's. ``total``: fp32; of a
        ``whole`` slice, with ``overwrite``, also of lower precision."""
        weight = some_rows(weight, self.start, self.stop)
        accumulate(total, some_rows(self.gradient, rows.start, rows.stop), weight, overwrite=overwrite)

    def add_weight(self, total: Tensor, x: Tensor, entries: slice, overwrite: bool) -> None:
        """``total += gradient[:, entries].T @ x``, or ``=``. ``total``: fp32, or of lower precision with
        ``overwrite``."""
        gradient = some_rows(self.gradient.transpose(0, 1), entries.start, entries.stop)
        accumulate(total, gradient, x, overwrite=overwrite)

    def column_sum(self, dtype: torch.dtype) -> Tensor:
        """``gradient.T @ dw_factor``, in ``dtype``. A factor of low precision would be rounded, so it is two."""
        if self.dw_factor is None:
            return self.gradient.sum(0, dtype=dtype)
        high = self.dw_factor.to(self.gradient.dtype)
        low = (self.dw_factor - high).to(high.dtype)
        return matmul(self.gradient.t(), torch.stack([high, low]).t()).sum(1, dtype=dtype)


class Piece:
    """Forms the slices of one piece of a block, with rows ``x [R, D]``. All slices of a block use the same memory: one
    must be consumed before the next is formed."""

    def __init__(self, task: BackwardTask, rows: slice) -> None:
        """``task``: of the piece's ``rows`` alone."""
        projection, coefficients, saved = task.projection, task.coefficients, task.saved
        self.rows, self.x, self._task = rows, task.x, task
        self.projection, partial = projection, task.partial.contiguous()
        self._saved = saved or None
        # Codes are decoded into the scratch memory, as slices are recomputed.
        self._codes: Saved | None = None
        if saved and saved.shift is not None:
            self._codes, self._saved = saved, None
            if coefficients.beta is None:  # the target has no code: its entry is written in any case
                coefficients = coefficients._replace(beta=torch.zeros_like(coefficients.alpha))
        is_fp16, capped = projection.weight.dtype == torch.float16, projection.logit_map.softcap is not None
        differs = any([c is not None for c in (coefficients.gamma, coefficients.delta, coefficients.epsilon)])
        # Rewrite every row of saved exponentials: selected entries can be added to no others.
        self._rewrite = task.selection is not None or differs or capped or is_fp16
        fp16_scale: Tensor | None = None
        # 1 / fp16_scale, 0-dimensional: every sum over G is multiplied by it. None except in fp16.
        self.fp16_unscale: Tensor | None = None
        # The targets with their gradients, which the first slice finds.
        self.targets = Targets()
        # [R]; None if the logits of targets need no gradient of their own.
        self.target = None if coefficients.beta is None else task.target
        saved_entries = 0 if self._saved is None else self._saved.exponentials.shape[1]
        # Only where all rows keep their exponentials the kernels take a factor.
        if self._rewrite or saved_entries < projection.real_rows or task.filter is not None:
            coefficients = without_factor(coefficients)
        if is_fp16:
            fp16_scale = fp16_scale_of(coefficients, partial[SUM_EXP], projection, task.selection)
            self.fp16_unscale = 1 / fp16_scale
        stride = factor_stride_of(coefficients)
        self.terms = GradientTerms(partial, coefficients, stride, fp16_scale, projection.logit_map)

    def form(self, start: int, stop: int) -> Slice:
        task, saved, real = self._task, self._saved, self.projection.real_rows
        if saved is not None and start < saved.exponentials.shape[1]:
            gradient = saved.exponentials if saved.exponentials.shape[1] == stop else saved.exponentials[:, :stop]
        else:
            saved, gradient = None, self._recompute(start, stop)
        if saved is not None and self._rewrite:
            rewrite_rows(gradient, saved, self.terms, window_of(saved, real))
            saved = None
        if task.selection is not None:
            write_selected(gradient, start, task.selection, self.terms)
        dx_factor = dw_factor = None
        if start == 0 and (saved is not None or self.target is not None):
            self.targets, dx_factor, dw_factor = token_gradients(
                gradient,
                saved,
                self.target,
                self.terms,
                entries=real,
                window=1 if saved is None else window_of(saved, real),
                find_shared=task.dweight is not None or task.dbias is not None,
                selected=task.selection is not None,
            )
        elif self.target is not None:
            write_targets(gradient, start, self.targets, self.terms.fp16_scale)
        vocab_slice = Slice(start, stop, gradient, dx_factor, dw_factor)
        return vocab_slice if task.filter is None else task.filter(self, vocab_slice)

    def _recompute(self, start: int, stop: int) -> Tensor:
        gradient = self._memory(start, stop)
        decoded = 0
        if self._codes is not None:
            decoded = max(0, min(stop, self._codes.exponentials.shape[1]) - start)
            if decoded:
                window = window_of(self._codes, self.projection.real_rows)
                decode(self._codes, self.rows, self.terms, start, window, gradient[:, :decoded])
        if start + decoded < stop:
            Product.of(self.projection, self.x, start + decoded, stop).launch(gradient[:, decoded:], self.terms)
        return gradient

    def _memory(self, start: int, stop: int) -> Tensor:
        """Uninitialised memory for a recomputed slice."""
        shape = self.x.shape[0], stride_of(stop - start)
        elements = shape[0] * shape[1]
        # The saved slice was consumed first. Recomputed slices overwrite its memory.
        memory = None if self._saved is None else self._saved.exponentials.view(-1)[:elements]
        if memory is None or memory.numel() < elements:
            memory = self._task.scratch.borrow(elements, self.x.dtype)
        return memory.view(shape)[:, : stop - start]

    def finish_rows(self, source: Tensor, dx_factor: Tensor | None, rows: tuple[int, int], dx: Tensor) -> None:
        """Write ``dx`` of the piece's ``rows [start, stop)``. ``source``: dX summed over all slices, not yet multiplied
        by ``dx_factor``."""
        targets, terms = self.targets, None
        if self.target is not None:
            weight = some_rows(self.projection.weight, 0, self.projection.real_rows)
            terms = some_rows(targets.target, *rows), some_rows(targets.residual, *rows), weight
        factor = self.fp16_unscale if dx_factor is None else some_rows(dx_factor, *rows)
        scale_and_add_targets(source, factor, terms, dx)

    def add_targets(self, total: Tensor, x: Tensor, start: int) -> None:
        """Add the targets' terms of dW to ``total``, the shard's rows from ``start`` on."""
        if self.target is not None:
            add_targets(total, start, self.targets, x)


def block_backward(task: BackwardTask) -> Iterator[bool]:
    real, saved = task.projection.real_rows, task.saved
    if len(task.x) == 0 or real == 0:
        if task.dx is not None:
            task.dx.memory.zero_()
        yield True
        return
    # Codes are decoded in slices, as logits are recomputed. Saved rows may be padded.
    entries = min(saved.exponentials.shape[1], real) if saved and saved.shift is None else 0
    if entries < real:
        yield False
    yield from BlockBackward(task, entries).run()


class BlockBackward:
    """Gradients of a block. The saved exponentials are overwritten, and recomputed slices reuse their memory. dX is
    complete before the last slice's dW product starts. If nothing is saved and nothing waits for dX, it is formed last
    (``HiddenGrad``). Peak memory beside the exponentials and ``scratch``: fp32 products of at most 128 MiB, or of dX's
    size where several slices add to it, and a copy of x."""

    def __init__(self, task: BackwardTask, saved_entries: int) -> None:
        """``saved_entries``: of the shard, the first, whose exponentials are saved."""
        x, dx, scratch = aligned_contiguous(task.x), task.dx, task.scratch
        self._task = task = task._replace(x=x)
        self._projection, self._saved_entries = task.projection, saved_entries
        self._dx_written = False
        # By gradient buffer: the sum of the current range of entries, to which all pieces add.
        self._sums: dict[GradBuffer, tuple[Tensor, bool]] = {}
        held = task.saved.exponentials.numel() if saved_entries else 0
        capacity = max(held, scratch.capacity(x.dtype))
        ranges, cut = self._tiling(capacity)
        # Whether recomputed slices take dX's bytes, so that dX is formed after dW.
        self._dx_last = False
        # Several ranges are added to an fp32 sum of dX.
        summed = len(ranges) > 1 and x.dtype != self._projection.dtype
        if dx is not None and dx.last and summed and held == 0 and scratch.memory is None:
            wider = self._tiling(max(capacity, min(capacity + x.numel(), len(x) * LONGEST_SLICE)))
            self._dx_last = len(wider[0]) > 1
            ranges, cut = wider if self._dx_last else (ranges, cut)
        # Ranges of entries; and pieces of rows, which begin at multiples of 128 rows, and so aligned. A piece has a
        # slice for each range.
        self._ranges = [(0, saved_entries), *ranges] if saved_entries else ranges
        self._pieces = [Piece(task if len(cut) == 1 else task.of_rows(rows), rows) for rows in cut]

    def _tiling(self, capacity: int) -> tuple[list[tuple[int, int]], list[slice]]:
        """Cut the recomputed gradient into ranges of the shard's entries, behind the saved ones, and pieces of rows.
        One range of one piece has at most ``capacity`` elements, or one window.

        The entries of a range are the K dimension of the product for dX; the rows of a piece, of the product for dW.
        Each product is added to a sum in memory, which slows a product with a K dimension below ``LONG_SLICE``. So the
        rows are cut if ranges of all rows would be narrower than that; such ranges have a product for dW of at most
        ``PRODUCT_BYTES``. If exponentials are saved, all rows stay together."""
        x, start, real, saved = self._task.x, self._saved_entries, self._projection.real_rows, self._task.saved
        rows = len(x)
        if start == real:
            return [], [slice(0, rows)]
        # Codes are decoded in whole windows of the forward.
        window = window_of(saved, real) if saved and not start else 1
        width = max(Product.of(self._projection, x, start, real).tile.entries, window)
        fitting, height = max(width, capacity // rows // width * width), rows
        widest = max(1, PRODUCT_BYTES // (4 * x.shape[1]))
        wide = max(width, min(LONG_SLICE, math.isqrt(capacity), widest) // width * width)
        if fitting < min(wide, real) and not start:
            fitting, height = wide, capacity // wide // _MULTIPLE * _MULTIPLE or capacity // wide
        number = -(-(real - start) // fitting)
        step = -(-(real - start) // (number * width)) * width
        pieces = -(-rows // height)
        height = min(rows, -(-rows // (pieces * _MULTIPLE)) * _MULTIPLE)
        return (
            [(a, min(a + step, real)) for a in range(start, real, step)],
            [slice(a, min(a + height, rows)) for a in range(0, rows, height)],
        )

    def run(self) -> Iterator[bool]:
        """Yields True once dX is complete."""
        dx, real = self._task.dx, self._projection.real_rows
        total: Tensor | None = None
        for start, stop in self._ranges:
            for piece in self._pieces:
                vocab_slice = piece.form(start, stop)
                if dx is None:
                    pass
                elif len(self._ranges) == 1:
                    self._form_hidden(piece, vocab_slice, dx.memory)
                else:
                    total = self._add_hidden(piece, vocab_slice, dx, total)
                if stop == real and piece is self._pieces[-1] and not self._dx_last:
                    self._finish_hidden(total)
                    total = None
                    yield True
                self._add_weight(piece, vocab_slice)
                del vocab_slice
        if self._dx_last:
            self._task.scratch.memory = None
            self._finish_hidden(total)
            yield True

    def _form_hidden(self, piece: Piece, vocab_slice: Slice, dx: Tensor) -> None:
        """dX of a piece from one slice of all entries. Some rows at a time, the fp32 product is finished
        (:meth:`Piece.finish_rows`) and then rounded."""
        self._dx_written = True
        dx = dx[piece.rows] if len(self._pieces) > 1 else dx
        plain = vocab_slice.dx_factor is None and piece.fp16_unscale is None and piece.target is None
        if plain and vocab_slice.whole:
            vocab_slice.add_hidden(dx, self._projection.weight, slice(0, dx.shape[0]), overwrite=True)
            return
        rows = PRODUCT_BYTES // (4 * dx.shape[1]) // _ROWS * _ROWS or _ROWS
        for start in range(0, dx.shape[0], rows):
            stop = min(start + rows, dx.shape[0])
            product = torch.empty(stop - start, dx.shape[1], dtype=self._projection.dtype, device=dx.device)
            vocab_slice.add_hidden(product, self._projection.weight, slice(start, stop), overwrite=True)
            piece.finish_rows(product, vocab_slice.dx_factor, (start, stop), some_rows(dx, start, stop))
            del product  # before the next one is allocated

    def _add_hidden(self, piece: Piece, vocab_slice: Slice, dx: HiddenGrad, total: Tensor | None) -> Tensor:
        """The fp32 sum of dX over the slices so far, in dX's memory if that is fp32. The first slice starts it."""
        dtype = self._projection.dtype
        if total is None:
            self._dx_written = not self._dx_last and dx.memory.dtype == dtype
            total = dx.memory if self._dx_written else self._task.x.new_empty(self._task.x.shape, dtype=dtype)
        rows, weight = total[piece.rows], self._projection.weight
        vocab_slice.add_hidden(rows, weight, slice(0, len(rows)), overwrite=vocab_slice.start == 0)
        if vocab_slice.dx_factor is not None:
            scale_and_add_targets(rows, vocab_slice.dx_factor, None, rows)
        return total

    def _finish_hidden(self, total: Tensor | None) -> None:
        """Write dX, if it was summed over several slices."""
        dx, self._dx_written = self._task.dx, True
        if dx is None or total is None:
            return
        for piece in self._pieces:
            if total is not dx.memory or piece.target is not None or piece.fp16_unscale is not None:
                rows = total[piece.rows]
                piece.finish_rows(rows, None, (0, len(rows)), dx.memory[piece.rows])

    def _add_weight(self, piece: Piece, vocab_slice: Slice) -> None:
        """``dW[start:stop] += G.T @ (c x)``, and ``dbias[start:stop] += G.sum(0)``."""
        dweight, dbias = self._task.dweight, self._task.dbias
        if dweight is not None:
            self._add_dweight(piece, vocab_slice, dweight)
        if dbias is not None:
            total, empty = self._open(dbias, piece, vocab_slice.start, vocab_slice.stop)
            column_sum = vocab_slice.column_sum(total.dtype)
            if piece.fp16_unscale is not None:
                column_sum *= piece.fp16_unscale
            put(total, column_sum, empty)
            ones = self._projection.weight.new_ones(1, 1).expand(len(piece.x), 1)
            piece.add_targets(total.unsqueeze(1), ones, vocab_slice.start)
            self._close(dbias, piece, vocab_slice.start, vocab_slice.stop)

    def _open(
        self, buffer: GradBuffer, piece: Piece, start: int, stop: int, whole: bool = False
    ) -> tuple[Tensor, bool]:
        """The buffer's sum of some entries, shared by all pieces, and whether it must be overwritten."""
        if piece is self._pieces[0]:
            self._sums[buffer] = buffer.open(start, stop, whole)
            return self._sums[buffer]
        return self._sums[buffer][0], False

    def _close(self, buffer: GradBuffer, piece: Piece, start: int, stop: int) -> None:
        if piece is self._pieces[-1]:
            buffer.close(start, stop, self._sums.pop(buffer)[0])

    def _add_dweight(self, piece: Piece, vocab_slice: Slice, dweight: GradBuffer) -> None:
        """Add the slice's dW. One product, if it needs no fp32 buffer, or if there are several pieces, whose ranges are
        narrow. Otherwise products of ``PRODUCT_BYTES``."""
        x, single = self._scaled_hidden(piece, vocab_slice), len(self._pieces) == 1
        step = vocab_slice.stop - vocab_slice.start
        if single and (piece.fp16_unscale is not None or dweight.buffered):
            step = max(256, PRODUCT_BYTES // (4 * x.shape[1]) // 256 * 256)
        for start in range(vocab_slice.start, vocab_slice.stop, step):
            stop = min(start + step, vocab_slice.stop)
            entries = slice(start - vocab_slice.start, stop - vocab_slice.start)
            total, empty = self._open(dweight, piece, start, stop, whole=single)
            if piece.fp16_unscale is None:
                vocab_slice.add_weight(total, x, entries, overwrite=empty)
                piece.add_targets(total, piece.x, start)
            else:
                product = x.new_empty(stop - start, x.shape[1], dtype=self._projection.dtype)
                vocab_slice.add_weight(product, x, entries, overwrite=True)
                product.mul_(piece.fp16_unscale)
                piece.add_targets(product, piece.x, start)
                put(total, product, empty)
                del product  # before the next one is allocated
            del total
            self._close(dweight, piece, start, stop)

    def _scaled_hidden(self, piece: Piece, vocab_slice: Slice) -> Tensor:
        """``c x [R, D]``, in dX's memory if dX is not written yet."""
        if vocab_slice.dw_factor is None:
            return piece.x
        memory = None if self._task.dx is None or self._dx_written else self._task.dx.memory
        if memory is None or memory.dtype != piece.x.dtype or not memory.is_contiguous():
            memory = torch.empty(piece.x.shape, dtype=piece.x.dtype, device=piece.x.device)
        return scale_and_add_targets(piece.x, vocab_slice.dw_factor, None, memory)
