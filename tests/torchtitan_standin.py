"""What parallel_lce.torchtitan uses of torchtitan 0.3.0 and of spmd_types, of the same contract, in few lines."""

import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tools import with_modules

IGNORE_INDEX = -100


class BaseLoss:
    @dataclass(kw_only=True)
    class Config:
        def build(self, **given):
            return self._owner(self, **given)

    def __init__(self, config, *, compile_config=None) -> None: ...

    def __init_subclass__(cls) -> None:
        if "Config" not in vars(cls):
            cls.Config = type("Config", (cls.Config,), {"__qualname__": f"{cls.__qualname__}.Config"})
        cls.Config._owner = cls

    def _maybe_compile(self, compile_config) -> None: ...


def cross_entropy_loss(logits, labels, *, global_vocab_size=None):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


class CrossEntropyLoss(BaseLoss):
    @dataclass(kw_only=True)
    class Config(BaseLoss.Config):
        global_vocab_size: int | None = None

    def __init__(self, config, *, compile_config=None) -> None:
        self.fn = cross_entropy_loss

    def __call__(self, logits, labels, count, **_):
        return self.fn(logits, labels) / count, {}


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, gradient, loss):
        ctx.gradient = gradient
        return loss.detach()

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient, None, None


class ChunkedLossWrapper(BaseLoss):
    @dataclass(kw_only=True)
    class Config(BaseLoss.Config):
        num_chunks: int = 8
        loss_fn: Any = field(default_factory=CrossEntropyLoss.Config)

    def __init__(self, config, *, compile_config=None) -> None:
        self.loss_fn, self.lm_head = config.loss_fn.build(compile_config=compile_config), None

    def set_lm_head(self, lm_head) -> None:
        self.lm_head = lm_head

    def __call__(self, pred, labels, count=None, **inputs):
        hidden = pred.detach().requires_grad_()
        loss, metrics = self.loss_fn(self.lm_head(hidden), labels, count, **inputs)
        loss.backward()
        return self._gradient_backprop(pred, hidden.grad, loss.detach(), self.lm_head, False), metrics

    @staticmethod
    def _gradient_backprop(hidden, gradient, loss, lm_head, fully_sharded):
        return _Bridge.apply(hidden, gradient, loss)


def derive(source, target, **deltas):
    return target(**{f.name: getattr(source, f.name) for f in fields(source)} | deltas)


@contextmanager
def installed(mesh=None):
    """Yields parallel_lce.torchtitan, imported from this module. ``mesh``: that of plain tensors, with a "tp"."""
    own = SimpleNamespace(
        **globals(), override=lambda **_: lambda factory: factory,
        current_spmd_mesh=lambda: mesh, spmd_mesh_size=lambda name: 1 if mesh is None else mesh[name].size(),
    )  # fmt: skip
    names = "config", "config.override", "distributed.spmd_types"
    loss = {"torchtitan.components.loss": sys.modules[__name__]}
    with with_modules({f"torchtitan.{name}": own for name in names} | loss):
        try:
            yield importlib.import_module("parallel_lce.torchtitan")
        finally:
            sys.modules.pop("parallel_lce.torchtitan", None)
