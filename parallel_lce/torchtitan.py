"""The fused loss in torchtitan: ``--override.imports parallel_lce.torchtitan.linear_cross_entropy``.

torchtitan sums dX at the end of its decoders, whose hidden states are replicated on the tensor-parallel axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

import parallel_lce
from parallel_lce.call.checks import public
from parallel_lce.core.private import FSDP_MODULES, comes_from, hooks, parameters_of
from parallel_lce.neighbours import TORCHTITAN_DISTRIBUTED
from parallel_lce.patching import is_own, warn, why_no_product

_OURS, _LOSSES = "parallel_lce.torchtitan", "torchtitan.components.loss"
try:
    from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
except ImportError as error:
    needed = f"{_OURS} needs torchtitan 0.3.0 (pip install torchtitan spmd_types) and a PyTorch that it supports"
    raise ImportError(f"{needed}: {error}") from error


class LinearCrossEntropyLoss(ChunkedLossWrapper):
    """``ChunkedLossWrapper`` of ``CrossEntropyLoss`` without chunks and without logits. With "loss" in
    ``compile.components`` the fused cross-entropy is compiled."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """The options: docs/torchtitan.md."""

        logits_budget: int | None = None
        gradient_filter: float | None = None
        skip_masked: bool = False

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)
        if type(self.loss_fn) is not CrossEntropyLoss:
            raise ValueError(f"{_OURS}: loss_fn must be CrossEntropyLoss, got {type(self.loss_fn).__name__}")
        self.config, self.fn, self._said = config, parallel_lce.linear_cross_entropy, False
        if not config.skip_masked:
            self._maybe_compile(compile_config)

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Any = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of this rank's tokens in fp32, divided by ``global_valid_tokens``, a DTensor if ``pred`` is one; and
        no metrics. As of ``ChunkedLossWrapper`` this call also runs the backward of ``lm_head``. Hidden states ``pred
        [b, s, D]`` and ids ``labels [b, s]`` are the same on all tensor-parallel ranks.

        Collectives: those of :func:`parallel_lce.linear_cross_entropy` on the tensor-parallel group, without a
        reduction of dX; FSDP's of ``lm_head``: one all-gather, one reduction of gradients.
        """
        lm_head: Any = self.lm_head
        if lm_head is None:
            raise ValueError(f"{_OURS}: call set_lm_head before the loss")
        if reason := _why_not_fused(self.loss_fn, lm_head):
            if not self._said:
                warn(f"{_OURS}: torchtitan's own loss runs, with logits: {reason}", UserWarning, on_each_rank=True)
                self._said = True
            return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
        losses: list[Tensor] = []  # in fp32: FSDP casts what a forward returns, if its policy says so

        def forward(hidden: Tensor) -> Tensor:
            loss = _local(self.fn(hidden, lm_head.weight, _local(labels), **self._arguments(lm_head, pred, labels)))
            losses.append(loss if global_valid_tokens is None else loss / global_valid_tokens)
            return losses[0]

        hidden, sharded = pred.detach().requires_grad_(pred.requires_grad), isinstance(lm_head, FSDPModule)
        if sharded:  # as torchtitan does it: one gather, while FSDP is idle, and the gradient is reduced in this call
            lm_head.set_reshard_after_forward(False)
            lm_head.set_requires_gradient_sync(True, recurse=False)
            lm_head.unshard()
        _Head(lm_head, forward)(hidden)
        if pred.requires_grad:
            losses[0].backward()
        if sharded:
            lm_head.set_reshard_after_forward(True)
            lm_head.reshard()
        loss = losses[0].detach()
        if isinstance(pred, DTensor):
            summed = [Partial() if p.is_shard() else Replicate() for p in pred.placements]
            loss = DTensor.from_local(loss, pred.device_mesh, summed, run_check=False)
        if hidden.grad is not None:
            loss = self._gradient_backprop(pred, hidden.grad, loss, lm_head, sharded)
        return loss, {}

    def _arguments(self, lm_head: Any, pred: Tensor, labels: Tensor) -> dict[str, Any]:
        arguments = dict(linear_bias=lm_head.bias, reduction="sum", reduce_hidden_grad=False, ignore_index=IGNORE_INDEX)
        arguments |= {name: getattr(self.config, name) for name in ("logits_budget", "gradient_filter")}
        if not isinstance(pred, DTensor) and spmd_mesh_size("tp") > 1:
            group = current_spmd_mesh().get_group("tp")
            arguments |= {"process_group": group, "vocab_start": _vocab_start(lm_head, group)}
        if self.config.skip_masked:
            arguments["counted_tokens"] = parallel_lce.count_tokens(_local(labels), IGNORE_INDEX)
        return arguments


@public
def _vocab_start(lm_head: Any, group: dist.ProcessGroup) -> int:
    """The first vocabulary entry of this rank's shard. Raises ``ValueError`` if the weight is no such shard."""
    V, P, rank = lm_head.out_features, dist.get_world_size(group), dist.get_rank(group)
    start, stop = (min(V, -(-V // P) * at) for at in (rank, rank + 1))  # the last shards may be smaller
    if len(lm_head.weight) != stop - start:
        raise ValueError(f"{_OURS}: lm_head.weight must have {stop - start} rows, got {len(lm_head.weight)}")
    return start


class _Head(nn.Module):
    """Another forward with a layer's hooks."""

    def __init__(self, lm_head: nn.Module, forward: Any) -> None:
        vars(self).update(vars(lm_head), forward=forward, _compiled_call_impl=None)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _why_not_fused(loss_fn: Any, lm_head: Any) -> str | None:
    """Why torchtitan might compute something else, if it might. The same on every rank."""
    own = (
        is_own(ChunkedLossWrapper.__call__, _LOSSES, "ChunkedLossWrapper.__call__"),
        is_own(CrossEntropyLoss.__call__, _LOSSES, "CrossEntropyLoss.__call__"),
        is_own(loss_fn.fn, _LOSSES, "cross_entropy_loss"),
        is_own(nn.functional.cross_entropy, "torch.nn.functional", "cross_entropy"),
    )
    if not all(own):
        return "other code has replaced a function of its losses"
    instead = vars(lm_head).get("forward")
    distributed = instead is None or is_own(instead, TORCHTITAN_DISTRIBUTED)
    # fully_shard derives a class.
    if not (distributed and is_own(type(lm_head).forward, "torch.nn.modules.linear", "Linear.forward")):
        return f"lm_head, a {type(lm_head).__name__}, has a forward of its own; leave it out of quantization and LoRA"
    # Others may write into lm_head, and the loss calls them with another module.
    around = hooks(lm_head, "forward", "forward_pre", "backward", "backward_pre")
    if not all(comes_from(hook, *FSDP_MODULES) for hook in around):
        return "lm_head has a hook, as of pruning; remove it"
    return why_no_product(_local(parameters_of(lm_head).get("weight")), None)


@override(target=ChunkedLossWrapper.Config, description="output projection and cross-entropy without logits")
def linear_cross_entropy(cfg: ChunkedLossWrapper.Config, **options: Any) -> ChunkedLossWrapper.Config:
    """The override's factory: ``cfg`` as a :class:`LinearCrossEntropyLoss.Config` with these options."""
    stock = type(cfg) is ChunkedLossWrapper.Config and type(cfg.loss_fn) is CrossEntropyLoss.Config
    if stock or type(cfg) is LinearCrossEntropyLoss.Config:
        return derive(cfg, LinearCrossEntropyLoss.Config, **options)
    left = f"torchtitan's own code runs {type(cfg).__qualname__} of {type(cfg.loss_fn).__qualname__}"
    warn(f"{_OURS}: {left}: only ChunkedLossWrapper of CrossEntropyLoss is fused", UserWarning)
    return cfg
