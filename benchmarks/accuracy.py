"""What a peer must fulfil before it is timed.

Its loss and gradients are compared with the float64 truth of the same problem. Plain torch's error in the same dtype is
the yardstick, so that no tolerance is set by hand: `error <= 2 * torch's error + floor`. For gradients the floor is a
few roundings of float32. For the loss, a single number in which torch may be right by luck, it is the last digit of the
dtype: some peers return a bfloat16 loss for bfloat16 input.

Each gradient has two errors. 'dX' is of the whole (Frobenius norm). 'dX row' is of the worst row, relative to the root
mean square of the rows: it shows a single wrong token, which the whole hides.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .peers import FORWARD, FORWARD_BACKWARD
from .problem import Problem
from .team import NotTimed

BLOCK_BYTES = 512 << 20  # float64 logits of a block of tokens; two blocks exist at a time


@dataclass(frozen=True)
class Answers:
    """The results of one problem in one dtype. Gradients are None where they are not wanted."""

    loss: Tensor  # the mean
    grad_x: Tensor | None  # [N, D], of the whole sequence
    grad_weight: Tensor | None  # [V/P, D], of this rank's shard
    largest_logit: float  # max |z|


class Judge:
    """Compares a peer's results on one rank with the truth. Errors and limits are those of the worst rank."""

    def __init__(self, problem: Problem, truth: Answers, torchs: Answers):
        """`truth` is `answers` in float64, `torchs` in the dtype of the problem."""
        self.problem = problem
        self.largest_logit = truth.largest_logit
        self._truth = self._own(truth)
        self.yardstick = problem.team.worst(self._errors(*self._own(torchs)))
        floor = 4 * torch.finfo(torch.float32).eps
        self.limits = {name: 2 * error + floor for name, error in self.yardstick.items()}
        self.limits["loss"] = 2 * self.yardstick["loss"] + max(floor, torch.finfo(problem.hidden.dtype).eps)

    def check(self, outputs: dict, main_grad: bool = False) -> dict[str, float]:
        """The errors of `{pass: what its call returned}`, or NotTimed on all ranks; with `main_grad` dW is fp32. The
        loss counts from the worse of the passes, which may run different code."""
        team = self.problem.team
        errors = team.worst(team.agree(lambda: self._found(outputs, main_grad)))
        wrong = [name for name in errors if not errors[name] <= self.limits[name]]  # NaN is wrong too
        if wrong:
            texts = [f"{name} error {errors[name]:.1e}, allowed {self.limits[name]:.1e}" for name in wrong]
            raise NotTimed("refused: " + "; ".join(texts), errors)
        return errors

    def forget(self) -> None:
        """Drops this judge's reference to the truth. The last judge to do so frees the memory."""
        del self._truth

    def _own(self, answers: Answers) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """This rank's `(loss, dX, dW)`."""
        grad_x = answers.grad_x
        return answers.loss, None if grad_x is None else self.problem.own(grad_x), answers.grad_weight

    def _found(self, outputs: dict, main_grad: bool) -> dict[str, float]:
        x, weight, errors = self.problem.x, self.problem.weight, {}
        if FORWARD_BACKWARD in outputs:
            loss, grad_x, grad_weight = outputs[FORWARD_BACKWARD]
            _check_form("dX", grad_x, x.shape, x.dtype)
            _check_form("dW", grad_weight, weight.shape, torch.float32 if main_grad else weight.dtype)
            errors = self._errors(loss, grad_x, grad_weight)
        if FORWARD in outputs:
            without = self._errors(outputs[FORWARD])["loss"]
            errors["loss"] = max(errors.get("loss", 0.0), without, key=lambda e: (math.isnan(e), e))
        return errors

    def _errors(self, loss: Tensor, *gradients: Tensor | None) -> dict[str, float]:
        """{'loss', 'dX', 'dX row', 'dW', 'dW row': relative error}, of the gradients that are given."""
        true_loss, *truths = self._truth
        errors = {"loss": (abs(loss.double() - true_loss) / abs(true_loss)).item()}
        for name, found, truth in zip(("dX", "dW"), gradients, truths):
            if found is not None and truth is not None:
                rows = torch.linalg.vector_norm(found - truth, dim=1)
                scale = torch.linalg.vector_norm(truth) / len(truth) ** 0.5  # root mean square of the rows
                errors[name] = (rows.square().mean().sqrt() / scale).item()
                errors[f"{name} row"] = (rows.max() / scale).item()
        return errors


def answers(
    problem: Problem,
    dtype: torch.dtype,
    gradients: bool = True,
    logits: torch.dtype | None = None,
    dlogits: torch.dtype | None = None,
) -> Answers:
    """What plain torch answers in a dtype, or over ranks Megatron's output layer and native loss: products in `dtype`,
    sums and the softmax at least in float32. In float64 it is the truth. It goes through blocks of tokens, whose dW are
    summed before they are rounded. `logits` and `dlogits` are narrower dtypes, to which the logits and their gradient
    are rounded on the way."""
    team, hidden, weight = problem.team, problem.hidden, problem.weight.to(dtype)
    sums = torch.promote_types(dtype, torch.float32)
    count = problem.counted.sum()
    grad_x = torch.empty_like(hidden, dtype=dtype) if gradients else None
    grad_weight = torch.zeros_like(weight, dtype=sums) if gradients else None
    loss, largest = weight.new_zeros((), dtype=sums), weight.new_zeros((), dtype=sums)
    rows = max(1, BLOCK_BYTES // (8 * len(weight)))
    for start in range(0, len(hidden), rows):
        tokens = slice(start, start + rows)
        x, counted = hidden[tokens].to(dtype), problem.counted[tokens].unsqueeze(1)
        z = _rounded(x @ weight.T, logits).to(sums)
        largest = torch.maximum(largest, z.abs().amax())
        loss += (_cross_entropy_(z, problem, tokens) * counted).sum() / count
        if grad_x is not None and grad_weight is not None:
            gradient = _rounded(z.mul_(counted).div_(count).to(dtype), dlogits)
            grad_x[tokens] = gradient @ weight
            grad_weight += gradient.T.to(sums) @ x.to(sums)
    largest = team.reduce(largest, dist.ReduceOp.MAX).item()
    if grad_x is None or grad_weight is None:
        return Answers(loss, None, None, largest)
    return Answers(loss, team.reduce(grad_x), grad_weight.to(dtype), largest)


def _rounded(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The values, rounded to a narrower dtype."""
    return values if dtype is None else values.to(dtype).to(values.dtype)


def _cross_entropy_(z: Tensor, problem: Problem, tokens: slice) -> Tensor:
    """Losses [R, 1] of some tokens' logits z [R, V/P], which become softmax minus one-hot in place."""
    ids = problem.target[tokens].unsqueeze(1) - problem.team.rank * z.shape[1]
    here = (ids >= 0) & (ids < z.shape[1])  # the target lies in this rank's shard
    ids = torch.where(here, ids, 0)
    top = problem.team.reduce(z.amax(1, keepdim=True), dist.ReduceOp.MAX)
    z.sub_(top)
    sums = problem.team.reduce(torch.cat([z.exp().sum(1, keepdim=True), z.gather(1, ids) * here], 1))
    log_sum = sums[:, :1].log()
    z.sub_(log_sum).exp_()  # in torch's order: top + log_sum would be rounded
    z.scatter_(1, ids, z.gather(1, ids) - here.to(z.dtype))
    return log_sum - sums[:, 1:]


def _check_form(name: str, gradient: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
    if gradient is None:
        raise NotTimed(f"refused: no {name}")
    if gradient.shape != shape or gradient.dtype != dtype:
        got, want = (tuple(gradient.shape), gradient.dtype), (tuple(shape), dtype)
        raise NotTimed(f"refused: {name} is {got}, expected {want}")
