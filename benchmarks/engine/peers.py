"""The peers: losses that are measured, and the GEMM-only baseline.

A loss is a function `loss(x, weight, target) -> scalar`, the mean cross-entropy over the targets that are not
IGNORE_INDEX. x are this rank's hidden states [N, D] ([N/P, D] under sequence parallelism), weight is its vocabulary
shard [V/P, D], and target has the ids [N] of the whole sequence.

The GEMM-only baseline is the three matrix products that every loss needs, without a loss. Speeds are relative to it.
"""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from . import libraries, ours
from .problem import Problem

FORWARD, FORWARD_BACKWARD = "forward", "fwd+bwd"
PASSES = (FORWARD, FORWARD_BACKWARD)  # without gradients; with dX and dW

ONE, RANKS = "one", "ranks"  # one process without a group; a process group, with or without sequence parallelism
BOTH = (ONE, RANKS)

GEMM_ONLY, OVERLAPPED, SAVED = "gemm-only", "gemm-only-overlapped", "ours-per-token@all"
ALL = 1 << 40  # a logits_budget that holds all exponentials

# torch 2.13 renamed these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Peer:
    """One row of the table. It is refused where the library that `build` imports is missing."""

    name: str
    build: Callable | None  # build(group, sequence_parallel) returns the loss; group is None on one GPU. None: products
    settings: tuple[str, ...] = (ONE,)
    main_grad: bool = False  # dW is added to an fp32 `weight.main_grad` that exists before the call
    context: Callable = nullcontext  # in which both passes run
    judged: bool = True  # its loss is the mean cross-entropy, so that its errors can be checked
    factor: float = 2  # allowed multiple of plain torch's errors

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")


# Of these `build(budget, group, sequence_parallel)` returns the loss.
OURS = (
    Peer("ours", partial(ours.loss, "mean"), BOTH),
    Peer("ours-per-token", partial(ours.loss, "none"), BOTH),
    Peer("ours-main-grad", ours.main_grad, BOTH, main_grad=True),
    Peer("ours-statistics", partial(ours.statistics, lambda *_: {}), BOTH),
    Peer("ours-entropy", partial(ours.statistics, lambda *_: {"entropy": True}), BOTH),
    Peer("ours-selected", partial(ours.statistics, ours.selected), BOTH),
    Peer("ours-masked", partial(ours.statistics, ours.half), BOTH, judged=False),
    Peer("ours-token-loss", partial(ours.clipped, True), BOTH, judged=False),
    Peer("ours-token-statistics", partial(ours.clipped, False), BOTH, judged=False),
    Peer("ours-distillation", ours.distillation, BOTH, judged=False),
)
OTHERS = (
    Peer(GEMM_ONLY, None, BOTH, judged=False),
    Peer(OVERLAPPED, None, (RANKS,), judged=False),
    Peer("torch", lambda *_: libraries.torch_loss),
    Peer("torch-compile", lambda *_: torch.compile(libraries.torch_loss, dynamic=False)),
    Peer("megatron-fused", partial(libraries.megatron, True, False), BOTH),
    Peer("megatron", partial(libraries.megatron, False, False), BOTH),
    Peer("megatron-fused-main-grad", partial(libraries.megatron, True, True), BOTH, main_grad=True),
    Peer("megatron-main-grad", partial(libraries.megatron, False, True), BOTH, main_grad=True),
    Peer("verl", libraries.verl, BOTH),
    Peer("liger", libraries.liger),
    Peer("liger-scaled", libraries.liger_scaled),
    # It sums dX and dW in the dtype of the input, and leaves out small gradients.
    Peer("cut-cross-entropy", libraries.cut_cross_entropy, factor=16),
    Peer("quack", libraries.quack),
    Peer("torch-distillation", libraries.distillation, judged=False),
)


def named(name: str, setting: str) -> Peer:
    """The peer of this name. A name of ours may end in a `logits_budget`: ours@512MiB, ours@0 or ours@all, which is
    `ALL`. Raises ArgumentTypeError for an unknown name."""
    kind, at, budget = name.partition("@")
    known = {peer.name: peer for peer in (*OURS, *OTHERS) if setting in peer.settings}
    match = re.fullmatch(r"(\d+)(|MiB|GiB)|all", budget)
    if kind not in known or (at and not (match and known[kind].is_ours)):
        raise ArgumentTypeError(f"no such peer: {name}; known: {', '.join(known)}; ours also with @512MiB, @0 or @all")
    peer = known[kind]
    if not peer.is_ours:
        return peer
    size = int(match[1]) * {"": 1, "MiB": 2**20, "GiB": 2**30}[match[2]] if match and match[1] else ALL
    assert peer.build is not None
    return replace(peer, name=name, build=partial(peer.build, size if at else None))


# --- a peer's two calls ----------------------------------------------------------------------------


def calls_of(peer: Peer, problem: Problem) -> dict[str, Callable]:
    """`{pass: function()}`: forward without gradients, and forward + backward, which returns the loss, dX and dW; for a
    GEMM-only baseline dX and dW.

    As in training, gradients go to `.grad` of leaf tensors, new ones in each call, or to one `main_grad`."""
    if peer.build is None:
        return _baseline_calls(problem, peer.name == OVERLAPPED)
    loss = peer.build(problem.team.group, problem.sequence_parallel)
    x, weight, target = problem.x, problem.weight, problem.target
    buffer = torch.zeros_like(weight, dtype=torch.float32) if peer.main_grad else None

    def forward():
        with torch.no_grad(), peer.context():
            return loss(x, weight, target)

    def forward_backward():
        leaf_x, leaf_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        if buffer is not None:
            vars(leaf_weight).update(main_grad=buffer, grad_added_to_main_grad=False)
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
