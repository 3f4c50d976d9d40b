"""Classes of other projects' output layers and models, derived in a running program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel_lce.core.private import parameters_of


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
    return isinstance(layer, FSDPModule) or hasattr(parameters_of(layer).get("weight"), "ds_id")
