"""The merge of windows' partials, beside float64: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import normal
from parallel_lce.core.partials import Columns, integer_view
from parallel_lce.kernels.arithmetic import REACH
from parallel_lce.kernels.partials import PartialColumns, merge_windows
from parallel_lce.kernels.projection import Product
from windows import ALL, merged_truth, reference_of, truth, window_partials, windows

pytestmark = pytest.mark.usefixtures("kernels")


def merge(maxima, sums, shift, V, width, start=0, **requested):
    columns = Columns(**(requested or ALL))
    merged = maxima.new_full((columns.count, maxima.shape[1]), torch.nan)
    found = dict(zip(columns.requested, sums[1:]))
    windows = PartialColumns(maxima, sums[0], None, *(found.get(name) for name in PartialColumns._fields[3:]))
    return merged, merge_windows(windows, merged, shift, columns, window=width, entries=V, start=start)


@pytest.mark.parametrize("kind", ["own maxima", "on_shift", "some windows"])
@pytest.mark.parametrize(("R", "K", "width"), [(20, 1030, 8), (1, 8, 8), (1, 5, 8), (33, 50, 16)])
def test_merged_windows(R, K, width, kind, device):
    """Up to 129 windows, more than a tile of the merge."""
    z = normal(R, K).to(device) * 3
    shift = None if kind == "own maxima" else z.amax(1).float() - 2
    if kind == "some windows":
        z[::2, :width] -= 2 * REACH
        z[::2, -1] = 8.0  # a maximum that stays
        shift = z.amax(1).float()
    maxima, sums, _ = truth(z, width, shift)
    maxima = maxima.float()
    ids = torch.stack([p.argmax(1) + i * width for i, p in enumerate(windows(z, width))]).int()
    sums = torch.cat([sums.float(), ids.view(torch.float32)[None]])
    merged, on_shift = merge(maxima, sums, shift, K, width, start=11)
    true = merged_truth(z)
    assert merged[2].isnan().all(), "the target's column is not the merge's"
    columns = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(merged[columns].double(), true, rtol=2e-6, atol=1e-3)
    torch.testing.assert_close(merged[1].double(), true[1], rtol=2e-6, atol=0)
    assert torch.equal(integer_view(merged[7]).long(), z.argmax(1) + 11)
    if shift is None:
        assert on_shift is None
    else:
        expected = torch.ones(R, dtype=torch.uint8, device=device)
        if kind == "some windows" and K > width:
            expected[::2] = 0
        assert on_shift.dtype == torch.uint8 and torch.equal(on_shift, expected)


def test_merged_windows_of_minus_infinity_and_nan(device):
    z = normal(6, 40).to(device)
    z[0] = -torch.inf
    z[1, :24] = -torch.inf
    z[2, 30] = torch.nan
    z[3, 30] = torch.inf
    z[4] = -torch.inf
    z[4, 9] = torch.nan
    for shift in (None, torch.full((6,), 1.5, device=device)):
        maxima = torch.stack([p.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1) for p in windows(z, 8)])
        sums = torch.stack([(p - reference_of(m, shift)[:, None]).exp().sum(1) for p, m in zip(windows(z, 8), maxima)])
        ids = torch.arange(0, 40, 8, device=device)[:, None].expand(5, 6).int().contiguous()
        both = torch.stack([sums.float(), ids.view(torch.float32)])
        merged, on_shift = merge(maxima.float(), both, shift, 40, 8, argmax=True)
        top, sum_exp, ids = merged[0], merged[1], integer_view(merged[3])
        assert top[0] == -torch.inf and sum_exp[0] == 0
        true = merged_truth(z)
        torch.testing.assert_close(merged[:2, [1, 5]].double(), true[:2, [1, 5]], rtol=2e-6, atol=0)
        assert top[[2, 4]].isnan().all() and sum_exp[[2, 4]].isnan().all()
        assert (ids[[2, 4]] == 2**31 - 1).all()
        assert top[3] == torch.inf and ids[3] == 24
        if shift is not None:
            assert on_shift.tolist() == [1, 1, 1, 0, 1, 1]


def test_ties_go_to_the_lowest(device):
    """Equal largest logits within a window and in several; products of small integers are exact."""
    x = torch.ones(3, 8, dtype=torch.float16, device=device)
    weight = torch.zeros(700, 8, dtype=torch.float16, device=device)
    weight[[40, 300, 301, 699]] = 1.0
    x[1] = -1.0  # zeros are its largest
    operands = Product(x, weight)
    maxima, sums = window_partials(operands, argmax=True)
    merged, _ = merge(maxima, sums, None, 700, operands.tile.entries, start=5, argmax=True)
    assert integer_view(merged[3]).tolist() == [45, 5, 45]
    assert merged[0].tolist() == [8.0, 0.0, 8.0]


@pytest.mark.parametrize("near", [True, False])
def test_nothing_is_lost_at_large_logits(near, device):
    """Logits around 300 that are exact, and whose distances are small: a reference is rounded in base
    2 there, by far more than the sums are, and the merge takes that back."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randint(-4, 5, (20, 8), generator=generator) / 4).to(device)
    weight = (torch.randint(-4, 5, (300, 8), generator=generator) / 4).to(device)
    for dtype in (torch.float16, torch.bfloat16):
        bias = torch.full((300,), 304.0, dtype=dtype, device=device)
        operands = Product(x.to(dtype), weight.to(dtype), bias)
        z = x.double() @ weight.double().t() + 304
        shift = (z.amax(1) - (1 / 3 if near else 100)).float()
        maxima, sums = window_partials(operands, weighted=True, softmax_shift=shift)
        merged, _ = merge(maxima, sums, shift, 300, operands.tile.entries, weighted=True)
        true = merged_truth(z)
        assert torch.equal(merged[0].double(), true[0])
        torch.testing.assert_close(merged[1].double(), true[1], rtol=1e-6, atol=0)
        torch.testing.assert_close(merged[3].double(), true[4], rtol=2e-6, atol=0)
