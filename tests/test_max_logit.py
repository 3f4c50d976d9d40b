"""The penalty on each token's largest logit: equal to plain torch, on one rank and on several."""

import pytest
import torch

from parallel_lce import linear_cross_entropy
from tools import everywhere

OPTIONS = [
    dict(),
    dict(reduction="sum", label_smoothing=0.1, z_loss=1e-3),
    dict(reduction="none", logit_softcap=3.0, logit_scale=0.7),
    dict(reduction="mean", temperature=torch.linspace(0.5, 2.0, 40), logits_budget=0),
]


def _plain(x, w, y, options):
    z = (x @ w.T) * options.get("logit_scale", 1.0)
    if cap := options.get("logit_softcap"):
        z = cap * torch.tanh(z / cap)
    z = z / torch.as_tensor(options.get("temperature", 1.0)).double().unsqueeze(-1)
    counted = y != -100
    losses = torch.nn.functional.cross_entropy(
        z, y, reduction="none", label_smoothing=options.get("label_smoothing", 0.0)
    ) + counted * (0.01 * z.amax(1).square() + options.get("z_loss", 0.0) * z.logsumexp(1).square())
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted.sum()}[options.get("reduction", "mean")]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.thinned
def test_beside_plain_torch(worlds, ranks, options, dtype, backend, device):
    everywhere(worlds, device, ranks, _body, options, getattr(torch, dtype))


def _body(member, options, dtype):
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (40, 52))
    y = torch.randint(0, 52, (40,), generator=generator)
    y[:8] = (x[:8] @ w.T).argmax(1)  # the target is the largest
    y[8], y[9] = -100, y[7]
    truth = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    expected = _plain(*truth, y, options)
    upstream = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64).view(expected.shape)
    expected.backward(upstream)
    rows = slice(member.rank * 52 // member.ranks, (member.rank + 1) * 52 // member.ranks)
    device, low = member.device, dtype == torch.float32
    ours = [t.to(device, dtype).requires_grad_() for t in (x, w[rows])]
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    loss = linear_cross_entropy(*ours, y.to(device), process_group=member.group, max_logit_penalty=0.01, **options)
    loss.backward(upstream.to(loss))
    found = loss, ours[0].grad, ours[1].grad
    for each, true in zip(found, (expected, truth[0].grad, truth[1].grad[rows])):
        torch.testing.assert_close(each.double().cpu(), true, atol=3e-5 if low else 1e-10, rtol=1e-4 if low else 1e-7)


def test_where_z_loss_has_no_slope_left(device):
    """The target's coefficient ``1 + 2 z_loss lse`` is 0: the penalty's gradient must not depend on it. One entry
    with logit 0 - 1: the loss is 0 + 0.5 + 1, and dz = 2 * 0.5 * lse + 2 max = -3."""
    bias = torch.full((1,), -1.0, dtype=torch.float64, device=device, requires_grad=True)
    x, w = torch.zeros(1, 1, dtype=bias.dtype, device=device), torch.ones(1, 1, dtype=bias.dtype, device=device)
    y = torch.zeros(1, dtype=torch.int64, device=device)
    loss = linear_cross_entropy(x, w, y, linear_bias=bias, z_loss=0.5, max_logit_penalty=1.0)
    loss.backward()
    assert loss.item() == 1.5 and bias.grad.item() == -3
