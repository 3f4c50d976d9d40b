"""``reduce_dtype``: dX summed over the ranks in fp32 and rounded once. test_collectives.py has what is sent."""

import pytest
import torch

import parallel_lce
from cases import make, part
from measures import error, size
from tools import REDUCED, everywhere, shrunk
from world import Member

N, D, ROWS = 48, 16, 40  # tokens of the whole sequence, hidden size, vocabulary rows per rank
BLOCKS = {"recompute": 4, "accumulate": 4}


def problem(ranks: int, offset: float, device="cpu"):
    """With an ``offset`` the ranks' parts of dX are large and cancel: all rows of the weight share it, so that
    it adds nothing to the sum over the vocabulary, where the logits' gradient adds up to 0, but to each
    rank's part."""
    t = make(N, ROWS * ranks, D, "bf16", device=device)
    t.weight += offset
    return t


def _gradient(member: Member, strategy: str, sequence_parallel: bool, reduce_dtype, offset: float):
    """This rank's dX and dW."""
    t = part(problem(member.ranks, offset, member.device), member, sequence_parallel)
    in_flight = 2 if strategy == "accumulate" else 1
    block = in_flight * N // BLOCKS.get(strategy, 1) * ROWS * torch.bfloat16.itemsize
    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, reduce_dtype=reduce_dtype)
    with shrunk(block, (8, 16)):
        if strategy == "statistics":
            loss = -parallel_lce.token_statistics(t.x, t.weight, t.target, **options).target_log_prob
        else:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options, **REDUCED[strategy])
        dx, dw = torch.autograd.grad(loss.sum() / (N if loss.dim() else 1), [t.x, t.weight])
    assert dx.dtype == t.x.dtype and dw.dtype == t.weight.dtype
    return dx.cpu(), dw.cpu()


def exact_parts(ranks: int) -> list[torch.Tensor]:
    """Each rank's part of dX in float64."""
    t = problem(ranks, 8.0)
    x, w = t.x.double(), t.weight.double()
    g = (torch.softmax(x @ w.t(), 1) - torch.nn.functional.one_hot(t.target, len(w))) / N
    return [a @ b for a, b in zip(g.chunk(ranks, 1), w.chunk(ranks))]


def whole(found: list, sequence_parallel: bool) -> torch.Tensor:
    if sequence_parallel:
        return torch.cat([dx for dx, _ in found])
    assert all(torch.equal(dx, found[0][0]) for dx, _ in found[1:]), "dX differs by rank"
    return found[0][0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("strategy", [*REDUCED, "statistics"])
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.thinned
def test_a_sum_that_cancels_keeps_its_digits(ranks, strategy, sequence_parallel, worlds, device):
    given = strategy, sequence_parallel
    low, wide = (everywhere(worlds, device, ranks, _gradient, *given, d, 8.0) for d in (None, torch.float32))
    parts = exact_parts(ranks)
    truth = sum(parts)
    assert sum(map(size, parts)) > 10 * size(truth), "the case must cancel"
    its = error(sum(p.bfloat16().double() for p in parts), truth)
    ours, default = (error(whole(found, sequence_parallel), truth) for found in (wide, low))
    # What is left is the rounding of the logits' gradient, which the sum's does not add to.
    assert ours <= 0.5 * its and ours <= 0.5 * default, f"{ours:.3g}, {default:.3g}, of bf16 parts {its:.3g}"
    for (_, a), (_, b) in zip(low, wide):
        assert torch.equal(a, b), "dW is no sum over ranks"
