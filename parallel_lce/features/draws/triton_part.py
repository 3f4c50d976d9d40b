"""Entries at given draw points of the running sum of exponentials, by the kernels of
:mod:`parallel_lce.kernels.draws`."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.interface import Projection
from parallel_lce.backends.triton_operands import product_of
from parallel_lce.core.partials import MAX
from parallel_lce.kernels.draws import DrawEpilogue, find_windows, tiles_of_draws
from parallel_lce.kernels.partials import WindowPartials


def entries_at(
    projection: Projection,
    x: Tensor,
    windows: list[WindowPartials],
    partial: Tensor,
    draw_point: Tensor,
    owned: Tensor | None,
) -> Tensor:
    """As in ``torch_part``. Projects again only the windows with a draw point."""
    rows, real = x.shape[0], projection.real_rows
    ids = draw_point.new_zeros(rows, dtype=torch.int64)
    if rows == 0 or real == 0:
        return ids
    window, within = find_windows(windows, partial[MAX], draw_point, owned)
    window, order = window.sort(stable=True)
    product = product_of(projection.of_rows(order), x.index_select(0, order), 0, real)
    tile_list = tiles_of_draws(window, product.row_blocks, product.tile.rows, product.windows)
    product.launch(None, DrawEpilogue(window, order, within, ids, projection.start), tile_list)
    return ids
