"""Megatron's output layers, as subclasses that return deferred logits."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, layers
from torch import Tensor, nn

from parallel_lce.call.checks import dispatches
from parallel_lce.core.private import outside_graphs, parameters_of
from parallel_lce.deferred import THE_LOSS, DeferredLogits, Source
from parallel_lce.heads import Derived, fused_class, is_unit
from parallel_lce.megatron.loss import losses_of, swapped
from parallel_lce.megatron.main_grad import keep_autograd_gradient
from parallel_lce.megatron.settings import MARK, NO_HEAD, Fusion, running
from parallel_lce.neighbours import MEGATRON, linear_cross_entropy_module
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy


class ColumnParallelLinear(Derived, layers.ColumnParallelLinear):
    """Megatron's output layer. Its forward returns deferred logits ``[s, b, V/P]``, or ``[s, b, V]`` if it gathers."""

    @outside_graphs
    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Any, Tensor | None]:
        own, fusion = parameters_of(self).get("weight"), vars(self).get(MARK)
        used: Any = own if weight is None else weight
        wants_losses = fusion is not None and fusion.has_labels and fusion.settings.cross_entropy == "output_layer"
        reason = ""  # the caller wants logits
        if wants_losses or running.get() is not None:
            reason = _why_real(self, own, used)
        if reason is not None:
            self._say(reason)
            keep_autograd_gradient(used)
            return super().forward(input_, weight, runtime_gather_output)
        stock = super().forward

        def make(hidden: Tensor) -> Tensor:
            keep_autograd_gradient(used)
            return stock(hidden, weight, runtime_gather_output)[0]

        group: Any = self.tp_group
        whole: Any = None
        ranks = 1 if group is None else group.size()
        first, *others, _ = input_.shape
        if self.sequence_parallel and ranks > 1:
            first, whole = ranks * first, functools.partial(gather_from_sequence_parallel_region, group=group)
        bias = None if self.skip_bias_add else self.bias
        call: Any = Source(self, input_, used, bias, make, self._say_use, whole=whole)
        call.shared = weight is not None  # for the loss
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        entries = self.output_size if gathers else self.output_size_per_partition
        logits = DeferredLogits.of(call, (first, *others, entries), getattr(self, "output_dtype", None))
        return logits, self.bias if self.skip_bias_add else None

    def _say(self, use: str) -> None:
        if not use:
            return
        if (scoring := running.get()) is not None:
            raise scoring.refused(use)
        fusion: Fusion = vars(self)[MARK]
        changes = fusion.settings.changes()
        fusion.say(self.training, f"{use}; a program's own loss of them has no {changes}" if changes else use)

    def _say_use(self, _: Source, use: str) -> None:
        self._say(f"{use!r} of the output layer's result wants them")


def _why_real(layer: Any, own: Any, used: Any) -> str | None:
    """Why a call of an output layer must make real logits. ``used``: its ``own`` weight, or the one passed to it, which
    may be a detached view of that."""
    if (reason := _replaced()) is not None:
        return reason
    if not is_megatrons(layer._forward_impl):
        return "_forward_impl is not Megatron's own; leave Megatron's in place"
    if used is None:
        return "the output layer has no parameter named weight, and none is passed to it; fold parametrizations into it"
    sharded = hasattr(used, "__fsdp_param__") or hasattr(own, "__fsdp_param__") or is_unit(layer)
    if sharded or getattr(layer, "gtp_remat_size", 1) > 1:
        return "the output weight is fully sharded, and not whole for the loss; use the distributed optimizer"
    expected = layer.output_size_per_partition, layer.input_size
    if used.shape != expected or dispatches(type(used)):
        return f"the output weight is a {type(used).__name__} {[*used.shape]}; use a plain one of {[*expected]}"
    if getattr(layer, "disable_grad_reduce", False):
        return "the output layer leaves the reduction of dX to others; build it with disable_grad_reduce=False"
    return None


def is_megatrons(function: Any) -> bool:
    """Whether Megatron-core wrote a function or class. A program's own, which may have its name, has other globals."""
    if isinstance(function, type):
        return function.__module__.startswith("megatron.core.")
    function = getattr(function, "__func__", function)
    while getattr(getattr(function, "__code__", None), "co_name", None) in ("decorate_fwd", "decorate_bwd"):
        function = function.__wrapped__  # of torch.amp, around its autograd.Functions
    return f"{getattr(function, '__globals__', {}).get('__name__')}.".startswith("megatron.core.")


_known: list[Any] = []
"""The functions of ``MEGATRON`` that were found to be Megatron's. A program may replace one later: each call
compares."""


@functools.cache
def _owners() -> list[tuple[dict, str, str]]:
    """Of each function in ``MEGATRON`` the attributes that hold it, its name there, and its place."""
    found = []
    for place, names in MEGATRON.items():
        module, _, kind = place.partition(":")
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, kind) if kind else owner
        found += [(vars(owner), name, f"{kind or module}.{name}") for name in names.split()]
    return found


def _replaced() -> str | None:
    """The first replaced function, of those that make the logits and their unfused loss, in a sentence; None without.
    The fused loss stands for Megatron's own alone."""
    owners = _owners()
    functions = [attributes.get(name) for attributes, name, _ in owners]
    if functions == _known:
        return None
    for function, (_, _, place) in zip(functions, owners):
        if function is not None and not is_megatrons(function):
            return f"{place} is not Megatron's own; leave Megatron's in place"
    _known[:] = functions
    return None


_module = linear_cross_entropy_module()


class LinearCrossEntropyModule(ColumnParallelLinear, _module or layers.ColumnParallelLinear):  # pyright: ignore[reportGeneralTypeIssues]
    """The output layer of Megatron's development branch, which may return losses."""

    @outside_graphs
    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False,
        labels: Tensor | None = None,
        reduction: str = "none",
        ignore_index: int = -100,
    ) -> Any:
        """Logits; or with ``output_cross_entropy_loss`` the losses of ``labels [b, s]``, 0 where they are
        ``ignore_index``. ``reduction="sum"`` adds them up on this rank; ``"mean"`` divides by their number."""
        if not output_cross_entropy_loss:
            return super().forward(input_, weight, runtime_gather_output)
        logits, bias = super().forward(input_, weight, False)
        assert labels is not None
        logits, target = logits if bias is None else logits + bias, labels.transpose(0, 1)
        if isinstance(logits, DeferredLogits) and logits.why_not_fused() is None:
            losses = losses_of(logits, labels, ignore_index)
        else:
            real = logits.real(THE_LOSS) if isinstance(logits, DeferredLogits) else logits
            group: Any = self.tp_group
            losses = vocab_parallel_cross_entropy(real, target, tp_group=group)
            losses = losses.masked_fill(target == ignore_index, 0.0)
        total = swapped(losses) if reduction == "none" else losses.sum()
        return total / (target != ignore_index).sum() if reduction == "mean" else total


def fuse_head(layer: nn.Module | None, fusion: Fusion) -> str | None:
    """Give the output layer a class that returns deferred logits. Returns why not, None if it has one."""
    if layer is None:
        return NO_HEAD
    if not isinstance(layer, layers.ColumnParallelLinear):
        kind = type(layer).__name__
        return f"the output layer is a {kind}; use Megatron's ColumnParallelLinear, or merge the adapter around it"
    of_losses = _module is not None and isinstance(layer, _module)
    layer.__class__ = fused_class(type(layer), LinearCrossEntropyModule if of_losses else ColumnParallelLinear)
    vars(layer)[MARK] = fusion
    return None
