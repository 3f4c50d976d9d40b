"""The device work of a call is recorded once and then replayed: calls of one signature do the same with other tensors.

For a small problem the GPU is done before Python has found out what to launch next. The second run of a forward or
backward is recorded as a tape (:mod:`parallel_lce.recording`). Later runs repeat that with their own tensors. They
allocate the same memory, and start the same launches and collectives, in the same order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from parallel_lce.memory import device_without_autocast
from parallel_lce.recording import recording
from parallel_lce.tape import Tape

_T = TypeVar("_T")
_MOST_TAPES = 64
# In all tapes of the process together. One takes about 1.4 KiB of the host's memory.
_MOST_ACTIONS = 16384
# A dispatch mode sets flags of the process: of two that end in another order than they began, one would stay set.
_recording = threading.Lock()
_RUN_ONCE, _NEVER_REPLAYED = "run once", "never replayed"
# All tapes, the oldest first: where each is, and its actions. Changed by who holds ``_recording``.
_kept: deque[tuple[dict[Hashable, Tape | str], Hashable, int]] = deque()


class Tapes:
    """The tapes of the calls of one signature."""

    def __init__(self) -> None:
        # By what a run depends on beside the signature.
        self._tapes: dict[Hashable, Tape | str] = {}

    def run(
        self, kind: Hashable, work: Callable[[], _T], inputs: tuple[Tensor | None, ...], group: object = None
    ) -> _T:
        """``work()``, or the replay of an earlier one.

        All tensors that it reads or writes are among ``inputs``, or made by it. The signature and ``kind`` tell their
        shapes, dtypes and device, and all else that it depends on, but for strides and alignment. Its collectives run
        on ``group``. The first run of a kind is only noted, the second one recorded.
        """
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            return work()  # A mode of the user's sees it, and may change it.
        key = kind, *[None if t is None else (t.data_ptr() & 15, t.stride()) for t in inputs]
        known = self._tapes.get(key)
        if isinstance(known, Tape):
            assert inputs[0] is not None
            with device_without_autocast(inputs[0]):
                return known.replay((*inputs, group))
        if known is None and len(self._tapes) < _MOST_TAPES:
            self._tapes[key] = _RUN_ONCE
        if known != _RUN_ONCE:
            return work()
        if not _recording.acquire(blocking=False):
            return work()
        try:
            with recording((*inputs, group)) as recorder:
                result = work()
            self._keep(key, recorder.tape(result))
        finally:
            _recording.release()
        return result

    def _keep(self, key: Hashable, tape: Tape | None) -> None:
        """Keep a new tape, and forget the oldest ones where all are too long together."""
        self._tapes[key] = tape or _NEVER_REPLAYED
        if tape is not None:
            _kept.append((self._tapes, key, tape.length))
        while sum([length for _, _, length in _kept]) > _MOST_ACTIONS:
            tapes, oldest, _ = _kept.popleft()
            tapes.pop(oldest, None)
