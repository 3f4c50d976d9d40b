"""What was measured: a Result per peer, a Cell per team and problem."""

from dataclasses import dataclass, field
from statistics import median

import torch

from .accuracy import Judge
from .peers import BARE, FORWARD_BACKWARD, OVERLAPPED, PASSES, Peer
from .problem import Shape


@dataclass
class Result:
    """One peer on one problem. Dictionaries by pass are empty where the peer was refused."""

    peer: Peer
    refused: str = ""  # why it was not timed
    errors: dict = field(default_factory=dict)  # {error: relative, see accuracy.py}; none of a GEMM-only baseline
    seconds: dict = field(default_factory=dict)  # {pass: [one per round]}
    peak: dict = field(default_factory=dict)  # {pass: bytes above the inputs, of the rank that needs most}
    gradients: dict = field(default_factory=dict)  # {pass: of these bytes, dX and dW in the dtype of the inputs}

    def has(self, kind: str) -> bool:
        return not self.refused and kind in self.seconds

    def extra_bytes(self, kind: str) -> int:
        """Peak above the inputs and the gradients, in bytes."""
        return self.peak[kind] - self.gradients[kind]


@dataclass
class Cell:
    """All peers on one problem and team, with or without sequence parallelism."""

    tp: int
    shape: Shape
    sequence_parallel: bool
    dtype: torch.dtype
    results: list[Result] = field(repr=False)
    passes: tuple = PASSES
    counted: int = 0  # targets that are not ignored
    largest_logit: float = 0.0
    yardstick: dict = field(default_factory=dict)  # torch's errors
    limits: dict = field(default_factory=dict)  # the allowed errors
    collectives: dict = field(default_factory=dict)  # measure_collectives()

    @classmethod
    def of(cls, judge: Judge, passes: tuple[str, ...]) -> "Cell":
        """The problem of a judge, without results yet."""
        problem = judge.problem
        cell = cls(problem.team.ranks, problem.shape, problem.sequence_parallel, problem.hidden.dtype, [], passes)
        cell.counted, cell.largest_logit = int(problem.counted.sum()), judge.largest_logit
        cell.yardstick, cell.limits = judge.yardstick, judge.limits
        return cell

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def where(self) -> str:
        layout = f"TP {self.tp}, {self.shape}" + (", SP" if self.sequence_parallel else "")
        return layout if self.tp > 1 else str(self.shape)

    @property
    def rounds(self) -> int:
        return max((len(times) for result in self.results for times in result.seconds.values()), default=0)

    def get(self, name: str, kind: str = FORWARD_BACKWARD) -> Result | None:
        """The result of a peer, or None where it has no time."""
        return next((r for r in self.results if r.peer.name == name and r.has(kind)), None)

    def ratio(
        self, result: Result | None, other: str, kind: str = FORWARD_BACKWARD
    ) -> tuple[float, float, float] | None:
        """(median, min, max) over the rounds of the speed of a result relative to that of the peer named `other`; None
        if either has no time. Both are of the same round, so that a machine which slows down or has other work slows
        both. A single rank has no collectives: its GEMM-only baseline is the overlapped one, too."""
        its = self.get(BARE if other == OVERLAPPED and self.tp == 1 else other, kind)
        if not its or not result or not result.has(kind):
            return None
        return spread([b / a for a, b in zip(result.seconds[kind], its.seconds[kind])])

    def as_dict(self) -> dict:
        """For JSON: seconds, bytes and relative errors, every round included."""
        return {
            "tp": self.tp,
            **vars(self.shape),
            "sequence_parallel": self.sequence_parallel,
            "dtype": self.dtype_name,
            "max_abs_logit": self.largest_logit,
            "counted_targets": self.counted,
            "torch_errors": self.yardstick,
            "allowed_errors": self.limits,
            "collectives": self.collectives,
            "peers": [self._peer_as_dict(result) for result in self.results],
        }

    def _peer_as_dict(self, result: Result) -> dict:
        entry: dict = {"name": result.peer.name, "upstream": result.peer.upstream}
        entry |= {"refused": result.refused or None, "errors": result.errors}
        for kind in filter(result.has, self.passes):
            entry[kind] = {
                "seconds": result.seconds[kind],
                **dict(zip(("seconds_median", "seconds_min", "seconds_max"), spread(result.seconds[kind]))),
                "of_bare": self.ratio(result, BARE, kind),
                "of_overlapped": self.ratio(result, OVERLAPPED, kind),
                "peak_bytes": result.peak[kind],
                "beyond_gradients_bytes": result.extra_bytes(kind),
            }
        return entry


def spread(values: list[float]) -> tuple[float, float, float]:
    """(median, min, max)."""
    return median(values), min(values), max(values)
