"""One call: all of it but the tensors that may need gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from parallel_lce.backends.interface import Backend, BlockForward, Projection, SelectedLogits, softcap_slope
from parallel_lce.collectives import HiddenReduction, IncomingHidden, Layout, Shard
from parallel_lce.grad_buffers import MainGrad
from parallel_lce.partials import Columns
from parallel_lce.plan import Block, Plan
from parallel_lce.replay import Tapes
from parallel_lce.selection import Selected
from parallel_lce.statistics import StatisticsHead

_T = TypeVar("_T")


@dataclass(frozen=True)
class Call:
    """All of one call but the tensors that may need gradients."""

    # One of parallel_lce.backends.
    backend: Backend
    layout: Layout
    shard: Shard
    columns: Columns
    plan: Plan
    # [N] int64 ids in the whole vocabulary, or None.
    target: Tensor | None
    # [N] in the statistics' dtype: the logits' scale of each token beside ``scale``; None: 1
    token_scale: Tensor | None = None
    # Entries whose logits are wanted, or None.
    selected: Selected | None = None
    # How many of the largest logits are wanted; 0: none.
    top_k: int = 0
    logit_scale: float = 1.0
    # One number, or of each token, already divided by its temperature: [N] in the statistics' dtype.
    logit_softcap: float | Tensor | None = None
    # One number. Temperatures of each token are part of ``token_scale`` and of the soft-cap.
    temperature: float = 1.0
    # Where dW is added, if anywhere.
    main_grad: MainGrad | None = None
    # dtype of dX's reduction over the ranks; None: that of the hidden states.
    reduce_dtype: torch.dtype | None = None
    # False: dX stays this rank's part.
    reduce_hidden_grad: bool = True
    # Largest probability of a tile of the gradient that is approximated; None: the gradient is exact.
    gradient_filter: float | None = None
    # Of calls of the same signature, where their runs can be replayed.
    tapes: Tapes | None = None

    @property
    def per_token(self) -> tuple[Tensor | None, ...]:
        """Its tensors, all of them per token; none needs a gradient."""
        selected = self.selected.tensors if self.selected else (None, None)
        return (self.target, self.token_scale, self.token_cap, *selected)

    @property
    def scale(self) -> float:
        """The logits' scale beside :attr:`token_scale`."""
        return self.logit_scale / self.temperature

    @property
    def softcap(self) -> float | Tensor | None:
        """The cap of the soft-cap: softcap(u) / T has the cap divided by T, and u."""
        cap = self.logit_softcap
        return cap if cap is None or isinstance(cap, Tensor) else cap / self.temperature

    @property
    def token_cap(self) -> Tensor | None:
        """The soft-cap of each token, if it is not one number."""
        return self.logit_softcap if isinstance(self.logit_softcap, Tensor) else None

    def with_tensors(self, per_token: Sequence[Tensor | None]) -> Call:
        """The call with these as :attr:`per_token`. They may have any strides."""
        # What a forward has found of its selection is unknown to the tape of a backward.
        if self.selected is None and all(a is b for a, b in zip(per_token, self.per_token)):
            return self
        target, token_scale, token_cap, ids, offsets = [t if t is None else t.contiguous() for t in per_token]
        selected = self.selected
        if selected is not None and ids is not None:
            selected = Selected(ids, offsets, selected.tokens)
        softcap = self.logit_softcap if token_cap is None else token_cap
        return replace(self, target=target, token_scale=token_scale, logit_softcap=softcap, selected=selected)

    def run(self, kind: Hashable, work: Callable[[], _T], *inputs: Tensor | None) -> _T:
        """``work()``, or its replay (:meth:`parallel_lce.replay.Tapes.run`)."""
        return work() if self.tapes is None else self.tapes.run(kind, work, inputs, self.layout.group)

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        shard = self.shard
        # Kernels take rows contiguous in D. Hooks for saved tensors may have returned others.
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        bias = bias if bias is None else bias.contiguous()
        return Projection(weight, bias, shard.start, shard.real_rows, self.scale, self.softcap)

    def of_block(self, projection: Projection, block: Block) -> Projection:
        """The ``projection`` with the scales and soft-caps of a block's tokens."""
        if self.token_scale is None:
            return projection
        softcap = self.softcap if self.token_cap is None else self.layout.take(self.token_cap, block)
        return replace(projection, token_scale=self.layout.take(self.token_scale, block), softcap=softcap)

    def hidden_reduction(self, hidden: Tensor, in_pieces: bool) -> HiddenReduction:
        """The sum of dX over the ranks, or over this rank alone."""
        return HiddenReduction(hidden, self.reduced_over, self.reduce_dtype, in_pieces)

    @property
    def reduced_over(self) -> Layout:
        """The ranks over which dX is summed."""
        return self.layout if self.reduce_hidden_grad else Layout()

    def block_forward(
        self,
        projection: Projection,
        x: IncomingHidden,
        targets: Tensor | None,
        block: Block,
        save: int,
        buffer: Tensor | None,
        out: Tensor | None,
        keep_windows: bool = False,
        selected: SelectedLogits | None = None,
    ) -> BlockForward:
        """The forward of a block. ``targets``: :meth:`local_targets`. The others: of ``Backend.BlockForward``."""
        projection, target = self.of_block(projection, block), self.layout.take(targets, block)
        given = projection, x.tensor, target, self.columns, save, buffer, out, keep_windows, selected
        return self.backend.BlockForward(*given)

    def before_softcap(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """From gradients ``[E]`` of selected ``logits`` to those of the projection's output ``x @ weight.T + bias``."""
        gradient = gradient * self.scale
        if self.token_scale is not None and self.selected is not None:
            gradient *= self.selected.spread(self.token_scale)
        if self.softcap is not None:
            cap = self.softcap
            if isinstance(cap, Tensor) and self.selected is not None:
                cap = self.selected.spread(cap)
            gradient *= softcap_slope(cap, logits)
        return gradient

    def statistics(self) -> StatisticsHead:
        """The head of all statistics that the call finds."""
        return StatisticsHead(self.columns, self.target is not None, self.selected, self.top_k)

    def local_targets(self) -> Tensor | None:
        """The targets ``[N]`` relative to the shard. Those of other shards, and invalid ones, lie outside it."""
        if self.target is None:
            return None
        return self.target - self.shard.start if self.shard.start else self.target.contiguous()


@dataclass(frozen=True)
class Needs:
    """Which gradients a backward must produce."""

    hidden: bool
    weight: bool
    bias: bool


Inputs = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states ``[..., D]``, weight ``[V/P, D]`` and bias ``[V/P]``."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dX, dW (or what ``MainGrad.placeholder`` returns for it) and dbias; None where not asked for."""


def flattened(hidden: Tensor) -> Tensor:
    """``hidden [..., D]`` as ``[N/sp_size, D]``. A size of -1 would be ambiguous for D = 0."""
    if hidden.dim() == 2:
        return hidden
    return hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])


def token_count(hidden: Tensor, layout: Layout) -> int:
    """N, the tokens in the TP layout of this rank's ``hidden [..., D]``."""
    return math.prod(hidden.shape[:-1]) * layout.sp_size
