"""The benchmark over ranks: what it launches and writes, and that no rank times anything wrong."""

from __future__ import annotations

import gzip
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import options as command
from benchmarks import peers, timing
from benchmarks.accuracy import Judge, answers
from benchmarks.libraries import whole_sequence
from benchmarks.measure import measure
from benchmarks.passes import calls_of
from benchmarks.peers import (
    ANY,
    CPU_AND_CUDA,
    FORWARD,
    FORWARD_BACKWARD,
    GEMM_ONLY,
    OVERLAPPED,
    RANKS,
    SAVED,
    Peer,
    named,
)
from benchmarks.plot import panels_of, plot_over_ranks
from benchmarks.problem import IGNORE_INDEX, Problem, Shape, make_problem
from benchmarks.results import Cell, Measured, Result
from benchmarks.scaling import AROUND
from benchmarks.suites import Suite
from benchmarks.tables import cell_table, overview
from benchmarks.team import NotTimed, Team
from test_bench import MIB, rows_of, text_of
from world import Member

ROOT = Path(__file__).resolve().parent.parent
TINY = Shape(64, 96, 16)


LEAN = "ours-main-grad@64MiB"


def peer(name: str) -> Peer:
    return named(name, RANKS)


# --- a whole run -----------------------------------------------------------------------------------


def folder_of_the_user(folder: Path) -> Path:
    """One with files that are called like modules that Python, PyTorch and the benchmark import."""
    for name in ("signal", "socket", "torch", "rich", "training", "parallel_lce"):
        (folder / f"{name}.py").write_text("raise SystemExit('not this one')")
    return folder


def launch(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "bench.sh"), *arguments],
        env=inherited | {"PARALLEL_LCE_PYTHON": sys.executable} | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """(folder, finished process, JSON) of two processes on tiny shapes."""
    folder = tmp_path_factory.mktemp("bench")
    done = launch(
        *"--standalone --nproc-per-node 2 -- --device cpu --rounds 3 --shape 48,256,16 --shape 64,256,16".split(),
        *f"--json {folder}/new/r.json --plot {folder}/new/r.png --trace {folder}/traces".split(),
        cwd=folder_of_the_user(folder),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done, json.loads((folder / "new" / "r.json").read_text())


def test_a_run_measures_every_size_and_layout(a_run):
    _, done, found = a_run
    cells = [(c["tp"], c["n"], c["sequence_parallel"]) for c in found["cells"]]
    assert cells == [(1, 48, False), (1, 64, False)] + [(2, n, sp) for n in (48, 64) for sp in (False, True)]
    assert found["machine"]["ranks"] == "2" and found["settings"]["rounds"] == 3
    # each line once, not once per rank
    assert done.stderr.count("TP 2, N=48, SP: round 1 of 3") == 1 and done.stdout.count("Ours over all problems") == 1


def test_the_numbers_of_a_run_make_sense(a_run):
    _, _, found = a_run
    for cell in found["cells"]:
        entries = {entry["name"]: entry for entry in cell["peers"]}
        expected = [SAVED, "ours", "ours@128MiB", LEAN, "ours-per-token@0", GEMM_ONLY, OVERLAPPED, "loss-parallel"]
        assert list(entries) == [name for name in expected if cell["tp"] > 1 or name != OVERLAPPED]
        assert [entry["refused"] for entry in entries.values()] == [None] * len(entries)
        parts = cell["tp"] if cell["sequence_parallel"] else 1
        n, d, rows = cell["n"], cell["d"], cell["v"] // cell["tp"]
        for name, entry in entries.items():
            assert (FORWARD in entry) == (name == SAVED or not name.startswith("ours"))
            both = entry[FORWARD_BACKWARD]
            assert len(both["seconds"]) == 3 and both["seconds_min"] <= both["seconds_median"] <= both["seconds_max"]
            for key, other in (
                ("of_gemm_only", GEMM_ONLY),
                ("of_overlapped", OVERLAPPED if cell["tp"] > 1 else GEMM_ONLY),
            ):
                its = entries[other][FORWARD_BACKWARD]["seconds"]
                ratios = sorted(b / t for b, t in zip(its, both["seconds"]))
                assert both[key] == pytest.approx([ratios[1], ratios[0], ratios[2]])
            gradients = 4 * d * (n // parts + (0 if name == LEAN else rows))
            assert both["peak_bytes"] - both["beyond_gradients_bytes"] == gradients
            assert entry["errors"].keys() == (
                set() if entry["name"] in (GEMM_ONLY, OVERLAPPED) else cell["torch_errors"].keys()
            )
        if not cell["sequence_parallel"]:
            assert entries[GEMM_ONLY][FORWARD_BACKWARD]["beyond_gradients_bytes"] == 4 * n * rows  # the logits alone
        assert set(cell["collectives"]) == (set() if cell["tp"] == 1 else {*AROUND})


def test_a_run_writes_a_picture_and_timelines(a_run):
    folder, _, _ = a_run
    assert (folder / "new" / "r.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in (folder / "traces").iterdir()}
    assert names == {
        f"{size}-n{n}{layout}-{peer}.json.gz"
        for size, layout in (("tp1", ""), ("tp2", ""), ("tp2", "-sp"))
        for n in (48, 64)
        for peer in (SAVED, OVERLAPPED)
        if size != "tp1" or peer == SAVED
    }
    with gzip.open(folder / "traces" / f"tp2-n64-sp-{OVERLAPPED}.json.gz", "rt") as file:
        events = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name == "aten::mm" for name in events) == 3  # one call
    assert any("gather" in name for name in events) and any("reduce_scatter" in name for name in events)


def test_a_run_fits_the_scaling_model(a_run, capsys):
    from benchmarks import scaling

    scaling.main([str(a_run[0] / "new" / "r.json"), "--ranks", "16"])
    printed = capsys.readouterr().out
    assert printed.count("| 16 |") == 4 and "Error of the fit: " in printed


def start(monkeypatch, *arguments: str) -> list[list[str]]:
    """Runs launch/bench.py in this process; the commands that it became."""
    commands = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: commands.append(command))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    runpy.run_path(str(ROOT / "launch" / "bench.py"), run_name="__main__")
    return commands


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--tp 2", "--standalone --nproc-per-node 2 -m benchmarks --tp 2"),
        ("--nnodes=2 --nproc-per-node=8 -- --rounds 1", "--nnodes=2 --nproc-per-node=8 -m benchmarks --rounds 1"),
        ("--", "-m benchmarks"),
    ],
)
def test_torchruns_arguments_come_before_ours(arguments, expected, monkeypatch):
    (command,) = start(monkeypatch, *arguments.split())
    assert command == [sys.executable, "-P", "-m", "torch.distributed.run", *expected.split()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-such-flag -- --tp 1", "torchrun: "),
        ("--json {folder}", "--json={folder} is no file that can be written to"),
        ("--plot {folder}/file/x.png", "the folder of --plot={folder}/file cannot be made a folder"),
        ("--trace {folder}/file", "--trace={folder}/file cannot be made a folder"),
        ("--peers none-such", "no such peer: none-such"),
        ("-m other -- --tp 1", "torchrun: 'other' in front of --"),
        ("--shape 8,8,0", "three positive numbers N,V,D below 2^31, got '8,8,0'"),
        ("--plot {folder}/p.foo", "argument --plot: the suffix must be one of "),
        ("--nproc-per-node=2 -- --tp 4", "--tp must lie in 1 to 2, the number of ranks, got [4]"),
        ("--nproc-per-node=2 -- --device cuda", "one GPU per process is needed, this host has 0"),
    ],
)
def test_mistakes_are_said_once_before_any_rank_starts(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, *arguments.format(folder=tmp_path).split())
    said = capsys.readouterr()
    assert_refused(ended.value.code, said.out, said.err, message.format(folder=tmp_path))


def assert_refused(status: int, out: str, err: str, message: str) -> None:
    assert status == 2 and out == ""
    *_, last = err.splitlines()  # argparse says how it is used before
    assert "error: " in last and message in last
    assert "Traceback" not in err


def test_a_mistake_ends_the_script():
    done = launch("--shape", "0,8,8", CUDA_VISIBLE_DEVICES="")
    assert_refused(done.returncode, done.stdout, done.stderr, "three positive numbers N,V,D below 2^31, got '0,8,8'")


# --- what a command line measures ------------------------------------------------------------------


def options(*arguments, ranks=8):
    return command.parse_arguments(["--device", "cpu", *arguments], ranks, ranks)


def test_sizes_are_powers_of_two_and_all_ranks():
    assert options().tp == [1, 2, 4, 8]
    assert options(ranks=1).tp == [1]
    assert options("--shape", "96,4800,64", ranks=6).tp == [1, 2, 4, 6]
    assert options("--tp", "8", "2").tp == [2, 8]
    assert options("--sequence-parallel", "on").sequence_parallel == [True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "16"], "--tp must lie in 1 to 8, the number of ranks, got [16]"),
        (["--tp", "0", "2"], "--tp must lie in 1 to 8"),
        (["--tp", "3"], "--shape: N and V must be multiples of the TP size, got N=256, V=4096, D=64 for TP 3"),
        (["--shape", "8,8,-5"], "three positive numbers N,V,D below 2^31, got '8,8,-5'"),
        (["--plot", "p.foo"], "argument --plot: the suffix must be one of "),
        (["--shape", "100,8,8"], "N and V must be multiples of the TP size, got N=100, V=8, D=8 for TP 8"),
        (["--peers", "nobody"], "no such peer: nobody"),
        (["--without", "gemm-only", "nobody"], "no such peer: nobody"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_a_bad_command_line_says_why(arguments, words, capsys):
    with pytest.raises(SystemExit) as refusal:
        options(*arguments)
    assert refusal.value.code == 2 and words in capsys.readouterr().err


def test_the_baselines_are_always_measured(monkeypatch, capsys):
    found = options("--peers", SAVED)
    assert [peer.name for peer in found.chosen] == [SAVED, GEMM_ONLY, OVERLAPPED] and not found.not_here
    found = options("--without", "ours-per-token@0", "loss-parallel")
    assert [peer.name for peer in found.chosen] == [SAVED, "ours", "ours@128MiB", LEAN, GEMM_ONLY, OVERLAPPED]
    renamed = [replace(peer, needs="no_such_module") if peer.name == "verl" else peer for peer in peers.OTHERS]
    monkeypatch.setattr(peers, "OTHERS", renamed)
    with pytest.raises(SystemExit):
        options("--peers", "verl")
    assert "cannot run here: verl (no module no_such_module)" in capsys.readouterr().err


# --- nothing wrong is timed ------------------------------------------------------------------------


def problem_of(member: Member, seed: int = 0, sequence_parallel: bool = False) -> Problem:
    team = Team.of(member.ranks, member.device)
    return replace(make_problem(TINY, torch.float32, team, seed), sequence_parallel=sequence_parallel)


def judge_of(problem: Problem) -> Judge:
    truth, torchs = (answers(problem, dtype) for dtype in (torch.float64, problem.hidden.dtype))
    return Judge(problem, truth, torchs)


def _truth(member):
    problem = problem_of(member, seed=1)
    found = answers(problem, torch.float64)
    shards = [torch.empty_like(problem.weight) for _ in range(member.ranks)]
    dist.all_gather(shards, problem.weight, group=problem.team.group)
    x, weight = (t.double().requires_grad_() for t in (problem.x, torch.cat(shards)))
    expected = F.cross_entropy(x @ weight.T, problem.target, ignore_index=IGNORE_INDEX)
    expected.backward()
    assert 0 < (problem.target == IGNORE_INDEX).sum() < TINY.n
    own = weight.grad.chunk(member.ranks)[member.rank]
    for value, truth in ((found.loss, expected.detach()), (found.grad_x, x.grad), (found.grad_weight, own)):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-15)
    assert not torch.equal(*shards[:2])
    return problem.x.cpu(), problem.target.cpu()


def test_the_truth_is_torch_in_float64_over_the_ranks(worlds, device):
    (x, target), (its_x, its_target) = worlds(2).run(_truth)
    assert torch.equal(x, its_x) and torch.equal(target, its_target)


def _baselines(member, sequence_parallel):
    """Both kinds of the GEMM-only baseline against dense products."""
    problem = problem_of(member, sequence_parallel=sequence_parallel)
    z = problem.hidden.double() @ problem.weight.double().T
    grad_x = z @ problem.weight.double()
    grad_weight = z.T @ problem.hidden.double()
    for value, truth in zip(calls_of(peer(GEMM_ONLY), problem)[FORWARD_BACKWARD](), (grad_x, grad_weight)):
        torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4)
    dist.all_reduce(grad_x, group=problem.team.group)
    truths = problem.own(grad_x), grad_weight
    for value, truth in zip(calls_of(peer(OVERLAPPED), problem)[FORWARD_BACKWARD](), truths):
        torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_overlapped_products_make_the_sums_over_ranks(worlds, device, sequence_parallel):
    worlds(2).run(_baselines, sequence_parallel)


def _whole_sequence(member, sequence_parallel):
    """Each rank's loss is `rank + 1` times the sum of squares, so that dX is the sum of both ranks'."""
    problem = problem_of(member, sequence_parallel=sequence_parallel)
    x = problem.x.clone().requires_grad_()
    found = whole_sequence(x, problem.team.group, sequence_parallel)
    assert torch.equal(found, problem.hidden)
    ((member.rank + 1) * found.square().sum()).backward()
    torch.testing.assert_close(x.grad, (1 + 2) * 2 * problem.x)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_kernel_for_the_whole_sequence_gets_it_and_its_gradient_is_summed(worlds, device, sequence_parallel):
    worlds(2).run(_whole_sequence, sequence_parallel)


class Scaled(torch.autograd.Function):
    """A weight whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, weight, factor):
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def _planted(fault, group, sequence_parallel):
    """Ours with a fault on rank 1 alone."""
    rank, calls = (
        dist.get_rank(group),
        [],
    )  # two calls of each pass and two of its first reading; then the rounds' readings
    right = peers.ours("mean", None, group, sequence_parallel)
    if rank == 0 or fault == "none":
        return right
    if fault == "not built":
        raise ImportError("no such library")

    def wrong(x, weight, target):
        calls.append(1)
        if fault == "raises" or (fault == "raises later" and len(calls) == 11):
            right(x, weight, target) if not torch.is_grad_enabled() else right(x, weight, target).backward()
            raise RuntimeError("out of something")
        weight = Scaled.apply(weight, 1.01) if fault == "wrong dW" else weight
        return right(x, weight, target) * (1.001 if fault == "wrong loss" else 1.0)

    return wrong


FAULTS = {
    "none": "",
    "wrong dW": "refused: dW error 1.0e-02, allowed",
    "wrong loss": "refused: loss error 1.0e-03, allowed",
    "not built": "failed: ImportError: no such library (on rank 1 of 2)",
    "raises": "failed: RuntimeError: out of something (on rank 1 of 2)",
    "raises later": "failed: RuntimeError: out of something (on rank 1 of 2)",
}


def _measured(member, sequence_parallel):
    """What each rank says of peers of which one rank is wrong."""
    problem = problem_of(member, sequence_parallel=sequence_parallel)
    planted = [Peer(fault, ANY, CPU_AND_CUDA, partial(_planted, fault), "ours", settings=(RANKS,)) for fault in FAULTS]
    planted.append(peer(GEMM_ONLY))
    called, said = [], []
    timing.OVER_RANKS[member.device.type] = 0.0, 1e-9  # one call

    def after(result, call):
        called.append(result.peer.name)

    results = measure(planted, judge_of(problem), Suite((), (), rounds=2), say=said.append, after=after)
    return [(r.peer.name, r.refused, r.passes, r.errors) for r in results], called, said


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_wrong_on_one_rank_is_refused_on_all(worlds, device, sequence_parallel):
    mine, its = worlds(2).run(_measured, sequence_parallel)
    assert mine == its  # times, bytes and errors are those of the worst rank
    results, called, said = mine
    for (name, refused, passes, _), words in zip(results, FAULTS.values()):
        assert refused.startswith(words) and bool(refused) == bool(words), (name, refused)
        assert name in called or words
        if not words:
            assert set(passes) == {FORWARD, FORWARD_BACKWARD}
            assert all(len(its.seconds) == 2 and its.peak_bytes > 0 for its in passes.values())
    assert results[1][-1]["dW"] > 100 * results[0][-1]["dW"] > 0  # a refused peer's errors are shown
    assert called == ["none", GEMM_ONLY] and any(line.endswith("round 2 of 2") for line in said)


def _together(member):
    team = problem_of(member).team
    assert team.worst({"a": 1.0 + team.rank, "b": float("nan") if team.rank == 0 else 5.0})["a"] == 2.0
    assert team.gather(team.agree(lambda: team.rank)) == [0, 1]
    with pytest.raises(NotTimed, match="^failed: ZeroDivisionError: division by zero$"):
        team.agree(lambda: 1 / 0)
    return team.worst({"b": float("nan") if team.rank == 0 else 5.0})["b"]


def test_nan_is_worse_than_any_number(worlds, device):
    assert all(value != value for value in worlds(2).run(_together))


def _megatron(member, sequence_parallel):
    """Its native loss, accepted by the judge; where there is no GPU its gather buffer has to be told so."""
    from megatron.core import parallel_state

    problem = problem_of(member, sequence_parallel=sequence_parallel)
    team, current_device = problem.team, torch.cuda.current_device
    megatron = peer("megatron")
    try:
        if member.device.type == "cpu":
            torch.cuda.current_device = lambda: member.device
        calls = calls_of(megatron, problem, megatron.build(team.group, sequence_parallel))
        return judge_of(problem).check({kind: call() for kind, call in calls.items()})
    finally:
        torch.cuda.current_device = current_device
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stock_megatron_is_called_as_it_is_meant(worlds, device, sequence_parallel):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    for errors in worlds(2).run(_megatron, sequence_parallel):
        assert set(errors) == {"loss", "dX", "dX row", "dW", "dW row"} and errors["dX"] < 1e-5


# --- what is written -------------------------------------------------------------------------------


def made_up(tp, sequence_parallel=False, tokens=64, **milliseconds) -> Cell:
    """Times that nobody measured; keys are peers, with _ for -."""
    results = []
    for name, time in milliseconds.items():
        its = {"ours_saved": peer(SAVED), "ours_lean": replace(peer(LEAN), passes=(FORWARD_BACKWARD,))}.get(name)
        its = its or peer(name.replace("_", "-"))
        times = Measured(8 * MIB, 5 * MIB, [1e-3 * time * factor for factor in (1.0, 0.5, 2.0)])
        results.append(Result(its, passes=dict.fromkeys(its.passes, times)))
    return Cell(tp, Shape(tokens, 4096, 2048), sequence_parallel, torch.bfloat16, results)


def test_ratios_are_of_speed_in_the_same_round():
    cell = made_up(8, True, ours_saved=10, gemm_only=8, gemm_only_overlapped=9, megatron_fused=15, ours_lean=12)
    saved = cell.get(SAVED)
    assert cell.ratio(saved, GEMM_ONLY) == pytest.approx((0.8, 0.8, 0.8))
    assert cell.ratio(saved, "megatron-fused", FORWARD) == pytest.approx((1.5, 1.5, 1.5))
    assert cell.ratio(cell.get(LEAN), GEMM_ONLY, FORWARD) is None and cell.ratio(saved, "verl") is None
    single = made_up(1, ours_saved=10, gemm_only=8)
    assert single.ratio(single.get(SAVED), OVERLAPPED) == pytest.approx((0.8, 0.8, 0.8))
    (columns, row) = rows_of(overview([cell]))
    assert columns[4] == "megatron-fused ×" and row == [
        "TP 8, N=64, V=4096, D=2048, SP",
        "0.900 (0.900–0.900)",
        "0.800 (0.800–0.800)",
        "0.800 (0.800–0.800)",
        "1.50",
        "3.0",
    ]  # 8 MiB less 5 of gradients


def test_what_was_refused_has_a_row_without_numbers():
    cell = made_up(2, ours_saved=10, gemm_only=8)
    cell.results[0] = replace(cell.results[0], refused="refused: dW error 1.0e-02, allowed 1e-3", errors={"dW": 0.01})
    cell.yardstick = {"loss": 1e-3, "dX": 1e-3, "dW": 1e-3}
    (_, refused, bare) = rows_of(cell_table(cell))
    assert refused[0] == "ours-per-token@all, refused" and refused[2:10] == ["–"] * 8
    assert refused[-1] == "10.00"
    assert bare[3] == "1.000" and "8 (4–16)" in bare[2]
    assert cell.as_dict()["peers"][0]["refused"].startswith("refused: dW") and FORWARD not in cell.as_dict()["peers"][0]
    assert "N=64" in text_of(cell_table(cell))


def test_one_rank_stands_in_the_panels_of_both_layouts():
    cells = [made_up(1, ours_saved=8, gemm_only=7)] + [
        made_up(2, sp, ours_saved=4, gemm_only=3) for sp in (False, True)
    ]
    panels = panels_of([cell.as_dict() for cell in cells])
    assert [sequence_parallel for _, sequence_parallel in panels] == [False, True]
    for lines in panels.values():
        assert lines[SAVED] == [(1, (0.008, 0.004, 0.016)), (2, (0.004, 0.002, 0.008))]


def test_panels_of_several_runs_are_of_one_problem_each(tmp_path):
    cells = [made_up(tp, ours_saved=8 / tp, gemm_only=7 / tp).as_dict() for tp in (1, 2, 4)]
    others = [dict(cell, dtype="float32") for cell in cells] + [dict(cell, v=2 * cell["v"]) for cell in cells]
    panels = panels_of(cells + others)
    assert len(panels) == 3 and all(len(lines[SAVED]) == 3 for lines in panels.values())
    path, facts = tmp_path / "of-several.png", {"device": "some", "torch": "2"}
    assert plot_over_ranks(path, facts, cells + others) and path.stat().st_size > 10_000
    assert not plot_over_ranks(tmp_path / "none.png", facts, [])
