"""Per-token statistics of the logits, differentiable, without the logits.

:func:`statistics_forward` and :func:`statistics_backward` are pure but for the memory of what is
kept; :mod:`parallel_lce.differentiable` joins them. Every loss is plain PyTorch on the ``[N]``
statistics, and what autograd hands back for them is folded into four per-token coefficients of the
logits' gradient (:func:`coefficients`). With shifted logits z - M and p = softmax(z):

    lse               = M + log s                        d/dz_j = p_j
    target_logit      = t                                d/dz_j = [j = y]
    target_log_prob   = (t - M) - log s                  d/dz_j = [j = y] - p_j
    mean_logit        = zt / V                           d/dz_j = 1 / V
    mean_log_prob     = zs / V - log s                   d/dz_j = 1 / V - p_j
    expected_logit E  = M + ez / s                       d/dz_j = p_j (1 + z_j - E)
    entropy           = log s - ez / s                   d/dz_j = -p_j (z_j - E)
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch import Tensor

from parallel_lce.backends.blocks import Coefficients, Destinations, Kept, Projection, Scratch
from parallel_lce.parallel import HiddenGradient, Layout, PartialsGather, Pending, Shard, gather_hidden
from parallel_lce.partials import MAX, SUM_EXP, TARGET, Columns, integer_view
from parallel_lce.plan import Block, Plan
from parallel_lce.weight_grad import MainGrad, ShardGradient


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each token's logits; every field has the target's shape (hidden states' leading
    shape without a target), fp32, or fp64 for fp64 input. Fields that were not asked for are None.

    ``lse``: log-sum-exp. ``target_logit``: 0 for a target outside ``[0, V)``. ``target_log_prob``:
    ``target_logit - lse``, computed without that difference. ``mean_logit`` over the V real entries;
    ``mean_log_prob``: ``mean_logit - lse`` likewise. ``expected_logit``: sum of p z; ``entropy``:
    ``lse - expected_logit`` likewise. Without gradient: ``max_logit``, ``argmax`` (int64, global
    id, the lowest among equals, -1 where a logit is NaN or the shards are no partition) and
    ``vocab_size``: V, 0-dimensional int64.
    """

    lse: Tensor
    target_logit: Tensor | None
    target_log_prob: Tensor | None
    mean_logit: Tensor | None
    mean_log_prob: Tensor | None
    expected_logit: Tensor | None
    entropy: Tensor | None
    max_logit: Tensor
    argmax: Tensor | None
    vocab_size: Tensor

    def view(self, shape: torch.Size) -> TokenStatistics:
        """The same with every per-token field reshaped."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "vocab_size"}
        reshaped = {k: v if v is None else v.view(shape) for k, v in values.items()}
        return TokenStatistics(**reshaped, vocab_size=self.vocab_size)


DIFFERENTIABLE = tuple(f.name for f in fields(TokenStatistics))[:7]
NAMES = tuple(f.name for f in fields(TokenStatistics))


@dataclass(frozen=True)
class Call:
    """One call's numbers, all but the tensors that may need gradients.

    ``backend``: one of :mod:`parallel_lce.backends`. ``target [N]``: ids in the whole vocabulary, or
    None. ``main_grad``: where dW is added, if anywhere. ``reduce_dtype``: dtype of dX's reduction over the
    ranks, by default that of the hidden states.
    """

    backend: ModuleType
    layout: Layout
    shard: Shard
    columns: Columns
    plan: Plan
    target: Tensor | None
    scale: float = 1.0
    softcap: float | None = None
    main_grad: MainGrad | None = None
    reduce_dtype: torch.dtype | None = None

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        shard = self.shard
        # Kernels take rows contiguous in D. Hooks for saved tensors may have given back others.
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        bias = bias if bias is None else bias.contiguous()
        return Projection(weight, bias, shard.start, shard.real, self.scale, self.softcap)

    @functools.cached_property
    def _local_targets(self) -> Tensor:
        return self.target - self.shard.start if self.shard.start else self.target.contiguous()

    def local_target(self, block: Block) -> Tensor | None:
        """The block's targets relative to the shard; other shards' and invalid ones hit nothing."""
        return None if self.target is None else self.layout.take(self._local_targets, block)


def token_count(hidden: Tensor, layout: Layout) -> int:
    """N, the tokens in the TP layout of this rank's ``hidden [..., D]``."""
    return math.prod(hidden.shape[:-1]) * layout.parts


def flattened(hidden: Tensor) -> Tensor:
    """``hidden [..., D]`` as ``[N/parts, D]``. Not by a size of -1, which D=0 leaves open."""
    return hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])


def finish_statistics(partial: Tensor, vocab_size: Tensor, columns: Columns, with_target: bool) -> TokenStatistics:
    """Statistics from a merged partial ``[C, N]``."""
    top, sum_exp, target = partial[MAX], partial[SUM_EXP], partial[TARGET]
    log_sum = sum_exp.log()
    # A token without a finite logit has M = -inf; its sums are relative to 0.
    values: dict[str, Tensor | None] = dict.fromkeys(NAMES)
    values.update(lse=top + log_sum, max_logit=top.clone(), vocab_size=vocab_size)
    if with_target:
        values.update(target_logit=target.clone(), target_log_prob=(target - top) - log_sum)
    if columns.mean_logit:
        values.update(mean_logit=partial[columns.total] / vocab_size)
    if columns.mean_log_prob:
        values.update(mean_log_prob=partial[columns.shifted] / vocab_size - log_sum)
    if columns.expected_logit:
        expected = partial[columns.weighted] / sum_exp
        values.update(expected_logit=top + expected, entropy=log_sum - expected)
    if columns.argmax:
        ids = integer_view(partial[columns.index])
        values["argmax"] = ids.long().masked_fill(ids == torch.iinfo(ids.dtype).max, -1)
    return TokenStatistics(**values)


def coefficients(
    upstream: dict[str, Tensor | None], partial: Tensor, vocab_size: Tensor, columns: Columns
) -> Coefficients:
    """Fold the upstream gradients ``[N]`` of the statistics into coefficients of the logits'."""

    def total(*terms: tuple[int, str]) -> Tensor | None:
        found = [sign * upstream[name] for sign, name in terms if upstream.get(name) is not None]
        return sum(found[1:], start=found[0]) if found else None

    alpha = total((1, "lse"), (-1, "target_log_prob"), (-1, "mean_log_prob"), (1, "expected_logit"))
    beta = total((-1, "target_logit"), (-1, "target_log_prob"))
    gamma = total((-1, "mean_logit"), (-1, "mean_log_prob"))
    delta = total((1, "expected_logit"), (-1, "entropy"))
    if alpha is None:
        alpha = torch.zeros_like(partial[MAX])
    if delta is not None:
        # The expected logit relative to the maximum, as the shifted logits that delta multiplies.
        alpha = alpha - delta * (partial[columns.weighted] / partial[SUM_EXP])
    return Coefficients(alpha, beta, None if gamma is None else gamma / vocab_size, delta)


def statistics_forward(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Kept]:
    """Merged partial ``[C, N]`` of ``hidden [..., D]``, V, and what is kept for backward (nothing unless
    ``keep``): of the first block, and before that its gathered hidden states if the plan says so.

    Collectives: under sequence parallelism one all-gather of hidden states per block, each started
    a block ahead; then one all-gather of the partials.
    """
    layout, columns, blocks = call.layout, call.columns, call.plan.forward_blocks
    hidden, projection = flattened(hidden), call.projection(weight, bias)
    gather = PartialsGather(hidden, token_count(hidden, layout), call.shard, columns, layout)
    kept: Kept = ()
    for block, pending in hidden_blocks(blocks, hidden, layout, projecting=True):
        target = call.local_target(block)
        # One block is all tokens, in their order.
        out = gather.local if len(blocks) == 1 else None
        local, block_kept = call.backend.block_forward(
            projection, pending.tensor, target, columns, block.kept if keep else 0, None, out, pending.arrival()
        )
        x = pending.wait()
        kept = kept or block_kept
        if keep and call.plan.keeps_hidden:
            # On every rank, also where the shard is empty: it decides about a collective.
            kept = (x, *kept)
        if out is None:
            layout.put(gather.local, block, local)
    gather.start()
    merged, vocab_size = gather.finish(call.backend.merge_messages)
    return merged, vocab_size, kept


def hidden_blocks(
    blocks: Sequence[Block], hidden: Tensor, layout: Layout, gathered: Tensor | None = None, projecting: bool = False
) -> Iterator[tuple[Block, Pending]]:
    """Each block with its hidden states, gathered one block ahead of their use; ``gathered``: those of
    the only block, from before. The first block's are on their way, the others' are there.

    ``projecting``, the caller waits for the first before it starts any other collective, and the second
    gather is started then: with CUDA_DEVICE_MAX_CONNECTIONS=1 what is launched beside the first gather
    would otherwise stand behind the second.
    """
    if gathered is not None:
        yield blocks[0], Pending(gathered)
        return
    ahead: deque[Pending] = deque()

    def gather(number: int) -> None:
        if number < len(blocks):
            ahead.append(gather_hidden(hidden, blocks[number], layout))

    gather(0)
    for number, block in enumerate(blocks):
        pending = ahead.popleft()
        if number:
            pending.wait()
        if number == 0 and projecting and pending.work is not None:
            pending.then = functools.partial(gather, 1)
        else:
            gather(number + 1)
        yield block, pending


@dataclass(frozen=True)
class Needs:
    """Which gradients a backward must produce."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


class GradientSums:
    """dX, dW and dbias of one call, formed block by block.

    Collectives: those of :class:`HiddenGradient`, started by each :meth:`add_block`.
    ``dtype`` of dW and dbias, by default the parameters'. ``scratch``: the blocks' working memory, of
    ``scratch_bytes``, by default the plan's.
    """

    def __init__(
        self,
        call: Call,
        hidden: Tensor,
        projection: Projection,
        needs: Needs,
        dtype: torch.dtype | None = None,
        scratch_bytes: int | None = None,
    ) -> None:
        self._call, self._projection = call, projection
        size = call.plan.scratch_bytes if scratch_bytes is None else scratch_bytes
        self.scratch = Scratch(size, hidden.device)
        visits, real = len(call.plan.blocks), projection.real
        self._hidden = self._weight = self._bias = None
        if needs.hidden:
            self._hidden = HiddenGradient(hidden, call.layout, call.reduce_dtype, not needs.weight)
        if needs.weight:
            self._weight = ShardGradient(projection.weight, real, visits, dtype=dtype, main_grad=call.main_grad)
        if needs.bias:
            self._bias = ShardGradient(projection.bias, real, visits, dtype=dtype)

    def add_block(self, block: Block, hidden: Pending, partial: Tensor, coefficients: Coefficients, kept: Kept) -> None:
        """Add a block: ``hidden [R, D]``, waited for where it is first read, merged ``partial [C, R]``,
        coefficients ``[R]``; ``kept`` is of no use any more."""
        dx = dx_ready = None
        if self._hidden is not None:
            dx = self._hidden.destination(block)
            if self._call.layout.ranks > 1:
                dx_ready = functools.partial(self._hidden.reduce, block, dx)
        self._call.backend.block_backward(
            self._projection,
            hidden.tensor,
            self._call.local_target(block),
            partial,
            coefficients,
            kept,
            Destinations(dx, dx_ready, self._weight, self._bias, hidden.wait),
            self.scratch,
        )
        # A gather whose result nobody needed must not be on its way when its memory is freed.
        hidden.wait()

    def deliver(self, shape: torch.Size) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dX of this ``shape [..., D]``, dW (or what :class:`MainGrad` gives for it) and dbias; None if not
        asked for."""
        weight = self._weight and self._weight.deliver()
        bias = self._bias and self._bias.deliver()
        return self._hidden and self._hidden.wait().view(shape), weight, bias


def statistics_backward(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    partial: Tensor,
    kept: Kept,
    coefficients: Coefficients,
    needs: Needs,
    spent: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX ``[..., D]``, dW, dbias of one call, whose :func:`statistics_forward` gave ``partial`` and ``kept``.

    A backward writes over what is kept. With ``spent``, one has already: everything is recomputed,
    in that memory. The tensors may have gaps or other strides than they had: hooks for saved tensors
    hand back what they like.

    Collectives: per block, under sequence parallelism, one all-gather of hidden states, started a
    block ahead, unless they were kept; then the reduction of dX (:class:`HiddenGradient`).
    """
    layout, blocks = call.layout, call.plan.blocks
    gathered = None
    if kept and call.plan.keeps_hidden:
        gathered, *kept = kept
    scratch = call.plan.scratch_bytes if kept else call.plan.scratch_alone
    shape, hidden, projection = hidden.shape, flattened(hidden), call.projection(weight, bias)
    sums = GradientSums(call, hidden, projection, needs, scratch_bytes=scratch)
    if kept:
        # Autograd, which saved these tensors, is not to count what is written to them.
        kept = [t.data.contiguous() for t in kept]
        memory = kept[0]
        # Exponentials that underflowed no longer tell the logits that delta needs.
        if spent or coefficients.delta is not None:
            kept = ()
            sums.scratch.adopt(memory)
    tokens = None
    if len(blocks) > 1:
        # All numbers of a token side by side: a block takes them in one copy.
        each = coefficients.present
        tokens = torch.cat([partial, torch.stack(each)])
    for block, pending in hidden_blocks(blocks, hidden, layout, gathered):
        of_block, local = partial, coefficients
        if tokens is not None:
            of_block, rest = layout.take(tokens, block).contiguous().split([len(partial), len(each)])
            mine = iter(rest.unbind())
            local = coefficients.map(lambda c: next(mine))
        sums.add_block(block, pending, of_block, local, tuple(kept))
        if kept:
            kept = ()
            sums.scratch.adopt(memory)
    return sums.deliver(shape)
