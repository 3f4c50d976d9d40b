"""What test files share: tiny blocks and tiles, backends, small problems, records of blocks and collectives."""

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import parallel_lce
from cases import Tensors, make
from parallel_lce import backends
from parallel_lce.backends import torch_logits
from parallel_lce.call import prepare
from parallel_lce.core import plan
from parallel_lce.core.options import Options
from parallel_lce.core.options import Tensors as Inputs
from parallel_lce.run import results as results_module
from parallel_lce.run import token_count
from world import Member

if backends._triton_installed() and os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import round_as_gpus_do, spare_work

    round_as_gpus_do()
    spare_work()


def alone(device: str = "cpu") -> Member:
    """The only member of no group."""
    return Member(0, 1, torch.device(device), None)


def everywhere(worlds, device: str, ranks: int, body, *arguments) -> list:
    """``body(member, *arguments)`` on every rank with this process's backend; here where there is but one."""
    return [body(alone(device), *arguments)] if ranks == 1 else over(worlds(ranks), body, *arguments)


def over(world, body, *arguments) -> list:
    """``body(member, *arguments)`` on every rank of this world, with this process's choice of a backend."""
    return world.run(_with_backend, os.environ.get(backends.VARIABLE, ""), body, *arguments)


def _with_backend(member: Member, name: str, body, *arguments):
    with chosen_backend(name):
        return body(member, *arguments)


def on_ranks(ranks: int | None = None, path_of: Callable[[dict], str | None] = lambda given: None) -> Callable:
    """Makes a test of ``body(member, **parameters)``: it passes if the body returns on each of the ``ranks``, or of as
    many as the test's parameter of this name says. The backend is that of the fixture ``backend``, if it is one of the
    parameters. ``path_of(parameters)``: a folder that the ranks import from first, or None."""

    def decorate(body: Callable) -> Callable:
        def test(worlds, **given) -> None:
            size = given.pop("ranks") if ranks is None else ranks
            over(worlds(size, path_of(given)), _run_body, body.__module__, body.__name__, given)

        _, *own = inspect.signature(body).parameters
        names = ["worlds", *(["ranks"] if ranks is None else []), *own]  # pytest gives them by name
        test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.body = body
        return test

    return decorate


def _run_body(member: Member, module: str, name: str, given: dict) -> None:
    getattr(importlib.import_module(module), name).body(member, **given)


@contextmanager
def shrunk(block_bytes: int | None = None, tile: tuple[int, int] | None = None):
    """Smaller blocks, accumulated however few rows they have, and tiles of ``(rows, columns)`` in the
    torch backend, so that a tiny problem has many of both."""
    with ExitStack() as changes:
        changes.callback(prepare.KNOWN.clear)
        patch = changes.enter_context(pytest.MonkeyPatch.context())
        if block_bytes is not None:
            patch.setattr(plan, "SMALLEST_BLOCK", block_bytes)
            patch.setattr(plan, "GATHERED_BYTES", block_bytes)
            patch.setattr(plan, "FEWEST_TOKENS", 1)
            for name in ("torch", *["triton"] * backends._triton_installed()):
                patch.setattr(backends.named(name), "FLOPS_PER_BYTE", 0)
            prepare.KNOWN.clear()
        if tile is not None:
            patch.setattr(torch_logits, "_TILE_ROWS", tile[0])
            for name in ("_TILE_BYTES", "_BYTES"):
                patch.setattr(torch_logits, name, 4 * tile[0] * tile[1])
        yield


def savable(dtype: str, device, backend: str = "") -> str:
    """fp32 for bf16 without Triton, where no exponentials of it are saved."""
    backend = backend or backends.backend_of(torch.empty(1, 1, dtype=torch.bfloat16, device=device)).NAME
    return "fp32" if dtype == "bf16" and backend == "torch" else dtype


def planned() -> plan.Plan | None:
    """The plan of the only call since ``prepare.KNOWN`` was cleared."""
    (call,) = prepare.KNOWN.values()
    return call.plan


REDUCED = {
    "save": dict(logits_budget=None, reduction="mean"),
    "recompute": dict(logits_budget=0, reduction="none"),
    "accumulate": dict(logits_budget=0, reduction="mean"),
}
"""Options of a loss for each way to spend memory, where blocks are small."""


def debug_mode():
    return mock.patch.dict(os.environ, PARALLEL_LCE_DEBUG="1")


def chosen_backend(name: str):
    """``torch``, ``triton``, or the default of an empty name."""
    return mock.patch.dict(os.environ, {backends.VARIABLE: name})


DIFFERENTIABLE = tuple(name for name in results_module.DIFFERENTIABLE if name != "selected_log_prob")
"""Statistics ``[N]`` of each token that have a gradient."""


def statistics(x, weight, target, **options):
    """Every field of ``token_statistics`` but those of selected and of the largest entries."""
    everything = dict(mean_logit=True, entropy=True, argmax=True, sum_p_squared=True)
    return parallel_lce.token_statistics(x, weight, target, **{**everything, **options})


def fields(found) -> dict[str, torch.Tensor]:
    """The statistics that were asked for, by name."""
    return {name: value for name, value in vars(found).items() if value is not None}


def small(device="cpu", N=24, V=150, D=16, dtype="fp32", **options) -> Tensors:
    """A small problem whose operands need gradients."""
    t = make(N, V, D, dtype, device, **options)
    for leaf in (t.x, t.weight, t.bias):
        if leaf is not None:
            leaf.requires_grad_()
    return t


def given(input, linear_weight, target, linear_bias=None, **options) -> tuple[Options, Inputs]:
    """Options and Tensors of these arguments, for tests below the public functions."""
    return Options("a test", **options), Inputs(input, linear_weight, target, linear_bias)


@contextmanager
def with_modules(given: dict):
    """``sys.modules`` with these, afterwards as before. What was imported of torch meanwhile stays: it cannot be
    imported twice, since it registers its names. So do modules of this package: others may hold them already."""
    before = dict(sys.modules)
    sys.modules.update(given)
    try:
        yield
    finally:
        kept = {name: module for name, module in sys.modules.items() if name.startswith(("torch.", "parallel_lce."))}
        before |= {name: module for name, module in kept.items() if name not in given}
        sys.modules.clear()
        sys.modules.update(before)


def upstream(loss: torch.Tensor) -> torch.Tensor:
    """A gradient that differs from token to token."""
    return torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype, device=loss.device).view(loss.shape)


@dataclass(frozen=True)
class Started:
    """A collective of torch.distributed that was started: what is sent, and how."""

    kind: str
    size: int
    dtype: str
    contiguous: bool
    group: dist.ProcessGroup | None
    asynchronous: bool


_KINDS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}


class _Collectives(TorchDispatchMode):
    """Each collective, of whatever kind and by whichever function, as c10d is given it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Started] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.found.append(_started(func._schema, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _started(schema, args: tuple, kwargs: dict) -> Started:
    given = {a.name: a.default_value for a in schema.arguments}
    given |= dict(zip(given, args)) | kwargs
    name = schema.name.partition("::")[2]
    sent = given["tensors"][0] if "tensors" in given else given.get("input_tensor", torch.empty(0))
    group = given.get("process_group")
    return Started(
        _KINDS.get(name, name),
        sent.numel(),
        str(sent.dtype).removeprefix("torch."),
        sent.is_contiguous(),
        None if group is None else dist.ProcessGroup.unbox(group),
        bool(given.get("async_op", given.get("asyncOp"))),
    )


@contextmanager
def started():
    """Yields a list of the collectives that this rank starts, in order."""
    with _Collectives() as mode:
        yield mode.found


@contextmanager
def unchecked():
    """A target outside the vocabulary and a wrong count of tokens are no errors on a CPU, as on a GPU."""
    with mock.patch.object(prepare, "check_target"), mock.patch.object(token_count, "check_target"):
        with mock.patch.object(token_count, "_check_count"):
            yield


def ran(*command: object, timeout: float = 300, **options) -> subprocess.CompletedProcess:
    """The end of a command on CPUs, whose environment has nothing of a launcher or the user's shell, but ``env``."""
    unset = ("PYTHONPATH", "PYTHONHOME", "PYTHON", "CDPATH", "RANK", "WORLD_SIZE", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {"PARALLEL_LCE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    options["env"] = environment | options.get("env", {})
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, **options)


@contextmanager
def watched_backwards(backend, before: Callable):
    """Calls ``before(task)`` before each block's backward."""
    original = backend.block_backward

    def block_backward(task):
        before(task)
        return original(task)

    with mock.patch.object(backend, "block_backward", block_backward):
        yield


@contextmanager
def counted_forwards(backend):
    """Yields a list of the number of rows of each block that the backend projects."""
    original, rows = backend.block_forward, []
    with mock.patch.object(backend, "block_forward", lambda task: rows.append(len(task.x)) or original(task)):
        yield rows
