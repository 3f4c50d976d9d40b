"""Logits that are not computed yet: output layers return them in place of tensors, and the loss takes them."""

from __future__ import annotations

import functools
import math
import numbers
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallel_lce.core.private import (
    DisableTorchFunctionSubclass,
    forward_gradients_enabled,
    pytree,
    saving_without_hooks,
    version,
    wrapper_subclass,
)

# Registered after the fused loss, these hooks would never run.
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")

# Attributes that need no real logits.
_SIZES = ("shape", "size", "ndim", "dim", "numel", "dtype", "is_floating_point", "device", "is_cuda")


def _in_function() -> bool:
    """Whether the forward of a ``torch.autograd.Function``, such as a reentrant checkpoint, is running: PyTorch turns
    off forward-mode gradients only there and in inference mode. Lazy logits among a Function's arguments or results
    lose their gradient, since its backward handles tensors only."""
    return not (forward_gradients_enabled() or torch.is_inference_mode_enabled())


class _Watch:
    """Notes whether an optimizer may have changed ``weight``, which fused and 8-bit ones do without a new version."""

    def __init__(self, weight: Tensor | None) -> None:
        self.weight, self.stepped = weight, False
        _watches.add(self)


_watches: weakref.WeakSet[_Watch] = weakref.WeakSet()


def _may_write(parameter: Tensor, weight: Tensor) -> bool:
    """Whether an optimizer of ``parameter`` may write ``weight``: it has the same memory, or is no plain parameter,
    such as a copy in fp32 or a part of a flat or sharded one."""
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return True
    return parameter is weight or (
        type(weight) in (Tensor, nn.Parameter)
        and parameter.device == weight.device
        and parameter.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    )


@torch.compiler.disable(reason="lazy logits are Python objects")
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in [*_watches]:
        weight = watch.weight
        if weight is not None and not watch.stepped:
            groups = optimizer.param_groups
            watch.stepped = any(_may_write(p, weight) for group in groups for p in group["params"])


@functools.cache
def watch_optimizers() -> None:
    """From now on lazy logits learn of optimizers' steps. Without lazy logits a step does nothing more than before."""
    register_optimizer_step_post_hook(_after_step)


class LazyLogits:
    """The logits that ``layer`` would make of ``hidden``. The base of Megatron's and of transformers' lazy logits.

    The loss is computed from the hidden states, the weight and the bias, which are read when the layer is called. Sizes
    need no real logits. The first other use (a method, an operator, an index, a torch function) makes the real logits
    as the stock layer does, in the autocast, grad and inference mode of the layer's call. Every later use, the loss
    included, gets that one tensor, ``made``, and so sees in-place changes. ``has_loss``: the loss was computed without
    logits. A write through ``weight.data`` outside of PyTorch's optimizers cannot be seen.

    A subclass has ``_make()``, the real logits by the stock layer; ``_empty()``, a tensor of their shape, dtype and
    device without memory of its own; and ``_warn(use)``, which says that a use makes them: four frames lie between that
    method and the caller's.
    """

    __array_priority__ = Tensor.__array_priority__
    made: Tensor | None
    _make: Callable[[], Tensor]
    _methods: tuple[Callable[..., Any], ...] = ()
    """Torch functions that call the method of their name."""

    def _capture(
        self, layer: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, trainable: bool, **more: Any
    ) -> None:
        """Remembers the operands, and the modes in which the layer is called. ``trainable``: a parameter of the layer
        that is not given here needs a gradient."""
        named = {"hidden states": hidden, "weight": weight, "bias": bias}
        operands = {name: tensor for name, tensor in named.items() if tensor is not None}
        kind = hidden.device.type
        autocast = kind != "meta" and torch.is_autocast_enabled(kind)
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
            autocast_dtype=torch.get_autocast_dtype(kind) if autocast else None,
            needs_gradient=trainable or any([tensor.requires_grad for tensor in operands.values()]),
            watch=_Watch(weight),
            # Inference tensors have no version counter.
            versions=[(name, t, version(t)) for name, t in operands.items() if not t.is_inference()],
            **more,
        )

    @torch.compiler.disable(reason="lazy logits are Python objects")
    def materialize(self, use: str) -> Tensor:
        """The real logits. The first ``use`` makes them.

        Collectives: at the first use, as in the stock layer's forward.
        """
        self.check()
        if self.made is None:
            self._warn(use)
            # A checkpoint around this use, but not around the layer, would miss in its second run what is saved here.
            with saving_without_hooks(), torch.inference_mode(self.inference):
                with torch.set_grad_enabled(self.grad_enabled), self.autocast():
                    self.made = self._make()
        return self.made

    def _changed(self, **fields: Any) -> Any:
        self.check()
        other = object.__new__(type(self))
        grad_enabled = self.grad_enabled and torch.is_grad_enabled()
        vars(other).update(vars(self), grad_enabled=grad_enabled, **fields)
        return other

    def __reduce_ex__(self, protocol):  # Megatron's config logger pickles
        return self.materialize("pickling").__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"

    def autocast(self) -> torch.autocast | nullcontext[None]:
        kind, dtype = self.hidden.device.type, self.autocast_dtype
        return nullcontext() if kind == "meta" else torch.autocast(kind, dtype, enabled=dtype is not None)

    def check(self) -> None:
        """Check that the logits can still be computed as in the layer's call, and get their gradient.

        Raises:
            RuntimeError: an operand of logits that are not made yet has changed, or may have; or their gradient would
            be lost, since a ``torch.autograd.Function`` uses or returned them.
        """
        if self.made is None:
            changed = [name for name, tensor, before in self.versions if version(tensor) != before]
            if self._bias_is_replaced():
                changed.append("bias")
            computed = "after the layer was called, and its logits, or their loss, are computed only now"
            if changed:
                raise RuntimeError(
                    f"parallel_lce: the output layer's {changed[0]} changed in place {computed}: change a copy"
                )
            if self.watch.stepped:
                step = "an optimizer's step may have changed the output layer's weight"
                raise RuntimeError(f"parallel_lce: {step} {computed}: use them before the step")
        self._check_function()

    def _check_function(self) -> None:
        """Refuse a use in which a ``torch.autograd.Function`` loses the gradient."""
        inside, lost = _in_function(), None
        if inside and not self.in_function and self.requires_grad:
            lost = "uses the output layer's result, which is no tensor, and loses its gradient: give it `logits[...]`"
        if self.in_function and not inside and torch.is_grad_enabled() and self.needs_gradient:
            lost = (
                "returned the output layer's result, which is no tensor, and has lost its gradient: let it return "
                "`logits[...]`, or checkpoint with use_reentrant=False"
            )
        if lost:
            raise RuntimeError(f"parallel_lce: a torch.autograd.Function (or a reentrant checkpoint) {lost}")

    def _bias_is_replaced(self) -> bool:
        return False

    @property
    def requires_grad(self) -> bool:
        if self.made is not None:
            return self.made.requires_grad
        return self.grad_enabled and self.needs_gradient

    def __len__(self) -> int:
        return self.size(0)

    def __getattr__(self, name: str):
        if name in _SIZES:
            return getattr(self._empty() if self.made is None else self.made, name)
        if not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self.has_loss and self.made is None and name in _HOOKS:
            said = f"{name} comes after the loss, which was computed without logits: call it before"
            raise RuntimeError(f"parallel_lce: {said}")
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
        for value in pytree.tree_leaves((args, options)):
            if isinstance(value, cls):
                value.materialize(use)  # in this frame: the warning names its caller's line
        args, options = pytree.tree_map_only(cls, lambda lazy: lazy.made, (args, options))
        return function(*args, **options)


class RecordedLogits(LazyLogits):
    """Lazy logits that record the operations on them in ``steps``: products and quotients with numbers, ``tanh``, casts
    to fp32, and after the loss to any dtype. Real logits are made by the subclass's ``_stock()``, and go through the
    same steps. ``hooks`` are registered on them. ``operands()``: those of ``nn.functional.linear``, if it alone makes
    the real logits before the steps; else none."""

    steps: tuple[tuple[str, tuple[Any, ...]], ...]  # names and arguments of methods
    hooks: tuple[Callable[[Tensor], Any], ...] = ()
    # Logits of which these are the detached ones, in the same memory.
    source: RecordedLogits | None = None
    _methods = (torch.tanh, torch.mul, torch.div)

    def _make(self) -> Tensor:
        if self.source is not None:
            return self.source.materialize("'detach'").detach()
        logits = self._stock()
        vars(self)["before"] = get_gradient_edge(logits) if logits.requires_grad else None
        logits = self.after_steps(logits)
        for hook in self.hooks if logits.requires_grad else ():
            logits.register_hook(hook)
        return logits

    def after_steps(self, logits: Tensor) -> Tensor:
        for name, arguments in self.steps:
            logits = getattr(logits, name)(*arguments)
        return logits

    def _step(self, name: str, *arguments: Any) -> Any:
        """New lazy logits after one more step; real ones if these are made, or a factor is no number."""
        if self.made is not None or not all(isinstance(a, (numbers.Real, torch.dtype)) for a in arguments):
            return getattr(self.materialize(f"{name!r}"), name)(*arguments)
        return self._changed(steps=(*self.steps, (name, arguments)), source=None)

    def detached(self) -> RecordedLogits:
        other = self._changed(source=self)
        vars(other)["grad_enabled"] = False
        return other

    def largest(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
        """Each token's largest logit and its position, as of ``max(dim)``, by a fused projection. None where real
        logits are needed."""
        made = self.made is not None or (self.source is not None and self.source.made is not None)
        return None if made else self._largest(*arguments, **options)

    def _largest(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
        return None

    def is_over_vocabulary(self, dim: object = None, keepdim: bool = False, **others: Any) -> bool:
        """Whether these are arguments of a maximum over the vocabulary alone, outside of a captured CUDA graph."""
        over = isinstance(dim, int) and dim in (-1, self.ndim - 1) and not keepdim and not others
        return over and not (self.hidden.is_cuda and torch.cuda.is_current_stream_capturing())

    def tanh(self) -> Any:
        return self._step("tanh")

    def mul(self, factor: Any) -> Any:
        return self._step("mul", factor)

    def div(self, factor: Any, **options: Any) -> Any:
        return self.materialize("'div'").div(factor, **options) if options else self._step("div", factor)

    def float(self) -> Any:
        return self._step("to", torch.float32)

    def to(self, *arguments: Any, **options: Any) -> Any:
        cast = len(arguments) == 1 and not options and isinstance(arguments[0], torch.dtype)
        if cast and (self.has_loss or arguments[0] == torch.float32):
            return self._step("to", *arguments)
        return self.materialize("'to'").to(*arguments, **options)

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
        if not (math.isfinite(inner) and math.isfinite(outer)):
            return None
        if not capped:
            return {"logit_scale": float(inner)}
        # outer * tanh(inner * u), and softcap(s * u) = cap * tanh(s * u / cap)
        return {"logit_scale": float(inner * outer), "logit_softcap": float(outer)} if outer > 0 else None


class _Attached(torch.autograd.Function):
    """The lazy logits' tensor with a place in the autograd graph, for those who see no torch functions."""

    @staticmethod
    def forward(ctx, lazy: RecordedLogits, *operands: Tensor):
        ctx.lazy, ctx.operands = lazy, operands
        ctx.set_materialize_grads(False)
        return LogitsTensor._of(lazy)

    @staticmethod
    def backward(ctx, gradient: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradient is None:
            return None, *(None for _ in ctx.operands)
        lazy, needed = ctx.lazy, [operand.requires_grad for operand in ctx.operands]
        real, after = lazy.materialize("a gradient"), lazy.after_steps
        if version(real):  # changed in place; else its own graph may be freed by now
            (gradient,), after = torch.autograd.grad(real, [lazy.before], gradient, retain_graph=True), lambda z: z
        # Of copies, since the hidden states may come from the same weight.
        leaves = [operand.detach().requires_grad_(need) for operand, need in zip(ctx.operands, needed)]
        with torch.enable_grad(), lazy.autocast():
            logits = after(nn.functional.linear(*leaves))
        found = iter(torch.autograd.grad(logits, [leaf for leaf in leaves if leaf.requires_grad], gradient))
        return None, *(next(found) if need else None for need in needed)


# Getters and methods that need no real logits.
_PLAIN = {*"_base layout is_meta is_cpu is_sparse is_quantized is_nested is_complex is_inference".split()}
_PLAIN |= {*_SIZES, "__len__", "element_size", "nelement", "get_device"}
_STEPS = {"mul", "div", "tanh", "float", "to", "contiguous"}


class LogitsTensor(Tensor):
    """Recorded lazy logits as a tensor without memory, for programs that ask whether something is a tensor.

    Sizes and recorded steps need no real logits. Any other use is one of the real ones, which the first one makes.
    """

    lazy: RecordedLogits

    @classmethod
    def of(cls, lazy: Any) -> Any:
        if not isinstance(lazy, RecordedLogits) or lazy.made is not None:
            return lazy.made if isinstance(lazy, RecordedLogits) else lazy
        if lazy.requires_grad and torch.is_grad_enabled() and (operands := lazy.operands()):
            return _Attached.apply(lazy, *operands)
        return cls._of(lazy)

    @classmethod
    def _of(cls, lazy: RecordedLogits) -> LogitsTensor:
        like = lazy._empty()
        tensor = wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        tensor.lazy = lazy
        return tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        options, first = kwargs or {}, args[0] if args else None
        name, lazy = getattr(function, "__name__", str(function)), first.lazy if isinstance(first, cls) else None
        name = function.__self__.__name__ if name == "__get__" else name  # an attribute
        if lazy is not None and lazy.made is None:
            if name in _PLAIN:
                with DisableTorchFunctionSubclass():
                    return function(*args, **options)
            if name == "requires_grad":
                return lazy.requires_grad
            if name in _STEPS and "out" not in options:
                return cls.of(getattr(lazy, name)(*args[1:], **options))
            # A function of ZeRO-3's stands around each output, and detaches it.
            if name == "detach" and not (lazy.has_loss and _in_function()):
                return cls._of(lazy.detached())
            if name == "argmax" and (top := lazy.largest(*args[1:], **options)) is not None:
                return top[1]
            if lazy.has_loss and name in _HOOKS:
                return lazy.hook_after_loss(name, *args[1:], **options)
            # DDP with find_unused_parameters clones each output, and takes the output itself if it has no grad_fn.
            if lazy.has_loss and name == "grad_fn":
                return None
            if lazy.has_loss and name in ("clone", "detach") and _in_function():
                return cls._of(lazy)
        for value in pytree.tree_leaves((args, options)):
            if isinstance(value, cls):
                value.lazy.materialize(repr(name))
        args, options = pytree.tree_map_only(cls, lambda tensor: tensor.lazy.made, (args, options))
        result = function(*args, **options)
        # `logits *= 2` rebinds the name to the result. Returning first keeps all names on one tensor.
        return first if lazy is not None and result is lazy.made and name.endswith("_") else result

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """A use that is no torch function: autograd's Functions save and detach tensors, and C++ calls operators."""
        real = lambda tensor: tensor.lazy.materialize(str(function)).detach()  # noqa: E731
        args, options = pytree.tree_map_only(cls, real, (args, kwargs or {}))
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
