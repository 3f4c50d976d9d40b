"""Logits in the torch backend: tiles of a projection, selected entries and their log-probabilities, a user's logits.

A tile ``[entries, rows]`` is one window of the vocabulary times some rows of a block. Per-token vectors broadcast along
its contiguous rows. In kernels: parallel_lce.kernels.selected and parallel_lce.kernels.dense_logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.gemm import accumulate
from parallel_lce.backends.interface import Scratch
from parallel_lce.core.logit_map import Projection
from parallel_lce.core.partials import LOWEST_SHIFT, MAX, SUM_EXP, TARGET, Coefficients, Columns, tile_partial
from parallel_lce.core.selection import Selection

# Bytes of a tile and the temporaries of its shape, and of a window of a low-precision weight in fp32. Few and large
# operations are faster on a CPU: each waits for its slowest thread, which the system may have suspended.
_TILE_BYTES = 64 << 20
# Most tensors of a tile's shape, the tile included.
_COPIES = 4
# Most rows of a tile.
_TILE_ROWS = 4096
# Bytes of the rows that are gathered or exponentiated at a time. Up to eight further tensors have the same shape.
_BYTES = 32 << 20


def row_tiles(rows: int) -> list[slice]:
    return even_slices(0, rows, _TILE_ROWS)


def window_size(projection: Projection, rows: int, temporaries: bool) -> int:
    """Most entries of a window, for tiles of ``rows`` rows. ``temporaries``: further tensors of a tile's shape are
    needed."""
    dtype = projection.dtype
    low_precision = projection.weight.dtype != dtype
    nbytes = _TILE_BYTES // _COPIES if temporaries or low_precision else _TILE_BYTES
    return max(1, nbytes // (dtype.itemsize * max(1, rows, projection.weight.shape[1] * low_precision)))


def even_slices(start: int, stop: int, most: int) -> list[slice]:
    """``[start, stop)`` in as few slices of at most ``most`` as possible, of equal size but for the last one."""
    if stop - start <= most:
        return [slice(start, stop)] if stop > start else []
    count = -(-(stop - start) // most)
    size = -(-(stop - start) // count)
    return [slice(a, min(a + size, stop)) for a in range(start, stop, size)]


def logits(projection: Projection, x: Tensor, weight: Tensor, window: slice, out: Tensor) -> Tensor:
    """A tile of z in ``out``. ``projection``: of the tile's rows. ``x``, ``weight``: its rows and entries, as
    operands."""
    accumulate(out, weight, x.t(), overwrite=True)
    if projection.bias is not None:
        out += projection.bias[window, None]
    return projection.logit_map.capped(projection.logit_map.scaled(out))


def borrowed(scratch: Scratch, rows: slice, window: slice, dtype: torch.dtype) -> Tensor:
    """Memory of a tile."""
    height = rows.stop - rows.start
    return scratch.borrow((window.stop - window.start) * height, dtype).view(-1, height)


def saved_tile(exponentials: Tensor, save: int, rows: slice, window: slice) -> Tensor:
    """A tile of the saved exponentials, which hold ``save`` entries, tile after tile of rows."""
    height = rows.stop - rows.start
    start = rows.start * save + window.start * height
    return exponentials[start : start + (window.stop - window.start) * height].view(-1, height)


def take_targets(tile: Tensor, target: Tensor, window: slice, out: Tensor) -> None:
    """Copy the targets' logits out of a tile to ``out [rows]``, 0 for targets outside the tile."""
    entry = target - window.start
    inside = entry.clamp(0, tile.shape[0] - 1)
    torch.gather(tile, 0, inside.unsqueeze(0), out=out.unsqueeze(0))
    out.masked_fill_(inside != entry, 0.0)


def set_at_targets(tile: Tensor, target: Tensor, window: slice, values: Tensor) -> None:
    """Write ``values [rows]`` to the targets' entries of a tile."""
    position, hit = _target_positions(tile, target, window)
    tile.view(-1).scatter_(0, position, torch.where(hit, values, tile.view(-1)[position]))


def _target_positions(tile: Tensor, target: Tensor, window: slice) -> tuple[Tensor, Tensor]:
    """Positions in the tile's memory: only with such does torch add deterministically. And whether a target is in the
    tile."""
    entry = target - window.start
    inside = entry.clamp(0, tile.shape[0] - 1)
    rows = torch.arange(len(target), device=target.device)
    return rows * tile.stride(1) + inside * tile.stride(0), inside == entry


def take_selected(tile: Tensor, selection: Selection, rows: slice, window: slice) -> None:
    """Copy the selected entries' logits out of a tile."""
    row, entry, hit = selection.of_rows(rows).located(window.start, window.stop)
    found = tile.view(-1).index_select(0, entry * tile.shape[1] + row)
    selection.logits.copy_(found.where(hit, selection.logits))


def add_selected(tile: Tensor, selection: Selection, rows: slice, window: slice) -> None:
    """Add the selected entries' terms to a tile of the gradient."""
    row, entry, hit = selection.of_rows(rows).located(window.start, window.stop)
    # Equal positions are summed in a fixed order, on CUDA too.
    position = entry * tile.shape[1] + row
    tile.view(-1).index_put_((position,), selection.gradient.where(hit, 0.0), accumulate=True)


def tiles_of_rows(count: int, width: int, itemsize: int) -> list[slice]:
    """Row ranges of a tensor ``[count, width]`` of at most ``_BYTES`` each, to bound temporaries."""
    step = max(1, _BYTES // max(1, width * itemsize))
    return [slice(a, a + step) for a in range(0, count, step)]


def selected_logits(projection: Projection, x: Tensor, selection: Selection) -> None:
    if projection.real_rows == 0 or len(x) == 0:
        return
    row, ids, hit = selection.located(0, projection.real_rows)
    out = selection.logits
    for some in tiles_of_rows(len(ids), x.shape[1], out.element_size()):
        of_entry, at = row[some], ids[some]
        z = (x[of_entry].to(out.dtype) * projection.weight[at].to(out.dtype)).sum(1)
        if projection.bias is not None:
            z += projection.bias[at]
        logit_map = projection.logit_map.of_rows(of_entry)
        z = logit_map.capped(logit_map.scaled(z))
        out[some] = z.where(hit[some], out[some])


def selected_rows(selection: Selection, source: Tensor, out: Tensor) -> None:
    """index_put_ adds equal indices one after another, in a fixed order, on CUDA too. In fp32 the sum of many terms of
    one sign would drift, so it is fp64."""
    if len(source) == 0 or len(out) == 0:
        out.zero_()
        return
    row, ids, hit = selection.located(0, len(source))
    values, skipped = selection.gradient, ~hit.unsqueeze(1)
    for columns in tiles_of_rows(out.shape[1], len(out), torch.float64.itemsize):
        of_columns = source[:, columns]
        total = torch.zeros_like(out[:, columns], dtype=torch.float64)
        for some in tiles_of_rows(len(ids), total.shape[1], total.element_size()):
            added = of_columns[ids[some]].to(total.dtype) * values[some].unsqueeze(1)
            total.index_put_((row[some],), added.masked_fill_(skipped[some], 0.0), accumulate=True)
        out[:, columns] = total


def logits_partial(logits: Tensor, target: Tensor, shifted: bool, partial: Tensor) -> None:
    window = slice(0, logits.shape[1])
    for rows in tiles_of_rows(*logits.shape, itemsize=partial.element_size()):
        tile = logits[rows].to(partial.dtype, copy=True).t()
        take_targets(tile, target[rows], window, partial[TARGET, rows])
        tile_partial(tile, 0, Columns(shifted), partial[:, rows])


def target_gradient(partial: Tensor, coefficients: Coefficients) -> Tensor:
    """The gradient ``[R]`` of each target's logit, from the fp32 logit. ``partial [>= 3, R]``: merged.
    ``coefficients``: without a factor."""
    alpha, beta, gamma, delta, epsilon, excess, *_ = coefficients
    assert beta is not None  # there are targets
    top = partial[MAX]
    below_max = (partial[TARGET] - top.masked_fill(top == -torch.inf, 0.0)).clamp_(LOWEST_SHIFT, 0.0)
    p = below_max.exp() / partial[SUM_EXP]
    # Where p is near 1, alpha p - beta would lose what is left: both terms of this sum are small.
    of_p = alpha - beta if excess is None else excess
    of_p = of_p if delta is None else of_p + delta * below_max
    of_p = of_p if epsilon is None else of_p + epsilon * p
    gradient = p * of_p + beta * (p - 1)
    return gradient if gamma is None else gradient - gamma


def logits_gradient(logits: Tensor, target: Tensor, partial: Tensor, coefficients: Tensor) -> Tensor:
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alpha, beta, gamma = coefficients
    window = slice(0, logits.shape[1])
    for rows in tiles_of_rows(*logits.shape, itemsize=partial.element_size()):
        z = logits[rows].to(partial.dtype) - partial[MAX, rows].unsqueeze(1)
        z.exp_().mul_((alpha[rows] / partial[SUM_EXP, rows]).unsqueeze(1)).sub_(gamma[rows].unsqueeze(1))
        position, hit = _target_positions(z.t(), target[rows], window)
        z.view(-1).scatter_add_(0, position, beta[rows] * -hit.to(z.dtype))
        gradient[rows] = z
    return gradient


def log_softmax_of_sets(logits: Tensor, selection: Selection, upstream: Tensor | None = None) -> Tensor:
    owner, lengths, lowest = selection.owner, selection.end - selection.begin, torch.finfo(logits.dtype).min
    # Of a token without a finite logit this is a number, too. In fp64 1 - p suffices for a confident token.
    maxima = torch.segment_reduce(logits, "max", lengths=lengths, unsafe=True, initial=lowest)
    shifted = logits.double() - maxima[owner]
    result = shifted - selection.sums(shifted.exp()).log()[owner]
    result.masked_fill_(logits == -torch.inf, -torch.inf)  # also beside a NaN
    if upstream is not None:
        # A probability of 0 has no gradient, even if its log-probability has an upstream gradient.
        upstream = upstream.where(logits != -torch.inf, 0.0).double()
        result = upstream - result.exp() * selection.sums(upstream)[owner]
    if selection.invalid is not None:
        result.masked_fill_(selection.invalid, torch.nan)
    return result.to(logits.dtype)
