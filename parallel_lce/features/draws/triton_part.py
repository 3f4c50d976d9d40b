"""Entries at given places of the running sum of exponentials, by the kernels of :mod:`parallel_lce.kernels.draws`."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_lce.backends.interface import Projection
from parallel_lce.backends.triton_operands import product_of
from parallel_lce.core.partials import MAX
from parallel_lce.kernels.draws import DrawEpilogue, find_windows, list_tiles
from parallel_lce.kernels.partials import WindowPartials


def entries_at(
    projection: Projection,
    x: Tensor,
    windows: list[WindowPartials],
    partial: Tensor,
    place: Tensor,
    owned: Tensor | None,
) -> Tensor:
    """As in ``torch_part``. Projects again only the windows with a place."""
    rows, real = x.shape[0], projection.real_rows
    ids = place.new_zeros(rows, dtype=torch.int64)
    if rows == 0 or real == 0:
        return ids
    window, within = find_windows(windows, partial[MAX], place, owned)
    window, order = window.sort(stable=True)
    product = product_of(projection.of_rows(order), x.index_select(0, order), 0, real)
    listed = list_tiles(window, product.row_blocks, product.tile.rows, product.windows)
    product.launch(None, DrawEpilogue(window, order, within, ids, projection.start), listed)
    return ids
