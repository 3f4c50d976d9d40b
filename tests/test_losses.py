"""Losses from partials, their coefficients, and partials and gradients of whole logits: the kernels and plain torch
beside float64. The kernels are interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import normal
from measures import assert_no_worse, size
from parallel_lce.backends import torch_backend, triton
from parallel_lce.core.options import Options

pytestmark = pytest.mark.usefixtures("kernels")


def problem(rows: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, a row of which is -inf, and targets, some of which lie outside."""
    logits = normal(rows, entries, seed=rows + entries) * 4
    if rows > 2:
        logits[2] = -torch.inf
        logits[1, : entries // 2] = -torch.inf
    return logits, torch.randint(-2, entries + 2, (rows,), generator=torch.Generator().manual_seed(0))


def partial_of(backend, logits: torch.Tensor, target: torch.Tensor, shifted: bool = True) -> torch.Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    partial = logits.new_full((3 + shifted, len(logits)), torch.nan, dtype=dtype)
    backend.logits_partial(logits, target, shifted, partial)
    return partial


@pytest.mark.parametrize("outside_is_nan", [True, False])
@pytest.mark.parametrize("ignore_index", [None, -100, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-3), (0.2, 1e-2)])
def test_losses(smoothing, z_loss, weighted, ignore_index, outside_is_nan, device):
    R, V = 300, 40
    z, target = problem(R, V)
    z[3, 5] = torch.nan
    target[4::10], target[5::10], target[6] = -100, V, 2**62
    exact = partial_of(torch_backend, z, target)
    weight = normal(R, seed=1) if weighted else None
    terms = dict(ignore_index=ignore_index, label_smoothing=smoothing, z_loss=z_loss, outside_is_nan=outside_is_nan)
    options, entries = Options("", **terms), torch.tensor(float(V))
    truth = torch_backend.token_losses(exact, entries.double(), target, weight, options)
    put = lambda t: None if t is None else t.float().to(device)  # noqa: E731
    for backend in (triton, torch_backend):
        found = backend.token_losses(put(exact), put(entries), target.to(device), put(weight), options)
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
    target = torch.randint(-100, 9, (rows,), generator=torch.Generator().manual_seed(0))
    if ignore_index == "all":
        target[:], ignore_index = 3, 3
    losses, weight = normal(2, rows)
    weight = weight.abs() if weighted else None
    weights = torch.ones(rows).double() if weight is None else weight
    counted = torch.ones(rows, dtype=torch.bool) if ignore_index is None else target != ignore_index
    losses[~counted] = 0.0
    divisor = weights[counted].sum()
    put = lambda t: None if t is None else t.float().to(device)  # noqa: E731
    for backend in (triton, torch_backend):
        found, its = backend.mean_loss(put(losses), target.to(device), put(weight), ignore_index)
        assert found.shape == its.shape == () and found.dtype == torch.float32
        if counted.any():
            torch.testing.assert_close(found.double().cpu(), losses.sum() / divisor, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(its.double().cpu(), divisor, rtol=1e-6, atol=0)
        else:
            assert found == 0 and its > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7, 4096), (5, 5000), (1, 1), (4, 12289)], ids=str)
@pytest.mark.thinned
def test_partials_and_gradients_of_whole_logits(shape, dtype, device):
    exact, target = problem(*shape)
    # A view with gaps between its rows.
    wide = torch.full((shape[0], shape[1] + 3), torch.nan, dtype=dtype, device=device)
    logits, target = wide[:, : shape[1]].copy_(exact), target.to(device)
    partial, want = partial_of(triton, logits, target), partial_of(torch_backend, logits.double(), target)
    assert torch.equal(partial[[0, 2]].double(), want[[0, 2]])
    torch.testing.assert_close(partial[[1, 3]].double(), want[[1, 3]], rtol=1e-5, atol=0)
    assert torch.equal(partial_of(triton, logits, target, False), partial[:3])

    coefficients = torch.rand(3, shape[0], generator=torch.Generator().manual_seed(1)).to(device)
    # As merged with another shard, which has finite logits.
    partial[0].clamp_(min=-5.0)
    partial[1] += 0.5
    found = triton.logits_gradient(logits, target, partial, coefficients)
    truth = torch_backend.logits_gradient(logits.double(), target, partial.double(), coefficients.double())
    yardstick = torch_backend.logits_gradient(logits, target, partial, coefficients)
    assert found.dtype == dtype and found.is_contiguous()
    assert_no_worse(found, truth, yardstick, 1.1, 1e-6 * size(truth))

    logits[0, -1] = torch.nan
    broken = partial_of(triton, logits, target)
    assert broken[:2, 0].isnan().all() and not broken[:, 1:].isnan().any()


def test_what_the_largest_logit_leaves_is_not_rounded_away(device):
    """1e-6 beside 1, of 12288 entries."""
    logits = torch.full((2, 12289), -23.0, device=device)
    logits[:, 77] = 0.0
    partial = partial_of(triton, logits, torch.full((2,), 77, device=device))
    truth = 12288 * torch.tensor(-23.0).double().exp()
    # Half a rounding of 1, in each of two sums.
    assert ((partial[1].double() - 1 - truth.to(device)).abs() <= 2**-24).all()
