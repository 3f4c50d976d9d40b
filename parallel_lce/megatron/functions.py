"""Which of Megatron's functions a program has replaced. The fused loss stands for Megatron's own alone."""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import cross_entropy, layers

from parallel_lce.neighbours import MEGATRON_LOSS, MEGATRON_PROJECTION


def is_megatrons(function: Any) -> bool:
    """Whether Megatron-core wrote a function or class. A program's own, which may have its name, has other globals."""
    if isinstance(function, type):
        return function.__module__.startswith("megatron.core.")
    function = getattr(function, "__func__", function)
    while getattr(getattr(function, "__code__", None), "co_name", None) in ("decorate_fwd", "decorate_bwd"):
        function = function.__wrapped__  # of torch.amp, around its autograd.Functions
    return f"{getattr(function, '__globals__', {}).get('__name__')}.".startswith("megatron.core.")


_own: dict[str, list[Any]] = {}
"""By module, the functions that were found to be Megatron's. A program may replace one later: each call compares."""


def why_projection_is_not_megatrons(layer: Any) -> str | None:
    """The first replaced function, of those that make the logits of an output layer, in a sentence; None without."""
    if not is_megatrons(layer._forward_impl):
        return "_forward_impl is not Megatron's own; leave Megatron's in place"
    return _replaced(layers, MEGATRON_PROJECTION)


def why_loss_is_not_megatrons() -> str | None:
    """The same of the functions that make the unfused cross-entropy."""
    return _replaced(tensor_parallel, _PUBLIC) or _replaced(cross_entropy, MEGATRON_LOSS)


_PUBLIC = {"": ("vocab_parallel_cross_entropy",)}


def _replaced(module: Any, table: dict[str, tuple[str, ...]]) -> str | None:
    """``table``: names of functions and, by their class, of methods, of which a class may inherit some."""
    found = []
    for kind, names in table.items():
        there = vars(vars(module)[kind]) if kind else vars(module)
        found += [there.get(name) for name in names]
    if found == _own.get(module.__name__):
        return None
    places = [f"{kind or module.__name__}.{name}" for kind, names in table.items() for name in names]
    for place, function in zip(places, found):
        if function is not None and not is_megatrons(function):
            return f"{place} is not Megatron's own; leave Megatron's in place"
    _own[module.__name__] = found
    return None
