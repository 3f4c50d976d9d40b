"""Logits that are not computed yet. Output layers return them, and the loss takes their operands."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallel_lce.call.checks import has_dtensor
from parallel_lce.core.private import (
    FSDP_MODULES,
    DisableTorchFunctionSubclass,
    after_backward,
    changes_arguments,
    comes_from,
    counting_versions,
    forbid_address,
    is_flattened,
    outside_graphs,
    parameters_of,
    pytree,
    saving_without_hooks,
    version,
    wrapper_subclass,
)
from parallel_lce.functional import token_statistics
from parallel_lce.neighbours import DEEPSPEED

_PLAIN = {
    *"shape size dim ndim numel nelement dtype device layout stride is_contiguous storage_offset element_size".split(),
    *"itemsize nbytes get_device __len__ __hash__ requires_grad grad_fn grad is_leaf retains_grad output_nr".split(),
    *"_base _version is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_complex is_floating_point".split(),
    *"is_inference is_mps is_xpu is_mtia is_mkldnn is_sparse_csr".split(),
}
"""Attributes and methods that need no real logits."""
_LAYOUT = {"stride", "is_contiguous", "storage_offset"}
"""Of these, what views of real logits that exist answer themselves."""
_HOOKS = {"register_hook", "retain_grad"}
_MEMORY = {*"data __set__ numpy __array__ __dlpack__ data_ptr storage untyped_storage".split()}
"""What a program can write by without a version; "__set__" is that of ``data``, too."""
_PRODUCTS, _QUOTIENTS = {"mul", "__mul__", "__rmul__", "multiply"}, {"div", "__truediv__", "true_divide"}
_CASTS, _UNARY = {"float", "half", "bfloat16", "double", "to"}, {"tanh", "contiguous", "clone", "detach"}
_VIEWS = {*"__getitem__ view reshape flatten unflatten transpose permute unsqueeze squeeze narrow select".split()}
THE_LOSS = "the loss"
"""The use of real logits by a door's loss, which has said why."""


@dataclasses.dataclass(eq=False)
class Source:
    """One call of an output layer: the operands of its logits, and the modes in which it was called."""

    layer: Any
    hidden: Tensor
    # These two are None where they are whole only within a call of the layer.
    weight: Any
    bias: Tensor | None
    # make(hidden, *operands): the real logits, by the layer's own forward.
    make: Callable[..., Tensor]
    # say(source, use): called when a use other than THE_LOSS makes real logits.
    say: Callable[[Source, str], None]
    # Tensors beside `hidden` whose gradient goes through the deferred logits. The layer's own forward delivers others'.
    operands: tuple[Tensor, ...] = ()
    # within(hidden, loss): loss(hidden, weight, bias) in a call of the layer. None: these are whole outside of it.
    within: Callable[..., Any] | None = None
    # Makes the hidden states of all rows of those of this rank. None: it has all.
    whole: Callable[[Tensor], Tensor] | None = None
    has_loss: bool = False
    # What makes real logits too late.
    events: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameter = parameters_of(self.layer).get("weight") if self.weight is None else self.weight
        self.device, self.grad = self.hidden.device, torch.is_grad_enabled()
        self.autocast_dtype = _autocast_dtype(self.device.type)
        given = self.hidden, self.parameter, self.bias, *self.operands
        self.is_trainable = self.grad and any(t is not None and t.requires_grad for t in given)
        named = ("hidden states", self.hidden), ("weight", self.weight), ("bias", self.bias)
        self.versions = [(name, tensor, version(tensor)) for name, tensor in named if tensor is not None]
        _watch_optimizers()
        _alive.add(weakref.ref(self, _alive.discard))

    def modes(self) -> AbstractContextManager:
        """The autocast mode of the layer's call."""
        kind, dtype = self.device.type, self.autocast_dtype
        if _autocast_dtype(kind) == dtype:
            return nullcontext()
        return torch.autocast(kind, dtype, enabled=dtype is not None)

    def event(self) -> str | None:
        """What happened since the layer's call, by which the operands may be others."""
        for name, tensor, before in self.versions:
            if version(tensor) != before:
                return f"the output layer's {name} changed in place"
        weight = self.weight
        if type(weight) in (Tensor, nn.Parameter) and not (weight.numel() and weight.untyped_storage().size()):
            return "FSDP or ZeRO has taken back the output layer's weight"
        if self.is_freed():
            return "the memory of the output layer's hidden states was freed"
        return self.events[0] if self.events else None

    def is_freed(self) -> bool:
        """Whether a program has freed the memory of the hidden states."""
        hidden = self.hidden
        return type(hidden) is Tensor and hidden.numel() > 0 and not hidden.untyped_storage().size()

    def check(self) -> None:
        """Raise ``RuntimeError`` after such an event."""
        if (event := self.event()) is not None:
            raise RuntimeError(f"parallel_lce: logits, or their loss, are wanted after {event}: use them before")

    def close_after(self, *losses: Tensor) -> None:
        """After the backward of one of them no real logits can be made; nor in it where the weight is taken back."""
        # A graph must not hold its source.
        close = functools.partial(self.events.append, "the backward of their loss")
        at_once = self.within is not None
        for loss in losses:
            if loss.grad_fn is not None:
                loss.grad_fn.register_prehook(lambda _: close() if at_once else after_backward(close))


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of autocast on devices of this kind; None where it is off."""
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


_alive: set[weakref.ref[Source]] = set()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


@outside_graphs
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """An optimizer's step makes it too late for logits of its weights. Fused optimizers raise no version; nor do those
    that hold other tensors: Megatron's copies of weights with a main_grad, FSDP's parts of weights."""
    sources = [reference() for reference in [*_alive]]  # a list at once: other threads may add to it
    parameters = [p for group in optimizer.param_groups for p in group["params"]] if sources else []
    any_weight = has_dtensor(parameters) or any(map(is_flattened, parameters))
    for source in sources:
        weight = source and source.parameter
        if source is None or weight is None:
            continue
        if any_weight or hasattr(weight, "main_grad") or any(p is weight for p in parameters):
            source.events[:] = ["an optimizer's step, which may have changed the output layer's weight"]


@dataclasses.dataclass(eq=False)
class _State:
    """What is known of a deferred tensor, and what becomes of it."""

    source: Source
    # shape and dtype, which are read often
    sizes: tuple[int, ...]
    kind: torch.dtype
    # The hidden states of these logits; None if this rank has not all of them.
    rows: Tensor | None
    parent: DeferredLogits | None = None
    # Function, arguments and options of each step from the layer's result to this tensor, the last one from its parent.
    steps: tuple[tuple[Callable, tuple, dict], ...] = ()
    # Whether it requires a gradient.
    tracked: bool = False
    # The real logits once they are made, and their version and grad_fn then.
    real: Tensor | None = None
    version: int = 0
    node: Any = None
    # The node of the graph at which they are a copy.
    placed: Any = None
    # A copy, from when a program got their memory before the loss.
    copy: Tensor | None = None
    # Whether the loss must take them: a program put a hook on them, or gave them to a Function that changed them after
    # that. And the hooks that FSDP and DeepSpeed put.
    hooked: bool = False
    # Whether a program changed in place what they are made of, before they were made.
    changed: bool = False
    output_hooks: list[Callable] = dataclasses.field(default_factory=list)

    def keep(self, real: Tensor) -> None:
        self.real, self.version, self.node = real, version(real), _node(real)

    def is_changed(self) -> bool:
        """Whether a program has changed the real logits in place; or, before they were made, what they are made of."""
        real = self.real
        if self.changed or real is None:
            return self.changed
        if version(real) != self.version:
            return True
        if self.copy is None:
            return False
        freed = not real.untyped_storage().size()
        return freed or not torch.allclose(real, self.copy, 0, 0, equal_nan=True)

    def share(self) -> None:
        """Keep a copy of these logits, and of those that they may be a view of."""
        if self.real is not None and self.copy is None and not self.source.has_loss:
            self.copy = self.real.detach().clone()
            if self.parent is not None:
                self.parent.state.share()


class _Edge(torch.autograd.Function):
    """The place of deferred logits in the autograd graph, for other Functions that take them."""

    @staticmethod
    def forward(ctx: Any, state: _State, *operands: Tensor) -> Any:
        ctx.state, ctx.operands = state, operands
        ctx.register_hook = ctx.register_prehook = _refuse_hook  # the loss's gradient may not come here
        ctx.set_materialize_grads(False)
        return DeferredLogits.without_graph(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """By a backward within the backward, as of a reentrant checkpoint."""
        if gradient is None:
            return None, *(None for _ in ctx.operands)
        state: _State = ctx.state
        # Functions may change their inputs themselves, as Megatron's cross-entropy does, which leaves the node.
        if state.real is not None and (state.hooked or _node(state.real) is not state.node):
            said = "logits were changed in place or got a hook, and then used by a torch.autograd.Function"
            raise RuntimeError(f"parallel_lce: {said}: give it a changed copy")
        state.source.check()
        leaves = [operand.detach().requires_grad_(operand.requires_grad) for operand in ctx.operands]
        with torch.enable_grad(), state.source.modes():
            logits = _after(state.source.make(*leaves), state.steps)
        torch.autograd.backward(logits, gradient)
        return None, *(leaf.grad for leaf in leaves)


def _refuse_hook(*_: Any) -> None:
    instead = "logits.register_hook, or a module's register_full_backward_hook"
    raise RuntimeError(f"parallel_lce: a hook of the logits' grad_fn may never run: call {instead}")


def _node(real: Tensor) -> Any:
    """A change of a view without gradients makes the view's own node anew."""
    return (real if real._base is None else real._base).grad_fn


def _after(logits: Tensor, steps: tuple) -> Tensor:
    for function, arguments, options in steps:
        logits = function(logits, *arguments, **options)
    return logits


class DeferredLogits(Tensor):
    """The logits ``[..., V]`` of an output layer's call, without memory.

    The loss takes their operands (:meth:`run`). Sizes need no logits. Products and quotients with numbers, tanh, casts,
    ``detach``, views that keep the vocabulary last and, in the graph, ``clone`` are recorded, and give deferred logits
    again. The first other use, by anybody, makes the real logits by the layer's own forward, in the grad and autocast
    mode of the layer's call. Later uses get the same tensor. They raise ``RuntimeError`` if an operand may have changed
    by then: by its version, by a step of an optimizer that holds the weight, by any step if that has a ``main_grad``,
    or after an event of the door.
    """

    state: _State

    @staticmethod
    def of(source: Source, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> DeferredLogits:
        """``dtype``: of the layer's result; by default autocast's, else the hidden states'."""
        dtype = dtype or source.autocast_dtype or source.hidden.dtype
        return DeferredLogits._in_graph(_State(source, shape, dtype, source.hidden))

    @staticmethod
    def _in_graph(state: _State, gradient: bool = True) -> DeferredLogits:
        source = state.source
        state.tracked = gradient and source.is_trainable and torch.is_grad_enabled()
        if not state.tracked:
            return DeferredLogits.without_graph(state)
        # Without an operand that requires a gradient the result would have no place in the graph.
        hidden = source.hidden if source.hidden.requires_grad else source.hidden.detach().requires_grad_()
        return _Edge.apply(state, hidden, *source.operands)

    @staticmethod
    def without_graph(state: _State) -> DeferredLogits:
        tensor = wrapper_subclass(DeferredLogits, state.sizes, dtype=state.kind, device=state.source.device)
        forbid_address(tensor)
        tensor.state = state
        return tensor

    @property
    def source(self) -> Source:
        return self.state.source

    # --- the loss ---

    def run(self, loss: Callable[[Tensor, Tensor, Tensor | None], Any]) -> Any:
        """``loss(hidden, weight, bias)`` in the modes of the layer's call. Only where :meth:`why_not_fused` is None."""
        source, rows = self.source, cast(Tensor, self.state.rows)
        source.check()
        with nullcontext() if self.state.tracked else torch.no_grad(), source.modes():
            result = source.within(rows, loss) if source.within else loss(rows, source.weight, source.bias)
        source.has_loss = True
        return result

    def why_not_fused(self) -> str | None:
        """Why the loss must take real logits; None if it need not. A use beside the loss is no reason: ranks may differ
        in that."""
        state = self.state
        if self._is_touched():
            return "an in-place change, a hook or a torch.autograd.Function comes between output layer and loss"
        if state.rows is None:
            return "rows of the logits are selected or moved, and under sequence parallelism this rank has not all rows"
        if self.epilogue() is None or state.kind == torch.float64 != self.source.hidden.dtype:
            return f"the loss takes more than a scale, a soft-cap and a cast: {[_name(f) for f, *_ in state.steps]}"
        return None

    def _is_touched(self) -> bool:
        """Whether a program has put a hook on these real logits, changed them in place or made them a leaf, or given
        them to a Function that moved them; or those that they are made of."""
        state, parent = self.state, self.state.parent
        is_another_leaf = state.real is not None and state.real.requires_grad != state.tracked
        if state.hooked or is_another_leaf or state.is_changed() or self._is_moved():
            return True
        return parent is not None and parent._is_touched()

    def epilogue(self) -> dict[str, float] | None:
        """The steps as the fused functions' ``logit_scale`` and ``logit_softcap``; None if they cannot express them."""
        scale, cap = 1.0, None
        for function, arguments, _ in self.state.steps:
            name = _name(function)
            if name in _PRODUCTS | _QUOTIENTS:
                number = float(arguments[0])  # also of NumPy
                factor = number if name in _PRODUCTS else 1.0 / number
                if cap is None:
                    scale *= factor
                else:
                    cap *= factor
            elif name == "tanh":
                if cap is not None:
                    return None
                cap = 1.0
        if not math.isfinite(scale) or (cap is not None and not 0 < cap < math.inf):
            return None
        # cap * tanh(scale * u), and softcap(s * u) = cap * tanh(s * u / cap)
        return {"logit_scale": scale} if cap is None else {"logit_scale": scale * cap, "logit_softcap": cap}

    @torch.no_grad()
    def _largest(self, name: str, over: list) -> Any:
        """The result of ``argmax(-1)`` or ``max(-1)`` by a fused projection; None where that needs real logits. Of a
        token with a NaN the index is 0."""
        source, weight, sizes = self.source, self.source.weight, self.state.sizes
        made: DeferredLogits | None = self
        while made is not None and made.state.real is None:
            made = made.state.parent
        if made is not None and source.whole is None:  # under sequence parallelism the other ranks may project
            return None
        if [type(dim) for dim in over] != [int] or over[0] not in (-1, len(sizes) - 1) or self.why_not_fused():
            return None
        if source.event() or type(weight) not in (Tensor, nn.Parameter) or len(weight) != sizes[-1]:
            return None  # the last: logits that are gathered over the ranks
        rows = cast(Tensor, self.state.rows) if source.whole is None else source.whole(source.hidden)
        with source.modes():
            options: dict[str, Any] = dict(linear_bias=source.bias, argmax=True, **(self.epilogue() or {}))
            found: Any = token_statistics(rows, weight, None, **options)
        index = found.argmax.clamp(min=0)
        return index if name == "argmax" else torch.return_types.max((found.max_logit.to(self.state.kind), index))

    # --- real logits ---

    @outside_graphs
    def computed(self, use: str) -> Tensor:
        """The real logits. Collectives: if this is the first use, those of the layer's forward."""
        state, parent = self.state, self.state.parent
        if state.real is None:
            state.keep(self._made(use))
            if parent is not None:
                state.hooked, state.changed = parent._is_touched(), parent.state.is_changed()
            self._place()
            real: Any = state.real
            for hook in state.output_hooks if real.requires_grad else ():
                real.register_hook(hook)
        else:
            self._place()
        assert state.real is not None
        return state.real

    def _place(self) -> None:
        """If a Function has moved this tensor in the graph, the real logits become a copy at its place."""
        state, place = self.state, self._place_in_graph()
        if self._is_moved() and place is not state.placed:
            state.hooked = state.hooked or _node(cast(Tensor, state.real)) is not state.node
            state.placed, state.changed = place, state.is_changed()
            with torch.enable_grad(), DisableTorchFunctionSubclass():
                state.keep(self.clone())

    def _made(self, use: str) -> Tensor:
        state, source, parent, before = self.state, self.source, self.state.parent, None
        if parent is not None:
            before, name = parent.computed(use), _name(state.steps[-1][0])
            if parent.state.is_changed() and name not in _VIEWS | {"detach"}:
                said = f"{name!r} was taken of logits that were then changed in place: use its result before"
                raise RuntimeError(f"parallel_lce: {said}")
        mode = torch.inference_mode() if torch.is_inference_mode_enabled() else nullcontext()
        with saving_without_hooks(), counting_versions(), torch.set_grad_enabled(state.tracked):
            if before is not None:
                return _after(before, state.steps[-1:])
            source.check()
            if use != THE_LOSS:
                source.say(source, use)
            with source.modes(), mode:  # Megatron's forward may write into memory of inference mode
                real = source.make(source.hidden, *source.operands)
            return real.clone() if real.is_inference() else real

    def _is_moved(self) -> bool:
        """Whether a Function, such as a reentrant checkpoint, gave this tensor another place in the graph."""
        node = self._place_in_graph()
        return node is not None and getattr(node, "state", None) is not self.state

    def _place_in_graph(self) -> Any:
        with DisableTorchFunctionSubclass():
            return self.grad_fn

    # --- uses ---

    @classmethod
    @outside_graphs
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name(function)
        first: Any = args[0] if args else None
        is_deferred = type(first) is cls
        if is_deferred and name in _HOOKS:
            return first._hooked(function, name, *args[1:])
        has_layout = is_deferred and name in _LAYOUT and first._is_touched()
        if is_deferred and name in _PLAIN and first.state.real is None and not has_layout:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        # Also beside real logits, so that a look of one rank alone leaves the loss what it is on the others.
        if is_deferred and not first._is_touched():
            if (step := first._recorded(function, name, args[1:], kwargs)) is not None:
                return step
            if (name == "argmax" or (name == "max" and not torch.is_grad_enabled())) and kwargs.keys() <= {"dim"}:
                if (found := first._largest(name, [*args[1:], *kwargs.values()])) is not None:
                    return found
        if comes_from(function, "torch.distributed"):  # __torch_dispatch__ gets its operator
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function in (torch.autograd.grad, torch.autograd.backward):
            wanted = pytree.tree_leaves((args[1:], kwargs.get("inputs")))
            if any(type(each) is cls and each.source.has_loss and each.state.tracked for each in wanted):
                raise RuntimeError("parallel_lce: the loss took no logits: for their gradient give it `logits + 0`")
        args, kwargs = _real((args, kwargs), name)
        if is_deferred and name in _MEMORY:
            first.state.share()
        result = function(*args, **kwargs)
        # `logits *= 2` rebinds the name to the result. Returning first keeps all names on one tensor.
        return first if is_deferred and result is first.state.real else result

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A use that is no torch function: autograd's Functions save and alias tensors, and C++ calls operators."""
        use = str(function)
        is_collective = use.startswith("c10d.") and "send" not in use
        if is_collective or changes_arguments(function):
            # A collective's schema does not say what it writes. The values of one rank may stay: all must know.
            written = (args[:1], None) if is_collective else (args, kwargs)
            changed = [each.computed(use) for each in pytree.tree_leaves(written) if type(each) is cls]
            torch.autograd.graph.increment_version(changed)
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, _real((args, kwargs or {}), use))
        return function(*args, **kwargs)

    def _hooked(self, function: Callable, name: str, *hook: Callable) -> Any:
        """A hook's place is at real logits, which the loss then takes. After the loss they get no gradient, and only
        the hooks may wait for one that FSDP and DeepSpeed put on each output."""
        state = self.state
        if hook and comes_from(hook[0], *FSDP_MODULES, DEEPSPEED):
            if state.real is not None:
                return function(state.real, *hook)
            state.output_hooks += hook
            with DisableTorchFunctionSubclass():
                return function(self, *hook)
        if self.source.has_loss and state.tracked:
            raise RuntimeError(f"parallel_lce: {name} comes after the loss, which took no logits: call it before")
        result = function(self.computed(name), *hook)
        state.hooked = True
        return result

    def _recorded(self, function: Callable, name: str, arguments: tuple, options: dict) -> DeferredLogits | None:
        """The result of a step; None for another use."""
        state, source = self.state, self.source
        sizes, kind, rows = state.sizes, state.kind, state.rows
        if name in _PRODUCTS | _QUOTIENTS:
            number = len(arguments) == 1 and not options and isinstance(arguments[0], numbers.Real)
            if not number or (name in _QUOTIENTS and arguments[0] == 0):
                return None
        elif any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((arguments, options))):
            return None
        elif name in _CASTS:
            empty = torch.empty(0, dtype=kind, device=source.device)
            cast = function(empty, *arguments, **options)
            if cast is empty:
                return self
            if cast.device != source.device or not cast.is_floating_point():
                return None
            kind = cast.dtype
        elif name in _VIEWS:
            if (view := _view(function, sizes, arguments, options)) is None:
                return None
            # Deferred logits say that they are contiguous, which a view of real ones may not be.
            sizes, function = view.shape, Tensor.reshape if name == "view" else function
            rows = None if rows is None or source.whole is not None or source.is_freed() else _same_rows(rows, view)
        elif name not in _UNARY or options.keys() - {"memory_format"}:
            return None
        elif name == "clone" and not state.tracked:  # kept, maybe while the weight changes; DDP clones all outputs
            return None
        elif name == "contiguous" and state.parent is None:
            return self
        steps = (*state.steps, (function, arguments, options))
        step = _State(source, sizes, kind, rows, self, steps)
        return self._in_graph(step, state.tracked and name != "detach")


def _real(arguments: Any, use: str) -> Any:
    """Arguments with real logits for deferred ones."""
    return pytree.tree_map_only(DeferredLogits, lambda tensor: tensor.computed(use), arguments)


def _name(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    return function.__self__.__name__ if name == "__get__" else name


def _view(function: Callable, sizes: tuple[int, ...], arguments: tuple, options: dict) -> Tensor | None:
    """The view, of logits whose strides count rows; None if its last dimension is not the vocabulary."""
    if any(isinstance(argument, torch.dtype) for argument in (*arguments, *options.values())):
        return None
    try:
        view = function(torch.empty((*sizes[:-1], 1), device="meta").expand(sizes), *arguments, **options)
    except RuntimeError:  # that of real logits may be possible
        return None
    if not isinstance(view, Tensor) or view.shape[-1:] != sizes[-1:] or view.numel() == 0:
        return None
    return view if view.stride(-1) == 0 else None


def _same_rows(hidden: Tensor, view: Tensor) -> Tensor:
    """Of hidden states ``[..., D]`` the rows that a view of their logits shows."""
    hidden, width = hidden.contiguous(), hidden.shape[-1]
    strides = [width * rows for rows in view.stride()[:-1]]
    first = hidden.storage_offset() + width * int(view.storage_offset())  # hidden may be a slice itself
    return hidden.as_strided((*view.shape[:-1], width), (*strides, 1), first)
