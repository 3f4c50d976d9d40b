"""Recording a run of the schedule as a tape (:mod:`parallel_lce.tape`).

Allocations and torch's operations are seen as a dispatch mode sees them, launches by their observer, and collectives
with their waits by :func:`noted`. A run of which anything else is seen, or a tensor that is neither an input nor made
by the run, cannot be replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_lce.kernels.relaunch import Compiled, Relaunched, observed
from parallel_lce.tape import (
    Address,
    Allocation,
    Descriptor,
    Empty,
    Launch,
    Object,
    Operation,
    Parts,
    Release,
    Tape,
    View,
    is_place,
)

_T = TypeVar("_T")
_aten = torch.ops.aten
# Longer tapes save the host little: the GPU takes longer.
_MOST_ACTIONS = 2048
# Bytes from which on memory is freed after its last use, and not at the end of the replay.
_LARGE = 1 << 20
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)

_thread = threading.local()


def noted(function: Callable[..., _T], *args, **kwargs) -> _T:
    """``function(*args, **kwargs)``. A tape that is being recorded notes the call as one, whatever is done in it."""
    recorder = getattr(_thread, "recorder", None)
    return function(*args, **kwargs) if recorder is None else recorder.called(function, args, kwargs)


@contextmanager
def recording(inputs: Iterable) -> Iterator[Recorder]:
    """Record what this thread asks of the device."""
    recorder = Recorder(inputs)
    with recorder, observed(recorder.launched):
        _thread.recorder = recorder
        try:
            yield recorder
        finally:
            _thread.recorder = None


class _Unknown(Exception):
    """A tensor that is neither an input nor made by the run."""


class _Slot(NamedTuple):
    number: int
    start: int  # address of the first element
    stop: int  # address after the last element
    size: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    dtype: torch.dtype
    storage: StorageWeakRef


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """The address of the tensor's first element, and the one after its last."""
    start = tensor.data_ptr()
    elements = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())]) + 1
    return start, start + elements * tensor.element_size()


class Recorder(TorchDispatchMode):
    """Notes what is asked of the device while it is entered."""

    def __init__(self, inputs: Iterable) -> None:
        super().__init__()
        self._actions: list = []
        # The tensors by the addresses of their storages. Inputs may share one; what is allocated replaces what had
        # the storage's address before.
        self._slots: dict[int, list[_Slot]] = {}
        # Other objects by their ids: the object, its slot, and the slots that must live until the object was used.
        self._objects: dict[int, tuple[Any, int, list[int]]] = {}
        self._number = 0
        self._last_use: dict[int, int] = {}
        # Slots that are freed after their last use.
        self._large: set[int] = set()
        self._recordable, self._paused = True, False
        for value in inputs:
            if isinstance(value, Tensor):
                self._slots.setdefault(value.untyped_storage().data_ptr(), []).append(self._slot_of(value))
                self._number += 1
            else:
                self._new_object(value, [])
        self._inputs = self._number

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: TorchDispatchMode would import torch._dynamo, which takes a second and keeps tensors alive."""
        return False

    def _new_object(self, value, used: list[int]) -> int:
        if value is not None:
            self._objects[id(value)] = value, self._number, used
        self._number += 1
        return self._number - 1

    def _slot_of(self, tensor: Tensor) -> _Slot:
        return _Slot(
            self._number,
            *_bounds(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_contiguous(),
            tensor.dtype,
            StorageWeakRef(tensor.untyped_storage()),
        )

    def _new_slot(self, tensor: Tensor) -> int:
        slot = self._slot_of(tensor)
        self._slots[tensor.untyped_storage().data_ptr()] = [slot]
        self._last_use[slot.number] = len(self._actions)
        if slot.stop - slot.start >= _LARGE:
            self._large.add(slot.number)
        self._number += 1
        return slot.number

    def _find(self, tensor: Tensor) -> tuple[_Slot, int]:
        """The slot in which a tensor lies, and its offset in bytes."""
        start, stop = _bounds(tensor)
        slots = self._slots.get(tensor.untyped_storage().data_ptr(), ())
        found = [s for s in slots if s.start <= start and stop <= s.stop and not s.storage.expired()]
        if len(found) != 1 or tensor.numel() == 0:
            raise _Unknown
        self._last_use[found[0].number] = len(self._actions)
        return found[0], start - found[0].start

    def _view(self, tensor: Tensor) -> View | Empty:
        if tensor.numel() == 0:
            return Empty.like(tensor)
        slot, offset = self._find(tensor)
        size, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        if dtype == slot.dtype:
            whole = offset == 0 and (size, stride) == (slot.size, slot.stride)
            return View(slot.number, offset // dtype.itemsize, None, None if whole else size, stride)
        # All of the memory is first viewed in the other dtype.
        row_bytes = slot.size[-1] * slot.dtype.itemsize if slot.contiguous and slot.size else 0
        if dtype.itemsize != slot.dtype.itemsize and (row_bytes == 0 or row_bytes % dtype.itemsize):
            raise _Unknown
        return View(slot.number, offset // dtype.itemsize, dtype, size, stride)

    def _address(self, tensor: Tensor) -> Address | int:
        if tensor.numel() == 0:
            # Nothing is read there.
            return 0
        slot, offset = self._find(tensor)
        return Address(slot.number, offset)

    def template(self, value, of_tensor: Callable[[Tensor], Any]):
        """``value`` with places instead of tensors."""
        if isinstance(value, Tensor):
            return of_tensor(value)
        if id(value) in self._objects:
            _, slot, used = self._objects[id(value)]
            self._last_use |= dict.fromkeys((slot, *used), len(self._actions))
            if slot >= self._inputs:
                # What a collective returns is waited for once. It may own the collective's output.
                del self._objects[id(value)]
                self._large.add(slot)
            return Object(slot)
        if hasattr(type(value), "from_tensor"):
            fields = dict(vars(value))
            return Descriptor(type(value), fields, self._view(fields.pop("base")))
        if isinstance(value, (tuple, list)):
            parts = [self.template(part, of_tensor) for part in value]
            places = [(number, part) for number, part in enumerate(parts) if is_place(part)]
            if places:
                return Parts(getattr(value, "_make", type(value)), parts, places)
        return value

    def _templates(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Of a call's arguments."""
        return self.template(args, self._view), {name: self.template(v, self._view) for name, v in kwargs.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._paused:
            self._attempt(self._note, func, args, kwargs, result)
        return result

    def _attempt(self, note: Callable[..., None], *what) -> None:
        """Note something, unless the run cannot be replayed anyway."""
        if self._recordable:
            try:
                note(*what)
                self._recordable = len(self._actions) <= _MOST_ACTIONS
            except _Unknown:
                self._recordable = False
        if not self._recordable:
            self._actions.clear()
            self._objects.clear()

    def _note(self, function, args: tuple, kwargs: dict[str, Any], result) -> None:
        if function in _ALLOCATIONS:
            if result.numel() > 0:
                self._actions.append(Allocation(self._new_slot(result), result))
            return
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, tuple(kwargs.values())))}
        results = result if isinstance(result, (tuple, list)) else (result,)
        # Numbers that the device computes could decide what comes next.
        if not all(isinstance(r, Tensor) for r in results):
            raise _Unknown
        new = {i: r for i, r in enumerate(results) if r.numel() and r.untyped_storage().data_ptr() not in given}
        if not new and not function._schema.is_mutable:
            return  # a view
        templates = self._templates(args, kwargs)
        slots = {i: self._new_slot(r) for i, r in new.items()}
        self._actions.append(Operation(function, *templates, slots))

    def launched(self, kernel: Relaunched, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
        """Launch it, and note that."""
        compiled = self._unnoted(kernel.launch, (grid, *arguments), constants)
        if compiled is None:  # Triton's interpreter
            self._attempt(self._note_call, kernel.launch, (grid, *arguments), constants, None)
        else:
            self._attempt(self._note_launch, compiled, grid, arguments)

    def called(self, function: Callable, args: tuple, kwargs: dict[str, Any]):
        """Call it, and note that. Its result, if any, is no tensor."""
        result = self._unnoted(function, args, kwargs)
        self._attempt(self._note_call, function, args, kwargs, result)
        return result

    def _unnoted(self, function: Callable, args: tuple, kwargs: dict[str, Any]):
        self._paused = True
        try:
            with observed(None):
                return function(*args, **kwargs)
        except BaseException:
            self._recordable = False
            raise
        finally:
            self._paused = False

    def _note_launch(self, compiled: Compiled, grid: tuple[int, ...], arguments: tuple) -> None:
        self._actions.append(Launch(compiled, grid, self.template(arguments, self._address)))

    def _note_call(self, function: Callable, args: tuple, kwargs: dict[str, Any], result) -> None:
        now = len(self._actions)
        templates = self._templates(args, kwargs)
        # Memory that a collective reads or writes is kept until it has been waited for.
        used = [slot for slot, action in self._last_use.items() if action == now]
        slots = {} if result is None else {0: self._new_object(result, used)}
        self._actions.append(Operation(function, *templates, slots))

    def tape(self, result) -> Tape | None:
        """None if the run cannot be replayed. ``result``: what it returned."""
        if not self._recordable:
            return None
        try:
            template = self.template(result, self._view)
        except _Unknown:
            return None
        done: dict[int, list[int]] = {}
        for slot in self._large:
            done.setdefault(self._last_use[slot], []).append(slot)
        actions: list = []
        for number, action in enumerate(self._actions):
            actions.append(action)
            if number in done:
                actions.append(Release(done[number]))
        return Tape(self._number, actions, template)


def _tensors(value) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
