"""The losses of parallel_lce, and losses made of the statistics of post-training.

Each `build` function returns a loss as peers.py describes it. A loss of `statistics` is the mean negative
log-probability, plus 0 times the sum of every other statistic, whose backward so runs, too.
"""

from functools import partial
from typing import Any

import torch

from parallel_lce import linear_cross_entropy, token_loss, token_statistics
from parallel_lce.distillation import divergence

from . import libraries
from .libraries import mean_of
from .problem import IGNORE_INDEX


def _of_call(budget, group, sequence_parallel):
    return {"logits_budget": budget, "process_group": group, "sequence_parallel": sequence_parallel}


def loss(reduction, *call):
    """`linear_cross_entropy`. With reduction 'none' torch averages the losses, and no gradient is formed in forward."""
    fused = partial(linear_cross_entropy, ignore_index=IGNORE_INDEX, reduction=reduction, **_of_call(*call))
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


# --- post-training ---------------------------------------------------------------------------------


def statistics(asked, budget, group, sequence_parallel):
    """`asked(x, weight, target, group)` returns further options of `token_statistics`."""
    options = _of_call(budget, group, sequence_parallel)

    def loss(x, weight, target):
        result: Any = token_statistics(x, weight, target, **options, **asked(x, weight, target, group))
        value = mean_of(-result.target_log_prob.where(target != IGNORE_INDEX, 0), target)
        for other in (result.entropy, result.selected_log_prob):
            if other is not None:
                value = value + 0 * other.sum()
        return value

    return loss


def selected(x, weight, target, group):
    """Log-probabilities of 64 random entries of each token, the same in each call and on all ranks."""
    ranks = 1 if group is None else group.size()
    generator = torch.Generator(x.device).manual_seed(0)
    ids = torch.randint(len(weight) * ranks, (len(target), 64), generator=generator, device=x.device)
    return {"selected": ids}


def half(x, weight, target, group):
    """Half of the tokens count."""
    return {"mask": torch.arange(len(target), device=x.device) % 2 == 0, "counted_tokens": -(-len(target) // 2)}


def clipped(by_token_loss, budget, group, sequence_parallel):
    """PPO's clipped objective with an entropy bonus: by `token_loss`, or by the same function of `token_statistics`."""
    options = {"entropy": True, **_of_call(budget, group, sequence_parallel)}

    def ppo(statistics, old, advantage):
        ratio = (statistics.target_log_prob - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -gain - 0.01 * statistics.entropy, {"clipped": (ratio - 1).abs() > 0.2}

    def loss(x, weight, target):
        generator = torch.Generator(x.device).manual_seed(1)
        old, advantage = torch.randn(2, len(target), device=x.device, generator=generator)
        old -= 12  # near the log-probabilities of random targets
        if by_token_loss:
            return token_loss(x, weight, target, ppo, old, advantage, **options)[0]
        losses, _ = ppo(token_statistics(x, weight, target, **options), old, advantage)
        return losses.where(target != IGNORE_INDEX, 0.0).sum()

    return loss


def distillation(*call):
    """The mean forward divergence from a teacher of the same sizes. Its matrix products are four."""

    def loss(x, weight, target, *teacher):
        return divergence(x, weight, *teacher, target=target, **_of_call(*call))

    return libraries.with_teacher(loss)
