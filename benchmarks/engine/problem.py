"""A problem to measure: a shape, and the tensors of each rank."""

from dataclasses import dataclass

import torch

from .team import Team

IGNORE_INDEX = -100
IGNORED = 0.05  # share of the targets that are IGNORE_INDEX
BLOCK_BYTES = 512 << 20  # bytes of the float64 logits of a block of tokens, in plain torch


@dataclass(frozen=True)
class Shape:
    """N tokens, a vocabulary of V entries, hidden size D."""

    n: int
    v: int
    d: int

    def __str__(self):
        return f"N={self.n}, V={self.v}, D={self.d}"


@dataclass(frozen=True)
class Problem:
    """The tensors of one rank of a team of P ranks."""

    shape: Shape
    team: Team
    hidden: torch.Tensor  # [N, D], hidden states of the whole sequence, the same on all ranks
    weight: torch.Tensor  # [V/P, D], this rank's vocabulary shard
    target: torch.Tensor  # [N] int64, the same on all ranks
    sequence_parallel: bool = False
    name: str = ""

    def own(self, whole):
        """This rank's tokens of `whole [N, ...]`: all of them without sequence parallelism."""
        return whole.chunk(self.team.ranks)[self.team.rank] if self.sequence_parallel else whole

    @property
    def x(self):
        """The hidden states that a call is given: [N, D], or [N/P, D] under sequence parallelism."""
        return self.own(self.hidden)

    @property
    def counted(self):
        """[N] bool: the targets that are not ignored."""
        return self.target != IGNORE_INDEX

    @property
    def blocks(self):
        """Slices of the tokens. The float64 logits of a slice, for this rank's shard, have at most `BLOCK_BYTES`."""
        rows = max(1, BLOCK_BYTES // (8 * len(self.weight)))
        return [slice(start, start + rows) for start in range(0, len(self.hidden), rows)]


def make_problem(shape, dtype, team):
    """Random tensors: x ~ N(0, 1) and W ~ N(0, 1 / D), so that logits are ~ N(0, 1) for any D. Targets are uniform."""
    shared = torch.Generator(team.device).manual_seed(0)
    own = shared if team.ranks == 1 else torch.Generator(team.device).manual_seed(1 + team.rank)
    options = {"generator": shared, "device": team.device}
    hidden = torch.randn(shape.n, shape.d, dtype=dtype, **options)
    weight = torch.randn(shape.v // team.ranks, shape.d, dtype=dtype, device=team.device, generator=own)
    weight.mul_(shape.d**-0.5)
    target = torch.randint(shape.v, (shape.n,), **options)
    target[torch.rand(shape.n, **options) < IGNORED] = IGNORE_INDEX
    target[0] = 0  # the mean needs at least one target that counts
    return Problem(shape, team, hidden, weight, target)


def read_snapshot(path, team):
    """The problem in a safetensors file that a training by configs/snapshots.yaml wrote, with the whole weight: `hidden
    [N, D]` and `weight [V, D]` in bf16, and `target [N]`. A file that cannot be read ends the program."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            hidden, weight, target = (file.get_tensor(name).to(team.device) for name in ("hidden", "weight", "target"))
    except (OSError, SafetensorError) as error:
        raise SystemExit(f"error: {path} cannot be read: {error}") from None
    return Problem(Shape(len(hidden), len(weight), hidden.shape[1]), team, hidden, weight, target, name=f"{path}, ")
