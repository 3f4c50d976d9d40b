"""What a peer must fulfil before it is timed.

Its loss and gradients are compared with the float64 truth of the same problem. Plain torch's error in the same dtype is
the yardstick, so that no tolerance is set by hand: `error <= 2 * torch's error + floor`. For gradients the floor is a
few roundings of float32. For the loss, a single number in which torch may be right by luck, it is the last digit of the
dtype: some peers return a bfloat16 loss for bfloat16 input.

Each gradient has two errors. 'dX' is of the whole (Frobenius norm). 'dX row' is of the worst row, relative to the root
mean square of the rows: it shows a single wrong token, which the whole hides.
"""

import math

import torch
import torch.distributed as dist

from .peers import FORWARD, FORWARD_BACKWARD
from .team import Refused

BLOCK_BYTES = 512 << 20  # float64 logits of a block of tokens; two blocks exist at a time
SMALLEST_BLOCK = 512  # tokens of a block of plain torch, where all of them do not fit


class Judge:
    """Compares a peer's results on one rank with the truth. Errors and limits are those of the worst rank."""

    def __init__(self, problem, truth, torchs):
        """Of what `exact` and `torch_in_same_dtype` return, for the layout of the problem."""
        self.problem = problem
        self.largest_logit = truth[0]
        self.truth = self._own(truth)
        self.yardstick = problem.team.worst(self._errors(*self._own(torchs)))
        floor = 4 * torch.finfo(torch.float32).eps
        self.limits = {name: 2 * error + floor for name, error in self.yardstick.items()}
        self.limits["loss"] = 2 * self.yardstick["loss"] + max(floor, torch.finfo(problem.hidden.dtype).eps)

    def check(self, outputs, main_grad=False):
        """The errors of `{pass: what its call returned}`, or Refused on all ranks; with `main_grad` dW is fp32. The
        loss counts from the worse of the passes, which may run different code."""
        team = self.problem.team
        errors = team.worst(team.agree(lambda: self._found(outputs, main_grad)))
        wrong = [name for name in errors if not errors[name] <= self.limits[name]]  # NaN is wrong too
        if wrong:
            texts = [f"{name} error {errors[name]:.1e}, allowed {self.limits[name]:.1e}" for name in wrong]
            raise Refused("refused: " + "; ".join(texts), errors)
        return errors

    def forget(self):
        """Frees the truth, before anything is timed."""
        self.truth = None

    def _own(self, found):
        """This rank's `(loss, dX, dW)` of `answers`, whose dX is of the whole sequence."""
        _, loss, grad_x, grad_weight = found
        return loss, None if grad_x is None else self.problem.own(grad_x), grad_weight

    def _found(self, outputs, main_grad):
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

    def _errors(self, loss, grad_x=None, grad_weight=None):
        """{'loss', 'dX', 'dX row', 'dW', 'dW row': relative error}, of the gradients that are given."""
        true_loss, true_grad_x, true_grad_weight = self.truth
        errors = {"loss": abs(loss.double() - true_loss).item() / abs(true_loss.item())}
        if grad_x is not None:
            errors["dX"], errors["dX row"] = _gradient_errors(grad_x, true_grad_x)
            errors["dW"], errors["dW row"] = _gradient_errors(grad_weight, true_grad_weight)
        return errors


def exact(problem, gradients=True):
    """The truth, as `answers` returns it: float64, in blocks of tokens."""
    return answers(problem, torch.float64, gradients, max(1, BLOCK_BYTES // (8 * len(problem.weight))))


def torch_in_same_dtype(problem, gradients=True):
    """What plain torch answers, or over ranks Megatron's output layer and native loss: of all tokens in one call. On
    one rank that has no memory for it, of blocks of tokens."""
    rows = len(problem.hidden)
    while True:
        try:
            return answers(problem, problem.hidden.dtype, gradients, rows)
        except torch.OutOfMemoryError:
            if rows <= SMALLEST_BLOCK or problem.team.ranks > 1:
                raise
        rows = max(SMALLEST_BLOCK, rows // 2)
        torch.cuda.empty_cache()


def answers(problem, dtype, gradients, rows):
    """`(max |z|, mean loss, dX [N, D] of the whole sequence, dW [V/P, D])` in blocks of so many tokens. Products are in
    `dtype`, sums and the softmax at least in float32. Gradients are None where they are not wanted."""
    team, hidden, weight = problem.team, problem.hidden, problem.weight.to(dtype)
    sums = torch.promote_types(dtype, torch.float32)
    count = problem.counted.sum()
    grad_x = torch.empty_like(hidden, dtype=dtype) if gradients else None
    grad_weight = torch.zeros_like(weight, dtype=sums) if gradients else None
    loss, largest = weight.new_zeros((), dtype=sums), weight.new_zeros((), dtype=sums)
    for start in range(0, len(hidden), rows):
        tokens = slice(start, start + rows)
        x, counted = hidden[tokens].to(dtype), problem.counted[tokens].unsqueeze(1)
        z = (x @ weight.T).to(sums)
        largest = torch.maximum(largest, torch.maximum(z.amax(), -z.amin()))
        loss += (_cross_entropy_(z, problem, tokens) * counted).sum() / count
        if gradients:
            dlogits = z.mul_(counted).div_(count).to(dtype)
            grad_x[tokens] = dlogits @ weight
            grad_weight += dlogits.T @ x
            del dlogits
        del z  # before the next block's
    largest = team.reduce(largest, dist.ReduceOp.MAX).item()
    return (largest, loss, team.reduce(grad_x), grad_weight.to(dtype)) if gradients else (largest, loss, None, None)


def _cross_entropy_(z, problem, tokens):
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


def _check_form(name, gradient, shape, dtype):
    if gradient is None:
        raise Refused(f"refused: no {name}")
    if gradient.shape != shape or gradient.dtype != dtype:
        got, want = (tuple(gradient.shape), gradient.dtype), (tuple(shape), dtype)
        raise Refused(f"refused: {name} is {got}, expected {want}")


def _gradient_errors(got, want, rows=4096):
    """Relative errors of a gradient [R, D] against float64: (of the whole, of the worst row)."""
    errors, squares = [], []
    for start in range(0, len(want), rows):  # in blocks: float64 copies of a whole dW would be large
        true = want[start : start + rows]
        errors.append((got[start : start + rows].double() - true).square().sum(1))
        squares.append(true.square().sum(1))
    errors, square = torch.cat(errors), torch.cat(squares).mean()
    return (errors.mean() / square).sqrt().item(), (errors.max() / square).sqrt().item()
