"""The check of a peer's errors before it is timed.

The peer's loss and gradients are compared with the float64 truth of the same problem. The error of plain torch in the
same dtype is the yardstick: `error <= 2 * torch's error + floor`. The floor is a few roundings of float32. For the
loss, a single number for which torch's error may be small by luck, it is one rounding of the dtype.

Each gradient has two errors. 'dX' is the error of the whole tensor (Frobenius norm). 'dX row' is the largest error of a
row, relative to the root mean square of the rows: it shows a single wrong token, which the error of the whole hides.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .problem import Problem
from .team import NotMeasured


class Answers(NamedTuple):
    """The results of one problem in one dtype."""

    loss: Tensor  # the mean
    grad_x: Tensor  # [N, D], of the whole sequence
    grad_weight: Tensor  # [V/P, D], of this rank's shard


class Judge:
    """Compares a peer's results with the truth. Errors and limits are the largest of all ranks."""

    def __init__(self, problem: Problem, truth: Answers, torch_answers: Answers):
        self.problem, self.truth = problem, truth
        errors = self._errors(torch_answers.loss, problem.own(torch_answers.grad_x), torch_answers.grad_weight)
        self.yardstick = problem.team.worst(errors | {"loss of forward": errors["loss"]})

    def check(
        self, without: Tensor, outputs: tuple, main_grad: bool = False, factor: float = 2
    ) -> tuple[dict[str, float], str]:
        """The errors of the loss, dX and dW, and which exceed their limits. Raises NotMeasured for a wrong shape.

        `without`: the loss of forward alone, which may run different code. `outputs`: loss, dX and dW of forward +
        backward. With `main_grad` dW is fp32. `factor`: the allowed multiple of torch's error."""
        x, weight, team = self.problem.x, self.problem.weight, self.problem.team

        def own_errors() -> dict[str, float]:
            dtypes = {"dX": x.dtype, "dW": torch.float32 if main_grad else weight.dtype}
            for (name, dtype), gradient, like in zip(dtypes.items(), outputs[1:], (x, weight)):
                if gradient is None or gradient.shape != like.shape or gradient.dtype != dtype:
                    got = "None" if gradient is None else f"{list(gradient.shape)}, {gradient.dtype}"
                    raise NotMeasured(f"refused: {name} is {got}, expected {list(like.shape)}, {dtype}")
            return self._errors(*outputs) | {"loss of forward": self._errors(without)["loss"]}

        errors = team.worst(team.agree(own_errors))
        floors = dict.fromkeys(errors, 4 * torch.finfo(torch.float32).eps)
        floors["loss"] = floors["loss of forward"] = max(floors["loss"], torch.finfo(x.dtype).eps)
        allowed = {name: factor * error + floors[name] for name, error in self.yardstick.items()}
        wrong = [name for name in errors if not errors[name] <= allowed[name]]  # NaN is wrong too
        return errors, "; ".join(f"{name} error {errors[name]:.1e}, allowed {allowed[name]:.1e}" for name in wrong)

    def _errors(self, loss: Tensor, *gradients: Tensor) -> dict[str, float]:
        """{'loss', 'dX', 'dX row', 'dW', 'dW row': relative error}; `gradients`: dX and dW, or none."""
        true = self.truth
        errors = {"loss": (abs(loss.double() - true.loss) / abs(true.loss)).item()}
        truths = self.problem.own(true.grad_x), true.grad_weight
        for name, gradient, truth in zip(("dX", "dW"), gradients, truths):
            rows = torch.linalg.vector_norm(gradient - truth, dim=1)
            scale = torch.linalg.vector_norm(truth) / len(truth) ** 0.5  # root mean square of the rows
            errors[name] = (rows.square().mean().sqrt() / scale).item()
            errors[f"{name} row"] = (rows.max() / scale).item()
        return errors


def answers(problem: Problem, dtype: torch.dtype) -> Answers:
    """The results of plain torch in a dtype. On several ranks the vocabulary is sharded, as in Megatron's native loss.

    Products are in `dtype`, sums and the softmax at least in float32. In float64 the result is the truth. Tokens are
    processed in blocks; dW is summed over the blocks and rounded once."""
    team, hidden, weight = problem.team, problem.hidden, problem.weight.to(dtype)
    sums = torch.promote_types(dtype, torch.float32)
    count = problem.counted.sum()
    grad_x, grad_weight = torch.empty_like(hidden, dtype=dtype), torch.zeros_like(weight, dtype=sums)
    loss = weight.new_zeros((), dtype=sums)
    for tokens in problem.blocks:
        x, counted = hidden[tokens].to(dtype), problem.counted[tokens].unsqueeze(1)
        z = (x @ weight.T).to(sums)
        loss += (_cross_entropy_(z, problem, tokens) * counted).sum() / count
        gradient = z.mul_(counted).div_(count).to(dtype)
        grad_x[tokens] = gradient @ weight
        grad_weight += gradient.T.to(sums) @ x.to(sums)
    return Answers(loss, team.reduce(grad_x), grad_weight.to(dtype))


def _cross_entropy_(z: Tensor, problem: Problem, tokens: slice) -> Tensor:
    """The losses [R, 1] of logits z [R, V/P] of some tokens. In place, z becomes softmax minus one-hot."""
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
