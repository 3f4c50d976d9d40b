"""Megatron's output layers, as subclasses that return deferred logits."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, layers
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from parallel_lce.call.checks import dispatches
from parallel_lce.core.private import outside_graphs, parameters_of
from parallel_lce.deferred import THE_LOSS, DeferredLogits, Source
from parallel_lce.heads import FusedHead, call_unit, fused_class, is_unit
from parallel_lce.megatron.functions import why_projection_is_not_megatrons
from parallel_lce.megatron.loss import fused_losses, swapped
from parallel_lce.megatron.main_grad import keep_autograd_gradient
from parallel_lce.megatron.settings import DEFERS_WEIGHT_GRADIENT, MARK, NO_HEAD, Fusion, running
from parallel_lce.neighbours import linear_cross_entropy_module
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy


class ColumnParallelLinear(FusedHead, layers.ColumnParallelLinear):
    """Megatron's output layer. Its forward returns deferred logits ``[s, b, V/P]``, or ``[s, b, V]`` if it gathers."""

    @outside_graphs
    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Any, Tensor | None]:
        if (loss := self.loss_within()) is not None:
            return loss(input_), None
        reason = self._why_real(weight)
        if reason is None and is_unit(self):
            reason = "the output layer, an FSDP unit of its own, has hooks or gets a weight; remove them"
        if reason is None:
            return self._deferred(input_, weight, runtime_gather_output, None)
        self._say(reason)
        keep_autograd_gradient(self._used(weight))
        return super().forward(input_, weight, runtime_gather_output)

    def deferred_of_unit(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        replaced = "forward" in vars(self) or type(self).forward is not ColumnParallelLinear.forward
        if replaced or weight is not None or self._why_real(None) is not None:
            return None
        return self._deferred(input_, None, runtime_gather_output, self)

    def _used(self, passed: Tensor | None) -> Any:
        """The weight of a call: the passed one, else the layer's own parameter, if it has one."""
        return parameters_of(self).get("weight") if passed is None else passed

    def _say(self, use: str) -> None:
        if not use:
            return
        if (scoring := running.get()) is not None:
            raise scoring.refused(use)
        fusion: Fusion = vars(self)[MARK]
        changes = fusion.settings.changes()
        fusion.say(self.training, f"{use}; a program's own loss of them has no {changes}" if changes else use)

    def _why_real(self, passed: Tensor | None) -> str | None:
        """Why this call makes real logits, "" if its caller asks for them; None if it need not."""
        fusion: Fusion | None = vars(self).get(MARK)
        asked_for = fusion is None or fusion.settings.cross_entropy == "logits" or not fusion.has_labels
        if asked_for and running.get() is None:
            return ""
        if is_parametrized(self):
            return "the output layer's parametrizations may give another weight each time; fold them into the weight"
        if (reason := why_projection_is_not_megatrons(self)) is not None:
            return reason
        own, expected = parameters_of(self).get("weight"), (self.output_size_per_partition, self.input_size)
        used = own if passed is None else passed
        if used is None:
            return "the output layer has no parameter named weight, and none is passed to it"
        # The passed weight may be a detached view of the layer's own.
        sharded = hasattr(used, "__fsdp_param__") or hasattr(own, "__fsdp_param__")
        if sharded or getattr(self, "gtp_remat_size", 1) > 1:
            return "the output weight is fully sharded, and not whole for the loss; use the distributed optimizer"
        if (used.shape != expected or dispatches(type(used))) and not is_unit(self):
            return f"the output weight is a {type(used).__name__} {[*used.shape]}; use a plain one of {[*expected]}"
        if getattr(self, "disable_grad_reduce", False):
            return "the output layer leaves the reduction of dX to others; build it with disable_grad_reduce=False"
        return DEFERS_WEIGHT_GRADIENT if self.config.defer_embedding_wgrad_compute else None

    def _deferred(self, hidden: Tensor, passed: Tensor | None, gather: bool | None, unit: Any) -> tuple:
        group: Any = self.tp_group
        ranks = 1 if group is None else group.size()
        used, bias, whole = self._used(passed), self.bias, None
        first, *others, _ = hidden.shape
        if self.sequence_parallel and ranks > 1:
            first, whole = ranks * first, partial(gather_from_sequence_parallel_region, group=self.tp_group)
        make = partial(self._real, passed, gather, unit is not None)
        operands = (None, None) if unit is not None else (used, None if self.skip_bias_add else bias)
        call: Any = Source(self, hidden, *operands, make, self._say_use, unit=unit, parameter=used, whole=whole)
        call.shared = passed is not None  # for the loss
        gathers = self.gather_output if gather is None else gather
        entries = self.output_size if gathers else self.output_size_per_partition
        logits = DeferredLogits.of(call, (first, *others, entries), getattr(self, "output_dtype", None))
        return logits, bias if self.skip_bias_add else None

    def _say_use(self, _: Source, use: str) -> None:
        self._say(f"{use!r} of the output layer's result wants them")

    def _real(self, passed: Any, gather: Any, unit: bool, hidden: Tensor) -> Tensor:
        stock = super().forward
        if unit:  # called by FSDP's hooks
            return call_unit(self, self, hidden, lambda h, weight, bias: (stock(h, None, gather)[0],))[0]
        keep_autograd_gradient(self._used(passed))
        return stock(hidden, passed, gather)[0]


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
            losses = fused_losses(logits, target, ignore_index)
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
    fused = LinearCrossEntropyModule if of_losses else ColumnParallelLinear
    layer.__class__ = fused_class(type(layer), fused)
    vars(layer)[MARK] = fusion
    return None
