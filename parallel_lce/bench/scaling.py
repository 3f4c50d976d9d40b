"""`python -m parallel_lce.bench.scaling RESULTS.json`: a model of the time over P ranks, which docs/scaling.md derives.

The model is fitted to what `launch/bench.sh` measured. The program prints the error of the fit, and predictions for
more ranks on several hosts. The fit is a least-squares fit of relative errors; no number may be negative. `launch`,
`hop` and `bandwidth` are fitted to the collectives alone, the others to the times of each series.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .peers import BARE, FORWARD, FORWARD_BACKWARD, OVERLAPPED, SAVED
from .plot import plot_over_ranks
from .tables import NONE, SHORT, new_console, new_table, say

BOTH = FORWARD_BACKWARD
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_gather_partials": 1}  # around a ring
SERIES = {"bare": BARE, "with collectives": OVERLAPPED, "ours": SAVED}  # names of peers


@dataclass(frozen=True)
class Layout:
    """One TP size and problem."""

    tp: int
    n: int
    v: int
    d: int
    sequence_parallel: bool = False
    itemsize: int = 2  # bytes of an element of the hidden states

    @property
    def product(self):
        """Flops of one of the matrix products on one rank; forward has one, forward + backward three."""
        return 2 * self.n * self.v * self.d / self.tp

    def __str__(self):
        return f"TP {self.tp}, N={self.n}" + (", SP" if self.sequence_parallel else "")


@dataclass(frozen=True)
class Network:
    """Rings of ranks. Over H hosts a chunk passes from host to host H times."""

    launch: float  # seconds per collective
    hop: float  # seconds from rank to rank
    bandwidth: float  # bytes per second that a rank sends
    host_gpus: int = sys.maxsize
    host_hop: float = 0.0  # seconds from host to host
    host_bandwidth: float = math.inf  # bytes per second of all network cards of a host, which its rings share

    def seconds(self, kind, size, ranks):
        """The time of a collective whose whole tensor has `size` bytes."""
        if ranks == 1:
            return 0.0
        hosts = -(-ranks // self.host_gpus)
        between = hosts if hosts > 1 else 0  # hops from host to host
        bandwidth = min(self.bandwidth, self.host_bandwidth) if between else self.bandwidth
        hops = (ranks - 1 - between) * self.hop + between * self.host_hop
        return self.launch + PASSES[kind] * (hops + size * (ranks - 1) / ranks / bandwidth)


@dataclass(frozen=True)
class Times:
    """The fitted numbers of one series, in seconds."""

    per_flop: float  # 1 / rate
    fixed: float = 0.0  # launches, and the last wave of each product
    token: float = 0.0  # per token, for any P: merging partials, losses, coefficients
    paid_ahead: float = 0.0  # share of the forward's gather that costs time although it overlaps
    paid_beside: float = 0.0  # share of a collective beside a product that costs time: it takes SMs

    def seconds(self, series, kind, layout, network):
        known, columns = _terms(series, kind, layout, network, self.per_flop)
        return known + sum(getattr(self, name) * value for name, value in columns.items())


def _terms(series, kind, layout, network, per_flop):
    """`(seconds of the network alone, {name of a number of Times: its factor})`; the time is their sum."""
    known, columns = 0.0, {"per_flop": layout.product * (1 if kind == FORWARD else 3), "fixed": 1.0}
    if series == "bare":
        return known, columns
    if series == "ours":
        columns["token"] = float(layout.n)
        known += network.seconds("all_gather_partials", 4 * (3 * layout.n + 2) * layout.tp, layout.tp)
    size = layout.n * layout.d * layout.itemsize
    gather = network.seconds("all_gather", size, layout.tp) if layout.sequence_parallel else 0.0
    # Ours projects the rank's own tokens during the gather.
    own = layout.product / layout.tp * per_flop if series == "ours" else math.inf
    columns["paid_ahead"] = min(gather, own)
    known += max(0.0, gather - own)
    if kind == BOTH:
        reduction = network.seconds("reduce_scatter" if layout.sequence_parallel else "all_reduce", size, layout.tp)
        product = layout.product * per_flop  # each collective overlaps with one product
        beside = [reduction] if series == "ours" else [gather, reduction]  # ours saves the gathered hidden states
        columns["paid_beside"] = sum(min(collective, product) for collective in beside)
        known += sum(max(0.0, collective - product) for collective in beside)
    return known, columns


@dataclass(frozen=True)
class Readings:
    times: dict  # {(series, pass): [(Layout, seconds)]}
    collectives: list  # [(kind, bytes of the whole tensor, ranks, seconds)]

    def upto(self, tp):
        times = {key: [pair for pair in pairs if pair[0].tp <= tp] for key, pairs in self.times.items()}
        return Readings(times, [reading for reading in self.collectives if reading[2] <= tp])

    @property
    def sizes(self):
        return sorted({layout.tp for pairs in self.times.values() for layout, _ in pairs})


def read(*contents):
    """The Readings of one or several of the benchmark's JSON files."""
    times = {(series, kind): [] for series in SERIES for kind in (FORWARD, BOTH)}
    collectives = {}
    for cell in (cell for content in contents for cell in content["cells"]):
        sizes = (cell[name] for name in ("tp", "n", "v", "d", "sequence_parallel"))
        layout = Layout(*sizes, getattr(torch, cell["dtype"]).itemsize)
        for kind, found in cell["collectives"].items():  # the same in both layouts of a TP size and N
            collectives[kind, found["bytes"], layout.tp] = found["seconds_median"]
        peers = {peer["name"]: peer for peer in cell["peers"]}
        for (series, kind), pairs in times.items():
            # A single rank has nothing to overlap: its GEMM-only baseline is both.
            name = SERIES["bare"] if layout.tp == 1 and series == "with collectives" else SERIES[series]
            measured = peers.get(name, {}).get(kind)
            if measured:
                pairs.append((layout, measured["seconds_median"]))
    return Readings(times, [(*key, seconds) for key, seconds in collectives.items()])


@dataclass(frozen=True)
class Model:
    network: Network
    times: dict  # {(series, pass): Times}

    def seconds(self, series, kind, layout):
        return self.times[series, kind].seconds(series, kind, layout, self.network)

    def errors(self, readings):
        """[(series, kind, Layout, measured seconds, modelled / measured - 1)] of every reading that it can model."""
        return [
            (series, kind, layout, seconds, self.seconds(series, kind, layout) / seconds - 1)
            for (series, kind), pairs in readings.times.items()
            if (series, kind) in self.times
            for layout, seconds in pairs
        ]

    def network_errors(self, readings):
        return [self.network.seconds(*reading[:3]) / reading[3] - 1 for reading in readings.collectives]


def fit(readings):
    """The Model of the readings."""
    rows = []
    for kind, size, ranks, _ in readings.collectives:
        moved = size * (ranks - 1) / ranks
        rows.append({"launch": 1.0, "hop": PASSES[kind] * (ranks - 1), "per_byte": PASSES[kind] * moved})
    found = least_squares(rows, [reading[3] for reading in readings.collectives])
    per_byte = found.get("per_byte", 0.0)
    network = Network(found.get("launch", 0.0), found.get("hop", 0.0), 1 / per_byte if per_byte else math.inf)
    times = {}
    for (series, kind), pairs in readings.times.items():  # forward first: forward + backward takes its `paid_ahead`
        if pairs:
            forward = times.get((series, FORWARD))
            ahead = forward.paid_ahead if kind == BOTH and forward else None
            times[series, kind] = _fit_times(series, kind, pairs, network, ahead)
    return Model(network, times)


def _fit_times(series, kind, pairs, network, ahead):
    per_flop = min(seconds / layout.product for layout, seconds in pairs) / (1 if kind == FORWARD else 3)
    for _ in range(5):  # how long a product hides a collective depends on what is being fitted
        rows, rest = [], []
        for layout, seconds in pairs:
            known, columns = _terms(series, kind, layout, network, per_flop)
            if ahead is not None:
                known += ahead * columns.pop("paid_ahead", 0.0)
            rows.append(columns)
            rest.append(seconds - known)
        found = least_squares(rows, rest, [seconds for _, seconds in pairs])
        per_flop = found.get("per_flop", 0.0)
    return Times(**({"per_flop": 0.0, "paid_ahead": ahead or 0.0} | found))


def least_squares(rows, values, scales=None):
    """`{name: number >= 0}` so that the sum of `row[name] * number` is nearest to each row's value, relative to
    `scales` (by default the values). Negative numbers are left out, the most negative first."""
    names = list(dict.fromkeys(name for row in rows for name in row if row[name]))
    scale = torch.tensor(scales or values, dtype=torch.float64)
    wanted = torch.tensor(values, dtype=torch.float64) / scale
    while names:
        matrix = torch.tensor([[row.get(name, 0.0) for name in names] for row in rows], dtype=torch.float64)
        matrix /= scale[:, None]
        norms = matrix.norm(dim=0)  # flops and ones differ by orders of magnitude
        found = torch.linalg.lstsq(matrix / norms, wanted[:, None], driver="gelsd").solution[:, 0] / norms
        if found.min() >= 0:
            return dict(zip(names, found.tolist()))
        names.pop(int((found * norms).argmin()))
    return {}


def size_of(errors):
    """`(root mean square, largest)` of relative errors."""
    errors = list(errors)
    return math.sqrt(sum(e * e for e in errors) / len(errors)), max(map(abs, errors))


def held_out(readings):
    """`(TP size, errors there)` of a model of the smaller sizes alone; None with fewer than three sizes."""
    if len(readings.sizes) < 3:
        return None
    *others, largest = readings.sizes
    model = fit(readings.upto(others[-1]))
    return largest, [error for error in model.errors(readings) if error[2].tp == largest]


def report(readings, ranks, hosts):
    """Tables and lines: the fitted numbers, the fit's error, and predictions for the `ranks`. `hosts` are fields of
    Network."""
    model = fit(readings)
    network = model.network
    yield _numbers_table(model)
    if readings.collectives:
        yield (
            f"A collective takes {1e6 * network.launch:.3g} us, {1e6 * network.hop:.3g} us per hop and its bytes at "
            f"{network.bandwidth / 1e9:.4g} GB/s; error of that fit: {_percent(model.network_errors(readings))}."
        )
    yield _readings_table(model, readings)
    yield f"Error of the fit: {_of_each(model.errors(readings))}."
    out = held_out(readings)
    if out and out[1]:
        yield f"Error at TP {out[0]} of a fit to the smaller sizes: {_of_each(out[1])}."
    if all(("ours", kind) in model.times for kind in (FORWARD, BOTH)):
        yield _predictions_table(replace(model, network=replace(network, **hosts)), readings, ranks)


def _numbers_table(model):
    columns = ["TFLOP/s", "fixed, us", "per token, ns", "paid ahead", "paid beside"]
    table = new_table(None, None, ["series", "pass"], columns)
    for (series, kind), times in model.times.items():
        rate = f"{1e-12 / times.per_flop:.4g}" if times.per_flop else "any"
        numbers = [f"{1e6 * times.fixed:.3g}", f"{1e9 * times.token:.3g}"]
        numbers += [f"{times.paid_ahead:.2f}", f"{times.paid_beside:.2f}"]
        table.add_row(series, SHORT[kind], rate, *numbers)
    return table


def _readings_table(model, readings):
    """The measured times, each with the model's relative error."""
    table = new_table(None, None, ["", "pass"], [name for s in SERIES for name in (f"{s}, ms", "model")])
    errors = {(s, kind, layout): (seconds, error) for s, kind, layout, seconds, error in model.errors(readings)}
    for layout, kind in dict.fromkeys((layout, kind) for _, kind, layout in errors):
        row = [str(layout), SHORT[kind]]
        for series in SERIES:
            found = errors.get((series, kind, layout))
            row += [f"{1e3 * found[0]:.4g}", f"{1e2 * found[1]:+.1f} %"] if found else [NONE, NONE]
        table.add_row(*row)
    return table


def _predictions_table(model, readings, ranks):
    """A row per TP size and problem."""
    columns = ["forward, ms", "of bare", "fwd+bwd, ms", "of bare", "of bare with collectives"]
    table = new_table(None, None, ["P", "N", "SP"], columns)
    layouts = dict.fromkeys(layout for layout, _ in readings.times["ours", BOTH] if layout.tp > 1)
    for layout in dict.fromkeys(replace(layout, tp=tp) for tp in ranks for layout in layouts):
        row = [str(layout.tp), str(layout.n), "on" if layout.sequence_parallel else "off"]
        for kind, others in ((FORWARD, ("bare",)), (BOTH, ("bare", "with collectives"))):
            mine = model.seconds("ours", kind, layout)
            row.append(f"{1e3 * mine:.3g}")
            for other in others:
                known = (other, kind) in model.times
                row.append(f"{model.seconds(other, kind, layout) / mine:.3f}" if known else NONE)
        table.add_row(*row)
    return table


def _of_each(errors):
    found = {series: [error[-1] for error in errors if error[0] == series] for series in SERIES}
    return "; ".join(f"{series} {_percent(values)}" for series, values in found.items() if values)


def _percent(errors):
    root, largest = size_of(errors)
    return f"{1e2 * root:.1f} % rms, {1e2 * largest:.1f} % at most"


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m parallel_lce.bench.scaling", description="Time over more ranks.")
    add = parser.add_argument
    add("results", nargs="+", metavar="RESULTS.json", help="what launch/bench.sh --json wrote")
    add("--ranks", nargs="+", type=int, default=[16, 32, 64], help="TP sizes to predict")
    add("--host-gpus", type=int, default=8)
    add("--network-gbps", type=float, default=400, help="of each GPU's network card, gigabits per second")
    add("--network-latency-us", type=float, default=10, help="from host to host")
    add("--plot", metavar="PATH", help="write a picture of the measured times against TP")
    options = parser.parse_args(arguments)
    contents = [json.loads(Path(path).read_text(encoding="utf-8")) for path in options.results]
    readings = read(*contents)
    if len(readings.sizes) < 2 or not readings.times["ours", BOTH]:
        parser.error(f"{', '.join(options.results)}: no times of ours for several TP sizes: {readings.sizes}")
    if options.host_gpus < 1 or options.network_gbps <= 0:
        parser.error("--host-gpus and --network-gbps must be positive")
    bandwidth = options.host_gpus * options.network_gbps * 1e9 / 8
    hosts = {"host_gpus": options.host_gpus, "host_bandwidth": bandwidth, "host_hop": options.network_latency_us / 1e6}
    console, latency = new_console(), f"{options.network_latency_us:g} us per hop between hosts"
    for part in report(readings, options.ranks, hosts):
        say(console, part)
    say(console, f"Predicted for {options.host_gpus} GPUs a host, {options.network_gbps:g} Gb/s and {latency}.")
    if options.plot:
        cells = [cell for content in contents for cell in content["cells"]]
        plot_over_ranks(options.plot, contents[0]["machine"], cells)


if __name__ == "__main__":
    main()
