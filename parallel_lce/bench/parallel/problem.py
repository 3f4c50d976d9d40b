"""The tensors of each rank, their float64 truth, and plain torch's answer in the same dtype.

Both answers are those of the whole vocabulary and sequence, of which each rank holds its shard of dW and all of dX.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import accuracy
from ..accuracy import Judge
from ..inputs import IGNORE_INDEX, IGNORED, Inputs


@dataclass(frozen=True)
class Problem:
    """`x [N, D]` and `target [N]` are the same on all ranks; `weight [V/P, D]` is this rank's shard, whose first row is
    vocabulary entry `start`."""

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    start: int

    def part(self, whole, team, sequence_parallel):
        """This rank's part of `whole [N, ...]`: all of it without sequence parallelism."""
        return whole.chunk(team.ranks)[team.rank] if sequence_parallel else whole

    def inputs(self, team, sequence_parallel):
        """What a call on this rank is given."""
        return Inputs(self.part(self.x, team, sequence_parallel), self.weight, self.target)


def make_problem(shape, dtype, team, seed):
    """Random tensors as those of `..inputs.make_inputs`: logits ~ N(0, 1), uniform targets, some of them ignored."""
    device, rows = team.device, shape.v // team.ranks
    shared = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape.n, shape.d, dtype=dtype, device=device, generator=shared)
    target = torch.randint(shape.v, (shape.n,), device=device, generator=shared)
    target[torch.rand(shape.n, device=device, generator=shared) < IGNORED] = IGNORE_INDEX
    target[0] = 0  # at least one token counts
    own = torch.Generator(device).manual_seed(seed + 1 + team.rank)
    weight = torch.randn(rows, shape.d, dtype=dtype, device=device, generator=own).mul_(shape.d**-0.5)
    return Problem(x, weight, target, team.rank * rows)


class Truth:
    """The answers to one problem, from which a judge of each layout is made. `forget()` frees them."""

    def __init__(self, problem, team):
        self._problem, self._team = problem, team
        self._exact, self._torchs = exact(problem, team), torch_in_same_dtype(problem, team)

    def judge(self, sequence_parallel):
        """Judges the loss, this rank's dX and its dW; limits are the same on all ranks."""
        largest, loss, grad_x, grad_weight = self._exact
        its_loss, its_grad_x, its_grad_weight = self._torchs
        grad_x, its_grad_x = (self._problem.part(g, self._team, sequence_parallel) for g in (grad_x, its_grad_x))
        inputs = self._problem.inputs(self._team, sequence_parallel)
        truth, torchs = (largest, loss, grad_x, grad_weight), (its_loss, its_grad_x, its_grad_weight)
        return Judge.between(inputs, truth, torchs, self._team.worst)

    def forget(self):
        self._exact = self._torchs = None


def exact(problem, team):
    """`(max |z|, mean loss, dX [N, D], dW [V/P, D])` in float64, in blocks of tokens."""
    weight, counted = problem.weight.double(), problem.target != IGNORE_INDEX
    count = counted.sum()
    grad_x, grad_weight = torch.empty_like(problem.x, dtype=torch.float64), torch.zeros_like(weight)
    loss, largest = weight.new_zeros(()), weight.new_zeros(())
    rows = max(1, accuracy.BLOCK_BYTES // (8 * len(weight)))
    for start in range(0, len(problem.x), rows):
        block = slice(start, start + rows)
        x, counts = problem.x[block].double(), counted[block].unsqueeze(1)
        z = x @ weight.T
        largest = torch.maximum(largest, torch.maximum(z.amax(), -z.amin()))
        here, ids = _local_targets(problem, block)
        lse, per_token = _lse_and_loss(z, here, ids, team)
        loss += (per_token * counts).sum() / count
        p = z.sub_(lse).exp_()
        p.scatter_(1, ids, p.gather(1, ids) - here.to(p.dtype))
        p.mul_(counts).div_(count)
        grad_x[block] = p @ weight
        grad_weight.addmm_(p.T, x)
        del z, p
    dist.all_reduce(grad_x, group=team.group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=team.group)
    return largest.item(), loss, grad_x, grad_weight


def torch_in_same_dtype(problem, team):
    """`(mean loss, dX [N, D], dW [V/P, D])` as Megatron's output layer and native loss compute them: products in the
    dtype of the input, the softmax in float32, dX summed over the ranks in the dtype of the input."""
    counted = (problem.target != IGNORE_INDEX).unsqueeze(1)
    count = counted.sum()
    z = (problem.x @ problem.weight.T).float()
    here, ids = _local_targets(problem, slice(None))
    lse, per_token = _lse_and_loss(z, here, ids, team)
    p = z.sub_(lse).exp_()
    p.scatter_(1, ids, p.gather(1, ids) - here.to(p.dtype))
    dlogits = p.mul_(counted / count).to(problem.x.dtype)
    del z, p
    grad_x = dlogits @ problem.weight
    dist.all_reduce(grad_x, group=team.group)
    return (per_token * counted).sum() / count, grad_x, dlogits.T @ problem.x


def _local_targets(problem, block):
    """`(whether the target lies in this shard, its row there or 0)`, both [R, 1]."""
    ids = problem.target[block].unsqueeze(1) - problem.start
    here = (ids >= 0) & (ids < len(problem.weight))
    return here, torch.where(here, ids, 0)


def _lse_and_loss(z, here, ids, team):
    """`(lse, lse - target's logit)`, both [R, 1], of logits [R, V/P] over all ranks."""
    top = z.amax(1, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=team.group)
    sums = torch.cat([(z - top).exp_().sum(1, keepdim=True), (z.gather(1, ids) - top) * here], 1)
    dist.all_reduce(sums, group=team.group)
    log_sum = sums[:, :1].log()
    return top + log_sum, log_sum - sums[:, 1:]
