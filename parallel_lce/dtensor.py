"""Refusals of DTensors. They say what to pass instead, which depends on who sharded them and over which ranks."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Words of a mesh dimension's name.
_TENSOR_PARALLEL = {"tp", "tensor"}
_FULLY_SHARDED = {"dp", "fsdp", "hsdp", "data", "shard", "replicate"}


def refuse_dtensor(name: str, value: Tensor, process_group: dist.ProcessGroup | None) -> None:
    """Raise ``ValueError`` for the DTensor ``value``, naming its mesh and the remedy.

    A weight sharded by fully_shard (FSDP2) must be made whole, because its ranks have different tokens. A weight
    sharded by tensor parallelism is passed as this rank's shard, because its ranks have the same tokens.
    """
    mesh, placements = getattr(value, "device_mesh", None), getattr(value, "placements", ())
    sharding = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if name == "vocab_parallel_logits":
        raise ValueError(f"{name} is a DTensor: {_remedy_of_logits(name, value, sharding)}")
    if mesh is None or not sharding:
        raise ValueError(f"{name} is a DTensor; pass {name}.to_local()")
    where = ", ".join(f"{placements[dim]} over {_described(mesh, dim)}" for dim in sharding)
    refusal = f"{name} is a DTensor, {where}: "
    if name not in ("linear_weight", "linear_bias"):
        local = ""
        if len(sharding) == 1 and placements[sharding[0]].is_shard(0):
            parts = ", or parts of one sequence with sequence_parallel=True" if name == "input" else ""
            local = f"pass {name}.to_local() if these ranks have different tokens{parts}; else "
        raise ValueError(f"{refusal}{local}pass {name}.full_tensor()")
    whole = (
        "call the loss inside the forward of the module that fully_shard wraps, where its parameters are whole, "
        "or call that module's unshard() before"
    )
    if len(sharding) > 1:
        raise ValueError(f"{refusal}no single process group shards it. If fully_shard (FSDP2) did, {whole}")
    if not placements[sharding[0]].is_shard(0):
        raise ValueError(f"{refusal}only dimension 0, the vocabulary, may be sharded; pass {name}.full_tensor()")
    local = f"pass {name}.to_local()"
    entries, ranks = value.shape[0], mesh.size(sharding[0])
    if entries % ranks:  # DTensor cuts as torch.chunk does
        start = min(mesh.get_local_rank(sharding[0]) * -(-entries // ranks), entries)
        local += f", vocab_start={start} (on this rank; the shards are uneven)"
    local += f" and process_group={name}.device_mesh.get_group({sharding[0]})"
    words = set(re.findall("[a-z]+", _name(mesh, sharding[0]).lower()))
    if words & _TENSOR_PARALLEL:
        raise ValueError(refusal + local)
    if words & _FULLY_SHARDED:
        raise ValueError(
            f"{refusal}{whole}; do not pass its local shard with that group, whose ranks have other tokens"
        )
    if process_group is not None and _ranks(process_group) != _ranks(mesh.get_group(sharding[0])):
        raise ValueError(
            f"{refusal}these are not the ranks {_ranks(process_group)} of process_group. If fully_shard (FSDP2) "
            f"sharded it, {whole}"
        )
    raise ValueError(
        f"{refusal}if these ranks have different tokens (fully_shard, FSDP2), {whole}; if they have the same tokens "
        f"(tensor parallelism), {local}"
    )


def _remedy_of_logits(name: str, value: Any, sharding: list[int]) -> str:
    """What to pass instead of the DTensor ``value``.

    Each rank's logits must be an equal shard of the last dimension, the vocabulary.
    """
    equal = len(sharding) == 1 and value.placements[sharding[0]].is_shard(value.ndim - 1)
    if equal and value.shape[-1] % value.device_mesh.size(sharding[0]) == 0:
        return f"pass {name}.to_local() and tp_group={name}.device_mesh.get_group({sharding[0]})"
    return "pass each rank's equal shard of the last dimension, the vocabulary, with all of its tokens"


def _name(mesh, dim: int) -> str:
    return (mesh.mesh_dim_names or [""] * mesh.ndim)[dim]


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _described(mesh, dim: int) -> str:
    name = _name(mesh, dim)
    return f"{f'mesh dimension {name!r} of ' if name else ''}ranks {_ranks(mesh.get_group(dim))}"
