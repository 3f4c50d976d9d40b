"""Output layers of other projects that return deferred logits, and those whose weight is whole only within a call.

FSDP2 and DeepSpeed's ZeRO-3 gather the weight of a layer by hooks around its call, FSDP1 in a module around it. Such a
module is a *unit*. The loss of a unit's deferred logits is computed in a call of the unit: :func:`call_unit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel_lce.core.private import FSDP_MODULES, comes_from, hooks, parameters_of
from parallel_lce.neighbours import ZERO_MODULES

_Loss = Callable[[Tensor, Any, Any], tuple]
_within: ContextVar[tuple[nn.Module, Callable[[Tensor], tuple]] | None] = ContextVar("_within", default=None)


class Derived:
    """A base of classes that are made in a program, so that objects can be copied and pickled. ``_made_by``: what makes
    the class, and from which classes."""

    _made_by: tuple

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced, made_by = super().__reduce_ex__(protocol), vars(type(self)).get("_made_by")
        return reduced if made_by is None else (_made_again, made_by, *reduced[2:])


def _made_again(make: Callable[..., type], *classes: type) -> Any:
    kind: Any = make(*classes)
    return kind.__new__(kind)


class FusedHead(Derived):
    """The first base of an output layer's class that may be a unit. ``forward`` begins with :meth:`loss_within`;
    ``deferred_of_unit`` returns the deferred logits of a weight that is not whole, None if a call makes real ones."""

    def __call__(self: Any, *arguments: Any, **options: Any) -> Any:
        """A unit that only gathers its weight runs no hooks for deferred logits: they run with the loss."""
        if _within.get() is None and is_unit(self) and not _other_hooks(self):
            if (deferred := self.deferred_of_unit(*arguments, **options)) is not None:
                return deferred
        return nn.Module.__call__(self, *arguments, **options)  # pyright: ignore[reportArgumentType]

    def loss_within(self) -> Callable[[Tensor], tuple] | None:
        """What :func:`call_unit` computes of the hidden states in place of the logits."""
        layer, loss = _within.get() or (None, None)
        return loss if layer is self else None


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
    elif FusedHead in kind.__bases__:
        module.__class__ = kind.__bases__[-1]


def is_unit(layer: nn.Module) -> bool:
    return isinstance(layer, FSDPModule) or hasattr(parameters_of(layer).get("weight"), "ds_id")


def _other_hooks(layer: nn.Module) -> bool:
    """Whether a hook does more than gather the weight."""
    around = hooks(layer, "forward", "forward_pre")
    gathers = all(comes_from(hook, *FSDP_MODULES, *ZERO_MODULES) for hook in around)
    return not gathers or bool(hooks(layer, "backward", "backward_pre"))


def call_unit(unit: nn.Module, layer: Any, hidden: Tensor, loss: _Loss) -> tuple:
    """``loss(hidden, weight, bias)``, a tuple of tensors, within a call ``unit(hidden)``, in place of the logits of its
    ``layer``. Collectives: those of the unit's hooks, and the loss's."""
    made: list[tuple] = []

    def within(hidden: Tensor) -> tuple:
        # Copies of views: a change of one in place would drop the hook that FSDP2 puts on it.
        found = loss(hidden, layer.weight, layer.bias)
        made.append(tuple([t.clone() if isinstance(t, Tensor) and t._is_view() else t for t in found]))
        return made[0]

    token = _within.set((layer, within))
    try:
        result = nn.Module.__call__(unit, hidden)
    finally:
        _within.reset(token)
    # FSDP2's hooks are on these tensors. It casts its result by a policy for logits.
    return made[0] if isinstance(unit, FSDPModule) else result
