"""What several test files share: tiny blocks and tiles, a record of collectives, debug mode."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist

from parallel_lce import parallel, plan
from parallel_lce.backends import eager
from parallel_lce.weight_grad import ShardGradient
from world import Member


def alone(device: str = "cpu") -> Member:
    """The only member of no group."""
    return Member(0, 1, torch.device(device), None)


def everywhere(worlds, device: str, ranks: int, body, *arguments) -> list:
    """``body(member, *arguments)`` on every rank, on this process where there is but one."""
    if ranks == 1:
        return [body(alone(device), *arguments)]
    return worlds(ranks).run(body, *arguments)


@contextmanager
def shrunk(block_bytes: int | None = None, tile: tuple[int, int] | None = None):
    """Smaller blocks, and tiles of ``(rows, columns)``, so that a tiny problem has many of both."""
    saved = plan.SMALLEST_BLOCK, eager._CPU_TILE, eager._CUDA_TILE
    if block_bytes is not None:
        plan.SMALLEST_BLOCK = block_bytes
    if tile is not None:
        eager._CPU_TILE = eager._CUDA_TILE = tile
    try:
        yield
    finally:
        plan.SMALLEST_BLOCK, eager._CPU_TILE, eager._CUDA_TILE = saved


@contextmanager
def debug_mode():
    before = os.environ.get("PARALLEL_LCE_DEBUG")
    os.environ["PARALLEL_LCE_DEBUG"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PARALLEL_LCE_DEBUG"]
        else:
            os.environ["PARALLEL_LCE_DEBUG"] = before


_OTHERS = (
    "all_gather", "all_gather_object", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "monitored_barrier", "recv",
    "reduce", "reduce_scatter", "scatter", "send", "all_gather_coalesced", "all_reduce_coalesced",
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single",
)  # fmt: skip


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
        (parallel, "_all_gather", watch("all_gather", parallel._all_gather, 1)),
        (parallel, "_reduce_scatter", watch("reduce_scatter", parallel._reduce_scatter, 1)),
        (dist, "all_reduce", watch("all_reduce", dist.all_reduce, 0)),
        *((dist, n, watch(n, getattr(dist, n), 0)) for n in _OTHERS if hasattr(dist, n)),
    ]
    close = ShardGradient.close

    def watched_close(self, start, stop, total):
        if total.dim() == 2:
            events.append(("dW", stop - start))
        return close(self, start, stop, total)

    patched.append((ShardGradient, "close", watched_close))
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, replacement in patched:
        setattr(owner, name, replacement)
    try:
        yield events
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)
