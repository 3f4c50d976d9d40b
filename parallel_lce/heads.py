"""Classes of other projects' output layers and models, derived in a running program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel_lce import neighbours
from parallel_lce.core import private
from parallel_lce.patching import is_own


class Derived:
    """The first base of such a class, so that objects can be copied and pickled. ``_made_by``: a function that makes
    the class, and its arguments."""

    _made_by: tuple

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced, made_by = super().__reduce_ex__(protocol), vars(type(self)).get("_made_by")
        return reduced if made_by is None else (_made_again, made_by, *reduced[2:])


def _made_again(make: Callable[..., type], *classes: type) -> Any:
    kind: Any = make(*classes)
    return kind.__new__(kind)


@functools.cache
def fused_class(kind: type, fused: type) -> type:
    """``fused`` itself for its last base, which it replaces. Another subclass keeps its forward, under its name: what
    that calls as ``super().forward`` is the fused one."""
    if fused in kind.__mro__:
        return kind
    if kind is fused.__bases__[-1]:
        return fused
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, fused), {**names, "_made_by": (fused_class, kind, fused)})


def unfuse(module: Any) -> None:
    """Gives a module the class that it had, unless ``fully_shard`` has derived another one since."""
    kind = type(module)
    if "_made_by" in vars(kind):
        module.__class__ = kind._made_by[1]
    elif Derived in kind.__bases__:
        module.__class__ = kind.__bases__[-1]


def is_unit(layer: nn.Module) -> bool:
    """Whether FSDP2 or DeepSpeed's ZeRO-3 gathers the layer's weight, by hooks, for a call of the layer alone."""
    return isinstance(layer, FSDPModule) or hasattr(private.parameters_of(layer).get("weight"), "ds_id")


def why_no_product(weight: Any, input: Any) -> str | None:
    """Why the logits of an ``nn.Linear`` might be more than a product of these, which are then made. ``weight``: None
    if it is whole in the loss alone."""
    if any(type(mode) is not private.DeviceContext for mode in private.function_modes()):
        return "a mode of torch functions is active"
    if private.transforming() or private.in_forward_mode() or torch.jit.is_tracing():  # pyright: ignore
        return "torch.func, forward-mode differentiation or a trace of torch.jit runs"
    function = nn.functional.linear
    if not (function is private.linear or is_own(function, f"{neighbours.ZERO_MODULES[0]}.linear")):
        return "torch.nn.functional.linear was replaced"
    if not is_own(nn.Linear.forward, "torch.nn.modules.linear", "Linear.forward"):
        return "nn.Linear.forward was replaced"
    for name, value in (("weight", weight), ("input", input)):
        if value is not None and (type(value) not in (Tensor, nn.Parameter) or value.is_meta):
            return f"the {name} of its output layer is a {type(value).__name__} on {value.device}"
    return None
