"""`python -m benchmarks.scaling RESULTS.json`: a model of the time over P ranks, which docs/scaling.md derives.

The model is fitted to what `launch/bench.sh` measured. The program prints the error of the fit, and predictions for
more ranks on several hosts. The fit is a least-squares fit of relative errors; no number may be negative. `launch`,
`hop` and `bandwidth` are fitted to the collectives alone, the others to the times of each series.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from .peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, SAVED
from .plot import plot_over_ranks
from .tables import NONE, SHORT, new_console, new_table, say

AROUND = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_gather_partials": 1}  # times around a ring
PRODUCTS = {FORWARD: 1, FORWARD_BACKWARD: 3}  # matrix products of a pass
SERIES = (GEMM_ONLY, OVERLAPPED, SAVED)


@dataclass(frozen=True)
class Point:
    """One TP size and problem."""

    tp: int
    n: int
    v: int
    d: int
    sequence_parallel: bool = False
    itemsize: int = 2  # bytes of an element of the hidden states

    @property
    def product(self) -> float:
        """Flops of one of the matrix products on one rank; forward has one, forward + backward three."""
        return 2 * self.n * self.v * self.d / self.tp

    def __str__(self) -> str:
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

    def seconds(self, kind: str, size: float, ranks: int) -> float:
        """The time of a collective whose whole tensor has `size` bytes."""
        if ranks == 1:
            return 0.0
        hosts = -(-ranks // self.host_gpus)
        between = hosts if hosts > 1 else 0  # hops from host to host
        bandwidth = min(self.bandwidth, self.host_bandwidth) if between else self.bandwidth
        hops = (ranks - 1 - between) * self.hop + between * self.host_hop
        return self.launch + AROUND[kind] * (hops + size * (ranks - 1) / ranks / bandwidth)


@dataclass(frozen=True)
class Times:
    """The fitted numbers of one series, in seconds."""

    per_flop: float  # 1 / rate
    fixed: float = 0.0  # launches, and the last wave of each product
    token: float = 0.0  # per token, for any P: merging partials, losses, coefficients
    paid_ahead: float = 0.0  # share of the forward's gather that costs time although it overlaps
    paid_beside: float = 0.0  # share of a collective beside a product that costs time: it takes SMs

    def seconds(self, series: str, kind: str, point: Point, network: Network) -> float:
        known, factors = _terms(series, kind, point, network, self.per_flop)
        return known + sum(getattr(self, name) * factor for name, factor in factors.items())


def _terms(series: str, kind: str, point: Point, network: Network, per_flop: float) -> tuple[float, dict[str, float]]:
    """`(seconds of the network alone, {name of a number of Times: its factor})`; the time is their sum."""
    known, factors = 0.0, {"per_flop": point.product * PRODUCTS[kind], "fixed": 1.0}
    if series == GEMM_ONLY:
        return known, factors
    if series == SAVED:
        factors["token"] = float(point.n)
        known += network.seconds("all_gather_partials", 4 * (3 * point.n + 2) * point.tp, point.tp)
    size = point.n * point.d * point.itemsize
    gather = network.seconds("all_gather", size, point.tp) if point.sequence_parallel else 0.0
    # Ours projects the rank's own tokens during the gather.
    own = point.product / point.tp * per_flop if series == SAVED else math.inf
    factors["paid_ahead"] = min(gather, own)
    known += max(0.0, gather - own)
    if kind == FORWARD_BACKWARD:
        reduction = network.seconds("reduce_scatter" if point.sequence_parallel else "all_reduce", size, point.tp)
        product = point.product * per_flop  # each collective overlaps with one product
        beside = [reduction] if series == SAVED else [gather, reduction]  # ours saves the gathered hidden states
        factors["paid_beside"] = sum(min(collective, product) for collective in beside)
        known += sum(max(0.0, collective - product) for collective in beside)
    return known, factors


@dataclass(frozen=True)
class Readings:
    times: list  # [(series, pass, Point, seconds)]
    collectives: list  # [(kind, bytes of the whole tensor, ranks, seconds)]

    def upto(self, tp: int) -> "Readings":
        return Readings([time for time in self.times if time[2].tp <= tp], [c for c in self.collectives if c[2] <= tp])

    @property
    def sizes(self) -> list[int]:
        return sorted({point.tp for _, _, point, _ in self.times})


def read(*contents: dict) -> Readings:
    """The Readings of one or several of the benchmark's JSON files."""
    times, collectives = [], {}
    for cell in (cell for content in contents for cell in content["cells"]):
        sizes = (cell[name] for name in ("tp", "n", "v", "d", "sequence_parallel"))
        point = Point(*sizes, itemsize=getattr(torch, cell["dtype"]).itemsize)
        for kind, found in cell["collectives"].items():  # the same in both layouts of a TP size and N
            collectives[kind, found["bytes"], point.tp] = found["seconds_median"]
        peers = {peer["name"]: peer for peer in cell["peers"]}
        if point.tp == 1 and GEMM_ONLY in peers:  # a single rank has nothing to overlap
            peers[OVERLAPPED] = peers[GEMM_ONLY]
        for series, kind in itertools.product(SERIES, PRODUCTS):
            if kind in peers.get(series, {}):
                times.append((series, kind, point, peers[series][kind]["seconds_median"]))
    return Readings(times, [(*key, seconds) for key, seconds in collectives.items()])


@dataclass(frozen=True)
class Model:
    network: Network
    times: dict[tuple[str, str], Times]  # by series and pass

    def seconds(self, series: str, kind: str, point: Point) -> float:
        return self.times[series, kind].seconds(series, kind, point, self.network)

    def errors(self, readings: Readings) -> list[tuple]:
        """[(series, pass, Point, measured seconds, modelled / measured - 1)] of every reading that it can model."""
        known = [time for time in readings.times if time[:2] in self.times]
        return [(*time, self.seconds(*time[:3]) / time[3] - 1) for time in known]

    def network_errors(self, readings: Readings) -> list[float]:
        return [self.network.seconds(*reading[:3]) / reading[3] - 1 for reading in readings.collectives]


def fit(readings: Readings) -> Model:
    rows = []
    for kind, size, ranks, _ in readings.collectives:
        moved = size * (ranks - 1) / ranks
        rows.append({"launch": 1.0, "hop": AROUND[kind] * (ranks - 1), "per_byte": AROUND[kind] * moved})
    seconds = [reading[3] for reading in readings.collectives]
    found = least_squares(rows, seconds, seconds)
    per_byte = found.get("per_byte", 0.0)
    network = Network(found.get("launch", 0.0), found.get("hop", 0.0), 1 / per_byte if per_byte else math.inf)
    times = {}
    for series, kind in itertools.product(SERIES, PRODUCTS):  # forward first: the other takes its `paid_ahead`
        pairs = [(point, time) for *key, point, time in readings.times if key == [series, kind]]
        if pairs:
            times[series, kind] = _fit_times(series, kind, pairs, network, times.get((series, FORWARD)))
    return Model(network, times)


def _fit_times(series: str, kind: str, pairs: list, network: Network, forward: Times | None) -> Times:
    per_flop = min(seconds / point.product for point, seconds in pairs) / PRODUCTS[kind]
    known = {} if forward is None else {"paid_ahead": forward.paid_ahead}
    found = {}
    for _ in range(5):  # how long a product hides a collective depends on what is being fitted
        rows, rest = [], []
        for point, seconds in pairs:
            of_network, factors = _terms(series, kind, point, network, per_flop)
            of_network += sum(value * factors.pop(name, 0.0) for name, value in known.items())
            rows.append(factors)
            rest.append(seconds - of_network)
        found = least_squares(rows, rest, [seconds for _, seconds in pairs])
        per_flop = found.get("per_flop", 0.0)
    return Times(**({"per_flop": 0.0} | known | found))


def least_squares(rows: list[dict[str, float]], values: list[float], scales: list[float]) -> dict[str, float]:
    """`{name: number >= 0}` so that the sum of `row[name] * number` is nearest to each row's value, relative to
    `scales`. Negative numbers are left out, the most negative first."""
    names = list(dict.fromkeys(name for row in rows for name in row if row[name]))
    scale = torch.tensor(scales, dtype=torch.float64)
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


def size_of(errors: Iterable[float]) -> tuple[float, float]:
    """`(root mean square, largest)` of relative errors."""
    sizes = [abs(error) for error in errors]
    return math.hypot(*sizes) / math.sqrt(len(sizes)), max(sizes)


def held_out(readings: Readings) -> tuple[int, list[tuple]] | None:
    """`(TP size, errors there)` of a model of the smaller sizes alone; None with fewer than three sizes."""
    if len(readings.sizes) < 3:
        return None
    *_, before, largest = readings.sizes
    errors = fit(readings.upto(before)).errors(readings)
    return largest, [error for error in errors if error[2].tp == largest]


def report(readings: Readings, ranks: list[int], hosts: dict[str, float]) -> Iterator[str | Table]:
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
    errors = model.errors(readings)
    yield _readings_table(errors)
    yield f"Error of the fit: {_of_each(errors)}."
    out = held_out(readings)
    if out and out[1]:
        yield f"Error at TP {out[0]} of a fit to the smaller sizes: {_of_each(out[1])}."
    if {(SAVED, FORWARD), (SAVED, FORWARD_BACKWARD)} <= model.times.keys():
        points = dict.fromkeys(point for series, _, point, _ in readings.times if series == SAVED and point.tp > 1)
        predicted = [replace(point, tp=tp) for tp in ranks for point in points]
        yield _predictions_table(replace(model, network=replace(network, **hosts)), predicted)


def _numbers_table(model: Model) -> Table:
    columns = ["TFLOP/s", "fixed, us", "per token, ns", "paid ahead", "paid beside"]
    table = new_table(None, None, ["series", "pass"], columns)
    for (series, kind), times in model.times.items():
        rate = f"{1e-12 / times.per_flop:.4g}" if times.per_flop else "any"
        numbers = [f"{1e6 * times.fixed:.3g}", f"{1e9 * times.token:.3g}"]
        numbers += [f"{times.paid_ahead:.2f}", f"{times.paid_beside:.2f}"]
        table.add_row(series, SHORT[kind], rate, *numbers)
    return table


def _readings_table(errors: list[tuple]) -> Table:
    """The measured times, each with the model's relative error."""
    table = new_table(None, None, ["", "pass"], [name for s in SERIES for name in (f"{s}, ms", "model")])
    rows = {}
    for series, kind, point, seconds, error in errors:
        rows.setdefault((point, kind), {})[series] = f"{1e3 * seconds:.4g}", f"{1e2 * error:+.1f} %"
    for (point, kind), found in rows.items():
        texts = [text for series in SERIES for text in found.get(series, (NONE, NONE))]
        table.add_row(str(point), SHORT[kind], *texts)
    return table


def _predictions_table(model: Model, points: list[Point]) -> Table:
    columns = ["forward, ms", "of GEMM-only", "fwd+bwd, ms", "of GEMM-only", "of overlapped"]
    table = new_table(None, None, ["P", "N", "SP"], columns)
    for point in dict.fromkeys(points):
        row = [str(point.tp), str(point.n), "on" if point.sequence_parallel else "off"]
        for kind, others in ((FORWARD, (GEMM_ONLY,)), (FORWARD_BACKWARD, (GEMM_ONLY, OVERLAPPED))):
            mine = model.seconds(SAVED, kind, point)
            row.append(f"{1e3 * mine:.3g}")
            for other in others:
                known = (other, kind) in model.times
                row.append(f"{model.seconds(other, kind, point) / mine:.3f}" if known else NONE)
        table.add_row(*row)
    return table


def _of_each(errors: list[tuple]) -> str:
    found = {series: [error[-1] for error in errors if error[0] == series] for series in SERIES}
    return "; ".join(f"{series} {_percent(values)}" for series, values in found.items() if values)


def _percent(errors: list[float]) -> str:
    return "{:.1f} % rms, {:.1f} % at most".format(*(1e2 * size for size in size_of(errors)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="Time over more ranks.")
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
    if len(readings.sizes) < 2 or not any(time[:2] == (SAVED, FORWARD_BACKWARD) for time in readings.times):
        files, wanted = ", ".join(options.results), "times of forward + backward at several TP sizes"
        parser.error(f"{files}: no peer named {SAVED} has {wanted}")
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
