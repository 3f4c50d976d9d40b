"""Prepares tensors for kernels: waits for their values, takes rows, makes their device the current one; and copies a
number to the host."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from parallel_lce.core.private import AsyncCollectiveTensor

_NOTHING = nullcontext()


class _Waited(torch.autograd.Function):
    """Waits for the result of a functional collective, since kernels read its memory."""

    @staticmethod
    def forward(ctx, result: AsyncCollectiveTensor) -> Tensor:
        return result.trigger_wait()

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        return upstream


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its final values in memory: waits for a functional collective, materializes a negated view."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = _Waited.apply(tensor)
    # Dynamo cannot trace is_neg().
    return tensor.resolve_neg() if torch.compiler.is_compiling() or tensor.is_neg() else tensor


def out_of_inference(tensor: Tensor) -> Tensor:
    """The tensor; a copy of one made in inference mode, which autograd could not save."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def some_rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """``tensor[start:stop]``; the tensor itself if that is every row, which saves the host a view."""
    return tensor if start == 0 and stop == tensor.shape[0] else tensor[start:stop]


def empty_if(
    present: bool, shape: int | tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """An uninitialised tensor, or None for one that is not wanted."""
    return torch.empty(shape, dtype=dtype, device=device) if present else None


def with_aligned_rows(tensor: Tensor) -> Tensor:
    """``tensor``, a copy if the elements of a row are not neighbours in memory. On a GPU also a copy if rows of 16-bit
    elements could begin at multiples of 16 bytes, but do not: TMA could not load them, and another tile would give
    other bits."""
    aligned = tensor.stride(1) == 1
    if tensor.is_cuda and tensor.element_size() == 2 and tensor.shape[1] % 8 == 0:
        aligned = aligned and tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0
    return tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """A context in which the tensor's device is the current one, as Triton's launches need. If it is already, the
    context is empty: entering a device takes the host microseconds."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def device_without_autocast(tensor: Tensor) -> AbstractContextManager:
    """:func:`on_device_of` the tensor, without autocast, which would round the products of fp32 operands."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return on_device_of(tensor) if tensor.is_cuda else _NOTHING
    entered = ExitStack()
    entered.enter_context(on_device_of(tensor))
    entered.enter_context(torch.autocast(kind, enabled=False))
    return entered


class HostNumber:
    """Starts to copy ``number``, 0-dimensional, of an integer dtype. From a CUDA device it is copied to pinned memory,
    on the current stream. On a CPU nothing is copied. Not in a captured CUDA graph."""

    def __init__(self, number: Tensor) -> None:
        self._copy, self._copied = number, None
        if number.is_cuda:
            self._copy = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._copied = torch.cuda.current_stream(number.device).record_event()

    def read(self) -> int:
        """The number. Waits until the device has copied it."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._copy)
