"""Where dW is summed and delivered: windows of any cut, a ``main_grad``, and rows without a buffer of their own."""

from __future__ import annotations

import pytest
import torch

from parallel_lce.core.grad_buffers import GradBuffer, MainGrad


def _visited(gradient: GradBuffer, visits: int, cuts: list[list[int]], whole: bool) -> torch.Tensor:
    """Adds 1 to each of 10 rows per visit, in windows that differ from visit to visit."""
    for visit in range(visits):
        bounds = cuts[visit % len(cuts)]
        for start, stop in zip(bounds, bounds[1:]):
            rows, overwrite = gradient.open(start, stop, whole)
            rows.copy_(torch.ones_like(rows) if overwrite else rows + 1)
            gradient.close(start, stop, rows)
    return gradient.deliver()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("main_dtype", [None, torch.bfloat16, torch.float32])
def test_every_block_may_cut_the_rows_in_its_own_way(main_dtype, dtype, whole, device):
    """A main_grad is added to, whatever the caller promises."""
    weight = torch.empty(12, 3, dtype=dtype, device=device)
    for visits in (0, 1, 3):
        if main_dtype is None:
            dw = _visited(GradBuffer(weight, 10, visits), visits, [[0, 4, 10], [0, 7, 10], [0, 10]], whole)
            assert dw.dtype == dtype and (dw[10:] == 0).all()
            assert (dw[:10] == visits).all()
        elif visits:
            main = torch.full((12, 3), 5.0, dtype=main_dtype, device=device)
            gradient = GradBuffer(weight, 10, visits, main_grad=MainGrad(main, lambda: None))
            assert _visited(gradient, visits, [[0, 10]], whole) is None
            assert (main[:10] == 5 + visits).all() and (main[10:] == 5).all()


def test_rows_of_one_product_are_handed_out_themselves(device):
    """No fp32 buffer between the product and a new bf16 gradient of one visit."""
    weight = torch.empty(10, 3, dtype=torch.bfloat16, device=device)
    gradient = GradBuffer(weight, 10, 1)
    rows, overwrite = gradient.open(2, 6, whole=True)
    assert overwrite and rows.dtype == torch.bfloat16
    rows.fill_(7)
    gradient.close(2, 6, rows)
    dw = gradient.deliver()
    assert rows.data_ptr() == dw[2:6].data_ptr() and (dw[2:6] == 7).all()
    buffered, overwrite = GradBuffer(weight, 10, 1).open(2, 6)
    assert overwrite and buffered.dtype == torch.float32
    summed, overwrite = GradBuffer(weight, 10, 2).open(2, 6, whole=True)
    assert overwrite and summed.dtype == torch.float32, "several visits are summed in fp32"
