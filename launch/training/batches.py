"""Batches from a token stream. They depend on the seed and the step, but not on the number of ranks."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from training.config import TrainConfig
from training.text import Text


@dataclass
class Batch:
    """One micro batch of `b` samples of `s` tokens, the same on every tensor-parallel rank."""

    tokens: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64, the next tokens
    loss_mask: torch.Tensor  # [b, s] float32, 0 where the label is the first token of another document
    position_ids: torch.Tensor  # [b, s] int64

    def sum_loss(self, per_token: torch.Tensor) -> torch.Tensor:
        """The sum of `per_token` [b, s] over the tokens that count, as a scalar."""
        return (per_token * self.loss_mask).sum()


class Batches:
    """Random windows of a text. (seed, step) determines those of a step, so that there is no state to restore."""

    def __init__(self, text: Text, config: TrainConfig, device: torch.device):
        self.text, self.config, self.device = text, config, device

    def of_rank(self, step: int, data_rank: int, data_size: int) -> list[Batch]:
        """The micro batches of one data-parallel rank: its share of the step's samples."""
        config = self.config
        samples = self.samples(step, data_size * config.micro_batches * config.micro_batch)
        if config.reverse_samples:
            samples = samples.flip(0)
        return [self.batch_of(part) for part in samples.chunk(data_size)[data_rank].split(config.micro_batch)]

    def samples(self, step: int, samples: int) -> torch.Tensor:
        """[samples, s + 1]"""
        stream, sequence = torch.from_numpy(self.text.tokens), self.config.sequence
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        starts = torch.randint(len(stream) - sequence, (samples,), generator=generator)
        return stream[starts[:, None] + torch.arange(sequence + 1)]

    def batch_of(self, samples: torch.Tensor) -> Batch:
        """The batch of samples [b, s + 1], on the device."""
        samples = samples.to(self.device, torch.int64)
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        return Batch(
            tokens=tokens,
            labels=labels,
            loss_mask=(tokens != self.text.end_of_document).float(),
            position_ids=torch.arange(tokens.shape[1], device=self.device).expand_as(tokens),
        )


def split(text: Text, sequence: int, samples: int) -> tuple[torch.Tensor, Text]:
    """Held-out samples [samples, sequence + 1] int64, spread evenly over the text, and the text without them.

    The text has at least `(samples + 1) * (sequence + 1)` tokens: they do not overlap, and a window is left.
    """
    starts = np.linspace(0, len(text.tokens) - sequence - 1, samples).astype(np.int64)
    places = starts[:, None] + np.arange(sequence + 1)
    held_out = torch.from_numpy(text.tokens[places]).long()
    return held_out, replace(text, tokens=np.delete(text.tokens, places))
