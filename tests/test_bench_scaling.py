"""The scaling model: known numbers are recovered from times made of them, and what does not fit is seen."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from benchmarks import scaling
from benchmarks.peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, OVERLAPPED, SAVED
from benchmarks.scaling import AROUND, Model, Network, Point, Readings, Times

NETWORK = Network(launch=8e-6, hop=1.5e-6, bandwidth=300e9)
RATE = 7e14
TIMES = {
    (GEMM_ONLY, FORWARD): Times(1 / RATE, 20e-6),
    (GEMM_ONLY, FORWARD_BACKWARD): Times(1.1 / RATE, 50e-6),
    (OVERLAPPED, FORWARD): Times(1 / RATE, 20e-6, 0.0, 1.0),
    (OVERLAPPED, FORWARD_BACKWARD): Times(1.1 / RATE, 50e-6, 0.0, 1.0, 0.5),
    (SAVED, FORWARD): Times(1.02 / RATE, 40e-6, 2e-9, 0.3),
    (SAVED, FORWARD_BACKWARD): Times(1.15 / RATE, 90e-6, 5e-9, 0.3, 0.7),
}
POINTS = [
    Point(tp, n, 131072, 4096, sequence_parallel)
    for tp in (1, 2, 4, 8)
    for n in (8192, 32768)
    for sequence_parallel in ((False, True) if tp > 1 else (False,))
]


MODEL = Model(NETWORK, TIMES)


def made_up(model=MODEL, points=POINTS) -> Readings:
    """What a machine would measure of which the model is true."""
    times = [(*key, point, model.seconds(*key, point)) for key in TIMES for point in points]
    collectives = []
    for ranks, n in {(point.tp, point.n) for point in points if point.tp > 1}:
        for kind in AROUND:
            size = 4 * (3 * n + 2) * ranks if kind == "all_gather_partials" else 2 * n * 4096
            collectives.append((kind, size, ranks, model.network.seconds(kind, size, ranks)))
    return Readings(times, collectives)


def slower(readings: Readings, tp: int, factor: float) -> Readings:
    """The same, but ours takes ``factor`` times as long on so many ranks."""
    times = [
        (*key, point, time * factor if key == [SAVED, FORWARD_BACKWARD] and point.tp == tp else time)
        for *key, point, time in readings.times
    ]
    return replace(readings, times=times)


def test_known_numbers_are_recovered():
    model = scaling.fit(made_up())
    for name in ("launch", "hop", "bandwidth"):
        assert getattr(model.network, name) == pytest.approx(getattr(NETWORK, name), rel=1e-6)
    for key, times in TIMES.items():
        for name, value in vars(times).items():
            assert getattr(model.times[key], name) == pytest.approx(value, rel=1e-3, abs=1e-12), (key, name)


def test_the_error_of_a_model_that_holds_is_nothing_and_smaller_sizes_predict_the_largest():
    readings = made_up()
    model = scaling.fit(readings)
    assert scaling.size_of(model.network_errors(readings))[1] < 1e-6
    errors = model.errors(readings)
    assert len(errors) == len(TIMES) * len(POINTS) and max(abs(error[-1]) for error in errors) < 1e-4
    tp, errors = scaling.held_out(readings)
    assert tp == 8 and {error[2].tp for error in errors} == {8}
    assert max(abs(error[-1]) for error in errors) < 1e-3


def test_a_deviation_is_seen_in_the_errors():
    """Of a tenth at TP 8, the fit takes up a part, and a fit to the smaller sizes nothing."""
    readings = slower(made_up(), 8, 1.1)
    root, largest = scaling.size_of(error[-1] for error in scaling.fit(readings).errors(readings))
    assert 0.01 < largest < 0.1 and 0 < root < largest
    _, errors = scaling.held_out(readings)
    of_ours = [error[-1] for error in errors if error[:2] == (SAVED, FORWARD_BACKWARD)]
    assert of_ours == pytest.approx([1 / 1.1 - 1] * 4, rel=1e-2)
    assert max(abs(error[-1]) for error in errors if error[0] != SAVED) < 1e-3


def test_a_collective_that_no_product_hides_is_paid():
    """dX's all-reduce takes longer than dW's product where ranks are many and the network is slow."""
    slow = replace(NETWORK, bandwidth=1e9)
    point = Point(8, 8192, 131072, 4096)
    model = Model(slow, {(SAVED, FORWARD_BACKWARD): Times(1 / RATE)})
    collective = slow.seconds("all_reduce", 8192 * 4096 * 2, 8)
    product = point.product / RATE
    partials = slow.seconds("all_gather_partials", 4 * (3 * 8192 + 2) * 8, 8)
    assert collective > product
    assert model.seconds(SAVED, FORWARD_BACKWARD, point) == pytest.approx(3 * product + partials + collective - product)
    model = Model(slow, {(SAVED, FORWARD_BACKWARD): Times(1 / RATE, paid_beside=1.0)})
    assert model.seconds(SAVED, FORWARD_BACKWARD, point) == pytest.approx(3 * product + partials + collective)


def test_a_ring_by_hand():
    """An all-reduce of 800 bytes on 8 ranks sends 700 bytes twice, in seven hops each time."""
    network = Network(launch=1.0, hop=0.5, bandwidth=100.0)
    assert network.seconds("all_reduce", 800, 8) == 1 + 2 * (7 * 0.5 + 7)
    assert network.seconds("all_gather", 800, 8) == 1 + 7 * 0.5 + 7
    assert network.seconds("all_gather", 800, 1) == 0
    hosts = replace(network, host_gpus=4, host_hop=10.0, host_bandwidth=50.0)
    assert hosts.seconds("all_gather", 800, 4) == network.seconds("all_gather", 800, 4)
    assert hosts.seconds("all_gather", 800, 8) == 1 + 5 * 0.5 + 2 * 10 + 14
    assert replace(hosts, host_bandwidth=400.0).seconds("all_gather", 800, 8) == 1 + 5 * 0.5 + 2 * 10 + 7


def test_least_squares_leaves_out_what_would_be_negative():
    rows = [{"a": float(k), "b": 1.0} for k in (1, 2, 3)]
    assert scaling.least_squares(rows, [5.0, 7.0, 9.0], [5.0, 7.0, 9.0]) == pytest.approx({"a": 2, "b": 3})
    found = scaling.least_squares(rows, [1.0, 3.0, 5.0], [1.0, 3.0, 5.0])  # 2 a - 1
    assert set(found) == {"a"} and found["a"] > 1
    assert scaling.least_squares([{"a": 0.0}], [1.0], [1.0]) == {}


def results(readings: Readings) -> dict:
    """The readings as the benchmark writes them, each gemm-only-overlapped only where there is something to overlap."""
    cells = {}
    for series, kind, point, seconds in readings.times:
        sizes = {name: value for name, value in vars(point).items() if name != "itemsize"}
        cell = cells.setdefault(point, {**sizes, "dtype": "bfloat16", "peers": {}, "collectives": {}})
        if point.tp > 1 or series != OVERLAPPED:
            entry = cell["peers"].setdefault(series, {"name": series})
            entry[kind] = {f"seconds_{of}": seconds for of in ("median", "min", "max")}
        for of, size, ranks, time in readings.collectives:
            if ranks == point.tp and size in (2 * point.n * point.d, 4 * (3 * point.n + 2) * ranks):
                cell["collectives"][of] = {"bytes": size, "seconds_median": time}
    cells = [{**cell, "peers": list(cell["peers"].values())} for cell in cells.values()]
    return {"machine": {"device": "made up", "torch": "2"}, "cells": cells}


def test_what_is_read_is_what_was_written():
    single = {(OVERLAPPED, kind): TIMES[GEMM_ONLY, kind] for kind in (FORWARD, FORWARD_BACKWARD)}
    readings = made_up(Model(NETWORK, TIMES | single), [point for point in POINTS if point.tp == 1])
    rest = made_up(points=[point for point in POINTS if point.tp > 1])
    found = scaling.read(results(readings), results(rest))
    assert set(found.times) == {*readings.times, *rest.times}
    assert len(found.times) == len(readings.times) + len(rest.times)
    assert set(found.collectives) == set(rest.collectives)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_program_prints_errors_and_predictions(tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(slower(made_up(), 8, 1.1))))
    picture = tmp_path / "scaling.png"
    options = ["--ranks", "16", "64", "--host-gpus", "8", "--network-gbps", "400", "--plot", str(picture)]
    scaling.main([str(path), *options])
    assert picture.stat().st_size > 10_000
    printed = capsys.readouterr().out
    (held_out,) = (line for line in printed.splitlines() if line.startswith("Error at TP 8 of a fit to the smaller"))
    assert "gemm-only 0.0 % rms, 0.0 % at most; " in held_out and held_out.endswith("9.1 % at most.")
    rows = [cells_of(line) for line in printed.splitlines() if line.startswith(("| 16 |", "| 64 |"))]
    assert [row[:3] for row in rows] == [
        [p, n, sp] for p in ("16", "64") for n in ("8192", "32768") for sp in ("off", "on")
    ]
    model = scaling.fit(slower(made_up(), 8, 1.1))
    hosts = replace(model.network, host_gpus=8, host_hop=10e-6, host_bandwidth=400e9)
    point = Point(16, 32768, 131072, 4096, True)
    mine = replace(model, network=hosts).seconds(SAVED, FORWARD_BACKWARD, point)
    bare = replace(model, network=hosts).seconds(GEMM_ONLY, FORWARD_BACKWARD, point)
    assert float(rows[3][5]) == pytest.approx(1e3 * mine, rel=1e-2)
    assert float(rows[3][6]) == pytest.approx(bare / mine, abs=1e-3)


@pytest.mark.parametrize(("points", "series"), [(POINTS[:2], TIMES), (POINTS, [(GEMM_ONLY, FORWARD_BACKWARD)])])
def test_the_program_refuses_what_says_nothing_about_scaling(points, series, tmp_path, capsys):
    readings = made_up(points=points)
    readings = replace(readings, times=[time for time in readings.times if time[:2] in series])
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(readings)))
    with pytest.raises(SystemExit) as refusal:
        scaling.main([str(path)])
    words = f"error: {path}: no peer named {SAVED} has times of forward + backward at several TP sizes"
    assert refusal.value.code == 2 and words in capsys.readouterr().err


def test_two_sizes_leave_none_out():
    assert scaling.held_out(made_up(points=[point for point in POINTS if point.tp < 4])) is None
    assert math.isinf(scaling.fit(made_up(points=POINTS[:2])).network.bandwidth)


def test_a_gather_is_hidden_by_no_more_than_a_rank_s_own_tokens():
    """Of which there are fewer the more ranks there are; the GEMM-only baseline has nothing beside it at all."""
    network, times = Network(1e-5, 0.0, 1e11), Times(per_flop=1e-15)
    for tp in (2, 64):
        point = Point(tp, 8192, 131072, 4096, sequence_parallel=True)
        flat = replace(point, sequence_parallel=False)
        gather = network.seconds("all_gather", 8192 * 4096 * 2, tp)
        own = 1e-15 * point.product / tp
        for series, exposed in ((SAVED, max(0.0, gather - own)), (OVERLAPPED, 0.0)):
            seconds = [times.seconds(series, FORWARD, each, network) for each in (point, flat)]
            assert seconds[0] - seconds[1] == pytest.approx(exposed)
        assert (gather > own) == (tp == 64)
