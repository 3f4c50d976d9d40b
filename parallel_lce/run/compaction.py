"""Calls on the counted tokens alone. The caller passes their number, since the host would have to synchronise with the
device to read it, or a :class:`parallel_lce.run.token_count.TokenCount`. A wrong number makes the result NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.agreement import check_together
from parallel_lce.call.prepare import autocasted, check, check_readable_target, gradients_of, needs_of
from parallel_lce.core.collectives import Layout, gather_hidden
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.memory import in_memory
from parallel_lce.core.options import NO_LABEL, SPOKEN, Options, Tensors, as_int64, is_count, shortened
from parallel_lce.core.plan import Block
from parallel_lce.run.entry import fused_loss, fused_statistics
from parallel_lce.run.results import NAMES, TokenStatistics
from parallel_lce.run.token_count import TokenCount


class Compaction:
    """The ``count`` tokens of a ``mask`` of any shape, in row-major order. ``bound``: there may be fewer; then tokens
    that do not count follow them."""

    def __init__(self, mask: Tensor, count: int, bound: bool = False) -> None:
        self.shape, flat = mask.shape, mask.reshape(-1)
        # [count], positions of the counted tokens
        self._kept = flat.logical_not().to(torch.uint8).argsort(stable=True)[:count]
        self._wrong = flat.sum() > count if bound else flat.sum() != count

    def of(self, tokens: Tensor, dims: int = 0) -> Tensor:
        """The counted tokens' rows ``[count, ...]``. ``tokens`` has ``dims`` dimensions more than the mask."""
        trailing = tokens.shape[tokens.dim() - dims :]
        return tokens.reshape(self.shape.numel(), *trailing).index_select(0, self._kept)

    def spread(self, values: Tensor, others: float) -> Tensor:
        """``values [count, ...]`` at their places among all tokens, and ``others`` elsewhere. -1 or NaN everywhere if
        the count was wrong."""
        whole = values.new_full((self.shape.numel(), *values.shape[1:]), others).index_copy(0, self._kept, values)
        return self.checked(whole).view((*self.shape, *values.shape[1:]))

    def spread_all(self, counted: TokenStatistics) -> TokenStatistics:
        """Statistics of all tokens, from the statistics of the ``counted`` ones. The others get 0, and ids -1."""
        return _on_each(counted, self.spread)

    def checked(self, value: Tensor) -> Tensor:
        """``value``. If the count was wrong: -1 for ids, else NaN, with NaN gradients of tokens whose weight is
        not 0."""
        if not value.is_floating_point():
            return value.masked_fill(self._wrong, -1)
        return value * value.new_ones(()).masked_fill(self._wrong, torch.nan)


class _AllTokens(torch.autograd.Function):
    """All ranks' hidden states ``[S, ..., D]``. Their gradient must be the same on every rank. Forward: one all-gather
    of N/P * D elements per rank. Backward: this rank's part, and no collective."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.rows = layout, len(hidden)
        flat = hidden.reshape(len(hidden), hidden[:1].numel())
        gathered = gather_hidden(flat, Block(0, len(flat), 0), layout).wait()
        return gathered.view(len(hidden) * layout.ranks, *hidden.shape[1:])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        # A copy: a leaf's gradient that is a view would keep the gradient of all tokens.
        return upstream.narrow(0, ctx.rows * ctx.layout.rank, ctx.rows).clone(), None


def counted_loss(
    options: Options,
    tensors: Tensors,
    group: dist.ProcessGroup | None,
    counted_tokens: Any,
    *,
    main_grad: MainGrad | None = None,
) -> Tensor:
    """:func:`fused_loss` on the tokens that are not ignored alone. ``counted_tokens``: their number, or a
    ``TokenCount``; one that cannot be read runs the call on all tokens."""
    count, bound, whole = read_count(counted_tokens, tensors.target)
    if whole:
        tensors = with_counted_hidden(options, tensors, group, None, count)
        return fused_loss(options, tensors, group, main_grad=main_grad)
    options, tensors, compaction = compacted(options, tensors, group, None, count, bound, main_grad)
    loss = fused_loss(options, tensors, group, main_grad=main_grad)
    return compaction.spread(loss, 0.0) if options.reduction == "none" else compaction.checked(loss)


def counted_statistics(
    options: Options,
    tensors: Tensors,
    group: dist.ProcessGroup | None,
    mask: Tensor | None,
    counted_tokens: Any,
    *,
    main_grad: MainGrad | None = None,
) -> TokenStatistics:
    """:func:`fused_statistics` on the tokens of the ``mask`` alone, as :func:`counted_loss`."""
    count, bound, whole = read_count(counted_tokens, mask)
    if not whole:
        options, tensors, compaction = compacted(options, tensors, group, mask, count, bound, main_grad)
        return compaction.spread_all(fused_statistics(options, tensors, group, main_grad=main_grad))
    check(options, autocasted(tensors), group, lambda shape: _mask_of(options, tensors, shape, mask, 0))
    assert mask is not None  # checked
    tensors = with_counted_hidden(options, tensors, group, mask, count)
    if isinstance(tensors.target, Tensor):  # others' targets may be no ids
        tensors = tensors._replace(target=as_int64(tensors.target).masked_fill(~mask, NO_LABEL))
    statistics = fused_statistics(options, tensors, group, main_grad=main_grad)
    return _on_each(statistics, lambda value, others: value.where(_as_wide(mask, value), others))


def read_count(counted_tokens: Any, tokens: object) -> tuple[Any, bool, bool]:
    """The number of counted tokens; whether fewer may count; and whether to run the call on all tokens."""
    if not isinstance(counted_tokens, TokenCount):
        return counted_tokens, False, counted_tokens is None
    count, total = counted_tokens.read(), tokens.numel() if isinstance(tokens, Tensor) else 0
    # In debug mode the ranks compare their numbers.
    whole = count is None or (count >= total and not debug.enabled())
    return count if count is None else min(count, total), counted_tokens.more > 0, whole


def with_counted_hidden(
    options: Options, tensors: Tensors, group: dist.ProcessGroup | None, mask: Tensor | None, count: int | None
) -> Tensors:
    """The tensors of a call on all tokens, whose count could not be read. Hidden states of tokens that do not count
    become 0, since a NaN in them, times a gradient of 0, would be NaN in every row of dW. ``count``: if it is known,
    all tokens count. ``mask``: None for a loss."""
    hidden, target = tensors.input, tensors.target
    if mask is None and isinstance(target, Tensor):
        mask = target != options.ignore_index
    if count is not None or not (isinstance(hidden, Tensor) and isinstance(mask, Tensor) and mask.dim()):
        return tensors
    layout = Layout.of(group, options.sequence_parallel)
    if layout.sp_size > 1:
        mask = mask.chunk(layout.sp_size)[layout.rank]
    if mask.shape != hidden.shape[:-1]:
        return tensors  # which the call refuses
    return tensors._replace(input=hidden.masked_fill(~mask.unsqueeze(-1), 0.0))


def _as_wide(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (value.dim() - mask.dim()))


def _on_each(statistics: TokenStatistics, change: Callable[[Tensor, float], Tensor]) -> TokenStatistics:
    """Statistics changed by ``change(values, what tokens get that do not count)``."""
    values: dict[str, Any] = {name: getattr(statistics, name) for name in NAMES}
    for name, value in values.items():
        if value is not None and name != "vocab_size":
            values[name] = change(value, 0.0 if value.is_floating_point() else -1)
    return TokenStatistics(**values)


def compacted(
    options: Options,
    tensors: Tensors,
    group: dist.ProcessGroup | None,
    mask: Tensor | None,
    count: Any,
    bound: bool = False,
    main_grad: MainGrad | None = None,
) -> tuple[Options, Tensors, Compaction]:
    """The call on the counted tokens alone: the tokens of the ``mask``, or for a loss the tokens that are not ignored.

    It has no sequence parallelism: every rank gathers all hidden states first, since the counted tokens are not spread
    evenly over the ranks. Its dX is all-reduced.

    Raises:
        ValueError: a count that is no number from 0 to N; a mask of another shape than the tokens', or not bool; and
        as for a call without a count.
    """
    masks = []

    def check_mask(shape: torch.Size) -> None:
        masks.append(_mask_of(options, tensors, shape, mask, count))

    tensors = autocasted(tensors)
    # check may send a refusal to the other ranks, so hidden states are gathered only after it.
    options, layout, _ = check(options, tensors, group, check_mask)
    if debug.enabled():
        gradients = gradients_of(tensors, main_grad, needs_of(tensors))
        check_together(options, tensors, layout, gradients, (count, masks[0]))
    elif not torch.compiler.is_compiling():  # there the operator checks the counted targets
        check_readable_target(options, tensors, layout, masks[0])
    compaction, hidden = Compaction(masks[0], count, bound), in_memory(tensors.input)
    if layout.sequence_parallel:
        hidden = _AllTokens.apply(hidden, layout)
    per_token = {
        name: compaction.of(value, dims=1 if name == "picked" else 0)
        for name, value in tensors.named().items()
        if name not in ("input", "linear_weight", "linear_bias")
    }
    tensors = tensors._replace(input=compaction.of(hidden, dims=1), **per_token)
    return options._replace(sequence_parallel=False), tensors, compaction


def _mask_of(options: Options, tensors: Tensors, tokens: torch.Size, mask: Tensor | None, count: Any) -> Tensor:
    """The mask of the counted tokens, of the shape ``tokens``. Raises ``ValueError`` as :func:`compacted`."""
    if not (is_count(count) and 0 <= count <= tokens.numel()):
        raise ValueError(
            f"counted_tokens must be a number of tokens from 0 to {tokens.numel()}, got {shortened(count)}"
        )
    if options.reduction is not None:
        mask = tensors.target != options.ignore_index
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != tokens:
        given = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be torch.bool of the tokens' shape {list(tokens)}, got {given}")
    if mask.device != tensors.input.device:
        raise ValueError(f"mask is on {mask.device} and input is on {tensors.input.device}")
    if tensors.picked_offsets is not None:
        raise ValueError(f"{SPOKEN['picked']} must be ids [..., K], without offsets, where counted_tokens is given")
    return mask
