"""Gradients formed in forward: Algorithms 3 and 4 of "From Projection to Prediction", over ranks and
row blocks.

A ``mean`` or ``sum`` knows each token's weight before backward, so a block's gradients are formed
from its exponentials as soon as its statistics are merged, and backward only scales them by the
scalar upstream gradient. 6 N V D flops with one block of logits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from parallel_lce.losses import WeightedLoss
from parallel_lce.parallel import PartialsGather, Pending
from parallel_lce.plan import Block
from parallel_lce.statistics import Call, GradientSums, Needs, flattened, hidden_blocks, token_count
from parallel_lce.weight_grad import accumulation_dtype


@dataclass
class Accumulated:
    """The sum of weighted losses over the divisor, 0-dimensional, and its gradients: dX in the hidden
    states' dtype, dW and dbias in fp32 (fp64 for fp64)."""

    loss: Tensor
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]


def accumulate(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    loss: WeightedLoss,
    divisor: Tensor | float,
    needs: Needs,
) -> Accumulated:
    """The loss of ``hidden [..., D]`` and its gradients in one pass over the blocks.

    Collectives per block: under sequence parallelism the all-gather of its hidden states, started a
    block ahead; the all-gather of its partials, waited for after the next block's projection; the
    reduction of its dX.
    """
    layout, columns = call.layout, call.columns
    backend, blocks = call.backend, call.plan.blocks
    shape, hidden, projection = hidden.shape, flattened(hidden), call.projection(weight, bias)
    dtype = accumulation_dtype(weight.dtype)
    sums = GradientSums(call, hidden, projection, needs, dtype)
    per_token = hidden.new_empty(token_count(hidden, layout), dtype=dtype)

    def complete(block: Block, x, gather, kept) -> None:
        partial, vocab_size = gather.finish(backend.merge_messages)
        select = lambda tokens: layout.take(tokens, block)  # noqa: E731
        losses, folded = loss.of_partials(backend, partial, vocab_size, select)
        if isinstance(divisor, Tensor):
            folded = folded.times(1 / divisor)
        layout.put(per_token, block, losses)
        sums.add_block(block, Pending(x), partial, folded, kept)

    # Over ranks a block waits for its statistics while the next one is projected.
    ahead = 1 if layout.ranks > 1 else 0
    rows = layout.parts * max((b.stop - b.start for b in blocks), default=0)
    kept_columns = max((b.kept for b in blocks), default=0)
    buffers = deque(backend.allocate_kept(projection, rows, kept_columns) for _ in range(ahead + 1))
    waiting: deque = deque()
    for block, pending in hidden_blocks(blocks, hidden, layout, projecting=True):
        x = pending.tensor
        buffers.rotate(1)
        target = call.local_target(block)
        gather = PartialsGather(x, x.shape[0], call.shard, columns, layout)
        _, kept = backend.block_forward(
            projection, x, target, columns, block.kept, buffers[0], gather.local, pending.arrival()
        )
        pending.wait()
        gather.start()
        waiting.append((block, x, gather, kept))
        if len(waiting) > ahead:
            complete(*waiting.popleft())
    while waiting:
        complete(*waiting.popleft())
    return Accumulated(per_token.sum() / divisor, sums.deliver(shape))
