"""What was measured: a Result per peer, a Cell per team and problem, a JSON file per run."""

import json
import os
from dataclasses import dataclass, field
from statistics import median

import torch

from .peers import BARE, FORWARD, FORWARD_BACKWARD, MIB, OVERLAPPED, PASSES, Peer
from .problem import Shape

WORDS = {FORWARD: "forward", FORWARD_BACKWARD: "forward + backward"}


@dataclass
class Result:
    """One peer on one problem. Dictionaries by pass are empty where the peer was refused."""

    peer: Peer
    refused: str = ""  # why it was not timed
    errors: dict = field(default_factory=dict)  # {error: relative, see accuracy.py}; none of a GEMM-only baseline
    seconds: dict = field(default_factory=dict)  # {pass: [one per round]}
    peak: dict = field(default_factory=dict)  # {pass: bytes above the inputs, of the rank that needs most}
    gradients: dict = field(default_factory=dict)  # {pass: of these bytes, dX and dW in the dtype of the inputs}

    def has(self, kind):
        return not self.refused and kind in self.seconds

    def extra_bytes(self, kind):
        """Peak above the inputs and the gradients, in bytes."""
        return self.peak[kind] - self.gradients[kind]

    def speed_against(self, other, kind):
        """[time of `other` / time of this peer], one per round. Both are of the same round, so that a machine which
        slows down or has other work slows both."""
        return [b / a for a, b in zip(self.seconds[kind], other.seconds[kind])]


@dataclass
class Cell:
    """All peers on one problem and team, with or without sequence parallelism."""

    tp: int
    shape: Shape
    sequence_parallel: bool
    dtype: torch.dtype
    results: list = field(repr=False)
    passes: tuple = PASSES
    counted: int = 0  # targets that are not ignored
    input_bytes: int = 0  # of one rank's hidden states and weight, and the targets
    largest_logit: float = 0.0
    yardstick: dict = field(default_factory=dict)  # torch's errors
    limits: dict = field(default_factory=dict)  # the allowed errors
    collectives: dict = field(default_factory=dict)  # measure_collectives()
    hidden: dict = field(default_factory=dict)  # {peer: (ms of communication, of these beside other work)}

    @classmethod
    def of(cls, judge, passes):
        """The problem of a judge, without results yet."""
        problem = judge.problem
        tensors = problem.x, problem.weight, problem.target
        cell = cls(problem.team.ranks, problem.shape, problem.sequence_parallel, problem.hidden.dtype, [], passes)
        cell.counted = int(problem.counted.sum())
        cell.input_bytes = sum(t.numel() * t.element_size() for t in tensors)
        cell.largest_logit, cell.yardstick, cell.limits = judge.largest_logit, judge.yardstick, judge.limits
        return cell

    @property
    def dtype_name(self):
        return str(self.dtype).removeprefix("torch.")

    @property
    def title(self):
        layout = f"TP {self.tp}, {self.shape}" + (", SP" if self.sequence_parallel else "")
        where = layout if self.tp > 1 else str(self.shape)
        return f"{where}, {self.dtype_name}, {self.counted} targets, max |z| {self.largest_logit:.1f}"

    @property
    def rounds(self):
        return max((len(times) for result in self.results for times in result.seconds.values()), default=0)

    def get(self, name, kind=FORWARD_BACKWARD):
        """The result of a peer, or None where it has no time."""
        return next((r for r in self.results if r.peer.name == name and r.has(kind)), None)

    def fastest(self, family, kind):
        """The fastest of a family, or None if nobody was timed."""
        timed = [result for result in self.results if result.peer.family == family and result.has(kind)]
        return min(timed, key=lambda result: median(result.seconds[kind]), default=None)

    def ratio(self, result, other, kind=FORWARD_BACKWARD):
        """(median, min, max) over the rounds of the speed of a result relative to that of the peer named `other`; None
        if either has no time. A single rank has no collectives: its GEMM-only baseline is the overlapped one, too."""
        its = self.get(BARE if other == OVERLAPPED and self.tp == 1 else other, kind)
        return spread(result.speed_against(its, kind)) if its and result and result.has(kind) else None

    def work_bytes(self, result):
        """Beyond gradients, without what sequence parallelism needs by itself: the whole dX before it is scattered, and
        the gathered hidden states."""
        layout = 2 * self.shape.n * self.shape.d * self.dtype.itemsize if self.sequence_parallel else 0
        return result.extra_bytes(FORWARD_BACKWARD) - layout

    def summary(self):
        """The headline: the fastest of ours against the fastest of torch's own paths and the GEMM-only baseline."""
        parts = [self._sentence(kind) for kind in reversed(self.passes)]
        if any(parts):
            return f"{self.title}. " + " ".join(part for part in parts if part)
        accurate = ", ".join(str(r.peer) for r in self.results if r.peer.family == "ours" and not r.refused)
        return f"{self.title}: " + (f"accurate, not timed: {accurate}." if accurate else "ours was not timed.")

    def _sentence(self, kind):
        ours, best = self.fastest("ours", kind), self.fastest("torch", kind)
        if ours is None:
            return ""
        speed = self.ratio(ours, BARE, kind)
        words = f"{speed[0]:.2f} of the speed of" if speed else "not comparable with"
        text = f"{WORDS[kind].capitalize()}: {ours.peer} has {words} the GEMM-only baseline"
        if best is not None:
            ratio = median(best.speed_against(ours, kind))  # time of ours / time of torch's best
            mine, its = ours.extra_bytes(kind), best.extra_bytes(kind)
            text += f", {ratio:.2f}x the time of {best.peer}"
            text += f" and {mine / its:.3f}x its memory ({mebibytes(mine)} and {mebibytes(its)} MiB)" if its else ""
        return text + "."

    def as_dict(self):
        """For JSON: seconds, bytes and relative errors, every round included."""
        return {
            "tp": self.tp,
            **vars(self.shape),
            "sequence_parallel": self.sequence_parallel,
            "dtype": self.dtype_name,
            "max_abs_logit": self.largest_logit,
            "counted_targets": self.counted,
            "input_bytes": self.input_bytes,
            "torch_errors": self.yardstick,
            "allowed_errors": self.limits,
            "collectives": self.collectives,
            "communication_ms_and_hidden": self.hidden,
            "peers": [self._peer_as_dict(result) for result in self.results],
            "summary": self.summary(),
        }

    def _peer_as_dict(self, result):
        entry = {"name": result.peer.name, "label": str(result.peer), "upstream": result.peer.upstream}
        entry.update(refused=result.refused or None, errors=result.errors)
        for kind in self.passes:
            if result.has(kind):
                of_bare, seconds = self.ratio(result, BARE, kind), result.seconds[kind]
                entry[kind] = {
                    "seconds": seconds,
                    **dict(zip(("seconds_median", "seconds_min", "seconds_max"), spread(seconds))),
                    **dict(zip(("eff", "eff_min", "eff_max"), of_bare or (None, None, None))),
                    "of_bare": of_bare,
                    "of_overlapped": self.ratio(result, OVERLAPPED, kind),
                    "peak_bytes": result.peak[kind],
                    "beyond_gradients_bytes": result.extra_bytes(kind),
                }
        if result.has(FORWARD_BACKWARD):
            entry[FORWARD_BACKWARD]["work_bytes"] = self.work_bytes(result)
        return entry


def write_json(path, content):
    """The file is complete at any time, also while a longer one replaces it."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    os.replace(f"{path}.new", path)


def spread(values):
    """(median, min, max)."""
    return median(values), min(values), max(values)


def milliseconds(seconds):
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def mebibytes(size):
    return f"{size / MIB:.0f}" if size >= 100 * MIB else f"{size / MIB:.1f}"
