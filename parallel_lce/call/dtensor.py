"""Refusals of DTensors. Each names the tensor to pass instead, which depends on the ranks and on the purpose of the
sharding."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist

# Words in a mesh dimension's name that tell the purpose of its sharding.
_TENSOR_PARALLEL = {"tp", "tensor"}
_FULLY_SHARDED = {"dp", "fsdp", "hsdp", "data", "shard", "replicate"}

_WHOLE = (
    "call the loss inside the forward of the module that fully_shard wraps, where its parameters are whole, "
    "or call that module's unshard() before"
)


def refuse_dtensor(name: str, value: Any, process_group: dist.ProcessGroup | None) -> None:
    """Raise ``ValueError`` for the DTensor ``value``, naming its mesh and the remedy. A weight sharded by fully_shard
    (FSDP2) must be made whole, because its ranks have different tokens. A weight sharded by tensor parallelism is
    passed as this rank's shard, because its ranks have the same tokens."""
    mesh, placements = getattr(value, "device_mesh", None), getattr(value, "placements", ())
    dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if name == "vocab_parallel_logits":
        remedy = "pass each rank's equal shard of the last dimension, the vocabulary, with all of its tokens"
        shard = len(dims) == 1 and placements[dims[0]].is_shard(value.ndim - 1)
        if shard and value.shape[-1] % value.device_mesh.size(dims[0]) == 0:
            remedy = f"pass {name}.to_local() and tp_group={name}.device_mesh.get_group({dims[0]})"
        raise ValueError(f"{name} is a DTensor: {remedy}")
    if mesh is None or not dims:
        raise ValueError(f"{name} is a DTensor; pass {name}.to_local()")
    names = [mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else "" for dim in dims]
    ranks = [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in dims]
    where = ", ".join(
        f"{placements[dim]} over {f'mesh dimension {name!r} of ' if name else ''}ranks {among}"
        for dim, name, among in zip(dims, names, ranks)
    )
    if name not in ("linear_weight", "linear_bias"):
        remedy = f"pass {name}.full_tensor()"
        if len(dims) == 1 and placements[dims[0]].is_shard(0):
            or_parts = ", or parts of one sequence with sequence_parallel=True" if name == "input" else ""
            remedy = f"pass {name}.to_local() if these ranks have different tokens{or_parts}; else {remedy}"
    elif len(dims) > 1:
        remedy = f"no single process group shards it. If fully_shard (FSDP2) did, {_WHOLE}"
    elif not placements[dims[0]].is_shard(0):
        remedy = f"only dimension 0, the vocabulary, may be sharded; pass {name}.full_tensor()"
    else:
        local = f"pass {name}.to_local()"
        entries, shards = len(value), len(ranks[0])
        if entries % shards:  # DTensor cuts as torch.chunk does
            start = min(mesh.get_local_rank(dims[0]) * -(-entries // shards), entries)
            local += f", vocab_start={start} (on this rank; the shards are uneven)"
        local += f" and process_group={name}.device_mesh.get_group({dims[0]})"
        words = set(re.findall("[a-z]+", names[0].lower()))
        if words & _TENSOR_PARALLEL:
            remedy = local
        elif words & _FULLY_SHARDED:
            remedy = f"{_WHOLE}; do not pass its local shard with that group, whose ranks have other tokens"
        elif process_group is not None and (given := dist.get_process_group_ranks(process_group)) != ranks[0]:
            remedy = f"these are not the ranks {given} of process_group. If fully_shard (FSDP2) sharded it, {_WHOLE}"
        else:
            remedy = (
                f"if these ranks have different tokens (fully_shard, FSDP2), {_WHOLE}; if they have the same tokens "
                f"(tensor parallelism), {local}"
            )
    raise ValueError(f"{name} is a DTensor, {where}: {remedy}")
