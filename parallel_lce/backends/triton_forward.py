"""The forward of a block in the triton backend.

What depends on the sizes of a block alone, and its launches, are made once, and kept by the block's traits. Between the
launches the host then does little more than allocate memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_lce.backends.interface import ForwardTask
from parallel_lce.backends.triton_operands import ALIGNED, aligned_contiguous, product_of, stride_of
from parallel_lce.core.partials import TARGET, empty_partial
from parallel_lce.kernels import picked as kernels
from parallel_lce.kernels.codes import CodeColumns
from parallel_lce.kernels.epilogue import ForwardEpilogue
from parallel_lce.kernels.partials import NO_LOW, RoundedSums, WindowPartials, bound_merge_windows, columns_of
from parallel_lce.kernels.product import Product, new_window_partials
from parallel_lce.kernels.relaunch import Bound, kept
from parallel_lce.kernels.target_logits import bound_target_logits
from parallel_lce.kernels.token_gradients import Saved
from parallel_lce.kernels.tuning import MEASURED

_PARTIAL_BYTES = MEASURED.partial_bytes


@dataclass
class _Range:
    """Rows of a block that are projected together."""

    rows: slice
    merge: Bound
    # With the first call.
    projection: list[Bound] | None = None


class _Program:
    """A block's sizes and launches."""

    def __init__(self, task: ForwardTask, product: Product) -> None:
        (rows, _), real = product.x.shape, product.weight.shape[0]
        self.windows, self.operands = product.windows, product.operands
        width, height = product.tile.entries, product.tile.rows
        self.width = width
        assert width % ALIGNED == 0
        self.save = real if task.save >= real else task.save // width * width
        self.stride = stride_of(self.save)
        self.capped = self.save > 0 and product.logit_map.softcap is not None
        # Rows of exponentials, which are multiplied where they are. Rows under a soft-cap, in fp16 and of codes are
        # rewritten in any case.
        self.kept = self.save > 0 and not (task.codes or self.capped) and product.x.dtype != torch.float16
        self.flat = self.kept and task.columns.differ
        # The common rounding of exponentials matters where they are nearly equal. In fp32 it never does.
        self.rounded = self.kept and product.x.dtype == torch.bfloat16
        self.target = bound_target_logits(product)
        # Without saved tensors rows are projected in ranges of whole tiles whose window partials fit _PARTIAL_BYTES.
        row_bytes = 8 * self.windows * (task.columns.merged - 1)
        fitting = rows if self.save or task.save_window_partials else max(1, _PARTIAL_BYTES // row_bytes)
        size = -(-rows // (-(-rows // fitting) * height)) * height
        self.ranges = []
        for first in range(0, rows, size):
            some = slice(first, min(first + size, rows))
            merge = bound_merge_windows(some.stop - first, self.windows, real, task.projection.start)
            self.ranges.append(_Range(some, merge))


_PROGRAMS: dict[tuple, _Program] = {}


def _traits(task: ForwardTask, x: Tensor) -> tuple:
    """All that a program depends on. ``x``: contiguous, so that of one token its stride is any."""
    projection, weight, logit_map = task.projection, task.projection.weight, task.projection.logit_map
    scale, token_scale, softcap, token_softcap = logit_map
    given = task.target is None, projection.bias is None, token_scale is None, token_softcap is None
    aligned = (x.data_ptr() | weight.data_ptr()) & 15 == 0
    sizes = x.shape, x.stride(0), x.dtype, x.get_device(), weight.stride(0), projection.real_rows, projection.start
    asked = task.columns, task.save, task.save_window_partials, task.codes
    return (*sizes, *given, aligned, scale, softcap, *asked, _PARTIAL_BYTES)


def block_forward(task: ForwardTask) -> tuple[Tensor, Saved | tuple[()]]:
    """The number of saved vocabulary rows is rounded down to whole windows. With ``save_window_partials`` the windows'
    sums of exponentials are saved, too."""
    projection, columns, target = task.projection, task.columns, task.target
    rows, real = task.x.shape[0], projection.real_rows
    if rows == 0 or real == 0:
        return empty_partial(columns, rows, projection.dtype, task.x.device, task.out), ()
    x = aligned_contiguous(task.x)
    product = product_of(projection, x, 0, real)
    program = kept(_PROGRAMS, _traits(task, x), lambda: _Program(task, product))
    partial = x.new_empty(columns.count, rows, dtype=projection.dtype) if task.out is None else task.out
    stored = numbers = flat = codes = None
    if program.save:
        save, stride = program.save, program.stride
        dtype = torch.uint8 if task.codes else x.dtype
        buffer = x.new_empty(rows * stride, dtype=dtype) if task.buffer is None else task.buffer[: rows * stride]
        stored = buffer.view(rows, stride)
        numbers = stored if stride == save else stored[:, :save]
        if program.capped:
            numbers = numbers.view(torch.float16)
    of_target = partial[TARGET]
    if task.codes and program.save:
        shift = partial.new_empty(program.windows, rows, dtype=torch.int32)
        lowest = torch.empty_like(shift, dtype=torch.float32)
        codes = CodeColumns(shift, lowest)
    elif program.flat:
        flat = x.new_empty(rows, dtype=torch.float32)
    if target is None:
        of_target.zero_()
    if target is not None or flat is not None:
        program.target(x, product.weight, product.bias, product.logit_map, target, of_target, flat)
    saved: Saved | tuple[()] = ()
    for part in program.ranges:
        some, of_rows = part.rows, product if len(program.ranges) == 1 else product.of_rows(part.rows)
        windows = new_window_partials(of_rows.x, program.windows, columns)
        sums = windows.sum_exp
        epilogue = ForwardEpilogue(windows, flat=flat, codes=codes)
        if program.rounded:
            sums = torch.empty_like(windows.max)
            epilogue = epilogue._replace(rounded_sums=sums)
        if codes is not None and target is not None:
            epilogue = epilogue._replace(target=target, target_logit=of_target)
        if part.projection is None:
            part.projection = of_rows.bound(numbers, epilogue)
        operands = program.operands(of_rows.x, of_rows.weight, numbers)
        for launch in part.projection:
            launch(*operands, of_rows.bias, of_rows.logit_map, epilogue, None)
        known = WindowPartials(windows.max, windows.sum_exp)
        if task.picked is not None:
            kernels.picked_logits(of_rows, task.picked.entries.of_rows(some), task.picked.out, known)
        merged, of_tokens = partial, target
        if len(program.ranges) > 1:
            merged, of_tokens = partial[:, some], None if target is None else target[some]
        mass = rounded = None
        if program.kept:
            mass = partial.new_empty(len(of_rows.x))
            rounded = RoundedSums(sums, mass, program.save, program.width)
        part.merge(windows, NO_LOW, *columns_of(merged, columns), rounded, of_tokens, None, None)
        if codes is not None:
            saved = Saved(stored, windows.max, shift=codes.shift, lowest=codes.lowest)
        elif stored is not None or task.save_window_partials:
            kept_sums = windows.sum_exp if task.save_window_partials else None
            saved = Saved(stored, windows.max, mass, kept_sums, flat)
        del windows, known, epilogue, sums, rounded  # before the next ones are allocated
    return partial, saved
