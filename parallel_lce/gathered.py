"""Output layers whose weight is whole only within their own forward: units of FSDP of their own, and the layers of
DeepSpeed's ZeRO-3.

Such a weight is gathered before the forward and again in the backward, by hooks of the *unit*: the layer, or a module
around it that does nothing but call it. So the loss is computed in a call of the unit, in place of the layer's forward
(:func:`called_with`). All ranks gather as often as without the loss, fused or not.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from parallel_lce.core.private import FSDP_MODULES, hooks, parameters_of
from parallel_lce.patching import is_own, replaced

# Beginnings of the names of the modules whose functions are the hooks that gather.
_GATHERING = *FSDP_MODULES, "deepspeed.runtime.zero", "deepspeed.utils.nvtx"
# Forwards that pass their input on to the only module within, and give what that gives.
_PASSING = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.forward"),
    ("torch.nn.modules.container", "Sequential.forward"),
)


def weight_of(layer: nn.Module) -> Any:
    """The layer's weight, whole or not. ZeRO-3's would be gathered by a plain read within a forward."""
    return parameters_of(layer).get("weight", vars(layer).get("weight"))


def is_partitioned(layer: nn.Module) -> bool:
    """Whether the layer's weight is a parameter of ZeRO-3."""
    return hasattr(weight_of(layer), "ds_id")


def is_computed(layer: nn.Module) -> bool:
    """Whether the layer computes its weight or bias at each use, as ``torch.nn.utils.parametrize`` does it.
    That may draw random numbers, so they are not read."""
    return hasattr(type(layer), "weight") or hasattr(type(layer), "bias")


def is_sharded_by_plan(layer: nn.Module) -> bool:
    """Whether transformers' tensor parallelism has replaced the layer's forward by one that gathers the logits."""
    return ".install_forward.<locals>." in getattr(vars(layer).get("forward"), "__qualname__", "")


def unit_of(layer: nn.Module, around: list[nn.Module]) -> tuple[str | None, nn.Module | None]:
    """The outermost module that gathers the weight of an output layer for the layer alone, None if there is none; and
    before it the reason, with a remedy, why the loss cannot be computed in a call of it, None if it can. ``around``:
    the modules from the model to the layer, from outside, without these."""
    modules = [*around, layer]
    units = [number for number, each in enumerate(modules) if isinstance(each, (FSDPModule, FullyShardedDataParallel))]
    if not units:
        if not is_partitioned(layer):
            return None, None
        gathers = any(map(is_gathering, hooks(layer, "forward_pre")))
        return (None, layer) if gathers else ("no hook of its output layer gathers the weight, which is ZeRO-3's", None)
    chain = modules[units[0] :]
    for outer, inner in pairwise(chain):
        passes = "forward" not in vars(outer) and any(is_own(type(outer).forward, *own) for own in _PASSING)
        if not passes or [*outer.children()] != [inner]:
            return (
                f"its output layer is in a unit of FSDP with more than the layer, {type(chain[0]).__name__}, and its "
                "weight whole only there; leave it to the unit of the whole model, or make it a unit of its own"
            ), None
    return None, chain[0]


def called_with(layer: Any, forward: Callable[[Tensor], Any], hidden: Tensor, unit: Any = None) -> Any:
    """``layer(hidden)`` with all its hooks, and ``forward`` in place of its own; or ``unit(hidden)``, which passes its
    input on to the layer. FSDP's and ZeRO-3's hooks look for tensors in tuples."""
    unit, made = layer if unit is None else unit, []

    def kept(hidden: Tensor) -> Any:
        made.append(forward(hidden))
        return made[0]

    with replaced(layer, forward=kept):
        result = nn.Module.__call__(unit, hidden)
    # FSDP2's hooks are on these tensors, and a cast by its policy after them.
    return made[0] if isinstance(unit, FSDPModule) else result


def other_hooks(unit: nn.Module) -> list[Callable]:
    """The hooks around a call of this module and of those within, without those that gather."""
    forward = [hook for module in unit.modules() for hook in hooks(module, "forward", "forward_pre")]
    others = [hook for hook in forward if not is_gathering(hook)]
    return others + [hook for module in unit.modules() for hook in hooks(module, "backward", "backward_pre")]


def is_gathering(hook: Callable) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_GATHERING)
