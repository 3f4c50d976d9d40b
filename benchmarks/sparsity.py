"""Where a softmax is not empty: the order of the vocabulary, and the tiles that `gradient_filter` computes exactly."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_lce.backends.torch_tiles import FILTER_TILE
from parallel_lce.vocabulary import VocabularyOrder

from .exactness import Inputs, log_softmax


def mean_probabilities(inputs: Inputs) -> Tensor:
    """Of each entry `[V]` fp32, over the tokens."""
    total = torch.zeros(len(inputs.weight), device=inputs.weight.device)
    for _, log_p, _ in log_softmax(inputs, torch.float32):
        total += log_p.exp_().sum(0)
    return total / len(inputs.hidden)


def by_probability(inputs: Inputs, ranks: int = 1) -> Tensor:
    """The ids of the vocabulary `[V]`, the most probable first: nearly the order of how frequent they are in text. They
    are dealt to the ranks in turn; those of the first rank come first."""
    order = VocabularyOrder.by_frequency(mean_probabilities(inputs), ranks=ranks)
    return order.undo(torch.arange(len(inputs.weight), device=inputs.weight.device))


def reordered(inputs: Inputs, order: Tensor) -> Inputs:
    """The same problem with the vocabulary's rows in the order of these ids `[V]`."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return replace(inputs, weight=inputs.weight[order], target=place[inputs.target])


def tile_maxima(inputs: Inputs, ranks: int = 1) -> Tensor:
    """The largest probability of each tile of each rank's entries, `[ceil(N / 128), P, ceil(V / P / 128)]` fp32; 1
    where a token of the tile has its target there. If this exceeds `gradient_filter`, the tile is active; but on a GPU
    the gradient of a target that no other token has is formed beside the tiles, and need not make its tile active."""
    parts, shard = [], len(inputs.weight) // ranks
    for tokens, log_p, _ in log_softmax(inputs, torch.float32):
        p = log_p.exp_().scatter_(1, inputs.target[tokens, None], 1.0).unflatten(1, (ranks, shard))
        parts.append(F.pad(p, (0, -shard % FILTER_TILE)).unflatten(2, (-1, FILTER_TILE)).amax(3))
    of_tokens = torch.cat(parts)
    return F.pad(of_tokens, (0, 0, 0, 0, 0, -len(of_tokens) % FILTER_TILE)).unflatten(0, (-1, FILTER_TILE)).amax(1)
