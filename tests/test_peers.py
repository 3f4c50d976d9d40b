"""The same answers as torch's own losses, and under autocast."""

import pytest
import torch
import torch.nn.functional as F

import parallel_lce
from cases import normal
from tools import shrunk, small


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("options", [{}, dict(reduction="none", ignore_index=7), dict(label_smoothing=0.3)], ids=str)
@pytest.mark.thinned
def test_torchs_losses(options, dtype, budget, device):
    """In float64, where both are exact: the definitions that the float64 reference of all tests shares."""
    x, weight, bias = (normal(*shape, seed=7).to(device) for shape in ((80, 17), (63, 17), (63,)))
    leaves = [v.requires_grad_() for v in (x, weight, bias)]
    target = torch.randint(63, (80,), generator=torch.Generator().manual_seed(0))
    target[::4] = options.get("ignore_index", -100 if dtype == torch.int64 else 5)
    expected = F.cross_entropy(F.linear(*leaves), target.to(device), **options)
    # What torch's functions have and this does not may be given as None.
    given = dict(linear_bias=bias, logits_budget=budget, weight=None, options=None, **options)
    with shrunk(2048, (16, 32)):
        loss = parallel_lce.linear_cross_entropy(x, weight, target.to(dtype).to(device), **given)
        found = [loss, *torch.autograd.grad(loss.sum(), leaves)]
    for value, its in zip(found, (expected, *torch.autograd.grad(expected.sum(), leaves))):
        torch.testing.assert_close(value, its, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("budget", [None, 0])
def test_a_backward_within_autocast(budget, device):
    """fp32 operands enter in bf16, gradients come back in fp32, and sums stay in fp32."""
    t = small(device, bias=True)
    leaves = [t.x, t.weight, t.bias]
    options = dict(reduction="none", logits_budget=budget)
    with torch.autocast(device, dtype=torch.bfloat16):
        parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, linear_bias=t.bias, **options).sum().backward()
    low = [v.detach().bfloat16().requires_grad_() for v in leaves]
    parallel_lce.linear_cross_entropy(*low[:2], t.target, linear_bias=low[2], **options).sum().backward()
    for leaf, other in zip(leaves, low):
        assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, other.grad.float())
