"""The divergence of two output layers' softmax, a teacher's from a student's, in blocks of tokens.

Per token, with p the student's softmax, q the teacher's, both of logits times a scale (1 / temperature), and the
reference r = beta q + (1 - beta) p, or q for beta = 1:

    beta = 0        D = KL(q || p)                              dD/dz_j = p_j - q_j
    0 < beta < 1    D = beta KL(q || r) + (1 - beta) KL(p || r) dD/dz_j = (1 - beta) p_j (log(p_j / r_j) - KL(p || r))
    beta = 1        D = KL(p || q)                              dD/dz_j = p_j (log(p_j / r_j) - KL(p || r))

z are the student's scaled logits. (Generalised Jensen-Shannon divergence: Agarwal et al. 2024, arXiv:2306.13649,
section 3. Its derivative by p_j is (1 - beta) log(p_j / r_j), up to a constant that the softmax removes.)

A block has fp32 logits of the student and of the teacher, and their gradient. For a sum or mean the gradients are
formed in forward, in four matrix products: three of the student's and one of the teacher's. For a loss of each token
the backward projects both again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate_nt, matmul_nt, put
from parallel_lce.backends.interface import LogitsGradient, Pair, power_of_two_near
from parallel_lce.backends.torch_logits import aligned
from parallel_lce.call.call import Call, Gradients, Inputs, Needs, flattened, token_count
from parallel_lce.core import plan
from parallel_lce.core.collectives import Layout, Shard, gather_whole, gather_with_bounds
from parallel_lce.core.grad_buffers import GradBuffer
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.partials import accumulation_dtype
from parallel_lce.core.plan import Block, balanced, shared_shard_rows
from parallel_lce.run.autograd import first_order_only
from parallel_lce.run.schedule import Gathers

# Of a token: the normalizers of student and teacher, two numbers each, and the student's sum.
_NUMBERS = 5
# Tokens of a block, whatever the budget: adding to an fp32 dW costs the same for few tokens as for many.
_FEWEST_TOKENS = 128
# A log-ratio that fp16 must hold beside the largest factor.
_LARGEST_LOG_RATIO = 64.0


@dataclass(frozen=True)
class Divergence:
    """Two calls over the same tokens and vocabulary entries, and how their softmax are compared."""

    student: Call
    teacher: Call
    beta: float
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, student: Call, teacher: Call, beta: float, dtype: torch.dtype) -> Divergence:
        """Blocks of tokens whose logits and gradient fit in the budget, or in 64 MiB, or that are 128 tokens.

        ``dtype``: of the student.
        """
        options, layout = student.options, student.layout
        # The same number on all ranks.
        shard_rows = shared_shard_rows(student.shard.rows, layout.ranks, options.vocab_start, options.vocab_size)
        parts = layout.sp_size
        rows = student.shape.numel() // parts
        token_bytes = shard_rows * (2 * accumulation_dtype(dtype).itemsize + dtype.itemsize)
        fitting = max(options.logits_budget or 0, plan.SMALLEST_BLOCK) // max(1, parts * token_bytes)
        size = balanced(rows, max(fitting, -(-_FEWEST_TOKENS // parts)))
        blocks = tuple([Block(a, min(a + size, rows), 0) for a in range(0, rows, size)])
        return cls(student, teacher, beta, blocks)


class Found(NamedTuple):
    """What a forward finds."""

    # [N]
    losses: Tensor
    # [5, N]: with these numbers a backward needs no sum over the vocabulary.
    numbers: Tensor


class _Evaluation:
    """One pass over the blocks. ``numbers``: what an earlier one has found."""

    def __init__(self, task: Divergence, student: Inputs, teacher: Inputs, numbers: Tensor | None = None) -> None:
        self.task, self.layout, self.shape = task, task.student.layout, student[0].shape
        # Hooks for saved tensors may have returned other strides.
        self.hidden, self.teacher_hidden = (flattened(each[0]).contiguous() for each in (student, teacher))
        self.projection, self.teacher = task.student.projection(*student[1:]), task.teacher.projection(*teacher[1:])
        tokens, dtype = token_count(self.hidden, self.layout), self.projection.dtype
        # None: nothing is known.
        self.known = numbers
        self.found = Found(
            self.hidden.new_empty(tokens if numbers is None else 0, dtype=dtype),
            self.hidden.new_empty(_NUMBERS, tokens, dtype=dtype) if numbers is None else numbers,
        )

    def run(self, factor: Tensor | None = None, gradients: _StudentGradients | None = None) -> Found:
        """Find losses and numbers where they are not known; and add the gradients of the sum of ``factor [N]`` times
        divergence."""
        blocks, layout = self.task.blocks, self.layout
        gathers = Gathers(self.hidden, blocks, layout), Gathers(self.teacher_hidden, blocks, layout)
        for block in blocks:
            x, y = [each.next().wait() for each in gathers]
            for each in gathers:
                if each.sequence_parallel:
                    each.start()
            if factor is None or gradients is None:
                self._evaluate(block, x, y, None)
            else:
                gradients.add(block, x, self._gradient(block, x, y, factor, gradients.dtype))
        return self.found

    def _gradient(self, block: Block, x: Tensor, y: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the block's output ``[R, V/P]``. The logits are freed when this returns."""
        out = aligned(x, len(x), self.projection.real_rows, dtype)
        self._evaluate(block, x, y, LogitsGradient(out, self.layout.take(factor, block).contiguous(), None))
        return out

    def _evaluate(self, block: Block, x: Tensor, y: Tensor, gradient: LogitsGradient | None) -> None:
        """Find the block's losses and numbers where they are not known, and write its gradient."""
        beta, pair = self.task.beta, self._pair(block, x, y)
        if self.known is None:
            # KL(teacher || student) has a gradient that needs no sum: both are found in one pass.
            self._sum(pair, block, gradient if beta == 0 else None)
        if gradient is not None and (self.known is not None or beta > 0):
            mean = self.layout.take(self.found.numbers[4], block).contiguous() if beta > 0 else None
            self.task.student.backend.divergence(pair, None, gradient._replace(student_mean=mean))

    def _pair(self, block: Block, x: Tensor, y: Tensor) -> Pair:
        """The block's logits, normalized over all ranks."""
        task, layout = self.task, self.layout
        student = task.student.backend.block_logits(self.projection, x)
        teacher = task.teacher.backend.block_logits(self.teacher, y)
        logits, partials = zip(student, teacher)
        if self.known is not None:
            numbers = layout.take(self.known[:4], block).contiguous()
        else:
            numbers = _normalizers(partials, task.student.shard, layout)
            layout.put(self.found.numbers[:4], block, numbers)
        return Pair(*logits, numbers[:2], numbers[2:], task.beta)

    def _sum(self, pair: Pair, block: Block, gradient: LogitsGradient | None) -> None:
        """The block's losses and the student's sums."""
        layout, beta = self.layout, self.task.beta
        parts = pair.student.new_empty(layout.ranks, 2, len(pair.student))
        own = parts[layout.rank]
        self.task.student.backend.divergence(pair, own, gradient)
        if layout.ranks > 1:
            gather_whole(parts.view(layout.ranks, -1), own.view(-1), layout)
        of_teacher, of_student = parts.sum(0)
        losses = beta * of_teacher + (1 - beta) * of_student if pair.mixed else of_teacher + of_student
        layout.put(self.found.losses, block, losses)
        layout.put(self.found.numbers[4], block, of_student)


def _normalizers(partials: Sequence[Tensor], shard: Shard, layout: Layout) -> Tensor:
    """``[4, R]``: maxima of the logits, and logarithms of the sums of exponentials, over all ranks, from this rank's
    ``partials [>= 2, R]`` of student and teacher. NaN where the shards leave a gap or overlap."""
    rows = partials[0].shape[1]
    packed = partials[0].new_empty(layout.ranks, 4 * rows + 2)
    own = packed[layout.rank]
    for part, each in zip(own[: 4 * rows].view(2, 2, rows), partials):
        part.copy_(each[:2])
    _, broken = gather_with_bounds(packed, shard, layout)
    maxima, sums = packed[:, : 4 * rows].view(layout.ranks, 2, 2, rows).unbind(2)
    largest = maxima.amax(0)
    numbers = torch.stack([largest, (sums * (maxima - largest).exp()).sum(0).log()], 1).view(4, rows)
    return numbers if broken is None else numbers.masked_fill_(broken, torch.nan)


class _StudentGradients:
    """The student's dX, dW and dbias, formed block by block, of ``unscale`` times the gradients of its output that are
    added. ``sum_dtype``: of dW and dbias, by default the parameters'."""

    def __init__(
        self, work: _Evaluation, needs: Needs, unscale: Tensor | None, sum_dtype: torch.dtype | None = None
    ) -> None:
        call, hidden, projection = work.task.student, work.hidden, work.projection
        self._shape, self._unscale = work.shape, unscale
        # CPUs multiply low precision slowly, and not more exactly.
        self.dtype = hidden.dtype if hidden.is_cuda else projection.dtype
        self._weight = projection.weight[: projection.real_rows]
        blocks = len(work.task.blocks)
        self._reduction = self._dweight = self._dbias = None
        if needs.hidden:
            self._reduction = call.hidden_reduction(hidden, in_pieces=not needs.weight)
        if needs.weight:
            self._dweight = GradBuffer(projection.weight, projection.real_rows, blocks, dtype=sum_dtype)
        if needs.bias and projection.bias is not None:
            self._dbias = GradBuffer(projection.bias, projection.real_rows, blocks, dtype=sum_dtype)

    def add(self, block: Block, x: Tensor, gradient: Tensor) -> None:
        """Of a block's ``x [R, D]``, from the ``gradient [R, V/P]`` of its output."""
        real = len(self._weight)
        if self._reduction is not None:
            dx = self._reduction.open_block(block)
            self._product(dx, gradient, self._weight.t(), True)
            self._reduction.start(block, dx, len(dx))
        if self._dweight is not None:
            total, empty = self._dweight.open(0, real, whole=True)
            self._product(total, gradient.t(), x.t(), empty)
            self._dweight.close(0, real, total)
        if self._dbias is not None:
            total, empty = self._dbias.open(0, real, whole=True)
            column_sum = gradient.sum(0, dtype=torch.promote_types(gradient.dtype, torch.float32))
            put(total, column_sum if self._unscale is None else column_sum.mul_(self._unscale), empty)
            self._dbias.close(0, real, total)

    def _product(self, total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
        if self._unscale is None:
            accumulate_nt(total, a, b, overwrite=overwrite)
        else:
            put(total, matmul_nt(a, b).mul_(self._unscale), overwrite)

    def deliver(self) -> Gradients:
        dx = self._reduction and self._reduction.wait().view(self._shape)
        return dx, self._dweight and self._dweight.deliver(), self._dbias and self._dbias.deliver()


def _output_factor(task: Divergence, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Factors ``[N]`` of the gradients of the student's output, from those of the divergences; and for fp16 what the
    gradients must be multiplied by at the end."""
    factor = factor * (task.student.scale * (1 - task.beta if 0 < task.beta < 1 else 1.0))
    if dtype != torch.float16 or not len(factor):
        return factor, None
    # A mean's gradients, 1 / N each, would underflow.
    scale = power_of_two_near(factor.abs().nan_to_num(0.0, 0.0).amax() * _LARGEST_LOG_RATIO)
    return factor * scale, 1 / scale


def token_divergences(task: Divergence, student: Inputs, teacher: Inputs) -> Tensor:
    """``[N]``, differentiable by the student's tensors."""
    return _TokenDivergences.apply(*student, *teacher, task)


def summed_divergence(task: Divergence, student: Inputs, teacher: Inputs, factor: Tensor) -> Tensor:
    """The sum of ``factor [N]`` times divergence, 0-dimensional. Gradients are formed with it."""
    return _SummedDivergence.apply(*student, *teacher, task, factor)


class _TokenDivergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        inputs, task = given[:6], given[6]
        with device_without_autocast(inputs[1]):
            losses, numbers = _Evaluation(task, inputs[:3], inputs[3:]).run()
        ctx.task = task
        ctx.save_for_backward(*inputs, numbers)
        return losses

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor):
        *inputs, numbers = saved
        needs = Needs(*ctx.needs_input_grad[:3])
        with device_without_autocast(inputs[1]):
            factor, unscale = _output_factor(ctx.task, in_memory(upstream), inputs[0].dtype)
            work = _Evaluation(ctx.task, tuple(inputs[:3]), tuple(inputs[3:]), numbers)
            gradients = _StudentGradients(work, needs, unscale)
            work.run(factor, gradients)
            return *gradients.deliver(), None, None, None, None


class _SummedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        inputs, (task, factor) = given[:6], given[6:]
        ctx.task, ctx.needs = task, Needs(*ctx.needs_input_grad[:3])
        losses, ctx.gradients = _with_gradients(task, inputs, factor, ctx.needs)
        ctx.save_for_backward(*inputs, factor)
        # A token that does not count has loss 0, whatever its logits are.
        return (losses * factor).masked_fill_(factor == 0, 0.0).sum()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor):
        *inputs, factor = saved
        # The first backward scales them in place. A later one through the same graph forms them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = _with_gradients(ctx.task, tuple(inputs), factor, ctx.needs)
        with device_without_autocast(inputs[1]):
            scaled = ctx.task.student.backend.scaled
            delivered = [g if g is None else scaled(g, upstream, t.dtype) for g, t in zip(gradients, inputs[:3])]
        return *delivered, None, None, None, None, None


def _with_gradients(task: Divergence, inputs: tuple, factor: Tensor, needs: Needs) -> tuple[Tensor, Gradients]:
    with device_without_autocast(inputs[1]):
        work = _Evaluation(task, inputs[:3], inputs[3:])
        of_output, unscale = _output_factor(task, factor, inputs[0].dtype)
        gradients = _StudentGradients(work, needs, unscale, work.projection.dtype)
        losses = work.run(of_output, gradients).losses
        return losses, gradients.deliver()
