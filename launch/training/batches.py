"""Batches from a token stream. They depend on the seed and the step, but not on the number of ranks."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from training.config import TrainConfig
from training.text import Text


@dataclass
class Batch:
    """One micro batch: `b` samples of `s` tokens. Every tensor-parallel rank holds all of it."""

    tokens: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64, the next tokens
    loss_mask: torch.Tensor  # [b, s] float32, 0 where the label is the first token of another document
    position_ids: torch.Tensor  # [b, s] int64

    def sum_loss(self, per_token: torch.Tensor) -> torch.Tensor:
        """The sum of `per_token` [b, s] over the tokens that count, as a scalar."""
        return (per_token * self.loss_mask).sum()


class Windows:
    """Random windows of a text. (seed, step) determines those of a step, so that there is no state to restore."""

    def __init__(self, text: Text, sequence: int, seed: int, device: torch.device):
        self.windows = len(text.tokens) - sequence  # start positions of windows of s + 1 tokens
        self.text, self.sequence, self.seed, self.device = text, sequence, seed, device

    def __call__(self, step: int, samples: int) -> Batch:
        """A batch of `samples` samples for step `step`, on the device."""
        return self._batch(self._starts(step, samples))

    def _starts(self, step: int, samples: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return torch.randint(self.windows, (samples,), generator=generator)

    def _batch(self, starts: torch.Tensor) -> Batch:
        stream = torch.from_numpy(self.text.tokens)
        return self.batch_of(stream[starts[:, None] + torch.arange(self.sequence + 1)])

    def batch_of(self, samples: torch.Tensor) -> Batch:
        """The batch of samples [b, s + 1], on the device."""
        samples = samples.to(self.device, torch.int64)
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        return Batch(
            tokens=tokens,
            labels=labels,
            loss_mask=(tokens != self.text.end_of_document).float(),
            position_ids=torch.arange(self.sequence, device=self.device).expand_as(tokens),
        )


class Batches(Windows):
    """The same, shared out among ranks. The samples of a step do not depend on their number."""

    def __init__(self, text: Text, config: TrainConfig, device: torch.device):
        super().__init__(text, config.sequence, config.seed, device)
        self.config = config

    def of_rank(self, step: int, data_rank: int, data_size: int) -> list[Batch]:
        """The micro batches of one data-parallel rank: its share of the step's samples."""
        config = self.config
        starts = self._starts(step, data_size * config.micro_batches * config.micro_batch)
        if config.reverse_samples:
            starts = starts.flip(0)
        mine = starts.view(data_size, config.micro_batches, config.micro_batch)[data_rank]
        return [self._batch(part) for part in mine]


def split(text: Text, sequence: int, samples: int) -> tuple[torch.Tensor, Text]:
    """Held-out samples [samples, sequence + 1] int64, spread evenly over the text, and the text without them.

    The text has at least `(samples + 1) * (sequence + 1)` tokens: they do not overlap, and a window is left.
    """
    starts = np.linspace(0, len(text.tokens) - sequence - 1, samples).astype(np.int64)
    places = starts[:, None] + np.arange(sequence + 1)
    held_out = torch.from_numpy(text.tokens[places]).long()
    return held_out, replace(text, tokens=np.delete(text.tokens, places))
