"""The loss under DDP, FSDP1 and FSDP2: inside and outside the forward of the wrapped module, with resharding, mixed
precision, gradient accumulation, activation checkpointing and initialisation on the meta device."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cases import normal
from on_ranks import on_ranks
from parallel_lce import LinearCrossEntropy
from world import mesh_of

V, D, N = 40, 16, 12
WRAPPERS = ["ddp", "fsdp1", "fsdp2", "fsdp2 reshard"]


class Model(nn.Module):
    """A layer, an output layer that may be tied to the embedding, and the loss. Without targets: hidden states."""

    def __init__(self, device, dtype=torch.float64, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D, device=device, dtype=dtype)
        self.body = nn.Linear(D, D, bias=False, device=device, dtype=dtype)
        self.head = nn.Linear(D, V, bias=not tied, device=device, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss, self.checkpointed = LinearCrossEntropy(), checkpointed

    def reset(self) -> None:
        """The same values on every rank, whatever shards them."""
        for seed, parameter in enumerate(self.parameters()):
            value = normal(*parameter.shape, seed=seed).to(parameter.device, parameter.dtype) / 4
            if isinstance(parameter, DTensor):
                value = DTensor.from_local(value, parameter.device_mesh).redistribute(placements=parameter.placements)
            with torch.no_grad():
                parameter.copy_(value)

    def of(self, hidden, target):
        return self.loss(hidden, self.head.weight, target, linear_bias=self.head.bias)

    def forward(self, ids, target=None):
        hidden = torch.tanh(self.body(self.embedding(ids)))
        if target is None:
            return hidden
        if self.checkpointed:
            return checkpoint(self.of, hidden, target, use_reentrant=False)
        return self.of(hidden, target)


def batch(rank: int, step: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[N]`` and targets ``[N]``, others on each rank and in each step."""
    ids = torch.arange(N, device=device) * 7 + 13 * rank + 29 * step
    target = (ids * 3 + 1) % V
    target[0] = -100
    return ids % V, target


def expected(member, steps: int, **options) -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses, and the mean over the ranks of the gradients of their sum, from all logits."""
    model, losses = Model(member.device, **options), []
    model.reset()
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


def wrapped(kind: str, model: Model, member) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=member.group)
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model, process_group=member.group, use_orig_params=True, device_id=member.device
        )
    mesh = mesh_of(member.device.type, (member.ranks,))
    return fully_shard(model, mesh=mesh, reshard_after_forward="reshard" in kind)


def gradients(kind: str, model: nn.Module) -> dict[str, torch.Tensor]:
    if kind == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
    else:
        found = {name: p.grad for name, p in model.named_parameters()}
    found = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    return {name.removeprefix("module.").removeprefix("_fsdp_wrapped_module."): g for name, g in found.items()}


def without_sync(kind: str, model: nn.Module, last: bool):
    if kind.startswith("fsdp2"):
        model.set_requires_gradient_sync(last)
        return nullcontext()
    return nullcontext() if last else model.no_sync()


def check(member, kind, steps=1, outside=False, **options) -> None:
    checkpointed = options.pop("checkpointed", False)
    losses, wanted = expected(member, steps, **options)
    inner = Model(member.device, checkpointed=checkpointed, **options)
    inner.reset()
    model = wrapped(kind, inner, member)
    for step in range(steps):
        ids, target = batch(member.rank, step, member.device)
        with without_sync(kind, model, step == steps - 1):
            loss = inner.of(model(ids), target) if outside else model(ids, target)
            loss.backward()
        assert loss.item() == pytest.approx(losses[step], rel=1e-12)
    found = gradients(kind, model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name])


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_inside_the_module(member, kind, tied):
    """Two steps, the first without a reduction of gradients."""
    check(member, kind, steps=2, tied=tied)


@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(2)
def test_activation_checkpointing(member, kind):
    check(member, kind, checkpointed=True)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@on_ranks(2)
def test_outside_the_module(member, kind):
    """The root module of FSDP2 keeps its parameters whole from forward to backward."""
    check(member, kind, steps=2, outside=True)


@on_ranks(2)
def test_sharded_weights_outside_the_module(member):
    """They are refused, before any collective. With FSDP2 the message's advice, unshard, gives the right gradients."""
    for kind, message in (("fsdp2 reshard", r"call that module's unshard\(\)"), ("fsdp1", "FSDP1 has flattened")):
        inner = Model(member.device)
        inner.reset()
        model = wrapped(kind, inner, member)
        ids, target = batch(member.rank, 0, member.device)
        hidden = model(ids)
        with pytest.raises(ValueError, match=message):
            inner.of(hidden, target)
        if kind == "fsdp1":
            continue
        model.unshard()
        loss = inner.of(hidden, target)
        loss.backward()
        losses, wanted = expected(member, 1)
        assert loss.item() == pytest.approx(losses[0], rel=1e-12)
        for name, gradient in gradients(kind, model).items():
            torch.testing.assert_close(gradient, wanted[name])


@on_ranks(2)
def test_an_output_layer_wrapped_on_its_own(member):
    """FSDP2: it is refused as long as nobody makes the weight whole, which its own forward would do."""
    losses, wanted = expected(member, 2)
    inner = Model(member.device)
    inner.reset()
    mesh = mesh_of(member.device.type, (member.ranks,))
    fully_shard(inner.head, mesh=mesh)
    model = fully_shard(inner, mesh=mesh)
    with pytest.raises(ValueError, match=r"or call that module's unshard\(\) before"):
        model(*batch(member.rank, 0, member.device))
    for step in range(2):
        inner.head.unshard()
        loss = model(*batch(member.rank, step, member.device))
        loss.backward()
        assert loss.item() == pytest.approx(losses[step], rel=1e-12)
    for name, gradient in gradients("fsdp2", model).items():
        torch.testing.assert_close(gradient, wanted[name])


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@on_ranks(2)
def test_mixed_precision(member, kind):
    """fp32 parameters, bf16 in forward: the loss is fp32, near the one of all logits in fp32."""
    inner = Model(member.device, dtype=torch.float32)
    inner.reset()
    if kind == "fsdp1":
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(
            inner, process_group=member.group, use_orig_params=True, device_id=member.device, mixed_precision=precision
        )
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(inner, mesh=mesh_of(member.device.type, (member.ranks,)), mp_policy=policy)
    loss = model(*batch(member.rank, 0, member.device))
    assert loss.dtype == torch.float32
    loss.backward()
    losses, wanted = expected(member, 1, dtype=torch.float32)
    assert loss.item() == pytest.approx(losses[0], rel=1e-2)
    for name, gradient in gradients(kind, model).items():
        assert gradient.dtype == torch.float32
        error = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert 0 < error < 0.02, (name, error)


@on_ranks(2)
def test_initialisation_on_the_meta_device(member):
    """The module of the loss has nothing to initialise."""
    losses, wanted = expected(member, 1)
    model = Model("meta")
    fully_shard(model, mesh=mesh_of(member.device.type, (member.ranks,)))
    model.to_empty(device=member.device)
    model.reset()
    loss = model(*batch(member.rank, 0, member.device))
    loss.backward()
    assert loss.item() == pytest.approx(losses[0], rel=1e-12)
    for name, gradient in gradients("fsdp2", model).items():
        torch.testing.assert_close(gradient, wanted[name])
