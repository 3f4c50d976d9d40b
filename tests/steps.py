"""A step of training on one rank, on tensors that stay where they are, by each way to spend memory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

import parallel_lce
from cases import DTYPES, Case, make, part
from tools import shrunk, statistics
from world import Member


@dataclass(frozen=True)
class Strategy:
    """``share``: the budget, in logits of an equal shard, None for the default. ``blocks``: of rows, what the logits
    make. ``saved``: whether the blocks' backwards are handed exponentials. ``of_statistics``: not of a loss."""

    share: float | None = None
    blocks: int = 1
    saved: set[bool] = field(default_factory=lambda: {True})
    options: dict = field(default_factory=lambda: dict(reduction="none"))
    frozen: str = ""
    of_statistics: bool = False


_MEAN = dict(label_smoothing=0.1, z_loss=1e-3)
_FILTERED = dict(reduction="none", gradient_filter=2**-7)
STRATEGIES = {
    "saved": Strategy(),
    "hidden states gathered again": Strategy(1.0),
    "some columns saved": Strategy(0.83, 2),
    "some rows saved": Strategy(0.7, 4, {True, False}),
    "recomputed": Strategy(0.0, 4, {False}),
    "recomputed, sums in fp32": Strategy(0.0, 4, {False}, dict(reduction="none", reduce_dtype=torch.float32)),
    "accumulated": Strategy(0.0, 3, options=_MEAN),
    "accumulated, sums in fp32": Strategy(0.0, 3, options=dict(reduce_dtype=torch.float32)),
    "a frozen weight": Strategy(1.0, frozen="weight"),
    "some rows saved, a frozen weight": Strategy(0.83, 2, {True, False}, frozen="weight"),
    "statistics": Strategy(of_statistics=True),
    "filtered": Strategy(options=_FILTERED),
    "filtered, recomputed": Strategy(0.0, options=_FILTERED),
}


class Step:
    """Forward and backward of one rank. Shards are equal, or have ``shards`` rows; those of ``vocab_size`` or more are
    padding. All calls are made within :meth:`small_blocks`."""

    def __init__(
        self,
        member: Member,
        strategy: Strategy,
        dtype: str,
        size: tuple[int, int, int],
        sequence_parallel: bool = False,
        *,
        shards: tuple[int, ...] | None = None,
        vocab_size: int | None = None,
        bias: bool = False,
        tile: tuple[int, int] | None = None,
    ) -> None:
        self.member, self.strategy = member, strategy
        self._size, self._dtype, self._bias, self._tile = size, dtype, bias, tile
        self._sequence_parallel, self._shards, self._vocab_size = sequence_parallel, shards, vocab_size
        self.reduction = strategy.options.get("reduction", "mean")
        N, V, _ = size
        counted = -(-(vocab_size or V) // member.ranks)
        row_bytes = counted * DTYPES[dtype].itemsize
        # Accumulating, two blocks are alive.
        alive = 1 if self.reduction == "none" else 2
        parts = member.ranks if sequence_parallel else 1
        self._block_bytes = alive * -(-N // (strategy.blocks * parts)) * parts * row_bytes
        start = None if shards is None or member.ranks == 1 else sum(shards[: member.rank])
        share = strategy.share
        self._options = ({} if strategy.of_statistics else dict(strategy.options)) | dict(
            process_group=member.group,
            sequence_parallel=sequence_parallel,
            vocab_start=start,
            vocab_size=vocab_size if vocab_size or start is None else V,
            logits_budget=None if share is None else int(share * N * row_bytes),
        )
        self.tensors = self.data(0)
        self.x, self.weight, self.target, self.upstream, *self.bias = self.tensors
        named = zip(("x", "weight", "bias"), (self.x, self.weight, *self.bias))
        self.leaves = [leaf.requires_grad_() for name, leaf in named if name not in strategy.frozen]

    def data(self, seed: int) -> list[torch.Tensor]:
        """x, weight, target, upstream gradient and, if there is one, bias."""
        N, V, D = self._size
        case = Case(N, V, D, self._dtype, reduction=self.reduction, bias=self._bias, seed=seed)
        t = make(case, self.member.device)
        t.target[5:12] = t.target[4]  # tokens of one target add up in one row of dW
        if self._vocab_size is not None:
            t.target[t.target >= self._vocab_size] = 0
        t = part(t, self.member, self._sequence_parallel, self._shards)
        made = t.x, t.weight, t.target, t.upstream, t.bias
        return [value.detach() for value in made if value is not None]

    @torch.no_grad()
    def load(self, tensors: list[torch.Tensor]) -> None:
        """Other data in the same memory."""
        for mine, other in zip(self.tensors, tensors, strict=True):
            mine.copy_(other)

    @contextmanager
    def small_blocks(self):
        with shrunk(self._block_bytes, self._tile):
            yield

    def forward(self, function=parallel_lce.linear_cross_entropy) -> torch.Tensor:
        options = self._options | (dict(linear_bias=self.bias[0]) if self.bias else {})
        if self.strategy.of_statistics:
            found = statistics(self.x, self.weight, self.target.clamp(min=0), **options)
            return found.target_log_prob + 0.1 * found.entropy - found.mean_logit
        return function(self.x, self.weight, self.target, **options)

    def backward(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, self.leaves, self.upstream.to(loss.dtype))]

    def __call__(self) -> list[torch.Tensor]:
        return self.backward(self.forward())
