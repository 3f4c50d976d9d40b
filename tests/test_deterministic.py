"""The same bits: of the loss on every rank, and of loss and gradients from run to run, by every strategy.

Random cases on one backend are in test_random; here torch may choose its algorithms freely as well.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import parallel_lce
from blocks import watched_backwards
from cases import DTYPES, Case, make, part
from parallel_lce.backends import backend_of
from tools import everywhere, shrunk, statistics
from world import Member

N, V, D = 36, 600, 8

# name: (reduction, whether the loss is of statistics, budget in logits of an equal shard, whether a block's
# backward is handed exponentials)
STRATEGIES = {
    "saved": ("none", False, None, True),
    "hidden states gathered again": ("none", False, 1.0, True),
    "some saved": ("none", False, 0.9, True),
    "recomputed": ("none", False, 0.0, False),
    "accumulated": ("mean", False, 0.0, True),
    "statistics": ("none", True, None, True),
}
SHARDS = {1: (600,), 2: (420, 180), 3: (0, 317, 283)}


@contextmanager
def algorithms(deterministic: bool):
    """Memory of ``torch.empty`` is NaN where they are deterministic, and anything where not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def handed_over(weight: torch.Tensor):
    """Yields a list of whether each block's backward is handed exponentials."""
    handed = []
    with watched_backwards(backend_of(weight), lambda task: handed.append(len(task.saved) > 0)):
        yield handed


def _twice(member: Member, name: str, dtype: str, sequence_parallel: bool, deterministic: bool):
    """Loss, dX, dW and dbias of two runs, as bytes."""
    reduction, of_statistics, share, keeps = STRATEGIES[name]
    shards = SHARDS[member.ranks]
    t = make(Case(N, V, D, dtype, bias=True, reduction=reduction), member.device)
    # Tokens of one target add up in one row of dW.
    t.target[5:12] = t.target[4]
    t = part(t, member, sequence_parallel, shards)
    leaves = [t.x, t.weight, t.bias]
    size = DTYPES[dtype].itemsize
    # What the plan counts: equal shards.
    logits = N * -(-V // member.ranks) * size
    options = dict(
        linear_bias=leaves[2],
        process_group=member.group,
        vocab_start=sum(shards[: member.rank]) if member.ranks > 1 else None,
        vocab_size=V,
        sequence_parallel=sequence_parallel,
        logits_budget=None if share is None else int(share * logits),
    )
    results = []
    with algorithms(deterministic), shrunk(logits // 3, (16, 64)), handed_over(leaves[1]) as handed:
        for _ in range(2):
            if of_statistics:
                found = statistics(*leaves[:2], t.target.clamp(min=0), **options)
                loss = found.target_log_prob + 0.1 * found.entropy - found.mean_logit
            else:
                loss = parallel_lce.linear_cross_entropy(
                    *leaves[:2], t.target, reduction=reduction, label_smoothing=0.1, z_loss=1e-3, **options
                )
            gradients = torch.autograd.grad(loss, leaves, t.upstream.to(loss.dtype))
            assert all(g.isfinite().all() for g in gradients)
            results.append([bits(v) for v in (loss.detach(), *gradients)])
    if of_statistics and dtype == "fp16":
        keeps = False  # whose range is too short to take logits from exponentials
    assert any(handed) == (keeps and len(leaves[1]) > 0), "the case must be what it is called"
    return results


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


LAYOUTS = [
    (backend, dtype, ranks, sequence_parallel)
    for backend, dtype in (("torch", "bf16"), ("torch", "fp32"), ("triton", "bf16"))
    for ranks, sequence_parallel in ((1, False), (2, False), (2, True), (3, True))
    if backend == "torch" or ranks == 2
]


@pytest.mark.parametrize(("backend", "dtype", "ranks", "sequence_parallel"), LAYOUTS, indirect=["backend"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.thinned
def test_the_same_bits(name, backend, dtype, ranks, sequence_parallel, worlds, device):
    if name == "hidden states gathered again" and not sequence_parallel:
        pytest.skip("no hidden states are gathered")
    for deterministic in (True, False):
        found = everywhere(worlds, device, ranks, _twice, name, dtype, sequence_parallel, deterministic)
        for rank, (first, second) in enumerate(found):
            for what, a, b in zip(("loss", "dX", "dW", "dbias"), first, second, strict=True):
                assert a == b, f"{what} of rank {rank} differs from run to run"
            assert len(first[0]) and first[0] == found[0][0][0], f"the loss of rank {rank} is another"
            if not sequence_parallel:
                assert first[1] == found[0][0][1], f"dX of rank {rank} is another"
