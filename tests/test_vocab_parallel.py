"""vocab_parallel_cross_entropy against stock Megatron-core's and float64."""

from __future__ import annotations

import functools
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cases import normal
from measures import assert_close, assert_no_worse, largest_error, size
from on_ranks import on_ranks
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy
from world import Member

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as stock

from megatron_models import Model, start

ENTRIES, ROWS = 37, (5, 3)


def _inputs(member: Member, dtype: torch.dtype, offset: float = 0.0):
    """This rank's shard of the logits, targets and upstream gradients."""
    ranks = member.ranks
    logits = normal(*ROWS, ranks * ENTRIES, seed=ranks) * 3 + offset
    target = torch.randint(ranks * ENTRIES, ROWS, generator=torch.Generator().manual_seed(ranks))
    target[0, 0], target[1, 1], target[2, 2] = -100, ranks * ENTRIES, ranks * ENTRIES - 1
    upstream = normal(*ROWS, seed=ranks + 10).float()
    shard = logits.to(dtype).chunk(ranks, -1)[member.rank]
    return [tensor.to(member.device) for tensor in (shard, target, upstream)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.thinned
@on_ranks()
def test_equals_stock(member, dtype, smoothing, offset):
    """At any common offset of the logits. Without smoothing every rank has the same bits."""
    start(member, Model(ranks=member.ranks))
    logits, target, upstream = _inputs(member, dtype, offset)
    before = logits.clone()

    def run(function):
        leaf = logits.clone().requires_grad_()
        # Stock works in place on fp32 logits, so it is given a copy that autograd can spare.
        loss = function(leaf * 1, target, smoothing)
        loss.backward(upstream)
        return loss.detach(), leaf.grad

    want, ours = run(stock), run(vocab_parallel_cross_entropy)
    assert ours[0].dtype == want[0].dtype == torch.float32
    assert ours[1].dtype == want[1].dtype == dtype
    assert largest_error(ours[0], want[0]) <= 4e-6
    assert_close(ours[1], want[1], 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
    assert torch.equal(logits, before)
    of_all = [torch.empty_like(ours[0]) for _ in range(member.ranks)]
    dist.all_gather(of_all, ours[0])
    assert smoothing or all(torch.equal(loss, ours[0]) for loss in of_all)


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


@pytest.mark.parametrize(("rows", "entries"), [(80, 125), (33, 152063)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_of_megatrons_own_test(rows, entries, dtype, device, monkeypatch):
    """Error against float64 at most that of torch in the same dtype; of strided inputs in ranges of rows, too."""
    logits = normal(rows, entries, seed=rows).to(device, dtype)
    target = torch.randint(entries, (rows,), generator=torch.Generator().manual_seed(rows)).to(device)

    def run(function, z, target=target):
        z = z.detach().requires_grad_()
        loss = function(z, target)
        loss.sum().backward()
        return loss.detach(), z.grad

    of_torch = functools.partial(torch.nn.functional.cross_entropy, reduction="none")
    truth = run(of_torch, logits.double())
    torchs = run(lambda z, y: of_torch(z.float(), y), logits)
    plain = run(vocab_parallel_cross_entropy, logits)
    if device == "cpu":
        monkeypatch.setattr("parallel_lce.backends.torch_logits._CPU_BLOCK", 4 * 4 * entries)
    # A transpose, and every second id of a longer tensor.
    strided = logits.t().contiguous().t(), torch.stack([target, target * 0], 1)[:, 0]
    for found in (plain, run(vocab_parallel_cross_entropy, *strided)):
        for mine, theirs, true in zip(found, torchs, truth):
            assert_no_worse(mine, true, theirs, 1.1, 1e-7 * size(true))
