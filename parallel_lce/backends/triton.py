"""The triton backend: a fused projection for the forward and for recomputed logits, cuBLAS for dX and dW.

A block of R tokens saves ``e = exp(z)`` of its first vocabulary entries; in windows far from 0 another multiple
(``kernels.arithmetic.slope_and_reference``). The gradient of the logits is then c e, with one coefficient c per token,
except in the target's column. So no pass over R * V is needed between the forward and the products of the backward
(:mod:`parallel_lce.backends.triton_backward`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends import torch_backend
from parallel_lce.backends.interface import ForwardTask
from parallel_lce.backends.triton_backward import block_backward
from parallel_lce.core.logit_map import Projection
from parallel_lce.core.options import Wanted
from parallel_lce.core.partials import TARGET, Columns
from parallel_lce.core.selection import Selection
from parallel_lce.kernels import partials
from parallel_lce.kernels import selected as kernels
from parallel_lce.kernels.codes import CodeColumns
from parallel_lce.kernels.dense_logits import logits_gradient, logits_partial
from parallel_lce.kernels.epilogue import ForwardEpilogue
from parallel_lce.kernels.partials import PartialColumns, RoundedSums, merge_windows
from parallel_lce.kernels.product import ALIGNED, Product, aligned_contiguous, new_window_partials, stride_of
from parallel_lce.kernels.results import Results, mean_loss, statistics_gradient, without_factor
from parallel_lce.kernels.selected import log_softmax_of_sets, selected_rows, target_logits
from parallel_lce.kernels.token_gradients import Saved, scale_and_add_targets
from parallel_lce.kernels.tuning import FLOPS_PER_BYTE, PARTIAL_BYTES

# What this module imports and does not call are functions of :class:`parallel_lce.backends.interface.Backend`.
NAME: str = "triton"
SAME_BITS: bool = True
REUSES_SAVED: bool = True
CODES: bool = True


def block_forward(task: ForwardTask) -> tuple[Tensor, Saved | tuple[()], Any]:
    """The number of saved vocabulary rows is rounded down to whole windows."""
    projection, columns, target = task.projection, task.columns, task.target
    rows, real = task.x.shape[0], projection.real_rows
    if rows == 0 or real == 0:
        partial, _, found = torch_backend.block_forward(task)
        return partial, (), found
    x = aligned_contiguous(task.x)
    product = Product.of(projection, x, 0, real)
    partial = task.out
    if partial is None:
        partial = torch.empty(columns.count, rows, dtype=projection.dtype, device=x.device)
    stored = _Stored(task, product)
    if target is None:
        partial[TARGET].zero_()
    if target is not None or stored.flat is not None:
        target_logits(product, target, partial, stored.flat)
    ranges = _ranges(task, product)
    results = None if task.wanted is None else Results.new(task.wanted, partial, rows)
    saved: Saved | tuple[()] = ()
    for some in ranges:
        of_rows, merged, of_tokens, its_results = product, partial, target, results
        if len(ranges) > 1:
            of_rows, merged = product.of_rows(some), partial[:, some]
            of_tokens = None if target is None else target[some]
            its_results = None if results is None else results.of_rows(some)
        windows = new_window_partials(of_rows.x, product.windows, columns)
        epilogue = ForwardEpilogue(windows, flat=stored.flat)
        if task.logits is not None:
            epilogue = epilogue._replace(logits=task.logits[some], logits_stride=task.logits.stride(0))
        rounded = None
        if stored.codes is not None:
            epilogue = epilogue._replace(codes=stored.codes, target=target)
        elif stored.mass is not None:
            # The common rounding of exponentials matters where they are nearly equal. In fp32 it never does.
            sums = windows.sum_exp
            if x.dtype == torch.bfloat16:
                sums = torch.empty(windows.max.shape, dtype=torch.float32, device=x.device)
                epilogue = epilogue._replace(rounded_sums=sums)
            rounded = RoundedSums(sums, stored.mass, stored.entries, product.tile.entries)
        of_rows.launch(stored.numbers, epilogue)
        if task.selection is not None:
            kernels.selected_logits(of_rows, task.selection.of_rows(some), (windows.max, windows.sum_exp))
        merge_windows(
            windows,
            merged,
            columns,
            entries=real,
            start=projection.start,
            rounded=rounded,
            target=of_tokens,
            results=its_results,
        )
        saved = stored.saved(windows)
        del windows, epilogue, rounded  # before the next ones are allocated
    return partial, saved, None if results is None else results.found()


def _ranges(task: ForwardTask, product: Product) -> list[slice]:
    """Rows that are projected together: all, or without saved tensors whole tiles whose window partials fit
    ``PARTIAL_BYTES``."""
    rows, height = product.x.shape[0], product.tile.rows
    row_bytes = 8 * product.windows * (task.columns.merged - 1)
    if task.save or rows * row_bytes <= PARTIAL_BYTES:
        return [slice(0, rows)]
    fitting = max(1, PARTIAL_BYTES // row_bytes)
    size = -(-rows // (-(-rows // fitting) * height)) * height
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


class _Stored:
    """What a block saves beside the maxima of its windows."""

    def __init__(self, task: ForwardTask, product: Product) -> None:
        x, (rows, _), real, width = product.x, product.x.shape, product.weight.shape[0], product.tile.entries
        assert width % ALIGNED == 0
        # Saved entries: whole windows.
        self.entries = save = real if task.save >= real else task.save // width * width
        self.memory = self.numbers = self.mass = self.flat = self.codes = None
        if save == 0:
            return
        stride, capped = stride_of(save), product.logit_map.softcap is not None
        if task.buffer is None:
            dtype = torch.uint8 if task.codes else x.dtype
            self.memory = torch.empty(rows, stride, dtype=dtype, device=x.device)
        else:
            self.memory = task.buffer[: rows * stride].view(rows, stride)
        numbers = self.memory if stride == save else self.memory[:, :save]
        self.numbers = numbers.view(torch.float16) if capped else numbers
        if task.codes:
            shift = x.new_empty(product.windows, rows, dtype=torch.int32)
            self.codes = CodeColumns(shift, torch.empty_like(shift, dtype=torch.float32))
        elif not capped and x.dtype != torch.float16:
            # Such exponentials are multiplied where they are. Under a soft-cap and in fp16 all are rewritten first.
            self.mass = torch.empty(rows, dtype=torch.float32, device=x.device)
            if task.columns.differ:
                self.flat = torch.empty_like(self.mass)

    def saved(self, windows: PartialColumns) -> Saved | tuple[()]:
        if self.memory is None:
            return ()
        shift, lowest = self.codes or (None, None)
        return Saved(self.memory, windows.max, self.mass, self.flat, shift, lowest)


def allocate_saved(projection: Projection, rows: int, entries: int) -> Tensor:
    return projection.weight.new_empty(rows * stride_of(min(entries, projection.real_rows)))


def recovers_differences(dtype: torch.dtype) -> bool:
    # fp16 lacks the range for logits beside exponentials.
    return dtype != torch.float16


def merge_ranks(
    packed: Tensor, columns: Columns, rows: int, vocab_size: int | None, wanted: Wanted | None
) -> tuple[Tensor, Tensor, Any]:
    results = None if wanted is None else Results.new(wanted, packed, rows)
    merged, size = partials.merge_ranks(packed, columns, rows, vocab_size, results)
    return merged, size, None if results is None else results.found()


def selected_logits(projection: Projection, x: Tensor, selection: Selection) -> None:
    kernels.selected_logits(Product.of(projection, aligned_contiguous(x), 0, projection.real_rows), selection)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.dim() == 1 or gradient.numel() == 0 or not gradient.is_contiguous():
        return torch_backend.scaled(gradient, factor, dtype)
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    rows, of_result = (t.view(-1, t.shape[-1]) for t in (gradient, result))
    scale_and_add_targets(rows, factor, None, of_result)
    return result
