"""Where a softmax is not empty: the order of the vocabulary, and the tiles that `gradient_filter` computes exactly."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.eager_filter import TILE
from .exactness import Inputs, log_softmax


def mean_probabilities(inputs: Inputs) -> Tensor:
    """Of each entry `[V]` fp32, over the tokens."""
    total = torch.zeros(len(inputs.weight), device=inputs.weight.device)
    for _, log_p, _ in log_softmax(inputs, torch.float32):
        total += log_p.exp_().sum(0)
    return total / len(inputs.hidden)


def by_probability(inputs: Inputs) -> Tensor:
    """The ids of the vocabulary `[V]`, the most probable first: nearly the order of how frequent they are in text."""
    return mean_probabilities(inputs).argsort(descending=True, stable=True)


def reordered(inputs: Inputs, order: Tensor) -> Inputs:
    """The same problem with the vocabulary's rows in the order of these ids `[V]`."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return replace(inputs, weight=inputs.weight[order], target=place[inputs.target])


def tile_maxima(inputs: Inputs) -> Tensor:
    """The largest probability of each tile, `[ceil(N / 128), ceil(V / 128)]` fp32; 1 where a token of the tile has its
    target there. A tile is active if this exceeds `gradient_filter`."""
    parts = []
    for tokens, log_p, _ in log_softmax(inputs, torch.float32):
        p = F.pad(log_p.exp_(), (0, -log_p.shape[1] % TILE))
        maxima = p.unflatten(1, (-1, TILE)).amax(2)
        parts.append(maxima.scatter_(1, inputs.target[tokens, None] // TILE, 1.0))
    of_tokens = torch.cat(parts)
    return F.pad(of_tokens, (0, 0, 0, -len(of_tokens) % TILE)).unflatten(0, (-1, TILE)).amax(1)
