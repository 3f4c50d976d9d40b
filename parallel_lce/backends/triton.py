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
from parallel_lce.core.memory import empty_if
from parallel_lce.core.options import Wanted
from parallel_lce.core.partials import TARGET, Columns
from parallel_lce.core.selection import Selection
from parallel_lce.kernels import partials
from parallel_lce.kernels import selected as kernels
from parallel_lce.kernels.dense_logits import logits_gradient, logits_partial
from parallel_lce.kernels.epilogue import ForwardEpilogue
from parallel_lce.kernels.partials import RoundedSums, merge_windows
from parallel_lce.kernels.product import Product, aligned_contiguous, new_window_partials, stride_of
from parallel_lce.kernels.results import Results, mean_loss, statistics_gradient, without_factor
from parallel_lce.kernels.selected import log_softmax_of_sets, selected_rows, target_logits
from parallel_lce.kernels.token_gradients import Saved, scale_and_add_targets
from parallel_lce.kernels.tuning import FLOPS_PER_BYTE, PARTIAL_BYTES

# What this module imports and does not call are functions of :class:`parallel_lce.backends.interface.Backend`.
NAME: str = "triton"
SAVED_DTYPES: tuple[torch.dtype, ...] = torch.bfloat16, torch.float16, torch.float32
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
    width = product.tile.entries
    save = real if task.save >= real else task.save // width * width
    saved = _new_saved(task, product, save) if save else None
    maxima, mass, flat = (None, None, None) if saved is None else (saved.maxima, saved.mass, saved.flat)
    if target is None:
        partial[TARGET].zero_()
    if target is not None or flat is not None:
        target_logits(product, target, partial, flat)
    ranges = _ranges(task, product)
    results = None if task.wanted is None else Results.new(task.wanted, partial, rows)
    for some in ranges:
        of_rows, merged, of_tokens, its_results = product, partial, target, results
        if len(ranges) > 1:
            of_rows, merged = product.of_rows(some), partial[:, some]
            of_tokens = None if target is None else target[some]
            its_results = None if results is None else results.of_rows(some)
        windows = new_window_partials(of_rows.x, product.windows, columns, maxima)
        epilogue, rounded, numbers = ForwardEpilogue(windows, flat=flat), None, None
        if task.logits is not None:
            epilogue = epilogue._replace(logits=task.logits[some], logits_stride=task.logits.stride(0))
        if saved is not None:
            numbers = saved.exponentials if stride_of(save) == save else saved.exponentials[:, :save]
            numbers = numbers if projection.logit_map.softcap is None else numbers.view(torch.float16)
        if saved is not None and saved.shift is not None:
            epilogue = epilogue._replace(shift=saved.shift, lowest=saved.lowest, target=target)
        if mass is not None:
            # The common rounding of exponentials matters where they are nearly equal. In fp32 it never does.
            sums = windows.sum_exp
            if x.dtype == torch.bfloat16:
                sums = torch.empty(windows.max.shape, dtype=torch.float32, device=x.device)
                epilogue = epilogue._replace(rounded_sums=sums)
            rounded = RoundedSums(sums, mass, save, width)
        of_rows.launch(numbers, epilogue)
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
        del windows, epilogue, rounded  # before the next ones are allocated
    return partial, saved or (), None if results is None else results.found()


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


def _new_saved(task: ForwardTask, product: Product, entries: int) -> Saved:
    """Memory for what a block saves of the shard's first ``entries``: all of them, or whole windows."""
    (rows, _), dtype, device = product.x.shape, product.x.dtype, product.x.device
    stride, of_windows = stride_of(entries), (product.windows, rows)
    if task.buffer is None:
        exponentials = torch.empty(rows, stride, dtype=torch.uint8 if task.codes else dtype, device=device)
    else:
        exponentials = task.buffer[: rows * stride].view(rows, stride)
    # Such exponentials are multiplied where they are. Under a soft-cap and in fp16 all are rewritten first.
    multiplied = not task.codes and product.logit_map.softcap is None and dtype != torch.float16
    return Saved(
        exponentials,
        maxima=torch.empty(of_windows, dtype=torch.float32, device=device),
        mass=empty_if(multiplied, rows, device),
        flat=empty_if(multiplied and task.columns.differ, rows, device),
        shift=empty_if(task.codes, of_windows, device, torch.int32),
        lowest=empty_if(task.codes, of_windows, device),
    )


def allocate_saved(projection: Projection, rows: int, entries: int) -> Tensor:
    return projection.weight.new_empty(rows * stride_of(min(entries, projection.real_rows)))


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
