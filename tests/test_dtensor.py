"""DTensors are refused with what to pass instead, and what the refusals say gives the right loss."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import parallel_lce
from tools import D, N, V, call, good
from world import Member

WHOLE = r"call the loss inside the forward of the module that fully_shard wraps"
LOCAL = r"pass linear_weight.to_local\(\) and process_group=linear_weight.device_mesh.get_group\(%d\)"
CASES = {
    # mesh shape, its names, placements of the weight, whether a group is given, what is said, what must not be
    "unnamed": ((2,), None, [Shard(0)], False, rf"ranks \[0, 1\]: if these ranks have different tokens .*{WHOLE}.*; if .* the same .*{LOCAL % 0}", None),
    "unnamed, its group": ((2,), None, [Shard(0)], True, rf"different tokens .*{WHOLE}.*; if they have the same tokens .*{LOCAL % 0}", None),
    "tp": ((2,), ("tp",), [Shard(0)], True, rf"mesh dimension 'tp' of ranks \[0, 1\]: {LOCAL % 0}", WHOLE),
    "dp": ((2,), ("dp_shard",), [Shard(0)], True, rf"mesh dimension 'dp_shard' of .*{WHOLE}", "to_local"),
    "another group": ((2, 1), ("a", "b"), [Replicate(), Shard(0)], True, rf"these are not the ranks \[0, 1\] of process_group.*{WHOLE}", "to_local"),
    "tp of two dimensions": ((1, 2), ("dp", "tp"), [Replicate(), Shard(0)], True, rf"'tp' of ranks \[0, 1\]: {LOCAL % 1}", WHOLE),
    "both": ((1, 2), ("dp", "tp"), [Shard(0), Shard(0)], True, rf"no single process group shards it.*{WHOLE}", "to_local"),
    "features": ((2,), ("tp",), [Shard(1)], True, r"only dimension 0.*full_tensor\(\)", "to_local"),
    "replicated": ((2,), None, [Replicate()], True, r"linear_weight is a DTensor; pass linear_weight.to_local\(\)$", None),
}  # fmt: skip


def _refusals(member: Member) -> dict[str, str]:
    found = {}
    for name, (shape, names, placements, grouped, *_) in CASES.items():
        mesh = init_device_mesh(member.device.type, shape, mesh_dim_names=names)
        arguments = good(member.device)
        arguments["linear_weight"] = distribute_tensor(arguments["linear_weight"], mesh, placements)
        if grouped:
            arguments["process_group"] = member.group
        found[name] = _said(arguments)
    mesh = init_device_mesh(member.device.type, (2,))
    for name in ("input", "target"):
        arguments = good(member.device) | dict(process_group=member.group)
        arguments[name] = distribute_tensor(arguments[name], mesh, [Shard(0)])
        found[name] = _said(arguments)
    return found


def _said(arguments: dict) -> str:
    try:
        call(arguments)
        return "not refused"
    except ValueError as refusal:
        return str(refusal).partition(" (if only this rank")[0]


def test_refusals_tell_the_cases_apart(worlds, device):
    for found in worlds(2).run(_refusals):
        for name, (*_, message, never) in CASES.items():
            assert re.search(message, found[name]), f"{name}: {found[name]}"
            assert never is None or not re.search(never, found[name]), f"{name}: {found[name]}"
        for name in ("input", "target"):
            assert f"{name} is a DTensor, S(0) over ranks [0, 1]: pass {name}.to_local(), with sequence_parallel" in (
                found[name].replace("Shard(dim=0)", "S(0)")
            )


class _Head(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, hidden, target):
        return parallel_lce.linear_cross_entropy(hidden, self.weight, target)


def _fully_sharded(member: Member):
    """Each rank has tokens of its own. Losses inside the wrapped forward, and with the module unsharded."""
    torch.manual_seed(0)
    weight = torch.randn(V, D)
    torch.manual_seed(1 + member.rank)
    hidden, target = torch.randn(N, D), torch.randint(V, (N,))
    want = F.cross_entropy(hidden @ weight.t(), target)
    hidden, target = hidden.to(member.device), target.to(member.device)
    head = _Head(weight.to(member.device))
    fully_shard(head, mesh=init_device_mesh(member.device.type, (member.ranks,)))
    refusal = _said(dict(input=hidden, linear_weight=head.weight, target=target))
    inside = head(hidden, target)
    inside.backward()
    gradient = head.weight.grad.full_tensor().cpu()
    head.unshard()
    outside = parallel_lce.linear_cross_entropy(hidden, head.weight, target)
    head.reshard()
    return refusal, inside.item(), outside.item(), want.item(), gradient


def test_a_fully_sharded_weight(worlds, device):
    """What the refusal says to do gives each rank's own loss, and the gradients' mean over the ranks."""
    parts = worlds(2).run(_fully_sharded)
    for refusal, inside, outside, want, gradient in parts:
        assert re.search(WHOLE, refusal) and "linear_weight is a DTensor" in refusal
        assert inside == pytest.approx(want, rel=1e-5) and outside == pytest.approx(want, rel=1e-5)
        assert torch.equal(gradient, parts[0][-1]) and gradient.norm() > 0
    assert parts[0][3] != parts[1][3]


def _tensor_parallel(member: Member):
    arguments = good(member.device)
    mesh = init_device_mesh(member.device.type, (member.ranks,), mesh_dim_names=("tp",))
    whole = call(arguments)
    weight = distribute_tensor(arguments["linear_weight"], mesh, [Shard(0)])
    arguments |= dict(linear_weight=weight.to_local(), process_group=weight.device_mesh.get_group(0))
    return whole.item(), call(arguments).item()


def test_a_tensor_parallel_weight(worlds, device):
    for whole, sharded in worlds(2).run(_tensor_parallel):
        assert sharded == pytest.approx(whole, rel=1e-6)
