# ruff: noqa: F401
"""The triton backend: a fused projection for the forward and for recomputed logits, cuBLAS for dX and dW.

A block of R tokens saves ``e = exp(z - r)`` of its first vocabulary entries. r is one softmax shift per token, except
for windows whose maximum lies more than 32 from it (:mod:`parallel_lce.kernels.projection`). The gradient of the logits
is then c e, with one coefficient c per token, except in the target's column. So no pass over R * V is needed between
the forward and the products of the backward (:mod:`parallel_lce.backends.triton_backward`).

The functions are those of :mod:`parallel_lce.backends.torch_backend`, which says what they do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends import torch_backend
from parallel_lce.backends.interface import (
    ForwardTask,
    LogitsGradient,
    Pair,
    Projection,
    SelectedGradient,
    Selection,
    savable,
)
from parallel_lce.backends.torch_logits import top_k
from parallel_lce.backends.triton_backward import BlockBackward
from parallel_lce.backends.triton_dense import Dense
from parallel_lce.backends.triton_filter import keeps_windows
from parallel_lce.backends.triton_operands import ALIGNED, dense, product_of, stride_of
from parallel_lce.core.partials import TARGET, Columns, empty_partial
from parallel_lce.kernels import dense_logits
from parallel_lce.kernels import selected as kernels
from parallel_lce.kernels.dense_logits import divergence as divergence_of
from parallel_lce.kernels.losses import mean_loss, token_losses
from parallel_lce.kernels.partials import PartialColumns, WindowPartials, merge_ranks, merge_windows
from parallel_lce.kernels.projection import ForwardEpilogue, Product, new_window_partials
from parallel_lce.kernels.token_gradients import Saved, scale_and_add_targets
from parallel_lce.kernels.token_logits import token_logits
from parallel_lce.kernels.tuning import MEASURED, rows_beside_gather

NAME: str = "triton"
DENSE_FLOPS: float = MEASURED.dense_flops
SMALLEST_ACCUMULATED: int = MEASURED.smallest_accumulated
REUSES_SAVED: bool = True

_PARTIAL_BYTES = MEASURED.partial_bytes


def allocate_saved(projection: Projection, rows: int, entries: int) -> Tensor:
    return projection.weight.new_empty(rows * stride_of(min(entries, projection.real_rows)))


def block_logits(projection: Projection, x: Tensor) -> tuple[Tensor, Tensor]:
    rows, real, columns = x.shape[0], projection.real_rows, Columns()
    logits = x.new_empty(rows, stride_of(real), dtype=projection.dtype)[:, :real]
    partial = empty_partial(columns, rows, projection.dtype, x.device)
    if rows and real:
        product = product_of(projection, dense(x), 0, real)
        windows = new_window_partials(product, columns)
        product.launch(None, ForwardEpilogue(windows, None, logits, logits.stride(0)))
        width = product.tile.entries
        merge_windows(windows, partial, None, columns, window=width, entries=real, start=projection.start)
    return logits, partial


def selected_logits(projection: Projection, x: Tensor, selection: Selection, out: Tensor) -> None:
    kernels.selected_logits(product_of(projection, dense(x), 0, projection.real_rows), selection, out)


def selected_hidden_gradient(weight: Tensor, gradient: SelectedGradient, dx: Tensor) -> None:
    kernels.hidden_gradient(weight, gradient.selection, gradient.values, dx)


def selected_weight_gradient(
    x: Tensor, owner: Tensor, gradient: SelectedGradient, dweight: Tensor, dbias: Tensor | None
) -> None:
    if len(dweight) == 0:
        return
    kernels.weight_gradient(dense(x), gradient.selection.ids, owner, gradient.values, dweight, dbias)


def set_log_probs(packed: Tensor, sets: Any, broken: Tensor | None, vocab_size: Tensor | int) -> tuple[Tensor, Tensor]:
    return kernels.set_log_probs(packed, sets.ids, sets.offsets, broken, vocab_size)


def set_gradient(log_probs: Tensor, upstream: Tensor, sets: Any) -> Tensor:
    # Hooks for saved tensors may have changed strides.
    return kernels.set_gradient(log_probs.contiguous(), upstream.contiguous(), sets.offsets)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.dim() == 1 or gradient.numel() == 0 or not gradient.is_contiguous():
        return torch_backend.scaled(gradient, factor, dtype)
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    rows, of_result = (t.view(-1, t.shape[-1]) for t in (gradient, result))
    scale_and_add_targets(rows, factor, None, of_result)
    return result


def logits_partial(logits: Tensor, target: Tensor, shifted: bool, partial: Tensor) -> None:
    of = dense_logits if logits.stride(1) == 1 else torch_backend
    of.logits_partial(logits, target, shifted, partial)


def logits_gradient(logits: Tensor, target: Tensor, partial: Tensor, coefficients: Tensor) -> Tensor:
    if logits.stride(1) != 1:
        return torch_backend.logits_gradient(logits, target, partial, coefficients)
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    # A fourth column is not read.
    found = torch.cat([partial[:3], partial[:1], coefficients])
    dense_logits.logits_gradient(logits, target, found, gradient)
    return gradient


def divergence(pair: Pair, sums: Tensor | None, gradient: LogitsGradient | None) -> None:
    divergence_of(*pair, sums, *(gradient or (None, None, None)))


class BlockForward:
    """Partials of a block over the shard, and the exponentials of its first vocabulary rows.

    The number of saved vocabulary rows is rounded down to whole windows. With ``keep_windows`` the windows' sums of
    exponentials are saved, too, if a filtered backward can recompute fewer than all windows. fp16 has no softmax shift:
    its exponentials are relative to each window's maximum.
    """

    def __init__(self, task: ForwardTask) -> None:
        projection, x, target, columns, save, buffer, out, keep_windows, selected = task
        rows, real = x.shape[0], projection.real_rows
        self._selected = selected
        self._projection, self._target, self._columns = projection, target, columns
        self._local = range(0)
        self._product: Product | None = None
        # Partials of all windows and rows; None if the rows are projected in several ranges.
        self._partials: PartialColumns | None = None
        if rows == 0 or real == 0:
            self.partial = empty_partial(columns, rows, projection.dtype, x.device, out)
            return
        self.partial = x.new_empty(columns.count, rows, dtype=projection.dtype) if out is None else out
        # ``dense`` does not copy x while its gather runs: gathered tensors are contiguous and aligned.
        self._product = product = product_of(projection, dense(x), 0, real)
        width = product.tile.entries
        assert width % ALIGNED == 0
        save = real if save >= real else save // width * width
        self._keeps_windows = keep_windows and keeps_windows(projection, product, real - save)
        self._stored: Tensor | None = None
        self._exponentials: Tensor | None = None
        self._shift: Tensor | None = None
        if save:
            stride = stride_of(save)
            if buffer is None:
                self._stored = x.new_empty(rows, stride)
            else:
                self._stored = buffer[: rows * stride].view(rows, stride)
            self._exponentials = self._stored if stride == save else self._stored[:, :save]
            self._shift = _new_softmax_shift(product)
        # Rows per range: whole tiles; all rows if exponentials or windows are saved.
        row_bytes = 4 * product.windows * (columns.count - 1)
        fitting = rows if save or self._keeps_windows else max(1, _PARTIAL_BYTES // row_bytes)
        pieces, height = -(-rows // fitting), product.tile.rows
        self._piece_rows = -(-rows // (pieces * height)) * height
        if rows <= self._piece_rows:
            self._partials = new_window_partials(product, columns)

    def project_local(self, local: range) -> None:
        """Project full tiles of the ``local`` rows of x, at most as many as take the time of the gather. Does nothing
        if the rows are projected in several ranges."""
        product = self._product
        if product is None or self._partials is None:
            return
        rows, height = product.x.shape[0], product.tile.rows
        first = -(-local.start // height)
        last = product.row_blocks if local.stop == rows else local.stop // height
        in_time = rows_beside_gather(rows - len(local), product.x.element_size(), product.weight.shape[0])
        last = min(last, first - (-in_time // height))
        if last <= first:
            return
        self._local = range(first, last)
        shift = self._sampled_shift
        if shift is not None:
            some = slice(height * first, min(height * last, rows))
            token_logits(product.of_rows(some), None, None, shift[some])
        product.launch(
            self._exponentials, ForwardEpilogue(self._partials, self._shift), self._local, overlaps_collective=True
        )

    def project_rest(self) -> Saved | tuple[()]:
        """Project the remaining rows, and merge the partials of all windows. Returns the saved tensors."""
        if self._product is None:
            return ()
        product, done = self._product, self._local
        saved = ()
        if self._target is None:
            self.partial[TARGET].zero_()
        # One launch samples all rows. It recomputes the local rows, to the same values, which costs less than a second
        # launch.
        if self._target is not None or self._sampled_shift is not None:
            token_logits(product, self._target, self.partial[TARGET], self._sampled_shift)
        if self._partials is not None:
            # Row blocks after the local ones, wrapping around to those before them.
            left = range(done.stop, product.row_blocks + done.start)
            product.launch(self._exponentials, ForwardEpilogue(self._partials, self._shift), left)
            on_shift = self._merge(product, self._partials, slice(0, len(product.x)))
            if self._stored is not None or self._keeps_windows:
                sums = self._partials.sum_exp if self._keeps_windows else None
                saved = Saved(self._stored, self._partials.max, self._shift, on_shift, sums)
        else:
            self._project_in_pieces(product)
        return saved

    def _project_in_pieces(self, product: Product) -> None:
        for first in range(0, product.x.shape[0], self._piece_rows):
            rows = slice(first, first + self._piece_rows)
            piece = product.of_rows(rows)
            partials = new_window_partials(piece, self._columns)
            piece.launch(None, ForwardEpilogue(partials, None))
            self._merge(piece, partials, rows)
            del partials  # before the next ones are allocated

    def _merge(self, product: Product, partials: PartialColumns, rows: slice) -> Tensor | None:
        """Merge the windows of some rows, and compute the rows' selected logits."""
        if self._selected is not None:
            selection, logits = self._selected
            windows = WindowPartials(partials.max, partials.sum_exp, self._shift)
            kernels.selected_logits(product, selection.of_rows(rows), logits, windows)
        target = None if self._target is None else self._target[rows]
        return merge_windows(
            partials,
            self.partial[:, rows],
            self._shift,
            self._columns,
            target=target,
            window=product.tile.entries,
            entries=self._projection.real_rows,
            start=self._projection.start,
        )

    @property
    def _sampled_shift(self) -> Tensor | None:
        """The softmax shift, or None if it is not sampled: under a soft-cap it is 0."""
        return self._shift if self._projection.softcap is None else None


def _new_softmax_shift(product: Product) -> Tensor | None:
    """Memory for the tokens' softmax shift ``[R]`` fp32: 0 under a soft-cap, None for fp16."""
    x = product.x
    if x.dtype == torch.float16:
        return None
    new = x.new_empty if product.softcap is None else x.new_zeros
    return new(x.shape[0], dtype=torch.float32)


block_forward, block_backward = BlockForward, BlockBackward
