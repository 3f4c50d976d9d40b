"""What was measured: a Result per peer, a Cell per team and problem."""

from dataclasses import asdict, dataclass, field
from statistics import median

import torch

from .accuracy import Judge
from .breakdown import Breakdown
from .peers import ANY, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, PASSES, Peer
from .problem import Shape


@dataclass
class Measured:
    """One pass of one peer. Another figure of a call is another field here, and a column in tables.py."""

    peak_bytes: int  # above the inputs, of the rank that needs most
    gradient_bytes: int  # of these, dX and dW in the dtype of the inputs
    seconds: list[float] = field(default_factory=list)  # one per round
    host_seconds: list[float] = field(default_factory=list)  # one per round, if asked for
    breakdown: Breakdown | None = None  # of rank 0, if asked for

    @property
    def extra_bytes(self) -> int:
        """Peak above the inputs and the gradients."""
        return self.peak_bytes - self.gradient_bytes


@dataclass
class Result:
    """One peer on one problem."""

    peer: Peer
    refused: str = ""  # why it was not timed
    errors: dict[str, float] = field(default_factory=dict)  # relative, see accuracy.py; none of a GEMM-only baseline
    passes: dict[str, Measured] = field(default_factory=dict)

    def has(self, kind: str) -> bool:
        return not self.refused and kind in self.passes


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
        if self.tp == 1:
            return str(self.shape)
        return f"TP {self.tp}, {self.shape}" + (", SP" if self.sequence_parallel else "")

    @property
    def rounds(self) -> int:
        return max((len(measured.seconds) for result in self.results for measured in result.passes.values()), default=0)

    def get(self, name: str, kind: str = FORWARD_BACKWARD) -> Result | None:
        """The result of a peer, or None where it has no time."""
        return next((r for r in self.results if r.peer.name == name and r.has(kind)), None)

    def rivals(self) -> tuple[Result | None, Result | None]:
        """(the first strategy of ours, the fastest other) in the last pass, of those whose loss accepts a gradient per
        token."""
        kind = self.passes[-1]
        timed = [result for result in self.results if result.peer.upstream == ANY and result.has(kind)]
        ours, others = ([r for r in timed if r.peer.family == family] for family in ("ours", "other"))
        return ours[0] if ours else None, min(others, key=lambda r: median(r.passes[kind].seconds), default=None)

    def ratio(
        self, result: Result | None, other: str, kind: str = FORWARD_BACKWARD
    ) -> tuple[float, float, float] | None:
        """(median, min, max) over the rounds of the speed of a result relative to that of the peer named `other`; None
        if either has no time. Both are of the same round, so that a machine which slows down or has other work slows
        both. A single rank has no collectives: its GEMM-only baseline is the overlapped one, too."""
        reference = self.get(GEMM_ONLY if other == OVERLAPPED and self.tp == 1 else other, kind)
        if not reference or not result or not result.has(kind):
            return None
        return spread([b / a for a, b in zip(result.passes[kind].seconds, reference.passes[kind].seconds)])

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
            measured = result.passes[kind]
            entry[kind] = {
                "seconds": measured.seconds,
                **dict(zip(("seconds_median", "seconds_min", "seconds_max"), spread(measured.seconds))),
                "of_gemm_only": self.ratio(result, GEMM_ONLY, kind),
                "of_overlapped": self.ratio(result, OVERLAPPED, kind),
                "peak_bytes": measured.peak_bytes,
                "beyond_gradients_bytes": measured.extra_bytes,
            }
            if measured.host_seconds:
                entry[kind] |= {
                    "host_seconds": measured.host_seconds,
                    "host_seconds_median": median(measured.host_seconds),
                    "breakdown": measured.breakdown and asdict(measured.breakdown),
                }
        return entry


def spread(values: list[float]) -> tuple[float, float, float]:
    """(median, min, max)."""
    return median(values), min(values), max(values)
