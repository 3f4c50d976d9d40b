"""The benchmarks on one device and over ranks: what a command line measures, that nothing wrong is timed, on whichever
rank it is wrong, and what is written. And the reports on snapshots of a training: parity of log-probabilities with an
fp32 head, and gradient_filter."""

import gzip
import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("rich", reason="needs the benchmark's packages")
pytest.importorskip("safetensors", reason="needs the benchmark's packages")
pytest.importorskip("matplotlib", reason="needs the benchmark's packages")

from matplotlib import pyplot
from safetensors.torch import save_file

import program  # of launch/
import torchtitan_training
from benchmarks import __main__ as command
from benchmarks import (
    distillation,
    energy,
    gradient_filter,
    measure,
    options,
    ours,
    papers,
    parity,
    peers,
    problem,
    snapshots,
    tables,
    timing,
    tune,
)
from benchmarks.accuracy import Judge, answers
from benchmarks.gradient_filter import BUDGETS, BY_PROBABILITY, EXACT, FILTERS, NATURAL, ROUNDINGS
from benchmarks.parity import FP32_HEAD, OURS, OUTPUTS, random_problem
from benchmarks.passes import calls_of
from benchmarks.peers import ANY, FORWARD, FORWARD_BACKWARD, GEMM_ONLY, ONE, OVERLAPPED, PASSES, RANKS, Peer, named
from benchmarks.problem import Problem, Shape, make_problem
from benchmarks.report import NONE, speaker
from benchmarks.team import NotMeasured, Team
from cases import normal
from parallel_lce import linear_cross_entropy
from releases import ROOT
from tools import chosen_backend, everywhere, on_ranks, ran
from world import Member

MIB = 2**20
ALONE = Team(torch.device("cpu"))
TINY = Shape(64, 96, 16)
LAYOUTS = pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, False), (2, True)])


@pytest.fixture
def short(monkeypatch):
    """Hardly any time is spent on timing."""
    monkeypatch.setitem(timing.ALONE, "cpu", (0.0, 1e-6))


def problem_of(member: Member, sequence_parallel: bool) -> Problem:
    team = Team(member.device) if member.group is None else Team.of(member.ranks, member.device)
    return replace(make_problem(TINY, torch.float32, team), sequence_parallel=sequence_parallel)


def rows_of(table, capsys) -> list[list[str]]:
    capsys.readouterr()
    speaker()(table)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


# --- what a command line measures ------------------------------------------------------------------


def test_a_command_line_chooses_peers_shapes_and_sizes():
    def parsed(*arguments, ranks=None):
        return options.parse_arguments(["--device", "cpu", *arguments], ranks, ranks or 1)

    for name, suite in options.SUITES.items():
        assert {*suite.ours, "gemm-only"} <= {peer.name for peer in parsed("--suite", name).chosen}
    found = parsed(*"--suite bars --shape 3,5,7 --peers torch ours ours-per-token@0".split())  # they override the suite
    assert found.shapes == [Shape(3, 5, 7)]
    assert [peer.name for peer in found.chosen] == ["ours", "ours-per-token@0", "gemm-only", "torch"]
    assert [peers.parse_budget(t) for t in ("512MiB", "3 kib", "7", "all")] == [512 * MIB, 3072, 7, peers.ALL]
    for ranks, expected in ((8, [1, 2, 4, 8]), (1, [1]), (6, [1, 2, 4, 6])):  # the powers of two, and all ranks
        assert parsed("--shape", "96,4800,64", ranks=ranks).tp == expected
    assert parsed("--tp", "8", "2", ranks=8).tp == [2, 8]
    doors = "--peers ours-style@0 torch-loss-parallel".split()  # over ranks alone
    assert {*doors[1:]} <= {peer.name for peer in parsed(*doors, ranks=2).chosen}
    with pytest.raises(SystemExit):
        parsed(*doors)


def test_torchruns_arguments_come_before_ours(monkeypatch):
    commands, more = [], "--nnodes=2 --nproc-per-node=8"
    monkeypatch.setattr(os, "execve", lambda program, command, environment: commands.append(" ".join(command[4:])))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program.run("bench", ["--tp", "2"])
    program.run("bench", [*more.split(), "--", "--rounds", "1"])
    assert commands == ["--standalone --nproc-per-node 2 -m benchmarks --tp 2", f"{more} -m benchmarks --rounds 1"]


# --- nothing wrong is timed ------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_the_baselines_form_both_gradients(member, sequence_parallel):
    given = problem_of(member, sequence_parallel)
    z = given.hidden.double() @ given.weight.double().T
    bare = z @ given.weight.double(), z.T @ given.hidden.double()
    summed = given.own(given.team.reduce(bare[0].clone()))
    for name, truths in ((GEMM_ONLY, bare), (OVERLAPPED, (summed, bare[1]))):
        for value, truth in zip(calls_of(named(name, RANKS), given)[FORWARD_BACKWARD](), truths):
            torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4)


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
    judge = Judge(given, *(answers(given, dtype) for dtype in (torch.float64, torch.float32)))
    return measure.measure(planted, judge, 2, after=after), called


def test_each_round_has_its_own_order(monkeypatch):
    """Of few peers too. Every rank has the same orders."""
    read = []
    monkeypatch.setattr(measure, "timer", lambda call, team, host: lambda: read.append(call) or 1.0)
    given = make_problem(TINY, torch.float32, ALONE)
    judge = Judge(given, *(answers(given, dtype) for dtype in (torch.float64, torch.float32)))
    measure.measure([named(name, ONE) for name in (GEMM_ONLY, "torch")], judge, 8)
    rounds = [tuple(read[number : number + 4]) for number in range(0, len(read), 4)]
    assert len(rounds) == 8 and len({*rounds}) == 2 and all([len({*each}) == 4 for each in rounds])
    orders = [timing.new_order() for _ in range(2)]
    assert [orders[0]("ab") for _ in range(8)] == [orders[1]("ab") for _ in range(8)]


@LAYOUTS
def test_what_is_wrong_is_shown_and_never_timed(ranks, sequence_parallel, worlds, device, monkeypatch, capsys):
    monkeypatch.setitem(timing.ALONE, device, (0.0, 1e-9))
    (cell, called), *others = everywhere(worlds, device, ranks, _measured, sequence_parallel)
    mine = repr((cell, called))  # NaN equals itself in words
    assert all(repr(other) == mine for other in others)  # times, bytes and errors are those of the worst rank
    rows, columns = {row[0]: row for row in rows_of(tables.cell_table(cell), capsys)}, 8 if ranks == 1 else 10
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


@pytest.mark.slow
def test_torchtitans_loss_is_measured_beside_ours(tmp_path):
    arguments = "--device cpu --tp 2 --rounds 1 --shape 64,256,16 --peers ours-torchtitan torchtitan --json r.json"
    environment = {"PYTHONPATH": str(torchtitan_training.release())}
    done = ran("bash", ROOT / "launch" / "bench.sh", *arguments.split(), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for cell in json.loads((tmp_path / "r.json").read_text())["cells"]:
        assert [entry["refused"] for entry in cell["peers"]] == [None] * 4


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


# --- snapshots -------------------------------------------------------------------------------------

BF16 = "bf16 logits"
N, V, D = 300, 700, 32


def written(path: Path, n=6, v=10, d=8, dtype=torch.bfloat16, **changed) -> str:
    target = torch.randint(v, (n,), generator=torch.Generator().manual_seed(2))
    weight = normal(v, d, seed=1) * d**-0.5
    content = {"hidden": normal(n, d).to(dtype), "weight": weight.to(dtype), "target": target} | changed
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)
    return str(path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(weight=None), r"has no tensor weight, but \['hidden', 'target'\]"),
        (dict(hidden=torch.ones(6, 8)), "both fp16, and integers, got hidden torch.float32, weight torch.bfloat16"),
        (dict(target=torch.ones(6, dtype=torch.bool)), "and integers, got .* target torch.bool"),
        (dict(target=torch.ones(5, dtype=torch.int64)), r"got hidden \[6, 8\], weight \[10, 8\], target \[5\]"),
        (dict(weight=torch.ones(0, 8).bfloat16()), r"none empty, got hidden \[6, 8\], weight \[0, 8\]"),
        (dict(target=torch.tensor([0, 1, 2, 3, 4, 10])), r"targets must lie in \[0, 10\), got 0 to 10"),
    ],
)
def test_a_file_that_cannot_be_measured_is_refused(changed, words, tmp_path):
    with pytest.raises(NotMeasured, match=words):
        snapshots.read(written(tmp_path / "a.safetensors", **changed), ALONE)


# --- parity ----------------------------------------------------------------------------------------


def assert_parity(case: dict) -> None:
    its, rounded, head = (case["deviations"][way] for way in (OURS, BF16, FP32_HEAD))
    slack = 4 * torch.finfo(torch.float32).eps * max(1.0, case["max_sum_of_magnitudes"])
    # bf16 rounds relative to a logit, fp32 statistics relative to lse: less is between them where logits are near 0.
    much = 100 if case["max_abs_logit"] > 1 else 10
    assert its["largest"] <= 2 * head["largest"] + slack and much * its["largest"] < rounded["largest"]
    assert its["outside"] == 0 and 0.999 < its["smallest_ratio"] <= its["largest_ratio"] < 1.001
    assert much * its["mean"] < rounded["mean"] and much * head["mean"] < rounded["mean"]
    assert its["entropy_largest"] <= 2 * head["entropy_largest"] + slack
    assert much / 10 * its["entropy_largest"] < rounded["entropy_largest"]
    assert case["groups"] and case["holds"]
    assert sum(group["tokens"] for group in case["groups"]) == case["n"]
    for group in case["groups"]:
        assert list(group["errors"]) == list(OUTPUTS)
        assert all(list(ways) == [OURS, BF16, FP32_HEAD] for ways in group["errors"].values())


def test_gradients_of_nearly_flat_logits_are_no_worse_than_those_of_rounded_ones(device):
    """Exponentials that are rounded to bf16 lose what the entropy's gradient is: dX is then 16 times as far off."""
    case = parity.measure(random_problem(Shape(200, 3000, 256), parity.DEVIATIONS[0], Team(torch.device(device))))
    (group,) = case["groups"]
    assert case["holds"] and group["tokens"] == 200
    assert group["errors"]["entropy"][OURS] < 1.2 * group["errors"]["entropy"][BF16] < 1e-2


@pytest.mark.parametrize("deviation", parity.DEVIATIONS[1:])
def test_ours_equals_an_fp32_head_on_random_inputs(deviation, device):
    case = parity.measure(random_problem(Shape(200, 3000, 256), deviation, Team(torch.device(device))))
    assert_parity(case)
    assert case["mean_log_prob"] > 0.3 - math.log(3000)  # targets are drawn from the softmax
    if deviation >= 5:
        assert case["deviations"][BF16]["outside"] > 0.1
    if deviation == 20:
        edges = [(group["low"], group["high"]) for group in case["groups"]]
        assert edges == [(0.1, 1.0), (1e-2, 0.1), (1e-3, 1e-2), (1e-4, 1e-3), (1e-5, 1e-4), (0.0, 1e-5)]


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tiny", "configuration"])
def test_the_whole_command_on_a_trained_model(large, tmp_path):
    """./launch/parity.sh twice: the second time nothing is trained. A file that cannot be read does not end it."""
    pytest.importorskip("tokenizers", reason="needs the training program's packages")
    pytest.importorskip("pydantic", reason="needs the training program's packages")
    tiny = ["model.hidden=64", "train.steps=20", "train.sequence=64", "text.max_bytes=300_000", "text.vocab_size=1024"]
    tiny += ["snapshots.steps=[5]", "snapshots.tokens=256"]
    config = ["--config", str(ROOT / "configs" / "snapshots-cpu.yaml"), *([] if large else tiny)]
    folders = [f"text.cache={tmp_path / 'cache'}", f"output={tmp_path / 'out'}"]
    (tmp_path / "worse").write_bytes(b"no header")
    report = ["worse", written(tmp_path / "bad [x]", weight=None), "--device", "cpu", "--random", "64,512,32"]
    command = ["bash", str(ROOT / "launch" / "parity.sh"), *config, *folders, "--", *report, "--json", "figures.json"]
    for trains in (True, False):
        done = ran(*command, cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "bad [x] has no tensor weight" in done.stderr and "error: worse cannot be read" in done.stderr
        assert ("stand for text" in done.stdout) is trains
    cases = json.loads((tmp_path / "figures.json").read_text())["cases"]
    steps = (20, 60) if large else (5, 20)
    names = [str(tmp_path / "out" / f"step-{step}.safetensors") for step in steps]
    assert [case["name"] for case in cases] == names + [f"random, std {s}" for s in (0.01, 1, 5, 20)]
    for case in cases:
        assert_parity(case)
        title = "| {name}: N={n}, V={v}, D={d} ".format_map(case)
        values, gradients = [line for line in done.stdout.splitlines() if line.startswith(title)]
        assert f"{case['deviations'][OURS]['largest']:.1e}" in values
        assert all(f"{ways[OURS]:.1e} / " in gradients for ways in case["groups"][0]["errors"].values())
    assert cases[0]["max_abs_logit"] < cases[1]["max_abs_logit"]  # it has been trained


def _lost_gradients_of_sure_tokens(right, inputs, entry):
    """Lost beside those of the other tokens."""
    sure = parity.dense(inputs, entry, torch.float64).values[2] > -1e-3
    return right._replace(gradients=[dx.masked_fill(sure[:, None], 0.0) for dx in right.gradients])


WRONG = {  # words of the report: what is made of its results, and of how many cases it fails
    "FAILED": (lambda right, *_: right, 0),
    "FAILED: ours is off by": (
        lambda right, *given: right._replace(values=parity.dense(*given, torch.bfloat16).values),
        4,
    ),
    "its entropies by nan": (
        lambda right, *_: right._replace(values=[right.values[0], right.values[1] * math.nan, right.values[2]]),
        4,
    ),
    "; its dX by more than twice those of bf16 logits, where 1 - p is at most ": (_lost_gradients_of_sure_tokens, 1),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_result_fails_the_report(words, monkeypatch, capsys, tmp_path):
    (wrong, failed), right, path = WRONG[words], parity.ours, tmp_path / "figures.json"
    monkeypatch.setattr(parity, "ours", lambda inputs, entry: wrong(right(inputs, entry), inputs, entry))
    status = parity.main(["--device", "cpu", "--random", "256,512,64", "--json", str(path)])
    said = capsys.readouterr().out
    assert status == bool(failed) and said.count("FAILED") == said.count(words) == failed
    assert ("1e-03, 1e-04, 1e-05" in said) == (wrong is _lost_gradients_of_sure_tokens)
    cases = json.loads(path.read_text(), parse_constant=pytest.fail)["cases"]  # NaN is no JSON
    assert [case["holds"] for case in cases].count(False) == failed


# --- gradient_filter -------------------------------------------------------------------------------


@pytest.fixture
def given(tmp_path) -> Problem:
    return snapshots.read(written(tmp_path / "step-1.safetensors", N, V, D), ALONE)


def probabilities(given: Problem) -> torch.Tensor:
    """[N, V] fp64"""
    return (given.hidden.double() @ given.weight.double().T).softmax(1)


def test_the_vocabulary_is_ordered_by_mean_probability_and_dealt_to_the_ranks(given, monkeypatch):
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * V * 7)  # blocks of 7 tokens
    mean, order = probabilities(given).mean(0), gradient_filter.by_probability(given)
    assert torch.equal(order.sort().values, torch.arange(V))
    assert (mean[order].diff() <= 1e-6 * mean[order][1:]).all()
    assert torch.equal(gradient_filter.by_probability(given, 2), torch.cat([order[0::2], order[1::2]]))
    changed = gradient_filter.reordered(given, order)  # the vocabulary alone
    torch.testing.assert_close(probabilities(changed), probabilities(given)[:, order])
    assert torch.equal(order[changed.target], given.target)


def test_the_measures_of_a_small_snapshot(short, given, monkeypatch):
    monkeypatch.setattr(problem, "BLOCK_BYTES", 8 * V * 70)  # blocks of 70 tokens
    filters = []

    def loss(*tensors, gradient_filter, **options):
        filters.append(gradient_filter)
        return linear_cross_entropy(*tensors, gradient_filter=gradient_filter, **options)

    monkeypatch.setattr(gradient_filter, "linear_cross_entropy", loss)
    with chosen_backend("torch"):
        case = gradient_filter.measure(given.name, 2, ALONE)
    assert {*filters} == {*FILTERS} and case["step"] == 1 and case["dtype"] == "bfloat16"
    assert case["loss"] == pytest.approx(-probabilities(given)[range(N), given.target].log().mean().item())
    # The exact gradients, rounded: of a number at most 2^-9 of it, 2^-9 / sqrt(3) in the mean or less.
    references, names = case["reference_errors"], ("dX", "dW", "dW rows")
    assert all(2**-11 < references[EXACT][name] < 2**-9 for name in names)
    assert all(references[rounded][name] > references[EXACT][name] for rounded in ROUNDINGS for name in names)
    found = [(each["order"], each["gradient_filter"]) for each in case["results"]]
    assert found == [(order, value) for order in (NATURAL, BY_PROBABILITY) for value in FILTERS]
    for none, *filtered in (case["results"][: len(FILTERS)], case["results"][len(FILTERS) :]):
        for memory in BUDGETS:
            for name in names:
                exact = none[memory]["errors"][name]
                assert exact < 2 * references[EXACT][name]
                # The torch backend computes exact gradients.
                assert all(each[memory]["errors"][name] == exact for each in filtered)
            ratios = sorted(g / s for g, s in zip(none["gemm_only_seconds"], none[memory]["seconds"]))
            assert none[memory]["of_gemm_only"] == pytest.approx([sum(ratios) / 2, *ratios])


def _measured_on(member: Member, path: str) -> dict:
    timing.OVER_RANKS[member.device.type] = timing.ALONE[member.device.type] = 0.0, 1e-6
    gradient_filter.FILTERS = (None,)
    team = Team(member.device, member.rank, member.ranks, member.group, member.group)
    with chosen_backend("torch"):
        return gradient_filter.measure(path, 1, team)


def test_ranks_have_the_errors_of_the_whole(worlds, short, given, device, monkeypatch):
    monkeypatch.setattr(gradient_filter, "FILTERS", (None,))
    (whole,), (first, second) = (everywhere(worlds, device, ranks, _measured_on, given.name) for ranks in (1, 2))
    assert first["tp"] == 2 and whole["tp"] == 1 and first["reference_errors"] == whole["reference_errors"]
    assert first == second
    for mine, of_whole in zip(first["results"], whole["results"]):
        for memory in BUDGETS:
            found, expected = mine[memory]["errors"], of_whole[memory]["errors"]
            for name in ("dW", "dW rows"):
                assert found[name] == pytest.approx(expected[name], rel=0.02)
            assert expected["dX"] <= found["dX"] < 2 * expected["dX"]  # a bf16 dX is summed over the ranks in bf16
    monkeypatch.setattr(Team, "agree", lambda self, work: work())
    with pytest.raises(NotMeasured, match="a vocabulary of 700 entries cannot be shared by 3 ranks"):
        gradient_filter.measure(given.name, 1, Team(torch.device("cpu"), 0, 3))


def test_the_report_writes_tables_json_and_a_picture(short, tmp_path, capsys, monkeypatch):
    """Lines go through the snapshots in the order of their steps, whatever the order of the files."""
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    paths = [written(tmp_path / f"{name}.safetensors", 40, 60, 16) for name in ("step-20", "step-9", "other [x]")]
    bad = written(tmp_path / "bad.safetensors", weight=None)
    figures, picture = tmp_path / "new" / "figures.json", tmp_path / "pictures" / "p.png"
    arguments = ["--device", "cpu", "--rounds", "2", "--json", str(figures), "--plot", str(picture)]
    assert gradient_filter.main([bad, *paths, *arguments]) == 2  # for one that cannot be measured
    monkeypatch.undo()
    said = capsys.readouterr()
    assert f"error: {bad} has no tensor weight" in said.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    cases = json.loads(figures.read_text())["cases"]
    assert [(case["name"], case["step"]) for case in cases] == list(zip(paths, (20, 9, None)))
    for case in cases:
        assert f"{case['name']}: N=40, V=60, D=16, bfloat16, loss {case['loss']:.4f}" in said.out
    row = next(line for line in said.out.splitlines() if line.startswith("| by probability") and "| 2^-11" in line)
    for way in (cases[0]["results"][8][memory] for memory in BUDGETS):
        assert f"{way['of_gemm_only'][0]:.3f} (" in row and f"{way['errors']['dX']:.2e}" in row
    line = drawn[0].axes[0].lines[0]
    of_natural_and_saved = [case["results"][5]["saved"]["of_gemm_only"][0] for case in (cases[1], cases[0])]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([9, 20], of_natural_and_saved)
    pyplot.close(drawn[0])
    with pytest.raises(SystemExit):
        gradient_filter.main([])
    assert "no file is given, and at least one is needed" in capsys.readouterr().err


# --- published figures ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_published_figures_stand_beside_ours(short, tmp_path, capsys, monkeypatch):
    path, picture = tmp_path / "found.json", tmp_path / "table.png"
    command = ["--device", "cpu", "--rounds", "1"]
    assert papers.main([*command, "--json", str(path), "--plot", str(picture)]) == 0
    content = json.loads(path.read_text())
    parts = content["parts"]
    assert {name: len(rows) for name, rows in parts.items()} == dict(table2=20, chunks=4, peak=3, gemma2=2)
    assert parts["table2"][-1] | {"N": "128", "V": "1024", "canonical, MiB": "–"} == parts["table2"][-1]
    assert [*parts["chunks"][0]] == ["loss", "GiB", "time", "published GiB", "published time"]
    assert len(content["calls"]) == 20 * 2 + 4 + 3 and all(len(call["seconds"]) == 1 for call in content["calls"])
    assert all((tmp_path / f"{figure}-table.png").stat().st_size > 10_000 for figure in ("latency", "memory"))
    monkeypatch.setattr(papers, "named", lambda name, setting: _wrong(named(name, setting)))
    assert papers.main([*command, "--parts", "peak"]) == 1
    assert "peak: ours@0: loss 1, not " in capsys.readouterr().out


def _wrong(peer: Peer) -> Peer:
    wrong = lambda *_: lambda x, weight, target: 0 * (x.sum() + weight.sum()) + 1  # noqa: E731
    return replace(peer, build=wrong) if peer.family == "ours" else peer


def test_joules_are_relative_to_the_bare_products(capsys):
    def peer(name, **joules):
        values = {kind: dict(joules=value, sustained_seconds=value / 100) for kind, value in joules.items()}
        return dict(name=name, family="ours", **values)

    ours, bare = peer("ours", forward=3.0, forward_backward=8.0), peer(GEMM_ONLY, forward=2.0)
    cell = dict(problem="a problem", dtype="float32", peers=[ours, bare])
    (table,) = tables.energy_output(cell)
    assert rows_of(table, capsys)[1:] == [
        ["ours", "forward", "3.00", "0.667", "30", "0.667"],
        ["ours", "fwd+bwd", "8.00", NONE, "80", NONE],
        [GEMM_ONLY, "forward", "2.00", "1.000", "20", "1.000"],
    ]
    assert not [*tables.energy_output(cell | {"peers": [peer("ours")]})]


@pytest.mark.gpu
def test_twice_the_work_takes_twice_the_joules():
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    once, twice = (energy.sustained(lambda: [x @ x for _ in range(n)], x.device) for n in (1, 2))
    assert 0.2 < once[0] and all(1.7 < b / a < 2.3 for a, b in zip(once, twice))
