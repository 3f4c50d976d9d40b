"""Launching a kernel again, for a fraction of what it costs the host the first time.

Triton finds the compiled kernel of a launch by a description of all arguments, which takes it longer than
the launch, and a small vocabulary shard less time than a few of these. Here a description of what Triton
compiles for finds it: dtypes, alignment, which integers are 1 or divisible by 16, and constants.
"""

from __future__ import annotations

import functools

import torch


def cdiv(a: int, b: int) -> int:
    """As ``triton.cdiv``, which takes the host several microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """As ``triton.next_power_of_2``, likewise."""
    return 1 << max(0, n - 1).bit_length()


class Relaunched:
    """A ``triton.jit`` or ``gluon.jit`` function that remembers what its launches compiled to.

    Constants and options are passed by name, always in one order, all other arguments by position. Launches
    after the first of a kind know nothing of ``pre_run_hooks`` and of knobs that ask for another compilation.
    """

    def __init__(self, function) -> None:
        self._function = function
        self._known: dict[tuple, tuple] = {}
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __getitem__(self, grid: tuple[int, ...]):
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        described = [_DESCRIBED.get(type(a), _description)(a) for a in arguments]
        key = (device, *described, *constants.values())
        known = self._known.get(key)
        if known is not None:
            compiled, names = known
            full = *grid, *(1,) * (3 - len(grid))
            compiled[full](*arguments, *[constants[name] for name in names])
            return
        compiled = self._function[grid](*arguments, **constants)
        # The interpreter compiles nothing.
        if hasattr(compiled, "__getitem__"):
            self._known[key] = compiled, self._function.arg_names[len(arguments) :]

    def __getattr__(self, name: str):
        return getattr(self._function, name)


def _of_tensor(tensor: torch.Tensor):
    return tensor.dtype if tensor.data_ptr() % 16 == 0 else (tensor.dtype,)


def _of_integer(number: int):
    if number == 1:
        return 1
    width = 0 if -(2**31) <= number < 2**31 else 32 if number < 2**63 else 64
    return width + (16 if number % 16 == 0 else 2)


# What Triton compiles anew for, or more; types that differ must not be described alike.
_DESCRIBED = {
    torch.Tensor: _of_tensor,
    torch.nn.Parameter: _of_tensor,
    int: _of_integer,
    float: lambda number: float,
    type(None): lambda nothing: None,
}


def _description(argument):
    if isinstance(argument, torch.Tensor):
        return _of_tensor(argument)
    if not hasattr(argument, "block_shape"):
        raise TypeError(f"no argument of a kernel: {argument!r}, a {type(argument).__name__}")
    return type(argument), argument.base.dtype, *argument.block_shape
