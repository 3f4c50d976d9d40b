"""The loss of statistics or of real logits, with the settings' z-loss, label smoothing and true vocabulary; and the
metrics of its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.core.partials import accumulation_dtype

_METRICS = "_parallel_lce_metrics"


class TokenMetrics(NamedTuple):
    """Results of :func:`token_metrics`: ``[b, s]``, without gradients, identical on all tensor-parallel ranks. 0 and
    False for tokens that ``skip_masked`` leaves out."""

    cross_entropy: Tensor
    """fp32: ``lse - logit of the label``, without z-loss and label smoothing."""
    z_loss: Tensor
    """fp32: ``z_loss * lse**2``; in evaluation too, where the loss has none."""
    correct: Tensor
    """bool: whether the label has the largest logit, over the whole vocabulary."""


def token_metrics(model: torch.nn.Module) -> TokenMetrics:
    """The metrics of the tokens of the last loss of ``model``, a Megatron model in any wrappers, under
    ``patch(token_metrics=True)``. The loss itself computes them, in its one pass. Of a model with heads for multi-token
    prediction they are those of the main head. Call it after the model's forward, as in the loss function of Megatron's
    schedules, on the last pipeline stage.

    Raises:
        ValueError: no such loss has run.
    """
    for module in model.modules():
        if _METRICS in vars(module):
            return vars(module)[_METRICS]
    raise ValueError("model has no token metrics: call patch(token_metrics=True), then the model with labels")


class Terms(NamedTuple):
    """Of each token ``[s, b]``, identical on all ranks: what its loss is made of, and the id of its largest logit."""

    lse: Tensor
    max_logit: Tensor
    target_logit: Tensor
    argmax: Tensor
    # Over the vocabulary, of log-probabilities. None if labels are not smoothed.
    mean_log_prob: Tensor | None
    vocab_size: Tensor | int


class Formula(NamedTuple):
    """How a loss is made of its terms. ``factor``: of the z-loss, in the metrics; ``z_loss``: the same in training,
    else 0."""

    z_loss: float
    label_smoothing: float
    factor: float
    ignore_index: int | None

    def losses(self, terms: Terms, target: Tensor) -> tuple[Tensor, TokenMetrics]:
        """Losses ``[s, b]`` of ``target [s, b]``, and metrics ``[b, s]``. As in stock, the cross-entropy of a target
        outside the vocabulary is ``lse - max``."""
        lse, top = terms.lse, terms.max_logit.detach()
        outside = (target < 0) | (target >= terms.vocab_size)
        entropy = loss = lse - torch.where(outside, top, terms.target_logit)
        if terms.mean_log_prob is not None:
            loss = (1 - self.label_smoothing) * loss - self.label_smoothing * terms.mean_log_prob
        if self.z_loss:
            loss = loss + self.z_loss * lse.square()
        found = entropy, self.factor * lse.square(), terms.argmax == target
        if self.ignore_index is not None:
            ignored = target == self.ignore_index
            loss, found = loss.masked_fill(ignored, 0.0), [value.masked_fill(ignored, 0) for value in found]
        # Copies: the losses may be changed in place, and Megatron's schedules free their memory.
        transposed = [value.detach().transpose(0, 1) for value in found]
        return loss, TokenMetrics(*[value.clone(memory_format=torch.contiguous_format) for value in transposed])


def keep_metrics(model: Any, metrics: TokenMetrics) -> None:
    vars(model)[_METRICS] = metrics


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, of which each gets the same upstream gradient. One all-reduce, in forward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return _reduced(value.clone(), dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return upstream, None


def _reduced(value: Tensor, operation: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(value, operation, group=group)
    return value


def terms_of_logits(
    logits: Tensor, target: Tensor, vocab_size: int | None, smoothed: bool, group: dist.ProcessGroup | None
) -> Terms:
    """Of this rank's real logits ``[s, b, V/P]``, in equal shards, whose ids from ``vocab_size`` on are padding.

    Collectives: four all-reduces of ``s * b`` elements, and a fifth if ``smoothed``.
    """
    entries, ranks, rank = logits.shape[-1], *((1, 0) if group is None else (group.size(), group.rank()))
    total = entries * ranks if vocab_size is None else vocab_size
    z, start = logits.to(accumulation_dtype(logits.dtype)), rank * entries
    padding = torch.arange(start, start + entries, device=z.device) >= total
    z = z.masked_fill(padding, -torch.inf)
    top, place = z.detach().max(-1)
    largest = _reduced(top.clone(), dist.ReduceOp.MAX, group)
    nowhere = torch.iinfo(place.dtype).max
    argmax = _reduced((place + start).masked_fill(top != largest, nowhere), dist.ReduceOp.MIN, group)
    lse = largest + _SumOverRanks.apply((z - largest.unsqueeze(-1)).exp().sum(-1), group).log()
    inside = (target >= start) & (target < min(start + entries, total))
    own = z.gather(-1, (target - start).clamp(0, entries - 1).unsqueeze(-1)).squeeze(-1)
    target_logit = _SumOverRanks.apply(own.masked_fill(~inside, 0.0), group)
    mean = None
    if smoothed:
        mean = _SumOverRanks.apply(z.masked_fill(padding, 0.0).sum(-1), group) / total - lse
    return Terms(lse, largest, target_logit, argmax, mean, total)
