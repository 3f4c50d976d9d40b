"""Lazy logits: what Megatron's model passes from its output layer to its loss in place of the logits."""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel_lce.collectives import Layout, gather_hidden
from parallel_lce.functional import token_statistics
from parallel_lce.megatron.logits_warning import warn_of_logits
from parallel_lce.plan import Block


def keep_autograd_gradient(weight: Tensor) -> None:
    """Have Megatron's DDP add what autograd delivers for ``weight`` to its main_grad.

    The fused loss adds its dW to main_grad itself and sets ``grad_added_to_main_grad``. DDP then drops autograd's
    gradient, including that of real logits made with the same weight, unless the weight has Megatron's
    ``zero_out_wgrad``.
    """
    if torch.is_grad_enabled() and weight.requires_grad:
        weight.zero_out_wgrad = True  # pyright: ignore[reportAttributeAccessIssue]: Megatron's


# Hooks registered after the fused loss would never run.
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


# What is answered without real logits, and has no gradient.
_SIZES = ("shape", "size", "ndim", "dim", "numel", "dtype", "is_floating_point", "device", "is_cuda")


# None from torch 2.14 on, where the call of a Function has no frame of its own.
_APPLY: CodeType | None = getattr(torch.autograd.Function.apply, "__code__", None)


def _function_calls() -> Iterator[FrameType]:
    """The frames of the calls of ``torch.autograd.Function`` that are running, innermost first: of their ``apply``, or
    of their forwards where ``apply`` has none.

    A reentrant checkpoint is one. Gradients are off in such a forward. The Function gives its tensor results a backward
    of its own. Lazy logits that it is given, or returns, are no tensors, and lose their gradient.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if _is_forward(frame.f_code) if _APPLY is None else frame.f_code is _APPLY:
            yield frame
        frame = frame.f_back


_FORWARDS: set[CodeType] = set()


def _is_forward(code: CodeType) -> bool:
    """Whether this is the forward of a ``torch.autograd.Function``. Asked while the code is running."""
    if code in _FORWARDS:
        return True
    functions: list[type[torch.autograd.Function]] = [torch.autograd.Function]
    for function in functions:
        functions += function.__subclasses__()
    found = any(getattr(inspect.unwrap(function.forward), "__code__", None) is code for function in functions)
    if found:
        _FORWARDS.add(code)
    return found


def _is_given(call: FrameType, value: object) -> bool:
    """Whether ``value`` is an argument of a call that is running."""
    names, more, _, local = inspect.getargvalues(call)
    arguments = [local.get(name) for name in names]
    others = local.get(more, ()) if more else ()
    return any(argument is value for argument in (*arguments, *others))


def _version(tensor: Tensor) -> int | None:
    """How often the tensor was changed in place; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Autocast's dtype on the tensor's device; None where autocast is off. Meta tensors have no autocast."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


class LazyLogits:
    """The logits ``[s, b, V/P]`` that ``layer`` would make of ``hidden``, multiplied by ``scale``.

    The loss takes the hidden states, the weight and the bias instead. Sizes, each token's largest logit and its place
    need no real logits. The first other use (a method, an operator, an index, a torch function) makes the real
    logits as the stock layer does, in the modes in which the layer was called. Every later use, the loss included, gets
    that one tensor, ``made``. In-place changes are therefore seen by the loss.

    The weight, the bias and ``sequence_parallel`` are those at the time of the call. ``shared``: the weight was
    passed to the layer. ``has_loss``: the loss was computed without logits.
    """

    __array_priority__ = Tensor.__array_priority__
    # Set by __init__, as all other attributes are. Type checkers need to know these.
    scale: float
    stock_forward: Callable[..., tuple[Tensor, Tensor | None]]
    made: Tensor | None

    def __init__(
        self,
        layer: torch.nn.Module,
        hidden: Tensor,
        weight: Tensor | None,
        sequence_parallel: bool,
        stock_forward: Callable[..., tuple[Tensor, Tensor | None]],
    ) -> None:
        used = layer.weight if weight is None else weight
        parts = {"hidden states": hidden, "weight": used, "bias": layer.bias}
        vars(self).update(  # past __setattr__
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
            autocast_dtype=_autocast_dtype(hidden),
            function_call=None if torch.is_grad_enabled() else next(_function_calls(), None),
            versions=[(n, t, _version(t)) for n, t in parts.items() if t is not None],
        )

    def __reduce_ex__(self, protocol):
        """Pickled, as Megatron's config logger does, they are the real logits."""
        return self.materialize("pickling").__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"LazyLogits({list(self.shape)}, {self.dtype}, {self.device})"

    @torch.compiler.disable(reason="lazy logits are Python objects")
    def materialize(self, use: str) -> Tensor:
        """The real logits; in training one warning names the first ``use``, which makes them.

        Collectives: those of the stock layer's forward, at the first use.
        """
        self.check()
        if self.made is None:
            # stacklevel 5 names the caller's line: frames of this class and of compiler.disable lie between.
            warn_of_logits(self.layer, f"{use} of the output layer's result wants them", stacklevel=5)
            before, self.layer.sequence_parallel = self.layer.sequence_parallel, self.sequence_parallel
            try:
                with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad_enabled):
                    keep_autograd_gradient(self.weight)
                    with self.autocast():
                        logits, _ = self.stock_forward(self.hidden, weight=self.weight, runtime_gather_output=False)
                        self.made = logits if self.scale == 1.0 else logits * self.scale
            finally:
                self.layer.sequence_parallel = before
        return self.made

    def autocast(self) -> torch.autocast | nullcontext[None]:
        """Autocast as it was when the output layer was called."""
        if self.autocast_dtype == _autocast_dtype(self.hidden):
            return nullcontext()
        enabled = self.autocast_dtype is not None
        return torch.autocast(self.hidden.device.type, dtype=self.autocast_dtype, enabled=enabled)

    def check(self) -> None:
        """Raise if the lazy logits no longer stand for the logits at the time of the call.

        Raises:
            RuntimeError: nothing is made yet, and the hidden states, the weight or the bias changed in
                place, or the layer's bias was replaced; or a ``torch.autograd.Function`` was given this or
                returned it, and the gradient would be lost.
        """
        if self.made is None:
            changed = [name for name, tensor, version in self.versions if _version(tensor) != version]
            if self.layer.bias is not self.bias:
                changed.append("bias")
            if changed:
                raise RuntimeError(
                    f"parallel_lce: the output layer's {changed[0]} changed in place after the layer was "
                    "called, and its logits, or their loss, are computed only now: change a copy"
                )
        calls = list(_function_calls())
        if self.requires_grad and any(_is_given(call, self) for call in calls):
            raise RuntimeError(
                "parallel_lce: a torch.autograd.Function (or a reentrant checkpoint) was given the output "
                "layer's result, which is no tensor, and would lose its gradient: give it `logits[...]`"
            )
        returned = self.function_call is not None and not any(call is self.function_call for call in calls)
        if returned and torch.is_grad_enabled() and self._parts_need_gradients():
            raise RuntimeError(
                "parallel_lce: a torch.autograd.Function (or a reentrant checkpoint) returned the output "
                "layer's result, which is no tensor, and has lost its gradient: let it return `logits[...]`, "
                "or checkpoint with use_reentrant=False"
            )

    @property
    def requires_grad(self) -> bool:
        if self.made is not None:
            return self.made.requires_grad
        return self.grad_enabled and self._parts_need_gradients()

    def _parts_need_gradients(self) -> bool:
        return any(t is not None and t.requires_grad for t in (self.hidden, self.weight, self.bias))

    def __len__(self) -> int:
        return len(self._sized())

    def _sized(self) -> Tensor:
        """What has the logits' sizes, dtype and device: themselves if they are made, else one number, expanded."""
        if self.made is not None:
            return self.made
        sequence, *others = self.hidden.shape[:-1]
        parts = self.layer.tp_group.size() if self.sequence_parallel else 1
        dtype = getattr(self.layer, "output_dtype", None)  # from 0.20 on
        one = self.hidden.new_empty((), dtype=dtype or self.autocast_dtype or self.hidden.dtype)
        return one.expand(parts * sequence, *others, self.layer.output_size_per_partition)

    def max(self, *arguments, **options):
        """Over the vocabulary, without a gradient, by statistics; else as of the real logits."""
        if self._known_without_logits(*arguments, **options) and not torch.is_grad_enabled():
            return torch.return_types.max(self._maximum())
        return self.materialize("'max'").max(*arguments, **options)

    def argmax(self, *arguments, **options) -> Tensor:
        """Over the vocabulary by statistics; else as of the real logits."""
        if self._known_without_logits(*arguments, **options):
            return self._maximum()[1]
        return self.materialize("'argmax'").argmax(*arguments, **options)

    def _known_without_logits(self, dim: object = None, keepdim: bool = False, **others) -> bool:
        over_vocabulary = isinstance(dim, int) and dim in (-1, self.ndim - 1)
        return self.made is None and over_vocabulary and not keepdim and not others

    @torch.no_grad()
    def _maximum(self) -> tuple[Tensor, Tensor]:
        """Maximum and its place in this rank's shard, of each token ``[s, b]``.

        One more projection, but no logits. Under sequence parallelism the hidden states are gathered
        first, as the stock layer does.
        """
        self.check()
        hidden = self.hidden
        if self.sequence_parallel:
            layout = Layout.of(self.layer.tp_group, True)
            flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
            whole = Block(0, flat.shape[0], 0)
            hidden = gather_hidden(flat, whole, layout).wait().view(*self.shape[:-1], -1)
        with self.autocast():
            found = token_statistics(
                hidden, self.weight, None, linear_bias=self.bias, logit_scale=self.scale, argmax=True
            )
        assert found.argmax is not None  # asked for
        return found.max_logit.to(self.dtype), found.argmax.clamp(min=0)

    def __mul__(self, factor: Any) -> LazyLogits | Tensor:
        """By a number: new lazy logits, unless the real ones exist."""
        if self.made is not None or not isinstance(factor, numbers.Real):
            return self.materialize("multiplication") * factor
        self.check()
        product = object.__new__(LazyLogits)
        vars(product).update(vars(self))
        product.scale = self.scale * float(factor)
        product.grad_enabled = self.grad_enabled and torch.is_grad_enabled()
        return product

    __rmul__ = __mul__

    def __getattr__(self, name: str):
        if name in _SIZES:
            return getattr(self._sized(), name)
        special = name.startswith("__") and name != "__cuda_array_interface__"
        if special or not hasattr(Tensor, name):
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
        name, options = getattr(function, "__name__", str(function)), kwargs or {}
        maximum = function in (torch.max, torch.argmax) and "out" not in options
        if maximum and args and isinstance(args[0], cls):
            return getattr(args[0], name)(*args[1:], **options)
        use = f"torch function {name!r}"

        for value in tree_leaves((args, options)):
            if isinstance(value, cls):
                value.materialize(use)  # in this frame: the warning names its caller's line
        args, options = tree_map_only(cls, lambda lazy: lazy.made, (args, options))
        return function(*args, **options)


def _add_special_methods() -> None:
    """Add the special methods of tensors, which Python looks up on the class, past ``__getattr__``."""

    def add(name: str) -> None:
        in_place = name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")

        def call(self, *arguments, **options):
            result = getattr(self.materialize(f"operator {name!r}"), name)(*arguments, **options)
            # `logits *= 2` rebinds the name to this return value: return self, so that all names keep sharing one
            # tensor.
            return self if in_place and result is self.made else result

        setattr(LazyLogits, name, call)

    comparisons = {f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne")}
    others = set(dir(Tensor)) - set(dir(object)) - {"__torch_function__", "__torch_dispatch__", "__setstate__"}
    for name in (comparisons | others) - set(vars(LazyLogits)):
        if name.startswith("__") and callable(getattr(Tensor, name)):
            add(name)


_add_special_methods()
