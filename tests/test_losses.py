"""Losses from partials, and the coefficients of their gradient: the kernel and plain torch beside float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import normal
from parallel_lce.backends import loss
from parallel_lce.backends.loss import mean_loss as plain_mean
from parallel_lce.backends.loss import token_losses as plain
from parallel_lce.core.options import Options
from parallel_lce.kernels.losses import mean_loss as fused_mean
from parallel_lce.kernels.losses import token_losses as fused

pytestmark = pytest.mark.usefixtures("kernels")

R, V = 300, 40


@pytest.mark.parametrize("outside_is_nan", [True, False])
@pytest.mark.parametrize("ignore_index", [None, -100, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-3), (0.2, 1e-2)])
def test_losses(smoothing, z_loss, weighted, ignore_index, outside_is_nan, device):
    z = normal(R, V) * 4
    z[1], z[2, 5] = -torch.inf, torch.nan
    target = torch.randint(V, (R,), generator=torch.Generator().manual_seed(0))
    target[4::10], target[5::10], target[6] = -100, V, 2**62
    logits = z.gather(1, target.where((target >= 0) & (target < V), 0)[:, None]).squeeze(1)
    logits[(target < 0) | (target >= V)] = 0.0
    top = z.amax(1)
    shifted = z - top.masked_fill(top == -torch.inf, 0.0)[:, None]
    exact = torch.stack([top, shifted.exp().sum(1), logits, shifted.sum(1)])
    weight = normal(R, seed=1) if weighted else None
    options = Options(
        "", ignore_index=ignore_index, label_smoothing=smoothing, z_loss=z_loss, outside_is_nan=outside_is_nan
    )
    truth = plain(exact, torch.tensor(float(V), dtype=torch.float64), target, weight, options)
    put = lambda t: None if t is None else t.float().to(device)  # noqa: E731
    arguments = put(exact), put(torch.tensor(float(V))), target.to(device), put(weight)
    for found in (fused(*arguments, options), plain(*arguments, options)):
        for got, expected in zip(found, truth, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got.double().cpu(), expected, rtol=2e-6, atol=1e-5, equal_nan=True)
    if ignore_index == -100:
        assert (truth[0][4::10] == 0).all() and (truth[1][4::10] == 0).all()
    assert truth[0][5::10].isnan().all() == outside_is_nan


@pytest.mark.parametrize("ignore_index", [None, 3, "all"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [1, 5000])
def test_mean(rows, weighted, ignore_index, device):
    target = torch.randint(V, (rows,), generator=torch.Generator().manual_seed(0))
    if ignore_index == "all":
        target[:], ignore_index = 3, 3
    losses, weight = normal(2, rows)
    losses[target == ignore_index] = 0.0
    weight = weight.abs() if weighted else None
    truth = plain_mean(losses, target, weight, ignore_index)
    assert truth[1] == torch.inf or truth[1] > 0
    put = lambda t: None if t is None else t.float().to(device)  # noqa: E731
    for mean in (fused_mean, plain_mean):
        found, divisor = mean(put(losses), target.to(device), put(weight), ignore_index)
        assert found.shape == divisor.shape == () and found.dtype == torch.float32
        torch.testing.assert_close(found.double().cpu(), truth[0], rtol=1e-5, atol=1e-7)
        if truth[0] != 0:
            torch.testing.assert_close(divisor.double().cpu(), truth[1], rtol=1e-6, atol=0)
        if ignore_index is not None and (target == ignore_index).all():
            assert found == 0


def test_without_an_ignored_id_every_token_counts():
    target = torch.tensor([-100, 0, 1])
    assert loss.sum_of_weights(target, None, None, torch.float32) == 3 and loss.counted(target, None).all()
