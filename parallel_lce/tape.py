"""Tapes: what one run asked of the device, as actions that can be repeated with other tensors.

An action knows every tensor by its *place*: a slot of the replay's memory, and where in that. The first slots are the
inputs, the others what the run allocates. No tape holds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.kernels.relaunch import Compiled

_aten = torch.ops.aten
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


class Object(NamedTuple):
    """``memory[slot]``, which is no tensor."""

    slot: int

    def within(self, memory: list):
        return memory[self.slot]


class View(NamedTuple):
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


class Empty(NamedTuple):
    """A tensor without elements. It has no memory, and so no place in any."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Empty:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def within(self, memory: list) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class Address(NamedTuple):
    """An address by its place: ``offset`` bytes after the first of ``memory[slot]``."""

    slot: int
    offset: int

    def within(self, memory: list) -> int:
        return memory[self.slot].data_ptr() + self.offset


class Descriptor(NamedTuple):
    """A TMA descriptor of a tensor."""

    kind: type
    fields: dict[str, Any]
    base: View | Empty

    def within(self, memory: list):
        # The checks of its constructor were made when it was recorded.
        descriptor = object.__new__(self.kind)
        descriptor.__dict__.update(self.fields, base=self.base.within(memory))
        return descriptor


class Parts(NamedTuple):
    """A tuple or list, made of ``parts`` once those at ``places`` are filled."""

    make: Callable[[list], Any]
    parts: list
    places: list[tuple[int, Any]]

    def within(self, memory: list):
        parts = self.parts.copy()
        for number, place in self.places:
            parts[number] = place.within(memory)
        return self.make(parts)


_PLACES = frozenset((Object, View, Empty, Address, Descriptor, Parts))


def is_place(template) -> bool:
    return type(template) in _PLACES


def filled(template, memory: list):
    return template.within(memory) if is_place(template) else template


class Allocation:
    def __init__(self, slot: int, tensor: Tensor) -> None:
        self._slot, self._size, self._stride = slot, tensor.shape, tensor.stride()
        self._traits = {"dtype": tensor.dtype, "device": tensor.device}

    def run(self, memory: list) -> None:
        memory[self._slot] = torch.empty_strided(self._size, self._stride, **self._traits)


class Operation:
    """A call of a function, of whose results some go to ``slots``, by their number."""

    def __init__(self, function: Callable, args, kwargs: dict[str, Any], slots: dict[int, int]) -> None:
        self._function, self._args = _FASTER.get(function, function), args
        self._kwargs, self._slots = kwargs, slots
        self._places = [(name, value) for name, value in kwargs.items() if is_place(value)]

    def run(self, memory: list) -> None:
        kwargs = self._kwargs | {name: place.within(memory) for name, place in self._places}
        result = self._function(*filled(self._args, memory), **kwargs)
        if self._slots:
            results = result if isinstance(result, (tuple, list)) else (result,)
            for number, slot in self._slots.items():
                memory[slot] = results[number]


class Launch:
    """A launch of a compiled kernel."""

    def __init__(self, compiled: Compiled, grid: tuple[int, ...], arguments) -> None:
        self._compiled, self._grid, self._arguments = compiled, grid, arguments

    def run(self, memory: list) -> None:
        self._compiled.start(self._grid, filled(self._arguments, memory))


class Release:
    """The last use of some memory is over."""

    def __init__(self, slots: list[int]) -> None:
        self._slots = slots

    def run(self, memory: list) -> None:
        for slot in self._slots:
            memory[slot] = None


class Tape:
    """A recorded run: ``size`` tensors and other objects in all, the inputs first, and the template of its result."""

    def __init__(self, size: int, actions: list, result) -> None:
        self._size, self._actions, self._result = size, actions, result

    @property
    def length(self) -> int:
        return len(self._actions)

    def replay(self, inputs: Iterable):
        memory = [*inputs]
        memory += [None] * (self._size - len(memory))
        for action in self._actions:
            action.run(memory)
        return filled(self._result, memory)
