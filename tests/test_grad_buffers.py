"""Where dW is summed and delivered: windows of any cut, a ``main_grad``, and rows without a buffer of their own."""

from __future__ import annotations

import pytest
import torch

from parallel_lce.core.grad_buffers import GradBuffer, MainGrad

CUTS = [0, 4, 10], [0, 7, 10], [0, 10]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("main_dtype", [None, torch.bfloat16, torch.float32])
def test_every_block_may_cut_the_rows_in_its_own_way(main_dtype, dtype, whole, device):
    """Each of its visits adds 1 to 10 of 12 rows. A main_grad is added to, whatever the caller promises."""
    weight = torch.empty(12, 3, dtype=dtype, device=device)
    for visits in (0, 1, 3):
        main = None if main_dtype is None else torch.full((12, 3), 5.0, dtype=main_dtype, device=device)
        main_grad = None if main is None else MainGrad(main, lambda: None)
        gradient = GradBuffer(weight, 10, visits, main_grad=main_grad)
        for visit in range(visits):
            cuts = CUTS[-1 if main_grad else visit]
            for start, stop in zip(cuts, cuts[1:]):
                rows, overwrite = gradient.open(start, stop, whole)
                if dtype == torch.bfloat16:  # one product writes a new gradient itself; sums are in fp32
                    assert (rows.dtype == dtype) == (whole and visits == 1 and main is None)
                rows.copy_(torch.ones_like(rows) if overwrite else rows + 1)
                gradient.close(start, stop, rows)
        found, before = (gradient.deliver(), 0) if main is None else (main, 5)
        assert main is None or gradient.deliver() is None
        assert found.dtype == (main_dtype or dtype)
        assert (found[:10] == before + visits).all() and (found[10:] == before).all()
