"""Logits that Megatron's model passes from its output layer to its loss without making them."""

from __future__ import annotations

import numbers
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def keep_autograd_gradient(weight: Tensor) -> None:
    """Have Megatron's DDP add what autograd delivers for ``weight`` to its main_grad.

    The fused loss adds its dW to main_grad itself and says so in ``grad_added_to_main_grad``, after
    which DDP drops autograd's gradient, that of real logits of the same weight included, unless the
    weight has Megatron's ``zero_out_wgrad``.
    """
    if torch.is_grad_enabled() and weight.requires_grad:
        weight.zero_out_wgrad = True


def _refuse_in_place(name: str) -> None:
    raise RuntimeError(
        f"parallel_lce: in-place {name} on the output layer's result would be lost, since the loss "
        "does not read the logits: change the hidden states or the loss instead, or train without "
        "cross_entropy_fusion_impl='parallel_lce'"
    )


@dataclass(frozen=True, eq=False)
class LazyLogits:
    """The logits ``[s, b, V/P]`` that ``layer`` would make of ``hidden``.

    The loss takes the parts; any other use (a method, an operator, an index, a torch function) makes
    the real logits as the stock layer does, and one that would change them in place is refused: the
    loss would not see the change. ``sequence_parallel`` is the layer's at the time of the call.
    ``weight`` is the shared one that was passed to the layer, or None for the layer's own.
    """

    layer: torch.nn.Module
    hidden: Tensor
    weight: Tensor | None
    sequence_parallel: bool
    stock_forward: Callable[..., tuple[Tensor, Tensor | None]]
    scale: float = 1.0

    def materialize(self, use: str) -> Tensor:
        """The real logits; in training one warning names the ``use`` that wants them."""
        if torch.is_grad_enabled() and self.layer.training:
            warnings.warn(
                f"parallel_lce: {use} of the output layer's result makes the whole logits "
                f"{list(self.hidden.shape[:-1])} x {self.layer.output_size_per_partition} per rank "
                "during training; without it they would not exist",
                stacklevel=3,
            )
        keep_autograd_gradient(self.layer.weight if self.weight is None else self.weight)
        before, self.layer.sequence_parallel = self.layer.sequence_parallel, self.sequence_parallel
        try:
            logits, _ = self.stock_forward(self.hidden, weight=self.weight)
        finally:
            self.layer.sequence_parallel = before
        return logits if self.scale == 1.0 else logits * self.scale

    def __mul__(self, factor: object) -> LazyLogits | Tensor:
        if isinstance(factor, numbers.Real):
            return replace(self, scale=self.scale * float(factor))
        return self.materialize("multiplication") * factor

    __rmul__ = __mul__

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_"):
            _refuse_in_place(name)
        return getattr(self.materialize(f"attribute {name!r}"), name)

    def __getitem__(self, index):
        return self.materialize("indexing")[index]

    def __setitem__(self, index, value):
        _refuse_in_place("assignment")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        if isinstance((kwargs or {}).get("out"), cls) or (
            name.endswith("_") and not name.startswith("__") and isinstance(args[0], cls)
        ):
            _refuse_in_place(name)
        use = f"torch function {name!r}"

        def real(value):
            if isinstance(value, cls):
                return value.materialize(use)
            return type(value)(map(real, value)) if isinstance(value, (list, tuple)) else value

        return function(*map(real, args), **{k: real(v) for k, v in (kwargs or {}).items()})


def _add_operators() -> None:
    """Python looks operators up on the class, past ``__getattr__``."""
    comparisons = ("lt", "le", "gt", "ge", "eq", "ne")
    arithmetic = ("add", "sub", "truediv", "floordiv", "mod", "pow")

    def add(name: str, function: Callable) -> None:
        def call(self, *others):
            return function(self.materialize(f"operator {name!r}"), *others)

        setattr(LazyLogits, name, call)

    for name in (*comparisons, *arithmetic, "neg", "abs"):
        add(f"__{name}__", getattr(operator, name))
    for name in arithmetic:
        add(f"__r{name}__", lambda z, other, of=getattr(operator, name): of(other, z))
    add("__len__", len)


_add_operators()
