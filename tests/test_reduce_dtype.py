"""``reduce_dtype``: dX summed over the ranks in fp32 and rounded once. test_collectives.py has what is sent."""

import pytest
import torch

import parallel_lce
from cases import make, part
from measures import error, size
from tools import REDUCED, everywhere, shrunk
from world import Member

N, D, ROWS, RANKS = 48, 16, 40, 2  # tokens of the whole sequence, hidden size, vocabulary rows per rank


def problem(device="cpu"):
    """The ranks' parts of dX are large and cancel. All rows of the weight share an offset, which adds nothing to the
    sum over the vocabulary, where the logits' gradient adds up to 0, but to each rank's part."""
    t = make(N, ROWS * RANKS, D, "bf16", device=device)
    t.weight += 8
    return t


def _gradients(member: Member, strategy: str, sequence_parallel: bool, reduce_dtype):
    """This rank's dX and dW."""
    t = part(problem(member.device), member, sequence_parallel)
    options = dict(process_group=member.group, sequence_parallel=sequence_parallel, reduce_dtype=reduce_dtype)
    with shrunk(N // 2 * ROWS * torch.bfloat16.itemsize, (8, 16)):
        if strategy == "statistics":
            loss = -parallel_lce.token_statistics(t.x, t.weight, t.target, **options).target_log_prob
        else:
            loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, **options, **REDUCED[strategy])
        dx, dw = torch.autograd.grad(loss.sum() / (N if loss.dim() else 1), [t.x, t.weight])
    assert dx.dtype == t.x.dtype and dw.dtype == t.weight.dtype
    return dx.cpu(), dw.cpu()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("strategy", [*REDUCED, "statistics"])
@pytest.mark.thinned
def test_a_sum_that_cancels_keeps_its_digits(strategy, sequence_parallel, worlds, device):
    t = problem()
    x, w = t.x.double(), t.weight.double()
    g = (torch.softmax(x @ w.t(), 1) - torch.nn.functional.one_hot(t.target, len(w))) / N
    parts = [a @ b for a, b in zip(g.chunk(RANKS, 1), w.chunk(RANKS))]
    truth = sum(parts)
    assert sum(map(size, parts)) > 10 * size(truth), "the case must cancel"
    its, errors, of_weight = error(sum(p.bfloat16().double() for p in parts), truth), [], []
    for reduce_dtype in (None, torch.float32):
        dx, dw = zip(*everywhere(worlds, device, RANKS, _gradients, strategy, sequence_parallel, reduce_dtype))
        assert sequence_parallel or torch.equal(*dx), "dX differs by rank"
        errors.append(error(torch.cat(dx) if sequence_parallel else dx[0], truth))
        of_weight.append(torch.cat(dw))
    default, ours = errors
    # What is left is the rounding of the logits' gradient, which the sum's does not add to.
    assert ours <= 0.5 * its and ours <= 0.5 * default, f"{ours:.3g}, {default:.3g}, of bf16 parts {its:.3g}"
    assert torch.equal(*of_weight), "dW is no sum over ranks"
