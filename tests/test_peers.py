"""The same answers as torch's own losses, and under autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel_lce
from cases import normal
from tools import shrunk, small

# Shape of the tokens, target's dtype, and options of torch's functions.
CALLS = {
    "one token": ((), torch.int64, dict(reduction="none")),
    "one token, summed": ((), torch.int64, dict(reduction="sum", label_smoothing=0.2)),
    "many": ((80,), torch.int64, dict()),
    "another ignored id": ((80,), torch.int64, dict(reduction="none", ignore_index=7, label_smoothing=0.1)),
    "two dimensions": ((4, 9), torch.int32, dict(reduction="none")),
    "unsigned": ((4, 9), torch.uint8, dict()),
    "three dimensions": ((3, 2, 5), torch.int64, dict(reduction="none", label_smoothing=1.0)),
    "short": ((3, 2, 5), torch.int16, dict(label_smoothing=0.3)),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.thinned
def test_torchs_losses(name, budget, biased, device):
    """In float64, where both are exact; test_functional.py has errors in other dtypes."""
    shape, dtype, options = CALLS[name]
    V, D = 63, 17
    x, weight, bias = (v.to(device).requires_grad_() for v in (normal(*shape, D), normal(V, D, seed=1), normal(V)))
    bias = bias if biased else None
    target = torch.randint(V, shape, generator=torch.Generator().manual_seed(0))
    if shape and dtype != torch.uint8:
        target[..., ::4] = options.get("ignore_index", -100)
    target = target.to(dtype).to(device)

    rows, ids = x.flatten(0, -2) if x.dim() > 2 else x, target.long().flatten() if shape else target.long()
    expected = F.cross_entropy(F.linear(rows, weight, bias), ids, **options)
    expected = expected.view(shape) if options.get("reduction") == "none" else expected
    leaves = [v for v in (x, weight, bias) if v is not None]
    upstream = normal(*expected.shape, seed=3).to(device)
    # What torch's functions have and this does not may be given as None.
    given = dict(linear_bias=bias, logits_budget=budget, weight=None, options=None, **options)
    with shrunk(2048, (16, 32)):
        loss = parallel_lce.linear_cross_entropy(x, weight, target, **given)
        found = [loss, *torch.autograd.grad(loss, leaves, upstream)]
    for value, its in zip(found, (expected, *torch.autograd.grad(expected, leaves, upstream))):
        torch.testing.assert_close(value, its, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(logits_budget=0), dict(reduction="none", logits_budget=0)], ids=str)
def test_autocast_as_linear_does(options, inside, device):
    """fp32 operands enter in bf16, and gradients come back in fp32; also if ``backward`` runs ``inside`` of it."""
    t = small(device, bias=True)
    leaves = [t.x, t.weight, t.bias]
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = parallel_lce.linear_cross_entropy(t.x, t.weight, t.target, linear_bias=t.bias, **options).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    low = [v.detach().bfloat16().requires_grad_() for v in leaves]
    expected = parallel_lce.linear_cross_entropy(*low[:2], t.target, linear_bias=low[2], **options).sum()
    expected.backward()
    assert torch.equal(loss, expected)
    for leaf, other in zip(leaves, low):
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad, other.grad.float())
