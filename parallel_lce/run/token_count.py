"""The number of counted tokens, copied from the device to the host while the model's forward runs, for
:mod:`parallel_lce.run.compaction`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.core.memory import HostNumber
from parallel_lce.core.options import INTEGERS, NO_LABEL, as_int64
from parallel_lce.core.private import transforming, version


class TokenCount:
    """What :func:`count_tokens` returns: the argument ``counted_tokens`` of the fused functions."""

    def __init__(self, mask: Tensor) -> None:
        self._total = HostNumber(mask.sum()) if _can_be_read(mask) else None

    @property
    def unknown(self) -> bool:
        """Whether nobody could read the mask."""
        return self._total is None

    def read(self) -> int | None:
        """The number. Waits until the device has copied it. None where the host must not wait: in a
        trace, in a captured CUDA graph, and for a mask of which nobody could read it."""
        total = self._total
        if total is None or _in_trace() or (total.waits and torch.cuda.is_current_stream_capturing()):
            return None
        return total.read()


def count_tokens(target: Tensor, ignore_index: int | None = NO_LABEL) -> TokenCount:
    """Starts to count the tokens that a loss will count. Call it before the model's forward, and give the result to the
    fused function as ``counted_tokens``: the tokens that do not count then cost nothing, and the host waits for nothing
    that the device has not passed long ago.

    On a CUDA device the number is copied to pinned memory, on a stream of its own, behind what the current stream has
    to do by now; the loss waits for that copy alone. On a CPU the number is read. In a trace of
    ``torch.compile``, in a captured CUDA graph, and for tensors of other kinds (other devices, DTensors), nothing is
    read: the loss then works on all tokens, with the same result, on a copy of the hidden states with 0 for tokens that
    do not count.

    Args:
        target: the very targets that the loss will get, so already shifted: ids ``[...]`` of any integer dtype. Or a
            mask ``[...]`` of bool, true for the tokens that count. The same on all tensor-parallel ranks.
        ignore_index: the target of tokens that do not count, as in :func:`parallel_lce.linear_cross_entropy`.

    Collectives: none.

    Raises:
        ValueError: ``target`` is no tensor of an integer dtype or bool.
    """
    if not isinstance(target, Tensor) or target.dtype not in (*INTEGERS, torch.bool):
        given = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must be a tensor of ids or a mask of bool, got {given}")
    if target.dtype is torch.bool:
        return TokenCount(target)
    return TokenCount(as_int64(target) != (NO_LABEL if ignore_index is None else ignore_index))


class LabelCount:
    """What a door counts before the model's forward: the labels that are not -100, with ``shifted`` without the first
    of each row. ``labels``: anything; nothing but a tensor is counted."""

    def __init__(self, labels: Any, shifted: bool = False) -> None:
        self._labels, self._shifted, self.count = labels, shifted, None
        if isinstance(labels, Tensor) and not _in_trace():
            count = TokenCount(as_int64(labels[..., 1:] if shifted else labels) != NO_LABEL)
            self._version, self.count = version(labels), None if count.unknown else count

    def of(self, labels: Any, shifted: bool = False) -> TokenCount | None:
        """The count, if it is that of these very labels and nobody has changed them since."""
        if self.count is None or labels is not self._labels or shifted != self._shifted:
            return None
        return self.count if version(labels) == self._version else None


def _in_trace() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or transforming()
    )


def _can_be_read(mask: Tensor) -> bool:
    if _in_trace() or type(mask) is not Tensor or mask.device.type not in ("cpu", "cuda"):
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
