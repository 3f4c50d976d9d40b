"""What several test files share: tiny blocks and tiles, backends, small problems, a record of
collectives."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import MISSING, fields

import torch
import torch.distributed as dist

import parallel_lce
from cases import Case, Tensors, make
from parallel_lce import backends, collectives, plan
from parallel_lce.backends import eager
from parallel_lce.checks import Arguments
from parallel_lce.grad_buffers import GradBuffer
from world import Member

_TRITON = backends._triton_installed()
if _TRITON and os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import round_as_gpus_do

    round_as_gpus_do()


def alone(device: str = "cpu") -> Member:
    """The only member of no group."""
    return Member(0, 1, torch.device(device), None)


def everywhere(worlds, device: str, ranks: int, body, *arguments) -> list:
    """``body(member, *arguments)`` on every rank with this process's choice of a backend; on this
    process where there is but one."""
    if ranks == 1:
        return [body(alone(device), *arguments)]
    chosen = os.environ.get(backends.VARIABLE, "")
    return worlds(ranks).run(_with_backend, chosen, body, *arguments)


def _with_backend(member: Member, name: str, body, *arguments):
    with chosen_backend(name):
        return body(member, *arguments)


@contextmanager
def shrunk(block_bytes: int | None = None, tile: tuple[int, int] | None = None):
    """Smaller blocks, accumulated however few rows they have, and tiles of ``(rows, columns)`` in the
    torch backend, so that a tiny problem has many of both."""
    modules = [backends.named(name) for name in ("eager", "triton") if name == "eager" or _TRITON]
    saved = plan.SMALLEST_BLOCK, plan.GATHERED_BYTES, eager._CPU_TILE, eager._CUDA_TILE
    accumulated = [module.SMALLEST_ACCUMULATED for module in modules]
    if block_bytes is not None:
        plan.SMALLEST_BLOCK = plan.GATHERED_BYTES = block_bytes
        plan.cached_plan.cache_clear()
        for module in modules:
            module.SMALLEST_ACCUMULATED = 1
    if tile is not None:
        eager._CPU_TILE = eager._CUDA_TILE = tile
    try:
        yield
    finally:
        plan.SMALLEST_BLOCK, plan.GATHERED_BYTES, eager._CPU_TILE, eager._CUDA_TILE = saved
        plan.cached_plan.cache_clear()
        for module, rows in zip(modules, accumulated):
            module.SMALLEST_ACCUMULATED = rows


REDUCED = {
    "save": dict(logits_budget=None, reduction="mean"),
    "recompute": dict(logits_budget=0, reduction="none"),
    "accumulate": dict(logits_budget=0, reduction="mean"),
}
"""Options of a loss for each way to spend memory, where blocks are small."""


@contextmanager
def _environment(name: str, value: str):
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def debug_mode():
    return _environment("PARALLEL_LCE_DEBUG", "1")


def chosen_backend(name: str):
    """``torch``, ``triton``, or the default of an empty name."""
    return _environment(backends.VARIABLE, name)


def statistics(x, weight, target, **options):
    """Every field of ``token_statistics``."""
    everything = dict(mean_logit=True, expected_logit=True, argmax=True)
    return parallel_lce.token_statistics(x, weight, target, **{**everything, **options})


def small(device="cpu", N=24, V=150, D=16, dtype="fp32", ignored="none", **options) -> Tensors:
    """A small problem whose operands need gradients."""
    t = make(Case(N, V, D, dtype, ignored=ignored, **options), device)
    for leaf in (t.x, t.weight, t.bias):
        if leaf is not None:
            leaf.requires_grad_()
    return t


def arguments_of(input, linear_weight, target, **options) -> Arguments:
    """What the public functions make of their arguments and defaults, for what is beneath them."""
    return Arguments(**_DEFAULTS | dict(input=input, linear_weight=linear_weight, target=target) | options)


_DEFAULTS = {f.name: None for f in fields(Arguments) if f.default is MISSING}
_DEFAULTS |= dict(logit_scale=1.0, sequence_parallel=False)


def field_gradients(found, names, leaves):
    """Gradients of a sum of fields, each with a weight of its own."""
    total = sum(getattr(found, name).sum() * (i + 1) for i, name in enumerate(names))
    return torch.autograd.grad(total, leaves)


_OTHERS = (
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather_single",
    "reduce_scatter_single",
)


@contextmanager
def recorded(group):
    """Yields a list of what this rank starts, in order:

    ``(kind, elements sent, dtype, whether it is on ``group``)`` per collective, and ``("dW", rows)``
    whenever a window of a weight's gradient is finished.
    """
    events: list[tuple] = []

    def watch(kind, original, sent):
        def call(*arguments, **options):
            tensor = arguments[sent] if len(arguments) > sent else None
            size = tensor.numel() if isinstance(tensor, torch.Tensor) else None
            dtype = str(tensor.dtype).removeprefix("torch.") if size is not None else None
            events.append((kind, size, dtype, options.get("group") is group))
            return original(*arguments, **options)

        return call

    patched = [
        (collectives, "_all_gather", watch("all_gather", collectives._all_gather, 1)),
        (collectives, "_reduce_scatter", watch("reduce_scatter", collectives._reduce_scatter, 1)),
        (dist, "all_reduce", watch("all_reduce", dist.all_reduce, 0)),
        *((dist, n, watch(n, getattr(dist, n), 0)) for n in _OTHERS if hasattr(dist, n)),
    ]
    close = GradBuffer.close

    def watched_close(self, start, stop, total):
        if total.dim() == 2:
            events.append(("dW", stop - start))
        return close(self, start, stop, total)

    patched.append((GradBuffer, "close", watched_close))
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, replacement in patched:
        setattr(owner, name, replacement)
    try:
        yield events
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)


N, V, D = 6, 10, 4
"""Sizes of :func:`good`."""


def good(device="cpu") -> dict:
    """The arguments of a call that is right; tests change one thing."""
    generator = torch.Generator().manual_seed(0)
    return dict(
        input=torch.randn(N, D, generator=generator).to(device),
        linear_weight=torch.randn(V, D, generator=generator).to(device),
        target=torch.randint(V, (N,), generator=generator).to(device),
    )


def call(arguments: dict, function=parallel_lce.linear_cross_entropy):
    arguments = dict(arguments)
    positional = [arguments.pop(name) for name in ("input", "linear_weight", "target")]
    return function(*positional, **arguments)


def words_of_error(use) -> str:
    """Of a RuntimeError; a missing one does not end the process, as pytest.raises would."""
    try:
        use()
    except RuntimeError as error:
        return str(error)
    return "no error"
