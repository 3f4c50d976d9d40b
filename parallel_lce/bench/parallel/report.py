"""What was measured over ranks, as tables and as JSON.

Ratios are of speed and per round: the time of the bare products, or of another peer, / the time of the peer in the same
round.
"""

import json
import os
from dataclasses import dataclass, field

import torch

from ..measure import spread
from ..peers import FORWARD, FORWARD_BACKWARD, PASSES
from ..report import ERRORS, mebibytes, milliseconds, new_table
from .peers import BARE, LEAN, OVERLAPPED, SAVED

RIVALS = ("megatron-fused", "megatron", "loss-parallel", "verl")
COLUMNS = [
    "peer",
    "upstream",
    "forward ms",
    "of bare",
    "fwd+bwd ms",
    "of bare",
    "of overlapped",
    "MiB",
    "beyond",
    "work",
    *(f"{name} err" for name in ERRORS),
]
CAPTION = (
    "Milliseconds of the slowest rank. of bare: speed relative to the three local products without communication; of "
    "overlapped: to those with their collectives overlapped. MiB: peak above the inputs of forward + backward on the "
    "rank that needs most; beyond: without dX and dW too; work: without the whole dX and the gathered hidden states of "
    "sequence parallelism either. Errors relative to float64, in units of plain {dtype} torch's ({errors})."
)


@dataclass
class Cell:
    """All peers on one TP size and shape, with or without sequence parallelism."""

    tp: int
    shape: object
    sequence_parallel: bool
    dtype: torch.dtype
    results: list = field(repr=False)
    largest_logit: float = 0.0
    yardstick: dict = field(default_factory=dict)  # torch's errors
    limits: dict = field(default_factory=dict)
    collectives: dict = field(default_factory=dict)  # by themselves, as collectives.py has them
    hidden: dict = field(default_factory=dict)  # {peer: (ms of communication, of these beside other work)} of timelines

    def __str__(self):
        return f"TP {self.tp}, {self.shape}" + (", SP" if self.sequence_parallel else "")

    def get(self, name, kind=FORWARD_BACKWARD):
        """The result of a peer, or None where it has no time."""
        return next((r for r in self.results if r.peer.name == name and r.has(kind)), None)

    def ratio(self, name, other, kind=FORWARD_BACKWARD):
        """(median, min, max) over the rounds of the speed of a peer relative to that of another, or None. A single
        rank has no collectives: its bare products are the overlapped ones, too."""
        if other == OVERLAPPED and self.tp == 1:
            other = BARE
        mine, its = self.get(name, kind), self.get(other, kind)
        return spread(mine.speed_against(its, kind)) if mine and its else None

    @property
    def layout_bytes(self):
        """What sequence parallelism needs of memory by itself: the whole dX before it is scattered, and x gathered."""
        itemsize = torch.empty((), dtype=self.dtype).element_size()
        return 2 * self.shape.n * self.shape.d * itemsize if self.sequence_parallel else 0

    def work_bytes(self, result):
        return result.extra_bytes(FORWARD_BACKWARD) - self.layout_bytes

    def table(self):
        rounds = max((len(times) for result in self.results for times in result.seconds.values()), default=0)
        dtype = str(self.dtype).removeprefix("torch.")
        errors = ", ".join(f"{name} {self.yardstick[name]:.1e}" for name in ERRORS if name in self.yardstick)
        title = f"{self}, {dtype}, max |z| {self.largest_logit:.1f}: medians of {rounds} rounds (min–max)"
        table = new_table(title, CAPTION.format(dtype=dtype, errors=errors), COLUMNS[:2], COLUMNS[2:])
        for result in self.results:
            table.add_row(*self._row(result), style="bold" if result.peer.family == "ours" else None)
        return table

    def _row(self, result):
        name = result.peer.name
        cells = [str(result.peer) + (", " + result.refused.split(":")[0] if result.refused else "")]
        cells += [result.peer.upstream, _time(result, FORWARD), _share(self.ratio(name, BARE, FORWARD))]
        cells += [_time(result, FORWARD_BACKWARD)]
        cells += [_share(self.ratio(name, other)) for other in (BARE, OVERLAPPED)]
        if result.has(FORWARD_BACKWARD):
            sizes = result.peak[FORWARD_BACKWARD], result.extra_bytes(FORWARD_BACKWARD), self.work_bytes(result)
            cells += [mebibytes(size) for size in sizes]
        else:
            cells += ["–"] * 3
        for error in ERRORS:
            known = error in result.errors and self.yardstick.get(error)
            cells.append(f"{result.errors[error] / self.yardstick[error]:.2f}" if known else "–")
        return cells

    def as_dict(self):
        """For JSON: seconds, bytes and relative errors, every round included."""
        return {
            "tp": self.tp,
            **vars(self.shape),
            "sequence_parallel": self.sequence_parallel,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_abs_logit": self.largest_logit,
            "torch_errors": self.yardstick,
            "allowed_errors": self.limits,
            "collectives": self.collectives,
            "communication_ms_and_hidden": self.hidden,
            "peers": [self._peer_as_dict(result) for result in self.results],
        }

    def _peer_as_dict(self, result):
        name = result.peer.name
        entry = {"name": name, "label": str(result.peer), "upstream": result.peer.upstream}
        entry.update(refused=result.refused or None, errors=result.errors)
        for kind in PASSES:
            if result.has(kind):
                middle, low, high = spread(result.seconds[kind])
                entry[kind] = {
                    "seconds": result.seconds[kind],
                    "seconds_median": middle,
                    "seconds_min": low,
                    "seconds_max": high,
                    "of_bare": self.ratio(name, BARE, kind),
                    "of_overlapped": self.ratio(name, OVERLAPPED, kind),
                    "peak_bytes": result.peak[kind],
                    "beyond_gradients_bytes": result.extra_bytes(kind),
                }
        if result.has(FORWARD_BACKWARD):
            entry[FORWARD_BACKWARD]["work_bytes"] = self.work_bytes(result)
        return entry


def overview(cells):
    """A row per cell: ours against the bare products with stock's collectives, and how many times as fast as others."""
    columns = ["TP", "N", "SP", "of overlapped", "of bare", "forward of bare", *(f"{n} ×" for n in RIVALS)]
    columns += ["lean of overlapped", "lean MiB"]
    caption = (
        "Speed of ours with everything saved (min–max over the rounds) relative to the bare products with overlapped "
        "collectives, to those alone, and forward alone to the bare projection; ×: times the speed of another. lean: "
        "fp32 main_grad and a budget of 64 MiB, with its memory beyond gradients, the whole dX and gathered hidden "
        "states."
    )
    table = new_table("Ours over the ranks", caption, [], columns)
    for cell in cells:
        lean = cell.get(LEAN)
        row = [str(cell.tp), str(cell.shape.n), "on" if cell.sequence_parallel else "off"]
        row += [_share(cell.ratio(SAVED, OVERLAPPED), True), _share(cell.ratio(SAVED, BARE), True)]
        row += [_share(cell.ratio(SAVED, BARE, FORWARD), True)]
        row += [_share(cell.ratio(SAVED, rival), digits=2) for rival in RIVALS]
        row += [_share(cell.ratio(LEAN, OVERLAPPED)), mebibytes(cell.work_bytes(lean)) if lean else "–"]
        table.add_row(*row)
    return table


def collectives_table(cells):
    """A row per TP size and number of tokens: what communication takes by itself."""
    rows = {(cell.tp, cell.shape): cell.collectives for cell in cells if cell.collectives}
    names = list(dict.fromkeys(name for found in rows.values() for name in found))
    caption = "Of [N, D] hidden states, and of the partials, 3 N + 2 fp32 numbers per rank; nothing else was running."
    table = new_table("Collectives alone, ms", caption, [], ["TP", "N", *(name.replace("_", " ") for name in names)])
    for (tp, shape), found in rows.items():
        table.add_row(str(tp), str(shape.n), *(milliseconds(found[name]["seconds_median"]) for name in names))
    return table


def _time(result, kind):
    if not result.has(kind):
        return "–"
    middle, low, high = (milliseconds(t) for t in spread(result.seconds[kind]))
    return f"{middle} ({low}–{high})"


def _share(ratio, wide=False, digits=3):
    if ratio is None:
        return "–"
    middle, low, high = (f"{value:.{digits}f}" for value in ratio)
    return f"{middle} ({low}–{high})" if wide else middle


def write_json(path, facts, settings, missing, cells):
    """One file per run, complete at any time: {'machine', 'settings', 'not_here', 'cells': [...]}."""
    content = {"machine": facts, "settings": settings, "not_here": missing}
    content["cells"] = [cell.as_dict() for cell in cells]
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    os.replace(f"{path}.new", path)
