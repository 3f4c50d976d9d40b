"""Megatron's output layer, as a subclass that returns deferred logits."""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, layers
from torch import Tensor

from parallel_lce.call.checks import dispatches
from parallel_lce.core.private import in_backward, outside_graphs, parameters_of
from parallel_lce.deferred import DeferredLogits, Source
from parallel_lce.megatron.main_grad import keep_autograd_gradient
from parallel_lce.megatron.settings import MARK, Fusion, is_megatrons
from parallel_lce.neighbours import MEGATRON, is_unit
from parallel_lce.patching import Derived

_OWNERS = [(pkgutil.resolve_name(place), names.split()) for place, names in MEGATRON.items()]
_PLACES = [(owner, vars(owner).get, name) for owner, names in _OWNERS for name in names]
"""Of each function in ``MEGATRON`` the module or class that holds it, what looks it up there, and its name."""

_found: list[Any] = []
"""What a call last found there, if Megatron wrote all of it."""


class ColumnParallelLinear(Derived, layers.ColumnParallelLinear):
    """Megatron's output layer. Its forward returns deferred logits ``[s, b, V/P]``, or ``[s, b, V]`` if it gathers."""

    @outside_graphs
    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Any, Tensor | None]:
        fusion: Fusion = vars(self)[MARK]
        own = parameters_of(self).get("weight")
        used, stock = own if weight is None else weight, super().forward

        def real(hidden: Tensor, given: Tensor | None = weight) -> Any:
            keep_autograd_gradient(used)
            return stock(hidden, given, runtime_gather_output)

        is_chosen = fusion.settings.cross_entropy == "output_layer"
        # Who asks for gathered logits samples from them, maybe on one rank alone.
        wants_loss = fusion.wanted_loss if in_backward() else fusion.wants_loss
        wants_loss = wants_loss and is_chosen and not runtime_gather_output
        if not (wants_loss or fusion.scoring):
            return real(input_)
        if (reason := _why_real(self, own, used)) is not None:
            fusion.say(self.training, reason)
            return real(input_)

        def say(_: Source, use: str) -> None:
            what = f"{use!r} of the output layer's result wants them"
            fusion.say(self.training, f"{what}; if an adapter does so, merge it")

        group: Any = self.tp_group
        ranks = group.size() if self.sequence_parallel and group is not None else 1
        whole = functools.partial(gather_from_sequence_parallel_region, group=group) if ranks > 1 else None
        bias = None if self.skip_bias_add else self.bias
        # Its gradient is delivered once, with that of its other uses. Fused accumulation needs the weight itself.
        operands: Any = () if self.gradient_accumulation_fusion else (used,)
        if operands or weight is not None:  # stock drops the gradient of other uses of the layer's own weight
            keep_autograd_gradient(used)
        call = Source(self, input_, used, bias, lambda *given: real(*given)[0], say, operands, whole=whole)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        entries = self.output_size if gathers else self.output_size_per_partition
        first, *others, _ = input_.shape
        shape = ranks * first, *others, entries
        logits = DeferredLogits.of(call, shape, getattr(self, "output_dtype", None))
        return logits, self.bias if self.skip_bias_add else None


def _why_real(layer: Any, own: Any, used: Any) -> str | None:
    """Why a call of an output layer must make real logits. The fused loss stands for Megatron's own functions alone.
    ``used``: its ``own`` weight, or the one passed to it, which may be a detached view of that."""
    found = [get(name) for _, get, name in _PLACES]  # at each call: a program may replace one later
    if found != _found:
        for (owner, _, name), function in zip(_PLACES, found):
            if function is not None and not is_megatrons(function):
                return f"{owner.__name__}.{name} is not Megatron's own; leave Megatron's in place"
        _found[:] = found
    if layer._forward_impl not in found and not is_megatrons(layer._forward_impl):
        return "_forward_impl is not Megatron's own; leave Megatron's in place"
    if used is None:
        return "the output layer has no parameter named weight, and none is passed to it; fold parametrizations into it"
    if used is own and layer.weight is not own:
        return "the output layer's weight is computed from its parameter; pass it to the layer, or fold it in"
    sharded = hasattr(used, "__fsdp_param__") or hasattr(own, "__fsdp_param__")
    if sharded or is_unit(layer) or vars(layer).get("gtp_remat_size", 1) > 1:
        return "the output weight is fully sharded, and not whole for the loss; use the distributed optimizer"
    expected = layer.output_size_per_partition, layer.input_size
    if used.shape != expected or dispatches(type(used)):
        return f"the output weight is a {type(used).__name__} {[*used.shape]}; use a plain one of {[*expected]}"
    if getattr(layer, "disable_grad_reduce", False):
        return "the output layer leaves the reduction of dX to others; build it with disable_grad_reduce=False"
    return None
