"""A penalty on each token's largest logit: the argument ``max_logit_penalty`` of
:func:`parallel_lce.linear_cross_entropy`.

With M the largest logit of a token and w its weight, the loss has the further term penalty * w * M^2, whose gradient is
2 * penalty * w * M at the largest logit and 0 elsewhere: RWKV's L2Wrap, as in flash-linear-attention's ``l2_warp``. The
entry is known only after the merge over the ranks. Among equal logits it is the one with the lowest id.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import BackwardTask, Coefficients, Picked, PickedGradient
from parallel_lce.call.seam import Feature
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import MAX, SUM_EXP, integer_view
from parallel_lce.core.plan import Block


class MaxLogitPenalty(Feature):
    columns = ("argmax",)
    adds_entries = "max_logit_penalty"
    allows_accumulation = True

    @classmethod
    def asked(cls, options: Options, tensors: Tensors) -> bool:
        return options.max_logit_penalty != 0

    def losses(self, call: Any, losses: Tensor, coefficients: Coefficients, partial: Tensor) -> Tensor:
        return losses + _weighted(call, coefficients, partial, partial[MAX].square())

    def before_backward(self, call: Any, task: BackwardTask, block: Block) -> BackwardTask:
        partial, coefficients = task.partial, task.coefficients.with_factor()
        top, ids = partial[MAX], integer_view(partial[call.columns["argmax"]]).long() - call.shard.start
        gradient = _weighted(call, coefficients, partial, 2 * top)
        # The term of a target belongs to the excess, because gradients of targets are never rounded.
        of_target, excess = ids == task.target, coefficients.excess
        assert excess is not None  # a loss has targets
        coefficients = coefficients._replace(excess=excess + gradient.where(of_target, 0.0))
        entry = torch.arange(len(ids) + 1, device=ids.device)
        gradient = task.projection.logit_map.before(gradient.masked_fill(of_target, 0.0), top)
        picked = PickedGradient(Picked(ids, entry[:-1], entry[1:]), gradient, top.contiguous())
        return task._replace(coefficients=coefficients, picked=picked)


def _weighted(call: Any, coefficients: Coefficients, partial: Tensor, values: Tensor) -> Tensor:
    """``values`` times the penalty and the tokens' weights; 0 if a token is ignored, even if its logits are NaN."""
    options, excess = call.options, coefficients.excess
    assert excess is not None  # a loss has targets
    if options.label_smoothing < 1:
        weights = (coefficients.alpha - excess) / (1 - options.label_smoothing)
    else:
        lse = partial[MAX] + partial[SUM_EXP].log()
        weights = coefficients.alpha / (1 + 2 * options.z_loss * lse)
    return (options.max_logit_penalty * weights * values).masked_fill(weights == 0, 0.0)
