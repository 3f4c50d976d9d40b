"""vocab_parallel_cross_entropy against stock Megatron-core's. test_fuzz.py has it against float64."""

import sys
from unittest import mock

import pytest
import torch

from cases import normal
from measures import assert_close, largest_error
from parallel_lce import vocab_parallel_cross_entropy
from tools import on_ranks
from world import Member

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as stock

from megatron_models import Model, start

ENTRIES, ROWS = 37, (5, 3)


def _inputs(member: Member, dtype: torch.dtype):
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


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.thinned
@on_ranks()
def test_losses_and_gradients_are_those_of_stock_megatron(member, dtype, smoothing):
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
