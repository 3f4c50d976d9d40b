"""vocab_parallel_cross_entropy against stock Megatron-core's and float64."""

from __future__ import annotations

import functools
import sys
from unittest import mock

import pytest
import torch

import parallel_lce
from cases import normal
from measures import assert_close, assert_no_worse, largest_error, size
from on_ranks import on_ranks
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy
from tools import everywhere
from world import Member

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_models import Model, start

ENTRIES, ROWS = 37, (5, 3)


def _inputs(ranks: int, dtype: torch.dtype, scale: float = 3.0):
    logits = normal(*ROWS, ranks * ENTRIES, seed=ranks) * scale
    target = torch.randint(ranks * ENTRIES, ROWS, generator=torch.Generator().manual_seed(ranks))
    target[0, 0], target[1, 1], target[2, 2] = -100, ranks * ENTRIES, ranks * ENTRIES - 1
    upstream = normal(*ROWS, seed=ranks + 10)
    return logits.to(dtype), target, upstream


def _shard(tensor: torch.Tensor, member: Member) -> torch.Tensor:
    return tensor.chunk(member.ranks, -1)[member.rank].to(member.device)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.thinned
@on_ranks()
def test_equals_stock(member, dtype, smoothing):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as stock

    start(member, Model(ranks=member.ranks))
    logits, target, upstream = _inputs(member.ranks, dtype)
    mine = _shard(logits, member)
    target, upstream = target.to(member.device), upstream.float().to(member.device)

    def run(function):
        leaf = mine.clone().requires_grad_()
        # Stock works in place on fp32 logits, so it is given a copy that autograd can spare.
        loss = function(leaf * 1, target, smoothing)
        loss.backward(upstream)
        return loss.detach(), leaf.grad

    want, ours = run(stock), run(vocab_parallel_cross_entropy)
    assert ours[0].dtype == want[0].dtype == torch.float32
    assert ours[1].dtype == want[1].dtype == dtype
    assert largest_error(ours[0], want[0]) <= 4e-6
    assert_close(ours[1], want[1], 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
    assert torch.equal(mine, _shard(logits, member))  # they are left as they were


@on_ranks(2)
def test_the_given_group_is_used(member):
    """With a group given, Megatron's own is not asked for; with none, it is the one."""
    from megatron.core import parallel_state

    start(member, Model(ranks=member.ranks))
    logits, target, _ = _inputs(member.ranks, torch.float32)
    mine, target = _shard(logits, member), target.to(member.device)
    own = vocab_parallel_cross_entropy(mine, target)
    with mock.patch.object(parallel_state, "get_tensor_model_parallel_group", side_effect=AssertionError("asked for")):
        assert torch.equal(vocab_parallel_cross_entropy(mine, target, 0.0, member.group), own)
        with pytest.raises(AssertionError, match="asked for"):
            vocab_parallel_cross_entropy(mine, target)
    without = {name: module for name, module in sys.modules.items() if not name.startswith("megatron")}
    with mock.patch.dict(sys.modules, without, clear=True):
        with pytest.raises(ValueError, match="no tensor-parallel group: pass tp_group"):
            vocab_parallel_cross_entropy(mine, target)


@pytest.mark.parametrize(("rows", "entries"), [(80, 125), (33, 152063)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_of_megatrons_own_test(rows, entries, dtype, device):
    """Error against float64 at most that of torch in the same dtype."""
    logits = normal(rows, entries, seed=rows).to(device, dtype)
    target = torch.randint(entries, (rows,), generator=torch.Generator().manual_seed(rows)).to(device)

    def run(function, z):
        z = z.detach().requires_grad_()
        loss = function(z, target)
        loss.sum().backward()
        return loss.detach().double(), z.grad.double()

    of_torch = functools.partial(torch.nn.functional.cross_entropy, reduction="none")
    truth = run(of_torch, logits.double())
    torchs = run(lambda z, y: of_torch(z.float(), y), logits)
    for mine, theirs, true in zip(run(vocab_parallel_cross_entropy, logits), torchs, truth):
        assert_no_worse(mine, true, theirs, 1.1, 1e-7 * size(true))


def _ours(member: Member, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, target, upstream = _inputs(member.ranks, torch.float32)
    leaf = _shard(logits + offset, member).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, target.to(member.device), tp_group=member.group)
    loss.backward(upstream.float().to(member.device))
    return loss.detach().cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_against_float64(ranks, offset, worlds, device):
    """Values and gradients in the dense formula, at any common offset of the logits."""
    logits, target, upstream = _inputs(ranks, torch.float32)
    z = (logits + offset).double().requires_grad_()
    log_p = torch.log_softmax(z, -1)
    inside = (target >= 0) & (target < z.shape[-1])
    picked = log_p.gather(-1, target.clamp(0, z.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    lowest = torch.logsumexp(z, -1) - z.detach().amax(-1)
    loss = torch.where(inside, -picked, lowest)
    loss.backward(upstream)
    parts = everywhere(worlds, device, ranks, _ours, offset)
    for part in parts:
        assert torch.equal(part[0], parts[0][0])
        assert largest_error(part[0], loss) <= 2e-6
    assert_close(torch.cat([part[1] for part in parts], -1), z.grad, 1e-6)


def test_row_blocks_change_nothing(monkeypatch):
    logits, target, _ = _inputs(1, torch.float32)
    whole = vocab_parallel_cross_entropy(logits, target, 0.1)
    monkeypatch.setattr("parallel_lce.backends.torch_logits._CPU_BLOCK", 4 * ENTRIES * 4)
    assert torch.equal(vocab_parallel_cross_entropy(logits, target, 0.1), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(target=torch.zeros(5, 4, dtype=torch.int64)), r"\[5, 3\].*\[5, 4\]"),
        (dict(target=torch.zeros(5, 3)), "class indices, got torch.float32"),
        (dict(label_smoothing=1.0), r"label_smoothing must be in \[0, 1\), got 1.0"),
        (dict(vocab_parallel_logits=torch.zeros(5, 3, 37, dtype=torch.int64)), "floating point"),
        (dict(vocab_parallel_logits=torch.zeros(5, 3, 1), label_smoothing=0.1), "at least 2 entries per rank, got 1"),
    ],
)
def test_bad_input(change, message):
    logits, target, _ = _inputs(1, torch.float32)
    arguments = {"vocab_parallel_logits": logits, "target": target, **change}
    with pytest.raises(ValueError, match=message):
        parallel_lce.vocab_parallel_cross_entropy(**arguments)


def test_strided_inputs(device):
    """Logits that no view flattens; every second id of a longer tensor, which stays strided when it is flattened."""
    logits, target, _ = _inputs(1, torch.float32)
    want = vocab_parallel_cross_entropy(logits, target)
    other = logits.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(vocab_parallel_cross_entropy(other, target), want)
    logits, ids = logits[0].to(device), target[0].clamp(0, ENTRIES - 1).to(device)
    wide = torch.stack([ids, ids * 0], 1).flatten()[::2]
    assert not wide.is_contiguous()
    want = torch.nn.functional.cross_entropy(logits, ids, reduction="none")
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits, wide), want)
