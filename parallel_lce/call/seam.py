"""The seam between a call and its features.

A feature adds to a call what not every call has: numbers in the message that the ranks gather, work on each block,
results, terms of the gradient of the logits. The spine runs the hooks of a call's features, and knows none by name. To
add a feature is to write a subclass of :class:`Feature` and to list it in :mod:`parallel_lce.features`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import BackwardTask, Coefficients, ForwardTask
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import Merged
from parallel_lce.core.plan import Block

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype | None]]


class Feature:
    """One feature of one call. Hooks stand in the order in which they run. A hook that is not overridden does nothing.

    ``call`` is the :class:`parallel_lce.call.call.Call`. No hook starts a collective.
    """

    # This rank's part of the message, [message_size], -inf at first. Only during a forward.
    message: Any = None
    # What the forward keeps for the backward.
    saved: Tensor | None = None

    def __init__(self, options: Options) -> None:
        """``options``: of a call for which :meth:`asked` is true."""

    @classmethod
    def asked(cls, options: Options, tensors: Tensors) -> bool:
        """Whether a call has the feature. It depends on the call's signature alone."""
        return False

    @classmethod
    def check(cls, options: Options, tensors: Tensors, vocab_size: int | None) -> None:
        """Raise ``ValueError`` for arguments that do not go with the feature. ``vocab_size``: V, None if this rank does
        not know it."""

    @classmethod
    def shapes(cls, options: Options, tensors: Tensors, tokens: int) -> Shapes:
        """The fields of TokenStatistics that the feature fills: their shapes, of N ``tokens``, and dtypes. None: the
        dtype of statistics."""
        return {}

    def message_size(self, call: Any) -> int:
        """Numbers, of the statistics' dtype, that each rank adds to the message of partials."""
        return 0

    def before_block(self, call: Any, task: ForwardTask, block: Block) -> ForwardTask:
        """The task that the backend gets for a block."""
        return task

    def outputs(self, call: Any, merged: Merged, messages: Tensor, statistics: Mapping[str, Any]) -> dict[str, Tensor]:
        """The results of N tokens, of a call of statistics. ``messages [P, message_size]``: of all ranks.
        ``statistics``: those that are no feature's, by name, and ``log_sum``, the logarithm of the sum of
        exponentials."""
        return {}

    def coefficients(
        self, call: Any, merged: Merged, upstream: Mapping[str, Tensor | None], coefficients: Coefficients
    ) -> Coefficients:
        """Coefficients of the gradient of the logits, from those without the feature. ``upstream``: the gradients of
        the differentiable statistics, by name."""
        return coefficients

    def before_backward(self, call: Any, task: BackwardTask, block: Block) -> BackwardTask:
        """The task that the backend gets for a block of the backward."""
        return task


FEATURES: list[type[Feature]] = []
"""All features, in the order of their hooks. Filled by :mod:`parallel_lce.features`."""


def features_of(options: Options, tensors: Tensors) -> tuple[type[Feature], ...]:
    """The features of a call."""
    return tuple([feature for feature in FEATURES if feature.asked(options, tensors)])
