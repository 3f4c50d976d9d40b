"""The divergence between a teacher's softmax and a student's, in blocks of tokens.

Per token, with p the student's softmax, q the teacher's, r = beta q + (1 - beta) p, and z the student's logits:

    beta = 0        D = KL(q || p)                              dD/dz_j = p_j - q_j
    0 < beta < 1    D = beta KL(q || r) + (1 - beta) KL(p || r) dD/dz_j = (1 - beta) p_j (log(p_j / r_j) - KL(p || r))
    beta = 1        D = KL(p || q)                              dD/dz_j = p_j (log(p_j / r_j) - KL(p || r))

(Generalised Jensen-Shannon divergence: Agarwal et al. 2024, arXiv:2306.13649, section 3. Its derivative by p_j is
(1 - beta) log(p_j / r_j), up to a constant that the softmax removes.)

A block has the fp32 logits of both, and the gradient of the student's.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial as partial_of
from typing import Any

import torch
from torch import Tensor

from parallel_lce.backends.formulas import fp16_scale_near
from parallel_lce.backends.gemm import accumulate, put
from parallel_lce.backends.interface import aligned_logits, block_logits
from parallel_lce.call import debug
from parallel_lce.call.call import Call, Gradients, flattened
from parallel_lce.core.collectives import PartialsGather, all_gather, digest_of, hidden_of_blocks
from parallel_lce.core.logit_map import Projection
from parallel_lce.core.memory import in_memory
from parallel_lce.core.partials import MAX, SUM_EXP, Columns
from parallel_lce.core.plan import Block, Needs, blocks_within
from parallel_lce.distillation.torch_part import DIVERGENCE, ROWS
from parallel_lce.run.schedule import GradientSums, function_backward, function_forward

# Largest log-ratio for which fp16 gradients of the output stay finite.
_LARGEST_LOG_RATIO = 64.0


class Divergences(torch.autograd.Function):
    """The divergence of each token times its ``factor``, or their sum if there is a ``reduction``, from hidden states,
    weight and bias of the student and of the teacher, differentiable by the student's. A task: the calls of both, and
    beta."""

    @staticmethod
    @function_forward
    def forward(ctx: Any, *given: Any) -> Tensor:
        *inputs, factor, ctx.task, reduction = given
        student, teacher, _ = ctx.task
        # fp16 gradients wait for the backward, where the upstream gradient, and with it the loss scale, is known.
        at_once = reduction != "none" and inputs[0].dtype != torch.float16
        needs = student.needs if at_once else Needs(False, False, False)
        gradients, numbers = _pass(ctx.task, inputs, needs, factor)
        ctx.gradients = [gradients] if at_once else []
        ctx.save_for_backward(*inputs, factor, numbers, *student.tensors, *teacher.tensors)
        return reduced(numbers[DIVERGENCE].view(factor.shape), factor, reduction)

    @staticmethod
    @function_backward
    def backward(ctx: Any, saved: tuple, upstream: Tensor):
        inputs, (factor, numbers, *tensors) = saved[:6], saved[6:]
        (student, teacher, beta), upstream = ctx.task, in_memory(upstream)
        debug.agree_on_backward(student.layout, student.number, [upstream])
        # The first backward scales gradients of a sum in place. A later one through the same graph forms them again.
        gradients = ctx.gradients.pop() if ctx.gradients else None
        if gradients is None:
            student, tensors = student.with_saved(tensors)
            teacher, _ = teacher.with_saved(tensors)
            # An ignored token has no gradient, whatever its upstream gradient is.
            factor, needs = factor.where(factor == 0, factor * upstream), Needs(*ctx.needs_input_grad[:3])
            gradients, _ = _pass((student, teacher, beta), inputs, needs, factor, numbers)
        else:
            scaled = student.backend.scaled
            gradients = [g if g is None else scaled(g, upstream, t.dtype) for g, t in zip(gradients, inputs)]
        return *gradients, *[None] * 6


def reduced(losses: Tensor, factors: Tensor, reduction: str) -> Tensor:
    # An ignored token has no loss and no gradient, even if its logits are NaN.
    losses = torch.where(factors == 0, 0.0, losses) * factors
    return losses if reduction == "none" else losses.sum()


def _pass(
    task: tuple[Call, Call, float], inputs: Sequence[Any], needs: Needs, factor: Tensor, known: Tensor | None = None
) -> tuple[Gradients, Tensor]:
    """One pass over the blocks of a ``task``. Returns the gradients of the sum of factor times divergence; and the
    numbers ``[ROWS, N]``, which may be ``known`` from an earlier pass. In the first pass dW and dbias stay in the
    statistics' dtype: they will be scaled."""
    student, teacher, beta = task
    layout, dtype, problem = student.layout, student.dtype, student.plan.problem
    # Saved-tensor hooks may have changed strides.
    x, y = [flattened(each).contiguous() for each in (inputs[0], inputs[3])]
    # The largest blocks whose logits and gradient fit in the budget.
    token_bytes = problem.shard_rows * (2 * dtype.itemsize + x.dtype.itemsize)
    blocks = blocks_within(problem.budget, len(x), token_bytes, layout.sp_size)
    # Of the gradient of the student's output. On CPUs low-precision products are slower, and no more exact.
    gradient_dtype = x.dtype if x.is_cuda else dtype
    sums = GradientSums(student, *inputs[:3], needs=needs, blocks=len(blocks), dtype=dtype if known is None else None)
    projection, of_teacher = sums.projection, teacher.projection(*inputs[4:])
    times = fp16_unscale = None
    if any(needs):
        times, fp16_unscale = _gradient_factors(factor.reshape(-1), beta, projection, gradient_dtype)
    numbers = x.new_empty(ROWS, student.shape.numel(), dtype=dtype) if known is None else known
    part = importlib.import_module(f"parallel_lce.distillation.{student.backend.NAME}_part")
    of_blocks = [hidden_of_blocks(each, blocks, layout) for each in (x, y)]
    for block, *incoming in zip(blocks, *of_blocks):
        x, y = [each.wait() for each in incoming]
        of_block = student.of_block(projection, block)
        logits, partial = block_logits(student.backend, of_block, x)
        its_logits, its_partial = block_logits(teacher.backend, teacher.of_block(of_teacher, block), y)
        own, of_tokens = layout.take(numbers, block).contiguous(), layout.take(times, block)
        gradient = aligned_logits(x, of_block, gradient_dtype) if any(needs) else None
        work = partial_of(part.divergence, logits, its_logits, own, beta, of_tokens, of_block.logit_map)
        if known is None:
            own[:DIVERGENCE] = _normalizers((partial, its_partial), student, teacher)
            local = own[DIVERGENCE:]
            # The gradient of KL(teacher || student) needs no sum: one pass computes both.
            work(local, gradient if beta == 0 else None)
            if layout.ranks > 1:
                of_ranks = local.new_empty(layout.ranks, *local.shape)
                all_gather(of_ranks.view(-1), local.view(-1), group=layout.group, async_op=True).wait()
                torch.sum(of_ranks, 0, out=local)
            layout.put(numbers, block, own)
        if gradient is not None and (known is not None or beta > 0):
            work(None, gradient)
        del logits, its_logits, work  # before the next block's
        if gradient is not None:
            _add(sums, block, x, gradient, fp16_unscale)
        del gradient
    return sums.deliver(), numbers


def _gradient_factors(
    factor: Tensor, beta: float, projection: Projection, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The factors ``[N]`` of the gradient of the student's output, which is stored in this ``dtype``; and what its
    products must be multiplied by, 0-dimensional, or None for 1."""
    times = projection.logit_map.scaled(factor * (1 - beta if 0 < beta < 1 else 1))
    # An ignored token has no gradient, whatever its scale is.
    times.masked_fill_(factor == 0, 0.0)
    if dtype != torch.float16 or len(times) == 0:
        return times, None
    # A mean's gradients, 1 / N each, would underflow.
    fp16_scale = fp16_scale_near(times.abs().nan_to_num(0.0, 0.0).amax() * _LARGEST_LOG_RATIO)
    return times * fp16_scale, 1 / fp16_scale


def _add(sums: GradientSums, block: Block, x: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
    """Add a block's gradients, from ``x [R, D]`` and the ``gradient [R, V/P]`` of its output, times the ``factor``."""
    projection = sums.projection
    real = projection.real_rows
    if sums.reduction is not None:
        dx = sums.reduction.open_block(block)
        accumulate(dx, gradient, projection.weight[:real], overwrite=True, factor=factor)
        sums.reduction.start(block, dx)
    if sums.dweight is not None:
        total, empty = sums.dweight.open(0, real, whole=True)
        accumulate(total, gradient.t(), x, overwrite=empty, factor=factor)
    if sums.dbias is not None:
        total, empty = sums.dbias.open(0, real, whole=True)
        summed = gradient.sum(0, dtype=projection.dtype)
        put(total, summed if factor is None else summed.mul_(factor), empty)


def _normalizers(partials: tuple[Tensor, Tensor], student: Call, teacher: Call) -> Tensor:
    """``[4, R]``: the numbers up to ``DIVERGENCE``, from this rank's ``partials [3, R]`` of student and teacher. NaN
    where the ranks' trailers do not match."""
    rows, shard = partials[0].shape[1], student.shard
    shard = replace(shard, digest=digest_of(shard.digest, teacher.shard.digest))
    gather = PartialsGather(partials[0], 2 * rows, shard, Columns(), student.layout)
    torch.cat(partials, 1, out=gather.local)
    gather.start()
    (merged, _), _ = gather.finish(student.backend)
    return torch.cat([merged[MAX], merged[SUM_EXP].log()]).view(4, rows)
