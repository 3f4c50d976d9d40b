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

pytest.importorskip("rich", reason="needs the benchmark's packages")

from benchmarks import options, ours, timing
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
    PASSES,
    RANKS,
    SAVED,
    Peer,
    named,
)
from benchmarks.problem import IGNORE_INDEX, Problem, Shape, make_problem
from benchmarks.team import NotMeasured, Team
from world import Member

ROOT = Path(__file__).resolve().parent.parent
TINY = Shape(64, 96, 16)

# --- a whole run -----------------------------------------------------------------------------------


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


def test_a_run_of_two_processes(tmp_path):
    for name in ("signal", "socket", "torch", "rich", "training", "parallel_lce", "benchmarks"):
        # The user's own file, called like a module that Python, PyTorch and the benchmark import.
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    done = launch(
        *"--standalone --nproc-per-node 2 -- --device cpu --rounds 3 --shape 64,256,16".split(),
        *"--json new/r.json --plot new/r.png --trace traces".split(),
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # each line once, not once per rank
    assert done.stderr.count("TP 2, N=64, V=256, D=16, SP: round 1 of 3") == 1
    assert done.stdout.count("Ours over all problems") == 1
    found = json.loads((tmp_path / "new" / "r.json").read_text())
    assert [(c["tp"], c["sequence_parallel"]) for c in found["cells"]] == [(1, False), (2, False), (2, True)]
    assert found["machine"]["ranks"] == "2"
    for cell in found["cells"]:
        assert_plausible(cell)
    assert (tmp_path / "new" / "r.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        f"{layout}-{peer}.json.gz"
        for layout in ("tp1-n64", "tp2-n64", "tp2-n64-sp")
        for peer in (SAVED, OVERLAPPED)
        if (layout, peer) != ("tp1-n64", OVERLAPPED)
    }
    with gzip.open(tmp_path / "traces" / f"tp2-n64-sp-{OVERLAPPED}.json.gz", "rt") as file:
        events = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name == "aten::mm" for name in events) == 3  # one call
    assert any("gather" in name for name in events) and any("reduce_scatter" in name for name in events)


def assert_plausible(cell: dict) -> None:
    entries = {entry["name"]: entry for entry in cell["peers"]}
    strategies = options.DEFAULTS[RANKS, "cpu"].ours
    assert list(entries) == [*strategies, GEMM_ONLY, *([OVERLAPPED] if cell["tp"] > 1 else [])]
    parts = cell["tp"] if cell["sequence_parallel"] else 1
    n, d, rows = cell["n"], cell["d"], cell["v"] // cell["tp"]
    for name, entry in entries.items():
        assert entry["refused"] is None
        both = entry[FORWARD_BACKWARD]
        for key, other in (("of_gemm_only", GEMM_ONLY), ("of_overlapped", OVERLAPPED if cell["tp"] > 1 else GEMM_ONLY)):
            its = entries[other][FORWARD_BACKWARD]["seconds"]
            ratios = sorted(b / t for b, t in zip(its, both["seconds"]))
            assert len(ratios) == 3 and both[key] == pytest.approx([ratios[1], ratios[0], ratios[2]])
        gradients = 4 * d * (n // parts + (0 if "main-grad" in name else rows))
        assert both["peak_bytes"] - both["beyond_gradients_bytes"] == gradients
        assert set(entry["errors"]) == set() if name in (GEMM_ONLY, OVERLAPPED) else {*cell["torch_errors"]}
    if not cell["sequence_parallel"]:
        assert entries[GEMM_ONLY][FORWARD_BACKWARD]["beyond_gradients_bytes"] == 4 * n * rows  # the logits alone


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
        ("--json {folder}", "--json: {folder} is a folder"),
        ("--plot {folder}/file/x.png", "the folder of --plot={folder}/file cannot be made a folder"),
        ("--trace {folder}/file", "--trace={folder}/file cannot be made a folder"),
        ("--peers none-such", "no such peer: none-such"),
        ("-m other -- --tp 1", "torchrun: 'other' in front of --"),
        ("--plot {folder}/p.foo", "argument --plot: the suffix must be one of "),
        ("--nproc-per-node=2 -- --tp 4", "--tp must lie in 1 to 2, the number of ranks, got [4]"),
        ("--nproc-per-node=2 -- --device cuda", "one GPU per process is needed, this host has 0"),
        ("--nproc-per-node=3 -- --tp 3", "--shape: N and V must be multiples of the TP size, got N=256, V=4096"),
    ],
)
def test_mistakes_are_said_once_before_any_rank_starts(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, *arguments.format(folder=tmp_path).split())
    said = capsys.readouterr()
    *_, last = said.err.splitlines()  # argparse says how it is used before
    assert ended.value.code == 2 and said.out == "" and "Traceback" not in said.err
    assert "error: " in last and message.format(folder=tmp_path) in last


def test_sizes_are_powers_of_two_and_all_ranks():
    def sizes(ranks, *arguments):
        return options.parse_arguments(["--device", "cpu", *arguments], ranks, ranks).tp

    assert sizes(8) == [1, 2, 4, 8] and sizes(1) == [1]
    assert sizes(6, "--shape", "96,4800,64") == [1, 2, 4, 6]
    assert sizes(8, "--tp", "8", "2") == [2, 8]


# --- nothing wrong is timed ------------------------------------------------------------------------


def problem_of(member: Member, seed: int = 0, sequence_parallel: bool = False) -> Problem:
    team = Team.of(member.ranks, member.device)
    return replace(make_problem(TINY, torch.float32, team, seed), sequence_parallel=sequence_parallel)


def judge_of(problem: Problem) -> Judge:
    return Judge(problem, *(answers(problem, dtype) for dtype in (torch.float64, problem.hidden.dtype)))


def _parts(member, sequence_parallel):
    """The truth, both kinds of the GEMM-only baseline, the whole sequence, and what ranks agree on."""
    problem = problem_of(member, 1, sequence_parallel)
    team = problem.team
    shards = [torch.empty_like(problem.weight) for _ in range(member.ranks)]
    dist.all_gather(shards, problem.weight, group=team.group)
    assert not torch.equal(*shards)
    x, weight = (t.double().requires_grad_() for t in (problem.hidden, torch.cat(shards)))
    expected = F.cross_entropy(x @ weight.T, problem.target, ignore_index=IGNORE_INDEX)
    expected.backward()
    assert 0 < (problem.target == IGNORE_INDEX).sum() < TINY.n
    truths = expected.detach(), x.grad, weight.grad.chunk(member.ranks)[member.rank]
    for value, truth in zip(answers(problem, torch.float64), truths):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-15)

    z = problem.hidden.double() @ problem.weight.double().T
    bare = z @ problem.weight.double(), z.T @ problem.hidden.double()
    summed = team.reduce(bare[0].clone())
    for name, truths in ((GEMM_ONLY, bare), (OVERLAPPED, (problem.own(summed), bare[1]))):
        for value, truth in zip(calls_of(named(name, RANKS), problem)[FORWARD_BACKWARD](), truths):
            torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4)

    own = problem.x.clone().requires_grad_()
    found = whole_sequence(team.group, sequence_parallel)(own)
    assert torch.equal(found, problem.hidden)
    ((member.rank + 1) * found.square().sum()).backward()
    torch.testing.assert_close(own.grad, (1 + 2) * 2 * problem.x)

    worst = team.worst({"a": 1.0 + team.rank, "b": float("nan") if team.rank == 0 else 5.0})
    assert worst["a"] == 2.0 and worst["b"] != worst["b"]  # NaN is worse than any number
    with pytest.raises(NotMeasured, match="^failed: ZeroDivisionError: division by zero$"):
        team.agree(lambda: 1 / 0)
    return problem.hidden.cpu(), problem.target.cpu()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_truth_the_baselines_and_the_team(worlds, device, sequence_parallel):
    (x, target), (its_x, its_target) = worlds(2).run(_parts, sequence_parallel)
    assert torch.equal(x, its_x) and torch.equal(target, its_target)


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
    right, calls = ours.loss("mean", None, group, sequence_parallel), []
    if dist.get_rank(group) == 0 or fault == "none":
        return right
    if fault == "not built":
        raise ImportError("no such library")

    def wrong(x, weight, target):
        calls.append(1)
        # Later: after two calls of each pass and three of its first reading.
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
    planted.append(named(GEMM_ONLY, RANKS))
    called = []
    timing.OVER_RANKS[member.device.type] = 0.0, 1e-9  # one call
    after = lambda peer, call: called.append(peer.name)  # noqa: E731
    return measure(planted, judge_of(problem), 2, after=after)["peers"], called


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_wrong_on_one_rank_is_refused_on_all(worlds, device, sequence_parallel):
    mine, its = worlds(2).run(_measured, sequence_parallel)
    assert mine == its  # times, bytes and errors are those of the worst rank
    entries, called = mine
    for entry, words in zip(entries, FAULTS.values()):
        refused = entry["refused"] or ""
        assert refused.startswith(words) and bool(refused) == bool(words), entry
        assert all((kind in entry) == (not words) for kind in PASSES)
    assert all(len(entries[0][kind]["seconds"]) == 2 and entries[0][kind]["peak_bytes"] > 0 for kind in PASSES)
    assert entries[1]["errors"]["dW"] > 100 * entries[0]["errors"]["dW"] > 0  # a refused peer's errors are shown
    assert called == ["none", GEMM_ONLY]


def _megatron(member, sequence_parallel):
    """Its native loss, accepted by the judge; where there is no GPU its gather buffer has to be told so."""
    from megatron.core import parallel_state

    problem = problem_of(member, sequence_parallel=sequence_parallel)
    team, current_device = problem.team, torch.cuda.current_device
    megatron = named("megatron", RANKS)
    try:
        if member.device.type == "cpu":
            torch.cuda.current_device = lambda: member.device
        calls = calls_of(megatron, problem, megatron.build(team.group, sequence_parallel))
        return judge_of(problem).check(*(calls[kind]() for kind in (FORWARD, FORWARD_BACKWARD)))
    finally:
        torch.cuda.current_device = current_device
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stock_megatron_is_called_as_it_is_meant(worlds, device, sequence_parallel):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    for errors in worlds(2).run(_megatron, sequence_parallel):
        assert set(errors) == {"loss", "dX", "dX row", "dW", "dW row"} and errors["dX"] < 1e-5
