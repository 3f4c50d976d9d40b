"""One call: its plan and all else that depends on its signature alone, its per-token tensors, and its features.

A feature adds to a call what not every call has: numbers in the message that the ranks gather, work on each block,
results, terms of the gradient of the logits. The spine runs the hooks of a call's features, and knows none by name. To
add a feature is to write a subclass of :class:`Feature` and to list it in :mod:`parallel_lce.features`.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.interface import Backend, BackwardTask, Coefficients, ForwardTask
from parallel_lce.core.collectives import Layout, Shard
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.logit_map import LogitMap, Projection
from parallel_lce.core.memory import with_aligned_rows
from parallel_lce.core.options import Options, Tensors, Wanted
from parallel_lce.core.partials import Columns, Merged
from parallel_lce.core.plan import Block, Needs, Plan
from parallel_lce.core.selection import Selection


@dataclass
class LossFunction:
    """A caller's function ``run(statistics, *values)`` of a block's tokens, and what it leaves beside the losses."""

    run: Callable[..., Any]
    # [N] each, by the names that the function gives them.
    metrics: dict[str, Tensor] = field(default_factory=dict)
    # What it raised first, which is raised after the call's collectives, for which the other ranks may wait. In a list:
    # its traceback would keep a variable of the function that raises it alive, and with it the call's tensors.
    failures: list[Exception] = field(default_factory=list)
    # Whether its losses depend on the statistics, of the blocks so far.
    differentiable: set[bool] = field(default_factory=set)


class Call(NamedTuple):
    # The fields up to ``dtype`` are shared by all calls of one signature.
    options: Options
    backend: Backend
    shard: Shard
    columns: Columns
    plan: Plan
    # Shape of the tokens.
    shape: torch.Size
    # V; None: it depends on numbers of rows that only other ranks know.
    vocab_size: int | None
    # Which inputs required a gradient in forward.
    needs: Needs
    # Dtype of statistics and sums.
    dtype: torch.dtype
    layout: Layout = Layout()
    logit_map: LogitMap = LogitMap()
    # [N] int64 ids in the whole vocabulary, or None.
    target: Tensor | None = None
    # [N] in the statistics' dtype
    token_weight: Tensor | None = None
    # None: the losses are cross-entropies.
    loss_function: LossFunction | None = None
    # [N] each, for the loss function.
    values: tuple[Tensor, ...] = ()
    selection: Selection | None = None
    features: tuple[Feature, ...] = ()
    # dW is added to this buffer; None: dW is a new tensor.
    main_grad: MainGrad | None = None
    # In debug mode, the number of the call among those of its group.
    number: int | None = None

    @property
    def wanted(self) -> Wanted:
        """What the backend makes of merged partials."""
        if self.options.kind == "loss" and self.loss_function is None:
            return Wanted("loss", self.options, self.target, self.token_weight)
        return Wanted("statistics", self.options, self.target, log_sum=bool(self.features))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The call's tensors of tokens, and those of its features. None of them needs a gradient."""
        entries = (None,) * 3 if self.selection is None else self.selection[:3]
        logit_map = self.logit_map
        own = self.target, logit_map.token_scale, logit_map.token_softcap, self.token_weight, *entries
        return *own, *[feature.saved for feature in self.features], *self.values

    def with_saved(self, saved: Sequence[Tensor | None]) -> tuple[Call, Sequence[Tensor | None]]:
        """The call with the first ``saved`` tensors as its :attr:`tensors`, and the other ``saved`` ones. Saved-tensor
        hooks may have changed the strides."""
        own = self.tensors
        given, rest = saved[: len(own)], saved[len(own) :]
        if self.selection is None and not self.features and all(map(operator.is_, given, own)):
            return self, rest
        target, scale, cap, weight, ids, begin, end, *others = [t if t is None else t.contiguous() for t in given]
        selection, features = self.selection, tuple([copy.copy(feature) for feature in self.features])
        if selection is not None:
            selection = selection._replace(ids=ids, begin=begin, end=end)
        for feature, tensor in zip(features, others):
            feature.saved = tensor
        logit_map = self.logit_map._replace(token_scale=scale, token_softcap=cap)
        changed = dict(target=target, logit_map=logit_map, token_weight=weight, selection=selection, features=features)
        return self._replace(**changed, values=tuple(others[len(features) :])), rest

    def of_tokens(self, block: Block) -> Call:
        """The call with the :attr:`target`, :attr:`token_weight` and :attr:`values` of a block's tokens."""
        target, weight, *values = [self.layout.take(t, block) for t in (self.target, self.token_weight, *self.values)]
        return self._replace(target=target, token_weight=weight, values=tuple(values))

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        shard = self.shard
        # Saved-tensor hooks may have changed the strides.
        bias = bias if bias is None else bias.contiguous()
        return Projection(with_aligned_rows(weight), bias, shard.start, shard.real_rows, self.logit_map, self.dtype)

    def of_block(self, projection: Projection, block: Block) -> Projection:
        """The ``projection`` with the logit map of a block's tokens."""
        if self.logit_map.token_scale is None:  # with it a token may have a soft-cap of its own, too
            return projection
        return projection._replace(logit_map=self.logit_map.each(lambda t: self.layout.take(t, block)))

    def local_targets(self) -> Tensor | None:
        """The targets ``[N]`` relative to the shard's first id. Targets of other shards lie outside ``[0, rows)``."""
        start, target = self.shard.start, self.target
        return target if target is None or start == 0 else target - start


Inputs = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states ``[..., D]``, weight ``[V/P, D]`` and bias ``[V/P]``."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dX, dW (or the placeholder of ``MainGrad``) and dbias; None for one that is not needed."""


def flattened(hidden: Tensor) -> Tensor:
    """``hidden [..., D]`` as ``[N/sp_size, D]``. A size of -1 would be ambiguous for D = 0."""
    if hidden.dim() == 2:
        return hidden
    return hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype | None]]


class Feature:
    """One feature of one call. Hooks stand in the order in which they run. A hook that is not overridden does nothing.

    No hook starts a collective.
    """

    # What the forward keeps for the backward.
    saved: Tensor | None = None

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

    def message_size(self, call: Call) -> int:
        """Numbers, of the statistics' dtype, that each rank adds to the message of partials."""
        return 0

    def before_block(self, call: Call, task: ForwardTask, block: Block, message: Tensor) -> ForwardTask:
        """The task that the backend gets for a block. ``message [message_size]``: this rank's part, -inf at first."""
        return task

    def outputs(self, call: Call, merged: Merged, messages: Tensor, statistics: Mapping[str, Any]) -> dict[str, Tensor]:
        """The results of N tokens, of a call of statistics. ``messages [P, message_size]``: of all ranks.
        ``statistics``: those that are no feature's, by name, and ``log_sum``, the logarithm of the sum of
        exponentials."""
        return {}

    def coefficients(
        self, call: Call, merged: Merged, upstream: Mapping[str, Tensor | None], coefficients: Coefficients
    ) -> Coefficients:
        """Coefficients of the gradient of the logits, from those without the feature. ``upstream``: the gradients of
        the differentiable statistics, by name."""
        return coefficients

    def before_backward(self, call: Call, task: BackwardTask, block: Block) -> BackwardTask:
        """The task that the backend gets for a block of the backward."""
        return task


FEATURES: list[type[Feature]] = []
"""All features, in the order of their hooks. Filled by :mod:`parallel_lce.features`."""


def features_of(options: Options, tensors: Tensors) -> tuple[type[Feature], ...]:
    """The features of a call."""
    return tuple([feature for feature in FEATURES if feature.asked(options, tensors)])
