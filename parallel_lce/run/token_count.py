"""Tokens that do not count: the number of the others, and calls on these alone.

:func:`count_tokens` copies the number from the device to the host while the model's forward runs, since the host would
have to synchronise with the device to read it. A wrong number is refused where the host can read it, on a CPU and in
debug mode, and else makes the result NaN.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_lce.call import debug
from parallel_lce.call.checks import check_kind, check_target, described, known_vocab_size
from parallel_lce.call.prepare import autocasted, check
from parallel_lce.core.collectives import Layout
from parallel_lce.core.grad_buffers import MainGrad
from parallel_lce.core.memory import HostNumber, in_memory
from parallel_lce.core.options import INTEGERS, NO_LABEL, Options, Tensors, as_int64, check_option, shortened
from parallel_lce.core.private import gather_rows, transforming, version


class TokenCount:
    """What :func:`count_tokens` returns: the argument ``counted_tokens`` of the fused functions."""

    def __init__(self, mask: Tensor) -> None:
        self._mask, self._total = mask, HostNumber(mask.sum()) if _can_be_read(mask) else None

    def read(self) -> int | None:
        """The number. Waits until the device has copied it. None where the host must not wait: in a
        trace, in a captured CUDA graph, and for a mask of which nobody could read it."""
        if self._total is None or not _can_be_read(self._mask):
            return None
        return self._total.read()


def count_tokens(target: Tensor, ignore_index: int | None = NO_LABEL) -> TokenCount:
    """Starts to count the tokens that a loss will count. Call it before the model's forward, and give the result to the
    fused function as ``counted_tokens``: the tokens that do not count then cost nothing, and the host waits for nothing
    that the device has not passed long ago.

    In a trace of ``torch.compile``, in a captured CUDA graph, and for tensors of other kinds (other devices, DTensors),
    nothing is read: the loss then works on all tokens, with the same result, on a copy of the hidden states with 0 for
    tokens that do not count.

    Args:
        target: the very targets that the loss will get, so already shifted: ids ``[...]`` of any integer dtype. Or a
            mask ``[...]`` of bool, true for the tokens that count. The same on all tensor-parallel ranks.
        ignore_index: the target of tokens that do not count, as in :func:`parallel_lce.linear_cross_entropy`.

    Collectives: none.

    Raises:
        ValueError: ``target`` is no tensor of an integer dtype or bool, or ``ignore_index`` no integer of 64 bits.
    """
    if not isinstance(target, Tensor) or target.dtype not in (*INTEGERS, torch.bool):
        raise ValueError(f"target must be a tensor of ids or a mask of bool, got {described(target)}")
    check_option("ignore_index", ignore_index)
    if target.dtype is torch.bool:
        return TokenCount(target)
    return TokenCount(as_int64(target) != (NO_LABEL if ignore_index is None else ignore_index))


class LabelCount:
    """What a door counts before the model's forward: the labels that are not -100, with ``shifted`` without the first
    of each row. ``labels``: anything; nothing but a tensor is counted."""

    def __init__(self, labels: Any, shifted: bool = False) -> None:
        self._labels, self._shifted, self.count = None, shifted, None
        if _can_be_read(labels):
            self._labels = weakref.ref(labels)  # they may keep this
            self.count = TokenCount(as_int64(labels[..., 1:] if shifted else labels) != NO_LABEL)
            self._version = version(labels)

    def of(self, labels: Any, shifted: bool = False) -> TokenCount | None:
        """The count, if it is that of these very labels and nobody has changed them since."""
        if self._labels is None or labels is not self._labels() or shifted != self._shifted:
            return None
        return self.count if version(labels) == self._version else None


def _can_be_read(mask: Any) -> bool:
    if torch.compiler.is_compiling() or transforming() or type(mask) is not Tensor:
        return False
    return mask.device.type == "cpu" or (mask.is_cuda and not torch.cuda.is_current_stream_capturing())


class Compaction:
    """The counted tokens of a ``mask`` of any shape, in row-major order: ``count`` of them. Without a ``count``, and
    with ``every``, the call keeps all tokens. Without a mask it changes nothing."""

    def __init__(self, mask: Tensor | None = None, count: int | None = None, every: bool = False) -> None:
        self._mask, self._kept, self._wrong = mask, None, None
        if mask is None or count is None:
            return
        flat = mask.reshape(-1)
        total = flat.sum()
        self._wrong = total != count
        if not torch.compiler.is_compiling():
            _check_count(count, total, self._wrong)
        if not every:
            # [count], positions of the counted tokens; behind the last one 0
            self._kept = torch.nonzero_static(flat, size=count, fill_value=0).view(-1)

    def of(self, tokens: Tensor) -> Tensor:
        """The rows ``[count, ...]`` that the call works on, of ``tokens``, whose first dimensions are the mask's."""
        if self._mask is None or self._kept is None:
            return tokens
        return tokens.reshape(self._mask.numel(), *tokens.shape[self._mask.dim() :]).index_select(0, self._kept)

    def spread(self, values: Tensor, others: float = 0) -> Tensor:
        """The call's ``values [count, ...]`` at their places among all tokens, and ``others`` elsewhere."""
        if self._mask is None:
            return values
        shape = self._mask.shape
        if self._kept is None:
            ones = [1] * (values.dim() - len(shape))
            return self.checked(values.masked_fill(~self._mask.view((*shape, *ones)), others))
        trailing = values.shape[1:]
        whole = values.new_full((shape.numel(), *trailing), others).index_copy(0, self._kept, values)
        return self.checked(whole).view((*shape, *trailing))

    def checked(self, value: Tensor) -> Tensor:
        """``value``. If the count was wrong: -1 for ids, else NaN, with NaN gradients of tokens whose weight is
        not 0."""
        if self._wrong is None:
            return value
        if not value.is_floating_point():
            return value.masked_fill(self._wrong, -1)
        return value * torch.where(self._wrong, torch.nan, 1.0).to(value.dtype)


_ALL = Compaction()


def _check_count(count: int, total: Tensor, wrong: Tensor) -> None:
    """Raise ``ValueError`` for a wrong count, where the host can read it."""
    if (total.device.type == "cpu" or debug.enabled()) and wrong:
        raise ValueError(f"counted_tokens is {count}, and {int(total)} tokens count")


def compacted(
    options: Options,
    tensors: Tensors,
    group: dist.ProcessGroup | None,
    mask: Tensor | None,
    counted_tokens: Any,
    main_grad: MainGrad | None = None,
) -> tuple[Options, Tensors, Compaction]:
    """The call on the counted tokens alone: the tokens of the ``mask``, for a loss those that are not ignored.
    ``counted_tokens``: their number, or a ``TokenCount``. If there is none, or it cannot be read, the call works on all
    tokens, as in debug mode. Without either, it is the call as it is.

    A call on some tokens has no sequence parallelism: every rank gathers all hidden states first, since the counted
    tokens are not spread evenly over the ranks. Its dX is all-reduced.

    Raises:
        ValueError: a count that is no number from 0 to N, or wrong; a mask of another shape than the tokens', or not
        bool; and as for a call without a count.
    """
    if mask is None and counted_tokens is None:
        return options, tensors, _ALL
    tensors, count, begun = autocasted(tensors), counted_tokens, isinstance(counted_tokens, TokenCount)
    # A refusal may be sent to the other ranks, so hidden states are gathered only after all checks.
    options, layout, tokens = check(options, tensors, group, main_grad)
    if begun:
        count = counted_tokens.read()
    if count is not None and not (type(count) is int and 0 <= count <= tokens.numel()):
        raise ValueError(f"counted_tokens must be an integer from 0 to {tokens.numel()}, got {shortened(count)}")
    counts = _checked_mask(mask, tokens, tensors) if mask is not None or options.kind == "statistics" else None
    if options.kind == "loss":
        labelled = as_int64(tensors.target) != options.ignore_index
        counts = labelled if counts is None else labelled & counts
    assert counts is not None  # of either kind
    debug.compare_later({"mask": counts} if count is None else {"counted_tokens": count, "mask": counts})
    if begun and count == tokens.numel():
        return options, tensors, Compaction(counts, count, every=True)
    if count is None or debug.enabled():  # before ranks that differ gather hidden states
        return options, _of_all(options, tensors, layout, counts), Compaction(counts, count, every=True)
    weight = tensors.linear_weight
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():  # there the operator checks counted targets
        vocab_size = known_vocab_size(weight.shape[0], layout, options.vocab_start, options.vocab_size)
        check_target(options, as_int64(tensors.target), vocab_size, layout, counts)
    compaction = Compaction(counts, count)
    hidden = in_memory(tensors.input)
    if layout.sequence_parallel:  # no Function, since graphs of torch 2.11 cannot break here
        whole = gather_rows(hidden.detach().contiguous(), 0, layout.group)
        own = torch.arange(hidden.shape[0], device=hidden.device) + hidden.shape[0] * layout.rank
        # dX is the same on every rank. This takes a copy of this rank's part: a view would keep all of it.
        hidden = whole.index_copy(0, own, hidden)
    of_tokens = tensors._replace(input=hidden, linear_weight=None, linear_bias=None).named()
    tensors = tensors._replace(**{name: compaction.of(value) for name, value in of_tokens.items()})
    return options._replace(sequence_parallel=False), tensors, compaction


def _of_all(options: Options, tensors: Tensors, layout: Layout, mask: Tensor) -> Tensors:
    """The tensors of a call on all tokens. Hidden states of tokens that do not count become 0, and their scales and
    temperatures 1, since a NaN, times a gradient of 0, would be NaN in every row of dW; their targets may be no ids."""
    own = mask.chunk(layout.sp_size)[layout.rank] if layout.sp_size > 1 else mask
    filled: dict[str, Any] = dict(logit_scale=1.0, temperature=1.0)
    filled["target"] = NO_LABEL if options.kind == "statistics" else options.ignore_index
    given = {name: as_int64(value) for name, value in tensors.named().items() if name in filled}
    others = {name: value.masked_fill(~mask, filled[name]) for name, value in given.items()}
    return tensors._replace(input=tensors.input.masked_fill(~own.unsqueeze(-1), 0.0), **others)


def _checked_mask(mask: Tensor | None, tokens: torch.Size, tensors: Tensors) -> Tensor:
    """The ``mask``. Raises ``ValueError`` as :func:`compacted`."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != tokens:
        given = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        given += ": counted_tokens is the number of its tokens" if mask is None else ""
        raise ValueError(f"mask must be torch.bool of the tokens' shape {list(tokens)}, got {given}")
    check_kind("mask", mask)
    if mask.device != tensors.input.device:
        raise ValueError(f"mask is on {mask.device} and input is on {tensors.input.device}")
    if tensors.selected_offsets is not None:
        raise ValueError("selected must be ids [..., K], without offsets, where a mask is given")
    return mask
