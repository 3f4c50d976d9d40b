"""DTensors are refused with what to pass instead, and what the refusals say gives the right loss."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import parallel_lce
from cases import Case, make
from tools import D, N, V, call, good
from world import Member

WHOLE = r"call the loss inside the forward of the module that fully_shard wraps"
LOCAL = r"pass linear_weight.to_local\(\) and process_group=linear_weight.device_mesh.get_group\(%d\)"
CASES = {
    # mesh shape, its names, placements of the weight, whether a group is given, what is said, what must not be
    "unnamed": (
        (2,),
        None,
        [Shard(0)],
        False,
        rf"ranks \[0, 1\]: if these ranks have different tokens .*{WHOLE}.*; if .* the same .*{LOCAL % 0}",
        None,
    ),
    "unnamed, its group": (
        (2,),
        None,
        [Shard(0)],
        True,
        rf"different tokens .*{WHOLE}.*; if they have the same tokens .*{LOCAL % 0}",
        None,
    ),
    "tp": ((2,), ("tp",), [Shard(0)], True, rf"mesh dimension 'tp' of ranks \[0, 1\]: {LOCAL % 0}", WHOLE),
    "dp": ((2,), ("dp_shard",), [Shard(0)], True, rf"mesh dimension 'dp_shard' of .*{WHOLE}", "to_local"),
    "another group": (
        (2, 1),
        ("a", "b"),
        [Replicate(), Shard(0)],
        True,
        rf"these are not the ranks \[0, 1\] of process_group.*{WHOLE}",
        "to_local",
    ),
    "tp of two dimensions": (
        (1, 2),
        ("dp", "tp"),
        [Replicate(), Shard(0)],
        True,
        rf"'tp' of ranks \[0, 1\]: {LOCAL % 1}",
        WHOLE,
    ),
    "both": (
        (1, 2),
        ("dp", "tp"),
        [Shard(0), Shard(0)],
        True,
        rf"no single process group shards it.*{WHOLE}",
        "to_local",
    ),
    "no word of tp": ((2,), ("output",), [Shard(0)], True, rf"if these ranks have different tokens .*{WHOLE}", None),
    "no word of dp": ((2,), ("endpoints",), [Shard(0)], True, rf"if these ranks have different tokens .*{WHOLE}", None),
    "a word of tp": ((2,), ("Tensor_Parallel",), [Shard(0)], True, LOCAL % 0, WHOLE),
    "features": ((2,), ("tp",), [Shard(1)], True, r"only dimension 0.*full_tensor\(\)", "to_local"),
    "replicated": (
        (2,),
        None,
        [Replicate()],
        True,
        r"linear_weight is a DTensor; pass linear_weight.to_local\(\)$",
        None,
    ),
}


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
        for placement in (Shard(0), Partial()) if name == "target" else (Shard(0), Shard(1), Partial()):
            arguments = good(member.device) | dict(process_group=member.group)
            arguments[name] = distribute_tensor(
                arguments[name], mesh, [Replicate() if placement.is_partial() else placement]
            )
            if placement.is_partial():
                arguments[name] = DTensor.from_local(arguments[name].to_local(), mesh, [placement])
            found[name, placement] = _said(arguments)
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
        for (name, placement), said in ((key, value) for key, value in found.items() if isinstance(key, tuple)):
            assert said.startswith(f"{name} is a DTensor, {placement} over ranks [0, 1]: ")
            assert said.endswith(f"pass {name}.full_tensor()")
            # Parts of tokens may be passed as they are; features or summands may not.
            assert (f"pass {name}.to_local() if these ranks have different tokens" in said) == (placement == Shard(0))
            assert ("to_local" in said) == (placement == Shard(0))
            assert ("sequence_parallel" in said) == (placement == Shard(0) and name == "input")


class _Head(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, hidden, target):
        return parallel_lce.linear_cross_entropy(hidden, self.weight, target)


def _fully_sharded(member: Member):
    """Each rank has tokens of its own. Losses inside the wrapped forward, and with the module unsharded."""
    weight = make(Case(N, V, D)).weight
    own = make(Case(N, V, D, ignored="none", seed=1 + member.rank))
    hidden, target = own.x, own.target
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


def _tensor_parallel(member: Member, entries: int):
    """What the refusal says to pass, word by word."""
    arguments = good(member.device)
    arguments["linear_weight"] = arguments["linear_weight"][:entries]
    arguments["target"] %= entries
    mesh = init_device_mesh(member.device.type, (member.ranks,), mesh_dim_names=("tp",))
    whole = call(arguments)
    weight = distribute_tensor(arguments["linear_weight"], mesh, [Shard(0)])
    arguments |= dict(linear_weight=weight)
    said = re.sub(r" \(.*?uneven\)", "", _said(arguments))
    passed = re.search(r"pass (linear_weight\.to_local\(\))(?:, vocab_start=(\d+))? and process_group=(\S+)$", said)
    names = {"linear_weight": weight}
    arguments |= dict(linear_weight=eval(passed[1], names), process_group=eval(passed[3], names))
    if passed[2]:
        arguments["vocab_start"] = int(passed[2])
    return whole.item(), call(arguments).item(), passed[2] is not None


@pytest.mark.parametrize(("ranks", "entries"), [(2, V - V % 2), (2, V - V % 2 - 1), (4, 5), (4, 9)])
def test_a_tensor_parallel_weight(ranks, entries, worlds, device):
    for whole, sharded, uneven in worlds(ranks).run(_tensor_parallel, entries):
        assert sharded == pytest.approx(whole, rel=1e-6) and uneven == bool(entries % ranks)


def _real_logits(member: Member) -> list[str]:
    """The right advice is followed; of the others, what is said."""
    arguments = good(member.device)
    logits, target = arguments["input"] @ arguments["linear_weight"].t(), arguments["target"]
    mesh = init_device_mesh(member.device.type, (member.ranks,), mesh_dim_names=("tp",))
    said = []
    for width, placement in ((V, Shard(1)), (V - 1, Shard(1)), (V, Shard(0)), (V, Replicate())):
        dtensor = distribute_tensor(logits[:, :width], mesh, [placement])
        try:
            parallel_lce.vocab_parallel_cross_entropy(dtensor, target, tp_group=member.group)
        except ValueError as refusal:
            said.append(str(refusal).partition(" (if only this rank")[0])
    passed = re.search(r"pass (\S+\.to_local\(\)) and tp_group=(\S+)$", said[0])
    names = {"vocab_parallel_logits": distribute_tensor(logits, mesh, [Shard(1)])}
    local, group = (eval(text, names) for text in passed.groups())
    found = parallel_lce.vocab_parallel_cross_entropy(local, target, tp_group=group)
    torch.testing.assert_close(found, F.cross_entropy(logits, target, reduction="none"))
    return said[1:]


def test_real_logits(worlds, device):
    for said in worlds(2).run(_real_logits):
        assert len(said) == 3
        for text in said:
            assert text.startswith(
                "vocab_parallel_logits is a DTensor: pass each rank's equal shard of the last dimension"
            )
