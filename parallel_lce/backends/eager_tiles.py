"""Tiles of logits in the torch backend, and of their gradient: ``[entries, rows]``, vocabulary-major.

Gradient of the logits, with the upstream gradients of all statistics folded into five per-token coefficients
(:class:`Coefficients`):

    dL/dz_j = p_j (alpha + delta (z_j - M) + epsilon p_j) - beta [j = target] - gamma,     p_j = exp(z_j - M) / s

times the derivative of scale and soft-cap ("From Projection to Prediction", Appendix A.1, generalised to any
statistic).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel_lce.backends.eager_filter import replace_inactive
from parallel_lce.backends.gemm import accumulate_nt, operand
from parallel_lce.backends.interface import (
    Coefficients,
    Projection,
    Scratch,
    SelectedGradient,
    SelectedLogits,
    Selection,
    power_of_two_scale,
    softcap_slope,
)
from parallel_lce.memory import some_rows
from parallel_lce.partials import ALONE, LOWEST_SHIFT, MAX, NEAR, SUM_EXP, TARGET, exponential_

# Bytes of a tile and the temporaries of its shape, and of a window of a low-precision weight in fp32. On a CPU every
# operation waits for the slowest thread, which may not be running: operations are to be few and large.
_TILE_BYTES = 64 << 20
# Tensors of its shape that a tile needs at most, but for a gradient_filter.
_COPIES = 4
# Rows of a tile, at most.
_TILE_ROWS = 4096
# fp16 saves exp(z - m), which is in [0, 1], times this: nothing is lost down to e^-20.
SAVED_FP16_SCALE = 2.0**15


def row_tiles(rows: int) -> list[slice]:
    return pieces(0, rows, _TILE_ROWS)


def window_size(projection: Projection, rows: int, temporaries: bool) -> int:
    """Entries of a window, at most, for tiles of ``rows`` rows. ``temporaries``: tensors of a tile's shape are needed
    beside it."""
    low_precision = projection.weight.dtype != projection.dtype
    nbytes = _TILE_BYTES // _COPIES if temporaries or low_precision else _TILE_BYTES
    return max(1, nbytes // (projection.dtype.itemsize * max(1, rows, projection.weight.shape[1] * low_precision)))


def pieces(start: int, stop: int, most: int) -> list[slice]:
    """``[start, stop)`` in as few pieces of at most ``most`` as possible, of equal size but for the last one."""
    size = -(-(stop - start) // max(1, -(-(stop - start) // most)))
    return [slice(a, min(a + size, stop)) for a in range(start, stop, size or 1)]


def logits(projection: Projection, x: Tensor, rows: slice, weight: Tensor, window: slice, out: Tensor) -> Tensor:
    """A tile ``[entries, rows]`` of z in ``out``; ``weight`` holds the window's rows as an operand."""
    bias = None if projection.bias is None else projection.bias[window, None]
    accumulate_nt(out, weight, some_rows(x, rows.start, rows.stop), overwrite=True)
    return finished(out, projection.of_rows(rows), bias)


def borrowed(scratch: Scratch, window: slice, rows: slice, dtype: torch.dtype) -> Tensor:
    """Memory of a tile."""
    shape = window.stop - window.start, rows.stop - rows.start
    return scratch.borrow(shape[0] * shape[1], dtype).view(shape)


def saved_tile(exponentials: Tensor, save: int, rows: slice, window: slice) -> Tensor:
    """A tile ``[entries, rows]`` of what is saved: exponentials of ``save`` entries, one tile of rows after another."""
    height = rows.stop - rows.start
    start = rows.start * save + window.start * height
    return exponentials[start : start + (window.stop - window.start) * height].view(-1, height)


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
    """Positions of the targets in the flattened tile, and which targets do not lie in it ``[rows]``.

    One-dimensional: only at such positions does torch add deterministically.
    """
    entry = target - window.start
    inside = entry.clamp(0, window.stop - window.start - 1)
    row = torch.arange(len(target), device=target.device)
    return torch.add(row, inside, alpha=len(target)), inside != entry


def _selected_positions(selection: Selection, rows: slice, window: slice) -> tuple[Tensor, Tensor]:
    """Positions of the selected entries ``[E]`` in a flattened tile, and which of them lie in it."""
    row, hit = selection.of_rows(rows).places()
    hit &= selection.inside(window.start, window.stop)
    height = len(selection.begin[rows])
    return ((selection.ids - window.start) * height + row).where(hit, 0), hit


def take_selected(tile: Tensor, selected: SelectedLogits, rows: slice, window: slice) -> None:
    """Copy the selected entries' logits out of a ``tile [window, rows]``."""
    position, hit = _selected_positions(selected.selection, rows, window)
    selected.out.copy_(tile.view(-1).index_select(0, position).where(hit, selected.out))


def _add_selected(tile: Tensor, selected: SelectedGradient, rows: slice, window: slice) -> None:
    """Add the selected entries' values to a ``tile [window, rows]`` of the gradient."""
    position, hit = _selected_positions(selected.selection, rows, window)
    # Equal positions are summed in a fixed order, on CUDA too.
    tile.view(-1).index_put_((position,), selected.values.where(hit, 0.0), accumulate=True)


class Saved(NamedTuple):
    """What a block saves of its first vocabulary entries from forward to backward."""

    # One tile [entries, rows] after another, in the weight's dtype, relative to ``maxima``
    exponentials: Tensor
    # [windows, R] fp32 (fp64)
    maxima: Tensor


class GradientTile(NamedTuple):
    # [window, rows], an operand of the next products
    gradient: Tensor
    # [window]: sums over the rows before anything was filtered; None: those of ``gradient``
    sums: Tensor | None


class LogitGradient:
    """Produces tiles of a block's gradient of the projection's output ``x @ weight.T + bias``.

    A tile overwrites the one before, unless it :meth:`stays` in the memory of what is saved.
    """

    def __init__(
        self,
        projection: Projection,
        x: Tensor,
        target: Tensor | None,
        partial: Tensor,
        coefficients: Coefficients,
        saved: Saved | tuple[()],
        scratch: Scratch,
        selected: SelectedGradient | None = None,
        gradient_filter: float | None = None,
    ) -> None:
        if selected is not None and saved and saved.exponentials.dtype != projection.dtype:
            # What selected entries add may cancel nearly all of their gradients, but for the rounding of what is saved.
            saved = ()
        self.x = operand(x)
        self._projection, self._target, self._saved, self._scratch = projection, target, saved, scratch
        rows, real = len(x), projection.real_rows
        # Vocabulary rows whose exponentials are saved, and of a window of the forward.
        self._save = saved.exponentials.numel() // max(1, rows) if saved else 0
        self._saved_width = -(-self._save // len(saved.maxima)) if saved else 1
        self.row_tiles = row_tiles(rows)
        temporaries = projection.softcap is not None or gradient_filter is not None
        temporaries |= coefficients.delta is not None or coefficients.epsilon is not None
        width = window_size(projection, max([t.stop - t.start for t in self.row_tiles], default=0), temporaries)
        saved_windows = pieces(0, self._save, self._saved_width)
        self.windows = [w for s in saved_windows for w in pieces(s.start, s.stop, width)]
        self.windows += pieces(self._save, real, width)
        maximum, sum_exp = partial[MAX], partial[SUM_EXP]
        # A row without a finite logit has M = -inf.
        self._maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
        # [R]: a recomputed logit less than that below the maximum is the maximum, which a product of other rows rounds
        # in another way: of millions, and where the exponential of a rounding would hide how small 1 - p is. None: 0.
        self._slack: Tensor | None = None
        if self._save < real:
            slack = self._maximum.abs().mul_(8 * torch.finfo(maximum.dtype).eps).sub_(1.0)
            slack.clamp_(min=0.0).clamp_(min=(sum_exp < ALONE) * NEAR)
            self._slack = slack if slack.is_cuda or slack.any() else None
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
        if gradient_filter is not None:
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
            self._beta = self._beta * softcap_slope(projection.softcap, partial[TARGET])

    def stays(self, window: slice) -> bool:
        in_place = self._saved and self._saved.exponentials.dtype == self._projection.dtype and self._limits is None
        return bool(in_place) and window.start < self._save

    def tile(self, window: slice, rows: slice, weight: Tensor) -> GradientTile:
        """``weight``: the window's rows as an operand."""
        if window.start < self._save:
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
        return GradientTile(gradient.to(self.x.dtype), sums)

    def _add_targets(self, gradient: Tensor, rows: slice, window: slice) -> None:
        if self._beta is not None and self._target is not None:
            position, missed = target_positions(self._target[rows], window)
            gradient.view(-1).scatter_add_(0, position, self._beta[rows].neg().masked_fill_(missed, 0.0))

    def _from_saved(self, rows: slice, window: slice) -> tuple[Tensor, Tensor | None]:
        exponentials, maxima = self._saved
        stored = saved_tile(exponentials, self._save, rows, window)
        scale = 1 / SAVED_FP16_SCALE if stored.dtype == torch.float16 else 1.0
        maximum = maxima[window.start // self._saved_width, rows]
        above = maximum - self._maximum[rows]
        rebase = above.exp() * scale
        slope, cap = None, self._projection.softcap
        if cap is not None:
            slope = softcap_slope(cap, torch.log(stored.to(maximum.dtype) * scale).add_(maximum))
        in_place = stored.dtype == maximum.dtype
        out = stored if in_place else borrowed(self._scratch, window, rows, self._projection.dtype)
        if self._delta is None and self._epsilon is None:
            return torch.mul(stored, self._alpha[rows] * rebase, out=out), slope
        e = torch.mul(stored, rebase, out=out)
        moved = None if self._delta is None else e.log().clamp_(min=LOWEST_SHIFT)
        return self._softmax_gradient(e, moved, rows), slope

    def _recomputed(self, rows: slice, window: slice, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        out = borrowed(self._scratch, window, rows, self._projection.dtype)
        z = logits(self._projection, self.x, rows, weight, window, out)
        cap = self._projection.of_rows(rows).softcap
        slope = None if cap is None else softcap_slope(cap, z)
        z.sub_(self._maximum[rows])
        if self._slack is None:
            z.clamp_(max=0.0)
        else:
            z.masked_fill_(z > -self._slack[rows], 0.0)
        moved = None if self._delta is None else z.clamp(min=LOWEST_SHIFT)
        return self._softmax_gradient(exponential_(z), moved, rows), slope

    def _softmax_gradient(self, e: Tensor, moved: Tensor | None, rows: slice) -> Tensor:
        """``e (alpha + delta moved + epsilon e)``. ``e``: exp(z - M). ``moved``: z - M. Both are overwritten."""
        alpha = self._alpha[rows]
        if self._delta is None and self._epsilon is None:
            return e.mul_(alpha)
        factor = alpha if self._delta is None or moved is None else moved.mul_(self._delta[rows]).add_(alpha)
        if self._epsilon is not None:
            factor = torch.addcmul(factor, e, self._epsilon[rows])
        return e.mul_(factor)
