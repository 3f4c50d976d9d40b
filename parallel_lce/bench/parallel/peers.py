"""Who is measured over ranks, and how each is called.

A peer is a function `loss(x, weight, target) -> scalar` as in `..peers`: of this rank's hidden states, [N, D] or
[N/P, D] under sequence parallelism, its shard [V/P, D] and the targets [N] of the whole sequence. The two kinds of bare
matrix products have no loss.
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from .. import libraries
from ..inputs import Inputs
from ..measure import bare_calls, passes_of
from ..peers import (
    ALL,
    ANY,
    CPU_AND_CUDA,
    CUDA,
    FORWARD,
    FORWARD_BACKWARD,
    PASSES,
    SCALAR,
    Peer,
    ours,
    ours_main_grad,
    ours_per_token,
)
from .team import all_gather, reduce_scatter

BARE, OVERLAPPED, SAVED, LEAN = "bare", "bare-overlapped", "ours-saved", "ours-lean"
LEAN_BUDGET = 64 << 20


def registry():
    """All peers there are, in the order of the table. Without gradients ours are one code, which the first measures."""
    both, backward = PASSES, (FORWARD_BACKWARD,)

    def of_ours(name, upstream, build, budget, label, passes=backward):
        build = partial(_on_team, build, budget)
        return Peer(name, upstream, CPU_AND_CUDA, build, "ours", label, passes, build.args[0] is ours_main_grad)

    return [
        of_ours(SAVED, ANY, ours_per_token, ALL, "ours, per token, all saved", both),
        of_ours("ours-default", SCALAR, ours, None, "ours, mean, default budget"),
        of_ours("ours-accumulate", SCALAR, ours, 128 << 20, "ours, mean, 128 MiB"),
        of_ours(LEAN, ANY, ours_main_grad, LEAN_BUDGET, "ours, fp32 main_grad, 64 MiB"),
        of_ours("ours-recompute", ANY, ours_per_token, 0, "ours, per token, budget 0"),
        Peer(BARE, ANY, CPU_AND_CUDA, None, "bare", "bare products, alone"),
        Peer(OVERLAPPED, ANY, CPU_AND_CUDA, None, "bare", "bare products and collectives"),
        Peer("megatron", ANY, CUDA, partial(libraries.megatron_tensor_parallel, False)),
        Peer("megatron-fused", ANY, CUDA, partial(libraries.megatron_tensor_parallel, True)),
        Peer("loss-parallel", ANY, CPU_AND_CUDA, libraries.loss_parallel),
        Peer("verl", ANY, CUDA, libraries.verl),
    ]


NEEDS = {"megatron": "megatron.core", "megatron-fused": "megatron.core", "verl": "verl"}  # modules to import


def names():
    return [peer.name for peer in registry()]


def _on_team(build, budget, group, sequence_parallel):
    return build(budget, process_group=group, sequence_parallel=sequence_parallel)


def calls_of(peer, problem, team, sequence_parallel):
    """`{pass: function()}`; that of forward + backward returns the loss and the gradients, or those alone of the bare
    products."""
    if peer.name == BARE:
        calls = bare_calls(Inputs(problem.x, problem.weight, problem.target))
    elif peer.name == OVERLAPPED:
        calls = _overlapped_calls(problem, team, sequence_parallel)
    else:
        loss = peer.build(team.group, sequence_parallel)
        calls = passes_of(loss, problem.inputs(team, sequence_parallel), peer.main_grad)
        calls = {kind: _within(getattr(loss, "around", nullcontext), call) for kind, call in calls.items()}
    return {kind: calls[kind] for kind in peer.passes}


def _within(context, call):
    def inside():
        with context():
            return call()

    return inside


def _overlapped_calls(problem, team, sequence_parallel):
    """The bare products with the collectives that stock has, each beside a product that does not need it.

    dX is all-reduced beside z.T @ x. Under sequence parallelism hidden states are gathered before x @ W.T, gathered
    again beside z @ W as Megatron does, which keeps nothing of size N * D, and dX is reduce-scattered beside z.T @ x.
    """
    x, weight, group = problem.inputs(team, sequence_parallel).x, problem.weight, team.group

    def gather():
        whole = x.new_empty(problem.x.shape)
        return whole, all_gather(whole, x, group=group, async_op=True)

    def hidden():
        if not sequence_parallel:
            return x
        whole, work = gather()
        work.wait()
        return whole

    def forward():
        hidden() @ weight.T  # not returned: z is what others may do without, no result

    def forward_backward():
        z = hidden() @ weight.T
        if not sequence_parallel:
            grad_x = z @ weight
            work = dist.all_reduce(grad_x, group=group, async_op=True)
            grad_weight = z.T @ x
        else:
            whole, work = gather()
            local = z @ weight
            work.wait()
            grad_x = torch.empty_like(x)
            work = reduce_scatter(grad_x, local, group=group, async_op=True)
            grad_weight = z.T @ whole
        work.wait()
        return grad_x, grad_weight

    return {FORWARD: forward, FORWARD_BACKWARD: forward_backward}
