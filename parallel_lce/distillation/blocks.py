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
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parallel_lce.call.call import Call, Gradients, Inputs, Needs, flattened
from parallel_lce.core.collectives import Layout, Shard, digest_of, gather_whole, gather_with_trailer
from parallel_lce.core.memory import device_without_autocast, in_memory
from parallel_lce.core.partials import TRAILER, accumulation_dtype
from parallel_lce.core.plan import Block, blocks_within, shared_shard_rows
from parallel_lce.distillation.output_gradients import OutputGradients
from parallel_lce.distillation.torch_part import LogitsGradient, Pair, aligned
from parallel_lce.run.autograd import first_order_only
from parallel_lce.run.schedule import Gathers

# Numbers per token: the student's normalizer (two), the teacher's (two), and the student's sum of p log(p / r). If its
# entropy is wanted, the sum of p log p follows.
_NUMBERS = 5
# Smallest block, whatever the budget: adding to an fp32 dW costs the same for few tokens as for many.
_FEWEST_TOKENS = 128


@dataclass(frozen=True)
class Divergence:
    """Two calls over the same tokens and vocabulary entries, the divergence's beta, the blocks of tokens, and whether
    the student's entropy is wanted."""

    student: Call
    teacher: Call
    beta: float
    blocks: tuple[Block, ...]
    entropy: bool = False

    @classmethod
    def of(cls, student: Call, teacher: Call, beta: float, dtype: torch.dtype, entropy: bool = False) -> Divergence:
        """The largest blocks whose logits and gradient fit in the budget; at least 128 tokens. ``dtype``: of the
        student."""
        options, layout = student.options, student.layout
        shard_rows = shared_shard_rows(student.shard.rows, layout.ranks, options.vocab_start, options.vocab_size)
        row_bytes = layout.sp_size * shard_rows * (2 * accumulation_dtype(dtype).itemsize + dtype.itemsize)
        rows, fewest = student.shape.numel() // layout.sp_size, -(-_FEWEST_TOKENS // layout.sp_size)
        return cls(student, teacher, beta, blocks_within(options.logits_budget or 0, rows, row_bytes, fewest), entropy)


class _Pass:
    """One pass over the blocks. Computes losses ``[N]`` and ``numbers [5 or 6, N]``. With the ``numbers`` of an earlier
    pass it computes the gradients alone, without sums over the vocabulary."""

    def __init__(self, task: Divergence, inputs: Sequence[Any], numbers: Tensor | None) -> None:
        self.task, self.layout = task, task.student.layout
        # Saved-tensor hooks may have changed strides.
        self.hidden, self.teacher_hidden = (flattened(each).contiguous() for each in (inputs[0], inputs[3]))
        self.projection, self.teacher = task.student.projection(*inputs[1:3]), task.teacher.projection(*inputs[4:])
        tokens, dtype = task.student.shape.numel(), self.projection.dtype
        shard = task.student.shard
        self._shard = replace(shard, digest=digest_of(shard.digest, task.teacher.shard.digest))
        self.known = numbers
        self.losses = self.hidden.new_empty(tokens if numbers is None else 0, dtype=dtype)
        count = _NUMBERS + task.entropy
        self.numbers = self.hidden.new_empty(count, tokens, dtype=dtype) if numbers is None else numbers

    def run(self, sums: OutputGradients | None) -> None:
        """Run all blocks. ``sums`` collects the gradients of the student."""
        gathers = [Gathers(hidden, self.task.blocks, self.layout) for hidden in (self.hidden, self.teacher_hidden)]
        for block in self.task.blocks:
            x, y = [each.ready().tensor for each in gathers]
            gradient = self._block(block, x, y, sums)
            if sums is not None and gradient is not None:
                sums.add(block, x, gradient)
            del gradient  # before the next block's logits

    def _block(self, block: Block, x: Tensor, y: Tensor, sums: OutputGradients | None) -> Tensor | None:
        """Compute the block's losses and numbers, unless numbers are given. Returns, with ``sums``, the gradient of
        the student's output ``[R, V/P]``. The logits are freed when this returns."""
        task, layout, gradient = self.task, self.layout, None
        projection = task.student.of_block(self.projection, block)
        student = _part_of(task.student).block_logits(projection, x)
        teacher = _part_of(task.teacher).block_logits(task.teacher.of_block(self.teacher, block), y)
        logits, partials = zip(student, teacher)
        if self.known is None:
            layout.put(self.numbers[:4], block, _normalizers(partials, self._shard, layout))
        numbers = layout.take(self.numbers[:4], block).contiguous()
        pair = Pair(*logits, numbers[:2], numbers[2:], task.beta)
        if sums is not None:
            out = aligned(x, len(x), projection.real_rows, sums.dtype)
            gradient = LogitsGradient(out, layout.take(sums.factor, block).contiguous(), None, projection.logit_map)
        if self.known is None:
            # The gradient of KL(teacher || student) needs no sum: one pass computes both.
            self._sum(pair, block, gradient if task.beta == 0 else None)
        if gradient is None:
            return None
        if task.beta > 0:
            gradient = gradient._replace(student_mean=layout.take(self.numbers[4], block).contiguous())
        if task.beta > 0 or self.known is not None:
            _part_of(task.student).divergence(pair, None, gradient)
        return gradient.out

    def _sum(self, pair: Pair, block: Block, gradient: LogitsGradient | None) -> None:
        """Write the block's losses and the student's sums."""
        layout = self.layout
        sums = pair.student.new_empty(layout.ranks, 2 + self.task.entropy, len(pair.student))
        own = sums[layout.rank]
        _part_of(self.task.student).divergence(pair, own, gradient)
        if layout.ranks > 1:
            gather_whole(sums.view(layout.ranks, -1), own.view(-1), layout)
        sums = sums.sum(0)
        layout.put(self.losses, block, sums[0])
        layout.put(self.numbers[4:], block, sums[1:])


def _part_of(call: Call) -> ModuleType:
    return importlib.import_module(f"parallel_lce.distillation.{call.backend.NAME}_part")


def _normalizers(partials: Sequence[Tensor], shard: Shard, layout: Layout) -> Tensor:
    """``[4, R]``: the student's, then the teacher's maximum of the logits and logarithm of the sum of exponentials over
    all ranks, from this rank's ``partials [>= 2, R]`` of both. NaN where the ranks' trailers do not match."""
    rows = partials[0].shape[1]
    packed = partials[0].new_empty(layout.ranks, 4 * rows + TRAILER)
    own = packed[layout.rank]
    for packed_rows, partial in zip(own[: 4 * rows].view(2, 2, rows), partials):
        packed_rows.copy_(partial[:2])
    _, broken = gather_with_trailer(packed, shard, layout)
    maxima, sums = packed[:, : 4 * rows].view(layout.ranks, 2, 2, rows).unbind(2)
    largest = maxima.amax(0)
    numbers = torch.stack([largest, (sums * (maxima - largest).exp()).sum(0).log()], 1).view(4, rows)
    return numbers if broken is None else numbers.masked_fill_(broken, torch.nan)


def _output_factor(task: Divergence, factor: Tensor) -> Tensor:
    """Factors ``[N]`` of the gradients of the student's output, from factors of the divergences."""
    logit_map = task.student.logit_map
    factor = factor * (logit_map.scale * (1 - task.beta if 0 < task.beta < 1 else 1.0))
    if logit_map.token_scale is not None:
        # An ignored token has no gradient, whatever its scale is.
        factor = (factor * logit_map.token_scale).masked_fill_(factor == 0, 0.0)
    return factor


def _evaluated(
    task: Divergence, inputs: Sequence[Any], needs: Needs, factor: Tensor | None, summed: bool, numbers: Tensor | None
) -> tuple[Tensor, Tensor, Gradients | None]:
    """Losses ``[N]`` (unless ``numbers`` are given), numbers ``[5, N]`` and, if ``factor [N]`` is given, the gradients
    of the sum of factor times divergence. ``summed``: dW stays in the statistics' dtype, since it is scaled later."""
    with device_without_autocast(inputs[1]):
        work, sums = _Pass(task, inputs, numbers), None
        if factor is not None:
            factor, dtype = _output_factor(task, factor), work.projection.dtype if summed else None
            of_student = task.student, work.hidden, work.projection, needs, len(task.blocks)
            sums = OutputGradients(*of_student, factor, dtype)
        work.run(sums)
        return work.losses, work.numbers, sums and sums.deliver(inputs[0].shape)


def divergences(
    task: Divergence, student: Inputs, teacher: Inputs, factor: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Divergences ``[N]``, differentiable by the student's tensors. With ``factor [N]`` the sum of factor times
    divergence, 0-dimensional; its gradients are formed in this call. Also the student's entropy ``[N]``, if it is
    wanted, without a gradient."""
    return _Divergences.apply(*student, *teacher, task, factor)


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        *inputs, task, factor = given
        needs, summed = Needs(*ctx.needs_input_grad[:3]), factor is not None
        losses, numbers, ctx.gradients = _evaluated(task, inputs, needs, factor, summed, None)
        ctx.task = task
        ctx.save_for_backward(*inputs, factor, numbers, *task.student.tensors, *task.teacher.tensors)
        entropy = -numbers[5] if task.entropy else None
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        # An ignored token has loss 0, even if its logits are NaN.
        return losses if factor is None else (losses * factor).masked_fill_(factor == 0, 0.0).sum(), entropy

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: tuple, upstream: Tensor, _: None):
        inputs, (factor, numbers, *tensors) = saved[:6], saved[6:]
        # The first backward scales gradients of a sum in place. A later one through the same graph forms them again.
        gradients, ctx.gradients = ctx.gradients, None
        upstream = in_memory(upstream)
        if gradients is None:
            each, needs = upstream if factor is None else factor, Needs(*ctx.needs_input_grad[:3])
            student, tensors = ctx.task.student.with_saved(tensors)
            teacher, _ = ctx.task.teacher.with_saved(tensors)
            task = replace(ctx.task, student=student, teacher=teacher)
            gradients = _evaluated(task, inputs, needs, each, factor is not None, numbers)[2]
            assert gradients is not None  # a factor is given
        if factor is not None:
            scaled = ctx.task.student.backend.scaled
            with device_without_autocast(inputs[1]):
                gradients = [g if g is None else scaled(g, upstream, t.dtype) for g, t in zip(gradients, inputs)]
        return *gradients, None, None, None, None, None
