"""The two measured calls of a peer: forward without gradients, and forward + backward."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from .peers import FORWARD, FORWARD_BACKWARD, OVERLAPPED, Peer
from .problem import Problem

# torch 2.13 renamed these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def calls_of(peer: Peer, problem: Problem, loss: Callable | None = None) -> dict[str, Callable]:
    """`{pass: function()}` for a peer and its loss. Forward + backward returns the loss, dX and dW; for a GEMM-only
    baseline dX and dW."""
    if peer.family == "gemm-only":
        return _baseline_calls(problem, peer.name == OVERLAPPED)
    return _loss_calls(loss, problem, peer)


def _loss_calls(loss, problem, peer):
    """As in training, gradients go to `.grad` of leaf tensors, or to one `main_grad` of all calls. Each call makes new
    leaves on the same storage: gradients in `.grad` do not accumulate over the calls."""
    x, weight, target = problem.x, problem.weight, problem.target
    buffer = torch.zeros_like(weight, dtype=torch.float32) if peer.main_grad else None

    def forward():
        with torch.no_grad(), peer.context():
            return loss(x, weight, target)

    def forward_backward():
        leaf_x, leaf_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        if buffer is not None:
            leaf_weight.main_grad, leaf_weight.grad_added_to_main_grad = buffer, False
        with peer.context():
            value = loss(leaf_x, leaf_weight, target)
            value.backward()
        return value.detach(), leaf_x.grad, leaf_weight.grad if buffer is None else buffer

    return {FORWARD: forward, FORWARD_BACKWARD: forward_backward}


def _baseline_calls(problem, collectives):
    """The matrix products that every loss needs, 6 N V D / P flops. The logits z take the place of their gradient.

    With `collectives`, also the collectives of stock Megatron, each beside a product that does not depend on it. dX is
    all-reduced beside z.T @ x. Under sequence parallelism the hidden states are gathered before x @ W.T, and again
    beside z @ W, since Megatron does not save the gathered N * D elements; dX is reduce-scattered beside z.T @ x.
    """
    weight, options = problem.weight, {"group": problem.team.group, "async_op": True}
    gathers = collectives and problem.sequence_parallel
    x = problem.x if gathers else problem.hidden

    def gather():
        """The hidden states of all ranks, and the handle of their gather."""
        whole = x.new_empty(problem.hidden.shape)
        return whole, all_gather(whole, x, **options)

    def product():
        whole, work = gather() if gathers else (x, None)
        if work:
            work.wait()
        return whole @ weight.T

    def forward():
        product()  # the logits are freed at once, as by a loss that does not need them

    def forward_backward():
        z = product()
        whole, work = gather() if gathers else (x, None)
        grad_x = z @ weight
        if work:
            work.wait()
            summed, grad_x = grad_x, torch.empty_like(x)
            work = reduce_scatter(grad_x, summed, **options)
        elif collectives:
            work = dist.all_reduce(grad_x, **options)
        grad_weight = z.T @ whole
        if work:
            work.wait()
        return grad_x, grad_weight

    return {FORWARD: forward, FORWARD_BACKWARD: forward_backward}
