"""Calls on the tokens that count alone, where the caller knows how many there are.

The host cannot ask the device for their number without waiting for it. So the caller tells it, and a number that is
wrong makes the result NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallel_lce.arguments import Arguments, as_number
from parallel_lce.checks import check_arguments, shortened
from parallel_lce.collectives import Layout, gather_hidden
from parallel_lce.plan import Block


class Compaction:
    """The tokens of a ``mask`` of any shape, ``count`` in number, in row-major order."""

    def __init__(self, mask: Tensor, count: int) -> None:
        self.shape, flat = mask.shape, mask.reshape(-1)
        # [count], positions of the tokens that count
        self._kept = flat.logical_not().to(torch.uint8).argsort(stable=True)[:count]
        self._wrong = flat.sum() != count

    def of(self, tokens: Tensor, dims: int = 0) -> Tensor:
        """The counted tokens' ``[count, ...]`` of a tensor with ``dims`` dimensions beside those of the tokens."""
        trailing = tokens.shape[tokens.dim() - dims :]
        return tokens.reshape(self.shape.numel(), *trailing).index_select(0, self._kept)

    def spread(self, values: Tensor, others: float) -> Tensor:
        """``values [count, ...]`` at their places among all tokens, and ``others`` elsewhere. -1 or NaN everywhere if
        the count was wrong."""
        whole = values.new_full((self.shape.numel(), *values.shape[1:]), others).index_copy(0, self._kept, values)
        return self.checked(whole).view(*self.shape, *values.shape[1:])

    def checked(self, value: Tensor) -> Tensor:
        """-1 or NaN if the count was wrong."""
        return value.masked_fill(self._wrong, torch.nan if value.is_floating_point() else -1)


class _AllTokens(torch.autograd.Function):
    """All ranks' hidden states ``[S, ..., D]``, of which every rank then forms the same gradient.

    Forward: one all-gather of N/P * D elements per rank. Backward: this rank's part, and no collective.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.rows = layout, len(hidden)
        flat = hidden.reshape(len(hidden), hidden[:1].numel())
        gathered = gather_hidden(flat, Block(0, len(flat), 0), layout).wait()
        return gathered.view(-1, *hidden.shape[1:])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream.narrow(0, ctx.rows * ctx.layout.rank, ctx.rows), None


def compacted(
    a: Arguments, mask: Tensor | None, count: Any, ignore_index: int | None = None
) -> tuple[Arguments, Compaction]:
    """The call on the tokens that count alone: those of the ``mask``, or those whose target is not ``ignore_index``.

    It has no sequence parallelism: every rank gathers all hidden states first, since the tokens that count are not
    spread evenly over the ranks. Its dX is all-reduced.

    Raises:
        ValueError: a count that is no number from 0 to N, or a mask of another shape or dtype than the tokens' bool;
        and for all arguments that are wrong without a count.
    """
    a = a.with_python_numbers()
    layout = Layout.of(a.process_group, a.sequence_parallel is True)
    tokens = check_arguments(a, layout, needs_target=mask is None)
    count = as_number(count)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= tokens.numel():
        raise ValueError(
            f"counted_tokens must be a number of tokens from 0 to {tokens.numel()}, got {shortened(count)}"
        )
    if mask is None:
        assert a.target is not None
        mask = a.target != ignore_index
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != tokens:
        given = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be torch.bool of the tokens' shape {list(tokens)}, got {given}")
    if a.selected_offsets is not None:
        raise ValueError("selected must be ids [..., K], without offsets, where counted_tokens is given")
    found, hidden = Compaction(mask, count), a.input
    if layout.sequence_parallel:
        hidden = _AllTokens.apply(hidden, layout)
    per_token = {
        name: found.of(value, dims=1 if name == "selected" else 0)
        for name in ("target", "token_weight", "logit_scale", "selected")
        if isinstance(value := getattr(a, name), Tensor)
    }
    return replace(a, input=found.of(hidden, dims=1), sequence_parallel=False, **per_token), found
