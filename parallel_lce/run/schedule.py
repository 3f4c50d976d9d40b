"""The schedule of a call, collectives and the backend's work, block by block; and its autograd.Functions.

    forward      gather hidden states -> project -> gather partials -> merge
    backward     gather hidden states -> dX -> reduce dX, beside the last slice's dW
    accumulate   forward and backward of each block in one pass: Algorithms 3 and 4 of "From Projection to Prediction",
                 over ranks and row blocks. 6 N V D flops. A rank holds the exponentials of one block at a time.

Gathers of hidden states are started one block ahead. Autograd may run backward through one graph more than once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial as partial_of
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.formulas import sum_of_weights
from parallel_lce.backends.interface import BackwardTask, ForwardTask, HiddenGrad, Scratch
from parallel_lce.call import debug
from parallel_lce.call.call import Call, Gradients, flattened
from parallel_lce.core import plan
from parallel_lce.core.collectives import (
    HiddenReduction,
    IncomingHidden,
    Layout,
    PartialsGather,
    checksum_of,
    hidden_of_blocks,
)
from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.partials import Coefficients
from parallel_lce.core.plan import Block, Needs
from parallel_lce.core.private import outside_graphs, outside_selective_checkpoints
from parallel_lce.run import results
from parallel_lce.run.results import DIFFERENTIABLE, NAMES

FIRST_ORDER = "gradients of parallel_lce cannot be differentiated twice (create_graph=True)"


class GradientSums:
    """Sums of dX, dW and dbias over ``blocks`` blocks of a call; None if not needed. ``dtype``: of dW and dbias, by
    default the parameters'. ``scratch_bytes``: size of the backend's working memory."""

    def __init__(
        self,
        call: Call,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: Needs,
        blocks: int,
        *,
        dtype: torch.dtype | None = None,
        scratch_bytes: int = 0,
    ) -> None:
        self._call, self._blocks, self._shape, real = call, blocks, hidden.shape, call.shard.real_rows
        self.hidden, self.targets = flattened(hidden), call.local_targets()
        self.projection = call.projection(weight, bias)
        self.scratch = Scratch(scratch_bytes, hidden.device)
        self.reduction = self.dweight = self.dbias = None
        if needs.hidden:
            layout = call.layout if call.options.reduce_hidden_grad else Layout()
            self.reduction = HiddenReduction(self.hidden, layout, call.options.reduce_dtype)
        if needs.weight:
            self.dweight = GradBuffer(weight, real, blocks, call.dtype, dtype=dtype, main_grad=call.main_grad)
        if needs.bias and bias is not None:
            self.dbias = GradBuffer(bias, real, blocks, call.dtype, dtype=dtype)

    def add_block(
        self, block: Block, x: IncomingHidden, partial: Tensor, coefficients: Coefficients, saved: Any
    ) -> None:
        """Let the backend add the gradients of a block with merged ``partial [C, R]`` and ``coefficients [R]``. It
        consumes ``saved``. The reduction of dX over the ranks is started as soon as dX is complete, and overlaps the
        rest of dW."""
        call, reduction, dx = self._call, self.reduction, None
        if reduction is not None:
            alone = reduction.ranks == 1 and self._blocks == 1
            dx = HiddenGrad(partial_of(reduction.open_block, block), last=alone)
        task = BackwardTask(
            call.of_block(self.projection, block),
            x.tensor,
            call.layout.take(self.targets, block),
            partial,
            coefficients,
            saved,
            dx,
            self.dweight,
            self.dbias,
            self.scratch,
        )
        for feature in call.features:
            task = feature.before_backward(call, task, block)
        for has_dx in call.backend.block_backward(task):
            if has_dx and reduction is not None and dx is not None:
                reduction.start(block, dx.memory)
            # Even if this block does not read x: the gather must end before its buffer is freed.
            x.wait()

    def deliver(self) -> Gradients:
        """The finished gradients."""
        dx = None if self.reduction is None else self.reduction.wait()
        if dx is not None and len(self._shape) != 2:
            dx = dx.view(self._shape)
        return dx, self.dweight and self.dweight.deliver(), self.dbias and self.dbias.deliver()


def accumulate(call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Gradients]:
    """The reduced loss of ``hidden [..., D]``, 0-dimensional, and its gradients in one pass over the blocks: dX in the
    hidden states' dtype, dW and dbias in fp32 (fp64 for fp64).

    The derivative of a ``mean`` or ``sum`` by each token's loss is known in forward, and so is the loss's by the
    token's statistics. So a block's gradients are formed from its exponentials as soon as its partials are merged, and
    backward only scales them by the upstream gradient.

    Collectives per block: under sequence parallelism the all-gather of its hidden states, started a block ahead; the
    all-gather of its partials; the reduction of its dX.
    """
    layout, dtype, backend, blocks = call.layout, call.dtype, call.backend, call.plan.blocks
    memory = call.plan.scratch_bytes
    sums = GradientSums(call, hidden, weight, bias, call.needs, len(blocks), dtype=dtype, scratch_bytes=memory)
    per_token = hidden.new_empty(call.shape.numel(), dtype=dtype)
    divisor = None
    if call.options.reduction == "mean":
        assert call.target is not None
        divisor = sum_of_weights(call.target, call.token_weight, call.options.ignore_index, dtype)
    rows = layout.sp_size * max((b.stop - b.start for b in blocks), default=0)
    buffer = backend.allocate_saved(sums.projection, rows, max((b.saved for b in blocks), default=0))
    for block, x in zip(blocks, hidden_of_blocks(sums.hidden, blocks, layout)):
        x.wait()
        of_tokens = call.of_tokens(block)
        partials = PartialsGather(x.tensor, len(x.tensor), call.shard, call.columns, layout)
        task = ForwardTask(
            call.of_block(sums.projection, block),
            x.tensor,
            layout.take(sums.targets, block),
            call.columns,
            block.saved,
            buffer=buffer,
            out=partials.local,
            wanted=of_tokens.wanted if layout.ranks == 1 else None,
        )
        _, saved, found = backend.block_forward(task)
        partials.start(block.start)
        merged, found = partials.finish(backend, of_tokens.wanted, found)
        losses, coefficients = results.of_tokens(of_tokens, merged, found, block)
        layout.put(per_token, block, losses)
        coefficients = coefficients._replace(divisor=divisor)
        sums.add_block(block, x, merged.partial, coefficients, saved)
        del x, task  # before the next block is projected
    gradients = sums.deliver()
    total = per_token.sum()
    return total if divisor is None else total / divisor, gradients


def function_forward(forward: Callable) -> Callable:
    """Decorator for an autograd.Function's ``forward(ctx, _, tensor, ...)``. It runs on the tensor's device, without
    autocast, which would round the products of fp32 operands, and a selective checkpoint runs it again whole."""

    @functools.wraps(forward)
    def call(*given):
        with outside_selective_checkpoints(), device_without_autocast(given[2]):
            return forward(*given)

    return call


def function_backward(backward: Callable) -> Callable:
    """Decorator for an autograd.Function's ``backward(ctx, saved, *upstream)``, where ``saved`` are its saved tensors.
    It runs on the second one's device, without autocast.

    With ``create_graph=True`` autograd would treat the gradients as constants, and second derivatives would silently be
    wrong: that is refused. (PyTorch's ``once_differentiable`` refuses only if an upstream gradient has a graph.)
    """

    @functools.wraps(backward)
    def call(ctx, *upstream):
        if torch.is_grad_enabled():
            raise RuntimeError(FIRST_ORDER)
        saved = ctx.saved_tensors
        with device_without_autocast(saved[1]):
            return backward(ctx, saved, *upstream)

    return outside_graphs(call)  # of compiled autograd


class Fused(torch.autograd.Function):
    """The results of a call: a loss; or all statistics, None if not asked for.

    Collectives, forward: under sequence parallelism one all-gather of hidden states per block, each started a block
    ahead; then one all-gather of the partials and the features' numbers. Backward, per block: under sequence
    parallelism one all-gather of hidden states, started a block ahead, unless they were saved; then the reduction of dX
    (:class:`parallel_lce.core.collectives.HiddenReduction`).
    """

    @staticmethod
    @function_forward
    def forward(ctx, hidden, weight, bias, call: Call):
        layout, blocks, backend, features = call.layout, call.plan.forward_blocks, call.backend, call.features
        flat, projection, targets = flattened(hidden), call.projection(weight, bias), call.local_targets()
        single, codes = len(blocks) == 1, call.plan.codes
        sizes = [feature.message_size(call) for feature in features]
        partials = PartialsGather(flat, call.shape.numel(), call.shard, call.columns, layout, sum(sizes))
        messages = partials.extra.fill_(-torch.inf).split(sizes) if features else ()
        gathered: Tensor | None = None
        # The backend's saved tensors of the first block.
        saved: Any = ()
        # What the call wants of the partial.
        found: Any = None
        # One block's partial is written straight into the buffer that is gathered.
        out, wanted = partials.local if single else None, call.wanted
        at_once = wanted if single and layout.ranks == 1 else None
        for block, incoming in zip(blocks, hidden_of_blocks(flat, blocks, layout)):
            x = incoming.wait()
            target, of_block = layout.take(targets, block), call.of_block(projection, block)
            task = ForwardTask(of_block, x, target, call.columns, block.saved, out=out, codes=codes, wanted=at_once)
            for feature, message in zip(features, messages):
                task = feature.before_block(call, task, block, message)
            partial, of_this, found = backend.block_forward(task)
            saved = saved or of_this
            if call.plan.hidden_bytes:
                # Saved on every rank, even one with an empty shard: a rank that saved nothing would gather again in
                # backward, and the collectives would no longer match.
                gathered = x
            if not single:
                layout.put(partials.local, block, partial)
        if layout.ranks > 1:
            partials.start(0 if call.selection is None else checksum_of(*call.selection[:3]))
        merged, found = partials.finish(backend, wanted, found)
        # ``kept``: from what backward makes the coefficients.
        if call.options.kind == "loss":
            outputs, kept = results.loss_of(call, merged, found)
        else:
            for feature, of_ranks in zip(features, partials.extras.split(sizes, 1) if features else ()):
                found |= feature.outputs(call, merged, of_ranks, found)
            outputs, kept = tuple([found.get(name) for name in NAMES]), (found["vocab_size"],)
            ctx.mark_non_differentiable(*[v for v in outputs[len(DIFFERENTIABLE) :] if v is not None])
            # Most statistics get no upstream gradient: autograd need not make zeros for them.
            ctx.set_materialize_grads(False)
        if any(call.needs):
            # The first backward overwrites the exponentials among ``saved``; later ones recompute them.
            ctx.save_for_backward(hidden, weight, bias, merged.partial, gathered, *kept, *call.tensors, *saved)
            ctx.call, ctx.kept, ctx.consumed = call, len(kept), [False]
            for feature in features:  # autograd keeps these, and saved-tensor hooks may move them
                feature.saved = None
        return outputs

    @staticmethod
    @function_backward
    def backward(ctx, saved_tensors, *upstream):
        hidden, weight, bias, partial, gathered, *others = saved_tensors
        kept: list[Any] = others[: ctx.kept]
        call, others = ctx.call.with_saved(others[ctx.kept :])
        if call.main_grad is not None and not call.main_grad.in_backward(ctx.next_functions[1][0]):
            call = call._replace(main_grad=None)
        needs, upstream = Needs(*ctx.needs_input_grad[:3]), tuple([u if u is None else in_memory(u) for u in upstream])
        debug.agree_on_backward(call.layout, call.number, upstream)
        if call.options.kind == "loss":  # saved-tensor hooks may have changed the strides
            values: list[Any] = [c if c is None else c.contiguous() for c in kept]
            coefficients = Coefficients(*values)._replace(factor=upstream[0])
        else:
            (vocab_size,) = kept
            coefficients = results.of_statistics(call, partial, vocab_size, dict(zip(DIFFERENTIABLE, upstream)))
        layout, blocks = call.layout, call.plan.blocks
        # Autograd, which saved these tensors, must not see that they are overwritten.
        of_block = [t if t is None else t.data.contiguous() for t in others]
        saved: Any = call.backend.Saved(*of_block) if of_block else ()
        exponentials = saved.exponentials if saved else None
        scratch_bytes = call.plan.scratch_bytes if saved else plan.SMALLEST_BLOCK
        sums = GradientSums(call, hidden, weight, bias, needs, len(blocks), scratch_bytes=scratch_bytes)
        _, _, gamma, delta, epsilon, *_ = coefficients
        differs = not (gamma is delta is epsilon is None)
        # If an earlier backward has overwritten what was saved, all logits are recomputed, in that memory; and in fp16,
        # which has no room for logits beside exponentials, if their differences are needed. In a list: compiled
        # autograd loses an attribute that a backward sets.
        consumed, ctx.consumed[0] = ctx.consumed[0], True
        if saved and (consumed or (differs and weight.dtype == torch.float16)):
            sums.scratch.adopt(saved.exponentials)
            saved = ()
        if len(blocks) > 1:
            coefficients = call.backend.without_factor(coefficients)
        of_blocks = hidden_of_blocks(sums.hidden, blocks, layout) if gathered is None else [IncomingHidden(gathered)]
        for block, x in zip(blocks, of_blocks):
            merged, of_tokens = partial, coefficients
            if len(blocks) > 1:
                merged = layout.take(partial, block).contiguous()
                of_tokens = coefficients.each(partial_of(layout.take, block=block))
            sums.add_block(block, x, merged, of_tokens, saved)
            if len(blocks) > 1 and saved:
                sums.scratch.adopt(saved.exponentials)
            saved = ()
        dx, dweight, dbias = sums.deliver()
        if call.main_grad is not None and needs.weight:
            sums = x = of_blocks = None  # their memory is free for the placeholder
            dweight = call.main_grad.placeholder(exponentials)
        return dx, dweight, dbias, None


class AccumulatedLoss(torch.autograd.Function):
    """The reduced loss, 0-dimensional. Its gradients are formed in forward."""

    @staticmethod
    @function_forward
    def forward(ctx, hidden, weight, bias, call: Call):
        ctx.call = call
        value, *ctx.gradients = accumulate(call, hidden, weight, bias)
        ctx.save_for_backward(hidden, weight, bias, *call.tensors)
        return value

    @staticmethod
    @function_backward
    def backward(ctx, saved, upstream):
        inputs, tensors, call, upstream = saved[:3], saved[3:], ctx.call, in_memory(upstream)
        debug.agree_on_backward(call.layout, call.number, [upstream])
        # The first backward scales the gradients in place and returns them: a copy would double the call's largest
        # buffer. A later backward through the same graph forms them again.
        gradients = ctx.gradients.pop() if ctx.gradients else None
        if gradients is None:
            _, gradients = accumulate(call.with_saved(tensors)[0], *inputs)
            if call.loss_function is not None and call.loss_function.failures:
                raise call.loss_function.failures.pop()
        scaled = call.backend.scaled
        return *[g if g is None else scaled(g, upstream, t.dtype) for g, t in zip(gradients, inputs)], None


def function_of(call: Call) -> type[torch.autograd.Function]:
    """The Function of a planned call. Its inputs are hidden states, weight, bias and the call."""
    return AccumulatedLoss if call.plan.accumulate else Fused
