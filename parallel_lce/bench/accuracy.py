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

from .inputs import IGNORE_INDEX
from .peers import FORWARD, FORWARD_BACKWARD, torch_loss

BLOCK_BYTES = 512 << 20  # float64 logits of a block of tokens of the reference; two blocks exist at a time
SMALLEST_BLOCK = 512  # tokens of a block of plain torch, where all of them do not fit


class Refused(Exception):
    """A peer that is not timed; the message says why, `errors` what was found until then."""

    def __init__(self, message, errors=None):
        super().__init__(message)
        self.errors = errors or {}


class Judge:
    """Holds the float64 truth of one set of inputs and torch's errors against it."""

    def __init__(self, inputs, gradients=True):
        self._hold(inputs, exact(inputs, gradients), _torch_in_same_dtype(inputs, gradients))

    @classmethod
    def between(cls, inputs, truth, torchs, worst=lambda errors: errors):
        """Of a truth, as `exact` returns it, and torch's loss and gradients that exist already. `worst(errors)` are
        the largest of all ranks."""
        judge = cls.__new__(cls)
        judge._hold(inputs, truth, torchs, worst)
        return judge

    def _hold(self, inputs, truth, torchs, worst=lambda errors: errors):
        self.inputs = inputs
        self.largest_logit, *self.truth = truth
        self.yardstick = worst(self.errors(*torchs))
        floor = 4 * torch.finfo(torch.float32).eps
        self.limits = {name: 2 * error + floor for name, error in self.yardstick.items()}
        self.limits["loss"] = 2 * self.yardstick["loss"] + max(floor, torch.finfo(inputs.x.dtype).eps)

    def errors(self, loss, grad_x=None, grad_weight=None):
        """{'loss', 'dX', 'dX row', 'dW', 'dW row': relative error}, of the gradients that are given."""
        true_loss, true_grad_x, true_grad_weight = self.truth
        errors = {"loss": abs(loss.double() - true_loss).item() / abs(true_loss.item())}
        if grad_x is not None:
            errors["dX"], errors["dX row"] = _gradient_errors(grad_x, true_grad_x)
            errors["dW"], errors["dW row"] = _gradient_errors(grad_weight, true_grad_weight)
        return errors

    def check(self, calls, main_grad=False):
        """The errors of a peer, or Refused."""
        errors = self.found(calls, main_grad)
        self.rule(errors)
        return errors

    def found(self, calls, main_grad=False):
        """The errors of a peer. `calls` are its functions by pass, each called once; with `main_grad` its dW is fp32.
        The loss counts from the worse of the two, which may run different code: without gradients there is nothing to
        save."""
        inputs, errors = self.inputs, {}
        if FORWARD_BACKWARD in calls:
            loss, grad_x, grad_weight = calls[FORWARD_BACKWARD]()
            weight_dtype = torch.float32 if main_grad else inputs.weight.dtype
            _check_form("dX", grad_x, inputs.x.shape, inputs.x.dtype)
            _check_form("dW", grad_weight, inputs.weight.shape, weight_dtype)
            errors = self.errors(loss.detach(), grad_x, grad_weight)
        if FORWARD in calls:
            errors["loss"] = _worse(errors.get("loss", 0.0), self.errors(calls[FORWARD]().detach())["loss"])
        return errors

    def rule(self, errors):
        """Raises Refused where an error is larger than allowed."""
        wrong = [name for name in errors if not errors[name] <= self.limits[name]]  # NaN is wrong too
        if wrong:
            texts = [f"{name} error {errors[name]:.1e}, allowed {self.limits[name]:.1e}" for name in wrong]
            raise Refused("refused: " + "; ".join(texts), errors)

    def forget(self):
        """Frees the reference, before anything is timed."""
        self.truth = None


def exact(inputs, gradients=True):
    """`(max |z|, mean loss, dX [N, D], dW [V, D])` in float64, in blocks of tokens; None for gradients not wanted."""
    x, target = inputs.x, inputs.target
    weight = inputs.weight.double()
    counted = target != IGNORE_INDEX
    count = counted.sum()
    grad_x = torch.empty_like(x, dtype=torch.float64) if gradients else None
    grad_weight = torch.zeros_like(weight) if gradients else None
    loss, largest = weight.new_zeros(()), weight.new_zeros(())
    rows = max(1, BLOCK_BYTES // (8 * len(weight)))
    for start in range(0, len(x), rows):
        block, counts = x[start : start + rows].double(), counted[start : start + rows]
        ids = torch.where(counts, target[start : start + rows], 0).unsqueeze(1)
        z = block @ weight.T
        largest = torch.maximum(largest, torch.maximum(z.amax(), -z.amin()))
        lse = z.logsumexp(1, keepdim=True)
        loss += ((lse - z.gather(1, ids)).squeeze(1) * counts).sum() / count
        if gradients:
            p = z.sub_(lse).exp_()
            p.scatter_add_(1, ids, p.new_full(ids.shape, -1.0))
            p.mul_(counts.unsqueeze(1)).div_(count)
            grad_x[start : start + rows] = p @ weight
            grad_weight.addmm_(p.T, block)
        del z
    return largest.item(), loss, grad_x, grad_weight


def _torch_in_same_dtype(inputs, gradients):
    """Loss and gradients of plain torch: in one call where that fits, which is the ordinary path; else in blocks of
    tokens, summed in float32."""
    rows = len(inputs.x)
    while True:
        try:
            return _torch_in_blocks(inputs, gradients, rows)
        except torch.OutOfMemoryError:
            if rows <= SMALLEST_BLOCK:
                raise
        rows = max(SMALLEST_BLOCK, rows // 2)
        torch.cuda.empty_cache()


def _torch_in_blocks(inputs, gradients, rows):
    x, target = inputs.x, inputs.target
    weight = inputs.weight.detach().requires_grad_(gradients)
    whole, count = rows >= len(x), (target != IGNORE_INDEX).sum()
    loss, grad_x, grad_weight = 0, [], None
    for start in range(0, len(x), rows):
        block = x[start : start + rows].detach().requires_grad_(gradients)
        ids = target[start : start + rows]
        part = torch_loss(block, weight, ids) if whole else torch_loss(block, weight, ids, "sum") / count
        if gradients:
            block_grad, grad = torch.autograd.grad(part, (block, weight))
            grad_x.append(block_grad)
            grad_weight = grad if whole else grad.float() if grad_weight is None else grad_weight.add_(grad)
        loss = loss + part.detach()
    if not gradients:
        return loss, None, None
    return loss, torch.cat(grad_x), grad_weight.to(x.dtype)


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


def _worse(a, b):
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
