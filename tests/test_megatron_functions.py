"""vocab_parallel_cross_entropy against stock Megatron-core's, and functions of hidden states behind its mappings.
test_fuzz.py and test_hazards.py have them against float64."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from cases import normal
from measures import assert_close, assert_near, largest_error
from on_ranks import on_ranks
from parallel_lce import LinearCrossEntropy, linear_cross_entropy, rl, vocab_parallel_cross_entropy
from parallel_lce.distillation import top_k_divergence
from tools import alone, everywhere, shrunk, started
from world import Member

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as stock

from megatron_models import Model, start

ENTRIES, ROWS = 37, (5, 3)


def _inputs(member: Member, dtype: torch.dtype):
    """This rank's shard of the logits, targets and upstream gradients."""
    ranks = member.ranks
    logits = normal(*ROWS, ranks * ENTRIES, seed=ranks) * 3
    target = torch.randint(ranks * ENTRIES, ROWS, generator=torch.Generator().manual_seed(ranks))
    target[0, 0], target[1, 1], target[2, 2] = -100, ranks * ENTRIES, ranks * ENTRIES - 1
    upstream = normal(*ROWS, seed=ranks + 10).float()
    shard = logits.to(dtype).chunk(ranks, -1)[member.rank]
    return [tensor.to(member.device) for tensor in (shard, target, upstream)]


def _gradient(function, logits, target, upstream, *options) -> list[torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    # Stock works in place on fp32 logits, so it is given a copy that autograd can spare.
    loss = function(leaf * 1, target, *options)
    return [loss.detach(), *torch.autograd.grad(loss, leaf, upstream)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.thinned
@on_ranks()
def test_logits_that_exist(member, dtype, smoothing):
    start(member, Model(ranks=member.ranks))
    inputs = _inputs(member, dtype)
    want, ours = (_gradient(f, *inputs, smoothing) for f in (stock, vocab_parallel_cross_entropy))
    assert [value.dtype for value in ours] == [value.dtype for value in want] == [torch.float32, dtype]
    assert largest_error(ours[0], want[0]) <= 4e-6
    assert_close(ours[1], want[1], 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


@on_ranks(2)
def test_the_given_group_is_used(member):
    """With a group given, Megatron's own is not asked for; with none, it is the one."""
    start(member, Model(ranks=member.ranks))
    logits, target, _ = _inputs(member, torch.float32)
    own = vocab_parallel_cross_entropy(logits, target)
    with mock.patch.object(parallel_state, "get_tensor_model_parallel_group", side_effect=AssertionError("asked for")):
        assert torch.equal(vocab_parallel_cross_entropy(logits, target, 0.0, member.group), own)
        with pytest.raises(AssertionError, match="asked for"):
            vocab_parallel_cross_entropy(logits, target)
    without = {name: module for name, module in sys.modules.items() if not name.startswith("megatron")}
    with mock.patch.dict(sys.modules, without, clear=True):
        with pytest.raises(ValueError, match="no tensor-parallel group: pass tp_group"):
            vocab_parallel_cross_entropy(logits, target)


def test_ranges_of_rows(monkeypatch):
    """The torch backend computes in ranges of rows, with the same bits however few they have."""
    inputs = normal(33, 125).float(), torch.arange(33), normal(33).float()
    whole = _gradient(vocab_parallel_cross_entropy, *inputs, 0.1)
    monkeypatch.setattr("parallel_lce.backends.torch_logits._CPU_BLOCK", 4 * 4 * 125)
    assert all(map(torch.equal, _gradient(vocab_parallel_cross_entropy, *inputs, 0.1), whole))


# --- hidden states behind Megatron's mappings, which sum their gradient over the ranks -------------------

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
    """Results and gradients on one rank, in float64. The functions leave dX as this rank's part."""
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
def test_behind_mappings(name, gathered, ranks, worlds, device):
    *parts, shards = zip(*everywhere(worlds, device, ranks, _ours, name, gathered))
    *expected, dw = _ours(alone(device), name, gathered)
    assert_near(torch.cat(shards), dw, 1e-12)
    if gathered:
        assert_near(torch.cat(parts.pop()), expected.pop(), 1e-12)
    for each, truth in zip(parts, expected, strict=True):
        for found in each:
            assert_near(found, truth, 1e-12)
