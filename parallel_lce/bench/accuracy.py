"""What a peer must fulfil before it is timed.

Its loss and gradients are compared with a float64 reference of the same inputs. How much error is allowed depends
on what plain torch has in the same dtype, so that no tolerance is set by hand:
`error <= 2 * torch's error + floor`. For gradients the floor is next to nothing, a few roundings of float32. For
the loss, one number in which torch may be right by luck, it is the last digit of the dtype: some peers return a
bfloat16 loss for bfloat16 input.

Each gradient has two errors, both relative: 'dX' is of the whole (Frobenius norm), 'dX row' of the worst row,
against the root mean square of the rows. The whole hides a single wrong token; the worst row does not.
"""

import math

import torch
import torch.nn.functional as F

from .inputs import IGNORE_INDEX

ROWS = 512  # of a block: the float64 logits of the reference take ROWS * V * 8 bytes


class Refused(Exception):
    """A peer that is not timed; the message says why."""


class Judge:
    """Holds the float64 truth of one set of inputs and torch's errors against it."""

    def __init__(self, inputs):
        self.inputs = inputs
        self.truth = loss_and_gradients(inputs, torch.float64, ROWS)
        self.yardstick = self.errors(*_torch_in_same_dtype(inputs))
        floor = 4 * torch.finfo(torch.float32).eps
        self.limits = {name: 2 * error + floor for name, error in self.yardstick.items()}
        self.limits["loss"] = 2 * self.yardstick["loss"] + max(floor, torch.finfo(inputs.x.dtype).eps)

    def errors(self, loss, grad_x, grad_weight):
        """{'loss', 'dX', 'dX row', 'dW', 'dW row': relative error}."""
        true_loss, true_grad_x, true_grad_weight = self.truth
        errors = {"loss": abs(loss.double() - true_loss).item() / abs(true_loss.item())}
        errors["dX"], errors["dX row"] = _gradient_errors(grad_x, true_grad_x)
        errors["dW"], errors["dW row"] = _gradient_errors(grad_weight, true_grad_weight)
        return errors

    def check(self, forward, forward_backward):
        """The errors of a peer, or Refused. The loss counts from the worse of the two calls, which may run
        different code: without gradients there is nothing to save."""
        inputs = self.inputs
        loss, grad_x, grad_weight = forward_backward()
        for name, gradient, like in (("dX", grad_x, inputs.x), ("dW", grad_weight, inputs.weight)):
            if gradient is None:
                raise Refused(f"refused: no {name}")
            if gradient.shape != like.shape or gradient.dtype != like.dtype:
                got, want = (tuple(gradient.shape), gradient.dtype), (tuple(like.shape), like.dtype)
                raise Refused(f"refused: {name} is {got}, expected {want}")
        errors = self.errors(loss.detach(), grad_x, grad_weight)
        forward_error = abs(forward().double() - self.truth[0]).item() / abs(self.truth[0].item())
        errors["loss"] = _worse(errors["loss"], forward_error)
        wrong = [name for name in errors if not errors[name] <= self.limits[name]]  # NaN is wrong too
        if wrong:
            texts = [f"{name} error {errors[name]:.1e}, allowed {self.limits[name]:.1e}" for name in wrong]
            raise Refused("refused: " + "; ".join(texts))
        return errors


def loss_and_gradients(inputs, dtype, rows):
    """Mean loss, dX [N, D] and dW [V, D] by plain torch in `dtype`, in blocks of `rows` tokens.

    Nothing larger than `[rows, V]` is made. Sums over blocks are in float64 for float64, else in float32; with
    one block of all tokens nothing is summed and the result is that of torch's ordinary call.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, target = inputs.x, inputs.target
    count = (target != IGNORE_INDEX).sum()
    weight = inputs.weight.detach().to(dtype).requires_grad_()
    loss = torch.zeros((), dtype=wide, device=x.device)
    grad_x = torch.empty(x.shape, dtype=dtype, device=x.device)
    grad_weight = torch.zeros(weight.shape, dtype=wide, device=x.device)
    for start in range(0, len(x), rows):
        block = x[start : start + rows].detach().to(dtype).requires_grad_()
        logits = F.linear(block, weight).to(wide)
        part = F.cross_entropy(logits, target[start : start + rows], ignore_index=IGNORE_INDEX, reduction="sum") / count
        grad_x[start : start + rows], grad = torch.autograd.grad(part, (block, weight))
        grad_weight += grad
        loss += part.detach()
    return loss, grad_x, grad_weight.to(dtype)


def _torch_in_same_dtype(inputs):
    """In one block where that fits, which is the ordinary torch path; else in as many as needed."""
    rows = len(inputs.x)
    while True:
        try:
            return loss_and_gradients(inputs, inputs.x.dtype, rows)
        except torch.OutOfMemoryError:
            if rows <= ROWS:
                raise
        rows = max(ROWS, rows // 2)
        torch.cuda.empty_cache()


def _gradient_errors(got, want, rows=4096):
    """Relative errors of a gradient [R, D] against float64: (of the whole, of the worst row)."""
    errors, squares = [], []
    for start in range(0, len(want), rows):  # in blocks: float64 copies of a whole dW would be large
        true = want[start : start + rows].double()
        errors.append((got[start : start + rows].double() - true).square().sum(1))
        squares.append(true.square().sum(1))
    errors, square = torch.cat(errors), torch.cat(squares).mean()
    return (errors.mean() / square).sqrt().item(), (errors.max() / square).sqrt().item()


def _worse(a, b):
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
