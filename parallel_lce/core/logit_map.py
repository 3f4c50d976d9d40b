"""What turns hidden states into logits: a projection, and a map of its products."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from parallel_lce.core.options import Options


class LogitMap(NamedTuple):
    """``z = softcap(scale * token_scale * u)`` of ``u = x @ weight.T + bias``; ``softcap(u) = cap * tanh(u / cap)``.

    A temperature T is part of all three: ``softcap(u) / T`` equals the soft-cap of ``u / T`` with ``cap / T``. The same
    formulas as in :mod:`parallel_lce.kernels.logit_map`.
    """

    scale: float = 1.0
    # [R] in the statistics' dtype: each token's factor beside ``scale``. None: 1
    token_scale: Tensor | None = None
    # The cap; None: no soft-cap.
    softcap: float | None = None
    # [R] in the statistics' dtype: each token's cap instead of ``softcap``.
    token_softcap: Tensor | None = None

    @classmethod
    def of(cls, options: Options) -> LogitMap:
        scale, temperature, cap = options.logit_scale, cast(float, options.temperature), options.logit_softcap
        return cls(cast(float, scale) / temperature, softcap=None if cap is None else cap / temperature)

    def of_tokens(self, scale: Tensor | None, temperature: Tensor | None) -> LogitMap:
        """The map with each token's ``scale`` and ``temperature``, ``[R]`` in the statistics' dtype."""
        token_softcap = None
        if temperature is not None:
            scale = (1.0 if scale is None else scale) / temperature
            if self.softcap is not None:  # its inverse is finite, as that of one cap (check_options)
                token_softcap = (self.softcap / temperature).clamp(min=torch.finfo(temperature.dtype).tiny)
        return self if scale is None else self._replace(token_scale=scale, token_softcap=token_softcap)

    def each(self, change: Callable[[Tensor], Tensor]) -> LogitMap:
        """The map with its tensors changed: those of some tokens, or spread over other dimensions."""
        scale, softcap = [t if t is None else change(t) for t in (self.token_scale, self.token_softcap)]
        return self._replace(token_scale=scale, token_softcap=softcap)

    def of_rows(self, rows: slice | Tensor) -> LogitMap:
        return self.each(lambda t: t[rows])

    def scaled(self, u: Tensor) -> Tensor:
        """``u [..., R]`` times the scales, in place."""
        if self.scale != 1.0:
            u *= self.scale
        if self.token_scale is not None:
            u *= self.token_scale
        return u

    def capped(self, u: Tensor) -> Tensor:
        """The soft-cap of ``u [..., R]``, in place."""
        cap = self.softcap if self.token_softcap is None else self.token_softcap
        return u if cap is None else u.div_(cap).tanh_().mul_(cap)

    def slope(self, z: Tensor) -> Tensor | None:
        """The soft-cap's derivative ``[..., R]`` where it returns ``z``: ``1 - (z / cap)^2``. None: 1"""
        cap = self.softcap if self.token_softcap is None else self.token_softcap
        return None if cap is None else (z / cap).square_().neg_().add_(1.0)

    def before(self, gradient: Tensor, z: Tensor) -> Tensor:
        """The gradient ``[..., R]`` of u, from the ``gradient`` of the logits ``z``."""
        gradient = gradient * self.scale
        if self.token_scale is not None:
            gradient *= self.token_scale
        slope = self.slope(z)
        return gradient if slope is None else gradient.mul_(slope)


class Projection(NamedTuple):
    """``z = logit_map(x @ weight.T + bias)`` for the real rows of a vocabulary shard."""

    # [V/P, D]
    weight: Tensor
    # [V/P]
    bias: Tensor | None
    # global id of the first row
    start: int
    # number of rows that are not padding; they come first
    real_rows: int
    logit_map: LogitMap = LogitMap()
    # Dtype of statistics and sums: torch.float64 for a weight of that dtype.
    dtype: torch.dtype = torch.float32

    def of_rows(self, rows: slice) -> Projection:
        """The projection of some tokens."""
        logit_map = self.logit_map.of_rows(rows)
        return self if logit_map is self.logit_map else self._replace(logit_map=logit_map)
