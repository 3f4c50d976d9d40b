"""The fused loss in torchtitan: ``--override.imports parallel_lce.torchtitan.linear_cross_entropy``.

:class:`LinearCrossEntropyLoss` replaces ``ChunkedLossWrapper``, which projects and scores an eighth of the sequence at
a time. It keeps that class's protocol: the call of the loss also runs the backward of ``lm_head``, and the trainer's
``loss.backward()`` hands the finished gradient of the hidden states to the decoder. So FSDP's hooks on ``lm_head`` see
one forward and one backward per call, whatever else shares its parameter group.

torchtitan sums dX, the gradient of the hidden states. Its decoders' last norm gives hidden states that are replicated
on the tensor-parallel axis, also under sequence parallelism, and takes this rank's term of dX back. The norm's boundary
then reduces the terms: by an all-reduce, or by a reduce-scatter under sequence parallelism.

Importing this module imports torchtitan; nothing else in the package does.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, compute_logprobs
from torchtitan.config import CompileConfig
from torchtitan.config.override import derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

import parallel_lce

_OURS = "parallel_lce.torchtitan"


class LinearCrossEntropyLoss(ChunkedLossWrapper):
    """``ChunkedLossWrapper`` without chunks and without logits.

    ``loss_fn`` says what is computed: ``CrossEntropyLoss``, or a loss whose ``__call__`` passes the logits to
    torchtitan's ``compute_logprobs`` alone, as ``DAPOLoss`` and ``GRPOLoss`` do. ``num_chunks`` is ignored. With
    "loss" in ``compile.components`` the fused cross-entropy is compiled.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        logits_budget: int | None = None
        """Bytes per rank for tensors of the logits' shape, as in :func:`parallel_lce.linear_cross_entropy`."""

        gradient_filter: float | None = None
        """As in :func:`parallel_lce.linear_cross_entropy`. Only with ``CrossEntropyLoss``."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        cross_entropy = type(config.loss_fn) is CrossEntropyLoss.Config
        super().__init__(config, compile_config=None if cross_entropy else compile_config)
        self.fn = parallel_lce.linear_cross_entropy
        self._log_prob_loss = None if cross_entropy else _on_log_probs(type(self.loss_fn))
        self._options: dict[str, Any] = {"logits_budget": config.logits_budget}
        if cross_entropy:
            self._options |= {"gradient_filter": config.gradient_filter}
            self._maybe_compile(compile_config)
        elif config.gradient_filter is not None:
            raise ValueError(f"{_OURS}: gradient_filter needs CrossEntropyLoss, got {type(self.loss_fn).__name__}")

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Any = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of hidden states.

        Args:
            pred: hidden states ``[b, s, D]`` in the dtype of ``lm_head.weight``: the whole sequence (under context
                parallelism this rank's part of it), the same on all tensor-parallel ranks. A DTensor with the backend
                "full_dtensor", and with "partial_dtensor" under tensor parallelism.
            labels: ids ``[b, s]``, the same on all tensor-parallel ranks. Those that are ``IGNORE_INDEX`` do not count.
            global_valid_tokens: divides the sum of the losses.
            loss_inputs: for a log-probability loss. Cross-entropy ignores them.

        Returns:
            The loss of this rank's tokens, fp32, the same on all tensor-parallel ranks; a DTensor if ``pred`` is one.
            And the metrics of ``loss_fn``. If ``pred`` needs a gradient, ``lm_head`` has its gradients by now. As with
            ``ChunkedLossWrapper``, ``backward()`` must be called on this loss itself: an upstream gradient is not
            applied.

        Collectives: those of :func:`parallel_lce.linear_cross_entropy`, or ``token_statistics``, on the tensor-parallel
        group, without a reduction of dX; and FSDP's of ``lm_head``: one all-gather, one reduction of gradients.

        Raises:
            ValueError: ``lm_head`` is not set, or is no plain linear layer and no ``SoftCappedLinear``; ``lm_head`` or
            its input is not sharded as by torchtitan's ``set_decoder_sharding_config``; ``global_vocab_size`` differs
            from the layer's size.
            TypeError, AttributeError: a log-probability loss computes with the logits. Further errors as in
            :func:`parallel_lce.linear_cross_entropy`.
        """
        lm_head: Any = self.lm_head
        if lm_head is None:
            raise ValueError(f"{_OURS}: call set_lm_head before the loss")
        if checking := spmd.is_type_checking():
            spmd.assert_type(pred, {"tp": spmd.R})
            spmd.assert_type(labels, {"tp": spmd.I})
        metrics: dict[str, Tensor] = {}

        def forward(hidden: Tensor) -> tuple[Tensor]:
            """Runs in place of the layer's own forward, between FSDP's hooks. Returns a tuple, where the hooks look for
            tensors."""
            projection, local = self._projection(lm_head, hidden), _local(labels)
            if self._log_prob_loss is None:
                total = _local(self.fn(target=local, reduction="sum", **projection))
                return (total if global_valid_tokens is None else total / global_valid_tokens,)
            inputs = {name: _local(value) for name, value in loss_inputs.items()}
            loss, found = self._log_prob_loss(self.loss_fn, projection, local, global_valid_tokens, **inputs)
            metrics.update(found)
            return (loss,)

        with spmd.no_typecheck():
            fully_sharded = isinstance(lm_head, FSDPModule)
            hidden = pred.detach().requires_grad_(pred.requires_grad)
            if fully_sharded:
                lm_head.unshard()
            try:
                loss = _through(lm_head, forward, hidden)
                if pred.requires_grad:
                    loss.backward()
            finally:
                if fully_sharded:
                    if not pred.requires_grad:  # without a backward FSDP keeps to its policy; torchtitan sets it, too
                        lm_head.set_reshard_after_forward(True)
                    lm_head.reshard()
            loss = loss.detach()
            if isinstance(pred, DTensor):
                summed = [Partial() if p.is_shard() else Replicate() for p in pred.placements]
                loss = DTensor.from_local(loss, pred.device_mesh, summed, run_check=False)
            if pred.requires_grad:
                assert hidden.grad is not None
                loss = self._gradient_backprop(pred, hidden.grad, loss, lm_head, fully_sharded)
            if checking:
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, metrics

    def _projection(self, lm_head: Any, hidden: Tensor) -> dict[str, Any]:
        """Arguments of the fused functions, which stand for the logits. These functions check DTensors, and give the
        gradients the placements that they have with torchtitan's own loss: ``Partial`` for ``hidden`` on the axis that
        shards the weight, and for the parameters on the axes that shard the tokens."""
        arguments = {"input": hidden, "linear_weight": lm_head.weight, "linear_bias": lm_head.bias}
        arguments |= {"reduce_hidden_grad": False, **_epilogue(lm_head), **self._options}
        rows, V = len(lm_head.weight), lm_head.out_features
        expected = getattr(self.loss_fn, "global_vocab_size", None)
        if expected not in (None, V):
            raise ValueError(f"{_OURS}: global_vocab_size is {expected}, but lm_head has {V} entries")
        if not isinstance(hidden, DTensor) and spmd_mesh_size("tp") > 1:
            _check_replicated(lm_head)
            group = current_spmd_mesh().get_group("tp")
            shard = -(-V // dist.get_world_size(group))  # of all ranks but the last ones
            start = min(V, shard * dist.get_rank(group))
            if rows != min(shard, V - start):
                raise ValueError(f"{_OURS}: lm_head.weight must have {min(shard, V - start)} rows, got {rows}")
            arguments |= {"process_group": group, "vocab_start": start}
        return arguments


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _through(module: Any, forward: Callable[[Tensor], tuple[Tensor]], hidden: Tensor) -> Tensor:
    """``module(hidden)[0]`` with the module's hooks, but with ``forward`` instead of its own."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        return module(hidden)[0]
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _epilogue(lm_head: nn.Module) -> dict[str, Any]:
    """The layer's scale and soft-cap as arguments of the fused functions. Raises ``ValueError`` for another forward."""
    layer: Any = lm_head
    forward = type(lm_head).forward  # fully_shard derives a class
    if forward is nn.Linear.forward:
        return {}
    muse: Any = sys.modules.get("torchtitan.models.muse_glimmer.model")
    if muse is not None and forward is muse.SoftCappedLinear.forward:
        return {"logit_scale": layer.output_multiplier, "logit_softcap": layer.output_soft_cap_temp}
    raise ValueError(
        f"{_OURS}: lm_head must be a plain linear layer or a SoftCappedLinear, got {type(lm_head).__name__} with a "
        "forward of its own; leave lm_head out of quantization and LoRA, or this override out"
    )


def _check_replicated(lm_head: nn.Module) -> None:
    """Raise ``ValueError`` unless the layer's configuration replicates its input over the tensor-parallel ranks: a
    plain tensor does not show its sharding."""
    config: Any = getattr(lm_head, "_sharding_config", None)
    layout = ((config and config.in_src_shardings) or {}).get("input")
    found = layout and layout.per_axis_spmd_types().get("tp")
    if found is not spmd.R:
        raise ValueError(f"{_OURS}: lm_head.sharding_config must say that its input is R on 'tp', got {found}")


def _takes_log_probs(loss: Any) -> bool:
    call: Any = getattr(loss, "__call__", None)  # noqa: B004
    names = getattr(getattr(call, "__code__", None), "co_names", ())
    return "compute_logprobs" in names and call.__globals__.get("compute_logprobs") is compute_logprobs


def _on_log_probs(loss: type) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """``loss.__call__`` with a ``compute_logprobs`` that takes a ``_projection`` as logits."""
    if not _takes_log_probs(loss):
        raise ValueError(f"{_OURS}: loss_fn must be CrossEntropyLoss or call compute_logprobs, got {loss.__name__}")
    call: Any = loss.__call__
    names = {**call.__globals__, "compute_logprobs": _compute_logprobs}
    changed = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    changed.__kwdefaults__ = call.__kwdefaults__
    return changed


def _compute_logprobs(logits: dict[str, Any], labels: Tensor, *, return_entropy: bool = False) -> Any:
    """torchtitan's function: ``[b, s]``, 0 for its ``IGNORE_INDEX``, -100; entropies without a gradient."""
    found = parallel_lce.token_statistics(target=labels, expected_logit=return_entropy, **logits)
    log_probs = _local(found.target_log_prob)
    return (log_probs, _local(found.entropy).detach()) if return_entropy else log_probs


@override(target=ChunkedLossWrapper.Config, description="output projection and cross-entropy without logits")
def linear_cross_entropy(
    cfg: ChunkedLossWrapper.Config, *, logits_budget: int | None = None, gradient_filter: float | None = None
) -> ChunkedLossWrapper.Config:
    """The override's factory: ``cfg`` as a :class:`LinearCrossEntropyLoss.Config`. Subclasses of the wrapper's config,
    and inner losses that need logits, such as ``MSELoss``, stay as they are, with a warning."""
    if type(cfg) is not ChunkedLossWrapper.Config:
        left = type(cfg).__qualname__
    elif type(cfg.loss_fn) is not CrossEntropyLoss.Config and not _takes_log_probs(cfg.loss_fn._owner):
        left = f"{type(cfg).__qualname__} of {type(cfg.loss_fn).__qualname__}"
    else:
        return derive(cfg, LinearCrossEntropyLoss.Config, logits_budget=logits_budget, gradient_filter=gradient_filter)
    warnings.warn(f"{_OURS}.linear_cross_entropy leaves {left} alone", stacklevel=2)
    return cfg
