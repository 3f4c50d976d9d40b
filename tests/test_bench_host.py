"""The benchmark of small problems: the host's time, the operations of a GPU, and who is the fastest where."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from benchmarks import __main__ as command
from benchmarks import breakdown, options, timing
from benchmarks.breakdown import CALL, CALLS, Breakdown, Operation, break_down, of_events
from benchmarks.peers import FORWARD, FORWARD_BACKWARD, GEMM_ONLY, ONE, PASSES, named
from benchmarks.problem import Shape
from benchmarks.results import Cell, Measured, Result
from benchmarks.tables import cell_table, grid, host_tables, verdict
from test_bench import ALONE, MIB, rows_of, text_of

SHAPE = Shape(64, 4096, 2048)
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def parsed(*arguments):
    return options.parse_arguments(["--device", "cpu", *arguments])


# --- what a suite measures -------------------------------------------------------------------------


def test_the_host_suite_reads_every_strategy_without_gradients_too():
    found = parsed("--suite", "host")
    assert found.plan.shapes == (Shape(1024, 8192, 1024),) and found.plan.host and found.plan.rounds == 5
    names = ["ours-per-token", "ours", "ours@0", "ours-statistics", GEMM_ONLY, "torch", "torch-compile"]
    assert [(peer.name, peer.passes) for peer in found.chosen] == [(name, PASSES) for name in names]


def test_the_small_suite_is_a_grid_of_twenty_cells():
    found = parsed("--suite", "small")
    assert len(found.plan.shapes) == 20 == len({s.n for s in found.plan.shapes}) * 4
    assert {(s.d, s.v) for s in found.plan.shapes} == {(1024, 32768), (2048, 50304), (2048, 65536), (4096, 128256)}
    assert found.plan.passes == (FORWARD_BACKWARD,) and (found.plan.rounds, found.plan.reading) == (3, 1 / 3)
    assert {"ours-per-token", GEMM_ONLY, "torch", "torch-compile"} <= {peer.name for peer in found.chosen}
    assert parsed("--suite", "small", "--rounds", "1").plan.rounds == 1


def test_the_lean_suite_has_no_others():
    found = parsed("--suite", "lean")
    assert [peer.name for peer in found.chosen] == ["ours-per-token@0", GEMM_ONLY]
    sizes = [(32768, 131072), (8192, 128256), (32768, 16384), (8192, 16384)]
    assert [(s.n, s.v, s.d) for s in found.plan.shapes] == [(n, v, 4096) for n, v in sizes]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "hosts"], "invalid choice: 'hosts'"),
        (["--suite", "host", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--suite", "host", "--peers", "ours-statistics@none"], "or all, got 'none'"),
        (["--suite", "small", "--shape", "1,2"], "three positive numbers N,V,D below 2^31, got '1,2'"),
        (["--suite", "lean", "--tp", "2"], "--tp must lie in 1 to 1, the number of ranks, got [2]"),
    ],
)
def test_a_wrong_option_is_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as refusal:
        parsed(*arguments)
    assert refusal.value.code == 2 and words in capsys.readouterr().err


# --- the host's time -------------------------------------------------------------------------------


def test_the_host_is_timed_from_call_to_return_while_the_device_is_idle(monkeypatch):
    said, seconds = [], iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(timing, "synchronize", lambda device: said.append("idle"))
    clock = SimpleNamespace(perf_counter=lambda: said.append("clock") or next(seconds))
    monkeypatch.setattr(timing, "time", clock)
    assert timing.host_clock(lambda: said.append("call"), 1, 3, GPU) == 2.0  # the median of 3, 1 and 2
    assert said == ["call", *["idle", "clock", "call", "clock"] * 3, "idle"]


def test_a_short_reading_has_fewer_calls(monkeypatch):
    counts = []
    monkeypatch.setitem(timing.ALONE, "cpu", (0.03, 0.06))
    monkeypatch.setattr(timing, "clock", lambda call, warm_up, calls, device: counts.append((warm_up, calls)) or 0.01)
    timing.timer(lambda: None, ALONE)()
    timing.timer(lambda: None, ALONE, 1 / 3)()
    assert counts == [*[(0, 1)] * 3, (3, 6), *[(0, 1)] * 3, (3, 2)]


# --- what a call is made of ------------------------------------------------------------------------


def event(category, name, start, length) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


def traced(calls: int) -> list[dict]:
    """What a profiler would write of so many calls of 100 us, the first of which it makes four times as slow."""
    events = [{"ph": "M", "name": "process_name"}, {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1.0}]
    start = 0.0
    for number in range(calls):
        slow = 1 if number else 4
        events += [
            event("kernel", "gemm", start + 30 * slow, 40.0),
            event("gpu_memset", "Memset (Device)", start + 20 * slow, 4.0),
            event("kernel", "gemm", start + 80 * slow, 36.0),
            event("gpu_user_annotation", CALL, start, 200.0),  # the annotation as the GPU sees it
            event("cuda_runtime", "cudaLaunchKernel", start + 15 * slow, 10.0 * slow),
            event("cuda_driver", "cuLaunchKernelEx", start + 50 * slow, 5.0 * slow),
            event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", start + 5 * slow, 90.0 * slow),
            event("cpu_op", "aten::matmul", start + 10 * slow, 30.0 * slow),
            event("cpu_op", "aten::mm", start + 12 * slow, 20.0 * slow),
            event("cpu_op", "parallel_lce::loss", start + 60 * slow, 20.0 * slow),
            event("cpu_op", "aten::detach", start + 95 * slow, 10.0 * slow),  # the last half is after the call
            event("user_annotation", CALL, start, 100.0 * slow),
            event("cuda_runtime", "cudaDeviceSynchronize", start + 110 * slow, 50.0),
        ]
        start += 1000.0
    return events


def test_a_call_is_made_of_gpu_operations_and_shares_of_the_host():
    found = of_events(traced(3))
    assert [(o.name, o.count) for o in found.operations] == [("Memset (Device)", 1), ("gemm", 2)]
    assert [o.seconds for o in found.operations] == pytest.approx([4e-6, 76e-6])
    assert found.host_seconds == pytest.approx(100e-6)
    assert (found.cuda, found.torch, found.rest) == pytest.approx((0.15, 0.25, 0.6))


def test_a_call_on_the_cpu_has_no_gpu_operations():
    x = torch.ones(64, 64)
    found = break_down(lambda: x @ x, CPU)
    assert found.operations == [] and found.cuda == 0
    assert 0 < found.torch < 1 and found.torch + found.rest == pytest.approx(1) and found.host_seconds > 0


def test_on_a_gpu_every_profiled_call_finds_it_idle(monkeypatch):
    said = []
    monkeypatch.setattr(breakdown, "profile", lambda activities: said.append(activities) or nullcontext())
    monkeypatch.setattr(breakdown, "synchronize", lambda device: said.append("idle"))
    monkeypatch.setattr(breakdown, "trace_events", lambda profiled: traced(CALLS))
    assert sum(o.count for o in break_down(lambda: said.append("call"), GPU).operations) == 3
    assert said == ["idle", [ProfilerActivity.CPU, ProfilerActivity.CUDA], *["call", "idle"] * CALLS]


# --- what is printed -------------------------------------------------------------------------------


def made_up(shape=SHAPE, breakdowns=None, **milliseconds) -> Cell:
    """Times that nobody measured; keys are peers, with _ for -."""
    results = []
    for name, seconds in milliseconds.items():
        times = Measured(8 * MIB, 5 * MIB, [1e-3 * seconds] * 3)
        if breakdowns:
            times.host_seconds, times.breakdown = [2e-3 * seconds, 1e-3 * seconds], breakdowns.get(name)
        results.append(Result(named(name.replace("_", "-"), ONE), passes=dict.fromkeys(PASSES, times)))
    return Cell(1, shape, False, torch.bfloat16, results)


def test_the_host_has_a_row_per_pass_and_each_peer_its_operations():
    its = Breakdown([Operation("Memset [Device]", 1, 2e-6), Operation("void " + "k" * 300, 2.5, 6e-6)], 4e-3, 0.25, 0.5)
    cell = made_up(breakdowns={"ours_per_token": its}, ours_per_token=1, torch=2)
    hosts, operations = host_tables(cell)
    columns, *rows = rows_of(hosts)
    assert columns[2:] == ["host ms", "GPU operations", "GPU ms", "profiled host ms", "CUDA", "torch", "rest"]
    assert [row[:2] for row in rows[1:3]] == [["ours-per-token", "fwd+bwd"], ["torch", "forward"]]
    assert rows[1][2:] == ["1.5 (1–2)", "3.5", "0.008", "4", "25%", "50%", "25%"]
    assert rows[3][2:] == ["3 (2–4)"] + ["–"] * 6
    _, fill, kernel = rows_of(operations)
    assert fill[1:] == ["2.0", "25.0%", "1"] * 2 and kernel[1:] == ["6.0", "75.0%", "2.5"] * 2
    assert kernel[0] == "k" * 100 and "ours-per-token: GPU operations of one call" in text_of(operations)
    assert not list(host_tables(made_up(ours=1))) and "host" not in text_of(cell_table(made_up(ours=1)))
    written = cell.as_dict()["peers"][0][FORWARD]
    assert written["host_seconds_median"] == 1.5e-3 and len(written["breakdown"]["operations"][1]["name"]) == 305


def test_an_operation_of_one_pass_has_no_figures_in_the_other():
    cell = made_up(breakdowns={"none": None}, ours=1)
    (result,) = cell.results
    for kind, name in zip(PASSES, ("a", "b")):
        result.passes[kind] = Measured(0, 0, [1.0], [1.0], Breakdown([Operation(name, 1, 1e-6)], 1.0, 0.0, 0.0))
    _, operations = host_tables(cell)
    _, *rows = rows_of(operations)
    assert rows == [["b", *["–"] * 3, "1.0", "100.0%", "1"], ["a", "1.0", "100.0%", "1", *["–"] * 3]]


def test_the_fastest_is_one_with_a_gradient_per_token():
    ours_slower = made_up(
        ours=1, ours_per_token=10, ours_statistics=9, gemm_only=8, torch=12, megatron_fused=9, liger=2
    )
    assert verdict(ours_slower) == (
        "N=64, V=4096, D=2048, fwd+bwd: megatron-fused is the fastest of those with a gradient per token; "
        "ours-per-token has 0.90 of the speed of megatron-fused and 0.80 of that of the GEMM-only baseline."
    )
    assert ": ours-per-token is the fastest" in verdict(made_up(ours_per_token=10, gemm_only=8, torch=10.1))
    assert verdict(made_up(ours_per_token=10, gemm_only=8)) == verdict(made_up(ours=10, torch=8)) == ""


def test_a_grid_of_cells_is_a_table():
    shapes = [Shape(n, v, d) for v, d in ((90, 16), (90, 8)) for n in (32, 64)]
    cells = [made_up(s, ours_per_token=s.n, gemm_only=s.d, torch=64) for s in shapes]
    assert rows_of(grid(cells)) == [
        ["N", "D=16, V=90", "D=8, V=90"],
        ["32", "2.00 / 0.50", "2.00 / 0.25"],
        ["64", "1.00 / 0.25", "1.00 / 0.12"],
    ]
    alone = [made_up(s, ours_per_token=s.n, gemm_only=s.d) for s in shapes]
    assert rows_of(grid(alone))[1] == ["32", "– / 0.50", "– / 0.25"]
    assert grid(cells[:3]) is None and grid(cells[:2]) is None and grid([*cells, cells[0]]) is None


# --- a whole run -----------------------------------------------------------------------------------


def run(tmp_path, *arguments) -> dict:
    path = tmp_path / "host.json"
    assert command.main(["--rounds", "2", "--json", str(path), *arguments]) == 0
    return json.loads(path.read_text())


def test_a_run_without_a_gpu_has_the_hosts_time_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-4))
    arguments = ("--device", "cpu", "--suite", "host", "--shape", "40,90,16", "--without", "torch-compile")
    (cell,) = run(tmp_path, *arguments)["cells"]
    for entry in cell["peers"]:
        assert entry["refused"] is None
        for kind in PASSES:
            assert len(entry[kind]["host_seconds"]) == 2 and entry[kind]["host_seconds_median"] > 0
            assert entry[kind]["breakdown"] is None
    printed = capsys.readouterr().out
    assert "N=40, V=90, D=16, float32: the host" in printed and "GPU operations of one call" not in printed


@pytest.mark.gpu
def test_a_run_on_a_gpu_names_the_operations(tmp_path, capsys):
    arguments = ("--device", "cuda", "--suite", "host", "--shape", "256,512,128", "--without", "torch-compile")
    (cell,) = run(tmp_path, *arguments)["cells"]
    for entry in cell["peers"]:
        assert entry["refused"] is None
        counts = {kind: sum(o["count"] for o in entry[kind]["breakdown"]["operations"]) for kind in PASSES}
        assert counts[FORWARD] >= 1 and counts[FORWARD_BACKWARD] >= 3
        assert all(0 < entry[kind]["breakdown"]["cuda"] < 1 for kind in PASSES)
        if entry["name"] == GEMM_ONLY:
            assert counts[FORWARD_BACKWARD] < 10
    assert "ours-per-token: GPU operations of one call" in capsys.readouterr().out
