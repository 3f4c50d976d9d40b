"""The kernels of whole logits beside their plain torch: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import normal
from measures import assert_no_worse, size
from parallel_lce.backends import dense_logits as plain
from parallel_lce.kernels import dense_logits as kernels

pytestmark = pytest.mark.usefixtures("kernels")

SHAPES = [(3, 5), (7, 4096), (5, 5000), (1, 1), (4, 12289)]


def _inputs(shape: tuple[int, int], dtype: torch.dtype, device: str):
    logits = normal(*shape, seed=sum(shape)) * 4
    if shape[0] > 2:
        logits[2] = -torch.inf  # nothing finite in the shard
        logits[1, : shape[1] // 2] = -torch.inf
    start = 10
    target = start + torch.randint(-2, shape[1] + 2, shape[:1], generator=torch.Generator().manual_seed(0))
    # A view with gaps between its rows.
    wide = torch.full((shape[0], shape[1] + 3), torch.nan, dtype=dtype, device=device)
    view = wide[:, : shape[1]].copy_(logits)
    return view, target.to(device), start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_partial(shape, dtype, device):
    logits, target, start = _inputs(shape, dtype, device)
    partial, shifted = kernels.logits_partial(logits, target, start, True)
    want, want_shifted = plain.logits_partial(logits.double(), target, start, True)
    assert torch.equal(partial[0].double(), want[0])
    assert torch.equal(partial[2].double(), want[2])
    torch.testing.assert_close(partial[1].double(), want[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(shifted.double(), want_shifted, rtol=1e-5, atol=0)
    alone, nothing = kernels.logits_partial(logits, target, start, False)
    assert torch.equal(alone, partial) and nothing is None


def test_logits_partial_lets_nan_through(device):
    logits, target, start = _inputs((3, 5000), torch.float32, device)
    logits[0, 4500] = torch.nan
    partial, _ = kernels.logits_partial(logits, target, start, False)
    assert partial[1, 0].isnan() and not partial[1, 1].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_gradient(shape, dtype, device):
    logits, target, start = _inputs(shape, dtype, device)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.rand(shape[0], generator=generator).to(device) for _ in range(3)]
    maximum = logits.float().amax(1).masked_fill(logits.float().amax(1) == -torch.inf, 0.0)
    found = kernels.logits_gradient(logits, target, start, maximum, *rows)
    doubles = [t.double() for t in (maximum, *rows)]
    truth = plain.logits_gradient(logits.double(), target, start, *doubles)
    yardstick = plain.logits_gradient(logits, target, start, maximum, *rows)
    assert found.dtype == dtype
    assert_no_worse(found, truth, yardstick, 1.1, 1e-6 * size(truth))
