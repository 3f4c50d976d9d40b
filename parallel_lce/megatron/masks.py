"""Masked tokens cost nothing: ``patch(skip_masked=True)``.

Megatron's models get their labels, and most their loss mask, when their forward begins. There the masked tokens' labels
become -100, and those that count begin to be counted. So the labels carry the mask to the loss, through whatever
Megatron does to labels: under context parallelism, in packed sequences, and rolled for multi-token prediction (MTP).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel_lce.core.options import NO_LABEL, as_int64
from parallel_lce.megatron import settings
from parallel_lce.megatron.own_code import is_megatrons
from parallel_lce.patching import replaced
from parallel_lce.run.token_count import TokenCount, count_labels, count_of_labels

LABELS = "labels", "lm_labels"
"""Names of the labels among the arguments of Megatron's models."""


def wrapped_forward(own: Callable) -> Callable:
    """The forward of one of Megatron's models, in which the loss may skip masked tokens."""
    names = [*inspect.signature(own).parameters]
    label = next((name for name in LABELS if name in names), None)
    if label is None:
        return own

    @functools.wraps(own)
    def forward(self, *given, **named):
        fused = hasattr(getattr(self, "output_layer", None), "returns_lazy_logits") and settings.current.skip_masked
        # Another loss wants the labels as they are; token_log_probs, which puts one there, also by identity.
        loss = vars(self).get("compute_language_model_loss")
        if not fused or not (loss is None or is_megatrons(loss)) or torch.compiler.is_compiling():
            return own(self, *given, **named)
        arguments = {**dict(zip(names[1:], given)), **named}
        labels, mask = arguments.get(label), arguments.get("loss_mask")
        if not isinstance(labels, Tensor):
            return own(self, *given, **named)
        if isinstance(mask, Tensor) and mask.numel() == labels.numel():
            arguments[label] = labels = as_int64(labels).masked_fill(mask.reshape(labels.shape) == 0, NO_LABEL)
        count, more = count_labels(labels), _rolled_in(self, arguments, labels)
        with replaced(self, rolled_labels=count.plus(more) if count is not None and more else None):
            return own(self, **arguments)

    return forward


def _rolled_in(model: Any, arguments: dict[str, Any], labels: Tensor) -> int:
    """How many labels at most come from elsewhere, or count without a mask, when MTP rolls the labels ``[b, s]``: at
    each depth one at the end of each sequence, and under context parallelism of both of its pieces."""
    packed = getattr(arguments.get("packed_seq_params"), "cu_seqlens_q", None)
    sequences = len(labels) if packed is None else len(packed) - 1
    return 2 * sequences * (getattr(model.config, "mtp_num_layers", None) or 0)


def count_of(model: Any, arguments: tuple) -> TokenCount | None:
    """How many of the labels among a loss's arguments count; a bound for labels of MTP. None if nobody knows, or if
    none are skipped."""
    if not settings.current.skip_masked:  # the same labels may have been counted before
        return None
    exact = next(filter(None, map(count_of_labels, arguments)), None)
    return exact or vars(model).get("rolled_labels")
