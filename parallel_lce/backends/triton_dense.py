"""Small problems in the triton backend: fp32 logits by cuBLAS, read by one kernel in forward and by one in backward.

A mean adds one launch. Several ranks also merge partials. Launches are bound to a call's signature once: between them
the host only allocates memory. The bf16 gradient of the logits takes the first half of each row of the fp32 logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.gemm import product
from parallel_lce.core.logit_map import LogitMap
from parallel_lce.core.options import Options
from parallel_lce.kernels.dense_logits import lce_backward_dense, lce_forward_dense
from parallel_lce.kernels.loss_kernels import LossTerms, lce_forward_mean
from parallel_lce.kernels.relaunch import Bound
from parallel_lce.kernels.tuning import MEASURED


class Dense:
    """The work on dense logits ``[tokens, entries]``, for the calls of one signature. ``entries``: the shard's real
    rows."""

    def __init__(self, tokens: int, entries: int, options: Options, logit_map: LogitMap) -> None:
        self.entries = entries
        shifted = options.columns.shifted
        self._tokens, self._number = tokens, 2 + shifted
        block, warps = MEASURED.dense_block
        self._traits = dict(SHIFTED=shifted, SCALED=logit_map.scale != 1.0, BLOCK=block, num_warps=warps)
        numbers = tokens, entries, entries, LossTerms.of(options)
        self._forward = Bound(lce_forward_dense, (tokens,), numbers, OUTSIDE_NAN=options.outside_is_nan, **self._traits)
        self._mean = Bound(lce_forward_mean, (1,), (tokens, options.ignore_index))
        # One launch for each stride of the upstream gradient.
        self._backward: dict[int, Bound] = {}

    def products(self, x: Tensor, weight: Tensor, memory: Tensor | None = None) -> Tensor:
        """``x @ weight[:entries].T``, ``[tokens, entries]`` fp32, in the ``memory`` of earlier products or in new
        memory."""
        if weight.shape[0] > self.entries:
            weight = weight[: self.entries]
        if memory is None:
            # No result of torch.mm: activation checkpointing may keep such results, and backward overwrites this one.
            memory = x.new_empty(self._tokens, self.entries, dtype=torch.float32)
        return product(x, weight.t(), torch.float32, memory)

    def partial(self, products: Tensor, partial: Tensor, per_token: tuple[Tensor | LogitMap | None, ...]) -> None:
        """Write the ``partial [C, N]``. ``per_token``: targets relative to the shard, weights, the bias ``[V]``,
        and the call's map."""
        self._forward(products, partial, None, *per_token)

    def losses(self, products: Tensor, per_token: tuple[Tensor | LogitMap | None, ...]) -> tuple[Tensor, Tensor]:
        """The losses ``[N]``, if the shard is the whole vocabulary. Also, stacked, the rows of the partial ``[C, N]``,
        alpha, beta and, if labels are smoothed, gamma."""
        # The losses have memory of their own, since users may change them in place.
        losses, stacked = products.new_empty(self._tokens), products.new_empty(2 * self._number + 1, self._tokens)
        self._forward(products, stacked, losses, *per_token)
        return losses, stacked

    def mean(self, losses: Tensor, target: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """As :func:`parallel_lce.kernels.loss_kernels.mean_loss`."""
        mean, divisor = losses.new_empty(()), losses.new_empty(())
        self._mean(losses, target, weights, mean, divisor)
        return mean, divisor

    def gradient(
        self,
        products: Tensor,
        stacked: Tensor,
        factor: Tensor,
        divisor: Tensor | None,
        per_token: tuple[Tensor | LogitMap | None, ...],
    ) -> Tensor:
        """The derivative ``[N, V]`` of (sum of ``factor`` times loss) / ``divisor`` by the products, in their memory.
        ``factor``: ``[N]`` or 0-dimensional. ``stacked``: as from :meth:`losses`, merged over the ranks.
        ``per_token``: as for :meth:`partial`, without weights."""
        gradient = products.view(torch.bfloat16)[:, : self.entries]
        stride = factor.stride(0) if factor.dim() else 0
        bound = self._backward.get(stride)
        if bound is None:
            numbers = self._tokens, self.entries, self.entries, 2 * self.entries, stride
            traits = dict(IN_PLACE=True, SPAN=self._traits["BLOCK"], **self._traits)
            bound = self._backward[stride] = Bound(lce_backward_dense, (self._tokens, 1), numbers, **traits)
        bound(products, gradient, stacked, factor, divisor, *per_token)
        return gradient
