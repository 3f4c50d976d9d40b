"""The benchmark on one device and over ranks: what a command line measures, that nothing wrong is timed, on whichever
rank it is wrong, and what is written."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("rich", reason="needs the benchmark's packages")

import program  # of launch/
from benchmarks import __main__ as command
from benchmarks import distillation, measure, options, ours, peers, problem, timing, tune
from benchmarks.accuracy import Judge, answers
from benchmarks.passes import calls_of
from benchmarks.peers import ANY, FORWARD, FORWARD_BACKWARD, GEMM_ONLY, ONE, OVERLAPPED, PASSES, RANKS, Peer, named
from benchmarks.problem import IGNORE_INDEX, Problem, Shape, make_problem
from benchmarks.report import NONE, speaker
from benchmarks.tables import cell_table
from benchmarks.team import Team
from tools import chosen_backend, everywhere, ran
from world import Member

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
ALONE = Team(torch.device("cpu"))
TINY = Shape(64, 96, 16)
LAYOUTS = pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])


@pytest.fixture
def short(monkeypatch):
    """Hardly any time is spent on timing."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))


def problem_of(member: Member, sequence_parallel: bool, seed: int = 0) -> Problem:
    team = Team(member.device) if member.group is None else Team.of(member.ranks, member.device)
    return replace(make_problem(TINY, torch.float32, team, seed), sequence_parallel=sequence_parallel)


def judge_of(given: Problem) -> Judge:
    return Judge(given, *(answers(given, dtype) for dtype in (torch.float64, given.hidden.dtype)))


def rows_of(table, capsys) -> list[list[str]]:
    capsys.readouterr()
    speaker()(table)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


# --- what a command line measures ------------------------------------------------------------------


def test_a_command_line_chooses_peers_shapes_and_sizes():
    def parsed(*arguments, ranks=None):
        return options.parse_arguments(["--device", "cpu", *arguments], ranks, ranks or 1)

    def chosen(*arguments) -> list[str]:
        return [peer.name for peer in parsed(*arguments).chosen]

    for name, suite in options.SUITES.items():
        expected = [*suite.ours, "gemm-only", *(suite.others if suite.others is not None else ["torch"])]
        found = chosen("--suite", name)
        # in the order of the table; what is not installed here is left out
        assert [peer for peer in found if peer in expected] == [peer for peer in expected if peer in found]
        assert {*suite.ours, "gemm-only"} <= {*found}
    found = parsed("--suite", "bars", "--shape", "3,5,7", "--rounds", "2")  # they override the suite
    assert found.shapes == [Shape(3, 5, 7)] and found.rounds == 2
    names = chosen("--suite", "bars", "--peers", "torch", "ours", "ours-per-token@0")
    assert names == ["ours", "ours-per-token@0", "gemm-only", "torch"]
    assert [peers.parse_budget(t) for t in ("512MiB", "3 kib", "7", "all")] == [512 * MIB, 3072, 7, peers.ALL]
    for ranks, expected in ((8, [1, 2, 4, 8]), (1, [1]), (6, [1, 2, 4, 6])):  # the powers of two, and all ranks
        assert parsed("--shape", "96,4800,64", ranks=ranks).tp == expected
    assert parsed("--tp", "8", "2", ranks=8).tp == [2, 8]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--tp 2", "--standalone --nproc-per-node 2 -m benchmarks --tp 2"),
        ("--nnodes=2 --nproc-per-node=8 -- --rounds 1", "--nnodes=2 --nproc-per-node=8 -m benchmarks --rounds 1"),
    ],
)
def test_torchruns_arguments_come_before_ours(arguments, expected, monkeypatch):
    commands = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: commands.append(command))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program.run("bench", arguments.split())
    assert commands == [[sys.executable, "-P", "-m", "torch.distributed.run", *expected.split()]]


# --- nothing wrong is timed ------------------------------------------------------------------------


def _truth(member: Member, sequence_parallel: bool) -> tuple:
    """The truth and the yardstick in blocks, and both baselines."""
    given = problem_of(member, sequence_parallel, seed=1)
    team = given.team
    shards = [torch.empty_like(given.weight) for _ in range(member.ranks)]
    dist.all_gather(shards, given.weight, group=team.group) if team.group else shards[0].copy_(given.weight)
    assert team.ranks == 1 or not torch.equal(*shards)
    assert 0 < (given.target == IGNORE_INDEX).sum() < TINY.n
    given.target[8:16] = IGNORE_INDEX  # a block of 8 of which no token counts
    # GPUs add up fp32 in another order.
    for dtype, rows, rtol in [(torch.float64, 7, 1e-12), (torch.float32, 8, 1e-5)][: 1 + (member.device.type == "cpu")]:
        x, weight = (t.to(dtype, copy=True).requires_grad_() for t in (given.hidden, torch.cat(shards)))
        z = F.linear(x, weight)
        loss = F.cross_entropy(z, given.target, ignore_index=IGNORE_INDEX)
        loss.backward()
        problem.BLOCK_BYTES = 8 * len(given.weight) * rows
        found = answers(given, dtype)
        problem.BLOCK_BYTES = 512 << 20
        assert found.largest_logit == pytest.approx(z.abs().max().item(), rel=rtol)
        for value, expected in zip(found, (loss.detach(), x.grad, weight.grad.chunk(team.ranks)[team.rank])):
            torch.testing.assert_close(value, expected, rtol=rtol, atol=1e-8 if rtol > 1e-8 else 1e-15)
    if team.ranks == 1:
        return given.hidden.cpu(), given.target.cpu()

    z = given.hidden.double() @ given.weight.double().T
    bare = z @ given.weight.double(), z.T @ given.hidden.double()
    summed = team.reduce(bare[0].clone())
    for name, truths in ((GEMM_ONLY, bare), (OVERLAPPED, (given.own(summed), bare[1]))):
        for value, truth in zip(calls_of(named(name, RANKS), given)[FORWARD_BACKWARD](), truths):
            torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4)
    return given.hidden.cpu(), given.target.cpu()


@LAYOUTS
def test_the_truth_and_the_baselines(ranks, sequence_parallel, worlds, device):
    first, *others = everywhere(worlds, device, ranks, _truth, sequence_parallel)
    for other in others:
        assert all(map(torch.equal, first, other))


def _one_row(factor: float):
    """Multiplies the largest row."""

    def change(gradient):
        gradient = gradient.clone()
        gradient[gradient.norm(dim=1).argmax()] *= factor
        return gradient

    return change


FAULTS = {  # name: (factor of the loss, change of dW, how the reason begins)
    "none": (1.0, lambda g: g, ""),
    "wrong dW": (1.0, lambda g: 1.01 * g, "refused: dW error 1.0e-02, allowed"),
    "wrong loss": (1.001, lambda g: g / 1.001, "refused: loss error 1.0e-03, allowed"),
    "one wrong row": (1.0, _one_row(1.5), "refused: dW error "),
    "a row of NaN": (1.0, _one_row(math.nan), "refused: dW error nan"),
    "no dW": (1.0, None, "refused: dW is None"),
    "not built": (1.0, None, "failed: ImportError: no such library"),
    "raises": (1.0, None, "failed: RuntimeError: out of something"),
    "raises later": (1.0, lambda g: g, "failed: RuntimeError: out of something"),
}


def _planted(fault: str, group, sequence_parallel: bool):
    """Ours, on the last rank with a fault."""
    right, calls = ours.loss("mean", None, group, sequence_parallel), []
    if fault == "none" or (group is not None and dist.get_rank(group) == 0):
        return right
    if fault == "not built":
        raise ImportError("no such library\nat all")
    factor, change, _ = FAULTS[fault]

    def wrong(x, weight, target):
        calls.append(1)
        # Later: after two calls of each pass and three of its first reading.
        if fault == "raises" or (fault == "raises later" and len(calls) == 11):
            right(x, weight, target) if not torch.is_grad_enabled() else right(x, weight, target).backward()
            raise RuntimeError("out of something\nat all")
        weight = weight.detach() if fault == "no dW" else weight.view_as(weight)
        if weight.requires_grad:
            weight.register_hook(change)
        return factor * right(x, weight, target)

    return wrong


def _measured(member: Member, sequence_parallel: bool) -> tuple[dict, list[str]]:
    """What each rank says of peers of which one rank is wrong."""
    given = problem_of(member, sequence_parallel)
    planted = [Peer(fault, ANY, peers.CPU_AND_CUDA, partial(_planted, fault), "ours") for fault in FAULTS]
    planted.append(named(GEMM_ONLY, ONE))
    called, lengths = [], timing.ALONE if member.ranks == 1 else timing.OVER_RANKS
    lengths[member.device.type] = 0.0, 1e-9  # one call
    after = lambda peer, call: called.append(peer.name)  # noqa: E731
    return measure.measure(planted, judge_of(given), 2, after=after), called


@LAYOUTS
def test_what_is_wrong_is_shown_and_never_timed(ranks, sequence_parallel, worlds, device, monkeypatch, capsys):
    monkeypatch.setitem(timing.ALONE, device, (0.0, 1e-9))
    (cell, called), *others = everywhere(worlds, device, ranks, _measured, sequence_parallel)
    mine = repr((cell, called))  # NaN equals itself in words
    assert all(repr(other) == mine for other in others)  # times, bytes and errors are those of the worst rank
    rows, columns = {row[0]: row for row in rows_of(cell_table(cell), capsys)}, 8 if ranks == 1 else 10
    for entry, (_, _, words) in zip(cell["peers"], FAULTS.values()):
        refused = entry["refused"] or ""
        assert refused.startswith(words) and bool(refused) == bool(words), entry
        assert ("(on rank 1 of 2)" in refused) == (ranks > 1 and bool(words) and " error " not in words)
        assert all((kind in entry) == (not words) for kind in PASSES)
        if words:
            assert rows[f"{entry['name']}, {refused.split(':')[0]}"][2 : 2 + columns] == [NONE] * columns
    right, wrong, row, bare = (cell["peers"][number] for number in (0, 1, 3, -1))
    assert all(len(right[kind]["seconds"]) == 2 and right[kind]["peak_bytes"] > 0 for kind in PASSES)
    assert wrong["errors"]["dW"] > 100 * right["errors"]["dW"] > 0  # a refused peer's errors are shown
    assert "dW row error" in row["refused"] and row["errors"]["dW row"] > row["errors"]["dW"]
    assert rows[bare["name"]][3] == "1.000" and called == ["none", GEMM_ONLY]


def _megatron(member: Member, sequence_parallel: bool) -> dict:
    """Its native loss, accepted by the judge; where there is no GPU its gather buffer has to be told so."""
    from megatron.core import parallel_state

    given, current_device, megatron = problem_of(member, sequence_parallel), torch.cuda.current_device, "megatron"
    try:
        if member.device.type == "cpu":
            torch.cuda.current_device = lambda: member.device
        peer = named(megatron, RANKS)
        calls = calls_of(peer, given, peer.build(given.team.group, sequence_parallel))
        return judge_of(given).check(*(calls[kind]() for kind in (FORWARD, FORWARD_BACKWARD)))
    finally:
        torch.cuda.current_device = current_device
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stock_megatron_is_called_as_it_is_meant(worlds, device, sequence_parallel):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    for errors in worlds(2).run(_megatron, sequence_parallel):
        assert set(errors) == {"loss", "dX", "dX row", "dW", "dW row"} and errors["dX"] < 1e-5


# --- what is written -------------------------------------------------------------------------------


def assert_plausible(cell: dict, strategies: tuple[str, ...]) -> None:
    """Three rounds in float32, of ours and the baselines, and of others."""
    entries = {entry["name"]: entry for entry in cell["peers"]}
    expected = [*strategies, GEMM_ONLY, *([OVERLAPPED] if cell["tp"] > 1 else [])]
    assert [*entries][: len(expected)] == expected
    parts = cell["tp"] if cell["sequence_parallel"] else 1
    n, d, rows = cell["n"], cell["d"], cell["v"] // cell["tp"]
    for name, entry in entries.items():
        assert entry["refused"] is None
        assert not entry["errors"] if name in (GEMM_ONLY, OVERLAPPED) else entry["errors"]["dX"] < 1e-5
        for kind in PASSES:
            its = entry[kind]
            assert len(its["seconds"]) == 3 and its["seconds_min"] <= its["seconds_median"] <= its["seconds_max"]
            for key, other in (("of_gemm_only", GEMM_ONLY), ("of_overlapped", expected[-1])):
                ratios = sorted(b / t for b, t in zip(entries[other][kind]["seconds"], its["seconds"]))
                assert its[key] == pytest.approx([ratios[1], ratios[0], ratios[2]])
        gradients = 4 * d * (n // parts + (0 if "main-grad" in name else rows))
        assert its["peak_bytes"] - its["beyond_gradients_bytes"] == gradients
    if not cell["sequence_parallel"]:
        assert entries[GEMM_ONLY][FORWARD_BACKWARD]["beyond_gradients_bytes"] == 4 * n * rows  # the logits alone


def run(tmp_path, *arguments):
    """(exit status, JSON) of a command."""
    path = tmp_path / "new" / "bench.json"
    status = command.main(["--device", "cpu", "--rounds", "3", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_a_run_writes_tables_json_and_a_picture(short, tmp_path, capsys):
    picture = tmp_path / "bench.png"
    status, found = run(tmp_path, *"--suite bars --shape 40,90,16 --shape 33,70,8 --plot".split(), str(picture))
    assert status == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert found["machine"]["torch"] == torch.__version__ and found["settings"]["suite"] == "bars"
    assert [(cell["n"], cell["v"], cell["d"]) for cell in found["cells"]] == [(40, 90, 16), (33, 70, 8)]
    printed = capsys.readouterr().out
    assert printed.count("| ours-main-grad@512MiB ") == 2 and printed.count("| N=40, V=90, D=16 ") == 1
    for cell in found["cells"]:
        assert_plausible(cell, options.SUITES["bars"].ours)
        _, returned, added, *_ = (entry[FORWARD_BACKWARD]["peak_bytes"] for entry in cell["peers"])
        assert added < returned  # main_grad is no memory of the call


def test_a_run_of_two_processes(tmp_path):
    for name in ("signal", "socket", "torch", "rich", "training", "parallel_lce", "benchmarks"):
        # The user's own file, called like a module that Python, PyTorch and the benchmark import.
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    arguments = "--standalone --nproc-per-node 2 -- --device cpu --rounds 3 --shape 64,256,16 --json new/r.json "
    arguments += "--plot new/r.png --trace traces"
    done = ran("bash", ROOT / "launch" / "bench.sh", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    # each line once, not once per rank
    assert done.stderr.count("TP 2, N=64, V=256, D=16, SP: round 1 of 3") == 1
    assert done.stdout.count("Ours over all problems") == 1
    found = json.loads((tmp_path / "new" / "r.json").read_text())
    assert [(c["tp"], c["sequence_parallel"]) for c in found["cells"]] == [(1, False), (2, False), (2, True)]
    assert found["machine"]["ranks"] == "2"
    for cell in found["cells"]:
        assert_plausible(cell, options.DEFAULTS[RANKS, "cpu"].ours)
    assert (tmp_path / "new" / "r.png").read_bytes().startswith(b"\x89PNG")
    names = [f"{layout}-{name}" for layout in ("tp2-n64", "tp2-n64-sp") for name in (peers.SAVED, OVERLAPPED)]
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        f"{name}.json.gz" for name in (f"tp1-n64-{peers.SAVED}", *names)
    }
    with gzip.open(tmp_path / "traces" / f"{names[-1]}.json.gz", "rt") as file:
        events = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name == "aten::mm" for name in events) == 3  # one call
    assert any("gather" in name for name in events) and any("reduce_scatter" in name for name in events)


def test_the_suites_of_the_host_and_of_post_training(short, tmp_path, capsys):
    shape = ["--shape", "40,90,16"]
    _, found = run(tmp_path, "--suite", "host", *shape, "--peers", "ours", "ours-statistics", "torch")
    for entry in found["cells"][0]["peers"]:
        assert entry["refused"] is None
        assert all(len(entry[kind]["host_seconds"]) == 3 and min(entry[kind]["host_seconds"]) > 0 for kind in PASSES)
    assert "N=40, V=90, D=16, float32: the host" in capsys.readouterr().out
    _, found = run(tmp_path, "--suite", "post", *shape)
    for entry in found["cells"][0]["peers"]:
        judged = entry["name"] not in ("gemm-only", "ours-masked@all", "ours-replay")
        assert entry["refused"] is None and bool(entry["errors"]) == judged


@pytest.mark.gpu
def test_the_host_suite_profiles_on_a_gpu(tmp_path, capsys):
    path = tmp_path / "host.json"
    arguments = ["--device", "cuda", "--suite", "host", "--shape", "256,512,128", "--peers", "ours", "--rounds", "1"]
    assert command.main([*arguments, "--json", str(path)]) == 0
    its, bare = json.loads(path.read_text())["cells"][0]["peers"]
    assert 3 <= bare[FORWARD_BACKWARD]["profile"]["operations"] < 10
    assert its[FORWARD_BACKWARD]["profile"]["operations"] > its[FORWARD]["profile"]["operations"] >= 1
    assert "ours, fwd+bwd:\n" in capsys.readouterr().out


def test_ours_refused_is_a_failure(short, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(peers.OURS, "ours", (ANY, lambda *_: _planted("one wrong row", None, False)))
    status, found = run(tmp_path, "--shape", "40,90,16", "--peers", "ours@0")
    assert status == 1 and "dW row error" in found["cells"][0]["peers"][0]["refused"]
    assert "ours@0: refused: dW" in capsys.readouterr().out


def test_distillation_is_measured(short, capsys):
    arguments = ["--device", "cpu", "--shape", "20,50,8", "--teacher", "16", "--beta", "0", "0.5", "--rounds", "1"]
    distillation.main(arguments)
    printed = capsys.readouterr().out
    for way in ("dense, beta 0", "ours, mean, beta 0.5", "ours, none, beta 0.5", "products"):
        assert printed.count(f"| {way} ") == 1
    for _, seconds, memory, error in distillation.measure(ALONE, TINY, 16, torch.float32, [0.0, 0.5, 1.0], 2):
        assert len(seconds) == 2 and memory > 0 and (error is None or error < 1e-5)


def test_tiles_are_measured_on_the_interpreter(short):
    pytest.importorskip("triton", reason="needs triton")
    tiles = [tune.Tile(64, 64, 32, 4, 2), tune.Tile(64, 128, 32, 4, 2)]
    with chosen_backend("triton"):
        found = tune.tune(make_problem(Shape(70, 150, 16), torch.bfloat16, ALONE), 1, tiles, (2,))
    assert [*found] == [(tile, 2, use) for tile in tiles for use in ("forward", "saving forward", "forward + backward")]
    assert all(speed > 0 for speed in found.values())
