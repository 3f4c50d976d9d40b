"""Hidden states behind Megatron's own mappings, which sum their gradient over the ranks in backward: the functions
leave it as this rank's part. Against whole tensors on one rank, in float64; test_fuzz.py has the functions that are not
here."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.tensor_parallel import mappings

from cases import normal
from measures import assert_near
from parallel_lce import LinearCrossEntropy, linear_cross_entropy, rl, vocab_parallel_cross_entropy
from parallel_lce.distillation import top_k_divergence
from tools import alone, everywhere, shrunk, started
from world import Member

S, B, V, D, T = 8, 3, 64, 16, 0.7


def _top_k(x, w, y, group):
    ids = (y[..., None] + torch.tensor([0, 23, 41], device=y.device)) % V  # on several ranks' shards
    stored = torch.tensor([-1.0, -2.0, -3.0]).to(x).expand(S, B, 3)
    return top_k_divergence(x, w, ids, stored, reduction="sum", process_group=group, reduce_hidden_grad=False)


FUNCTIONS = {
    "gradients in forward": lambda x, w, y, group: linear_cross_entropy(
        x, w, y, reduction="sum", logits_budget=0, process_group=group, reduce_hidden_grad=False
    ),
    "module": lambda x, w, y, group: LinearCrossEntropy(
        reduction="sum", temperature=T, process_group=group, reduce_hidden_grad=False
    )(x, w, y),
    "top_k": _top_k,
    # These need not be asked. Of logits that exist each rank has its own gradient; their layer sums that of its input.
    "rl": lambda x, w, y, group: rl.linear_cross_entropy(x, w, y, T, "none", group),
    "logits": lambda x, w, y, group: vocab_parallel_cross_entropy(x @ w.t() / T, y, tp_group=group),
}


def _ours(member: Member, name: str, gathered: bool):
    x, w = normal(S, B, D).to(member.device), normal(V, D, seed=1).to(member.device) / 4
    y, group = torch.arange(S * B, device=member.device).view(S, B) * 7 % V, member.group
    x = (x.chunk(member.ranks)[member.rank] if gathered else x).clone().requires_grad_()
    shard = w.chunk(member.ranks)[member.rank].clone().requires_grad_()
    mapping = mappings.copy_to_tensor_model_parallel_region
    if gathered:
        mapping = mappings.gather_from_sequence_parallel_region
    device = nullcontext()
    if member.device.type == "cpu":
        # Megatron's gather asks where to put its result.
        device = mock.patch.object(torch.cuda, "current_device", lambda: member.device)
    with device, shrunk(4000, (8, 16)), started() as collectives:
        found = FUNCTIONS[name](x if group is None else mapping(x, group=group), shard, y, group)
        found = [found] if isinstance(found, torch.Tensor) else [*found]
        upstream = [normal(*f.shape, seed=6 + i).to(f) for i, f in enumerate(found)]
        gradients = torch.autograd.grad(found, [x, shard], upstream)
    reductions = [c.kind for c in collectives if c.kind != "all_gather"]
    # That of the mapping alone.
    assert reductions == ([] if group is None else ["reduce_scatter"] if gathered else ["all_reduce"])
    return [v.detach().cpu() for v in (*found, *gradients)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "copied"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.thinned
def test_gradients(name, gathered, ranks, worlds, device):
    *parts, shards = zip(*everywhere(worlds, device, ranks, _ours, name, gathered))
    *expected, dw = _ours(alone(device), name, gathered)
    assert_near(torch.cat(shards), dw, 1e-12)
    if gathered:
        assert_near(torch.cat(parts.pop()), expected.pop(), 1e-12)
    for each, truth in zip(parts, expected, strict=True):
        for found in each:
            assert_near(found, truth, 1e-12)
