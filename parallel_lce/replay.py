"""The device work of a call, recorded once and then replayed: calls of one signature do the same with other tensors.

For a small problem the GPU is done before Python has found out what to launch next. A :class:`Tape` holds what one run
of the schedule asked of the device, in order: memory, launches of kernels, and torch's operations. Every tensor is
known by its place in one of the inputs or in memory that the run allocated, so a replay works on other inputs, and
allocates and frees the same memory at the same points.

Collectives are recorded as calls of functions (:func:`noted`), and so are the waits for them. The process group is an
input, too.

A run is recorded if everything it asks for can be told apart in this way; else its calls are never replayed. No tape
holds a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_lce.kernels.relaunch import Compiled, Relaunched, observed
from parallel_lce.memory import device_without_autocast

_T = TypeVar("_T")
_aten = torch.ops.aten

# Longer tapes save the host little: the GPU takes longer.
_MOST_ACTIONS = 256
_MOST_TAPES = 64
# Bytes from which on memory is freed after its last use, and not at the end of the replay.
_LARGE = 1 << 20
_RUN_ONCE, _NEVER_REPLAYED = "run once", "never replayed"

_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
# The same by torch's own bindings, which take the host less time than those of ``torch.ops``.
_FASTER: dict[Callable, Callable] = {
    _aten.mm.default: torch.mm,
    _aten.mm.out: torch.mm,
    _aten.addmm.out: torch.addmm,
    _aten.mm.dtype_out: lambda a, b, dtype, *, out: torch.mm(a, b, out_dtype=dtype, out=out),
    _aten.addmm.dtype_out: lambda c, a, b, dtype, *, out: torch.addmm(c, a, b, out_dtype=dtype, out=out),
    _aten.copy_.default: Tensor.copy_,
    _aten.fill_.Scalar: Tensor.fill_,
    _aten.zero_.default: Tensor.zero_,
    _aten.div.Tensor: Tensor.div,
}


_thread = threading.local()


def noted(function: Callable[..., _T], *args, **kwargs) -> _T:
    """``function(*args, **kwargs)``. A tape that is being recorded notes the call as one, whatever is done in it."""
    recorder = getattr(_thread, "recorder", None)
    return function(*args, **kwargs) if recorder is None else recorder.called(function, args, kwargs)


class _Object(NamedTuple):
    """``memory[slot]``, which is no tensor."""

    slot: int

    def within(self, memory: list):
        return memory[self.slot]


class _View(NamedTuple):
    """A tensor by its place: ``offset`` elements after the first of ``memory[slot]``."""

    slot: int
    offset: int
    # None: that of memory[slot]
    dtype: torch.dtype | None
    # None: all of memory[slot]
    size: tuple[int, ...] | None
    stride: tuple[int, ...]

    def within(self, memory: list) -> Tensor:
        tensor = memory[self.slot]
        if self.dtype is not None:
            tensor = tensor.view(self.dtype)
        if self.size is not None:
            tensor = tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)
        return tensor


class _Address(NamedTuple):
    """An address by its place: ``offset`` bytes after the first of ``memory[slot]``."""

    slot: int
    offset: int

    def within(self, memory: list) -> int:
        return memory[self.slot].data_ptr() + self.offset


class _Descriptor(NamedTuple):
    """A TMA descriptor of a tensor."""

    kind: type
    fields: dict[str, Any]
    base: _View

    def within(self, memory: list):
        # The checks of its constructor were made when it was recorded.
        descriptor = object.__new__(self.kind)
        descriptor.__dict__.update(self.fields, base=self.base.within(memory))
        return descriptor


class _Parts(NamedTuple):
    """A tuple or list, made of ``parts`` once those at ``places`` are filled."""

    make: Callable[[list], Any]
    parts: list
    places: list[tuple[int, Any]]

    def within(self, memory: list):
        parts = self.parts.copy()
        for number, place in self.places:
            parts[number] = place.within(memory)
        return self.make(parts)


_PLACES = frozenset((_Object, _View, _Address, _Descriptor, _Parts))


def _is_place(template) -> bool:
    return type(template) in _PLACES


def _filled(template, memory: list):
    return template.within(memory) if type(template) in _PLACES else template


class _Allocation:
    def __init__(self, slot: int, tensor: Tensor) -> None:
        self._slot, self._size, self._stride = slot, tensor.shape, tensor.stride()
        self._traits = {"dtype": tensor.dtype, "device": tensor.device}

    def run(self, memory: list) -> None:
        memory[self._slot] = torch.empty_strided(self._size, self._stride, **self._traits)


class _Operation:
    """A call of a function, of whose results some go to ``slots``, by their number."""

    def __init__(self, function: Callable, args, kwargs: dict[str, Any], slots: dict[int, int]) -> None:
        self._function, self._args = _FASTER.get(function, function), args
        self._kwargs, self._slots = kwargs, slots
        self._places = [(name, value) for name, value in kwargs.items() if _is_place(value)]

    def run(self, memory: list) -> None:
        kwargs = self._kwargs | {name: place.within(memory) for name, place in self._places}
        result = self._function(*_filled(self._args, memory), **kwargs)
        if self._slots:
            results = result if isinstance(result, (tuple, list)) else (result,)
            for number, slot in self._slots.items():
                memory[slot] = results[number]


class _Launch:
    """A launch of a compiled kernel."""

    def __init__(self, compiled: Compiled, grid: tuple[int, ...], arguments) -> None:
        self._compiled, self._grid, self._arguments = compiled, grid, arguments

    def run(self, memory: list) -> None:
        self._compiled.start(self._grid, self._arguments.within(memory))


class _Release:
    """The last use of some memory is over."""

    def __init__(self, slots: list[int]) -> None:
        self._slots = slots

    def run(self, memory: list) -> None:
        for slot in self._slots:
            memory[slot] = None


class Tape:
    """A recorded run: ``size`` tensors and other objects in all, the inputs first, and the template of its result."""

    def __init__(self, size: int, actions: list, result) -> None:
        self._allocated, self._actions, self._result = size, actions, result

    def replay(self, inputs: Iterable):
        memory = [*inputs]
        memory += [None] * (self._allocated - len(memory))
        for action in self._actions:
            action.run(memory)
        return _filled(self._result, memory)


class _Unknown(Exception):
    """A tensor that is neither an input nor made by the run."""


class _Slot(NamedTuple):
    number: int
    first: int  # address
    last: int  # address after the last element
    size: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    dtype: torch.dtype
    storage: StorageWeakRef


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """The address of the tensor's first element, and the one after its last."""
    first = tensor.data_ptr()
    elements = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())]) + 1
    return first, first + elements * tensor.element_size()


class _Recorder(TorchDispatchMode):
    """Notes what is asked of the device while it is entered."""

    def __init__(self, inputs: Iterable) -> None:
        super().__init__()
        self._actions: list = []
        # The tensors by the addresses of their storages. Inputs may share one; what is allocated replaces what had
        # the storage's address before.
        self._slots: dict[int, list[_Slot]] = {}
        # Other objects by their ids, each with its slot and the slots that are used as long as it is.
        self._objects: dict[int, tuple[int, list[int]]] = {}
        self._alive: list = []
        self._number = 0
        self._last_use: dict[int, int] = {}
        self._large: set[int] = set()
        self.recordable, self._paused = True, False
        for value in inputs:
            if isinstance(value, Tensor):
                self._slots.setdefault(value.untyped_storage().data_ptr(), []).append(self._slot_of(value))
                self._number += 1
            else:
                self._new_object(value, [])
        self._inputs = self._number

    def _new_object(self, value, used: list[int]) -> int:
        if value is not None:
            self._objects[id(value)] = self._number, used
            self._alive.append(value)
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
        if tensor.numel() == 0:
            raise _Unknown
        slot = self._slot_of(tensor)
        self._slots[tensor.untyped_storage().data_ptr()] = [slot]
        self._last_use[slot.number] = len(self._actions)
        if slot.last - slot.first >= _LARGE:
            self._large.add(slot.number)
        self._number += 1
        return slot.number

    def _find(self, tensor: Tensor) -> tuple[_Slot, int]:
        """The slot in which a tensor lies, and its offset in bytes."""
        first, last = _bounds(tensor)
        slots = self._slots.get(tensor.untyped_storage().data_ptr(), ())
        found = [s for s in slots if s.first <= first and last <= s.last and not s.storage.expired()]
        if len(found) != 1 or tensor.numel() == 0:
            raise _Unknown
        self._last_use[found[0].number] = len(self._actions)
        return found[0], first - found[0].first

    def _view(self, tensor: Tensor) -> _View:
        slot, offset = self._find(tensor)
        size, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        if dtype == slot.dtype:
            whole = offset == 0 and (size, stride) == (slot.size, slot.stride)
            return _View(slot.number, offset // dtype.itemsize, None, None if whole else size, stride)
        # All of the memory is first viewed in the other dtype.
        row_bytes = slot.size[-1] * slot.dtype.itemsize if slot.contiguous and slot.size else 0
        if dtype.itemsize != slot.dtype.itemsize and (row_bytes == 0 or row_bytes % dtype.itemsize):
            raise _Unknown
        return _View(slot.number, offset // dtype.itemsize, dtype, size, stride)

    def _address(self, tensor: Tensor) -> _Address:
        slot, offset = self._find(tensor)
        return _Address(slot.number, offset)

    def template(self, value, of_tensor: Callable[[Tensor], Any]):
        """``value`` with places instead of tensors."""
        if isinstance(value, Tensor):
            return of_tensor(value)
        if id(value) in self._objects:
            slot, used = self._objects[id(value)]
            self._last_use |= dict.fromkeys((slot, *used), len(self._actions))
            return _Object(slot)
        if hasattr(type(value), "from_tensor"):
            fields = dict(vars(value))
            return _Descriptor(type(value), fields, self._view(fields.pop("base")))
        if isinstance(value, (tuple, list)):
            parts = [self.template(part, of_tensor) for part in value]
            places = [(number, part) for number, part in enumerate(parts) if _is_place(part)]
            if places:
                return _Parts(getattr(value, "_make", type(value)), parts, places)
        return value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        try:
            self._note(func, args, kwargs, result)
        except _Unknown:
            self.recordable = False
        return result

    def _note(self, function, args: tuple, kwargs: dict[str, Any], result) -> None:
        if function in _ALLOCATIONS:
            self._actions.append(_Allocation(self._new_slot(result), result))
            return
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, tuple(kwargs.values())))}
        results = result if isinstance(result, (tuple, list)) else (result,)
        # Numbers that the device computes could decide what comes next.
        if not all(isinstance(r, Tensor) for r in results):
            raise _Unknown
        new = {i: r for i, r in enumerate(results) if r.untyped_storage().data_ptr() not in given}
        if not new and not function._schema.is_mutable:
            return  # a view
        templates = self.template(tuple(args), self._view), {k: self.template(v, self._view) for k, v in kwargs.items()}
        slots = {i: self._new_slot(r) for i, r in new.items()}
        self._actions.append(_Operation(function, *templates, slots))

    def launched(self, kernel: Relaunched, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
        """Launch it, and note that."""
        compiled = self._unnoted(kernel.launch, (grid, *arguments), constants)
        try:
            if compiled is None:  # Triton's interpreter
                self._note_call(kernel.launch, (grid, *arguments), constants, None)
            else:
                self._actions.append(_Launch(compiled, grid, self.template(arguments, self._address)))
        except _Unknown:
            self.recordable = False

    def called(self, function: Callable, args: tuple, kwargs: dict[str, Any]):
        """Call it, and note that. Its result, if any, is no tensor."""
        result = self._unnoted(function, args, kwargs)
        try:
            self._note_call(function, args, kwargs, result)
        except _Unknown:
            self.recordable = False
        return result

    def _unnoted(self, function: Callable, args: tuple, kwargs: dict[str, Any]):
        self._paused = True
        with observed(None):
            result = function(*args, **kwargs)
        self._paused = False
        return result

    def _note_call(self, function: Callable, args: tuple, kwargs: dict[str, Any], result) -> None:
        now = len(self._actions)
        templates = self.template(args, self._view), {k: self.template(v, self._view) for k, v in kwargs.items()}
        # Memory that a collective reads or writes is kept until it has been waited for.
        used = [slot for slot, action in self._last_use.items() if action == now]
        slots = {} if result is None else {0: self._new_object(result, used)}
        self._actions.append(_Operation(function, *templates, slots))

    def tape(self, result) -> Tape | None:
        """None if the run cannot be replayed. ``result``: what it returned."""
        try:
            template = self.template(result, self._view)
        except _Unknown:
            return None
        if not self.recordable or len(self._actions) > _MOST_ACTIONS:
            return None
        done: dict[int, list[int]] = {}
        for slot in self._large:
            done.setdefault(self._last_use[slot], []).append(slot)
        actions: list = []
        for number, action in enumerate(self._actions):
            actions.append(action)
            if number in done:
                actions.append(_Release(done[number]))
        return Tape(self._number, actions, template)


def _tensors(value) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def run(
    tapes: Tapes | None, kind: Hashable, work: Callable[[], _T], inputs: tuple[Tensor | None, ...], group: object = None
) -> _T:
    """``work()``, or what :meth:`Tapes.run` makes of it."""
    return work() if tapes is None else tapes.run(kind, work, inputs, group)


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
        if torch._C._len_torch_dispatch_stack():
            return work()  # A mode of the user's wants to see it.
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
        recorder = _Recorder((*inputs, group))
        with recorder, observed(recorder.launched):
            _thread.recorder = recorder
            try:
                result = work()
            finally:
                _thread.recorder = None
        self._tapes[key] = recorder.tape(result) or _NEVER_REPLAYED
        return result
