"""A shape and the random tensors measured on it."""

from dataclasses import dataclass

import torch

IGNORE_INDEX = -100
IGNORED = 0.05


@dataclass(frozen=True)
class Shape:
    """N tokens, a vocabulary of V entries, hidden size D."""

    n: int
    v: int
    d: int

    def __str__(self):
        return f"N={self.n}, V={self.v}, D={self.d}"

    @classmethod
    def parse(cls, text):
        """'N,V,D' as on the command line."""
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 3 or min(numbers) < 1:
            raise ValueError(f"a shape is three positive numbers N,V,D, got {text!r}")
        return cls(*numbers)


@dataclass(frozen=True)
class Inputs:
    """`x [N, D]` and `weight [V, D]` of one dtype, `target [N]` int64 with some entries IGNORE_INDEX."""

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor

    @property
    def bytes(self):
        return sum(t.numel() * t.element_size() for t in (self.x, self.weight, self.target))

    @property
    def counted(self):
        return int((self.target != IGNORE_INDEX).sum())


def make_inputs(shape, dtype, device, seed, deviation=1.0, ignored=IGNORED):
    """Fresh random tensors. x ~ N(0, 1) and W ~ N(0, deviation^2 / D), so that logits are ~ N(0, deviation^2)
    whatever D is: of 10^9 of them the largest is about 6 times the deviation.
    Targets are uniform, a share of them `ignored`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    x = torch.randn(shape.n, shape.d, dtype=dtype, **options)
    weight = torch.randn(shape.v, shape.d, dtype=dtype, **options).mul_(deviation * shape.d**-0.5)
    target = torch.randint(shape.v, (shape.n,), **options)
    target[torch.rand(shape.n, **options) < ignored] = IGNORE_INDEX
    target[0] = 0  # at least one token counts, or the mean would be of nothing
    return Inputs(x, weight, target)
