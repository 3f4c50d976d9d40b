"""The kernels of whole logits beside their plain torch: interpreted on the CPU, compiled with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from cases import normal
from measures import assert_no_worse, size
from parallel_lce.backends import torch_logits as plain
from parallel_lce.backends import triton as kernels

pytestmark = pytest.mark.usefixtures("kernels")

SHAPES = [(3, 5), (7, 4096), (5, 5000), (1, 1), (4, 12289)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _inputs(shape: tuple[int, int], dtype: torch.dtype, device: str):
    logits = normal(*shape, seed=sum(shape)) * 4
    if shape[0] > 2:
        logits[2] = -torch.inf  # nothing finite in the shard
        logits[1, : shape[1] // 2] = -torch.inf
    target = torch.randint(-2, shape[1] + 2, shape[:1], generator=torch.Generator().manual_seed(0))
    # A view with gaps between its rows.
    wide = torch.full((shape[0], shape[1] + 3), torch.nan, dtype=dtype, device=device)
    view = wide[:, : shape[1]].copy_(logits)
    return view, target.to(device)


def _partial(module, logits: torch.Tensor, target: torch.Tensor, shifted: bool = True) -> torch.Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    partial = logits.new_full((3 + shifted, len(logits)), torch.nan, dtype=dtype)
    module.logits_partial(logits, target, shifted, partial)
    return partial


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.thinned
def test_partials_and_gradients(shape, dtype, device):
    logits, target = _inputs(shape, dtype, device)
    partial, want = _partial(kernels, logits, target), _partial(plain, logits.double(), target)
    assert torch.equal(partial[[0, 2]].double(), want[[0, 2]])
    torch.testing.assert_close(partial[[1, 3]].double(), want[[1, 3]], rtol=1e-5, atol=0)
    assert torch.equal(_partial(kernels, logits, target, False), partial[:3])

    coefficients = torch.rand(3, shape[0], generator=torch.Generator().manual_seed(1)).to(device)
    # As merged with another shard, which has finite logits.
    partial[0].clamp_(min=-5.0)
    partial[1] += 0.5
    found = kernels.logits_gradient(logits, target, partial, coefficients)
    truth = plain.logits_gradient(logits.double(), target, partial.double(), coefficients.double())
    yardstick = plain.logits_gradient(logits, target, partial, coefficients)
    assert found.dtype == dtype and found.is_contiguous()
    assert_no_worse(found, truth, yardstick, 1.1, 1e-6 * size(truth))

    logits[0, -1] = torch.nan
    broken = _partial(kernels, logits, target)
    assert broken[:2, 0].isnan().all() and not broken[:, 1:].isnan().any()


def test_what_the_largest_logit_leaves_is_not_rounded_away(device):
    """1e-6 beside 1, of 12288 entries."""
    logits = torch.full((2, 12289), -23.0, device=device)
    logits[:, 77] = 0.0
    partial = _partial(kernels, logits, torch.full((2,), 77, device=device))
    truth = torch.tensor(12288.0).double() * torch.tensor(-23.0).double().exp()
    # Half a rounding of 1, in each of two sums.
    assert ((partial[1].double() - 1 - truth.to(device)).abs() <= 2**-24).all()


@pytest.mark.parametrize("top", [1.0, 2.0**21])
def test_the_second_largest_of_large_logits(top, device):
    logits = torch.full((1, 16), -1e9, device=device)
    logits[0, :2] = torch.tensor([top, top - 1])
    found = _partial(kernels, logits, torch.ones(1, dtype=torch.int64, device=device))
    assert found[2].item() == top - 1
