"""Tiles of logits in the torch backend, and of their gradient: ``[entries, rows]``, vocabulary-major.

Gradient of the logits, with the upstream gradients of all statistics folded into five per-token coefficients
(:class:`Coefficients`):

    dL/dz_j = p_j (alpha + delta (z_j - M) + epsilon p_j) - beta [j = target] - gamma,     p_j = exp(z_j - M) / s

times the derivative of scale and soft-cap ("From Projection to Prediction", Appendix A.1, generalised to any
statistic).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.eager_filter import replace_inactive
from parallel_lce.backends.gemm import matmul_nt, operand
from parallel_lce.backends.interface import (
    AUTO,
    Coefficients,
    GradientFilter,
    Projection,
    Saved,
    SelectedGradient,
    power_of_two_scale,
    softcap_slope,
)
from parallel_lce.partials import LOWEST_SHIFT, TARGET

# Rows and entries of a tile: 2 MiB of fp32, a core complex's cache, or 16 MiB for a GPU.
_CPU_TILE = (256, 2048)
_CUDA_TILE = (2048, 2048)
# fp16 saves exp(z - m), which is in [0, 1], times this: nothing is lost down to e^-20.
SAVED_FP16_SCALE = 2.0**15


def tile_size(device: torch.device) -> tuple[int, int]:
    return _CUDA_TILE if device.type == "cuda" else _CPU_TILE


def windows(projection: Projection, saved: int = 0) -> list[slice]:
    """The vocabulary windows of a shard, one per tile. None straddles the end of the first ``saved`` entries."""
    width = tile_size(projection.weight.device)[1]
    bounds = ((0, saved), (saved, projection.real_rows))
    return [slice(a, min(a + width, end)) for begin, end in bounds for a in range(begin, end, width)]


def row_tiles(rows: int, device: torch.device) -> list[slice]:
    height = tile_size(device)[0]
    return [slice(a, min(a + height, rows)) for a in range(0, rows, height)]


def logits(projection: Projection, x: Tensor, rows: slice, weight: Tensor, window: slice) -> Tensor:
    """A tile ``[entries, rows]`` of z; ``weight`` holds the window's rows as an operand."""
    bias = None if projection.bias is None else projection.bias[window, None]
    return finished(matmul_nt(weight, x[rows]), projection.of_rows(rows), bias)


def finished(z: Tensor, projection: Projection, bias: Tensor | None) -> Tensor:
    """Logits from products, in place, with what of the bias and of the tokens' scales and caps belongs to each."""
    if bias is not None:
        z += bias
    if projection.scale != 1.0:
        z *= projection.scale
    if projection.token_scale is not None:
        z *= projection.token_scale
    if projection.softcap is not None:
        z.div_(projection.softcap).tanh_().mul_(projection.softcap)
    return z


def target_positions(target: Tensor, window: slice) -> tuple[Tensor, Tensor]:
    """Positions of the targets in the flattened tile, and which targets lie in it ``[rows]``.

    One-dimensional: only at such positions does torch add deterministically.
    """
    entry = target - window.start
    width, rows = window.stop - window.start, target.shape[0]
    hit = (entry >= 0) & (entry < width)
    position = entry.clamp_(0, width - 1).mul_(rows)
    return position.add_(torch.arange(rows, device=target.device)), hit


def _add_selected(tile: Tensor, selected: SelectedGradient, rows: slice, window: slice) -> None:
    """Add the selected entries' values to a ``tile [window, rows]`` of the gradient."""
    height = tile.shape[1]
    row, hit = selected.of_rows(rows).selection.places()
    hit &= selected.selection.inside(window.start, window.stop)
    position = ((selected.selection.ids - window.start) * height + row).where(hit, 0)
    # Equal positions are summed in a fixed order, on CUDA too.
    tile.view(-1).index_put_((position,), selected.values.where(hit, 0.0), accumulate=True)


class GradientTile(NamedTuple):
    rows: slice
    # [window, rows], an operand of the next products
    gradient: Tensor
    # [window]: sums over the rows before anything was filtered; None: those of ``gradient``
    sums: Tensor | None


class LogitGradient:
    """Produces tiles of a block's gradient of the projection's output ``x @ weight.T + bias``."""

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        partial: Tensor,
        coefficients: Coefficients,
        saved: Saved,
        selected: SelectedGradient | None = None,
        gradient_filter: GradientFilter = None,
    ) -> None:
        self.x = operand(x)
        self._projection, self._target, self._saved = projection, target, saved
        # Vocabulary rows whose exponentials are saved.
        self.saved = len(saved[0]) if saved else 0
        maximum, sum_exp, target_logit = partial[: TARGET + 1]
        # A row without a finite logit has M = -inf.
        self._maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
        self.fp16_unscale: Tensor | None = None
        factor: Tensor | float = projection.scale
        if projection.token_scale is not None:
            factor = factor * projection.token_scale
        if self.x.dtype == torch.float16:
            power = power_of_two_scale(coefficients, projection, selected)
            factor, self.fp16_unscale = factor * power, 1 / power
            if selected is not None:
                selected = selected._replace(values=selected.values * power)
        self._selected = selected
        # Up to these numbers entries of a token are approximated, where all of their tile are. [R]
        self._limits: Tensor | None = None
        # A filter saves no time here, so that "auto" is exact.
        if gradient_filter is not None and gradient_filter != AUTO:
            self._limits = (coefficients.alpha * factor).abs() * gradient_filter
        # p = e / s: the 1 / s is multiplied into alpha, delta and, twice, epsilon.
        self._alpha = coefficients.alpha / sum_exp * factor
        self._beta, self._gamma, self._delta, self._epsilon = (
            c if c is None else c * factor for c in coefficients.each[1:]
        )
        if self._delta is not None:
            self._delta = self._delta / sum_exp
        if self._epsilon is not None:
            self._epsilon = self._epsilon / sum_exp.square()
        if self._beta is not None and projection.softcap is not None:
            # Uses the target's fp32 logit, not a stored exponential.
            self._beta = self._beta * softcap_slope(projection.softcap, target_logit)

    def tiles(self, window: slice, weight: Tensor | None = None) -> Iterator[GradientTile]:
        """``weight``: the window's rows as an operand."""
        if weight is None:
            weight = operand(self._projection.weight[window])
        for rows in row_tiles(self.x.shape[0], self.x.device):
            if window.start < self.saved:
                gradient, slope = self._from_saved(rows, window)
            else:
                gradient, slope = self._recomputed(rows, window, weight)
            if self._gamma is not None:
                gradient -= self._gamma[rows]
            if slope is not None:
                gradient *= slope
            sums = None
            if self._limits is not None:
                # The bias's gradient is not filtered.
                if self._projection.bias is not None:
                    exact = gradient.clone()
                    self._add_targets(exact, rows, window)
                    sums = exact.to(self.x.dtype).sum(1, dtype=gradient.dtype)
                gradient = replace_inactive(gradient, self._limits[rows])
            self._add_targets(gradient, rows, window)
            if self._selected is not None:
                _add_selected(gradient, self._selected, rows, window)
            yield GradientTile(rows, gradient.to(self.x.dtype), sums)
            del gradient

    def _add_targets(self, gradient: Tensor, rows: slice, window: slice) -> None:
        if self._beta is not None and self._target is not None:
            position, hit = target_positions(self._target[rows], window)
            gradient.view(-1).scatter_add_(0, position, self._beta[rows] * -hit.to(gradient.dtype))

    def _from_saved(self, rows: slice, window: slice) -> tuple[Tensor, Tensor | None]:
        exponentials, maxima = self._saved
        stored = exponentials[window, rows]
        scale = 1 / SAVED_FP16_SCALE if stored.dtype == torch.float16 else 1.0
        maximum = maxima[window.start // tile_size(stored.device)[1], rows]
        above = maximum - self._maximum[rows]
        rebase = above.exp() * scale
        if self._delta is None and self._epsilon is None:
            gradient = stored * (self._alpha[rows] * rebase)
        else:
            e = stored * rebase
            moved = None if self._delta is None else e.log().clamp_(min=LOWEST_SHIFT)
            gradient = self._softmax_gradient(e, moved, rows)
        slope, cap = None, self._projection.softcap
        if cap is not None:
            slope = softcap_slope(cap, torch.log(stored.to(gradient.dtype) * scale).add_(maximum))
        return gradient, slope

    def _recomputed(self, rows: slice, window: slice, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        z = logits(self._projection, self.x, rows, weight, window)
        cap = self._projection.of_rows(rows).softcap
        slope = None if cap is None else softcap_slope(cap, z)
        z -= self._maximum[rows]
        moved = None if self._delta is None else z.clamp(min=LOWEST_SHIFT)
        return self._softmax_gradient(z.exp_(), moved, rows), slope

    def _softmax_gradient(self, e: Tensor, moved: Tensor | None, rows: slice) -> Tensor:
        """``e (alpha + delta moved + epsilon e)``. ``e``: exp(z - M). ``moved``: z - M. Both are overwritten."""
        alpha = self._alpha[rows]
        if self._delta is None and self._epsilon is None:
            return e.mul_(alpha)
        factor = alpha if self._delta is None or moved is None else moved.mul_(self._delta[rows]).add_(alpha)
        if self._epsilon is not None:
            factor = torch.addcmul(factor, e, self._epsilon[rows])
        return e.mul_(factor)
