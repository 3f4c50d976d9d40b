"""The schedule of a call: what a forward and a backward do with each block of tokens, and in which order.

A call runs block by block (:mod:`parallel_lce.plan`). Of a fused call, this module alone knows both the collectives
(:mod:`parallel_lce.collectives`) and the work on a block (:mod:`parallel_lce.backends`):

    forward      gather hidden states -> project -> gather partials -> merge
    backward     gather hidden states -> dX -> reduce dX, beside dW
    accumulate   forward and backward of each block in one pass: Algorithms 3 and 4 of "From Projection to Prediction",
                 over ranks and row blocks. 6 N V D flops; the exponentials of one block exist at a time, of two on
                 several ranks.

Gathers of hidden states are started one block ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_lce.backends.interface import (
    BlockForward,
    Coefficients,
    GradBuffers,
    Projection,
    Saved,
    Scratch,
    SelectedGradient,
    recovers_logits,
)
from parallel_lce.call import Call, Gradients, Needs, flattened, token_count
from parallel_lce.collectives import IncomingHidden, Layout, PartialsGather, gather_hidden
from parallel_lce.grad_buffers import GradBuffer
from parallel_lce.losses import WeightedLoss
from parallel_lce.memory import device_without_autocast
from parallel_lce.partials import Merged, accumulation_dtype
from parallel_lce.plan import Block
from parallel_lce.selection import BesidePartials


class Gathers:
    """Hidden states of the blocks, in order: :meth:`start` starts the next gather, :meth:`next` gives the oldest."""

    def __init__(self, hidden: Tensor, blocks: Sequence[Block], layout: Layout) -> None:
        self._hidden, self._blocks, self._layout = hidden, iter(blocks), layout
        self._started: deque[IncomingHidden] = deque()

    def start(self) -> None:
        block = next(self._blocks, None)
        if block is not None:
            self._started.append(gather_hidden(self._hidden, block, self._layout))

    def next(self) -> IncomingHidden:
        return self._started.popleft()


def forward(call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, save: bool) -> tuple[Merged, Saved]:
    """What is found of ``hidden [..., D]``, and what is saved for backward.

    With ``save`` these are the first block's exponentials, preceded by its gathered hidden states if
    ``plan.saves_hidden``.

    Collectives: under sequence parallelism one all-gather of hidden states per block, each started a block ahead; then
    one all-gather of the partials.
    """
    layout, columns, blocks = call.layout, call.columns, call.plan.forward_blocks
    # The backward's only block can use what is known of the forward's windows, but for the gradient of the bias.
    keep_windows = save and call.gradient_filter is not None and len(blocks) == 1 and call.plan.blocks == blocks
    keep_windows = keep_windows and (bias is None or not bias.requires_grad)
    with device_without_autocast(weight):
        hidden, projection = flattened(hidden), call.projection(weight, bias)
        targets = call.local_targets()
        entries = BesidePartials(call.selected, call.top_k, token_count(hidden, layout), call.shard, layout)
        partials = PartialsGather(hidden, entries.tokens, call.shard, columns, layout, entries.size)
        entries.begin(partials.extra)
        saved: Saved = ()
        gathers = Gathers(hidden, blocks, layout)
        gathers.start()
        for block in blocks:
            x = gathers.next()
            # With one block the backend writes straight into the buffer that is gathered.
            out = partials.local if len(blocks) == 1 else None
            saves = block.saved if save else 0
            wanted = entries.selected_of(block)
            work = call.block_forward(projection, x, targets, block, saves, None, out, keep_windows, wanted)
            block_saved = _project(work, x, gathers, first=block.start == 0)
            saved = saved or block_saved
            entries.find_top(call.backend, call.of_block(projection, block), x.tensor, block)
            if save and call.plan.saves_hidden:
                # Saved on every rank, even one with an empty shard: a rank that saved nothing would gather again in
                # backward, and the collectives would no longer match.
                saved = (x.tensor, *saved)
            if out is None:
                layout.put(partials.local, block, work.partial)
        partials.start()
        merged = partials.finish(call.backend.merge_ranks)
        return Merged(*merged, *entries.merged(partials.extras)), saved


def _project(work: BlockForward, x: IncomingHidden, gathers: Gathers, first: bool) -> Saved:
    """Project a block, and start the next block's gather once this one's hidden states are there.

    This rank's own rows of the first block are projected during its gather: no earlier block overlaps that. The
    second gather is started after it: with CUDA_DEVICE_MAX_CONNECTIONS=1 the local rows' kernels would otherwise
    queue behind the second gather.
    """
    if first and len(x.local) < len(x.tensor):
        work.project_local(x.local)
    x.wait()
    gathers.start()
    return work.project_rest()


class _GradientSums:
    """dX, dW and dbias of one call, formed block by block.

    ``dtype``: of dW and dbias, by default the parameters'. ``scratch_bytes``: of the blocks' working memory.
    """

    def __init__(
        self,
        call: Call,
        hidden: Tensor,
        projection: Projection,
        needs: Needs,
        scratch_bytes: int,
        dtype: torch.dtype | None = None,
        selected: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._call, self._projection, self._targets = call, projection, call.local_targets()
        # [E]: what the selected entries add to the gradient of the projection's output, and their logits.
        self._selected = selected
        self.scratch = Scratch(scratch_bytes, hidden.device)
        number, real = len(call.plan.blocks), projection.real_rows
        self._reduction = self._dweight = self._dbias = None
        if needs.hidden:
            self._reduction = call.hidden_reduction(hidden, in_pieces=not needs.weight)
        if needs.weight:
            self._dweight = GradBuffer(projection.weight, real, number, dtype=dtype, main_grad=call.main_grad)
        if needs.bias and projection.bias is not None:
            self._dbias = GradBuffer(projection.bias, real, number, dtype=dtype)

    def add_block(
        self, block: Block, x: IncomingHidden, partial: Tensor, coefficients: Coefficients, saved: Saved
    ) -> None:
        """Add the gradients of a block: its merged ``partial [C, R]`` and ``coefficients [R]``. Consumes ``saved``.

        The reduction of dX over the ranks is started as soon as dX is complete, and overlaps the rest of dW.
        """
        call, reduction = self._call, self._reduction
        dx = None if reduction is None else reduction.open_block(block)
        work = call.backend.BlockBackward(
            call.of_block(self._projection, block),
            x.tensor,
            call.layout.take(self._targets, block),
            partial,
            coefficients,
            saved,
            GradBuffers(dx, self._dweight, self._dbias, call.reduced_over.ranks > 1, x.arrived),
            self.scratch,
            self._selected_of(block),
            call.gradient_filter,
        )
        if work.reads_hidden_first:
            x.wait()
        for rows_done in work.hidden_grad():
            if reduction is not None and dx is not None:
                reduction.start(block, dx, rows_done)
        # Even if this block did not read x: the gather must end before its buffer is freed.
        x.wait()
        work.weight_grad()

    def _selected_of(self, block: Block) -> SelectedGradient | None:
        call = self._call
        if self._selected is None or call.selected is None:
            return None
        return SelectedGradient(call.selected.of_block(call.layout, block, call.shard.start), *self._selected)

    def deliver(self, shape: torch.Size) -> Gradients:
        """The gradients, dX in this ``shape [..., D]``."""
        dweight = self._dweight and self._dweight.deliver()
        dbias = self._dbias and self._dbias.deliver()
        return self._reduction and self._reduction.wait().view(shape), dweight, dbias


def backward(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    partial: Tensor,
    saved: Saved,
    coefficients: Coefficients,
    needs: Needs,
    consumed: bool = False,
) -> Gradients:
    """Gradients of a call whose :func:`forward` gave ``partial`` and ``saved``.

    A backward overwrites what is saved. ``consumed``: an earlier backward has overwritten it; everything is then
    recomputed, in that memory. The tensors may have other strides than in forward, since hooks for saved tensors
    return what they like.

    Collectives: per block, under sequence parallelism, one all-gather of hidden states, started a block ahead, unless
    they were saved; then the reduction of dX (:class:`parallel_lce.collectives.HiddenReduction`).
    """
    layout, blocks, plan = call.layout, call.plan.blocks, call.plan
    with device_without_autocast(weight):
        gathered = None
        if saved and plan.saves_hidden:
            gathered, saved = saved[0], saved[1:]
        # Autograd, which saved these tensors, must not see that they are overwritten.
        saved = tuple([t.data.contiguous() for t in saved])
        shape, hidden, projection = hidden.shape, flattened(hidden), call.projection(weight, bias)
        # Windows alone may have been kept, without exponentials.
        has_exponentials = bool(saved) and saved[0].numel() > 0
        scratch_bytes = plan.scratch_bytes if has_exponentials else plan.scratch_bytes_unsaved
        coefficients, selected = _selected_apart(call, coefficients)
        sums = _GradientSums(call, hidden, projection, needs, scratch_bytes, selected=selected)
        if has_exponentials and (consumed or not (coefficients.delta is None or recovers_logits(weight.dtype))):
            sums.scratch.adopt(saved[0])
            saved = ()
        tokens = None
        if len(blocks) > 1:
            coefficients = coefficients.folded()
            # All per-token vectors stacked: one copy then extracts a block.
            tokens = torch.cat([partial, torch.stack(coefficients.present)])
        gathers = Gathers(hidden, () if gathered is not None else blocks, layout)
        gathers.start()
        for block in blocks:
            x = gathers.next() if gathered is None else IncomingHidden(gathered)
            # At most two gathers are in flight.
            if block.start:
                x.wait()
            gathers.start()
            of_block, folded = partial, coefficients
            if tokens is not None:
                stacked = layout.take(tokens, block).contiguous()
                of_block, present = stacked[: len(partial)], stacked[len(partial) :]
                folded = coefficients.replaced(present.unbind())
            sums.add_block(block, x, of_block, folded, saved)
            if saved:
                sums.scratch.adopt(saved[0])
                saved = ()
        return sums.deliver(shape)


def _selected_apart(call: Call, coefficients: Coefficients) -> tuple[Coefficients, tuple[Tensor, Tensor] | None]:
    """The coefficients, and ``[E]`` what the selected entries add to the gradient of the projection's output, with
    their logits. What a selected target would add becomes part of ``beta``: the gradients of targets are never
    rounded."""
    if coefficients.selected is None or call.selected is None:
        return coefficients, None
    (upstream, logits), selected = coefficients.selected, call.selected
    if call.target is not None and coefficients.beta is not None:
        of_target = selected.ids == selected.spread(call.target)
        beta = coefficients.beta - selected.sums(upstream.where(of_target, 0.0))
        coefficients, upstream = replace(coefficients, beta=beta), upstream.masked_fill(of_target, 0.0)
    # Hooks for saved tensors may have changed the strides of the logits.
    return coefficients, (call.before_softcap(upstream, logits), logits.contiguous())


@dataclass
class Accumulated:
    """Result of :func:`accumulate`."""

    # Sum of the weighted losses over the divisor, 0-dimensional.
    loss: Tensor
    # dX in the hidden states' dtype, dW and dbias in fp32 (fp64 for fp64).
    gradients: Gradients


@dataclass
class _Waiting:
    """A projected block that waits for the other ranks' partials."""

    block: Block
    x: IncomingHidden
    partials: PartialsGather
    saved: Saved


def accumulate(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    loss: WeightedLoss,
    divisor: Tensor | None,
    needs: Needs,
) -> Accumulated:
    """The loss of ``hidden [..., D]``, the sum over ``divisor``, and its gradients in one pass over the blocks.

    The gradient of a ``mean`` or ``sum`` by each token's loss is known in forward, up to the scalar upstream
    gradient. So a block's gradients are formed from its exponentials as soon as its partials are merged, and backward
    only scales them by the upstream gradient.

    Collectives per block: under sequence parallelism the all-gather of its hidden states, started a block ahead; the
    all-gather of its partials, waited for after the next block's projection; the reduction of its dX.
    """
    layout, columns, backend, blocks = call.layout, call.columns, call.backend, call.plan.blocks
    dtype = accumulation_dtype(weight.dtype)
    with device_without_autocast(weight):
        shape, hidden, projection = hidden.shape, flattened(hidden), call.projection(weight, bias)
        sums = _GradientSums(call, hidden, projection, needs, call.plan.scratch_bytes, dtype)
        per_token = hidden.new_empty(token_count(hidden, layout), dtype=dtype)
        targets = call.local_targets()
        factor = None if divisor is None else 1 / divisor

        def complete(waiting: _Waiting) -> None:
            block = waiting.block
            merged = Merged(*waiting.partials.finish(backend.merge_ranks))
            [losses], residuals = loss.of_block(layout, block).outputs(backend, merged)
            partial = merged.partial
            layout.put(per_token, block, losses)
            sums.add_block(block, waiting.x, partial, Coefficients(*residuals, factor=factor), waiting.saved)

        # Over ranks a block waits for its merged partials while the next one is projected.
        ahead = 1 if layout.ranks > 1 else 0
        rows = layout.sp_size * max((b.stop - b.start for b in blocks), default=0)
        entries = max((b.saved for b in blocks), default=0)
        buffers = deque(backend.allocate_saved(projection, rows, entries) for _ in range(ahead + 1))
        waiting: deque[_Waiting] = deque()
        gathers = Gathers(hidden, blocks, layout)
        gathers.start()
        for block in blocks:
            x = gathers.next()
            buffers.rotate(1)
            partials = PartialsGather(x.tensor, len(x.tensor), call.shard, columns, layout)
            work = call.block_forward(projection, x, targets, block, block.saved, buffers[0], partials.local)
            saved = _project(work, x, gathers, first=block.start == 0)
            partials.start()
            waiting.append(_Waiting(block, x, partials, saved))
            if len(waiting) > ahead:
                complete(waiting.popleft())
        while waiting:
            complete(waiting.popleft())
        total = per_token.sum()
        return Accumulated(total if divisor is None else total / divisor, sums.deliver(shape))
