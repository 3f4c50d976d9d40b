"""What parallel_lce.torchtitan uses of torchtitan 0.3.0 and of spmd_types, of the same contract, in few lines."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import torch
from torch import nn

IGNORE_INDEX = -100


class _Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **given):
            return self._owner(self, **given)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config._owner = cls


_Configurable.Config._owner = None


@dataclass(kw_only=True)
class CompileConfig:
    enable: bool = False
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    backend: str = "inductor"


class BaseLoss(_Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(_Configurable.Config):
        pass

    def __init__(self, config, *, compile_config: CompileConfig | None = None) -> None:
        self.fn = None

    def _maybe_compile(self, compile_config: CompileConfig | None) -> None:
        if compile_config and compile_config.enable and "loss" in compile_config.components:
            self.fn = torch.compile(self.fn, backend=compile_config.backend)


class CrossEntropyLoss(BaseLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        global_vocab_size: int | None = None

    def __init__(self, config, *, compile_config=None) -> None:
        self.global_vocab_size = config.global_vocab_size


class MSELoss(BaseLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass


def compute_logprobs(logits, labels, *, return_entropy: bool = False):
    """Of all entries of the vocabulary: without shards."""
    log_p = torch.log_softmax(logits, -1)
    chosen = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(labels == IGNORE_INDEX, 0.0)
    return (chosen, -(log_p.exp() * log_p).sum(-1).detach()) if return_entropy else chosen


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, gradient, loss):
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx, _):
        return *ctx.saved_tensors, None, None


class ChunkedLossWrapper(BaseLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        num_chunks: int = 8
        loss_fn: Any = field(default_factory=CrossEntropyLoss.Config)

    def __init__(self, config, *, compile_config=None) -> None:
        self.num_chunks = config.num_chunks
        self.loss_fn = config.loss_fn.build(compile_config=compile_config)
        self.lm_head: nn.Module | None = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        self.lm_head = lm_head

    @staticmethod
    def _gradient_backprop(hidden, gradient, loss, lm_head, fully_sharded):
        return _Bridge.apply(hidden, gradient, loss)


def override(*, target, description=""):
    def decorate(factory):
        factory.target = target
        return factory

    return decorate


def derive(source, target, **deltas):
    shared = {f.name for f in fields(source)} & {f.name for f in fields(target)} - {*deltas}
    return target(**{name: getattr(source, name) for name in shared}, **deltas)


_meshes: list = []


def set_spmd_backend(name: str) -> None:
    pass


@contextmanager
def set_current_spmd_mesh(mesh):
    _meshes.append(mesh)
    try:
        yield
    finally:
        _meshes.pop()


def current_spmd_mesh():
    return _meshes[-1] if _meshes else None


def spmd_mesh_size(name: str) -> int:
    mesh = current_spmd_mesh()
    return mesh.size(mesh.mesh_dim_names.index(name)) if mesh and name in mesh.mesh_dim_names else 1


_CONTENTS = {
    "torchtitan.components.loss": (
        IGNORE_INDEX, BaseLoss, CrossEntropyLoss, MSELoss, ChunkedLossWrapper, compute_logprobs
    ),
    "torchtitan.config": (CompileConfig,),
    "torchtitan.config.override": (override, derive),
    "torchtitan.distributed.spmd_types": (set_current_spmd_mesh, current_spmd_mesh, spmd_mesh_size),
    "torchtitan.distributed.utils": (set_spmd_backend,),
    "spmd_types": (),
}  # fmt: skip


@contextmanager
def installed():
    """These modules are importable, and parallel_lce.torchtitan is one that has imported them."""
    modules = {}
    for name, contents in _CONTENTS.items():
        for part in (name[:i] for i, letter in enumerate(name) if letter == "."):
            modules.setdefault(part, types.ModuleType(part))
        modules[name] = types.ModuleType(name)
        for thing in contents:
            setattr(modules[name], getattr(thing, "__name__", "IGNORE_INDEX"), thing)
    spmd = modules["spmd_types"]
    spmd.R, spmd.I, spmd.P = "R", "I", "P"
    spmd.S = lambda dim: f"S({dim})"
    spmd.is_type_checking, spmd.no_typecheck = lambda: False, nullcontext
    ours = "parallel_lce.torchtitan"
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop(ours, None)
        try:
            yield
        finally:
            vars(sys.modules["parallel_lce"]).pop("torchtitan", None)
