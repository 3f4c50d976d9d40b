"""What was measured on one shape, as a table, as JSON and in plain sentences."""

import importlib.metadata
import json
import os
import platform
import subprocess
from statistics import median

import torch

from .measure import spread
from .peers import FORWARD, FORWARD_BACKWARD

MIB = 2**20
WORDS = {FORWARD: "forward", FORWARD_BACKWARD: "forward + backward"}
ERRORS = ("loss", "dX", "dW")  # in the table; JSON has the worst rows too
LIBRARIES = ("megatron-core", "liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl")


def machine(device):
    """{what: text} of the hardware and the software that decide the numbers."""
    facts = {"device": _cpu_name(), "cpus": str(os.cpu_count()), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        size = f"{properties.multi_processor_count} SMs, {properties.total_memory // MIB} MiB"
        facts["device"] = f"{properties.name}, {size}"
        facts["driver"] = _driver()
        facts["cuda"] = str(torch.version.cuda)
    facts["python"] = platform.python_version()
    facts["torch"] = torch.__version__
    for name in ("triton", *LIBRARIES):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "none"
    facts["float32 matmul precision"] = torch.get_float32_matmul_precision()
    facts["PARALLEL_LCE_BACKEND"] = os.environ.get("PARALLEL_LCE_BACKEND", "")
    return facts


def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0].strip()


def _cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def milliseconds(seconds):
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def mebibytes(size):
    return f"{size / MIB:.0f}" if size >= 100 * MIB else f"{size / MIB:.1f}"


def new_table(title, caption, left, right):
    """A table in Markdown, with columns aligned left and right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, caption=caption, box=box.MARKDOWN)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


class Report:
    """Results of one shape with the bare products as yardstick of time. `judge` is accuracy.py's, whose limits and
    yardstick are the allowed errors and torch's own, both {error name: relative error}."""

    def __init__(self, shape, dtype, inputs, passes, results, judge):
        self.shape, self.dtype, self.passes, self.results = shape, str(dtype).removeprefix("torch."), passes, results
        self.input_bytes, self.largest_logit = inputs.bytes, judge.largest_logit
        self.limits, self.yardstick = judge.limits, judge.yardstick
        self.bare = next(result for result in results if result.peer.family == "bare")
        self.counted = inputs.counted
        self.title = f"{shape}, {self.dtype}, {self.counted} targets, max |z| {self.largest_logit:.1f}"

    def efficiency(self, result, kind):
        """(median, min, max) over the rounds of the bare products' time / the peer's; None if either has none."""
        if not (result.has(kind) and self.bare.has(kind)):
            return None
        return spread(result.speed_against(self.bare, kind))

    def fastest(self, family, kind):
        """Of a family; None if nobody was timed."""
        timed = [result for result in self.results if result.peer.family == family and result.has(kind)]
        return min(timed, key=lambda result: median(result.seconds[kind]), default=None)

    def table(self):
        rounds = max((len(times) for result in self.results for times in result.seconds.values()), default=0)
        title = f"{self.title}: " + (f"medians of {rounds} rounds (min–max)" if rounds else "accuracy")
        yardstick = ", ".join(f"{name} {self.yardstick[name]:.1e}" for name in ERRORS if name in self.yardstick)
        caption = f"Errors relative to float64, in units of plain {self.dtype} torch's ({yardstick})."
        if rounds:
            caption += (
                " eff: time of the bare matrix products / time of the peer, in the same round. MiB: peak above the "
                "inputs; beyond: without dX and dW too."
            )
        table = new_table(title, caption, ["peer", "upstream"], self._titles(rounds))
        for result in self.results:
            if rounds or result.peer.family != "bare":
                style = "bold" if result.peer.family == "ours" else None
                table.add_row(*self._row(result, rounds), style=style)
        return table

    def _titles(self, rounds):
        words = {FORWARD: ("forward ms", "eff", "MiB"), FORWARD_BACKWARD: ("fwd+bwd ms", "eff", "MiB", "beyond")}
        for kind in self.passes if rounds else ():
            yield from words[kind]
        yield from (f"{name} err" for name in self.yardstick if name in ERRORS or not rounds)

    def _row(self, result, rounds):
        cells = [str(result.peer), result.peer.upstream]
        for kind in self.passes if rounds else ():
            cells += self._timed_cells(result, kind)
        for name, unit in self.yardstick.items():
            if name in ERRORS or not rounds:
                known = name in result.errors and unit > 0
                cells.append(f"{result.errors[name] / unit:.2f}" if known else "–")
        if result.refused:
            cells[0] += ", " + result.refused.split(":")[0]  # all of it is printed below the table
        return cells

    def _timed_cells(self, result, kind):
        wide = kind == FORWARD_BACKWARD
        if not result.has(kind):
            return ["–"] * (4 if wide else 3)
        middle, low, high = (milliseconds(t) for t in spread(result.seconds[kind]))
        efficiency = self.efficiency(result, kind)
        cells = [
            f"{middle} ({low}–{high})",
            f"{efficiency[0]:.3f}" if efficiency else "–",
            mebibytes(result.peak[kind]),
        ]
        return cells + ([mebibytes(result.extra_bytes(kind))] if wide else [])

    def sentences(self):
        """The headline: the fastest of ours against the fastest of torch's own paths and the bare products."""
        parts = [self._sentence(kind) for kind in reversed(self.passes)]
        if any(parts):
            return f"{self.title}. " + " ".join(part for part in parts if part)
        accurate = ", ".join(str(r.peer) for r in self.results if r.peer.family == "ours" and not r.refused)
        return f"{self.title}: " + (f"accurate, not timed: {accurate}." if accurate else "ours was not timed.")

    def _sentence(self, kind):
        ours, best = self.fastest("ours", kind), self.fastest("torch", kind)
        if ours is None:
            return ""
        efficiency = self.efficiency(ours, kind)
        speed = f"{efficiency[0]:.2f} of the speed of" if efficiency else "not comparable with"
        text = f"{WORDS[kind].capitalize()}: {ours.peer} has {speed} the bare matrix products"
        if best is not None:
            ratio = median(best.speed_against(ours, kind))  # time of ours / time of torch's best
            mine, its = ours.extra_bytes(kind), best.extra_bytes(kind)
            text += f", {ratio:.2f}x the time of {best.peer}"
            text += f" and {mine / its:.3f}x its memory ({mebibytes(mine)} and {mebibytes(its)} MiB)" if its else ""
        return text + "."

    def as_dict(self):
        """For JSON: seconds, bytes and relative errors, every round included."""
        return {
            **vars(self.shape),
            "dtype": self.dtype,
            "max_abs_logit": self.largest_logit,
            "counted_targets": self.counted,
            "input_bytes": self.input_bytes,
            "torch_errors": self.yardstick,
            "allowed_errors": self.limits,
            "peers": [self._peer_as_dict(result) for result in self.results],
            "summary": self.sentences(),
        }

    def _peer_as_dict(self, result):
        entry = {"name": result.peer.name, "label": str(result.peer), "upstream": result.peer.upstream}
        entry.update(refused=result.refused or None, errors=result.errors)
        for kind in self.passes:
            if not result.has(kind):
                continue
            middle, low, high = spread(result.seconds[kind])
            efficiency = self.efficiency(result, kind) or (None, None, None)
            entry[kind] = {
                "seconds": result.seconds[kind],
                "seconds_median": middle,
                "seconds_min": low,
                "seconds_max": high,
                "eff": efficiency[0],
                "eff_min": efficiency[1],
                "eff_max": efficiency[2],
                "peak_bytes": result.peak[kind],
                "beyond_gradients_bytes": result.extra_bytes(kind),
            }
        return entry


def write_json(path, settings, facts, missing, reports):
    """One file per run: {'machine', 'settings', 'not_here', 'shapes': [...]}."""
    content = {
        "machine": facts,
        "settings": settings,
        "not_here": missing,
        "shapes": [report.as_dict() for report in reports],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
