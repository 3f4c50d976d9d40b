"""The triton backend: a fused projection for the forward and for recomputed logits, cuBLAS for dX and dW.

A block of R tokens saves ``e = exp(z)`` of its first vocabulary entries; in windows far from 0 another multiple
(``kernels.arithmetic.scale_of``). The gradient of the logits is then c e, with one coefficient c per token, except in
the target's column. So no pass over R * V is needed between the forward and the products of the backward
(:mod:`parallel_lce.backends.triton_backward`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends import torch_backend
from parallel_lce.backends.interface import ForwardTask, Picked, PickedGradient, Projection
from parallel_lce.backends.triton_backward import BlockBackward
from parallel_lce.backends.triton_dense import Dense
from parallel_lce.backends.triton_operands import ALIGNED, aligned_contiguous, product_of, stride_of
from parallel_lce.core.partials import TARGET, empty_partial
from parallel_lce.kernels import dense_logits
from parallel_lce.kernels import picked as kernels
from parallel_lce.kernels.codes import CodeColumns
from parallel_lce.kernels.epilogue import ForwardEpilogue
from parallel_lce.kernels.loss_kernels import mean_loss, token_losses
from parallel_lce.kernels.partials import WindowPartials, merge_ranks, merge_windows
from parallel_lce.kernels.picked import gradient_of_sets, log_softmax_of_sets, picked_hidden_gradient
from parallel_lce.kernels.product import new_window_partials
from parallel_lce.kernels.statistics import statistics_gradient, token_statistics
from parallel_lce.kernels.target_logits import target_logits
from parallel_lce.kernels.token_gradients import Saved, scale_and_add_targets
from parallel_lce.kernels.tuning import MEASURED

__all__ = [
    "CODES",
    "DENSE_FLOPS",
    "FLOPS_PER_BYTE",
    "NAME",
    "REUSES_SAVED",
    "SAME_BITS",
    "Dense",
    "Saved",
    "allocate_saved",
    "block_backward",
    "block_forward",
    "gradient_of_sets",
    "log_softmax_of_sets",
    "logits_gradient",
    "logits_partial",
    "mean_loss",
    "merge_ranks",
    "picked_hidden_gradient",
    "picked_logits",
    "picked_weight_gradient",
    "scaled",
    "statistics_gradient",
    "token_losses",
    "token_statistics",
]

NAME: str = "triton"
DENSE_FLOPS: float = MEASURED.dense_flops
FLOPS_PER_BYTE: float = MEASURED.flops_per_byte
SAME_BITS: bool = True
REUSES_SAVED: bool = True
CODES: bool = True

_PARTIAL_BYTES = MEASURED.partial_bytes


def allocate_saved(projection: Projection, rows: int, entries: int) -> Tensor:
    return projection.weight.new_empty(rows * stride_of(min(entries, projection.real_rows)))


def picked_logits(projection: Projection, x: Tensor, picked: Picked, out: Tensor) -> None:
    kernels.picked_logits(product_of(projection, aligned_contiguous(x), 0, projection.real_rows), picked, out)


def picked_weight_gradient(
    x: Tensor, owner: Tensor, gradient: PickedGradient, dweight: Tensor, dbias: Tensor | None
) -> None:
    kernels.picked_weight_gradient(aligned_contiguous(x), owner, gradient, dweight, dbias)


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
    # The kernel skips the fourth row.
    stacked = torch.cat([partial[:3], partial[:1], coefficients])
    dense_logits.logits_gradient(logits, target, stacked, gradient)
    return gradient


def block_forward(task: ForwardTask) -> tuple[Tensor, Saved | tuple[()]]:
    """The number of saved vocabulary rows is rounded down to whole windows. With ``save_window_partials`` the windows'
    sums of exponentials are saved, too."""
    projection, x, columns, target, save = task.projection, task.x, task.columns, task.target, task.save
    rows, real = x.shape[0], projection.real_rows
    if rows == 0 or real == 0:
        return empty_partial(columns, rows, projection.dtype, x.device, task.out), ()
    partial = x.new_empty(columns.count, rows, dtype=projection.dtype) if task.out is None else task.out
    product = product_of(projection, aligned_contiguous(x), 0, real)
    width, height = product.tile.entries, product.tile.rows
    assert width % ALIGNED == 0
    save = real if save >= real else save // width * width
    stored = exponentials = flat = codes = None
    if save:
        stride = stride_of(save)
        dtype = torch.uint8 if task.codes else x.dtype
        buffer = x.new_empty(rows * stride, dtype=dtype) if task.buffer is None else task.buffer[: rows * stride]
        stored = buffer.view(rows, stride)
        exponentials = stored if stride == save else stored[:, :save]
        if task.codes:
            shift = partial.new_empty(product.windows, rows, dtype=torch.int32)
            of_target = None if target is None else (target, partial[TARGET])
            codes = CodeColumns(shift, torch.empty_like(shift, dtype=torch.float32), of_target)
        elif columns.differ and x.dtype != torch.float16:
            # Under a soft-cap every row is rewritten, as those of flat tokens are.
            flat = x.new_ones(rows, dtype=torch.float32)
    if target is None:
        partial[TARGET].zero_()
    sampled = flat if projection.logit_map.softcap is None else None
    if target is not None or sampled is not None:
        target_logits(product, target, partial[TARGET], sampled)
    # Without saved tensors the rows are projected in ranges of whole tiles whose window partials fit _PARTIAL_BYTES.
    row_bytes = 8 * product.windows * (columns.merged - 1)
    fitting = rows if save or task.save_window_partials else max(1, _PARTIAL_BYTES // row_bytes)
    size = -(-rows // (-(-rows // fitting) * height)) * height
    saved: Saved | tuple[()] = ()
    for first in range(0, rows, size):
        some = slice(first, first + size)
        of_rows = product if size >= rows else product.of_rows(some)
        windows = new_window_partials(of_rows, columns)
        of_rows.launch(exponentials, ForwardEpilogue(windows, flat=flat, codes=codes))
        known = WindowPartials(windows.max, windows.sum_exp)
        if task.picked is not None:
            kernels.picked_logits(of_rows, task.picked.entries.of_rows(some), task.picked.out, known)
        plain = merge_windows(
            windows,
            partial[:, some],
            columns,
            target=None if target is None else target[some],
            entries=real,
            start=projection.start,
            find_plain=stored is not None and codes is None and x.dtype != torch.float16,
        )
        if task.window_partials is not None:
            task.window_partials.append(known)
        if codes is not None:
            saved = Saved(stored, windows.max, shift=codes.shift, lowest=codes.lowest)
        elif stored is not None or task.save_window_partials:
            sums = windows.sum_exp if task.save_window_partials else None
            saved = Saved(stored, windows.max, plain, sums, flat)
        del windows, known  # before the next ones are allocated
    return partial, saved


block_backward = BlockBackward
