"""Lazy logits: the output layer of Megatron's models returns them in place of logits, and the loss takes them."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel_lce.functional import token_statistics
from parallel_lce.lazy_logits import RecordedLogits
from parallel_lce.patching import replaced


class LogitsWarning(RuntimeWarning):
    """Training makes the whole logits.

    Not a UserWarning: Megatron-LM's programs show UserWarnings only on the first rank, which has no output layer under
    pipeline parallelism.
    """


def warn_of_logits(module: torch.nn.Module, reason: str, stacklevel: int = 3) -> None:
    """Warn that training makes logits although the caller did not ask for them: once per module and reason, on one of
    the ranks that have the module. Raises ``RuntimeError`` for an output layer within
    :func:`parallel_lce.megatron.output_layer.without_logits`."""
    if (function := getattr(module, "logits_refused_by", None)) is not None:
        raise RuntimeError(f"{function} makes no logits: {reason}")
    said = vars(module).setdefault("_parallel_lce_said", set())
    if not module.training or reason in said or are_asked_for():
        return
    said.add(reason)
    from megatron.core import parallel_state as ranks

    if ranks.is_initialized():
        if ranks.get_data_parallel_rank(with_context_parallel=True) or ranks.get_tensor_model_parallel_rank():
            return
    message = f"parallel_lce: training makes the whole logits, which need not exist: {reason}"
    warnings.warn(message, LogitsWarning, stacklevel=stacklevel)


def are_asked_for() -> bool:
    """Whether a language model that was called without labels is on the stack."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for frame, _ in traceback.walk_stack(sys._getframe()):
        local = frame.f_locals
        name = next((name for name in ("labels", "lm_labels") if name in local), None)
        if name is not None and isinstance(local.get("self"), LanguageModule):
            return local[name] is None
    return False


def keep_autograd_gradient(weight: Tensor | None) -> None:
    """Make Megatron's DDP add autograd's gradient of ``weight`` to its main_grad. It drops that otherwise, with the
    gradient of real logits: the fused loss, which adds its dW itself, sets ``grad_added_to_main_grad``. The gradient of
    a weight that Megatron shards once more may be anything."""
    sharded_once_more = getattr(weight, "is_gtp_weight_remat", False)
    if weight is not None and torch.is_grad_enabled() and weight.requires_grad and not sharded_once_more:
        weight.zero_out_wgrad = True  # pyright: ignore[reportAttributeAccessIssue]: Megatron's


class LazyLogits(RecordedLogits):
    """The logits ``[s, b, V/P]`` that ``layer`` would make of ``hidden``, and the scales and the soft-cap that follow.
    With ``gather`` real ones are ``[s, b, V]``, gathered over the ranks; the loss needs no gather. ``shared``: the
    weight was passed to the layer. ``unit``: FSDP2 gathers the layer's own weight for each of its calls, and so for the
    loss or the real logits; ``weight`` is None.

    Each token's largest logit and its position need no real logits either. In training a warning names the first use
    that makes them.
    """

    _methods = (*RecordedLogits._methods, torch.max, torch.argmax)

    def __init__(
        self, layer: Any, hidden: Tensor, weight: Tensor | None, gather: bool, stock_forward: Callable, unit: bool
    ) -> None:
        used, shared, parallel = layer.weight if weight is None else weight, weight is not None, layer.sequence_parallel
        more = dict(steps=(), shared=shared, sequence_parallel=parallel, gather=gather, stock_forward=stock_forward)
        operands = (None, None, any(p.requires_grad for p in layer.parameters())) if unit else (used, layer.bias, False)
        self._capture(layer, hidden, *operands, unit=unit, **more)
        self.watch.weight = used

    def _warn(self, use: str) -> None:
        # stacklevel 6 names the caller's line: frames of this class and of compiler.disable lie between.
        warn_of_logits(self.layer, f"{use} of the output layer's result wants them", stacklevel=6)

    def _stock(self) -> Tensor:
        with replaced(self.layer, sequence_parallel=self.sequence_parallel):
            keep_autograd_gradient(self.weight)
            forward = partial(self.stock_forward, weight=self.weight, runtime_gather_output=self.gather)
            if self.unit:
                with replaced(self.layer, forward=forward):
                    return torch.nn.Module.__call__(self.layer, self.hidden)[0]
            return forward(self.hidden)[0]

    def operands(self) -> tuple[Tensor, ...]:
        return ()  # the stock layer sums their gradients over the ranks

    def _bias_is_replaced(self) -> bool:
        return not self.unit and self.layer.bias is not self.bias

    def _empty(self) -> Tensor:
        sequence, *others = self.hidden.shape[:-1]
        parts = self.layer.tp_group.size() if self.sequence_parallel else 1
        dtype = getattr(self.layer, "output_dtype", None)  # from Megatron-core 0.20 on
        casts = [arguments[0] for name, arguments in self.steps if name == "to"]
        dtype = [dtype or self.autocast_dtype or self.hidden.dtype, *casts][-1]
        entries = self.layer.output_size if self.gather else self.layer.output_size_per_partition
        return self.hidden.new_empty((), dtype=dtype).expand(parts * sequence, *others, entries)

    # What gives the tensor itself in stock, which a program may change in place.

    def float(self) -> Any:
        self.check()
        return self if self.dtype == torch.float32 else super().float()

    def contiguous(self) -> Any:
        self.check()
        return self

    def max(self, *arguments, **options):
        top = None if torch.is_grad_enabled() else self.largest(*arguments, **options)
        return self.materialize("'max'").max(*arguments, **options) if top is None else torch.return_types.max(top)

    def argmax(self, *arguments, **options) -> Tensor:
        top = self.largest(*arguments, **options)
        return self.materialize("'argmax'").argmax(*arguments, **options) if top is None else top[1]

    @torch.no_grad()
    def _largest(self, *arguments, **options) -> tuple[Tensor, Tensor] | None:
        """Of ``[s, b]`` tokens; positions are those in this rank's shard. Waits for the device: as in torch, the
        maximum of a token with NaN is NaN, at its first NaN.

        Collectives: under sequence parallelism the stock layer's all-gather of the hidden states.
        """
        epilogue = self.epilogue()
        if self.unit or self.gather or epilogue is None or not self.is_over_vocabulary(*arguments, **options):
            return None
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        self.check()
        hidden = self.hidden
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.layer.tp_group)
        with self.autocast():
            statistics = token_statistics(hidden, self.weight, None, linear_bias=self.bias, argmax=True, **epilogue)
            position = statistics.argmax
            assert position is not None
            if (nowhere := position < 0).any():
                logits = torch.nn.functional.linear(hidden[nowhere], self.weight, self.bias)
                position = position.masked_scatter(nowhere, self.after_steps(logits).argmax(-1))
        return statistics.max_logit.to(self.dtype), position
