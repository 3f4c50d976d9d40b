"""The loss and the statistics of deferred logits in Megatron's models, and the metrics of their tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel_lce.call import debug
from parallel_lce.call.checks import public
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import NO_LABEL, Options, Tensors, as_int64
from parallel_lce.core.plan import default_budget, lean_budget
from parallel_lce.core.private import keep_with, kept_with, outside_graphs, version
from parallel_lce.deferred import THE_LOSS, DeferredLogits
from parallel_lce.megatron.main_grad import main_grad_of
from parallel_lce.megatron.settings import MARK, Fusion, asks
from parallel_lce.neighbours import is_global_group
from parallel_lce.run.entry import fused_loss, fused_statistics
from parallel_lce.run.results import TokenStatistics
from parallel_lce.run.token_count import LabelCount
from parallel_lce.vocab_parallel import vocab_parallel_cross_entropy

_METRICS = "_parallel_lce_metrics"
_REAL = (
    "the loss gets real logits, or another layer's: leave the output layer's forward in place, and call the model with "
    "labels, without runtime_gather_output"
)


class TokenMetrics(NamedTuple):
    """Results of :func:`token_metrics`: ``[b, s]``, without gradients, identical on all tensor-parallel ranks. 0 and
    False for tokens that ``skip_masked`` leaves out."""

    cross_entropy: Tensor
    """fp32: ``lse - logit of the label``, without z-loss and label smoothing."""
    z_loss: Tensor
    """fp32: ``z_loss * lse**2``; in evaluation too, where the loss has none."""
    correct: Tensor
    """bool: whether the label has the largest logit, over the whole vocabulary."""


def token_metrics(model: nn.Module | list[nn.Module]) -> TokenMetrics:
    """The metrics of the tokens of the last loss of ``model``, a Megatron model in any wrappers or its chunks, under
    ``patch(token_metrics=True)``; of its main head. Call it after the model's forward, on the last pipeline stage.
    Collectives: none. Raises ``ValueError`` if no such loss has run."""
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for module in chunk.modules():
            if _METRICS in vars(module):
                return vars(module)[_METRICS]
    raise ValueError("model has no token metrics: call patch(token_metrics=True), then the model with labels")


def with_fused_loss(own: Any) -> Any:
    """``compute_language_model_loss(labels [b, s], logits)`` of ``LanguageModule``, with this package's loss of fused
    models: fp32 ``[b, s]``, or the scores of labels that are scored.

    Deferred logits get the fused loss, real ones Megatron's ``own``; if that does not take the model's group,
    :func:`parallel_lce.vocab_parallel_cross_entropy`. Raises ``RuntimeError`` if a setting changes the loss, and it
    cannot be fused.
    """
    if not inspect.isfunction(own):
        return own

    @outside_graphs
    @public  # what one rank refuses the others raise in debug mode
    @functools.wraps(own)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Any, *others: Any, **named: Any) -> Any:
        fusion: Fusion | None = vars(self).get(MARK)
        if fusion is None and asks(self.config):
            raise RuntimeError("parallel_lce: the model was not fused when it was built: call fuse(model)")
        if fusion is None or fusion.reason is not None:
            if fusion is not None:
                fusion.refuse_changes(fusion.reason, self.training)
            debug.state.awaited = False
            return own(self, labels, logits, *others, **named)
        tp_group = debug.state.group = model_group(self)
        scoring, chosen, deferred = fusion.scoring, fusion.settings, isinstance(logits, DeferredLogits)
        scores = scoring if scoring and labels is scoring.labels else None
        if scoring and not (scores or self.training or torch.is_grad_enabled()):
            return torch.zeros(labels.shape, device=labels.device)  # the loss of a head that nobody reads
        # Without gradients only a checkpoint's hidden states require one.
        tracked = deferred and logits.source.hidden.requires_grad
        if scores and tracked and not torch.is_grad_enabled():
            made_again = "in a checkpoint, which would run it again as a loss: leave output layer and loss out of it"
            raise RuntimeError(f"{scores.function}: the loss of the labels is {made_again}")
        by_choice = chosen.cross_entropy == "logits" and not scores
        if not by_choice:
            of_own_head = deferred and vars(logits.source.layer).get(MARK) is fusion
            reason = logits.why_not_fused() if of_own_head else _REAL
            if reason is None:
                found = scores.of(logits, labels) if scores else (_fused(self, fusion, logits, labels),)
                logits.source.close_after(*found)
                return found if scores else found[0]
            if not scores:
                fusion.refuse_changes(reason, self.training)
            if scores or deferred or not fusion.said:  # else the output layer has said why
                fusion.say(self.training, reason)
        if deferred:
            logits = logits.computed(THE_LOSS)
        if by_choice or not (self.config.cross_entropy_loss_fusion or is_global_group(tp_group)):
            losses = swapped(vocab_parallel_cross_entropy(logits, labels.transpose(0, 1), tp_group=tp_group))
        else:
            hand_over("Megatron's own loss, of real logits")  # is the loss fused on another rank?
            if kept_with(logits):
                again = "is to be computed of them again, as in a checkpoint: leave it out of that, or give it a copy"
                raise RuntimeError(f"parallel_lce: Megatron's loss has written into these logits, and {again}")
            before = version(logits)
            losses = own(self, labels, logits, *others, **named)
            if deferred and version(logits) != before:
                keep_with(logits, True)
        return losses.masked_fill(labels == NO_LABEL, 0.0) if chosen.skip_masked else losses

    return compute_language_model_loss


def hand_over(function: str) -> None:
    """Before other code runs in place of ours: in debug mode the ranks agree on that, and await no message in it."""
    layout = Layout.of(debug.state.group, False)
    if debug.enabled() and layout.ranks > 1:
        debug.agree(layout, function, {})
    debug.state.awaited = False


def model_group(model: Any) -> Any:
    """The model's tensor-parallel group."""
    of_layer = getattr(getattr(model, "output_layer", None), "tp_group", None)
    return getattr(getattr(model, "pg_collection", None), "tp", of_layer)


def swapped(tokens: Tensor) -> Tensor:
    """``[s, b]``, as Megatron's activations, to ``[b, s]``, as its labels and losses."""
    return tokens.transpose(0, 1).contiguous()


def _fused(model: Any, fusion: Fusion, logits: DeferredLogits, labels: Tensor) -> Tensor:
    """Losses ``[b, s]``. As in stock, the loss of a target outside the vocabulary is ``lse - max``, and padding rows
    stay in the softmax unless ``vocab_size`` says otherwise."""
    chosen = fusion.settings
    ignored = NO_LABEL if chosen.skip_masked else None
    if not chosen.token_metrics or fusion.scoring:
        return swapped(run(logits, labels, fused_loss, reduction="none", ignore_index=ignored, outside_is_nan=False))
    smoothing, z_loss = (chosen.label_smoothing, chosen.z_loss) if logits.source.layer.training else (0.0, 0.0)
    found: Any = statistics(logits, labels, argmax=True, mean_logit=smoothing > 0)
    target = as_int64(labels.transpose(0, 1))
    outside = (target < 0) | (target >= found.vocab_size)
    entropy = found.lse - torch.where(outside, found.max_logit.detach(), found.target_logit)
    losses, squares = entropy, found.lse.square()
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * found.mean_log_prob
    if z_loss:
        losses = losses + z_loss * squares
    metrics = entropy, chosen.z_loss * squares, found.argmax == target
    if ignored is not None:
        losses, *metrics = (value.masked_fill(target == ignored, 0) for value in (losses, *metrics))
    # Copies: the losses may be changed in place, and Megatron's schedules free their memory.
    vars(model)[_METRICS] = TokenMetrics(*[swapped(value.detach()).clone() for value in metrics])
    return swapped(losses)


def statistics(
    logits: DeferredLogits, labels: Tensor, temperature: float | Tensor = 1.0, **options: Any
) -> TokenStatistics:
    """``[s, b]`` each, of ``labels [b, s]``; with ``skip_masked`` of those that are not -100 alone."""
    skips = vars(logits.source.layer)[MARK].settings.skip_masked
    mask = as_int64(labels.transpose(0, 1)) != NO_LABEL if skips else None
    return run(logits, labels, functools.partial(fused_statistics, mask=mask), temperature, **options)


def run(
    logits: DeferredLogits, labels: Tensor, entry: Callable[..., Any], temperature: float | Tensor = 1.0, **given: Any
) -> Any:
    """``entry``, of :mod:`parallel_lce.run.entry`, with the ``given`` options and the model's settings. ``labels [b,
    s]``; ``temperature``: a number or ``[b, s]``. Results of tokens are ``[s, b]``."""
    call: Any = logits.source
    layer, fusion = call.layer, vars(call.layer)[MARK]
    chosen = fusion.settings
    options = dict(given, **(logits.epilogue() or {}), sequence_parallel=call.whole is not None)
    options |= dict(reduce_dtype=chosen.reduce_dtype, vocab_size=chosen.vocab_size, logits_budget=chosen.logits_budget)
    if fusion.heads > 1:  # all calls keep saved memory until backward
        default = default_budget(call.hidden.device)
        options["logits_budget"] = lean_budget(chosen.logits_budget, default // fusion.heads)
    if not (given.get("entropy") or given.get("sum_p_squared") or given.get("mean_logit")):
        options["gradient_filter"] = chosen.gradient_filter  # else gradients are large where probabilities are small
    if layer.training and given.get("reduction") == "none":
        options |= dict(z_loss=chosen.z_loss, label_smoothing=chosen.label_smoothing)
    target = labels.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # labels may change before backward
    each = temperature.transpose(0, 1) if isinstance(temperature, Tensor) else None
    options["temperature"] = temperature if each is None else 1.0

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        main_grad = main_grad_of(weight, layer.gradient_accumulation_fusion)
        tensors = Tensors(hidden, weight, target, bias, temperature=each)
        of_labels: LabelCount | None = kept_with(labels) if chosen.skip_masked else None
        count = None if of_labels is None else of_labels.of(labels)
        arguments = Options("Megatron's output layer", **options), tensors, layer.tp_group
        return entry(*arguments, main_grad=main_grad, counted_tokens=count)

    return logits.run(loss)
