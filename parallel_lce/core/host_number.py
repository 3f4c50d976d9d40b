"""A number of a device, on its way to the host while the device goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Of each CUDA device, by its number.
_streams: dict[int, torch.cuda.Stream] = {}


class HostNumber:
    """Starts to copy ``number``, 0-dimensional, of an integer dtype. From a CUDA device it is copied to pinned memory,
    on a stream of its own, behind the event ``written``, by default behind what the current stream has to do by now. On
    a CPU nothing is copied. Not in a captured CUDA graph."""

    def __init__(self, number: Tensor, written: torch.Event | None = None) -> None:
        # Lives as long as the copy may read it.
        self._number = self._copy = number
        self._copied: Any = None
        if number.is_cuda:
            stream = _streams.get(number.get_device())
            if stream is None:
                stream = _streams[number.get_device()] = torch.cuda.Stream(number.device)
            stream.wait_event(written or torch.cuda.current_stream(number.device).record_event())
            with torch.cuda.stream(stream):
                self._copy = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
                self._copy.copy_(number, non_blocking=True)
                self._copied = stream.record_event()

    @property
    def waits(self) -> bool:
        """Whether :meth:`read` may wait for a device."""
        return self._copied is not None

    def read(self) -> int:
        """The number. Waits until the device has copied it."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._copy)
