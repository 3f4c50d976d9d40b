"""The same answers as torch's own losses, and under autocast."""

import pytest
import torch
import torch.nn.functional as F

import parallel_lce
from cases import normal
from tools import shrunk


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("options", [{}, dict(reduction="none", ignore_index=7), dict(label_smoothing=0.3)], ids=str)
@pytest.mark.thinned
def test_losses_and_gradients_are_torchs(options, dtype, budget, device):
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


def _statistics(x, weight, target, dtype):
    """Log-probabilities and entropies of plain torch: logits in the dtype, a softmax at least in fp32."""
    log_p = (x.to(dtype) @ weight.to(dtype).T).to(torch.promote_types(dtype, torch.float32)).log_softmax(1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("deviation", [5.0, *(pytest.param(d, marks=pytest.mark.slow) for d in (0.01, 20.0))])
def test_log_probabilities_and_entropies_err_no_more_than_an_fp32_heads(deviation, device):
    """And gradients no more than those of bf16 logits, of sure tokens too. Normal logits of this standard deviation;
    targets drawn from the softmax, as from a policy."""
    generator = torch.Generator().manual_seed(0)
    x, weight = normal(200, 256, seed=1).bfloat16(), (normal(3000, 256, seed=2) * deviation / 16).bfloat16()
    target = (x.float() @ weight.float().T).softmax(1).multinomial(1, generator=generator)[:, 0]
    x, weight, target = (tensor.to(device) for tensor in (x, weight, target))
    x.requires_grad_()
    # A call for each: a second backward would not use what was saved.
    calls = [parallel_lce.token_statistics(x, weight, target, entropy=True) for _ in range(2)]
    ways = [(calls[0].target_log_prob, calls[1].entropy)]
    ways += [_statistics(x, weight, target, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32)]
    # Roundings of a logit are relative to the sum of |x_k w_k|; tensor cores truncate where fp32 rounds.
    sums = (x.detach().float() * weight[target].float()).abs().sum(1).max().item()
    slack = 4 * torch.finfo(torch.float32).eps * max(1.0, sums)
    for ours, true, rounded, head in zip(*ways):
        off, of_rounded, of_head = ((value - true).abs().max().item() for value in (ours, rounded, head))
        assert off <= 2 * of_head + slack and off < 1e-3
        assert deviation < 1 or 10 * off < of_rounded
        ours, true, rounded = (torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v in (ours, true, rounded))
        surest = ways[1][0].argsort()  # neighbours in this order have gradients of like sizes
        for tokens in surest.chunk(5):
            errors = [(dx[tokens] - true[tokens]).norm() / true[tokens].norm() for dx in (ours, rounded)]
            assert errors[0] <= 2 * errors[1] + torch.finfo(torch.bfloat16).eps / 2
