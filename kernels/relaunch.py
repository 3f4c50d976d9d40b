"""Launch a compiled kernel with a cheaper look-up than Triton's.

Triton finds the compiled kernel of a launch from a description of all its arguments. That takes longer than the launch
itself, and longer than the GPU takes for a small vocabulary shard. :class:`Relaunched` describes only what Triton
compiles for: dtypes, alignment, which integers are 1 or divisible by 16, and constants.
"""

from __future__ import annotations

import torch


def next_power_of_2(n: int) -> int:
    """As ``triton.next_power_of_2``, which takes the host several microseconds."""
    return 1 << max(0, n - 1).bit_length()


class Relaunched:
    """A ``triton.jit`` or ``gluon.jit`` function that remembers what its launches compiled to.

    Constants and options are passed by name, always in the same order; all other arguments by position. From the
    second launch of a kind on, ``pre_run_hooks`` and Triton's knobs have no effect.
    """

    def __init__(self, function) -> None:
        self._function = function
        self._compiled: dict[tuple, tuple] = {}
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        key = (device, *_describe(arguments), *constants.values())
        known = self._compiled.get(key)
        if known is not None:
            compiled, names = known
            full = *grid, *(1,) * (3 - len(grid))
            compiled[full](*arguments, *[constants[name] for name in names])
            return
        # Triton 3.10 changes the default of whether a product and a sum become one instruction.
        compiled = self._function[grid](*arguments, **constants, enable_fp_fusion=True)
        # The interpreter compiles nothing.
        if hasattr(compiled, "__getitem__"):
            self._compiled[key] = compiled, self._function.arg_names[len(arguments) :]

    def __getattr__(self, name: str):
        return getattr(self._function, name)


def _describe(arguments: tuple) -> list:
    """Everything that Triton specializes on, and possibly more. Arguments of different types are described
    differently."""
    described: list = []
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            # 1, else the width and whether it is divisible by 16
            width = 0 if -(2**31) <= argument < 2**31 else 32 if argument < 2**63 else 64
            described.append(1 if argument == 1 else width + (16 if argument % 16 == 0 else 2))
        elif kind is float:
            described.append(float)
        elif argument is None:
            described.append(None)
        elif isinstance(argument, torch.Tensor):
            described.append(argument.dtype if argument.data_ptr() % 16 == 0 else (argument.dtype,))
        elif isinstance(argument, tuple):
            described.append((kind, *_describe(argument)))
        elif hasattr(argument, "block_shape"):
            described.append((kind, argument.base.dtype, *argument.block_shape))
        else:
            raise TypeError(f"no argument of a kernel: {argument!r}, a {kind.__name__}")
    return described
