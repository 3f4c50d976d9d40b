"""Log-probabilities of selected entries: the argument ``selected`` of :func:`parallel_lce.token_statistics`.

Each rank sends the logits of the picked entries that lie in its shard, and 0 for the others. With z_k the logit of a
selected entry, M the maximum and s the sum of exponentials,

    selected_log_prob = (z_k - M) - log s                d/dz_j = [j = k] - p_j
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from parallel_lce.backends.interface import BackwardTask, Coefficients, ForwardTask, PickedGradient, PickedLogits
from parallel_lce.call.seam import Feature, Shapes
from parallel_lce.core.options import Options, Tensors
from parallel_lce.core.partials import MAX, Merged
from parallel_lce.core.plan import Block


def ids_and_offsets(selected: object) -> tuple[Any, Tensor | None]:
    """Split the argument ``selected`` into ids and offsets; without offsets these are None. Raises ``ValueError`` for a
    pair that is not two tensors."""
    if not isinstance(selected, (tuple, list)) or len(selected) != 2:
        return selected, None
    ids, offsets = selected
    if not (isinstance(ids, Tensor) and isinstance(offsets, Tensor)):
        given = f"{type(ids).__name__} and {type(offsets).__name__}"
        raise ValueError(f"selected must be a tensor of ids, or a pair of ids and offsets, got {given}")
    return ids, offsets


class Selected(Feature):
    results = ("selected_log_prob",)
    # Logits [E] of the selected entries; 0 for an id outside the vocabulary. Known after the merge.
    logits: Tensor | None = None
    # [E]: terms of the gradient of the projection's output. Known in a backward with an upstream gradient.
    _gradient: Tensor | None = None

    @classmethod
    def asked(cls, options: Options, tensors: Tensors) -> bool:
        return tensors.picked is not None

    @classmethod
    def shapes(cls, options: Options, tensors: Tensors, tokens: int) -> Shapes:
        ids = tensors.picked
        return {cls.results[0]: ((tokens, ids.shape[-1]) if tensors.picked_offsets is None else ids.shape, None)}

    def message_size(self, call: Any) -> int:
        return call.picked.count

    def begin(self, call: Any, message: Tensor) -> None:
        self._message = message.zero_()

    def before_block(self, call: Any, task: ForwardTask, block: Block, save: bool) -> ForwardTask:
        entries = call.picked.of_block(call.layout, block, call.shard.start)
        return task._replace(picked=PickedLogits(entries, self._message))

    def merged(self, messages: Tensor) -> None:
        self.logits = messages.sum(0)
        del self._message

    def forget(self) -> None:
        self.logits = None

    def outputs(self, call: Any, merged: Merged, statistics: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """-inf for an id outside the vocabulary, NaN if the given offsets are invalid."""
        picked, partial = call.picked, merged.partial
        assert self.logits is not None
        # A new tensor, no view: autograd forbids in-place changes of a view if a Function has several outputs.
        shape = picked.given_ids.shape
        shifted = self.logits.view(shape) - picked.spread(partial[MAX]).view(shape)
        log_probs = shifted - picked.spread(statistics["log_sum"]).view(shape)
        # A token whose statistics are NaN has no log-probability.
        log_probs = log_probs.where(picked.inside(merged.vocab_size).view(shape) | log_probs.isnan(), -torch.inf)
        if picked.broken is not None:
            log_probs.masked_fill_(picked.broken, torch.nan)
        return {self.results[0]: log_probs}

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.logits,)

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Self:
        feature = super().with_tensors(tensors)
        (feature.logits,) = tensors
        return feature

    def coefficients(
        self, call: Any, merged: Merged, upstream: Mapping[str, Tensor | None], coefficients: Coefficients
    ) -> Coefficients:
        """The term of a selected target is moved to ``beta``, because gradients of targets are never rounded."""
        given, picked = upstream[self.results[0]], call.picked
        if given is None:
            return coefficients
        given = given.reshape(-1).where(picked.inside(merged.vocab_size), 0.0)
        coefficients = coefficients._replace(alpha=coefficients.alpha - picked.sums(given))
        if call.target is not None and coefficients.beta is not None:
            of_target = picked.ids == picked.spread(call.target)
            beta = coefficients.beta - picked.sums(given.where(of_target, 0.0))
            given = given.masked_fill(of_target, 0.0)
            excess = coefficients.excess
            if excess is not None:
                excess = excess - picked.sums(given)
            coefficients = coefficients._replace(beta=beta, excess=excess)
        assert self.logits is not None
        self.logits = self.logits.contiguous()
        self._gradient = call.logit_map.each(picked.spread).before(given, self.logits)
        return coefficients

    def before_backward(self, call: Any, task: BackwardTask, block: Block) -> BackwardTask:
        if self._gradient is None:
            return task
        entries = call.picked.of_block(call.layout, block, call.shard.start)
        return task._replace(picked=PickedGradient(entries, self._gradient, self.logits))
