"""The fused loss in torchtitan: ``--override.imports parallel_lce.torchtitan.linear_cross_entropy``.

:class:`LinearCrossEntropyLoss` replaces ``ChunkedLossWrapper``, which projects and scores an eighth of the sequence at
a time. It keeps that class's protocol: the call of the loss also runs the backward of ``lm_head``, and the trainer's
``loss.backward()`` hands the finished gradient of the hidden states to the decoder. So FSDP's hooks on ``lm_head`` see
one forward and one backward per call, whatever else shares its parameter group.

torchtitan sums dX, the gradient of the hidden states: its decoders' last norm gives hidden states that are replicated
on the tensor-parallel axis, also under sequence parallelism, and its boundary reduces the ranks' terms of dX.

A call that the fused loss might not compute as torchtitan would runs torchtitan's own loss, and a warning says once why
(docs/torchtitan.md). Importing this module imports torchtitan; nothing else in the package does.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

import parallel_lce
from parallel_lce.core.options import NO_LABEL
from parallel_lce.core.private import hooks
from parallel_lce.gathered import called_with
from parallel_lce.patching import Replacements, is_own
from parallel_lce.run.token_count import count_labels, count_of_labels

_OURS = "parallel_lce.torchtitan"
try:
    import spmd_types as spmd
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import CompileConfig
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
except ImportError as error:
    needed = f"{_OURS} needs torchtitan 0.3.0 (pip install torchtitan spmd_types) and a PyTorch that it supports"
    raise ImportError(f"{needed}: {error}") from error

_LOSSES = "torchtitan.components.loss"


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
        cross_entropy = config.loss_fn._owner is CrossEntropyLoss
        super().__init__(config, compile_config=None if cross_entropy else compile_config)
        self.fn, self._cross_entropy, self._said = parallel_lce.linear_cross_entropy, cross_entropy, False
        for module, owner in _COUNTED:
            if module in sys.modules:  # else no trainer builds this loss
                _count_before(getattr(sys.modules[module], owner, None))
        if not cross_entropy and not _takes_log_probs(type(self.loss_fn)):
            name = type(self.loss_fn).__name__
            raise ValueError(f"{_OURS}: loss_fn must be CrossEntropyLoss or call compute_logprobs, got {name}")
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
            ``ChunkedLossWrapper``, ``backward()`` of this loss itself must follow: no upstream gradient is applied.

        Collectives: those of :func:`parallel_lce.linear_cross_entropy`, or ``token_statistics``, on the tensor-parallel
        group, without a reduction of dX; and FSDP's of ``lm_head``: one all-gather, one reduction of gradients.

        Raises:
            ValueError: ``lm_head`` is not set, or its rows are no shard of torchtitan's. Further errors as in
            :func:`parallel_lce.linear_cross_entropy`.
        """
        lm_head: Any = self.lm_head
        if lm_head is None:
            raise ValueError(f"{_OURS}: call set_lm_head before the loss")
        reason = _other_loss(type(self.loss_fn), getattr(self.loss_fn, "fn", None)) or _other_projection(
            lm_head, self.loss_fn, pred
        )
        if reason:
            if not self._said:
                warnings.warn(f"{_OURS}: torchtitan's own loss runs, with logits: {reason}", stacklevel=2)
                self._said = True
            return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
        if checking := spmd.is_type_checking():
            spmd.assert_type(pred, {"tp": spmd.R})
            spmd.assert_type(labels, {"tp": spmd.I})
        metrics: dict[str, Tensor] = {}
        # In a compiled graph the number cannot be read.
        count = count_of_labels(labels) if self.fn is parallel_lce.linear_cross_entropy else None
        counted: dict[str, Any] = {} if count is None else {"counted_tokens": count}

        def forward(hidden: Tensor) -> tuple[Tensor]:
            projection, local = self._projection(lm_head, hidden), _local(labels)
            if self._cross_entropy:
                total = _local(self.fn(target=local, reduction="sum", **projection, **counted))
                return (total if global_valid_tokens is None else total / global_valid_tokens,)
            inputs = {name: _local(value) for name, value in loss_inputs.items()}
            of_log_probs = _on_log_probs(type(self.loss_fn))
            loss, found = of_log_probs(self.loss_fn, projection, local, global_valid_tokens, **inputs)
            metrics.update(found)
            return (loss,)

        with spmd.no_typecheck():
            fully_sharded = isinstance(lm_head, FSDPModule)
            hidden = pred.detach().requires_grad_(pred.requires_grad)
            if fully_sharded:
                lm_head.unshard()
                if pred.requires_grad:  # a pipeline's stage says False; its next backward says so again
                    lm_head.set_requires_gradient_sync(True, recurse=False)
            try:
                (loss,) = called_with(lm_head, forward, hidden)
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
        arguments |= {"reduce_hidden_grad": False, **(_epilogue(lm_head) or {}), **self._options}
        rows, V = len(lm_head.weight), lm_head.out_features
        if not isinstance(hidden, DTensor) and spmd_mesh_size("tp") > 1:
            group = current_spmd_mesh().get_group("tp")
            shard = -(-V // dist.get_world_size(group))  # of all ranks but the last ones
            start = min(V, shard * dist.get_rank(group))
            if rows != min(shard, V - start):
                raise ValueError(f"{_OURS}: lm_head.weight must have {min(shard, V - start)} rows, got {rows}")
            arguments |= {"process_group": group, "vocab_start": start}
        return arguments


# The classes that prepare a batch before the model's forward, and their modules.
_COUNTED = ("torchtitan.trainer", "Trainer"), ("torchtitan.components.validate", "Validator")
_replacements = Replacements()


def _count_before(owner: Any) -> None:
    """Lets a trainer or validator whose loss is ours begin to count the labels before the model's forward."""

    def counting(own: Any) -> Any:
        @functools.wraps(own)
        def post_dataloading_process(self: Any, *given: Any, **named: Any) -> Any:
            inputs, labels, *others = own(self, *given, **named)
            # A CUDA graph cannot read the number. The eager step before it must run what will be captured.
            training = getattr(self.config, "training", None)  # a validator has none, and captures none
            captured = training is not None and not training.disable_cuda_graphs
            if isinstance(self.loss_fn, LinearCrossEntropyLoss) and not captured:
                with spmd.no_typecheck():
                    count_labels(labels, _local(labels) != NO_LABEL)
            return inputs, labels, *others

        return post_dataloading_process

    if "post_dataloading_process" in vars(owner or object):
        _replacements.replace(owner, "post_dataloading_process", counting)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _epilogue(lm_head: Any) -> dict[str, Any] | None:
    """The layer's scale and soft-cap as arguments of the fused functions. None for a layer that computes otherwise."""
    forward = type(lm_head).forward  # fully_shard derives a class
    if is_own(forward, "torch.nn.modules.linear", "Linear.forward"):
        return {}
    if is_own(forward, "torchtitan.models.muse_glimmer.model", "SoftCappedLinear.forward"):
        return {"logit_scale": lm_head.output_multiplier, "logit_softcap": lm_head.output_soft_cap_temp}
    return None


def _other_projection(lm_head: Any, loss_fn: Any, pred: Tensor) -> str | None:
    """Why the logits may be others than those that are fused, if they may be. The same on every rank."""
    instead = vars(lm_head).get("forward")  # torchtitan's own distributes inputs and outputs
    others = instead is not None and not _globals(instead).get("__name__", "").startswith("torchtitan.")
    if others or _epilogue(lm_head) is None:
        return f"lm_head, a {type(lm_head).__name__}, has a forward of its own; leave it out of quantization and LoRA"
    for hook in hooks(lm_head, "forward", "backward", "backward_pre"):
        module = getattr(hook, "__module__", None) or type(hook).__module__
        if not module.startswith("torch.distributed."):  # FSDP's
            return "lm_head has a hook on its logits or their gradient; remove it"
    expected, V = getattr(loss_fn, "global_vocab_size", None), lm_head.out_features
    if expected not in (None, V):
        return f"global_vocab_size is {expected}, but lm_head has {V} entries"
    if not isinstance(pred, DTensor) and spmd_mesh_size("tp") > 1:
        # A plain tensor does not show its sharding.
        config: Any = getattr(lm_head, "_sharding_config", None)
        layout = ((config and config.in_src_shardings) or {}).get("input")
        found = layout and layout.per_axis_spmd_types().get("tp")
        if found is not spmd.R:
            return f"lm_head.sharding_config must say that its input is R on 'tp', got {found}"
    return None


def _globals(function: Any) -> dict[str, Any]:
    return getattr(function, "__globals__", {})


def _other_loss(loss: type, fn: Any) -> str | None:
    """Why a loss may be another than the one that is fused, if it may be. ``fn``: of a cross-entropy."""
    own = ChunkedLossWrapper.Config._owner is ChunkedLossWrapper
    if not own or not is_own(ChunkedLossWrapper.__call__, _LOSSES, "ChunkedLossWrapper.__call__"):
        return "other code has replaced ChunkedLossWrapper.__call__"
    if loss is not CrossEntropyLoss:
        own = _takes_log_probs(loss)
    else:
        own = is_own(loss.__call__, _LOSSES, "CrossEntropyLoss.__call__")
        own = own and is_own(fn, _LOSSES, "cross_entropy_loss")
    return None if own else f"other code has replaced {loss.__name__} or its function"


def _takes_log_probs(loss: type) -> bool:
    call: Any = loss.__call__
    return is_own(_globals(call).get("compute_logprobs"), _LOSSES, "compute_logprobs") and _passes_logits_on(call)


@functools.cache
def _passes_logits_on(call: Any) -> bool:
    """Whether ``call(self, logits, ...)`` uses its logits as the first argument of ``compute_logprobs`` alone."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(call))).body
    except (OSError, TypeError, SyntaxError):  # no source
        return False
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return False
    logits, passed, used = function.args.args[1].arg, 0, 0
    for node in ast.walk(function):
        used += isinstance(node, ast.Name) and node.id == logits
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "compute_logprobs":
            passed += bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id == logits
    return 0 < passed == used


def _on_log_probs(loss: type) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """``loss.__call__`` with a ``compute_logprobs`` that takes a ``_projection`` as logits, and else the globals of
    now."""
    call: Any = loss.__call__
    names = {**call.__globals__, "compute_logprobs": _compute_logprobs}
    changed = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    changed.__kwdefaults__ = call.__kwdefaults__
    return changed


def _compute_logprobs(logits: dict[str, Any], labels: Tensor, *, return_entropy: bool = False) -> Any:
    """torchtitan's function: ``[b, s]``, 0 for its ``IGNORE_INDEX``, -100; entropies without a gradient."""
    found = parallel_lce.token_statistics(target=labels, entropy=return_entropy, **logits)
    log_probs = _local(found.target_log_prob)
    return (log_probs, _local(found.entropy).detach()) if return_entropy else log_probs


@override(target=ChunkedLossWrapper.Config, description="output projection and cross-entropy without logits")
def linear_cross_entropy(
    cfg: ChunkedLossWrapper.Config, *, logits_budget: int | None = None, gradient_filter: float | None = None
) -> ChunkedLossWrapper.Config:
    """The override's factory: ``cfg`` as a :class:`LinearCrossEntropyLoss.Config`. Subclasses of the wrapper's config,
    inner losses that need logits, such as ``MSELoss``, and losses that other code has replaced stay as they are, with a
    warning."""
    loss, fn = cfg.loss_fn._owner, sys.modules[_LOSSES].cross_entropy_loss
    if type(cfg) is ChunkedLossWrapper.Config and _other_loss(loss, fn) is None:
        options = dict(logits_budget=logits_budget, gradient_filter=gradient_filter)
        return derive(cfg, LinearCrossEntropyLoss.Config, **options)
    left = f"{type(cfg).__qualname__} of {loss.__qualname__}"
    warnings.warn(
        f"{_OURS}.linear_cross_entropy leaves {left} alone, which makes logits: the fused loss takes torchtitan's own "
        "ChunkedLossWrapper of CrossEntropyLoss, or of a loss that only passes its logits to compute_logprobs",
        stacklevel=2,
    )
    return cfg
