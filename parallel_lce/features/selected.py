"""Log-probabilities of selected entries: the argument ``selected`` of :func:`parallel_lce.token_statistics`.

Each rank sends the logits of the selected entries in its shard, and -inf for the others. With z_k the logit of a
selected entry, M the maximum and s the sum of exponentials,

    selected_log_prob = (z_k - M) - log s                d/dz_j = [j = k] - p_j
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.interface import BackwardTask, Coefficients, ForwardTask
from parallel_lce.call.call import Feature, Shapes
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
    """``saved``: the logits of the selected entries ``[E]``, -inf for an id outside the vocabulary."""

    # [E]: terms of the gradient of the projection's output. Known in a backward with an upstream gradient.
    _gradient: Tensor | None = None

    @classmethod
    def asked(cls, options: Options, tensors: Tensors) -> bool:
        return tensors.selected is not None

    @classmethod
    def shapes(cls, options: Options, tensors: Tensors, tokens: int) -> Shapes:
        shape = tensors.selected.shape
        return {"selected_log_prob": ((tokens, shape[-1]) if tensors.selected_offsets is None else shape, None)}

    def message_size(self, call: Any) -> int:
        return len(call.selection.ids)

    def before_block(self, call: Any, task: ForwardTask, block: Block, message: Tensor) -> ForwardTask:
        selection = call.selection.of_block(call.layout, block, call.shard.start)
        return task._replace(selection=selection._replace(logits=message))

    def outputs(self, call: Any, merged: Merged, messages: Tensor, statistics: Mapping[str, Any]) -> dict[str, Tensor]:
        selection, owner = call.selection, call.selection.owner
        # Of an id in no shard, -inf.
        self.saved = logits = messages.amax(0)
        # A new tensor, no view: autograd forbids in-place changes of a view if a Function has several outputs.
        shifted = logits.view(selection.shape) - merged.partial[MAX][owner].view(selection.shape)
        log_probs = shifted - statistics["log_sum"][owner].view(selection.shape)
        if selection.invalid is not None:
            log_probs.masked_fill_(selection.invalid, torch.nan)
        return {"selected_log_prob": log_probs}

    def coefficients(
        self, call: Any, merged: Merged, upstream: Mapping[str, Tensor | None], coefficients: Coefficients
    ) -> Coefficients:
        """The term of a selected target is moved to ``beta``, because gradients of targets are never rounded."""
        given, selection = upstream["selected_log_prob"], call.selection
        if given is None:
            return coefficients
        owner = selection.owner
        given = given.reshape(-1).where(selection.inside(0, merged.vocab_size), 0.0)
        alpha, beta, excess = coefficients.alpha - selection.sums(given), coefficients.beta, coefficients.excess
        if call.target is not None and beta is not None:
            of_target = selection.ids == call.target[owner]
            beta = beta - selection.sums(given.where(of_target, 0.0))
            given = given.masked_fill(of_target, 0.0)
            excess = excess if excess is None else excess - selection.sums(given)
        self._gradient = call.logit_map.of_rows(owner).before(given, self.saved)
        return coefficients._replace(alpha=alpha, beta=beta, excess=excess)

    def before_backward(self, call: Any, task: BackwardTask, block: Block) -> BackwardTask:
        if self._gradient is None:
            return task
        selection = call.selection.of_block(call.layout, block, call.shard.start)
        return task._replace(selection=selection._replace(logits=self.saved, gradient=self._gradient))
