"""The benchmark: what its suites measure, that it times nothing wrong, and what it writes."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F

from benchmarks import __main__ as command
from benchmarks import accuracy, measure, options, peers, timing
from benchmarks.libraries import torch_loss
from benchmarks.peak_memory import peak_memory
from benchmarks.peers import ALL, ANY, CPU_AND_CUDA, FORWARD, FORWARD_BACKWARD, ONE, PASSES, Peer
from benchmarks.problem import IGNORE_INDEX, Problem, Shape, make_problem
from benchmarks.results import Cell, Result
from benchmarks.suites import SUITES, Suite
from benchmarks.tables import cell_table
from benchmarks.team import NotTimed, Team

MIB = 2**20
ALONE = Team(torch.device("cpu"))
TINY = Shape(40, 90, 16)


def a_problem(shape=TINY, dtype=torch.float32, seed=0) -> Problem:
    return make_problem(shape, dtype, ALONE, seed)


def judge_of(problem) -> accuracy.Judge:
    return accuracy.Judge(
        problem, *(accuracy.answers(problem, dtype) for dtype in (torch.float64, problem.hidden.dtype))
    )


def measured(all_peers, problem, rounds, passes=PASSES) -> list[Result]:
    return measure.measure(all_peers, judge_of(problem), Suite((), (), passes=passes, rounds=rounds))


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
    assert found.ours == ("ours-per-token@all", "ours-per-token@512MiB", "ours-main-grad@512MiB", "ours@1GiB")
    assert found.others is None and found.passes == PASSES


def test_table_2_is_a_full_grid_bothforward():
    found = plan("--suite", "table2")
    assert len(found.shapes) == 20 == len({s.n for s in found.shapes}) * len({s.v for s in found.shapes})
    assert found.passes == (FORWARD,) and found.others == ("torch",)


def test_every_suite_names_peers_that_exist():
    for suite in SUITES.values():
        for name in (*suite.ours, *(suite.others or ())):
            assert peers.named(name, ONE).name == name


def chosen(*arguments) -> list[str]:
    found = options.parse_arguments(["--device", "cpu", "--suite", "bars", *arguments])
    return [peer.name for peer in found.chosen]


def test_options_override_the_suite():
    assert plan("--suite", "bars", "--shape", "3,5,7").shapes == (Shape(3, 5, 7),)
    assert chosen("--peers", "torch", "ours", "ours-per-token@0") == ["ours", "ours-per-token@0", "gemm-only", "torch"]
    assert chosen("--without", "ours-per-token@all", "ours@1GiB", "torch-lce", "torch-lce-chunked") == [
        "ours-per-token@512MiB",
        "ours-main-grad@512MiB",
        "gemm-only",
        "torch",
    ]
    assert chosen("--without", "ours-per-token", "ours-main-grad", "torch-lce-chunked") == [
        "ours@1GiB",
        "gemm-only",
        "torch",
        "torch-lce",
    ]
    assert [peers.parse_budget(t) for t in ("512MiB", "3 kib", "7", "all")] == [512 * MIB, 3072, 7, ALL]


def test_the_first_strategy_measures_forward_for_all():
    found = options.parse_arguments(["--device", "cpu", "--suite", "bars", "--without", "ours-per-token@all"])
    assert [peer.passes for peer in found.chosen[:3]] == [PASSES, (FORWARD_BACKWARD,), (FORWARD_BACKWARD,)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "nothing"], "invalid choice"),
        (["--shape", "1,2"], "three positive numbers N,V,D below 2^31, got '1,2'"),
        (["--shape", "1,x,2"], "three positive numbers N,V,D below 2^31, got '1,x,2'"),
        (["--peers", "ours@5 tons"], "KiB, MiB or GiB, or all, got '5 tons'"),
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
    found = accuracy.answers(problem, torch.float64)
    assert found.largest_logit == pytest.approx(z.abs().max().item(), rel=1e-12)
    for value, truth in zip((found.loss, found.grad_x, found.grad_weight), (expected.detach(), x.grad, weight.grad)):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shape", [Shape(8, 2048, 512), Shape(2048, 8, 512)])
def test_without_gradients_none_is_allocated(shape):
    problem = a_problem(shape)
    found = accuracy.answers(problem, torch.float64, gradients=False)
    assert (found.grad_x, found.grad_weight) == (None, None)
    peak, _ = peak_memory(lambda: accuracy.answers(problem, torch.float32, gradients=False), "cpu")
    assert peak < max(problem.x.nbytes, problem.weight.nbytes)


@pytest.mark.parametrize(
    ("dtype", "rows", "rtol"), [(torch.float32, 40, 1e-5), (torch.float32, 8, 1e-5), (torch.bfloat16, 8, 1e-2)]
)
def test_the_yardstick_is_torch_also_in_blocks(dtype, rows, rtol, monkeypatch):
    monkeypatch.setattr(accuracy, "BLOCK_BYTES", 8 * 90 * rows)
    problem = a_problem(dtype=dtype, seed=2)
    problem.target[8:16] = IGNORE_INDEX  # a block of which no token counts
    x, weight = (t.clone().requires_grad_() for t in (problem.x, problem.weight))
    loss = torch_loss(x, weight, problem.target)
    loss.backward()
    found = accuracy.answers(problem, dtype)
    for value, expected in zip((found.loss, found.grad_x, found.grad_weight), (loss.detach(), x.grad, weight.grad)):
        torch.testing.assert_close(value, expected, rtol=rtol, atol=1e-8)


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
    monkeypatch.setattr(timing, "clock", lambda call, *_: timed.append(call) or 0.5)
    problem = a_problem()
    all_peers = [Peer(name, ANY, CPU_AND_CUDA, lambda *_, loss=loss: loss) for name, (loss, _) in FAULTS.items()]
    all_peers.append(Peer("gemm-only", ANY, CPU_AND_CUDA, None, "gemm-only"))
    results = measured(all_peers, problem, 2)
    # three first readings and two rounds, of two passes and two peers: the right one and the GEMM-only baseline
    assert len(timed) == (3 + 2) * 2 * 2
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
    problem = a_problem()
    judge, exact = judge_of(problem), accuracy.answers(problem, torch.float64)
    truth = exact.loss.float(), exact.grad_x.float(), exact.grad_weight.float()
    assert set(judge.check({FORWARD_BACKWARD: truth})) == {"loss", "dX", "dX row", "dW", "dW row"}
    holes = truth[0], truth[1], truth[2].clone()
    holes[2][5] = math.nan
    with pytest.raises(NotTimed, match="dW error nan"):
        judge.check({FORWARD_BACKWARD: holes})


def test_a_peer_that_fails_when_timed_is_out(monkeypatch, no_profiler):
    calls = []

    def loss(x, weight, target):
        calls.append(1)
        if len(calls) > 10:  # a check, a measurement of memory and three first readings, of two passes each
            raise RuntimeError("out of something")
        return torch_loss(x, weight, target)

    monkeypatch.setattr(timing, "clock", lambda call, *_: call() and 0.5)
    (result,) = measured([Peer("p", ANY, CPU_AND_CUDA, lambda *_: loss)], a_problem(), 3)
    assert result.refused == "failed: RuntimeError: out of something" and not result.has(FORWARD)
    assert len(calls) == 11


def test_main_grad_takes_dw_and_is_no_memory_of_the_call():
    problem = a_problem(Shape(64, 4096, 32), torch.bfloat16)
    strategies = [peers.named(name, ONE) for name in ("ours-main-grad@0", "ours-per-token@0")]
    results = measured(strategies, problem, 1, (FORWARD_BACKWARD,))
    assert [r.refused for r in results] == ["", ""]
    size = 2 * problem.weight.numel()
    both = [r.passes[FORWARD_BACKWARD] for r in results]
    added, returned = (its.gradient_bytes for its in both)
    assert returned - added == size and added == 2 * problem.x.numel()
    assert both[0].peak_bytes < both[1].peak_bytes


# --- what is written -------------------------------------------------------------------------------


def run(monkeypatch, tmp_path, *arguments):
    """(exit status, JSON) of a command on tiny CPU shapes."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-4))
    path = tmp_path / "bench.json"
    status = command.main(["--device", "cpu", "--rounds", "3", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


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
    assert [(s["n"], s["v"], s["d"]) for s in found["cells"]] == [(40, 90, 16), (33, 70, 8)]
    for shape in found["cells"]:
        entries = {entry["name"]: entry for entry in shape["peers"]}
        assert list(entries) == [
            "ours-per-token@all",
            "ours-per-token@512MiB",
            "ours-main-grad@512MiB",
            "ours@1GiB",
            "gemm-only",
            "torch",
        ]
        bare = entries["gemm-only"][FORWARD_BACKWARD]["seconds"]
        gradients = 4 * shape["d"] * (shape["n"] + shape["v"])
        for label, entry in entries.items():
            assert entry["refused"] is None and (label == "gemm-only" or entry["errors"]["dX"] < 1e-5)
            assert (FORWARD in entry) == (label in ("gemm-only", "torch", "ours-per-token@all"))
            both = entry[FORWARD_BACKWARD]
            assert len(both["seconds"]) == 3 and both["seconds_min"] <= both["seconds_median"] <= both["seconds_max"]
            ratios = sorted(b / t for b, t in zip(bare, both["seconds"]))
            assert both["of_gemm_only"] == pytest.approx([ratios[1], ratios[0], ratios[2]])
            mine = gradients - 4 * shape["d"] * shape["v"] if "main-grad" in label else gradients
            assert both["peak_bytes"] - both["beyond_gradients_bytes"] == mine
    printed = capsys.readouterr().out
    assert printed.count("| ours-main-grad@512MiB ") == 2
    assert "| N=40, V=90, D=16 |" in printed  # of the whole run
    assert re.search(r"N=40, V=90, D=16, float32, \d+ targets, max \|z\|", printed)


def test_ours_refused_is_a_failure(monkeypatch, no_profiler, tmp_path, capsys):
    monkeypatch.setitem(peers.OURS, "ours", (ANY, lambda *_: faulty(1.0, 1.5)))
    status, found = run(monkeypatch, tmp_path, "--shape", "40,90,16", "--peers", "ours@0")
    assert status == 1 and "dW row error" in found["cells"][0]["peers"][0]["refused"]
    assert "ours@0: refused: dW" in capsys.readouterr().out


def test_a_missing_peer_is_named_with_its_reason(monkeypatch, capsys):
    gone = Peer("gone", ANY, CPU_AND_CUDA, None, needs="no_such_module.of_mine")
    monkeypatch.setattr(peers, "OTHERS", (*peers.OTHERS, gone))
    found = options.parse_arguments(["--device", "cpu", "--without", "torch-lce", "torch-lce-chunked"])
    assert found.not_here == {"gone": "no module no_such_module.of_mine"}
    assert [str(peer) for peer in found.chosen] == ["ours@0", "ours-per-token@0", "gemm-only", "torch"]
    with pytest.raises(SystemExit) as refusal:
        command.main(["--device", "cpu", "--peers", "gone"])
    assert refusal.value.code == 2 and "cannot run here: gone (no module" in capsys.readouterr().err


def test_readings_on_a_gpu_are_long_enough():
    assert timing.calls_in(0.15, 0.04) == 4
    assert timing.calls_in(0.15, 1.0) == 1
    assert timing.calls_in(0.15, 0.0) == timing.MOST_CALLS
