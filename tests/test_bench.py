"""The benchmark: what its suites measure, that it times nothing wrong, and what it writes."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F

from parallel_lce.bench import __main__ as command
from parallel_lce.bench import accuracy, measure, options, peers, timing
from parallel_lce.bench.libraries import torch_loss
from parallel_lce.bench.peers import ALL, ANY, CPU_AND_CUDA, FORWARD, FORWARD_BACKWARD, ONE, PASSES, Peer
from parallel_lce.bench.problem import IGNORE_INDEX, Problem, Shape, make_problem
from parallel_lce.bench.results import Cell, Result
from parallel_lce.bench.suites import SUITES
from parallel_lce.bench.tables import cell_table
from parallel_lce.bench.team import Refused, Team

MIB = 2**20
ALONE = Team(torch.device("cpu"))
TINY = Shape(40, 90, 16)


def a_problem(shape=TINY, dtype=torch.float32, seed=0) -> Problem:
    return make_problem(shape, dtype, ALONE, seed)


def judge_of(problem) -> accuracy.Judge:
    return accuracy.Judge(problem, accuracy.exact(problem), accuracy.torch_in_same_dtype(problem))


def measured(all_peers, problem, rounds, passes=PASSES) -> list[Result]:
    return measure.measure(all_peers, judge_of(problem), rounds, passes)


def plan(*arguments):
    return options.parse_arguments(["--device", "cpu", *arguments]).plan


def text_of(table) -> str:
    from rich.console import Console

    console = Console(width=300)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def rows_of(table) -> list[list[str]]:
    lines = [line for line in text_of(table).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


# --- what a command line measures ------------------------------------------------------------------


def test_the_bars_are_four_shapes_in_four_strategies():
    found = plan("--suite", "bars")
    sizes = [(8192, 128256), (4096, 128256), (32768, 131072), (1024, 262144)]
    assert [(s.n, s.v, s.d) for s in found.shapes] == [(n, v, 4096) for n, v in sizes]
    assert found.ours == (
        ("ours-per-token", ALL),
        ("ours-per-token", 512 * MIB),
        ("ours-main-grad", 512 * MIB),
        ("ours", 1024 * MIB),
    )
    assert found.others is None and found.passes == PASSES


def test_table_2_is_a_full_grid_measured_forward():
    found = plan("--suite", "table2")
    assert len(found.shapes) == 20 == len({s.n for s in found.shapes}) * len({s.v for s in found.shapes})
    assert found.passes == (FORWARD,) and found.others == ("torch",)


def test_every_suite_names_peers_that_exist():
    known = {peer.name for peer in peers.OTHERS}
    for suite in SUITES.values():
        assert {name for name, _ in suite.ours} | set(suite.others or ()) <= known | set(peers.OURS)


def test_options_override_the_suite():
    found = plan("--suite", "bars", "--shape", "3,5,7", "--logits-budget", "0", "--logits-budget", "all")
    assert found.shapes == (Shape(3, 5, 7),)
    kinds = ("ours-per-token", "ours-main-grad", "ours")
    assert found.ours == tuple((name, budget) for budget in (0, ALL) for name in kinds)
    found = plan("--suite", "bars", "--peers", "ours", "torch,torch-compile")
    assert found.ours == (("ours", 1024 * MIB),) and found.others == ("torch", "torch-compile")
    assert plan("--peers", "ours-main-grad").ours == (("ours-main-grad", None),)
    assert [name for name, _ in plan("--suite", "bars", "--without", "ours-per-token").ours] == [
        "ours-main-grad",
        "ours",
    ]
    assert [options.parse_budget(t) for t in ("512MiB", "3 kib", "7", "none", "all")] == [512 * MIB, 3072, 7, None, ALL]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "nothing"], "invalid choice"),
        (["--shape", "1,2"], "three positive numbers N,V,D below 2^31, got '1,2'"),
        (["--shape", "1,x,2"], "three positive numbers N,V,D below 2^31, got '1,x,2'"),
        (["--logits-budget", "5 tons"], "KiB, MiB or GiB, all, or none, got '5 tons'"),
        (["--shape", "0,2,3"], "three positive numbers N,V,D below 2^31, got '0,2,3'"),
        (["--shape", f"1,2,{2**31}"], "three positive numbers N,V,D below 2^31, got '1,2,2147483648'"),
        (["--tp", "2"], "--tp must lie in 1 to 1, the number of ranks, got [2]"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--plot", "p.foo"], "--plot: the suffix must be one of "),
        (["--peers", "nobody"], "no such peer: nobody"),
        (["--without", "nobody"], "no such peer: nobody"),
    ],
)
def test_a_bad_command_line_says_why(arguments, words, capsys):
    with pytest.raises(SystemExit) as refusal:
        plan(*arguments)
    assert refusal.value.code == 2 and words in capsys.readouterr().err


# --- nothing wrong is timed ------------------------------------------------------------------------


def test_the_reference_is_torch_in_float64(monkeypatch):
    monkeypatch.setattr(accuracy, "BLOCK_BYTES", 8 * 90 * 7)  # blocks of 7 tokens, the last of 5
    problem = a_problem(seed=1)
    problem.weight.mul_(4.0)
    x, weight = (t.double().requires_grad_() for t in (problem.x, problem.weight))
    z = F.linear(x, weight)
    expected = F.cross_entropy(z, problem.target, ignore_index=IGNORE_INDEX)
    expected.backward()
    largest, *found = accuracy.exact(problem)
    assert largest == pytest.approx(z.abs().max().item(), rel=1e-12)
    for value, truth in zip(found, (expected.detach(), x.grad, weight.grad)):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-15)
    assert accuracy.exact(problem, gradients=False)[2:] == (None, None)


@pytest.mark.parametrize(
    ("dtype", "rows", "rtol"), [(torch.float32, 40, 1e-5), (torch.float32, 8, 1e-5), (torch.bfloat16, 40, 1e-2)]
)
def test_the_yardstick_is_torch_also_in_blocks(dtype, rows, rtol):
    problem = a_problem(dtype=dtype, seed=2)
    problem.target[8:16] = IGNORE_INDEX  # a block of which no token counts
    x, weight = (t.clone().requires_grad_() for t in (problem.x, problem.weight))
    loss = torch_loss(x, weight, problem.target)
    loss.backward()
    _, *found = accuracy.answers(problem, dtype, True, rows)
    for value, expected in zip(found, (loss.detach(), x.grad, weight.grad)):
        torch.testing.assert_close(value, expected, rtol=rtol, atol=1e-8)


def test_the_yardstick_falls_back_to_blocks_where_memory_is_short(monkeypatch):
    problem, tried = a_problem(Shape(1200, 20, 4)), []

    def answers(problem, dtype, gradients, rows):
        tried.append(rows)
        if rows > 512:
            raise torch.OutOfMemoryError("of the device")
        return "found"

    monkeypatch.setattr(accuracy, "answers", answers)
    assert accuracy.torch_in_same_dtype(problem) == "found" and tried == [1200, 600, 512]


class Faulty(torch.autograd.Function):
    """The right loss times `loss`, the right gradients but for one row of dW times `row`; None is no gradient."""

    @staticmethod
    def forward(ctx, x, weight, target, loss, row):
        ctx.save_for_backward(x, weight, target)
        ctx.row = row
        return loss * torch_loss(x, weight, target)

    @staticmethod
    def backward(ctx, upstream):
        x, weight, target = ctx.saved_tensors
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            grad_x, grad_weight = torch.autograd.grad(torch_loss(*leaves, target), leaves, upstream)
        if ctx.row is None:
            return grad_x, None, None, None, None
        grad_weight[int(target[target >= 0][0])] *= ctx.row
        return grad_x, grad_weight, None, None, None


def raising(x, weight, target):
    raise NotImplementedError("of no use here\nat all")


def faulty(loss, row):
    return lambda x, weight, target: Faulty.apply(x, weight, target, loss, row)


FAULTS = {
    "right": (faulty(1.0, 1.0), ""),
    "wrong loss": (faulty(1.001, 1.0), "refused: loss error 1.0e-03, allowed"),
    "NaN": (faulty(math.nan, 1.0), "refused: loss error nan"),
    "one wrong row": (faulty(1.0, 1.5), "dW row error"),
    "no dW": (faulty(1.0, None), "refused: no dW"),
    "raises": (raising, "failed: NotImplementedError: of no use here"),
}


@pytest.fixture
def no_profiler(monkeypatch):
    """Memory as if measured, where a test is about something else."""
    monkeypatch.setattr(measure, "peak_memory", lambda call, device: (call() is None, 0))


def test_what_is_wrong_is_shown_and_never_timed(monkeypatch, no_profiler):
    timed = []
    monkeypatch.setattr(timing, "clock", lambda call, device: timed.append(call) or 0.5)
    problem = a_problem()
    all_peers = [Peer(name, ANY, CPU_AND_CUDA, lambda *_, loss=loss: loss) for name, (loss, _) in FAULTS.items()]
    all_peers.append(Peer("bare", ANY, CPU_AND_CUDA, None, "bare"))
    results = measured(all_peers, problem, 2)
    assert len(timed) == 2 * 2 * 2  # rounds, passes, peers: the right one and the GEMM-only baseline
    cell = Cell.of(judge_of(problem), PASSES)
    cell.results = results
    rows = {row[0]: row for row in rows_of(cell_table(cell))}
    for result, (_, words) in zip(results, FAULTS.values()):
        assert words in result.refused and bool(words) == bool(result.refused)
        assert result.has(FORWARD) == result.has(FORWARD_BACKWARD) == (not words)
        name = f"{result.peer}, {words.split(':')[0]}" if words.startswith(("refused", "failed")) else None
        assert name is None or rows[name][2] == "–"
    assert results[3].errors["dW row"] > results[3].errors["dW"] > 0  # a refused peer's errors are shown
    assert cell.as_dict()["peers"][1]["refused"].startswith("refused: loss")


def test_nan_in_one_row_is_refused():
    """A row that a peer does not write holds what poison left there."""
    judge = judge_of(a_problem())
    truth = judge.truth[0].float(), judge.truth[1].float(), judge.truth[2].float()
    assert set(judge.check({FORWARD_BACKWARD: truth})) == {"loss", "dX", "dX row", "dW", "dW row"}
    holes = truth[0], truth[1], truth[2].clone()
    holes[2][5] = math.nan
    with pytest.raises(Refused, match="dW error nan"):
        judge.check({FORWARD_BACKWARD: holes})


def test_a_peer_that_fails_when_timed_is_out(monkeypatch, no_profiler):
    calls = []

    def loss(x, weight, target):
        calls.append(1)
        if len(calls) > 4:  # a check and a measurement of memory, of two passes each
            raise RuntimeError("out of something")
        return torch_loss(x, weight, target)

    monkeypatch.setattr(timing, "clock", lambda call, device: call() and 0.5)
    (result,) = measured([Peer("p", ANY, CPU_AND_CUDA, lambda *_: loss)], a_problem(), 3)
    assert result.refused == "failed: RuntimeError: out of something" and not result.has(FORWARD)
    assert len(calls) == 5


def test_main_grad_takes_dw_and_is_no_memory_of_the_call():
    problem = a_problem(Shape(64, 4096, 32), torch.bfloat16)
    strategies = peers.registry([("ours-main-grad", 0), ("ours-per-token", 0)], ONE)[:2]
    results = measured(strategies, problem, 1, (FORWARD_BACKWARD,))
    assert [r.refused for r in results] == ["", ""]
    size = 2 * problem.weight.numel()
    added, returned = (r.gradients[FORWARD_BACKWARD] for r in results)
    assert returned - added == size and added == 2 * problem.x.numel()
    assert results[0].peak[FORWARD_BACKWARD] < results[1].peak[FORWARD_BACKWARD]


# --- what is written -------------------------------------------------------------------------------


def run(monkeypatch, tmp_path, *arguments):
    """(exit status, JSON) of a command on tiny CPU shapes."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-4))
    path = tmp_path / "bench.json"
    status = command.main(["--device", "cpu", "--rounds", "3", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


@pytest.mark.slow
def test_a_run_writes_table_json_and_picture(monkeypatch, tmp_path, capsys):
    picture = tmp_path / "bench.png"
    status, found = run(
        monkeypatch,
        tmp_path,
        "--suite",
        "bars",
        "--shape",
        "40,90,16",
        "--shape",
        "33,70,8",
        "--without",
        "torch-lce",
        "torch-lce-chunked",
        "--plot",
        str(picture),
    )
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["machine"]["torch"] == torch.__version__ and found["settings"]["suite"] == "bars"
    assert [(s["n"], s["v"], s["d"]) for s in found["shapes"]] == [(40, 90, 16), (33, 70, 8)]
    for shape in found["shapes"]:
        entries = {entry["label"]: entry for entry in shape["peers"]}
        assert list(entries) == [
            "ours-per-token (everything saved)",
            "ours-per-token (budget 512 MiB)",
            "ours-main-grad (budget 512 MiB)",
            "ours (budget 1 GiB)",
            "bare",
            "torch",
        ]
        bare = entries["bare"][FORWARD_BACKWARD]["seconds"]
        gradients = 4 * shape["d"] * (shape["n"] + shape["v"])
        for label, entry in entries.items():
            assert entry["refused"] is None and (label == "bare" or entry["errors"]["dX"] < 1e-5)
            assert (FORWARD in entry) == (label in ("bare", "torch", "ours-per-token (everything saved)"))
            both = entry[FORWARD_BACKWARD]
            assert len(both["seconds"]) == 3 and both["seconds_min"] <= both["seconds_median"] <= both["seconds_max"]
            ratios = sorted(b / t for b, t in zip(bare, both["seconds"]))
            assert both["of_bare"] == pytest.approx([ratios[1], ratios[0], ratios[2]])
            mine = gradients - 4 * shape["d"] * shape["v"] if "main-grad" in label else gradients
            assert both["peak_bytes"] - both["beyond_gradients_bytes"] == mine
    printed = capsys.readouterr().out
    assert printed.count("| ours-main-grad (budget 512 MiB) ") == 2
    assert "| N=40, V=90, D=16 |" in printed  # of the whole run
    assert re.search(r"N=40, V=90, D=16, float32, \d+ targets, max \|z\|", printed)


def test_ours_refused_is_a_failure(monkeypatch, no_profiler, tmp_path, capsys):
    monkeypatch.setitem(peers.OURS, "ours", (ANY, lambda *_: faulty(1.0, 1.5)))
    status, found = run(monkeypatch, tmp_path, "--shape", "40,90,16", "--peers", "ours")
    assert status == 1 and "dW row error" in found["shapes"][0]["peers"][0]["refused"]
    assert "ours (budget 0): refused: dW" in capsys.readouterr().out


def test_a_missing_peer_is_named_with_its_reason(monkeypatch, capsys):
    gone = Peer("gone", ANY, CPU_AND_CUDA, None, needs="no_such_module.of_mine")
    monkeypatch.setattr(peers, "OTHERS", (*peers.OTHERS, gone))
    found = options.parse_arguments(["--device", "cpu", "--without", "torch-lce", "torch-lce-chunked"])
    assert found.not_here == {"gone": "no module no_such_module.of_mine"}
    assert [str(peer) for peer in found.chosen] == ["ours (budget 0)", "ours-per-token (budget 0)", "bare", "torch"]
    with pytest.raises(SystemExit) as refusal:
        command.main(["--device", "cpu", "--peers", "gone"])
    assert refusal.value.code == 2 and "cannot run here: gone (no module" in capsys.readouterr().err


def test_readings_on_a_gpu_are_long_enough():
    assert timing.calls_in(0.15, 0.04) == 4
    assert timing.calls_in(0.15, 1.0) == 1
    assert timing.calls_in(0.15, 0.0) == timing.CUDA_CALLS
