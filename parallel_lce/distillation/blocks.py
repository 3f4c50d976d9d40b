"""The divergence between a teacher's softmax and a student's, in blocks of tokens.

Per token, with p the student's softmax, q the teacher's (each of its own scaled and soft-capped logits), and the
reference r = beta q + (1 - beta) p:

    beta = 0        D = KL(q || p)                              dD/dz_j = p_j - q_j
    0 < beta < 1    D = beta KL(q || r) + (1 - beta) KL(p || r) dD/dz_j = (1 - beta) p_j (log(p_j / r_j) - KL(p || r))
    beta = 1        D = KL(p || q)                              dD/dz_j = p_j (log(p_j / r_j) - KL(p || r))

z are the student's logits. (Generalised Jensen-Shannon divergence: Agarwal et al. 2024, arXiv:2306.13649, section 3.
Its derivative by p_j is (1 - beta) log(p_j / r_j), up to a constant that the softmax removes.)

Memory of a block: fp32 logits of student and teacher, and the gradient of the student's. For a sum or mean the
gradients are formed in forward, in four matrix products: three for the student and one for the teacher. For a loss of
each token the backward projects both again.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.formulas import fp16_scale_of
from parallel_lce.backends.gemm import accumulate, put
from parallel_lce.backends.interface import ForwardTask, Projection
from parallel_lce.call.call import Call, Gradients, Needs, flattened
from parallel_lce.core.collectives import Layout, digest_of, gather_whole, gather_with_trailer
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.partials import TRAILER, Coefficients, Columns
from parallel_lce.core.plan import Block, blocks_within, shared_shard_rows
from parallel_lce.distillation.torch_part import DIVERGENCE, NEGATIVE_ENTROPY
from parallel_lce.run.autograd import first_order_only
from parallel_lce.run.schedule import Gathers, GradientSums

# Smallest block, whatever the budget: adding to an fp32 dW costs the same for few tokens as for many.
_FEWEST_TOKENS = 128
# Largest log-ratio for which fp16 gradients of the output stay finite.
_LARGEST_LOG_RATIO = 64.0


class _Task(NamedTuple):
    # Student and teacher, over the same tokens and vocabulary entries.
    calls: tuple[Call, Call]
    beta: float
    blocks: tuple[Block, ...]
    # Numbers per token, in the rows that :mod:`parallel_lce.distillation.torch_part` names.
    rows: int


def divergences(
    calls: tuple[Call, Call], inputs: tuple, beta: float, factor: Tensor | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Divergences ``[N]`` of student and teacher, with three ``inputs`` each, differentiable by the student's. With
    ``factor [N]`` the sum of factor times divergence, 0-dimensional; its gradients are formed in this call. Also the
    student's entropy ``[N]``, if it is wanted, without a gradient."""
    student, hidden = calls[0], inputs[0]
    options, layout = student.options, student.layout
    # The largest blocks whose logits and gradient fit in the budget.
    entries = shared_shard_rows(student.shard.rows, layout.ranks, options.vocab_start, options.vocab_size)
    row_bytes = layout.sp_size * entries * (2 * student.dtype.itemsize + hidden.dtype.itemsize)
    rows, fewest = student.shape.numel() // layout.sp_size, -(-_FEWEST_TOKENS // layout.sp_size)
    blocks = blocks_within(options.logits_budget or 0, rows, row_bytes, fewest)
    return _Divergences.apply(*inputs, _Task(calls, beta, blocks, NEGATIVE_ENTROPY + entropy), factor)


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        *inputs, task, factor = given
        work = _Pass(task, inputs, None, Needs(*ctx.needs_input_grad[:3]), factor, summed=True)
        ctx.task, ctx.gradients, numbers = task, work.run(), work.numbers
        student, teacher = task.calls
        ctx.save_for_backward(*inputs, factor, numbers, *student.tensors, *teacher.tensors)
        entropy = -numbers[NEGATIVE_ENTROPY] if task.rows > NEGATIVE_ENTROPY else None
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        losses = numbers[DIVERGENCE]
        if factor is None:
            return losses.clone(), entropy  # the caller may overwrite it
        # An ignored token has loss 0, even if its logits are NaN.
        return (losses * factor).masked_fill_(factor == 0, 0.0).sum(), entropy

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor, _: None):
        inputs, (factor, numbers, *tensors) = saved[:6], saved[6:]
        # The first backward scales gradients of a sum in place. A later one through the same graph forms them again.
        gradients, ctx.gradients, task = ctx.gradients, None, ctx.task
        upstream, needs = in_memory(upstream), Needs(*ctx.needs_input_grad[:3])
        student, teacher = task.calls
        if factor is None or gradients is None:
            student, tensors = student.with_saved(tensors)
            task = task._replace(calls=(student, teacher.with_saved(tensors)[0]))
            each = upstream if factor is None else factor
            gradients = _Pass(task, inputs, numbers, needs, each, factor is not None).run()
        if factor is not None:
            scaled = student.backend.scaled
            with device_without_autocast(inputs[1]):
                gradients = [g if g is None else scaled(g, upstream, t.dtype) for g, t in zip(gradients, inputs)]
        return *gradients, None, None, None, None, None


class _Pass:
    """One pass over the blocks. It writes ``numbers [rows, N]``, unless they are ``known`` from an earlier pass. With
    ``factor [N]`` it forms the gradients of the sum of factor times divergence. ``summed``: they will be scaled, so dW
    and dbias stay in the statistics' dtype."""

    def __init__(
        self, task: _Task, inputs: Any, known: Tensor | None, needs: Needs, factor: Tensor | None, summed: bool
    ) -> None:
        student, teacher = task.calls
        self._task, self._layout, self._known = task, student.layout, known is not None
        # Saved-tensor hooks may have changed strides.
        self._hidden = hidden, _ = [flattened(each).contiguous() for each in (inputs[0], inputs[3])]
        self._projections = projection, _ = student.projection(*inputs[1:3]), teacher.projection(*inputs[4:])
        self._shape, self._dtype, self._factor = inputs[0].shape, None, None
        if known is None:
            known = hidden.new_empty(task.rows, student.shape.numel(), dtype=student.dtype)
        self.numbers, dtype = known, student.dtype if summed else None
        needs = needs if factor is not None else Needs(False, False, False)
        self._sums = GradientSums(student, hidden, projection, needs, len(task.blocks), dtype)
        if factor is not None:
            # On CPUs low-precision products are slower, and no more exact.
            self._dtype = hidden.dtype if hidden.is_cuda else student.dtype
            self._factor, self._unscale = self._of_output(factor)

    def _of_output(self, factor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Factors ``[N]`` of the gradients of the student's output; and what these are multiplied by at the end, or
        None."""
        beta, projection, unscale = self._task.beta, self._projections[0], None
        if 0 < beta < 1:
            factor = factor * (1 - beta)
        if self._dtype == torch.float16 and len(factor):
            # A mean's gradients, 1 / N each, would underflow.
            largest = Coefficients(factor * _LARGEST_LOG_RATIO)
            fp16_scale = fp16_scale_of(largest, factor, projection)
            factor, unscale = factor * fp16_scale, 1 / fp16_scale
        scaled = projection.logit_map.scaled(factor.clone())
        # An ignored token has no gradient, whatever its scale is.
        return scaled.masked_fill_(factor == 0, 0.0), unscale

    def run(self) -> Gradients:
        """The gradients, None each without a factor."""
        with device_without_autocast(self._projections[0].weight):
            gathers = [Gathers(each, self._task.blocks, self._layout) for each in self._hidden]
            for block in self._task.blocks:
                hidden = [each.ready().tensor for each in gathers]
                gradient = self._block(block, hidden)
                if gradient is not None:
                    self._add(block, hidden[0], gradient)
                del gradient  # before the next block's logits
            return self._sums.deliver(self._shape)

    def _block(self, block: Block, hidden: Sequence[Tensor]) -> Tensor | None:
        """Write the block's numbers. Returns, with a factor, the gradient of the student's output ``[R, V/P]``. The
        logits are freed when this returns."""
        task, layout, rows = self._task, self._layout, len(hidden[0])
        logits, partials = [], []
        for call, whole, x in zip(task.calls, self._projections, hidden):
            projection = call.of_block(whole, block)
            logits.append(_aligned(x, projection, projection.dtype))
            partial, *_ = call.backend.block_forward(ForwardTask(projection, x, None, Columns(), 0, logits=logits[-1]))
            partials.append(partial)
        student, gradient = task.calls[0], None
        part = importlib.import_module(f"parallel_lce.distillation.{student.backend.NAME}_part")
        projection = student.of_block(self._projections[0], block)
        numbers, factor = layout.take(self.numbers, block).contiguous(), layout.take(self._factor, block)
        if factor is not None:
            assert self._dtype is not None  # of gradients
            gradient, factor = _aligned(hidden[0], projection, self._dtype), factor.contiguous()
        if not self._known:
            numbers[:DIVERGENCE] = _normalizers(partials, task.calls, layout)
            of_ranks = numbers.new_empty(layout.ranks, task.rows - DIVERGENCE, rows)
            own = of_ranks[layout.rank]
            # The gradient of KL(teacher || student) needs no sum: one pass computes both.
            formed = gradient if task.beta == 0 else None
            part.divergence(*logits, numbers, task.beta, own, formed, factor, projection.logit_map)
            if layout.ranks > 1:
                gather_whole(of_ranks.view(layout.ranks, -1), own.view(-1), layout)
            numbers[DIVERGENCE:] = of_ranks.sum(0)
            layout.put(self.numbers, block, numbers)
        if gradient is not None and (self._known or task.beta > 0):
            part.divergence(*logits, numbers, task.beta, None, gradient, factor, projection.logit_map)
        return gradient

    def _add(self, block: Block, x: Tensor, gradient: Tensor) -> None:
        """Add the gradients of a block with ``x [R, D]``, from the ``gradient [R, V/P]`` of its output."""
        sums, projection, factor = self._sums, self._projections[0], self._unscale
        real = projection.real_rows
        if sums.reduction is not None:
            dx = sums.reduction.open_block(block)
            accumulate(dx, gradient, projection.weight[:real], overwrite=True, factor=factor)
            sums.reduction.start(block, dx)
        if sums.dweight is not None:
            total, empty = sums.dweight.open(0, real, whole=True)
            accumulate(total, gradient.t(), x, overwrite=empty, factor=factor)
            sums.dweight.close(0, real, total)
        if sums.dbias is not None:
            total, empty = sums.dbias.open(0, real, whole=True)
            summed = gradient.sum(0, dtype=projection.dtype)
            put(total, summed if factor is None else summed.mul_(factor), empty)
            sums.dbias.close(0, real, total)


def _aligned(x: Tensor, projection: Projection, dtype: torch.dtype) -> Tensor:
    """New memory ``[R, V/P]`` with rows at multiples of 16 elements: cuBLAS wants 16 bytes, and Triton loads several
    elements at a time."""
    entries = projection.real_rows
    return x.new_empty(len(x), -(-entries // 16) * 16, dtype=dtype)[:, :entries]


def _normalizers(partials: Sequence[Tensor], calls: Sequence[Call], layout: Layout) -> Tensor:
    """``[4, R]``: the student's, then the teacher's maximum of the logits and logarithm of the sum of exponentials over
    all ranks, from this rank's ``partials [>= 2, R]`` of both. NaN where the ranks' trailers do not match."""
    rows = partials[0].shape[1]
    packed = partials[0].new_empty(layout.ranks, 4 * rows + TRAILER)
    torch.stack([partial[:2] for partial in partials], out=packed[layout.rank, : 4 * rows].view(2, 2, rows))
    student, teacher = [call.shard for call in calls]
    _, broken = gather_with_trailer(packed, replace(student, digest=digest_of(student.digest, teacher.digest)), layout)
    maxima, sums = packed[:, : 4 * rows].view(layout.ranks, 2, 2, rows).unbind(2)
    largest = maxima.amax(0)
    numbers = torch.stack([largest, (sums * (maxima - largest).exp()).sum(0).log()], 1).view(4, rows)
    return numbers if broken is None else numbers.masked_fill_(broken, torch.nan)
