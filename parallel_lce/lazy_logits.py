"""Logits that are not computed yet: output layers return them in place of tensors, and the loss takes them."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

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
    """The logits that ``layer`` would make of ``hidden``. The base of Megatron's and of transformers' lazy logits.

    The loss is computed from the hidden states, the weight and the bias. Sizes need no real logits. The first other use
    (a method, an operator, an index, a torch function) makes the real logits as the stock layer does, in the autocast,
    grad and inference mode of the layer's call. Every later use, the loss included, gets that one tensor, ``made``. The
    loss therefore sees in-place changes.

    The weight and the bias are read when the layer is called. ``has_loss``: the loss was computed without logits.
    """

    __array_priority__ = Tensor.__array_priority__
    # For type checkers; _capture sets them, and all other attributes.
    layer: Any
    hidden: Tensor
    made: Tensor | None
    _methods: tuple[Callable[..., Any], ...] = ()
    """Torch functions that call the method of their name."""

    def _capture(
        self, layer: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, trainable: bool, **more: Any
    ) -> None:
        """Remembers the operands, and the modes in which the layer is called. ``trainable``: a parameter of the layer
        that is not given here needs a gradient."""
        named = {"hidden states": hidden, "weight": weight, "bias": bias}
        operands = {name: tensor for name, tensor in named.items() if tensor is not None}
        vars(self).update(  # faster than __setattr__
            layer=layer,
            hidden=hidden,
            weight=weight,
            bias=bias,
            made=None,
            has_loss=False,
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            in_function=_in_function(),
            autocast_dtype=_autocast_dtype(hidden),
            needs_gradient=trainable or any([tensor.requires_grad for tensor in operands.values()]),
            # Inference tensors have no version counter.
            versions=[(name, t, t._version) for name, t in operands.items() if not t.is_inference()],
            **more,
        )

    def _make(self) -> Tensor:
        """The real logits, by the stock layer."""
        raise NotImplementedError

    def _warn(self, use: str) -> None:
        """Says that ``use`` makes real logits. Four frames lie between this one and the caller's."""

    def _empty(self) -> Tensor:
        """A tensor of the real logits' shape, dtype and device, without memory of its own."""
        raise NotImplementedError

    @torch.compiler.disable(reason="lazy logits are Python objects")
    def materialize(self, use: str) -> Tensor:
        """The real logits. The first ``use`` makes them.

        Collectives: at the first use, as in the stock layer's forward.
        """
        self.check()
        if self.made is None:
            self._warn(use)
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad_enabled), self.autocast():
                self.made = self._make()
        return self.made

    def _sized(self) -> Tensor:
        """The real logits if they are made, else a tensor of the same shape, dtype and device."""
        return self._empty() if self.made is None else self.made

    def _changed(self, **fields: Any) -> Any:
        """New lazy logits of the same operands."""
        self.check()
        other = object.__new__(type(self))
        grad_enabled = self.grad_enabled and torch.is_grad_enabled()
        vars(other).update(vars(self), grad_enabled=grad_enabled, **fields)
        return other

    def __reduce_ex__(self, protocol):
        """Pickling, as by Megatron's config logger, stores the real logits."""
        return self.materialize("pickling").__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"

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
            if self._bias_is_replaced():
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

    def _bias_is_replaced(self) -> bool:
        return False

    @property
    def requires_grad(self) -> bool:
        if self.made is not None:
            return self.made.requires_grad
        return self.grad_enabled and self.needs_gradient

    def __len__(self) -> int:
        return len(self._sized())

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
        if function in cls._methods and args and isinstance(args[0], cls) and "out" not in options:
            return getattr(args[0], function.__name__)(*args[1:], **options)
        use = f"torch function {getattr(function, '__name__', function)!r}"
        for value in tree_leaves((args, options)):
            if isinstance(value, cls):
                value.materialize(use)  # in this frame: the warning names its caller's line
        args, options = tree_map_only(cls, lambda lazy: lazy.made, (args, options))
        return function(*args, **options)


class RecordedLogits(LazyLogits):
    """Lazy logits that record the operations on them in ``steps``: products and quotients with numbers, ``tanh``, casts
    to fp32. Real logits are made by :meth:`_stock`, and go through the same steps."""

    steps: tuple[tuple[str, tuple[Any, ...]], ...]  # names and arguments of methods
    _methods = (torch.tanh, torch.mul, torch.div)

    def _stock(self) -> Tensor:
        """The real logits before the steps."""
        raise NotImplementedError

    def _make(self) -> Tensor:
        logits = self._stock()
        for name, arguments in self.steps:
            logits = getattr(logits, name)(*arguments)
        return logits

    def _step(self, name: str, *arguments: Any) -> Any:
        """New lazy logits after one more step; real ones if these are made, or a factor is no number."""
        if self.made is not None or not all(isinstance(a, (numbers.Real, torch.dtype)) for a in arguments):
            return getattr(self.materialize(f"{name!r}"), name)(*arguments)
        return self._changed(steps=(*self.steps, (name, arguments)))

    def tanh(self) -> Any:
        return self._step("tanh")

    def mul(self, factor: Any) -> Any:
        return self._step("mul", factor)

    def div(self, factor: Any, **options: Any) -> Any:
        return self.materialize("'div'").div(factor, **options) if options else self._step("div", factor)

    def float(self) -> Any:
        return self._step("to", torch.float32)

    def contiguous(self) -> Any:
        return self._step("contiguous")

    __mul__ = __rmul__ = mul
    __truediv__ = div

    def epilogue(self) -> dict[str, Any] | None:
        """The steps as the fused functions' ``logit_scale`` and ``logit_softcap``; None if they cannot express them."""
        inner, outer, capped = 1.0, 1.0, False
        for name, arguments in self.steps:
            if (name == "tanh" and capped) or (name == "div" and arguments[0] == 0):
                return None
            if name in ("mul", "div"):
                factor = 1.0 / arguments[0] if name == "div" else arguments[0]
                inner, outer = (inner, outer * factor) if capped else (inner * factor, outer)
            capped = capped or name == "tanh"
        if not capped:
            return {"logit_scale": float(inner)}
        # outer * tanh(inner * u), and softcap(s * u) = cap * tanh(s * u / cap)
        return {"logit_scale": float(inner * outer), "logit_softcap": float(outer)} if outer > 0 else None


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
