"""The loss under DDP, FSDP1 and FSDP2: inside and outside the forward of the wrapped module, with resharding, gradient
accumulation and activation checkpointing."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cases import normal
from parallel_lce import LinearCrossEntropy
from tools import on_ranks
from world import mesh_of

V, D, N = 40, 16, 12


class Model(nn.Module):
    """A layer, an output layer that may be tied to the embedding, and the loss. Without targets: hidden states."""

    def __init__(self, device, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        own = dict(device=device, dtype=torch.float64)
        self.embedding = nn.Embedding(V, D, **own)
        self.body = nn.Linear(D, D, bias=False, **own)
        self.head = nn.Linear(D, V, bias=not tied, **own)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss, self.checkpointed = LinearCrossEntropy(), checkpointed
        for seed, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(normal(*parameter.shape, seed=seed) / 4)

    def of(self, hidden, target):
        return self.loss(hidden, self.head.weight, target, linear_bias=self.head.bias)

    def forward(self, ids, target=None):
        hidden = torch.tanh(self.body(self.embedding(ids)))
        if target is None:
            return hidden
        if self.checkpointed:
            return checkpoint(self.of, hidden, target, use_reentrant=False)
        return self.of(hidden, target)


def wrapped(how: str, model: nn.Module, member) -> nn.Module:
    """``model`` in one of :data:`WRAPPERS`, over all ranks."""
    if how == "DDP":
        return DistributedDataParallel(model, process_group=member.group)
    if how == "FSDP1":
        options = dict(process_group=member.group, use_orig_params=True, device_id=member.device)
        return FullyShardedDataParallel(model, **options)
    mesh = mesh_of(member.device.type, (member.ranks,))
    return fully_shard(model, mesh=mesh, reshard_after_forward="resharded" in how)


def gradients(inner: Model, model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients of ``inner`` in the wrapper ``model``, by the names of its parameters."""
    fsdp1 = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True) if fsdp1 else nullcontext():
        found = {name: p.grad for name, p in inner.named_parameters()}
        return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found.items()}


def batch(rank: int, step: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[N]`` and targets ``[N]``, others on each rank and in each step."""
    ids = torch.arange(N, device=device) * 7 + 13 * rank + 29 * step
    target = (ids * 3 + 1) % V
    target[0] = -100
    return ids % V, target


def expected(member, steps: int, **options) -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses, and the mean over the ranks of the gradients of their sum, from all logits."""
    model, losses = Model(member.device, **options), []
    total = torch.zeros((), dtype=torch.float64, device=member.device)
    for rank in range(member.ranks):
        for step in range(steps):
            ids, target = batch(rank, step, member.device)
            loss = F.cross_entropy(model.head(model(ids)), target)
            total = total + loss / member.ranks
            if rank == member.rank:
                losses.append(loss.item())
    total.backward()
    return losses, {name: p.grad for name, p in model.named_parameters()}


def without_sync(how: str, model: nn.Module, last: bool):
    if how.startswith("FSDP2"):
        model.set_requires_gradient_sync(last)
        return nullcontext()
    return nullcontext() if last else model.no_sync()


def check(member, step, inner: Model, model: nn.Module, steps: int = 1, how: str = "", **options) -> None:
    """``step(ids, target)`` gives this rank's losses; after ``steps`` of them, of which the last one alone reduces
    gradients if ``how`` is a wrapper, the gradients are right."""
    losses, wanted = expected(member, steps, **options)
    for number in range(steps):
        with without_sync(how, model, number == steps - 1) if how else nullcontext():
            loss = step(*batch(member.rank, number, member.device))
            loss.backward()
        assert loss.item() == pytest.approx(losses[number], rel=1e-12)
    found = gradients(inner, model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name])


WRAPPERS = "DDP", "FSDP1", "FSDP2", "FSDP2, resharded"
CALLS = [
    *((how, dict(tied=True), False) for how in WRAPPERS),
    *((how, dict(checkpointed=True), False) for how in WRAPPERS),
    # The root module of FSDP2 keeps its parameters whole from forward to backward.
    *((how, {}, True) for how in ("DDP", "FSDP2")),
]


@pytest.mark.parametrize(("how", "options", "outside"), CALLS, ids=str)
@on_ranks(2)
def test_gradients_are_right_inside_and_outside_the_module(member, how, options, outside):
    inner = Model(member.device, **options)
    model = wrapped(how, inner, member)
    step = (lambda ids, target: inner.of(model(ids), target)) if outside else model
    check(member, step, inner, model, 2, how, tied=options.get("tied", False))


@on_ranks(2)
def test_sharded_weights_are_refused_outside_the_module(member):
    """Before any collective. With FSDP2 the message's advice, unshard, gives the right gradients."""
    for how, message in (("FSDP1", "FSDP1 has flattened"), ("FSDP2, resharded", r"call that module's unshard\(\)")):
        inner = Model(member.device)
        model = wrapped(how, inner, member)
        ids, target = batch(member.rank, 0, member.device)
        hidden = model(ids)
        with pytest.raises(ValueError, match=message):
            inner.of(hidden, target)
    model.unshard()
    check(member, lambda *_: inner.of(hidden, target), inner, model)
