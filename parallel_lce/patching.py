"""How the doors change other projects' code: replace attributes, derive classes of objects, undo both, and warn."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_lce import neighbours
from parallel_lce.core import private

_SKIPPED = os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep


class LogitsWarning(RuntimeWarning):
    """A fused model makes logits that it was to do without. No UserWarning: Megatron-LM's programs show those on the
    first rank alone, which has no output layer under pipeline parallelism."""


def warn(message: str, category: type[Warning], on_each_rank: bool = False) -> None:
    """Warn, on the first rank, of the first line outside of this package and of PyTorch, where Python can find it."""
    if not on_each_rank and dist.is_initialized() and dist.get_rank() > 0:
        return
    where: dict[str, Any] = {"skip_file_prefixes": _SKIPPED} if sys.version_info >= (3, 12) else {}
    warnings.warn(message, category, **where)


class Replacements(dict[tuple[Any, str], tuple[Any, Any]]):
    """Replaced attributes, by owner (a module or a class) and name: ours, and the owner's own."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by ``make(own)``, once."""
        if (owner, name) not in self:
            own = vars(owner)[name]
            self[owner, name] = make(own), own
            setattr(owner, name, self[owner, name][0])

    def restore(self) -> None:
        """Undo all replacements. What other code has replaced since stays, with a warning."""
        for (owner, name), (ours, own) in [*self.items()]:
            now = vars(owner).get(name)
            if now is ours:
                setattr(owner, name, own)
            elif now is not own:
                said = f"{owner.__name__}.{name} has been replaced since patch(), and stays"
                warn(f"parallel_lce: {said}", RuntimeWarning)
                continue
            del self[owner, name]


class Derived:
    """The first base of a class that is derived in a running program, so that objects can be copied and pickled.
    ``_made_by``: a function that makes the class, and its arguments."""

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
    made_by = {"_made_by": (fused_class, kind, fused)}
    if private.is_parametrized(kind):
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        return type(kind.__name__, (fused_class(kind.__bases__[0], fused),), own | made_by)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, fused), names | made_by)


def unfuse(module: Any) -> None:
    """Gives a module the class that it had, unless ``fully_shard`` has derived another one since."""
    kind = type(module)
    if "_made_by" in vars(kind):
        module.__class__ = kind._made_by[1]
    elif Derived in kind.__bases__:
        module.__class__ = kind.__bases__[-1]


def is_own(function: Any, module: str, name: str | None = None) -> bool:
    """Whether a function was written in that module, under that qualified name. A wrapper copies names, not globals."""
    there = getattr(function, "__globals__", 0) is getattr(sys.modules.get(module), "__dict__", None)
    return there and name in (None, function.__qualname__)


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
