"""Log-probabilities and entropy of a Megatron model's labels, and losses made of them, for RL.

The model's own forward runs, with labels. Its loss gets deferred logits, and scores the labels in place of a loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.checks import check_values, described, public
from parallel_lce.core.options import NO_LABEL
from parallel_lce.deferred import DeferredLogits
from parallel_lce.megatron.loss import hand_over, model_group, run, statistics, swapped
from parallel_lce.megatron.settings import MARK, Fusion, running
from parallel_lce.megatron.switch import fuse, language_model, why_not_fused
from parallel_lce.run.entry import fused_token_loss


class TokenLogProbs(NamedTuple):
    """Results of :func:`token_log_probs`: fp32 ``[b, s]``, identical on all tensor-parallel ranks bit for bit."""

    log_probs: Tensor
    # In nats; None without ``entropy=True``.
    entropy: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Megatron's schedules ask for that of a model's output."""
        return self.log_probs.device


class Scoring(NamedTuple):
    """A call of a model by ``function``, whose loss of ``labels`` is ``of(logits, labels)``, a tuple of tensors."""

    fusion: Fusion | None
    function: str
    labels: Tensor | None
    of: Callable[[DeferredLogits, Tensor], tuple]


@public
def token_log_probs(
    model: torch.nn.Module,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    labels: Tensor | None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    **forward_arguments: object,
) -> TokenLogProbs | Tensor:
    """Log-probabilities of ``labels``, and entropies, without the ``[s, b, V/P]`` logits: docs/rl.md.

    Calls ``model``, a GPTModel, MambaModel or HybridModel in any wrappers, and fuses it at the first call. Its settings
    apply, but not those of the model's own loss: ``z_loss``, ``label_smoothing`` and ``token_metrics``. Gradients are
    exact with ``entropy``.

    Args:
        input_ids, position_ids, attention_mask, forward_arguments: as in the model's forward. ``loss_mask`` masks only
            the losses of multi-token prediction, whose gradients any backward through the result includes.
        labels: ``[b, s]``, already shifted: this rank's under context parallelism, ``[1, tokens]`` of packed sequences.
            Targets as in :func:`parallel_lce.token_statistics`. May be None on pipeline stages other than the last,
            which return the model's own output.
        temperature: divides the logits: a number > 0, or one per token ``[b, s]``, as in that function.

    Collectives: those of the model's forward up to the output layer, then those of
    :func:`parallel_lce.token_statistics` on the tensor-parallel group, with C = 3, or 4 with ``entropy``.
    ``ValueError``: the model cannot be fused, or labels or temperature do not fit. ``RuntimeError``: something in the
    model's forward makes real logits.
    """
    fusion = _fusion_of("token_log_probs", model, labels, temperature)

    def of(logits: DeferredLogits, labels: Tensor) -> tuple[Tensor, ...]:
        found = statistics(logits, labels, temperature, ignore_index=NO_LABEL, entropy=entropy)
        return tuple([swapped(value) for value in (found.target_log_prob, found.entropy) if value is not None])

    scoring = Scoring(fusion, "token_log_probs", labels, of)
    scores = _scored(scoring, model, input_ids, position_ids, attention_mask, **forward_arguments)
    return TokenLogProbs(*scores) if fusion else scores


@public
def token_loss(
    model: torch.nn.Module,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    labels: Tensor | None,
    loss: Callable[..., Any],
    *per_token: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "sum",
    entropy: bool = False,
    sum_p_squared: bool = False,
    mean_logit: bool = False,
    **forward_arguments: object,
) -> tuple[Tensor, dict[str, Tensor]] | Tensor:
    """The loss of :func:`parallel_lce.token_loss`, of a model's ``labels``, and its metrics ``[b, s]``.

    Calls the model as :func:`token_log_probs` does, with its arguments, collectives and errors. ``per_token`` values
    have the labels' shape. On pipeline stages other than the last the result is the model's own output. If dW goes to a
    ``main_grad``, backward forms the gradients.
    """
    fusion, names = _fusion_of("token_loss", model, labels, temperature), []
    options = dict(reduction=reduction, entropy=entropy, sum_p_squared=sum_p_squared, mean_logit=mean_logit)
    # Before the model runs, on the last stage alone.
    values = () if labels is None else check_values(loss, per_token, reduction, labels)

    def of(logits: DeferredLogits, labels: Tensor) -> tuple[Tensor, ...]:
        entry = functools.partial(fused_token_loss, loss=loss, values=tuple(map(swapped, values)))
        total, metrics = run(logits, labels, entry, temperature, ignore_index=NO_LABEL, **options)
        names.extend(metrics)
        return total, *map(swapped, metrics.values())

    scoring = Scoring(fusion, "token_loss", labels, of)
    scores = _scored(scoring, model, input_ids, position_ids, attention_mask, **forward_arguments)
    return (scores[0], dict(zip(names, scores[1:]))) if fusion else scores


def _scored(scoring: Scoring, model: Any, /, *given: Any, **named: Any) -> Any:
    """The output of the model's call: ``of(logits, labels)``, a tuple, on the last pipeline stage."""
    hand_over(scoring.function)  # has another rank refused? Before the model's collectives
    token = running.set(scoring)
    try:
        output = model(*given, labels=scoring.labels, **named)
    finally:
        running.reset(token)
    if scoring.fusion is not None and not isinstance(output, tuple):
        raise RuntimeError(
            f"{scoring.function}: {type(language_model(model)).__name__}'s forward must return "
            f"compute_language_model_loss of the labels that it is given, and returned {type(output).__name__}"
        )
    return output


def _fusion_of(function: str, model: Any, labels: Any, temperature: float | Tensor) -> Fusion | None:
    """That of the language model in the wrappers, which is fused if it was not; None on earlier pipeline stages. Debug
    mode learns the model's group."""
    inner = language_model(model)
    if (vars(inner).get(MARK) or Fusion(inner)).labels != "labels":
        kind = type(inner).__name__
        raise ValueError(f"model must be a Megatron GPTModel, MambaModel or HybridModel, got {kind}")
    debug.state.group = model_group(inner)
    if isinstance(labels, Tensor) and isinstance(temperature, Tensor) and temperature.shape != labels.shape:
        raise ValueError(f"temperature must be a number or one per label {[*labels.shape]}, got {[*temperature.shape]}")
    if not getattr(inner, "post_process", True):
        return None
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        raise ValueError(f"labels must be ids [b, s] of an integer dtype, got {described(labels)}")
    if why_not_fused(inner) is not None and (reason := fuse(inner)[0]) != "fused":
        raise ValueError(f"{function} makes no logits: {reason}")
    return vars(inner)[MARK]
