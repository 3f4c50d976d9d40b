"""Samplers for :func:`parallel_lce.sampled_linear_cross_entropy`.

Each gives ids and the logarithms of their expected counts. Ids are drawn on the CPU from a seed, so all ranks draw the
same ones, whatever their devices, and no collective is needed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallel_lce.call.checks import int64_ids
from parallel_lce.core.options import is_count, is_number, shortened


class LogUniformSampler:
    """Ids with probability log((k + 2) / (k + 1)) / log(V + 1), Zipf's law for ids in the order of falling frequency.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        if not (is_count(vocab_size) and vocab_size >= 1):
            raise ValueError(f"vocab_size must be an integer of at least 1, got {shortened(vocab_size)}")
        self.vocab_size = vocab_size

    def sample(self, count: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
        """``[count]`` int64 ids, drawn with replacement."""
        drawn = _uniform(count, seed) * math.log(self.vocab_size + 1)
        return (drawn.exp() - 1).long().clamp(0, self.vocab_size - 1).to(device)

    def log_expected_count(self, ids: Tensor, count: int) -> Tensor:
        """Logarithm of the expected number of each of the ``ids``, of any integer dtype, among ``count`` samples, fp32,
        of the shape of ``ids``. Ids outside the vocabulary get the value of the nearest id inside. Raises
        ``ValueError`` for ids of another dtype, and for a negative count."""
        _check_count(count)
        ids = int64_ids("ids", ids).clamp(0, self.vocab_size - 1).double()
        share = torch.log1p(1 / (ids + 1)) / math.log(self.vocab_size + 1)
        return (share.log() + math.log(max(count, 1))).float()


class UnigramSampler:
    """Ids with probability proportional to their counts to a power. A draw takes constant time, by an alias table
    (Walker 1977; Vose 1991).

    Args:
        counts: ``[V]`` non-negative numbers, such as the frequencies of a corpus; at least one must be positive.
        power: 0.75 as in word2vec, 1 for the frequencies themselves.

    Raises:
        ValueError: counts that are not one-dimensional, negative, not finite, or all 0; a power that is no finite
        number, or makes the counts so.
    """

    def __init__(self, counts: Tensor, power: float = 1.0) -> None:
        counts = torch.as_tensor(counts, device="cpu").detach().double()
        if counts.dim() != 1 or not (counts.isfinite().all() and (counts >= 0).all() and counts.sum() > 0):
            raise ValueError(f"counts must be [V], finite and >= 0, and not all 0, got {list(counts.shape)}")
        if not is_number(power):
            raise ValueError(f"power must be a finite Python number, got {shortened(power)}")
        weights = counts.pow(power).masked_fill(counts == 0, 0.0)
        total = weights.sum()
        if not (total.isfinite() and total > 0):
            raise ValueError(f"power must keep the counts finite and not all 0, got {shortened(power)}")
        self.probabilities = weights / total
        self._keep, self._alias = _alias_table(self.probabilities)

    def sample(self, count: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
        """``[count]`` int64 ids, drawn with replacement."""
        _check_count(count)
        place, rest = _uniform(2 * count, seed).view(2, count)
        place = (place * len(self._keep)).long()
        return torch.where(rest < self._keep[place], place, self._alias[place]).to(device)

    def log_expected_count(self, ids: Tensor, count: int) -> Tensor:
        """As :meth:`LogUniformSampler.log_expected_count`; -inf for an id that is never drawn."""
        _check_count(count)
        inside = int64_ids("ids", ids).clamp(0, len(self.probabilities) - 1)
        share = self.probabilities.to(ids.device)[inside]
        return (share.log() + math.log(max(count, 1))).float()


def in_batch(target: Tensor, log_probability: Tensor | None = None, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """The batch's own targets as shared samples.

    Args:
        target: ids ``[...]`` of any integer dtype, the same on all ranks. Ignored ones are no samples.
        log_probability: ``[V]``, the logarithm of each entry's share of the targets. None: the share in this batch,
            which needs no table and is biased.

    Returns:
        ``sampled [N]`` int64, -1 for an ignored target; and ``log_expected_count [N]`` fp32, also for the targets.
    """
    ids = int64_ids("target", target).reshape(-1)
    counted = ids != ignore_index
    sampled = ids.masked_fill(~counted, -1)
    if log_probability is not None:
        share = log_probability.to(ids.device)[sampled.clamp(0, len(log_probability) - 1)].float()
        return sampled, share + counted.sum().clamp(min=1).log()
    order = sampled.sort().values
    same = torch.searchsorted(order, sampled, right=True) - torch.searchsorted(order, sampled)
    return sampled, same.float().log()


def _check_count(count: int) -> None:
    if not (is_number(count) and count >= 0):
        raise ValueError(f"count must be a number >= 0, got {shortened(count)}")


def _uniform(count: int, seed: int) -> Tensor:
    """fp64 numbers in [0, 1)."""
    _check_count(count)
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")


def _alias_table(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """For each of V places the probability that it keeps its own id, and the id that it gives otherwise."""
    scaled = (probabilities * len(probabilities)).tolist()
    keep, alias = [1.0] * len(scaled), list(range(len(scaled)))
    small = [place for place, share in enumerate(scaled) if share < 1]
    large = [place for place, share in enumerate(scaled) if share >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        keep[low], alias[low] = scaled[low], high
        scaled[high] -= 1 - scaled[low]
        if scaled[high] < 1:
            small.append(large.pop())
    # Rounding may leave places without an alias. Each keeps its own id, or without a probability gives the likeliest.
    likeliest = int(probabilities.argmax())
    for place in small:
        if probabilities[place] == 0:
            keep[place], alias[place] = 0.0, likeliest
    return torch.tensor(keep, dtype=torch.float64, device="cpu"), torch.tensor(alias, device="cpu")
