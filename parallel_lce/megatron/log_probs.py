"""Log-probabilities and entropy of a Megatron model's labels, and losses made of them, for RL.

The model's own forward runs, with labels. Its loss gets deferred logits, and scores the labels in place of a loss. So
everything before the loss (embedding, MuP's scale, heads for multi-token prediction, hooks) is the model's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.checks import INTEGERS, check_no_gradient, check_values, described, public
from parallel_lce.core.collectives import Layout
from parallel_lce.core.options import Options, check_flag, check_option, check_options
from parallel_lce.deferred import DeferredLogits
from parallel_lce.megatron.loss import counted, model_group, statistics, token_loss_of
from parallel_lce.megatron.settings import MARK, running
from parallel_lce.megatron.switch import fuse, language_model, replace_loss
from parallel_lce.run.token_count import count_labels

# Arguments of the model's forward that ask for logits, or for a result other than the labels' loss.
_REFUSED = "runtime_gather_output inference_context inference_params output_processor output_processor_context".split()


class TokenLogProbs(NamedTuple):
    """Results of :func:`token_log_probs`: fp32 ``[b, s]``, identical on all tensor-parallel ranks bit for bit."""

    log_probs: Tensor
    # In nats; None without ``entropy=True``.
    entropy: Tensor | None = None


class Scoring:
    """A call of a model by ``function``, whose loss of ``labels`` is ``of(logits, labels)``, a tuple of tensors."""

    def __init__(self, function: str, labels: Tensor | None, of: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function, self.labels, self._of = function, labels, of
        self.results = 0

    def score(self, logits: Any) -> tuple[Tensor, ...]:
        if not isinstance(logits, DeferredLogits):
            kind = type(logits).__name__
            raise self.refused(f"something has replaced the output layer's result, by one of type {kind}")
        if (reason := logits.why_not_fused()) is not None:
            raise self.refused(reason)
        found = self._of(logits, self.labels)
        self.results = len(found)
        return found

    def refused(self, reason: str) -> RuntimeError:
        return RuntimeError(f"{self.function} makes no logits: {reason}")


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
    """Log-probabilities of ``labels``, and entropies, without the ``[s, b, V/P]`` logits. Differentiable.

    Calls ``model`` itself: all its wrappers and hooks run, including the output layer's. The first call fuses the model
    (:func:`parallel_lce.megatron.fuse`), unless it is. Its settings apply. With ``entropy`` gradients are exact.

    Args:
        model: Megatron's GPTModel, MambaModel or HybridModel, or a subclass, in any wrappers, such as
            DistributedDataParallel, Float16Module and torch.compile.
        input_ids, position_ids, attention_mask: as in the model's forward.
        labels: ``[b, s]`` of any integer dtype: the id to be scored at each position, already shifted. Under context
            parallelism these are this rank's labels, and with packed sequences ``[1, tokens]``. The label -100 has the
            log-probability 0, without a gradient; another one outside the vocabulary, to which padding rows belong, has
            NaN, and on a CPU it is refused. May be None on pipeline stages other than the last.
        temperature: divides the logits: a number > 0; or a tensor of the labels' shape and any real dtype, the same on
            all tensor-parallel ranks, without a gradient. Its values, which must be > 0, are not checked, since the
            host would have to wait for the device.
        entropy: whether to return the entropy of the divided logits, too.
        forward_arguments: further keyword arguments of the model's forward, such as ``packed_seq_params`` and
            ``loss_mask``, which only masks the losses of multi-token prediction.

    Returns:
        On the last pipeline stage :class:`TokenLogProbs`. On other stages the model's own output, the hidden states for
        the next stage. As in stock, padding rows of the vocabulary take part in the softmax, unless the model was
        patched with a ``vocab_size``.

    The model's forward adds the losses of heads for multi-token prediction: any backward through the result includes
    their gradients, once per call. In evaluation mode with gradients disabled these losses are not computed.

    Collectives: those of the model's forward up to the output layer, then those of
    :func:`parallel_lce.token_statistics` on the tensor-parallel group, with C = 3, or 4 with ``entropy``. In backward
    the weight's gradient goes to ``main_grad`` if DistributedDataParallel has made one, else to autograd.

    Raises:
        ValueError: the model cannot be fused, or labels, temperature or forward arguments do not fit. Raised before the
            model is called.
        TypeError: the model's forward does not take one of ``forward_arguments``.
        RuntimeError: something in the model's forward makes real logits.
    """
    inner = _scored_model(model)
    check_flag("entropy", entropy)

    def of(temperature: float | Tensor, logits: DeferredLogits, labels: Tensor) -> tuple[Tensor, ...]:
        return statistics(logits, labels, temperature, entropy, counted(vars(inner)[MARK], labels))

    given = input_ids, position_ids, attention_mask, labels
    output = _scored("token_log_probs", model, inner, given, temperature, of, forward_arguments)
    return TokenLogProbs(*output) if _is_last(inner) else output


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
    have the labels' shape; they and ``loss`` are not used on pipeline stages other than the last, where the result is
    the model's own output. If dW goes to a ``main_grad``, backward forms the gradients.
    """
    inner = _scored_model(model)
    options = Options("megatron.token_loss", reduction=reduction, loss_function=True, entropy=entropy)
    options = options._replace(sum_p_squared=sum_p_squared, mean_logit=mean_logit)
    check_options(options)
    values, names = check_values(loss, per_token, reduction, labels) if _is_last(inner) else (), []

    def of(temperature: float | Tensor, logits: DeferredLogits, labels: Tensor) -> tuple[Tensor, ...]:
        total, metrics = token_loss_of(logits, labels, temperature, options, loss, values)
        names.extend(metrics)
        return total, *metrics.values()

    given = input_ids, position_ids, attention_mask, labels
    output = _scored("token_loss", model, inner, given, temperature, of, forward_arguments)
    return (output[0], dict(zip(names, output[1:]))) if _is_last(inner) else output


def _is_last(inner: Any) -> bool:
    """Whether the language model is of the last pipeline stage."""
    return bool(getattr(inner, "post_process", True))


def _scored(
    function: str,
    model: torch.nn.Module,
    inner: Any,
    given: tuple[Tensor | None, ...],
    temperature: float | Tensor,
    of: Callable[..., tuple[Tensor, ...]],
    forward_arguments: dict[str, object],
) -> Any:
    """The output of the model's forward, whose loss is ``of(temperature, logits, labels)``. ``given``: input and
    position ids, attention mask and labels."""
    for name in _REFUSED:
        if forward_arguments.get(name) is not None:
            raise ValueError(f"{function} takes no {name}: it gives no logits")
    last, (input_ids, *_, labels) = _is_last(inner), given
    decoder_input = forward_arguments.get("decoder_input")
    divisor = _temperature(labels, temperature, input_ids if decoder_input is None else None, last)
    scoring = Scoring(function, labels, partial(of, divisor))
    if last:
        replace_loss()
        if MARK not in vars(inner) and (reason := fuse(inner)[0]) != "fused":
            raise ValueError(f"{function} makes no logits: {reason}")
        if vars(inner)[MARK].settings.skip_masked:
            count_labels(labels)
    layout = Layout.of(debug.state.group, False)
    if debug.enabled() and layout.ranks > 1:  # has another rank refused? Before the model's collectives
        debug.agree(layout, {"function": function}, {})
    debug.state.awaited = False
    # The model may have been built with parallel_output=False, which gathers the logits.
    arguments = {**forward_arguments, "labels": labels, "runtime_gather_output": False}
    token = running.set(scoring if last else None)
    try:
        output = model(*given[:3], **arguments)
    finally:
        running.reset(token)
    if last and not (isinstance(output, tuple) and len(output) == scoring.results):
        raise RuntimeError(
            f"{function}: {type(inner).__name__}'s forward must return compute_language_model_loss of the labels that "
            f"it is given, and returned {type(output).__name__}"
        )
    return output


def _scored_model(model: Any) -> Any:
    """The language model in its wrappers, whose forward takes labels ``[b, s]``. Debug mode learns its group."""
    try:
        inner = language_model(model)
        taken = inspect.signature(inner.forward).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    except ValueError:
        inner, taken, anything = model, {}, False
    if not (anything or {"labels", "runtime_gather_output"} <= {*taken}):
        kind = type(inner).__name__
        raise ValueError(
            f"model must be a Megatron GPTModel, MambaModel or HybridModel, alone or in wrappers, got {kind}"
        )
    debug.state.group = model_group(inner)
    return inner


def _temperature(labels: object, temperature: float | Tensor, input_ids: Tensor | None, last: bool) -> float | Tensor:
    """The divisor of the logits: a number, or floating-point ``[b, s]``. Raises ``ValueError`` if the labels or the
    temperature do not fit."""
    if not isinstance(temperature, Tensor):
        check_option("temperature", temperature)
    if labels is None and not last:
        return temperature
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.dtype not in INTEGERS:
        raise ValueError(f"labels must be ids [b, s] of an integer dtype, got {described(labels)}")
    if input_ids is not None and input_ids.shape != labels.shape:
        raise ValueError(f"labels must have input_ids' shape {list(input_ids.shape)}, got {list(labels.shape)}")
    if not isinstance(temperature, Tensor):
        return temperature
    if temperature.shape != labels.shape or temperature.is_complex():
        expected = f"a number > 0, or real ones of labels' shape {list(labels.shape)}"
        raise ValueError(f"temperature must be {expected}, got {list(temperature.shape)} of {temperature.dtype}")
    check_no_gradient("temperature", temperature)
    if temperature.device != labels.device:
        raise ValueError(f"temperature is on {temperature.device} and labels are on {labels.device}")
    return temperature if temperature.is_floating_point() else temperature.float()
