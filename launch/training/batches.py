"""Batches from a token stream: the same on every rank, in every run with the same seed."""

from dataclasses import dataclass

import torch

from training.config import TrainConfig
from training.text import Text


@dataclass
class Batch:
    """One step's data: `b` samples of `s` tokens. Under tensor parallelism every rank holds all of it."""

    tokens: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64, the tokens one place on
    loss_mask: torch.Tensor  # [b, s] float32, 0 where the label begins an unrelated document
    position_ids: torch.Tensor  # [b, s] int64
    attention_mask: torch.Tensor  # [1, 1, s, s] bool, True where a token must not look

    def mean_loss(self, per_token: torch.Tensor) -> torch.Tensor:
        """The mean of `per_token` [b, s] over the tokens that count, as a scalar."""
        return (per_token * self.loss_mask).sum() / self.loss_mask.sum()


class Batches:
    """Random windows of a text, drawn by (seed, step) alone: no state to keep in step between runs."""

    def __init__(self, text: Text, config: TrainConfig, device: torch.device):
        self.windows = len(text.tokens) - config.sequence  # a sample is s tokens and the label of the last
        self.text, self.config, self.device = text, config, device

    def __call__(self, step: int, samples: int) -> Batch:
        """The batch of step `step`, of `samples` samples, on the device."""
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        starts = torch.randint(self.windows, (samples,), generator=generator)
        stream = torch.from_numpy(self.text.tokens)
        samples = stream[starts[:, None] + torch.arange(config.sequence + 1)].to(self.device, torch.int64)  # [b, s + 1]
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        ones = torch.ones(config.sequence, config.sequence, dtype=torch.bool, device=self.device)
        return Batch(
            tokens=tokens,
            labels=labels,
            loss_mask=(tokens != self.text.end_of_document).float(),
            position_ids=torch.arange(config.sequence, device=self.device).expand_as(tokens),
            attention_mask=ones.triu(1)[None, None],
        )
