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
from on_ranks import on_ranks
from tools import D, N, V, call, good
from world import Member

WHOLE = r"call the loss inside the forward of the module that fully_shard wraps"
LOCAL = r"pass linear_weight.to_local\(\) and process_group=linear_weight.device_mesh.get_group\(%d\)"
OTHER = rf"different tokens .*{WHOLE}"
EITHER = rf"{OTHER}.*; if they have the same tokens .*{LOCAL % 0}"
ROWS, NONE = Shard(0), Replicate()
# Shape and names of the mesh, placements of the weight, whether a group is given, what is said, what must not be.
CASES = [
    ((2,), None, [ROWS], False, rf"ranks \[0, 1\]: if these ranks have {EITHER}", None),
    ((2,), None, [ROWS], True, EITHER, None),
    ((2,), ("tp",), [ROWS], True, rf"mesh dimension 'tp' of ranks \[0, 1\]: {LOCAL % 0}", WHOLE),
    ((2,), ("dp_shard",), [ROWS], True, rf"mesh dimension 'dp_shard' of .*{WHOLE}", "to_local"),
    ((2, 1), ("a", "b"), [NONE, ROWS], True, rf"not the ranks \[0, 1\] of process_group.*{WHOLE}", "to_local"),
    ((1, 2), ("dp", "tp"), [NONE, ROWS], True, rf"'tp' of ranks \[0, 1\]: {LOCAL % 1}", WHOLE),
    ((1, 2), ("dp", "tp"), [ROWS, ROWS], True, rf"no single process group shards it.*{WHOLE}", "to_local"),
    ((2,), ("output",), [ROWS], True, OTHER, None),  # no word of tp
    ((2,), ("endpoints",), [ROWS], True, OTHER, None),  # no word of dp
    ((2,), ("Tensor_Parallel",), [ROWS], True, LOCAL % 0, WHOLE),
    ((2,), ("tp",), [Shard(1)], True, r"only dimension 0.*full_tensor\(\)", "to_local"),
    ((2,), None, [NONE], True, r"linear_weight is a DTensor; pass linear_weight.to_local\(\)$", None),
]


@on_ranks(2)
def test_refusals_tell_the_cases_apart(member):
    for shape, names, placements, grouped, message, never in CASES:
        mesh = init_device_mesh(member.device.type, shape, mesh_dim_names=names)
        arguments = good(member.device)
        arguments["linear_weight"] = distribute_tensor(arguments["linear_weight"], mesh, placements)
        said = _said(arguments | (dict(process_group=member.group) if grouped else {}))
        assert re.search(message, said) and not (never and re.search(never, said)), said
    mesh = init_device_mesh(member.device.type, (2,))
    for name, placement in (
        ("input", ROWS),
        ("input", Shard(1)),
        ("input", Partial()),
        ("target", ROWS),
        ("target", Partial()),
    ):
        arguments = good(member.device) | dict(process_group=member.group)
        whole = distribute_tensor(arguments[name], mesh, [NONE if placement.is_partial() else placement])
        arguments[name] = DTensor.from_local(whole.to_local(), mesh, [placement])
        said = _said(arguments)
        assert said.startswith(f"{name} is a DTensor, {placement} over ranks [0, 1]: ")
        assert said.endswith(f"pass {name}.full_tensor()")
        # Parts of tokens may be passed as they are; features or summands may not.
        assert (f"pass {name}.to_local() if these ranks have different tokens" in said) == (placement == ROWS)
        assert ("to_local" in said) == (placement == ROWS)
        assert ("sequence_parallel" in said) == (placement == ROWS and name == "input")


def _said(arguments: dict) -> str:
    try:
        call(arguments)
        return "not refused"
    except ValueError as refusal:
        return str(refusal).partition(" (if only this rank")[0]


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


@pytest.mark.parametrize(("ranks", "entries"), [(2, V - V % 2), (2, V - V % 2 - 1), (4, 5), (4, 9)])
@on_ranks()
def test_a_tensor_parallel_weight(member, entries):
    """What the refusal says to pass, word by word."""
    arguments = good(member.device)
    arguments["linear_weight"] = arguments["linear_weight"][:entries]
    arguments["target"] %= entries
    mesh = init_device_mesh(member.device.type, (member.ranks,), mesh_dim_names=("tp",))
    whole = call(arguments)
    weight = distribute_tensor(arguments["linear_weight"], mesh, [ROWS])
    said = re.sub(r" \(.*?uneven\)", "", _said(arguments | dict(linear_weight=weight)))
    local, start, group = re.search(
        r"pass (linear_weight\.to_local\(\))(?:, vocab_start=(\d+))? and process_group=(\S+)$", said
    ).groups()
    names = {"linear_weight": weight}
    arguments |= dict(linear_weight=eval(local, names), process_group=eval(group, names))
    assert (start is not None) == bool(entries % member.ranks)
    if start:
        arguments["vocab_start"] = int(start)
    assert call(arguments).item() == pytest.approx(whole.item(), rel=1e-6)


@on_ranks(2)
def test_real_logits(member):
    """The right advice is followed; of the others, what is said."""
    arguments = good(member.device)
    logits, target = arguments["input"] @ arguments["linear_weight"].t(), arguments["target"]
    mesh = init_device_mesh(member.device.type, (member.ranks,), mesh_dim_names=("tp",))
    loss = parallel_lce.vocab_parallel_cross_entropy
    equal = "^vocab_parallel_logits is a DTensor: pass each rank's equal shard of the last dimension"
    for width, placement in ((V - 1, Shard(1)), (V, ROWS), (V, NONE)):
        with pytest.raises(ValueError, match=equal):
            loss(distribute_tensor(logits[:, :width], mesh, [placement]), target, tp_group=member.group)
    names = {"vocab_parallel_logits": distribute_tensor(logits, mesh, [Shard(1)])}
    with pytest.raises(ValueError) as refusal:
        loss(*names.values(), target, tp_group=member.group)
    passed = re.search(r"pass (\S+\.to_local\(\)) and tp_group=(\S+\))", str(refusal.value))
    local, group = (eval(text, names) for text in passed.groups())
    torch.testing.assert_close(loss(local, target, tp_group=group), F.cross_entropy(logits, target, reduction="none"))
