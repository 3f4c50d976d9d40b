"""The losses of parallel_lce, and losses made of the statistics of post-training.

Each `build` function returns a loss as peers.py describes it. A loss of post-training is the mean negative
log-probability, plus 0 times the sum of every other statistic. So every statistic has an upstream gradient and its
backward runs, and the loss still is the mean cross-entropy. Only `masked` and `replay` have another loss, which is not
judged.
"""

from functools import partial

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from parallel_lce import (
    LinearCrossEntropy,
    LinearCrossEntropyParallel,
    linear_cross_entropy,
    selected_log_probs,
    token_statistics,
)

from . import libraries
from .libraries import mean_of
from .problem import IGNORE_INDEX

SELECTED, REPLAYED = 64, 8  # selected entries of each token


def loss(reduction, budget, group, sequence_parallel):
    """`linear_cross_entropy`. With reduction 'none' torch averages the losses, and no gradient is formed in forward."""
    options = {"ignore_index": IGNORE_INDEX, "reduction": reduction, "logits_budget": budget}
    fused = partial(linear_cross_entropy, process_group=group, sequence_parallel=sequence_parallel, **options)
    if reduction == "mean":
        return fused
    return lambda x, weight, target: mean_of(fused(x, weight, target), target)


def main_grad(budget, group, sequence_parallel):
    """The fused loss as Megatron's output layer calls it. dW is added to the parameter's fp32 `main_grad`."""
    from parallel_lce.core.grad_buffers import MainGrad, within
    from parallel_lce.core.options import Options, Tensors
    from parallel_lce.run.entry import fused_loss

    options = Options(
        "ours-main-grad",
        reduction="none",
        ignore_index=IGNORE_INDEX,
        outside_is_nan=False,
        sequence_parallel=sequence_parallel,
        logits_budget=budget,
    )

    def loss(x, weight, target):
        buffer = getattr(weight, "main_grad", None)
        main_grad = None if buffer is None else MainGrad(buffer, lambda memory: within(memory, weight))
        return mean_of(fused_loss(options, Tensors(x, weight, target), group, main_grad=main_grad), target)

    return loss


def style(budget, group, sequence_parallel):
    """The loss as a module that `parallelize_module` has given a style."""
    mesh, layout = libraries.mesh_of(group), Shard(0) if sequence_parallel else Replicate()
    module = LinearCrossEntropy(ignore_index=IGNORE_INDEX, logits_budget=budget)
    parallelize_module(module, mesh, LinearCrossEntropyParallel(input_layouts=layout))
    return lambda x, weight, target: module(x, libraries.vocabulary_shard(weight, mesh), target)


def torchtitan(budget, group, sequence_parallel):
    """The loss in the place of torchtitan's own."""
    from parallel_lce.torchtitan import LinearCrossEntropyLoss

    new_loss = partial(LinearCrossEntropyLoss.Config, logits_budget=budget)
    return libraries.torchtitan(new_loss, group, sequence_parallel)


def statistics(asked, budget, group, sequence_parallel):
    """`asked(x, weight, target, group)` returns further options of `token_statistics`."""
    options = {"process_group": group, "sequence_parallel": sequence_parallel, "logits_budget": budget}

    def loss(x, weight, target):
        result = token_statistics(x, weight, target, **options, **asked(x, weight, target, group))
        assert result.target_log_prob is not None  # there is a target
        value = mean_of(-result.target_log_prob.where(target != IGNORE_INDEX, 0), target)
        for other in (result.entropy, result.selected_log_prob):
            if other is not None:
                value = value + 0 * other.sum()
        return value

    return loss


def selected(x, weight, target, group):
    """Log-probabilities of random entries."""
    return {"selected": _ids(x, weight, target, SELECTED, group)}


def half(x, weight, target, group):
    """Half of the tokens count."""
    return {"mask": torch.arange(len(target), device=x.device) % 2 == 0, "counted_tokens": -(-len(target) // 2)}


def replay(budget, group, sequence_parallel):
    """`selected_log_probs` among 8 kept ids of each token, given as ids and offsets."""
    options = {"process_group": group, "sequence_parallel": sequence_parallel}

    def loss(x, weight, target):
        ids = _ids(x, weight, target, REPLAYED, group)
        offsets = torch.arange(len(target) + 1, device=x.device) * REPLAYED
        return selected_log_probs(x, weight, (ids.view(-1), offsets), **options).sum()

    return loss


def _ids(x, weight, target, count, group):
    """Random ids `[N, count]`, the same in each call and on all ranks."""
    ranks = 1 if group is None else group.size()
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randint(len(weight) * ranks, (len(target), count), generator=generator, device=x.device)
