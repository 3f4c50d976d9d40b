"""What was measured, as a table, as JSON and in plain sentences."""

import json
import os
import platform
from statistics import median

import torch

from .measure import FORWARD, FORWARD_BACKWARD, PASSES, spread

MIB = 2**20
ERRORS = ("loss", "dX", "dW")  # in the table; JSON has the worst rows too


def machine(device):
    """{what: text} of the hardware and the software that decide the numbers."""
    facts = {"device": _cpu_name(), "cpus": str(os.cpu_count()), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        size = f"{properties.multi_processor_count} SMs, {properties.total_memory // MIB} MiB"
        facts["device"] = f"{properties.name}, {size}"
        facts["cuda"] = str(torch.version.cuda)
    facts["torch"] = torch.__version__
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = "none"
    facts["float32 matmul precision"] = torch.get_float32_matmul_precision()
    return facts


def _cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _milliseconds(seconds):
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


class Report:
    """Results of one shape with the bare products as yardstick of time.

    `limits` and `yardstick` are accuracy.py's allowed errors and torch's own, both {error name: relative error}.
    """

    def __init__(self, shape, dtype, results, limits, yardstick):
        self.shape, self.dtype = shape, str(dtype).removeprefix("torch.")
        self.results, self.limits, self.yardstick = results, limits, yardstick
        self.bare = next(result for result in results if result.peer.family == "bare")

    def efficiency(self, result, kind):
        """(median, min, max) over the rounds of the bare products' time / the peer's; None if either has none."""
        if result.refused or self.bare.refused:
            return None
        return spread(result.speed_against(self.bare, kind))

    def fastest(self, family):
        """Of a family, who trains fastest; None if nobody was timed."""
        timed = [result for result in self.results if result.peer.family == family and not result.refused]
        return min(timed, key=lambda result: median(result.seconds[FORWARD_BACKWARD]), default=None)

    def table(self):
        from rich.table import Table

        rounds = max((len(r.seconds[FORWARD]) for r in self.results if r.seconds), default=0)
        table = Table(
            title=f"{self.shape}, {self.dtype}: medians of {rounds} rounds (min–max)",
            caption="eff: time of the bare matrix products / time of the peer, in the same round. "
            "MiB: peak above inputs and results. "
            f"Errors relative to float64, in units of plain {self.dtype} torch's "
            f"({', '.join(f'{name} {self.yardstick[name]:.1e}' for name in ERRORS)}).",
        )
        table.add_column("peer")
        table.add_column("upstream")
        for title in ("forward ms", "eff", "MiB", "fwd+bwd ms", "eff", "MiB", *(f"{name} err" for name in ERRORS)):
            table.add_column(title, justify="right")
        for result in self.results:
            style = "bold" if result.peer.family == "ours" else None
            table.add_row(*self._row(result), style=style)
        return table

    def _row(self, result):
        cells = [str(result.peer), result.peer.upstream]
        if result.refused:
            return [*cells, result.refused.split(";")[0]]  # all of it is printed below the table
        for kind in PASSES:
            middle, low, high = (_milliseconds(t) for t in spread(result.seconds[kind]))
            efficiency = self.efficiency(result, kind)
            cells.append(f"{middle} ({low}–{high})")
            cells.append(f"{efficiency[0]:.2f}" if efficiency else "–")
            cells.append(f"{result.extra_bytes(kind) / MIB:.1f}")
        for name in ERRORS:
            known = name in result.errors and self.yardstick[name] > 0
            cells.append(f"{result.errors[name] / self.yardstick[name]:.2f}" if known else "–")
        return cells

    def sentences(self):
        """The headline: the fastest of ours against the fastest of torch's own paths and the bare products."""
        ours, best = self.fastest("ours"), self.fastest("torch")
        text = f"{self.shape}, {self.dtype}: "
        if ours is None:
            return text + "ours was not timed."
        text += f"the fastest of ours in training is {ours.peer}"
        text += f", of torch's own paths {best.peer}." if best is not None else "."
        for kind, words in ((FORWARD_BACKWARD, "Forward + backward"), (FORWARD, "Forward only")):
            efficiency = self.efficiency(ours, kind)
            speed = f"{efficiency[0]:.2f} of the speed of" if efficiency else "not comparable with"
            text += f" {words}: {speed} the bare matrix products"
            if best is not None:
                ratio = median(best.speed_against(ours, kind))  # time of ours / time of torch's best
                mine, its = ours.extra_bytes(kind) / MIB, best.extra_bytes(kind) / MIB
                text += f", {ratio:.2f}x the time of {best.peer}"
                text += f" and {mine / its:.2f}x its memory ({mine:.1f} and {its:.1f} MiB)" if its else ""
            text += "."
        return text

    def as_dict(self):
        """For JSON: seconds, bytes and relative errors, every round included."""
        return {
            **vars(self.shape),
            "dtype": self.dtype,
            "torch_errors": self.yardstick,
            "allowed_errors": self.limits,
            "peers": [self._peer_as_dict(result) for result in self.results],
            "summary": self.sentences(),
        }

    def _peer_as_dict(self, result):
        entry = {"name": result.peer.name, "label": str(result.peer), "upstream": result.peer.upstream}
        entry.update(refused=result.refused or None, errors=result.errors)
        for kind in PASSES if not result.refused else ():
            efficiency = self.efficiency(result, kind)
            entry[kind] = {
                "seconds": result.seconds[kind],
                "seconds_median": median(result.seconds[kind]),
                "eff": efficiency[0] if efficiency else None,
                "eff_min": efficiency[1] if efficiency else None,
                "eff_max": efficiency[2] if efficiency else None,
                "peak_bytes": result.peak[kind],
                "result_bytes": result.alive[kind],
            }
        return entry


def write_json(path, settings, facts, reports):
    """One file per run: {'machine', 'settings', 'shapes': [...]}."""
    content = {"machine": facts, "settings": settings, "shapes": [report.as_dict() for report in reports]}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
