"""Lazy logits: the output layer of Megatron's models returns them in place of logits, and the loss takes them."""

from __future__ import annotations

import numbers
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel_lce.functional import token_statistics


class LogitsWarning(RuntimeWarning):
    """Training makes the whole logits.

    Not a UserWarning: Megatron-LM's programs show UserWarnings only on the first rank, which has no output layer under
    pipeline parallelism.
    """


def warn_of_logits(module: torch.nn.Module, reason: str, stacklevel: int = 3) -> None:
    """Warn that training makes logits although the caller did not ask for them: once per module and reason, on one of
    the ranks that have the module.

    Raises:
        RuntimeError: ``module`` is an output layer in :func:`parallel_lce.megatron.output_layer.without_logits`.
    """
    if (function := getattr(module, "logits_refused_by", None)) is not None:
        raise RuntimeError(f"{function} makes no logits: {reason}")
    said = vars(module).setdefault("_parallel_lce_said", set())
    if not module.training or reason in said or _are_asked_for():
        return
    said.add(reason)
    from megatron.core import parallel_state as ranks

    if ranks.is_initialized():
        if ranks.get_data_parallel_rank(with_context_parallel=True) or ranks.get_tensor_model_parallel_rank():
            return
    message = f"parallel_lce: training makes the whole logits, which need not exist: {reason}"
    warnings.warn(message, LogitsWarning, stacklevel=stacklevel)


def _are_asked_for() -> bool:
    """Whether the caller asked for logits: a language model that was called without labels is on the stack."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for frame, _ in traceback.walk_stack(sys._getframe()):
        local = frame.f_locals
        name = next((name for name in ("labels", "lm_labels") if name in local), None)
        if name is not None and isinstance(local.get("self"), LanguageModule):
            return local[name] is None
    return False


def keep_autograd_gradient(weight: Tensor) -> None:
    """Make Megatron's DDP add autograd's gradient of ``weight`` to its main_grad.

    The fused loss adds its dW to main_grad itself and sets ``grad_added_to_main_grad``. DDP then drops autograd's
    gradient, which contains the gradient of real logits, unless the weight has Megatron's ``zero_out_wgrad``.
    """
    if torch.is_grad_enabled() and weight.requires_grad:
        weight.zero_out_wgrad = True  # pyright: ignore[reportAttributeAccessIssue]: Megatron's


# Registered after the fused loss, these hooks would never run.
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")

# Attributes that need no real logits.
_SIZES = ("shape", "size", "ndim", "dim", "numel", "dtype", "is_floating_point", "device", "is_cuda")

_LOST = (
    "parallel_lce: a torch.autograd.Function (or a reentrant checkpoint) {} the output layer's result, which is no "
    "tensor, and {} its gradient: {}"
)


def _in_function() -> bool:
    """Whether the forward of a ``torch.autograd.Function``, such as a reentrant checkpoint, is running.

    PyTorch turns off forward-mode gradients only there and in inference mode. A Function's backward handles tensors
    only: lazy logits among its arguments or results lose their gradient.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Autocast's dtype on the tensor's device; None where autocast is off. Meta tensors have no autocast."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


class LazyLogits:
    """The logits ``[s, b, V/P]`` that ``layer`` would make of ``hidden``, multiplied by ``scale``.

    The loss is computed from the hidden states, the weight and the bias. Sizes, each token's largest logit and its
    position need no real logits. The first other use (a method, an operator, an index, a torch function) makes the real
    logits as the stock layer does, in the autocast, grad and inference mode of the layer's call. Every later use, the
    loss included, gets that one tensor, ``made``. The loss therefore sees in-place changes.

    The weight, the bias and ``sequence_parallel`` are read when the layer is called. ``shared``: the weight was passed
    to the layer. ``has_loss``: the loss was computed without logits.
    """

    __array_priority__ = Tensor.__array_priority__
    # For type checkers; __init__ sets them, and all other attributes.
    scale: float
    stock_forward: Callable[..., tuple[Tensor, Tensor | None]]
    made: Tensor | None

    def __init__(
        self,
        layer: Any,
        hidden: Tensor,
        weight: Tensor | None,
        sequence_parallel: bool,
        stock_forward: Callable[..., tuple[Tensor, Tensor | None]],
    ) -> None:
        used = layer.weight if weight is None else weight
        named = {"hidden states": hidden, "weight": used, "bias": layer.bias}
        operands = {name: tensor for name, tensor in named.items() if tensor is not None}
        vars(self).update(  # faster than __setattr__
            layer=layer,
            hidden=hidden,
            weight=used,
            shared=weight is not None,
            bias=layer.bias,
            sequence_parallel=sequence_parallel,
            stock_forward=stock_forward,
            scale=1.0,
            made=None,
            has_loss=False,
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            in_function=_in_function(),
            autocast_dtype=_autocast_dtype(hidden),
            needs_gradient=any([tensor.requires_grad for tensor in operands.values()]),
            # Inference tensors have no version counter.
            versions=[(name, t, t._version) for name, t in operands.items() if not t.is_inference()],
        )

    def __reduce_ex__(self, protocol):
        """Pickling, as by Megatron's config logger, stores the real logits."""
        return self.materialize("pickling").__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"LazyLogits({list(self.shape)}, {self.dtype}, {self.device})"

    @torch.compiler.disable(reason="lazy logits are Python objects")
    def materialize(self, use: str) -> Tensor:
        """The real logits. The first ``use`` makes them; in training a warning names it.

        Collectives: at the first use, as in the stock layer's forward.
        """
        self.check()
        if self.made is None:
            # stacklevel 5 names the caller's line: frames of this class and of compiler.disable lie between.
            warn_of_logits(self.layer, f"{use} of the output layer's result wants them", stacklevel=5)
            before, self.layer.sequence_parallel = self.layer.sequence_parallel, self.sequence_parallel
            try:
                with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad_enabled), self.autocast():
                    keep_autograd_gradient(self.weight)
                    logits, _ = self.stock_forward(self.hidden, weight=self.weight, runtime_gather_output=False)
                    self.made = logits if self.scale == 1.0 else logits * self.scale
            finally:
                self.layer.sequence_parallel = before
        return self.made

    def autocast(self) -> torch.autocast | nullcontext[None]:
        """Autocast as it was when the output layer was called."""
        kind, dtype = self.hidden.device.type, self.autocast_dtype
        return nullcontext() if kind == "meta" else torch.autocast(kind, dtype, enabled=dtype is not None)

    def check(self) -> None:
        """Check that the logits can still be computed as in the layer's call, and get their gradient.

        Raises:
            RuntimeError: the real logits are not made yet, and the hidden states, the weight or the bias changed in
                place, or the layer's bias was replaced; or a ``torch.autograd.Function`` uses or returned the lazy
                logits, so that their gradient would be lost.
        """
        if self.made is None:
            changed = [name for name, tensor, version in self.versions if tensor._version != version]
            if self.layer.bias is not self.bias:
                changed.append("bias")
            if changed:
                raise RuntimeError(
                    f"parallel_lce: the output layer's {changed[0]} changed in place after the layer was "
                    "called, and its logits, or their loss, are computed only now: change a copy"
                )
        inside = _in_function()
        if inside and not self.in_function and self.requires_grad:
            raise RuntimeError(_LOST.format("uses", "loses", "give it `logits[...]`"))
        if self.in_function and not inside and torch.is_grad_enabled() and self.needs_gradient:
            remedy = "let it return `logits[...]`, or checkpoint with use_reentrant=False"
            raise RuntimeError(_LOST.format("returned", "has lost", remedy))

    @property
    def requires_grad(self) -> bool:
        if self.made is not None:
            return self.made.requires_grad
        return self.grad_enabled and self.needs_gradient

    def __len__(self) -> int:
        return len(self._sized())

    def _sized(self) -> Tensor:
        """The real logits if they are made, else an expanded scalar of the same shape, dtype and device."""
        if self.made is not None:
            return self.made
        sequence, *others = self.hidden.shape[:-1]
        parts = self.layer.tp_group.size() if self.sequence_parallel else 1
        dtype = getattr(self.layer, "output_dtype", None)  # from Megatron-core 0.20 on
        one = self.hidden.new_empty((), dtype=dtype or self.autocast_dtype or self.hidden.dtype)
        return one.expand(parts * sequence, *others, self.layer.output_size_per_partition)

    def max(self, *arguments, **options):
        """Over the vocabulary and without gradients, by :meth:`_maximum`; otherwise of the real logits."""
        top = None if torch.is_grad_enabled() else self._maximum(*arguments, **options)
        return self.materialize("'max'").max(*arguments, **options) if top is None else torch.return_types.max(top)

    def argmax(self, *arguments, **options) -> Tensor:
        """Over the vocabulary, by :meth:`_maximum`; otherwise of the real logits."""
        top = self._maximum(*arguments, **options)
        return self.materialize("'argmax'").argmax(*arguments, **options) if top is None else top[1]

    @torch.no_grad()
    def _maximum(self, dim: object = None, keepdim: bool = False, **others) -> tuple[Tensor, Tensor] | None:
        """Each token's maximum ``[s, b]`` and its position in this rank's shard, by a fused projection. None if the
        real logits are made, or if the arguments are not the vocabulary's dimension alone.

        Collectives: under sequence parallelism the stock layer's all-gather of the hidden states.
        """
        over_vocabulary = isinstance(dim, int) and dim in (-1, self.ndim - 1)
        if self.made is not None or not over_vocabulary or keepdim or others:
            return None
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        self.check()
        hidden = self.hidden
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.layer.tp_group)
        with self.autocast():
            statistics = token_statistics(
                hidden, self.weight, None, linear_bias=self.bias, logit_scale=self.scale, argmax=True
            )
        assert statistics.argmax is not None
        return statistics.max_logit.to(self.dtype), statistics.argmax.clamp(min=0)

    def __mul__(self, factor: Any) -> LazyLogits | Tensor:
        """New lazy logits if ``factor`` is a number and the real logits are not made."""
        if self.made is not None or not isinstance(factor, numbers.Real):
            return self.materialize("multiplication") * factor
        self.check()
        product = object.__new__(LazyLogits)
        grad_enabled = self.grad_enabled and torch.is_grad_enabled()
        vars(product).update(vars(self), scale=self.scale * float(factor), grad_enabled=grad_enabled)
        return product

    __rmul__ = __mul__

    def __getattr__(self, name: str):
        if name in _SIZES:
            return getattr(self._sized(), name)
        if not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self.has_loss and self.made is None and name in _HOOKS:
            raise RuntimeError(
                f"parallel_lce: {name} comes after the loss, which was computed without logits: call it before"
            )
        return getattr(self.materialize(f"attribute {name!r}"), name)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(Tensor, name):
            setattr(self.materialize(f"attribute {name!r}"), name, value)
        else:
            object.__setattr__(self, name, value)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        options = kwargs or {}
        if function in (torch.max, torch.argmax) and args and isinstance(args[0], cls) and "out" not in options:
            return getattr(args[0], function.__name__)(*args[1:], **options)
        use = f"torch function {getattr(function, '__name__', function)!r}"
        for value in tree_leaves((args, options)):
            if isinstance(value, cls):
                value.materialize(use)  # in this frame: the warning names its caller's line
        args, options = tree_map_only(cls, lambda lazy: lazy.made, (args, options))
        return function(*args, **options)


def _special_method(name: str) -> Callable:
    def call(self, *arguments, **options):
        result = getattr(self.materialize(f"operator {name!r}"), name)(*arguments, **options)
        # `logits *= 2` rebinds the name to the result. Returning self keeps all names on one tensor.
        return self if name.startswith("__i") and result is self.made else result

    return call


# Python looks up special methods on the class, not through __getattr__.
_COMPARISONS = {"__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"}
_OTHERS = {*dir(Tensor)} - {*dir(object)} - {"__torch_function__", "__torch_dispatch__", "__setstate__"}
for _name in (_COMPARISONS | _OTHERS) - {*vars(LazyLogits)}:
    if _name.startswith("__") and callable(getattr(Tensor, _name)):
        setattr(LazyLogits, _name, _special_method(_name))
