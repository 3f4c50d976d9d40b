"""Models in PyTorch's data-parallel wrappers, and their whole gradients."""

from contextlib import nullcontext

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from world import Member, mesh_of

WRAPPERS = ("DDP", "FSDP1", "FSDP2", "FSDP2, resharded")


def wrapped(how: str, model: nn.Module, member: Member, **options) -> nn.Module:
    """``model`` in one of :data:`WRAPPERS`, over all ranks, with ``options`` of FSDP."""
    if how == "DDP":
        return DistributedDataParallel(model, process_group=member.group)
    if how == "FSDP1":
        options |= dict(process_group=member.group, use_orig_params=True, device_id=member.device)
        return FullyShardedDataParallel(model, **options)
    mesh = mesh_of(member.device.type, (member.ranks,))
    return fully_shard(model, mesh=mesh, reshard_after_forward="resharded" in how, **options)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _summoned(model: nn.Module | None, **options):
    fsdp1 = isinstance(model, FullyShardedDataParallel)
    return FullyShardedDataParallel.summon_full_params(model, **options) if fsdp1 else nullcontext()


def gradients(inner: nn.Module, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Whole gradients of ``inner``, by the names of its parameters. ``model``: the wrapper around it."""
    with _summoned(model, with_grads=True):
        return {name: whole(p.grad).clone() for name, p in inner.named_parameters()}


def parameters(inner: nn.Module, model: nn.Module) -> list[Tensor]:
    """Copies of the whole parameters of ``inner``, in the wrapper ``model``."""
    with _summoned(model):
        return [whole(p.detach()).clone() for p in inner.parameters()]
