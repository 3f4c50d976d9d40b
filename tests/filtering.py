"""A problem of which a filter leaves some tiles, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from cases import DTYPES, normal
from parallel_lce import linear_cross_entropy


def problem(dtype="bf16", device="cpu", N=150, V=400, slope=2.5, noise=0.4) -> list[Tensor]:
    """Hidden states, a weight whose first rows are the likely ones, and targets: drawn from the softmax, but for some
    ignored ones, and shared and unshared ones where nothing is likely."""
    x, weight = normal(N, 16), noise * normal(V, 16, seed=1)
    x[:, 0] = 3.0
    weight[:, 0] = torch.linspace(slope, -slope, V)
    x, weight = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    p = (x.double() @ weight.double().T).softmax(1)
    target = p.multinomial(1, generator=torch.Generator().manual_seed(2)).squeeze(1)
    target[::9], target[1 :: max(17, N // 3)], target[3:4] = -100, max(0, V - 60), max(0, V - 70)
    return [x.to(device).requires_grad_(), weight.to(device).requires_grad_(), target.to(device)]


def gradients(x, weight, target, upstream=1.0, **options) -> tuple[Tensor, ...]:
    """dX and dW, and dbias if the bias needs one."""
    loss = linear_cross_entropy(x, weight, target, **options)
    bias = options.get("linear_bias")
    leaves = [x, weight] if bias is None or not bias.requires_grad else [x, weight, bias]
    return torch.autograd.grad(loss.sum() * upstream, leaves)
