"""The gradient of the logits in slices of the vocabulary, for the backward of the triton backend.

A slice's gradient G ``[R, C]`` is either formed from saved exponentials, in their memory, or recomputed into scratch
memory. If the scratch memory held only a narrow slice of all rows, the rows are cut into pieces, too (:func:`tiling`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.formulas import fp16_scale_of
from parallel_lce.backends.gemm import accumulate, matmul
from parallel_lce.backends.interface import BackwardTask, SliceProducts
from parallel_lce.core.logit_map import Projection
from parallel_lce.core.memory import some_rows
from parallel_lce.core.partials import SUM_EXP, Coefficients
from parallel_lce.core.plan import LONG_SLICE
from parallel_lce.kernels.codes import decode
from parallel_lce.kernels.launch import next_power_of_2
from parallel_lce.kernels.picked import write_picked
from parallel_lce.kernels.product import Product, logits_gradient, stride_of
from parallel_lce.kernels.results import without_factor
from parallel_lce.kernels.token_gradients import (
    GradientTerms,
    Saved,
    Targets,
    TokenGradients,
    add_targets,
    scale_and_add_targets,
    token_gradients,
    write_targets,
)

# Rows of a piece are a multiple of this, since matrix products are tiled so.
_MULTIPLE = 128


def rewrites(coefficients: Coefficients, projection: Projection) -> bool:
    """Whether all rows of saved exponentials are rewritten for this gradient."""
    beside_alpha = coefficients.gamma, coefficients.delta, coefficients.epsilon
    differs = any([c is not None for c in beside_alpha])
    return differs or projection.logit_map.softcap is not None or projection.weight.dtype == torch.float16


def is_coded(saved: Saved | tuple[()]) -> bool:
    """Whether the saved exponentials are codes."""
    return bool(saved) and saved.exponentials.dtype == torch.uint8


def window_of(saved: Saved, real_rows: int) -> int:
    """Width of the forward's windows, a power of two; for a shard of one window the next power of two suffices.
    ``Product.of`` may now choose another tile, since saved-tensor hooks may change the operands' alignment."""
    return next_power_of_2(-(-real_rows // saved.maxima.shape[0]))


def tiling(
    projection: Projection, x: Tensor, saved_entries: int, capacity: int, widest: int, window: int
) -> tuple[list[tuple[int, int]], list[slice]]:
    """Cut the recomputed gradient of ``x [R, D]`` into ranges of the shard's entries, from ``saved_entries`` on, and
    pieces of rows. One range of one piece has at most ``capacity`` elements, or one window.

    The entries of a range are the K dimension of the product for dX; the rows of a piece, of the product for dW. Each
    product is added to a sum in memory, which slows a product with a K dimension below ``LONG_SLICE``. So the rows are
    cut if ranges of all rows would be narrower than that. Ranges of a cut block have at most ``widest`` entries. If
    exponentials are saved, all rows stay together. Ranges begin with windows of ``window`` entries."""
    (rows, _), start, real = x.shape, saved_entries, projection.real_rows
    if start == real:
        return [], [slice(0, rows)]
    width = max(Product.of(projection, x, start, real).tile.entries, window)
    fitting, height = max(width, capacity // rows // width * width), rows
    wide = max(width, min(LONG_SLICE, math.isqrt(capacity), widest) // width * width)
    if fitting < min(wide, real) and not saved_entries:
        fitting, height = wide, capacity // wide // _MULTIPLE * _MULTIPLE or capacity // wide
    number = -(-(real - start) // fitting)
    step = -(-(real - start) // (number * width)) * width
    pieces = -(-rows // height)
    height = min(rows, -(-rows // (pieces * _MULTIPLE)) * _MULTIPLE)
    return (
        [(a, min(a + step, real)) for a in range(start, real, step)],
        [slice(a, min(a + height, rows)) for a in range(0, rows, height)],
    )


class GradientOperands(NamedTuple):
    """Some tokens, and the tensors from which their rows of G are formed."""

    # [R, D]
    x: Tensor
    projection: Projection
    # [>= 3, R], contiguous
    partial: Tensor
    # without a factor
    coefficients: Coefficients
    # 0-dimensional, or None
    fp16_scale: Tensor | None
    # None: they are not known
    targets: Targets | None = None

    def form(self, start: int, stop: int, gradient: Tensor) -> None:
        """Write ``gradient [R, stop - start]`` of the shard's entries ``[start, stop)``, without the targets' terms."""
        product = Product.of(self.projection, self.x, start, stop)
        logits_gradient(product, self.partial, self.coefficients, self.fp16_scale, gradient)


@dataclass
class Slice:
    """The gradient of the logits of the shard's entries ``[start, stop)``, for one piece of the rows."""

    start: int
    stop: int
    # [R, stop - start]
    gradient: Tensor
    # [R] factors of the rows of gradient @ weight; None: 1
    dx_factor: Tensor | None
    # [R] factors of the rows of x in gradient.T @ x; None: 1
    dw_factor: Tensor | None
    # None: ``gradient`` is multiplied whole.
    products: SliceProducts | None = None

    def add_hidden(self, total: Tensor, weight: Tensor, rows: slice, overwrite: bool) -> None:
        """As :meth:`SliceProducts.add_hidden`; whole, with ``overwrite``, ``total`` may be of lower precision."""
        if self.products is None:
            accumulate(total, some_rows(self.gradient, rows.start, rows.stop), weight, overwrite=overwrite)
        else:
            self.products.add_hidden(total, weight, rows, overwrite)

    def add_weight(self, total: Tensor, x: Tensor, entries: slice, overwrite: bool) -> None:
        if self.products is None:
            gradient = some_rows(self.gradient.t(), entries.start, entries.stop)
            accumulate(total, gradient, x, overwrite=overwrite)
        else:
            self.products.add_weight(total, x, entries, overwrite)

    def column_sum(self, dtype: torch.dtype) -> Tensor:
        """``gradient.T @ dw_factor``, in ``dtype``. A factor of low precision would be rounded, so it is two."""
        if self.dw_factor is None:
            return self.gradient.sum(0, dtype=dtype)
        high = self.dw_factor.to(self.gradient.dtype)
        low = (self.dw_factor - high).to(high.dtype)
        return matmul(self.gradient.t(), torch.stack([high, low]).t()).sum(1, dtype=dtype)


class Piece:
    """Forms the slices of one piece of a block, with rows ``x [R, D]``. All slices of a block use the same memory: one
    must be consumed before the next is formed."""

    def __init__(self, task: BackwardTask, rows: slice) -> None:
        """``task``: of the piece's ``rows`` alone."""
        projection, coefficients, saved, grads = task.projection, task.coefficients, task.saved, task.grads
        self.rows, self.x, self._task = rows, task.x, task
        self._projection, self._partial = projection, task.partial.contiguous()
        self._saved = saved or None
        # Codes are decoded into the scratch memory, as slices are recomputed.
        self._codes: Saved | None = None
        if is_coded(saved):
            self._codes, self._saved = saved, None
            if coefficients.beta is None:  # the target has no code: its entry is written in any case
                coefficients = coefficients._replace(beta=torch.zeros_like(coefficients.alpha))
        # Rewrite every row of saved exponentials: picked entries can be added to no others.
        self._rewrite = task.picked is not None or rewrites(coefficients, projection)
        self._find_shared = grads.dweight is not None or grads.dbias is not None
        self._fp16_scale: Tensor | None = None
        # 1 / fp16_scale, 0-dimensional: every sum over G is multiplied by it. None except in fp16.
        self.fp16_unscale: Tensor | None = None
        # Per-token factors and target gradients, computed with the first slice. None before.
        self._tokens: TokenGradients | None = None
        self.has_targets = task.target is not None and coefficients.beta is not None
        saved_entries = 0 if self._saved is None else self._saved.exponentials.shape[1]
        # Only where all rows keep their exponentials the kernels take a factor.
        if self._rewrite or saved_entries < projection.real_rows or task.filter is not None:
            coefficients = without_factor(coefficients)
        if projection.weight.dtype == torch.float16:
            self._fp16_scale = fp16_scale_of(coefficients, self._partial[SUM_EXP], projection, task.picked)
            self.fp16_unscale = 1 / self._fp16_scale
        self._coefficients = coefficients
        self._terms = GradientTerms.of(self._partial, coefficients, self._fp16_scale, projection.logit_map)

    def form(self, start: int, stop: int) -> Slice:
        picked = self._task.picked
        vocab_slice = self._formed(start, stop)
        gradient = vocab_slice.gradient
        if picked is not None:
            target = self._task.target if self.has_targets else None
            write_picked(gradient, start, picked, target, self._terms)
        if self._task.filter is not None:
            rows = self._rows()._replace(targets=self._targets)
            vocab_slice.products = self._task.filter(rows, start, gradient, vocab_slice.dx_factor)
        return vocab_slice

    def _is_recomputed(self, start: int) -> bool:
        return self._saved is None or start >= self._saved.exponentials.shape[1]

    def _rows(self) -> GradientOperands:
        return GradientOperands(self.x, self._projection, self._partial, self._coefficients, self._fp16_scale)

    def _formed(self, start: int, stop: int) -> Slice:
        """The slice without the picked entries."""
        saved = None if self._is_recomputed(start) else self._saved
        if saved is None:
            gradient = self._recompute(start, stop)
        else:
            gradient = saved.exponentials if saved.exponentials.shape[1] == stop else saved.exponentials[:, :stop]
        tokens = self._tokens
        if tokens is None and (saved is not None or self.has_targets):
            tokens = self._tokens = self._find_tokens(gradient, saved, start)
            return Slice(start, stop, gradient, tokens.dx_factor, tokens.dw_factor)
        if self._targets is not None:
            write_targets(gradient, start, self._targets, self._fp16_scale)
        return Slice(start, stop, gradient, None, None)

    def _find_tokens(self, gradient: Tensor, saved: Saved | None, start: int) -> TokenGradients:
        projection, window = self._projection, 1
        if saved is not None:
            window = window_of(saved, projection.real_rows)
        return token_gradients(
            gradient,
            saved,
            self._task.target,
            self._terms,
            entries=projection.real_rows,
            first=start,
            window=window,
            find_shared=self._find_shared,
            rewrite=self._rewrite,
        )

    def _recompute(self, start: int, stop: int) -> Tensor:
        gradient = self._memory(start, stop)
        decoded = 0
        if self._codes is not None:
            codes, maxima = self._codes.exponentials, self._codes.maxima
            shift, lowest = self._codes.shift, self._codes.lowest
            assert shift is not None and lowest is not None
            decoded = max(0, min(stop, codes.shape[1]) - start)
            if decoded:
                windows = maxima[:, self.rows], shift[:, self.rows], lowest[:, self.rows]
                window = window_of(self._codes, self._projection.real_rows)
                decode(codes[self.rows], windows, self._terms, self.rows.start, start, window, gradient[:, :decoded])
        if start + decoded < stop:
            self._rows().form(start + decoded, stop, gradient[:, decoded:])
        return gradient

    def _memory(self, start: int, stop: int) -> Tensor:
        """Uninitialised memory for a recomputed slice."""
        shape = self.x.shape[0], stride_of(stop - start)
        elements = shape[0] * shape[1]
        # The saved slice was consumed first. Recomputed slices overwrite its memory.
        memory = None if self._saved is None else self._saved.exponentials.view(-1)[:elements]
        if memory is None or memory.numel() < elements:
            memory = self._task.scratch.borrow(elements, self.x.dtype)
        return memory.view(shape)[:, : stop - start]

    @property
    def _targets(self) -> Targets | None:
        """The targets with their gradients. None without targets, and before :meth:`_find_tokens`."""
        tokens = self._tokens
        if tokens is None or tokens.residual is None or tokens.unshared is None:
            return None
        assert self._task.target is not None
        return Targets(self._task.target, tokens.residual, tokens.unshared)

    def finish_rows(self, source: Tensor, dx_factor: Tensor | None, rows: tuple[int, int], dx: Tensor) -> None:
        """Write ``dx`` of the piece's ``rows [start, stop)``. ``source``: dX summed over all slices, not yet multiplied
        by ``dx_factor``."""
        targets, terms = self._targets, None
        if targets is not None:
            weight = some_rows(self._projection.weight, 0, self._projection.real_rows)
            terms = some_rows(targets.target, *rows), some_rows(targets.residual, *rows), weight
        factor = self.fp16_unscale if dx_factor is None else some_rows(dx_factor, *rows)
        scale_and_add_targets(source, factor, terms, dx)

    def add_targets(self, total: Tensor, x: Tensor, start: int) -> None:
        """Add the targets' terms of dW to ``total``, the shard's rows from ``start`` on."""
        targets = self._targets
        if targets is not None:
            add_targets(total, start, targets, x)
