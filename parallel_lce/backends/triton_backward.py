"""The backward of the triton backend: the two products of each slice of the gradient of the logits.

With one coefficient c per token (1 where G was recomputed or rewritten), a slice G ``[R, C]``
(:mod:`parallel_lce.backends.triton_slices`) gives

    dX = c (G @ weight)        dW = G.T @ (c x)        G with the targets' entries replaced

A target's gradient t is formed in fp32. If no other token of the piece has the target, G holds 0, and the terms of t
are added to dX and dW in fp32. Otherwise G holds t rounded (:mod:`parallel_lce.kernels.token_gradients`). The formula
of the gradient is in :mod:`parallel_lce.backends.torch_backend`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.gemm import put
from parallel_lce.backends.interface import BackwardTask, HiddenGrad
from parallel_lce.backends.triton_slices import Piece, Slice, is_coded, tiling, window_of
from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.core.memory import some_rows
from parallel_lce.kernels.product import aligned_contiguous
from parallel_lce.kernels.token_gradients import Saved, scale_and_add_targets
from parallel_lce.kernels.tuning import MEASURED

# Rows of a product are a multiple of this.
_ROWS = 1024
PRODUCT_BYTES = MEASURED.product_bytes


class BlockBackward:
    """Gradients of a block. The saved exponentials are overwritten, and recomputed slices reuse their memory. dX is
    complete before the last slice's dW product starts. If nothing is saved and nothing waits for dX, it is formed last
    (``HiddenGrad``). Peak memory beside the exponentials and ``scratch``: fp32 products of
    at most 128 MiB, or of dX's size where several slices add to it, and a copy of x."""

    def __init__(self, task: BackwardTask) -> None:
        projection = task.projection
        saved: Saved | tuple[()] = task.saved
        self._task, self._projection, self._grads, self._saved = task, projection, task.grads, saved
        # The last slice, whose dW is formed by weight_grad.
        self._last: tuple[Piece, Slice] | None = None
        self._dx_written = False
        # Whether recomputed slices take dX's bytes, so that dX is formed after dW.
        self._dx_last = False
        # By gradient buffer: the sum of the current range of entries, to which all pieces add.
        self._sums: dict[GradBuffer, tuple[Tensor, bool]] = {}
        # Set by hidden_grad.
        self._ranges: list[tuple[int, int]] = []
        self._pieces: list[Piece] = []
        # Saved rows may be padded.
        known = min(saved.exponentials.shape[1], projection.real_rows) if saved else 0
        # Codes are decoded in slices, as logits are recomputed.
        self._coded = is_coded(saved)
        self._saved_entries = 0 if self._coded else known
        self._empty = task.x.shape[0] == 0 or projection.real_rows == 0
        self.reads_hidden_first = not self._empty and self._saved_entries < projection.real_rows

    def _cut(self) -> tuple[list[tuple[int, int]], list[Piece]]:
        """The ranges of vocabulary entries, and the pieces of rows. A piece has a slice for each range."""
        x, saved = aligned_contiguous(self._task.x), self._saved
        task = self._task if x is self._task.x else self._task._replace(x=x)
        if self._saved_entries == self._projection.real_rows:
            return [(0, self._saved_entries)], [Piece(task, slice(0, x.shape[0]))]
        held = 0 if not saved or self._coded else saved.exponentials.numel()
        dx, capacity = self._grads.dx, max(held, task.scratch.capacity(x.dtype))
        widest = max(1, PRODUCT_BYTES // (4 * x.shape[1]))
        window = window_of(saved, self._projection.real_rows) if saved and self._coded else 1

        def cut_for(capacity: int) -> tuple[list[tuple[int, int]], list[slice]]:
            return tiling(self._projection, x, self._saved_entries, capacity, widest, window)

        ranges, cut = cut_for(capacity)
        # Several ranges are added to an fp32 sum of dX.
        summed = len(ranges) > 1 and x.dtype != self._projection.dtype
        if dx is not None and dx.last and summed and held == 0 and not task.scratch.allocated:
            longest = len(x) * MEASURED.longest_slice
            wider = cut_for(max(capacity, min(capacity + x.numel(), longest)))
            self._dx_last = len(wider[0]) > 1
            ranges, cut = wider if self._dx_last else (ranges, cut)
        pieces = []
        for rows in cut:
            some = task if len(cut) == 1 else task.of_rows(rows)
            pieces.append(Piece(some._replace(x=aligned_contiguous(some.x)), rows))
        return [(0, self._saved_entries), *ranges] if self._saved_entries else ranges, pieces

    def hidden_grad(self) -> None:
        """Form dX, and dW of all slices but the last; of the last, too, if dX is formed last."""
        dx, real = self._grads.dx, self._projection.real_rows
        if self._empty:
            if dx is not None:
                dx.memory.zero_()
            return
        total: Tensor | None = None
        self._ranges, self._pieces = self._cut()
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
                    self._last = piece, vocab_slice
                else:
                    self._add_weight(piece, vocab_slice)
                del vocab_slice
        if self._dx_last:
            self._task.scratch.release()
        if dx is not None and total is not None:
            for piece in self._pieces:
                if total is not dx.memory or piece.has_targets or piece.fp16_unscale is not None:
                    rows = total[piece.rows]
                    piece.finish_rows(rows, None, (0, len(rows)), dx.memory[piece.rows])
        self._dx_written = True

    def weight_grad(self) -> None:
        """dW and dbias of the last slice."""
        if self._last is not None:
            self._add_weight(*self._last)
            self._last = None

    def _form_hidden(self, piece: Piece, vocab_slice: Slice, dx: Tensor) -> None:
        """dX of a piece from one slice of all entries. Some rows at a time, the fp32 product is finished
        (:meth:`Piece.finish_rows`) and then rounded."""
        weight = self._weight_of(vocab_slice)
        self._dx_written = True
        dx = dx[piece.rows] if len(self._pieces) > 1 else dx
        plain = vocab_slice.dx_factor is None and piece.fp16_unscale is None and not piece.has_targets
        if plain and vocab_slice.products is None:
            vocab_slice.add_hidden(dx, weight, slice(0, dx.shape[0]), overwrite=True)
            return
        rows = PRODUCT_BYTES // (4 * dx.shape[1]) // _ROWS * _ROWS or _ROWS
        for start in range(0, dx.shape[0], rows):
            stop = min(start + rows, dx.shape[0])
            product = torch.empty(stop - start, dx.shape[1], dtype=self._projection.dtype, device=dx.device)
            vocab_slice.add_hidden(product, weight, slice(start, stop), overwrite=True)
            piece.finish_rows(product, vocab_slice.dx_factor, (start, stop), some_rows(dx, start, stop))
            del product  # before the next one is allocated

    def _add_hidden(self, piece: Piece, vocab_slice: Slice, dx: HiddenGrad, total: Tensor | None) -> Tensor:
        """The fp32 sum of dX over the slices so far, in dX's memory if that is fp32. The first slice starts it."""
        dtype = self._projection.dtype
        if total is None:
            self._dx_written = not self._dx_last and dx.memory.dtype == dtype
            total = dx.memory if self._dx_written else self._task.x.new_empty(self._task.x.shape, dtype=dtype)
        rows = total[piece.rows]
        vocab_slice.add_hidden(
            rows, self._weight_of(vocab_slice), slice(0, len(rows)), overwrite=vocab_slice.start == 0
        )
        if vocab_slice.dx_factor is not None:
            scale_and_add_targets(rows, vocab_slice.dx_factor, None, rows)
        return total

    def _weight_of(self, vocab_slice: Slice) -> Tensor:
        return some_rows(self._projection.weight, vocab_slice.start, vocab_slice.stop)

    def _add_weight(self, piece: Piece, vocab_slice: Slice) -> None:
        """``dW[start:stop] += G.T @ (c x)``, and ``dbias[start:stop] += G.sum(0)``."""
        grads = self._grads
        if grads.dweight is not None:
            self._add_dweight(piece, vocab_slice, grads.dweight)
        if grads.dbias is not None:
            total, empty = self._open(grads.dbias, piece, vocab_slice.start, vocab_slice.stop)
            column_sum = vocab_slice.column_sum(total.dtype)
            if piece.fp16_unscale is not None:
                column_sum *= piece.fp16_unscale
            put(total, column_sum, empty)
            ones = self._projection.weight.new_ones(1, 1).expand(len(piece.x), 1)
            piece.add_targets(total.unsqueeze(1), ones, vocab_slice.start)
            self._close(grads.dbias, piece, vocab_slice.start, vocab_slice.stop)

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
        memory = None if self._grads.dx is None or self._dx_written else self._grads.dx.memory
        if memory is None or memory.dtype != piece.x.dtype or not memory.is_contiguous():
            memory = torch.empty_like(piece.x)
        return scale_and_add_targets(piece.x, vocab_slice.dw_factor, None, memory)
