"""Which of Megatron's functions a program has replaced. The fused loss stands for Megatron's own alone."""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import cross_entropy, layers

from parallel_lce.neighbours import MEGATRON_LOSS, MEGATRON_PROJECTION

_own: dict[str, Any] = {}
"""Functions that were found to be Megatron's, by their names: most calls only compare."""


def is_megatrons(function: Any) -> bool:
    """Whether Megatron-core wrote a function or class. A program's own, which may have its name, has other globals."""
    if isinstance(function, type):
        return function.__module__.startswith("megatron.core.")
    function = getattr(function, "__func__", function)
    while getattr(getattr(function, "__code__", None), "co_name", None) in ("decorate_fwd", "decorate_bwd"):
        function = function.__wrapped__  # of torch.amp, around its autograd.Functions
    return f"{getattr(function, '__globals__', {}).get('__name__')}.".startswith("megatron.core.")


def why_projection_is_not_megatrons(layer: Any) -> str | None:
    """The first replaced function, of those that make the logits of an output layer, in a sentence; None without."""
    of_layer = getattr(layer._forward_impl, "__func__", layer._forward_impl)
    return _replaced("_forward_impl", of_layer) or _first_replaced(layers, MEGATRON_PROJECTION)


def why_loss_is_not_megatrons() -> str | None:
    """The same of the functions that make the unfused cross-entropy."""
    public = "tensor_parallel.vocab_parallel_cross_entropy", tensor_parallel.vocab_parallel_cross_entropy
    return _replaced(*public) or _first_replaced(cross_entropy, MEGATRON_LOSS)


def _first_replaced(module: Any, table: dict[str, tuple[str, ...]]) -> str | None:
    for kind, names in table.items():
        owner = vars(module)[kind] if kind else module
        own = vars(owner)
        for name in names:
            if name in own and (reason := _replaced(f"{kind}.{name}", own[name])) is not None:
                return reason
    return None


def _replaced(name: str, function: Any) -> str | None:
    if _own.get(name) is function:
        return None
    if is_megatrons(function):
        _own[name] = function
        return None
    return f"{name} is not Megatron's own; leave Megatron's in place"
